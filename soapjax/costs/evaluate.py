"""From a strategy to durations and memory, in jit, without a table per pair of configs.

`evaluator(tables)` gives a pure function of one strategy (axes [N, A], storage [N]);
`jax.vmap` makes it one of a batch. Steps: config values -> layout of every access ->
storage of every parameter -> home layout of every tensor (partial sums resolved towards
the first reader) -> local sizes -> seconds and bytes. `stages` gives the same in three functions, to be compiled side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from soapjax.costs.conversion import ConversionCost, conversion_cost
from soapjax.costs.halos import halo_cost, inner_source, inner_target
from soapjax.costs.indexing import add, along, rows
from soapjax.costs.layouts import (
    as_read,
    gradient_layouts,
    held_until,
    holders,
    home_layouts,
    is_held_split,
    is_sent,
    needed_until,
    passing_bytes,
    split_of,
    storage_layouts,
    summed_layouts,
    value_index,
    waiting_bytes,
    waiting_spans,
    with_pins,
)
from soapjax.costs.measured import log_degrees, measured_ratio, point_of
from soapjax.costs.shared_copies import shared_since
from soapjax.costs.tables import CostTables
from soapjax.strategy.layout import REPLICATED


class Durations(NamedTuple):
    """What the simulators schedule; L link levels, slowest first."""

    compute_s: Array  # [K]
    resolve_s: Array  # [T, L]
    convert_s: Array  # [E, L]
    sum_s: Array  # [S, L]


class Layouts(NamedTuple):
    """The layouts that a strategy implies; the executor's specs come from these."""

    slots: Array  # int8 [U + 2P + 1, A]: accesses, parameter storages, gradient storages, replicated
    home: Array  # int8 [T, A]: of each tensor as it is kept; PARTIAL for summands only
    raw: Array  # int8 [T, A]: as its producer makes it, PARTIAL included
    resolved: Array  # int8 [T, A]: what its resolution costs the way to
    is_shared: Array  # bool [E]: the conversion was made before for another reader
    shared_since: Array  # int32 [E]: the task after the last reader of that copy, 0 where it is not shared


class Parts(NamedTuple):
    """Summands, for those who update them one operator at a time (change.py). G groups of devices, 1 without pins."""

    convert_s: Array  # [E, L]: as if no copy were shared
    held_bytes: Array  # [T]: of a tensor as it is kept, on a device that holds it
    copy_bytes: Array  # [E]: of a converted copy, 0 where nothing is converted
    passing_bytes: Array  # [T]: while it is made: of partial sums before they are resolved, and work space
    waiting_bytes: Array  # [T, 2]: of gradients that wait to be summed in one collective
    stored_bytes: Array  # [P]: of a parameter with its optimizer state
    is_sent: Array  # bool [E]: the conversion makes a copy of its own


class Holders(NamedTuple):
    """Which of the G device groups take part, where pins tell them apart."""

    compute: Array  # bool [K, G]
    resolve: Array  # bool [T, G]
    convert: Array  # bool [E, G]
    sum: Array  # bool [S, G]
    home: Array  # bool [T, G]
    copy: Array  # bool [E, G]
    stored: Array  # bool [P, G]


class Costs(NamedTuple):
    durations: Durations
    layouts: Layouts
    bytes_by_collective: Array  # [6] that each device sends in a step, by COLLECTIVES
    sent_bytes: Array  # []: in a step by the device that sends most; with pins devices differ, else the sum of the above
    memory_bytes: Array  # [4]: parameters and optimizer state; at the peak gradients and activations, and what is passing; total
    penalty: Array  # degree violations of the strategy (0 for a valid one)
    parts: Parts
    holders: Holders | None


def layouts_of(tables: CostTables, axes: Array, storage: Array) -> Layouts:
    """Layouts of every access, storage and tensor under a strategy."""
    sizes = np.array(tables.links.axis_sizes)
    index = value_index(axes)  # [N, A]
    used = along(jnp.asarray(tables.access_map), rows(index, tables.access_op))  # [U, A]
    if tables.space.offers_pins:
        used = with_pins(used, rows(axes, tables.access_op))
    replicated = jnp.full((1, len(sizes)), REPLICATED, jnp.int8)
    if len(tables.parameter_op):
        as_used = rows(jnp.concatenate([used, replicated]), tables.parameter_slot)  # [P, A]
        masks = rows(jnp.asarray(tables.storage_masks), rows(storage, tables.parameter_op).astype(jnp.int32))
        stored = storage_layouts(as_used, masks, tables.storage_dim, tables.storage_dim_size, tables.storage_fixed, sizes)
    else:
        stored = jnp.zeros((0, len(sizes)), jnp.int8)
    slots = jnp.concatenate([used, stored, gradient_layouts(stored, tables.gradient_shift), replicated])
    raw, home = home_layouts(
        rows(slots, tables.tensor_slot), rows(slots, tables.tensor_reader), tables.tensor_source, tables.tensor_fixed,
        tables.tensor_shape, sizes,
    )  # fmt: skip
    common = rows(slots, np.maximum(tables.tensor_sum, 0))
    home, resolved = summed_layouts(raw, home, common, tables.tensor_sum >= 0, tables.is_joint)
    since = shared_since(tables, slots, storage)
    return Layouts(slots, home, raw, resolved, since > 0, since)


class Asked(NamedTuple):
    """What is known of a strategy before its conversions are paid for."""

    found: Layouts
    compute_s: Array  # [K]
    shards: Array  # [P]: of stored parameters
    edge_home: Array  # int8 [E, A]: of the tensors that conversions start from
    target: Array  # int8 [E, A]
    inner: Array  # int8 [S, A]: collectives in the middle of operators
    source: Array  # int8 [R + E + S, A]: of everything that is sent; R tensors may be partial
    wanted: Array


def _asked(tables: CostTables, axes: Array, storage: Array) -> Asked:
    """What a strategy's operators take, and what they ask to be converted."""
    sizes = np.array(tables.links.axis_sizes, np.float32)
    memory_rate, launch_s = tables.rates.memory_bytes_per_s, tables.rates.launch_s
    num_k, num_u, num_p = tables.num_tasks, len(tables.access_op), len(tables.parameter_op)
    is_update = tables.task_parameter >= 0
    found = layouts_of(tables, axes, storage)
    slots, home = found.slots, found.home
    index = value_index(axes)

    # Compute: a roofline of FLOPs and of the bytes read and written at local shapes.
    used = slots[:num_u]
    access_bytes = tables.access_bytes / split_of(used >= 0, sizes)
    moved = add(jnp.zeros(num_k), tables.access_task, access_bytes)
    task_index = rows(index, tables.task_op)
    split = split_of(along(jnp.asarray(tables.work_split), rows(task_index, tables.work_task)), sizes)
    flop_s = add(jnp.zeros(num_k), tables.work_task, tables.work_seconds / split)
    if num_p:
        shards = split_of(slots[num_u : num_u + num_p] >= 0, sizes)
        update_split = rows(shards, np.maximum(tables.task_parameter, 0))
        flop_s = jnp.where(is_update, flop_s / update_split, flop_s)
        moved = jnp.where(is_update, tables.update_bytes / update_split, moved)
    else:
        shards, update_split = jnp.zeros(0), jnp.ones(num_k)
    compute_s = (jnp.maximum(flop_s, moved / memory_rate) + launch_s) * tables.task_trips
    if tables.measured:
        at = rows(log_degrees(axes, tables.links.axis_sizes, tables.measured.degrees.shape[-1]), tables.task_op)
        compute_s *= measured_ratio(*tables.measured, point_of(at, update_split, is_update))

    edge_home = rows(home, tables.edge_tensor)
    target = as_read(edge_home, rows(slots, tables.edge_slot))
    inner = along(jnp.asarray(tables.sum_map), rows(task_index, tables.sum_task))  # [S, A]
    partial = tables.partial
    source = jnp.concatenate([rows(found.raw, partial), edge_home, inner_source(inner)])
    wanted = jnp.concatenate([rows(found.resolved, partial), target, inner_target(inner)])
    return Asked(found, compute_s, shards, edge_home, target, inner, source, wanted)


def evaluator(tables: CostTables, *, is_batched: bool = False) -> Callable[[Array, Array], Costs]:
    """The cost function of one strategy: (int8 [N, A], int8 [N]) -> Costs. Pure, to be jitted or vmapped.

    Of a batch of strategies, with a leading dim everywhere, if `is_batched`: the same as vmapped, but traced in half of the time.
    """
    ask, convert, pay = stages(tables, is_batched=is_batched)

    def evaluate(axes: Array, storage: Array) -> Costs:
        of = ask(axes, storage)
        return pay(axes, of, convert(of.source, of.wanted))

    return evaluate


class Stages(NamedTuple):
    """The cost function's parts, one after the other."""

    ask: Callable[[Array, Array], Asked]  # of axes and storage
    convert: Callable[[Array, Array], ConversionCost]  # of `Asked.source` and `Asked.wanted`
    pay: Callable[[Array, Asked, ConversionCost], Costs]  # of axes, and what the others gave


def stages(tables: CostTables, *, is_batched: bool = False) -> Stages:
    """The parts of `evaluator(tables)`."""
    sizes = np.array(tables.links.axis_sizes, np.float32)
    num_k, num_t = tables.num_tasks, len(tables.tensor_bytes)
    partial = tables.partial  # [R]: the others are kept as they are made
    row_of = np.full(num_t, len(partial), np.int32)  # of a row of zeros
    row_of[partial] = np.arange(len(partial))
    sum_times = tables.task_trips[tables.sum_task] if len(tables.sum_task) else np.zeros(0, np.float32)

    pins = tables.space.offers_pins
    coordinates = tables.space.groups
    is_update = tables.task_parameter >= 0
    num_u, num_p, num_e = len(tables.access_op), len(tables.parameter_op), len(tables.edge_task)

    def product(mask: Array) -> Array:
        return split_of(mask, sizes)

    lift = jax.vmap if is_batched else lambda fn: fn

    def convert(source: Array, wanted: Array) -> ConversionCost:
        # Communication: resolutions, conversions and inner sums in one call, which keeps the compiled program small.
        shares = jnp.concatenate([tables.resolve_share[partial], tables.edge_share, np.ones(len(tables.sum_task), np.float32)])
        no_shape = np.zeros((len(tables.sum_task), tables.tensor_shape.shape[1]), np.int32)
        shapes = jnp.concatenate([tables.tensor_shape[partial], tables.tensor_shape[tables.edge_tensor], no_shape])
        sizes_sent = jnp.concatenate([tables.resolve_bytes[partial], tables.edge_bytes, tables.sum_bytes])
        return conversion_cost(source, wanted, sizes_sent, tables.links, shares, shape=shapes, pins=pins)

    def paid(axes: Array, of: Asked, every: ConversionCost) -> Costs:
        found, shards, edge_home, target, inner = of.found, of.shards, of.edge_home, of.target, of.inner
        home = found.home
        times = jnp.concatenate([tables.tensor_trips[partial], tables.edge_trips, sum_times])[:, None]
        seconds, num_r = every.seconds * times, len(partial)
        nothing = jnp.zeros((1, seconds.shape[1]), seconds.dtype)
        resolve_s = rows(jnp.concatenate([seconds[:num_r], nothing]), row_of)
        full_s, sum_s = seconds[num_r : num_r + num_e], seconds[num_r + num_e :]
        borders = halo_cost(inner, tables.sum_bytes, tables.links, tables.num_edges)
        sum_s += borders.seconds * sum_times[:, None]
        is_paid = jnp.concatenate([jnp.ones(num_r, bool), ~found.is_shared, jnp.ones(len(tables.sum_task), bool)])
        # Products of matrices: XLA's sums over the first dim are ten times slower.
        paid_times = times[:, 0] * is_paid
        sent = paid_times @ every.bytes + sum_times @ borders.bytes
        durations = Durations(of.compute_s, resolve_s, jnp.where(found.is_shared[:, None], 0.0, full_s), sum_s)

        # Memory, per group of devices where pins tell them apart.
        stored_bytes = tables.parameter_bytes * tables.state_copies / shards
        held = tables.tensor_bytes * tables.tensor_copies / product(is_held_split(found.raw, home))
        copy = jnp.where((edge_home != target).any(-1), tables.edge_bytes / product(target >= 0), 0.0)
        local = tables.resolve_bytes / product(found.raw >= 0)
        in_place = tables.working.sums_in_place
        passing = passing_bytes(found.raw, found.resolved, local, tables.is_product, sizes, in_place=in_place)
        waiting = waiting_bytes(found.raw, found.resolved, local, tables.working.waits, tables.working.combine_bytes, sizes)
        sent_copy = is_sent(edge_home, target)
        parts = Parts(full_s, held, copy, passing, waiting, stored_bytes, sent_copy)
        holding = None
        if pins:
            stored = found.slots[num_u : num_u + num_p]
            of_op = holders(with_pins(jnp.full_like(axes, REPLICATED), axes), coordinates)  # [N, G]
            of_home, of_copy, of_stored = (holders(x, coordinates) for x in (home, target, stored))
            of_task = rows(of_op, tables.task_op)
            if num_p:
                of_task = jnp.where(is_update[:, None], rows(of_stored, np.maximum(tables.task_parameter, 0)), of_task)
            holding = Holders(
                of_task, holders(found.raw, coordinates), rows(of_home, tables.edge_tensor) | of_copy,
                rows(of_op, tables.task_op[tables.sum_task]), of_home, of_copy, of_stored,
            )  # fmt: skip
            most_sent = _sent_by_groups(tables, paid_times, sum_times * borders.bytes.sum(-1), every, holding)
            live = jnp.stack(
                [
                    _liveness(
                        tables, held * of_home[:, g], waiting * of_home[:, g, None], copy * of_copy[:, g], found, sent_copy
                    )
                    for g in range(len(coordinates))
                ]
            )
            made = jnp.stack([_made(tables, passing * holding.resolve[:, g]) for g in range(len(coordinates))])
            persistent = (stored_bytes[:, None] * of_stored).sum(0)
        else:
            most_sent = sent.sum(keepdims=True)
            live, made = _liveness(tables, held, waiting, copy, found, sent_copy)[None], _made(tables, passing)[None]
            persistent = stored_bytes.sum(keepdims=True)
        if not num_k:
            live = made = jnp.zeros((len(persistent), 1))
        total = persistent[:, None] + live + made  # [G, K]
        g, k = jnp.unravel_index(jnp.argmax(total), total.shape)
        memory = jnp.stack([persistent[g], live[g, k], made[g, k], total[g, k]])
        return Costs(durations, found, sent, most_sent.max(), memory, _violations(tables, axes), parts, holding)

    return Stages(lift(lambda axes, storage: _asked(tables, axes, storage)), convert, lift(paid))


def _sent_by_groups(tables: CostTables, times: Array, borders: Array, every: ConversionCost, on: Holders) -> Array:
    """Bytes [G] that a device of each group sends: of resolutions, conversions and sums so many `times`, and of `borders` [S].

    A collective counts on all of its devices as what each of them sends. Of a conversion between pinned layouts, what
    comes before the messages, and these, counts where the tensor is at home; what one device gets from the shards of many,
    and gathers after the messages, where it goes.
    """
    made = on.resolve[tables.partial]
    early_on = jnp.concatenate([made, rows(on.home, tables.edge_tensor), on.sum, on.sum]).astype(jnp.float32)
    late_on = jnp.concatenate([made, on.copy, on.sum]).astype(jnp.float32)
    early = jnp.concatenate([times * (every.bytes.sum(-1) - every.late_bytes), borders])
    return early @ early_on + (times * every.late_bytes) @ late_on


def own_costs(tables: CostTables, axes: Array, storage: Array) -> tuple[Array, Array, Array]:
    """What depends on one operator each, of strategies [B, N, A] and [B, N]: no tensor's conversion is paid for.

    Gives slots [B, ., A] as in `Layouts`, `compute_s` [B, K] and `sum_s` [B, S, L] as in `Durations`.
    """
    of = jax.vmap(lambda a, s: _asked(tables, a, s))(axes, storage)
    count, num_s = len(axes), len(tables.sum_task)
    if not num_s:
        return of.found.slots, of.compute_s, jnp.zeros((count, 0, tables.links.num_levels))
    every = conversion_cost(
        of.source[:, -num_s:], of.wanted[:, -num_s:], tables.sum_bytes, tables.links, np.ones(num_s, np.float32),
        shape=np.zeros((num_s, tables.tensor_shape.shape[1]), np.int32), pins=tables.space.offers_pins,
    )  # fmt: skip
    borders = jax.vmap(lambda inner: halo_cost(inner, tables.sum_bytes, tables.links, tables.num_edges).seconds)(of.inner)
    return of.found.slots, of.compute_s, (every.seconds + borders) * tables.task_trips[tables.sum_task][:, None]


def _liveness(tables: CostTables, held: Array, waiting: Array, copy: Array, found: Layouts, sent: Array) -> Array:
    """Bytes alive during each task [K]: tensors until nobody needs them, converted copies while a reader may reuse them."""
    num_k, working = tables.num_tasks, tables.working
    spans = lifespans(tables, found, sent)
    birth, death = tables.order.since, tables.order.until
    of_alive = rows(held, spans.tensors)
    steps = add(jnp.zeros(num_k + 2), spans.since, of_alive)
    steps = add(steps, spans.until + 1, -of_alive)
    late = np.flatnonzero(working.waits & (death >= 0))
    held_back = jnp.zeros((num_k + 2, 2))
    if len(late):
        of_late = rows(waiting, late)
        for bytes_, since in waiting_spans(of_late, birth[late], working.operand_share, working.merged_at):
            held_back = add(add(held_back, since, bytes_), np.maximum(death[late] + 1, since), -bytes_)
    if len(tables.edge_task):
        steps = add(add(steps, spans.copy_since, copy), spans.copy_until + 1, -copy)
    return jnp.cumsum(steps)[:num_k] + jnp.minimum(jnp.cumsum(held_back, 0)[:num_k], working.most_waiting).sum(1)


class Lifespans(NamedTuple):
    """Tasks from which on, and until which, something is alive, both included."""

    tensors: np.ndarray  # int [V]: those that are counted
    since: np.ndarray  # int32 [V]
    until: Array  # int32 [V]; gradients that wait to be summed in one collective wait beside this (`waiting_spans`)
    copy_since: Array  # int32 [E]: of converted copies
    copy_until: np.ndarray  # int32 [E]


def lifespans(tables: CostTables, found: Layouts, sent: Array) -> Lifespans:
    """Of tensors and copies under a strategy; NumPy arrays give NumPy arrays."""
    birth, death, read_at, made_at, at_least = tables.order
    xp = np if isinstance(sent, np.ndarray) else jnp
    alive = np.flatnonzero(death >= 0)
    until = held_until(needed_until(found.shared_since, sent, made_at, read_at), tables.edge_tensor, at_least, death)
    task = np.minimum(read_at, tables.num_tasks - 1)
    copy_since = xp.where(found.is_shared, xp.minimum(found.shared_since, task), np.minimum(made_at, task))
    return Lifespans(alive, birth[alive], xp.where(tables.working.waits, birth, until)[alive], copy_since, task)


def _made(tables: CostTables, passing: Array) -> Array:
    """Bytes beside the results of each task [K] while they are made."""
    return add(jnp.zeros(tables.num_tasks), tables.order.since, passing)


def _violations(tables: CostTables, axes: Array) -> Array:
    """How many (operator, dim) degrees do not divide."""
    sizes = np.array(tables.links.axis_sizes)
    total = jnp.zeros((), jnp.int32)
    for d in range(tables.space.divisors.shape[1]):
        split = jnp.prod(jnp.where(axes == d, sizes, 1), axis=1)
        total += (tables.space.divisors[:, d] % split != 0).sum()
    return total
