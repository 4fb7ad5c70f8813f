"""The search's programs compiled while the step is traced: those of the usual sizes, which most problems share."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import Array

from soapjax.costs.tables.arrays import Bucket
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import trace
from soapjax.jit.programs import threads
from soapjax.own_config import on_cpu, own_configuration
from soapjax.search.chain.engine import Engine
from soapjax.search.problem import PlanningProblem
from soapjax.strategy.space import search_space
from soapjax.topology import DeviceTopology, factor_mesh

BY_CHAINS = ("mcmc",)  # planners that walk, and need all of them


@contextlib.contextmanager
def compiled_ahead(planner: str, topology: DeviceTopology) -> Iterator[Callable[[PlanningProblem], None]]:
    """Inside, programs for problems on a topology begin to be compiled, in a thread of their own; what is on disk is loaded.

    Gives a function of the problem, once there is one. Where it is of another size, or there is none, no further program is begun.
    """
    if planner not in BY_CHAINS:
        yield lambda problem: None
        return
    ahead = Ahead(topology)
    try:
        yield ahead.found
    except BaseException:
        ahead.is_in_vain.set()
        raise


class Ahead:
    """The simulator's programs, and then the chains', as long as they may be wanted."""

    def __init__(self, topology: DeviceTopology):
        self.topology, self.is_in_vain = topology, threading.Event()
        self.usual: Bucket | None = None
        with on_cpu():
            pool = threads(1)
            self.done = pool.submit(self._compile)
        pool.shutdown(wait=False)

    def _compile(self) -> None:
        with own_configuration():
            problem = stand_in(self.topology)
            self.usual = problem.simulator.evaluator.bucket
            problem.simulator.prepare()
            if not self.is_in_vain.is_set():
                Engine(problem).prepare()

    def found(self, problem: PlanningProblem) -> None:
        if self.usual is not None and problem.simulator.evaluator.bucket != self.usual:
            self.is_in_vain.set()


def stand_in(topology: DeviceTopology) -> PlanningProblem:
    """A small problem: its programs are those of every problem of the usual sizes."""
    graph = build_graph(trace(_step, jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((8, 8), "float32")))[0]
    return PlanningProblem.make(graph, search_space(graph, factor_mesh(topology)), topology)


def _step(weights: Array, batch: Array) -> Array:
    return weights - jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)
