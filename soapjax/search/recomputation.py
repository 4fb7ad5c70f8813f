"""Keep or recompute: which operators' results the backward pass computes again, so that a fast strategy fits into memory.

Recomputing never makes a step of given layouts faster: it pays where a strategy that would be faster does not fit. So of the
baselines those are looked at that do not fit. Where none of them is faster than the best that fits, nothing is
recomputed, and the search is that of the step as it is. For the others operators are ranked by the seconds that a byte costs,
cheap ones first and of equal ones those of the first segments: this is what experts do by hand (norms and activations, then
attention, then whole blocks, of all blocks or of some). As many as are needed are recomputed, which the simulator of the step
with that recomputation decides: it is a problem of its own, with the operators, the space and so the strategies of the other.
To search in it, operators are taken in whole groups, so that equal blocks stay equal.

The search then walks among strategies in that problem, and what is recomputed is fitted anew to the strategy that it found.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from soapjax.costs.by_operator import owners
from soapjax.costs.evaluate import Costs, lifespans
from soapjax.costs.tables.problem_tables import CostTables
from soapjax.graph.passes.phases import BACKWARD, FORWARD
from soapjax.graph.recompute import Recomputation
from soapjax.jit.array_types import Array
from soapjax.search.chain.record import TIME_DECIDED
from soapjax.search.descent.plainest import EQUAL
from soapjax.search.front import FrontPoint
from soapjax.search.problem import Budget, Evaluation, Planner, PlanningProblem, SearchResult
from soapjax.strategy.configs import Strategy

MOST_FITS = 3  # problems that are made for one strategy
FILLED = 0.97  # of the usable memory: with more of it taken, little less can be recomputed
SLACK = 1.02  # so much more than is needed is saved by the estimate
MOST_SAVED = 1.15  # of the estimate of all that can be saved: it is within some percent, most often too low
MOST_STRATEGIES = 2  # that are fitted before the search
FITTED_AGAIN = 0.15  # of the budget: what the search leaves for fitting to its own strategy


class Fitted(NamedTuple):
    """A problem with some operators recomputed, and a strategy that fits in it."""

    recomputed: frozenset[str]
    problem: PlanningProblem
    best: Evaluation


class Ranking(NamedTuple):
    """Operators in the order in which they are recomputed, under one strategy."""

    names: list[str]
    ends: np.ndarray  # so many of them are whole groups: equal operators of all blocks
    seconds: np.ndarray  # of recomputing the first 1, 2, ...
    saved_bytes: np.ndarray  # on a device, by the first 1, 2, ...


NOTHING = Ranking([], np.zeros(0, int), np.zeros(0), np.zeros(0))


class Recomputing:
    """The choice of one step.

    Args:
      problem: the step as it is.
      problem_of: makes the same with operators recomputed.
      baselines: the front of what was judged of the step as it is, whether it fits or not.
      making_s: that making `problem` took, as any of the others is taken to do.
    """

    def __init__(
        self, problem: PlanningProblem, options: Recomputation, problem_of: Callable[[frozenset[str]], PlanningProblem],
        baselines: Sequence[FrontPoint], making_s: float = 0.0,
    ):  # fmt: skip
        self.problem, self.options, self.problem_of, self.baselines = problem, options, problem_of, baselines
        self.made: dict[frozenset[str], PlanningProblem] = {frozenset(): problem}
        self.making_s = making_s  # that one of them took, at the most

    def start(self, limit_s: float, until: float = math.inf) -> Fitted | None:
        """What is recomputed in the problem to search in; None where no baseline is then faster than `limit_s`.

        Once something fits, no problem is made that would not be ready by `until` (of `time.monotonic`).
        """
        best, fitting = None, 0
        ranked = sorted((self._estimate_s(kept, ranking), i, kept.plan) for i, (kept, ranking) in enumerate(self.paying(limit_s)))
        for seconds, _, strategy in ranked:
            must_fit = math.isinf(limit_s)
            if seconds >= limit_s or fitting == MOST_STRATEGIES or (self._is_late(until) and not must_fit):
                break
            if (found := self.fitted(strategy, by_groups=True, until=until, must_fit=must_fit)) is not None:
                fitting += 1
                if found.best.cost < limit_s:
                    best, limit_s = found, found.best.cost
        return best

    def paying(self, limit_s: float) -> list[tuple[FrontPoint, Ranking]]:
        """Baselines that do not fit and, by estimate, are faster than `limit_s` with as much recomputed as they need."""
        return [
            (kept, ranking) for kept, ranking in self._unfit
            if ranking.names and self._excess(kept) <= MOST_SAVED * ranking.saved_bytes[-1]
            and self._estimate_s(kept, ranking) < limit_s
        ]  # fmt: skip

    @functools.cached_property
    def _unfit(self) -> list[tuple[FrontPoint, Ranking]]:
        return [(point, self.ranking(point.plan)) for point in self.baselines if self._excess(point) > 0]

    def _excess(self, kept: Evaluation | FrontPoint) -> float:
        return kept.memory_bytes - self.problem.usable_memory_bytes

    def _estimate_s(self, kept: FrontPoint, ranking: Ranking) -> float:
        k = min(int(np.searchsorted(ranking.saved_bytes, self._excess(kept))), len(ranking.names) - 1)
        return kept.step_time_s + ranking.seconds[k]

    def fitted(
        self, strategy: Strategy, *, by_groups: bool = False, until: float = math.inf, must_fit: bool = False
    ) -> Fitted | None:  # fmt: skip
        """The least recomputation under which a strategy fits; None where none is enough.

        Args:
          by_groups: of whole groups, so that equal blocks stay equal; and the first that is enough is taken.
          until: no problem is made that would not be ready by then.
          must_fit: but one that is enough is found, however late.
        """
        ranking, kept = self.ranking(strategy), self.problem.evaluate([strategy])[0]
        saved, tried = np.append(0.0, ranking.saved_bytes), {0: kept}
        ends = ranking.ends if by_groups else np.arange(len(saved))

        def judge(k: int) -> Evaluation:
            tried[k] = now = self.of(frozenset(ranking.names[:k])).evaluate([strategy])[0]
            saved[:] *= max(kept.memory_bytes - now.memory_bytes, 1.0) / max(saved[k], 1.0)  # as it turned out
            return now

        everything, excess, too_few, enough = len(ranking.names), self._excess(kept), 0, len(saved)
        asks_for_most = frozenset(ranking.names) in self.made or saved[-1] < SLACK * excess
        for _ in range(MOST_FITS if excess > 0 else 0):
            if self._is_late(until) and (enough < len(saved) or not must_fit):
                break
            if asks_for_most and everything not in tried:
                if not judge(everything).is_feasible:
                    return None
                enough = everything
            between = ends[(ends > too_few) & (ends < enough)]
            reach = between[saved[between] >= SLACK * excess]
            # What is enough by no estimate is tried only where nothing is known to be enough.
            if not len(between) or (not len(reach) and enough < len(saved)):
                break
            k = int(reach[0] if len(reach) else between[-1])
            too_few, enough = (too_few, k) if judge(k).is_feasible else (k, enough)
            if enough == k and (by_groups or tried[k].memory_bytes > FILLED * self.problem.usable_memory_bytes):
                break
            asks_for_most |= too_few == k  # the estimate was wrong: is anything enough?
        fits = [k for k, e in tried.items() if e.is_feasible]
        if not fits:
            return None
        best = min(fits, key=lambda k: tried[k].cost)
        recomputed = frozenset(ranking.names[:best])
        return Fitted(recomputed, self.of(recomputed), tried[best])

    def again(
        self, result: SearchResult, problem: PlanningProblem, until: float = math.inf
    ) -> tuple[SearchResult, PlanningProblem]:  # fmt: skip
        """A search's result in `problem` with the recomputation that its own strategy needs, if that is less."""
        may_pay = not self._is_late(until) and result.stopped_by != "interrupted" and self._may_be_less(result.best, problem)
        fitted = self.fitted(result.best.strategy, until=until) if may_pay else None
        if fitted is None or fitted.best.rank >= result.best.rank:
            return result, problem
        # Where less is recomputed another of them may be the best.
        candidates = tuple(fitted.problem.evaluate([e.strategy for e in result.candidates])) if result.candidates else ()
        return result._replace(best=min([fitted.best, *candidates], key=lambda e: e.rank), candidates=candidates), fitted.problem

    def _may_be_less(self, best: Evaluation, problem: PlanningProblem) -> bool:
        """Whether a strategy of `problem` fits, by estimate, with so much less recomputed that it pays to make a problem and see.

        What recomputation frees and takes is estimated for single operators, and known of those that `problem` recomputes together.
        For what simplicity may cost no problem is made.
        """
        now = next((names for names, made in self.made.items() if made is problem), frozenset())
        ranking, kept = self.ranking(best.strategy), self.problem.evaluate([best.strategy])[0]
        is_now = np.isin(ranking.names, list(now))
        seconds, saved = (np.diff(x, prepend=0.0)[is_now].sum() for x in (ranking.seconds, ranking.saved_bytes))
        freed = max(kept.memory_bytes - best.memory_bytes, 1.0) / max(saved, 1.0)
        taken = max(best.step_time_s - kept.step_time_s, 0.0) / max(seconds, 1e-30)  # what hides beside communication takes less
        enough = np.flatnonzero(freed * ranking.saved_bytes >= SLACK * self._excess(kept))
        less_s = taken * (seconds - ranking.seconds[enough[0]]) if len(enough) else 0.0
        return self._excess(kept) <= 0 or less_s > EQUAL * best.cost

    def _is_late(self, until: float) -> bool:
        return time.monotonic() + self.making_s > until

    def of(self, recomputed: frozenset[str]) -> PlanningProblem:
        """The problem with these operators recomputed."""
        if recomputed not in self.made:
            begin = time.monotonic()
            self.made[recomputed] = self.problem_of(recomputed)
            self.making_s = max(self.making_s, time.monotonic() - begin)
        return self.made[recomputed]

    def ranking(self, strategy: Strategy) -> Ranking:
        """Operators by what recomputing them costs under a strategy."""
        simulator = self.problem.simulator
        return ranking_of(self.options, simulator.tables, simulator.costs(strategy)) if self.options.closed else NOTHING


def may_recompute(problem: PlanningProblem, planner: str, baselines: Mapping[str, SearchResult]) -> bool:
    """Whether the choice is offered.

    Not where the compiler takes barriers out, and keeps what would be computed again, nor where pins make several programs,
    nor beside limits of memory that are not the device's; and a baseline that fits is what it always was.
    """
    is_own = planner in baselines and baselines[planner].best.is_feasible
    keeps_barriers = problem.simulator.tables.compiler.keeps_barriers
    is_plain = problem.objective.is_time and problem.front is None and not problem.space.offers_pins
    return is_plain and not is_own and keeps_barriers and not problem.graph.is_single_phase


def ranking_of(options: Recomputation, tables: CostTables, costs: Costs) -> Ranking:
    """Cheap ones first: by the seconds per byte of all operators of a group, each with what must be recomputed with it."""
    parts, closed, operators = options.parts, options.closed, tables.graph.operators
    seconds, kept = _forward_s(tables, costs), _kept_bytes(tables, costs)
    index = {op.name: n for n, op in enumerate(operators)}
    saved = {name: kept[list(part.tensors)].sum() for name, part in parts.items()}
    groups = {name: operators[index[name]].group for name in closed}
    sums: dict[int, np.ndarray] = {}
    for name, members in closed.items():
        own = np.array([sum(seconds[index[m]] for m in members), sum(saved[m] for m in members)])
        sums[groups[name]] = sums.get(groups[name], 0) + own
    rate = {g: s / b for g, (s, b) in sums.items() if b > 0}
    order = sorted((rate[groups[name]], parts[name].segment, index[name], name) for name in closed if groups[name] in rate)
    names = list(dict.fromkeys(m for *_, name in order for m in sorted(closed[name], key=index.get)))
    place = {name: i for i, name in enumerate(names)}
    last_of: dict[int, int] = {}
    for *_, name in order:
        last_of[groups[name]] = max(last_of.get(groups[name], 0), *(place[m] for m in closed[name]))
    ends = np.unique(np.maximum.accumulate([last_of[groups[name]] for *_, name in order]) + 1)
    again_s, freed = (np.cumsum(x) for x in ([seconds[index[m]] for m in names], [saved[m] for m in names]))
    return Ranking(names, ends, again_s, freed - _at_once([parts[m].segment for m in names], [saved[m] for m in names]))


def _at_once(segments: Sequence[int], saved: Sequence[float]) -> np.ndarray:
    """Bytes of the largest segment by the first 1, 2, ... operators: what is recomputed of one is there at once."""
    of_segment: dict[int, float] = {}
    largest: list[float] = []
    for segment, each in zip(segments, saved, strict=True):
        of_segment[segment] = of_segment.get(segment, 0.0) + each
        largest.append(max(of_segment[segment], largest[-1] if largest else 0.0))
    return np.array(largest)


def _kept_bytes(tables: CostTables, costs: Costs) -> np.ndarray:
    """Bytes [T] that a device keeps from the forward to the backward pass of every tensor, and of its copies in other layouts."""
    begin = next(k for k, task in enumerate(tables.graph.tasks) if task.phase == BACKWARD)
    spans, kept = lifespans(tables, costs.layouts, np.asarray(costs.parts.is_sent)), np.zeros(len(tables.graph.tensors))
    is_kept = (spans.since < begin) & (np.asarray(spans.until) >= begin)
    kept[spans.tensors[is_kept]] = np.asarray(costs.parts.held_bytes, np.float64)[spans.tensors[is_kept]]
    is_copy = (np.asarray(spans.copy_since) < begin) & (spans.copy_until >= begin)
    np.add.at(kept, tables.edge_tensor[is_copy], np.asarray(costs.parts.copy_bytes, np.float64)[is_copy])
    return kept


def _forward_s(tables: CostTables, costs: Costs) -> np.ndarray:
    """Seconds [N] of every operator's forward tasks, communication included."""
    own, d, graph = owners(tables), costs.durations, tables.graph
    is_forward = np.array([task.phase == FORWARD for task in graph.tasks] + [False])
    birth = np.where(tables.tensor_birth >= 0, tables.tensor_birth, len(graph.tasks))
    seconds = np.zeros(graph.num_operators)
    for of, task, each in (
        (own.of_task, np.arange(len(graph.tasks)), np.asarray(d.compute_s)),
        (own.of_tensor, birth, np.asarray(d.resolve_s).sum(-1)),
        (own.of_edge, tables.edge_task, np.asarray(d.reshard_s).sum(-1)),
        (own.of_sum, tables.sum_task, np.asarray(d.sum_s).sum(-1)),
    ):
        here = (of >= 0) & is_forward[np.minimum(task, len(graph.tasks))]
        np.add.at(seconds, of[here], each[here])
    return seconds


def _gained_late(result: SearchResult) -> float:
    """By how much, relatively, the second half of a search's proposals made its best step faster."""
    early = [step_s for done, _, step_s in result.history if done <= result.num_proposals / 2]
    return early[-1] / result.best.step_time_s - 1 if early else math.inf


def searched(
    search: Planner, key: Array, problem: PlanningProblem, budget: Budget, baselines: Mapping[str, SearchResult],
    choice: Recomputing | None, *, goes_on: bool, kept: float = 0.0,
) -> tuple[SearchResult, PlanningProblem]:  # fmt: skip
    """What a planner finds, and the problem in which it found it: that of the step as it is, or with operators recomputed.

    Where a baseline fits as it is, half of the budget is for the step as it is. The other half is for it as well where recomputing
    would not be faster than what was found, if the planner `goes_on` from strategies that it is given. A number of proposals is not
    spent to its end where the later ones of the first half gained less than simplicity may cost: the search has converged.

    Args:
      kept: of the seconds, what is left of them where no baseline fits, recomputed or not.
    Raises: KeyboardInterrupt where nothing was found before it.
    """
    begin, spent = time.monotonic(), 0
    found: list[tuple[SearchResult, PlanningProblem]] = []
    limit_s = min((b.best.cost for b in baselines.values() if b.best.is_feasible), default=np.inf)
    until = math.inf if budget.seconds is None else begin + budget.seconds

    def left_s() -> float:
        return until - time.monotonic()

    def search_in(where: PlanningProblem, part: float, *known: Strategy, kept: float = 0.0) -> None:
        """With so much of what is left."""
        nonlocal spent
        seconds = None if budget.seconds is None else max(left_s(), 1e-3) * part * (1 - kept)
        left = None if budget.num_proposals is None else max(int((budget.num_proposals - spent) * part), 1)
        mine = budget._replace(num_proposals=left, seconds=seconds, baselines=(*budget.baselines, *known))
        result = search(jax.random.fold_in(key, len(found)) if found else key, where, mine)
        spent += result.num_proposals
        found.append((result, where))
        if result.stopped_by == "interrupted":
            raise KeyboardInterrupt

    is_interrupted = has_converged = False
    try:
        may_pay, fits = choice is not None and bool(choice.paying(limit_s)), math.isfinite(limit_s)
        chosen = choice.start(limit_s, until) if may_pay and not (fits and goes_on) else None
        if may_pay and fits and (goes_on or chosen is not None):
            search_in(problem, 0.5)
            if chosen is None and left_s() > 0:
                chosen = choice.start(found[0][0].best.cost, until)
            has_converged = chosen is None and budget.seconds is None and _gained_late(found[0][0]) < EQUAL
        if chosen is not None:
            search_in(chosen.problem, 1 - FITTED_AGAIN, chosen.best.strategy)
            found[-1] = choice.again(*found[-1], until)
        elif not has_converged and (not found or left_s() > 0):
            fits = any(b.best.memory_bytes <= problem.usable_memory_bytes for b in baselines.values())
            search_in(problem, 1.0, *(f[0].best.strategy for f in found), kept=0.0 if fits else kept)
    except KeyboardInterrupt:
        if not found:
            raise
        is_interrupted = True
    best, where = min(found, key=lambda f: f[0].best.rank)
    stopped_by = "interrupted" if is_interrupted else "converged" if has_converged else found[-1][0].stopped_by
    by_clock = [n for result, _ in found for n in result.notes if n == TIME_DECIDED]
    notes = tuple(dict.fromkeys((*best.notes, *by_clock)))
    took_s = time.monotonic() - begin
    return best._replace(num_proposals=spent, search_s=took_s, stopped_by=stopped_by, notes=notes), where
