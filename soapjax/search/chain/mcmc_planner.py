"""Metropolis-Hastings over the SOAP space, judging an operator's whole neighbourhood at once, exactly.

A chain walks in *blocks* of steps. A block draws one operator and some of the mesh axes, then for every step a
candidate: independent values on those axes and an independent storage. No candidate depends on what the block accepts
before it, and the cost of a candidate does not depend on the operator's own config. So all of them are judged in one
call beside the strategy at the block's start (the exact delta simulation), and the steps accept or refuse one after the
other, none thrown away. The proposal density is that of uniform draws: symmetric, the Hastings correction is one.

Between some rounds of blocks stand *leaps*: moves of many operators at once (moves.py), simulated in full, the first accepted
taken and those behind it thrown away. Several chains at different temperatures start from the best
starts and from a random one, and exchange states between rounds (parallel tempering); a chain that finds nothing
better for long starts again elsewhere. Costs are scaled by the best start, so that beta means the same for every model.

First the best of the baselines, a random start and the additive optimum (coarse_optimum.py), where it can be had in time, *descend*
in moves of whole groups, and the best end is *perturbed* (descending.py). Meanwhile the chains' programs are compiled
(compiling.py), where no problem of the same sizes has needed them before, and the chains walk when perturbations no longer help, or
their share of the time is over (descents.py). A search too short for that, or of few proposals, compiles none, and goes on with
perturbations; of a step of many equal blocks one by a number of proposals ends without.
A space with pins is searched without them first: pins tell devices apart, and a simulation takes several times as long. Time is
looked at between rounds only, so a run that time ended is replayed by its number of proposals, unless its notes say that time
decided what was judged.

FlexFlow (Jia, Zaharia, Aiken 2019), section 6; best-so-far is kept apart from the chains.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from soapjax.jit.array_types import Array
from soapjax.jit.programs import threads
from soapjax.search.chain.block_steps import Walker, exchange
from soapjax.search.chain.compiling import OF_A_DESCENT, chain_programs
from soapjax.search.chain.descents import WHOLE_AFTER_FEWER, Descents, SearchRun, with_fewer_blocks
from soapjax.search.chain.engine import Engine, engine_of
from soapjax.search.chain.later_start import additive_beside
from soapjax.search.chain.moves import State
from soapjax.search.chain.record import Record
from soapjax.search.chain.starting_points import numpy_rng, starts
from soapjax.search.descent.shortening import fewer_blocks
from soapjax.search.problem import Budget, Evaluation, PlanningProblem, SearchResult
from soapjax.simulate.simulator import BATCH

NUM_CHAINS = 4
BETAS = (12800.0, 3200.0, 800.0, 200.0)  # of the relative cost, coldest first
BLOCKS_PER_ROUND = 16  # per chain
ROUNDS_PER_LEAP = 8  # a leap costs as much as a hundred candidates of a block: more often, they would take half of the time
PATIENCE = 24  # rounds without an own improvement, after which a chain starts again elsewhere
WITHOUT_PINS = 0.4  # of the budget
FIRST_CHAIN = 1000  # of the numbers of generators: descents and perturbations have those before


def mcmc(rng_key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
    """Searches until the budget is spent, or until half of it brought no improvement (as in the paper)."""
    begin = time.monotonic()
    engine = engine_of(problem)
    pool, programs = threads(2), chain_programs(engine, budget)
    if programs is not None:
        programs.begin_by(0.0)
    begun = starts(rng_key, problem, budget)
    record = Record(budget, begin, begun[0])
    try:
        fewer = fewer_blocks(problem)
        begun += _without_pins(rng_key, problem, record)
        later = additive_beside(problem, fewer, record)
        best = min(begun, key=lambda e: e.rank)
        record.offer(best.strategy, best.cost)
        run = SearchRun(rng_key, record, pool, programs)
        descents = Descents(run, problem, problem.space)
        if fewer is None:
            begun, stopped_by = descents.run(begun, later)
            record.offer(begun[0].strategy, begun[0].cost)  # the best draw, too, where nothing was left to descend from it
        else:
            begun = with_fewer_blocks(run, fewer, begun, later)
            begun, stopped_by = descents.on(begun, WHOLE_AFTER_FEWER)
        if stopped_by is None and record.limit is None and not run.is_ready:
            record.time_decides()
            begun, stopped_by = descents.go_on(begun)
        if stopped_by is None and programs is None:
            stopped_by = "converged"
        elif stopped_by is None:
            programs.wait()
            stopped_by = _walked(rng_key, engine.relative_to(begun[0].cost), begun, record, pool)
            if record.limit is None and record.done < OF_A_DESCENT:  # asked for by number, so few would have had no chains
                record.time_decides()
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
    proposals = None if record.limit is None else max(int(WITHOUT_PINS * record.limit), 1)
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
