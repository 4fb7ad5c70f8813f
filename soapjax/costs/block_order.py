"""When blocks have to change places: the permutes and rounds of a conversion, of many conversions at once.

The same decisions as `strategy/resharding.py`, which the executor follows step by step. A set of mesh axes is an integer with a
bit per axis, so that a question about all pairs of axes is a few operations on [...] integers, side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from soapjax.strategy.layout import PARTIAL, PINNED, REPLICATED

BITS_PER_FACTOR = 5  # so many bits count the axes of one size; a mesh has fewer than 32


class FirstGather(NamedTuple):
    """Of conversions of tensors with dims too small for the axes that leave and those that enter; sets are int32 [...]."""

    gathered: Array  # axes, before all other steps
    permutes: Array  # bool [...]: blocks are put in order for it
    moved: Array  # axes over which that permute sends


class BlockOrder(NamedTuple):
    """Of conversions; sets of axes are int32 [...]."""

    is_whole: Array  # bool [...]: blocks only change places; none of the other steps happens
    late: Array  # axes exchanged in the second round
    num_permutes: Array  # float32 [...]
    moved: Array  # axes over which a permute sends


def axes_where(truths: list[Array]) -> Array:
    """The set of axes of which `truths` says so, bool [...] each."""
    found = jnp.int32(0)
    for a, truth in enumerate(truths):
        found = found | jnp.where(truth, jnp.int32(1 << a), jnp.int32(0))
    return found


def holds(axes: Array, a: int) -> Array:
    """Whether axis `a` is in a set."""
    return (axes & (1 << a)) != 0


def only_if(truth: Array, axes: Array | int) -> Array:
    """The set where `truth`, else none."""
    return jnp.where(truth, axes, jnp.int32(0))


def first_gather(source: list[Array], target: list[Array], shape: list[Array], axis_sizes: tuple[int, ...]) -> FirstGather:
    """`strategy/resharding.py`'s `gathered_first` for tensors of shapes [...] per dim; layouts as in `block_order`."""
    every = range(len(axis_sizes))
    source, target = _without_pins(source, target)
    gathered = jnp.zeros_like(axes_where([s >= 0 for s in source]))
    is_whole = axes_where([s == PARTIAL for s in source]) == 0

    def parts(axes: Array) -> Array:
        n = jnp.ones_like(axes)
        for a, size in enumerate(axis_sizes):
            n = jnp.where(holds(axes, a), n * size, n)
        return n

    def divides(n: Array, size: Array) -> Array:
        # Integer division is one number per instruction; a power of two needs none.
        return (size & (n - 1)) == 0 if all(x & (x - 1) == 0 for x in axis_sizes) else size % n == 0

    for d, size in enumerate(shape):
        before, after = (axes_where([x == d for x in layout]) for layout in (source, target))
        gathered = gathered | only_if(~divides(parts(before | after), size), before & ~after)
        is_whole &= parts(before) == parts(after)
    gathered = only_if(~is_whole, gathered)
    follow = jnp.zeros_like(gathered)
    for a in every:
        peers = axes_where([source[b] == source[a] if b > a else jnp.zeros_like(is_whole) for b in every])
        follow = follow | only_if(holds(gathered, a), peers)
    follow = follow & ~gathered
    return FirstGather(gathered, follow != 0, gathered | follow)


def _without_pins(source: list[Array], target: list[Array]) -> list[list[Array]]:
    """Both layouts, replicated where either is pinned."""
    is_pinned = [(s <= PINNED) | (t <= PINNED) for s, t in zip(source, target, strict=True)]
    return [[jnp.where(p, REPLICATED, x) for p, x in zip(is_pinned, layout, strict=True)] for layout in (source, target)]


def block_order(source: list[Array], target: list[Array], axis_sizes: tuple[int, ...]) -> BlockOrder:
    """What keeps a conversion from being slices, one all-to-all and one all-gather. Layouts are an int32 [...] per axis."""
    every = range(len(axis_sizes))
    source, target = _without_pins(source, target)
    behind = [sum(1 << b for b in every if b > a) for a in every]  # in the mesh

    split, wanted = axes_where([s >= 0 for s in source]), axes_where([t >= 0 for t in target])
    same = axes_where([s == t for s, t in zip(source, target, strict=True)])
    keeps, moves = split & wanted & same, split & wanted & ~same
    gathers = split & axes_where([t == REPLICATED for t in target])
    enters = wanted & ~split  # slices, and scatters of partial sums
    changes = ~same & ((1 << len(axis_sizes)) - 1)

    def peers(layout: list[Array], of: list[Array]) -> list[Array]:
        """Per axis a: the axes that `layout` has on the dim where `of` has a."""
        return [axes_where([layout[b] == of[a] for b in every]) for a in every]

    with_source, with_target = peers(source, source), peers(target, target)
    enters_where_it_was, was_where_it_enters = peers(target, source), peers(source, target)

    def parts(axes: Array) -> Array:
        """Into how many parts the axes split a dim, as an integer that tells products of prime sizes apart."""
        found = jnp.zeros_like(axes)
        for i, size in enumerate(sorted(set(axis_sizes))):
            among = sum(1 << a for a in every if axis_sizes[a] == size)
            found = found | (jnp.bitwise_count(axes & among).astype(jnp.int32) << (BITS_PER_FACTOR * i))
        return found

    # Each dim in as many parts as before; with those that are split before, and all together, none is left.
    is_whole = (changes != 0) & (parts(split) == parts(wanted)) & (axes_where([s == PARTIAL for s in source]) == 0)
    for a in every:
        is_whole &= (source[a] < 0) | (parts(with_source[a]) == parts(enters_where_it_was[a]))

    early = jnp.zeros_like(moves)  # the first round, axis by axis: none that clashes with one chosen before
    for a in every:
        is_free = holds(moves, a) & (((enters_where_it_was[a] | was_where_it_enters[a]) & early) == 0)
        early = early | only_if(is_free, 1 << a)
    late = moves & ~early
    first = second = second_unless_first = jnp.zeros_like(moves)
    for a in every:
        stays = (with_source[a] & behind[a] & (keeps | gathers)) | (enters_where_it_was[a] & enters)
        first = first | only_if(holds(early, a), stays | (with_source[a] & behind[a] & late))
        second = second | only_if(holds(late, a), enters_where_it_was[a] & early)
        second_unless_first = second_unless_first | only_if(holds(late, a), stays)
    permutes_first = first != 0
    permutes_second = (second != 0) | ((second_unless_first != 0) & ~permutes_first)
    is_in_order = permutes_first | permutes_second

    # How late an axis joined a dim since blocks were last put in order: an earlier axis of the mesh must not join later.
    third = late
    second_on = third | only_if(~permutes_second, early)
    joined = second_on | only_if(~is_in_order, enters)
    kept = only_if(~is_in_order, keeps)
    unsorted, follow = jnp.zeros_like(moves), jnp.zeros_like(moves)
    for a in every:
        sooner = only_if(holds(joined, a), ~joined)
        sooner = jnp.where(holds(second_on, a), ~second_on, sooner)
        sooner = jnp.where(holds(third, a), ~third, sooner)
        unsorted = unsorted | (with_target[a] & wanted & behind[a] & sooner)
        unsorted = unsorted | only_if(holds(gathers, a), enters_where_it_was[a] & (joined | (kept & behind[a])))
        follow = follow | only_if(holds(changes, a), behind[a] & (with_source[a] | was_where_it_enters[a]))
    count = permutes_first.astype(jnp.float32) + permutes_second + (unsorted != 0)
    # A permute sends over the axes that change and those behind them on their dims.
    moved = only_if(is_whole | (count > 0), changes | only_if(~is_whole, keeps & follow))
    return BlockOrder(is_whole, only_if(~is_whole, late), jnp.where(is_whole, 1.0, count), moved)
