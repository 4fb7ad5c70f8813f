"""A start for searches, within a second or so: the additive optimum where repeated operators choose alike, of coarse candidates.

A descent's moves reach any config; where it ends depends on which dims it begins with, and these the sum of all durations ranks
well (relaxed.py): of ResNet-101 on 16 GPUs such a start, before any descent, is below what descents from baselines end at. Where
communication hides under compute, as the sum does not know, less of it has to count: the optimum with a quarter of it is another
start, and the better one by the simulator is taken.
"""

from __future__ import annotations

import math

from soapjax.search.problem import Judging, PlanningProblem
from soapjax.search.relaxation.candidates import coarse_candidates
from soapjax.search.relaxation.dynamic_program import Solution, fitting, seeds, tied_solution
from soapjax.search.relaxation.relaxed import Pairwise, relaxation_on
from soapjax.strategy.configs import Strategy

TOLLS = (1.0, 0.25)  # what communication counts
ROUNDS, MAX_ENTRIES = 6, 300_000  # of the dynamic program: more of either took ten times as long, and found nothing lower


def additive_start_s(problem: PlanningProblem) -> float:
    """About how long it takes."""
    tables = problem.simulator.tables
    terms = tables.num_tasks + len(tables.sum_task) + len(tables.edge_task) + int(tables.may_be_partial.sum())
    return 0.2 + terms / 6000


def additive_start(problem: PlanningProblem, *, judging: Judging | None = None, deadline: float = math.inf) -> Strategy:
    """A good strategy quickly, fitting into memory where one was found; of a problem without pins.

    `judging` says what fits and which is the best, where that is asked of a longer step with strategies like the problem's.

    Raises: TimeoutError where the relaxation was not done by `deadline`, of `time.monotonic`.
    """
    begun, judging = seeds(problem), judging or problem
    relaxation = relaxation_on(problem, coarse_candidates(problem.space, begun), deadline=deadline)
    unsharded = [s for s in begun if not s.storage.any()]

    def minimise(pairwise: Pairwise) -> Solution:
        return tied_solution(relaxation, pairwise, unsharded, deadline, rounds=ROUNDS, max_entries=MAX_ENTRIES)

    found = {s.key(): s for toll in TOLLS for s in fitting(relaxation, minimise, deadline, judging, toll=toll)}
    evaluations = judging.evaluate(list(found.values()))
    if not any(e.is_feasible for e in evaluations):
        evaluations += judging.evaluate(begun)
    return min(evaluations, key=lambda e: e.rank).strategy
