"""Layouts as sets of mesh axes: what the rules of the cost program compute with.

A set is an integer with a bit per axis. A layout of a tensor is one set per dim (the axes that split it), one more of the axes
over which it is a partial sum, and, where operators may be pinned, one of the pinned axes and one per binary digit of the
coordinates to which they are pinned: [W, Q] for Q *lanes*, strategies or candidates that are judged side by side. What a rule
asks of all axes is then one operation, and nothing here is compiled for one mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from soapjax.jit.array_types import Array, Scalar
from soapjax.jit.kernel import put, row
from soapjax.strategy.configs import MOST_AXES, MOST_PLACES
from soapjax.strategy.layout import PARTIAL, PINNED, REPLICATED

SET = jnp.int16
MAX_AXES = MOST_AXES
DIGITS = (MOST_PLACES - 1).bit_length()  # of coordinates


class Mesh(NamedTuple):
    """The mesh's axes, as data."""

    one: Scalar  # int32 []: 1, which XLA does not know
    num_axes: Scalar  # int32 []
    all_axes: Scalar  # SET []
    twos: Scalar  # SET []: the axes of size two
    others: Array  # SET [O]: each of the other axes
    other_sizes: Array  # float32 [O]
    num_others: Scalar  # int32 []


def mesh_of(axis_sizes: tuple[int, ...]) -> Mesh:
    others = [a for a, size in enumerate(axis_sizes) if size != 2]
    bits, sizes = np.zeros(MAX_AXES, np.int16), np.ones(MAX_AXES, np.float32)
    bits[: len(others)], sizes[: len(others)] = [1 << a for a in others], [axis_sizes[a] for a in others]
    twos = sum(1 << a for a, size in enumerate(axis_sizes) if size == 2)
    count = len(axis_sizes)
    return Mesh(
        one=np.int32(1), num_axes=np.int32(count), all_axes=np.int16((1 << count) - 1), twos=np.int16(twos), others=bits,
        other_sizes=sizes, num_others=np.int32(len(others)),
    )  # fmt: skip


def stage(mesh: Mesh, fn: Callable[..., Any], *of: Any) -> Any:
    """`fn(*of)` in a loop of one turn, which XLA cannot know: what several results need is computed once, in a short function.

    XLA merges elementwise operations into the functions that make their results, one function per result, and whatever two
    results need is computed in both.
    """
    none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(fn, *of))
    return lax.fori_loop(0, mesh.one, lambda _, __: fn(*of), none)


def columns_of(layout: Array) -> np.ndarray:
    """The numbers of a layout's columns, int32 [W, 1]. Rules choose by them, and concatenate nothing: what they choose from is
    computed for many lanes at once, where the parts of a concatenation are told apart lane by lane."""
    return np.arange(layout.shape[0], dtype=np.int32)[:, None]


def union(sets: Array | Sequence[Array]) -> Array:
    """Of [n, ...]."""
    return functools.reduce(jnp.bitwise_or, [sets[i] for i in range(len(sets))])


def every(truths: Array) -> Array:
    """Over the first dim."""
    return functools.reduce(jnp.logical_and, [truths[i] for i in range(truths.shape[0])])


def only_if(truth: Array, sets: Array) -> Array:
    """Sets, or numbers, where `truth`; else none, or zero."""
    return jnp.where(truth, sets, jnp.zeros((), sets.dtype))


def first_of(sets: Array) -> Array:
    """The first axis of each set, as a set."""
    return sets & -sets


def up_to(sets: Array) -> Array:
    """All axes up to the last of each set; none of an empty one."""
    return lax.shift_right_logical(jnp.full_like(sets, -1), lax.clz(sets))


def behind(sets: Array) -> Array:
    """All axes behind the first of each set; none of an empty one."""
    return ~(sets ^ (sets - 1))


def parts_of(mesh: Mesh, sets: Array) -> Array:
    """Into how many parts sets of axes split, float32: the exponent of a float for axes of two, a loop over the others."""
    return parts_of_each(mesh, [sets])[0]


def parts_of_each(mesh: Mesh, sets: Sequence[Array]) -> list[Array]:
    """`parts_of` of several, in one loop."""
    counts = [lax.population_count(s & mesh.twos).astype(jnp.int32) for s in sets]
    parts = [lax.bitcast_convert_type((count + 127) << 23, jnp.float32) for count in counts]

    def other(i: Array, parts: list[Array]) -> list[Array]:
        axis, size = row(mesh.others, i), row(mesh.other_sizes, i)
        return [jnp.where((s & axis) != 0, x * size, x) for s, x in zip(sets, parts, strict=True)]

    return lax.fori_loop(0, mesh.num_others, other, parts)


def log2_parts_of(mesh: Mesh, sets: Array) -> Array:
    """log2 of `parts_of`: by counting axes, since a logarithm takes a hundred times as long."""

    def other(i: Array, found: Array) -> Array:
        return jnp.where((sets & row(mesh.others, i)) != 0, found + jnp.log2(row(mesh.other_sizes, i)), found)

    return lax.fori_loop(0, mesh.num_others, other, lax.population_count(sets & mesh.twos).astype(jnp.float32))


def stacked(mesh: Mesh, parts: Sequence[Array]) -> Array:
    """`jnp.stack(parts)`, one after the other: of one operation XLA would ask lane by lane which part it is in."""
    found = jnp.zeros((len(parts), *parts[0].shape), parts[0].dtype)
    for i, part in enumerate(parts):
        found = put(found, mesh.one * (i + 1) - 1, part)  # i, which XLA does not know
    return found


def steps_of(mesh: Mesh, sets: Array) -> Array:
    """The sum of (size - 1) over the axes of a set, float32: messages of a tree, axis by axis."""
    count = lax.population_count(sets & mesh.twos).astype(jnp.float32)

    def other(i: Array, count: Array) -> Array:
        return jnp.where((sets & row(mesh.others, i)) != 0, count + (row(mesh.other_sizes, i) - 1), count)

    return lax.fori_loop(0, mesh.num_others, other, count)


def divides(mesh: Mesh, sets: Array, size: Array) -> Array:
    """Whether the axes of a set split `size`, int32, evenly.

    By axes of two by its last bits; by the others in floats, since integers are divided one at a time: the rest that is left of a
    rounded quotient is less than 2^24, and so its own quotient is exact.
    """
    count = lax.population_count(sets & mesh.twos).astype(jnp.int32)
    fits = (size & ((1 << count) - 1)) == 0

    def other(i: Array, parts: Array) -> Array:
        return jnp.where((sets & row(mesh.others, i)) != 0, parts * row(mesh.other_sizes, i), parts)

    def rest(left: Array, parts: Array) -> Array:
        quotient = jnp.round(left.astype(jnp.float32) / parts)
        return left - quotient.astype(jnp.int32) * parts.astype(jnp.int32)

    parts = lax.fori_loop(0, mesh.num_others, other, jnp.ones(count.shape, jnp.float32))
    return fits & (rest(rest(jnp.broadcast_to(size, count.shape), parts), parts) == 0)


def encoded(layouts: np.ndarray, num_dims: int, pins: bool) -> np.ndarray:
    """int8 layouts [..., A] as sets int16 [..., W]."""
    layouts = np.asarray(layouts)
    columns = [layouts == d for d in (*range(num_dims), PARTIAL)]
    if pins:
        digits = PINNED - layouts.astype(np.int32)
        is_pinned = (digits >= 0) & (digits < 2**DIGITS)
        columns += [is_pinned, *(is_pinned & (digits >> i & 1 != 0) for i in range(DIGITS))]
    found = np.zeros((*layouts.shape[:-1], len(columns)), np.int16)
    for i, column in enumerate(columns):
        for k, byte in enumerate(np.moveaxis(np.packbits(column, -1, "little"), -1, 0)):
            found[..., i] |= byte.astype(np.int16) << 8 * k
    return found


def decoded(sets: np.ndarray, num_axes: int, num_dims: int) -> np.ndarray:
    """The inverse of `encoded`: int8 [..., A] of sets [..., W]."""
    sets = np.asarray(sets)
    is_in = (np.arange(1 << num_axes)[:, None] >> np.arange(num_axes) & 1).astype(np.int8)  # [2^A, A]: by the set's number
    found = np.full((*sets.shape[:-1], num_axes), REPLICATED, np.int8)
    for i, value in enumerate((*range(num_dims), PARTIAL)):
        found += (is_in * np.int8(value - REPLICATED))[sets[..., i]]
    if sets.shape[-1] > num_dims + 1:
        digits = sum(is_in[sets[..., num_dims + 2 + i]] << i for i in range(DIGITS))
        found = np.where(is_in[sets[..., num_dims + 1]] != 0, np.int8(PINNED) - digits, found)
    return found.astype(np.int8)
