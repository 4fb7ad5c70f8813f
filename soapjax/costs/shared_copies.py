"""Which readers share a converted copy: who pays, and since when a copy is held.

A reader whose copy an earlier reader of the same tensor has made already, in the same layout, is its heir and pays nothing.
`shared_since` finds out for a whole strategy, `sharing_after` once one operator's conversions changed.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from soapjax.costs.indexing import put, rows
from soapjax.costs.indexing import row as one_row
from soapjax.costs.layouts import words_of
from soapjax.costs.local import SHORT
from soapjax.costs.tables import CostTables

if TYPE_CHECKING:
    from soapjax.costs.change import Arrays, Base

_OWN_COPY = 1 << 30  # in the first word of a key: above all layouts


def keys_of(layout: Array, regathered: Array) -> Array:
    """int32 [..., W]: equal where two readers could use one copy, layouts [..., A] and the backward pass' own copies."""
    return jnp.stack(_keys_of_words(words_of(layout), regathered), -1)


def _keys_of_words(words: list[Array], regathered: Array) -> list[Array]:
    return [words[0] + jnp.where(regathered, _OWN_COPY, 0), *words[1:]]


def made_again(tables: CostTables, storage: Array, edge: np.ndarray) -> Array:
    """Whether readers `edge` [...], a constant, gather their parameter anew for the backward pass, by `storage` [N]."""
    parameter = tables.edge_parameter[edge]
    may = (parameter >= 0) & tables.edge_is_backward[edge]
    if not may.any():
        return jnp.zeros(edge.shape, bool)
    again = rows(jnp.asarray(tables.storage_regather), rows(storage, tables.parameter_op).astype(jnp.int32))  # [P]
    return rows(again, np.maximum(parameter, 0)) & may


def shared_since(tables: CostTables, slots: Array, storage: Array) -> Array:
    """int32 [E]: the task after the last earlier reader of the same copy, 0 where it is made for this reader."""
    num_e = len(tables.edge_task)
    words = words_of(slots)
    found, count, position = [], 0, np.full(num_e, -1)
    for block in _blocks(tables):
        is_real = block < num_e
        edge = np.where(is_real, block, 0)
        # All readers of a row are compared with all: vector instructions, where a list of pairs would be gathered one by one.
        before = np.triu(np.ones((edge.shape[1],) * 2, bool), 1) & is_real[:, :, None] & is_real[:, None, :]
        same = jnp.asarray(before)  # [C, R, R]: the earlier one first
        of_block = [rows(word, tables.edge_slot[edge]) for word in words]
        for key in _keys_of_words(of_block, made_again(tables, storage, edge)):
            same &= key[:, :, None] == key[:, None, :]
        found.append(jnp.where(same, (tables.edge_task[edge] + 1)[:, :, None], 0).max(1).reshape(-1))
        position[edge[is_real]] = (count + np.arange(edge.size).reshape(edge.shape))[is_real]
        count += edge.size
    position = np.where(position < 0, count, position)  # those alone in their group: the zero behind
    return rows(jnp.concatenate([*found, jnp.zeros(1, jnp.int32)]), position)


def _blocks(tables: CostTables) -> list[np.ndarray]:
    """int32 [C, R] each: the members of groups of readers of about R, in order and padded with E; none of groups of one."""
    by_width: dict[int, list[list[int]]] = defaultdict(list)
    for some in tables.reader_groups():
        if len(some) > 1:
            power = 1 << (len(some) - 1).bit_length()
            step = power // 8 if power > 8 else power  # of long ones four widths to a power of two
            by_width[-(-len(some) // step) * step].append(some)
    blocks = []
    for width, alike in sorted(by_width.items()):
        block = np.full((len(alike), width), len(tables.edge_group), np.int32)
        for i, some in enumerate(alike):
            block[i, : len(some)] = some
        blocks.append(block)
    return blocks


def sharing_after(
    arrays: Arrays, num: tuple[int, int], edge: Array, base: Base, key: Array
) -> tuple[Array, Array, Array]:
    """(since [e], heir [2o], heir_since [2o]) when the first num[1] of `edge`, num[0] of them in long rows, have `key` [o, W]."""
    num_long, num_keyed = num
    parts = []
    if num_long:
        parts.append(_sharing_of(arrays, arrays.row, edge[:num_long], base, key[:num_long]))
    if num_keyed > num_long:
        parts.append(_sharing_of(arrays, arrays.row[:, :SHORT], edge[num_long:num_keyed], base, key[num_long:]))
    since_keyed, heir, heir_since = (jnp.concatenate(x) for x in zip(*parts, strict=True))
    pad = len(arrays.edge_task) - 1
    rest = edge[num_keyed:]
    # Heirs among the operator's own other conversions: where they stand is the same for all candidates.
    position = put(jnp.full(pad + 1, len(rest), jnp.int32), rest, jnp.arange(len(rest), dtype=jnp.int32)).at[pad].set(len(rest))
    own = rows(position, heir)
    inherited = jnp.full(len(rest) + 1, -1, jnp.int32).at[own].max(heir_since, mode="promise_in_bounds")[:-1]
    since_rest = jnp.where(inherited >= 0, inherited, rows(base.since, rest))
    heir = jnp.where(own < len(rest), pad, heir)
    return jnp.concatenate([since_keyed, since_rest]), heir, heir_since


def _sharing_of(arrays: Arrays, row: Array, keyed: Array, base: Base, key: Array) -> tuple[Array, Array, Array]:
    """(since [o], heir [2o], heir_since [2o]) of readers `keyed` [o] among the others of their rows.

    Among the readers of a tensor only the next one behind a changed reader can be affected by it: any other has one in
    between that it follows as before.
    """
    pad, length = len(arrays.edge_task) - 1, row.shape[1]
    members = rows(row, keyed)  # [o, R]
    is_keyed = put(jnp.zeros(pad + 1, bool), keyed, True)
    others = ~rows(is_keyed, members) & (members != pad)
    row_key, after_task = rows(base.key, members), rows(arrays.edge_task, members) + 1
    position, own_after = rows(arrays.column, keyed), rows(arrays.edge_task, keyed) + 1
    together = (rows(arrays.group, keyed)[:, None] == rows(arrays.group, keyed)) & (keyed != pad)  # [o, o]
    old = rows(base.key, keyed)
    same_old = (row_key == old[:, None]).all(-1) & others
    columns = jnp.arange(length)
    next_old = jnp.where(same_old & (columns > position[:, None]), columns, length).min(1)  # R where there is none
    until_old = jnp.where(same_old & (columns < next_old[:, None]), after_task, 0).max(1)

    # Loops over the other readers, not one reduction: with all candidates side by side a turn is a vector operation, and nothing
    # of the size of readers × readers × candidates is made.
    def other(c: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        before, next_new = state
        same = (row_key[:, c] == key).all(-1) & others[:, c]
        before = jnp.where(same & (c < position), jnp.maximum(before, after_task[:, c]), before)
        return before, jnp.where(same & (c > position), jnp.minimum(next_new, c), next_new)

    nobody = jnp.zeros(len(keyed), jnp.int32), jnp.full(len(keyed), length, jnp.int32)
    before, next_new = jax.lax.fori_loop(0, length, other, nobody)

    def own(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """The task after the latest reader in front of three columns: the keyed reader's own, and its two heirs'."""
        after = jnp.where(one_row(together, j), one_row(own_after, j), 0)
        now = one_row(key, j)
        limits = ((key, position), (key, next_new), (old, next_old))
        return tuple(
            jnp.where((now == wanted).all(-1) & (one_row(position, j) < limit), jnp.maximum(x, after), x)
            for x, (wanted, limit) in zip(state, limits, strict=True)
        )

    # The next reader of the new key has the same others before it: no reader between is one.
    since_keyed, since_new, since_old = jax.lax.fori_loop(0, len(keyed), own, (before, before, until_old))
    padded = jnp.concatenate([members, jnp.full((len(keyed), 1), pad, members.dtype)], 1).reshape(-1)
    first = jnp.arange(len(keyed)) * (length + 1)
    heir = rows(padded, jnp.concatenate([first + next_new, first + next_old]))
    return since_keyed, heir, jnp.concatenate([since_new, since_old])
