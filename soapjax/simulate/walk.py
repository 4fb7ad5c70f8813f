"""The batched full simulator: one walk over all items, Q strategies side by side.

The state is the time each stream is free and the ends of items that are still waited for; all are exact
maxima and sums of durations, so that it equals the event simulator up to float32 rounding. The items are data: what is compiled
is the same for all problems of a bucket.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from soapjax.costs.tables.buckets import Bucket, at_least, grown
from soapjax.costs.tables.problem_tables import CostTables
from soapjax.jit.array_types import Array, Scalar
from soapjax.jit.kernel import in_kernel, largest, put, row
from soapjax.jit.programs import PlannerProgram
from soapjax.simulate.items import Items
from soapjax.simulate.schedule import COMPUTE, RESHARD, RESOLVE, SUM


class ItemRecords(NamedTuple):
    """`Items` as data: T items, and one behind the last that nobody waits for."""

    item: Array  # int32 [T + 1, 7]: predecessor, is_compute, is_link, is_barrier, phase, place of its end, task or row
    num_items: Scalar  # int32 []
    num_phases: Scalar  # int32 []
    phase_end: Array  # int32 [F + 1]: the item behind the phase's last
    last_reader: Array  # int32 [T + 1]: the last item that waits for it, -1
    previous_reader: Array  # int32 [T + 1]: the item before that waits for the same, -1
    overlap: jax.Array | np.bool_  # []
    of_task: Array  # int32 [K + 1]: the item of a task, T for none
    of_row: Array  # int32 [X + 1]


MAX_PHASES = 64


def places_of(items: Items) -> tuple[np.ndarray, int]:
    """A place for every end, used again once nobody waits for it: (place [T + 1], how many places); the last for all others."""
    n = items.num_items
    predecessor = np.append(np.where(items.predecessor < 0, n, items.predecessor), n)
    last_use = np.full(n + 1, -1, np.int64)
    for t in range(n - 1, -1, -1):
        # An item of no duration passes its predecessor's end on to its own readers.
        last_use[predecessor[t]] = max(last_use[predecessor[t]], t, last_use[t])
    slot, count = np.full(n + 1, -1, np.int64), 0
    free: list[int] = []
    expiring: dict[int, list[int]] = {}
    for t in range(n):
        free += expiring.pop(t, [])
        if last_use[t] >= 0:
            if not free:
                free, count = [count], count + 1
            slot[t] = free.pop()
            expiring.setdefault(int(last_use[t]), []).append(int(slot[t]))
    slot[slot < 0] = count
    return slot, count + 1


class ItemSizes(NamedTuple):
    """What is compiled in."""

    items: int
    places: int


SMALL, LARGE = ItemSizes(6144, 64), ItemSizes(24576, 512)


def item_records(items: Items, tables: CostTables, b: Bucket) -> tuple[ItemRecords, ItemSizes]:
    """Of a problem in a bucket; larger sizes go with larger buckets."""
    num_t, num_e = len(tables.tensor_bytes), len(tables.edge_task)
    first = {RESOLVE: 0, RESHARD: num_t, SUM: num_t + num_e, COMPUTE: 0}
    kinds, sources = items.kind.tolist(), items.source.tolist()
    source = [first[k] + s if k in first else b.rows for k, s in zip(kinds, sources, strict=True)]
    n, num_places = items.num_items, places_of(items)[1]
    usual = LARGE if b.scale or n > SMALL.items or num_places > SMALL.places else SMALL
    sizes = ItemSizes(*(at_least(m, grown(u, b.scale)) for m, u in zip((n, num_places), usual, strict=True)))
    of_rows = np.concatenate([items.of_resolve, items.of_reshard, items.of_sum])
    overlap = tables.topology.device.overlap
    records = records_of_items(
        items, source, items.of_compute, of_rows, sizes, num_tasks=b.tasks, num_rows=b.rows, overlap=overlap
    )  # fmt: skip
    return records, sizes


def records_of_items(
    items: Items, source: Sequence[int], of_tasks: np.ndarray, of_rows: np.ndarray, sizes: ItemSizes, *, num_tasks: int,
    num_rows: int, overlap: bool,
) -> ItemRecords:  # fmt: skip
    """Padded to `sizes`.

    Args:
      source: the task or the row of every item; `num_rows` for neither.
      of_tasks, of_rows: the item of each, as many or more than there are items where it has none.
    """
    n = items.num_items
    place, num_places = places_of(items)
    found = np.zeros((sizes.items + 1, 7), np.int32)
    found[:, 0], found[:, 5], found[:, 6] = sizes.items, sizes.places, num_rows
    predecessor = np.where(items.predecessor < 0, sizes.items, items.predecessor)
    place = np.where(place == num_places - 1, sizes.places, place)  # the last is that of ends for which nobody waits
    phase = np.cumsum(items.is_barrier) - items.is_barrier
    columns = (predecessor, items.is_compute, items.is_link, items.is_barrier, phase, place[:n], source)
    found[:n] = np.stack([np.asarray(x, np.int32).reshape(n) for x in columns], 1)
    ends = np.append(np.flatnonzero(items.is_barrier), n)
    if len(ends) > MAX_PHASES:
        raise ValueError(f"{len(ends)} phases; {MAX_PHASES} at most")
    phase_end = np.full(MAX_PHASES + 1, n, np.int32)
    phase_end[: len(ends)] = ends
    last, previous = np.full(sizes.items + 1, -1, np.int32), np.full(sizes.items + 1, -1, np.int32)
    for t, before in enumerate(items.predecessor.tolist()):
        if before >= 0:
            previous[t], last[before] = last[before], t

    def item_of(some: np.ndarray, count: int) -> np.ndarray:
        none = np.full(count + 1 - len(some), sizes.items)
        return np.concatenate([np.where(some >= n, sizes.items, some), none]).astype(np.int32)

    return ItemRecords(
        item=found, num_items=np.int32(n), num_phases=np.int32(len(ends)), phase_end=phase_end, last_reader=last,
        previous_reader=previous, overlap=np.bool_(overlap), of_task=item_of(of_tasks, num_tasks),
        of_row=item_of(of_rows, num_rows),
    )  # fmt: skip


def latest_of(free: Sequence[Array], *, pins: bool) -> Array:
    """When all streams [Q] are free; with `pins` of all groups, [G, Q] each."""
    found = free[0]
    for stream in free[1:]:
        found = jnp.maximum(found, stream)
    return largest(found) if pins else found


def stream_times(
    free: Sequence[Array], end: Array, own: Sequence[Array], overlap: Array | np.bool_, on: Array | None
) -> tuple[list[Array], Array]:
    """Runs one item: (times at which each stream is free, its end), of [Q], or [G, Q] and [Q] where groups take part (`on`).

    `own` are its seconds per stream, 0 of computing first; a communication occupies the computing stream too without overlap.
    """
    free = list(free)

    def latest(stream: Array) -> Array:
        if on is None:
            return stream
        return largest(jnp.where(on, stream, 0.0))

    def taken(stream: Array, takes: Array, end: Array) -> Array:
        return jnp.where(takes if on is None else takes & on, end, stream)

    for s, seconds in enumerate(own):
        takes = seconds > 0
        busy = latest(free[s])
        if s:
            busy = jnp.maximum(busy, jnp.where(overlap, 0.0, latest(free[0])))
        end = jnp.where(takes, jnp.maximum(end, busy) + seconds, end)
        free[s] = taken(free[s], takes, end)
        if s:
            free[0] = taken(free[0], takes & ~overlap, end)
    return free, end


class ItemCosts(NamedTuple):
    """What items take: seconds [K + 1] of tasks and [X + 1, L] of rows as they are paid, and who takes part [.., G], or None.

    Of one strategy, or of Q side by side, [.., Q].
    """

    compute_s: Array
    paid_s: Array
    on_compute: Array | None
    on_rows: Array | None


def costs_of_item(of: ItemCosts, item: Array) -> tuple[list[Array], Array | None]:
    """Seconds per stream of one item, and who takes part."""
    is_compute, source = item[1] != 0, item[6]
    task, sent = jnp.where(is_compute, source, 0), jnp.where(is_compute, of.paid_s.shape[0] - 1, source)
    seconds = row(of.paid_s, sent)
    own: list[Array] = [jnp.where(is_compute, row(of.compute_s, task), 0.0), *(seconds[lv] for lv in range(seconds.shape[0]))]
    if of.on_rows is None:
        return own, None
    return own, jnp.where(is_compute, row(of.on_compute, task), row(of.on_rows, sent))


def makespans(items: ItemRecords, num_places: int, of: ItemCosts) -> Array:
    """Step times [Q] of strategies."""
    levels, q = of.paid_s.shape[1:]
    groups = () if of.on_compute is None else (of.on_compute.shape[1],)
    zeros = jnp.zeros(q)

    def body(t: Array, state: tuple):
        free, gathered, last_end, last_place, ends = state
        # An end is written one item late, so that the loop reads and writes the array of ends in one place and in that order.
        ends = put(ends, last_place, last_end)
        item = row(items.item, t)
        before, is_compute, is_link, is_barrier = item[0], item[1] != 0, item[2] != 0, item[3] != 0
        ready = jnp.where(before < items.item.shape[0] - 1, row(ends, row(items.item, before)[5]), 0.0)
        own, on = costs_of_item(of, item)
        free, end = stream_times(list(free), jnp.where(is_compute, gathered, ready), own, items.overlap, on)
        gathered = jnp.where(is_link, jnp.maximum(gathered, end), jnp.where(is_compute, 0.0, gathered))
        latest = latest_of(free, pins=bool(groups))
        free = tuple(jnp.where(is_barrier, latest, x) for x in free)
        return free, gathered, end, item[5], ends

    start = tuple(jnp.zeros((*groups, q)) for _ in range(1 + levels))
    ends = jnp.zeros((num_places + 1, q))
    free = lax.fori_loop(0, items.num_items, body, (start, zeros, zeros, jnp.int32(num_places), ends))[0]
    return latest_of(free, pins=bool(groups))


@functools.cache
def program(sizes: ItemSizes, b: Bucket) -> PlannerProgram:
    """The walk as one program of problems in a bucket: (items, compute_s, row_s, on_compute, on_rows) -> step times."""

    def walk(items: ItemRecords, compute_s: Array, row_s: Array, on_compute: Array, on_rows: Array) -> Array:
        groups = (on_compute, on_rows) if b.groups else ()

        def run(items: ItemRecords, compute_s: Array, row_s: Array, *on: Array) -> Array:
            return makespans(items, sizes.places, ItemCosts(compute_s, row_s, *(on or (None, None))))

        return in_kernel(run, items, compute_s, row_s, *groups)

    return PlannerProgram(walk, is_urgent=True, name=f"simulation {sizes} {b}", results=0)
