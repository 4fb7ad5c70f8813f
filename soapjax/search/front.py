"""The front of step time, communication and memory: of what a search saw, no plan is better in one and no worse in the others.

What is best by any objective of objective.py lies on it, since none falls where a figure rises. It holds only what fits the device.
It does not depend on the order in which strategies come: of equal ones the first by its key stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from soapjax.simulate.simulator import Scores


class FrontPoint(NamedTuple):
    """A plan on the front: a `Strategy`, or a pipeline's `Choice`."""

    step_time_s: float
    sent_bytes: float  # in a step by the device that sends most
    memory_bytes: float  # of the fullest device
    plan: Any


Point = TypeVar("Point", bound=tuple[Any, ...])  # begins with the three figures, as `FrontPoint` does


class Front:
    """Kept by several threads of one search.

    Args:
      usable_bytes: what a device can store.
      key: orders plans that are equal in all three figures.
    """

    def __init__(self, usable_bytes: float, key: Callable[[Any], Any]):
        self.usable_bytes, self.key = usable_bytes, key
        self._figures = np.zeros((0, 3))
        self._plans: list[Any] = []
        self._lock = threading.Lock()

    def offer(self, scores: Scores, plans: Sequence[Any]) -> None:
        """Takes note of plans with their scores, NumPy arrays [B]."""
        figures = np.stack([scores.step_time_s, scores.sent_bytes, scores.memory_bytes], 1).astype(np.float64)
        fits = (scores.memory_bytes <= self.usable_bytes) & ~(scores.violations > 0) & np.isfinite(figures).all(1)
        with self._lock:
            now = self._figures[:, None]
            is_worse = ((now <= figures).all(-1) & (now < figures).any(-1)).any(0)
            for i in np.flatnonzero(fits & ~is_worse).tolist():
                self._add(figures[i], plans[i])

    def _add(self, own: np.ndarray, plan: Any) -> None:
        is_below, is_above = (self._figures <= own).all(1), (self._figures >= own).all(1)
        same = np.flatnonzero(is_below & is_above)
        if len(same):
            k = int(same[0])
            self._plans[k] = min(self._plans[k], plan, key=self.key)
        elif not is_below.any():
            kept = np.flatnonzero(~is_above).tolist()
            self._figures = np.concatenate([self._figures[kept], own[None]])
            self._plans = [*(self._plans[k] for k in kept), plan]

    def points(self) -> tuple[FrontPoint, ...]:
        """The fastest first."""
        with self._lock:
            order = np.lexsort(self._figures.T[::-1])
            return tuple(FrontPoint._make([*self._figures[k].tolist(), self._plans[k]]) for k in order.tolist())


def joined(*fronts: Sequence[Point]) -> tuple[Point, ...]:
    """The front of several, the fastest first; of equal points the one in the earlier front."""
    every = [p for front in fronts for p in front]
    if not every:
        return ()
    figures = np.array([p[:3] for p in every])
    below = (figures[:, None] <= figures[None]).all(-1)  # [i, j]: i is no worse than j
    earlier = np.arange(len(every))[:, None] < np.arange(len(every))
    beaten = set(np.flatnonzero((below & (~below.T | earlier)).any(0)).tolist())
    return tuple(sorted((p for i, p in enumerate(every) if i not in beaten), key=lambda p: p[:3]))
