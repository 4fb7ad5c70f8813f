"""When blocks have to change places: the permutes and rounds of a conversion, of many conversions at once.

The same decisions as `strategy/resharding.py`, which the executor follows step by step. A set of mesh axes is an integer with a
bit per axis, and a layout one such set per dim: what that one asks of all pairs of axes is a few operations per dim here.
The integers are as short as the mesh allows: a vector instruction does four times as many of eight bits as of 32.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class Conversions(NamedTuple):
    """Layouts before and after, as sets of axes [n]; what is partial on both sides counts as replicated on both."""

    source: list[Array]  # per dim: the axes that split it
    target: list[Array]
    partial: Array  # in the source: partial sums
    replicated: Array  # in the target
    changes: Array  # other in the target than in the source

    def without(self, gathered: Array) -> Conversions:
        """The same, once some axes of the source are gathered."""
        changes = (self.changes & ~gathered) | (gathered & ~self.replicated)
        return self._replace(source=[s & ~gathered for s in self.source], changes=changes)


class FirstGather(NamedTuple):
    """Of conversions of tensors with dims too small for the axes that leave and those that enter; sets are integers [n]."""

    gathered: Array  # axes, before all other steps
    permutes: Array  # bool [n]: blocks are put in order for it
    moved: Array  # axes over which that permute sends


class BlockOrder(NamedTuple):
    """Of conversions; sets of axes are integers [n]."""

    is_whole: Array  # bool [n]: blocks only change places; none of the other steps happens
    late: Array  # axes exchanged in the second round
    num_permutes: Array  # float32 [n]
    moved: Array  # axes over which a permute sends


def type_of_sets(num_axes: int) -> type:
    """The shortest integers that hold sets of so many axes."""
    return np.int8 if num_axes <= 8 else np.int16 if num_axes <= 16 else np.int32


def union(sets: Sequence[Array]) -> Array:
    """One set of several; there is at least one."""
    return functools.reduce(operator.or_, sets)


def axes_where(truths: Sequence[Array]) -> Array:
    """The set of axes of which `truths` says so, bool [n] each."""
    alone = sets_of_one(len(truths))
    return union([jnp.where(truth, alone[a], alone.dtype.type(0)) for a, truth in enumerate(truths)])


def sets_of_one(num_axes: int) -> np.ndarray:
    """The set of each axis alone [A]."""
    return np.left_shift(1, np.arange(num_axes)).astype(type_of_sets(num_axes))


def sets_by(of_axes: Sequence[int]) -> dict[int, np.integer]:
    """The axes that have each of the values [A]: sizes, or link levels."""
    alone = sets_of_one(len(of_axes))
    return {x: np.bitwise_or.reduce(alone[[y == x for y in of_axes]]) for x in sorted(set(of_axes))}


def only_if(truth: Array, axes: Array | np.integer) -> Array:
    """The set where `truth`, else none."""
    return jnp.where(truth, axes, axes.dtype.type(0))


def behind(axes: Array) -> Array:
    """All axes behind the first of a set in the mesh; none if it is empty."""
    return ~(axes ^ (axes - 1))


def number_of_parts(axes: Array, axis_sizes: tuple[int, ...], dtype: type) -> Array:
    """Into how many parts a set of axes splits."""
    found = jnp.ones(axes.shape, dtype)
    for size, those in sets_by(axis_sizes).items():
        count = jax.lax.population_count(axes & those)
        if size == 2:
            found = found * jnp.left_shift(np.int32(1), count.astype(np.int32)).astype(dtype)
        else:
            for k in range(axis_sizes.count(size)):
                found = jnp.where(count > k, found * np.array(size, dtype), found)
    return found


def _as_many_parts(one: Array, other: Array, axis_sizes: tuple[int, ...]) -> Array:
    """bool [n]: whether two sets of axes split into as many parts; their sizes are primes."""
    counts = [[jax.lax.population_count(x & those) for x in (one, other)] for those in sets_by(axis_sizes).values()]
    return functools.reduce(operator.and_, [x == y for x, y in counts])


def first_gather(of: Conversions, shape: Sequence[Array], axis_sizes: tuple[int, ...]) -> FirstGather:
    """`strategy/resharding.py`'s `gathered_first` for tensors of shapes int32 [n] per dim."""

    def divides(axes: Array, size: Array) -> Array:
        n = number_of_parts(axes, axis_sizes, np.int32)
        # Integer division is one number per instruction; a power of two needs none.
        return (size & (n - 1)) == 0 if all(x & (x - 1) == 0 for x in axis_sizes) else size % n == 0

    gathered, is_whole = jnp.zeros_like(of.partial), of.partial == 0
    for before, after, size in zip(of.source, of.target, shape, strict=True):
        gathered = gathered | only_if(~divides(before | after, size), before & ~after)
        is_whole &= _as_many_parts(before, after, axis_sizes)
    gathered = only_if(~is_whole, gathered)
    follow = union([s & behind(s & gathered) for s in of.source]) & ~gathered
    return FirstGather(gathered, follow != 0, gathered | follow)


def exchanged_first(of: Conversions, source: Sequence[Array], target: Sequence[Array]) -> Array:
    """The axes of the first round of all-to-alls: axis by axis, none that clashes with one chosen before.

    Args:
      source: integers [n] per axis, the dim that it splits; anything where it splits none. `target` likewise.
    """
    split, wanted = union(of.source), union(of.target)
    moves = split & wanted & of.changes
    dims = type_of_sets(len(of.source))
    early, left, entered = jnp.zeros_like(moves), *(jnp.zeros(moves.shape, dims) for _ in range(2))  # the latter: sets of dims
    for alone, s, t in zip(sets_of_one(len(source)), source, target, strict=True):
        was, is_now = (jnp.left_shift(dims(1), jnp.maximum(d, 0).astype(dims)) for d in (s, t))
        is_free = ((moves & alone) != 0) & (((was & entered) | (is_now & left)) == 0)
        early = early | only_if(is_free, alone)
        left, entered = left | only_if(is_free, was), entered | only_if(is_free, is_now)
    return early


def block_order(of: Conversions, early: Array, axis_sizes: tuple[int, ...]) -> BlockOrder:
    """What keeps a conversion from being slices, one all-to-all and one all-gather; `early` is `exchanged_first`."""
    split, wanted, changes = union(of.source), union(of.target), of.changes
    keeps, late = split & wanted & ~changes, split & wanted & changes & ~early
    gathers = split & of.replicated
    enters = wanted & ~split  # slices, and scatters of partial sums

    is_whole = (changes != 0) & (of.partial == 0)
    first = second = second_unless_first = jnp.zeros(changes.shape, bool)
    for before, after in zip(of.source, of.target, strict=True):
        # Each dim in as many parts as before.
        is_whole &= _as_many_parts(before, after, axis_sizes)
        leaves, leaves_late = early & before, late & before
        is_entered = (after & enters) != 0
        first |= ((leaves != 0) & is_entered) | ((before & behind(leaves) & (keeps | gathers | late)) != 0)
        second |= (leaves_late != 0) & ((after & early) != 0)
        stays = before & behind(leaves_late) & (keeps | gathers)
        second_unless_first |= ((leaves_late != 0) & is_entered) | (stays != 0)
    permutes_second = second | (second_unless_first & ~first)
    is_in_order = first | permutes_second

    # How late an axis joined a dim since blocks were last put in order: an earlier axis of the mesh must not join later.
    since_second = late | only_if(~permutes_second, early)
    joined = since_second | only_if(~is_in_order, enters)
    kept = only_if(~is_in_order, keeps)
    unsorted, follow = jnp.zeros_like(changes), jnp.zeros_like(changes)
    for before, after in zip(of.source, of.target, strict=True):
        for later in (late, since_second, joined):
            unsorted = unsorted | (after & behind(after & later) & ~later)
        leaves = gathers & before
        unsorted = unsorted | only_if(leaves != 0, after & joined) | (after & kept & behind(leaves))
        follow = follow | (before & keeps & behind(changes & (before | after)))
    count = first.astype(jnp.float32) + permutes_second + (unsorted != 0)
    # A permute sends over the axes that change and those behind them on their dims.
    moved = only_if(is_whole | (count > 0), changes | only_if(~is_whole, follow))
    return BlockOrder(is_whole, only_if(~is_whole, late), jnp.where(is_whole, 1.0, count), moved)
