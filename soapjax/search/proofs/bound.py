"""Lower bounds of the simulated step time: no strategy is faster.

A stream runs one task at a time and phases end in barriers, so that a step takes at least

    B(x) = sum over phases of max over streams of the busy time of that stream under strategy x.

For any weights w >= 0 that sum to one over the streams of every phase, sum of w * busy <= B, and its minimum over x is that of an
additive problem (relaxed.py, which never overestimates), found by elimination. The best w is found by cutting planes (Kelley
1960): a linear program over the busy times of the minimisers so far proposes the next w. Every w gives a valid bound, also where
elimination had to split buckets.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import scipy

from soapjax.costs.evaluate import Durations
from soapjax.costs.tables.problem_tables import CostTables
from soapjax.search.problem import PlanningProblem
from soapjax.search.relaxation.dynamic_program import seeded_relaxation, seeds
from soapjax.search.relaxation.elimination import eliminate, factors_of, order_of
from soapjax.search.relaxation.relaxed import Relaxation, pruned, relax

COMPLETE_CONFIGS = 400  # of an operator, up to which all of them are considered
PRUNED_TO = 32
_ROUNDS = 40
_GAP = 1e-3  # relative, between the bound and what other weights could still give


class Bound(NamedTuple):
    """`value_s` bounds all strategies of the space from below; if `is_pruned`, all of those made of the candidates."""

    value_s: float
    candidates: int
    is_pruned: bool
    has_pins: bool = False  # the space has plans with pins: the bound does not speak of them

    def describe(self) -> str:
        where = f"on {self.candidates} candidates" if self.is_pruned else "in the whole space"
        where += " without pins" if self.has_pins else ""
        return f"no strategy takes less than {self.value_s:.6g} s {where}"


class Streams(NamedTuple):
    """Which phase and stream every duration belongs to."""

    num_phases: int
    num_streams: int  # 0 computes, 1 + l communicates over link level l
    overlap: bool
    phases: Durations  # of int arrays: per task, tensor, reshard, sum

    def weights(self, w: np.ndarray) -> Durations:
        """Weights of all durations, from those of streams [P, S]."""
        link = w[:, 1:] if self.overlap else w[:, 1:] + w[:, :1]
        p = self.phases
        return Durations(*(x.astype(np.float32) for x in (w[p.compute_s, 0], link[p.resolve_s], link[p.reshard_s], link[p.sum_s])))

    def busy(self, d: Durations) -> np.ndarray:
        """Busy seconds [P, S]."""
        out = np.zeros((self.num_phases, self.num_streams))
        np.add.at(out[:, 0], self.phases.compute_s, d.compute_s)
        for phase, seconds in zip(self.phases[1:], d[1:], strict=True):
            np.add.at(out[:, 1:], phase, seconds)
        if not self.overlap:
            out[:, 0] += out[:, 1:].sum(axis=1)
        return out


def streams_of(tables: CostTables) -> Streams:
    graph = tables.graph
    phase = np.array([t.phase for t in graph.tasks])
    by_task = np.concatenate([[0], np.cumsum(phase[1:] != phase[:-1])]) if len(phase) else np.zeros(0, int)
    if graph.is_single_phase:
        by_task = np.zeros(len(phase), int)
    by_task = np.append(by_task, by_task[-1] if len(by_task) else 0)  # what comes after the last task
    found = Durations(by_task[:-1], by_task[tables.tensor_birth], by_task[tables.edge_task], by_task[tables.sum_task])
    return Streams(int(by_task.max()) + 1, 1 + tables.links.num_levels, tables.topology.device.overlap, found)


def lower_bound(problem: PlanningProblem, seconds: float = 30.0) -> Bound:
    """The largest bound found within about `seconds`; of the whole space where operators have few configs.

    Raises: TimeoutError where there is none by then.
    """
    deadline = time.monotonic() + seconds
    if problem.space.num_assignments.max(initial=1.0) <= COMPLETE_CONFIGS:
        relaxation = relax(problem, max_candidates=None, deadline=deadline)
    else:
        relaxation = pruned(seeded_relaxation(problem, deadline), PRUNED_TO, seeds(problem), deadline=deadline)
    value, _ = bound_of(relaxation, deadline=deadline)
    return Bound(value, relaxation.num_candidates, relaxation.is_pruned, problem.space.offers_pins)


def bound_of(relaxation: Relaxation, *, deadline: float = float("inf")) -> tuple[float, np.ndarray]:
    """The bound over a relaxation's candidates, and the weights [P, S] that give it."""
    streams = streams_of(relaxation.problem.simulator.tables)
    shape = streams.num_phases, streams.num_streams
    w = np.full(shape, 1.0 / streams.num_streams)
    if not streams.overlap:
        w = np.zeros(shape)
        w[:, 0] = 1.0  # the compute stream does everything
    best, best_w, seen = -np.inf, w, []
    plan = None
    for _ in range(_ROUNDS):
        pairwise = relaxation.pairwise(streams.weights(w))
        if plan is None:
            # The order is the same for all weights; those with a zero have fewer tables.
            plan = order_of(relaxation.pairwise())
        found = eliminate(factors_of(pairwise), plan[0] + plan[1])
        # float32 tables: a hair less, so that rounding cannot break the bound.
        value = found.value * (1 - 1e-5)
        if value > best:
            best, best_w = value, w
        if not streams.overlap or time.monotonic() > deadline:
            break
        choice = found.choice({}, len(pairwise.costs))
        seen.append(streams.busy(relaxation.durations(relaxation.strategy(pairwise, choice))))
        w, most = _next_weights(np.array(seen))
        if most - best <= _GAP * most:
            break
        w = 0.7 * w + 0.3 * best_w  # between the proposal and the best: steadier than the proposal alone
    return best, best_w


def _next_weights(seen: np.ndarray) -> tuple[np.ndarray, float]:
    """The weights [P, S] that maximise the least weighted busy time over those seen [I, P, S], and that maximum."""
    count, phases, streams = seen.shape
    scale = seen.sum(axis=(1, 2)).max()
    cost = np.zeros(1 + phases * streams)
    cost[0] = -1.0
    below = np.concatenate([np.ones((count, 1)), -seen.reshape(count, -1) / scale], axis=1)
    total = np.zeros((phases, len(cost)))
    for p in range(phases):
        total[p, 1 + p * streams : 1 + (p + 1) * streams] = 1.0
    bounds = [(None, None)] + [(0.0, 1.0)] * (phases * streams)
    found = scipy.optimize.linprog(
        cost, A_ub=below, b_ub=np.zeros(count), A_eq=total, b_eq=np.ones(phases), bounds=bounds, method="highs"
    )
    return found.x[1:].reshape(phases, streams), float(-found.fun) * scale
