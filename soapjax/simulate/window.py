"""From a strategy's trace to the step times under many changes of a few items: windows and adjoints, exactly.

In each phase the items from the first changed one to the last, the *window*, are walked, all candidates side
by side, from the kept state before it; the adjoint behind it says how much longer the phase takes. What crosses the window's
end (an item in front of it or inside that one behind it waits for) is closed by the path from where the waiting
item begins. Phases without a changed item keep their lengths.

Inside a window most items need no walking, the same ones for all candidates:

1. An item that takes no time passes its predecessor's end on: who waits for it waits for its *root*.
2. A wait for a compute item of the same devices is implied by the order on the compute stream.
3. Compute items that then wait for nothing, and for whose end nothing on another stream waits, run back to back: a run of
   them is one duration, paid before the next item.

With pins the order on a stream implies less: 2 and 3 are left out, and every item says which groups of devices take part.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from soapjax.costs.indexing import put, put_row, rows
from soapjax.costs.indexing import row as row_of
from soapjax.simulate.kernel import as_one_kernel
from soapjax.simulate.trace import ItemArrays, Trace, occupied


class Changed(NamedTuple):
    """R items that Q candidates change; an item stands there once, or is T (nobody)."""

    item: Array  # int32 [R]
    seconds: Array  # [R, S, Q]
    holders: Array | None  # bool [R, G, Q]: who takes part; None without pins


def window_times(items: ItemArrays, trace: Trace, changed: Changed, *, overlap: bool) -> Array:
    """Step times [Q] of the traced strategy under each of Q candidates' changes. Pure."""
    n, num_streams = trace.seconds.shape
    pins = changed.holders is not None
    # What no candidate really changes is none of the window.
    moves = (changed.seconds != rows(_padded(trace.seconds), changed.item)[..., None]).any((1, 2))
    if pins:
        moves |= (changed.holders != rows(_padded(trace.on), changed.item)[..., None]).any((1, 2))
    item = jnp.where(moves, changed.item, n)
    num_rows = len(item)
    row = put(jnp.full(n + 1, num_rows, jnp.int32), item, jnp.arange(num_rows, dtype=jnp.int32)).at[n].set(num_rows)
    is_root = put(trace.is_root, item, True)
    is_asked = put(trace.is_asked, rows(trace.root, rows(items.predecessor, item)), True)
    num_phases = len(items.phase_end)
    in_phase = (jnp.append(items.phase, num_phases)[item] == jnp.arange(num_phases)[:, None])  # [F, R]
    first = jnp.where(in_phase, item, n).min(1)
    last = jnp.where(in_phase, item, -1).max(1)
    seconds = jnp.concatenate([changed.seconds, jnp.zeros_like(changed.seconds[:1])])
    holders = jnp.concatenate([changed.holders, jnp.zeros_like(changed.holders[:1])]) if pins else None
    walk = as_one_kernel(lambda *x: _windows(*x, overlap=overlap))
    return walk(items, trace, row, is_root, is_asked, first, last, seconds, holders)


def _padded(x: Array) -> Array:
    return jnp.concatenate([x, jnp.zeros_like(x[:1])])


def _windows(
    items: ItemArrays, trace: Trace, row: Array, is_root: Array, is_asked: Array, first: Array, last: Array, seconds: Array,
    holders: Array | None, *, overlap: bool,
) -> Array:  # fmt: skip
    n, num_streams = trace.seconds.shape
    num_rows, q, dtype = len(seconds) - 1, seconds.shape[-1], seconds.dtype
    pins = holders is not None
    groups = trace.on.shape[1] if pins else 1

    def waits_for(t: Array) -> Array:
        """The root of what item `t` waits for."""
        p = row_of(items.predecessor, t)
        return jax.lax.while_loop(lambda p: ~row_of(is_root, p), lambda p: row_of(items.predecessor, p), p)

    def is_real(w: Array) -> Array:
        """Whether waiting for root `w` has to be looked at."""
        return (w < n) if pins else (w < n) & ~row_of(items.is_compute, w)

    def phase(f: Array, carry):
        total, ends = carry
        begin, stop, limit = row_of(first, f), row_of(last, f), row_of(items.phase_end, f)
        is_touched = begin <= stop
        at = jnp.minimum(begin, n - 1)

        def end_of(ends: Array, w: Array) -> Array:
            return jnp.where((w < begin) | (w == n), row_of(trace.end, w), row_of(ends, row_of(items.slot, w)))

        def is_needed(t: Array, is_linked: Array) -> Array:
            is_compute, timed = row_of(items.is_compute, t), row_of(trace.takes_time, t)
            waiting = timed | (row_of(items.is_link, t) & is_real(waits_for(t)))
            here = is_compute if pins else is_compute & (is_linked | row_of(is_asked, t))
            return (row_of(row, t) < num_rows) | here | (~is_compute & waiting)

        def walk_item(state):
            t, run, is_linked, free, gathered, last_end, last_slot, ends = state

            def pass_over(state):
                t, run = state
                return t + 1, run + jnp.where(row_of(items.is_compute, t), row_of(trace.seconds, t)[0], 0)

            t, run = jax.lax.while_loop(lambda x: (x[0] <= stop) & ~is_needed(x[0], is_linked), pass_over, (t, run))
            is_inside = t <= stop
            t = jnp.minimum(t, n - 1)
            # An end is written one item late, so that the loop reads and writes the array of ends in one place and in that order.
            ends = put_row(ends, last_slot, last_end)
            r, w = row_of(row, t), waits_for(t)
            is_compute, is_link = row_of(items.is_compute, t), row_of(items.is_link, t)
            ready = end_of(ends, w)
            own, common = row_of(seconds, r), row_of(trace.seconds, t)
            held = None
            if pins:
                held = row_of(holders, r) | (row_of(trace.on, t)[:, None] & (r == num_rows))

            def occupy(free: list[Array], end: Array, s: int) -> Array:
                d = own[s] + jnp.where(r == num_rows, common[s], 0)
                used, latest = occupied(s, overlap), end
                for u in used:
                    for g in range(groups):
                        latest = jnp.maximum(latest, jnp.where(held[g], free[u][g], 0) if pins else free[u][g])
                end = jnp.where(d > 0, latest + d, end)
                for u in used:
                    free[u] = jnp.where((d > 0) & held if pins else (d > 0)[None], end, free[u])
                return end

            def compute():
                streams = [free[0] + run, *free[1:]]
                end = occupy(streams, gathered, 0)
                return tuple(streams), jnp.zeros_like(gathered), end

            def communicate():
                streams, end = [free[0] + run, *free[1:]], ready
                for s in range(1, num_streams):
                    end = occupy(streams, end, s)
                return tuple(streams), jnp.where(is_link, jnp.maximum(gathered, end), gathered), end

            def nothing():
                return (free[0] + run, *free[1:]), gathered, last_end

            kind = jnp.where(is_inside, jnp.where(is_compute, 0, 1), 2)
            free, gathered, end = jax.lax.switch(kind, (compute, communicate, nothing))
            is_linked = jnp.where(is_compute, False, is_linked | is_link)
            slot = jnp.where(is_inside, row_of(items.slot, t), last_slot)
            return t + 1, jnp.zeros((), dtype), is_linked, free, gathered, end, slot, ends

        def wide(x: Array, *shape: int) -> Array:
            return jnp.broadcast_to(x[..., None], (*shape, q))

        state = (
            begin, jnp.zeros((), dtype), jnp.bool_(True),
            tuple(wide(row_of(trace.free, at)[s], groups) for s in range(num_streams)), wide(row_of(trace.gathered, at)),
            jnp.zeros(q, dtype), jnp.int32(len(ends) - 1), ends,
        )  # fmt: skip
        state = jax.lax.while_loop(lambda x: x[0] <= stop, walk_item, state)
        _, _, _, free, gathered, last_end, last_slot, ends = state
        ends = put_row(ends, last_slot, last_end)
        behind = jnp.maximum(stop, 0)
        longest = gathered + row_of(trace.rest_of_gathered, behind)
        for s in range(num_streams):
            for g in range(groups):
                longest = jnp.maximum(longest, free[s][g] + row_of(trace.rest_of_free, behind)[s, g])

        def crosses(c: Array) -> Array:
            w = waits_for(c)
            return (w <= stop) & (row_of(trace.takes_time, c) | (row_of(items.is_link, c) & is_real(w)))

        def close(state):
            c, longest = state
            c = jax.lax.while_loop(lambda c: (c < limit) & ~crosses(c), lambda c: c + 1, c)
            path = end_of(ends, waits_for(jnp.minimum(c, n))) + row_of(trace.rest_of_begin, jnp.minimum(c, n - 1))
            return c + 1, jnp.where(c < limit, jnp.maximum(longest, path), longest)

        start = jnp.where(is_touched, stop + 1, limit)
        _, longest = jax.lax.while_loop(lambda x: x[0] < limit, close, (start, longest))
        return total + jnp.where(is_touched, longest, row_of(trace.length, f)), ends

    carry = (jnp.zeros(q, dtype), jnp.zeros((len(items.num_slots), q), dtype))
    return jax.lax.fori_loop(0, len(items.phase_end), phase, carry)[0]
