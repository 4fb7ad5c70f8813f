"""What blocks of a convolution's image get from their neighbours, of one layout in plain Python: the rule is in reshard_cost.py."""

from __future__ import annotations

import math

import numpy as np

from soapjax.costs.rules.links import COLLECTIVES, Links
from soapjax.strategy.layout import HALO, REPLICATED

KIND = "collective-permute"


def inner_target(layout: np.ndarray) -> np.ndarray:
    """What they are brought to: sums made, halos exchanged."""
    return np.where(layout >= 0, layout, REPLICATED)


def halo_cost_plainly(layout, size_bytes: float, links: Links) -> tuple[list[float], dict[str, float]]:
    """(seconds per level, bytes by collective) of a layout [A], zeros where it has no halo."""
    seconds, sent = [0.0] * links.num_levels, dict.fromkeys(COLLECTIVES, 0.0)
    for code in sorted({int(d) for d in layout if d <= HALO}):
        along = [a for a, d in enumerate(layout) if d == code]
        others = [a for a, d in enumerate(layout) if d != code and (d >= 0 or d <= HALO)]
        rows = size_bytes / math.prod(links.axis_sizes[a] for a in others)
        lv = min(links.axis_levels[a] for a in along)
        seconds[lv] += 2 * links.latency_s[lv] + rows / links.rate(KIND, lv, along)
        sent[KIND] += rows
    return seconds, sent
