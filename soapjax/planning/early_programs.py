"""The search's programs, compiled or loaded while a step is traced.

They are the same for all problems of a bucket. So a problem of one product, padded to the bucket that a step with so many arguments
usually needs, has them compiled, or loaded, in a thread. Where a step turns out to need another one, they are there for the next.
Of the chains' programs, which take longer to compile, those that are on disk are loaded.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from soapjax.costs.rules.many_reshards import prepare_reshards
from soapjax.costs.tables.arrays import need_of
from soapjax.costs.tables.buckets import bucket_for
from soapjax.costs.tables.problem_tables import cost_tables
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import TracedStep, trace
from soapjax.helpers.own_config import on_cpu
from soapjax.jit.beside import Beside
from soapjax.jit.programs import know_surroundings
from soapjax.search.chain.engine import engine_of
from soapjax.search.problem import PlanningProblem
from soapjax.simulate.simulator import Simulator
from soapjax.strategy.space import search_space
from soapjax.topology import DeviceTopology, factor_mesh

# Layouts that operators decide, per leaf of the arguments: 4.8 of transformers with Adam's state, 6.7 of convolutional networks,
# 7.1 of Llama. Many more in unrolled recurrent networks, which are small in all.
SLOTS_PER_LEAF = 6


def begin_programs(num_leaves: int, topology: DeviceTopology, *, walks: bool) -> None:
    """Begins to compile or load the programs for steps without pins whose arguments have so many leaves; chains' where one `walks`.

    What is Python is done at once: a thread beside tracing, which is all Python, waits at every file that it reads.
    """
    with on_cpu():
        problem = problem_like(num_leaves, topology)
        engine = engine_of(problem) if walks else None
    know_surroundings()

    @on_cpu()
    def prepare() -> None:
        problem.simulator.prepare()
        if engine is not None:
            engine.is_at_hand()
            prepare_reshards(problem.simulator.tables.links)  # for the additive optimum, one of the starts

    Beside(prepare).begin()


def problem_like(num_leaves: int, topology: DeviceTopology) -> PlanningProblem:
    """A problem whose programs are those that a step with so many leaves usually needs; of a product alone."""
    graph, _ = build_graph(_product())
    space = search_space(graph, factor_mesh(topology))
    tables = cost_tables(graph, space, topology)
    bucket = bucket_for(need_of(tables)._replace(slots=SLOTS_PER_LEAF * num_leaves))
    return PlanningProblem(graph, space, Simulator(tables, bucket))


@functools.cache
def _product() -> TracedStep:
    def step(weights: jax.Array, batch: jax.Array) -> jax.Array:
        return weights - jax.grad(lambda w: (batch @ w).sum())(weights)

    square = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    return trace(step, square, square)
