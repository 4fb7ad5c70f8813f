"""The exact costs of changing one operator's config, from the costs of the strategy as it is.

`Base` holds every summand of the costs of one strategy; `change` computes anew only those that one operator decides
(local.py), for one candidate config, and `apply` writes them back. Vmapped over candidates, everything that
does not depend on the candidate is computed once. Both equal evaluate.py on the whole strategy, which is their oracle.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from soapjax.costs.conversion import Links, conversion_cost, conversion_seconds
from soapjax.costs.evaluate import Costs
from soapjax.costs.halos import halo_cost, inner_source, inner_target
from soapjax.costs.indexing import put, rows
from soapjax.costs.indexing import row as one_row
from soapjax.costs.layouts import (
    as_read,
    gradient_layouts,
    holders,
    home_layouts,
    is_held_split,
    is_sent,
    passing_bytes,
    split_of,
    storage_layouts,
    summed_layouts,
    value_index,
    waiting_bytes,
    with_pins,
)
from soapjax.costs.local import LocalTables, Sharing, sharing
from soapjax.costs.measured import log_degrees, measured_ratio, point_of
from soapjax.costs.sent import by_groups, sent_rows
from soapjax.costs.shared_copies import keys_of, made_again, sharing_after
from soapjax.costs.tables import CostTables
from soapjax.strategy.layout import REPLICATED
from soapjax.strategy.space import NOT_FIXED


class Arrays(NamedTuple):
    """What `change` reads of the cost tables, each with a row behind the last that means "nothing". Letters as in CostTables."""

    access_map: Array  # int8 [U + 1, D + 1]
    access_bytes: Array  # [U + 1]
    work_seconds: Array  # [W + 1]
    work_split: Array  # bool [W + 1, D + 1]
    sum_bytes: Array  # [S + 1]
    sum_map: Array  # int8 [S + 1, D + 1]
    sum_trips: Array  # [S + 1]
    task_trips: Array  # [K + 1]
    update_bytes: Array  # [K + 1]
    measured_degrees: Array  # [K + 1, M, D]
    measured_log_ratio: Array  # [K + 1, M]
    measured_weight: Array  # [K + 1, M]
    tensor_source: Array  # int32 [T + 1]
    tensor_fixed: Array  # int8 [T + 1, A]
    is_joint: Array  # bool [T + 1]
    tensor_shape: Array  # int32 [T + 1, R]
    tensor_bytes: Array  # [T + 1]
    resolve_bytes: Array  # [T + 1]
    tensor_copies: Array  # [T + 1]
    resolve_trips: Array  # [T + 1]: 0 where it is never partial
    resolve_share: Array  # [T + 1]
    birth: Array  # int32 [T + 1]
    death: Array  # int32 [T + 1]: -1 where it is counted elsewhere
    at_least: Array  # int32 [T + 1]: until when it is kept also where its readers share a copy
    is_product: Array  # bool [T + 1]
    waits: Array  # bool [T + 1]: from its birth on it only waits for its parameter's update
    most_waiting: Array  # [2]: of what waits, as much is alive at once
    operand_share: Array  # [2]
    merged_at: Array  # int32
    edge_bytes: Array  # [E + 1]
    edge_trips: Array  # [E + 1]
    edge_share: Array  # [E + 1]
    edge_task: Array  # int32 [E + 1]
    read_at: Array  # int32 [E + 1]: its reader in the order of what is alive
    made_at: Array  # int32 [E + 1]
    edge_tensor: Array  # int32 [E + 1]
    storage_dim: Array  # int32 [P + 1]
    storage_dim_size: Array  # int32 [P + 1]
    storage_fixed: Array  # int8 [P + 1, A]
    gradient_shift: Array  # int32 [P + 1]
    state_bytes: Array  # [P + 1]: of a parameter with its optimizer state
    storage_masks: Array  # bool [O, A]
    storage_regather: Array  # bool [O]
    row: Array  # int32 [E + 1, R]: see Sharing
    column: Array  # int32 [E + 1]
    group: Array  # int32 [E + 1]
    is_backward: Array  # bool [E + 1]
    coordinates: Array  # int8 [G, A]


class Machine(NamedTuple):
    """Figures that are part of the compiled program."""

    links: Links
    memory_bytes_per_s: float
    launch_s: float
    pins: bool
    sums_in_place: bool
    combine_bytes: float
    num_edges: int  # as in CostTables
    wants_bytes: bool  # that are sent


class Base(NamedTuple):
    """Every summand of one strategy's costs; a pad row each. Holders are [.., 1] and all true without pins."""

    axes: Array  # int8 [N, A]
    storage: Array  # int8 [N]
    slots: Array  # int8 [U + 2P + 1, A]
    key: Array  # int32 [E + 1, W]
    since: Array  # int32 [E + 1]: the task after the last reader of the same copy, 0 where this reader pays
    compute_s: Array  # [K + 1]
    resolve_s: Array  # [T + 1, L]
    convert_s: Array  # [E + 1, L]: as if no copy were shared
    sum_s: Array  # [S + 1, L]
    held: Array  # [T + 1]
    copy: Array  # [E + 1]
    passing: Array  # [T + 1]
    waiting: Array  # [T + 1, 2]
    stored: Array  # [P + 1]
    sent: Array  # bool [E + 1]: makes a copy of its own
    on_compute: Array  # bool [K + 1, G]
    on_resolve: Array  # bool [T + 1, G]
    on_convert: Array  # bool [E + 1, G]
    on_sum: Array  # bool [S + 1, G]
    on_home: Array  # bool [T + 1, G]
    on_copy: Array  # bool [E + 1, G]
    on_stored: Array  # bool [P + 1, G]
    # Bytes that a device of each group sends, as if paid for; [.., 0] where nobody asks.
    resolve_sent: Array  # [T + 1, G]
    convert_sent: Array  # [E + 1, G]
    sum_sent: Array  # [S + 1, G]


class Change(NamedTuple):
    """What one candidate of one operator makes of its entries; letters as in LocalTables, o keyed conversions."""

    slots: Array  # int8 [u + 2p, A]
    key: Array  # int32 [o, W]
    since: Array  # int32 [e]
    compute_s: Array  # [k]
    resolve_s: Array  # [t, L]
    convert_s: Array  # [e, L]
    sum_s: Array  # [s, L]
    held: Array  # [t]
    copy: Array  # [e]
    passing: Array  # [t]
    waiting: Array  # [t, 2]
    stored: Array  # [p]
    sent: Array  # bool [e]
    heir: Array  # int32 [2o]: conversions of others that inherit a payment, or lose it; E where there is none
    heir_since: Array  # int32 [2o]
    on_compute: Array  # bool [k, G]
    on_resolve: Array  # bool [t, G]
    on_convert: Array  # bool [e, G]
    on_sum: Array  # bool [s, G]
    on_home: Array  # bool [t, G]
    on_copy: Array  # bool [e, G]
    on_stored: Array  # bool [p, G]
    resolve_sent: Array  # [t, G]
    convert_sent: Array  # [e, G]
    sum_sent: Array  # [s, G]


def arrays_of(tables: CostTables, *, wants_bytes: bool = False) -> tuple[Arrays, Machine]:
    shares: Sharing = sharing(tables)

    def padded(x: np.ndarray, value=0) -> np.ndarray:
        return np.concatenate([x, np.full((1, *x.shape[1:]), value, x.dtype)])

    sum_trips = tables.task_trips[tables.sum_task] if len(tables.sum_task) else np.zeros(0, np.float32)
    arrays = Arrays(
        access_map=padded(tables.access_map, REPLICATED), access_bytes=padded(tables.access_bytes),
        work_seconds=padded(tables.work_seconds), work_split=padded(tables.work_split),
        sum_bytes=padded(tables.sum_bytes), sum_map=padded(tables.sum_map, REPLICATED),
        sum_trips=padded(sum_trips), task_trips=padded(tables.task_trips), update_bytes=padded(tables.update_bytes),
        measured_degrees=padded(tables.measured.degrees), measured_log_ratio=padded(tables.measured.log_ratio),
        measured_weight=padded(tables.measured.weight),
        tensor_source=padded(tables.tensor_source), tensor_fixed=padded(tables.tensor_fixed, REPLICATED),
        is_joint=padded(tables.is_joint), tensor_shape=padded(tables.tensor_shape, 1), tensor_bytes=padded(tables.tensor_bytes),
        resolve_bytes=padded(tables.resolve_bytes),
        tensor_copies=padded(tables.tensor_copies), resolve_trips=padded(tables.tensor_trips * tables.may_be_partial),
        resolve_share=padded(tables.resolve_share), birth=padded(tables.order.since), death=padded(tables.order.until, -1),
        at_least=padded(tables.order.at_least, -1), made_at=padded(tables.order.made_at),
        edge_tensor=padded(tables.edge_tensor, len(tables.tensor_bytes)),
        is_product=padded(tables.is_product), waits=padded(tables.working.waits),
        most_waiting=tables.working.most_waiting, operand_share=tables.working.operand_share,
        merged_at=np.int32(tables.working.merged_at),
        edge_bytes=padded(tables.edge_bytes), edge_trips=padded(tables.edge_trips), edge_share=padded(tables.edge_share),
        edge_task=padded(tables.edge_task), read_at=padded(tables.order.read_at), storage_dim=padded(tables.storage_dim),
        storage_dim_size=padded(tables.storage_dim_size, 1), storage_fixed=padded(tables.storage_fixed, NOT_FIXED),
        gradient_shift=padded(tables.gradient_shift), state_bytes=padded(tables.parameter_bytes * tables.state_copies),
        storage_masks=tables.storage_masks, storage_regather=tables.storage_regather,
        row=shares.row, column=shares.column, group=padded(tables.edge_group, -1),
        is_backward=padded(tables.edge_is_backward), coordinates=np.asarray(tables.space.groups),
    )  # fmt: skip
    return jax.device_put(arrays), Machine(
        tables.links, tables.rates.memory_bytes_per_s, tables.rates.launch_s, tables.space.offers_pins,
        tables.working.sums_in_place, tables.working.combine_bytes, tables.num_edges, wants_bytes,
    )  # fmt: skip


def base_of(tables: CostTables, costs: Costs, axes: Array, storage: Array, *, wants_bytes: bool = False) -> Base:
    """The summands of a strategy from its costs by `evaluator`."""
    parts, found = costs.parts, costs.layouts
    num_e = len(tables.edge_task)
    again = made_again(tables, storage, np.arange(num_e))
    num_groups = len(tables.space.groups)

    def padded(x: Array) -> Array:
        return jnp.concatenate([x, jnp.zeros((1, *x.shape[1:]), x.dtype)])

    def on(name: str, count: int) -> Array:
        mask = jnp.ones((count, num_groups), bool) if costs.holders is None else getattr(costs.holders, name)
        return padded(mask)

    d = costs.durations
    if wants_bytes:
        sent = sent_rows(tables, found, axes)
    else:
        sent = tuple(jnp.zeros((count, 0)) for count in (len(tables.tensor_bytes), num_e, len(tables.sum_task)))
    return Base(
        axes, storage, found.slots, padded(keys_of(found.slots[tables.edge_slot], again)), padded(found.shared_since),
        padded(d.compute_s), padded(d.resolve_s), padded(parts.convert_s), padded(d.sum_s), padded(parts.held_bytes),
        padded(parts.copy_bytes), padded(parts.passing_bytes), padded(parts.waiting_bytes), padded(parts.stored_bytes),
        padded(parts.is_sent), on("compute", tables.num_tasks), on("resolve", len(tables.tensor_bytes)), on("convert", num_e),
        on("sum", len(tables.sum_task)), on("home", len(tables.tensor_bytes)), on("copy", num_e),
        on("stored", len(tables.parameter_op)), *map(padded, sent),
    )  # fmt: skip


def change(
    arrays: Arrays, machine: Machine, num: tuple[int, int], row: LocalTables, base: Base, axes: Array, storage: Array
) -> Change:
    """The entries of the operator of `row` under config (`axes` int8 [A], `storage` int8) beside the rest of `base`.

    `num` is the class' `sizes` (local.py).
    """
    sizes = np.array(machine.links.axis_sizes)
    index = value_index(axes)
    own = rows(rows(arrays.access_map, row.access).T, index).T
    if machine.pins:
        own = with_pins(own, axes)
    none = jnp.full((1, len(sizes)), REPLICATED, jnp.int8)
    p = row.parameter
    as_used = rows(jnp.concatenate([own, none]), jnp.where(row.parameter_first < 0, len(own), row.parameter_first))
    masks = jnp.broadcast_to(one_row(arrays.storage_masks, storage.astype(jnp.int32)), as_used.shape)
    stored = storage_layouts(
        as_used, masks, rows(arrays.storage_dim, p), rows(arrays.storage_dim_size, p), rows(arrays.storage_fixed, p), sizes
    )  # fmt: skip
    slots = jnp.concatenate([own, stored, gradient_layouts(stored, rows(arrays.gradient_shift, p))])
    every = jnp.concatenate([slots, rows(base.slots, row.other_slot)])
    t = row.tensor
    shape = rows(arrays.tensor_shape, t)
    raw, home = home_layouts(
        rows(every, row.tensor_slot), rows(every, row.tensor_reader), rows(arrays.tensor_source, t), rows(arrays.tensor_fixed, t),
        shape, sizes,
    )  # fmt: skip
    common = rows(every, jnp.maximum(row.tensor_sum, 0))
    home, resolved = summed_layouts(raw, home, common, row.tensor_sum >= 0, rows(arrays.is_joint, t))

    # Compute: sums over few entries, as products with one-hot matrices.
    num_tasks = len(row.task)
    of_access = row.access_task == jnp.arange(num_tasks)[:, None]
    moved = jnp.where(of_access, rows(arrays.access_bytes, row.access) / split_of(own >= 0, sizes), 0.0).sum(1)
    of_work = row.work_task == jnp.arange(num_tasks)[:, None]
    work = rows(arrays.work_seconds, row.work) / split_of(rows(rows(arrays.work_split, row.work).T, index).T, sizes)
    flop_s = jnp.where(of_work, work, 0.0).sum(1)
    shards = split_of(stored >= 0, sizes)
    is_update = row.task_parameter >= 0
    updated = jnp.maximum(row.task_parameter, 0)
    update_split = rows(shards, updated)
    flop_s = jnp.where(is_update, flop_s / update_split, flop_s)
    moved = jnp.where(is_update, rows(arrays.update_bytes, row.task) / update_split, moved)
    compute_s = (jnp.maximum(flop_s, moved / machine.memory_bytes_per_s) + machine.launch_s) * rows(arrays.task_trips, row.task)

    if arrays.measured_weight.shape[1]:
        num_dims = arrays.measured_degrees.shape[-1]
        at = jnp.broadcast_to(log_degrees(axes, machine.links.axis_sizes, num_dims), (num_tasks, num_dims))
        points = (rows(x, row.task) for x in (arrays.measured_degrees, arrays.measured_log_ratio, arrays.measured_weight))
        compute_s *= measured_ratio(*points, point_of(at, update_split, is_update))

    # Communication.
    e, s = row.edge, row.sum
    edge_home = rows(home, row.edge_tensor)
    wanted = rows(every, row.edge_slot)
    target = as_read(edge_home, wanted)
    inner = rows(rows(arrays.sum_map, s).T, index).T  # [s, A]
    of_conversions = (
        jnp.concatenate([raw, edge_home, inner_source(inner)]),
        jnp.concatenate([resolved, target, inner_target(inner)]),
        jnp.concatenate([rows(arrays.resolve_bytes, t), rows(arrays.edge_bytes, e), rows(arrays.sum_bytes, s)]), machine.links,
        jnp.concatenate([rows(arrays.resolve_share, t), rows(arrays.edge_share, e), jnp.ones(len(s), jnp.float32)]),
    )  # fmt: skip
    shapes = jnp.concatenate([shape, rows(shape, row.edge_tensor), jnp.zeros((len(s), shape.shape[1]), jnp.int32)])
    if machine.wants_bytes:
        every = conversion_cost(*of_conversions, shape=shapes, pins=machine.pins)
        full_s = every.seconds
    else:
        full_s = conversion_seconds(*of_conversions, shape=shapes, pins=machine.pins)
    trips = jnp.concatenate([rows(arrays.resolve_trips, t), rows(arrays.edge_trips, e), rows(arrays.sum_trips, s)])
    seconds = full_s * trips[:, None]
    resolve_s, convert_s, sum_s = jnp.split(seconds, [len(t), len(t) + len(e)])
    borders = halo_cost(inner, rows(arrays.sum_bytes, s), machine.links, machine.num_edges)
    sum_s += borders.seconds * rows(arrays.sum_trips, s)[:, None]

    again = one_row(arrays.storage_regather, storage.astype(jnp.int32)) & rows(arrays.is_backward, e) & (row.edge_again >= 0)
    other_again = (rows(base.key, e)[:, 0] >= 1 << 30) & (row.edge_again < 0)
    key = keys_of(wanted, again | other_again)[: num[1]]
    since, heir, heir_since = sharing_after(arrays, num, e, base, key)

    local = rows(arrays.resolve_bytes, t) / split_of(raw >= 0, sizes)
    on_op = holders(with_pins(jnp.full_like(axes, REPLICATED), axes), arrays.coordinates)
    on_home, on_copy, on_stored = (holders(x, arrays.coordinates) for x in (home, target, stored))
    on_made, on_sum = holders(raw, arrays.coordinates), jnp.broadcast_to(on_op, (len(s), len(on_op)))
    if machine.wants_bytes:
        early_on = jnp.concatenate([on_made, rows(on_home, row.edge_tensor), on_sum])
        sent = by_groups(every, trips, early_on, jnp.concatenate([on_made, on_copy, on_sum]))
        resolve_sent, convert_sent, sum_sent = jnp.split(sent, [len(t), len(t) + len(e)])
        sum_sent += (borders.bytes.sum(-1) * rows(arrays.sum_trips, s))[:, None] * on_sum
    else:
        resolve_sent, convert_sent, sum_sent = (jnp.zeros((len(x), 0)) for x in (t, e, s))
    return Change(
        slots, key, since, compute_s, resolve_s, convert_s, sum_s,
        held=rows(arrays.tensor_bytes, t) * rows(arrays.tensor_copies, t) / split_of(is_held_split(raw, home), sizes),
        copy=jnp.where((edge_home != target).any(-1), rows(arrays.edge_bytes, e) / split_of(target >= 0, sizes), 0.0),
        passing=passing_bytes(raw, resolved, local, rows(arrays.is_product, t), sizes, in_place=machine.sums_in_place),
        waiting=waiting_bytes(raw, resolved, local, rows(arrays.waits, t), machine.combine_bytes, sizes),
        stored=rows(arrays.state_bytes, p) / shards, sent=is_sent(edge_home, target),
        heir=heir, heir_since=heir_since,
        on_compute=jnp.where(is_update[:, None], rows(on_stored, updated), on_op), on_resolve=on_made,
        on_convert=rows(on_home, row.edge_tensor) | on_copy, on_sum=on_sum,
        on_home=on_home, on_copy=on_copy, on_stored=on_stored,
        resolve_sent=resolve_sent, convert_sent=convert_sent, sum_sent=sum_sent,
    )  # fmt: skip


def apply(row: LocalTables, num_keyed: int, n: Array, axes: Array, storage: Array, base: Base, found: Change) -> Base:
    """`base` after operator `n` took the config that `found` was computed for."""
    num_p = len(base.stored) - 1
    last = len(base.slots) - 1  # the replicated slot: pads are written there, and it stays replicated
    num_u = last - 2 * num_p
    where = jnp.concatenate(
        [
            jnp.where(row.access < num_u, row.access, last),
            jnp.where(row.parameter < num_p, num_u + row.parameter, last),
            jnp.where(row.parameter < num_p, num_u + num_p + row.parameter, last),
        ]
    )
    slots = put(base.slots, where, found.slots).at[last].set(REPLICATED)
    e, t, k, p, s = row.edge, row.tensor, row.task, row.parameter, row.sum
    return base._replace(
        axes=put(base.axes, n, axes), storage=put(base.storage, n, storage), slots=slots,
        key=put(base.key, e[:num_keyed], found.key),
        since=put(put(base.since, found.heir, found.heir_since), e, found.since),
        compute_s=put(base.compute_s, k, found.compute_s), resolve_s=put(base.resolve_s, t, found.resolve_s),
        convert_s=put(base.convert_s, e, found.convert_s), sum_s=put(base.sum_s, s, found.sum_s),
        held=put(base.held, t, found.held), copy=put(base.copy, e, found.copy),
        passing=put(base.passing, t, found.passing), waiting=put(base.waiting, t, found.waiting),
        stored=put(base.stored, p, found.stored), sent=put(base.sent, e, found.sent),
        on_compute=put(base.on_compute, k, found.on_compute), on_resolve=put(base.on_resolve, t, found.on_resolve),
        on_convert=put(base.on_convert, e, found.on_convert), on_sum=put(base.on_sum, s, found.on_sum),
        on_home=put(base.on_home, t, found.on_home), on_copy=put(base.on_copy, e, found.on_copy),
        on_stored=put(base.on_stored, p, found.on_stored),
        resolve_sent=put(base.resolve_sent, t, found.resolve_sent), convert_sent=put(base.convert_sent, e, found.convert_sent),
        sum_sent=put(base.sum_sent, s, found.sum_sent),
    )  # fmt: skip
