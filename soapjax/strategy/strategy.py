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

    Parameters and optimizer state are split over `axes` beyond the way the parameter is used: gathered before use, gradients
    reduce-scattered after. With `regather` the backward pass gathers again instead of keeping the whole parameter (ZeRO-3, FSDP).

    With micro-batches parameters are gathered once per pass, or once per step, and gradients are scattered accordingly: per
    micro-batch, into a running sum in parts, or once per step, which every device adds up to whole (ZeRO-1). With
    `scatters` they are scattered per micro-batch although the parameter is kept (ZeRO-2).
    """

    axes: tuple[bool, ...]
    regather: bool
    scatters: bool = False

    def describe(self, axis_names: Sequence[str]) -> str:
        """As plan files have it."""
        return str(StorageName(tuple(n for n, on in zip(axis_names, self.axes, strict=True) if on), self.regather, self.scatters))


class StorageName(NamedTuple):
    """A storage by the names of its axes, as plans say it: "as used", "sharded(d0,d1), kept"."""

    axes: tuple[str, ...]
    regather: bool
    scatters: bool

    def __str__(self) -> str:
        kept = "regathered" if self.regather else "kept" + ", gradients sharded" * self.scatters
        return f"sharded({','.join(self.axes)}), {kept}" if self.axes else AS_USED

    @staticmethod
    def parse(text: str) -> StorageName:
        """Of what `str` gives."""
        names = text.partition("(")[2].partition(")")[0]
        return StorageName(tuple(names.split(",")) if names else (), "regathered" in text, "gradients" in text)


def storage_options(mesh: FactorMesh, *, adds_up: bool = False) -> tuple[Storage, ...]:
    """As used; over all axes; over the fastest level only; each kept or regathered.

    Where gradients of several micro-batches are added up (`adds_up`), also kept with these sums in parts.
    """
    none = Storage((False,) * len(mesh.axis_names), False)
    masks = [tuple(True for _ in mesh.axis_names)]
    if len(set(mesh.axis_levels)) > 1:
        fastest = max(mesh.axis_levels)
        masks.append(tuple(lv == fastest for lv in mesh.axis_levels))
    if mesh.num_devices == 1:
        return (none,)
    ways = [(False, False), (True, False), *([(False, True)] if adds_up else [])]
    return (none, *(Storage(m, *way) for m in masks for way in ways))


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
