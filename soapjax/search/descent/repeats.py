"""Blocks that repeat: which operators stand at the same place of equal blocks, read off the order of their structures.

    structures in program order   e  a b c  a b c  a b c  z        one run of three blocks of three operators

Names play no part: a recurrent net's time steps repeat as the layers of a Transformer do. A block at the end of a run may lack
operators (its first normalisation has another structure, say): those that it has belong to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MOST_OPERATORS_OF_A_BLOCK = 1000


class Run(NamedTuple):
    """Equal blocks, one after the other."""

    members: np.ndarray  # int32 [blocks, places]: the operator at each place; -1 where a block at an end has none

    @property
    def num_blocks(self) -> int:
        return len(self.members)

    def distinct(self, axes: np.ndarray, storage: np.ndarray) -> int:
        """In how many ways the blocks are split and stored. An operator that a block lacks makes no difference."""
        whole = self.members[(self.members >= 0).all(axis=1)]
        rows = np.concatenate([axes[whole].reshape(len(whole), -1), storage[whole].reshape(len(whole), -1)], axis=1)
        return len(np.unique(rows, axis=0))


def runs_of(groups: Sequence[int]) -> list[Run]:
    """The runs of operators whose structures are `groups`, in program order: those that cover most first, none overlaps another."""
    found: list[Run] = []
    _collect(np.asarray(groups), 0, len(groups), found)
    return sorted(found, key=lambda r: -int((r.members >= 0).sum()))


def _collect(groups: np.ndarray, begin: int, end: int, found: list[Run]) -> None:
    best = _longest(groups[begin:end])
    if best is None:
        return
    start, period, blocks = best
    start += begin
    members = start + np.arange(blocks * period, dtype=np.int32).reshape(blocks, period)
    left, right = _beside(groups, members[0], -period, begin, end), _beside(groups, members[-1], period, begin, end)
    rows = [members, *([left[None]] if (left >= 0).any() else []), *([right[None]] if (right >= 0).any() else [])]
    joined = np.concatenate(rows)
    found.append(Run(joined[joined.max(axis=1).argsort(kind="stable")]))
    _collect(groups, begin, int(joined[joined >= 0].min()), found)
    _collect(groups, int(joined.max()) + 1, end, found)


def _longest(groups: np.ndarray) -> tuple[int, int, int] | None:
    """(start, period, blocks) of the run that covers most, of these that with the shortest period; None where nothing repeats."""
    best, covered = None, 0
    for period in range(1, min(len(groups) // 2, MOST_OPERATORS_OF_A_BLOCK) + 1):
        if len(groups) <= covered:
            break
        same = np.concatenate([[False], groups[period:] == groups[:-period], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        lengths = edges[1::2] - edges[::2]
        if not len(lengths):
            continue
        k = int(lengths.argmax())
        blocks = int(lengths[k]) // period + 1
        if blocks > 1 and blocks * period > covered:
            best, covered = (int(edges[2 * k]), period, blocks), blocks * period
    return best


def _beside(groups: np.ndarray, block: np.ndarray, shift: int, begin: int, end: int) -> np.ndarray:
    """The operators before or behind a block that belong to one more of its kind; -1 elsewhere."""
    at = block + shift
    inside = (at >= begin) & (at < end)
    return np.where(inside & (groups[np.where(inside, at, 0)] == groups[block]), at, -1).astype(np.int32)
