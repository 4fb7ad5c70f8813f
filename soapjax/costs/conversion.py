"""What a change of layout costs: seconds per link level and bytes per collective.

Per mesh axis the source layout is compared with the destination: equal is free;
replicated -> split is a slice (free); partial -> split a reduce-scatter;
partial -> replicated an all-reduce; split -> another dim an all-to-all; split ->
replicated an all-gather. Pinned to one coordinate, a tensor is sent: to another coordinate (one message over the
slowest link between), to all (a broadcast), in shards, or gathered from shards.
Slice first, then reduce, then exchange, then send, then gather:
the fewest bytes; what a small dim cannot hold beside the axes that enter it is gathered before
(strategy/resharding.py). Groups that span link levels run level by level, fastest first where
the data shrinks, slowest first where it grows; or, where a topology says so, as one ring through all of the group's
devices, which together have the links of their host. Where a level's links join some pairs of devices only, groups along
some of its axes have a share of its bandwidth (topology/rings.py); messages between pinned operators are not slowed by it.

With n devices per group, S bytes of the group's full tensor, latency a per step, bandwidth b per device:
all-gather and reduce-scatter (n-1)a + S(n-1)/n/b, all-reduce their sum, all-to-all (n-1)a + S/n(n-1)/n/b,
a message a + S/b, a broadcast one message per step of a tree, shards to or from one device (n-1)a + S(n-1)/n/b.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from soapjax.costs.block_order import number_of_parts, sets_by, type_of_sets
from soapjax.costs.links import COLLECTIVES, RINGS, TRANSFER, Links
from soapjax.costs.steps import steps_of_all
from soapjax.costs.turns import in_turns
from soapjax.strategy.layout import PINNED, REPLICATED


class ConversionCost(NamedTuple):
    seconds: Array  # [..., L]
    bytes: Array  # [..., 6] that each device sends, by COLLECTIVES


def conversion_cost(
    source: Array, target: Array, size_bytes: Array, links: Links, latency_share: np.ndarray | float = 1.0, *,
    shape: Array | None = None, pins: bool = False,
) -> ConversionCost:  # fmt: skip
    """The cost of bringing tensors of `size_bytes` [...] from layouts `source` to `target`, both [..., A].

    Args:
      latency_share: [...], scales the latencies (`combined_share`).
      shape: int32 [..., R] of the tensors; None, and a dim of 0, are large enough to be split in any way.
      pins: whether pinned layouts are looked at.
    """
    seconds, sent = _side_by_side(links, pins, True)(*_args(source, target, shape, size_bytes, latency_share))
    return ConversionCost(jnp.stack(seconds, -1), jnp.stack(sent, -1))


def conversion_seconds(
    source: Array, target: Array, size_bytes: Array, links: Links, latency_share: np.ndarray | float = 1.0, *,
    shape: Array | None = None, pins: bool = False,
) -> Array:  # fmt: skip
    """The seconds [..., L] of `conversion_cost` alone."""
    seconds, _ = _side_by_side(links, pins, False)(*_args(source, target, shape, size_bytes, latency_share))
    return jnp.stack(seconds, -1)


MOST_DIMS = 8  # of a tensor whose shape is not given


def _args(source: Array, target: Array, shape: Array | None, size_bytes: Array, share: Array | float) -> tuple[Array, ...]:
    """Arguments of `_side_by_side`: source, target [..., A], shape [..., R], bytes and share of the latency [...]."""
    lead = source.shape[:-1]
    if shape is None or not shape.shape[-1]:
        shape = jnp.zeros(MOST_DIMS, jnp.int32)
    shape = jnp.broadcast_to(shape, (*lead, shape.shape[-1]))
    return source, target, shape, *(jnp.broadcast_to(jnp.asarray(x, jnp.float32), lead) for x in (size_bytes, share))


def _side_by_side(links: Links, pins: bool, wants_bytes: bool) -> Callable[..., tuple[list[Array], list[Array]]]:
    """`_costs` (seconds per level, bytes by collective) of arrays [...], in turns of a loop; a batch is more of the same."""

    def flat(*of: Array) -> tuple[list[Array], list[Array]]:
        per_axis = [[x[..., a].reshape(-1) for a in range(x.shape[-1])] for x in of[:3]]
        return in_turns(functools.partial(_costs, links, pins, wants_bytes), *per_axis, *(x.reshape(-1) for x in of[3:]))

    @jax.custom_batching.custom_vmap
    def shaped(*of: Array) -> tuple[list[Array], list[Array]]:
        return jax.tree.map(lambda x: x.reshape(of[-1].shape), flat(*of))

    @shaped.def_vmap
    def batched(size: int, is_batched: Any, *of: Array) -> tuple[Any, Any]:
        whole = jax.tree.map(lambda x, has: x if has else jnp.broadcast_to(x, (size, *x.shape)), of, tuple(is_batched))
        found = shaped(*whole)
        return found, jax.tree.map(lambda _: True, found)

    return shaped


def _costs(
    links: Links, pins: bool, wants_bytes: bool, source: list[Array], target: list[Array], shape: list[Array], size_bytes: Array,
    latency_share: Array,
) -> tuple[list[Array], list[Array]]:  # fmt: skip
    """Seconds [n] per level and bytes [n] by collective, of layouts int8 [n] per axis and shapes int32 [n] per dim."""
    sizes, levels = links.axis_sizes, range(links.num_levels)
    on_level = sets_by(links.axis_levels)
    of_level = [on_level.get(lv, type_of_sets(len(sizes))(0)) for lv in levels]
    first, order, over = steps_of_all(sizes, pins, source, target, shape)

    def product(axes: Array, level: int | None = None) -> Array:
        return number_of_parts(axes if level is None else axes & of_level[level], sizes, np.float32)

    seconds = [jnp.zeros_like(size_bytes) for _ in levels]
    sent = {}

    def run(kind: str, axes: Array, size: Array) -> Array:
        """Adds one collective over `axes` to `seconds` and `sent`; gives the bytes per device after it."""
        spread = kind in ("all-gather", "all-to-all")  # to all others: over the slowest links first
        times = 2 if kind == "all-reduce" else 1
        is_ring = links.rings_across_levels and kind in RINGS
        total = jnp.zeros_like(size)
        for lv in levels if spread else reversed(levels):
            n = product(axes, lv)
            if kind == "all-gather":
                size = size * n
            moved = times * size * (n - 1) / n
            if not is_ring:
                rate = links.rate(kind, lv, axes)
                seconds[lv] = seconds[lv] + times * (n - 1) * links.latency_s[lv] * latency_share + moved / rate
            total = total + moved
            if kind != "all-gather":
                size = size / n
        sent[kind] = sent.get(kind, 0.0) + total
        if is_ring:
            ring(kind, axes, total, times)
        return size

    def on_slowest(axes: Array, level_s: Callable[[int], Array]) -> None:
        """Adds what it takes to the slowest links that any of `axes` crosses: `level_s` of that level."""
        slower = jnp.zeros(jnp.shape(axes), bool)
        for lv in levels:
            crosses = (axes & of_level[lv]) != 0
            seconds[lv] = seconds[lv] + jnp.where(crosses & ~slower, level_s(lv), 0.0)
            slower |= crosses

    def ring(kind: str, axes: Array, moved: Array, times: int) -> None:
        """Adds a ring in which each device sends `moved`, to the slowest links that it crosses."""
        whole = product(axes)
        behind, wire_s = whole, jnp.zeros_like(moved)
        for lv in levels:
            behind = behind / product(axes, lv)  # devices that have the links of this level together
            wire_s = jnp.maximum(wire_s, jnp.where(product(axes, lv) > 1, moved / (links.rate(kind, lv, axes) * behind), 0.0))
        on_slowest(axes, lambda lv: times * (whole - 1) * links.latency_s[lv] * latency_share + wire_s)

    def permute(times: Array, moved: Array, size: Array) -> None:
        """Adds so many permutes, over the slowest links that any of the axes in `moved` crosses."""
        kind = "collective-permute"
        sent[kind] = sent.get(kind, 0.0) + times * size
        on_slowest(moved, lambda lv: times * (links.latency_s[lv] * latency_share + size / links.rate(kind, lv, moved)))

    part = size_bytes / product(over.given)
    permute(first.permutes.astype(jnp.float32), first.moved, part)
    run("all-gather", first.gathered, part)
    local = size_bytes / product(over.held)
    local = run("reduce-scatter", over.scattered, local)
    run("all-reduce", over.summed, local)
    run("all-to-all", over.exchanged, local)
    run("all-to-all", over.exchanged_late, local)
    permute(order.num_permutes, order.moved, local)
    sent[TRANSFER] = jnp.zeros_like(local)
    if pins:
        local, sent[TRANSFER] = _send(source, target, local, links, seconds, latency_share)
    run("all-gather", over.gathered, local)
    return seconds, [sent[k] for k in COLLECTIVES] if wants_bytes else []


def _send(src, dst, local: Array, links: Links, seconds: list[Array], latency_share) -> tuple[Array, Array]:
    """Messages between pinned and other layouts; adds to `seconds`, gives the local bytes after them and the bytes sent."""

    def product(mask: list[Array], level: int) -> Array:
        n = jnp.ones(jnp.shape(local), jnp.float32)
        for a, m in enumerate(mask):
            if links.axis_levels[a] == level:
                n = jnp.where(m, n * links.axis_sizes[a], n)
        return n

    pairs = list(zip(src, dst, strict=True))
    to_shards = [(s <= PINNED) & (d >= 0) for s, d in pairs]
    from_shards = [(s >= 0) & (d <= PINNED) for s, d in pairs]
    to_all = [(s <= PINNED) & (d == REPLICATED) for s, d in pairs]
    to_other = [(s <= PINNED) & (d <= PINNED) & (s != d) for s, d in pairs]
    total = jnp.zeros_like(local)
    for lv in range(links.num_levels):  # slowest first: what is spread gets smaller before it is sent on
        n = product(to_shards, lv)
        moved, steps = local * (n - 1) / n, n - 1
        local = local / n
        seconds[lv] = seconds[lv] + steps * links.latency_s[lv] * latency_share + moved / links.bytes_per_s[lv]
        total = total + moved
    sent_slower = jnp.zeros(jnp.shape(local), bool)
    for lv in range(links.num_levels):
        here = jnp.zeros(jnp.shape(local), bool)
        for a, m in enumerate(to_other):
            if links.axis_levels[a] == lv:
                here |= m
        times = jnp.where(here & ~sent_slower, 1.0, 0.0)  # one message, over the slowest link that it crosses
        sent_slower |= here
        for a, m in enumerate(to_all):
            if links.axis_levels[a] == lv:
                times = times + jnp.where(m, links.axis_sizes[a] - 1.0, 0.0)
        seconds[lv] = seconds[lv] + times * (links.latency_s[lv] * latency_share + local / links.bytes_per_s[lv])
        total = total + times * local
    for lv in reversed(range(links.num_levels)):
        n = product(from_shards, lv)
        moved, steps = local * (n - 1), n - 1
        local = local * n
        seconds[lv] = seconds[lv] + steps * links.latency_s[lv] * latency_share + moved / links.bytes_per_s[lv]
        total = total + moved
    return local, total
