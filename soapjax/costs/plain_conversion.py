"""What one change of layout costs, in plain Python: for lists of what a plan sends, and the oracle of the tests (conversion.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from soapjax.costs.links import COLLECTIVES, RINGS, TRANSFER, Links
from soapjax.strategy.layout import PARTIAL, PINNED, REPLICATED
from soapjax.strategy.resharding import Exchange, Permute, gathered_first, steps_of

Wanted = Callable[[int], bool]  # of mesh axes


def conversion_cost_plainly(
    source, target, size_bytes: float, links: Links, latency_share: float = 1.0, shape: Sequence[int] = ()
) -> tuple[list[float], dict[str, float]]:
    """Seconds per level and bytes by collective, as `conversion_cost`, of one tensor of a `shape`."""
    sizes, axes = links.axis_sizes, range(len(links.axis_sizes))
    pairs = list(zip(source, target, strict=True))
    is_pinned = [min(p) <= PINNED for p in pairs]
    unpinned = [[REPLICATED if on else d for on, d in zip(is_pinned, x, strict=True)] for x in (source, target)]
    first = gathered_first(*unpinned, shape, sizes)
    if list(first) != unpinned[0]:
        half = [s if on else f for s, f, on in zip(source, first, is_pinned, strict=True)]
        gathers_s, gathered = conversion_cost_plainly(unpinned[0], first, size_bytes, links, latency_share)
        rest_s, rest = conversion_cost_plainly(half, target, size_bytes, links, latency_share, shape)
        return [a + b for a, b in zip(gathers_s, rest_s, strict=True)], {k: gathered[k] + rest[k] for k in COLLECTIVES}
    steps = steps_of(*unpinned, sizes, is_counted=True)
    sums = any(s == PARTIAL != t for s, t in zip(*unpinned, strict=True))
    is_whole = len(steps) == 1 and isinstance(steps[0], Permute) and not sums  # blocks only change places
    local = size_bytes
    for a, (s, t) in enumerate(pairs):
        if s >= 0 or (s == REPLICATED and t >= 0 and not is_whole):
            local /= sizes[a]
    seconds = [0.0] * links.num_levels
    sent = dict.fromkeys(COLLECTIVES, 0.0)
    slow_first = range(links.num_levels)

    def group(level: int, wanted: Wanted) -> int:
        return int(np.prod([sizes[a] for a in axes if links.axis_levels[a] == level and wanted(a)]))

    def run(kind: str, level: int, n: int, size: float, times: int = 1, over: Sequence[int] = ()) -> None:
        moved = times * size * (n - 1) / n
        seconds[level] += times * (n - 1) * links.latency_s[level] * latency_share + moved / links.rate(kind, level, over)
        sent[kind] += moved

    def across(kind: str, wanted: Wanted, size: float) -> float:
        """A collective over the axes `wanted`: from `size` bytes per device to what it gives back."""
        times, is_gather = 2 if kind == "all-reduce" else 1, kind == "all-gather"
        is_ring, before = links.rings_across_levels and kind in RINGS, size
        for lv in slow_first if kind in ("all-gather", "all-to-all") else reversed(slow_first):
            n = group(lv, wanted)
            size *= n if is_gather else 1
            if not is_ring:
                run(kind, lv, n, size, times, [a for a in axes if wanted(a)])
            size /= 1 if is_gather else n
        if is_ring:
            ring(kind, wanted, times * (size if is_gather else before), times)
        return size

    def ring(kind: str, wanted: Wanted, whole: float, times: int) -> None:
        """All devices in one ring, that hold up to `whole` bytes; those of a host have its links together."""
        parts = {lv: n for lv in slow_first if (n := group(lv, wanted)) > 1}
        if parts:
            n, slowest = math.prod(parts.values()), min(parts)
            moved = whole * (n - 1) / n
            beside = {lv: math.prod(m for faster, m in parts.items() if faster > lv) for lv in parts}
            over = [a for a in axes if wanted(a)]
            wire_s = max(moved / (links.rate(kind, lv, over) * beside[lv]) for lv in parts)
            seconds[slowest] += times * (n - 1) * links.latency_s[slowest] * latency_share + wire_s
            sent[kind] += moved

    local = across("reduce-scatter", lambda a: source[a] == PARTIAL and target[a] >= 0, local)
    across("all-reduce", lambda a: source[a] == PARTIAL and target[a] == REPLICATED, local)
    for step in steps:
        if isinstance(step, Exchange):
            moving = {a for a, _, _ in step.moves}
            across("all-to-all", moving.__contains__, local)
    times = sum(isinstance(s, Permute) for s in steps)
    if times:
        changed = [a for a in axes if source[a] != target[a] and not is_pinned[a]]
        behind = [b for b in axes for a in changed if a < b and source[b] == target[b] >= 0 and source[b] in pairs[a]]
        over = changed if is_whole else changed + behind
        lv = min(links.axis_levels[a] for a in over)
        seconds[lv] += times * (links.latency_s[lv] * latency_share + local / links.rate("collective-permute", lv, over))
        sent["collective-permute"] += times * local
    for lv in slow_first:
        n = group(lv, lambda a: source[a] <= PINNED and target[a] >= 0)
        run(TRANSFER, lv, n, local)
        local /= n
    crossed = [links.axis_levels[a] for a in axes if source[a] <= PINNED and target[a] <= PINNED and source[a] != target[a]]
    spread = [(links.axis_levels[a], sizes[a] - 1) for a in axes if source[a] <= PINNED and target[a] == REPLICATED]
    for lv, times in ([(min(crossed), 1)] if crossed else []) + spread:
        seconds[lv] += times * (links.latency_s[lv] * latency_share + local / links.bytes_per_s[lv])
        sent[TRANSFER] += times * local
    for lv in reversed(slow_first):
        n = group(lv, lambda a: source[a] >= 0 and target[a] <= PINNED)
        local *= n
        run(TRANSFER, lv, n, local)
    across("all-gather", lambda a: source[a] >= 0 and target[a] == REPLICATED and not is_whole, local)
    return seconds, sent
