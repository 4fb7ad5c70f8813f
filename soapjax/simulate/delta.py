"""The batched exact delta simulation: all candidates of one operator beside one strategy, without simulating the rest.

With a static order a step is linear in the max-plus algebra, so whatever no candidate changes can be
composed beforehand. Three exact reductions leave a short list of items, the same for all candidates:

1. An item that takes no time under the strategy nor under any candidate passes its predecessor's end on:
   it is skipped, and who waits for it waits for the first item before it that takes time (its *root*).
2. A wait for a compute item of the same devices is implied by the order on the compute stream: skipped.
3. Compute items that then wait for nothing, and for which nothing on another stream waits, run back to back:
   a run of them is one duration, paid before the item that follows (max-plus matrices of translations add up).

What is left, the communication that takes time and the compute items around it, is walked once, all candidates side by
side. Far effects need no special case: the sync of a weight that forty time steps share is an item of the list as
any other. With pins the order on a stream implies less: reductions 2 and 3 are left out, and every
item says which groups of devices take part.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from soapjax.costs.change import Base, Change
from soapjax.costs.indexing import add, put, rows
from soapjax.costs.indexing import row as one_row
from soapjax.costs.local import LocalTables
from soapjax.simulate.items import NONE, Items, by_stream, with_nothing
from soapjax.simulate.walk import walk


class ItemArrays(NamedTuple):
    """`Items` on the device; T items and one behind them that means "none"."""

    index: Array  # int32 [T]: row of `figures`
    predecessor: Array  # int32 [T]: T where there is none
    is_link: Array  # bool [T]
    is_compute: Array  # bool [T]
    is_barrier: Array  # bool [T]
    of_compute: Array  # int32 [K + 1], T for the pad; and so on
    of_convert: Array  # int32 [E + 1]
    of_resolve: Array  # int32 [T' + 1]
    of_sum: Array  # int32 [S + 1]


def item_arrays(items: Items) -> tuple[ItemArrays, int]:
    """The arrays, and how many doublings reach the end of the longest chain of items that may all be skipped."""
    n = items.num_items
    predecessor = np.where(items.predecessor == NONE, n, items.predecessor).astype(np.int32)
    depth = np.zeros(n + 1, np.int32)
    for t in range(n):
        depth[t] = 0 if items.is_compute[t] or items.predecessor[t] == NONE else depth[predecessor[t]] + 1
    # Each kind of figure has a pad row in `Base`, and so a pad row here.
    sizes = [len(x) + 1 for x in (items.of_compute, items.of_sum, items.of_resolve, items.of_convert)]

    def padded(x: np.ndarray) -> Array:
        return jnp.asarray(np.append(x, n).astype(np.int32))

    return ItemArrays(
        jnp.asarray(items.index(*sizes)), jnp.asarray(predecessor), jnp.asarray(items.is_link), jnp.asarray(items.is_compute),
        jnp.asarray(items.is_barrier), padded(items.of_compute), padded(items.of_convert), padded(items.of_resolve),
        padded(items.of_sum),
    ), int(np.ceil(np.log2(depth.max() + 2)))  # fmt: skip


def base_durations(items: ItemArrays, base: Base) -> Array:
    """[T, 1 + L]: seconds of every item on every stream."""
    paid = jnp.where((base.since > 0)[:, None], 0.0, base.convert_s)
    return rows(with_nothing(by_stream(base.compute_s, base.resolve_s, paid, base.sum_s)), items.index)


def base_holders(items: ItemArrays, base: Base) -> Array:
    """bool [T, G]: who takes part in every item; a wait or a barrier needs nobody."""
    every = jnp.concatenate([base.on_compute, base.on_sum, base.on_resolve, base.on_convert])
    return rows(with_nothing(every), items.index)


class _Rows(NamedTuple):
    """What candidates change, R items: those of the operator, and heirs (per candidate)."""

    item: Array  # int32 [R]
    seconds: Array  # [R, S, Q]
    holders: Array  # bool [R, G, Q]


def _changed(
    items: ItemArrays, base: Base, row: LocalTables, found: Change, durations: Array, on: Array, pins: bool, width: int
) -> _Rows:
    """The operator's own items [R] with the figures of all Q candidates, and a row for every conversion that has heirs."""
    num_items = len(items.predecessor)
    q = found.compute_s.shape[0]
    paid = jnp.where((found.since > 0)[..., None], 0.0, found.convert_s)  # [Q, e, L]
    own = jnp.concatenate(
        [
            rows(items.of_compute, row.task), rows(items.of_sum, row.sum), rows(items.of_resolve, row.tensor),
            rows(items.of_convert, row.edge),
        ]
    )  # fmt: skip
    seconds = by_stream(found.compute_s, found.resolve_s, paid, found.sum_s).transpose(1, 2, 0)  # [R, S, Q]
    # Heirs differ from candidate to candidate: one row per conversion, filled up with the figures of the strategy.
    num_e = len(items.of_convert) - 1
    marked = put(jnp.zeros(num_e + 1, bool), found.heir.reshape(-1), True)
    marked = put(marked.at[num_e].set(False), row.edge, False)
    (heirs,) = jnp.nonzero(marked, size=width, fill_value=num_e)
    rank = jnp.cumsum(marked) - 1
    rank = jnp.where(marked, rank, width)  # [E + 1]: row among heirs
    heir_items = rows(items.of_convert, heirs)
    default = rows(with_nothing(durations), heir_items)  # [H, S]
    table = jnp.broadcast_to(default[..., None], (*default.shape, q))
    value = jnp.where((found.heir_since > 0)[..., None], 0.0, rows(base.convert_s, found.heir))  # [Q, 2o, L]
    value = jnp.concatenate([jnp.zeros((*value.shape[:2], 1)), value], 2)
    table = table.at[rows(rank, found.heir), :, jnp.arange(q)[:, None]].set(value, mode="drop")
    item = jnp.concatenate([own, heir_items])
    if not pins:
        return _Rows(item, jnp.concatenate([seconds, table]), jnp.ones((len(item), 1, 1), bool))
    of_own = jnp.concatenate([found.on_compute, found.on_sum, found.on_resolve, found.on_convert], 1).transpose(1, 2, 0)
    of_heirs = jnp.concatenate([on, on[:1]])[jnp.minimum(heir_items, num_items)]
    of_heirs = jnp.broadcast_to(of_heirs[..., None], (*of_heirs.shape, q))
    return _Rows(item, jnp.concatenate([seconds, table]), jnp.concatenate([of_own, of_heirs]))


def step_times(
    items: ItemArrays, base: Base, row: LocalTables, found: Change, *, overlap: bool, pins: bool, jumps: int, num_heirs: int
) -> Array:
    """Step times [Q] of the strategy of `base` under each of the Q changes `found` of the operator of `row`.

    `jumps` is `item_arrays`'; `num_heirs` the class' (local.py).
    """
    n = len(items.predecessor)
    computes = items.of_compute[:-1]  # in order
    durations, on = base_durations(items, base), base_holders(items, base)
    changed = _changed(items, base, row, found, durations, on, pins, num_heirs)
    num_rows = len(changed.item)
    of_item = put(jnp.full(n + 1, num_rows, jnp.int32), changed.item, jnp.arange(num_rows, dtype=jnp.int32))[:n]
    is_changed = of_item < num_rows
    takes_time = rows(jnp.concatenate([(changed.seconds > 0).any((1, 2)), jnp.zeros(1, bool)]), of_item) | (durations > 0).any(1)

    # Roots: the first item before, this one included, that is not skipped over.
    stops = takes_time | items.is_compute
    root = jnp.concatenate([jnp.where(stops, jnp.arange(n), items.predecessor), jnp.array([n])])
    for _ in range(jumps):
        root = rows(root, root)
    waits_for = rows(root, items.predecessor)  # [T], n for nobody
    of_compute = rows(jnp.concatenate([items.is_compute, jnp.ones(1, bool)]), waits_for)
    kept = (takes_time & ~items.is_compute) | items.is_barrier | (items.is_compute & is_changed)
    if pins:
        kept |= items.is_compute | (items.is_link & (waits_for < n))
    else:
        kept |= items.is_link & ~of_compute
        # Compute items that communication waits for, and those that wait for it.
        asked = put(jnp.zeros(n + 1, bool), jnp.where(kept, waits_for, n), True)[:n]
        links = jnp.cumsum(kept & items.is_link)
        before = jnp.concatenate([jnp.zeros(1, links.dtype), links])
        gathered = rows(before, computes)
        since_last = gathered - jnp.concatenate([jnp.zeros(1, links.dtype), gathered])[:-1]
        kept = kept.at[computes].max(since_last > 0) | (items.is_compute & asked)
    rank = jnp.cumsum(kept)
    count = rank[-1]
    rank = jnp.concatenate([rank - 1, jnp.full(1, n)])  # [T + 1]

    # Runs of skipped compute items, paid by the kept item behind them.
    run = jnp.zeros(n + 1)
    if not pins:
        skipped = ~rows(kept, computes)
        run = add(run, jnp.where(skipped, rows(rank, computes) + 1, n), rows(durations[:, 0], computes)).at[n].set(0.0)

    zero = jnp.zeros((1, *changed.seconds.shape[1:]))
    changed_s = jnp.concatenate([changed.seconds, zero])
    row_holders = jnp.concatenate([changed.holders, jnp.zeros((1, *changed.holders.shape[1:]), bool)]) if pins else None

    # The items that are kept, by binary search in their ranks; behind the last: harmless repetitions.
    item = jnp.minimum(jnp.searchsorted(rank[:-1], jnp.arange(n), side="left"), n - 1)
    return walk(
        count, jnp.where(rows(is_changed, item)[:, None], 0.0, rows(durations, item)), rows(of_item, item), changed_s,
        rows(rank, rows(waits_for, item)), rows(items.is_link, item), rows(items.is_compute, item),
        rows(items.is_barrier, item), run[:n], one_row(run, count), rows(on, item) if pins else None, row_holders, overlap,
    )  # fmt: skip
