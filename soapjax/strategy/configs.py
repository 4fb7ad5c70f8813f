"""What a search chooses: for every operator a `ParallelConfig`, for the whole graph a `Strategy`.

A config assigns every mesh axis to one dim of the operator's iteration space, to
REPLICATE, or to PIN(i) (the operator runs only where that axis' coordinate is i), and picks how
the parameters that the operator owns are stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from soapjax.graph.operators import Operator, OperatorGraph
from soapjax.topology.mesh import FactorMesh

REPLICATE = -1
AS_USED = "as used"  # a storage: over no axes beyond those of the use
FIRST_PIN = -2
MOST_PLACES = 8  # along an axis, that operators may be pinned to: so many the cost model tells apart
MOST_AXES = 15  # of a mesh: the cost model keeps sets of them in 16 bits


def PIN(i: int) -> int:  # noqa: N802 - a constructor of config values, written as in the paper's notation
    """The config value that runs an operator only on coordinate `i` of an axis."""
    return FIRST_PIN - i


class Storage(NamedTuple):
    """How parameters, gradients and optimizer state of an operator are stored.

    Parameters and optimizer state are split over `axes` beyond the way the parameter is used: gathered before use, gradients
    reduce-scattered after. The backward pass gathers again over the axes in `again`: over none it keeps the whole parameter, over
    all it begins with what is stored (ZeRO-3, FSDP), and over some with a part that the forward pass left it, split over these
    (the secondary partition of ZeRO++, Wang et al. 2023, section 4.2).

    With micro-batches parameters are gathered once per pass, or once per step, and gradients are scattered accordingly: per
    micro-batch, into a running sum in parts, or once per step, which every device adds up to whole (ZeRO-1). With
    `scatters` they are scattered per micro-batch although the parameter is kept (ZeRO-2).
    """

    axes: tuple[bool, ...]
    again: tuple[bool, ...]
    scatters: bool = False

    @property
    def regathers(self) -> bool:
        return any(self.again)

    @property
    def is_scattering(self) -> bool:
        """Whether gradients that are added up are scattered before that: no device holds a whole sum."""
        return self.regathers or self.scatters

    @property
    def left(self) -> tuple[bool, ...]:
        """The axes that split the part that the forward pass leaves the backward pass; none where it leaves nothing."""
        return tuple(x and self.again != self.axes for x in self.again)

    def describe(self, axis_names: Sequence[str]) -> str:
        """As plan files have it."""

        def named(mask: tuple[bool, ...]) -> tuple[str, ...]:
            return tuple(n for n, on in zip(axis_names, mask, strict=True) if on)

        return str(StorageName(named(self.axes), named(self.again), self.scatters))


class StorageName(NamedTuple):
    """A storage by the names of its axes, as plans say it: "as used", "sharded(d0,d1), kept"."""

    axes: tuple[str, ...]
    again: tuple[str, ...]
    scatters: bool

    @property
    def is_scattering(self) -> bool:
        """As of `Storage`."""
        return bool(self.again) or self.scatters

    def __str__(self) -> str:
        if not self.axes:
            return AS_USED
        over = f"({','.join(self.again)})" * (self.again != self.axes)
        how = f"regathered{over}" if self.again else "kept" + ", gradients sharded" * self.scatters
        return f"sharded({','.join(self.axes)}), {how}"

    @staticmethod
    def parse(text: str) -> StorageName:
        """Of what `str` gives."""

        def names(text: str) -> tuple[str, ...]:
            found = text.partition("(")[2].partition(")")[0]
            return tuple(found.split(",")) if found else ()

        sharded, _, how = text.partition("), ")
        axes = names(sharded + ")")
        return StorageName(axes, (names(how) or axes) if how.startswith("regathered") else (), "gradients" in how)


def storage_options(mesh: FactorMesh, *, adds_up: bool = False) -> tuple[Storage, ...]:
    """Of one program: as used; over all axes or those of the fastest level, kept or regathered; over all, regathered over these.

    Where the step itself adds up gradients (`adds_up`), also kept with these sums in parts.
    """
    masks = _masks(mesh)
    kept = (False,) * len(mesh.axis_names)
    ways = [Storage(m, again) for i, m in enumerate(masks) for again in (kept, *masks[i:])]
    return (Storage(kept, kept), *ways, *(Storage(m, kept, scatters=True) for m in masks if adds_up))


def stage_storages(mesh: FactorMesh, *, adds_up: bool) -> tuple[Storage, ...]:
    """Of a part of a step that is several programs, each with its own copies: regathered over all axes or none.

    Where gradients of micro-batches are added up (`adds_up`), also kept with these sums in parts.
    """
    kept = (False,) * len(mesh.axis_names)
    ways = [(m, again, scatters) for m in _masks(mesh) for again, scatters in ((kept, False), (m, False), (kept, True))]
    return (Storage(kept, kept), *(Storage(*way) for way in ways if adds_up or not way[2]))


def _masks(mesh: FactorMesh) -> list[tuple[bool, ...]]:
    """All axes, and those of the fastest level."""
    if mesh.num_devices == 1:
        return []
    levels = sorted(set(mesh.axis_levels))
    return [tuple(lv >= first for lv in mesh.axis_levels) for first in dict.fromkeys((levels[0], levels[-1]))]


class ParallelConfig(NamedTuple):
    """One operator's choice, by name: axis -> dim name, 'replicate' or 'pin(i)'."""

    axes: dict[str, str]
    storage: str


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

    def of(self, operators: np.ndarray) -> Strategy:
        """What some operators do, in this order."""
        return Strategy(self.axes[operators], self.storage[operators])

    def but(self, operators: Any, axes: Any, storage: Any) -> Strategy:
        """The same, but for one operator or several."""
        changed = Strategy(self.axes.copy(), self.storage.copy())
        changed.axes[operators], changed.storage[operators] = axes, storage
        return changed

    def key(self) -> bytes:
        return np.ascontiguousarray(self.axes).tobytes() + np.ascontiguousarray(self.storage).tobytes()


def replicated(graph: OperatorGraph, mesh: FactorMesh) -> Strategy:
    """Every device does everything."""
    n = graph.num_operators
    return Strategy(np.full((n, len(mesh.axis_names)), REPLICATE, np.int8), np.zeros(n, np.int8))
