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
from soapjax.costs.indexing import add, put, rows
from soapjax.costs.local import LocalTables


class Alive(NamedTuple):
    """Of the strategy as it is, per group of devices."""

    live: Array  # [G, K]: gradients and activations during each task, bytes
    persistent: Array  # [G]: parameters and optimizer state


def _spans(arrays: Arrays, edge: Array, since: Array, num_tasks: int) -> tuple[Array, Array]:
    """First task of a converted copy and the one behind its last."""
    task = jnp.minimum(rows(arrays.edge_task, edge), num_tasks - 1)
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
    steps = add(add(steps, arrays.birth, held), arrays.death + 1, -held)
    steps = add(add(steps, start, copies), stop, -copies)
    return Alive(jnp.cumsum(steps, 0)[:num_tasks].T, (base.stored[:, None] * base.on_stored).sum(0))


def memory_after(
    arrays: Arrays, now: Alive, base: Base, row: LocalTables, found: Change, usable_bytes: Array | float
) -> Array:
    """Bytes per device [Q] of the strategy of `base` under each change of `found`; an upper bound where all candidates fit."""
    t, e, p = row.tensor, row.edge, row.parameter
    transient = jnp.maximum(put(base.transient, t, 0.0).max(), found.transient.max(1))
    counted = (rows(arrays.death, t) >= 0)[:, None]
    before = jnp.where(counted, rows(base.held, t)[:, None] * rows(base.on_home, t), 0.0)
    after = jnp.where(counted, found.held[..., None] * found.on_home, 0.0)  # [Q, t, G]
    stored = found.stored[..., None] * found.on_stored - rows(base.stored, p)[:, None] * rows(base.on_stored, p)
    persistent = now.persistent + stored.sum(1)  # [Q, G]
    added = jnp.maximum(after - before, 0).sum(1) + (found.copy[..., None] * found.on_copy).sum(1)
    added = added + jnp.where(found.heir < len(base.copy) - 1, rows(base.copy, found.heir), 0.0).sum(1)[:, None]
    bound = (persistent + now.live.max(1) + added).max(1) + transient

    def exactly() -> Array:
        num_tasks = now.live.shape[1]
        birth, after_death = rows(arrays.birth, t), rows(arrays.death, t) + 1
        old_start, stop = _spans(arrays, e, rows(base.since, e), num_tasks)
        old_copy = rows(base.copy, e)[:, None] * rows(base.on_copy, e)
        own_steps = jnp.zeros((num_tasks + 2, before.shape[1]))
        own_steps = add(add(own_steps, birth, -before), after_death, before)
        own_steps = add(add(own_steps, old_start, -old_copy), stop, old_copy)

        def peak(after: Array, found: Change, persistent: Array) -> Array:
            start, _ = _spans(arrays, e, found.since, num_tasks)
            copy = found.copy[:, None] * found.on_copy
            steps = add(add(own_steps, birth, after), after_death, -after)
            steps = add(add(steps, start, copy), stop, -copy)
            # Of conversions that several of the operator's readers name as their heir, one.
            again = (found.heir[:, None] == found.heir) & (jnp.arange(len(found.heir)) < jnp.arange(len(found.heir))[:, None])
            h = jnp.where(again.any(1), len(base.copy) - 1, found.heir)
            was, _ = _spans(arrays, h, rows(base.since, h), num_tasks)  # a copy's end is its reader, whoever pays
            now_from, _ = _spans(arrays, h, found.heir_since, num_tasks)
            moved = rows(base.copy, h)[:, None] * rows(base.on_copy, h)
            steps = add(add(steps, was, -moved), now_from, moved)
            live = now.live + jnp.cumsum(steps, 0)[:num_tasks].T
            return (persistent + live.max(1)).max()

        return jax.vmap(peak)(after, found, persistent) + transient

    return jax.lax.cond((bound > usable_bytes).any(), exactly, lambda: bound)
