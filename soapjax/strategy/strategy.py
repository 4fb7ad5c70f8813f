"""What a search chooses: for every operator a `ParallelConfig`, for the whole graph a `Strategy`.

A config assigns every mesh axis to one dim of the operator's iteration space, to
REPLICATE, or to PIN(i) (the operator runs only where that axis' coordinate is i), and picks how
the parameters that the operator owns are stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from soapjax.graph.operators import Operator, OperatorGraph
from soapjax.topology.mesh import FactorMesh

REPLICATE = -1
AS_USED = "as used"  # a storage: over no axes beyond those of the use
FIRST_PIN = -2


def PIN(i: int) -> int:  # noqa: N802 - a constructor of config values, written as in the paper's notation
    """The config value that runs an operator only on coordinate `i` of an axis."""
    return FIRST_PIN - i


class Storage(NamedTuple):
    """How parameters, gradients and optimizer state of an operator are stored.

    `axes` are split over beyond the way the parameter is used: gathered before use, reduce-scattered after. With
    `regather` the backward pass gathers again instead of keeping the whole parameter (FSDP; without: ZeRO-1/2). With micro-batches
    that is once per pass, or once per step; gradients are then scattered per micro-batch, or once per step.
    """

    axes: tuple[bool, ...]
    regather: bool

    def describe(self, axis_names: Sequence[str]) -> str:
        names = ",".join(n for n, on in zip(axis_names, self.axes, strict=True) if on)
        return AS_USED if not names else f"sharded({names})" + (", regathered" if self.regather else ", kept")


def storage_options(mesh: FactorMesh) -> tuple[Storage, ...]:
    """As used; over all axes; over the fastest level only; each kept or regathered."""
    none = Storage((False,) * len(mesh.axis_names), False)
    masks = [tuple(True for _ in mesh.axis_names)]
    if len(set(mesh.axis_levels)) > 1:
        fastest = max(mesh.axis_levels)
        masks.append(tuple(lv == fastest for lv in mesh.axis_levels))
    if mesh.num_devices == 1:
        return (none,)
    return (none, *(Storage(m, again) for m in masks for again in (False, True)))


class ParallelConfig(NamedTuple):
    """One operator's choice, by name: axis -> dim name, 'replicate' or 'pin(i)'."""

    axes: dict[str, str]
    storage: str

    def degrees(self, mesh: FactorMesh) -> dict[str, int]:
        """Degree of each dim that is split."""
        found: dict[str, int] = {}
        for name, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True):
            dim = self.axes[name]
            if dim != "replicate" and not dim.startswith("pin("):
                found[dim] = found.get(dim, 1) * size
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Strategy:
    """Configs of all operators as arrays: what simulators and searches work on."""

    axes: np.ndarray  # int8 [N, A]: dim index, REPLICATE or PIN(i)
    storage: np.ndarray  # int8 [N]: index into the space's storage options

    def config(self, n: int, operator: Operator, mesh: FactorMesh, storages: Sequence[Storage]) -> ParallelConfig:
        """The config of operator `n`, by name."""

        def name(value: int) -> str:
            return operator.dims[value].name if value >= 0 else "replicate" if value == REPLICATE else f"pin({-2 - value})"

        axes = {a: name(int(v)) for a, v in zip(mesh.axis_names, self.axes[n], strict=True)}
        return ParallelConfig(axes, storages[int(self.storage[n])].describe(mesh.axis_names))

    def key(self) -> bytes:
        return np.ascontiguousarray(self.axes).tobytes() + np.ascontiguousarray(self.storage).tobytes()


def replicated(graph: OperatorGraph, mesh: FactorMesh) -> Strategy:
    """Every device does everything."""
    n = graph.num_operators
    return Strategy(np.full((n, len(mesh.axis_names)), REPLICATE, np.int8), np.zeros(n, np.int8))
