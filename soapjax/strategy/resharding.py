"""How a tensor is brought from one layout to another: the steps that the executor runs and the cost model counts.

Left to itself, XLA's partitioner gathers the whole tensor for many pairs of layouts. Here every pair has its steps:

0. where every dim is in as many parts before as after, whole blocks change places: one permute;
1. slice what gets split over axes that held copies (free; a partial sum is scattered here);
2. exchange: axes that go from one dim to another, all in one all-to-all; where an axis leaves a dim that another enters,
   in rounds, the lower axis first;
3. gather what is no longer split, in one all-gather.

Between 1 and 3 a dim is split by the axes that leave it and by those that enter it at once. From a dim that is too small for
both, the axes that leave are gathered before anything else (`gathered_first`).

A dim that is split by several axes has an order of them, the first being major. Local work can remove or add minor axes
only, so that a permute (of local blocks between devices) comes in between where an axis that leaves is not minor, and
at the end, where the order is not the mesh's.

>>> steps_of((0, -1), (-1, 0), (2, 2))  # from one axis to the other: blocks change places
(Permute(before=((0,),), after=((1,),)),)
>>> steps_of((0, 1), (1, 1), (2, 2))  # the major axis enters last: exchanged, then put in order
(Exchange(moves=((0, 0, 1),)), Permute(before=((), (1, 0)), after=((), (0, 1))))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from soapjax.strategy.layout import PARTIAL, REPLICATED, degree

Order = tuple[tuple[int, ...], ...]  # per tensor dim: the axes that split it, major first


class Slice(NamedTuple):
    """Every device keeps its part of dim `dim`, split by `axis` as the minor one."""

    axis: int
    dim: int


class Permute(NamedTuple):
    """Blocks go to other devices, so that the dims split by axes in order `before` are split in order `after`."""

    before: Order
    after: Order


class Exchange(NamedTuple):
    """One all-to-all: (axis, from dim, to dim); each axis is minor on the dim that it leaves and on the one that it enters."""

    moves: tuple[tuple[int, int, int], ...]
    before: Order = ()

    def __repr__(self) -> str:
        return f"Exchange(moves={self.moves})"


class Gather(NamedTuple):
    """One all-gather over axes that are minor on their dims: (axis, dim)."""

    axes: tuple[tuple[int, int], ...]
    before: Order = ()

    def __repr__(self) -> str:
        return f"Gather(axes={self.axes})"


Step = Slice | Permute | Exchange | Gather


def rounds_of(source: Sequence[int], target: Sequence[int]) -> list[list[int]]:
    """Axes that go from dim to dim, in rounds in which no dim is both left and entered."""
    left = [a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s >= 0 and t >= 0 and s != t]
    rounds = []
    while left:
        chosen: list[int] = []
        for a in left:
            if not any(target[b] == source[a] or source[b] == target[a] for b in chosen):
                chosen.append(a)
        rounds.append(chosen)
        left = [a for a in left if a not in chosen]
    return rounds


def is_permute(source: Sequence[int], target: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether every dim is in equally many parts before and after."""
    if any(s != t and min(s, t) < REPLICATED for s, t in zip(source, target, strict=True)):
        return False
    dims = {d for d in (*source, *target) if d >= 0}
    return tuple(source) != tuple(target) and all(degree(source, d, sizes) == degree(target, d, sizes) for d in dims)


def gathered_first(
    source: Sequence[int], target: Sequence[int], shape: Sequence[int], sizes: Sequence[int]
) -> tuple[int, ...]:
    """`source` after the gathers that a tensor of `shape` needs before its steps to `target`: mostly `source` itself.

    >>> gathered_first((0, 0), (1, 0), (4, 4), (2, 2)), gathered_first((0, -1), (1, 0), (2, 2), (2, 2))
    ((0, 0), (-1, -1))
    """
    if is_permute(source, target, sizes):
        return tuple(source)
    pairs = list(zip(source, target, strict=True))
    small = {d for d, n in enumerate(shape) if n % math.prod(size for size, pair in zip(sizes, pairs, strict=True) if d in pair)}
    return tuple(REPLICATED if s in small and s != t else s for s, t in pairs)


def steps_of(
    source: Sequence[int], target: Sequence[int], sizes: Sequence[int], *, is_counted: bool = False
) -> tuple[Step, ...]:
    """The steps from `source` to `target`, layouts without pins over axes of `sizes`.

    `is_counted`: as the cost model counts them, a third round of exchanges (three dims that trade axes in a ring) in one with
    the second.

    Partial sums of `source` count as resolved: split ones as if sliced, the others as replicated.
    """
    axes = range(len(sizes))
    rank = max((*source, *target, 0)) + 1
    order = [[a for a in axes if source[a] == d] for d in range(rank)]
    if is_permute(source, target, sizes):
        after = tuple(tuple(a for a in axes if target[a] == d) for d in range(rank))
        return (Permute(tuple(map(tuple, order)), after),)
    steps: list[Step] = []
    for a in axes:
        if source[a] in (REPLICATED, PARTIAL) and target[a] >= 0:
            order[target[a]].append(a)
            if source[a] == REPLICATED:
                steps.append(Slice(a, target[a]))
    gathered = [a for a in axes if source[a] >= 0 and target[a] == REPLICATED]
    rounds = rounds_of(source, target)
    if is_counted and len(rounds) > 2:
        rounds[1:] = [sorted(a for later in rounds[1:] for a in later)]

    def arrange(leaving: list[int], later: list[int]) -> None:
        """Makes axes that leave next the minor ones, if they are not."""
        nonlocal order
        ideal = []
        for names in order:
            kept = sorted(a for a in names if a not in gathered and a not in leaving and a not in later)
            groups = (gathered, later, leaving) if leaving is not gathered else (gathered,)
            ideal.append([*kept, *(a for group in groups for a in names if a in group)])
        suffix_is_right = all(set(names[len(names) - sum(a in leaving for a in names) :]) <= set(leaving) for names in order)
        if not (order == ideal if leaving is gathered else suffix_is_right):
            steps.append(Permute(tuple(map(tuple, order)), tuple(map(tuple, ideal))))
            order = ideal

    for k, moving in enumerate(rounds):
        arrange(moving, [a for later in rounds[k + 1 :] for a in later])
        steps.append(Exchange(tuple((a, source[a], target[a]) for a in moving), tuple(map(tuple, order))))
        for a in moving:
            order[source[a]].remove(a)
            order[target[a]].append(a)
    arrange(gathered, [])
    if gathered:
        steps.append(Gather(tuple((a, source[a]) for a in gathered), tuple(map(tuple, order))))
    return tuple(steps)
