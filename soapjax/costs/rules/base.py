"""One strategy's costs, summand by summand, what Q candidate configs of one operator make of some of them, and which records are
computed."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from soapjax.costs.rules.sets import SET
from soapjax.costs.tables.arrays import CostArrays
from soapjax.costs.tables.operator_records import OwnRecords, OwnSizes
from soapjax.jit.array_types import Array, Scalar
from soapjax.jit.kernel import row


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
    transient: Array  # [T + 1]
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
    transient: Array  # [R, Q]
    waiting: Array  # [R, 2, Q]
    on: Array  # bool [R, G, Q]
    on_kept: Array  # bool [R, G, Q]
    on_compute: Array  # bool [tasks, G, Q]
    on_stored: Array  # bool [parameters, G, Q]
    row_of: Array  # int32 [X + 1]: the row of the change, 0 where nothing changes
    task_of: Array  # int32 [K + 1]: 1 + the place among the operator's own tasks, 0
    heir: Array  # int32 [R]: what row a heir's row is, X for nobody
    num_heirs: Scalar  # int32 []
    again: Array  # bool [Q]: whether the operator's parameters are gathered anew


def nothing_changed(p: CostArrays, sizes: OwnSizes, lanes: int) -> Change:
    """Of the sizes of a bucket."""
    count, width = 1 + sizes.rows + sizes.heirs, p.row_fixed.shape[1]
    groups, levels = p.group_digits.shape[1], p.network.level_axes.shape[0]

    def zeros(*shape: int, dtype=jnp.float32) -> Array:
        return jnp.zeros((*shape, lanes), dtype)

    on, on_kept, on_compute, on_stored = (
        zeros(n, groups, dtype=bool) | True for n in (count, count, sizes.tasks + 1, sizes.parameters + 1)
    )
    return Change(
        layout=zeros(sizes.slots + 1, width, dtype=SET), compute_s=zeros(sizes.tasks + 1), state_bytes=zeros(sizes.parameters + 1),
        full_s=zeros(count, levels), pays=zeros(count) + 1, sent=zeros(count, groups), held=zeros(count), copy=zeros(count),
        is_sent=zeros(count, dtype=bool), transient=zeros(count), waiting=zeros(count, 2), on=on, on_kept=on_kept,
        on_compute=on_compute, on_stored=on_stored, row_of=jnp.zeros(p.row_int.shape[0], jnp.int32),
        task_of=jnp.zeros(p.task_float.shape[0], jnp.int32), heir=jnp.full(count, p.row_int.shape[0] - 1, jnp.int32),
        num_heirs=jnp.int32(0), again=jnp.zeros(lanes, bool),
    )  # fmt: skip


class Span(NamedTuple):
    """Records that follow one another, computed into a buffer of their own: from 0 on."""

    first: Array  # int32 []
    number: Array  # int32 []

    def record(self, j: Array) -> Array:
        """Which one the j-th is."""
        return self.first + j

    def place(self, j: Array) -> Array:
        """Where what it gives is put."""
        return j


def span(own: OwnRecords, n: Array, kind: int) -> Span:
    """An operator's slots, parameters, tasks, rows or groups."""
    found = row(own.spans, n)[kind]
    return Span(found[0], found[1])
