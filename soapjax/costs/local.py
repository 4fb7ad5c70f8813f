"""What one operator's config decides: the entries of the cost tables that can change with it.

A change of one operator's config moves

* its own tasks, inner collectives, and the layouts of its accesses and of the parameters that it owns;
* the home layout of tensors that it writes, reads first or owns, or whose common layout as summands it
  decides, and so every conversion of them;
* its own conversions of tensors that others write;
* who pays for a copy that several readers share: the next reader of the old layout may inherit the payment,
  the next of the new one may be freed from it. These *heirs* are found when a change is evaluated.

`local_tables` lists the first three per operator, padded to one size for each class of operators, small and large.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from soapjax.costs.tables import CostTables


class LocalTables(NamedTuple):
    """M operators, padded; a pad is the index behind the last (tasks K, tensors T, ...), except where said.

    Local slots are, in this order: the operator's accesses, the storages of its parameters, the storages of their gradients,
    and slots of others that it depends on.
    """

    task: np.ndarray  # int32 [M, k]
    access: np.ndarray  # int32 [M, u]
    access_task: np.ndarray  # int32 [M, u]: position in `task`
    parameter: np.ndarray  # int32 [M, p]
    parameter_first: np.ndarray  # int32 [M, p]: local slot of the owner's first read, -1 where there is none
    task_parameter: np.ndarray  # int32 [M, k]: position in `parameter` that an update task updates, -1
    other_slot: np.ndarray  # int32 [M, o]: global slots
    tensor: np.ndarray  # int32 [M, t]
    tensor_slot: np.ndarray  # int32 [M, t]: local slot
    tensor_reader: np.ndarray  # int32 [M, t]: local slot
    tensor_sum: np.ndarray  # int32 [M, t]: local slot, -1
    edge: np.ndarray  # int32 [M, e]: those whose key may change stand first, of them those in long rows (see Sharing)
    edge_tensor: np.ndarray  # int32 [M, e]: position in `tensor`
    edge_slot: np.ndarray  # int32 [M, e]: local slot
    edge_again: np.ndarray  # int32 [M, e]: position in `parameter` of one that may be regathered for it, -1
    work: np.ndarray  # int32 [M, w]
    work_task: np.ndarray  # int32 [M, w]: position in `task`
    sum: np.ndarray  # int32 [M, s]


class Sharing(NamedTuple):
    """Readers of one tensor, in one dtype and one loop, that share copies in equal layouts."""

    row: np.ndarray  # int32 [E + 1, R]: the conversions of the same group, in order; E is the pad
    column: np.ndarray  # int32 [E + 1]: where a conversion stands in its row


def sharing(tables: CostTables) -> Sharing:
    """Rows of conversions that may be one copy."""
    num_e, groups = len(tables.edge_task), tables.reader_groups()
    row = np.full((num_e + 1, max(map(len, groups), default=1)), num_e, np.int32)
    column = np.zeros(num_e + 1, np.int32)
    for members in groups:
        row[members, : len(members)] = members
        column[members] = np.arange(len(members))
    return Sharing(row, column)


class _Row(NamedTuple):
    """One operator's lists, before padding."""

    task: list[int]
    access: list[int]
    parameter: list[int]
    other_slot: list[int]
    tensor: list[int]
    edge: list[int]
    num_long: int
    num_keyed: int
    work: list[int]
    sum: list[int]


def _rows(tables: CostTables, length: np.ndarray) -> list[_Row]:
    """Per operator; `length` [E]: how many readers may share a conversion's copy."""
    graph = tables.graph
    num_u, num_p = len(tables.access_op), len(tables.parameter_op)
    by_op = {name: defaultdict(list) for name in ("access", "parameter", "task", "work", "sum")}
    for u, n in enumerate(tables.access_op.tolist()):
        by_op["access"][n].append(u)
    for p, n in enumerate(tables.parameter_op.tolist()):
        by_op["parameter"][n].append(p)
    update_of = {k: p for k, p in enumerate(tables.task_parameter.tolist()) if p >= 0}
    for k, n in enumerate(tables.task_op.tolist()):
        by_op["task"][int(tables.parameter_op[update_of[k]]) if k in update_of else n].append(k)
    for name, where in (("work", tables.work_task), ("sum", tables.sum_task)):
        for i, k in enumerate(where.tolist()):
            p = update_of.get(k)
            by_op[name][int(tables.task_op[k]) if p is None else int(tables.parameter_op[p])].append(i)
    edges_of_tensor, edges_of_slot, tensors_of_slot = defaultdict(list), defaultdict(list), defaultdict(list)
    for e, (tensor, slot) in enumerate(zip(tables.edge_tensor.tolist(), tables.edge_slot.tolist(), strict=True)):
        edges_of_tensor[tensor].append(e)
        edges_of_slot[slot].append(e)
    for i, (slot, reader) in enumerate(zip(tables.tensor_slot.tolist(), tables.tensor_reader.tolist(), strict=True)):
        tensors_of_slot[slot].append(i)
        if tables.tensor_sum[i] >= 0:
            tensors_of_slot[int(tables.tensor_sum[i])].append(i)
        if tables.may_be_partial[i]:
            tensors_of_slot[reader].append(i)
    rows = []
    for n in range(graph.num_operators):
        access, parameter = by_op["access"][n], by_op["parameter"][n]
        own = {*access, *(num_u + p for p in parameter), *(num_u + num_p + p for p in parameter)}
        moved = sorted({i for s in own for i in tensors_of_slot[s]})
        owned = {graph.parameters[p].tensor for p in parameter}
        keyed = sorted({e for s in own for e in edges_of_slot[s]} | {e for i in owned for e in edges_of_tensor[i]})
        others = sorted({e for i in moved for e in edges_of_tensor[i]} - set(keyed))
        keyed.sort(key=lambda e: (length[e] <= SHORT, e))
        num_long = sum(int(length[e]) > SHORT for e in keyed)
        edges = keyed + others
        tensors = sorted({*moved, *(int(tables.edge_tensor[e]) for e in edges)})
        needed = {int(s) for i in tensors for s in (tables.tensor_slot[i], tables.tensor_reader[i], tables.tensor_sum[i]) if s >= 0}
        needed |= {int(tables.edge_slot[e]) for e in edges}
        rows.append(
            _Row(
                by_op["task"][n], access, parameter, sorted(needed - own), tensors, edges, num_long, len(keyed),
                by_op["work"][n], by_op["sum"][n],
            )
        )  # fmt: skip
    return rows


class LocalClass(NamedTuple):
    """Operators of one size: numbers of leading edges in long rows and of all whose key may change, and of possible heirs."""

    operators: np.ndarray  # int32 [M]
    num_long: int
    num_keyed: int
    num_heirs: int
    tables: LocalTables

    @property
    def sizes(self) -> tuple[int, int]:
        return self.num_long, self.num_keyed


SHORT = 8  # readers of one tensor
MAX_CLASSES = 3


def local_classes(tables: CostTables) -> list[LocalClass]:
    """The operators in up to three classes: padding everything to the largest would make the many pay for the few.

    Each class is compiled on its own, so a split has to save a quarter of the work to be made.
    """
    found = sharing(tables)
    length = (found.row[:-1] < len(tables.edge_task)).sum(1)
    rows = _rows(tables, length)
    longest = found.row.shape[1]
    size = np.array([(len(r.edge), r.num_long, r.num_keyed) for r in rows]).reshape(-1, 3)
    work = 30.0 * size[:, 0] + size[:, 1] * longest + size[:, 2] * SHORT
    order = np.argsort(work, kind="stable")
    parts = [order]
    while len(parts) < MAX_CLASSES:
        long = [(i, part) for i, part in enumerate(parts) if len(part) > 1]
        options = [(_work(size, part, longest), *_best_split(size, part, longest), i) for i, part in long]
        total = sum(_work(size, part, longest) for part in parts)
        gain, cut, i = max(((whole - split, cut, i) for whole, split, cut, i in options), default=(0, 0, 0))
        if gain < total / 4:
            break
        parts[i : i + 1] = [parts[i][:cut], parts[i][cut:]]
    return [_padded(tables, rows, found, np.sort(part)) for part in parts if len(part)]


def _work(size: np.ndarray, part: np.ndarray, longest: int) -> float:
    edges, long, keyed = size[part].max(0)
    return float(len(part) * (30.0 * edges + long * longest + keyed * SHORT))


def _best_split(size: np.ndarray, part: np.ndarray, longest: int) -> tuple[float, int]:
    """(work, position) of the best split of an ordered class in two."""
    cuts = sorted({round(q) for q in np.linspace(1, len(part) - 1, 64)})
    return min((_work(size, part[:c], longest) + _work(size, part[c:], longest), c) for c in cuts)


def _padded(tables: CostTables, rows: list[_Row], shares: Sharing, members: np.ndarray) -> LocalClass:
    graph, num_u, num_p = tables.graph, len(tables.access_op), len(tables.parameter_op)
    chosen = [rows[n] for n in members]
    num_long = max(r.num_long for r in chosen)
    num_keyed = num_long + max(r.num_keyed - r.num_long for r in chosen)

    def pad(name: str, value: int) -> np.ndarray:
        out = np.full((len(chosen), max(1, max(len(getattr(r, name)) for r in chosen))), value, np.int32)
        for i, r in enumerate(chosen):
            out[i, : len(getattr(r, name))] = getattr(r, name)
        return out

    task, access, parameter = pad("task", len(graph.tasks)), pad("access", num_u), pad("parameter", num_p)
    tensor, work, total = pad("tensor", len(graph.tensors)), pad("work", len(tables.work_task)), pad("sum", len(tables.sum_task))
    other_slot = pad("other_slot", num_u + 2 * num_p)
    width_u, width_p = access.shape[1], parameter.shape[1]
    others = max(len(r.edge) - r.num_keyed for r in chosen)
    edge = np.full((len(chosen), max(1, num_keyed + others)), len(tables.edge_task), np.int32)
    shape = edge.shape
    edge_tensor, edge_slot, again = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
    tensor_slot, tensor_reader = np.zeros(tensor.shape, np.int32), np.zeros(tensor.shape, np.int32)
    tensor_sum = np.full(tensor.shape, -1, np.int32)
    access_task, first = np.zeros(access.shape, np.int32), np.full(parameter.shape, -1, np.int32)
    task_parameter, work_task = np.full(task.shape, -1, np.int32), np.zeros(work.shape, np.int32)
    for i, r in enumerate(chosen):
        slots = {s: j for j, s in enumerate(r.access)}
        slots |= {num_u + p: width_u + j for j, p in enumerate(r.parameter)}
        slots |= {num_u + num_p + p: width_u + width_p + j for j, p in enumerate(r.parameter)}
        slots |= {s: width_u + 2 * width_p + j for j, s in enumerate(r.other_slot)}
        tasks, tensors = {k: j for j, k in enumerate(r.task)}, {x: j for j, x in enumerate(r.tensor)}
        parameters = {p: j for j, p in enumerate(r.parameter)}
        owned = {graph.parameters[p].tensor: j for p, j in parameters.items()}
        for j, u in enumerate(r.access):
            access_task[i, j] = tasks[int(tables.access_task[u])]
        for j, w in enumerate(r.work):
            work_task[i, j] = tasks[int(tables.work_task[w])]
        for j, p in enumerate(r.parameter):
            first[i, j] = slots.get(int(tables.parameter_slot[p]), -1)
        for j, k in enumerate(r.task):
            task_parameter[i, j] = parameters.get(int(tables.task_parameter[k]), -1)
        for j, x in enumerate(r.tensor):
            tensor_slot[i, j], tensor_reader[i, j] = slots[int(tables.tensor_slot[x])], slots[int(tables.tensor_reader[x])]
            tensor_sum[i, j] = slots.get(int(tables.tensor_sum[x]), -1)
        for j, e in enumerate(r.edge):
            at = j if j < r.num_long else num_long + j - r.num_long if j < r.num_keyed else num_keyed + j - r.num_keyed
            edge[i, at] = e
            edge_tensor[i, at], edge_slot[i, at] = tensors[int(tables.edge_tensor[e])], slots[int(tables.edge_slot[e])]
            again[i, at] = owned.get(int(tables.edge_tensor[e]), -1)
    num_heirs = max(len(set(shares.row[r.edge[: r.num_keyed]].ravel().tolist()) - {*r.edge, len(tables.edge_task)}) for r in chosen)
    return LocalClass(
        members.astype(np.int32), num_long, max(1, num_keyed), max(1, num_heirs),
        LocalTables(
            task, access, access_task, parameter, first, task_parameter, other_slot, tensor, tensor_slot, tensor_reader,
            tensor_sum, edge, edge_tensor, edge_slot, again, work, work_task, total,
        ),
    )  # fmt: skip
