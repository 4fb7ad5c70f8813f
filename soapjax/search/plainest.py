"""Of strategies that are equal within the error, the one that sends less and reshards less.

A predicted step time is not known to half a percent, and a search that follows it to the last digit leaves conversions
in a plan that buy nothing. So at the end of a search, among what is within the error of the best (0.5 %, or the calibrated error):

* of the search's candidates and the baselines the one that sends fewest bytes is the start;
* from there, moves of whole groups of repeated operators (a layer's in all layers): to the config that a member has, or that a
  baseline has, or to another storage. Those that send less in fewer collectives are made together, as many as stay within it.

Nothing is taken that is slower than a baseline, that would be slower without overlap, or that splits a smaller share of the FLOPs
(by more than the same half percent): where launching takes most of the time, what sends least is the whole step on every device.
What is evaluated depends on the strategies alone, never on the clock, and is at most ROUNDS times MOST_MOVES strategies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from soapjax.costs.split_share import share_of, split_flops
from soapjax.search.problem import Evaluation, PlanningProblem, SearchResult
from soapjax.simulate.simulator import BATCH
from soapjax.strategy.strategy import Strategy

EQUAL = 0.005  # relative step time
ROUNDS = 3
MOST_MOVES = 8 * BATCH
_ROUNDING = 1e-6  # of sums in float32


class Candidate(NamedTuple):
    """A strategy with what it sends."""

    evaluation: Evaluation
    sent_bytes: float  # by each device in one step
    num_sends: int  # collectives and conversions that take time
    without_overlap_s: float
    split_flops_share: float

    def sends_less_than(self, other: Candidate) -> bool:
        """No more bytes in no more collectives, one of them less, and no slower where nothing overlaps."""
        bytes_ = self.sent_bytes - other.sent_bytes
        same = abs(bytes_) <= _ROUNDING * max(self.sent_bytes, other.sent_bytes)
        no_more = (same or bytes_ < 0) and self.num_sends <= other.num_sends
        is_less = (not same and bytes_ < 0) or self.num_sends < other.num_sends
        return no_more and is_less and self.without_overlap_s <= other.without_overlap_s * (1 + _ROUNDING)


def sends_less(
    problem: PlanningProblem, result: SearchResult, baselines: Sequence[Evaluation]
) -> tuple[SearchResult, tuple[str, ...]]:  # fmt: skip
    """The result with the plainest of what is equal to its best, and a note where that is another strategy."""
    best = result.best
    if not best.is_feasible:
        return result, ()
    profile = problem.simulator.tables.profile
    error = max(EQUAL, profile.error if profile is not None else 0.0)
    fits = [e for e in baselines if e.is_feasible]
    limit_s = min([best.step_time_s * (1 + error), *(e.step_time_s for e in fits if e.step_time_s >= best.step_time_s)])
    pool = [best, *(e for e in (*result.candidates, *fits) if e.is_feasible and e.step_time_s <= limit_s)]
    known = candidates_of(problem, list({e.strategy.key(): e.strategy for e in pool}.values()))
    start = plainest = known[0]
    limits = Limits(limit_s, start.split_flops_share - EQUAL)
    for candidate in known[1:]:
        if limits.allow(candidate) and candidate.sends_less_than(plainest):
            plainest = candidate
    for _ in range(ROUNDS):
        improved = _improved(problem, plainest, [e.strategy for e in baselines], limits)
        if improved is None:
            break
        plainest = improved
    if plainest is start:
        return result, ()
    found = plainest.evaluation
    note = (
        f"of plans within {error:.1%} of {best.step_time_s:.4g} s per step, the one that sends least is taken: "
        f"{found.step_time_s:.4g} s, {plainest.sent_bytes / 1e6:.4g} MB in {plainest.num_sends} collectives and conversions, "
        f"not {start.sent_bytes / 1e6:.4g} MB in {start.num_sends}"
    )
    return result._replace(best=found, candidates=(best, *result.candidates)), (note,)


def candidates_of(problem: PlanningProblem, strategies: Sequence[Strategy]) -> list[Candidate]:
    """Strategies with what they send, BATCH at a time."""
    out, simulator = [], problem.simulator
    for k in range(0, len(strategies), BATCH):
        some = list(strategies[k : k + BATCH])
        batch = simulator.batch(np.stack([s.axes for s in some]), np.stack([s.storage for s in some]))
        judged = problem.judged(some, batch.scores)
        for i, (strategy, evaluation) in enumerate(zip(some, judged, strict=True)):
            own = batch.costs(i)
            num = sum(int((np.asarray(x) > 0).any(-1).sum()) for x in own.durations[1:])
            sent = float(own.bytes_by_collective.sum(dtype=np.float64))
            share = share_of(*split_flops(simulator.tables, strategy.axes, own.layouts.slots))
            out.append(Candidate(evaluation, sent, num, simulator.without_overlap_s(own), share))
    return out


class Limits(NamedTuple):
    """What a strategy must keep to be taken for equal."""

    step_time_s: float
    split_flops_share: float

    def allow(self, candidate: Candidate) -> bool:
        e = candidate.evaluation
        return e.is_feasible and e.step_time_s <= self.step_time_s and candidate.split_flops_share >= self.split_flops_share


def _improved(
    problem: PlanningProblem, start: Candidate, templates: Sequence[Strategy], limits: Limits
) -> Candidate | None:  # fmt: skip
    """A candidate that sends less than `start`: by as many of the moves that do as are possible together."""
    before = start.evaluation.strategy
    moved = candidates_of(problem, _moves(problem, before, templates))
    better = [c for c in moved if limits.allow(c) and c.sends_less_than(start)]
    if not better:
        return None
    better.sort(key=lambda c: (c.sent_bytes, c.num_sends))
    together: list[Strategy] = []
    count = len(better)
    while count > 1:
        merged = Strategy(before.axes.copy(), before.storage.copy())
        for candidate in reversed(better[:count]):  # the best last: where two change the same operators, it has its way
            other = candidate.evaluation.strategy
            rows = (other.axes != before.axes).any(1) | (other.storage != before.storage)
            merged.axes[rows], merged.storage[rows] = other.axes[rows], other.storage[rows]
        together.append(merged)
        count //= 2
    fitting = [c for c in candidates_of(problem, together) if limits.allow(c) and c.sends_less_than(start)]
    return min([better[0], *fitting], key=lambda c: (c.sent_bytes, c.num_sends))


def _moves(problem: PlanningProblem, before: Strategy, templates: Sequence[Strategy]) -> list[Strategy]:
    """What can be done to a group of repeated operators at once, each once, MOST_MOVES at the most."""
    space = problem.space
    members: dict[int, list[int]] = {}
    for n, op in enumerate(problem.graph.operators):
        members.setdefault(op.group, []).append(n)
    found: dict[bytes, Strategy] = {}
    for rows in members.values():
        configs = [(before.axes[n], before.storage[n]) for n in rows]
        configs += [(t.axes[rows[0]], t.storage[rows[0]]) for t in templates]
        if space.owns_parameters[rows[0]]:
            configs += [(None, np.int8(k)) for k in range(len(space.storages))]
        for axes, storage in configs:
            moved = Strategy(before.axes.copy(), before.storage.copy())
            if axes is not None:
                moved.axes[rows] = axes
            moved.storage[rows] = storage
            if moved.key() != before.key():
                found.setdefault(moved.key(), moved)
    return [s for s in found.values() if space.is_valid(s)][:MOST_MOVES]
