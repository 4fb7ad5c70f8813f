"""Layouts: per mesh axis, which dim of a tensor it splits.

A layout is a vector over the mesh axes: a tensor dim, REPLICATED, PARTIAL
(every device holds a summand), or PINNED - i (only the devices whose coordinate on that axis is i hold it).
An axis splits at most one dim; a dim may be split by several axes, in mesh order, the first being major.

>>> spec_of([0, REPLICATED, 0], rank=2, axis_names=("h0", "d0", "d1"))
(('h0', 'd1'), ())
"""

from __future__ import annotations

from collections.abc import Sequence

REPLICATED = -1
PARTIAL = -2
PINNED = -3
HALO = -100  # HALO - k, of what is in the middle of an operator: blocks get halos from their neighbours along its k-th dim

Spec = tuple[tuple[str, ...], ...]  # axis names per tensor dim, as in a PartitionSpec


def spec_of(layout: Sequence[int], *, rank: int, axis_names: Sequence[str]) -> Spec:
    """The axis names per dim; PARTIAL axes appear nowhere."""
    return tuple(tuple(n for n, d in zip(axis_names, layout, strict=True) if d == k) for k in range(rank))


def layout_of(spec: Sequence[Sequence[str]], axis_names: Sequence[str]) -> list[int]:
    """The inverse of `spec_of`."""
    layout = [REPLICATED] * len(axis_names)
    for d, names in enumerate(spec):
        for n in names:
            layout[list(axis_names).index(n)] = d
    return layout


def degree(layout: Sequence[int], dim: int, axis_sizes: Sequence[int]) -> int:
    """Into how many parts `dim` is split."""
    n = 1
    for d, s in zip(layout, axis_sizes, strict=True):
        n *= s if d == dim else 1
    return n


def divides(layout: Sequence[int], shape: Sequence[int], axis_sizes: Sequence[int]) -> bool:
    """Whether every dim is split evenly."""
    return all(n % degree(layout, d, axis_sizes) == 0 for d, n in enumerate(shape))
