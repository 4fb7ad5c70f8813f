"""A start that takes a second or two to find: the additive optimum (coarse_optimum.py), which the descents need not wait for."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from concurrent.futures import Future

from soapjax.jit.programs import threads
from soapjax.search.chain.record import Record
from soapjax.search.descent.shortening import FewerBlocks
from soapjax.search.problem import Evaluation, PlanningProblem
from soapjax.search.relaxation.coarse_optimum import additive_start, additive_start_s

EARLIEST = 0.05  # of the budget's seconds, where time may end the search: what descents find first they find sooner alone
WITHIN, UNTIL = 0.3, 0.6  # of them: what it may take by its estimate, and when it is given up


class LaterStart:
    """What `find` gives, None where there was no time for it; in a thread, from `begin_by` on.

    Args:
      earliest: the share of the budget before which it does not begin.
    """

    def __init__(self, find: Callable[[], Evaluation | None], earliest: float):
        self.earliest, self._find = earliest, find
        self._found: Future[Evaluation | None] | None = None

    def begin_by(self, spent: float) -> None:
        if self._found is None and spent >= self.earliest:
            self._begin()

    def _begin(self) -> None:
        pool = threads(1)
        self._found = pool.submit(self._find)
        pool.shutdown(wait=False)

    @property
    def is_looked_for(self) -> bool:
        return self._found is not None and not self._found.done()

    @property
    def is_there(self) -> bool:
        return self._found is not None and self._found.done()

    def take(self) -> Evaluation | None:
        """Waits for it."""
        if self._found is None:
            self._begin()
        return self._found.result()


def additive_beside(problem: PlanningProblem, fewer: FewerBlocks | None, record: Record) -> LaterStart | None:
    """The additive optimum, of few of its blocks where a step has many, judged as these are; None where it would take too long.

    Where time may end the search, it is when that is found that decides what descends from it.
    """
    budget = record.budget
    if budget.random_start or problem.space.offers_pins:
        return None
    seconds = math.inf if budget.seconds is None else budget.seconds
    relaxed, judging = (problem, problem) if fewer is None else (fewer.shortest, fewer)
    if seconds < math.inf:
        record.time_decides()
    if additive_start_s(relaxed) > WITHIN * seconds:
        return None

    def find() -> Evaluation | None:
        with contextlib.suppress(TimeoutError):
            start = additive_start(relaxed, judging=judging, deadline=record.begin + UNTIL * seconds)
            return judging.evaluate([start])[0]
        return None

    later = LaterStart(find, EARLIEST)
    if record.limit is not None:  # the clock is not to decide
        later.take()
    return later
