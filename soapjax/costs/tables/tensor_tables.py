"""The part of the cost tables that follows tensors: where each comes from, how long it lives, and who reads it in which layout."""

from __future__ import annotations

import dataclasses

import numpy as np

from soapjax.graph.lifespans import lifetimes
from soapjax.graph.operators import NOT_SPLIT, Access, OperatorGraph, Tensor
from soapjax.graph.passes.phases import BACKWARD, UPDATE
from soapjax.graph.rules.pools import needed_at
from soapjax.strategy.layout import PARTIAL, REPLICATED
from soapjax.strategy.space import SearchSpace

FROM_ACCESS, FROM_STORAGE, FROM_READER, FROM_FIXED = range(4)


def trip_slices(graph: OperatorGraph, access: Access) -> int:
    """Of how many slices of a tensor one trip of a task reads one: loops take a stacked input apart, if nobody splits that dim."""
    is_input = graph.tensors[access.tensor].input_leaf >= 0
    return access.slices if access.slices > 1 and is_input and _is_sliced(graph, access.tensor) else 1


def trip_bytes(graph: OperatorGraph, access: Access) -> float:
    """Bytes of a tensor that one trip of a task touches."""
    return graph.tensors[access.tensor].size_bytes / trip_slices(graph, access)


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


class _Users:
    """Who makes each tensor and who reads it: slots of accesses, and of gradients as they are stored."""

    def __init__(self, graph: OperatorGraph, t: dict):
        self.graph, self.num_u = graph, len(t["access_op"])
        of_sums = self.num_u + 3 * len(graph.parameters)
        self.following = [chain for chain in graph.accumulations if chain.follows_storage]
        self.replicated = of_sums + len(self.following)
        self.task_of = t["access_task"].tolist()
        self.bytes_of, self.slices = t["access_bytes"].tolist(), t.pop("access_slices").tolist()  # by slot
        self.writer: dict[int, int] = {}  # tensor -> slot
        self.readers: dict[int, list[tuple[int, int]]] = {}  # tensor -> (task, slot)
        for u, (tensor, is_write) in enumerate(zip(t["access_tensor"].tolist(), t["access_is_write"], strict=True)):
            if is_write:
                self.writer[tensor] = u
            else:
                self.readers.setdefault(tensor, []).append((self.task_of[u], u))
        self.by_parameter = {p.tensor: i for i, p in enumerate(graph.parameters)}
        # Arguments that lie as a parameter is stored: itself, and its optimizer state where operators read that.
        by_leaf = {leaf: i for i, p in enumerate(graph.parameters) for leaf in p.leaves}
        self.stored_as = {i: by_leaf[t.input_leaf] for i, t in enumerate(graph.tensors) if t.input_leaf in by_leaf}
        # And results that are them in the next step.
        self.next_as = {result: by_leaf[leaf] for leaf, result in graph.state_pairs if leaf in by_leaf}
        self._by_gradient = {p.gradient: i for i, p in enumerate(graph.trained)}
        self._update_task = {task.parameter: k for k, task in enumerate(graph.tasks) if task.parameter >= 0}
        self._carried = {chain.total for chain in graph.accumulations if chain.is_carried}
        # A tensor's common layout with others: of a gradient's summands, and of the products of a joint sum.
        self.common, self.is_joint = np.full(len(graph.tensors), -1, np.int32), np.zeros(len(graph.tensors), bool)
        self.sum_slot = {chain.total: self.writer[chain.layout_of] for chain in graph.accumulations}  # by total
        self.sum_slot.update((chain.total, of_sums + a) for a, chain in enumerate(self.following))
        for chain in graph.accumulations:
            self.common[[*chain.summands, *chain.running]] = self.sum_slot[chain.total]
        for joint in graph.joint_sums:
            *others, last = joint.summands
            self.common[others], self.is_joint[others] = self.writer[last], True

    def of(self, tensor: int) -> list[tuple[int, int]]:
        """Its readers in order, the update of a gradient too; of a sum that a loop carries those after the loop."""
        found = list(self.readers.get(tensor, []))
        if tensor in self._carried:
            found = [(k, u) for k, u in found if k > self.made_by(tensor)]
        p = self._by_gradient.get(tensor)
        if p in self._update_task:
            found.append((self._update_task[p], self.num_u + len(self.graph.parameters) + p))
        return sorted(found)

    def kept_by(self, result: int) -> int:
        """The slot of the layout in which a result that is the next step's state is kept."""
        return self.num_u + self.next_as[result] if result in self.next_as else self.replicated

    def made_by(self, tensor: int) -> int:
        """The task that makes it."""
        return self.task_of[self.writer[tensor]]

    def first_reader(self, tensor: int) -> int | None:
        """The first task that reads it, updates apart."""
        return min((k for k, _ in self.readers.get(tensor, [])), default=None)


def tensors_and_edges(graph: OperatorGraph, space: SearchSpace, num_axes: int, t: dict) -> list[Edge]:
    """Adds the arrays by tensor and by edge to `t`, which has those of accesses; the edges in order."""
    users, early = _Users(graph, t), needed_at(graph)
    edges = _edges(graph, users)
    t["tensor_sum"], t["is_joint"] = users.common, users.is_joint
    t["sum_parameter"] = np.array([chain.parameter for chain in users.following], np.int32)
    t["sum_slot"] = np.array([users.writer[chain.layout_of] for chain in users.following], np.int32)
    t.update(_layouts(graph, space, users, num_axes, t["access_map"]))
    t.update(_figures(graph))
    t.update(_lives(graph, users, early))
    t["edge_tensor"] = np.array([e.tensor for e in edges], np.int32)
    t["edge_slot"] = np.array([e.slot for e in edges], np.int32)
    t["edge_task"] = np.array([e.task for e in edges], np.int32)
    t["edge_read_at"] = np.array([early.get((e.task, e.tensor), e.task) for e in edges], np.int32)
    t["edge_bytes"] = np.array([e.bytes for e in edges], np.float32)
    t["edge_trips"] = np.array([e.trips for e in edges], np.float32)
    t["edge_parameter"] = np.array([e.parameter for e in edges], np.int32)
    return edges


def _edges(graph: OperatorGraph, users: _Users) -> list[Edge]:
    """Every reshard that may be: for a reader, for the step's end, and into a loop."""
    num_k, state_outputs = len(graph.tasks), {o for _, o in graph.state_pairs}
    edges: list[Edge] = []
    for i, tensor in enumerate(graph.tensors):
        for k, u in users.of(i):
            task = graph.tasks[k]
            per_trip = users.bytes_of[u] if u < users.num_u else tensor.size_bytes
            made_inside = i in users.writer and graph.tasks[users.made_by(i)].trip_count > 1
            is_sliced = u < users.num_u and users.slices[u] > 1
            count = task.trip_count if made_inside or is_sliced else 1
            if task.parameter >= 0:
                per_trip *= tensor.copies  # the gradients of all layers of a loop at once
            if users.common[i] < 0 or users.is_joint[i]:
                dtype = dict(task.casts).get(i, tensor.dtype)
                sent = per_trip * itemsize_as(tensor, dtype) / tensor.itemsize
                edges.append(Edge(
                    tensor=i, slot=u, task=k, bytes=sent, trips=count, parameter=users.by_parameter.get(i, -1), dtype=dtype,
                ))  # fmt: skip
        kept = {users.kept_by(o) for o in state_outputs.intersection(tensor.output_leaves)} if i in users.writer else ()
        for u in sorted(kept):
            edges.append(Edge(
                tensor=i, slot=u, task=num_k, bytes=tensor.size_bytes * tensor.copies, trips=1, parameter=-1, dtype=tensor.dtype,
            ))  # fmt: skip
    for entry in graph.entries:
        if (first := users.first_reader(entry.target)) is not None:
            # Resharded to the layout in which the loop's own result is carried.
            carried, source = users.writer.get(entry.target, users.replicated), graph.tensors[entry.source]
            edges.append(Edge(
                tensor=entry.source, slot=carried, task=first, bytes=source.size_bytes, trips=1, parameter=-1, dtype=source.dtype,
            ))  # fmt: skip
    edges = [e for e in edges if e.bytes > itemsize_as(graph.tensors[e.tensor], e.dtype)]
    return sorted(edges, key=lambda e: (e.task, e.tensor))


def _layouts(
    graph: OperatorGraph, space: SearchSpace, users: _Users, num_axes: int, access_map: np.ndarray
) -> dict[str, np.ndarray]:  # fmt: skip
    """Where each tensor's layout comes from, and whether and how often it may be a partial sum."""
    n, paired = len(graph.tensors), dict(graph.state_pairs)
    source, slot, reader = np.zeros(n, np.int32), np.full(n, users.replicated, np.int32), np.full(n, users.replicated, np.int32)
    fixed = np.full((n, num_axes), REPLICATED, np.int8)
    trips, partial = np.ones(n, np.float32), np.zeros(n, bool)
    may_sum = (access_map == PARTIAL).any(1)
    begun = {source: users.writer[target] for target, source in graph.begun_by.items() if target in users.writer}
    for i, tensor in enumerate(graph.tensors):
        # A gradient's first reader is what sums it up: the update, unless another task adds to it before. Data that only begin a
        # loop are laid out as it carries them on.
        first = found[0][1] if (found := users.of(i)) else begun.get(i)
        if first is not None:
            reader[i] = first
        if i in users.stored_as:
            source[i], slot[i] = FROM_STORAGE, users.num_u + users.stored_as[i]
        elif i in users.writer:
            source[i], slot[i] = FROM_ACCESS, users.writer[i]
            trips[i] = graph.tasks[users.made_by(i)].trip_count
            partial[i] = may_sum[users.writer[i]]
        elif tensor.input_leaf in space.fixed_layouts:
            source[i], fixed[i] = FROM_FIXED, space.fixed_layouts[tensor.input_leaf]
        elif tensor.input_leaf in paired or first is None:
            source[i] = FROM_FIXED
        else:
            source[i], slot[i] = FROM_READER, first
    for chain in graph.accumulations:
        for i in (*chain.running, chain.total):  # added up in the summands' layout; the total leaves it
            slot[i], partial[i] = users.sum_slot[chain.total], may_sum[users.writer[chain.layout_of]] and i == chain.total
        partial[list(chain.summands)] = True  # from their own layouts into the common one
        if chain.is_carried:
            trips[chain.total] = 1
    return {
        "tensor_source": source, "tensor_slot": slot, "tensor_reader": reader, "tensor_fixed": fixed,
        "tensor_trips": trips, "may_be_partial": partial,
    }  # fmt: skip


def _figures(graph: OperatorGraph) -> dict[str, np.ndarray]:
    rank = max([len(x.shape) for x in graph.tensors], default=1) or 1
    shapes = np.ones((len(graph.tensors), rank), np.int32)
    for i, tensor in enumerate(graph.tensors):
        shapes[i, : len(tensor.shape)] = tensor.shape
    products = {a.tensor for task in graph.tasks if task.kind == "dot" for a in task.writes}
    return {
        "tensor_shape": shapes,
        "tensor_bytes": np.array([x.size_bytes for x in graph.tensors], np.float32),
        "resolve_bytes": np.array([x.summed_bytes for x in graph.tensors], np.float32),
        "is_product": np.array([i in products and len(x.shape) > 2 for i, x in enumerate(graph.tensors)]),
    }


def _lives(graph: OperatorGraph, users: _Users, early: dict[tuple[int, int], int]) -> dict[str, np.ndarray]:
    """From which task to which a tensor is there; `early`: (task, tensor) -> when the task really reads it."""
    last_task = len(graph.tasks) - 1
    birth, death = np.zeros(len(graph.tensors), np.int32), np.zeros(len(graph.tensors), np.int32)
    for i, tensor in enumerate(graph.tensors):
        last = max([early.get((k, i), k) for k, _ in users.of(i)], default=0)
        death[i] = last_task if tensor.output_leaves else last
        if i in users.stored_as:
            death[i] = -1  # a parameter is counted with its optimizer state
        elif i in users.writer:
            birth[i] = users.made_by(i)
            death[i] = max(death[i], birth[i])  # a loop carries it over from the trip before
    for entry in graph.entries:
        first = users.first_reader(entry.target)
        if first is not None and entry.source not in users.stored_as:
            death[entry.source] = max(death[entry.source], first)
    lives = lifetimes(graph)
    death = np.where(death < 0, death, np.maximum(death, np.minimum(lives.last_use, last_task)))
    death = np.where(lives.is_reused & (death == lives.last_use), np.maximum(death - 1, birth), death)
    summands = {i for chain in graph.accumulations for i in (*chain.summands, *chain.running, chain.total)}
    copies = np.array([x.copies for x in graph.tensors], np.float32)
    return {
        "tensor_birth": birth, "tensor_death": death, "computed_until": np.minimum(lives.computed_until, last_task),
        "is_kept": np.array([bool(x.output_leaves) or i in summands for i, x in enumerate(graph.tensors)]),
        "tensor_copies": copies * lives.is_stored * lives.scale,
    }  # fmt: skip


def reader_groups(graph: OperatorGraph, edges: list[Edge], t: dict) -> None:
    """Which reshards may be one: those of one tensor, into one dtype, for readers in the same loop.

    A parameter that every trip uses is resharded before the loop.
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
