"""The batched exact delta simulation: all candidates of one operator beside one strategy, without simulating the rest.

`trace_of` takes a strategy's step apart (trace.py); `step_times` finds which items an operator's candidates change, those of the
operator itself and the *heirs* of copies that it shares with others, and simulates the windows around them (window.py). Far
effects need no special case: they widen a window, at worst to the whole phase.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from soapjax.costs.change import Base, Change
from soapjax.costs.indexing import put, rows
from soapjax.costs.local import LocalTables
from soapjax.simulate.items import by_stream, with_nothing
from soapjax.simulate.trace import ItemArrays, Trace, trace
from soapjax.simulate.window import Changed, window_times


def trace_of(items: ItemArrays, base: Base, *, overlap: bool, pins: bool) -> Trace:
    """The trace of the strategy of `base`."""
    paid = jnp.where((base.since > 0)[:, None], 0.0, base.convert_s)
    seconds = rows(with_nothing(by_stream(base.compute_s, base.resolve_s, paid, base.sum_s)), items.index)
    if not pins:
        return trace(items, seconds, None, overlap=overlap)
    every = jnp.concatenate([base.on_compute, base.on_sum, base.on_resolve, base.on_convert])
    return trace(items, seconds, rows(with_nothing(every), items.index), overlap=overlap)


def step_times(
    items: ItemArrays, at: Trace, base: Base, row: LocalTables, found: Change, *, overlap: bool, pins: bool, num_heirs: int
) -> Array:
    """Step times [Q] of the strategy of `base` under each of the Q changes `found` of the operator of `row`.

    `at` is the trace of `base`; `num_heirs` the class' (local.py).
    """
    return window_times(items, at, _changed(items, at, base, row, found, pins, num_heirs), overlap=overlap)


def _changed(
    items: ItemArrays, at: Trace, base: Base, row: LocalTables, found: Change, pins: bool, width: int
) -> Changed:
    """The operator's own items [R] with the figures of all Q candidates, and a row for every conversion that has heirs."""
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
    default = rows(with_nothing(at.seconds), heir_items)  # [H, S]
    table = jnp.broadcast_to(default[..., None], (*default.shape, q))
    value = jnp.where((found.heir_since > 0)[..., None], 0.0, rows(base.convert_s, found.heir))  # [Q, 2o, L]
    value = jnp.concatenate([jnp.zeros((*value.shape[:2], 1)), value], 2)
    table = table.at[rows(rank, found.heir), :, jnp.arange(q)[:, None]].set(value, mode="drop")
    item = jnp.concatenate([own, heir_items])
    if not pins:
        return Changed(item, jnp.concatenate([seconds, table]), None)
    of_own = jnp.concatenate([found.on_compute, found.on_sum, found.on_resolve, found.on_convert], 1).transpose(1, 2, 0)
    of_heirs = rows(with_nothing(at.on), heir_items)
    of_heirs = jnp.broadcast_to(of_heirs[..., None], (*of_heirs.shape, q))
    return Changed(item, jnp.concatenate([seconds, table]), jnp.concatenate([of_own, of_heirs]))
