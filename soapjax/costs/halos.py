"""What blocks of a convolution's image get from their neighbours, where its spatial dims are split.

Two messages per dim that is split, the rows before a block and those after it, over the slowest link between blocks: 2a + S/b
with latency a, bandwidth b and S bytes on both sides together. What other axes split, other spatial dims among them,
makes the rows shorter. Where two dims are split the second exchange sends the corners too: they are not counted, a percent or so.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array

from soapjax.costs.block_order import axes_where
from soapjax.costs.conversion import ConversionCost
from soapjax.costs.layouts import split_of
from soapjax.costs.links import COLLECTIVES, Links
from soapjax.strategy.layout import HALO, REPLICATED

KIND = "collective-permute"


def inner_source(layout: Array) -> Array:
    """Layouts [S, A] of the collectives in the middle of tasks, without the codes of halos."""
    return jnp.where(layout <= HALO, REPLICATED, layout).astype(jnp.int8)


def inner_target(layout: Array) -> Array:
    """What they are brought to: sums made, borders exchanged."""
    return jnp.where(layout >= 0, layout, REPLICATED).astype(jnp.int8)


def halo_cost(layout: Array, size_bytes: Array, links: Links, num_edges: int) -> ConversionCost:
    """Of layouts [S, A], zeros where one has no halo.

    Args:
      size_bytes: [S], of the rows around a block, as wide as the whole image.
      num_edges: how many codes of halos there are, HALO the first; with none, nothing is computed.
    """
    sizes = jnp.asarray(links.axis_sizes, jnp.float32)
    local = size_bytes / split_of((layout >= 0) | (layout <= HALO), sizes)
    seconds, total = [jnp.zeros_like(local) for _ in range(links.num_levels)], jnp.zeros_like(local)
    for code in range(HALO, HALO - num_edges, -1):
        along = layout == code
        rows = jnp.where(along.any(-1), local * split_of(along, sizes), 0.0)
        total = total + rows
        slower = jnp.zeros(len(local), bool)
        for lv in range(links.num_levels):
            here = along[:, [a for a, level in enumerate(links.axis_levels) if level == lv]].any(-1)
            message_s = 2 * links.latency_s[lv] + rows / links.rate(KIND, lv, axes_where(list(along.T)))
            seconds[lv] = seconds[lv] + jnp.where(here & ~slower, message_s, 0.0)
            slower |= here
    nothing = jnp.zeros_like(total)
    return ConversionCost(jnp.stack(seconds, -1), jnp.stack([total if kind == KIND else nothing for kind in COLLECTIVES], -1))


def halo_cost_plainly(layout, size_bytes: float, links: Links) -> tuple[list[float], dict[str, float]]:
    """The same of one layout, in plain Python."""
    seconds, sent = [0.0] * links.num_levels, dict.fromkeys(COLLECTIVES, 0.0)
    for code in sorted({int(d) for d in layout if d <= HALO}):
        along = [a for a, d in enumerate(layout) if d == code]
        others = [a for a, d in enumerate(layout) if d != code and (d >= 0 or d <= HALO)]
        rows = size_bytes / math.prod(links.axis_sizes[a] for a in others)
        lv = min(links.axis_levels[a] for a in along)
        seconds[lv] += 2 * links.latency_s[lv] + rows / links.rate(KIND, lv, along)
        sent[KIND] += rows
    return seconds, sent
