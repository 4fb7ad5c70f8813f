"""The additive relaxation as an integer program, solved by HiGHS (scipy): Alpa's formulation of intra-operator parallelism.

    minimise    sum over operators of c_n . x_n  +  sum over edges of C_ab . y_ab
    such that   x_n is one-hot; rows of y_ab sum to x_a, columns to x_b; memory at some times within the device

Zheng et al. 2022, section 4.2, equations 1 to 3: x are binaries; y, linearised, may stay continuous. Operators with many classes of
candidates, in graphs with many edges, keep those that do best beside the tied additive optimum, so that y has at most
`MAX_ENTRIES` entries. The solution is evaluated with the simulator; where that lacks memory, which the program sees from below, the
limit is tightened.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
from jax import Array
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, vstack

from soapjax.search.bound import Bound, bound_of, lower_bound
from soapjax.search.optcnn import TOLL, conditional_costs, fitting, seeded_relaxation, seeds, tied_solution, tolled, unproven
from soapjax.search.problem import Budget, PlanningProblem, SearchResult
from soapjax.search.relaxation import Pairwise
from soapjax.strategy.strategy import Strategy

MAX_ENTRIES = 40_000  # of all y together
DEFAULT_SECONDS = 40.0
_TIGHTENINGS = 3


class Integer(NamedTuple):
    choice: np.ndarray | None  # [N] classes; None if there is none within the time
    value: float
    gap: float  # relative, 0 if proven


def solve_integer(
    problem: Pairwise, usage: list[np.ndarray] | None = None, limit: float = np.inf, *, seconds: float = 60.0
) -> Integer:
    """Minimises `problem` with sum of usage[n][c_n, m] <= limit for all m."""
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
    matrix = coo_array((np.concatenate(value), (np.concatenate(row), np.concatenate(column))), shape=(rows, at)).tocsr()
    low = high = np.concatenate(wanted)
    if usage is not None and np.isfinite(limit):
        bytes_ = np.concatenate(usage).T / limit  # [M, num_x]
        memory = coo_array(np.concatenate([bytes_, np.zeros((len(bytes_), at - num_x))], axis=1))
        matrix = vstack([matrix, memory]).tocsr()
        low, high = np.concatenate([low, np.full(len(bytes_), -np.inf)]), np.concatenate([high, np.ones(len(bytes_))])
    integrality = np.concatenate([np.ones(num_x), np.zeros(at - num_x)])
    found = milp(
        cost / scale, constraints=LinearConstraint(matrix, low, high), integrality=integrality, bounds=Bounds(0, 1),
        options=dict(time_limit=max(1.0, seconds), mip_rel_gap=1e-6),
    )  # fmt: skip
    if found.x is None:
        return Integer(None, np.inf, np.inf)
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


def ilp(rng_key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
    """The integer optimum of the additive relaxation within memory; its notes say how far it is proven, and the bound."""
    begin = time.monotonic()
    seconds = DEFAULT_SECONDS if budget.seconds is None else budget.seconds
    begun = seeds(problem)
    relaxation = seeded_relaxation(problem)
    strategies: list[Strategy] = fitting(relaxation, lambda p: tied_solution(relaxation, p, begun))
    whole = relaxation.pairwise()
    start = relaxation.choice(whole, strategies[0])
    small, _ = reduced(whole, start)
    objective, toll = problem.objective, 1.0
    limit, notes, stopped_by = objective.memory_limit(problem.usable_memory_bytes), (), "complete"
    for _ in range(_TIGHTENINGS):
        left = 0.6 * seconds - (time.monotonic() - begin)
        usage = [u[of] for u, of in zip(relaxation.usage_bytes, small.labels, strict=True)]
        found = solve_integer(small, usage, limit, seconds=left)
        if found.choice is None:
            stopped_by = "seconds"
            notes = notes or ("the integer program found nothing in time: this is the tied additive optimum",)
            break
        strategies.append(relaxation.strategy(small, found.choice))
        is_pruned = relaxation.is_pruned or any(len(c) < len(w) for c, w in zip(small.costs, whole.costs, strict=True))
        where = f"on {sum(map(len, small.costs))} candidates" if is_pruned else "on all configs"
        proof = "optimal" if found.gap <= 1e-5 else f"gap {found.gap:.2%}"
        counted = f", communication counted {toll:g} times" if toll > 1 else ""
        notes = (f"additive objective {found.value:.6g} s{counted}, {proof} {where}", *unproven(problem))
        stopped_by = "complete" if found.gap <= 1e-5 else "seconds"
        last = problem.evaluate(strategies[-1:])[0]
        if last.is_feasible:
            break
        if last.memory_bytes > objective.memory_limit(problem.usable_memory_bytes):
            limit *= 0.9
        if last.sent_bytes > objective.max_bytes:
            toll *= TOLL
            whole = relaxation.pairwise(tolled(relaxation, toll))
            small, _ = reduced(whole, relaxation.choice(whole, strategies[0]))
    best = min(problem.evaluate(strategies), key=lambda e: e.rank)
    left = seconds - (time.monotonic() - begin)
    if left > 0.2 * seconds:
        if relaxation.is_pruned:
            bound = lower_bound(problem, left / 2)
        else:
            value, _ = bound_of(relaxation, deadline=time.monotonic() + left / 2)
            bound = Bound(value, relaxation.num_candidates, False, problem.space.offers_pins)
        notes += (bound.describe(),)
    return SearchResult(best, len(strategies), time.monotonic() - begin, stopped_by, (), notes)
