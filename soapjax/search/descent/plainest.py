"""Of strategies that are equal within the error, the simplest: equal blocks alike, fewer bytes, fewer reshards.

A predicted step time is not known to half a percent, and a search that follows it to the last digit leaves in a plan what buys
nothing: reshards that hide under computing, and a split of its own for every layer. So at the end of a search, among what is
within the error of the best (`--simplicity`, or the calibrated error where that is more):

* of the search's candidates and the baselines the plainest is the start;
* from there, *templates*: all blocks of a run (repeats.py) as one of them is, with and without those at its ends;
* then moves of whole groups of repeated operators (a layer's in all layers, or those of equal structure): to the config that a
  member has, or that a baseline has, or to another storage. Those that are plainer are made together, as many as stay within it.

Nothing is taken that is slower than a baseline, that would be slower by more than the error if nothing overlapped, or that splits a
smaller share of the FLOPs (by more than half a percent): where launching takes most of the time, what sends least is the whole step
on every device. What is evaluated depends on the strategies alone, the clock only ends it, and is at most ROUNDS times MOST_MOVES
strategies, and MOST_MOVES templates.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from soapjax.costs.split_share import share_of, split_flops
from soapjax.search.descent.repeats import Run, runs_of
from soapjax.search.problem import Evaluation, PlanningProblem, SearchResult
from soapjax.simulate.simulator import BATCH
from soapjax.strategy.configs import Strategy

EQUAL = 0.005  # relative step time
ROUNDS = 6
MOST_MOVES = 8 * BATCH
_SHARE = 0.005  # of the FLOPs, by which a smaller share may be split
_FEWER_BYTES = 0.01  # relative, from which on fewer bytes are worth more collectives
_ROUNDING = 1e-6  # of sums in float32


class Candidate(NamedTuple):
    """A strategy with what is plain in it."""

    evaluation: Evaluation
    num_ways: int  # in which the blocks of each run are split and stored, of all runs together
    num_unlike: int  # configs beyond the first of all places of blocks
    sent_bytes: float  # by each device in one step
    num_sends: int  # collectives and reshards that take time
    without_overlap_s: float
    split_flops_share: float

    def is_plainer_than(self, other: Candidate) -> bool:
        """Its blocks more alike; where they are as alike, fewer bytes; where these are as many, fewer collectives."""
        if self.num_unlike != other.num_unlike:
            return self.num_unlike < other.num_unlike
        if self.sent_bytes < (1 - _FEWER_BYTES) * other.sent_bytes:
            return True
        bytes_ = self.sent_bytes - other.sent_bytes
        same = abs(bytes_) <= _ROUNDING * max(self.sent_bytes, other.sent_bytes)
        no_more = (same or bytes_ < 0) and self.num_sends <= other.num_sends
        return no_more and ((not same and bytes_ < 0) or self.num_sends < other.num_sends)

    @property
    def order(self) -> tuple[int, float, int, float]:
        """By this the plainest is the least."""
        return self.num_unlike, self.sent_bytes, self.num_sends, self.evaluation.step_time_s


def simplified(
    problem: PlanningProblem, result: SearchResult, baselines: Sequence[Evaluation], simplicity: float = EQUAL, *,
    deadline: float = math.inf,
) -> tuple[SearchResult, tuple[str, ...]]:  # fmt: skip
    """The result with the plainest of what is equal to its best within `simplicity`, and a note where that is another strategy.

    Nothing more is judged after `deadline`, of `time.monotonic`.
    """
    best = result.best
    if not best.is_feasible or not simplicity:
        return result, ()
    profile = problem.simulator.tables.profile
    error = max(simplicity, profile.error if profile is not None else 0.0)
    fits = [e for e in baselines if e.is_feasible]
    limit_s = min([best.step_time_s * (1 + error), *(e.step_time_s for e in fits if e.step_time_s >= best.step_time_s)])
    pool = [best, *(e for e in (*result.candidates, *fits) if e.is_feasible and e.step_time_s <= limit_s)]
    judge = Judge(problem, limit_s, deadline)
    known = judge(list({e.strategy.key(): e.strategy for e in pool}.values()))
    if not known:
        return result, ()
    start = found = known[0]
    limits = Limits(limit_s, start.without_overlap_s * (1 + error), start.split_flops_share - _SHARE)
    found = _plainest_of(found, known[1:], limits)
    found = _plainest_of(found, judge(_templates(problem, judge.runs, found.evaluation.strategy)), limits)
    for _ in range(ROUNDS):
        improved = _improved(judge, found, [e.strategy for e in baselines], limits)
        if improved is None:
            break
        found = improved
    if found is start:
        return result, ()
    return result._replace(best=found.evaluation, candidates=(best, *result.candidates)), (_note(start, found, error),)


def _note(start: Candidate, found: Candidate, error: float) -> str:
    alike = "" if found.num_ways == start.num_ways else f"equal blocks are split in {_ways(found)}, not {_ways(start)}; "
    return (
        f"of plans within {100 * error:.2g} % of {start.evaluation.step_time_s:.4g} s per step, the simplest is taken: "
        f"{found.evaluation.step_time_s:.4g} s; {alike}{found.sent_bytes / 1e6:.4g} MB in {found.num_sends} collectives and "
        f"reshards, not {start.sent_bytes / 1e6:.4g} MB in {start.num_sends}"
    )


def _ways(candidate: Candidate) -> str:
    return "one way" if candidate.num_ways == 1 else f"{candidate.num_ways} ways"


class Judge:
    """Strategies of one problem with what is plain in them, BATCH at a time: those that take no longer than `limit_s`, and none
    after `deadline`."""

    def __init__(self, problem: PlanningProblem, limit_s: float = math.inf, deadline: float = math.inf):
        self.limit_s, self.deadline = limit_s, deadline
        self.problem, self.runs = problem, runs_of([op.group for op in problem.graph.operators])

    def __call__(self, strategies: Sequence[Strategy]) -> list[Candidate]:
        out, simulator = [], self.problem.simulator
        for k in range(0, len(strategies), BATCH):
            if time.monotonic() > self.deadline:
                break
            some = list(strategies[k : k + BATCH])
            batch = simulator.batch(np.stack([s.axes for s in some]), np.stack([s.storage for s in some]))
            judged = self.problem.judged(some, batch.scores)
            for i, (strategy, evaluation) in enumerate(zip(some, judged, strict=True)):
                if evaluation.step_time_s > self.limit_s:
                    continue
                own = batch.outline(i)
                num = sum(int((np.asarray(x) > 0).any(-1).sum()) for x in own.durations[1:])
                sent = float(own.bytes_by_collective.sum(dtype=np.float64))
                share = share_of(*split_flops(simulator.tables, strategy.axes, own.stored))
                ways = sum(run.distinct(strategy.axes, strategy.storage) for run in self.runs)
                alike = ways, self._num_unlike(strategy)
                out.append(Candidate(evaluation, *alike, sent, num, simulator.without_overlap_s(own), share))
            batch.done()
        return out

    def _num_unlike(self, strategy: Strategy) -> int:
        places = [p[p >= 0] for run in self.runs for p in run.members.T]
        configs = np.concatenate([strategy.axes, strategy.storage[:, None]], axis=1)
        return sum(len({c.tobytes() for c in configs[p]}) - 1 for p in places)


class Limits(NamedTuple):
    """What a strategy must keep to be taken for equal."""

    step_time_s: float
    without_overlap_s: float
    split_flops_share: float

    def allow(self, candidate: Candidate) -> bool:
        e = candidate.evaluation
        is_as_fast = e.step_time_s <= self.step_time_s and candidate.without_overlap_s <= self.without_overlap_s
        return e.is_feasible and is_as_fast and candidate.split_flops_share >= self.split_flops_share


def _plainest_of(start: Candidate, others: Sequence[Candidate], limits: Limits) -> Candidate:
    found = start
    for other in others:
        if limits.allow(other) and other.is_plainer_than(found):
            found = other
    return found


def _templates(problem: PlanningProblem, runs: Sequence[Run], before: Strategy) -> list[Strategy]:
    """All blocks of a run as one of them is, of every run and of all runs at once; blocks at its ends may stay as they are."""
    def made(runs: Sequence[Run], b: int, kept: tuple[int, ...] = ()) -> Strategy:
        strategy = before
        for run in runs:
            if b < run.num_blocks:
                strategy = _copied(before, run.members[b], np.delete(run.members, list(kept), axis=0), strategy)
        return strategy

    most = range(max((run.num_blocks for run in runs), default=0))
    whole = [made(some, b) for some in ([runs] if len(runs) > 1 else []) + [[run] for run in runs] for b in most]
    but_ends = [made([run], b, kept) for kept in ((0,), (-1,), (0, -1)) for run in runs for b in range(run.num_blocks)]
    found = {s.key(): s for s in (*whole, *but_ends)}
    return [s for s in found.values() if s.key() != before.key() and problem.space.is_valid(s)][:MOST_MOVES]


def _copied(before: Strategy, block: np.ndarray, to: np.ndarray, into: Strategy) -> Strategy:
    """`into` with what `block` has of `before` in all blocks `to`."""
    here = block[None].repeat(len(to), axis=0)
    both = (here >= 0) & (to >= 0)
    return into.but(to[both], before.axes[here[both]], before.storage[here[both]])


def _improved(judge: Judge, start: Candidate, templates: Sequence[Strategy], limits: Limits) -> Candidate | None:
    """A candidate that is plainer than `start`: by as many of the moves that are as are possible together."""
    before = start.evaluation.strategy
    better = [c for c in judge(_moves(judge, before, templates)) if limits.allow(c) and c.is_plainer_than(start)]
    if not better:
        return None
    better.sort(key=lambda c: c.order)
    together: list[Strategy] = []
    count = len(better)
    while count > 1:
        merged = before
        for candidate in reversed(better[:count]):  # the best last: where two change the same operators, it has its way
            other = candidate.evaluation.strategy
            rows = (other.axes != before.axes).any(1) | (other.storage != before.storage)
            merged = merged.but(rows, other.axes[rows], other.storage[rows])
        together.append(merged)
        count //= 2
    fitting = [c for c in judge(together) if limits.allow(c) and c.is_plainer_than(start)]
    return min([better[0], *fitting], key=lambda c: c.order)


def _moves(judge: Judge, before: Strategy, templates: Sequence[Strategy]) -> list[Strategy]:
    """What can be done to a group of repeated operators at once, each once, MOST_MOVES at the most."""
    problem, space = judge.problem, judge.problem.space
    members: dict[int, list[int]] = {}
    for n, op in enumerate(problem.graph.operators):
        members.setdefault(op.group, []).append(n)
    places = [p[p >= 0].tolist() for run in judge.runs for p in run.members.T]
    found: dict[bytes, Strategy] = {}
    for rows in (*places, *members.values()):
        configs = [(before.axes[n], before.storage[n]) for n in rows]
        configs += [(t.axes[rows[0]], t.storage[rows[0]]) for t in templates]
        if space.owns_parameters[rows[0]]:
            configs += [(before.axes[rows], np.int8(k)) for k in range(len(space.storages))]
        for axes, storage in configs:
            moved = before.but(rows, axes, storage)
            if moved.key() != before.key():
                found.setdefault(moved.key(), moved)
    return [s for s in found.values() if space.is_valid(s)][:MOST_MOVES]
