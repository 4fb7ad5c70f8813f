"""The walk over items that both jitted simulators share: max-plus steps in schedule order, many strategies side by side."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from soapjax.costs.indexing import row as row_of


def walk(
    count: Array, seconds: Array, row: Array, rows: Array, start: Array, is_link: Array, is_compute: Array, is_barrier: Array,
    run: Array, tail: Array, on: Array | None, row_holders: Array | None, overlap: bool,
) -> Array:  # fmt: skip
    """Makespans [Q] of Q strategies.

    Args:
      count: how many of the W items to walk.
      seconds: [W, S] durations that all strategies have in common, per stream: compute, then link levels.
      row: int32 [W], into `rows` [R + 1, S, Q] and `row_holders` bool [R + 1, G, Q]: durations that differ, added to
        the common ones; R where none do.
      start: int32 [W]: the position of the item whose end is waited for, W for nobody.
      is_link, is_compute, is_barrier: bool [W], see items.py.
      run, tail: [W], []: seconds of compute before an item, and behind the last.
      on: bool [W, G]: which groups of devices take part, where it is common; None where there is one group.
      overlap: whether communication leaves the compute stream free.

    An end is written one item late, so that the loop reads and writes the array of ends in one place and in that order,
    and XLA updates it without a copy. The branch per kind does only what the kind needs.
    """
    size, num_streams = seconds.shape
    q = rows.shape[-1]
    groups = 1 if on is None else on.shape[1]
    zeros = jnp.zeros((q,), rows.dtype)
    kind = jnp.where(is_barrier, 3, jnp.where(is_compute, 0, jnp.where(is_link, 1, 2)))

    columns = [seconds[:, s] for s in range(num_streams)]

    def body(i: Array, carry):
        free, gathered, last, ends = carry  # free: [stream][group] of [Q]
        ends = jax.lax.dynamic_update_index_in_dim(ends, last, jnp.where(i > 0, i - 1, size), 0)
        begin = row_of(ends, row_of(start, i))

        def holds(g: int) -> Array:
            of_row = row_of(row_holders, row_of(row, i))[g]
            return of_row | (row_of(on, i)[g] & (row_of(row, i) == len(rows) - 1))

        def occupy(free: list[list[Array]], begin: Array, s: int) -> Array:
            """Runs stage `s` of the item on the streams that it needs; gives its end."""
            d = row_of(rows, row_of(row, i))[s] + row_of(columns[s], i)
            used = (s,) if overlap or s == 0 else (0, s)
            latest = begin
            for u in used:
                for g in range(groups):
                    latest = jnp.maximum(latest, free[u][g] if on is None else jnp.where(holds(g), free[u][g], 0.0))
            end = jnp.where(d > 0, latest + d, begin)
            for u in used:
                for g in range(groups):
                    takes = d > 0 if on is None else (d > 0) & holds(g)
                    free[u][g] = jnp.where(takes, end, free[u][g])
            return end

        def opened(state):
            free = [list(stream) for stream in state[0]]
            free[0] = [f + row_of(run, i) for f in free[0]]
            return free

        def closed(free, gathered: Array, end: Array):
            return tuple(tuple(stream) for stream in free), gathered, end

        def compute(state):
            free = opened(state)
            end = occupy(free, state[1], 0)
            return closed(free, zeros, end)

        def communicate(state, is_link: bool):
            free, end = opened(state), begin
            for s in range(1, num_streams):
                end = occupy(free, end, s)
            return closed(free, jnp.maximum(state[1], end) if is_link else state[1], end)

        def barrier(state):
            free = opened(state)
            latest = zeros
            for stream in free:
                for f in stream:
                    latest = jnp.maximum(latest, f)
            return closed([[latest] * groups for _ in free], state[1], state[2])

        branches = (compute, lambda x: communicate(x, True), lambda x: communicate(x, False), barrier)
        free, gathered, last = jax.lax.switch(row_of(kind, i), branches, (free, gathered, last))
        return free, gathered, last, ends

    none = tuple(tuple(zeros for _ in range(groups)) for _ in range(num_streams))
    free, _, _, _ = jax.lax.fori_loop(0, count, body, (none, zeros, zeros, jnp.zeros((size + 1, q), rows.dtype)))
    return jnp.stack([f + tail * (s == 0) for s, stream in enumerate(free) for f in stream]).max(0)
