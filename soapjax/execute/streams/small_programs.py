"""Small programs beside those of the stages, of which many steps have the same: each is compiled once per shape and layout.

XLA compiles a slice of a few arrays about as long as a stage of a small model: where a process runs several pipelines (of two
models, or of one that is planned anew) these programs are found again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from soapjax.execute.parts.batch_axes import joined

Program = Callable[..., tuple[Any, ...]]


@functools.lru_cache(maxsize=4096)
def rows_apart(rows: tuple[int, ...], shardings: tuple[NamedSharding, ...]) -> Program:
    """`(*stacked) -> rows`: those `rows` of one array after those of another, each row laid out as its sharding says."""
    return jax.jit(lambda *stacked: tuple(x[m] for x in stacked for m in rows), out_shardings=shardings)


@functools.lru_cache(maxsize=4096)
def rows_joined(dims: tuple[int, ...], shardings: tuple[NamedSharding, ...]) -> Program:
    """`(*stacked) -> arrays`: what is stacked by micro-batch as the whole batch, which is a dim of each."""
    return jax.jit(lambda *stacked: tuple(map(joined, stacked, dims)), out_shardings=shardings)


@functools.lru_cache(maxsize=4096)
def zeros(shapes: tuple[tuple[tuple[int, ...], Any], ...], shardings: tuple[NamedSharding, ...]) -> Program:
    """Arrays of these shapes and dtypes."""
    return jax.jit(lambda: tuple(jnp.zeros(shape, dtype) for shape, dtype in shapes), out_shardings=shardings)


@functools.lru_cache(maxsize=4096)
def numbers(of: tuple[int, ...], sharding: NamedSharding) -> Program:
    """Numbers of micro-batches, as passes take them."""
    return jax.jit(lambda: tuple(jnp.uint32(m) for m in of), out_shardings=(sharding,) * len(of))
