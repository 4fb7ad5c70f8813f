"""The additive relaxation as an integer program, solved by HiGHS (scipy): Alpa's formulation of intra-operator parallelism.

    minimise    sum over operators of c_n . x_n  +  sum over edges of C_ab . y_ab
    such that   x_n is one-hot; rows of y_ab sum to x_a, columns to x_b; memory at some times within the device

Zheng et al. 2022, section 4.2, equations 1 to 3: x are binaries; y, linearised, may stay continuous. Where y would have more than
`MAX_ENTRIES` entries, operators at one place of blocks that repeat share a variable (as in PyTorch's AutoParallel), and operators
keep those classes of candidates that do best beside the tied additive optimum. The solution is evaluated with the simulator; where
that lacks memory, which the program sees from below, the limit is tightened.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import numpy as np
import scipy

from soapjax.jit.array_types import Array
from soapjax.search.descent.repeats import runs_of
from soapjax.search.problem import Budget, PlanningProblem, SearchResult
from soapjax.search.proofs.bound import Bound, bound_of, lower_bound
from soapjax.search.relaxation.dynamic_program import (
    TOLL,
    best_of,
    conditional_costs,
    fitting,
    not_relaxed,
    seeded_relaxation,
    seeds,
    tied,
    tied_solution,
    tolled,
    unproven,
)
from soapjax.search.relaxation.relaxed import Pairwise, Relaxation
from soapjax.strategy.configs import Strategy

MAX_ENTRIES = 40_000  # of all y together
MOST_NODES = 100  # of branch and bound: where no time is given, what is solved depends on the problem alone
_TIGHTENINGS = 3


class Integer(NamedTuple):
    choice: np.ndarray | None  # [N] classes; None if there is none within the time
    value: float
    gap: float  # relative, 0 if proven


NOTHING = Integer(None, np.inf, np.inf)


def solve_integer(
    problem: Pairwise, usage: list[np.ndarray] | None = None, limit: float = np.inf, *, seconds: float = np.inf
) -> Integer:
    """Minimises `problem` with sum of usage[n][c_n, m] <= limit for all m, in `MOST_NODES` nodes of branch and bound at most."""
    sizes = np.array([len(c) for c in problem.costs])
    first = np.concatenate([[0], np.cumsum(sizes)])
    num_x = int(first[-1])
    starts, at = [], num_x
    for table in problem.tables.values():
        starts.append(at)
        at += table.size
    cost = np.concatenate([*problem.costs, *(t.reshape(-1) for t in problem.tables.values())])
    scale = max(1e-30, float(sum(c.min() for c in problem.costs)) + float(np.abs(cost).mean()))
    row, column, value, wanted = [], [], [], []
    rows = 0

    def add(columns: np.ndarray, values: np.ndarray, count: int, per_row: np.ndarray, right: float) -> None:
        nonlocal rows
        row.append(rows + per_row)
        column.append(columns)
        value.append(values)
        wanted.append(np.full(count, right))
        rows += count

    add(np.arange(num_x), np.ones(num_x), len(sizes), np.repeat(np.arange(len(sizes)), sizes), 1.0)
    for ((a, b), table), start in zip(problem.tables.items(), starts, strict=True):
        p, q = table.shape
        y = start + np.arange(p * q)
        for n, count, of in ((a, p, np.repeat(np.arange(p), q)), (b, q, np.tile(np.arange(q), p))):
            columns = np.concatenate([y, first[n] + np.arange(count)])
            add(columns, np.concatenate([np.ones(p * q), -np.ones(count)]), count, np.concatenate([of, np.arange(count)]), 0.0)
    entries = np.concatenate(value), (np.concatenate(row), np.concatenate(column))
    matrix = scipy.sparse.coo_array(entries, shape=(rows, at)).tocsr()
    low = high = np.concatenate(wanted)
    if usage is not None and np.isfinite(limit):
        bytes_ = np.concatenate(usage).T / limit  # [M, num_x]
        memory = scipy.sparse.coo_array(np.concatenate([bytes_, np.zeros((len(bytes_), at - num_x))], axis=1))
        matrix = scipy.sparse.vstack([matrix, memory]).tocsr()
        low, high = np.concatenate([low, np.full(len(bytes_), -np.inf)]), np.concatenate([high, np.ones(len(bytes_))])
    integrality = np.concatenate([np.ones(num_x), np.zeros(at - num_x)])
    found = scipy.optimize.milp(
        cost / scale, constraints=scipy.optimize.LinearConstraint(matrix, low, high), integrality=integrality,
        bounds=scipy.optimize.Bounds(0, 1), options=dict(time_limit=max(0.1, seconds), node_limit=MOST_NODES, mip_rel_gap=1e-6),
    )  # fmt: skip
    if found.x is None:
        return NOTHING
    choice = np.array([int(found.x[a:b].argmax()) for a, b in zip(first[:-1], first[1:], strict=True)])
    return Integer(choice, problem.value(choice), float(found.mip_gap or 0.0))


def reduced(problem: Pairwise, choice: np.ndarray) -> tuple[Pairwise, list[np.ndarray]]:
    """The problem with as many classes per operator as `MAX_ENTRIES` allows, and their indices: the best beside `choice`."""
    most = max((len(c) for c in problem.costs), default=1)
    shapes = np.array([t.shape for t in problem.tables.values()]).reshape(-1, 2)
    while most > 2 and np.minimum(shapes, most).prod(axis=1).sum() > MAX_ENTRIES:
        most -= 1
    beside = conditional_costs(problem, choice)
    keep = []
    for n, cost in enumerate(beside):
        kept = np.argsort(cost, kind="stable")[:most]
        keep.append(np.unique(np.append(kept[kept != choice[n]][: most - 1], choice[n])))
    tables = {(a, b): t[np.ix_(keep[a], keep[b])] for (a, b), t in problem.tables.items()}
    cut = zip(problem.costs, problem.labels, keep, strict=True)
    costs, labels = zip(*((c[k], of[k]) for c, of, k in cut), strict=True)
    return Pairwise(list(costs), tables, list(labels), problem.own_costs), keep


class IntegerProgram(NamedTuple):
    """The relaxation as HiGHS gets it: variables of repeated blocks tied where there are many, few classes of each kept."""

    whole: Pairwise
    small: Pairwise
    keep: list[np.ndarray]  # V of [C]: which of the whole problem's classes
    variable: list[int]  # [N]: of each operator
    is_tied: bool
    is_pruned: bool  # whether classes were left out

    @classmethod
    def of(cls, relaxation: Relaxation, whole: Pairwise, start: np.ndarray) -> IntegerProgram:
        """`start`: the classes [N] of a choice that stays possible, alike in repeated operators."""
        is_tied = sum(t.size for t in whole.tables.values()) > MAX_ENTRIES
        before, variable = tied(whole, _places(relaxation)) if is_tied else (whole, list(range(len(whole.costs))))
        first = [variable.index(v) for v in range(len(before.costs))]
        small, keep = reduced(before, start[first])
        is_pruned = any(len(c) < len(w) for c, w in zip(small.costs, before.costs, strict=True))
        return cls(whole, small, keep, variable, is_tied, is_pruned)

    def usage(self, relaxation: Relaxation) -> list[np.ndarray]:
        """V of [C, M]: bytes of each class at some times, of all operators that are tied."""
        found = [np.zeros((len(k), relaxation.usage_bytes[0].shape[1])) for k in self.keep]
        for v, u, labels in zip(self.variable, relaxation.usage_bytes, self.whole.labels, strict=True):
            found[v] += u[labels[self.keep[v]]]
        return found

    def strategy(self, relaxation: Relaxation, choice: np.ndarray) -> Strategy:
        return relaxation.strategy(self.whole, np.array([self.keep[v][choice[v]] for v in self.variable]))

    def describe(self, relaxation: Relaxation) -> str:
        """Of what the optimum is one."""
        candidates = sum(map(len, self.small.costs))
        where = f"on {candidates} candidates" if relaxation.is_pruned or self.is_pruned else "on all configs"
        return where + ", equal blocks alike" * self.is_tied


def _places(relaxation: Relaxation) -> list[int]:
    """A number for each place of blocks that repeat, and one for every other operator."""
    groups = [op.group for op in relaxation.problem.graph.operators]
    found = list(range(len(groups)))
    for run in runs_of(groups):
        for place in run.members.T:
            members = place[place >= 0].tolist()
            for n in members:
                found[n] = members[0]
    return found


def ilp(rng_key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
    """The integer optimum of the additive relaxation within memory; its notes say how far it is proven, and the bound."""
    begin = time.monotonic()
    seconds = math.inf if budget.seconds is None else budget.seconds
    begun = seeds(problem)
    try:
        relaxation = seeded_relaxation(problem, begin + 0.6 * seconds)
    except TimeoutError:
        return not_relaxed(problem, begin)
    strategies, notes, stopped_by = _solved(relaxation, begun, begin, 0.6 * seconds)
    best, more = best_of(problem, strategies, begun)
    notes += more
    left = seconds - (time.monotonic() - begin)
    if math.isinf(seconds) or left > 0.2 * seconds:
        notes += (_bounded(relaxation, left / 2),)
    return SearchResult(best, len(strategies), time.monotonic() - begin, stopped_by, (), notes)


def _solved(
    relaxation: Relaxation, begun: list[Strategy], begin: float, seconds: float
) -> tuple[list[Strategy], tuple[str, ...], str]:
    """Minimisers, notes on the last one, and what ended the search."""
    problem, objective, deadline = relaxation.problem, relaxation.problem.objective, begin + seconds
    strategies = fitting(relaxation, lambda p: tied_solution(relaxation, p, begun, deadline), deadline)
    whole = relaxation.pairwise()
    program = IntegerProgram.of(relaxation, whole, relaxation.choice(whole, strategies[0]))
    limit, toll = objective.memory_limit(problem.usable_memory_bytes), 1.0
    notes: tuple[str, ...] = ()
    for _ in range(_TIGHTENINGS):
        left = deadline - time.monotonic()
        found = solve_integer(program.small, program.usage(relaxation), limit, seconds=left) if left > 0 else NOTHING
        if found.choice is None:
            notes = notes or ("the integer program found nothing within its limits: this is the tied additive optimum",)
            return strategies, notes, _ended_by(deadline)
        strategies.append(program.strategy(relaxation, found.choice))
        proof = "optimal" if found.gap <= 1e-5 else f"gap {found.gap:.2%}"
        counted = f", communication counted {toll:g} times" if toll > 1 else ""
        notes = (f"additive objective {found.value:.6g} s{counted}, {proof} {program.describe(relaxation)}", *unproven(problem))
        stopped_by = "complete" if found.gap <= 1e-5 else _ended_by(deadline)
        last = problem.evaluate(strategies[-1:])[0]
        if last.is_feasible:
            break
        if last.memory_bytes > objective.memory_limit(problem.usable_memory_bytes):
            limit *= 0.9
        if last.sent_bytes > objective.max_bytes:
            toll *= TOLL
            whole = relaxation.pairwise(tolled(relaxation, toll))
            program = IntegerProgram.of(relaxation, whole, relaxation.choice(whole, strategies[0]))
    return strategies, notes, stopped_by


def _ended_by(deadline: float) -> str:
    return "seconds" if time.monotonic() >= deadline else "nodes"


def _bounded(relaxation: Relaxation, seconds: float) -> str:
    """What is known of all strategies."""
    problem = relaxation.problem
    try:
        if relaxation.is_pruned:
            return lower_bound(problem, seconds).describe()
        value, _ = bound_of(relaxation, deadline=time.monotonic() + seconds)
        return Bound(value, relaxation.num_candidates, False, problem.space.offers_pins).describe()
    except TimeoutError:
        return "no bound of all strategies was found in time"
