"""Sizes of the cost program: a few that are usual, so that problems share what is compiled."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from soapjax.costs.rules.sets import DIGITS


class Bucket(NamedTuple):
    """Sizes that are compiled in; of lists, how many there may be."""

    operators: int
    slots: int
    parameters: int
    tasks: int
    tensors: int
    edges: int
    rows: int
    slot_records: int
    stops: int
    points: int
    dims: int  # of tensors
    op_dims: int  # of operators
    levels: int
    groups: int  # of devices that pins tell apart; 0 without pins

    @property
    def scale(self) -> int:
        """Which of the usual sizes it is: 0 small, 1 large, 2 twice as large and so on."""
        return (self.tasks // LARGE.tasks).bit_length()

    @property
    def width(self) -> int:
        """Columns of a layout: a set per dim, the partial sums, and pins."""
        return self.dims + 1 + (1 + DIGITS if self.groups else 0)


SMALL = Bucket(
    operators=256, slots=4096, parameters=512, tasks=1024, tensors=3072, edges=3072, rows=6144, slot_records=6144, stops=16384,
    points=1024, dims=5, op_dims=8, levels=2, groups=0,
)  # fmt: skip
LARGE = Bucket(
    operators=1024, slots=16384, parameters=1024, tasks=4096, tensors=12288, edges=12288, rows=24576, slot_records=24576,
    stops=65536, points=4096, dims=5, op_dims=8, levels=2, groups=0,
)  # fmt: skip


MIN_GROUPS = 4


def bucket_for(need: Bucket) -> Bucket:
    """The smallest of the usual sizes that holds a problem; of more dims, levels or groups, powers of two of those alone."""
    usual = next(b for b in map(usual_bucket, itertools.count()) if all(n <= u for n, u in zip(need[:10], b[:10], strict=True)))
    found = Bucket(*(at_least(n, u) for n, u in zip(need, usual, strict=True)))
    return found._replace(groups=max(found.groups, MIN_GROUPS)) if need.groups else found


def usual_bucket(scale: int) -> Bucket:
    return SMALL if scale == 0 else Bucket._make([grown(n, scale) if i < 10 else n for i, n in enumerate(LARGE)])


def grown(large: int, scale: int) -> int:
    """A size of the large bucket in one of that scale."""
    return large << max(scale - 1, 0)


def at_least(need: int, usual: int) -> int:
    """A size that is compiled in: the usual one, or a power of two that is enough."""
    return usual if need <= usual else 1 << (need - 1).bit_length()
