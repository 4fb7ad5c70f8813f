"""What Q candidate configs of one operator change of a strategy's costs: the rules (rules.py) on the records that it decides.

`Base` holds every summand of one strategy; `changed` computes anew only those that one operator decides (own_records.py), all
candidates side by side, into the *rows* of a `Change`: its own rows, and behind them those of *heirs*, readers of other operators
that inherit the payment of a shared copy, or lose it. Full evaluation (whole.py) of the changed strategies is their oracle.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from soapjax.costs.arrays import CostArrays
from soapjax.costs.own_records import OwnRecords
from soapjax.costs.rules import configs_of, gathers_again, holders, on_groups, row_costs
from soapjax.costs.sets import SET, every
from soapjax.costs.whole import Slots, Stored, parameters_pass, slots_pass, tasks_pass
from soapjax.jit.kernel import as_one_kernel, put, row


class Base(NamedTuple):
    """Every summand of one strategy's costs; a row behind the last of each kind means "nothing". `on` is true without pins."""

    axes: Array  # int8 [N, A]
    storage: Array  # int8 [N]
    layout: Array  # SET [slots + 1, W]
    compute_s: Array  # [K + 1]
    full_s: Array  # [X + 1, L]: as if no copy were shared
    paid_s: Array  # [X + 1, L]
    sent: Array  # [X + 1, G]: bytes that a device of each group sends, as if no copy were shared
    previous: Array  # int32 [E + 1]: the last reader before it of the same copy, -1 where it pays
    held: Array  # [T + 1]; this and what follows as in `RowCosts`
    copy: Array  # [E + 1]
    is_sent: Array  # bool [E + 1]
    passing: Array  # [T + 1]
    waiting: Array  # [T + 1, 2]
    state_bytes: Array  # [P + 1]
    on: Array  # bool [X + 1, G]
    on_kept: Array  # bool [X + 1, G]
    on_compute: Array  # bool [K + 1, G]
    on_stored: Array  # bool [P + 1, G]


class Change(NamedTuple):
    """Kept from block to block, so that nothing is zeroed: rows [R, ..., Q], from 1 on; row 0 is nobody's."""

    layout: Array  # SET [places + 1, W, Q]
    compute_s: Array  # [tasks, Q]: of the operator's own
    state_bytes: Array  # [parameters, Q]
    full_s: Array  # [R, L, Q]
    pays: Array  # [R, Q]: 1 where it pays for its copy, else 0
    sent: Array  # [R, G, Q]
    held: Array  # [R, Q]
    copy: Array  # [R, Q]
    is_sent: Array  # bool [R, Q]
    passing: Array  # [R, Q]
    waiting: Array  # [R, 2, Q]
    on: Array  # bool [R, G, Q]
    on_kept: Array  # bool [R, G, Q]
    on_compute: Array  # bool [tasks, G, Q]
    on_stored: Array  # bool [parameters, G, Q]
    row_of: Array  # int32 [X + 1]: the row of the change, 0 where nothing changes
    task_of: Array  # int32 [K + 1]: 1 + the place among the operator's own tasks, 0
    heir: Array  # int32 [R]: what row a heir's row is, X for nobody
    num_heirs: Array  # int32 []
    again: Array  # bool [Q]: whether the operator's parameters are gathered anew


def nothing_changed(p: CostArrays, sizes, lanes: int) -> Change:
    """Sized for `OwnSizes`."""
    count, width = 1 + sizes.rows + sizes.heirs, p.row_fixed.shape[1]
    groups, levels = p.group_digits.shape[1], p.network.level_axes.shape[0]

    def zeros(*shape: int, dtype=jnp.float32) -> Array:
        return jnp.zeros((*shape, lanes), dtype)

    return Change(
        zeros(sizes.slots + 1, width, dtype=SET), zeros(sizes.tasks + 1), zeros(sizes.parameters + 1), zeros(count, levels),
        zeros(count) + 1, zeros(count, groups), zeros(count), zeros(count), zeros(count, dtype=bool), zeros(count), zeros(count, 2),
        *(zeros(n, groups, dtype=bool) | True for n in (count, count, sizes.tasks + 1, sizes.parameters + 1)),
        jnp.zeros(p.row_int.shape[0], jnp.int32), jnp.zeros(p.task_float.shape[0], jnp.int32),
        jnp.full(count, p.row_int.shape[0] - 1, jnp.int32), jnp.int32(0), jnp.zeros(lanes, bool),
    )  # fmt: skip


def span(own: OwnRecords, n: Array, kind: int) -> tuple[Array, Array]:
    """First and number of an operator's slots, parameters, tasks, rows or groups."""
    found = row(own.spans, n)[kind]
    return found[0], found[1]


def changed(p: CostArrays, own: OwnRecords, base: Base, into: Change, n: Array, axes: Array, storage: Array) -> Change:
    """What candidates (`axes` int8 [A, Q], `storage` int8 [Q]) of operator `n` make of their rows."""
    pins = p.row_fixed.shape[1] > p.row_shape.shape[1] + 1
    config = configs_of(axes[None], p.divisors.shape[1], pins)  # [1, C, Q]
    again = gathers_again(p, storage)

    def decided(p, own, config, storage, layout, others, compute_s, state_bytes, n):
        tasks = compute_s.shape[0]
        flops = jnp.zeros((tasks, layout.shape[2])), jnp.zeros((tasks, layout.shape[2]))
        slots = slots_pass(p, own.records, *span(own, n, 0), config, Slots(layout, *flops), others)
        shards = jnp.ones_like(state_bytes)
        stored = parameters_pass(p, own.records, *span(own, n, 1), storage[None], Stored(slots.layout, state_bytes, shards))
        compute_s = tasks_pass(p, own.records, *span(own, n, 2), config, slots, stored.shards, compute_s)
        return stored.layout, compute_s, stored.state_bytes

    layout, compute_s, state_bytes = _kernel(
        decided, p, own, config, storage, into.layout, base.layout, into.compute_s, into.state_bytes, n
    )  # fmt: skip
    into = into._replace(layout=layout, compute_s=compute_s, state_bytes=state_bytes, again=again)
    if pins:
        on_compute, on_stored = _kernel(_taking_part, p, own, config, layout, into.on_compute, into.on_stored, n)
        into = into._replace(on_compute=on_compute, on_stored=on_stored)

    def own_rows(p, own, into, n):
        first, count = span(own, n, 3)

        def body(j: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            record = row(own.records.row, first + j)
            of = row_costs(p, record, *(row(into.layout, record[i]) for i in range(1, 5)))
            found = (
                of.seconds, of.sent_on, of.held, of.copy, of.is_sent, of.passing, of.waiting,
                *((of.on, of.on_kept) if pins else ()),
            )  # fmt: skip
            return put(state[0], record[0], 1 + j), *(put(x, 1 + j, y) for x, y in zip(state[1:], found, strict=True))

        found = lax.fori_loop(0, count, body, (into.row_of, *(getattr(into, name) for name in names)))
        first, count = span(own, n, 2)

        def task(j: Array, task_of: Array) -> Array:
            return put(task_of, row(own.records.task, first + j)[0], 1 + j)

        return *found, lax.fori_loop(0, count, task, into.task_of)

    # What is not changed is not passed through a kernel.
    names = ("full_s", "sent", "held", "copy", "is_sent", "passing", "waiting", *(("on", "on_kept") if pins else ()))
    row_of, *found, task_of = _kernel(own_rows, p, own, into, n)
    into = into._replace(row_of=row_of, task_of=task_of, **dict(zip(names, found, strict=True)))
    pays, full_s, sent, row_of, heir, num_heirs = _kernel(paying, p, own, base, into, n)
    return into._replace(pays=pays, full_s=full_s, sent=sent, row_of=row_of, heir=heir, num_heirs=num_heirs)


def _kernel(fn, *of):
    return as_one_kernel(fn, is_guarded=False)(*of)


def _taking_part(p, own, config, layout, on_compute, on_stored, n):
    op_dims = p.divisors.shape[1]
    first_p, num_p = span(own, n, 1)
    first_k, num_k = span(own, n, 2)

    def stored(j: Array, found: Array) -> Array:
        return put(found, j, holders(p, row(layout, row(own.records.parameter, first_p + j)[2])))

    on_stored = lax.fori_loop(0, num_p, stored, on_stored)
    of_op = on_groups(p, row(config, jnp.int32(0))[op_dims:])

    def task(j: Array, found: Array) -> Array:
        updated = row(own.records.task, first_k + j)[1]
        return put(found, j, jnp.where(updated >= 0, row(on_stored, jnp.maximum(updated, 0)), of_op))

    return lax.fori_loop(0, num_k, task, on_compute), on_stored


class Readers:
    """Who reads what in which layout, with the readers of one operator as they are under its candidates."""

    def __init__(self, p: CostArrays, own: OwnRecords, base: Base, into: Change, n: Array):
        self.p, self.own, self.base, self.into, self.n = p, own, base, into, n
        self.first, self.count = span(own, n, 3)
        self.num_tensors = p.counts[3]

    def row_of(self, e: Array) -> Array:
        """Among the operator's own and its heirs, 0."""
        return row(self.into.row_of, self.num_tensors + e)

    def is_keyed(self, e: Array) -> Array:
        r = self.row_of(e)
        is_own = (r > 0) & (r <= self.count)
        return is_own & row(self.own.is_keyed, self.first + jnp.where(is_own, r - 1, 0))

    def keyed(self, i: Array) -> Array:
        """The conversion behind entry `i` of the keyed rows."""
        return row(self.own.records.row, self.first + row(self.own.keyed, i))[0] - self.num_tensors

    def again(self, e: Array) -> Array:
        """bool [Q]: whether it gathers a parameter anew."""
        op = row(self.p.edge_group, e)[3]
        of_base = gathers_again(self.p, row(self.base.storage, jnp.maximum(op, 0)))
        return jnp.where(op == self.n, self.into.again, of_base & (op >= 0))

    def wanted(self, e: Array) -> Array:
        """The layout [W, Q] that an own reader wants under each candidate."""
        return row(self.into.layout, row(self.own.records.row, self.first + self.row_of(e) - 1)[4])

    def before(self, e: Array) -> Array:
        """The last reader before `e` of the same copy in the base that is not keyed, -1."""
        last = row(self.base.previous, e)
        return lax.while_loop(
            lambda y: (y >= 0) & self.is_keyed(jnp.maximum(y, 0)), lambda y: row(self.base.previous, y), last
        )  # fmt: skip

    def same(self, e: Array, mine: Array) -> Array:
        """bool [Q]: whether reader `e`, of the operator or not, wants the copy of keyed reader `mine`."""
        of_base = row(self.base.layout, row(self.p.edge_life, e)[3])[:, None]
        layout = jnp.where(self.is_keyed(e), self.wanted(jnp.where(self.is_keyed(e), e, mine)), of_base)
        return every(layout == self.wanted(mine)) & (self.again(e) == self.again(mine))


def paying(p: CostArrays, own: OwnRecords, base: Base, into: Change, n: Array):
    """Who pays for copies: (pays, full_s, sent, row_of, heir, num_heirs) of `Change`.

    Of the readers whose wish is as before only the first of each copy can start or stop paying: a later one follows that one.
    """
    readers = Readers(p, own, base, into, n)
    nobody = p.row_int.shape[0] - 1
    num_t, q = p.counts[3], into.pays.shape[1]

    def as_before(j: Array, pays: Array) -> Array:
        x = row(own.records.row, readers.first + j)[0]
        e = jnp.where((x >= num_t) & (x < num_t + p.counts[4]), x - num_t, base.previous.shape[0] - 1)
        return put(pays, 1 + j, jnp.full(q, row(base.previous, e) < 0, jnp.float32))

    pays = lax.fori_loop(0, readers.count, as_before, into.pays)
    first_g, num_g = span(own, n, 4)

    def group(g: Array, state):
        first, count, first_k, num_k = (row(own.group, first_g + g)[i] for i in range(4))

        def no_keyed_before(e: Array, stop: Array) -> Array:
            """1 where no keyed reader before place `stop` wants the copy of `e`."""

            def one(i: Array, free: Array) -> Array:
                z = readers.keyed(i)
                is_before = row(p.edge_group, z)[1] < stop
                return free * ~(is_before & readers.same(e, z))

            return lax.fori_loop(first_k, first_k + num_k, one, jnp.ones(q))

        def member(c: Array, state):
            pays, full_s, sent, heir, count = state
            e = row(p.members, c)
            x, place = num_t + e, row(p.edge_group, e)[1]
            is_keyed = readers.is_keyed(e)

            def earlier(d: Array, free: Array) -> Array:
                """Not where an unchanged reader before it wants the same: the first of each copy stands for all."""
                y = row(p.members, d)
                asks = ~readers.is_keyed(y) & (readers.before(y) < 0)
                return lax.fori_loop(0, asks.astype(jnp.int32), lambda _, f: f * ~readers.same(y, e), free)

            free = lax.fori_loop(first, jnp.where(is_keyed, c, first), earlier, no_keyed_before(e, place))
            now = jnp.where(is_keyed | (readers.before(e) < 0), free, 0.0)
            r = readers.row_of(e)
            is_heir = (r == 0) & (now != (row(base.previous, e) < 0)).any()
            r = jnp.where(is_heir, 1 + readers.count + count, r)
            pays = put(pays, r, jnp.where(r > 0, now, 1.0))
            h = jnp.where(is_heir, r, 0)
            full_s = put(full_s, h, jnp.broadcast_to(row(base.full_s, x)[:, None], full_s.shape[1:]))
            sent = put(sent, h, jnp.broadcast_to(row(base.sent, x)[:, None], sent.shape[1:]))
            return pays, full_s, sent, put(heir, h, jnp.where(is_heir, x, nobody)), count + is_heir

        return lax.fori_loop(first, first + count, member, state)

    state = (pays, into.full_s, into.sent, into.heir, jnp.int32(0))
    pays, full_s, sent, heir, count = lax.fori_loop(0, num_g, group, state)

    def placed(i: Array, row_of: Array) -> Array:
        return put(row_of, row(heir, 1 + readers.count + i), 1 + readers.count + i)

    return pays, full_s, sent, lax.fori_loop(0, count, placed, into.row_of), heir, count


def moved(
    p: CostArrays, own: OwnRecords, base: Base, into: Change, n: Array, q: Array, axes: Array, storage: Array, is_wanted: Array
) -> Base:
    """`base` after operator `n` took candidate `q` (config `axes` int8 [A], `storage`); itself unless `is_wanted`."""
    num_t, num_e = p.counts[3], p.counts[4]

    def counted(kind: int) -> tuple[Array, Array]:
        first, count = span(own, n, kind)
        return first, jnp.where(is_wanted, count, 0)

    def lane(x: Array, i: Array) -> Array:
        return lax.dynamic_index_in_dim(row(x, i), q, -1, keepdims=False, allow_negative_indices=False)

    def slot(j: Array, layout: Array) -> Array:
        place = row(own.records.slot, first + j)[layout.shape[1] + 1]
        to = row(own.global_slot, first + j)
        return put(layout, jnp.where(to >= 0, to, layout.shape[0] - 1), lane(into.layout, place))

    first, count = counted(0)
    layout = lax.fori_loop(0, count, slot, base.layout)

    def parameter(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        layout, state_bytes, on_stored = state
        which, _, place, gradient, _, to, gradient_to = (row(own.records.parameter, first + j)[i] for i in range(7))
        layout = put(put(layout, to, lane(into.layout, place)), gradient_to, lane(into.layout, gradient))
        return layout, put(state_bytes, which, lane(into.state_bytes, j)), put(on_stored, which, lane(into.on_stored, j))

    first, count = counted(1)
    layout, state_bytes, on_stored = lax.fori_loop(0, count, parameter, (layout, base.state_bytes, base.on_stored))

    def task(j: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        k = row(own.records.task, first + j)[0]
        return put(state[0], k, lane(into.compute_s, j)), put(state[1], k, lane(into.on_compute, j))

    first, count = counted(2)
    compute_s, on_compute = lax.fori_loop(0, count, task, (base.compute_s, base.on_compute))

    def one_row(j: Array, base: Base) -> Base:
        x, r = row(own.records.row, first + j)[0], 1 + j
        t = jnp.where(x < num_t, x, base.held.shape[0] - 1)
        e = jnp.where((x >= num_t) & (x < num_t + num_e), x - num_t, base.copy.shape[0] - 1)
        return base._replace(
            full_s=put(base.full_s, x, lane(into.full_s, r)), sent=put(base.sent, x, lane(into.sent, r)),
            held=put(base.held, t, lane(into.held, r)), copy=put(base.copy, e, lane(into.copy, r)),
            is_sent=put(base.is_sent, e, lane(into.is_sent, r)), passing=put(base.passing, t, lane(into.passing, r)),
            waiting=put(base.waiting, t, lane(into.waiting, r)), on=put(base.on, x, lane(into.on, r)),
            on_kept=put(base.on_kept, x, lane(into.on_kept, r)),
        )  # fmt: skip

    first, count = counted(3)
    base = base._replace(
        layout=layout, state_bytes=state_bytes, on_stored=on_stored, compute_s=compute_s, on_compute=on_compute,
        axes=put(base.axes, n, jnp.where(is_wanted, axes, row(base.axes, n))),
        storage=put(base.storage, n, jnp.where(is_wanted, storage, row(base.storage, n))),
    )  # fmt: skip
    base = lax.fori_loop(0, count, one_row, base)
    first_g, count_g = counted(4)

    def group(g: Array, previous: Array) -> Array:
        begin, number = row(own.group, first_g + g)[0], row(own.group, first_g + g)[1]
        return previous_in(p, base.layout, base.storage, begin, number, previous)

    previous = lax.fori_loop(0, count_g, group, base.previous)

    def pay(x: Array, paid_s: Array) -> Array:
        e = jnp.where((x >= num_t) & (x < num_t + num_e), x - num_t, previous.shape[0] - 1)
        return put(paid_s, x, row(base.full_s, x) * (row(previous, e) < 0))

    def pay_group(g: Array, paid_s: Array) -> Array:
        begin, number = row(own.group, first_g + g)[0], row(own.group, first_g + g)[1]
        return lax.fori_loop(begin, begin + number, lambda c, x: pay(num_t + row(p.members, c), x), paid_s)

    paid_s = lax.fori_loop(0, count, lambda j, x: pay(row(own.records.row, first + j)[0], x), base.paid_s)
    return base._replace(previous=previous, paid_s=lax.fori_loop(0, count_g, pay_group, paid_s))


def previous_in(p: CostArrays, layout: Array, storage: Array, begin: Array, number: Array, previous: Array) -> Array:
    """`Base.previous` with the readers of one group looked up anew."""

    def again(e: Array) -> Array:
        op = row(p.edge_group, e)[3]
        return gathers_again(p, row(storage, jnp.maximum(op, 0))) & (op >= 0)

    def one(c: Array, previous: Array) -> Array:
        e = row(p.members, c)
        wanted, own = row(layout, row(p.edge_life, e)[3]), again(e)

        def is_other(d: Array) -> Array:
            y = row(p.members, jnp.maximum(d, 0))
            return (d >= begin) & ~(every(row(layout, row(p.edge_life, y)[3]) == wanted) & (again(y) == own))

        found = lax.while_loop(is_other, lambda d: d - 1, c - 1)
        return put(previous, e, jnp.where(found >= begin, row(p.members, jnp.maximum(found, 0)), -1))

    return lax.fori_loop(begin, begin + number, one, previous)


def all_previous(p: CostArrays, layout: Array, storage: Array) -> Array:
    """`Base.previous` [E + 1] of a strategy."""

    def one(e: Array, previous: Array) -> Array:
        first, place, number = row(p.edge_group, e)[0], row(p.edge_group, e)[1], row(p.edge_group, e)[2]
        return previous_in(p, layout, storage, first, jnp.where(place == first, number, 0), previous)

    return lax.fori_loop(0, p.counts[4], one, jnp.full(p.edge_life.shape[0], -1, jnp.int32))


def sent_by(p: CostArrays, base: Base, is_wanted: Array) -> Array:
    """Bytes [G] that a device of each group sends in a step; zeros unless `is_wanted`."""
    num_t, num_e = p.counts[3], p.counts[4]

    def one(x: Array, total: Array) -> Array:
        e = jnp.where((x >= num_t) & (x < num_t + num_e), x - num_t, base.previous.shape[0] - 1)
        return total + row(base.sent, x) * (row(base.previous, e) < 0)

    return lax.fori_loop(0, jnp.where(is_wanted, p.counts[5], 0), one, jnp.zeros(base.sent.shape[1]))


def sent_after(p: CostArrays, own: OwnRecords, base: Base, into: Change, n: Array, now: Array, is_wanted: Array) -> Array:
    """Bytes [Q] by the device that sends most, under each candidate, where `base` sends `now` [G]."""
    first, count = span(own, n, 3)
    num_t, num_e = p.counts[3], p.counts[4]

    def one(i: Array, total: Array) -> Array:
        x = jnp.where(i < count, row(own.records.row, first + jnp.where(i < count, i, 0))[0], row(into.heir, 1 + i))
        e = jnp.where((x >= num_t) & (x < num_t + num_e), x - num_t, base.previous.shape[0] - 1)
        was = row(base.sent, x) * (row(base.previous, e) < 0)
        return total + row(into.sent, 1 + i) * row(into.pays, 1 + i) - was[:, None]

    begin = jnp.broadcast_to(now[:, None], (*now.shape, into.pays.shape[1]))
    return lax.fori_loop(0, jnp.where(is_wanted, count + into.num_heirs, 0), one, begin).max(0)


def cleaned(own: OwnRecords, n: Array, row_of: Array, task_of: Array, heir: Array, num_heirs: Array) -> tuple[Array, Array]:
    """(row_of, task_of) of `Change` with nothing in them again."""
    first, count = span(own, n, 3)
    row_of = lax.fori_loop(0, count, lambda j, x: put(x, row(own.records.row, first + j)[0], 0), row_of)
    row_of = lax.fori_loop(0, num_heirs, lambda h, x: put(x, row(heir, 1 + count + h), 0), row_of)
    first, count = span(own, n, 2)
    return row_of, lax.fori_loop(0, count, lambda j, x: put(x, row(own.records.task, first + j)[0], 0), task_of)

