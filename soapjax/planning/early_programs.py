"""The simulator's programs, compiled while a step is traced.

They are the same for all problems of a bucket. So a problem of one product, padded to the bucket that a step with so many arguments
usually needs, has them compiled, or loaded, in a thread. Where a step turns out to need another one, they are there for the next.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from soapjax.costs.tables.arrays import bucket_for, need_of
from soapjax.costs.tables.problem_tables import cost_tables
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import TracedStep, trace
from soapjax.helpers.own_config import on_cpu
from soapjax.jit.programs import threads
from soapjax.simulate.simulator import Simulator
from soapjax.strategy.space import search_space
from soapjax.topology import DeviceTopology, factor_mesh

# Layouts that operators decide, per leaf of the arguments: 4.8 of transformers with Adam's state, 6.7 of convolutional networks,
# 7.1 of Llama. Many more in unrolled recurrent networks, which are small in all.
SLOTS_PER_LEAF = 6


def prepare_simulator(num_leaves: int, topology: DeviceTopology) -> None:
    """Begins to compile the programs for steps without pins whose arguments have so many leaves."""
    pool = threads(1)
    pool.submit(on_cpu()(simulator_like(num_leaves, topology).prepare))
    pool.shutdown(wait=False)


def simulator_like(num_leaves: int, topology: DeviceTopology) -> Simulator:
    """A simulator with the programs that a step with so many leaves usually needs; of a product alone."""
    graph, _ = build_graph(_product())
    tables = cost_tables(graph, search_space(graph, factor_mesh(topology)), topology)
    return Simulator(tables, bucket_for(need_of(tables)._replace(slots=SLOTS_PER_LEAF * num_leaves)))


@functools.cache
def _product() -> TracedStep:
    def step(weights: jax.Array, batch: jax.Array) -> jax.Array:
        return weights - jax.grad(lambda w: (batch @ w).sum())(weights)

    square = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    return trace(step, square, square)
