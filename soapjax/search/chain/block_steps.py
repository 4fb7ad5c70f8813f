"""One chain: blocks of Metropolis-Hastings steps in one operator's neighbourhood (see mcmc_planner.py), and swaps between chains.

The walking program is one for all problems of a bucket: of a block's steps, whose draws repeat, each distinct config is judged
once, in one of LANES lanes; where they are more than there are lanes the block ends.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from soapjax.costs.memory.memory_change import Alive
from soapjax.costs.rules import sets
from soapjax.costs.rules.base import Base
from soapjax.costs.tables.buckets import Bucket
from soapjax.jit.array_types import Array, Scalar
from soapjax.jit.kernel import in_kernel, put, row
from soapjax.jit.programs import PlannerProgram
from soapjax.search.chain.moves import MoveTables, State, choices_of, leap, pick
from soapjax.search.chain.neighbourhood import Judged, Position, Sizes, Tables, judge, move, position, scratch_of
from soapjax.search.problem import PlanningProblem
from soapjax.simulate.simulated_trace import Trace

MAX_AXES = 4  # that one block moves
MAX_STEPS, LANES = 256, 128  # of a block


def block_size(problem: PlanningProblem) -> int:
    """Steps of a block: a quarter of what a typical operator can choose from on the axes of a block, a power of two."""
    _, counts = choices_of(problem.space)
    options = np.median([np.prod(np.sort(c)[::-1][:MAX_AXES]) for c in counts]) if len(counts) else 1
    options *= len(problem.space.storages) if problem.space.owns_parameters.any() else 1
    return int(2 ** np.clip(np.ceil(np.log2(max(options / 4, 1))), 4, np.log2(MAX_STEPS)))


class Walker(NamedTuple):
    """One chain."""

    at: Position
    cost: Scalar  # []: relative to the reference
    accepted: Scalar  # int32 []: changes of config
    steps: Scalar  # int32 []: that were taken
    best_cost: Scalar  # []: among all that was judged
    best: State


class Draws(NamedTuple):
    """Of one block."""

    operator: Scalar  # int32 []
    axes: Array  # int8 [A, MAX_STEPS]
    storage: Array  # int8 [MAX_STEPS]
    config: Array  # int32 [MAX_STEPS]: one number for each distinct candidate
    uniforms: Array  # float32 [MAX_STEPS]


UNIFORMS = 3 + sets.MAX_AXES + (sets.MAX_AXES + 2) * MAX_STEPS  # of one block


def draws(m: MoveTables, u: Array, axes: Array, storage: Array) -> Draws:
    """A block's operator and the candidate of every step, beside a strategy int8 [N, A] and [N], by uniforms [UNIFORMS].

    The caller draws these, so that no generator is compiled.
    """
    num_axes = m.values.shape[1]
    n = row(m.free, pick(u[0], m.num_free))
    # One to MAX_AXES axes: few of them are tried out completely, many reach further.
    order = jnp.where(jnp.arange(num_axes) < m.num_axes, u[3 : 3 + num_axes], 2.0)
    rank = (order[:, None] > order).sum(1)
    moves = (rank < 1 + pick(u[2], MAX_AXES)) & (order < 2)
    rest = u[3 + num_axes :].reshape(num_axes + 2, MAX_STEPS)
    values, counts = row(m.values, n), row(m.counts, n)
    drawn = jnp.take_along_axis(values, pick(rest[:num_axes], counts[:, None]), 1, mode="promise_in_bounds")
    found = jnp.where(moves[:, None], drawn, row(axes, n)[:, None])
    # Half of the blocks of an operator with parameters draw their storage too.
    of_storage = pick(rest[num_axes], m.num_storages).astype(jnp.int8)
    stored = jnp.where(row(m.owns, n) & (u[1] < 0.5), of_storage, row(storage, n))
    # Six bits for each of the axes that move, and the storage above.
    shift = jnp.where(moves, 6 * rank, 0)[:, None]
    config = jnp.where(moves[:, None], (found.astype(jnp.int32) + 2**sets.DIGITS) << shift, 0).sum(0)
    return Draws(n, found, stored, config + (stored.astype(jnp.int32) << (6 * MAX_AXES)), rest[num_axes + 1])


class Lanes(NamedTuple):
    """Which distinct configs a block's steps ask for."""

    of_step: Array  # int32 [MAX_STEPS]
    first: Array  # int32 [LANES]: the first step of each
    held: Scalar  # int32 []: so many steps are judged


def lanes_of(config: Array, steps: Array | Scalar) -> Lanes:
    """Of candidates `config` int32 [M], of which the first `steps` count."""

    def find(config: Array, steps: Array) -> tuple[Array, Array, Array]:
        lanes = jnp.arange(LANES)

        def step(i: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            seen, of_step, first, count, held = state
            here = row(config, i)
            at = jnp.where((seen == here) & (lanes < count), lanes, LANES).min()
            is_new = (at == LANES) & (count < LANES)
            at = jnp.where(is_new, count, at)
            to = jnp.minimum(at, LANES - 1)
            fits = (at < LANES) & (held == i)
            seen, first = (put(x, to, jnp.where(is_new, value, row(x, to))) for x, value in ((seen, here), (first, i)))
            return seen, put(of_step, i, to), first, count + is_new.astype(jnp.int32), held + fits.astype(jnp.int32)

        none, zero = jnp.zeros(LANES, jnp.int32), jnp.int32(0)
        _, of_step, first, _, held = lax.fori_loop(0, steps, step, (none, jnp.zeros(MAX_STEPS, jnp.int32), none, zero, zero))
        return of_step, first, held

    return Lanes(*in_kernel(find, config, steps))


def metropolis(
    cost: Array, uniforms: Array, of_step: Array, beta: Array, now: Array, accepted: Array, held: Array
) -> tuple[Array, ...]:  # fmt: skip
    """(cost, lane or -1, accepted) after `held` steps, and the lane of the least cost and that."""

    def step(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        now, chosen, accepted = state
        lane = row(of_step, i)
        proposed = row(cost, lane)
        # min(1, exp(beta (cost - cost'))) against a uniform.
        moves = (row(uniforms, i) < jnp.exp(jnp.minimum(beta * (now - proposed), 0.0))) & (proposed < jnp.inf)
        return jnp.where(moves, proposed, now), jnp.where(moves, lane, chosen), accepted + moves.astype(jnp.int32)

    def least(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        return jnp.where(row(cost, i) < state[1], i, state[0]), jnp.minimum(row(cost, i), state[1])

    found = lax.fori_loop(0, held, step, (now, jnp.int32(-1), accepted))
    return *found, *lax.fori_loop(0, LANES, least, (jnp.int32(0), jnp.float32(jnp.inf)))


def block(
    tables: Tables, moves: MoveTables, sizes: Sizes, reference_s: Array, beta: Array, uniforms: Array, state: tuple
) -> tuple:  # fmt: skip
    """One block of steps of a (walker, scratch)."""
    walker, into = state
    base = walker.at.base
    drawn = draws(moves, uniforms, base.axes, base.storage)
    n, lanes = drawn.operator, lanes_of(drawn.config, moves.steps)
    axes, storage = drawn.axes[:, lanes.first], drawn.storage[lanes.first]
    judged, effects, alive, into = judge(tables, sizes, walker.at, into, n, axes, storage)
    now, chosen, accepted, lowest, least = in_kernel(
        metropolis, judged.cost_s / reference_s, drawn.uniforms, lanes.of_step, beta, walker.cost, walker.accepted, lanes.held
    )
    q = jnp.maximum(chosen, 0)
    is_new = (chosen >= 0) & ((axes[:, q] != row(base.axes, n)).any() | (storage[q] != row(base.storage, n)))
    at = move(
        tables, sizes, walker.at, into, effects, alive, n=n, q=q, axes=axes, storage=storage, is_wanted=is_new
    )  # fmt: skip
    is_better = least < walker.best_cost
    best = State(
        jnp.where(is_better, put(base.axes, n, axes[:, lowest]), walker.best.axes),
        jnp.where(is_better, put(base.storage, n, storage[lowest]), walker.best.storage),
    )
    return Walker(at, now, accepted, walker.steps + lanes.held, jnp.minimum(least, walker.best_cost), best), into


class Programs(NamedTuple):
    """Of one bucket."""

    position: PlannerProgram  # (tables, base) -> position
    walk: PlannerProgram  # (tables, moves, reference_s, beta, uniforms [M, UNIFORMS], walker, count) -> walker after so many blocks
    leaps: PlannerProgram  # (moves, uniforms [BATCH, NUM_UNIFORMS], state) -> BATCH states


MOST_BLOCKS = 64  # of one call


@functools.cache
def programs(sizes: Sizes) -> Programs:
    def take_apart(tables: Tables, base: Base) -> Position:
        return position(tables, sizes, base)

    def walk(
        tables: Tables, moves: MoveTables, reference_s: Array, beta: Array, uniforms: Array, walker: Walker, count: Array
    ) -> Walker:
        def one(i: Array, state: tuple) -> tuple:
            return block(tables, moves, sizes, reference_s, beta, row(uniforms, i), state)

        return lax.fori_loop(0, count, one, (walker, scratch_of(tables, sizes, LANES)))[0]

    at = Position._make([_zeros(Base), _zeros(Trace), _zeros(Alive), 0])
    return Programs(
        PlannerProgram(take_apart, name=f"position {sizes}", results=at, is_urgent=True),
        PlannerProgram(walk, name=f"walk {sizes}", results=Walker._make([at, 0, 0, 0, 0, _zeros(State)])),
        leaps_program(sizes.bucket),
    )  # fmt: skip


def _zeros(of: type[NamedTuple]) -> Any:
    """A tree like the results of that type."""
    return of._make([0] * len(of._fields))


@functools.cache
def judge_program(sizes: Sizes) -> PlannerProgram:
    """(tables, position, operator, axes int8 [A, LANES], storage int8 [LANES]) -> `Judged`: candidates, and no step."""

    def run(tables: Tables, at: Position, n: Array, axes: Array, storage: Array) -> Judged:
        return judge(tables, sizes, at, scratch_of(tables, sizes, LANES), n, axes, storage)[0]

    return PlannerProgram(run, name=f"judge {sizes}", results=_zeros(Judged), is_urgent=True)


@functools.cache
def leaps_program(b: Bucket) -> PlannerProgram:
    def leaps(moves: MoveTables, uniforms: Array, state: State) -> State:
        return jax.vmap(lambda u: leap(moves, u, state, pins=bool(b.groups)))(uniforms)

    return PlannerProgram(leaps, name=f"leaps {b}", results=_zeros(State), is_urgent=True)


def exchange(rng: np.random.Generator, walkers: list[Walker], betas: np.ndarray, parity: int) -> list[Walker]:
    """Replica exchange between neighbours in temperature: min(1, exp((beta_i - beta_j)(cost_i - cost_j)))."""
    walkers, uniforms = list(walkers), rng.random(len(betas))
    for i in range(parity, len(betas) - 1, 2):
        log_ratio = (betas[i] - betas[i + 1]) * (float(walkers[i].cost) - float(walkers[i + 1].cost))
        if uniforms[i] < np.exp(min(0.0, log_ratio)):
            walkers[i], walkers[i + 1] = walkers[i + 1], walkers[i]
    return walkers

