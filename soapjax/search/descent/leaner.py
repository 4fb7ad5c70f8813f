"""Ways round a full device: of what descents judged, what takes less memory than all that is as fast.

Where a device is nearly full, whatever is faster and takes more memory does not fit, and no single move leads on from the best. But
something hardly slower may take much less, and what that leaves is enough for several moves that are faster. Of 48 blocks of width
8,192 on 64 H100s a descent ended at 3.034 s and 99.9 % of the memory; one from a strategy that is 0.2 % slower and takes 93 % ended
at 2.886 s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from soapjax.search.problem import Evaluation

NEARLY_FULL = 0.9  # of the usable memory: with less of it taken, memory keeps nothing from being tried
SLOWER = 0.02  # than the best, relatively, at the most
LEANER = 0.005  # relatively, at least


class Leaner:
    """The front of cost and memory of what is offered to it; a point is given once."""

    def __init__(self) -> None:
        self.front: list[Evaluation] = []  # the fastest first
        self._given: set[bytes] = set()

    def offer(self, some: Iterable[Evaluation]) -> None:
        """Takes note of what was judged."""
        front: list[Evaluation] = []
        least_bytes = math.inf
        for e in sorted([*self.front, *some], key=lambda e: (e.cost, e.memory_bytes)):
            if e.memory_bytes < (1 - LEANER) * least_bytes:
                front.append(e)
                least_bytes = e.memory_bytes
        self.front = front

    def next(self, best: Evaluation, usable_memory_bytes: float) -> Evaluation | None:
        """The fastest that takes less than `best`, is hardly slower, and was not given before.

        None where there is none, or where memory does not bind `best`.
        """
        if best.memory_bytes <= NEARLY_FULL * usable_memory_bytes:
            return None
        for e in self.front:
            is_worth_it = e.cost <= (1 + SLOWER) * best.cost and e.memory_bytes < (1 - LEANER) * best.memory_bytes
            if is_worth_it and (key := e.strategy.key()) not in self._given:
                self._given.add(key)
                return e
        return None
