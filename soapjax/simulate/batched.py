"""The batched full simulator: one `lax.scan` over the schedule, vectorised over strategies.

The state is the time each stream is free and the end of every task; both are exact
maxima and sums of durations, so that it equals the event simulator up to float32 rounding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from soapjax.simulate.schedule import Schedule


def simulate_batch(schedule: Schedule, durations: Array) -> Array:
    """Step times [B] of B strategies from durations [B, T]. Pure; jit it with the schedule closed over."""
    batch, n = durations.shape
    occupies = jnp.asarray(schedule.occupies)

    def step(carry: tuple[Array, Array], x) -> tuple[tuple[Array, Array], None]:
        free, end = carry  # [S, B], [T + 1, B]
        t, duration, needs, mask, is_barrier = x
        ready = end[needs].max(axis=0)
        active = (duration > 0) | is_barrier
        stream = jnp.where(mask[:, None], free, 0.0).max(axis=0)
        start = jnp.where(active, jnp.maximum(ready, stream), ready)
        done = start + duration
        free = jnp.where(mask[:, None] & active, done, free)
        end = jax.lax.dynamic_update_index_in_dim(end, done, t, 0)
        return (free, end), None

    start = (jnp.zeros((occupies.shape[1], batch), durations.dtype), jnp.zeros((n + 1, batch), durations.dtype))
    inputs = (
        jnp.arange(n), durations.T, jnp.asarray(schedule.predecessors), occupies, jnp.asarray(schedule.is_barrier),
    )  # fmt: skip
    (_, end), _ = jax.lax.scan(step, start, inputs)
    return end.max(axis=0)
