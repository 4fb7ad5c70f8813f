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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from soapjax.costs.block_order import number_of_parts, sets_by, sets_of_one, type_of_sets
from soapjax.costs.steps import steps_of_all
from soapjax.costs.turns import in_turns
from soapjax.strategy.layout import PINNED, REPLICATED
from soapjax.topology import COLLECTIVE_KINDS, DeviceTopology, FactorMesh
from soapjax.topology.rings import detour_share, group_shares

TRANSFER = "transfer"  # from one group of devices to another
COLLECTIVES = (*COLLECTIVE_KINDS, TRANSFER)
RINGS = ("reduce-scatter", "all-reduce", "all-gather")


# XLA merges all-reduces, all-gathers and reduce-scatters of independent tensors, on GPUs up to this size
# (xla_gpu_all_reduce_combine_threshold_bytes and its siblings). On CPUs a whole step's gradients are one instruction too, but
# its tensors are then reduced one after the other, each with a latency of its own (measured: scripts/cluster_table.py).
COMBINE_BYTES = {"cuda": 30 * 2**20, "rocm": 30 * 2**20}


class Links(NamedTuple):
    """The mesh's axes and the link levels below them."""

    axis_sizes: tuple[int, ...]
    axis_levels: tuple[int, ...]
    latency_s: tuple[float, ...]  # per level, slowest first
    bytes_per_s: tuple[float, ...]
    combine_bytes: float = 0.0  # the compiler merges small collectives of parameters up to this size; 0: it does not
    fractions: tuple[tuple[float, ...], ...] = ()  # per level, by COLLECTIVES: of the rate above; 1 if empty
    rings_across_levels: bool = False  # of RINGS
    # Per level, by its axes: of the rate above, what groups along these have that are not joined by all links of the level.
    group_share: tuple[tuple[tuple[tuple[int, ...], float], ...], ...] = ()

    @property
    def num_levels(self) -> int:
        return len(self.latency_s)

    def rate(self, kind: str, level: int, axes: Array | Sequence[int] = ()) -> Any:
        """Bytes per second of a collective over `axes`, of which those of `level` count: their numbers, or sets [n]."""
        full = self.bytes_per_s[level] * (self.fractions[level][COLLECTIVES.index(kind)] if self.fractions else 1.0)
        if not self.group_share:
            return full
        if isinstance(axes, list | tuple):
            here = tuple(sorted(a for a in axes if self.axis_levels[a] == level))
            return full * dict(self.group_share[level]).get(here, 1.0)
        alone, here, rate = sets_of_one(len(self.axis_sizes)), axes & sets_by(self.axis_levels)[level], full
        for group, share in self.group_share[level]:
            rate = jnp.where(here == np.bitwise_or.reduce(alone[list(group)]), full * share, rate)
        return rate


def links_of(topology: DeviceTopology, mesh: FactorMesh) -> Links:
    return Links(
        mesh.axis_sizes,
        mesh.axis_levels,
        tuple(lv.latency_s for lv in topology.levels),
        tuple(lv.achieved_bytes_per_s for lv in topology.levels),
        COMBINE_BYTES.get(topology.device.platform, 0.0),
        tuple(tuple(lv.collective_fraction.get(kind, 1.0) for kind in COLLECTIVES) for lv in topology.levels),
        topology.rings_across_levels,
        _group_share(topology, mesh) if any(lv.links for lv in topology.levels) else (),
    )


def _group_share(topology: DeviceTopology, mesh: FactorMesh) -> tuple[tuple[tuple[tuple[int, ...], float], ...], ...]:
    found = []
    for i, level in enumerate(topology.levels):
        axes = [a for a, on in enumerate(mesh.axis_levels) if on == i]
        shares = group_shares(level.links, tuple(mesh.axis_sizes[a] for a in axes)) if level.links else {}
        least = detour_share(level.links) if level.links else 1.0  # meshes written by hand have groups that no ring joins
        slower = {group: max(share, least) for group, (share, _) in shares.items() if share < 1}
        found.append(tuple((tuple(axes[a] for a in group), share) for group, share in slower.items()))
    return tuple(found)


class ConversionCost(NamedTuple):
    seconds: Array  # [..., L]
    bytes: Array  # [..., 6] that each device sends, by COLLECTIVES
    late_bytes: Array | None = None  # [...]: of these what devices of the target layout send, or get from shards; with pins only


def combined_share(size_bytes, combines, links: Links):
    """The share of a collective's latency that a tensor of `size_bytes` pays, where it is merged with its neighbours."""
    if not links.combine_bytes:
        return np.ones_like(size_bytes)
    return np.where(combines, np.minimum(1.0, size_bytes / links.combine_bytes), 1.0).astype(np.float32)


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
    num = len(COLLECTIVES)
    return ConversionCost(jnp.stack(seconds, -1), jnp.stack(sent[:num], -1), sent[num] if pins else None)


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
    """Seconds [n] per level and bytes [n] by collective, of layouts int8 [n] per axis and shapes int32 [n] per dim.

    With pins a list of bytes more: `ConversionCost.late_bytes`.
    """
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
    late = jnp.zeros_like(local)
    if pins:
        local, sent[TRANSFER], late = _send(source, target, local, links, seconds, latency_share)
    before = sent["all-gather"]
    run("all-gather", over.gathered, local)
    if not wants_bytes:
        return seconds, []
    return seconds, [*(sent[k] for k in COLLECTIVES), *([late + sent["all-gather"] - before] if pins else [])]


def _send(src, dst, local: Array, links: Links, seconds: list[Array], latency_share) -> tuple[Array, Array, Array]:
    """Messages between pinned and other layouts; adds to `seconds`.

    Gives the local bytes after them, the bytes sent, and of these what one device gets from the others' shards.
    """

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
    gathered = jnp.zeros_like(local)
    for lv in reversed(range(links.num_levels)):
        n = product(from_shards, lv)
        moved, steps = local * (n - 1), n - 1
        local = local * n
        seconds[lv] = seconds[lv] + steps * links.latency_s[lv] * latency_share + moved / links.bytes_per_s[lv]
        gathered = gathered + moved
    return local, total + gathered, gathered
