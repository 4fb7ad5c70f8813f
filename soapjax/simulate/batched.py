"""The batched full simulator: one walk over all items, vectorised over strategies.

The state is the time each stream is free and the ends of items that are still waited for; all are exact
maxima and sums of durations, so that it equals the event simulator up to float32 rounding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from soapjax.costs.indexing import put_row
from soapjax.costs.indexing import row as row_of
from soapjax.simulate.kernel import as_one_kernel
from soapjax.simulate.trace import ItemArrays, occupied


def simulate_batch(items: ItemArrays, durations: Array, *, overlap: bool, on: Array | None = None) -> Array:
    """Step times [B] of B strategies from durations [B, T, S]. Pure.

    `on` bool [B, T, G] says which groups of devices take part in each item; None where there is one group.
    """
    if not durations.shape[1]:
        return jnp.zeros(len(durations), durations.dtype)
    walk = as_one_kernel(lambda *x: _walk(*x, overlap=overlap))
    return walk(items, durations.transpose(1, 2, 0), None if on is None else on.transpose(1, 2, 0))


def _walk(items: ItemArrays, seconds: Array, on: Array | None, *, overlap: bool) -> Array:
    """Makespans [Q] from `seconds` [T, S, Q] and `on` [T, G, Q]. The branch per kind does only what the kind needs."""
    n, num_streams, q = seconds.shape
    groups, dtype = 1 if on is None else on.shape[1], seconds.dtype
    zeros = jnp.zeros(q, dtype)

    def latest_of(free: tuple[Array, ...], used: tuple[int, ...], latest: Array, held: Array | None = None) -> Array:
        for u in used:
            for g in range(groups):
                latest = jnp.maximum(latest, free[u][g] if held is None else jnp.where(held[g], free[u][g], 0))
        return latest

    def body(t: Array, state):
        free, gathered, last_end, ends = state
        # An end is written one item late, so that the loop reads and writes the array of ends in one place and in that order.
        ends = put_row(ends, row_of(items.slot, jnp.where(t > 0, t - 1, n)), last_end)
        p = row_of(items.predecessor, t)
        ready = jnp.where(p < n, row_of(ends, row_of(items.slot, p)), 0)
        own, is_link = row_of(seconds, t), row_of(items.is_link, t)
        held = None if on is None else row_of(on, t)

        def occupy(free: tuple[Array, ...], end: Array, s: int) -> tuple[tuple[Array, ...], Array]:
            used, takes = occupied(s, overlap), own[s] > 0
            end = jnp.where(takes, latest_of(free, used, end, held) + own[s], end)
            takes = takes[None] if held is None else takes & held
            return tuple(jnp.where(takes, end, f) if u in used else f for u, f in enumerate(free)), end

        def compute():
            streams, end = occupy(free, gathered, 0)
            return streams, zeros, end

        def communicate():
            streams, end = free, ready
            for s in range(1, num_streams):
                streams, end = occupy(streams, end, s)
            return streams, jnp.where(is_link, jnp.maximum(gathered, end), gathered), end

        def barrier():
            latest = latest_of(free, tuple(range(num_streams)), zeros)
            return tuple(jnp.broadcast_to(latest, (groups, q)) for _ in free), gathered, last_end

        kind = jnp.where(row_of(items.is_barrier, t), 2, jnp.where(row_of(items.is_compute, t), 0, 1))
        return *jax.lax.switch(kind, (compute, communicate, barrier)), ends

    none = tuple(jnp.zeros((groups, q), dtype) for _ in range(num_streams))
    state = (none, zeros, zeros, jnp.zeros((len(items.num_slots), q), dtype))
    return latest_of(jax.lax.fori_loop(0, n, body, state)[0], tuple(range(num_streams)), zeros)
