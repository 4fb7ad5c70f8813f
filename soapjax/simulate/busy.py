"""How long each stream is busy in each phase, of many strategies at once: no step takes less than its busiest streams, one phase
after the other. Sums of what the simulators schedule, so that those of equal blocks add up exactly.
All devices do the same here: there are no pins.
"""

from __future__ import annotations

import numpy as np

from soapjax.simulate.items import Items

Array = np.ndarray


class BusyStreams:
    """Of the items of one problem.

    Args:
      overlap: whether a device computes while it communicates; else a communication keeps the computing stream busy, too.
    """

    def __init__(self, items: Items, *, overlap: bool):
        phase = np.cumsum(items.is_barrier) - items.is_barrier
        self.overlap = overlap
        of_rows = np.concatenate([items.of_resolve, items.of_reshard, items.of_sum])
        self.phases = [
            tuple(np.flatnonzero(np.append(phase == f, False)[of]) for of in (items.of_compute, of_rows))
            for f in range(int(phase.max(initial=0)) + 1)
        ]

    def seconds(self, compute_s: Array, paid_s: Array) -> Array:
        """Seconds [F, 1 + L, Q] of strategies: of tasks [K.., Q] and of rows as they are paid [X.., L, Q]; F phases."""
        found = []
        for tasks, rows in self.phases:
            computing = compute_s[tasks].sum(0, dtype=np.float64)[None]
            sending = paid_s[rows].sum(0, dtype=np.float64)
            found.append(np.concatenate([computing if self.overlap else computing + sending.sum(0), sending]))
        return np.stack(found)


def least_s(busy_s: Array) -> Array:
    """Seconds [Q] that no step of so busy streams [F, 1 + L, Q] falls below."""
    return busy_s.max(1).sum(0)
