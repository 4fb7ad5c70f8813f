"""In which order GPU compilers make things, where it is not the program's: XLA schedules for little memory.

The gradient of a weight that every step of an unrolled recurrent net uses is a sum of products, one per step. All products of one
sum are made right before it, and their operands kept until then. Products that read the same activation (of two
layers, say) are merged into one, so that these sums are made together.

Of a layer's two products in the backward pass the one for the layer below comes first: it frees the gathered
weight, while the other makes the weight's gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.phases import BACKWARD, FORWARD


class MemoryOrder(NamedTuple):
    """Tasks, as places in time for what is alive."""

    since: np.ndarray  # int32 [T]: from when on a tensor is alive
    until: np.ndarray  # int32 [T]: -1 where it is counted elsewhere
    read_at: np.ndarray  # int32 [E]: when the reader of a conversion runs
    made_at: np.ndarray  # int32 [E]: when it is converted, by readers that share no earlier copy
    at_least: np.ndarray  # int32 [T]: until when also where its last readers share a copy in another layout: `until`, or earlier


def least_until(order: MemoryOrder, edge_tensor: np.ndarray, computed_until: np.ndarray, is_kept: np.ndarray) -> MemoryOrder:
    """Says how early tensors are free whose readers have a copy: where nothing but these conversions keeps them.

    `computed_until` [T]: until when others are computed from a tensor. `is_kept` [T]: something else needs it until the end.
    """
    read = np.full(len(order.until), -1)
    np.maximum.at(read, edge_tensor, order.read_at)
    is_other = is_kept | (order.until > np.maximum(read, computed_until)) | (read < 0)
    found = np.where(is_other, order.until, np.minimum(order.until, np.maximum(order.since, computed_until)))
    return order._replace(at_least=found.astype(np.int32))


def gpu_order(
    graph: OperatorGraph, birth: np.ndarray, death: np.ndarray, needed: np.ndarray, edge_tensor: np.ndarray
) -> MemoryOrder:
    """As GPU compilers put tasks off.

    `birth`, `death`: the task that makes a tensor, and the last that needs it, in program order.
    `needed`, `edge_tensor`: the reader of each conversion, and what it reads.
    """
    swapped = weights_before_inputs(graph)
    since, until, late = late_products(graph, *inputs_first(graph, swapped, birth, death))
    read_at = needed.copy()
    for k in swapped:
        read_at[needed == k], read_at[needed == k + 1] = k + 1, k
    made_at = read_at.copy()
    for k, place in late.items():
        # The layer's other product, which is not put off, reads the same gradient in the same layout: that copy waits. Other
        # conversions come one after the other, right before their products.
        others = (j for j in (k - 1, k + 1) if 0 <= j < len(graph.tasks) and j not in late)
        early = {a.tensor for j in others if graph.tasks[j].operator == graph.tasks[k].operator for a in graph.tasks[j].reads}
        waits = (needed == k) & np.isin(edge_tensor, list(early))
        read_at[waits] = np.maximum(read_at[waits], place)
    return MemoryOrder(since, until, read_at, made_at, until)


def weights_before_inputs(graph: OperatorGraph) -> list[int]:
    """Tasks that make a weight's gradient right before one of the same operator that reads the weight."""
    parameters = {p.tensor for p in graph.parameters}
    gradients = {p.gradient for p in graph.parameters} | {i for chain in graph.accumulations for i in chain.summands}

    def is_pair(k: int) -> bool:
        weights, inputs = graph.tasks[k : k + 2]
        is_layer = (weights.operator, weights.scope) == (inputs.operator, inputs.scope) and weights.heavy and inputs.heavy
        made, read = ({a.tensor for a in accesses} for accesses in (weights.writes, inputs.reads))
        is_pair = made & gradients and read & parameters and not read & made
        return bool(is_layer and is_pair and weights.phase == inputs.phase == BACKWARD)

    found: list[int] = []
    for k in range(len(graph.tasks) - 1):
        if (not found or found[-1] + 1 < k) and is_pair(k):
            found.append(k)
    return found


def inputs_first(
    graph: OperatorGraph, swapped: list[int], birth: np.ndarray, death: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """From when and until when tensors are alive, int32 [T] each, where the tasks `swapped` change places with the next ones."""
    since, until = birth.copy(), death.copy()
    for k in swapped:
        weights, inputs = graph.tasks[k], graph.tasks[k + 1]
        read = {a.tensor for a in weights.reads}
        for i in read:
            until[i] = k + 1 if death[i] == k else until[i]
        for i in {a.tensor for a in inputs.reads} - read:
            until[i] = k if death[i] == k + 1 else until[i]
        for task, at in ((weights, k + 1), (inputs, k)):
            for access in task.writes:
                since[access.tensor], until[access.tensor] = at, max(until[access.tensor], at)
    return since, until


def late_products(
    graph: OperatorGraph, birth: np.ndarray, death: np.ndarray
) -> tuple[np.ndarray, np.ndarray, dict[int, int]]:
    """From when and until when tensors are alive, int32 [T] each, where the compiler puts products off, and when these run.

    `birth`, `death`: the task that makes a tensor, and the last that needs it, in program order.
    """
    maker = {a.tensor: k for k, task in enumerate(graph.tasks) for a in task.writes}
    late = [
        i for chain in graph.accumulations if not chain.is_carried for i in chain.summands
        if graph.tasks[maker[i]].heavy and graph.tasks[maker[i]].trip_count == 1
    ]  # fmt: skip
    since, until = birth.copy(), death.copy()
    places: dict[int, int] = {}
    if not late:
        return since, until, places

    def is_activation(tensor: int) -> bool:
        return tensor not in maker or graph.tasks[maker[tensor]].phase == FORWARD

    read = [(n, a.tensor) for n, i in enumerate(late) for a in graph.tasks[maker[i]].reads if is_activation(a.tensor)]
    rows, columns = np.array(read, int).reshape(-1, 2).T
    size = len(late) + len(graph.tensors)
    shared = coo_array((np.ones(len(read)), (rows, len(late) + columns)), shape=(size, size))
    _, group = connected_components(shared, directed=False)
    first = np.full(size, len(graph.tasks))
    np.minimum.at(first, group[: len(late)], death[late])
    for n, i in enumerate(late):
        since[i] = places[maker[i]] = max(birth[i], first[group[n]])
        for access in graph.tasks[maker[i]].reads:
            if until[access.tensor] >= 0:
                until[access.tensor] = max(until[access.tensor], since[i])
    return since, until, places
