"""One search: every baseline, the planner, and of what is as good the simplest; and again, with less memory."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

from soapjax.helpers import interrupts
from soapjax.search.chain.compiling import prepare_chains
from soapjax.search.descent.plainest import simplified
from soapjax.search.front import Front, FrontPoint
from soapjax.search.planners import BASELINES
from soapjax.search.problem import Budget, Evaluation, Planner, PlanningProblem, SearchResult
from soapjax.search.recomputation import Recomputing, may_recompute, searched
from soapjax.strategy.configs import Strategy

AGAIN = 0.25  # of the first search's proposals that each search under less memory gets, and of the seconds that are kept for all
SIMPLIFYING = 0.1  # of the seconds, which are kept for finding the simplest of what is as good


class Searched(NamedTuple):
    problem: PlanningProblem  # with what the plan recomputes
    result: SearchResult
    baselines: dict[str, SearchResult]  # as the step is
    as_it_is: PlanningProblem  # the step without recomputation of the plan's
    notes: tuple[str, ...] = ()

    def known(self) -> dict[bytes, Strategy]:
        """All strategies that are left of it."""
        found = [self.result.best, *self.result.candidates, *(b.best for b in self.baselines.values())]
        return {e.strategy.key(): e.strategy for e in found}

    def under(self, limit_bytes: float) -> Searched:
        """The same strategies, judged where a plan may be predicted to take so much of a device."""
        problem, as_it_is = (p.usable_up_to(limit_bytes) for p in (self.problem, self.as_it_is))
        baselines = {name: judged(found, as_it_is) for name, found in self.baselines.items()}
        return self._replace(
            problem=problem, result=judged(self.result, problem), baselines=baselines, as_it_is=as_it_is
        )  # fmt: skip

    def with_best(self, best: Evaluation) -> Searched:
        return self._replace(result=self.result._replace(best=best))


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


def judged(result: SearchResult, problem: PlanningProblem) -> SearchResult:
    """The strategies of a result in another problem."""
    best, *others = problem.evaluate([e.strategy for e in (result.best, *result.candidates)])
    return result._replace(best=best, candidates=tuple(others))


@dataclasses.dataclass(frozen=True)
class Search:
    """What is searched by.

    Args:
      proposals: of the first search; None where only `deadline` ends it.
      deadline: of all searches together, of `time.monotonic`.
      simplicity: relative step time within which a simpler plan is taken.
      recomputing: of a problem the choice of what the backward pass computes again; its problems have at most so many bytes, and
        the front is of baselines.
      may_go_on: whether a quarter of the seconds is kept for searches under less memory.
      kept: of the seconds, where no baseline fits the devices.
    """

    name: str
    planner: Planner
    seed: int
    proposals: int | None
    deadline: float
    progress: Callable[[int, float, float], None] | None
    simplicity: float
    recomputing: Callable[[PlanningProblem, float, Sequence[FrontPoint]], Recomputing]
    may_go_on: bool = False
    kept: float = 0.0

    def __call__(self, problem: PlanningProblem) -> Searched:
        """The first search.

        Raises: SoapjaxError where the planner refuses the problem.
        """
        if self.name == "mcmc":
            prepare_chains(problem, Budget(self.proposals, _finite(self._first_s())))
        baselines, front = self._baselines(problem)
        found = tuple(b.best.strategy for b in baselines.values())
        return self._searched(problem, baselines, front, found, self.proposals, self._first_s())

    def again(self, before: Searched, limit_bytes: float) -> Searched:
        """From what was found, where a plan may be predicted to take no more than `limit_bytes` per device.

        When no time is left, the best of what was found.
        """
        if self._left_s() <= 0:
            found = before.under(limit_bytes)
            return found.with_best(min(found.problem.evaluate(list(found.known().values())), key=lambda e: e.rank))
        problem, known = before.as_it_is.usable_up_to(limit_bytes), tuple(before.known().values())
        proposals = None if self.proposals is None else max(1, int(AGAIN * self.proposals))
        found = self._searched(problem, *self._baselines(problem), known, proposals, self._left_s() / 2)
        done, took_s = (getattr(before.result, k) + getattr(found.result, k) for k in ("num_proposals", "search_s"))
        return found._replace(result=found.result._replace(num_proposals=done, search_s=took_s))

    def _baselines(self, problem: PlanningProblem) -> tuple[dict[str, SearchResult], tuple[FrontPoint, ...]]:
        """What they found, and the front of all that they judged, whether it fits or not; empty where the problem keeps one."""
        front = Front(math.inf, Strategy.key)
        judging = problem if problem.front is not None else dataclasses.replace(problem, front=front)
        return {name: run(self._key, judging, Budget()) for name, run in BASELINES.items()}, front.points()

    @property
    def _key(self) -> jax.Array:
        return jax.random.key(self.seed)

    def _left_s(self) -> float:
        return self.deadline - time.monotonic()

    def _first_s(self) -> float:
        """Of what is left, for the first search."""
        return self._left_s() * (1 - AGAIN if self.may_go_on else 1)

    def _searched(
        self, problem: PlanningProblem, baselines: dict[str, SearchResult], front: Sequence[FrontPoint],
        starts: tuple[Strategy, ...], proposals: int | None, left_s: float,
    ) -> Searched:  # fmt: skip
        until, as_it_is = time.monotonic() + left_s, problem
        offers = may_recompute(problem, self.name, baselines)
        choice = self.recomputing(problem, problem.usable_memory_bytes, front) if offers else None
        is_mcmc = self.name == "mcmc"
        simplifies = is_mcmc and self.simplicity > 0  # the others' results have names or proofs
        seconds = _finite(max(left_s * (1 - SIMPLIFYING * simplifies), 1e-3))
        try:
            with interrupts.searching():
                budget = Budget(proposals, seconds, self.progress, baselines=starts)
                result, problem = searched(
                    self.planner, self._key, problem, budget, baselines, choice, goes_on=is_mcmc, kept=self.kept
                )
        except KeyboardInterrupt:  # before a planner had anything of its own: the best baseline is the best so far
            best = min((found.best for found in baselines.values()), key=lambda e: e.rank)
            result = SearchResult(best, 0, 0.0, "interrupted")
        seen = problem.best_seen()
        if seen is not None and not problem.objective.is_time and seen.rank < result.best.rank:
            result = result._replace(best=seen, candidates=(result.best, *result.candidates))
        here = baselines if problem is as_it_is else {name: judged(found, problem) for name, found in baselines.items()}
        result, simpler = self._simpler_if_as_good(result, here, problem)
        if simplifies and not simpler and result.stopped_by != "interrupted":
            result, simpler = simplified(problem, result, [b.best for b in here.values()], self.simplicity, deadline=until)
        return Searched(problem, result, baselines, as_it_is, simpler)

    def _simpler_if_as_good(
        self, result: SearchResult, baselines: Mapping[str, SearchResult], problem: PlanningProblem
    ) -> tuple[SearchResult, tuple[str, ...]]:
        """The simplest baseline whose distance from the best is within the calibrated error; the simplest first."""
        profile = problem.simulator.tables.profile
        error = profile.error if profile is not None else 0.0
        best = result.best
        for name, found in baselines.items() if error > 0 and self.name not in baselines else ():
            gain = 1 - best.step_time_s / found.best.step_time_s
            if found.best.is_feasible and 0 <= gain < error:
                note = (
                    f"{self.name} found {best.step_time_s:.4g} s per step, {gain:.1%} less than {name}: below the calibrated error "
                    f"of {error:.1%}, so {name} is taken"
                )
                return result._replace(best=found.best, candidates=(best, *result.candidates)), (note,)
        return result, ()


def least_memory(searched: Searched) -> Evaluation:
    """Of what a search left, what is predicted to take least of a device."""
    return min(searched.problem.evaluate(list(searched.known().values())), key=lambda e: e.memory_bytes)
