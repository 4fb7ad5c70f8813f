"""What whole strategies cost: the rules (record_rules.py) applied to the records of a problem, Q strategies side by side.

Pure functions of a problem's arrays and of configs: compiled once for all problems of a bucket. Each loop is one kernel, with
as many turns as there are records to compute; of rows that cost the same one is computed (equal_rows.py). Results are written over
those of an earlier call, since to make so many zeros takes longer than the rules do where a problem is small.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from soapjax.costs.equal_rows import DistinctRows, distinct_rows, equal_layouts
from soapjax.costs.memory.peak_memory import Lives, Steps, memory_of, no_steps
from soapjax.costs.rules.base import Span
from soapjax.costs.rules.links import COLLECTIVES
from soapjax.costs.rules.record_rules import (
    compute_s,
    config_of,
    gathers_again,
    holders,
    on_groups,
    row_costs,
    slot_layout,
    stored_layout,
    violations,
)
from soapjax.costs.rules.sets import DIGITS, SET, every, parts_of, union
from soapjax.costs.tables.arrays import ROW_LAYOUTS, CostArrays, Places, Records, edge_of, places_of
from soapjax.costs.tables.buckets import Bucket
from soapjax.jit.array_types import Array
from soapjax.jit.kernel import added, in_kernel, put, row, zeroed


class Slots(NamedTuple):
    """What operators decide, [n, ..., Q] by places of the records."""

    layout: Array  # SET [n, W, Q]
    work: Array  # [K + 1, 2, Q]: bytes moved, and seconds of FLOPs; one array, since XLA makes two of zeros by copying one


class Stored(NamedTuple):
    """Of parameters."""

    layout: Array  # SET [n, W, Q], of `Slots`, with those of parameters
    state_bytes: Array  # [P + 1, Q]
    shards: Array  # [P + 1, Q]


class Rows(NamedTuple):
    """Of rows that differ, each in its own places (`standing`); layouts of tensors only."""

    raw: Array  # SET [T + 1, W, Q]
    home: Array
    resolved: Array
    full_s: Array  # [X + 1, L, Q]: as if no copy were shared
    sent: Array  # [X + 1, 6, Q]: bytes by collective, as if no copy were shared
    full_bytes: Array  # [X + 1, G, Q]: what a device of each group sends, as if no copy were shared
    held: Array  # [T + 1, Q]
    copy: Array  # [E + 1, Q]
    is_sent: Array  # bool [E + 1, Q]
    transient: Array  # [T + 1, Q]
    waiting: Array  # [T + 1, 2, Q]
    on: Array  # bool [X + 1, G, Q]
    on_kept: Array  # bool [X + 1, G, Q]


def standing(at: Places) -> Rows:
    """Where each of a row's figures stands, by where rows do."""
    return Rows(
        raw=at.tensor, home=at.tensor, resolved=at.tensor, full_s=at.row, sent=at.row, full_bytes=at.row, held=at.tensor,
        copy=at.edge, is_sent=at.edge, transient=at.tensor, waiting=at.tensor, on=at.row, on_kept=at.row,
    )  # fmt: skip


class PerRecord(NamedTuple):
    """Of each operator, slot, task, parameter, reader and row; what stands behind a problem's last means nothing."""

    config: Array  # SET [N, C, Q]
    layout: Array  # SET [slots + 1, W, Q]
    compute_s: Array  # [K + 1, Q]
    on_compute: Array  # bool [K + 1, G, Q]
    rows: Rows
    equal: Places  # int32 [T + 1], [E + 1], [X + 1]: where the figures in `rows` of each row stand
    paid_s: Array  # [X + 1, L, Q]
    on_rows: Array  # bool [X + 1, G, Q]: who takes part
    state_bytes: Array  # [P + 1, Q]
    shards: Array  # [P + 1, Q]
    on_stored: Array  # bool [P + 1, G, Q]
    previous: Array  # int32 [E + 1, Q]: the last reader before it of the same copy, -1 where it pays
    memory: Array  # [K + 1, Q]: bytes while each task runs, of the device that holds most then


class Accumulators(NamedTuple):
    """What is added up in: whatever an earlier call left there, which nobody reads."""

    work: Array  # as in `Slots`
    steps: Steps


class Over(NamedTuple):
    """What a call's results are written over."""

    per_record: PerRecord
    scratch: Accumulators


class Evaluated(NamedTuple):
    """All figures of Q strategies."""

    over: Over
    memory_bytes: Array  # [4, Q], as in `Costs`
    sent_bytes: Array  # [Q]: by the device that sends most
    violations: Array  # int32 [Q]

    @property
    def per_record(self) -> PerRecord:
        return self.over.per_record


def slots_pass(p: CostArrays, records: Records, of: Span, config: Array, begun: Slots, others: Array) -> Slots:
    """Layouts of some slots, and what their tasks compute and move.

    `config` [n, C, Q] by the records' operators; `others` [n, W] layouts that slots are copied from.
    """
    dims = p.row_shape.shape[1]

    def body(j: Array, state: Slots) -> Slots:
        record, sizes = row(records.slot, of.record(j)), row(records.slot_float, of.record(j))
        width = state.layout.shape[1]
        copied, place, task, op = (record[width + i] for i in range(4))
        start = jnp.where(copied >= 0, row(others, jnp.maximum(copied, 0)), jnp.zeros((), SET))
        layout = slot_layout(p, record, row(config, op), jnp.broadcast_to(start[:, None], state.layout.shape[1:]))
        split = parts_of(p.mesh, union(layout[:dims]))
        return Slots(put(state.layout, place, layout), added(state.work, task, sizes[:, None] / split))

    return lax.fori_loop(0, of.number, body, begun)


def parameters_pass(p: CostArrays, records: Records, of: Span, storage: Array, begun: Stored) -> Stored:
    """Storages of some parameters; `storage` int8 [n, Q] by the records' operators."""
    dims = p.row_shape.shape[1]

    def body(j: Array, state: Stored) -> Stored:
        which, used, summand, *places, op = (row(records.parameter, of.record(j))[i] for i in range(8))
        axes = jnp.zeros((3, *storage.shape[1:]), SET)
        chosen = row(storage, op).astype(jnp.int32)
        axes = lax.fori_loop(
            0, p.storage_axes.shape[0], lambda i, x: jnp.where(chosen == i, row(p.storage_axes, i)[:, None], x), axes
        )  # fmt: skip
        found = stored_layout(p, which, row(state.layout, used), row(state.layout, summand), axes)
        shards = parts_of(p.mesh, union(found[0][:dims]))
        layout = state.layout
        for place, one in zip(places, found, strict=True):
            layout = put(layout, place, one)
        bytes_, at = row(p.state_bytes, which) / shards, of.place(j)
        return Stored(layout, put(state.state_bytes, at, bytes_), put(state.shards, at, shards))

    return lax.fori_loop(0, of.number, body, begun)


def tasks_pass(
    p: CostArrays, records: Records, of: Span, config: Array, work: Array, shards: Array, begun: Array
) -> Array:
    """Seconds [n, Q] of some tasks, by the `work` of their slots; `shards` [n, Q] by the records of parameters."""

    def body(j: Array, found: Array) -> Array:
        which, updated, op = (row(records.task, of.record(j))[i] for i in range(3))
        split = row(config, op), updated >= 0, row(shards, jnp.maximum(updated, 0))
        return put(found, of.place(j), compute_s(p, which, row(work, of.place(j)), *split))

    return lax.fori_loop(0, of.number, body, begun)


def sharing_pass(p: CostArrays, layout: Array, again: Array, begun: Array) -> Array:
    """`PerRecord.previous` of slots [n, W, Q] and `again` bool [N, Q]: whose parameters are gathered anew for the backward pass.

    A reader whose copy an earlier reader of the same tensor has made already, in the same layout, is its heir and pays nothing.
    """

    def own_copy(e: Array) -> Array:
        op = row(p.edge_group, e)[3]
        return row(again, jnp.maximum(op, 0)) & (op >= 0)

    def of_edge(e: Array, previous: Array) -> Array:
        first, place = row(p.edge_group, e)[0], row(p.edge_group, e)[1]
        wanted, own = row(layout, row(p.edge_life, e)[3]), own_copy(e)

        def earlier(state: tuple[Array, Array]) -> tuple[Array, Array]:
            c, found = state
            y = row(p.members, c)
            same = every(row(layout, row(p.edge_life, y)[3]) == wanted) & (own_copy(y) == own)
            return c - 1, jnp.where((found < 0) & same, y, found)

        start: tuple[Array, Array] = place - 1, jnp.full(previous.shape[1:], -1, previous.dtype)
        return put(previous, e, lax.while_loop(lambda x: (x[0] >= first) & (x[1] < 0).any(), earlier, start)[1])

    return lax.fori_loop(0, p.counts[4], of_edge, begun)


def rows_pass(p: CostArrays, records: Records, of: DistinctRows, layout: Array, begun: Rows) -> Rows:
    """The rows of a problem that differ, as if no copy were shared."""

    def body(j: Array, rows: Rows) -> Rows:
        x = row(of.order, j)
        record = row(records.row, x)
        found = row_costs(p, record, *(row(layout, record[i]) for i in ROW_LAYOUTS))
        return Rows._make(map(put, rows, standing(places_of(p, x)), found))

    return lax.fori_loop(0, of.number, body, begun)


def paid_pass(p: CostArrays, previous: Array, rows: Rows, equal: Array, begun: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """Of all rows: seconds as they are paid [X + 1, L, Q], who takes part, and what a device of each group sends in them [G, Q].

    The first two are put into `begun`.
    """
    groups, lanes = rows.full_bytes.shape[1:]

    def body(x: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        paid_s, on, sent_on = state
        of, pays = row(equal, x), (row(previous, edge_of(p, x)) < 0).astype(jnp.float32)
        on = put(on, x, row(rows.on, of)) if p.has_pins else on
        return put(paid_s, x, row(rows.full_s, of) * pays), on, sent_on + row(rows.full_bytes, of) * pays

    return lax.fori_loop(0, p.counts[5], body, (*begun, jnp.zeros((groups, lanes))))


def on_pass(
    p: CostArrays, records: Records, parameters: Span, tasks: Span, config: Array, layout: Array,
    begun: tuple[Array, Array],
) -> tuple[Array, Array]:  # fmt: skip
    """The device groups that compute some tasks and that store some parameters, bool [n, G, Q] each.

    They are put into `begun`, two arrays of that kind.
    """
    op_dims = p.divisors.shape[1]

    def stored(j: Array, found: Array) -> Array:
        return put(found, parameters.place(j), holders(p, row(layout, row(records.parameter, parameters.record(j))[3])))

    on_stored = lax.fori_loop(0, parameters.number, stored, begun[1])

    def task(j: Array, found: Array) -> Array:
        _, updated, op = (row(records.task, tasks.record(j))[i] for i in range(3))
        of_op = on_groups(p, row(config, op)[op_dims:])
        return put(found, tasks.place(j), jnp.where(updated >= 0, row(on_stored, jnp.maximum(updated, 0)), of_op))

    return lax.fori_loop(0, tasks.number, task, begun[0]), on_stored


def evaluate(p: CostArrays, records: Records, axes: Array, storage: Array, over: Over) -> Evaluated:
    """Of strategies int8 [N, A, Q] and [N, Q], in the sizes of the problem's bucket. Pure.

    `over` is what an earlier call on any problem of the bucket gave, or `nothing_yet`.
    """
    q, width = storage.shape[1], p.row_fixed.shape[1]
    before, scratch = over
    slots, parameters, tasks = (Span(jnp.int32(0), p.counts[i]) for i in (6, 1, 2))

    def configs(p, axes, begun):
        return lax.fori_loop(0, p.counts[0], lambda n, found: put(found, n, config_of(p, row(axes, n))), begun)

    def slots_of(p, records, of, config, layout, work):
        begun = Slots(layout, zeroed(work, p.counts[2]))
        return slots_pass(p, records, of, config, begun, jnp.zeros((1, width), SET))

    def bad(p, config):
        return lax.fori_loop(0, p.counts[0], lambda n, v: v + violations(p, n, row(config, n)), jnp.zeros(q, jnp.int32))

    config = in_kernel(configs, p, axes, before.config)
    found = in_kernel(slots_of, p, records, slots, config, before.layout, scratch.work)
    begun = Stored(found.layout, before.state_bytes, before.shards)
    stored = in_kernel(parameters_pass, p, records, parameters, storage, begun)
    seconds = in_kernel(tasks_pass, p, records, tasks, config, found.work, stored.shards, before.compute_s)
    layouts = in_kernel(equal_layouts, p, stored.layout)
    apart = in_kernel(distinct_rows, p, records, layouts, before.equal)
    rows = in_kernel(rows_pass, p, records, apart, stored.layout, before.rows)
    previous = in_kernel(sharing_pass, p, stored.layout, gathers_again(p, storage), before.previous)
    paid_s, on_rows, sent_on = in_kernel(paid_pass, p, previous, rows, apart.equal.row, (before.paid_s, before.on_rows))
    on_compute, on_stored = before.on_compute, before.on_stored
    if p.has_pins:
        on_compute, on_stored = in_kernel(
            on_pass, p, records, parameters, tasks, config, stored.layout, (on_compute, on_stored)
        )  # fmt: skip
    lives = Lives(
        held=rows.held, copy=rows.copy, is_sent=rows.is_sent, transient=rows.transient, waiting=rows.waiting, previous=previous,
        on=rows.on, on_kept=rows.on_kept, equal=apart.equal,
    )  # fmt: skip
    memory, curve, steps = in_kernel(memory_of, p, lives, stored.state_bytes, on_stored, before.memory, scratch.steps)
    each = PerRecord(
        config=config, layout=stored.layout, compute_s=seconds, on_compute=on_compute, rows=rows, equal=apart.equal, paid_s=paid_s,
        on_rows=on_rows, state_bytes=stored.state_bytes, shards=stored.shards, on_stored=on_stored, previous=previous, memory=curve,
    )  # fmt: skip
    written = Over(each, Accumulators(found.work, steps))
    return Evaluated(written, memory_bytes=memory, sent_bytes=sent_on.max(0), violations=in_kernel(bad, p, config))


def nothing_yet(b: Bucket, lanes: int) -> Over:
    """For problems of a bucket, before the first call."""
    steps = no_steps(b.tasks, max(b.groups, 1), lanes)
    return Over(no_records(b, lanes), Accumulators(np.zeros((b.tasks + 1, 2, lanes), np.float32), steps))


def no_records(b: Bucket, lanes: int) -> PerRecord:
    """In `nothing_yet`."""
    tensors, edges, rows, tasks, parameters = (n + 1 for n in (b.tensors, b.edges, b.rows, b.tasks, b.parameters))
    groups = max(b.groups, 1)

    def zeros(*shape: int, dtype=np.float32) -> np.ndarray:
        return np.zeros((*shape, lanes), dtype)

    def layouts(count: int) -> np.ndarray:
        return zeros(count, b.width, dtype=np.int16)

    def truths(count: int, truth: bool) -> np.ndarray:
        return np.full((count, groups, lanes), truth)

    columns = b.op_dims + (1 + DIGITS if b.groups else 0)
    of_rows = Rows(
        raw=layouts(tensors), home=layouts(tensors), resolved=layouts(tensors), full_s=zeros(rows, b.levels),
        sent=zeros(rows, len(COLLECTIVES)), full_bytes=zeros(rows, groups), held=zeros(tensors), copy=zeros(edges),
        is_sent=zeros(edges, dtype=bool), transient=zeros(tensors), waiting=zeros(tensors, 2), on=truths(rows, False),
        on_kept=truths(rows, False),
    )  # fmt: skip
    each_itself = Places(*(np.arange(n, dtype=np.int32) for n in (tensors, edges, rows)))
    alike = not b.groups  # all devices do the same
    return PerRecord(
        config=zeros(b.operators, columns, dtype=np.int16), layout=layouts(b.slots + 1), compute_s=zeros(tasks),
        on_compute=truths(tasks, alike), rows=of_rows, equal=each_itself, paid_s=zeros(rows, b.levels), on_rows=truths(rows, alike),
        state_bytes=zeros(parameters), shards=zeros(parameters) + 1, on_stored=truths(parameters, alike), memory=zeros(tasks),
        previous=np.full((edges, lanes), -1, np.int32),
    )  # fmt: skip
