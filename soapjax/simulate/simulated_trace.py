"""A strategy's step taken apart: the state before every item, and the longest path from it to its phase's end.

With a static order a step is linear in the max-plus algebra (max for plus, plus for times). A *state* is the time that
each stream is free, what the accumulator holds and the ends of items that are still waited for. One walk
forward keeps the state before every item; one walk backward keeps, per component of the state after an item, the longest
path from it to the end of the phase (the *adjoint*). Then for any item

    phase's length = max over components (time of the component after the item + its path)

and of the crossing pairs of an item before and one after that waits for it. So a change of a few items is
simulated from the first of them to the last, and closed by the adjoint (window.py). Times count from the phase's start: a barrier
lets no state pass, and the phases' lengths add up. What a trace is of may change in a few items: it is then made anew from the
first of them on forward, and from the last on backward.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from soapjax.jit.array_types import Array
from soapjax.jit.kernel import largest, put, row
from soapjax.simulate.walk import MAX_PHASES, ItemCosts, ItemRecords, costs_of_item, latest_of, stream_times

NEVER = -jnp.inf


class Trace(NamedTuple):
    """Of one strategy; S streams, G groups of devices that pins tell apart, left out without pins."""

    end: Array  # [T + 1]: 0 for nobody
    free: Array  # [T + 1, S(, G)]: before the item
    gathered: Array  # [T + 1]: what the accumulator holds, before the item
    rest_of_free: Array  # [T + 1, S(, G)]: longest path to the phase's end from a stream, after the item; and so on
    rest_of_gathered: Array  # [T + 1]
    rest_of_begin: Array  # [T + 1]: from the end of what the item waits for
    length: Array  # [F]


def no_trace(num_items: int, num_levels: int, groups: int) -> Trace:
    """To be made anew from the first item on; `groups` is 0 without pins."""
    streams = (num_items + 1, 1 + num_levels, *((groups,) if groups else ()))
    line, free = jnp.zeros(num_items + 1), jnp.zeros(streams)
    return Trace(
        end=line, free=free, gathered=line, rest_of_free=free, rest_of_gathered=line + NEVER, rest_of_begin=line,
        length=jnp.zeros(MAX_PHASES),
    )  # fmt: skip


def forward(items: ItemRecords, of: ItemCosts, old: Trace, first: Array, count: Array) -> tuple[Array, ...]:
    """(end, free, gathered, length) of `Trace` from item `first` on, up to item `count`."""
    pins, nobody = of.on_rows is not None, items.item.shape[0] - 1

    def body(t: Array, state: tuple) -> tuple:
        free, gathered, end, ends, kept_free, kept_gathered, length = state
        # What a loop reads at one place and writes at another it writes first, one item late: XLA then copies no array.
        late = jnp.where(t > first, t - 1, nobody)
        ends = put(ends, late, jnp.where(t > first, end, 0.0))
        kept_free, kept_gathered = put(kept_free, t, free), put(kept_gathered, t, gathered)
        item = row(items.item, t)
        is_compute, is_link, is_barrier = (item[i] != 0 for i in (1, 2, 3))
        own, on = costs_of_item(of, item)
        start = jnp.where(is_compute, gathered, row(ends, item[0]))
        streams, end = stream_times([free[s] for s in range(free.shape[0])], start, own, items.overlap, on)
        length = put(length, item[4], latest_of(streams, pins=pins))
        gathered = jnp.where(is_link, jnp.maximum(gathered, end), jnp.where(is_compute, 0.0, gathered))
        free = jnp.where(is_barrier, 0.0, jnp.stack(streams))
        return free, jnp.where(is_barrier, 0.0, gathered), end, ends, kept_free, kept_gathered, length

    before = row(old.free, first), row(old.gathered, first), jnp.zeros((), old.end.dtype)
    start = (*before, old.end, old.free, old.gathered, old.length)
    _, _, end, ends, free, gathered, length = lax.fori_loop(first, count, body, start)
    last = jnp.where(count > first, count - 1, nobody)
    return put(ends, last, jnp.where(count > first, end, 0.0)), free, gathered, length


def backward(items: ItemRecords, of: ItemCosts, old: Trace, last: Array, stop: Array) -> tuple[Array, ...]:
    """(rest_of_free, rest_of_gathered, rest_of_begin) of `Trace` from item `last` down to item `stop`."""
    nobody = items.item.shape[0] - 1

    def body(i: Array, state: tuple) -> tuple:
        free, gathered, path, rest_free, rest_gathered, rest_begin = state
        t = last - i
        rest_begin = put(rest_begin, jnp.where(i > 0, t + 1, nobody), jnp.where(i > 0, path, 0.0))
        rest_free, rest_gathered = put(rest_free, t, free), put(rest_gathered, t, gathered)
        item = row(items.item, t)
        is_compute, is_link, is_barrier = (item[j] != 0 for j in (1, 2, 3))

        def reader(state: tuple[Array, Array]) -> tuple[Array, Array]:
            c, path = state
            return row(items.previous_reader, c), jnp.maximum(path, row(rest_begin, c))

        never = jnp.full((), NEVER, path.dtype)
        readers: tuple[Array, Array] = row(items.last_reader, t), never
        _, path = lax.while_loop(lambda x: x[0] >= 0, reader, readers)
        path = jnp.where(is_link, jnp.maximum(path, gathered), path)
        own, on = costs_of_item(of, item)
        streams = [free[s] for s in range(free.shape[0])]
        for s in reversed(range(len(streams))):
            takes = own[s] > 0
            used = (s,) if s == 0 else (s, 0)
            longest = path
            for u in used:
                of_stream = streams[u] if on is None else largest(jnp.where(on, streams[u], NEVER))
                longest = jnp.maximum(longest, of_stream if u == s else jnp.where(items.overlap, NEVER, of_stream))
            path = jnp.where(takes, longest + own[s], path)
            for u in used:
                does = takes if u == s else takes & ~items.overlap
                streams[u] = jnp.where(does if on is None else does & on, path, streams[u])
        # A compute item begins when the accumulator is there, and empties it.
        gathered = jnp.where(is_compute, path, gathered)
        free = jnp.where(is_barrier, 0.0, jnp.stack(streams))
        return free, jnp.where(is_barrier, NEVER, gathered), path, rest_free, rest_gathered, rest_begin

    count = jnp.maximum(last - stop + 1, 0)
    zero = jnp.zeros((), old.end.dtype)
    begin = row(old.rest_of_free, jnp.maximum(last, 0)), row(old.rest_of_gathered, jnp.maximum(last, 0))
    start = (*begin, zero, old.rest_of_free, old.rest_of_gathered, old.rest_of_begin)
    _, _, path, rest_free, rest_gathered, rest_begin = lax.fori_loop(0, count, body, start)
    at = jnp.where(count > 0, last - count + 1, nobody)
    return rest_free, rest_gathered, put(rest_begin, at, jnp.where(count > 0, path, 0.0))


def traced(items: ItemRecords, of: ItemCosts, old: Trace, first: Array, last: Array, is_wanted: Array) -> Trace:
    """The trace of what takes `of`, where `old` is of the same but for items from `first` to `last`; `old` unless `is_wanted`.

    The last item's rests are those of a phase's end.
    """
    end, free, gathered, length = forward(items, of, old, first, jnp.where(is_wanted, items.num_items, first))
    of_free, of_gathered, of_begin = backward(items, of, old, last, jnp.where(is_wanted, 0, last + 1))
    return Trace(
        end=end, free=free, gathered=gathered, rest_of_free=of_free, rest_of_gathered=of_gathered, rest_of_begin=of_begin,
        length=length,
    )  # fmt: skip

