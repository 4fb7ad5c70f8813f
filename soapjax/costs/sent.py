"""What the devices of each group send when one operator's config changes: the bytes beside change.py, where they are limited.

The definition is that of evaluate.py (`Costs.sent_bytes`). Rows [.., G] of resolutions, conversions and sums, each as if it were
paid for; a conversion whose copy is shared is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from soapjax.costs.conversion import ConversionCost, conversion_cost
from soapjax.costs.evaluate import Layouts
from soapjax.costs.halos import halo_cost, inner_source, inner_target
from soapjax.costs.indexing import along, rows
from soapjax.costs.layouts import as_read, holders, value_index, with_pins
from soapjax.costs.local import LocalTables
from soapjax.costs.tables import CostTables
from soapjax.strategy.layout import REPLICATED

if TYPE_CHECKING:
    from soapjax.costs.change import Base, Change


def by_groups(cost: ConversionCost, times: Array, early_on: Array, late_on: Array) -> Array:
    """Bytes [n, G] of n conversions, each `times` [n], on devices of the groups that the tensor is at home on, and goes to."""
    every = cost.bytes.sum(-1)
    late = jnp.zeros_like(every) if cost.late_bytes is None else cost.late_bytes
    return ((every - late) * times)[:, None] * early_on + (late * times)[:, None] * late_on


def sent_rows(tables: CostTables, found: Layouts, axes: Array) -> tuple[Array, Array, Array]:
    """Bytes [T, G], [E, G] and [S, G] of the resolutions, conversions and sums of a whole strategy."""
    pins, links, groups = tables.space.offers_pins, tables.links, tables.space.groups
    home, wanted = rows(found.home, tables.edge_tensor), rows(found.slots, tables.edge_slot)
    target = as_read(home, wanted)
    trips = jnp.asarray(tables.tensor_trips * tables.may_be_partial)
    made = holders(found.raw, groups)
    shape = jnp.asarray(tables.tensor_shape)
    resolved = conversion_cost(found.raw, found.resolved, tables.resolve_bytes, links, shape=shape, pins=pins)
    converted = conversion_cost(home, target, tables.edge_bytes, links, shape=rows(shape, tables.edge_tensor), pins=pins)
    resolve = by_groups(resolved, trips, made, made)
    convert = by_groups(converted, tables.edge_trips, holders(home, groups), holders(target, groups))
    if not len(tables.sum_task):
        return resolve, convert, jnp.zeros((0, len(groups)))
    task_op = tables.task_op[tables.sum_task]
    inner = along(jnp.asarray(tables.sum_map), rows(value_index(axes), task_op))
    on = operator_groups(rows(axes, task_op), tables)
    summed = conversion_cost(inner_source(inner), inner_target(inner), tables.sum_bytes, links, pins=pins)
    times = tables.task_trips[tables.sum_task]
    borders = halo_cost(inner, tables.sum_bytes, links, tables.num_edges).bytes.sum(-1) * times
    return resolve, convert, by_groups(summed, times, on, on) + borders[:, None] * on


def operator_groups(axes: Array, tables: CostTables) -> Array:
    """bool [n, G]: the groups on which operators with configs `axes` [n, A] run."""
    return holders(with_pins(jnp.full_like(axes, REPLICATED), axes), tables.space.groups)


def sent_now(base: Base) -> Array:
    """Bytes [G] of the whole strategy."""
    paid = jnp.where((base.since > 0)[:, None], 0.0, base.convert_sent)
    return base.resolve_sent.sum(0) + paid.sum(0) + base.sum_sent.sum(0)


def sent_after(now: Array, base: Base, row: LocalTables, found: Change) -> Array:
    """Bytes [Q] by the device that sends most, of the strategy of `base`, which sends `now` [G], under each change of `found`."""
    t, e, s, pad = row.tensor, row.edge, row.sum, len(base.convert_sent) - 1

    def paid(since: Array, sent: Array) -> Array:
        return jnp.where((since > 0)[..., None], 0.0, sent)

    before = rows(base.resolve_sent, t).sum(0) + rows(base.sum_sent, s).sum(0)
    before = before + paid(rows(base.since, e), rows(base.convert_sent, e)).sum(0)
    after = found.resolve_sent.sum(1) + found.sum_sent.sum(1) + paid(found.since, found.convert_sent).sum(1)
    # Heirs pay, or pay no more; of those that several of the operator's readers name, one counts.
    h = found.heir  # [Q, 2o]
    earlier = jnp.arange(h.shape[1]) < jnp.arange(h.shape[1])[:, None]
    h = jnp.where(((h[:, :, None] == h[:, None, :]) & earlier).any(-1), pad, h)
    of_heir = rows(base.convert_sent, h)
    heirs = (paid(found.heir_since, of_heir) - paid(rows(base.since, h), of_heir)).sum(1)
    return (now + (after - before) + heirs).max(-1)
