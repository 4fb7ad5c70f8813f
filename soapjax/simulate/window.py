"""From a strategy's trace to the step times under many changes of a few items: windows and adjoints, exactly.

In each phase the items from the first changed one to the last, the *window*, are walked, all candidates side
by side, from the kept state before it; the adjoint behind it says how much longer the phase takes. What crosses the window's
end (an item in front of it or inside that one behind it waits for) is closed by the path from where the waiting
item begins. Phases without a changed item keep their lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from soapjax.jit.array_types import Array
from soapjax.jit.kernel import largest, put, row
from soapjax.simulate.simulated_trace import NEVER, Trace
from soapjax.simulate.walk import MAX_PHASES, ItemCosts, ItemRecords, costs_of_item, stream_times

FAR = 1 << 30


class Changed(NamedTuple):
    """What Q candidates make of some tasks and rows of a strategy; row 0 is nobody's."""

    task_of: Array  # int32 [K + 1]: 1 + the place in `compute_s`, 0 where it is as before
    row_of: Array  # int32 [X + 1]: the place in `full_s`, 0 where it is as before
    compute_s: Array  # [tasks, Q]
    full_s: Array  # [R, L, Q]
    pays: Array  # [R, Q]
    on_compute: Array | None  # bool [tasks, G, Q]
    on_rows: Array | None  # bool [R, G, Q]


def no_windows() -> tuple[Array, Array]:
    """First and last changed item of every phase, int32 [F] each, where nothing changes."""
    return jnp.full(MAX_PHASES, FAR, jnp.int32), jnp.full(MAX_PHASES, -1, jnp.int32)


def widened(items: ItemRecords, windows: tuple[Array, Array], t: Array, moves: Array) -> tuple[Array, Array]:
    """`windows` that hold item `t` too, if it `moves`."""
    first, last = windows
    moves = moves & (t < items.item.shape[0] - 1)
    f = jnp.where(moves, row(items.item, t)[4], 0)
    first = put(first, f, jnp.minimum(row(first, f), jnp.where(moves, t, FAR)))
    return first, put(last, f, jnp.maximum(row(last, f), jnp.where(moves, t, -1)))


def passing_by(items: ItemRecords, trace: Trace, first: Array, last: Array) -> Array:
    """Per phase, the longest path over a wait that its window does not touch: from before it to behind it."""

    def phase(f: Array, found: Array) -> Array:
        begin, stop = row(first, f), row(last, f)
        limit = jnp.where(begin <= stop, row(items.phase_end, f), stop)

        def waiting(c: Array, longest: Array) -> Array:
            before = row(items.item, c)[0]
            path = row(trace.end, before) + row(trace.rest_of_begin, c)
            return jnp.where(before < begin, jnp.maximum(longest, path), longest)

        none = jnp.full((), NEVER, trace.end.dtype)
        return put(found, f, lax.fori_loop(stop + 1, limit, waiting, none))

    return lax.fori_loop(0, items.num_phases, phase, jnp.full(MAX_PHASES, NEVER, trace.end.dtype))


def window_times(
    items: ItemRecords, of: ItemCosts, trace: Trace, changed: Changed, first: Array, last: Array, around: Array, places: Array
) -> tuple[Array, Array]:
    """Step times [Q] of the traced strategy under each of Q candidates' changes, and `places` [V + 1, Q], scratch.

    `first` and `last` are the windows of the phases, `around` is of `passing_by`.
    """
    q, nobody, num_places = places.shape[1], items.item.shape[0] - 1, places.shape[0] - 1
    pins, num_streams = changed.on_rows is not None, trace.free.shape[1]
    dtype = trace.end.dtype

    def wide(x: Array) -> Array:
        return jnp.broadcast_to(x[..., None], (*x.shape, q))

    def phase(f: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        total, places = carry
        begin, stop = row(first, f), row(last, f)
        at = jnp.minimum(begin, nobody)

        def step(t: Array, state: tuple) -> tuple:
            free, gathered, last_end, last_place, longest, places = state
            # An end is written one item late, so that the loop reads and writes the array of ends in one place and in that order.
            places = put(places, last_place, last_end)
            item = row(items.item, t)
            before, is_compute, is_link, source = item[0], item[1] != 0, item[2] != 0, item[6]
            is_outside = (before < begin) | (before == nobody)
            ready = jnp.where(is_outside, row(trace.end, before), row(places, row(items.item, before)[5]))
            k = jnp.where(is_compute, row(changed.task_of, jnp.where(is_compute, source, 0)), 0)
            r = jnp.where(is_compute, 0, row(changed.row_of, jnp.where(is_compute, 0, source)))
            base, base_on = costs_of_item(of, item)
            compute_s = row(changed.compute_s, jnp.maximum(k - 1, 0))
            sent_s = row(changed.full_s, r) * row(changed.pays, r)
            links = (jnp.where(r > 0, sent_s[s], base[1 + s]) for s in range(num_streams - 1))
            own = [jnp.where(k > 0, compute_s, base[0]), *links]
            on = None
            if pins:
                on = jnp.where(r > 0, row(changed.on_rows, r), base_on[:, None])
                on = jnp.where(k > 0, row(changed.on_compute, jnp.maximum(k - 1, 0)), on)
            streams, end = stream_times(
                [free[s] for s in range(num_streams)], jnp.where(is_compute, gathered, ready), own, items.overlap, on
            )  # fmt: skip
            gathered = jnp.where(is_link, jnp.maximum(gathered, end), jnp.where(is_compute, 0.0, gathered))

            def waiting(state: tuple[Array, Array]) -> tuple[Array, Array]:
                c, longest = state
                return row(items.previous_reader, c), jnp.maximum(longest, end + row(trace.rest_of_begin, c))

            readers: tuple[Array, Array] = row(items.last_reader, t), longest
            _, longest = lax.while_loop(lambda x: x[0] > stop, waiting, readers)
            return jnp.stack(streams), gathered, end, item[5], longest, places

        start = (
            wide(row(trace.free, at)), wide(row(trace.gathered, at)), jnp.zeros(q, dtype), jnp.int32(num_places),
            jnp.full(q, row(around, f)), places,
        )  # fmt: skip
        free, gathered, last_end, last_place, longest, places = lax.fori_loop(begin, stop + 1, step, start)
        places = put(places, last_place, last_end)
        longest = _longest_behind(trace, jnp.maximum(stop, 0), free, gathered, longest, pins)
        return total + jnp.where(begin <= stop, longest, row(trace.length, f)), places

    return lax.fori_loop(0, items.num_phases, phase, (jnp.zeros(q, dtype), places))


def _longest_behind(trace: Trace, last: Array, free: Array, gathered: Array, longest: Array, pins: bool) -> Array:
    """The longest path [Q] of a phase: `longest`, or one that goes on behind item `last` from its streams."""
    longest = jnp.maximum(longest, gathered + row(trace.rest_of_gathered, last))
    rest = row(trace.rest_of_free, last)
    for s in range(free.shape[0]):
        path = free[s] + (rest[s][:, None] if pins else rest[s])
        longest = jnp.maximum(longest, largest(path) if pins else path)
    return longest
