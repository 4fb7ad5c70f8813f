"""Measured seconds of tasks as a function of how their operator is split.

A task at local shapes is identified by what it computes, the local shapes that it reads and writes, and its local FLOPs
(`LocalTask.identity`), so a measurement serves every task that asks for the same. Per task the measurements that
fit it become points in the space of log2 degrees, one coordinate per dim of the operator (the number of shards, of an update).
There the ratio of measured to roofline is interpolated by inverse squared distance: exact at the
points, and the roofline corrected by what was seen nearby elsewhere. No point: the roofline.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from soapjax.costs.measured.profile import Profile
from soapjax.costs.measured.profile_parts import Measurement, Rates
from soapjax.costs.tables.tensor_tables import trip_bytes
from soapjax.graph.operators import NOT_SPLIT, OperatorGraph
from soapjax.topology import DeviceTopology

MAX_POINTS = 32  # per task; those of the most shards are kept
MEASURED, CALIBRATED, ANALYTIC = "measured", "calibrated", "analytic"
MAX_GUESSES = 64
_EXACT = 1e-3  # distance in log2 degrees


class LocalTask(NamedTuple):
    """What one device does of a task under certain degrees."""

    structure: str
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    elements: int
    flops: float
    moved_bytes: float

    @property
    def identity(self) -> tuple:
        return self.structure, self.reads, self.writes, self.elements, f"{self.flops:.6g}"


def local_task(graph: OperatorGraph, k: int, degrees: Sequence[int]) -> LocalTask:
    """Task `k` split by `degrees` per dim of its operator; of an update by one degree, the shards of the parameter."""
    task = graph.tasks[k]
    if task.parameter >= 0:
        parameter = graph.parameters[task.parameter]
        tensor, shards = graph.tensors[parameter.tensor], degrees[0]
        flops = sum(w.flops for w in task.work) / shards
        # The gradient is read; the parameter and its optimizer state are read and written.
        moved = tensor.size_bytes * (1 + 2 * (1 + len(parameter.state_leaves))) / shards
        return LocalTask(task.structure, (), (), math.prod(tensor.shape) // shards, flops, moved)

    def shapes(accesses) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(n if d == NOT_SPLIT else n // degrees[d] for n, d in zip(graph.tensors[a.tensor].shape, a.dims, strict=True))
            for a in accesses
        )

    moved = sum(
        trip_bytes(graph, a) / math.prod(degrees[d] for d in a.dims if d != NOT_SPLIT)
        for a in (*task.reads, *task.writes)
    )
    flops = sum(w.flops / math.prod(degrees[d] for d in w.dims) for w in task.work)
    return LocalTask(task.structure, shapes(task.reads), shapes(task.writes), 0, flops, moved)


def degrees_behind(graph: OperatorGraph, k: int, m: Measurement) -> tuple[int, ...] | None:
    """The degrees under which task `k` is what was measured; None where there are none."""
    task = graph.tasks[k]
    if task.structure != m.structure:
        return None
    if task.parameter >= 0:
        elements = math.prod(graph.tensors[graph.parameters[task.parameter].tensor].shape)
        if m.elements == 0 or elements % m.elements:
            return None
        degrees: tuple[int, ...] = (elements // m.elements,)
    else:
        found = [0] * len(graph.operators[task.operator].dims)
        accesses = (*task.reads, *task.writes)
        shapes = (*m.reads, *m.writes)
        if m.elements or len(accesses) != len(shapes) or len(task.reads) != len(m.reads):
            return None
        for access, local in zip(accesses, shapes, strict=True):
            full = graph.tensors[access.tensor].shape
            if len(full) != len(local):
                return None
            for n, size, d in zip(full, local, access.dims, strict=True):
                if d == NOT_SPLIT:
                    if n != size:
                        return None
                elif size < 1 or n % size or found[d] not in (0, n // size):
                    return None
                else:
                    found[d] = n // size
        # A dim of the work that no tensor shows (what is broadcast and summed inside) is known by the FLOPs.
        hidden = [d for d in visible_dims(graph, k) if found[d] == 0]
        sizes = [graph.operators[task.operator].dims[d].divisor for d in hidden]
        choices = itertools.product(*([n for n in range(1, s + 1) if s % n == 0] for s in sizes))
        for chosen in itertools.islice(choices, MAX_GUESSES):
            guess = [max(1, n) for n in found]
            for d, n in zip(hidden, chosen, strict=True):
                guess[d] = n
            if local_task(graph, k, guess).identity == m.identity:
                return tuple(guess)
        return None
    return degrees if local_task(graph, k, degrees).identity == m.identity else None


def visible_dims(graph: OperatorGraph, k: int) -> list[int]:
    """The dims of its operator that a task's shapes or FLOPs depend on; other dims do not change it."""
    task = graph.tasks[k]
    if task.parameter >= 0:
        return [0]
    of_tensors = {d for a in (*task.reads, *task.writes) for d in a.dims}
    return sorted((of_tensors | {d for w in task.work for d in w.dims}) - {NOT_SPLIT})


class MeasuredArrays(NamedTuple):
    """M points of K tasks, task by task; D dims."""

    number: np.ndarray  # int [K]: how many points each task has
    degrees: np.ndarray  # float32 [M, D]: log2; -1 of a dim that the task does not depend on
    log_ratio: np.ndarray  # float32 [M]: of measured to roofline


def measured_arrays(graph: OperatorGraph, rates: ComputeRates, num_dims: int) -> MeasuredArrays:
    """The points of every task, beside what `rates` say of one trip; none without a profile."""
    by_structure: dict[str, list[Measurement]] = {}
    for m in rates.profile.operators if rates.profile is not None else ():
        by_structure.setdefault(m.structure, []).append(m)
    cache: dict[tuple, list[tuple[tuple[int, ...], float]]] = {}
    number: list[int] = []
    every: list[tuple[list[int], tuple[int, ...], float]] = []  # the dims that a task depends on, degrees, log ratio
    for k, task in enumerate(graph.tasks):
        if task.structure not in by_structure:
            number.append(0)
            continue
        # Repeated layers ask for the same.
        shapes = tuple((graph.tensors[a.tensor].shape, a.dims) for a in (*task.reads, *task.writes))
        of = graph.tensors[graph.parameters[task.parameter].tensor].shape if task.parameter >= 0 else ()
        key = (task.structure, shapes, task.work, task.dtype, task.trip_count, of, task.parameter >= 0)
        if key not in cache:
            points = []
            for m in by_structure[task.structure]:
                degrees = degrees_behind(graph, k, m)
                if degrees is not None:
                    roofline_s = rates.roofline_s(task.kind, task.dtype, local_task(graph, k, degrees))
                    points.append((degrees, math.log(m.seconds / roofline_s)))
            points.sort(key=lambda p: (-math.prod(p[0]), p[0]))
            cache[key] = points[:MAX_POINTS]
        number.append(len(cache[key]))
        every += [(visible_dims(graph, k), *point) for point in cache[key]]
    # One dim at least: the shards of updates, where nothing else can be split.
    log_degrees = np.full((len(every), max(num_dims, 1)), -1, np.float32)
    for i, (dims, degrees, _) in enumerate(every):
        for d in dims:
            log_degrees[i, d] = np.log2(degrees[d])
    return MeasuredArrays(np.array(number, int), log_degrees, np.array([ratio for *_, ratio in every], np.float32))


def figures_of(arrays: MeasuredArrays, at: np.ndarray, is_fitted: np.ndarray) -> list[str]:
    """Where each task's seconds come from at [K, D]: a measurement; measurements nearby or a fit; the topology's figures."""
    out = []
    for k, stop in enumerate(np.cumsum(arrays.number)):
        degrees = arrays.degrees[stop - arrays.number[k] : stop]
        distance = np.where(degrees < 0, 0, np.abs(degrees - at[k])).sum(-1)
        if len(distance) and distance.min() < _EXACT:
            out.append(MEASURED)
        else:
            out.append(CALIBRATED if len(distance) or is_fitted[k] else ANALYTIC)
    return out


class ComputeRates(NamedTuple):
    """The roofline in use: a topology's figures, or a profile's fit; `scale` (whole steps) slows all of it."""

    topology: DeviceTopology
    profile: Profile | None

    @property
    def scale(self) -> float:
        calibration = self.profile.calibration if self.profile is not None else None
        return calibration.compute_scale if calibration is not None else 1.0

    def is_fitted(self, kind: str, dtype: str) -> bool:
        rates = self.profile.rates if self.profile is not None else None
        return rates is not None and f"{kind} {dtype}" in rates.flops_per_s

    def flops_per_s(self, kind: str, dtype: str) -> float:
        if self.is_fitted(kind, dtype):
            return self.profile.rates.flops_per_s[f"{kind} {dtype}"] / self.scale
        device = self.topology.device
        return device.efficiency[kind] * device.peak(dtype, operator_class=kind) / self.scale

    @property
    def memory_bytes_per_s(self) -> float:
        rates, device = self.profile.rates if self.profile is not None else None, self.topology.device
        own = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
        return (own if rates is None else rates.memory_bytes_per_s) / self.scale

    @property
    def launch_s(self) -> float:
        rates = self.profile.rates if self.profile is not None else None
        return (self.topology.device.launch_s if rates is None else rates.launch_s) * self.scale

    def rates_of(self, classes: Iterable[tuple[str, str]]) -> Rates:
        """All of it, for these (kind, dtype)."""
        flops_per_s = {f"{kind} {dtype}": self.flops_per_s(kind, dtype) for kind, dtype in classes}
        return Rates(flops_per_s=flops_per_s, memory_bytes_per_s=self.memory_bytes_per_s, launch_s=self.launch_s)

    def roofline_s(self, kind: str, dtype: str, local: LocalTask) -> float:
        """One trip, not slowed by `scale`: what measurements are compared with."""
        flop_s, byte_s = local.flops / self.flops_per_s(kind, dtype), local.moved_bytes / self.memory_bytes_per_s
        return (max(flop_s, byte_s) + self.launch_s) / self.scale


def without_links(profile: Profile | None) -> Profile | None:
    """What a profile says of compute, to be used with a topology that is `linked` already."""
    if profile is None:
        return None
    found = profile.calibration
    compute = None if found is None else found.model_copy(update={"network_scale": 1.0})
    return profile.model_copy(update={"links": (), "calibration": compute})


def linked(topology: DeviceTopology, profile: Profile | None) -> DeviceTopology:
    """The topology with its links as measured, and slowed by the calibrated scale."""
    if profile is None:
        return topology
    fits = {link.level: link for link in profile.links}
    scale = profile.calibration.network_scale if profile.calibration is not None else 1.0
    levels = []
    for lv in topology.levels:
        latency_s, rate, fractions = lv.latency_s, lv.achieved_bytes_per_s, lv.collective_fraction
        if lv.name in fits:
            found = fits[lv.name]
            latency_s, rate, fractions = found.latency_s, found.bytes_per_s, dict(found.fractions)
        levels.append(
            replace(
                lv, latency_s=latency_s * scale, bandwidth_bytes_per_s=rate / scale, efficiency=1.0, collective_fraction=fractions
            )
        )
    return replace(topology, levels=tuple(levels))
