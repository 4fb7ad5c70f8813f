"""Which records a call computes: those of operators that are not as they were in the call whose results are written over.

A record depends on the configs of few operators: a slot, a task and a parameter on one, a row on those that decide its layouts
(at most four). So where the strategies of a call resemble, lane by lane, those of an earlier one, most of what was found stays as
it is. Exact: what is kept was computed by the same rules from the same numbers.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from soapjax.costs.rules.base import Listed
from soapjax.costs.tables.arrays import Records
from soapjax.costs.whole import Evaluated, Over, PerRecord, Todo

MOST_KEPT = 4  # results of a bucket that nobody reads any more


class Counts(NamedTuple):
    """How many records there are of each kind, as in `Todo`."""

    operators: int
    slots: int
    parameters: int
    tasks: int
    rows: int


class Dependents:
    """Of each operator of a problem, the records that depend on its config or storage.

    Args:
      records: of the problem, as NumPy arrays.
      counts: of the problem.
      sizes: how many there are with the padding.
    """

    def __init__(self, records: Records, counts: Counts, sizes: Counts):
        self._counts, self._sizes = counts, sizes
        of_kinds = records.slot, records.parameter, records.task, records.row
        slot, parameter, task, row = (np.asarray(x)[:n] for x, n in zip(of_kinds, counts[1:], strict=True))
        width = slot.shape[1] - 4
        self._of_slot, self._of_parameter, self._of_task = slot[:, width + 3], parameter[:, 5], task[:, 2]
        places = slot[:, width + 1], parameter[:, 2:5], row[:, 1:5]
        of_place = np.full(1 + max(int(x.max(initial=0)) for x in places), sizes.operators)  # nobody
        of_place[slot[:, width + 1]] = self._of_slot
        of_place[parameter[:, 2:5]] = self._of_parameter[:, None]
        self._of_row = of_place[row[:, 1:5]]  # [X, 4]
        # A task that updates a parameter takes as long as the parameter's storage says.
        updates = task[task[:, 1] >= 0]
        self._updated = np.unique(np.stack([self._of_parameter[updates[:, 1]], updates[:, 2]], 1), axis=0)

    def todo(self, changed: np.ndarray) -> Todo:
        """The records of `changed` operators, bool [N]."""
        changed = np.append(changed, np.zeros(self._sizes.operators + 1 - len(changed), bool))
        changed[self._updated[changed[self._updated[:, 0]], 1]] = True
        found = (
            changed[:-1], changed[self._of_slot], changed[self._of_parameter], changed[self._of_task],
            changed[self._of_row].any(axis=1),
        )  # fmt: skip
        return Todo._make(_listed(np.flatnonzero(x), size) for x, size in zip(found, self._sizes, strict=True))

    def everything(self) -> Todo:
        return Todo._make(_listed(np.arange(n), size) for n, size in zip(self._counts, self._sizes, strict=True))


def _listed(some: np.ndarray, size: int) -> Listed:
    order = np.zeros(size, np.int32)
    order[: len(some)] = some
    return Listed(order, np.int32(len(some)))


class Results(NamedTuple):
    """What a call found, and of what."""

    found: Evaluated
    problem: object
    axes: np.ndarray  # int8 [N, A, Q], of the problem's own operators
    storage: np.ndarray  # int8 [N, Q]

    @property
    def per_record(self) -> PerRecord:
        return self.found.over.per_record

    def changed(self, axes: np.ndarray, storage: np.ndarray) -> np.ndarray:
        """bool [N]: the operators that are not in every lane as they were."""
        return (self.axes != axes).any(axis=(1, 2)) | (self.storage != storage).any(axis=1)


class DoneWith:
    """Results of a bucket that nobody reads any more: the next, of any of its problems, are written over these."""

    def __init__(self) -> None:
        self._kept: list[Results] = []
        self._lock = threading.Lock()

    def add(self, found: Results) -> None:
        with self._lock:
            if len(self._kept) < MOST_KEPT:
                self._kept.append(found)

    def take(self, problem: object, axes: np.ndarray, storage: np.ndarray) -> tuple[Over | None, np.ndarray | None]:
        """Those of the strategies most like these, and which operators have changed since; None of another problem's.

        `axes` and `storage` as in `Results`.
        """
        with self._lock:
            own = [(found.changed(axes, storage), i) for i, found in enumerate(self._kept) if found.problem is problem]
            if own:
                changed, i = min(own, key=lambda x: int(x[0].sum()))
                return self._kept.pop(i).found.over, changed
            return (self._kept.pop().found.over if self._kept else None), None
