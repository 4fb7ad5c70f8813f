"""The gradient of max-pooling, without the scatter that XLA makes of it.

`select_and_scatter_add` is one loop on CPUs, and on GPUs a scatter into an array of zeros beside a second one, both
made early in the forward pass. Here every element of a window adds its share where it was the largest: sums of
padded arrays, which compilers fuse. The same element is chosen: the first one of those that are equal.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def pool_gradient(source: Any, operand: Any, params: dict[str, Any]) -> Any:
    """What `select_and_scatter_add` computes: each of `source` where its window's choice is, added up in the shape of `operand`.

    Args:
      source: the gradient of the pooled image, one per window.
      operand: the image.
      params: of the equation: `select_prim` (ge or le), `window_dimensions`, `window_strides`, `padding`.
    """
    select, window = params["select_prim"], params["window_dimensions"]
    strides, padding = params["window_strides"], params["padding"]
    outside = np.array(-np.inf if select is jax.lax.ge_p else np.inf, operand.dtype)
    padded = jax.lax.pad(operand, outside, [(low, high, 0) for low, high in padding])
    places = list(itertools.product(*(range(w) for w in window)))

    def at(place: tuple[int, ...]) -> Any:
        """The elements at one place of every window."""
        span = zip(place, source.shape, strides, strict=True)
        return padded[tuple(slice(o, o + (n - 1) * s + 1, s) for o, n, s in span)]

    best, chosen = at(places[0]), jnp.zeros(source.shape, jnp.uint8)
    for i, place in enumerate(places[1:], 1):
        other = at(place)
        stays = select.bind(best, other)
        best, chosen = jnp.where(stays, best, other), jnp.where(stays, chosen, jnp.uint8(i))
    chosen = jax.lax.optimization_barrier(chosen)  # found once, not by each of the sums
    summed_as = jnp.promote_types(source.dtype, jnp.float32)
    total, zero = jnp.zeros(operand.shape, summed_as), np.zeros((), summed_as)
    for i, place in enumerate(places):
        edges = []
        for o, (low, _), n, s, size in zip(place, padding, source.shape, strides, operand.shape, strict=True):
            edges.append((o - low, size - (o - low) - (n - 1) * s - 1, s - 1))
        total += jax.lax.pad(jnp.where(chosen == i, source.astype(summed_as), zero), zero, edges)
    return total.astype(source.dtype)
