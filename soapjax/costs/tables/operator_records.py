"""What one operator's config decides: the records that can change with it, of every operator, one list behind the other.

A change of one operator's config moves

* its own tasks, inner collectives, and the layouts of its accesses and of the parameters that it owns;
* the home layout of tensors that it writes, reads first or owns, or whose common layout as summands it
  decides, and so every reshard of them;
* its own reshards of tensors that others write;
* who pays for a copy that several readers share, in every group of readers of which one wants another layout now: these
  readers are *keyed*.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from soapjax.costs.tables.arrays import NONE, Records, padded, slot_masks
from soapjax.costs.tables.buckets import Bucket, at_least, grown
from soapjax.costs.tables.problem_tables import CostTables
from soapjax.jit.array_types import Array


class OwnRecords(NamedTuple):
    """Of all operators; places of slots count in an operator's own buffer, whose first place stays replicated."""

    records: Records
    spans: Array  # int32 [N, 5, 2]: first and number of an operator's slots, parameters, tasks, rows, groups
    global_slot: Array  # int32 [slot records]: where a slot lies in the whole graph, NONE
    is_keyed: Array  # bool [row records]
    group: Array  # int32 [groups, 4]: first member and their number, first in `keyed` and their number
    keyed: Array  # int32 [n]: rows of an operator, from 0


class OwnSizes(NamedTuple):
    """What is compiled in: the longest list of one operator, and all lists together."""

    slots: int  # of one operator, parameters' included
    parameters: int
    tasks: int
    rows: int
    heirs: int
    all_slots: int
    all_parameters: int
    all_tasks: int
    all_rows: int
    all_groups: int
    all_keyed: int


SMALL = OwnSizes(
    slots=96, parameters=16, tasks=32, rows=128, heirs=64, all_slots=8192, all_parameters=1024, all_tasks=1536, all_rows=12288,
    all_groups=6144, all_keyed=6144,
)  # fmt: skip
LARGE = OwnSizes(
    slots=512, parameters=32, tasks=64, rows=512, heirs=256, all_slots=32768, all_parameters=2048, all_tasks=6144, all_rows=49152,
    all_groups=24576, all_keyed=24576,
)  # fmt: skip


def own_sizes_for(need: OwnSizes, scale: int) -> OwnSizes:
    """Those that go with a bucket of that scale, or larger ones."""
    usual = LARGE if scale or any(n > u for n, u in zip(need, SMALL, strict=True)) else SMALL
    usual = OwnSizes(*usual[:5], *(grown(n, scale) for n in usual[5:]))
    return OwnSizes(*map(at_least, need, usual))


class _Decided(NamedTuple):
    """What one operator's config decides."""

    task: list[int]
    access: list[int]
    parameter: list[int]
    others: list[int]  # slots that other operators decide
    tensor: list[int]
    edge: list[int]
    keyed: set[int]
    work: list[int]
    sum: list[int]


def _decided(tables: CostTables) -> list[_Decided]:
    graph = tables.graph
    by_op: dict[str, dict[int, list[int]]] = {name: defaultdict(list) for name in ("access", "parameter", "task", "work", "sum")}
    for u, n in enumerate(tables.access_op.tolist()):
        by_op["access"][n].append(u)
    for p, n in enumerate(tables.parameter_op.tolist()):
        by_op["parameter"][n].append(p)
    owner = tables.parameter_op.tolist()
    decides = [owner[p] if p >= 0 else n for p, n in zip(tables.task_parameter.tolist(), tables.task_op.tolist(), strict=True)]
    for k, n in enumerate(decides):
        by_op["task"][n].append(k)
    for name, where in (("work", tables.work_task), ("sum", tables.sum_task)):
        for i, k in enumerate(where.tolist()):
            by_op[name][decides[k]].append(i)
    edges_of_tensor, edges_of_slot, tensors_of_slot = defaultdict(list), defaultdict(list), defaultdict(list)
    edge_tensor, edge_slot, edge_source = (x.tolist() for x in (tables.edge_tensor, tables.edge_slot, tables.edge_source))
    for e, (tensor, slot) in enumerate(zip(edge_tensor, edge_slot, strict=True)):
        edges_of_tensor[tensor].append(e)
        edges_of_slot[slot].append(e)
    made, reader, common = tables.tensor_slot.tolist(), tables.tensor_reader.tolist(), tables.tensor_sum.tolist()
    left, own_slots = tables.left_slot.tolist(), tables.parameter_slots[:, 2:].tolist()
    for i, slot in enumerate(made):
        tensors_of_slot[slot].append(i)
        if common[i] >= 0:
            tensors_of_slot[common[i]].append(i)
        if tables.may_be_partial[i]:
            tensors_of_slot[reader[i]].append(i)
    found = []
    for n in range(graph.num_operators):
        access, parameter = by_op["access"][n], by_op["parameter"][n]
        own = {*access, *(s for p in parameter for s in own_slots[p] if s >= 0)}
        moved = sorted({i for s in own for i in tensors_of_slot[s]})
        owned = {graph.parameters[p].tensor for p in parameter}
        keyed = {e for s in own for e in edges_of_slot[s]} | {e for i in owned for e in edges_of_tensor[i]}
        edges = sorted(keyed | {e for i in moved for e in edges_of_tensor[i]})
        tensors = sorted({*moved, *(edge_tensor[e] for e in edges)})
        needed = {s for i in tensors for s in (made[i], reader[i], common[i], left[i]) if s >= 0}
        needed |= {s for e in edges for s in (edge_slot[e], edge_source[e])}
        found.append(
            _Decided(
                task=by_op["task"][n], access=access, parameter=parameter, others=sorted(needed - own), tensor=tensors, edge=edges,
                keyed=keyed, work=by_op["work"][n], sum=by_op["sum"][n],
            )  # fmt: skip
        )  # fmt: skip
    return found


class _Lists:
    """The records of all operators so far."""

    def __init__(self, tables: CostTables, b: Bucket):
        self.tables, self.nothing = tables, [0] * b.width
        self.masks = [m.tolist() for m in slot_masks(tables, b)]
        self.num_t, self.num_e = len(tables.tensor_bytes), len(tables.edge_task)
        self.parameter_slots, self.replicated = tables.parameter_slots.tolist(), tables.replicated_slot
        self.group_of, self.groups = tables.edge_group.tolist(), tables.reader_groups()
        self.member_first = np.cumsum([0, *map(len, self.groups)]).tolist()
        self.place_in = {e: i for some in self.groups for i, e in enumerate(some)}
        self.number_of = {g: i for i, g in enumerate(dict.fromkeys(self.group_of))}  # in the order of `reader_groups`
        self.made, self.reader, self.common = (x.tolist() for x in (tables.tensor_slot, tables.tensor_reader, tables.tensor_sum))
        self.edge_tensor, self.edge_slot = tables.edge_tensor.tolist(), tables.edge_slot.tolist()
        self.edge_source, self.left = tables.edge_source.tolist(), tables.left_slot.tolist()
        self.slot: list[list[int]] = []
        self.sizes: list[list[float]] = []
        self.global_slot: list[int] = []
        self.parameter: list[list[int]] = []
        self.task: list[list[int]] = []
        self.row: list[list[int]] = []
        self.is_keyed: list[bool] = []
        self.group: list[list[int]] = []
        self.keyed: list[int] = []

    def lengths(self) -> list[int]:
        return [len(x) for x in (self.slot, self.parameter, self.task, self.row, self.group)]

    def add(self, of: _Decided) -> tuple[int, int]:
        """Adds what one operator decides; the places of its buffer, and the members of all groups that it touches."""
        places = self._slots(of)
        self._parameters_and_tasks(of, places)
        return len(places), self._groups(of, self._rows(of, places))

    def _slots(self, of: _Decided) -> dict[int, int]:
        """The place of every slot in the operator's buffer."""
        tables, tasks = self.tables, {k: j for j, k in enumerate(of.task)}
        access_mask, sum_mask, work_mask = self.masks
        places: dict[int, int] = {self.replicated: 0}

        def place(name: int) -> int:
            return places.setdefault(name, len(places))

        def add(mask: list[int], copied: int, where: int, task: int, sizes: list[float], name: int = NONE) -> None:
            self.slot.append([*mask, copied, where, task, 0])
            self.sizes.append(sizes)
            self.global_slot.append(name)

        for s in (s for p in of.parameter for s in self.parameter_slots[p][2:] if s >= 0):
            place(s)
        for u in of.access:
            add(access_mask[u], NONE, place(u), tasks[int(tables.access_task[u])], [tables.access_bytes[u], 0], u)
        for s in (s for s in of.others if s != self.replicated):
            add(self.nothing, s, place(s), NONE, [0, 0])
        for s in of.sum:
            name = self.replicated + 1 + s
            add(sum_mask[s], NONE, place(name), NONE, [0, 0], name)
        for w in of.work:
            add(work_mask[w], NONE, NONE, tasks[int(tables.work_task[w])], [0, tables.work_seconds[w]])
        return places

    def _parameters_and_tasks(self, of: _Decided, places: dict[int, int]) -> None:
        for p in of.parameter:
            read, summand, *own = self.parameter_slots[p]
            self.parameter.append([p, places.get(read, 0), places.get(summand, 0), *(places.get(s, NONE) for s in own), 0, *own])
        updated = {p: j for j, p in enumerate(of.parameter)}
        self.task += [[k, updated.get(int(self.tables.task_parameter[k]), NONE), 0] for k in of.task]

    def _rows(self, of: _Decided, places: dict[int, int]) -> dict[int, int]:
        """The row of every reshard, counted from the operator's first."""

        def at(s: int) -> int:
            return places[s] if s >= 0 else 0

        def of_tensor(i: int) -> tuple[int, int]:
            return at(self.reader[i]), at(self.common[i])

        self.row += [[i, at(self.made[i]), *of_tensor(i), at(self.left[i]), 0] for i in of.tensor]
        self.row += [
            [self.num_t + e, at(self.edge_source[e]), *of_tensor(self.edge_tensor[e]), at(self.edge_slot[e]), 0] for e in of.edge
        ]
        self.row += [[self.num_t + self.num_e + s, places[self.replicated + 1 + s], 0, 0, 0, 0] for s in of.sum]
        self.is_keyed += [False] * len(of.tensor) + [e in of.keyed for e in of.edge] + [False] * len(of.sum)
        return {e: len(of.tensor) + j for j, e in enumerate(of.edge)}

    def _groups(self, of: _Decided, row_of_edge: dict[int, int]) -> int:
        """How many members the groups have of which the operator's readers are keyed."""
        touched: dict[int, list[int]] = defaultdict(list)
        for e in of.keyed:
            touched[self.number_of[self.group_of[e]]].append(e)
        for g, some in sorted(touched.items()):
            some.sort(key=self.place_in.__getitem__)
            self.group.append([self.member_first[g], len(self.groups[g]), len(self.keyed), len(some)])
            self.keyed += [row_of_edge[e] for e in some]
        return sum(len(self.groups[g]) for g in touched)


def own_records(tables: CostTables, b: Bucket) -> tuple[OwnRecords, OwnSizes]:
    """Of a problem in a bucket."""
    lists = _Lists(tables, b)
    spans = np.zeros((b.operators, 5, 2), np.int32)
    longest = np.zeros(5, int)
    for n, of in enumerate(_decided(tables)):
        starts = lists.lengths()
        num_places, num_members = lists.add(of)
        spans[n, :, 0] = starts
        spans[n, :, 1] = np.subtract(lists.lengths(), starts)
        longest = np.maximum(longest, [num_places, *spans[n, 1:4, 1], num_members])
    of_one = (*longest[:4].tolist(), min(int(longest[4]), lists.num_e))
    found = own_sizes_for(OwnSizes._make((*of_one, *lists.lengths(), len(lists.keyed))), b.scale)
    return _padded_records(lists, spans, found, b.width), found


def _padded_records(lists: _Lists, spans: np.ndarray, sizes: OwnSizes, width: int) -> OwnRecords:
    slot = np.array(lists.slot, np.int32).reshape(-1, width + 4)
    slot[slot[:, width + 1] == NONE, width + 1] = sizes.slots  # places that nobody reads
    slot[slot[:, width + 2] == NONE, width + 2] = sizes.tasks
    parameter = np.array(lists.parameter, np.int32).reshape(-1, 12)
    parameter[parameter[:, 6] == NONE, 6] = sizes.slots

    def ints(x: list, count: int, columns: int) -> np.ndarray:
        return padded(np.array(x, np.int32).reshape(-1, columns), count + 1)

    records = Records(
        padded(slot, sizes.all_slots + 1), padded(np.array(lists.sizes, np.float32).reshape(-1, 2), sizes.all_slots + 1),
        padded(parameter, sizes.all_parameters + 1), ints(lists.task, sizes.all_tasks, 3), ints(lists.row, sizes.all_rows, 6),
    )  # fmt: skip
    return OwnRecords(
        records, spans, padded(np.array(lists.global_slot, np.int32), sizes.all_slots + 1, NONE),
        padded(np.array(lists.is_keyed, bool), sizes.all_rows + 1, False), ints(lists.group, sizes.all_groups, 4),
        padded(np.array(lists.keyed, np.int32), sizes.all_keyed + 1),
    )  # fmt: skip
