"""The part of the cost tables that follows tensors: where each comes from, how long it lives, and who reads it in which layout."""

from __future__ import annotations

import dataclasses

import numpy as np

from soapjax.graph.lifetimes import lifetimes
from soapjax.graph.operators import NOT_SPLIT, OperatorGraph, Tensor
from soapjax.graph.phases import BACKWARD, UPDATE
from soapjax.graph.pools import needed_at
from soapjax.strategy.layout import PARTIAL, REPLICATED
from soapjax.strategy.space import SearchSpace

FROM_ACCESS, FROM_STORAGE, FROM_READER, FROM_FIXED = range(4)


def trip_bytes(graph: OperatorGraph, tensor: int, task: int) -> float:
    """Bytes of a tensor that one trip of a task touches: a loop reads one slice of a stacked input."""
    found, trips = graph.tensors[tensor], graph.tasks[task].trip_count
    stacked = trips > 1 and found.input_leaf >= 0 and found.shape and found.shape[0] == trips and _is_sliced(graph, tensor)
    return found.size_bytes / (trips if stacked else 1)


def itemsize_as(tensor: Tensor, dtype: str) -> int:
    """Bytes of an element of a tensor that is sent as `dtype`, its own or one that it is cast to."""
    return tensor.itemsize if dtype == tensor.dtype else np.dtype(dtype).itemsize


def _is_sliced(graph: OperatorGraph, tensor: int) -> bool:
    """Whether loops read this input slice by slice: its leading dim is never split."""
    return all(a.dims[0] == NOT_SPLIT for k in graph.tasks for a in k.reads if a.tensor == tensor and a.dims)


@dataclasses.dataclass
class Edge:
    tensor: int
    slot: int
    task: int
    bytes: float
    trips: int
    parameter: int
    dtype: str  # as which it is sent


def tensors_and_edges(graph: OperatorGraph, space: SearchSpace, num_axes: int, t: dict) -> list[Edge]:
    num_u, num_p, num_k = len(t["access_op"]), len(graph.parameters), len(graph.tasks)
    replicated_slot = num_u + 2 * num_p
    by_parameter = {p.tensor: i for i, p in enumerate(graph.parameters)}
    by_gradient = {p.gradient: i for i, p in enumerate(graph.parameters)}
    update_task = {task.parameter: k for k, task in enumerate(graph.tasks) if task.parameter >= 0}
    paired = dict(graph.state_pairs)
    state_outputs = {o for i, o in graph.state_pairs}
    readers: dict[int, list[tuple[int, int]]] = {}  # tensor -> (task, slot)
    writer: dict[int, int] = {}
    for u in range(num_u):
        tensor, k = int(t["access_tensor"][u]), int(t["access_task"][u])
        if t["access_is_write"][u]:
            writer[tensor] = u
        else:
            readers.setdefault(tensor, []).append((k, u))
    n = len(graph.tensors)
    source, slot, reader = np.zeros(n, np.int32), np.full(n, replicated_slot, np.int32), np.full(n, replicated_slot, np.int32)
    fixed = np.full((n, num_axes), REPLICATED, np.int8)
    rank = max([len(x.shape) for x in graph.tensors], default=1) or 1
    shapes = np.ones((n, rank), np.int32)
    birth, death, trips = np.zeros(n, np.int32), np.zeros(n, np.int32), np.ones(n, np.float32)
    partial = np.zeros(n, bool)
    sums, is_joint = np.full(n, -1, np.int32), np.zeros(n, bool)
    for chain in graph.accumulations:
        sums[[*chain.summands, *chain.running]] = writer[chain.layout_of]
    for joint in graph.joint_sums:
        *others, last = joint.summands
        sums[others], is_joint[others] = writer[last], True
    edges: list[Edge] = []
    early = needed_at(graph)
    for i, tensor in enumerate(graph.tensors):
        shapes[i, : len(tensor.shape)] = tensor.shape
        found = sorted(readers.get(i, []))
        if i in by_gradient and by_gradient[i] in update_task:
            p = by_gradient[i]
            found.append((update_task[p], num_u + num_p + p))
            found.sort()
        for k, u in found:
            task = graph.tasks[k]
            per_trip = trip_bytes(graph, i, k)
            made_inside = i in writer and graph.tasks[int(t["access_task"][writer[i]])].trip_count > 1
            sliced = per_trip != tensor.size_bytes
            count = task.trip_count if made_inside or sliced else 1
            if task.parameter >= 0:
                per_trip *= tensor.copies  # the gradients of all layers of a loop at once
            if sums[i] < 0 or is_joint[i]:
                dtype = dict(task.casts).get(i, tensor.dtype)
                sent = per_trip * itemsize_as(tensor, dtype) / tensor.itemsize
                edges.append(Edge(i, u, k, sent, count, by_parameter.get(i, -1), dtype))
        if tensor.output_leaves and i in writer and state_outputs.intersection(tensor.output_leaves):
            edges.append(Edge(i, replicated_slot, num_k, tensor.size_bytes * tensor.copies, 1, -1, tensor.dtype))
        if found:
            # A gradient's first reader is what sums it up: the update, unless another task adds to it before.
            reader[i] = found[0][1]
        last = max([early.get((k, i), k) for k, _ in found], default=0)
        death[i] = num_k - 1 if tensor.output_leaves else last
        if i in by_parameter:
            source[i], slot[i] = FROM_STORAGE, num_u + by_parameter[i]
            death[i] = -1  # counted with its optimizer state
        elif i in writer:
            source[i], slot[i] = FROM_ACCESS, writer[i]
            birth[i] = t["access_task"][writer[i]]
            trips[i] = graph.tasks[birth[i]].trip_count
            partial[i] = bool((t["access_map"][writer[i]] == PARTIAL).any())
            # A loop carries it over from the trip before.
            death[i] = max(death[i], birth[i])
        elif tensor.input_leaf in space.fixed_layouts:
            source[i], fixed[i] = FROM_FIXED, space.fixed_layouts[tensor.input_leaf]
        elif tensor.input_leaf in paired or not found:
            source[i] = FROM_FIXED
        else:
            source[i], slot[i] = FROM_READER, found[0][1]
    for chain in graph.accumulations:
        layout = writer[chain.layout_of]
        may_sum = bool((t["access_map"][layout] == PARTIAL).any())
        for i in (*chain.running, chain.total):  # added up in the summands' layout; the total leaves it
            slot[i], partial[i] = layout, may_sum and i == chain.total
        partial[list(chain.summands)] = True  # from their own layouts into the common one
        if chain.is_carried:
            trips[chain.total] = 1
    for entry in graph.entries:
        first = min((k for k, _ in readers.get(entry.target, [])), default=None)
        if first is not None:
            # Converted to the layout in which the loop's own result is carried.
            edges.append(
                Edge(
                    entry.source,
                    writer.get(entry.target, replicated_slot),
                    first,
                    graph.tensors[entry.source].size_bytes,
                    1,
                    -1,
                    graph.tensors[entry.source].dtype,
                )
            )
            if entry.source not in by_parameter:
                death[entry.source] = max(death[entry.source], first)
    lives = lifetimes(graph)
    t["computed_until"] = np.minimum(lives.computed_until, num_k - 1)
    summands = {i for chain in graph.accumulations for i in (*chain.summands, *chain.running, chain.total)}
    t["is_kept"] = np.array([bool(x.output_leaves) or i in summands for i, x in enumerate(graph.tensors)])
    death = np.where(death < 0, death, np.maximum(death, np.minimum(lives.last_use, num_k - 1)))
    death = np.where(lives.is_reused & (death == lives.last_use), np.maximum(death - 1, birth), death)
    edges = [e for e in edges if e.bytes > itemsize_as(graph.tensors[e.tensor], e.dtype)]
    edges.sort(key=lambda e: (e.task, e.tensor))
    t["tensor_source"], t["tensor_slot"], t["tensor_reader"], t["tensor_fixed"] = source, slot, reader, fixed
    t["is_joint"], t["tensor_sum"], t["tensor_shape"], t["tensor_birth"], t["tensor_death"] = is_joint, sums, shapes, birth, death
    t["tensor_bytes"] = np.array([x.size_bytes for x in graph.tensors], np.float32)
    t["resolve_bytes"] = np.array([x.summed_bytes for x in graph.tensors], np.float32)
    t["tensor_copies"] = np.array([x.copies for x in graph.tensors], np.float32) * lives.is_stored * lives.scale
    products = {a.tensor for task in graph.tasks if task.kind == "dot" for a in task.writes}
    t["is_product"] = np.array([i in products and len(x.shape) > 2 for i, x in enumerate(graph.tensors)])
    t["tensor_trips"], t["may_be_partial"] = trips, partial
    t["edge_tensor"] = np.array([e.tensor for e in edges], np.int32)
    t["edge_slot"] = np.array([e.slot for e in edges], np.int32)
    t["edge_task"] = np.array([e.task for e in edges], np.int32)
    t["edge_read_at"] = np.array([early.get((e.task, e.tensor), e.task) for e in edges], np.int32)
    t["edge_bytes"] = np.array([e.bytes for e in edges], np.float32)
    t["edge_trips"] = np.array([e.trips for e in edges], np.float32)
    t["edge_parameter"] = np.array([e.parameter for e in edges], np.int32)
    return edges


def reader_groups(graph: OperatorGraph, edges: list[Edge], t: dict) -> None:
    """Which conversions may be one: those of one tensor, into one dtype, for readers in the same loop.

    A parameter that every trip uses is converted before the loop.
    """
    last = len(graph.tasks)
    numbers: dict[object, int] = {}
    # What the step's end wants is shared with nobody.
    keys = (
        (e.tensor, e.dtype, "" if e.trips == 1 and e.parameter >= 0 else graph.tasks[e.task].scope) if e.task < last else ("end", i)
        for i, e in enumerate(edges)
    )
    t["edge_group"] = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int32)
    t["edge_is_backward"] = np.array([e.task < last and graph.tasks[e.task].phase in (BACKWARD, UPDATE) for e in edges], bool)
