"""When the summands of a gradient are made: GPU compilers put off products that only take memory.

The gradient of a weight that every step of an unrolled recurrent net uses is a sum of products, one per step. XLA schedules for
little memory: it makes all products of one sum right before it, and keeps their operands until then. Products that
read the same activation (of two layers, say) it merges into one, so that these sums are made together.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from soapjax.graph.operators import OperatorGraph
from soapjax.graph.phases import FORWARD


def late_products(graph: OperatorGraph, birth: np.ndarray, death: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """From when and until when tensors are alive, int32 [T] each, where the compiler puts products off.

    `birth`, `death`: the task that makes a tensor, and the last that needs it, in program order.
    """
    maker = {a.tensor: k for k, task in enumerate(graph.tasks) for a in task.writes}
    late = [
        i for chain in graph.accumulations if not chain.is_carried for i in chain.summands
        if graph.tasks[maker[i]].heavy and graph.tasks[maker[i]].trip_count == 1
    ]  # fmt: skip
    since, until = birth.copy(), death.copy()
    if not late:
        return since, until

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
        since[i] = max(birth[i], first[group[n]])
        for access in graph.tasks[maker[i]].reads:
            if until[access.tensor] >= 0:
                until[access.tensor] = max(until[access.tensor], since[i])
    return since, until
