"""All that can be asked about one operator's candidates beside one strategy, in one call: what chains walk on.

`position` takes a strategy apart, `judge` gives the exact cost of Q candidate configs of one operator, `move` takes one of them.
All pure functions of a problem's arrays, for use inside jitted loops that are compiled once for all problems of a bucket.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from soapjax.costs.change import changed, cleaned, moved, sent_after, sent_by
from soapjax.costs.evaluate import figure_of_rows
from soapjax.costs.memory.memory_change import Alive, alive_of, most_added, peaks_after, stored_more
from soapjax.costs.rules.base import Base, Change, nothing_changed, span
from soapjax.costs.rules.record_rules import config_of, violations
from soapjax.costs.rules.sets import MAX_AXES
from soapjax.costs.tables.arrays import CostArrays
from soapjax.costs.tables.buckets import Bucket
from soapjax.costs.tables.operator_records import OwnRecords, OwnSizes, own_records
from soapjax.costs.whole import PerRecord, no_records
from soapjax.jit.array_types import Array, Scalar
from soapjax.jit.kernel import any_of, in_kernel, largest, row
from soapjax.search.objective import cost_by, limits_of
from soapjax.search.problem import PlanningProblem
from soapjax.simulate.simulated_trace import Trace, no_trace, traced
from soapjax.simulate.walk import ItemCosts, ItemRecords, ItemSizes
from soapjax.simulate.window import Changed, no_windows, passing_by, widened, window_times


class Tables(NamedTuple):
    """Of one problem, on the device."""

    costs: CostArrays
    own: OwnRecords
    items: ItemRecords
    limits: Array  # float32 [7]: `limits_of`


class Sizes(NamedTuple):
    """What is compiled in."""

    bucket: Bucket
    own: OwnSizes
    items: ItemSizes

    @property
    def pins(self) -> bool:
        return bool(self.bucket.groups)


class Position(NamedTuple):
    """A strategy taken apart, how its step goes, and what is alive under it."""

    base: Base
    trace: Trace
    alive: Alive
    sent: Array  # [G]: bytes of a device of each group; 0 where the objective does not limit them


class Scratch(NamedTuple):
    """What judging writes into; its contents do not matter."""

    change: Change
    places: Array  # [V + 1, Q]
    steps: tuple[Array, Array]  # [K + 2, G, Q] and [K + 2, 2, G, Q] of memory: zeros


class Judged(NamedTuple):
    """Of Q candidates."""

    step_time_s: Array  # [Q]
    memory_bytes: Array  # [Q]: an upper bound where that is within the limits
    sent_bytes: Array  # [Q]: by the device that sends most; 0 where the objective does not limit them
    cost_s: Array  # [Q]: the objective; inf where a degree does not divide


class Effects(NamedTuple):
    """What `move` asks of candidates that were judged."""

    first: Scalar  # int32 []: of the items that may change
    last: Scalar  # int32 []
    added: Array  # [Q]: bytes that may be added to the peak, at the most
    stored: Array  # [G, Q]: bytes of parameters and optimizer state that are added


def tables_of(problem: PlanningProblem) -> tuple[Tables, Sizes]:
    """The arrays of a problem and the sizes of their bucket."""
    simulator = problem.simulator
    own, own_sizes = own_records(simulator.tables, simulator.evaluator.bucket)
    items, item_sizes = simulator.item_records
    limits = limits_of(problem.objective, problem.usable_memory_bytes)
    tables = Tables(simulator.evaluator.arrays, *jax.device_put((own, items, limits)))
    return tables, Sizes(simulator.evaluator.bucket, own_sizes, item_sizes)


def scratch_of(tables: Tables, sizes: Sizes, lanes: int) -> Scratch:
    tasks, groups = sizes.bucket.tasks + 4, max(sizes.bucket.groups, 1)
    steps = jnp.zeros((tasks, groups, lanes)), jnp.zeros((tasks, 2, groups, lanes))
    return Scratch(nothing_changed(tables.costs, sizes.own, lanes), jnp.zeros((sizes.items.places + 1, lanes)), steps)


def base_of(b: Bucket, each: PerRecord, lane: int, axes: np.ndarray, storage: np.ndarray) -> Base:
    """The summands of one of the strategies that were judged together."""
    padded_axes = np.full((b.operators, MAX_AXES), -1, np.int8)
    padded_axes[: len(axes), : axes.shape[1]] = axes
    padded_storage = np.zeros(b.operators, np.int8)
    padded_storage[: len(storage)] = storage

    def one(x: Any) -> np.ndarray:
        return np.ascontiguousarray(np.asarray(x)[..., lane])

    names = ("full_s", "held", "copy", "is_sent", "transient", "waiting", "on", "on_kept")
    figures = {name: figure_of_rows(each, name, lane) for name in names}
    return Base(
        axes=padded_axes, storage=padded_storage, layout=one(each.layout), compute_s=one(each.compute_s), paid_s=one(each.paid_s),
        sent=figure_of_rows(each, "full_bytes", lane), previous=one(each.previous), state_bytes=one(each.state_bytes),
        on_compute=one(each.on_compute), on_stored=one(each.on_stored), **figures,
    )  # fmt: skip


def no_base(b: Bucket) -> Base:
    """Of no strategy: to say which shapes there are."""
    return base_of(b, no_records(b, 1), 0, np.zeros((0, 0), np.int8), np.zeros(0, np.int8))


def no_alive(sizes: Sizes) -> Alive:
    tasks, groups = sizes.bucket.tasks + 1, max(sizes.bucket.groups, 1)
    of_tasks = np.zeros((tasks, groups), np.float32), np.zeros((tasks, 2, groups), np.float32)
    none = np.zeros(groups, np.float32)
    return Alive(*of_tasks, none, none, np.float32(0))


def item_costs_of(base: Base, pins: bool) -> ItemCosts:
    on = (base.on_compute, base.on) if pins else (None, None)
    return ItemCosts(base.compute_s, base.paid_s, *on)


def position(tables: Tables, sizes: Sizes, base: Base) -> Position:
    """What `base` is."""
    trace = no_trace(sizes.items.items, sizes.bucket.levels, sizes.bucket.groups)
    everything = jnp.int32(0), tables.items.num_items - 1, jnp.bool_(True)
    trace = in_kernel(traced, tables.items, item_costs_of(base, sizes.pins), trace, *everything)
    sent = in_kernel(sent_by, tables.costs, base, tables.limits[5] > 0)
    return Position(base, trace, in_kernel(alive_of, tables.costs, base), sent)


def judge(
    tables: Tables, sizes: Sizes, at: Position, into: Scratch, n: Array | Scalar, axes: Array, storage: Array
) -> tuple[Judged, Effects, Alive, Scratch]:
    """Candidates (`axes` int8 [A, Q], `storage` int8 [Q]) of operator `n` beside the strategy at `at`."""
    p, own, items, pins = tables.costs, tables.own, tables.items, sizes.pins
    config = in_kernel(config_of, p, axes)[None]
    base, change = at.base, changed(p, own, at.base, into.change, n, config, storage)
    on = (change.on_compute, change.on) if pins else (None, None)
    found = Changed(change.task_of, change.row_of, change.compute_s, change.full_s, change.pays, *on)
    first, last = in_kernel(functools.partial(_window, pins=pins), p, own, items, base, change, n)
    around = in_kernel(passing_by, items, at.trace, first, last)
    times, places = in_kernel(window_times, items, item_costs_of(base, pins), at.trace, found, first, last, around, into.places)
    memory, alive, steps, added, stored = in_kernel(_memory, p, own, base, change, n, at.alive, tables.limits, into.steps)
    sent = in_kernel(sent_after, p, own, base, change, n, at.sent, tables.limits[5] > 0)

    def price(p, config, n, times, memory, sent, limits):
        return cost_by(limits, times, memory, sent, violations(p, n, config[0]))

    costs = in_kernel(price, p, config, n, times, memory, sent, tables.limits)
    row_of, task_of = in_kernel(cleaned, own, n, change.row_of, change.task_of, change.heir, change.num_heirs)
    effects = Effects(jnp.minimum(first.min(), items.num_items - 1), jnp.maximum(last.max(), 0), added, stored)
    into = Scratch(change._replace(row_of=row_of, task_of=task_of), places, steps)
    return Judged(times, memory, sent, costs), effects, alive, into


def _window(p: CostArrays, own: OwnRecords, items: ItemRecords, base: Base, change: Change, n: Array, *, pins: bool):
    """First and last changed item of every phase. What no candidate really changes is none of the window."""
    first, count = span(own, n, 2)

    def task(j: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        k = row(own.records.task, first + j)[0]
        moves = (row(change.compute_s, j) != row(base.compute_s, k)).any()
        if pins:
            moves |= any_of(row(change.on_compute, j) != row(base.on_compute, k)[:, None]).any()
        return widened(items, state, row(items.of_task, k), moves)

    state = lax.fori_loop(0, count, task, no_windows())
    first_r, count_r = span(own, n, 3)

    def one_row(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        is_own = i < count_r
        x = jnp.where(is_own, row(own.records.row, first_r + jnp.where(is_own, i, 0))[0], row(change.heir, 1 + i))
        paid_s = row(change.full_s, 1 + i) * row(change.pays, 1 + i)
        moves = (paid_s != row(base.paid_s, x)[:, None]).any()
        if pins:
            moves |= is_own & any_of(row(change.on, 1 + i) != row(base.on, x)[:, None]).any()
        return widened(items, state, row(items.of_row, x), moves)

    return lax.fori_loop(0, count_r + change.num_heirs, one_row, state)


def _memory(
    p: CostArrays, own: OwnRecords, base: Base, change: Change, n: Array, alive: Alive, limits: Array, steps: tuple[Array, Array]
) -> tuple[Array, Alive, tuple[Array, Array], Array, Array]:
    """(bytes per device [Q], what is alive, `steps` as they were, `Effects.added` and `stored`).

    A bound where that fits, else what is alive now, and exactly.
    """
    added, stored = most_added(p, own, base, change, n), stored_more(p, own, base, change, n)

    def bound(alive: Alive) -> Array:
        return largest(stored + (alive.persistent + alive.peak)[:, None]) + added + alive.slack

    def anew(_: Array, __: Alive) -> Alive:
        return alive_of(p, base)

    is_over = ((bound(alive) > limits[4]).any() & (alive.slack > 0)).astype(jnp.int32)
    alive = lax.fori_loop(0, is_over, anew, alive)
    memory = bound(alive)
    is_over = (memory > limits[4]).any().astype(jnp.int32)

    def exactly(_: Array, state: tuple) -> tuple:
        peaks, steps = peaks_after(p, own, base, change, n, alive, state[1])
        return largest(stored + alive.persistent[:, None] + peaks), steps

    memory, steps = lax.fori_loop(0, is_over, exactly, (memory, steps))
    return memory, alive, steps, added, stored


def move(
    tables: Tables, sizes: Sizes, at: Position, into: Scratch, effects: Effects, alive: Alive, n: Array | Scalar, q: Array,
    axes: Array, storage: Array, is_wanted: Array,
) -> Position:  # fmt: skip
    """The position after operator `n` took candidate `q` that `judge` judged; the same one unless `is_wanted`."""
    p = tables.costs
    base = in_kernel(moved, p, tables.own, at.base, into.change, n, q, axes[:, q], storage[q], is_wanted)
    trace = in_kernel(traced, tables.items, item_costs_of(base, sizes.pins), at.trace, effects.first, effects.last, is_wanted)
    sent = in_kernel(sent_by, p, base, tables.limits[5] > 0)
    added, stored = jnp.where(is_wanted, effects.added[q], 0.0), jnp.where(is_wanted, effects.stored[:, q], 0.0)
    alive = alive._replace(slack=alive.slack + added, persistent=alive.persistent + stored)
    return Position(base, trace, alive, sent)

