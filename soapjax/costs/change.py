"""What Q candidate configs of one operator change of a strategy's costs: the rules (record_rules.py) on records that it decides.

`changed` computes anew only those that one operator decides (operator_records.py), all
candidates side by side, into the *rows* of a `Change`: its own rows, and behind them those of *heirs*, readers of other operators
that inherit the payment of a shared copy, or lose it. Full evaluation (whole.py) of the changed strategies is their oracle.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax

from soapjax.costs.rules.base import Base, Change, span
from soapjax.costs.rules.copies import paying, previous_in
from soapjax.costs.rules.record_rules import gathers_again, row_costs
from soapjax.costs.rules.sets import only_if
from soapjax.costs.tables.arrays import ROW_LAYOUTS, CostArrays, edge_of
from soapjax.costs.tables.operator_records import OwnRecords
from soapjax.costs.whole import Slots, Stored, on_pass, parameters_pass, slots_pass, tasks_pass
from soapjax.jit.array_types import Array, Scalar
from soapjax.jit.kernel import in_kernel, largest, put, row


def changed(p: CostArrays, own: OwnRecords, base: Base, into: Change, n: Array | Scalar, config: Array, storage: Array) -> Change:
    """What candidates (`config` SET [1, C, Q], `storage` int8 [Q]) of operator `n` make of their rows."""
    pins = p.has_pins
    again = gathers_again(p, storage)

    def decided(p, own, config, storage, layout, others, compute_s, state_bytes, n):
        work = jnp.zeros((compute_s.shape[0], 2, layout.shape[2]))
        slots = slots_pass(p, own.records, span(own, n, 0), config, Slots(layout, work), others)
        shards = jnp.ones_like(state_bytes)
        stored = parameters_pass(p, own.records, span(own, n, 1), storage[None], Stored(slots.layout, state_bytes, shards))
        compute_s = tasks_pass(p, own.records, span(own, n, 2), config, slots.work, stored.shards, compute_s)
        return stored.layout, compute_s, stored.state_bytes

    def on(p, own, config, layout, begun, n):
        return on_pass(p, own.records, span(own, n, 1), span(own, n, 2), config, layout, begun)

    layout, compute_s, state_bytes = in_kernel(
        decided, p, own, config, storage, into.layout, base.layout, into.compute_s, into.state_bytes, n
    )  # fmt: skip
    into = into._replace(layout=layout, compute_s=compute_s, state_bytes=state_bytes, again=again)
    if pins:
        on_compute, on_stored = in_kernel(on, p, own, config, layout, (into.on_compute, into.on_stored), n)
        into = into._replace(on_compute=on_compute, on_stored=on_stored)

    def own_rows(p, own, into, n):
        first, count = span(own, n, 3)

        def body(j: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            record = row(own.records.row, first + j)
            of = row_costs(p, record, *(row(into.layout, record[i]) for i in ROW_LAYOUTS))
            found = (
                of.seconds, of.sent_on, of.held, of.copy, of.is_sent, of.transient, of.waiting,
                *((of.on, of.on_kept) if pins else ()),
            )  # fmt: skip
            return put(state[0], record[0], 1 + j), *(put(x, 1 + j, y) for x, y in zip(state[1:], found, strict=True))

        found = lax.fori_loop(0, count, body, (into.row_of, *(getattr(into, name) for name in names)))
        first, count = span(own, n, 2)

        def task(j: Array, task_of: Array) -> Array:
            return put(task_of, row(own.records.task, first + j)[0], 1 + j)

        return *found, lax.fori_loop(0, count, task, into.task_of)

    # What is not changed is not passed through a kernel.
    names = ("full_s", "sent", "held", "copy", "is_sent", "transient", "waiting", *(("on", "on_kept") if pins else ()))
    row_of, *found, task_of = in_kernel(own_rows, p, own, into, n)
    into = into._replace(row_of=row_of, task_of=task_of, **dict(zip(names, found, strict=True)))
    names = ("full_s", "sent", *(("on",) if pins else ()))
    (pays, row_of, heir, num_heirs), found = in_kernel(functools.partial(paying, names=names), p, own, base, into, n)
    heirs = dict(zip(names, found, strict=True))
    return into._replace(pays=pays, row_of=row_of, heir=heir, num_heirs=num_heirs, **heirs)


def moved(
    p: CostArrays, own: OwnRecords, base: Base, into: Change, n: Array, q: Array, axes: Array, storage: Array, is_wanted: Array
) -> Base:
    """`base` after operator `n` took candidate `q` (config `axes` int8 [A], `storage`); itself unless `is_wanted`."""
    num_t = p.counts[3]

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
        record = row(own.records.parameter, first + j)
        which, places, slots = record[0], record[3:7], record[8:12]
        for i in range(4):
            to = jnp.where(slots[i] >= 0, slots[i], layout.shape[0] - 1)  # a place that nobody reads
            layout = put(layout, to, lane(into.layout, places[i]))
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
        e = edge_of(p, x)
        return base._replace(
            full_s=put(base.full_s, x, lane(into.full_s, r)), sent=put(base.sent, x, lane(into.sent, r)),
            held=put(base.held, t, lane(into.held, r)), copy=put(base.copy, e, lane(into.copy, r)),
            is_sent=put(base.is_sent, e, lane(into.is_sent, r)), transient=put(base.transient, t, lane(into.transient, r)),
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
    return paid_anew(p, own, base, (first, count), counted(4))


def paid_anew(
    p: CostArrays, own: OwnRecords, base: Base, rows: tuple[Array, Array], groups: tuple[Array, Array]
) -> Base:
    """`base` with who pays for copies looked up anew, for some rows and groups of readers (first and number)."""
    (first, count), (first_g, count_g), num_t = rows, groups, p.counts[3]

    def group(g: Array, previous: Array) -> Array:
        begin, number = row(own.group, first_g + g)[0], row(own.group, first_g + g)[1]
        return previous_in(p, base.layout, base.storage, begin, number, previous)

    previous = lax.fori_loop(0, count_g, group, base.previous)

    def pay(x: Array, paid_s: Array) -> Array:
        return put(paid_s, x, only_if(row(previous, edge_of(p, x)) < 0, row(base.full_s, x)))

    def pay_group(g: Array, paid_s: Array) -> Array:
        begin, number = row(own.group, first_g + g)[0], row(own.group, first_g + g)[1]
        return lax.fori_loop(begin, begin + number, lambda c, x: pay(num_t + row(p.members, c), x), paid_s)

    paid_s = lax.fori_loop(0, count, lambda j, x: pay(row(own.records.row, first + j)[0], x), base.paid_s)
    return base._replace(previous=previous, paid_s=lax.fori_loop(0, count_g, pay_group, paid_s))


def sent_by(p: CostArrays, base: Base, is_wanted: Array) -> Array:
    """Bytes [G] that a device of each group sends in a step; zeros unless `is_wanted`."""

    def one(x: Array, total: Array) -> Array:
        return total + only_if(row(base.previous, edge_of(p, x)) < 0, row(base.sent, x))

    return lax.fori_loop(0, jnp.where(is_wanted, p.counts[5], 0), one, jnp.zeros(base.sent.shape[1]))


def sent_after(p: CostArrays, own: OwnRecords, base: Base, into: Change, n: Array, now: Array, is_wanted: Array) -> Array:
    """Bytes [Q] by the device that sends most, under each candidate, where `base` sends `now` [G]."""
    first, count = span(own, n, 3)

    def one(i: Array, total: Array) -> Array:
        x = jnp.where(i < count, row(own.records.row, first + jnp.where(i < count, i, 0))[0], row(into.heir, 1 + i))
        was = only_if(row(base.previous, edge_of(p, x)) < 0, row(base.sent, x))
        return total + row(into.sent, 1 + i) * row(into.pays, 1 + i) - was[:, None]

    begin = jnp.broadcast_to(now[:, None], (*now.shape, into.pays.shape[1]))
    return largest(lax.fori_loop(0, jnp.where(is_wanted, count + into.num_heirs, 0), one, begin))


def cleaned(own: OwnRecords, n: Array, row_of: Array, task_of: Array, heir: Array, num_heirs: Array) -> tuple[Array, Array]:
    """(row_of, task_of) of `Change` with nothing in them again."""
    first, count = span(own, n, 3)
    row_of = lax.fori_loop(0, count, lambda j, x: put(x, row(own.records.row, first + j)[0], 0), row_of)
    row_of = lax.fori_loop(0, num_heirs, lambda h, x: put(x, row(heir, 1 + count + h), 0), row_of)
    first, count = span(own, n, 2)
    return row_of, lax.fori_loop(0, count, lambda j, x: put(x, row(own.records.task, first + j)[0], 0), task_of)

