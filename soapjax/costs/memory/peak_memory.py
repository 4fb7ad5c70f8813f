"""What a device holds at the peak of a step: lifetimes of tensors and copies, task by task, for Q lanes side by side.

A tensor is alive from the task that makes it until nobody needs it: a reshard that makes a copy needs the tensor until the copy
is made, one that shares an earlier copy not at all. A copy is alive until its last reader. Partial sums pass while they are
resolved, and gradients that the compiler merges into one collective wait for each other.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from soapjax.costs.rules.sets import only_if
from soapjax.costs.tables.arrays import CostArrays, Places, places_of
from soapjax.jit.array_types import Array
from soapjax.jit.kernel import added, added_at, largest, put, row, zeroed


class Lives(NamedTuple):
    """Bytes, and what decides how long they are held; T tensors, E reshards, X rows, G groups of devices."""

    held: Array  # [T + 1, Q]
    copy: Array  # [E + 1, Q]
    is_sent: Array  # bool [E + 1, Q]
    transient: Array  # [T + 1, Q]
    waiting: Array  # [T + 1, 2, Q]
    previous: Array  # int32 [E + 1, Q]: the last reader before it of the same copy, -1 where it makes one
    on: Array  # bool [X + 1, G, Q]: who makes it
    on_kept: Array  # bool [X + 1, G, Q]
    equal: Places | None  # where figures of `held` to `waiting`, `on` and `on_kept` stand; None: each in its own place

    def places(self, p: CostArrays, x: Array) -> Places:
        """Where those of row `x` stand."""
        own = places_of(p, x)
        return own if self.equal is None else Places._make(map(row, self.equal, own))


def needed_until(p: CostArrays, e: Array, is_sent: Array, is_shared: Array) -> Array:
    """int32 [Q]: until when reshard `e` needs the tensor itself; -1 where an earlier reader has made its copy."""
    life = row(p.edge_life, e)
    return jnp.where(is_sent, jnp.where(is_shared, -1, life[5]), life[4])


def held_since(p: CostArrays, y: Array, last: Array) -> Array:
    """From which task on a reader that needs a copy until `last` holds it, where reader `y` had it last before: behind `last` where
    `y` has it until then. (A reader may run before one that stands before it: memory_order.py.)"""
    life = row(p.edge_life, y)
    return jnp.where((life[2] > last) & (life[1] <= last), last + 1, jnp.minimum(life[2], last))


class Steps(NamedTuple):
    """By how much what is held changes at the beginning of each task, [K + 2, G, Q]."""

    alive: Array
    transient: Array  # during that task only
    waiting: Array  # [K + 2, 2, G, Q]


def no_steps(num_tasks: int, groups: int, lanes: int) -> Steps:
    """Where nothing is held; `num_tasks` is K."""
    nothing = np.zeros((num_tasks + 2, groups, lanes), np.float32)
    return Steps(nothing, nothing, np.zeros((num_tasks + 2, 2, groups, lanes), np.float32))


def steps_of(p: CostArrays, of: Lives, begun: Steps) -> Steps:
    """Of all tensors and copies, added to `begun`."""
    num_t, q = p.counts[3], of.on.shape[2]

    def tensor(t: Array, state: Steps) -> Steps:
        alive, transient, waiting = state
        birth, death, at_least, first, number = (row(p.tensor_life, t)[i] for i in range(5))
        waits, is_counted = row(p.row_int, t)[6] != 0, death >= 0
        here = of.places(p, t)
        on_home = row(of.on_kept, here.row)
        transient = added(transient, birth, only_if(row(of.on, here.row), row(of.transient, here.tensor)))
        held = only_if(on_home & is_counted, row(of.held, here.tensor))
        alive = added(alive, birth, held)

        def reader(c: Array, last: Array) -> Array:
            e = row(p.edges_of, c)
            is_sent = row(of.is_sent, of.places(p, num_t + e).edge)
            return jnp.maximum(last, needed_until(p, e, is_sent, row(of.previous, e) >= 0))

        last = lax.fori_loop(first, first + number, reader, jnp.full(q, -1, jnp.int32))
        until = jnp.where(waits, birth, jnp.minimum(jnp.maximum(last, at_least), death))
        stops, stop_count = row(p.tensor_stops, t)[0], only_if(is_counted, row(p.tensor_stops, t)[1])

        def stop(i: Array, alive: Array) -> Array:
            place = row(p.stops, i)
            return added(alive, place + 1, -only_if(until == place, held))

        alive = lax.fori_loop(stops, stops + stop_count, stop, alive)
        late = only_if(on_home[None], row(of.waiting, here.tensor)[:, None])
        return Steps(alive, transient, waited(p, waiting, t, birth, death, late))

    def copy(e: Array, alive: Array) -> Array:
        last, made = row(p.edge_life, e)[0], row(p.edge_life, e)[1]
        here, previous = of.places(p, num_t + e), row(of.previous, e)
        bytes_ = only_if(row(of.on_kept, here.row), row(of.copy, here.edge))
        alive = added_at(alive, (made, last + 1), (only_if(previous < 0, bytes_), -bytes_))
        first, place = row(p.edge_group, e)[0], row(p.edge_group, e)[1]

        def earlier(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            c, left, alive = state
            y = row(p.members, c)
            begins = left & (previous == y)
            return c - 1, left & ~begins, added(alive, held_since(p, y, last), only_if(begins, bytes_))

        start: tuple[Array, Array, Array] = place - 1, previous >= 0, alive
        return lax.while_loop(lambda x: (x[0] >= first) & x[1].any(), earlier, start)[2]

    steps = lax.fori_loop(0, num_t, tensor, begun)
    return steps._replace(alive=lax.fori_loop(0, p.counts[4], copy, steps.alive))


def waited(p: CostArrays, waiting: Array, t: Array, birth: Array, death: Array, bytes_: Array) -> Array:
    """`waiting` and gradient `t`, `bytes_` [2, ...] of which wait to be summed: operands since they are made, results behind the
    last of all."""
    of_operands = p.waiting[1].reshape(2, *[1] * (bytes_.ndim - 1))

    def place(i: Array, waiting: Array) -> Array:
        since = jnp.where(i < 2, birth + 1, p.merged_at)
        part = jnp.where(i < 2, of_operands, 1 - of_operands)
        at = jnp.where(i % 2 == 0, since, jnp.maximum(death + 1, since))
        return added(waiting, at, jnp.where(i % 2 == 0, 1.0, -1.0) * part * bytes_)

    is_late = (row(p.row_int, t)[6] != 0) & (death >= 0)
    return lax.fori_loop(0, jnp.where(is_late, 4, 0), place, waiting)


def stored_bytes(p: CostArrays, state_bytes: Array, on_stored: Array) -> Array:
    """Parameters and optimizer state [G, ...] of [P + 1, ...] and who stores them, bool [P + 1, G, ...]; and unplaced state."""
    unplaced = jnp.broadcast_to(p.scalars[3], on_stored.shape[1:])
    return lax.fori_loop(0, p.counts[1], lambda j, total: total + only_if(row(on_stored, j), row(state_bytes, j)), unplaced)


def memory_of(
    p: CostArrays, of: Lives, state_bytes: Array, on_stored: Array, begun: Array, scratch: Steps
) -> tuple[Array, Array, Steps]:  # fmt: skip
    """[4, Q] at the peak of the device that holds most: parameters and state, what is alive, what passes, and their sum.

    And [K + 1, Q], written over `begun`: the sum while each task runs, on the device that holds most then. And `scratch`, whatever
    stands in which, used.

    `state_bytes` [P + 1, Q] and `on_stored` bool [P + 1, G, Q] are of parameters with their optimizer state.
    """
    steps = steps_of(p, of, Steps(*(zeroed(x, p.counts[2]) for x in scratch)))
    groups, q = of.on.shape[1:]
    stored = stored_bytes(p, state_bytes, on_stored)

    def task(k: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        now, waits, most, curve = state
        now, waits = now + row(steps.alive, k), waits + row(steps.waiting, k)
        held = jnp.minimum(waits, p.waiting[0][:, None, None])
        live, made = now + held[0] + held[1], row(steps.transient, k)
        found = jnp.stack([stored, live, made, stored + live + made])
        return now, waits, jnp.where(found[3] > most[3], found, most), put(curve, k, largest(found[3]))

    none = jnp.zeros((groups, q))
    start = jnp.stack([stored, none, none, jnp.where(p.counts[2] > 0, -1.0, stored)])
    most, curve = lax.fori_loop(0, p.counts[2], task, (none, jnp.zeros((2, groups, q)), start, begun))[2:]

    def group(g: Array, best: Array) -> Array:
        of_group = lax.dynamic_index_in_dim(most, g, 1, keepdims=False)
        return jnp.where(of_group[3] > best[3], of_group, best)

    return lax.fori_loop(1, groups, group, most[:, 0]), curve, steps
