"""One chain: a block of Metropolis-Hastings steps in one operator's neighbourhood (see mcmc.py), and swaps between chains."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from soapjax.search.moves import State, choices_of, pick
from soapjax.search.neighbourhood import Judged, Neighbourhoods, Position, Tables
from soapjax.search.problem import PlanningProblem
from soapjax.strategy.space import SearchSpace

MAX_AXES = 4  # that one block moves


def block_size(problem: PlanningProblem) -> int:
    """Steps of a block: a quarter of what a typical operator can choose from on the axes of a block, a power of two."""
    _, counts = choices_of(problem.space)
    options = np.median([np.prod(np.sort(c)[::-1][:MAX_AXES]) for c in counts]) if len(counts) else 1
    options *= len(problem.space.storages) if problem.space.owns_parameters.any() else 1
    return int(2 ** np.clip(np.ceil(np.log2(max(options / 4, 1))), 4, 8))


class Walker(NamedTuple):
    """One chain."""

    at: Position
    cost: Array  # []: relative to the reference
    accepted: Array  # int32 []: changes of config
    best_cost: Array  # []: among all that was judged
    best: State


Draws = Callable[[Array, Array, Array], tuple[Array, Array, Array, Array]]


def block_draws(space: SearchSpace, steps: int) -> Draws:
    """A pure function (key, axes [N, A], storage [N]) -> operator [], candidates (axes [Q, A], storage [Q]), uniforms [Q]."""
    values, counts = choices_of(space)
    free = np.flatnonzero((counts > 1).any(axis=1) | space.owns_parameters)
    free = free if len(free) else np.zeros(1, np.int64)
    num_axes, num_storages = space.num_axes, len(space.storages)
    owns = jnp.asarray(space.owns_parameters)
    values, counts, free = jnp.asarray(values), jnp.asarray(counts), jnp.asarray(free)

    def draws(key: Array, base_axes: Array, base_storage: Array) -> tuple[Array, Array, Array, Array]:
        which, of_axes, of_values, of_storage, of_steps = jax.random.split(key, 5)
        u = jax.random.uniform(which, (3,))
        n = free[pick(u[0], len(free))]
        order = jnp.argsort(jax.random.uniform(of_axes, (num_axes,)))
        # One to MAX_AXES axes: few of them are tried out completely, many reach further.
        moves = order < 1 + pick(u[2], MAX_AXES)
        index = pick(jax.random.uniform(of_values, (steps, num_axes)), counts[n])
        axes = jnp.where(moves, values[n, jnp.arange(num_axes), index], base_axes[n])
        # Half of the blocks of an operator with parameters draw their storage too.
        drawn = pick(jax.random.uniform(of_storage, (steps,)), num_storages).astype(jnp.int8)
        storage = jnp.where(owns[n] & (u[1] < 0.5), drawn, base_storage[n])
        return n, axes, storage, jax.random.uniform(of_steps, (steps,))

    return draws


def block_kernel(near: Neighbourhoods, reference_s: Array, draws: Draws) -> Callable[[Tables, Array, Array, Walker], Walker]:
    """A pure function (tables, key, beta, walker) -> walker: one block."""

    def block(tables: Tables, key: Array, beta: Array, walker: Walker) -> Walker:
        base = walker.at.base
        n, axes, storage, uniforms = draws(key, base.axes, base.storage)

        def metropolis(judged: Judged) -> tuple[tuple[Array, ...], Array]:
            cost = judged.cost_s / reference_s

            def step(state: tuple[Array, Array, Array], x: tuple[Array, Array, Array]):
                now, chosen, accepted = state
                q, proposed, uniform = x
                # min(1, exp(beta (cost - cost'))) against a uniform.
                moved = (uniform < jnp.exp(jnp.minimum(beta * (now - proposed), 0.0))) & jnp.isfinite(proposed)
                return (jnp.where(moved, proposed, now), jnp.where(moved, q, chosen), accepted + moved), None

            inputs = (jnp.arange(len(cost), dtype=jnp.int32), cost, uniforms)
            (now, chosen, accepted), _ = jax.lax.scan(step, (walker.cost, jnp.int32(-1), walker.accepted), inputs)
            q = jnp.maximum(chosen, 0)
            is_new = (axes[q] != base.axes[n]).any() | (storage[q] != base.storage[n])
            lowest = jnp.argmin(cost)
            return (now, accepted, lowest, cost[lowest]), jnp.where(is_new, chosen, -1)

        (now, accepted, lowest, lowest_cost), at = near.judge_and_move(tables, walker.at, n, axes, storage, metropolis)
        better = lowest_cost < walker.best_cost
        best = State(
            jnp.where(better, base.axes.at[n].set(axes[lowest]), walker.best.axes),
            jnp.where(better, base.storage.at[n].set(storage[lowest]), walker.best.storage),
        )
        return Walker(at, now, accepted, jnp.minimum(lowest_cost, walker.best_cost), best)

    return block


def exchange(key: Array, walkers: list[Walker], betas: np.ndarray, parity: int) -> list[Walker]:
    """Replica exchange between neighbours in temperature: min(1, exp((beta_i - beta_j)(cost_i - cost_j)))."""
    walkers, uniforms = list(walkers), np.asarray(jax.random.uniform(key, (len(betas),)))
    for i in range(parity, len(betas) - 1, 2):
        log_ratio = (betas[i] - betas[i + 1]) * (float(walkers[i].cost) - float(walkers[i + 1].cost))
        if uniforms[i] < np.exp(min(0.0, log_ratio)):
            walkers[i], walkers[i + 1] = walkers[i + 1], walkers[i]
    return walkers
