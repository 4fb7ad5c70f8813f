"""What one reshard costs, in plain Python: for lists of what a plan sends, and the oracle of the tests (many_reshards.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from soapjax.costs.rules.links import COLLECTIVES, RINGS, TRANSFER, Links
from soapjax.strategy.layout import PARTIAL, PINNED, REPLICATED
from soapjax.strategy.resharding import Exchange, Permute, gathered_first, steps_of

Wanted = Callable[[int], bool]  # of mesh axes


class _Sent:
    """What is sent so far; every method adds a collective or a transfer."""

    def __init__(self, links: Links, latency_share: float):
        self.links, self.latency_share = links, latency_share
        self.seconds = [0.0] * links.num_levels
        self.bytes = dict.fromkeys(COLLECTIVES, 0.0)
        self.slow_first = range(links.num_levels)

    def group(self, level: int, wanted: Wanted) -> int:
        """Devices of a level along the axes `wanted`."""
        axes = range(len(self.links.axis_sizes))
        return int(np.prod([self.links.axis_sizes[a] for a in axes if self.links.axis_levels[a] == level and wanted(a)]))

    def add(self, kind: str, level: int, steps: int, moved: float, wire_s: float) -> None:
        self.seconds[level] += steps * self.links.latency_s[level] * self.latency_share + wire_s
        self.bytes[kind] += moved

    def at_level(self, kind: str, level: int, n: int, size: float, times: int = 1, over: Sequence[int] = ()) -> None:
        moved = times * size * (n - 1) / n
        self.add(kind, level, times * (n - 1), moved, moved / self.links.rate(kind, level, over))

    def across(self, kind: str, wanted: Wanted, size: float) -> float:
        """A collective over the axes `wanted`: from `size` bytes per device to what it gives back."""
        times, is_gather = 2 if kind == "all-reduce" else 1, kind == "all-gather"
        is_ring, before = self.links.rings_across_levels and kind in RINGS, size
        over = [a for a in range(len(self.links.axis_sizes)) if wanted(a)]
        for lv in self.slow_first if kind in ("all-gather", "all-to-all") else reversed(self.slow_first):
            n = self.group(lv, wanted)
            size *= n if is_gather else 1
            if not is_ring:
                self.at_level(kind, lv, n, size, times, over)
            size /= 1 if is_gather else n
        if is_ring:
            self.ring(kind, wanted, times * (size if is_gather else before), times, over)
        return size

    def ring(self, kind: str, wanted: Wanted, whole: float, times: int, over: Sequence[int]) -> None:
        """All devices in one ring, that hold up to `whole` bytes; those of a host have its links together."""
        parts = {lv: n for lv in self.slow_first if (n := self.group(lv, wanted)) > 1}
        if parts:
            n, slowest = math.prod(parts.values()), min(parts)
            moved = whole * (n - 1) / n
            beside = {lv: math.prod(m for faster, m in parts.items() if faster > lv) for lv in parts}
            wire_s = max(moved / (self.links.rate(kind, lv, over) * beside[lv]) for lv in parts)
            self.add(kind, slowest, times * (n - 1), moved, wire_s)

    def permuted(self, times: int, over: Sequence[int], size: float) -> None:
        """Blocks change places along the axes `over`."""
        lv = min(self.links.axis_levels[a] for a in over)
        self.add("collective-permute", lv, times, times * size, times * (size / self.links.rate("collective-permute", lv, over)))

    def moved_to_pins(self, source, target, size: float) -> float:
        """Transfers between devices that pins tell apart; the bytes that a device holds then."""
        links, axes = self.links, range(len(self.links.axis_sizes))
        for lv in self.slow_first:
            n = self.group(lv, lambda a: source[a] <= PINNED and target[a] >= 0)
            self.at_level(TRANSFER, lv, n, size)
            size /= n
        crossed = [links.axis_levels[a] for a in axes if source[a] <= PINNED and target[a] <= PINNED and source[a] != target[a]]
        spread = [
            (links.axis_levels[a], links.axis_sizes[a] - 1) for a in axes if source[a] <= PINNED and target[a] == REPLICATED
        ]
        for lv, times in ([(min(crossed), 1)] if crossed else []) + spread:
            self.add(TRANSFER, lv, times, times * size, times * (size / links.bytes_per_s[lv]))
        for lv in reversed(self.slow_first):
            n = self.group(lv, lambda a: source[a] >= 0 and target[a] <= PINNED)
            size *= n
            self.at_level(TRANSFER, lv, n, size)
        return size


def reshard_cost_plainly(
    source, target, size_bytes: float, links: Links, latency_share: float = 1.0, shape: Sequence[int] = ()
) -> tuple[list[float], dict[str, float]]:
    """Seconds per level and bytes by collective, as `reshard_costs`, of one tensor of a `shape`."""
    sizes, axes = links.axis_sizes, range(len(links.axis_sizes))
    pairs = list(zip(source, target, strict=True))
    is_pinned = [min(p) <= PINNED for p in pairs]
    was, wanted = ([REPLICATED if on else d for on, d in zip(is_pinned, x, strict=True)] for x in (source, target))
    first = gathered_first(was, wanted, shape, sizes)
    if list(first) != was:
        half = [s if on else f for s, f, on in zip(source, first, is_pinned, strict=True)]
        gathers_s, gathered = reshard_cost_plainly(was, first, size_bytes, links, latency_share)
        rest_s, rest = reshard_cost_plainly(half, target, size_bytes, links, latency_share, shape)
        return [a + b for a, b in zip(gathers_s, rest_s, strict=True)], {k: gathered[k] + rest[k] for k in COLLECTIVES}
    steps = steps_of(was, wanted, sizes, is_counted=True)
    sums = any(s == PARTIAL != t for s, t in zip(was, wanted, strict=True))
    is_whole = len(steps) == 1 and isinstance(steps[0], Permute) and not sums  # blocks only change places
    local = size_bytes
    for a, (s, t) in enumerate(pairs):
        if s >= 0 or (s == REPLICATED and t >= 0 and not is_whole):
            local /= sizes[a]
    sent = _Sent(links, latency_share)
    local = sent.across("reduce-scatter", lambda a: source[a] == PARTIAL and target[a] >= 0, local)
    sent.across("all-reduce", lambda a: source[a] == PARTIAL and target[a] == REPLICATED, local)
    for step in steps:
        if isinstance(step, Exchange):
            sent.across("all-to-all", {a for a, _, _ in step.moves}.__contains__, local)
    if times := sum(isinstance(s, Permute) for s in steps):
        changed = [a for a in axes if source[a] != target[a] and not is_pinned[a]]
        behind = [b for b in axes for a in changed if a < b and source[b] == target[b] >= 0 and source[b] in pairs[a]]
        sent.permuted(times, changed if is_whole else changed + behind, local)
    local = sent.moved_to_pins(source, target, local)
    sent.across("all-gather", lambda a: source[a] >= 0 and target[a] == REPLICATED and not is_whole, local)
    return sent.seconds, sent.bytes
