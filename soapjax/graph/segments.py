"""Where a forward pass is cut, so that the backward pass computes it again piece by piece.

What crosses a cut is kept. Between two cuts nothing need be kept, and all of it is there again while the piece is
differentiated: the peak is what all cuts keep, and the largest piece (Chen et al., "Training Deep Nets with Sublinear Memory
Cost", 2016). Cuts lie where little crosses, and are those of the least peak: of a network of equal blocks between the
blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MAX_PLACES = 256  # where a cut may lie: one in each part of the pass in which equally many bytes are saved
_BOUNDS = 24  # sizes of the largest piece that are tried


class Value(NamedTuple):
    """What the forward pass makes, in positions of its equations."""

    made: int
    last_read: int  # by the forward pass itself; `made` where it reads it not
    size_bytes: float
    is_saved: bool  # the backward pass reads it


def cuts(values: list[Value], length: int) -> list[int]:
    """Positions before which to cut a forward pass of so many equations."""
    places = _places(values, length)
    if len(places) < 3:
        return []
    made = np.searchsorted(places, [v.made for v in values], side="right") - 1
    read = np.searchsorted(places, [v.last_read for v in values], side="right") - 1
    size, is_saved = np.array([v.size_bytes for v in values]), np.array([v.is_saved for v in values])
    num = len(places)
    crossing = np.zeros((num, num))  # [q, p]: bytes made since place q and read behind place p
    np.add.at(crossing, (made, read), size)
    crossing = crossing[::-1].cumsum(0)[::-1]  # made at q or later
    crossing = crossing[:, ::-1].cumsum(1)[:, ::-1]  # read at p or later
    saved = np.zeros((num, num))  # [q, p]: bytes made from q on, last read before p, for the backward pass
    np.add.at(saved, (made[is_saved], read[is_saved]), size[is_saved])
    saved = saved[::-1].cumsum(0)[::-1]
    inner = np.concatenate([np.zeros((num, 1)), saved.cumsum(1)[:, :-1]], 1)
    crossing -= np.diagonal(crossing).copy()  # made before p too
    return [places[i] for i in _least_peak(crossing, inner)]


def _places(values: list[Value], length: int) -> list[int]:
    """Where a cut may lie, the beginning and the end included: where fewer bytes cross than right before or behind."""
    across, saved = np.zeros(length + 1), np.zeros(length)
    for v in values:
        saved[v.made] += v.size_bytes * v.is_saved
        if v.last_read > v.made:
            across[v.made + 1] += v.size_bytes
            across[v.last_read + 1] -= v.size_bytes
    across = across.cumsum()[:length]
    inside = np.arange(1, length - 1)
    is_low = (across[inside] < across[inside - 1]) & (across[inside] <= across[inside + 1])
    found: dict[int, int] = {}  # share of all that is saved -> the place in it that least crosses
    share = (saved.cumsum() / max(saved.sum(), 1.0) * MAX_PLACES).astype(int)
    for i in inside[is_low].tolist():
        if across[i] < across[found.setdefault(int(share[i]), i)]:
            found[int(share[i])] = i
    return [0, *sorted(found.values()), length]


def _least_peak(crossing: np.ndarray, inner: np.ndarray) -> list[int]:
    """Places of the cuts that keep least, the largest piece counted once; `crossing` and `inner` are of [q, p], q before p."""
    num = len(inner)
    largest = inner[0, num - 1]
    best = largest
    found: list[int] = []
    for bound in largest * 2.0 ** -np.arange(1, _BOUNDS / 2, 0.5):
        kept, before = np.full(num, np.inf), np.zeros(num, int)
        kept[0] = 0.0
        for p in range(1, num):
            cost = np.where(inner[:p, p] <= bound, kept[:p] + crossing[:p, p], np.inf)
            before[p] = int(cost.argmin())
            kept[p] = cost[before[p]]
        if kept[-1] + bound < best:
            best, found, p = kept[-1] + bound, [], before[num - 1]
            while p > 0:
                found.append(p)
                p = before[p]
    return found[::-1]
