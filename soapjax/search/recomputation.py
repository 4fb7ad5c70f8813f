"""Keep or recompute: which operators' results the backward pass computes again, so that a fast strategy fits into memory.

Recomputing never makes a step of given layouts faster: it pays where a strategy that would be faster does not fit. So the
baselines are judged once as if memory had no limit. Where none of them is then faster than the best that fits, nothing is
recomputed, and the search is that of the step as it is. For the others operators are ranked by the seconds that a byte costs,
cheap ones first and of equal ones those of the first segments: this is what experts do by hand (norms and activations, then
attention, then whole blocks, of all blocks or of some). As many as are needed are recomputed, which the simulator of the step
with that recomputation decides: it is a problem of its own, with the operators, the space and so the strategies of the other.

The search then walks among strategies in that problem, and what is recomputed is fitted anew to the strategy that it found.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from soapjax.costs.by_operator import owners
from soapjax.costs.tables.tables import CostTables
from soapjax.graph.passes.phases import FORWARD
from soapjax.graph.recompute import Recomputation
from soapjax.jit.array_types import Array
from soapjax.search.planners import BASELINES
from soapjax.search.problem import Budget, Evaluation, Planner, PlanningProblem, SearchResult
from soapjax.simulate.simulator import Simulator
from soapjax.strategy.strategy import Strategy

MOST_FITS = 3  # problems that are made for one strategy
SLACK = 1.02  # so much more than is needed is saved by the estimate
MOST_STRATEGIES = 2  # that are fitted before the search
FITTED_AGAIN = 0.15  # of the budget: what the search leaves for fitting to its own strategy
UNLIMITED_BYTES = 2**62


class Fitted(NamedTuple):
    """A problem with some operators recomputed, and a strategy that fits in it."""

    recomputed: frozenset[str]
    problem: PlanningProblem
    best: Evaluation


class Ranking(NamedTuple):
    """Operators in the order in which they are recomputed, under one strategy."""

    names: list[str]
    seconds: np.ndarray  # of recomputing the first 1, 2, ...
    saved_bytes: np.ndarray  # on a device, by the first 1, 2, ...: less than turns out, of which copies and sums are a part
    stored_bytes: float  # parameters and optimizer state, which are there whatever is recomputed


class Recomputing:
    """The choice of one step: `problem` is the step as it is, `problem_of` makes the same with operators recomputed."""

    def __init__(
        self, problem: PlanningProblem, options: Recomputation, problem_of: Callable[[frozenset[str]], PlanningProblem]
    ):
        self.problem, self.options, self.problem_of = problem, options, problem_of
        self.made: dict[frozenset[str], PlanningProblem] = {frozenset(): problem}
        self.making_s = 0.0  # that one of them took, at the most

    def start(self, key: Array, baselines: Mapping[str, SearchResult]) -> Fitted | None:
        """What is recomputed in the problem to search in; None where it pays under no baseline."""
        limit_s = min((b.best.cost for b in baselines.values() if b.best.is_feasible), default=np.inf)
        free = _unlimited(self.problem)
        for run in BASELINES.values():
            run(key, free, Budget())
        usable = self.problem.usable_memory_bytes
        faster = [p for p in free.front.points() if p.step_time_s < limit_s and p.memory_bytes > usable]
        estimates = []
        for i, point in enumerate(faster):
            ranking = self.ranking(point.plan)
            k = min(int(np.searchsorted(ranking.saved_bytes, point.memory_bytes - usable)), len(ranking.names) - 1)
            if k >= 0 and ranking.stored_bytes < usable and point.step_time_s + ranking.seconds[k] < limit_s:
                estimates.append((point.step_time_s + ranking.seconds[k], i))
        best = None
        for seconds, i in sorted(estimates)[:MOST_STRATEGIES]:
            if seconds < limit_s and (found := self.fitted(faster[i].plan)) is not None and found.best.cost < limit_s:
                best, limit_s = found, found.best.cost
        return best

    def fitted(self, strategy: Strategy) -> Fitted | None:
        """The least recomputation under which a strategy fits; None where none is enough."""
        ranking, kept = self.ranking(strategy), self.problem.evaluate([strategy])[0]
        excess = kept.memory_bytes - self.problem.usable_memory_bytes
        saved, tried = np.append(0.0, ranking.saved_bytes), {0: kept}
        too_few, enough = 0, len(saved)
        while excess > 0 and len(tried) <= MOST_FITS and enough - too_few > 1:
            k = int(np.clip(np.searchsorted(saved, SLACK * excess), too_few + 1, enough - 1))
            tried[k] = now = self.of(frozenset(ranking.names[:k])).evaluate([strategy])[0]
            too_few, enough = (too_few, k) if now.is_feasible else (k, enough)
            saved *= max(kept.memory_bytes - now.memory_bytes, 1.0) / max(saved[k], 1.0)  # as it turned out
        fits = [k for k, e in tried.items() if e.is_feasible]
        if not fits:
            return None
        best = min(fits, key=lambda k: tried[k].cost)
        recomputed = frozenset(ranking.names[:best])
        return Fitted(recomputed, self.of(recomputed), tried[best])

    def again(self, result: SearchResult, chosen: Fitted, *, may_make: bool) -> tuple[SearchResult, PlanningProblem]:
        """A search's result with the recomputation that its own strategy needs, if that is less, and `may_make` problems."""
        fitted = self.fitted(result.best.strategy) if may_make and result.stopped_by != "interrupted" else None
        if fitted is None or fitted.best.rank >= result.best.rank:
            return result, chosen.problem
        candidates = tuple(fitted.problem.evaluate([e.strategy for e in result.candidates])) if result.candidates else ()
        return result._replace(best=fitted.best, candidates=candidates), fitted.problem

    def of(self, recomputed: frozenset[str]) -> PlanningProblem:
        """The problem with these operators recomputed."""
        if recomputed not in self.made:
            begin = time.monotonic()
            self.made[recomputed] = self.problem_of(recomputed)
            self.making_s = max(self.making_s, time.monotonic() - begin)
        return self.made[recomputed]

    def ranking(self, strategy: Strategy) -> Ranking:
        """Cheap ones first: by the seconds per byte of all operators of a group, each with what must be recomputed with it."""
        tables, parts = self.problem.simulator.tables, self.options.parts
        costs = self.problem.simulator.costs(strategy)
        seconds, held = _forward_s(tables, costs), np.asarray(costs.parts.held_bytes, np.float64)
        index = {op.name: n for n, op in enumerate(self.problem.graph.operators)}
        last = max((p.segment for p in parts.values()), default=0)  # is there when the backward pass begins, whatever is kept
        closed = {name: self._closed(name) for name, part in parts.items() if part.segment < last}
        saved = {name: sum(held[t] for t in part.tensors) for name, part in parts.items()}
        sums: dict[int, np.ndarray] = {}
        for name, members in closed.items():
            own = np.array([sum(seconds[index[m]] for m in members), sum(saved[m] for m in members)])
            group = self.problem.graph.operators[index[name]].group
            sums[group] = sums.get(group, 0) + own
        rate = {g: s / b for g, (s, b) in sums.items() if b > 0}
        groups = {name: self.problem.graph.operators[index[name]].group for name in closed}
        order = sorted((rate[groups[name]], parts[name].segment, index[name], name) for name in closed if groups[name] in rate)
        names = list(dict.fromkeys(m for *_, name in order for m in sorted(closed[name], key=index.get)))
        again_s, freed = np.cumsum([seconds[index[m]] for m in names]), np.cumsum([saved[m] for m in names])
        return Ranking(names, again_s, freed, float(costs.memory_bytes[0]))

    def _closed(self, name: str) -> list[str]:
        """An operator and all that must be recomputed with it."""
        found, queue = {name}, [name]
        while queue:
            more = self.options.parts[queue.pop()].needs - found
            found |= more
            queue += more
        return sorted(found)


def may_recompute(problem: PlanningProblem, planner: str, baselines: Mapping[str, SearchResult]) -> bool:
    """Whether the choice is offered.

    Not where the compiler takes barriers out, and keeps what would be computed again, nor where pins make several programs,
    nor beside limits of memory that are not the device's; and a baseline that fits is what it always was.
    """
    is_own = planner in baselines and baselines[planner].best.is_feasible
    keeps_barriers = problem.simulator.tables.compiler.keeps_barriers
    is_plain = problem.objective.is_time and problem.front is None and not problem.space.offers_pins
    return is_plain and not is_own and keeps_barriers and not problem.graph.is_single_phase


def _unlimited(problem: PlanningProblem) -> PlanningProblem:
    """The same on devices with memory for everything; keeps its front."""
    tables = dataclasses.replace(problem.simulator.tables, usable_memory_bytes=UNLIMITED_BYTES)
    return dataclasses.replace(problem, simulator=Simulator(tables)).keeping_front()


def _forward_s(tables: CostTables, costs) -> np.ndarray:
    """Seconds [N] of every operator's forward tasks, communication included."""
    own, d, graph = owners(tables), costs.durations, tables.graph
    is_forward = np.array([task.phase == FORWARD for task in graph.tasks] + [False])
    birth = np.where(tables.tensor_birth >= 0, tables.tensor_birth, len(graph.tasks))
    seconds = np.zeros(graph.num_operators)
    for of, task, each in (
        (own.of_task, np.arange(len(graph.tasks)), np.asarray(d.compute_s)),
        (own.of_tensor, birth, np.asarray(d.resolve_s).sum(-1)),
        (own.of_edge, tables.edge_task, np.asarray(d.convert_s).sum(-1)),
        (own.of_sum, tables.sum_task, np.asarray(d.sum_s).sum(-1)),
    ):
        here = (of >= 0) & is_forward[np.minimum(task, len(graph.tasks))]
        np.add.at(seconds, of[here], each[here])
    return seconds


def searched(
    search: Planner, key: Array, problem: PlanningProblem, budget: Budget, baselines: Mapping[str, SearchResult],
    choice: Recomputing | None,
) -> tuple[SearchResult, PlanningProblem]:  # fmt: skip
    """What a planner finds, and the problem in which it found it: that of the step as it is, or with operators recomputed.

    Where recomputing pays, the planner searches there; in both, half of the budget each, where a baseline fits as it is.
    """
    begin = time.monotonic()

    def share(part: float) -> Budget:
        left_s = None if budget.seconds is None else max(budget.seconds - (time.monotonic() - begin), 1e-3) * part
        return budget._replace(num_proposals=budget.num_proposals and max(int(budget.num_proposals * part), 1), seconds=left_s)

    chosen = None if choice is None else choice.start(key, baselines)
    if chosen is None:
        return search(key, problem, share(1.0)), problem
    fits = any(b.best.is_feasible for b in baselines.values())
    found = [(search(key, problem, share(0.5)), problem)] if fits else []
    if not found or found[0][0].stopped_by != "interrupted":
        of_rest = 0.5 if fits and budget.seconds is None else 1.0
        starts = (*budget.baselines, chosen.best.strategy)
        result = search(key, chosen.problem, share(of_rest * (1 - FITTED_AGAIN))._replace(baselines=starts))
        found.append(choice.again(result, chosen, may_make=budget.seconds is None or share(1.0).seconds > choice.making_s))
    return min(found, key=lambda f: f[0].best.rank)
