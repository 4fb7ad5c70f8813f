"""The factor mesh: the one mesh of a plan, an axis per prime factor of each link level.

Axes stand slowest link first, within a level larger primes first, and are named
after the level: 6 hosts of 8 GPUs are

>>> mesh = factor_mesh(load_topology("6xdgx_a100"))
>>> dict(zip(mesh.axis_names, mesh.axis_sizes))
{'h0': 3, 'h1': 2, 'd0': 2, 'd1': 2, 'd2': 2}
>>> mesh.axis_levels  # which of topology.levels each axis runs over
(0, 0, 1, 1, 1)
>>> mesh.device_coordinates(9)  # host 1, GPU 1
(0, 1, 0, 0, 1)

A split over any divisor of the device count is a set of such axes, so that the
search never needs another mesh. Plain data: JAX meshes are made by the executor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from soapjax.errors import Problem, SoapjaxError
from soapjax.topology.device_topology import DeviceTopology


@dataclass(frozen=True)
class FactorMesh:
    """Axes of one plan; device i has the row-major coordinates of i."""

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    axis_levels: tuple[int, ...]  # index into DeviceTopology.levels, per axis

    @property
    def num_devices(self) -> int:
        return math.prod(self.axis_sizes)

    def device_coordinates(self, i: int) -> tuple[int, ...]:
        """Where device `i` sits on each axis."""
        if not 0 <= i < self.num_devices:
            raise SoapjaxError(
                Problem(f"device {i}", str(i), f"0 to {self.num_devices - 1}", "this mesh has no such device: check the topology")
            )
        coordinates = []
        for size in reversed(self.axis_sizes):
            i, coordinate = divmod(i, size)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates))

    def axes_of(self, other: Sequence[tuple[str, int]]) -> dict[str, tuple[str, ...]]:
        """The axes of this mesh that each (name, size) axis of another mesh over the same devices is, as far as it is any.

        Axes that both name with one size are themselves; else those of this mesh, in order, are factors of the other's.

        >>> FactorMesh(("h0", "d0", "d1"), (2, 2, 2), (0, 1, 1)).axes_of([("data", 4), ("model", 2)])
        {'data': ('h0', 'd0'), 'model': ('d1',)}
        """
        sizes = dict(zip(self.axis_names, self.axis_sizes, strict=True))
        found: dict[str, tuple[str, ...]] = {name: (name,) for name, size in other if sizes.get(name) == size}
        if len(found) == len(other) or math.prod(size for _, size in other) != self.num_devices:
            return found
        left = [name for name in self.axis_names if sizes[name] > 1]
        factors: dict[str, tuple[str, ...]] = {}
        for name, size in other:
            taken: list[str] = []
            while left and math.prod(sizes[a] for a in taken) < size:
                taken.append(left.pop(0))
            if math.prod(sizes[a] for a in taken) != size:
                return found
            factors[name] = tuple(taken)
        return factors


def factor_mesh(topology: DeviceTopology) -> FactorMesh:
    """The factor mesh of `topology`; one device in total is the single axis `d0` of size 1."""
    prefixes = _axis_prefixes([level.name for level in topology.levels])
    axes = [
        (f"{prefix}{index}", prime, level_index)
        for level_index, (level, prefix) in enumerate(zip(topology.levels, prefixes, strict=True))
        for index, prime in enumerate(level.axis_sizes)
    ]
    names, sizes, levels = zip(*(axes or [("d0", 1, len(topology.levels) - 1)]), strict=True)
    return FactorMesh(names, sizes, levels)


def _axis_prefixes(names: Sequence[str]) -> list[str]:
    """The first letter of each name, or as many as it takes to tell it from the others."""
    return [
        next(
            (
                name[:length]
                for length in range(1, len(name) + 1)
                if not any(other.startswith(name[:length]) for other in names if other != name)
            ),
            name,
        )
        for name in names
    ]
