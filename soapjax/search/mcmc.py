"""Metropolis-Hastings over the SOAP space, judging whole batches of proposals at once, exactly.

A chain draws B proposals from its *current* state, evaluates all of them in one call,
accepts the first that its uniform accepts and throws away those behind it: their draws did not depend on
what was thrown away. Draws are keyed by the Metropolis step, so B = 1 and B = 64 give the same chain.
Several chains at different temperatures start from the baselines and a random strategy, and exchange
states between rounds (parallel tempering). Costs are scaled by the best baseline, so that beta means the same for
every model. Time is looked at between rounds only, so a run that time ended is replayed by its number of proposals.

FlexFlow (Jia, Zaharia, Aiken 2019), section 6; best-so-far is kept apart from the chains.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from soapjax.search.baselines import BASELINES, replicate_all
from soapjax.search.moves import State, proposal
from soapjax.search.problem import Budget, Evaluation, PlanningProblem, SearchResult, objective
from soapjax.strategy.strategy import Strategy

NUM_CHAINS = 4
BETAS = (3200.0, 800.0, 200.0, 50.0)  # of the relative cost, coldest first
STEPS_PER_ROUND = 64  # per chain
BATCHES = (4, 16)  # speculative batch sizes per chain; the acceptance rate picks one
DEFAULT_PROPOSALS = 20_000


class Chains(NamedTuple):
    """State of C chains."""

    state: State  # axes int8 [C, N, A], storage int8 [C, N]
    cost: Array  # [C], relative to the reference
    step: Array  # int32 [C]: Metropolis steps done
    accepted: Array  # int32 [C]
    best: State  # of each chain
    best_cost: Array  # [C]


def kernel(problem: PlanningProblem, reference_s: float, batch: int) -> Callable[[Array, Chains, Array, Array], Chains]:
    """A jitted function (chain keys, chains, betas, limit) -> chains: every chain walks to step `limit`."""
    propose = proposal(problem.space)
    usable = float(problem.usable_memory_bytes)

    def costs_of(s: State) -> Array:
        return objective(problem.simulator.scores(s.axes, s.storage), usable) / reference_s

    def draws(key: Array, s: State, step: Array) -> tuple[State, Array]:
        move, uniform = jax.random.split(jax.random.fold_in(key, step))
        return propose(move, s), jax.random.uniform(uniform)

    def advance(keys: Array, chains: Chains, betas: Array, limit: Array) -> Chains:
        num_chains = chains.cost.shape[0]
        steps = chains.step[:, None] + jnp.arange(batch)  # [C, B]
        per_chain = jax.vmap(draws, (None, None, 0))
        proposed, uniforms = jax.vmap(per_chain)(keys, chains.state, steps)
        flat = jax.tree.map(lambda x: x.reshape(num_chains * batch, *x.shape[2:]), proposed)
        cost = costs_of(flat).reshape(num_chains, batch)
        # min(1, exp(beta (cost - cost'))) against a uniform; steps at the limit belong to the next round.
        ratio = jnp.exp(jnp.minimum(betas[:, None] * (chains.cost[:, None] - cost), 0.0))
        inside = steps < limit
        accepts = (uniforms < ratio) & jnp.isfinite(cost) & inside
        moved = accepts.any(axis=1)
        first = jnp.argmax(accepts, axis=1)
        consumed = jnp.where(moved, first + 1, inside.sum(axis=1))
        state = _take(moved, _at(proposed, first), chains.state)
        # Best so far: of what was consumed only, so that it does not depend on the batch size either.
        seen = jnp.where(jnp.arange(batch) < consumed[:, None], cost, jnp.inf)
        index = jnp.argmin(seen, axis=1)
        lowest = seen.min(axis=1)
        better = lowest < chains.best_cost
        return Chains(
            state,
            jnp.where(moved, jnp.take_along_axis(cost, first[:, None], 1)[:, 0], chains.cost),
            chains.step + consumed,
            chains.accepted + moved,
            _take(better, _at(proposed, index), chains.best),
            jnp.where(better, lowest, chains.best_cost),
        )

    def walk(keys: Array, chains: Chains, betas: Array, limit: Array) -> Chains:
        return jax.lax.while_loop(
            lambda c: (c.step < limit).any(), lambda c: advance(keys, c, betas, limit), chains
        )  # fmt: skip

    return jax.jit(walk)


def _at(tree: State, index: Array) -> State:
    return jax.tree.map(lambda x: x[jnp.arange(x.shape[0]), index], tree)


def _take(which: Array, a: State, b: State) -> State:
    return jax.tree.map(lambda x, y: jnp.where(which.reshape(-1, *[1] * (x.ndim - 1)), x, y), a, b)


def exchange(key: Array, chains: Chains, betas: np.ndarray, parity: int) -> Chains:
    """Replica exchange between neighbours in temperature: min(1, exp((beta_i - beta_j)(cost_i - cost_j)))."""
    order = np.arange(len(betas))
    cost = np.asarray(chains.cost, np.float64)
    uniforms = np.asarray(jax.random.uniform(key, (len(betas),)))
    for i in range(parity, len(betas) - 1, 2):
        log_ratio = (betas[i] - betas[i + 1]) * (cost[i] - cost[i + 1])
        if uniforms[i] < np.exp(min(0.0, log_ratio)):
            order[[i, i + 1]] = order[[i + 1, i]]
    return chains._replace(state=jax.tree.map(lambda x: x[order], chains.state), cost=chains.cost[order])


def starts(rng_key: Array, problem: PlanningProblem) -> list[Evaluation]:
    """Distinct starting points, best first: every baseline, the replicated strategy, and random ones."""
    seed = int(jax.random.randint(rng_key, (), 0, np.iinfo(np.int32).max))
    rng = np.random.default_rng(seed)
    found = [planner(rng_key, problem, Budget()).best.strategy for planner in BASELINES.values()]
    found += [replicate_all(problem), *(problem.space.random(rng) for _ in range(NUM_CHAINS))]
    unique = {s.key(): s for s in found}
    return sorted(problem.evaluate(list(unique.values())), key=lambda e: (not e.is_feasible, e.cost))


def _batch_for(rate: float, budget: Budget, limit: int | None, done: int, elapsed: float) -> int:
    """Small batches where most proposals are accepted (the rest is thrown away), if what is left pays for another compilation."""
    left = limit - done * NUM_CHAINS if limit is not None else 0
    long = left > 20_000 or (budget.seconds is not None and budget.seconds - elapsed > 60)
    return BATCHES[0] if rate > 0.5 and long else BATCHES[-1]


def mcmc(rng_key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
    """Searches until the budget is spent, or until half of it brought no improvement (as in the paper)."""
    begin = time.monotonic()
    start_key, chain_key, swap_key = jax.random.split(rng_key, 3)
    begun = starts(start_key, problem)
    reference_s = begun[0].cost
    chosen = [begun[min(i, len(begun) - 1)] for i in range(NUM_CHAINS - 1)] + [begun[-1]]
    state = State(
        jnp.stack([jnp.asarray(e.strategy.axes) for e in chosen]), jnp.stack([jnp.asarray(e.strategy.storage) for e in chosen])
    )
    cost = jnp.asarray([e.cost / reference_s for e in chosen], jnp.float32)
    zeros = jnp.zeros(NUM_CHAINS, jnp.int32)
    chains = Chains(state, cost, zeros, zeros, state, cost)
    keys = jax.random.split(chain_key, NUM_CHAINS)
    betas = np.array(BETAS[:NUM_CHAINS])
    kernels: dict[int, Callable] = {}
    limit = budget.num_proposals
    if limit is None and budget.seconds is None:
        limit = DEFAULT_PROPOSALS
    per_chain = None if limit is None else -(-limit // NUM_CHAINS)
    best_cost, best_at, rounds, done, batch = float(cost.min()), 0.0, 0, 0, BATCHES[-1]
    history = [(0, 0.0, begun[0].step_time_s)]
    stopped_by = "proposals"
    try:
        while per_chain is None or done < per_chain:
            elapsed = time.monotonic() - begin
            if budget.seconds is not None and elapsed >= budget.seconds:
                stopped_by = "seconds"
                break
            target = done + STEPS_PER_ROUND if per_chain is None else min(done + STEPS_PER_ROUND, per_chain)
            if batch not in kernels:
                kernels[batch] = kernel(problem, reference_s, batch)
            before = np.asarray(chains.accepted).sum()
            moved = kernels[batch](keys, chains, jnp.asarray(betas, jnp.float32), jnp.int32(target))
            rate = (np.asarray(moved.accepted).sum() - before) / max(1, (target - done) * NUM_CHAINS)
            chains = exchange(jax.random.fold_in(swap_key, rounds), moved, betas, rounds % 2)
            done, rounds = target, rounds + 1
            batch = _batch_for(rate, budget, limit, done, elapsed)
            elapsed = time.monotonic() - begin
            lowest = float(np.asarray(chains.best_cost).min())
            if lowest < best_cost:
                best_cost, best_at = lowest, elapsed
                history.append((done * NUM_CHAINS, elapsed, lowest * reference_s))
            if budget.progress is not None:
                budget.progress(done * NUM_CHAINS, best_cost * reference_s, elapsed)
            if budget.seconds is not None and limit is None and elapsed - best_at > budget.seconds / 2:
                stopped_by = "converged"
                break
    except KeyboardInterrupt:
        stopped_by = "interrupted"
    candidates = [begun[0].strategy]
    for c in range(NUM_CHAINS):
        candidates.append(Strategy(np.asarray(chains.best.axes[c]), np.asarray(chains.best.storage[c])))
    best = min(problem.evaluate(candidates), key=lambda e: (not e.is_feasible, e.cost))
    return SearchResult(best, done * NUM_CHAINS, time.monotonic() - begin, stopped_by, tuple(history))
