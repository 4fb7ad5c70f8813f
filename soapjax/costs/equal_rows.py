"""Rows that cost the same: of equal numbers, between the same layouts in every lane.

Layers and time steps repeat, so most rows of a graph equal another one: of NMT's 12,515 rows under 32 strategies, 300 to 800
differ. Those are computed (`rows_pass` in whole.py), and read in place of the others, which would be 40 MB to write. Equal ones are
found by a hash of the layouts and compared in full, so that nothing depends on the hash but how many are computed.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from soapjax.costs.rules.sets import SET, union
from soapjax.costs.tables.arrays import ROW_LAYOUTS, CostArrays, Places, Records, places_of
from soapjax.jit.array_types import Array
from soapjax.jit.kernel import put, row

HASH_BITS = 14  # of the table of rows that were met: a row that finds its place taken by another is computed
_FACTORS = np.random.default_rng(0).integers(0, 2**15, 32, np.int16) | 1  # of the hash, by column
_MIXED = np.int32(-1640531527)  # 2^32 over the golden ratio: its multiples differ in their first bits (Knuth, volume 3, 6.4)


class Met(NamedTuple):
    """What was met so far, by hash. An entry is written one turn late: XLA would copy a table that is read before it is written."""

    table: Array  # int32 [2 ** HASH_BITS], -1 for nobody
    place: Array  # int32 []: of the entry that is not written yet
    last: Array  # int32 []: that entry


class DistinctRows(NamedTuple):
    """All rows, told apart."""

    order: Array  # int32 [X + 1]: the computed ones are the first `number`
    number: Array  # int32 []
    equal: Places  # int32 [T + 1], [E + 1] and [X + 1]: the computed one that each equals, itself perhaps


def equal_layouts(p: CostArrays, layout: Array) -> Array:
    """int32 [n]: of each slot one that has the same of the layouts [n, W, Q] in every lane; its own number where none was found."""

    def body(i: Array, state: tuple[Met, Array]) -> tuple[Met, Array]:
        own = row(layout, i)
        place = _place(_mark(own))
        met, other = _looked_up(state[0], place)
        known = row(layout, jnp.maximum(other, 0))
        same = (other >= 0) & ~(union(own ^ known) != 0).any()
        equal = jnp.where(same, other, i)
        return met._replace(last=equal, place=place), put(state[1], i, equal)

    return lax.fori_loop(0, p.counts[7], body, (_nobody(), jnp.zeros(layout.shape[0], jnp.int32)))[1]


def distinct_rows(p: CostArrays, records: Records, layouts: Array, begun: Places) -> DistinctRows:
    """Of all rows of a problem, by `equal_layouts` of its slots. Written over `begun`, which stays as it is behind the last row."""

    def key_of(x: Array) -> list[Array]:
        record = row(records.row, x)
        return [row(p.row_class, record[0]), *(row(layouts, record[i]) for i in ROW_LAYOUTS)]

    def body(x: Array, state: tuple[Met, Array, Array, Places]) -> tuple[Met, Array, Array, Places]:
        met, order, number, equal = state
        own = key_of(x)
        place = _place(functools.reduce(lambda mark, one: mark * _MIXED + one, own))
        met, other = _looked_up(met, place)
        known = jnp.maximum(other, 0)
        differs = functools.reduce(jnp.bitwise_or, [a ^ b for a, b in zip(own, key_of(known), strict=True)])
        is_new = (other < 0) | (differs != 0)
        of = jnp.where(is_new, x, known)
        equal = Places._make(map(put, equal, places_of(p, x), places_of(p, of)))
        # The entry behind the last distinct one is written always, and counted only where it is another.
        return met._replace(last=of, place=place), put(order, number, x), number + is_new.astype(jnp.int32), equal

    nothing, none = jnp.zeros(p.row_class.shape[0], jnp.int32), jnp.int32(0)
    _, order, number, equal = lax.fori_loop(0, p.counts[5], body, (_nobody(), nothing, none, begun))
    return DistinctRows(order, number, equal)


def _nobody() -> Met:
    nobody: Array = jnp.int32(-1)
    return Met(jnp.full(1 << HASH_BITS, nobody), jnp.int32(0), nobody)


def _looked_up(met: Met, place: Array) -> tuple[Met, Array]:
    table = put(met.table, met.place, met.last)
    return met._replace(table=table), row(table, place)


def _place(mark: Array) -> Array:
    """Of a number int32 [] in the table."""
    return lax.shift_right_logical(mark * _MIXED, jnp.int32(32 - HASH_BITS))


def _mark(layout: Array) -> Array:
    """A number int32 [] by a layout SET [W, Q]: different ones seldom have the same."""
    width, lanes = layout.shape
    mixed = functools.reduce(jnp.add, [layout[w] * SET(_FACTORS[w % len(_FACTORS)]) for w in range(width)])
    return (mixed.astype(jnp.int32) * (2 * jnp.arange(lanes, dtype=jnp.int32) + 1)).sum()
