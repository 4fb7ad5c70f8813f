"""Indexing that trusts its indices: not negative, and inside.

`x[i]` of jax.numpy first counts negative indices from the end: four operations more per access, in programs that
consist of accesses, and so a good part of their compile time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def rows(x: Array, index: Array) -> Array:
    """`x[index]`."""
    return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def along(x: Array, index: Array) -> Array:
    """`x[i, index[i, j]]` [N, J] of `x` [N, D] and `index` [N, J]."""
    return jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds")


def row(x: Array, i: Array) -> Array:
    """`x[i]` of one index."""
    return jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False, allow_negative_indices=False)


def put_row(x: Array, i: Array, value: Array | float) -> Array:
    """`x.at[i].set(value)` of one index."""
    return jax.lax.dynamic_update_index_in_dim(x, jnp.asarray(value, x.dtype), i, 0, allow_negative_indices=False)


def put(x: Array, index: Array, values: Array | float) -> Array:
    """`x.at[index].set(values)`."""
    return x.at[index].set(values, mode="promise_in_bounds", wrap_negative_indices=False)


def add(x: Array, index: Array, values: Array) -> Array:
    """`x.at[index].add(values)`."""
    return x.at[index].add(values, mode="promise_in_bounds", wrap_negative_indices=False)
