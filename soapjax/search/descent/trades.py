"""Moves that are made together because one frees the memory that others take.

Where a device is full, a descent ends at a strategy from which every move either is slower or does not fit. Of the moves that it
tried there, each with its seconds and bytes more or less, sets are chosen as if these added up: a knapsack, filled greedily.
What is promising is simulated as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapjax.search.problem import Evaluation
from soapjax.strategy.configs import Strategy

MOST_BEGUN = 64  # moves of each kind that sets begin with


def traded(best: Evaluation, around: Sequence[Evaluation], usable_bytes: float, most: int) -> list[Strategy]:
    """Up to `most` strategies in which several of the moves from `best` to `around` are made, the most promising first.

    By the sums they are faster than `best` and fit into `usable_bytes`.
    """
    if not around:
        return []
    base = best.strategy
    more_s = np.array([e.step_time_s for e in around]) - best.step_time_s
    more_bytes = np.array([e.memory_bytes for e in around]) - best.memory_bytes
    # Two moves may change the split of an operator and the storage of its parameters; not both the same.
    moved = [(e.strategy.axes != base.axes, e.strategy.storage != base.storage) for e in around]
    changed = np.array([np.concatenate([axes.any(axis=1), storage]) for axes, storage in moved])  # [moves, 2 N]
    spare = usable_bytes - best.memory_bytes
    is_gain, frees = (more_s < 0) & (more_bytes > spare), more_bytes < 0
    rate = more_s / np.where(more_bytes == 0, 1.0, more_bytes)  # seconds per byte: the lowest gains most, the highest frees best
    gains = np.flatnonzero(is_gain)[np.argsort(rate[is_gain])]
    freeing = np.flatnonzero(frees)[np.argsort(-rate[frees])]
    found: dict[tuple[int, ...], float] = {}

    def fill(begun: int, others: np.ndarray) -> None:
        chosen, taken, seconds, left = [begun], changed[begun].copy(), more_s[begun], spare - more_bytes[begun]
        for k in others:
            if left >= 0 and seconds < 0 and len(chosen) > 1:
                found[tuple(sorted(chosen))] = seconds
            if more_bytes[k] > max(left, 0) or (left >= 0 and more_bytes[k] < 0) or (changed[k] & taken).any():
                continue
            chosen.append(int(k))
            taken |= changed[k]
            seconds, left = seconds + more_s[k], left - more_bytes[k]
        if left >= 0 and seconds < 0 and len(chosen) > 1:
            found[tuple(sorted(chosen))] = seconds

    for k in gains[:MOST_BEGUN]:
        fill(int(k), np.concatenate([freeing, gains]))
    for k in freeing[:MOST_BEGUN]:
        fill(int(k), gains)
    promising = sorted(found, key=lambda c: (found[c], c))[:most]
    return [overlaid(base, [around[k].strategy for k in chosen])[-1] for chosen in promising]


def overlaid(before: Strategy, better: list[Strategy]) -> list[Strategy]:
    """The first of `better` with what the second changed of `before`, that with what the third changed, and so on."""
    out = better[:1]
    for other in better[1:]:
        last = out[-1]
        axes = np.where(other.axes != before.axes, other.axes, last.axes)
        out.append(Strategy(axes, np.where(other.storage != before.storage, other.storage, last.storage)))
    return out[1:]
