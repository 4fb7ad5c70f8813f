"""Every rule of the cost model, once: pure functions of what a record gathers, for Q lanes side by side.

A layout is [W, Q] sets of axes (sets.py), a config [K, Q] such sets, and where pins are, one of the pinned axes and their
coordinates' digits behind them. Full evaluation (whole.py) applies the rules to all records, lanes being strategies; the chain
(change.py) to the records that one operator's config can change, lanes being its candidates.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from soapjax.costs.rules.links import COLLECTIVES
from soapjax.costs.rules.reshard_cost import PERMUTE, halos, reshard
from soapjax.costs.rules.sets import (
    DIGITS,
    SET,
    columns_of,
    divides,
    every,
    first_of,
    log2_parts_of,
    only_if,
    parts_of_each,
    stacked,
    stage,
    union,
    up_to,
)
from soapjax.costs.tables.arrays import EDGE, PINNED_BIT, SUM, TENSOR, CostArrays
from soapjax.jit.array_types import Array
from soapjax.jit.kernel import row
from soapjax.strategy.configs import FIRST_PIN

NEAR = 1e-9


def config_of(p: CostArrays, axes: Array) -> Array:
    """SET [K (+ 1 + DIGITS), Q] of an operator's config values int8 [A, Q]."""
    op_dims, pins = p.divisors.shape[1], p.has_pins
    values = jnp.arange(op_dims, dtype=SET)[:, None]

    def of_axis(a: int) -> Array:
        value = axes[a][None].astype(SET)
        truths = value == values
        if pins:
            is_pinned, place = value <= FIRST_PIN, FIRST_PIN - value
            digits = (place >> jnp.arange(DIGITS, dtype=SET)[:, None]) & 1 != 0
            truths = jnp.concatenate([truths, is_pinned, is_pinned & digits])
        return only_if(truths, jnp.full((), 1 << a, SET))

    # Axis after axis in one expression: a loop over them takes six times as long.
    return union([of_axis(a) for a in range(axes.shape[0])])


def slot_layout(p: CostArrays, record: Array, config: Array, begun: Array) -> Array:
    """The layout of a slot under its operator's `config`, with what is in `begun` [W, Q] already: another's slot, or nothing."""
    width, op_dims = begun.shape[0], p.divisors.shape[1]
    masks = record[:width]
    # As in `config_of`; a loop takes twice as long.
    found = union([begun, *(only_if(((masks >> k) & 1 != 0)[:, None], config[k][None]) for k in range(op_dims))])
    if config.shape[0] > op_dims:
        plain = width - 1 - DIGITS
        pins = only_if((masks[plain] & PINNED_BIT) != 0, config[op_dims:])
        found = jnp.concatenate([found[:plain], found[plain:] | pins])
    return found


def stored_layout(p: CostArrays, which: Array, as_used: Array, summand: Array, storage: Array) -> tuple[Array, ...]:
    """Of a parameter: as it is stored, its gradient, what the backward pass gathers again, and sums of its gradient.

    It is stored as its owner reads it, and over further axes by `storage` [3, Q]. Where the second of these has any, the forward
    pass leaves a part of what it read, split over those of them with which it is a slice: that come behind the axes of its use.
    Where the third is not 0, a gradient of several passes is added up as it is stored, else as one `summand` is made.
    """
    dims = p.row_shape.shape[1]
    ints, fixed = row(p.parameter_int, which), row(p.parameter_fixed, which)[:, None]
    pins = as_used[dims + 1 :]

    def storing(as_used: Array, pins: Array, axes: Array, left: Array, summand: Array) -> tuple[Array, Array, Array]:
        used = as_used[:dims]
        taken = union(used) | (pins[0] if pins.shape[0] else jnp.zeros_like(used[0]))
        own = (jnp.arange(dims) == ints[0])[:, None]
        extra = axes & ~taken
        whole = union(only_if(own, used)) | extra
        stored = jnp.where(own & divides(p.mesh, whole, ints[1]), used | extra, used)
        stored = jnp.concatenate([stored, jnp.zeros_like(stored[:1]), pins])
        stored = (stored & ~ints[2].astype(SET)) | fixed
        part = jnp.concatenate([stored[:dims] & (used | (left & ~up_to(used))), stored[dims:]])
        return stored, jnp.where((ints[4] != 0) & (left != 0), part, stored), summand  # read here, before anything is written

    stored, left, summand = stage(p.mesh, storing, as_used, pins, storage[0], storage[1], summand)

    def shifted(d: Array, found: Array) -> Array:
        source = d + ints[3]
        value = row(stored, jnp.minimum(source, dims - 1))
        return lax.dynamic_update_index_in_dim(found, only_if(source < dims, value), d, 0)

    gradient = lax.fori_loop(0, dims, shifted, stored)
    return stored, gradient, left, jnp.where(storage[2] != 0, gradient, summand)


def compute_s(p: CostArrays, which: Array, work: Array, config: Array, is_update: Array, shards: Array) -> Array:
    """Seconds [Q] of a task: a roofline of its FLOPs and of the bytes read and written at local shapes, or near what was measured.

    Args:
      work: [2, Q], bytes of its accesses, and seconds of its FLOPs.
      is_update, shards: whether it updates a parameter, and in how many shards that is stored [Q].
    """
    floats, (first, number) = row(p.task_float, which), row(p.task_points, which)
    flop_s = jnp.where(is_update, work[1] / shards, work[1])
    moved_bytes = jnp.where(is_update, floats[1] / shards, work[0])
    roofline_s = (jnp.maximum(flop_s, moved_bytes / p.scalars[0]) + p.scalars[1]) * floats[0]

    def near_points(roofline_s: Array) -> Array:
        """Measured ratios, weighted by their distance in log2 of the degrees."""
        op_dims = p.divisors.shape[1]
        at = log2_parts_of(p.mesh, config[:op_dims])
        of_update = jnp.where((jnp.arange(op_dims) == 0)[:, None], jnp.log2(shards), 0.0)
        at = jnp.where(is_update, of_update, at)

        def of_point(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            point = row(p.point, i)
            apart = jnp.where((point[1:] < 0)[:, None], 0.0, jnp.abs(point[1:, None] - at))
            distance = functools.reduce(jnp.add, [apart[k] for k in range(op_dims)])
            nearness = 1 / (distance * distance + NEAR)
            return sums[0] + nearness * point[0], sums[1] + nearness

        nothing = jnp.zeros_like(roofline_s)
        ratio, total = lax.fori_loop(first, first + number, of_point, (nothing, nothing))
        return roofline_s * jnp.exp(ratio / jnp.maximum(total, 1e-20))

    return lax.fori_loop(0, jnp.minimum(number, 1), lambda _, s: near_points(s), roofline_s)


class Homes(NamedTuple):
    """Layouts of a tensor [W, Q]."""

    raw: Array  # as its producer makes it
    home: Array  # as it is kept
    resolved: Array  # what its resolution costs the way to


def homes(p: CostArrays, which: Array, made: Array, reader: Array, common: Array) -> Homes:
    """A partial sum is scattered where the first reader wants it split, if that divides; else summed everywhere.

    Summands are kept in their `common` layout, partial sums included: those of a gradient always, a product of a joint sum where
    it is a partial sum in that layout as it is made.
    """
    ints, fixed, shape = row(p.row_int, which), row(p.row_fixed, which)[:, None], row(p.row_shape, which)[:, None]
    dims = shape.shape[0]
    column = columns_of(made)
    is_split, is_partial = column < dims, column == dims
    is_input = ints[2] != 0  # never a partial sum
    raw = only_if(~(is_partial & is_input), jnp.where(ints[1] != 0, fixed, made))
    sums = raw[dims]

    def as_scattered() -> Array:
        # A later axis that already splits that dim would be the major one after the scatter: blocks out of mesh order.
        scattered = raw | only_if(is_split, sums & reader & ~up_to(raw))
        return jnp.where(every(divides(p.mesh, scattered[:dims], shape)), scattered, raw)

    home: Array = lax.cond((sums != 0).any(), as_scattered, lambda: raw)
    waits = every(raw == common) & (sums != 0)
    is_summand = (ints[3] != 0) & (waits | (ints[4] == 0))
    # A partial sum made of a whole value is a mask, free.
    masked = jnp.where(is_partial, common & sums, common)
    home = only_if(~is_partial, home)
    return Homes(raw, jnp.where(is_summand, common, home), jnp.where(is_summand, masked, home))


def as_read(home: Array, wanted: Array, dims: int) -> Array:
    """What a tensor kept as `home` is resharded to for a reader.

    A loop carries its sums resolved, and what is still a partial sum is summed up with the last product of its sum.
    """
    target = only_if(columns_of(home) != dims, wanted | (home & wanted[dims]))
    return jnp.where(home[dims] != 0, home, target)


def holders(p: CostArrays, layout: Array) -> Array:
    """bool [G, Q]: the device groups that hold a tensor of this layout; all without pins."""
    if not p.has_pins:
        return jnp.ones((1, layout.shape[1]), bool)
    return on_groups(p, layout[-1 - DIGITS :])


def on_groups(p: CostArrays, pins: Array) -> Array:
    """bool [G, Q] of pinned axes and their digits [1 + DIGITS, Q]."""
    differs = [(pins[1 + i][None] ^ p.group_digits[i][:, None]) & pins[0] for i in range(DIGITS)]
    return functools.reduce(jnp.bitwise_or, differs) == 0


class RowCosts(NamedTuple):
    """Of one row; what does not apply to its kind is zero."""

    raw: Array  # layouts [W, Q]
    home: Array
    resolved: Array
    seconds: Array  # [L, Q], as if no copy were shared
    sent: Array  # [6, Q] bytes by collective, of all trips
    sent_on: Array  # [G, Q]: bytes that a device of each group sends
    held: Array  # [Q]: bytes of a tensor as it is kept, of a parameter as it is left
    copy: Array  # [Q]: of a resharded copy, 0 where nothing is resharded
    is_sent: Array  # bool [Q]: the reshard makes a copy of its own
    transient: Array  # [Q]: beside a tensor while it is made: partial sums before they are resolved
    waiting: Array  # [2, Q]: of gradients that wait to be summed together, by all-reduces and by reduce-scatters
    on: Array  # bool [G, Q]: who takes part
    on_kept: Array  # bool [G, Q]: who holds the tensor as it is kept, or the copy


def row_costs(p: CostArrays, record: Array, made: Array, reader: Array, common: Array, wanted: Array) -> RowCosts:
    """Of the row of `record` from the layouts [W, Q] that it gathers."""
    which, dims = record[0], p.row_shape.shape[1]
    ints, floats, shape = row(p.row_int, which), row(p.row_float, which), row(p.row_shape, which)[:, None]
    is_edge, is_sum = ints[0] == EDGE, ints[0] == SUM
    of: Homes = stage(p.mesh, functools.partial(homes, p), which, made, reader, common)

    def ends(raw: Array, home: Array, resolved: Array, made: Array, wanted: Array) -> tuple[Array, Array]:
        # Of a collective inside a task: partial sums are made; blocks get their halos, which no layout says.
        column = columns_of(made)
        inner = only_if((column == 0) | (column >= dims), made)
        summed = only_if((column == 0) | (column > dims), made)
        source = jnp.where(is_sum, inner, jnp.where(is_edge, home, raw))
        return source, jnp.where(is_sum, summed, jnp.where(is_edge, as_read(home, wanted, dims), resolved))

    source, target = stage(p.mesh, ends, *of, made, wanted)
    # Most tensors are kept as they are made, and read as they are kept: of those nothing is asked.
    is_changed = functools.reduce(jnp.bitwise_or, [source[i] ^ target[i] for i in range(source.shape[0])]) != 0
    num_levels, lanes = p.network.level_axes.shape[0], source.shape[1:]
    unsent = jnp.zeros((num_levels, *lanes)), jnp.zeros((len(COLLECTIVES), *lanes)), jnp.zeros(lanes)

    def changed() -> tuple[Array, ...]:
        return reshard(p.mesh, p.network, source, target, shape, floats[0], floats[1])

    seconds, sent, late = lax.cond(is_changed.any(), changed, lambda: unsent)

    def with_halos(_: Array, paid: tuple[Array, Array]) -> tuple[Array, Array]:
        more_s, more = halos(p.mesh, p.network, made, floats[0], dims)
        kinds = jnp.arange(sent.shape[0])[:, None] == PERMUTE
        return paid[0] + more_s, paid[1] + jnp.where(kinds, more, 0.0)

    seconds, sent = lax.fori_loop(0, ints[7], with_halos, (seconds, sent))
    held, copy, is_sent, transient, waiting = stage(p.mesh, functools.partial(_memory_of, p), ints, floats, of, target, wanted)
    on_kept = holders(p, jnp.where(is_edge, target, of.home))
    on_home = holders(p, of.home)
    on = jnp.where(is_edge, on_home | on_kept, jnp.where(is_sum, holders(p, made), holders(p, of.raw)))
    total = functools.reduce(jnp.add, [sent[i] for i in range(sent.shape[0])])
    late = jnp.where(is_edge, late, 0.0)
    sent_on = only_if(jnp.where(is_edge, on_home, on), total - late) + only_if(on_kept, late)
    return RowCosts(
        raw=of.raw, home=of.home, resolved=of.resolved, seconds=seconds * floats[2], sent=sent * floats[2],
        sent_on=sent_on * floats[2], held=held, copy=copy, is_sent=is_sent, transient=transient, waiting=waiting, on=on,
        on_kept=on_kept,
    )  # fmt: skip


def _memory_of(
    p: CostArrays, ints: Array, floats: Array, of: Homes, target: Array, wanted: Array
) -> tuple[Array, Array, Array, Array, Array]:
    """`RowCosts` from held to waiting."""
    dims = p.row_shape.shape[1]
    is_tensor, is_edge, mesh = ints[0] == TENSOR, ints[0] == EDGE, p.mesh
    raw_split, home_split = union(of.raw[:dims]), union(of.home[:dims])
    raw_other = of.raw[dims] | (of.raw[dims + 1] if of.raw.shape[0] > dims + 1 else jnp.zeros_like(raw_split))
    home_other = of.home[dims] | (of.home[dims + 1] if of.home.shape[0] > dims + 1 else jnp.zeros_like(raw_split))
    # Where nothing is sent, slices of what each device has whole are cut out by the tensor's readers.
    is_whole = ~(raw_split | raw_other)
    is_cut = (union(of.raw ^ of.home) & ~is_whole) == 0
    held_split = home_split & ~only_if(is_cut, is_whole & home_split)
    # Parameters are counted with their state, but for the part that the forward pass leaves of one.
    is_left = ints[8] != 0
    held_split = jnp.where(is_left, union(wanted[:dims]), held_split)
    is_held = is_tensor & (~is_left | (union(of.home ^ wanted) != 0))
    # Copies of their own: slices of a whole value are cut out of it, sums of it are a mask.
    moved = union(of.home ^ target)
    is_sent = is_edge & ((moved & (home_split | home_other)) != 0)
    summed = of.raw[dims] & ~of.resolved[dims]
    scattered = summed & union(of.resolved[:dims])
    parts = parts_of_each(mesh, [held_split, union(target[:dims]), raw_split, scattered, first_of(scattered)])
    held = jnp.where(is_held, floats[3] / parts[0], 0.0)
    copy = jnp.where(is_edge & (moved != 0), floats[0] / parts[1], 0.0)
    local = jnp.where(is_tensor, floats[0] / parts[2], 0.0)
    is_scattered = scattered != 0
    # A reduce-scatter reads the whole of what it makes a part of, one axis after the other: the first result is the largest.
    # Along another dim than the first a product is laid out anew, whole, to be scattered.
    first = jnp.where((ints[5] != 0) & ((scattered & of.resolved[0]) == 0), 1.0, 1 / parts[4])
    in_place = jnp.where(is_scattered, 1 + first - 1 / parts[3], 0.0)
    transient = local * jnp.where(p.flags[0] != 0, in_place, (summed != 0).astype(jnp.float32))
    # Only what the compiler merges waits: results of up to that size.
    result = local * jnp.where(is_scattered, 1 / parts[4], 1.0)
    both = jnp.where((ints[6] != 0) & (summed != 0) & (result <= p.scalars[2]), local + result, 0.0)
    waiting = stacked(mesh, [jnp.where(is_scattered, 0.0, both), jnp.where(is_scattered, both, 0.0)])
    return held, copy, is_sent, transient, waiting


def gathers_again(p: CostArrays, storage: Array) -> Array:
    """bool [Q]: whether the backward pass gathers parameters of this `storage` anew."""
    return (jnp.right_shift(p.storage_again, storage.astype(jnp.int32)) & 1) != 0


def violations(p: CostArrays, op: Array, config: Array) -> Array:
    """int32 [Q]: how many degrees of an operator do not divide."""
    op_dims = p.divisors.shape[1]
    fits = divides(p.mesh, config[:op_dims], row(p.divisors, op)[:, None])
    return functools.reduce(jnp.add, [(~fits[k]).astype(jnp.int32) for k in range(op_dims)])
