"""What happens when tensors change their layouts: which collectives, over which axes, of many conversions at once.

`strategy/resharding.py` gives the steps of one conversion, for the executor; here they are sets of axes, to be paid for.
"""

from __future__ import annotations

from typing import NamedTuple

from jax import Array

from soapjax.costs.block_order import (
    BlockOrder,
    Conversions,
    FirstGather,
    axes_where,
    block_order,
    exchanged_first,
    first_gather,
    only_if,
    union,
)
from soapjax.costs.turns import as_stage
from soapjax.strategy.layout import PARTIAL, PINNED, REPLICATED


class Over(NamedTuple):
    """Which axes a conversion's collectives go over: sets of axes [n]."""

    given: Array  # that split the source, before the first gather
    held: Array  # that split what the other collectives begin with
    scattered: Array
    summed: Array
    exchanged: Array  # in the first round
    exchanged_late: Array
    gathered: Array


def _conversions(source: list[Array], target: list[Array], num_dims: int) -> tuple[Conversions, Array]:
    """Layouts, int8 [n] per axis, as sets; an axis that is pinned on either side is replicated on both. And those."""
    is_pinned = axes_where([(s <= PINNED) | (t <= PINNED) for s, t in zip(source, target, strict=True)])
    was_partial, is_partial = (axes_where([x == PARTIAL for x in layout]) for layout in (source, target))
    replicated = axes_where([t == REPLICATED for t in target]) | (was_partial & is_partial) | is_pinned
    changes = axes_where([s != t for s, t in zip(source, target, strict=True)]) & ~is_pinned
    before, after = ([axes_where([x == d for x in layout]) & ~is_pinned for d in range(num_dims)] for layout in (source, target))
    return Conversions(before, after, was_partial & ~is_partial & ~is_pinned, replicated, changes), is_pinned


def steps_of_all(
    axis_sizes: tuple[int, ...], pins: bool, source: list[Array], target: list[Array], shape: list[Array]
) -> tuple[FirstGather, BlockOrder, Over]:
    """Of layouts int8 [n] per axis and shapes int32 [n] per dim; `pins`: whether pinned layouts are looked at."""

    def rounds(of: Conversions, gathered: Array, source: list[Array], target: list[Array]) -> Array:
        return exchanged_first(of.without(gathered), source, target)

    def order(of: Conversions, gathered: Array, early: Array) -> BlockOrder:
        return block_order(of.without(gathered), early, axis_sizes)

    def over(of: Conversions, gathered: Array, order: BlockOrder, early: Array, is_pinned: Array, source: list[Array]) -> Over:
        left = of.without(gathered)
        given, split, wanted = union(of.source), union(left.source), union(left.target)
        # Where blocks only change places there is nothing else to do.
        held = split | only_if(~order.is_whole, wanted & ~of.partial)
        if pins:
            sent = axes_where([s >= 0 for s in source]) & is_pinned
            given, held = given | sent, held | sent
        early, gathered = (only_if(~order.is_whole, x) for x in (early, split & of.replicated))
        return Over(given, held, of.partial & wanted, of.partial & of.replicated, early, order.late, gathered)

    of, is_pinned = as_stage(lambda s, t: _conversions(s, t, len(shape)), source, target)
    first = as_stage(lambda of, shape: first_gather(of, shape, axis_sizes), of, shape)
    early = as_stage(rounds, of, first.gathered, source, target)
    found = as_stage(order, of, first.gathered, early)
    return first, found, as_stage(over, of, first.gathered, found, early, is_pinned, source)
