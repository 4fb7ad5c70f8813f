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
Starts are the baselines, the additive optimum (optcnn.py) where it can be had in time, and random ones. That needs only the
full simulator, which compiles in a few seconds, and brings most of what there is to gain. The chains' programs are compiled
when kicks no longer help, or most of the time is over; where that leaves no time for it, kicks go on to the end. A space with pins
is searched without them first: pins tell devices apart, and a simulation takes several times as long. Time is looked
at between rounds only, so a run that time ended is replayed by its number of proposals, unless its notes say that time decided
what was judged.

FlexFlow (Jia, Zaharia, Aiken 2019), section 6; best-so-far is kept apart from the chains.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from soapjax.costs.evaluate import Costs
from soapjax.search.assignments import Assignments
from soapjax.search.chain import Walker, block_draws, block_kernel, block_size, exchange
from soapjax.search.descent import Descent, Kicks
from soapjax.search.moves import State, leap
from soapjax.search.neighbourhood import Neighbourhoods, Position, Tables
from soapjax.search.optcnn import additive_start, additive_start_s, has_additive_start
from soapjax.search.problem import Budget, Evaluation, PlanningProblem, SearchResult
from soapjax.search.starts import numpy_rng, starts
from soapjax.simulate.programs import Program, side_by_side, threads
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
KICKED_UNTIL = 0.6  # of the budget's seconds: what may be spent before chains walk
WITHOUT_PINS = 0.4  # of the budget
ADDITIVE_WITHIN, ADDITIVE_UNTIL = 0.4, 0.5  # of the budget's seconds: what the additive optimum may take, and when it is given up


class Engine:
    """The compiled functions of one search, and the cost that others are relative to. Programs do not depend on that cost."""

    def __init__(self, problem: PlanningProblem, reference_s: float):
        self.problem, self.reference_s = problem, reference_s
        self.near = Neighbourhoods(problem)
        self.steps = block_size(problem)
        self.draws = block_draws(problem.space, self.steps)

        def walk(tables: Tables, reference_s: Array, key: Array, beta: Array, walker: Walker, first: Array, count: Array):
            block = block_kernel(self.near, reference_s, self.draws)
            return jax.lax.fori_loop(
                first, first + count, lambda i, w: block(tables, jax.random.fold_in(key, i), beta, w), walker
            )  # fmt: skip

        self._walk, self._position = Program(walk), Program(self.near.position)
        self._propose = Program(jax.vmap(leap(problem.space), (0, None)))

    def compile_s(self) -> float:
        """About how long `prepare` will take, by what the simulator took: so much more is there to compile per class."""
        return self.problem.simulator.compile_s * (1 + 3 * len(self.near.tables.classes))

    def prepare(self, walker: Walker) -> None:
        """Compiles all, on as many cores as there are."""
        key, number, beta = jax.random.key(0), jnp.int32(0), jnp.float32(1.0)
        with side_by_side() as prepare:
            prepare(self._walk, self.near.tables, beta, key, beta, walker, number, number)
            prepare(self._propose, jax.random.split(key, BATCH), State(walker.at.base.axes, walker.at.base.storage))

    def walker(self, strategy: Strategy, cost: float) -> Walker:
        """A chain that begins at `strategy`."""
        at = self._at(self.problem.simulator.costs(strategy), strategy.axes, strategy.storage)
        return Walker(at, jnp.float32(cost), jnp.int32(0), jnp.float32(cost), State(at.base.axes, at.base.storage))

    def _at(self, costs: Costs, axes: np.ndarray, storage: np.ndarray) -> Position:
        return self._position(self.near.tables, costs, axes, storage)

    def walk(self, key: Array, beta: float, walker: Walker, first: int, count: int) -> Walker:
        """Blocks `first` to `first + count` of a chain."""
        numbers = jnp.int32(first), jnp.int32(count)
        reference_s = jnp.float32(self.reference_s)
        return jax.block_until_ready(self._walk(self.near.tables, reference_s, key, jnp.float32(beta), walker, *numbers))

    def leap(self, key: Array, beta: float, walker: Walker, limit: int = BATCH) -> Walker:
        """Up to `limit` steps of many operators at once, simulated in full: as many as it takes to accept one."""
        move, uniform = jax.random.split(key)
        state = State(walker.at.base.axes, walker.at.base.storage)
        proposed = self._propose(jax.random.split(move, BATCH), state)
        proposed = State(np.asarray(proposed.axes), np.asarray(proposed.storage))
        judged = self.problem.simulator.batch(*proposed)
        cost = np.asarray(self.problem.cost(judged.scores), np.float64) / self.reference_s
        uniforms = np.asarray(jax.random.uniform(uniform, (BATCH,)))
        now = float(walker.cost)
        accepts = np.isfinite(cost) & (uniforms < np.exp(np.minimum(beta * (now - cost), 0.0)))
        accepts[limit:] = False
        first = int(np.argmax(accepts)) if accepts.any() else limit - 1
        lowest = int(np.argmin(cost[: first + 1]))
        if cost[lowest] < float(walker.best_cost):
            best = State(*(jnp.asarray(x[lowest]) for x in proposed))
            walker = walker._replace(best=best, best_cost=jnp.float32(cost[lowest]))
        if accepts.any():
            at = self._at(judged.costs(first), proposed.axes[first], proposed.storage[first])
            walker = walker._replace(at=at, cost=jnp.float32(cost[first]), accepted=walker.accepted + 1)
        return walker


class Record:
    """What a search has found so far, and whether its budget is spent."""

    def __init__(self, budget: Budget, begin: float, first: Evaluation):
        self.budget, self.begin = budget, begin
        self.limit = budget.num_proposals
        if self.limit is None and budget.seconds is None:
            self.limit = DEFAULT_PROPOSALS
        self.done, self.best_at, self.best_elapsed = 0, 0, 0.0
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

    def time_spent(self) -> float:
        """Which part of the budget's seconds; 0 where they are not limited."""
        return 0.0 if self.budget.seconds is None else self.elapsed / self.budget.seconds

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
    begun = starts(rng_key, problem, budget)
    record = Record(budget, begin, begun[0])
    pool = threads(2)
    try:
        begun += _without_pins(rng_key, problem, record)
        descents = Descents(rng_key, problem, record, pool)
        begun, stopped_by = descents.run(begun)
        if stopped_by is None:
            engine = Engine(problem, begun[0].cost)
            needed_s = engine.compile_s()
            if budget.seconds is not None and record.elapsed + needed_s > budget.seconds:
                took = f"compiling takes about {needed_s:.0f} s, more than was left"
                record.notes.append(f"no chain walked: {took}; kicks went on instead")
                stopped_by = descents.go_on(begun[0])
            else:
                stopped_by = _walked(jax.random.split(rng_key, 3), engine, begun, record, pool)
    except KeyboardInterrupt:
        stopped_by = "interrupted"
    finally:
        pool.shutdown(wait=True)
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
        record.notes.append(f"the space without pins was searched for {WITHOUT_PINS:.0%} of the time")
    best = problem.evaluate([found.best.strategy])
    record.offer(best[0].strategy, best[0].cost)
    if found.stopped_by == "interrupted":
        raise KeyboardInterrupt
    return best


class Descents:
    """Descents and kicks of one search, two side by side."""

    def __init__(self, key: Array, problem: PlanningProblem, record: Record, pool: ThreadPoolExecutor):
        self.key, self.problem, self.record, self.pool = key, problem, record, pool
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
        if self.record.time_spent() >= KICKED_UNTIL:
            self.record.notes.append(f"kicks ended after {KICKED_UNTIL:.0%} of the time")
        found = {e.strategy.key(): e for e in [kicked, *ends, *begun]}
        return sorted(found.values(), key=lambda e: e.rank), self.record.stopped_by(has_walked=False)

    def go_on(self, best: Evaluation) -> str:
        """More kicks, until the budget is spent; why it stopped."""
        while not (stopped_by := self.record.stopped_by(has_walked=True)):
            best = self._kicked(best)
        return stopped_by

    def _additive(self) -> list[Evaluation]:
        """The additive optimum, where it can be had; a note says where it would take too long."""
        budget, problem = self.record.budget, self.problem
        if budget.random_start or not has_additive_start(problem):
            return []
        seconds = math.inf if budget.seconds is None else budget.seconds
        if additive_start_s(problem) <= ADDITIVE_WITHIN * seconds:
            with contextlib.suppress(TimeoutError):
                return problem.evaluate([additive_start(problem, deadline=self.record.begin + ADDITIVE_UNTIL * seconds)])
        self.record.notes.append("the additive optimum was no start: it would have taken too long")
        return []

    def _ranked(self, start: Evaluation) -> Evaluation:
        """The best of many draws that rank all axes of `start` anew: as random, but what follows one another is split alike."""
        count = min(STARTING_DRAWS, max(self.record.left(), 0))
        drawn = self.moves.reranked(self._rng(), start.strategy, count, every_axis=True)
        self.record.done += len(drawn)
        return min([start, *(self.problem.evaluate(drawn) if drawn else [])], key=lambda e: e.cost)

    def _descended(self, begun: list[Evaluation]) -> list[Evaluation]:
        members = [Descent(self.problem, e, self._rng(), self.moves) for e in begun]
        while self.record.stopped_by(has_walked=False) is None and (active := [d for d in members if not d.is_over]):
            self._one_round(active)
        return [d.best for d in members]

    def _kicked(self, best: Evaluation, *, until: float = 1.0) -> Evaluation:
        """Small kicks beside large ones, until many of both in a row have failed, or that part of the budget's seconds is spent."""
        record = self.record
        kicks = [Kicks(self.problem, best, self._rng(), self.moves, kinds) for kinds in KICKS]
        while any(k.failed < MAX_FAILED for k in kicks) and record.time_spent() < until and not record.stopped_by(has_walked=False):
            self._one_round(kicks)
            best = min((k.best for k in kicks), key=lambda e: e.cost)
            for k in kicks:
                k.offer(best)
        return best

    def _one_round(self, members: Sequence[Descent | Kicks]) -> None:
        record = self.record
        limits = [min(BATCH, (record.left() + i) // len(members)) for i in range(len(members))]
        record.done += sum(self.pool.map(lambda d, limit: d.round(limit), members, limits))
        for d in members:
            record.offer(d.best.strategy, d.best.cost)
        record.tell()


def _walked(keys: Array, engine: Engine, begun: list[Evaluation], record: Record, pool: ThreadPoolExecutor) -> str:
    """Chains from the starts `begun`, until the budget is spent; why they stopped."""
    chain_key, leap_key, swap_key = keys
    reference_s, waiting = engine.reference_s, _in_turn(begun)
    walkers = [engine.walker(e.strategy, e.cost / reference_s) for e in (waiting.pop(0) for _ in range(NUM_CHAINS))]
    engine.prepare(walkers[0])
    betas, chain_keys = np.array(BETAS), jax.random.split(chain_key, NUM_CHAINS)
    rounds, blocks, quiet = 0, 0, [0] * NUM_CHAINS
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
        keys = jax.random.split(jax.random.fold_in(leap_key, rounds), NUM_CHAINS)

        def one_round(c: int, count: int = count, keys: Array = keys, leaps: list[int] = leaps) -> Walker:
            moved = engine.leap(keys[c], betas[c], walkers[c], leaps[c]) if leaps[c] else walkers[c]
            return engine.walk(chain_keys[c], betas[c], moved, blocks, count) if count else moved

        walkers = list(pool.map(one_round, range(NUM_CHAINS)))
        record.done += sum(leaps) + NUM_CHAINS * count * engine.steps
        blocks, rounds = blocks + count, rounds + 1
        for c, w in enumerate(walkers):
            quiet[c] = 0 if float(w.best_cost) < own_best[c] else quiet[c] + 1
            own_best[c] = float(w.best_cost)
        leader = int(np.argmin(own_best))
        state = walkers[leader].best
        record.offer(Strategy(np.asarray(state.axes), np.asarray(state.storage)), own_best[leader] * reference_s)
        walkers = exchange(jax.random.fold_in(swap_key, rounds), walkers, betas, rounds % 2)
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
