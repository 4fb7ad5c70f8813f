"""What a change of layout costs: seconds per link level, and bytes that a device sends by collective, of Q lanes.

Per mesh axis the source layout is compared with the destination: equal is free;
replicated -> split is a slice (free); partial -> split a reduce-scatter;
partial -> replicated an all-reduce; split -> another dim an all-to-all; split ->
replicated an all-gather. Pinned to one coordinate, a tensor is sent: to another coordinate (one message over the
slowest link between), to all (a broadcast), in shards, or gathered from shards.
Slice first, then reduce, then exchange, then send, then gather:
the fewest bytes; what a small dim cannot hold beside the axes that enter it is gathered before, and blocks that would end in
another order than the mesh's are permuted: the decisions of strategy/resharding.py, which the executor follows step by step.
Groups that span link levels run level by level, fastest first where
the data shrinks, slowest first where it grows; or, where a topology says so, as one ring through all of the group's
devices, which together have the links of their host. Where a level's links join some pairs of devices only, groups along
some of its axes have a share of its bandwidth (topology/rings.py); messages between pinned operators are not slowed by it.

With n devices per group, S bytes of the group's full tensor, latency a per step, bandwidth b per device:
all-gather and reduce-scatter (n-1)a + S(n-1)/n/b, all-reduce their sum, all-to-all (n-1)a + S/n(n-1)/n/b,
a message a + S/b, a broadcast one message per step of a tree, shards to or from one device (n-1)a + S(n-1)/n/b.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from soapjax.costs.rules.links import COLLECTIVES, TRANSFER, Links
from soapjax.costs.rules.sets import (
    SET,
    Mesh,
    behind,
    divides,
    every,
    only_if,
    parts_of,
    parts_of_each,
    stacked,
    stage,
    steps_of,
    union,
)
from soapjax.jit.array_types import Array, Scalar
from soapjax.jit.kernel import row

# The collectives of a reshard, in their order.
STEPS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "all-to-all", "all-gather")
IS_SPREAD = tuple(kind in ("all-gather", "all-to-all") for kind in STEPS)  # to all others: over the slowest links first
IN_RINGS = (0, 1, 2, 5)
PERMUTE = COLLECTIVES.index("collective-permute")
MAX_SHARES = 64
HALOS = 3  # spatial dims


class Network(NamedTuple):
    """Links below the mesh's axes, as data; L levels, slowest first. Levels that a topology lacks come first, without axes."""

    level_axes: Array  # SET [L]
    latency_s: Array  # float32 [L]
    rate: Array  # float32 [5, L]: bytes per second, by COLLECTIVES without transfers
    message_rate: Array  # float32 [L]
    share_axes: Array  # SET [M]: groups along these axes have a share of their level's rate
    share: Array  # float32 [M]
    num_shares: Scalar  # int32 []
    is_ring: Scalar  # int32 []: 1 where rings run across levels


def network_of(links: Links, num_levels: int) -> Network:
    """`links` with so many levels."""
    missing = num_levels - links.num_levels
    levels = [sum(1 << a for a, on in enumerate(links.axis_levels) if on == lv) for lv in range(links.num_levels)]
    rate = np.array([[links.rate(kind, lv) for lv in range(links.num_levels)] for kind in COLLECTIVES if kind != TRANSFER])

    def padded(x: np.ndarray, value: float, dtype: type) -> np.ndarray:
        return np.concatenate([np.full((*x.shape[:-1], missing), value), x], -1).astype(dtype)

    shares = [(sum(1 << a for a in group), share) for of_level in links.group_share for group, share in of_level]
    if len(shares) > MAX_SHARES:
        raise ValueError(f"{len(shares)} groups of axes with shares of a level's bandwidth; {MAX_SHARES} at most")
    axes, share = np.zeros(MAX_SHARES, np.int16), np.ones(MAX_SHARES, np.float32)
    axes[: len(shares)], share[: len(shares)] = [x for x, _ in shares], [x for _, x in shares]
    return Network(
        level_axes=padded(np.array(levels), 0, np.int16), latency_s=padded(np.array(links.latency_s), 0, np.float32),
        rate=padded(rate, 1, np.float32), message_rate=padded(np.array(links.bytes_per_s), 1, np.float32), share_axes=axes,
        share=share, num_shares=np.int32(len(shares)), is_ring=np.int32(links.rings_across_levels),
    )  # fmt: skip


class Moves(NamedTuple):
    """What a reshard does: sets of axes [Q]."""

    given: Array  # that split the source, before the first gather
    held: Array  # that split what the other collectives begin with
    steps: Array  # SET [6, Q]: the axes of each of STEPS
    first_permuted: Array  # the axes over which blocks are sent before the first gather
    first_permutes: Array  # float32 [Q]: how often
    permuted: Array
    permutes: Array  # float32 [Q]


def compared(mesh: Mesh, shape: Array, source: Array, target: Array) -> tuple[Array, ...]:
    """Two layouts of a tensor: what splits each dim before the first gather, after it, and in the end [D, Q]; and sets of axes [Q].

    The sets: partial sums that are resolved, axes that are replicated, that change, that the first gather takes; those whose
    blocks move with it, and those over which pinned blocks are sent.
    """
    dims = shape.shape[0]
    pins = source.shape[0] > dims + 1
    pinned = source[dims + 1] | target[dims + 1] if pins else jnp.zeros_like(source[0])
    s, t, partial, still_partial = source[:dims] & ~pinned, target[:dims] & ~pinned, source[dims], target[dims]
    replicated = (mesh.all_axes & ~union(t) & ~still_partial) | (partial & still_partial) | pinned
    changes = union(source[: dims + 1] ^ target[: dims + 1]) & ~pinned
    partial = partial & ~still_partial & ~pinned
    # What small dims cannot hold is gathered before.
    of = parts_of_each(mesh, [s, t])
    is_whole = every(of[0] == of[1]) & (partial == 0)
    gathered = only_if(~is_whole, union(only_if(~divides(mesh, s | t, shape), s & ~t)))
    follow = union(s & behind(s & gathered)) & ~gathered
    changes = (changes & ~gathered) | (gathered & ~replicated)
    sent = union(source[:dims]) & pinned
    return s, s & ~gathered, t, partial, replicated, changes, gathered, follow, sent


def moves_of(mesh: Mesh, source: Array, target: Array, shape: Array) -> Moves:
    """Of layouts [W, Q] and shapes int32 [D, 1]; a dim of size 0 can be split in any way."""
    dims = shape.shape[0]
    given, s, t, partial, replicated, changes, gathered, follow, sent = stage(
        mesh, functools.partial(compared, mesh, shape), source, target
    )  # fmt: skip
    exchanged = union(s) & union(t) & changes
    early = exchanged_first(mesh, s, t, exchanged)

    def order(early: Array):
        split, wanted = union(s), union(t)
        keeps, late = split & wanted & ~changes, exchanged & ~early
        gathers, enters = split & replicated, wanted & ~split
        of = parts_of_each(mesh, [s, t])
        is_whole = (changes != 0) & (partial == 0) & every(of[0] == of[1])  # blocks only change places
        leaves, leaves_late = early & s, late & s
        is_entered = (t & enters) != 0
        nothing = jnp.zeros((), SET)
        first = union(only_if(is_entered, leaves) | (s & behind(leaves) & (keeps | gathers | late))) != 0
        second = union(jnp.where((t & early) != 0, leaves_late, nothing)) != 0
        unless_first = union(only_if(is_entered, leaves_late) | (s & behind(leaves_late) & (keeps | gathers))) != 0
        return first, second | (unless_first & ~first), keeps, late, gathers, enters, is_whole

    first, second, keeps, late, gathers, enters, is_whole = stage(mesh, order, early)

    def permuted():
        is_ordered = first | second
        # How late an axis joined a dim since blocks were last put in order: an earlier axis of the mesh must not join later.
        since_second = late | only_if(~second, early)
        joined = since_second | only_if(~is_ordered, enters)
        kept = only_if(~is_ordered, keeps)
        nothing = jnp.zeros((), SET)
        later = jnp.stack([late, since_second, joined])[:, None]  # [3, 1, Q]
        unsorted = union((t & behind(t & later) & ~later).reshape(3 * dims, -1)) != 0
        unsorted |= union(jnp.where((gathers & s) != 0, t & joined, nothing) | (t & kept & behind(gathers & s))) != 0
        follows = union(s & keeps & behind(changes & (s | t)))
        times = sum(one.astype(jnp.float32) for one in (first, second, unsorted))
        moved = only_if(is_whole | (times > 0), changes | only_if(~is_whole, follows))
        return jnp.where(is_whole, 1.0, times), moved

    times, moved = stage(mesh, permuted)

    def steps():
        wanted = union(t)
        held = union(s) | only_if(~is_whole, wanted & ~partial) | sent
        late_ones = [only_if(~is_whole, x) for x in (early, late, gathers)]
        return union(given) | sent, held, stacked(mesh, [gathered, partial & wanted, partial & replicated, *late_ones])

    given_axes, held, of_steps = stage(mesh, steps)
    return Moves(
        given=given_axes, held=held, steps=of_steps, first_permuted=gathered | follow,
        first_permutes=(follow != 0).astype(jnp.float32), permuted=moved, permutes=times,
    )  # fmt: skip


def exchanged_first(mesh: Mesh, s: Array, t: Array, exchanged: Array) -> Array:
    """Those of the axes in `exchanged` [Q] that the first of two all-to-alls moves, from dims `s` to dims `t` [D, Q]."""

    def choose(a: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Axis by axis, none that clashes with one chosen before."""
        early, left, entered = state
        axis = jnp.left_shift(jnp.ones((), SET), a.astype(SET))
        was, is_now = (s & axis) != 0, (t & axis) != 0
        clash = (was & entered) | (is_now & left)
        is_free = ((exchanged & axis) != 0) & ~functools.reduce(jnp.logical_or, [clash[d] for d in range(s.shape[0])])
        return early | only_if(is_free, axis), left | (is_free & was), entered | (is_free & is_now)

    nobody = jnp.zeros(s.shape, bool)
    return lax.fori_loop(0, mesh.num_axes, choose, (jnp.zeros_like(exchanged), nobody, nobody))[0]


def reshard(
    mesh: Mesh, network: Network, source: Array, target: Array, shape: Array, size_bytes: Array, latency_share: Array
) -> tuple[Array, Array, Array]:
    """Seconds [L, Q] and bytes that a device sends [6, Q], by COLLECTIVES, of `source` -> `target`, layouts [W, Q].

    Third are the bytes [Q] among them that devices of the target send, or get from shards; those of the source send all others.

    Args:
      shape: int32 [D, 1] of the tensor; a dim of 0 is large enough to be split in any way.
      size_bytes, latency_share: [] of the whole tensor, and the part of latencies that it pays where collectives are merged.
    """
    dims, num_levels = shape.shape[0], network.level_axes.shape[0]
    pins = source.shape[0] > dims + 1
    of = moves_of(mesh, source, target, shape)

    def parts():
        by_level = parts_of(mesh, of.steps[:, None] & network.level_axes[:, None])  # [6, L, Q]
        shares = shares_of(network, jnp.concatenate([of.steps, jnp.stack([of.first_permuted, of.permuted])]))
        return by_level, parts_of_each(mesh, [of.given, of.held, of.steps[1]]), shares

    by_level, several, shares = stage(mesh, parts)

    def paid():
        part, held = size_bytes / several[0], size_bytes / several[1]
        local = held / several[2]
        ended = local
        if pins:
            message_s, message_bytes, gathered, ended = transfers(mesh, network, source, target, local, latency_share, dims)
        of_level, moved_of = by_levels(network, by_level, shares, (part, held, local, local, local, ended), latency_share)
        seconds = jnp.stack([functools.reduce(jnp.add, [of_level[j][lv] for j in IN_RINGS]) for lv in range(num_levels)])
        rings = functools.partial(in_rings, network, of.steps, by_level, shares, moved_of, latency_share)
        seconds = lax.fori_loop(0, network.is_ring, lambda _, __: rings(), seconds)
        rows = [seconds[lv] + of_level[3][lv] + of_level[4][lv] for lv in range(num_levels)]
        rows = with_permutes(rows, network, of.first_permuted, of.first_permutes, part, shares[6], latency_share)
        rows = with_permutes(rows, network, of.permuted, of.permutes, local, shares[7], latency_share)
        if pins:
            rows = [rows[lv] + message_s[lv] for lv in range(num_levels)]
        by_kind = {kind: jnp.zeros_like(local) for kind in COLLECTIVES}
        for j, kind in enumerate(STEPS):
            by_kind[kind] = by_kind[kind] + moved_of[j]
        by_kind["collective-permute"] = of.first_permutes * part + of.permutes * local
        late = moved_of[5]
        if pins:
            by_kind[TRANSFER], late = message_bytes, late + gathered
        return stacked(mesh, rows), stacked(mesh, [by_kind[kind] for kind in COLLECTIVES]), late

    return stage(mesh, paid)


def by_levels(
    network: Network, by_level: Array, shares: Array, sizes: tuple[Array, ...], latency_share: Array
) -> tuple[list[list[Array]], Array]:
    """Of each of STEPS, run level by level on `sizes` [Q] bytes per device: seconds by level, and bytes sent [6, Q]."""
    num_levels = network.level_axes.shape[0]
    of_level: list[list[Array]] = [[jnp.zeros_like(sizes[2])] * num_levels for _ in STEPS]
    moved_of = []
    for j, size in enumerate(sizes):
        kind, times = COLLECTIVES.index(STEPS[j]), 2 if STEPS[j] == "all-reduce" else 1
        total = jnp.zeros_like(sizes[2])
        for lv in range(num_levels) if IS_SPREAD[j] else reversed(range(num_levels)):
            n = by_level[j, lv]
            if STEPS[j] == "all-gather":
                size = size * n
            moved = times * size * (n - 1) / n
            rate = network.rate[kind, lv] * shares[j, lv]
            of_level[j][lv] = times * (n - 1) * network.latency_s[lv] * latency_share + moved / rate
            total = total + moved
            if STEPS[j] != "all-gather":
                size = size / n
        moved_of.append(total)
    return of_level, jnp.stack(moved_of)


def with_permutes(
    rows: list[Array], network: Network, axes: Array, times: Array, size: Array, share: Array, latency_share: Array
) -> list[Array]:
    """Seconds by level, and those of `times` permutes of `size` bytes, over the slowest links that any of `axes` crosses."""
    found, slower = [], jnp.zeros(axes.shape, bool)
    for lv, row_s in enumerate(rows):
        crosses = (axes & network.level_axes[lv]) != 0
        message = network.latency_s[lv] * latency_share + size / (network.rate[PERMUTE, lv] * share[lv])
        found.append(row_s + jnp.where(crosses & ~slower, times * message, 0.0))
        slower |= crosses
    return found


def shares_of(network: Network, sets: Array) -> Array:
    """[n, L, Q]: which share of each level's rate groups along `sets` [n, Q] have."""
    here = sets[:, None] & network.level_axes[:, None]

    def one(i: Array, shares: Array) -> Array:
        return jnp.where(here == row(network.share_axes, i), row(network.share, i), shares)

    return lax.fori_loop(0, network.num_shares, one, jnp.ones(here.shape, jnp.float32))


def in_rings(
    network: Network, steps: Array, by_level: Array, shares: Array, moved: Array, latency_share: Array
) -> Array:
    """Seconds [L, Q] of the collectives in IN_RINGS where each runs as one ring, on the slowest links that it crosses."""
    num_levels = network.level_axes.shape[0]
    rows = [jnp.zeros_like(moved[0]) for _ in range(num_levels)]
    for j in IN_RINGS:
        kind, times = COLLECTIVES.index(STEPS[j]), 2 if STEPS[j] == "all-reduce" else 1
        whole = functools.reduce(jnp.multiply, [by_level[j, lv] for lv in range(num_levels)])
        together, wire_s = whole, jnp.zeros_like(whole)
        for lv in range(num_levels):
            n = by_level[j, lv]
            together = together / n  # devices that have the links of this level together
            rate = network.rate[kind, lv] * shares[j, lv]
            wire_s = jnp.maximum(wire_s, jnp.where(n > 1, moved[j] / (rate * together), 0.0))
        slower = jnp.zeros(whole.shape, bool)
        for lv in range(num_levels):
            crosses = (steps[j] & network.level_axes[lv]) != 0
            ring_s = times * (whole - 1) * network.latency_s[lv] * latency_share + wire_s
            rows[lv] = rows[lv] + jnp.where(crosses & ~slower, ring_s, 0.0)
            slower |= crosses
    return jnp.stack(rows)


def transfers(
    mesh: Mesh, network: Network, source: Array, target: Array, local: Array, latency_share: Array, dims: int
) -> tuple[list[Array], Array, Array, Array]:
    """Messages between pinned and other layouts: seconds [L] of [Q], bytes sent [Q], what a device gets from shards of these [Q],
    and what it holds after all [Q]."""
    num_levels = network.level_axes.shape[0]
    was, is_now = source[dims + 1], target[dims + 1]
    split, wanted = union(source[:dims]), union(target[:dims])
    is_other = union(source[dims + 2 :] ^ target[dims + 2 :]) & was & is_now
    to_shards, from_shards = was & wanted, split & is_now
    to_all = was & ~wanted & ~is_now & ~target[dims]
    seconds: list[Array] = [jnp.zeros_like(local)] * num_levels
    total = jnp.zeros_like(local)

    def message(lv: int, times: Array, moved: Array) -> None:
        seconds[lv] = seconds[lv] + times * network.latency_s[lv] * latency_share + moved / network.message_rate[lv]

    for lv in range(num_levels):  # slowest first: what is spread gets smaller before it is sent on
        n = parts_of(mesh, to_shards & network.level_axes[lv])
        moved = local * (n - 1) / n
        message(lv, n - 1, moved)
        local, total = local / n, total + moved
    slower = jnp.zeros(local.shape, bool)
    for lv in range(num_levels):
        crosses = (is_other & network.level_axes[lv]) != 0
        # One message, over the slowest link that it crosses.
        times = (crosses & ~slower).astype(jnp.float32) + steps_of(mesh, to_all & network.level_axes[lv])
        slower |= crosses
        message(lv, times, times * local)
        total = total + times * local
    gathered = jnp.zeros_like(local)
    for lv in reversed(range(num_levels)):
        n = parts_of(mesh, from_shards & network.level_axes[lv])
        moved = local * (n - 1)
        message(lv, n - 1, moved)
        local, gathered = local * n, gathered + moved
    return seconds, total + gathered, gathered, local


def halos(mesh: Mesh, network: Network, inner: Array, size_bytes: Array, num_dims: int) -> tuple[Array, Array]:
    """Seconds [L, Q] and bytes sent [Q] of the halos that blocks of a convolution's image get from their neighbours.

    Two messages per spatial dim that is split, the rows before a block and those after it, over the slowest link between blocks:
    2a + S/b with latency a, bandwidth b and S bytes on both sides together. What other axes split, other spatial dims among them,
    makes the rows shorter. Where two dims are split the second exchange sends the corners too: they are not counted, a percent
    or so.

    Args:
      inner: layouts [W, Q]: what splits all of it in the first column, the axes along the k-th spatial dim in column 1 + k.
      size_bytes: [] of the rows around a block, as wide as the whole image.
    """
    num_levels, count = network.level_axes.shape[0], min(HALOS, num_dims - 1)
    along = inner[1 : 1 + count]
    all_of_them = inner[0] | union(along)
    shares = shares_of(network, along)
    rows, total = [jnp.zeros(inner.shape[1:], jnp.float32)] * num_levels, jnp.zeros(inner.shape[1:], jnp.float32)
    for k in range(count):
        sent = jnp.where(along[k] != 0, size_bytes / parts_of(mesh, all_of_them & ~along[k]), 0.0)
        total = total + sent
        slower = jnp.zeros(sent.shape, bool)
        for lv in range(num_levels):
            crosses = (along[k] & network.level_axes[lv]) != 0
            message_s = 2 * network.latency_s[lv] + sent / (network.rate[PERMUTE, lv] * shares[k, lv])
            rows[lv] = rows[lv] + jnp.where(crosses & ~slower, message_s, 0.0)
            slower |= crosses
    return stacked(mesh, rows), total
