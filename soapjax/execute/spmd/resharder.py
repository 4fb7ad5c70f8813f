"""Resharding as the cost model counts it, step by step in `shard_map` (strategy/resharding.py).

The partitioner would choose for itself: a full gather and a slice for many pairs, an all-to-all and a permute where
blocks only change places. Here prediction is what runs by construction.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from soapjax.execute.spmd.on_blocks import partition_spec, scattered, with_leading
from soapjax.execute.spmd.slicing import block_slice_in_dim
from soapjax.strategy.layout import PARTIAL, REPLICATED, Spec, layout_of, spec_of
from soapjax.strategy.resharding import Exchange, Gather, Order, Permute, Slice, Step, gathered_first, steps_of


def reshard(x: Any, source: Spec, target: Spec, mesh: Mesh) -> Any:
    """`x`, laid out as `source`, laid out as `target`; axes in each dim in mesh order."""
    names, sizes = mesh.axis_names, tuple(mesh.shape.values())
    layouts = layout_of(source, names), layout_of(target, names)
    first = gathered_first(*layouts, x.shape, sizes)
    if list(first) != layouts[0]:
        half = spec_of(first, rank=x.ndim, axis_names=names)
        return reshard(reshard(x, source, half, mesh), half, target, mesh)
    steps = steps_of(*layouts, sizes)
    if not steps:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition_spec(target)))

    def body(block: Any) -> Any:
        for step in steps:
            block = _apply(step, block, names, sizes)
        return block

    return jax.shard_map(
        body, mesh=mesh, in_specs=partition_spec(source), out_specs=partition_spec(target), axis_names=set(names), check_vma=False
    )(x)


def reshard_sums(x: Any, sums: tuple[str, ...], kept: tuple[str, ...], source: Spec, target: Spec, mesh: Mesh) -> Any:
    """Sums over devices laid out anew, and those over axes that are not `kept` summed up: scattered where `target` has the axis.

    `x` has a leading dim, split by it, for each axis of `sums`; the result for those of `kept`.
    """
    names, sizes = mesh.axis_names, tuple(mesh.shape.values())
    leading = tuple((n,) for n in sums)
    shape, rank = x.shape[len(sums) :], x.ndim - len(sums)
    before, after = list(layout_of(source, names)), layout_of(target, names)
    for name in sums:
        before[names.index(name)] = REPLICATED if name in kept else PARTIAL
    first = gathered_first(before, after, shape, sizes)
    if list(first) != before:
        half = spec_of([REPLICATED if d == PARTIAL else d for d in first], rank=rank, axis_names=names)
        return reshard_sums(reshard(x, (*leading, *source), (*leading, *half), mesh), sums, kept, half, target, mesh)
    steps = steps_of(before, after, sizes)
    ways = tuple(n for a, n in enumerate(names) if before[a] == PARTIAL and after[a] < 0)

    def body(block: Any) -> Any:
        block = _entered(block.reshape(block.shape[len(sums) :]), before, after, names, sizes)
        block = jax.lax.psum(block, ways) if ways else block
        for step in steps:
            block = block if isinstance(step, Slice) else _apply(step, block, names, sizes)
        return with_leading(block, kept)

    return jax.shard_map(
        body, mesh=mesh, in_specs=partition_spec((*leading, *source)), axis_names=set(names), check_vma=False,
        out_specs=partition_spec((*((n,) for n in kept), *target)),
    )(x)  # fmt: skip


def _entered(x: Any, before: list[int], after: list[int], names: tuple[str, ...], sizes: tuple[int, ...]) -> Any:
    """A device's part of what gets split: sliced first, then sums scattered, which are smaller so; axes in order in each dim."""
    digits: list[int | None] = []  # of the dims of `shape`: an axis, or what is left of a dim
    shape: list[int] = []
    for d, n in enumerate(x.shape):
        entering = [a for a in range(len(sizes)) if before[a] in (REPLICATED, PARTIAL) and after[a] == d]
        digits += [*entering, None]
        shape += [*(sizes[a] for a in entering), n // math.prod(sizes[a] for a in entering)]
    local = tuple(n for n, a in zip(shape, digits, strict=True) if a is None)
    x = x.reshape(shape)
    for k, a in enumerate(digits):
        if a is not None and before[a] == REPLICATED:
            x = block_slice_in_dim(x, jax.lax.axis_index(names[a]), 1, k)
    for k, a in enumerate(digits):
        if a is not None and before[a] == PARTIAL:
            x = scattered(x, names[a], k)
    return x.reshape(local)


def _apply(step: Step, x: Any, names: tuple[str, ...], sizes: tuple[int, ...]) -> Any:
    if isinstance(step, Slice):
        part = x.shape[step.dim] // sizes[step.axis]
        return block_slice_in_dim(x, jax.lax.axis_index(names[step.axis]) * part, part, step.dim)
    if isinstance(step, Permute):
        axes, pairs = permutation(step.before, step.after, sizes)
        return jax.lax.ppermute(x, tuple(names[a] for a in axes), pairs)
    if isinstance(step, Exchange):
        return _exchange(step, x, names, sizes)
    return _gather(step, x, names, sizes)


def _exchange(step: Exchange, x: Any, names: tuple[str, ...], sizes: tuple[int, ...]) -> Any:
    axes = [a for a, _, _ in step.moves]
    to = {a: j for a, _, j in step.moves}
    x = _split(x, [[a for a in axes if to[a] == d] for d in range(x.ndim)], axes, sizes)
    x = jax.lax.all_to_all(x, tuple(names[a] for a in axes), split_axis=0, concat_axis=0, tiled=True)
    leaving = [[a for a in step.before[d] if a in axes] if d < len(step.before) else [] for d in range(x.ndim - 1)]
    return _merge(x, leaving, axes, sizes)


def _gather(step: Gather, x: Any, names: tuple[str, ...], sizes: tuple[int, ...]) -> Any:
    axes = [a for a, _ in step.axes]
    if {d for _, d in step.axes} == {0}:
        return jax.lax.all_gather(x, tuple(names[a] for a in step.before[0] if a in axes), axis=0, tiled=True)
    # Along another dim XLA would lay out the whole anew, element by element, before and after: here runs are copied, once.
    gathered = [[a for a in step.before[d] if a in axes] if d < len(step.before) else [] for d in range(x.ndim)]
    return _merge(jax.lax.all_gather(x, tuple(names[a] for a in axes), axis=0, tiled=False), gathered, axes, sizes)


def _split(x: Any, by_dim: list[list[int]], axes: list[int], sizes: tuple[int, ...]) -> Any:
    """[d0, d1, ...] as [parts, d0', d1', ...]: the parts that go to each device of `axes`, in the order of `axes`."""
    shape: list[int] = []
    where: dict[int, int] = {}
    kept = []
    for n, entering in zip(x.shape, by_dim, strict=True):
        for a in entering:
            where[a] = len(shape)
            shape.append(sizes[a])
        kept.append(len(shape))
        shape.append(n // math.prod(sizes[a] for a in entering))
    x = jnp.transpose(x.reshape(shape), [*(where[a] for a in axes), *kept])
    return x.reshape((math.prod(sizes[a] for a in axes), *(shape[k] for k in kept)))


def _merge(x: Any, by_dim: list[list[int]], axes: list[int], sizes: tuple[int, ...]) -> Any:
    """The inverse: parts [parts, d0, d1, ...] from each device of `axes`, as major digits of the dims in `by_dim`."""
    local = x.shape[1:]
    x = x.reshape((*(sizes[a] for a in axes), *local))
    order = []
    for d, digits in enumerate(by_dim):
        order += [*(axes.index(a) for a in digits), len(axes) + d]
    shape = tuple(n * math.prod(sizes[a] for a in digits) for n, digits in zip(local, by_dim, strict=True))
    return jnp.transpose(x, order).reshape(shape)


def permutation(before: Order, after: Order, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """(axes, pairs of (sender, receiver)) numbered by their coordinates on `axes`, major first."""
    axes = tuple(sorted({a for names in (*before, *after) for a in names}))
    held, wanted = ({a for names in order for a in names} for order in (before, after))
    free_before, free_after = ([a for a in axes if a not in used] for used in (held, wanted))
    pairs = []
    for receiver, point in enumerate(itertools.product(*(range(sizes[a]) for a in axes))):
        at = dict(zip(axes, point, strict=True))
        source: dict[int, int] = {}
        for old, new in (*zip(before, after, strict=True), (free_before, free_after)):
            index = 0
            for a in new:
                index = index * sizes[a] + at[a]
            for a in reversed(old):
                index, source[a] = divmod(index, sizes[a])
        sender = 0
        for a in axes:
            sender = sender * sizes[a] + source[a]
        pairs.append((sender, receiver))
    return axes, pairs
