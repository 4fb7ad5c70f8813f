"""The anytime driver: reduce, price memory, make feasible, improve until the time is up; the best so far is kept apart.

While prices and messages converge, their rounded choices are made to fit now and then. Then blocks of the best choice are
solved again and again, by a second process too (same core, another seed); either takes over the other's best.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from soapjax.additive.additive_problem import FORBIDDEN, AdditiveProblem, Score
from soapjax.additive.core import Core
from soapjax.additive.dual import Dual
from soapjax.additive.enumeration import best_of_all, is_small
from soapjax.additive.helper import Helper
from soapjax.additive.improve import Improver
from soapjax.additive.reduction import NoAllowedChoice, reduce_problem
from soapjax.additive.shrinking import Reduced

REDUCTION_SHARE = 0.4  # of the time, at most
DUAL_SHARE = 0.4  # of the time after the reduction
SMALL_CORE = 1500  # nodes, up to which all of the core is solved at once
RESTARTS = 0.3  # of the rounds on a small core


class Best:
    """The best strategies so far, by exact score; read it whenever the search was interrupted."""

    def __init__(self, problem: AdditiveProblem, report: Callable[[Score, float], None] | None = None, begin: float | None = None):
        self.problem, self.report = problem, report
        self.begin = time.monotonic() if begin is None else begin
        first = np.zeros(problem.num_nodes, np.int64)
        self._found = (problem.score(first), first)
        self.bound: float | None = None  # no feasible solution costs less
        self.infeasible: str | None = None  # why there is none
        self.helper: Helper | None = None

    @property
    def score(self) -> Score:
        return self._found[0]

    @property
    def strategies(self) -> np.ndarray:
        return self._found[1]

    def offer(self, strategies: np.ndarray) -> None:
        score = self.problem.score(strategies)
        if score < self.score:
            self._found = (score, strategies)  # one assignment: an interrupt leaves both or neither
            if self.report is not None:
                self.report(score, time.monotonic() - self.begin)

    def close(self) -> None:
        """Takes the second process' last find, and ends it."""
        if self.helper is not None:
            self.helper.close()
            found = self.helper.receive()
            if found is not None:
                self.offer(self.helper.expand(found))
            self.helper = None


def solve(best: Best, seconds: float, seed: int = 0, *, is_alone: bool = True) -> None:
    """Improves `best` until `seconds` after its begin, or until it is proven optimal. May be interrupted anywhere."""
    problem = best.problem
    end = best.begin + seconds
    best.offer(_least_usage(problem))
    least = _least_excess(problem)
    if least > 0:
        # The least that any choice exceeds the limit by becomes part of the limit.
        best.infeasible = f"every choice uses at least {problem.usage_limit + least} of {problem.usage_limit} at some time"
        problem = dataclasses.replace(problem, usage_limit=problem.usage_limit + least)
    try:
        reduced = reduce_problem(problem, time.monotonic() + REDUCTION_SHARE * (end - time.monotonic()))
    except NoAllowedChoice:
        best.infeasible = best.infeasible or "every choice takes a forbidden strategy or pair"
        problem = _forgiving(problem)
        reduced = reduce_problem(problem, time.monotonic() + REDUCTION_SHARE * (end - time.monotonic()))
    _search(best, reduced, end, seed, is_alone)


def _least_excess(problem: AdditiveProblem) -> int:
    """By how much the limit is exceeded even where every node uses least."""
    least = np.minimum.reduceat(problem.usages, problem.node_offsets[:-1])
    return problem.peak_usage(least) - problem.usage_limit


def _least_usage(problem: AdditiveProblem) -> np.ndarray:
    """Every node by itself: allowed, of least usage, of least cost."""
    at = problem.node_offsets
    node = np.repeat(np.arange(problem.num_nodes), problem.num_strategies)
    return np.lexsort((problem.costs, problem.usages, problem.costs >= FORBIDDEN, node))[at[:-1]] - at[:-1]


def _forgiving(problem: AdditiveProblem) -> AdditiveProblem:
    """Forbidden choices at a price above all else, so that few of them are taken."""
    costs, tables = (np.where(x >= FORBIDDEN, -1, x) for x in (problem.costs, problem.tables))
    price = int(
        min(float(FORBIDDEN) / 10, 1 + np.maximum(costs, 0).sum(dtype=np.float64) + np.maximum(tables, 0).sum(dtype=np.float64))
    )
    return dataclasses.replace(problem, costs=np.where(costs < 0, price, costs), tables=np.where(tables < 0, price, tables))


class _Current:
    """The best choice in the core that fits."""

    def __init__(self, core: Core):
        self.core, self.cost = core, np.inf
        self.choice: np.ndarray | None = None

    def take(self, choice: np.ndarray) -> bool:
        cost = self.core.cost(choice)
        if not cost < self.cost:
            return False
        self.choice, self.cost = choice, cost
        return True


def _search(best: Best, reduced: Reduced, end: float, seed: int, is_alone: bool) -> None:
    core = Core(reduced)
    rng = np.random.default_rng(seed)
    dual, improver = Dual(core), Improver(core, rng)
    current = _Current(core)

    def take(choice: np.ndarray | None) -> None:
        if choice is not None and current.take(choice):
            best.offer(reduced.expand(choice))

    least = improver.least_memory()
    best.offer(reduced.expand(least))
    if core.fits(least):
        take(least)
    if is_small(core):
        if core.num_nodes > 0:
            take(best_of_all(core))
        if current.choice is None or current.cost + reduced.offset >= FORBIDDEN:
            best.infeasible = best.infeasible or "no allowed choice fits the limit: all were tried"
        else:
            best.bound = current.cost + reduced.offset
        return
    everything = np.ones(core.num_nodes, bool)
    dual_end = time.monotonic() + DUAL_SHARE * (end - time.monotonic())
    steps = 0
    while time.monotonic() < dual_end:
        choice = dual.step(reduced.offset)
        steps += 1
        if core.fits(choice):
            take(choice)
        elif steps % 40 == 20 and (current.choice is None or steps % 80 == 20):
            take(dual.push(reduced.offset, 40, lambda: time.monotonic() > dual_end))
        elif steps % 10 == 0 and core.num_nodes <= SMALL_CORE:
            take(improver.fit(choice, dual.prices, 12, everything, dual.best_beliefs))
        best.bound = dual.bound + reduced.offset
        if _is_optimal(current, dual):
            return
        if dual.is_converged and current.choice is not None:
            break
    helper = None
    if not is_alone and current.choice is not None and time.monotonic() < end:
        helper = best.helper = Helper(core.num_nodes, reduced.expand)
        if helper.is_child:
            helper.run(lambda: _improve_with(helper, Improver(core, np.random.default_rng([seed, 1])), dual, current, end))
    while time.monotonic() < end:
        if current.choice is None:
            take(dual.push(reduced.offset, 40, lambda: False))
            dual.step(reduced.offset)
        elif core.num_nodes <= SMALL_CORE and rng.random() < RESTARTS:
            # From elsewhere: what the prices say, wherever the best choice is.
            choice = dual.step(reduced.offset)
            take(improver.fit(choice, dual.prices, 12, everything, dual.best_beliefs))
        else:
            take(improver.round(current.choice, dual.best_prices, dual.best_beliefs))
        if helper is not None:
            helper.send(current.choice)
            found = helper.receive()
            if found is not None and core.fits(found):
                take(found)


def _improve_with(helper: Helper, improver: Improver, dual: Dual, current: _Current, end: float) -> None:
    """The second process' loop."""
    while time.monotonic() < end and helper.has_parent():
        found = improver.round(current.choice, dual.best_prices, dual.best_beliefs)
        if found is not None and current.take(found):
            helper.send(found)
        other = helper.receive()
        if other is not None and improver.core.fits(other):
            current.take(other)


def _is_optimal(current: _Current, dual: Dual) -> bool:
    """Costs are whole numbers: less than one below the bound is none."""
    return current.choice is not None and current.cost - dual.bound < 1 - 1e-9 * max(abs(current.cost), abs(dual.bound))
