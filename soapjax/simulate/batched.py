"""The batched full simulator: one walk over all items, vectorised over strategies.

The state is the time each stream is free and the end of every item; both are exact
maxima and sums of durations, so that it equals the event simulator up to float32 rounding.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from soapjax.simulate.items import NONE, Items
from soapjax.simulate.walk import walk


def simulate_batch(items: Items, durations: Array, *, overlap: bool, on: Array | None = None) -> Array:
    """Step times [B] of B strategies from durations [B, T, S]. Pure; jit it with the items closed over.

    `on` bool [B, T, G] says which groups of devices take part in each item; None where there is one group.
    """
    n, streams = durations.shape[1:]
    start = np.where(items.predecessor == NONE, n, items.predecessor).astype(np.int32)
    groups = None if on is None else jnp.zeros((n, on.shape[2]), bool)
    return walk(
        jnp.int32(n), jnp.zeros((n, streams), durations.dtype), jnp.arange(n), durations.transpose(1, 2, 0), jnp.asarray(start),
        jnp.asarray(items.is_link), jnp.asarray(items.is_compute), jnp.asarray(items.is_barrier), jnp.zeros(n, durations.dtype),
        jnp.zeros((), durations.dtype), groups, None if on is None else on.transpose(1, 2, 0), overlap,
    )  # fmt: skip
