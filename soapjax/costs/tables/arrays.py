"""A planning problem as arrays of one of a few sizes: all that the cost program reads, nothing that is compiled into it.

What a strategy decides is computed from *records*, each with the numbers of what it gathers:

* a *slot* is a layout that one operator's config decides: an access, the middle of a collective inside a task, and a work item,
  whose seconds it divides;
* a *parameter* has three slots more, as it is stored, its gradient, and what the backward pass gathers again;
* a *task* sums up its slots' bytes and seconds;
* a *row* is what may be sent: a tensor as it is resolved, a reshard for a reader, a collective inside a task.

The records of the whole graph are one list (`records_of`), and those of what one operator's config can change another
(operator_records.py); the rules read either. Sizes are padded to those of a `Bucket`, so that problems share what is compiled.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from soapjax.costs.rules.reshard_cost import Network, network_of
from soapjax.costs.rules.sets import DIGITS, Mesh, encoded, mesh_of
from soapjax.costs.tables.buckets import Bucket
from soapjax.costs.tables.problem_tables import CostTables
from soapjax.costs.tables.tensor_tables import FROM_FIXED, FROM_READER
from soapjax.jit.array_types import Array, Scalar
from soapjax.strategy.layout import HALO, PARTIAL
from soapjax.strategy.space import NOT_FIXED

TENSOR, EDGE, SUM = range(3)  # kinds of rows
ROW_LAYOUTS = range(1, 5)  # of a row's record: the places of the layouts that its costs depend on
NONE = -1


class Records(NamedTuple):
    """What is computed, in this order; places of slots count in the buffer that they are computed into."""

    slot: Array  # int32 [n, W + 4]: op dims (bits) of each column; slot to copy (NONE), place, task, operator
    slot_float: Array  # float32 [n, 2]: bytes, seconds on one device
    # int32 [n, 8]: parameter, places of `CostTables.parameter_slots`, operator; of one operator's [n, 12]: and its own slots
    parameter: Array
    task: Array  # int32 [n, 3]: task, its parameter's place in the list (NONE), operator
    row: Array  # int32 [n, 6]: row, places as made, as first read, as summed in common, as wanted or left; operator of a sum


class CostArrays(NamedTuple):
    """Of one problem; a row behind the last of tensors, parameters and rows means "nothing"."""

    mesh: Mesh
    network: Network
    scalars: Array  # float32 [4]: memory bytes per second, launch seconds, up to which size sums are merged, unplaced bytes
    flags: Array  # int32 [1]: whether sums write over their operands
    waiting: Array  # float32 [2, 2]: most_waiting, operand_share, as in WorkingMemory
    merged_at: Scalar  # int32 []
    counts: Array  # int32 [8]: operators, parameters, tasks, tensors, edges, rows, slot records, slots
    divisors: Array  # int32 [N, K]
    group_digits: Array  # SET [DIGITS, G]: coordinates of device groups
    # tasks
    task_float: Array  # float32 [K + 1, 2]: trips, bytes of an update
    task_points: Array  # int32 [K + 1, 2]: first measured point and their number
    point: Array  # float32 [M, 1 + D]: log ratio, log2 of degrees (-1: any)
    # parameters
    # int32 [P + 1, 5]: dim of extra storage, its size, axes that are fixed, dims that the gradient lacks, whether a part is left
    parameter_int: Array
    parameter_fixed: Array  # SET [P + 1, W]
    state_bytes: Array  # float32 [P + 1]
    # SET [O, 3]: of what is stored, and of what the forward pass leaves; whether gradients are scattered before they are added up
    storage_axes: Array
    storage_again: Scalar  # int32 []: bits of the storages that are gathered again
    # rows
    # int32 [X + 1, 9]: kind, is_fixed, is_reader, is_summand, is_joint, is_product, waits, has halos, is_left
    row_int: Array
    row_float: Array  # float32 [X + 1, 4]: bytes sent, latency share, trips, bytes held
    row_shape: Array  # int32 [X + 1, D]
    row_fixed: Array  # SET [X + 1, W]
    row_class: Array  # int32 [X + 1]: a number for each set of rows that have all of the above alike
    # lifetimes of tensors
    tensor_life: Array  # int32 [T + 1, 5]: birth, death, at_least, first of its edges in `edges_of`, their number
    tensor_stops: Array  # int32 [T + 1, 2]: first in `stops` and their number: tasks at which it may end
    stops: Array  # int32 [n]
    edges_of: Array  # int32 [E]
    # reshards
    # int32 [E + 1, 6]: last and first task of its copy where it is not shared, edge_handed_on, slot wanted, read_at, made_at
    edge_life: Array
    edge_group: Array  # int32 [E + 1, 4]: first of its group in `members`, its place, number; operator whose storage gathers again
    members: Array  # int32 [E]

    @property
    def has_pins(self) -> bool:
        """Whether layouts have columns for pins: a property of the bucket."""
        return self.row_fixed.shape[1] > self.row_shape.shape[1] + 1


class Places(NamedTuple):
    """Where figures of a row stand: among those of tensors, of reshards, and of all rows; the last of a kind for what it is not."""

    tensor: Array
    edge: Array
    row: Array


def places_of(p: CostArrays, x: Array) -> Places:
    """Of row `x`."""
    num_t = p.counts[3]
    return Places(jnp.where(x < num_t, x, p.tensor_life.shape[0] - 1), edge_of(p, x), x)


def edge_of(p: CostArrays, x: Array) -> Array:
    """The reshard that row `x` is; for other rows the place behind the last."""
    num_t, num_e = p.counts[3], p.counts[4]
    return jnp.where((x >= num_t) & (x < num_t + num_e), x - num_t, p.edge_life.shape[0] - 1)


def need_of(tables: CostTables) -> Bucket:
    """The sizes of a problem."""
    space, links = tables.space, tables.links
    num_u, num_p, num_s = len(tables.access_op), len(tables.parameter_op), len(tables.sum_task)
    num_t, num_e = len(tables.tensor_bytes), len(tables.edge_task)
    return Bucket(
        operators=len(space.graph.operators), slots=tables.replicated_slot + 1 + num_s, parameters=num_p, tasks=tables.num_tasks,
        tensors=num_t, edges=num_e, rows=num_t + num_e + num_s, slot_records=num_u + num_s + len(tables.work_task) + 1,
        stops=2 * num_e + 3 * num_t, points=len(tables.measured.log_ratio),
        dims=max(tables.tensor_shape.shape[1], 1 + tables.num_edges), op_dims=space.allowed.shape[2] - 1, levels=links.num_levels,
        groups=len(space.groups) if space.offers_pins else 0,
    )  # fmt: skip


def padded(x: np.ndarray, count: int, value: float = 0) -> np.ndarray:
    """`x` with so many rows, of a list with at least one more than it holds."""
    return np.concatenate([x, np.full((count - len(x), *x.shape[1:]), value, x.dtype)])


def cost_arrays(tables: CostTables, b: Bucket) -> CostArrays:
    """The arrays of a problem in a bucket that holds it."""
    links, working, rates, n, f32 = tables.links, tables.working, tables.rates, need_of(tables), np.float32
    scalars = [rates.memory_bytes_per_s, rates.launch_s, tables.compiler.merged_bytes, tables.graph.unplaced_bytes]
    return CostArrays(
        mesh=mesh_of(links.axis_sizes), network=network_of(links, b.levels),
        scalars=np.array(scalars, f32),
        flags=np.array([tables.compiler.sums_in_place], np.int32),
        waiting=np.stack([working.most_waiting, working.operand_share]).astype(f32),
        merged_at=np.int32(working.merged_at),
        counts=np.array([n.operators, n.parameters, n.tasks, n.tensors, n.edges, n.rows, n.slot_records, n.slots], np.int32),
        storage_again=np.int32(sum(1 << i for i, x in enumerate(tables.storage_again) if x)),
        **_axes(tables, b), **_tasks(tables, b), **_parameters(tables, b), **_rows(tables, b), **_tensor_lives(tables, b),
        **_reshards(tables, b),
    )  # fmt: skip


def _axes(tables: CostTables, b: Bucket) -> dict[str, np.ndarray]:
    """Dims by operator, and coordinates by device group."""
    space = tables.space
    divisors = np.ones((b.operators, b.op_dims), np.int32)
    divisors[: len(space.divisors), : space.divisors.shape[1]] = space.divisors
    digits = np.zeros((DIGITS, max(b.groups, 1)), np.int16)
    if b.groups:
        bit = 1 << np.arange(len(tables.links.axis_sizes))
        of_groups = [((space.groups.astype(int) >> i & 1) * bit).sum(1) for i in range(DIGITS)]
        digits[:, : len(space.groups)] = of_groups
        digits[:, len(space.groups) :] = digits[:, :1]  # groups that do not exist do what the first one does
    return {"divisors": divisors, "group_digits": digits}


def _tasks(tables: CostTables, b: Bucket) -> dict[str, np.ndarray]:
    """Tasks, and what was measured of them."""
    number, degrees, log_ratio = tables.measured
    points = np.full((b.points + 1, 1 + b.op_dims), -1, np.float32)
    points[: len(degrees), 0], points[: len(degrees), 1 : 1 + degrees.shape[1]] = log_ratio, degrees
    return {
        "task_float": padded(np.stack([tables.task_trips, tables.update_bytes], 1).astype(np.float32), b.tasks + 1),
        "task_points": padded(np.stack([np.cumsum(number) - number, number], 1).astype(np.int32), b.tasks + 1),
        "point": points,
    }


def _parameters(tables: CostTables, b: Bucket) -> dict[str, np.ndarray]:
    is_fixed = tables.storage_fixed != NOT_FIXED
    bits = (1 << np.arange(len(tables.links.axis_sizes))).astype(np.int32)
    numbers = np.stack(
        [tables.storage_dim, tables.storage_dim_size, (is_fixed * bits).sum(1), tables.gradient_shift, tables.is_left], 1
    )  # fmt: skip
    masks = np.stack([tables.storage_masks, tables.storage_left], 1)
    fixed = encoded(np.where(is_fixed, tables.storage_fixed, -1), b.dims, bool(b.groups))
    return {
        "parameter_int": padded(numbers.astype(np.int32), b.parameters + 1),
        "parameter_fixed": padded(fixed, b.parameters + 1),
        "state_bytes": padded((tables.parameter_bytes * tables.state_copies).astype(np.float32), b.parameters + 1),
        "storage_axes": padded(np.column_stack([(masks * bits).sum(2), tables.storage_scatters]).astype(np.int16), 32),
    }


def _rows(tables: CostTables, b: Bucket) -> dict[str, np.ndarray]:
    """What may be sent: tensors as they are resolved, then reshards, then collectives inside tasks."""
    num_t, num_e, num_s = len(tables.tensor_bytes), len(tables.edge_task), len(tables.sum_task)
    edges = slice(num_t, num_t + num_e)
    of_tensor = np.stack(
        [np.full(num_t, TENSOR), tables.tensor_source == FROM_FIXED, tables.tensor_source == FROM_READER, tables.tensor_sum >= 0,
         tables.is_joint, tables.is_product, tables.working.waits], 1,
    )  # fmt: skip
    numbers = np.zeros((num_t + num_e + num_s, 9), np.int32)
    numbers[:num_t, :7] = of_tensor
    numbers[edges, :7] = of_tensor[tables.edge_tensor]
    numbers[edges, 0] = EDGE
    numbers[:num_t, 8] = tables.left_slot >= 0
    numbers[num_t + num_e :, 0] = SUM
    numbers[num_t + num_e :, 7] = (tables.sum_map <= HALO).any(1)
    sum_trips = tables.task_trips[tables.sum_task] if num_s else np.zeros(0, np.float32)
    figures = np.stack(
        [
            np.concatenate([tables.resolve_bytes, tables.edge_bytes, tables.sum_bytes]),
            np.concatenate([tables.resolve_share, tables.edge_share, np.ones(num_s)]),
            np.concatenate([tables.tensor_trips * tables.may_be_partial, tables.edge_trips, sum_trips]),
            np.concatenate([tables.held_bytes, np.zeros(num_e + num_s)]),
        ], 1,
    ).astype(np.float32)  # fmt: skip
    shape = np.zeros((len(numbers), b.dims), np.int32)
    shape[:num_t] = 1
    shape[:num_t, : tables.tensor_shape.shape[1]] = tables.tensor_shape
    shape[edges] = shape[tables.edge_tensor]
    fixed = np.zeros((len(numbers), b.width), np.int16)
    fixed[:num_t] = encoded(np.where(tables.tensor_fixed == NOT_FIXED, -1, tables.tensor_fixed), b.dims, bool(b.groups))
    fixed[edges] = fixed[tables.edge_tensor]
    found: dict[str, np.ndarray] = {"row_int": numbers, "row_float": figures, "row_shape": shape, "row_fixed": fixed}
    of_bytes = np.concatenate([x.view(np.uint8) for x in map(np.ascontiguousarray, found.values())], 1)
    found["row_class"] = distinct(of_bytes)[1].astype(np.int32)
    return {name: padded(x, b.rows + 1) for name, x in found.items()}


def distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of rows [n, m]: int [d], one of each that differs in its bytes, and int [n], which of these each row equals."""
    packed = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.shape[1] * rows.itemsize))).reshape(-1)
    _, first, index = np.unique(packed, return_index=True, return_inverse=True)
    return first, index


def _tensor_lives(tables: CostTables, b: Bucket) -> dict[str, np.ndarray]:
    """When tensors are there, and at which tasks each may end."""
    order, num_t = tables.order, len(tables.tensor_bytes)
    by_tensor = np.argsort(tables.edge_tensor, kind="stable").astype(np.int32)
    number = np.bincount(tables.edge_tensor, minlength=num_t)[:num_t]
    life = np.stack([order.since, order.until, order.at_least, np.cumsum(number) - number, number], 1).astype(np.int32)
    stops: list[int] = []
    tensor_stops = np.zeros((num_t, 2), np.int32)
    start = life[:, 3].tolist()
    for t in range(num_t):
        low, high = int(order.at_least[t]), int(order.until[t])
        own = by_tensor[start[t] : start[t] + number[t]]
        # np.clip where the lower bound is above the upper one gives the upper one.
        ends = np.minimum(np.maximum(np.concatenate([order.made_at[own], order.read_at[own], [NONE]]), low), high)
        found = {*ends.tolist(), int(order.since[t])} if tables.working.waits[t] else set(ends.tolist())
        tensor_stops[t] = len(stops), len(found)
        stops += sorted(found)
    return {
        "tensor_life": padded(life, b.tensors + 1), "tensor_stops": padded(tensor_stops, b.tensors + 1),
        "stops": padded(np.array(stops, np.int32), b.stops + 1), "edges_of": padded(by_tensor, b.edges + 1),
    }  # fmt: skip


def _reshards(tables: CostTables, b: Bucket) -> dict[str, np.ndarray]:
    """When copies are there, and which readers may share one."""
    order, last = tables.order, max(tables.num_tasks - 1, 0)
    read_at = np.minimum(order.read_at, last)
    life = np.stack(
        [read_at, np.minimum(order.made_at, read_at), tables.edge_handed_on, tables.edge_slot, order.read_at, order.made_at], 1
    ).astype(np.int32)
    group = np.zeros((len(tables.edge_task), 4), np.int32)
    members: list[int] = []
    owner = tables.parameter_op[np.maximum(tables.edge_parameter, 0)] if len(tables.parameter_op) else 0
    group[:, 3] = np.where(tables.may_gather_again, owner, NONE)
    for some in tables.reader_groups():
        for e in some:
            group[e, :3] = len(members), len(members) + some.index(e), len(some)
        members += some
    found = {"edge_life": life, "edge_group": group, "members": np.array(members, np.int32)}
    return {name: padded(x, b.edges + 1) for name, x in found.items()}


def op_dims_of(b: Bucket, column_of: np.ndarray) -> np.ndarray:
    """int32 [n, W]: the op dims (bits) whose axes come into each column, of rows [n, K + 1] of tensor dims by config value + 1."""
    found = np.zeros((len(column_of), b.width), np.int32)
    for k in range(column_of.shape[1] - 1):
        dim = column_of[:, k + 1].astype(int)
        for column, wanted in ((b.dims, dim == PARTIAL), *((d, dim == d) for d in range(b.dims))):
            found[:, column] |= wanted.astype(np.int32) << k
    return found


PINNED_BIT = 1 << 30  # in the columns of pins: they follow the operator's


class SlotMasks(NamedTuple):
    """int32 [n, W] each: of accesses, of collectives inside tasks, and of work items."""

    access: np.ndarray
    sum: np.ndarray
    work: np.ndarray


def slot_masks(tables: CostTables, b: Bucket) -> SlotMasks:
    access = op_dims_of(b, tables.access_map)
    halo_column = np.where(tables.sum_map <= HALO, 1 + HALO - tables.sum_map.astype(int), tables.sum_map)
    inner = op_dims_of(b, halo_column)
    work = op_dims_of(b, np.where(tables.work_split, 0, NONE))
    if b.groups:
        access[:, b.dims + 1 :] = PINNED_BIT
        inner[:, b.dims + 1 :] = PINNED_BIT
    return SlotMasks(access, inner, work)


def records_of(tables: CostTables, b: Bucket) -> Records:
    """Of the whole graph: slots lie in the order of `Layouts.slots`, and behind them the collectives inside tasks."""
    num_u, num_s = len(tables.access_op), len(tables.sum_task)
    num_t, num_e, i32 = len(tables.tensor_bytes), len(tables.edge_task), np.int32
    replicated, inner = tables.replicated_slot, tables.replicated_slot + 1
    nowhere = b.slots  # a place that nobody reads
    masks = slot_masks(tables, b)

    def slots(mask: np.ndarray, place, task: np.ndarray, op: np.ndarray) -> np.ndarray:
        n = len(mask)
        rest = np.stack([np.full(n, NONE), np.broadcast_to(place, n), task, op], 1)
        return np.concatenate([mask, rest], 1).astype(i32)

    sum_op = tables.task_op[tables.sum_task] if num_s else np.zeros(0, i32)
    work_op = tables.task_op[tables.work_task] if len(tables.work_task) else np.zeros(0, i32)
    slot = np.concatenate([
        slots(masks.access, np.arange(num_u), tables.access_task, tables.access_op),
        slots(masks.sum, inner + np.arange(num_s), np.full(num_s, b.tasks), sum_op),
        slots(masks.work, nowhere, tables.work_task, work_op),
        slots(np.zeros((1, b.width)), replicated, np.full(1, b.tasks), np.zeros(1)),
    ])  # fmt: skip
    sizes = np.zeros((len(slot), 2), np.float32)
    sizes[:num_u, 0], sizes[num_u + num_s : -1, 1] = tables.access_bytes, tables.work_seconds
    places = np.where(tables.parameter_slots < 0, nowhere, tables.parameter_slots)
    parameter = np.column_stack([np.arange(len(places)), places, tables.parameter_op]).astype(i32)
    task = np.stack([np.arange(tables.num_tasks), tables.task_parameter, tables.task_op], 1).astype(i32)
    row = np.zeros((num_t + num_e + num_s, 6), i32)
    row[:, 0] = np.arange(len(row))
    row[:num_t, 1], row[:num_t, 2] = tables.tensor_slot, tables.tensor_reader
    row[:num_t, 3] = np.where(tables.tensor_sum >= 0, tables.tensor_sum, replicated)
    row[:num_t, 4] = np.where(tables.left_slot >= 0, tables.left_slot, replicated)
    row[num_t : num_t + num_e, 1], row[num_t : num_t + num_e, 2:4] = tables.edge_source, row[tables.edge_tensor, 2:4]
    row[num_t : num_t + num_e, 4] = tables.edge_slot
    row[num_t + num_e :, 1], row[num_t + num_e :, 2:5] = inner + np.arange(num_s), replicated
    row[num_t + num_e :, 5] = sum_op
    return Records(
        padded(slot, b.slot_records + 1), padded(sizes, b.slot_records + 1), padded(parameter, b.parameters + 1),
        padded(task, b.tasks + 1), padded(row, b.rows + 1),
    )  # fmt: skip
