"""A start that takes a second or two to find: the additive optimum (coarse_optimum.py), which the descents need not wait for."""

from __future__ import annotations

import contextlib
import math

from soapjax.jit.beside import Beside
from soapjax.search.chain.record import Record
from soapjax.search.descent.shortening import FewerBlocks
from soapjax.search.problem import Evaluation, PlanningProblem
from soapjax.search.relaxation.coarse_optimum import additive_start, additive_start_s

EARLIEST = 0.05  # of the budget's seconds, where time may end the search: what descents find first they find sooner alone
WITHIN, UNTIL = 0.3, 0.6  # of them: what it may take by its estimate, and when it is given up


def additive_beside(
    problem: PlanningProblem, fewer: FewerBlocks | None, record: Record
) -> Beside[Evaluation | None] | None:  # fmt: skip
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

    later = Beside(find, EARLIEST)
    if record.limit is not None:  # the clock is not to decide
        later.wait()
    return later
