"""What a chain does to one problem: it begins at a strategy, walks blocks of steps, and leaps (see mcmc_planner.py)."""

from __future__ import annotations

import copy
import functools
from typing import Any

import jax
import numpy as np

from soapjax.costs.evaluate import LANES
from soapjax.costs.rules import sets
from soapjax.jit.programs import threads
from soapjax.search.chain.block_steps import LANES as CANDIDATES
from soapjax.search.chain.block_steps import MOST_BLOCKS, UNIFORMS, Programs, Walker, block_size, judge_program, programs
from soapjax.search.chain.moves import NUM_UNIFORMS, MoveTables, State, move_tables
from soapjax.search.chain.neighbourhood import Judged, Position, Sizes, Tables, base_of, no_alive, no_base, tables_of
from soapjax.search.problem import PlanningProblem
from soapjax.simulate.simulated_trace import no_trace
from soapjax.simulate.simulator import BATCH, Batch
from soapjax.strategy.configs import REPLICATE, Strategy


def engine_of(problem: PlanningProblem) -> Engine:
    """Made once for each problem, which keeps it."""
    own = vars(problem)
    if "_engine" not in own:
        own["_engine"] = Engine(problem)
    return own["_engine"]


class Engine:
    """The walking programs on one problem, and the cost that others are relative to. Programs depend on neither."""

    def __init__(self, problem: PlanningProblem, reference_s: float = 1.0):
        self.problem = problem
        self.reference_s: Any = np.float32(reference_s)
        self.steps = block_size(problem)

    @functools.cached_property
    def _tables_and_sizes(self) -> tuple[Tables, Sizes]:
        """Made when they are asked for: a quarter of a second for NMT, and in a short search no chain walks."""
        return tables_of(self.problem)

    @functools.cached_property
    def tables(self) -> Tables:
        return self._tables_and_sizes[0]

    @functools.cached_property
    def sizes(self) -> Sizes:
        return self._tables_and_sizes[1]

    @functools.cached_property
    def moves(self) -> MoveTables:
        b = self.sizes.bucket
        return jax.device_put(move_tables(self.problem.space, b.operators, sets.MAX_AXES, b.op_dims, self.steps))

    @property
    def programs(self) -> Programs:
        return programs(self.sizes)

    def relative_to(self, reference_s: float) -> Engine:
        """The same, with costs relative to another."""
        other = copy.copy(self)
        other.reference_s = np.float32(reference_s)
        return other

    def prepare(self) -> None:
        """Compiles, or loads, what is not there yet: the longest beside the simulator's programs, which a search begins with."""
        arguments = self._walk_arguments()
        *_, walker, _ = arguments
        uniforms = np.zeros((BATCH, NUM_UNIFORMS), np.float32)
        with threads(2) as pool:
            longest = pool.submit(self.programs.walk.prepare, *arguments)
            self.problem.simulator.prepare()
            others = [
                pool.submit(self.programs.position.prepare, self.tables, walker.at.base),
                pool.submit(self.programs.leaps.prepare, self.moves, uniforms, walker.best),
            ]
            for each in (longest, *others):
                each.result()

    def is_at_hand(self) -> bool:
        """Whether the longest of the programs is compiled, or kept on disk, from where it is loaded."""
        return self.programs.walk.is_at_hand(*self._walk_arguments())

    def _walk_arguments(self) -> tuple[Any, ...]:
        """Arguments like those of the walk."""
        nothing_sent = np.zeros(max(self.sizes.bucket.groups, 1), np.float32)
        trace = no_trace(self.sizes.items.items, self.sizes.bucket.levels, self.sizes.bucket.groups)
        at = Position(no_base(self.sizes.bucket), trace, no_alive(self.sizes), nothing_sent)
        state, one, count = State(at.base.axes, at.base.storage), np.float32(1), np.int32(0)
        walker, uniforms = Walker(at, one, count, count, one, state), np.zeros((MOST_BLOCKS, UNIFORMS), np.float32)
        return self.tables, self.moves, one, one, uniforms, walker, count

    def walker(self, strategy: Strategy, cost: float | np.floating) -> Walker:
        """A chain that begins at `strategy`."""
        at = self.at(strategy)
        return Walker(at, np.float32(cost), np.int32(0), np.int32(0), np.float32(cost), State(at.base.axes, at.base.storage))

    def _position(self, batch: Batch, i: int, strategy: Strategy) -> Position:
        part, lane = divmod(i, LANES)
        base = base_of(self.sizes.bucket, batch.parts[part].per_record, lane, strategy.axes, strategy.storage)
        return self.programs.position(self.tables, base)

    def at(self, strategy: Strategy) -> Position:
        """A strategy taken apart."""
        batch = self.problem.simulator.batch(strategy.axes[None], strategy.storage[None])
        found = self._position(batch, 0, strategy)
        batch.done()
        return found

    def judged(self, at: Position, n: int, axes: np.ndarray, storage: np.ndarray) -> Judged:
        """Candidates int8 [Q, A] and [Q] of operator `n` beside the strategy at `at`, exactly; as NumPy arrays [Q]."""
        found = []
        for k in range(0, len(storage), CANDIDATES):
            lanes = np.minimum(np.arange(k, k + CANDIDATES), len(storage) - 1)
            padded = np.full((sets.MAX_AXES, CANDIDATES), REPLICATE, np.int8)
            padded[: axes.shape[1]] = axes[lanes].T
            some = judge_program(self.sizes)(self.tables, at, np.int32(n), padded, np.asarray(storage, np.int8)[lanes])
            found.append([np.asarray(x)[: len(storage) - k] for x in some])
        return Judged(*map(np.concatenate, zip(*found, strict=True)))

    def strategy(self, state: State) -> Strategy:
        """Without the padding."""
        num_ops, num_axes = self.problem.graph.num_operators, self.problem.space.num_axes
        return Strategy(np.asarray(state.axes)[:num_ops, :num_axes].copy(), np.asarray(state.storage)[:num_ops].copy())

    def walk(self, rng: np.random.Generator, beta: float, walker: Walker, count: int) -> Walker:
        """`count` blocks of a chain, MOST_BLOCKS at most."""
        uniforms = np.zeros((MOST_BLOCKS, UNIFORMS), np.float32)
        rng.random(dtype=np.float32, out=uniforms[:count])
        found = self.programs.walk(self.tables, self.moves, self.reference_s, np.float32(beta), uniforms, walker, np.int32(count))
        return jax.block_until_ready(found)

    def leap(self, rng: np.random.Generator, beta: float, walker: Walker, limit: int = BATCH) -> Walker:
        """Up to `limit` steps of many operators at once, simulated in full: as many as it takes to accept one."""
        state = State(walker.at.base.axes, walker.at.base.storage)
        draws = rng.random((BATCH, NUM_UNIFORMS), dtype=np.float32)
        found = jax.tree.map(np.asarray, self.programs.leaps(self.moves, draws, state))
        proposed = [self.strategy(State(a, s)) for a, s in zip(found.axes, found.storage, strict=True)]
        judged = self.problem.simulator.batch(np.stack([s.axes for s in proposed]), np.stack([s.storage for s in proposed]))
        self.problem.see(judged.scores, proposed)
        cost = np.asarray(self.problem.cost(judged.scores), np.float64) / self.reference_s
        now, uniforms = float(walker.cost), rng.random(BATCH)
        accepts = np.isfinite(cost) & (uniforms < np.exp(np.minimum(beta * (now - cost), 0.0)))
        accepts[limit:] = False
        first = int(np.argmax(accepts)) if accepts.any() else limit - 1
        lowest = int(np.argmin(cost[: first + 1]))
        if cost[lowest] < float(walker.best_cost):
            best = State(found.axes[lowest], found.storage[lowest])
            walker = walker._replace(best=best, best_cost=np.float32(cost[lowest]))
        if accepts.any():
            at = self._position(judged, first, proposed[first])
            walker = walker._replace(at=at, cost=np.float32(cost[first]), accepted=np.int32(walker.accepted + 1))
        judged.done()
        return walker
