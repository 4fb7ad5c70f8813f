"""Memory after a change: the peak of what is alive, updated with what one operator's config moves.

A candidate that fits even if everything it adds were alive at the peak fits; only where that bound does not, the
timeline of live bytes is added up again, from the one of the strategy as it is. Both give the same cost, since
the cost looks at memory only beyond what is usable; the figure itself is exact where it counts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from soapjax.costs.change import Arrays, Base, Change
from soapjax.costs.local import LocalTables


class Alive(NamedTuple):
    """Of the strategy as it is, per group of devices."""

    live: Array  # [G, K]: gradients and activations during each task, bytes
    persistent: Array  # [G]: parameters and optimizer state


def _spans(arrays: Arrays, edge: Array, since: Array, num_tasks: int) -> tuple[Array, Array]:
    """First task of a converted copy and the one behind its last."""
    task = jnp.minimum(arrays.edge_task[edge], num_tasks - 1)
    return jnp.where(since > 0, since, task), task + 1


def alive(arrays: Arrays, base: Base) -> Alive:
    """Sums up the whole strategy."""
    num_tasks = len(base.compute_s) - 1
    counted = arrays.death >= 0
    every = jnp.arange(len(base.copy))
    start, stop = _spans(arrays, every, base.since, num_tasks)
    held = jnp.where(counted, base.held, 0.0)[:, None] * base.on_home
    copies = base.copy[:, None] * base.on_copy
    steps = jnp.zeros((num_tasks + 2, base.on_home.shape[1]))
    steps = steps.at[arrays.birth].add(held).at[arrays.death + 1].add(-held)
    steps = steps.at[start].add(copies).at[stop].add(-copies)
    return Alive(jnp.cumsum(steps, 0)[:num_tasks].T, (base.stored[:, None] * base.on_stored).sum(0))


def memory_after(
    arrays: Arrays, now: Alive, base: Base, row: LocalTables, found: Change, usable_bytes: Array | float
) -> Array:
    """Bytes per device [Q] of the strategy of `base` under each change of `found`; an upper bound where all candidates fit."""
    t, e, p = row.tensor, row.edge, row.parameter
    transient = jnp.maximum(base.transient.at[t].set(0.0).max(), found.transient.max(1))
    counted = (arrays.death[t] >= 0)[:, None]
    before = jnp.where(counted, base.held[t][:, None] * base.on_home[t], 0.0)
    after = jnp.where(counted, found.held[..., None] * found.on_home, 0.0)  # [Q, t, G]
    stored = found.stored[..., None] * found.on_stored - base.stored[p][:, None] * base.on_stored[p]
    persistent = now.persistent + stored.sum(1)  # [Q, G]
    added = jnp.maximum(after - before, 0).sum(1) + (found.copy[..., None] * found.on_copy).sum(1)
    added = added + jnp.where(found.heir < len(base.copy) - 1, base.copy[found.heir], 0.0).sum(1)[:, None]
    bound = (persistent + now.live.max(1) + added).max(1) + transient

    def exactly() -> Array:
        num_tasks = now.live.shape[1]
        after_death = arrays.death[t] + 1
        old_start, stop = _spans(arrays, e, base.since[e], num_tasks)
        old_copy = base.copy[e][:, None] * base.on_copy[e]
        own_steps = jnp.zeros((num_tasks + 2, before.shape[1])).at[arrays.birth[t]].add(-before).at[after_death].add(before)
        own_steps = own_steps.at[old_start].add(-old_copy).at[stop].add(old_copy)

        def peak(after: Array, found: Change, persistent: Array) -> Array:
            start, _ = _spans(arrays, e, found.since, num_tasks)
            copy = found.copy[:, None] * found.on_copy
            steps = own_steps.at[arrays.birth[t]].add(after).at[after_death].add(-after)
            steps = steps.at[start].add(copy).at[stop].add(-copy)
            # Of conversions that several of the operator's readers name as their heir, one.
            again = (found.heir[:, None] == found.heir) & (jnp.arange(len(found.heir)) < jnp.arange(len(found.heir))[:, None])
            h = jnp.where(again.any(1), len(base.copy) - 1, found.heir)
            was, ends = _spans(arrays, h, base.since[h], num_tasks)
            now_from, _ = _spans(arrays, h, found.heir_since, num_tasks)
            moved = base.copy[h][:, None] * base.on_copy[h]
            del ends  # a copy's end is its reader, whoever pays
            steps = steps.at[was].add(-moved).at[now_from].add(moved)
            live = now.live + jnp.cumsum(steps, 0)[:num_tasks].T
            return (persistent + live.max(1)).max()

        return jax.vmap(peak)(after, found, persistent) + transient

    return jax.lax.cond((bound > usable_bytes).any(), exactly, lambda: bound)
