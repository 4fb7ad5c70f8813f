"""A dynamic slice that the compiled program knows by a name of its own.

XLA's loop emitters (xla/codegen/emitters) make one function per operand of a fusion, named after the instruction with every
``-`` made a ``_``. JAX's slice is called ``dynamic_slice.4``, the slice that the partitioner makes of a constraint
``dynamic-slice.4``: in one fusion the second function is lost, and the first is read twice. Wrong numbers, without a word
(jaxlib 0.10.2: run on CPUs, and seen in what it compiles for CUDA; tests/execute/test_block_slice.py fails when it is mended).
Nobody else's slice is a ``block_slice``.

What `jax.lax.scan` slices keeps JAX's name: `hlo.namesakes` finds such pairs where a proof fails.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxlib.mlir.dialects import stablehlo

block_slice_p = Primitive("block_slice")


def block_slice(x: Any, starts: Any, sizes: tuple[int, ...]) -> Any:
    """The block of `x` that begins at `starts`: integer scalars of one type. Where it would end outside it is moved inwards."""
    return block_slice_p.bind(x, *starts, sizes=tuple(sizes))


def block_slice_in_dim(x: Any, start: Any, size: int, dim: int) -> Any:
    """As `jax.lax.dynamic_slice_in_dim`."""
    zero = jnp.zeros_like(start)
    starts = [start if d == dim else zero for d in range(x.ndim)]
    return block_slice(x, starts, tuple(size if d == dim else n for d, n in enumerate(x.shape)))


@block_slice_p.def_impl
def _slice(x: Any, *starts: Any, sizes: tuple[int, ...]) -> Any:
    return jax.lax.dynamic_slice_p.bind(x, *starts, slice_sizes=sizes)


@block_slice_p.def_abstract_eval
def _shape(x: Any, *starts: Any, sizes: tuple[int, ...]) -> Any:
    return x.update(shape=sizes)


def _lowered(ctx: Any, x: Any, *starts: Any, sizes: tuple[int, ...]) -> list[Any]:
    return [stablehlo.dynamic_slice(x, starts, mlir.dense_int_array(sizes))]


def _batched(arguments: Any, dims: Any, *, sizes: tuple[int, ...]) -> tuple[Any, int]:
    (x, *starts), (dim, *start_dims) = arguments, dims
    if any(d is not None for d in start_dims):
        return jax.vmap(lambda x, *starts: _slice(x, *starts, sizes=sizes), in_axes=dims)(*arguments), 0
    return block_slice(jnp.moveaxis(x, dim, 0), [jnp.zeros_like(starts[0]), *starts], (x.shape[dim], *sizes)), 0


mlir.register_lowering(block_slice_p, _lowered)
batching.primitive_batchers[block_slice_p] = _batched
