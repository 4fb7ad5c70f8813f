"""The links below the mesh's axes: levels, latencies, rates, and what groups along some axes have of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from soapjax.topology import COLLECTIVE_KINDS, DeviceTopology, FactorMesh
from soapjax.topology.rings import detour_share, group_shares

TRANSFER = "transfer"  # from one group of devices to another
COLLECTIVES = (*COLLECTIVE_KINDS, TRANSFER)
RINGS = ("reduce-scatter", "all-reduce", "all-gather")


class Links(NamedTuple):
    """The mesh's axes and the link levels below them."""

    axis_sizes: tuple[int, ...]
    axis_levels: tuple[int, ...]
    latency_s: tuple[float, ...]  # per level, slowest first
    bytes_per_s: tuple[float, ...]
    fractions: tuple[tuple[float, ...], ...] = ()  # per level, by COLLECTIVES: of the rate above; 1 if empty
    rings_across_levels: bool = False  # of RINGS
    # Per level, by its axes: of the rate above, what groups along these have that are not joined by all links of the level.
    group_share: tuple[tuple[tuple[tuple[int, ...], float], ...], ...] = ()

    @property
    def num_levels(self) -> int:
        return len(self.latency_s)

    def rate(self, kind: str, level: int, axes: Sequence[int] = ()) -> float:
        """Bytes per second of a collective over `axes`, of which those of `level` count."""
        full = self.bytes_per_s[level] * (self.fractions[level][COLLECTIVES.index(kind)] if self.fractions else 1.0)
        if not self.group_share:
            return full
        here = tuple(sorted(a for a in axes if self.axis_levels[a] == level))
        return full * dict(self.group_share[level]).get(here, 1.0)


def links_of(topology: DeviceTopology, mesh: FactorMesh) -> Links:
    return Links(
        axis_sizes=mesh.axis_sizes, axis_levels=mesh.axis_levels, latency_s=tuple(lv.latency_s for lv in topology.levels),
        bytes_per_s=tuple(lv.achieved_bytes_per_s for lv in topology.levels),
        fractions=tuple(tuple(lv.collective_fraction.get(kind, 1.0) for kind in COLLECTIVES) for lv in topology.levels),
        rings_across_levels=topology.rings_across_levels,
        group_share=_group_share(topology, mesh) if any(lv.links for lv in topology.levels) else (),
    )  # fmt: skip


def _group_share(topology: DeviceTopology, mesh: FactorMesh) -> tuple[tuple[tuple[tuple[int, ...], float], ...], ...]:
    found = []
    for i, level in enumerate(topology.levels):
        axes = [a for a, on in enumerate(mesh.axis_levels) if on == i]
        shares = group_shares(level.links, tuple(mesh.axis_sizes[a] for a in axes)) if level.links else {}
        least = detour_share(level.links) if level.links else 1.0  # meshes written by hand have groups that no ring joins
        slower = {group: max(share, least) for group, (share, _) in shares.items() if share < 1}
        found.append(tuple((tuple(axes[a] for a in group), share) for group, share in slower.items()))
    return tuple(found)


def combined_share(size_bytes, combines, merged_bytes: float):
    """The share of a collective's latency that a tensor of `size_bytes` pays, where it is merged with its neighbours."""
    if not merged_bytes:
        return np.ones_like(size_bytes)
    return np.where(combines, np.minimum(1.0, size_bytes / merged_bytes), 1.0).astype(np.float32)
