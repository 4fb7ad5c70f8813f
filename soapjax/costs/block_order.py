"""When blocks have to change places: the permutes and rounds of a conversion, vectorised over layouts.

The same decisions as `strategy/resharding.py`, which the executor follows step by step, as masks over pairs of axes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from soapjax.strategy.layout import PARTIAL, PINNED, REPLICATED


class FirstGather(NamedTuple):
    """Of conversions between layouts [..., A] whose tensors have dims too small for the axes that leave and those that enter."""

    is_gathered: Array  # bool [..., A]: before all other steps
    permutes: Array  # bool [...]: blocks are put in order for it
    is_moved: Array  # bool [..., A]: axes over which that permute sends


def first_gather(source: Array, target: Array, shape: Array, axis_sizes: tuple[int, ...]) -> FirstGather:
    """`strategy/resharding.py`'s `gathered_first` for tensors of shapes [..., R]."""
    is_pinned = (source <= PINNED) | (target <= PINNED)
    source, target = (jnp.where(is_pinned, jnp.int8(REPLICATED), x) for x in (source, target))
    is_gathered = jnp.zeros(source.shape, bool)
    is_whole = (source != PARTIAL).all(-1)

    def parts(mask: Array) -> Array:
        return jnp.where(mask, jnp.asarray(axis_sizes, jnp.int32), 1).prod(-1)

    for d in range(shape.shape[-1]):
        before, after = source == d, target == d
        is_small = shape[..., d] % parts(before | after) != 0
        is_gathered |= is_small[..., None] & before & ~after
        is_whole &= parts(before) == parts(after)
    is_gathered &= ~is_whole[..., None]
    behind = jnp.asarray(np.triu(np.ones((len(axis_sizes),) * 2, bool), 1))  # [a, b]: b stands behind a in the mesh
    stays_behind = (
        is_gathered[..., :, None] & behind & (source[..., :, None] == source[..., None, :]) & ~is_gathered[..., None, :]
    ).any(-2)
    return FirstGather(is_gathered, stays_behind.any(-1), is_gathered | stays_behind)


class BlockOrder(NamedTuple):
    """Of conversions between layouts [..., A]."""

    is_whole: Array  # bool [...]: blocks only change places; none of the other steps happens
    is_late: Array  # bool [..., A]: axes exchanged in the second round
    num_permutes: Array  # float32 [...]
    is_moved: Array  # bool [..., A]: axes over which a permute sends


def block_order(source: Array, target: Array, axis_sizes: tuple[int, ...]) -> BlockOrder:
    """What keeps a conversion from being slices, one all-to-all and one all-gather."""
    num_axes = len(axis_sizes)
    sizes = jnp.asarray(axis_sizes, jnp.float32)
    is_pinned = (source <= PINNED) | (target <= PINNED)
    source, target = (jnp.where(is_pinned, jnp.int8(REPLICATED), x) for x in (source, target))
    keeps = (source == target) & (source >= 0)
    moves = (source >= 0) & (target >= 0) & (source != target)
    gathers = (source >= 0) & (target == REPLICATED)
    enters = ((source == REPLICATED) | (source == PARTIAL)) & (target >= 0)  # slices, and scatters of partial sums

    # Pairs: axis a in the rows, axis b in the columns.
    after = jnp.asarray(np.triu(np.ones((num_axes, num_axes), bool), 1))  # b stands behind a in the mesh

    def a(mask: Array) -> Array:
        return mask[..., :, None]

    def b(mask: Array) -> Array:
        return mask[..., None, :]

    same_source = a(source) == b(source)
    same_target = a(target) == b(target)
    enters_where_a_was = a(source) == b(target)
    was_where_a_enters = a(target) == b(source)

    def parts(pairs: Array) -> Array:
        return jnp.where(pairs, sizes, 1.0).prod(-1)

    changed = source != target
    is_even = ((source < 0) | (parts(same_source) == parts(enters_where_a_was))) & (
        (target < 0) | (parts(same_target) == parts(was_where_a_enters))
    )
    is_whole = changed.any(-1) & (is_even & (source != PARTIAL)).all(-1)

    clashes = a(moves) & (enters_where_a_was | was_where_a_enters)
    chosen: list[Array] = []  # the first round, axis by axis: none that clashes with one chosen before
    for i in range(num_axes):
        free = moves[..., i]
        for j, is_chosen in enumerate(chosen):
            free &= ~(is_chosen & clashes[..., i, j])
        chosen.append(free)
    is_late = moves & ~jnp.stack(chosen, -1)
    early, late = moves & ~is_late, moves & is_late
    behind_stays = same_source & after & b(keeps | gathers)
    first = a(early) & ((behind_stays | (same_source & after & b(late))) | (enters_where_a_was & b(enters)))
    permutes_first = first.any((-1, -2), keepdims=True)
    second = a(late) & ((enters_where_a_was & b(early)) | ((behind_stays | (enters_where_a_was & b(enters))) & ~permutes_first))
    permutes_second = second.any((-1, -2), keepdims=True)
    # How late an axis joined a dim since blocks were last put in order: an earlier axis of the mesh must not join later.
    in_order = (permutes_first | permutes_second)[..., 0]
    stays = keeps | enters | moves
    joins = jnp.where(enters, 1, jnp.where(early, 2, jnp.where(late, 3, 0)))

    def unsorted(joined: Array, kept_behind: Array) -> Array:
        crossed = same_target & a(stays) & b(stays) & after & (a(joined) > b(joined))
        return crossed | (a(gathers) & b(stays) & enters_where_a_was & (b(joined > 0) | (b(keeps) & kept_behind)))

    is_new = (joins == 3) | ((joins == 2) & ~permutes_second[..., 0]) | ((joins == 1) & ~in_order)
    permutes_last = unsorted(jnp.where(is_new, joins, 0), after & ~in_order[..., None]).any((-1, -2))
    count = permutes_first[..., 0, 0].astype(jnp.float32) + permutes_second[..., 0, 0] + permutes_last
    # A permute sends over the axes that change and those behind them on their dims.
    behind = keeps & (a(changed) & after & (same_source | was_where_a_enters)).any(-2)
    is_moved = (is_whole | (count > 0))[..., None] & (changed | (behind & ~is_whole[..., None]))
    return BlockOrder(is_whole, is_late & ~is_whole[..., None], jnp.where(is_whole, 1.0, count), is_moved)
