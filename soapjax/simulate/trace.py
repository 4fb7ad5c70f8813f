"""A strategy's step taken apart: the state before every item, and the longest path from it to its phase's end.

With a static order a step is linear in the max-plus algebra (max for plus, plus for times). A *state* is the time that
each stream is free, what the accumulator holds and the ends of items that are still waited for. One walk
forward keeps the state before every item; one walk backward keeps, per component of the state after an item, the longest
path from it to the end of the phase (the *adjoint*). Then for any item

    phase's length = max over components (time of the component after the item + its path)

and of the crossing pairs of an item before and one after that waits for it. So a change of a few items is
simulated from the first of them to the last, and closed by the adjoint (window.py). Times count from the phase's start: a barrier
lets no state pass, and the phases' lengths add up.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from soapjax.costs.indexing import put_row
from soapjax.costs.indexing import row as row_of
from soapjax.simulate.items import NONE, Items
from soapjax.simulate.kernel import as_one_kernel


class ItemArrays(NamedTuple):
    """`Items` on the device; T items and one behind them that means "none", F phases."""

    index: Array  # int32 [T]: row of the figures of a strategy (items.py)
    predecessor: Array  # int32 [T + 1]: T where there is none
    is_link: Array  # bool [T]
    is_compute: Array  # bool [T + 1]
    is_barrier: Array  # bool [T]
    phase: Array  # int32 [T]
    phase_end: Array  # int32 [F]: the item behind the phase's last
    slot: Array  # int32 [T + 1]: where a window keeps its end; the last slot for those that nobody waits for
    num_slots: Array  # [V, 0]: its shape counts the slots
    of_compute: Array  # int32 [K + 1], T for the pad; and so on
    of_convert: Array  # int32 [E + 1]
    of_resolve: Array  # int32 [T' + 1]
    of_sum: Array  # int32 [S + 1]


def item_arrays(items: Items) -> ItemArrays:
    n = items.num_items
    predecessor = np.append(np.where(items.predecessor == NONE, n, items.predecessor), n).astype(np.int32)
    slot, num_slots = _slots(items, predecessor)
    phase = np.cumsum(items.is_barrier) - items.is_barrier
    phase_end = np.append(np.flatnonzero(items.is_barrier), n)
    # Each kind of figure has a pad row in a strategy's figures, and so a pad row here.
    sizes = [len(x) + 1 for x in (items.of_compute, items.of_sum, items.of_resolve, items.of_convert)]

    def ints(x: np.ndarray) -> np.ndarray:
        return np.asarray(x, np.int32)

    arrays = ItemArrays(
        ints(items.index(*sizes)), ints(predecessor), items.is_link, np.append(items.is_compute, False), items.is_barrier,
        ints(phase), ints(phase_end), ints(slot), np.zeros((num_slots, 0), np.float32),
        *(ints(np.append(x, n)) for x in (items.of_compute, items.of_convert, items.of_resolve, items.of_sum)),
    )  # fmt: skip
    return jax.device_put(arrays)  # jnp.asarray compiles a program for every shape


def _slots(items: Items, predecessor: np.ndarray) -> tuple[np.ndarray, int]:
    """A place for every end, used again once nobody waits for it: (place [T + 1], how many places)."""
    n = items.num_items
    last_use = np.full(n + 1, -1, np.int64)
    for t in range(n - 1, -1, -1):
        # An item of no duration passes its predecessor's end on to its own readers.
        last_use[predecessor[t]] = max(last_use[predecessor[t]], t, last_use[t])
    slot, free, expiring, count = np.full(n + 1, -1, np.int64), [], {}, 0
    for t in range(n):
        free += expiring.pop(t, [])
        if last_use[t] >= 0:
            if not free:
                free, count = [count], count + 1
            slot[t] = free.pop()
            expiring.setdefault(int(last_use[t]), []).append(int(slot[t]))
    slot[slot < 0] = count
    return slot, count + 1


class Trace(NamedTuple):
    """Of one strategy; S streams, G groups of devices, 1 without pins."""

    seconds: Array  # [T, S]
    on: Array | None  # bool [T, G]: who takes part; None without pins
    takes_time: Array  # bool [T]
    root: Array  # int32 [T + 1]: the item itself where it computes or takes time, else the root of its predecessor; T for nobody
    is_root: Array  # bool [T + 1]
    is_asked: Array  # bool [T + 1]: a compute item whose end some communication that takes time waits for
    end: Array  # [T + 1]: 0 for nobody
    free: Array  # [T, S, G]: before the item
    gathered: Array  # [T]: what the accumulator holds, before the item
    rest_of_free: Array  # [T, S, G]: longest path to the phase's end from a stream, after the item; and so on
    rest_of_gathered: Array  # [T]
    rest_of_begin: Array  # [T]: from the end of what the item waits for
    length: Array  # [F]


def occupied(stage: int, overlap: bool) -> tuple[int, ...]:
    """The streams that stage `stage` of an item occupies."""
    return (stage,) if overlap or stage == 0 else (0, stage)


def trace(items: ItemArrays, seconds: Array, on: Array | None, *, overlap: bool) -> Trace:
    """The trace of a strategy with `seconds` [T, S] and, with pins, `on` bool [T, G] of every item. Pure."""
    n, num_streams = seconds.shape
    groups, dtype, num_phases = 1 if on is None else on.shape[1], seconds.dtype, len(items.phase_end)
    takes_time = (seconds > 0).any(1)

    def forward(items: ItemArrays, seconds: Array, on: Array | None, takes_time: Array):
        def body(t: Array, state):
            free, gathered, kept_free, kept_gathered, end, root_of_last, ends, root, asked, length = state
            # What a loop reads at one place and writes at another it writes first, one item late: XLA then copies no array.
            before = jnp.where(t > 0, t - 1, n)
            ends, root = put_row(ends, before, end), put_row(root, before, root_of_last)
            kept_free = put_row(kept_free, t, free)
            kept_gathered = put_row(kept_gathered, t, gathered)
            p, is_compute, is_barrier = row_of(items.predecessor, t), row_of(items.is_compute, t), row_of(items.is_barrier, t)
            timed, waits_for = row_of(takes_time, t), row_of(root, p)
            end = jnp.where(is_compute, gathered, row_of(ends, p))
            held = np.ones(1, bool) if on is None else row_of(on, t)
            streams = [free[s] for s in range(num_streams)]
            for s in range(num_streams):
                d, used = row_of(seconds, t)[s], occupied(s, overlap)
                latest = end
                for u in used:
                    for g in range(groups):
                        latest = jnp.maximum(latest, jnp.where(held[g], streams[u][g], 0))
                end = jnp.where(d > 0, latest + d, end)
                for u in used:
                    streams[u] = jnp.where((d > 0) & held, end, streams[u])
            latest = streams[0][0]
            for stream in streams:
                for g in range(groups):
                    latest = jnp.maximum(latest, stream[g])
            length = put_row(length, row_of(items.phase, t), latest)
            asked = put_row(asked, jnp.where(timed & ~is_compute & row_of(items.is_compute, waits_for), waits_for, n), True)
            root_of_last = jnp.where(timed | is_compute, t, waits_for)
            gathered = jnp.where(row_of(items.is_link, t), jnp.maximum(gathered, end), jnp.where(is_compute, 0, gathered))
            free = jnp.where(is_barrier, 0, jnp.stack(streams))
            return free, jnp.where(is_barrier, 0, gathered), kept_free, kept_gathered, end, root_of_last, ends, root, asked, length

        state = (
            jnp.zeros((num_streams, groups), dtype), jnp.zeros((), dtype), jnp.zeros((n, num_streams, groups), dtype),
            jnp.zeros(n, dtype), jnp.zeros((), dtype), jnp.int32(n), jnp.zeros(n + 1, dtype), jnp.full(n + 1, n, jnp.int32),
            jnp.zeros(n + 1, bool), jnp.zeros(num_phases, dtype),
        )  # fmt: skip
        _, _, kept_free, kept_gathered, end, root_of_last, ends, root, asked, length = jax.lax.fori_loop(0, n, body, state)
        return kept_free, kept_gathered, put_row(ends, n - 1, end), put_row(root, n - 1, root_of_last), asked, length

    def backward(items: ItemArrays, seconds: Array, on: Array | None):
        def body(i: Array, state):
            free, gathered, path, waits_for, rest_free, rest_gathered, rest_begin, rest_end = state
            t = n - 1 - i
            rest_end = put_row(rest_end, waits_for, jnp.maximum(row_of(rest_end, waits_for), path))
            rest_free = put_row(rest_free, t, free)
            rest_gathered = put_row(rest_gathered, t, gathered)
            p, is_compute, is_barrier = row_of(items.predecessor, t), row_of(items.is_compute, t), row_of(items.is_barrier, t)
            held = np.ones(1, bool) if on is None else row_of(on, t)
            path = row_of(rest_end, t)
            path = jnp.where(row_of(items.is_link, t), jnp.maximum(path, gathered), path)
            streams = [free[s] for s in range(num_streams)]
            for s in reversed(range(num_streams)):
                d, used = row_of(seconds, t)[s], occupied(s, overlap)
                longest = path
                for u in used:
                    for g in range(groups):
                        longest = jnp.maximum(longest, jnp.where(held[g], streams[u][g], -jnp.inf))
                path = jnp.where(d > 0, longest + d, path)
                for u in used:
                    streams[u] = jnp.where((d > 0) & held, path, streams[u])
            # A compute item begins when the accumulator is there, and empties it.
            gathered = jnp.where(is_compute, path, gathered)
            rest_begin = put_row(rest_begin, t, path)
            free = jnp.where(is_barrier, 0, jnp.stack(streams))
            return free, jnp.where(is_barrier, -jnp.inf, gathered), path, p, rest_free, rest_gathered, rest_begin, rest_end

        never = jnp.full((), -jnp.inf, dtype)
        state = (
            jnp.zeros((num_streams, groups), dtype), never, never, jnp.int32(n), jnp.zeros((n, num_streams, groups), dtype),
            jnp.zeros(n, dtype), jnp.zeros(n, dtype), jnp.full(n + 1, -jnp.inf, dtype),
        )  # fmt: skip
        return jax.lax.fori_loop(0, n, body, state)[4:7]

    free, gathered, end, root, asked, length = as_one_kernel(forward)(items, seconds, on, takes_time)
    is_root = root == jnp.arange(n + 1)
    rest = as_one_kernel(backward)(items, seconds, on)
    return Trace(seconds, on, takes_time, root, is_root, asked, end, free, gathered, *rest, length)
