"""Metropolis-Hastings over the SOAP space, judging an operator's whole neighbourhood at once, exactly.

A chain walks in *blocks* of steps. A block draws one operator and some of the mesh axes, then for every step a
candidate: independent values on those axes and an independent storage. No candidate depends on what the block accepts
before it, and the cost of a candidate does not depend on the operator's own config. So all of them are judged in one
call beside the strategy at the block's start (the exact delta simulation), and the steps accept or refuse one after the
other, none thrown away. The proposal density is that of uniform draws: symmetric, the Hastings correction is one.

Between some rounds of blocks stand *leaps*: moves of many operators at once (moves.py), simulated in full, the first accepted
taken and those behind it thrown away. Draws are keyed by the step. Several chains at different temperatures start from the best
starts and from a random one, and exchange states between rounds (parallel tempering); a chain that finds nothing
better for long starts again elsewhere. Costs are scaled by the best start, so that beta means the same for every model.

First the best start and a random one *descend* in moves of whole groups, and the better is *kicked* from its end (descent.py).
Starts are the baselines, the additive optimum (dynamic_program.py) where it can be had in time, and random ones. Meanwhile the
chains' programs are compiled, where no problem of the same sizes has needed them before, and the chains walk when kicks no longer
help, or their share of the time is over. A space with pins is searched without them first: pins tell devices apart, and a
simulation takes several times as long. Time is looked at between rounds only, so a run that time ended is replayed by its number
of proposals, unless its notes say that time decided what was judged.

FlexFlow (Jia, Zaharia, Aiken 2019), section 6; best-so-far is kept apart from the chains.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from soapjax.jit.array_types import Array
from soapjax.jit.programs import threads
from soapjax.search.chain.chain import Walker, exchange
from soapjax.search.chain.engine import Engine
from soapjax.search.chain.moves import State
from soapjax.search.chain.starting_points import numpy_rng, starts
from soapjax.search.descent.assignments import Assignments
from soapjax.search.descent.descent import Descent, Kicks
from soapjax.search.problem import Budget, Evaluation, PlanningProblem, SearchResult
from soapjax.search.relaxation.dynamic_program import additive_start, additive_start_s, has_additive_start
from soapjax.simulate.simulator import BATCH
from soapjax.strategy.strategy import Strategy

NUM_CHAINS = 4
BETAS = (12800.0, 3200.0, 800.0, 200.0)  # of the relative cost, coldest first
BLOCKS_PER_ROUND = 16  # per chain
ROUNDS_PER_LEAP = 8  # a leap costs as much as a hundred candidates of a block: more often, they would take half of the time
DEFAULT_PROPOSALS = 100_000
PATIENCE = 24  # rounds without an own improvement, after which a chain starts again elsewhere
MAX_FAILED = 10  # kicks in a row without an improvement, small ones and large ones, after which chains walk
KICKS = (("moved",), ("exchanged", "reranked"))  # small ones beside large ones
STARTING_DRAWS = 64  # of all axes ranked anew in the whole graph: the best of them is where the descent from a random start begins
DESCENDED_UNTIL, KICKED_UNTIL = 0.3, 0.4  # of the budget: what may be spent before chains walk
WITHOUT_PINS = 0.4  # of the budget
TIME_DECIDED = "what was searched depended on the clock: another run may find another plan, one by --proposals the same"
FIRST_CHAIN = 1000  # of the numbers of generators: descents and kicks have those before
ADDITIVE_WITHIN, ADDITIVE_UNTIL = 0.15, 0.2  # of the budget's seconds: what the additive optimum may take, and when it is given up


class Record:
    """What a search has found so far, and whether its budget is spent."""

    def __init__(self, budget: Budget, begin: float, first: Evaluation):
        self.budget, self.begin = budget, begin
        self.limit = budget.num_proposals
        if self.limit is None and budget.seconds is None:
            self.limit = DEFAULT_PROPOSALS
        self.done, self.best_at = 0, 0
        self.began = self.best_elapsed = self.elapsed  # compiling the simulator is no lack of improvement
        self.lowest_s = first.cost
        self.candidates = [first.strategy]
        self.history = [(0, self.elapsed, first.step_time_s)]
        self.notes: list[str] = []

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.begin

    def left(self) -> int:
        """Proposals."""
        return DEFAULT_PROPOSALS if self.limit is None else self.limit - self.done

    def spent(self) -> float:
        """Which part of the budget, from the first judged strategies on."""
        seconds = self.budget.seconds
        of_time = 0.0 if seconds is None else (self.elapsed - self.began) / max(seconds - self.began, 1e-9)
        return max(of_time, 0.0 if self.limit is None else self.done / self.limit)

    def time_decides(self) -> None:
        """Says so: the clock decided what is judged, not only when the search ends."""
        if TIME_DECIDED not in self.notes:
            self.notes.append(TIME_DECIDED)

    def offer(self, strategy: Strategy, cost_s: float) -> None:
        if cost_s < self.lowest_s:
            self.lowest_s, self.best_at, self.best_elapsed = cost_s, self.done, self.elapsed
            self.candidates.append(strategy)
            self.history.append((self.done, self.elapsed, cost_s))

    def tell(self) -> None:
        if self.budget.progress is not None:
            self.budget.progress(self.done, self.lowest_s, self.elapsed)

    def stopped_by(self, *, has_walked: bool) -> str | None:
        """Why the search ends now, if it does: half of the budget without an improvement is enough, once chains have walked."""
        if self.limit is not None and self.done >= self.limit:
            return "proposals"
        seconds = self.budget.seconds
        if seconds is not None and self.elapsed >= seconds:
            return "seconds"
        if not has_walked:
            return None
        if self.limit is not None:
            is_idle = self.done - self.best_at > self.limit / 2
        else:
            is_idle = self.elapsed - self.best_elapsed > seconds / 2
        return "converged" if is_idle else None


def mcmc(rng_key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
    """Searches until the budget is spent, or until half of it brought no improvement (as in the paper)."""
    begin = time.monotonic()
    engine = Engine(problem)
    pool, preparing = threads(2), threads(1)
    ready = preparing.submit(engine.prepare)
    begun = starts(rng_key, problem, budget)
    record = Record(budget, begin, begun[0])
    try:
        begun += _without_pins(rng_key, problem, record)
        descents = Descents(rng_key, problem, record, pool, ready)
        begun, stopped_by = descents.run(begun)
        if stopped_by is None and record.limit is None and not ready.done():
            record.time_decides()
            begun, stopped_by = descents.go_on(begun)
        if stopped_by is None:
            ready.result()
            stopped_by = _walked(rng_key, engine.relative_to(begun[0].cost), begun, record, pool)
    except KeyboardInterrupt:
        stopped_by = "interrupted"
    finally:
        pool.shutdown(wait=True)
        preparing.shutdown(wait=False)
    good = sorted(problem.evaluate(record.candidates[-BATCH:] + record.candidates[:1]), key=lambda e: e.rank)
    history, notes = tuple(record.history), tuple(record.notes)
    return SearchResult(good[0], record.done, record.elapsed, stopped_by, history, notes, candidates=tuple(good))


def _without_pins(key: Array, problem: PlanningProblem, record: Record) -> list[Evaluation]:
    """What a search of the space without pins finds, where this one has them."""
    if not problem.space.offers_pins:
        return []
    budget = record.budget
    proposals = None if record.limit is None else int(WITHOUT_PINS * record.limit)
    seconds = None if budget.seconds is None else WITHOUT_PINS * budget.seconds
    found = mcmc(key, problem.without_pins(), budget._replace(num_proposals=proposals, seconds=seconds))
    record.done += found.num_proposals
    if found.stopped_by == "seconds":
        record.time_decides()
    best = problem.evaluate([found.best.strategy])
    record.offer(best[0].strategy, best[0].cost)
    if found.stopped_by == "interrupted":
        raise KeyboardInterrupt
    return best


class Descents:
    """Descents and kicks of one search, two side by side."""

    def __init__(self, key: Array, problem: PlanningProblem, record: Record, pool: ThreadPoolExecutor, ready: Future[None]):
        self.key, self.problem, self.record, self.pool, self.ready = key, problem, record, pool, ready
        self.moves = Assignments(problem.space)
        self.number = 0  # of generators

    def _rng(self) -> np.random.Generator:
        self.number += 1
        return numpy_rng(self.key, self.number)

    def run(self, begun: list[Evaluation]) -> tuple[list[Evaluation], str | None]:
        """All starts and what was found from some of them, best first; and why to stop there."""
        begun = sorted([*self._additive(), *begun], key=lambda e: e.rank)
        self.record.offer(begun[0].strategy, begun[0].cost)
        ends = self._descended([begun[0], self._ranked(begun[-1])])  # the worst is a random one
        kicked = self._kicked(min(ends, key=lambda e: e.cost), until=KICKED_UNTIL)
        if self.record.limit is None and self.record.spent() >= KICKED_UNTIL:
            self.record.time_decides()
        found = {e.strategy.key(): e for e in [kicked, *ends, *begun]}
        return sorted(found.values(), key=lambda e: e.rank), self.record.stopped_by(has_walked=False)

    def go_on(self, begun: list[Evaluation]) -> tuple[list[Evaluation], str | None]:
        """More kicks, until chains are ready to walk or the budget is spent; as `run`."""
        best, stopped_by = begun[0], None
        while not self.ready.done() and not (stopped_by := self.record.stopped_by(has_walked=False)):
            best = self._kicked(best, ends_when_ready=True)
        return [best, *begun], stopped_by

    def _additive(self) -> list[Evaluation]:
        """The additive optimum, where it can be had; a note says where it would take too long."""
        budget, problem = self.record.budget, self.problem
        if budget.random_start or not has_additive_start(problem):
            return []
        seconds = math.inf if budget.seconds is None else budget.seconds
        if additive_start_s(problem) <= ADDITIVE_WITHIN * seconds:
            with contextlib.suppress(TimeoutError):
                return problem.evaluate([additive_start(problem, deadline=self.record.begin + ADDITIVE_UNTIL * seconds)])
        self.record.time_decides()
        return []

    def _ranked(self, start: Evaluation) -> Evaluation:
        """The best of many draws that rank all axes of `start` anew: as random, but what follows one another is split alike."""
        count = min(STARTING_DRAWS, max(self.record.left(), 0))
        drawn = self.moves.reranked(self._rng(), start.strategy, count, every_axis=True)
        self.record.done += len(drawn)
        return min([start, *(self.problem.evaluate(drawn) if drawn else [])], key=lambda e: e.cost)

    def _descended(self, begun: list[Evaluation]) -> list[Evaluation]:
        members = [Descent(self.problem, e, self._rng(), self.moves) for e in begun]
        while self._may_descend() and (active := [d for d in members if not d.is_over]):
            self._one_round(active)
        return [d.best for d in members]

    def _may_descend(self) -> bool:
        record = self.record
        if record.spent() >= DESCENDED_UNTIL and record.limit is None:
            record.time_decides()
        return record.spent() < DESCENDED_UNTIL and record.stopped_by(has_walked=False) is None

    def _kicked(self, best: Evaluation, *, until: float = 1.0, ends_when_ready: bool = False) -> Evaluation:
        """Small kicks beside large ones, until many of both in a row have failed, or that part of the budget is spent."""
        record = self.record
        kicks = [Kicks(self.problem, best, self._rng(), self.moves, kinds) for kinds in KICKS]
        while any(k.failed < MAX_FAILED for k in kicks) and record.spent() < until and not record.stopped_by(has_walked=False):
            if ends_when_ready and self.ready.done():
                break
            self._one_round(kicks)
            best = min((k.best for k in kicks), key=lambda e: e.cost)
            for k in kicks:
                k.offer(best)
        return best

    def _one_round(self, members: Sequence[Descent | Kicks]) -> None:
        record = self.record
        limits = [min(BATCH, (record.left() + i) // len(members)) for i in range(len(members))]
        # While the chains' programs are compiled, one of two cores is left to that.
        run = self.pool.map if self.ready.done() else map
        record.done += sum(run(lambda d, limit: d.round(limit), members, limits))
        for d in members:
            record.offer(d.best.strategy, d.best.cost)
        record.tell()


def _walked(rng_key: Array, engine: Engine, begun: list[Evaluation], record: Record, pool: ThreadPoolExecutor) -> str:
    """Chains from the starts `begun`, until the budget is spent; why they stopped."""
    rngs, swaps = [numpy_rng(rng_key, FIRST_CHAIN + c) for c in range(NUM_CHAINS)], numpy_rng(rng_key, FIRST_CHAIN + NUM_CHAINS)
    reference_s, waiting = engine.reference_s, _in_turn(begun)
    walkers = [engine.walker(e.strategy, e.cost / reference_s) for e in (waiting.pop(0) for _ in range(NUM_CHAINS))]
    rounds, quiet = 0, [0] * NUM_CHAINS
    own_best = [float(w.best_cost) for w in walkers]
    record.best_elapsed = record.elapsed  # compilation is no lack of improvement
    while True:
        if stopped_by := record.stopped_by(has_walked=True):
            return stopped_by
        # What is judged counts, taken or not; the last rounds share what is left.
        is_last = record.limit is not None and record.left() < NUM_CHAINS * (engine.steps + 1)  # less than a block each
        most_leaps = BATCH if rounds % ROUNDS_PER_LEAP == 0 or is_last else 0
        shares = [most_leaps + BLOCKS_PER_ROUND * engine.steps] * NUM_CHAINS
        if record.limit is not None:
            shares = [min(shares[c], (record.left() + c) // NUM_CHAINS) for c in range(NUM_CHAINS)]
        leaps = [min(most_leaps, share) for share in shares]
        count = min((share - lanes) // engine.steps for share, lanes in zip(shares, leaps, strict=True))

        def one_round(c: int, count: int = count, leaps: list[int] = leaps) -> Walker:
            moved = engine.leap(rngs[c], BETAS[c], walkers[c], leaps[c]) if leaps[c] else walkers[c]
            return engine.walk(rngs[c], BETAS[c], moved, count) if count else moved

        taken = [int(w.steps) for w in walkers]
        walkers = list(pool.map(one_round, range(NUM_CHAINS)))
        # A block of more configs than there are lanes ends before its last step.
        walked = [int(w.steps) - before for w, before in zip(walkers, taken, strict=True)]
        record.done += sum(leaps) + sum(walked)
        if engine.problem.front is not None:  # what is judged beside another strategy is not seen by it
            states = [s for w in walkers for s in (State(w.at.base.axes, w.at.base.storage), w.best)]
            engine.problem.evaluate([engine.strategy(s) for s in states])
        rounds += 1
        for c, w in enumerate(walkers):
            quiet[c] = 0 if float(w.best_cost) < own_best[c] else quiet[c] + 1
            own_best[c] = float(w.best_cost)
        leader = int(np.argmin(own_best))
        record.offer(engine.strategy(walkers[leader].best), own_best[leader] * reference_s)
        walkers = exchange(swaps, walkers, np.array(BETAS), rounds % 2)
        own_best = [float(w.best_cost) for w in walkers]
        record.tell()
        for c in range(NUM_CHAINS - 1):
            if quiet[c] > PATIENCE and waiting:
                fresh = waiting.pop(0)
                walkers[c], quiet[c] = engine.walker(fresh.strategy, fresh.cost / reference_s), 0
                own_best[c] = float(walkers[c].best_cost)


def _in_turn(begun: list[Evaluation]) -> list[Evaluation]:
    """The order in which starts are used: the coldest chains begin at the best, the hottest at a random one (the worst)."""
    order = [*begun[: NUM_CHAINS - 1], begun[-1], *begun[NUM_CHAINS - 1 : -1]]
    return order + [begun[-1]] * max(0, NUM_CHAINS - len(order))
