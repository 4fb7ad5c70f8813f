"""What whole strategies cost: the rules (record_rules.py) applied to all records of a problem, Q strategies side by side.

Pure functions of a problem's arrays and of configs: compiled once for all problems of a bucket. Each loop is one kernel, whose
lists have as many turns as the problem has entries.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from soapjax.costs.memory.peak_memory import Lives, memory_of
from soapjax.costs.rules.record_rules import (
    compute_s,
    configs_of,
    gathers_again,
    holders,
    on_groups,
    row_costs,
    slot_layout,
    stored_layout,
    violations,
)
from soapjax.costs.rules.sets import SET, every, parts_of, union
from soapjax.costs.tables.arrays import CostArrays, Records, edge_of
from soapjax.jit.array_types import Array
from soapjax.jit.kernel import added, in_kernel, put, row


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
    """Of all rows; layouts of tensors only."""

    raw: Array  # SET [T + 1, W, Q]
    home: Array
    resolved: Array
    full_s: Array  # [X + 1, L, Q]: as if no copy were shared
    paid_s: Array  # [X + 1, L, Q]
    sent: Array  # [6, Q] bytes by collective
    full_bytes: Array  # [X + 1, G, Q]: what a device of each group sends, as if no copy were shared
    sent_on: Array  # [G, Q]: of all rows, as they are paid
    held: Array  # [T + 1, Q]
    copy: Array  # [E + 1, Q]
    is_sent: Array  # bool [E + 1, Q]
    transient: Array  # [T + 1, Q]
    waiting: Array  # [T + 1, 2, Q]
    on: Array  # bool [X + 1, G, Q]
    on_kept: Array  # bool [X + 1, G, Q]


class Evaluated(NamedTuple):
    """All figures of Q strategies."""

    layout: Array  # SET [slots + 1, W, Q]
    compute_s: Array  # [K + 1, Q]
    on_compute: Array  # bool [K + 1, G, Q]
    rows: Rows
    state_bytes: Array  # [P + 1, Q]
    on_stored: Array  # bool [P + 1, G, Q]
    since: Array  # int32 [E + 1, Q]: the task after the last earlier reader of the same copy, 0 where this reader pays
    memory_bytes: Array  # [4, Q], as in `Costs`
    sent_bytes: Array  # [Q]: by the device that sends most
    violations: Array  # int32 [Q]


def slots_pass(p: CostArrays, records: Records, first: Array, count: Array, config: Array, begun: Slots, others: Array) -> Slots:
    """Layouts of `count` slot records, and what their tasks compute and move.

    `config` [n, C, Q] by the records' operators; `others` [n, W] layouts that slots are copied from.
    """
    dims = p.row_shape.shape[1]

    def body(j: Array, state: Slots) -> Slots:
        record, sizes = row(records.slot, first + j), row(records.slot_float, first + j)
        width = state.layout.shape[1]
        copied, place, task, op = (record[width + i] for i in range(4))
        start = jnp.where(copied >= 0, row(others, jnp.maximum(copied, 0)), jnp.zeros((), SET))
        layout = slot_layout(p, record, row(config, op), jnp.broadcast_to(start[:, None], state.layout.shape[1:]))
        split = parts_of(p.mesh, union(layout[:dims]))
        return Slots(put(state.layout, place, layout), added(state.work, task, sizes[:, None] / split))

    return lax.fori_loop(0, count, body, begun)


def parameters_pass(p: CostArrays, records: Records, first: Array, count: Array, storage: Array, begun: Stored) -> Stored:
    """Storages of `count` parameters; `storage` int8 [n, Q] by the records' operators."""
    dims = p.row_shape.shape[1]

    def body(j: Array, state: Stored) -> Stored:
        which, used, *places, op = (row(records.parameter, first + j)[i] for i in range(6))
        axes = jnp.zeros((2, *storage.shape[1:]), SET)
        chosen = row(storage, op).astype(jnp.int32)
        axes = lax.fori_loop(
            0, p.storage_axes.shape[0], lambda i, x: jnp.where(chosen == i, row(p.storage_axes, i)[:, None], x), axes
        )  # fmt: skip
        found = stored_layout(p, which, row(state.layout, used), axes)
        shards = parts_of(p.mesh, union(found[0][:dims]))
        layout = state.layout
        for place, one in zip(places, found, strict=True):
            layout = put(layout, place, one)
        return Stored(layout, put(state.state_bytes, j, row(p.state_bytes, which) / shards), put(state.shards, j, shards))

    return lax.fori_loop(0, count, body, begun)


def tasks_pass(
    p: CostArrays, records: Records, first: Array, count: Array, config: Array, slots: Slots, shards: Array, begun: Array
) -> Array:
    """Seconds [n, Q] of `count` tasks, in the order of their records; `shards` [n, Q] by those of parameters."""

    def body(j: Array, found: Array) -> Array:
        which, updated, op = (row(records.task, first + j)[i] for i in range(3))
        of = row(config, op), updated >= 0, row(shards, jnp.maximum(updated, 0))
        return put(found, j, compute_s(p, which, row(slots.work, j), *of))

    return lax.fori_loop(0, count, body, begun)


def sharing_pass(p: CostArrays, layout: Array, again: Array) -> Array:
    """`Evaluated.since` of slots [n, W, Q] and `again` bool [N, Q]: whose parameters are gathered anew for the backward pass.

    A reader whose copy an earlier reader of the same tensor has made already, in the same layout, is its heir and pays nothing.
    """

    def own_copy(e: Array) -> Array:
        op = row(p.edge_group, e)[3]
        return row(again, jnp.maximum(op, 0)) & (op >= 0)

    def of_edge(e: Array, since: Array) -> Array:
        first, place = row(p.edge_group, e)[0], row(p.edge_group, e)[1]
        wanted, own = row(layout, row(p.edge_life, e)[3]), own_copy(e)

        def earlier(state: tuple[Array, Array]) -> tuple[Array, Array]:
            c, found = state
            y = row(p.members, c)
            life = row(p.edge_life, y)
            same = every(row(layout, life[3]) == wanted) & (own_copy(y) == own)
            return c - 1, jnp.where((found == 0) & same, life[2], found)

        start: tuple[Array, Array] = place - 1, jnp.zeros(since.shape[1:], since.dtype)
        return put(since, e, lax.while_loop(lambda x: (x[0] >= first) & (x[1] == 0).any(), earlier, start)[1])

    return lax.fori_loop(0, p.counts[4], of_edge, jnp.zeros((p.edge_life.shape[0], layout.shape[2]), jnp.int32))


def rows_pass(p: CostArrays, records: Records, layout: Array, since: Array) -> Rows:
    """All rows of a problem."""
    num_t = p.counts[3]
    t_pad, e_pad = p.tensor_life.shape[0] - 1, p.edge_life.shape[0] - 1
    width, q = layout.shape[1:]
    levels, groups, x_rows = p.network.level_axes.shape[0], p.group_digits.shape[1], p.row_int.shape[0]

    def zeros(*shape: int, dtype=jnp.float32) -> Array:
        return jnp.zeros((*shape, q), dtype)

    def body(x: Array, state: Rows) -> Rows:
        record = row(records.row, x)
        of = row_costs(p, record, *(row(layout, record[i]) for i in range(1, 5)))
        t = jnp.where(x < num_t, x, t_pad)
        e = edge_of(p, x)
        pays = (row(since, e) == 0).astype(jnp.float32)
        return Rows(
            raw=put(state.raw, t, of.raw), home=put(state.home, t, of.home), resolved=put(state.resolved, t, of.resolved),
            full_s=put(state.full_s, x, of.seconds), paid_s=put(state.paid_s, x, of.seconds * pays),
            sent=state.sent + of.sent * pays, full_bytes=put(state.full_bytes, x, of.sent_on),
            sent_on=state.sent_on + of.sent_on * pays, held=put(state.held, t, of.held), copy=put(state.copy, e, of.copy),
            is_sent=put(state.is_sent, e, of.is_sent), transient=put(state.transient, t, of.transient),
            waiting=put(state.waiting, t, of.waiting), on=put(state.on, x, of.on), on_kept=put(state.on_kept, x, of.on_kept),
        )  # fmt: skip

    raw, home, resolved = (zeros(t_pad + 1, width, dtype=SET) for _ in range(3))
    nothing = Rows(
        raw=raw, home=home, resolved=resolved, full_s=zeros(x_rows, levels), paid_s=zeros(x_rows, levels), sent=zeros(6),
        full_bytes=zeros(x_rows, groups), sent_on=zeros(groups), held=zeros(t_pad + 1), copy=zeros(e_pad + 1),
        is_sent=zeros(e_pad + 1, dtype=bool), transient=zeros(t_pad + 1), waiting=zeros(t_pad + 1, 2),
        on=zeros(x_rows, groups, dtype=bool), on_kept=zeros(x_rows, groups, dtype=bool),
    )  # fmt: skip
    return lax.fori_loop(0, p.counts[5], body, nothing)


def on_pass(
    p: CostArrays, records: Records, parameters: tuple[Array, Array], tasks: tuple[Array, Array], config: Array, layout: Array,
    begun: tuple[Array, Array],
) -> tuple[Array, Array]:  # fmt: skip
    """The device groups that compute tasks and that store parameters, bool [n, G, Q] each, in the order of their records.

    `parameters` and `tasks` are the first of the records and their number, `begun` two arrays of that kind.
    """
    op_dims = p.divisors.shape[1]

    def stored(j: Array, found: Array) -> Array:
        return put(found, j, holders(p, row(layout, row(records.parameter, parameters[0] + j)[2])))

    on_stored = lax.fori_loop(0, parameters[1], stored, begun[1])

    def task(j: Array, found: Array) -> Array:
        _, updated, op = (row(records.task, tasks[0] + j)[i] for i in range(3))
        of_op = on_groups(p, row(config, op)[op_dims:])
        return put(found, j, jnp.where(updated >= 0, row(on_stored, jnp.maximum(updated, 0)), of_op))

    return lax.fori_loop(0, tasks[1], task, begun[0]), on_stored


def evaluate(p: CostArrays, records: Records, num_slots: int, axes: Array, storage: Array) -> Evaluated:
    """Of strategies int8 [N, A, Q] and [N, Q], in the sizes of the problem's bucket, `num_slots` among them. Pure."""
    pins = p.row_fixed.shape[1] > p.row_shape.shape[1] + 1
    q = storage.shape[1]
    num_k, num_p = p.task_float.shape[0], p.parameter_int.shape[0]
    config = configs_of(axes, p.divisors.shape[1], pins)
    width, zero = p.row_fixed.shape[1], jnp.int32(0)

    def slots(p, records, config):
        begun = Slots(jnp.zeros((num_slots + 1, width, q), SET), jnp.zeros((num_k, 2, q)))
        return slots_pass(p, records, zero, p.counts[6], config, begun, jnp.zeros((1, width), SET))

    def parameters(p, records, storage, layout):
        begun = Stored(layout, jnp.zeros((num_p, q)), jnp.ones((num_p, q)))
        return parameters_pass(p, records, zero, p.counts[1], storage, begun)

    def tasks(p, records, config, slots, shards):
        return tasks_pass(p, records, zero, p.counts[2], config, slots, shards, jnp.zeros((num_k, q)))

    def on(p, records, config, layout):
        begun = tuple(jnp.zeros((n, p.group_digits.shape[1], q), bool) for n in (num_k, num_p))
        return on_pass(p, records, (zero, p.counts[1]), (zero, p.counts[2]), config, layout, begun)

    def bad(p, config):
        return lax.fori_loop(0, p.counts[0], lambda n, v: v + violations(p, n, row(config, n)), jnp.zeros(q, jnp.int32))

    found = in_kernel(slots, p, records, config)
    stored = in_kernel(parameters, p, records, storage, found.layout)
    seconds = in_kernel(tasks, p, records, config, found, stored.shards)
    since = in_kernel(sharing_pass, p, stored.layout, gathers_again(p, storage))
    rows = in_kernel(rows_pass, p, records, stored.layout, since)
    if pins:
        on_compute, on_stored = in_kernel(on, p, records, config, stored.layout)
    else:
        on_compute, on_stored = jnp.ones((num_k, 1, q), bool), jnp.ones((num_p, 1, q), bool)
    lives = Lives(
        held=rows.held, copy=rows.copy, is_sent=rows.is_sent, transient=rows.transient, waiting=rows.waiting, since=since,
        on=rows.on, on_kept=rows.on_kept,
    )  # fmt: skip
    memory = in_kernel(memory_of, p, lives, stored.state_bytes, on_stored)
    return Evaluated(
        layout=stored.layout, compute_s=seconds, on_compute=on_compute, rows=rows, state_bytes=stored.state_bytes,
        on_stored=on_stored, since=since, memory_bytes=memory, sent_bytes=rows.sent_on.max(0),
        violations=in_kernel(bad, p, config),
    )  # fmt: skip

