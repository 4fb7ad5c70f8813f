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
from soapjax.costs.layouts import held_until, needed_until, waiting_spans
from soapjax.costs.local import LocalTables


class Alive(NamedTuple):
    """Of the strategy as it is, per group of devices; bytes during each task."""

    used: Array  # [G, K]: gradients and activations, converted copies, work space
    waiting: Array  # [G, K, 2]: gradients that wait for an all-reduce, and for a reduce-scatter
    persistent: Array  # [G]: parameters and optimizer state
    needed: Array  # int32 [E + 1]: until when each conversion needs its tensor
    until: Array  # int32 [T + 1]: until when each tensor is kept


def _spans(arrays: Arrays, edge: Array, since: Array, num_tasks: int) -> tuple[Array, Array]:
    """First task of a converted copy and the one behind its last."""
    task = jnp.minimum(rows(arrays.read_at, edge), num_tasks - 1)
    made = jnp.minimum(rows(arrays.made_at, edge), task)
    return jnp.where(since > 0, jnp.minimum(since, task), made), task + 1


def _tensor_steps(
    arrays: Arrays, t: Array, until: Array, held: Array, passing: Array, waiting: Array, num_tasks: int
) -> tuple[Array, Array]:
    """By how much tensors `t` change what is used [K + 2, G] and what waits [K + 2, G, 2], task by task.

    until [t]: the last task that needs it. held, passing [t, G] and waiting [t, G, 2]: bytes until then, while it is made, and
    until its parameter's update.
    """
    birth, death = rows(arrays.birth, t), rows(arrays.death, t)
    leaves = jnp.where(rows(arrays.waits, t), birth, until)
    held = jnp.where((death >= 0)[:, None], held, 0.0)
    used = jnp.zeros((num_tasks + 2, held.shape[1]))
    used = add(add(used, birth, held + passing), leaves + 1, -held)
    used = add(used, birth + 1, -passing)
    waits = jnp.zeros((num_tasks + 2, *waiting.shape[1:]))
    for size, since in waiting_spans(waiting, leaves, arrays.operand_share, arrays.merged_at):
        waits = add(add(waits, since, size), jnp.maximum(death + 1, since), -size)
    return used, waits


def alive(arrays: Arrays, base: Base) -> Alive:
    """Sums up the whole strategy."""
    num_tasks = len(base.compute_s) - 1
    every = jnp.arange(len(base.copy))
    start, stop = _spans(arrays, every, base.since, num_tasks)
    copies = base.copy[:, None] * base.on_copy
    held, passing = base.held[:, None] * base.on_home, base.passing[:, None] * base.on_resolve
    waiting = base.waiting[:, None] * base.on_home[..., None]
    needed = needed_until(base.since, base.sent, arrays.made_at, arrays.read_at).at[-1].set(-1)
    until = held_until(needed, arrays.edge_tensor, arrays.at_least, arrays.death)
    used, waits = _tensor_steps(arrays, jnp.arange(len(base.held)), until, held, passing, waiting, num_tasks)
    used = add(add(used, start, copies), stop, -copies)
    used, waits = (jnp.swapaxes(jnp.cumsum(x, 0)[:num_tasks], 0, 1) for x in (used, waits))
    return Alive(used, waits, (base.stored[:, None] * base.on_stored).sum(0), needed, until)


def memory_after(
    arrays: Arrays, now: Alive, base: Base, row: LocalTables, found: Change, usable_bytes: Array | float
) -> Array:
    """Bytes per device [Q] of the strategy of `base` under each change of `found`; an upper bound where all candidates fit."""
    t, e, p = row.tensor, row.edge, row.parameter
    on_home, on_made = rows(base.on_home, t), rows(base.on_resolve, t)
    held, passing, waiting = (rows(x, t)[:, None] for x in (base.held, base.passing, base.waiting))
    before = held * on_home, passing * on_made, waiting * on_home[..., None]
    # [Q, t, G], the last [Q, t, G, 2]
    after = (
        found.held[..., None] * found.on_home, found.passing[..., None] * found.on_resolve,
        found.waiting[:, :, None] * found.on_home[..., None],
    )  # fmt: skip
    stored = found.stored[..., None] * found.on_stored - rows(base.stored, p)[:, None] * rows(base.on_stored, p)
    persistent = now.persistent + stored.sum(1)  # [Q, G]
    counted = (rows(arrays.death, t) >= 0)[:, None]
    more = [jnp.maximum(a - b, 0) for a, b in zip(after, before, strict=True)]
    added = (jnp.where(counted, more[0], 0.0) + more[1] + more[2].sum(-1)).sum(1)
    added = added + (found.copy[..., None] * found.on_copy).sum(1)
    added = added + jnp.where(found.heir < len(base.copy) - 1, rows(base.copy, found.heir), 0.0).sum(1)[:, None]
    # Who has a copy no more, or one less, needs the tensor itself longer.
    num_heirs = found.heir.shape[1] // 2
    own_needed = needed_until(found.since, found.sent, rows(arrays.made_at, e), rows(arrays.read_at, e))  # [Q, e]
    heir_places = rows(arrays.made_at, found.heir), rows(arrays.read_at, found.heir)
    heir_needed = needed_until(found.heir_since, rows(base.sent, found.heir), *heir_places)
    heir_needed = jnp.where(found.heir < len(base.copy) - 1, heir_needed, -1)  # [Q, 2o]
    own_longer, heir_longer = own_needed > rows(now.needed, e), heir_needed > rows(now.needed, found.heir)
    kept = jnp.where(counted, after[0], 0.0)  # [Q, t, G]
    heir_tensor = jnp.tile(row.edge_tensor[:num_heirs], 2)
    added = added + (jnp.where(own_longer[..., None], kept[:, row.edge_tensor], 0.0)).sum(1)
    added = added + (jnp.where(heir_longer[..., None], kept[:, heir_tensor], 0.0)).sum(1)

    def peak_of(used: Array, waits: Array) -> Array:
        """[G]"""
        return (used + jnp.minimum(waits, arrays.most_waiting).sum(-1)).max(1)

    bound = (persistent + peak_of(now.used, now.waiting) + added).max(1)

    def exactly() -> Array:
        num_tasks = now.used.shape[1]
        old_start, stop = _spans(arrays, e, rows(base.since, e), num_tasks)
        old_copy = rows(base.copy, e)[:, None] * rows(base.on_copy, e)
        own_used, own_waits = (-x for x in _tensor_steps(arrays, t, rows(now.until, t), *before, num_tasks))
        own_used = add(add(own_used, old_start, -old_copy), stop, old_copy)

        def peak(
            after: tuple[Array, Array, Array], found: Change, persistent: Array, own_needed: Array, heir_needed: Array
        ) -> Array:  # fmt: skip
            needed = put(put(now.needed, found.heir, heir_needed), e, own_needed).at[-1].set(-1)
            until = held_until(needed, arrays.edge_tensor, arrays.at_least, arrays.death)
            used, waits = _tensor_steps(arrays, t, rows(until, t), *after, num_tasks)
            start, _ = _spans(arrays, e, found.since, num_tasks)
            copy = found.copy[:, None] * found.on_copy
            steps = add(add(own_used + used, start, copy), stop, -copy)
            # Of conversions that several of the operator's readers name as their heir, one.
            again = (found.heir[:, None] == found.heir) & (jnp.arange(len(found.heir)) < jnp.arange(len(found.heir))[:, None])
            h = jnp.where(again.any(1), len(base.copy) - 1, found.heir)
            was, _ = _spans(arrays, h, rows(base.since, h), num_tasks)  # a copy's end is its reader, whoever pays
            now_from, _ = _spans(arrays, h, found.heir_since, num_tasks)
            moved = rows(base.copy, h)[:, None] * rows(base.on_copy, h)
            steps = add(add(steps, was, -moved), now_from, moved)
            used, waits = (jnp.swapaxes(jnp.cumsum(x, 0)[:num_tasks], 0, 1) for x in (steps, own_waits + waits))
            return (persistent + peak_of(now.used + used, now.waiting + waits)).max()

        return jax.vmap(peak)(after, found, persistent, own_needed, heir_needed)

    return jax.lax.cond((bound > usable_bytes).any(), exactly, lambda: bound)
