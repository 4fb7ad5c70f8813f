"""Who pays for copies that several readers share, and since when they are held, as one operator's readers change their wishes.

A reader whose copy an earlier reader of the same tensor has made already, in the same layout, is its heir and pays nothing.
Of whole strategies whole.py says so.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from soapjax.costs.rules.base import Base, Change, span
from soapjax.costs.rules.record_rules import gathers_again
from soapjax.costs.rules.sets import every, only_if
from soapjax.costs.tables.arrays import CostArrays, edge_of
from soapjax.costs.tables.operator_records import OwnRecords
from soapjax.jit.array_types import Array
from soapjax.jit.kernel import put, row


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
        """The reshard behind entry `i` of the keyed rows."""
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


def paying(
    p: CostArrays, own: OwnRecords, base: Base, into: Change, n: Array, *, names: tuple[str, ...]
) -> tuple[tuple[Array, ...], list[Array]]:
    """Who pays for copies: (pays, row_of, heir, num_heirs) of `Change`, and its figures `names` with those of heirs.

    Of the readers whose wish is as before only the first of each copy can start or stop paying: a later one follows that one.
    """
    readers = Readers(p, own, base, into, n)
    nobody = p.row_int.shape[0] - 1
    num_t, q = p.counts[3], into.pays.shape[1]

    def as_before(j: Array, pays: Array) -> Array:
        x = row(own.records.row, readers.first + j)[0]
        return put(pays, 1 + j, jnp.full(q, row(base.previous, edge_of(p, x)) < 0, jnp.float32))

    pays = lax.fori_loop(0, readers.count, as_before, into.pays)
    first_g, num_g = span(own, n, 4)

    def group(g: Array, state):
        first, count, first_k, num_k = (row(own.group, first_g + g)[i] for i in range(4))

        def no_keyed_before(e: Array, stop: Array) -> Array:
            """1 where no keyed reader before place `stop` wants the copy of `e`."""

            def one(i: Array, free: Array) -> Array:
                z = readers.keyed(i)
                is_before = row(p.edge_group, z)[1] < stop
                return only_if(~(is_before & readers.same(e, z)), free)

            return lax.fori_loop(first_k, first_k + num_k, one, jnp.ones(q))

        def member(c: Array, state):
            pays, heir, count = state
            e = row(p.members, c)
            x, place = num_t + e, row(p.edge_group, e)[1]
            is_keyed = readers.is_keyed(e)

            def earlier(d: Array, free: Array) -> Array:
                """Not where an unchanged reader before it wants the same: the first of each copy stands for all."""
                y = row(p.members, d)
                asks = ~readers.is_keyed(y) & (readers.before(y) < 0)
                return lax.fori_loop(0, asks.astype(jnp.int32), lambda _, f: only_if(~readers.same(y, e), f), free)

            free = lax.fori_loop(first, jnp.where(is_keyed, c, first), earlier, no_keyed_before(e, place))
            now = only_if(is_keyed | (readers.before(e) < 0), free)
            r = readers.row_of(e)
            is_heir = (r == 0) & (now != (row(base.previous, e) < 0).astype(now.dtype)).any()
            r = jnp.where(is_heir, 1 + readers.count + count, r)
            pays = put(pays, r, jnp.where(r > 0, now, 1.0))
            heir = put(heir, jnp.where(is_heir, r, 0), jnp.where(is_heir, x, nobody))
            return pays, heir, count + is_heir.astype(count.dtype)

        return lax.fori_loop(first, first + count, member, state)

    pays, heir, count = lax.fori_loop(0, num_g, group, (pays, into.heir, jnp.int32(0)))

    row_of, *figures = _placed(base, into, heir, 1 + readers.count, count, names)
    return (pays, row_of, heir, count), figures


def _placed(base: Base, into: Change, heir: Array, first: Array, count: Array, names: tuple[str, ...]) -> tuple[Array, ...]:
    """`row_of` of `Change` and its figures `names` with heirs from row `first` on: what they pay, if they do, is as before."""

    def one(i: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        r = first + i
        x, (row_of, *figures) = row(heir, r), state
        of_base = (row(getattr(base, name), x)[..., None] for name in names)
        same = (jnp.broadcast_to(z, y.shape[1:]) for z, y in zip(of_base, figures, strict=True))
        return put(row_of, x, r), *(put(y, r, z) for y, z in zip(figures, same, strict=True))

    return lax.fori_loop(0, count, one, (into.row_of, *(getattr(into, name) for name in names)))


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
