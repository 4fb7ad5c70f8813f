"""OptCNN's dynamic programming on the additive relaxation (Jia, Lin, Qi and Aiken, ICML 2018, section 5).

The cost is the sum of all durations; nothing overlaps. Operators are eliminated one by one (elimination.py), exactly,
while the tables stay small. Nets with few skips reduce to nothing. Where a kernel remains (unrolled recurrent nets are
grids, their shared weights meet every step), operators with the most neighbours are held fixed, the others are solved
exactly given these, and then these one at a time given the others, until nothing improves: a local optimum, as the notes say.

It starts where repeated operators are tied to one choice: that problem is much smaller.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from soapjax.costs.evaluate import Durations
from soapjax.jit.array_types import Array
from soapjax.search.experts.baselines import data_parallel_strategy, replicate_all, tensor_parallel_strategy
from soapjax.search.problem import Budget, Evaluation, Judging, PlanningProblem, SearchResult
from soapjax.search.relaxation.elimination import MAX_ENTRIES, eliminate, factors_of, order_of
from soapjax.search.relaxation.relaxed import Pairwise, Relaxation, relax
from soapjax.strategy.configs import Strategy

MAX_CANDIDATES = 64
_STARTS = 4
_TIED_ROUNDS, _ROUNDS = 20, 8  # of descent, each with other operators held fixed
_MEMORY_STEPS = 6  # of the prices of memory and of communication
TOLL = 4.0  # how much more each of these steps makes of communication


class Solution(NamedTuple):
    choice: np.ndarray  # [N]: candidate indices
    value: float
    is_exact: bool


def solve(
    problem: Pairwise, starts: Sequence[np.ndarray] = (), *, rounds: int = 12, deadline: float = float("inf"),
    max_entries: int = MAX_ENTRIES,
) -> Solution:  # fmt: skip
    """The minimum where elimination reaches it, else a local one.

    From each start, and then from the best, with other operators held fixed in every round.
    """
    count = len(problem.costs)
    order, cut = order_of(problem, max_entries=max_entries)
    if not cut:
        found = eliminate(factors_of(problem), order, max_entries=max_entries)
        return Solution(found.choice({}, count), found.value, True)
    near = _neighbours(problem)
    rng = np.random.default_rng(0)

    def improved(choice: np.ndarray, order: list[int], cut: list[int]) -> Solution:
        fixed = {n: int(choice[n]) for n in cut}
        choice = eliminate(factors_of(problem, fixed), order, max_entries=max_entries).choice(fixed, count)
        for n in cut:
            choice[n] = int(_conditional(problem, near, choice, n).argmin())
        return Solution(choice, problem.value(choice), False)

    first = [*sorted(starts, key=problem.value)[:_STARTS], np.array([int(c.argmin()) for c in problem.costs])]
    best = min((improved(c, order, cut) for c in first), key=lambda s: s.value)
    for _ in range(rounds):
        if time.monotonic() > deadline:
            break
        best = min(best, improved(best.choice, *order_of(problem, max_entries=max_entries, rng=rng)), key=lambda s: s.value)
    return best


def _neighbours(problem: Pairwise) -> list[list[tuple[int, np.ndarray]]]:
    """Per variable n: (neighbour m, table [Cm, Cn])."""
    near: list[list[tuple[int, np.ndarray]]] = [[] for _ in problem.costs]
    for (a, b), table in problem.tables.items():
        near[b].append((a, table))
        near[a].append((b, table.T))
    return near


def _conditional(problem: Pairwise, near, choice: np.ndarray, n: int) -> np.ndarray:
    """The cost of each class of `n` given all others."""
    return problem.costs[n] + sum((t[choice[m]] for m, t in near[n]), start=np.zeros(len(problem.costs[n])))


def conditional_costs(problem: Pairwise, choice: np.ndarray) -> list[np.ndarray]:
    """N of [C]: what each class would cost, all others as in `choice`."""
    near = _neighbours(problem)
    return [_conditional(problem, near, choice, n) for n in range(len(choice))]


def tied(problem: Pairwise, groups: list[int]) -> tuple[Pairwise, list[int]]:
    """The problem in which operators of one group choose alike, and the variable of each operator.

    Operators of a group that have other candidates (at the ends of a chain) stay apart.
    """
    ids: dict[object, int] = {}
    variable = [ids.setdefault((g, of.tobytes()), len(ids)) for g, of in zip(groups, problem.labels, strict=True)]
    costs: list[np.ndarray] = [None] * len(ids)  # type: ignore[list-item]
    for v, c in zip(variable, problem.costs, strict=True):
        costs[v] = c if costs[v] is None else costs[v] + c
    repeats: dict[tuple[int, int, int], tuple[np.ndarray, int]] = {}
    for (a, b), table in problem.tables.items():
        key = (variable[a], variable[b], id(table))
        repeats[key] = (table, repeats.get(key, (table, 0))[1] + 1)
    tables: dict[tuple[int, int], np.ndarray] = {}
    for (u, w, _), (table, times) in repeats.items():
        if u == w:
            costs[u] = costs[u] + times * np.diagonal(table)
            continue
        pair, table = ((u, w), table) if u < w else ((w, u), table.T)
        tables[pair] = tables[pair] + times * table if pair in tables else times * table
    labels = [problem.labels[variable.index(v)] for v in range(len(ids))]
    return Pairwise(costs, tables, labels, costs), variable


def seeds(problem: PlanningProblem) -> list[Strategy]:
    """The baselines' strategies, and that which replicates all: their configs are always candidates."""
    space = problem.space
    plain = [replicate_all(problem), data_parallel_strategy(problem)[0]]
    pairs = [tensor_parallel_strategy(problem, range(a, space.num_axes)) for a in range(space.num_axes)]
    plain += [s for s in pairs if space.is_valid(s)]
    storages = range(len(space.storages) if space.owns_parameters.any() else 1)
    return [Strategy(s.axes, np.where(space.owns_parameters, k, 0).astype(np.int8)) for s in plain for k in storages]


_last: list[Relaxation] = []  # planners that are compared ask for the same one, after each other


def seeded_relaxation(problem: PlanningProblem, deadline: float = math.inf) -> Relaxation:
    """The relaxation on the best candidates, those of the baselines among them.

    Raises: TimeoutError where it was not done by `deadline`, of `time.monotonic`.
    """
    for known in _last:
        if known.problem is problem:
            return known
    made = relax(problem, max_candidates=MAX_CANDIDATES, seeds=seeds(problem), deadline=deadline)
    _last[:] = [made]  # another thread may have a problem of its own
    return made


def tied_solution(
    relaxation: Relaxation, pairwise: Pairwise, starts: list[Strategy], deadline: float = math.inf, *, rounds: int = _TIED_ROUNDS,
    max_entries: int = MAX_ENTRIES,
) -> Solution:  # fmt: skip
    """The best choice in which repeated operators choose alike."""
    small, variable = tied(pairwise, [o.group for o in relaxation.problem.graph.operators])
    members = [variable.index(v) for v in range(len(small.costs))]
    begun = [c[members] for s in starts if (c := relaxation.choice(pairwise, s)) is not None]
    found = solve(small, begun, rounds=rounds, deadline=deadline, max_entries=max_entries)
    choice = found.choice[variable]
    return Solution(choice, pairwise.value(choice), found.is_exact)


def fitting(
    relaxation: Relaxation, minimise: Callable[[Pairwise], Solution], deadline: float = math.inf, judging: Judging | None = None,
    *, toll: float = 1.0,
) -> list[Strategy]:  # fmt: skip
    """Minimisers at prices of memory and of communication that rise until one is feasible; the first is that without any.

    No further ones after `deadline`, of `time.monotonic`.

    Communication, which the relaxation knows in seconds, counts `toll` times, and several times that where the objective limits its
    bytes. `judging` says what is feasible; by default the problem that was relaxed.
    """
    problem, objective = judging or relaxation.problem, relaxation.problem.objective
    found: list[Strategy] = []
    price = 0.0
    for _ in range(_MEMORY_STEPS):
        pairwise = relaxation.pairwise(tolled(relaxation, toll), memory_price=price)
        found.append(relaxation.strategy(pairwise, minimise(pairwise).choice))
        evaluation = problem.evaluate(found[-1:])[0]
        if evaluation.is_feasible or time.monotonic() > deadline:
            break
        if evaluation.sent_bytes > objective.max_bytes:
            toll *= TOLL
        if evaluation.memory_bytes > objective.memory_limit(problem.usable_memory_bytes):
            price = 6 * price if price else 0.1 * evaluation.step_time_s / evaluation.memory_bytes
    return found


def tolled(relaxation: Relaxation, toll: float) -> Durations:
    """Weights of all durations: those of communication count `toll` times."""
    weights = relaxation.weights()
    return Durations(weights.compute_s, *(np.float32(toll) * x for x in weights[1:]))


def optcnn(rng_key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
    """The minimum of the sum of all durations (of the relaxation), evaluated by the simulator; never worse than its starts."""
    begin = time.monotonic()
    deadline = begin + (budget.seconds if budget.seconds is not None else float("inf"))
    begun = seeds(problem)
    try:
        relaxation = seeded_relaxation(problem, deadline)
    except TimeoutError:
        return not_relaxed(problem, begin)
    exact: list[bool] = []

    def minimise(p: Pairwise) -> Solution:
        start = tied_solution(relaxation, p, begun, deadline).choice
        found = solve(p, [start], rounds=_ROUNDS, deadline=deadline)
        exact.append(found.is_exact)
        return found

    strategies = fitting(relaxation, minimise, deadline)
    best, more = best_of(problem, strategies, begun)
    how = "solved exactly by elimination" if exact[0] else f"a kernel of over {MAX_ENTRIES:,} entries was left: coordinate descent"
    took_s, stopped_by = time.monotonic() - begin, "seconds" if time.monotonic() > deadline else "complete"
    return SearchResult(best, len(strategies), took_s, stopped_by, (), notes_on(relaxation, strategies[0], how) + more)


def best_of(problem: PlanningProblem, found: list[Strategy], begun: list[Strategy]) -> tuple[Evaluation, tuple[str, ...]]:
    """The best of the minimisers and of what the solver began at, by the simulator, and a note where that is one of the latter."""
    evaluations = problem.evaluate([*found, *begun])
    best = min(evaluations, key=lambda e: e.rank)
    if best.rank == min(e.rank for e in evaluations[: len(found)]):
        return best, ()
    return best, ("by the simulator a start is better than what minimises the sum of durations, and taken",)


def not_relaxed(problem: PlanningProblem, begin: float) -> SearchResult:
    """What is left to a planner of the additive relaxation when time ends before there is one: the best of the baselines."""
    found = problem.evaluate(seeds(problem))
    note = "the additive relaxation was not made in time: this is the best of its seeds, the baselines and full replication"
    return SearchResult(min(found, key=lambda e: e.rank), len(found), time.monotonic() - begin, "seconds", (), (note,))


def notes_on(relaxation: Relaxation, strategy: Strategy, how: str) -> tuple[str, ...]:
    kept = f"on {relaxation.num_candidates} candidates" if relaxation.is_pruned else "on all configs"
    notes = (f"additive objective {relaxation.value(strategy):.6g} s, {how}, {kept}", *unproven(relaxation.problem))
    return notes


def unproven(problem: PlanningProblem) -> tuple[str, ...]:
    """What a result of the additive relaxation does not speak of."""
    pins = ("of plans without pins",) if problem.space.offers_pins else ()
    if problem.objective.is_time:
        return pins
    return (*pins, "the sum of durations was minimised, its minimisers judged by mdpe: nothing is proven of mdpe")
