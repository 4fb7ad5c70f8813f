"""What a change of layout costs: seconds per link level and bytes per collective.

Per mesh axis the source layout is compared with the destination: equal is free;
replicated -> split is a slice (free); partial -> split a reduce-scatter;
partial -> replicated an all-reduce; split -> another dim an all-to-all; split ->
replicated an all-gather. Pinned to one coordinate, a tensor is sent: to another coordinate (one message over the
slowest link between), to all (a broadcast), in shards, or gathered from shards.
Slice first, then reduce, then exchange, then send, then gather:
the fewest bytes. Groups that span link levels run level by level, fastest first where
the data shrinks, slowest first where it grows.

With n devices per group, S bytes of the group's full tensor, latency a per step, bandwidth b per device:
all-gather and reduce-scatter (n-1)a + S(n-1)/n/b, all-reduce their sum, all-to-all (n-1)a + S/n(n-1)/n/b,
a message a + S/b, a broadcast one message per step of a tree, shards to or from one device (n-1)a + S(n-1)/n/b.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from soapjax.strategy.layout import PARTIAL, PINNED, REPLICATED
from soapjax.topology import DeviceTopology, FactorMesh

COLLECTIVES = ("reduce-scatter", "all-reduce", "all-to-all", "all-gather", "transfer")
EXCHANGES = COLLECTIVES[:3]


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

    @property
    def num_levels(self) -> int:
        return len(self.latency_s)


def links_of(topology: DeviceTopology, mesh: FactorMesh) -> Links:
    return Links(
        mesh.axis_sizes,
        mesh.axis_levels,
        tuple(lv.latency_s for lv in topology.levels),
        tuple(lv.achieved_bytes_per_s for lv in topology.levels),
        COMBINE_BYTES.get(topology.device.platform, 0.0),
    )


class ConversionCost(NamedTuple):
    seconds: Array  # [..., L]
    bytes: Array  # [..., 5] that each device sends, by COLLECTIVES


def combined_share(size_bytes, combines, links: Links):
    """The share of a collective's latency that a tensor of `size_bytes` pays, where it is merged with its neighbours."""
    if not links.combine_bytes:
        return np.ones_like(size_bytes)
    return np.where(combines, np.minimum(1.0, size_bytes / links.combine_bytes), 1.0).astype(np.float32)


def conversion_cost(
    source: Array, target: Array, size_bytes: Array, links: Links, latency_share: np.ndarray | float = 1.0, *, pins: bool = False
) -> ConversionCost:
    """The cost of bringing tensors of `size_bytes` [...] from layouts `source` to `target`, both [..., A].

    `latency_share` [...] scales the latencies (`combined_share`). Pinned layouts are looked at where `pins` says so.
    """
    sizes = links.axis_sizes
    src = [source[..., a] for a in range(len(sizes))]
    dst = [target[..., a] for a in range(len(sizes))]

    def product(mask: list[Array], level: int | None = None) -> Array:
        n = jnp.ones(jnp.shape(size_bytes), jnp.float32)
        for a, m in enumerate(mask):
            if level is None or links.axis_levels[a] == level:
                n = jnp.where(m, n * sizes[a], n)
        return n

    local = size_bytes / product([s >= 0 for s in src])
    local = local / product([(s == REPLICATED) & (d >= 0) for s, d in zip(src, dst, strict=True)])
    scatter = [(s == PARTIAL) & (d >= 0) for s, d in zip(src, dst, strict=True)]
    reduce = [(s == PARTIAL) & (d == REPLICATED) for s, d in zip(src, dst, strict=True)]
    exchange = [(s >= 0) & (d >= 0) & (s != d) for s, d in zip(src, dst, strict=True)]
    gather = [(s >= 0) & (d == REPLICATED) for s, d in zip(src, dst, strict=True)]
    levels = range(links.num_levels)
    seconds = [jnp.zeros_like(local) for _ in levels]
    sent = {}
    for kind, masks in (*zip(EXCHANGES, (scatter, reduce, exchange), strict=True), ("transfer", None), ("all-gather", gather)):
        sent[kind] = jnp.zeros_like(local)
        if kind == "transfer":
            if pins:
                local, sent[kind] = _send(src, dst, local, links, product, seconds, latency_share)
            continue
        size = local  # bytes per device before this collective
        for lv in levels if kind == "all-gather" else reversed(levels):
            n = product(masks, lv)
            if kind == "all-gather":
                size = size * n
            moved = size * (n - 1) / n
            steps = n - 1
            if kind == "all-reduce":
                moved, steps = 2 * moved, 2 * steps
            seconds[lv] = seconds[lv] + steps * links.latency_s[lv] * latency_share + moved / links.bytes_per_s[lv]
            sent[kind] = sent[kind] + moved
            if kind in ("reduce-scatter", "all-reduce"):
                size = size / n
        if kind == "reduce-scatter":
            local = size
    return ConversionCost(jnp.stack(seconds, -1), jnp.stack([sent[k] for k in COLLECTIVES], -1))


def _send(src, dst, local: Array, links: Links, product, seconds: list[Array], latency_share) -> tuple[Array, Array]:
    """Messages between pinned and other layouts; adds to `seconds`, gives the local bytes after them and the bytes sent."""
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


def conversion_cost_plainly(
    source, target, size_bytes: float, links: Links, latency_share: float = 1.0
) -> tuple[list[float], dict[str, float]]:
    """The same, one tensor at a time in plain Python: the oracle of the tests, and of hand calculations."""
    sizes, axes = links.axis_sizes, range(len(links.axis_sizes))
    local = size_bytes
    for a in axes:
        if source[a] >= 0 or (source[a] == REPLICATED and target[a] >= 0):
            local /= sizes[a]
    seconds = [0.0] * links.num_levels
    sent = dict.fromkeys(COLLECTIVES, 0.0)

    def group(level: int, wanted) -> int:
        return int(np.prod([sizes[a] for a in axes if links.axis_levels[a] == level and wanted(source[a], target[a])]))

    def run(kind: str, level: int, n: int, size: float, times: int = 1) -> None:
        moved = times * size * (n - 1) / n
        seconds[level] += times * (n - 1) * links.latency_s[level] * latency_share + moved / links.bytes_per_s[level]
        sent[kind] += moved

    fast_first = list(reversed(range(links.num_levels)))
    for lv in fast_first:
        n = group(lv, lambda s, d: s == PARTIAL and d >= 0)
        run("reduce-scatter", lv, n, local)
        local /= n
    size = local
    for lv in fast_first:
        n = group(lv, lambda s, d: s == PARTIAL and d == REPLICATED)
        run("all-reduce", lv, n, size, times=2)
        size /= n
    for lv in fast_first:
        run("all-to-all", lv, group(lv, lambda s, d: s >= 0 and d >= 0 and s != d), local)
    for lv in reversed(fast_first):
        n = group(lv, lambda s, d: s <= PINNED and d >= 0)
        run("transfer", lv, n, local)
        local /= n
    crossed = [links.axis_levels[a] for a in axes if source[a] <= PINNED and target[a] <= PINNED and source[a] != target[a]]
    spread = [(links.axis_levels[a], sizes[a] - 1) for a in axes if source[a] <= PINNED and target[a] == REPLICATED]
    for lv, times in ([(min(crossed), 1)] if crossed else []) + spread:
        seconds[lv] += times * (links.latency_s[lv] * latency_share + local / links.bytes_per_s[lv])
        sent["transfer"] += times * local
    for lv in fast_first:
        n = group(lv, lambda s, d: s >= 0 and d <= PINNED)
        local *= n
        run("transfer", lv, n, local)
    for lv in reversed(fast_first):
        n = group(lv, lambda s, d: s >= 0 and d == REPLICATED)
        local *= n
        run("all-gather", lv, n, local)
    return seconds, sent
