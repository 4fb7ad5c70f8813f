"""Memory after a change: an upper bound where that fits, and where it does not the steps of what is alive, with the change.

The cost looks at memory only beyond what is usable, and a candidate that fits even if all that it holds were alive at the peak
fits. So what is alive under the strategy as it is need not be known at every step of a chain: `Alive` may be of an earlier
strategy, with the bytes that changes since then may have added at the most.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from soapjax.costs.memory.peak_memory import Lives, held_since, needed_until, no_steps, steps_of, stored_bytes, waited
from soapjax.costs.rules.base import Base, Change, span
from soapjax.costs.rules.copies import Readers
from soapjax.costs.rules.sets import only_if
from soapjax.costs.tables.arrays import CostArrays
from soapjax.costs.tables.operator_records import OwnRecords
from soapjax.jit.array_types import Array, Scalar
from soapjax.jit.kernel import added, added_at, put, row


class Alive(NamedTuple):
    """Of one strategy, bytes during each task and group of devices."""

    used: Array  # [K + 1, G]: gradients and activations, resharded copies, partial sums
    waiting: Array  # [K + 1, 2, G]
    peak: Array  # [G] of both together
    persistent: Array  # [G]: parameters and optimizer state
    slack: Scalar  # []: what may have been added since


def begin_of(p: CostArrays, base: Base, e: Array) -> Array:
    """int32 []: the first task of its copy: behind the last reader before it of the same one, or where it is made."""
    before, last, made = row(base.previous, e), row(p.edge_life, e)[0], row(p.edge_life, e)[1]
    return jnp.where(before >= 0, held_since(p, jnp.maximum(before, 0), last), made)


def alive_of(p: CostArrays, base: Base) -> Alive:
    """Sums up the whole strategy."""

    def one(x: Array) -> Array:
        return x[..., None]

    lives = Lives(
        held=one(base.held), copy=one(base.copy), is_sent=one(base.is_sent), transient=one(base.transient),
        waiting=one(base.waiting), previous=one(base.previous), on=one(base.on), on_kept=one(base.on_kept), equal=None,
    )  # fmt: skip
    groups = base.on.shape[1]
    nothing = jax.tree.map(jnp.zeros_like, no_steps(p.task_float.shape[0] - 1, groups, 1))  # made here: a kernel has no constants
    steps = steps_of(p, lives, nothing)

    def task(k: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        now, waits, used, waiting, peak = state
        now, waits = now + row(steps.alive, k)[:, 0], waits + row(steps.waiting, k)[..., 0]
        here = now + row(steps.transient, k)[:, 0]
        held = jnp.minimum(waits, p.waiting[0][:, None])
        return now, waits, put(used, k, here), put(waiting, k, waits), jnp.maximum(peak, here + held[0] + held[1])

    places, none = p.task_float.shape[0], jnp.zeros(groups)
    start = none, jnp.zeros((2, groups)), jnp.zeros((places, groups)), jnp.zeros((places, 2, groups)), none
    _, _, used, waiting, peak = lax.fori_loop(0, p.counts[2], task, start)
    return Alive(used, waiting, peak, stored_bytes(p, base.state_bytes, base.on_stored), jnp.float32(0))


def stored_more(p: CostArrays, own: OwnRecords, base: Base, into: Change, n: Array) -> Array:
    """By how much more parameters and optimizer state [G, Q] each candidate stores."""
    first, count = span(own, n, 1)

    def one(j: Array, total: Array) -> Array:
        which = row(own.records.parameter, first + j)[0]
        was = only_if(row(base.on_stored, which), row(base.state_bytes, which))
        return total + only_if(row(into.on_stored, j), row(into.state_bytes, j)) - was[:, None]

    return lax.fori_loop(0, count, one, jnp.zeros((base.on_stored.shape[1], into.pays.shape[1])))


def most_added(p: CostArrays, own: OwnRecords, base: Base, into: Change, n: Array) -> Array:
    """Bytes [Q] that a candidate may add to the peak: all that the operator's rows hold, and copies that are kept longer."""
    first, count = span(own, n, 3)
    num_t = p.counts[3]

    def one(j: Array, total: Array) -> Array:
        x, r = row(own.records.row, first + j)[0], 1 + j
        t = jnp.where(x < num_t, x, p.tensor_life.shape[0] - 1)
        waits = jnp.maximum(row(into.waiting, r) - row(base.waiting, t)[:, None], 0.0)
        transient = jnp.maximum(row(into.transient, r) - row(base.transient, t), 0.0)
        is_counted = (row(p.tensor_life, t)[1] >= 0) | (x >= num_t)
        return total + only_if(is_counted, row(into.held, r)) + row(into.copy, r) + transient + waits[0] + waits[1]

    own_bytes = lax.fori_loop(0, count, one, jnp.zeros(into.pays.shape[1]))
    first, count = span(own, n, 4)

    def group(g: Array, total: Array) -> Array:
        begin, number = row(own.group, first + g)[0], row(own.group, first + g)[1]
        return lax.fori_loop(begin, begin + number, lambda c, sum_: sum_ + row(base.copy, row(p.members, c)), total)

    return own_bytes + lax.fori_loop(0, count, group, jnp.zeros(()))


def peaks_after(
    p: CostArrays, own: OwnRecords, base: Base, into: Change, n: Array, alive: Alive, steps: tuple[Array, Array]
) -> tuple[Array, tuple[Array, Array]]:
    """The peak of what is alive [G, Q] under each candidate, exactly, where `alive` is of `base`; and `steps` as they were.

    `steps` [K + 2, G, Q] and [K + 2, 2, G, Q] are zeros: to be used again, since to make so many anew takes as long as all else.
    """
    change = _Steps(p, own, base, into, n)
    diff, waiting = lax.fori_loop(0, change.count, change.own_row, steps)
    diff = lax.fori_loop(0, change.num_groups, change.group, diff)
    return _peaks(p, alive, diff, waiting)


class _Steps:
    """By how much more is alive from each task on [K + 2, G, Q], under each candidate than in the base.

    What is alive at every task is what was before it, and these steps up to it.
    """

    def __init__(self, p: CostArrays, own: OwnRecords, base: Base, into: Change, n: Array):
        self.p, self.own, self.base, self.into = p, own, base, into
        self.readers = Readers(p, own, base, into, n)
        self.first, self.count = span(own, n, 3)
        self.num_tensors, self.q = p.counts[3], into.pays.shape[1]
        self.first_group, self.num_groups = span(own, n, 4)

    def own_row(self, j: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        """One of the operator's rows: a tensor, or a reshard that no group of its readers touches; others follow in groups."""
        p, num_t = self.p, self.num_tensors
        x = row(self.own.records.row, self.first + j)[0]
        state = lax.fori_loop(0, (x < num_t).astype(jnp.int32), lambda _, s: self._tensor(j, s), state)
        is_edge = (x >= num_t) & (x < num_t + p.counts[4])
        e = jnp.where(is_edge, x - num_t, 0)

        def alone(_: Array, diff: Array) -> Array:
            """It begins when it did."""
            base, into = self.base, self.into
            before = only_if(row(base.on_kept, x), row(base.copy, e))
            more = only_if(row(into.on_kept, 1 + j), row(into.copy, 1 + j)) - before[:, None]
            return added_at(diff, (begin_of(p, base, e), row(p.edge_life, e)[0] + 1), (more, -more))

        is_alone = is_edge & ~self._is_touched(e)
        return lax.fori_loop(0, is_alone.astype(jnp.int32), alone, state[0]), state[1]

    def _is_touched(self, e: Array) -> Array:
        begin, groups = row(self.p.edge_group, e)[0], self.own.group
        return lax.fori_loop(
            0, self.num_groups, lambda g, found: found | (row(groups, self.first_group + g)[0] == begin), False
        )  # fmt: skip

    def _tensor(self, j: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        """A tensor: kept until the last of its readers that needs it, and what passes or waits while it is made."""
        p, base, into = self.p, self.base, self.into
        diff, waiting = state
        t, r = row(self.own.records.row, self.first + j)[0], 1 + j
        birth, death, at_least, begin, number = (row(p.tensor_life, t)[i] for i in range(5))
        waits, is_counted = row(p.row_int, t)[6] != 0, death >= 0
        home, base_home = row(into.on_kept, r), row(base.on_kept, t)[:, None]
        transient = only_if(row(into.on, r), row(into.transient, r)) - only_if(row(base.on, t), row(base.transient, t))[:, None]
        held, base_held = only_if(home & is_counted, row(into.held, r)), only_if(base_home & is_counted, row(base.held, t))
        diff = added_at(diff, (birth, birth + 1), (held - base_held + transient, -transient))
        last, base_last = self._last_needed(begin, number)

        def until(last: Array) -> Array:
            return jnp.where(waits, birth, jnp.minimum(jnp.maximum(last, at_least), death))

        stops, stop_count = row(p.tensor_stops, t)[0], only_if(is_counted, row(p.tensor_stops, t)[1])

        def stop(i: Array, diff: Array) -> Array:
            place = row(p.stops, i)
            return added(diff, place + 1, only_if(until(base_last) == place, base_held) - only_if(until(last) == place, held))

        diff = lax.fori_loop(stops, stops + stop_count, stop, diff)
        bytes_ = only_if(home[None], row(into.waiting, r)[:, None]) - only_if(base_home[None], row(base.waiting, t)[:, None, None])
        return diff, waited(p, waiting, t, birth, death, bytes_)

    def _last_needed(self, begin: Array, number: Array) -> tuple[Array, Array]:
        """The last task [Q] that needs a tensor with these reshards, and in the base."""
        p, base, into, readers = self.p, self.base, self.into, self.readers

        def pays_before(e: Array) -> Array:
            return row(base.previous, e) < 0

        def reader(c: Array, last: tuple[Array, Array]) -> tuple[Array, Array]:
            e = row(p.edges_of, c)
            of = readers.row_of(e)
            was = needed_until(p, e, row(base.is_sent, e), ~pays_before(e))
            is_own = (of > 0) & (of <= self.count)
            is_sent = jnp.where(is_own, row(into.is_sent, of), row(base.is_sent, e))
            pays = jnp.where(of > 0, row(into.pays, of) > 0, pays_before(e))
            return jnp.maximum(last[0], needed_until(p, e, is_sent, ~pays)), jnp.maximum(last[1], was)

        return lax.fori_loop(begin, begin + number, reader, (jnp.full(self.q, -1, jnp.int32), jnp.int32(-1)))

    def group(self, g: Array, diff: Array) -> Array:
        """The copies of one group of readers, of which one wants another layout."""
        begin, number = row(self.own.group, self.first_group + g)[0], row(self.own.group, self.first_group + g)[1]
        return lax.fori_loop(begin, begin + number, functools.partial(self._member, begin), diff)

    def _member(self, begin: Array, c: Array, diff: Array) -> Array:
        """A reader of a group: its copy begins behind the last reader before it of the same copy, or where it is made."""
        p, base, into, readers = self.p, self.base, self.into, self.readers
        e = row(p.members, c)
        r, x, place = readers.row_of(e), self.num_tensors + e, row(p.edge_group, e)[1]
        is_own, is_keyed = (r > 0) & (r <= self.count), readers.is_keyed(e)
        base_bytes = only_if(row(base.on_kept, x), row(base.copy, e))[:, None]
        bytes_ = jnp.where(is_own, only_if(row(into.on_kept, r), row(into.copy, r)), base_bytes)
        last, made = row(p.edge_life, e)[0], row(p.edge_life, e)[1]
        before = readers.before(e)

        # The last reader before it of the same copy: an unchanged one, or one of the operator's.
        def earlier(d: Array, since: Array) -> Array:
            y = row(p.members, d)
            y_keyed = readers.is_keyed(y)
            task = row(p.edge_life, y)[2]
            asks = y_keyed | is_keyed
            same = jnp.where(is_keyed, readers.same(y, jnp.where(is_keyed, e, y)), readers.same(e, jnp.where(y_keyed, y, e)))
            same = jnp.where(asks, same, y == before)
            return jnp.where(same, task, since)

        since = lax.fori_loop(begin, place, earlier, jnp.zeros(self.q, jnp.int32))

        def begins(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d, left, diff = state
            y = row(p.members, d)
            here = left & (since == row(p.edge_life, y)[2])
            return d - 1, left & ~here, added(diff, held_since(p, y, last), only_if(here, bytes_))

        places = begin_of(p, base, e), last + 1, made
        values = (-base_bytes, base_bytes - bytes_, only_if(since == 0, bytes_))
        diff = added_at(diff, places, values)
        start: tuple[Array, Array, Array] = place - 1, since > 0, diff
        return lax.while_loop(lambda s: (s[0] >= begin) & s[1].any(), begins, start)[2]


def _peaks(p: CostArrays, alive: Alive, diff: Array, waiting: Array) -> tuple[Array, tuple[Array, Array]]:
    """The peak [G, Q] of what is alive with these steps, which are zeros again afterwards."""
    groups, q = diff.shape[1:]
    none, no_waits, nowhere = jnp.zeros((groups, q)), jnp.zeros((2, groups, q)), diff.shape[0] - 1

    def task(k: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        now, waits, peak, diff, waiting = state
        # What is read at one place and written at another is written first, one turn late: XLA then copies no array.
        diff, waiting = put(diff, jnp.where(k > 0, k - 1, nowhere), none), put(waiting, jnp.where(k > 0, k - 1, nowhere), no_waits)
        now, waits = now + row(diff, k), waits + row(waiting, k)
        held = jnp.minimum(row(alive.waiting, k)[..., None] + waits, p.waiting[0][:, None, None])
        peak = jnp.maximum(peak, row(alive.used, jnp.minimum(k, p.counts[2] - 1))[:, None] + now + held[0] + held[1])
        return now, waits, peak, diff, waiting

    # Steps may stand one or two places behind the last task, where nothing is held any more; the last place stays zero.
    found = lax.fori_loop(0, p.counts[2] + 3, task, (none, no_waits, none, diff, waiting))
    return found[2], found[3:]
