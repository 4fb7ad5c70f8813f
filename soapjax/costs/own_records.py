"""What one operator's config decides: the records that can change with it, of every operator, one list behind the other.

A change of one operator's config moves

* its own tasks, inner collectives, and the layouts of its accesses and of the parameters that it owns;
* the home layout of tensors that it writes, reads first or owns, or whose common layout as summands it
  decides, and so every conversion of them;
* its own conversions of tensors that others write;
* who pays for a copy that several readers share, in every group of readers of which one wants another layout now: these
  readers are *keyed*.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
from jax import Array

from soapjax.costs.arrays import NONE, Bucket, Records, padded, slot_masks
from soapjax.costs.tables import CostTables


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


SMALL = OwnSizes(96, 16, 32, 128, 64, 8192, 1024, 1536, 12288, 6144, 6144)
LARGE = OwnSizes(512, 32, 64, 512, 256, 32768, 2048, 6144, 49152, 24576, 24576)


def own_sizes_for(need: OwnSizes) -> OwnSizes:
    usual = SMALL if all(n <= u for n, u in zip(need, SMALL, strict=True)) else LARGE
    return OwnSizes(*(u if n <= u else 1 << (n - 1).bit_length() for n, u in zip(need, usual, strict=True)))


class _Lists(NamedTuple):
    """One operator's."""

    task: list[int]
    access: list[int]
    parameter: list[int]
    others: list[int]  # slots that other operators decide
    tensor: list[int]
    edge: list[int]
    keyed: set[int]
    work: list[int]
    sum: list[int]


def _lists(tables: CostTables) -> list[_Lists]:
    graph = tables.graph
    num_u, num_p = len(tables.access_op), len(tables.parameter_op)
    by_op = {name: defaultdict(list) for name in ("access", "parameter", "task", "work", "sum")}
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
    edge_tensor, edge_slot = tables.edge_tensor.tolist(), tables.edge_slot.tolist()
    for e, (tensor, slot) in enumerate(zip(edge_tensor, edge_slot, strict=True)):
        edges_of_tensor[tensor].append(e)
        edges_of_slot[slot].append(e)
    made, reader, common = tables.tensor_slot.tolist(), tables.tensor_reader.tolist(), tables.tensor_sum.tolist()
    for i, slot in enumerate(made):
        tensors_of_slot[slot].append(i)
        if common[i] >= 0:
            tensors_of_slot[common[i]].append(i)
        if tables.may_be_partial[i]:
            tensors_of_slot[reader[i]].append(i)
    found = []
    for n in range(graph.num_operators):
        access, parameter = by_op["access"][n], by_op["parameter"][n]
        own = {*access, *(num_u + p for p in parameter), *(num_u + num_p + p for p in parameter)}
        moved = sorted({i for s in own for i in tensors_of_slot[s]})
        owned = {graph.parameters[p].tensor for p in parameter}
        keyed = {e for s in own for e in edges_of_slot[s]} | {e for i in owned for e in edges_of_tensor[i]}
        edges = sorted(keyed | {e for i in moved for e in edges_of_tensor[i]})
        tensors = sorted({*moved, *(edge_tensor[e] for e in edges)})
        needed = {s for i in tensors for s in (made[i], reader[i], common[i]) if s >= 0} | {edge_slot[e] for e in edges}
        found.append(
            _Lists(
                by_op["task"][n], access, parameter, sorted(needed - own), tensors, edges, keyed, by_op["work"][n], by_op["sum"][n],
            )
        )  # fmt: skip
    return found


def own_records(tables: CostTables, b: Bucket) -> tuple[OwnRecords, OwnSizes]:
    """Of a problem in a bucket."""
    lists, masks = _lists(tables), slot_masks(tables, b)
    num_u, num_p, num_t = len(tables.access_op), len(tables.parameter_op), len(tables.tensor_bytes)
    num_e, replicated = len(tables.edge_task), num_u + 2 * num_p
    group_of, groups = tables.edge_group.tolist(), tables.reader_groups()
    member_first = np.cumsum([0, *map(len, groups)]).tolist()
    place_in = {e: i for some in groups for i, e in enumerate(some)}
    number_of = {g: i for i, g in enumerate(dict.fromkeys(group_of))}  # in the order of `reader_groups`
    made, reader, common = tables.tensor_slot.tolist(), tables.tensor_reader.tolist(), tables.tensor_sum.tolist()
    edge_tensor, edge_slot = tables.edge_tensor.tolist(), tables.edge_slot.tolist()
    slot, sizes, global_slot, parameter, task, row, is_keyed, group, keyed = ([] for _ in range(9))
    spans = np.zeros((b.operators, 5, 2), np.int32)
    longest = np.zeros(5, int)
    nothing = [0] * b.width
    access_mask, sum_mask, work_mask = masks.access.tolist(), masks.sum.tolist(), masks.work.tolist()
    for n, of in enumerate(lists):
        starts = [len(x) for x in (slot, parameter, task, row, group)]
        tasks = {k: j for j, k in enumerate(of.task)}
        places: dict[int, int] = {replicated: 0}
        count = 1

        def place(name: int) -> int:
            nonlocal count
            if name not in places:
                places[name] = count
                count += 1
            return places[name]

        for p in of.parameter:
            place(num_u + p), place(num_u + num_p + p)
        for u in of.access:
            slot.append([*access_mask[u], NONE, place(u), tasks[int(tables.access_task[u])], 0])
            sizes.append([tables.access_bytes[u], 0])
            global_slot.append(u)
        for s in of.others:
            if s != replicated:
                slot.append([*nothing, s, place(s), NONE, 0])
                sizes.append([0, 0])
                global_slot.append(NONE)
        for s in of.sum:
            slot.append([*sum_mask[s], NONE, place(replicated + 1 + s), NONE, 0])
            sizes.append([0, 0])
            global_slot.append(replicated + 1 + s)
        for w in of.work:
            slot.append([*work_mask[w], NONE, NONE, tasks[int(tables.work_task[w])], 0])
            sizes.append([0, tables.work_seconds[w]])
            global_slot.append(NONE)
        for p in of.parameter:
            first = int(tables.parameter_slot[p])
            parameter.append([p, places.get(first, 0) if first != num_u else 0, places[num_u + p], places[num_u + num_p + p], 0,
                              num_u + p, num_u + num_p + p])
        updated = {p: j for j, p in enumerate(of.parameter)}
        for k in of.task:
            task.append([k, updated.get(int(tables.task_parameter[k]), NONE), 0])

        def at(s: int) -> int:
            return places[s] if s >= 0 else 0

        begin = len(row)
        for i in of.tensor:
            row.append([i, at(made[i]), at(reader[i]), at(common[i]), 0, 0])
        row_of_edge = {}
        for e in of.edge:
            i = edge_tensor[e]
            row_of_edge[e] = len(row) - begin
            row.append([num_t + e, at(made[i]), at(reader[i]), at(common[i]), at(edge_slot[e]), 0])
        for s in of.sum:
            row.append([num_t + num_e + s, places[replicated + 1 + s], 0, 0, 0, 0])
        is_keyed += [False] * len(of.tensor) + [e in of.keyed for e in of.edge] + [False] * len(of.sum)
        touched: dict[int, list[int]] = defaultdict(list)
        for e in of.keyed:
            touched[number_of[group_of[e]]].append(e)
        for g, some in sorted(touched.items()):
            some.sort(key=place_in.__getitem__)
            group.append([member_first[g], len(groups[g]), len(keyed), len(some)])
            keyed += [row_of_edge[e] for e in some]
        ends = [len(x) for x in (slot, parameter, task, row, group)]
        spans[n, :, 0] = starts
        spans[n, :, 1] = np.subtract(ends, starts)
        longest = np.maximum(longest, [count, *spans[n, 1:4, 1], sum(len(groups[g]) for g in touched)])
    totals = [len(x) for x in (slot, parameter, task, row, group, keyed)]
    need = OwnSizes(longest[0], *longest[1:4], min(longest[4], num_e), *totals)
    found = own_sizes_for(OwnSizes(*map(int, need)))
    width = b.width
    slot_array = np.array(slot, np.int32).reshape(-1, width + 4)
    slot_array[slot_array[:, width + 1] == NONE, width + 1] = found.slots  # places that nobody reads
    slot_array[slot_array[:, width + 2] == NONE, width + 2] = found.tasks

    def ints(x: list, count: int, columns: int) -> np.ndarray:
        return padded(np.array(x, np.int32).reshape(-1, columns), count + 1)

    records = Records(
        padded(slot_array, found.all_slots + 1), padded(np.array(sizes, np.float32).reshape(-1, 2), found.all_slots + 1),
        ints(parameter, found.all_parameters, 7), ints(task, found.all_tasks, 3), ints(row, found.all_rows, 6),
    )  # fmt: skip
    return OwnRecords(
        records, spans, padded(np.array(global_slot, np.int32), found.all_slots + 1, NONE),
        padded(np.array(is_keyed, bool), found.all_rows + 1, False), ints(group, found.all_groups, 4),
        padded(np.array(keyed, np.int32), found.all_keyed + 1),
    ), found  # fmt: skip
