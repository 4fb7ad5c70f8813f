"""Elementwise functions of long arrays, so that XLA's CPU compiler makes short and fast programs of them.

It merges elementwise operations into the functions that make their results, one function per result, and whatever two results
need is computed in both: of a formula of a thousand operations with ten results it makes ten of nearly a thousand. And where the
code around it gathers or interleaves, it works on one number per instruction. What stands in a loop of its own is
kept apart from both. So a long formula runs in turns of a loop, and its stages, whose results are
used many times, in loops inside.

Measured on the conversions between layouts of 64 devices: 5,000 instead of 29,500 instructions, 1.3 s instead of 3.4 to compile,
and about 100 ns instead of 405 each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

AT_ONCE = 2048  # numbers of one turn: what they need stays in the nearest cache


def in_turns(fn: Callable[..., Any], *of: Any) -> Any:
    """`fn(*of)`, computed piece by piece along the last dim of all arguments and results, which is one for all."""
    return _in_turns(fn, AT_ONCE, *of)


def as_stage(fn: Callable[..., Any], *of: Any) -> Any:
    """`fn(*of)` inside a turn, kept apart from what is computed before and after it: two turns."""
    return _in_turns(fn, AT_ONCE // 2, *of)


def _in_turns(fn: Callable[..., Any], at_once: int, *of: Any) -> Any:
    count = jax.tree.leaves(of)[0].shape[-1]
    width = min(at_once, -(-count // 2))  # XLA dissolves a loop of one turn
    traced = jax.jit(fn, inline=True)  # once, for its results' types and for the turn
    one = jax.eval_shape(traced, *jax.tree.map(lambda x: jax.ShapeDtypeStruct((*x.shape[:-1], width), x.dtype), of))
    found = jax.tree.map(lambda x: jnp.zeros((*x.shape[:-1], count), x.dtype), one)
    if not count:
        return found

    def turn(i: Array, found: Any) -> Any:
        first = jnp.minimum(i * width, count - width)
        some = traced(*jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, width, -1), of))
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, first, x.ndim - 1), found, some)

    return jax.lax.fori_loop(0, -(-count // width), turn, found)
