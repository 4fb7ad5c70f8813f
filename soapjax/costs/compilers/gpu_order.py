"""In which order XLA for GPUs makes things, where it is not the program's: it schedules for little memory (jaxlib 0.10.2).

The gradient of a weight that every step of an unrolled recurrent net uses is a sum of products, one per step. All products of one
sum are made right before it, and their operands kept until then. Products that read the same activation (of two
layers, say) are merged into one, so that these sums are made together.

Of a layer's two products in the backward pass the one for the layer below comes first: it frees the gathered
weight, while the other makes the weight's gradient.
"""

from __future__ import annotations

import numpy as np
import scipy

from soapjax.costs.compilers.compiler_model import Reshards
from soapjax.costs.memory.memory_order import MemoryOrder
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.phases import BACKWARD, FORWARD


def inputs_first(graph: OperatorGraph, order: MemoryOrder, reshards: Reshards) -> MemoryOrder:
    """Where each of `weights_before_inputs` changes places with the next task."""
    since, until, read_at = order.since.copy(), order.until.copy(), order.read_at.copy()
    for k in weights_before_inputs(graph):
        weights, inputs = graph.tasks[k], graph.tasks[k + 1]
        read = {a.tensor for a in weights.reads}
        for i in read:
            until[i] = k + 1 if order.until[i] == k else until[i]
        for i in {a.tensor for a in inputs.reads} - read:
            until[i] = k if order.until[i] == k + 1 else until[i]
        for task, at in ((weights, k + 1), (inputs, k)):
            for access in task.writes:
                since[access.tensor], until[access.tensor] = at, max(until[access.tensor], at)
        read_at[reshards.read_at == k], read_at[reshards.read_at == k + 1] = k + 1, k
    return MemoryOrder(since, until, read_at, made_at=read_at, at_least=until)


def weights_before_inputs(graph: OperatorGraph) -> list[int]:
    """Tasks that make a weight's gradient right before one of the same operator that reads the weight."""
    parameters = {p.tensor for p in graph.parameters}
    gradients = {p.gradient for p in graph.trained} | {i for chain in graph.accumulations for i in chain.summands}

    def is_pair(k: int) -> bool:
        weights, inputs = graph.tasks[k : k + 2]
        is_layer = (weights.operator, weights.scope) == (inputs.operator, inputs.scope) and weights.is_heavy and inputs.is_heavy
        made, read = ({a.tensor for a in accesses} for accesses in (weights.writes, inputs.reads))
        is_pair = made & gradients and read & parameters and not read & made
        return bool(is_layer and is_pair and weights.phase == inputs.phase == BACKWARD)

    found: list[int] = []
    for k in range(len(graph.tasks) - 1):
        if (not found or found[-1] + 1 < k) and is_pair(k):
            found.append(k)
    return found


def late_products(graph: OperatorGraph, order: MemoryOrder, reshards: Reshards) -> MemoryOrder:
    """Where the products of a sum are put off until right before it."""
    maker = {a.tensor: k for k, task in enumerate(graph.tasks) for a in task.writes}
    late = [
        i for chain in graph.accumulations if not chain.is_carried for i in chain.summands
        if graph.tasks[maker[i]].is_heavy and graph.tasks[maker[i]].trip_count == 1
    ]  # fmt: skip
    if not late:
        return order
    since, until, read_at = order.since.copy(), order.until.copy(), order.read_at.copy()
    places: dict[int, int] = {}
    for i, at in zip(late, _together(graph, late, maker, order.until), strict=True):
        since[i] = places[maker[i]] = max(order.since[i], at)
        for access in graph.tasks[maker[i]].reads:
            if until[access.tensor] >= 0:
                until[access.tensor] = max(until[access.tensor], since[i])
    for k, place in places.items():
        # The layer's other product, which is not put off, reads the same gradient in the same layout: that copy waits. Other
        # reshards come one after the other, right before their products.
        others = (j for j in (k - 1, k + 1) if 0 <= j < len(graph.tasks) and j not in places)
        early = {a.tensor for j in others if graph.tasks[j].operator == graph.tasks[k].operator for a in graph.tasks[j].reads}
        waits = (reshards.read_at == k) & np.isin(reshards.tensor, list(early))
        read_at[waits] = np.maximum(read_at[waits], place)
    return MemoryOrder(since, until, read_at, order.made_at, at_least=until)


def _together(graph: OperatorGraph, late: list[int], maker: dict[int, int], until: np.ndarray) -> np.ndarray:
    """When each of the `late` products is made: when the first sum needs one that reads an activation with it."""

    def is_activation(tensor: int) -> bool:
        return tensor not in maker or graph.tasks[maker[tensor]].phase == FORWARD

    read = [(n, a.tensor) for n, i in enumerate(late) for a in graph.tasks[maker[i]].reads if is_activation(a.tensor)]
    rows, columns = np.array(read, int).reshape(-1, 2).T
    size = len(late) + len(graph.tensors)
    shared = scipy.sparse.coo_array((np.ones(len(read)), (rows, len(late) + columns)), shape=(size, size))
    _, group = scipy.sparse.csgraph.connected_components(shared, directed=False)
    first = np.full(size, len(graph.tasks))
    np.minimum.at(first, group[: len(late)], until[late])
    return first[group[: len(late)]]
