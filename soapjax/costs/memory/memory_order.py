"""When tensors are alive and reshards made, as a compiler orders them (costs/compilers)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from soapjax.graph.operators import OperatorGraph


class MemoryOrder(NamedTuple):
    """Tasks, as places in time for what is alive."""

    since: np.ndarray  # int32 [T]: from when on a tensor is alive
    until: np.ndarray  # int32 [T]: -1 where it is counted elsewhere
    read_at: np.ndarray  # int32 [E]: when the reader of a reshard runs
    made_at: np.ndarray  # int32 [E]: when it is resharded, by readers that share no earlier copy
    at_least: np.ndarray  # int32 [T]: until when also where its last readers share a copy in another layout: `until`, or earlier


def least_until(order: MemoryOrder, edge_tensor: np.ndarray, computed_until: np.ndarray, is_kept: np.ndarray) -> MemoryOrder:
    """Says how early tensors are free whose readers have a copy: where nothing but these reshards keeps them.

    `computed_until` [T]: until when others are computed from a tensor. `is_kept` [T]: something else needs it until the end.
    """
    read = np.full(len(order.until), -1)
    np.maximum.at(read, edge_tensor, order.read_at)
    is_other = is_kept | (order.until > np.maximum(read, computed_until)) | (read < 0)
    found = np.where(is_other, order.until, np.minimum(order.until, np.maximum(order.since, computed_until)))
    return order._replace(at_least=found.astype(np.int32))


def through_loops(
    graph: OperatorGraph, order: MemoryOrder, edge_tensor: np.ndarray, edge_task: np.ndarray, edge_trips: np.ndarray
) -> tuple[MemoryOrder, np.ndarray]:  # fmt: skip
    """What crosses the border of a loop is there as long as the loop runs.

    A loop holds what it reads of outside until its last trip ends, in the layout in which it reads it, and has a place for what it
    stacks or adds up from its first trip on.

    Args:
      edge_task: who reads a reshard, K for the step's end; `edge_trips`: 1 where it is made before the loop of its reader.

    Returns: the order, and int32 [E], from which task on a later reader of the same copy holds it.
    """
    loops = [tuple(task.scope.split("/")) if task.scope else () for task in graph.tasks]
    handed_on = edge_task + 1
    if not any(loops):
        return order, handed_on
    spans: dict[tuple[str, ...], tuple[int, int]] = {}  # loop -> its first and its last task
    for k, scope in enumerate(loops):
        for n in range(1, len(scope) + 1):
            spans[scope[:n]] = spans.get(scope[:n], (k, k))[0], k
    made_in = {a.tensor: loops[k] for k, task in enumerate(graph.tasks) for a in task.writes}
    since, until, read_at, made_at = (x.copy() for x in (order.since, order.until, order.read_at, order.made_at))

    def entered(scope: tuple[str, ...], left: tuple[str, ...]) -> tuple[int, int] | None:
        """First and last task of the outermost loop around `scope` that is not around `left`."""
        n = next((n for n, (a, b) in enumerate(zip(scope, left, strict=False)) if a != b), min(len(scope), len(left)))
        return spans[scope[: n + 1]] if n < len(scope) else None

    for k, task in enumerate(graph.tasks):
        for i in {a.tensor for a in task.reads}:
            own = made_in.get(i, ())
            if until[i] >= 0 and (loop := entered(loops[k], own)):
                until[i] = max(until[i], loop[1])
            if loop := entered(own, loops[k]):
                since[i] = min(since[i], loop[0])
    for i, tensor in enumerate(graph.tensors):
        if tensor.output_leaves and (loop := entered(made_in.get(i, ()), ())):
            since[i] = min(since[i], loop[0])
    for e, (i, k, trips) in enumerate(zip(edge_tensor.tolist(), edge_task.tolist(), edge_trips.tolist(), strict=True)):
        if trips == 1 and k < len(loops) and (loop := entered(loops[k], made_in.get(i, ()))):
            made_at[e], read_at[e] = min(made_at[e], loop[0]), max(read_at[e], loop[1])
            handed_on[e] = read_at[e] + 1
    return order._replace(since=since, until=until, read_at=read_at, made_at=made_at), handed_on
