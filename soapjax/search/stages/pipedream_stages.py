"""PipeDream's planner: stages, replicas and levels by dynamic programming (Narayanan et al. 2019, section 3.1).

A stage is a run of layers on `m` workers, each of which works on every m-th minibatch. Per minibatch it costs

    T(k → j, m) = (compute ⊕ sync) / m        sync: all-reduce of its weights over the m workers, level by level
    transfer    = 2 a_k / B                   the activation there and its gradient back, over the slowest link between the stages

⊕ is max where communication runs beside compute (the paper's formula), + where it does not (the authors' program). The pipeline is
as fast as its slowest stage or transfer, and the program minimises that bottleneck:

    A(j, w) = min over k, m of  max( A(k, w - m), transfer(k), T(k → j, m) )

Workers stand in a line, hosts one after the other, and a stage takes the next m of them: 15-1 on four hosts of four is such a
plan, though a stage ends within a host. As in the paper, several whole units (hosts) may also run the same pipeline inside
each, found by the same program one level below: then m is a number of units. Layers need no chain: k and j are cuts of the
graph (costs/measured/layer_graph.py), and a stage is what lies between.

Per worker a stage keeps one version of weights and activations for every minibatch in flight, ⌈workers from here on / m⌉.
Cost: O(workers² · cuts²) for the last level, O(workers · cuts³) below.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from soapjax.costs.measured.layer_graph import Cuts, LayerGraph, cuts
from soapjax.errors import Problem, SoapjaxError
from soapjax.topology import DeviceTopology


class StageChoice(NamedTuple):
    """One stage: its layers, and the workers that are its replicas."""

    layers: tuple[int, ...]
    devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """What a stage planner decided; `bottleneck_s` is its objective, seconds per minibatch."""

    stages: tuple[StageChoice, ...]
    bottleneck_s: float

    @property
    def config(self) -> str:
        """As PipeDream's paper writes it: "15-1", "16" (data parallelism), "straight" (no stage replicated)."""
        replicas = [len(s.devices) for s in self.stages]
        if len(replicas) > 1 and max(replicas) == 1:
            return "straight"
        return "-".join(map(str, replicas))


class Workers(NamedTuple):
    """A line of workers and the levels of links between them, slowest first."""

    sizes: tuple[int, ...]  # [L]: children of one unit
    bandwidth: tuple[float, ...]  # [L]: bytes/s of one child, one direction
    overlap: bool
    memory_bytes: float  # of one worker

    @classmethod
    def of(cls, topology: DeviceTopology) -> Workers:
        below = [math.prod(level.size for level in topology.levels[i + 1 :]) for i in range(len(topology.levels))]
        rates = tuple(level.achieved_bytes_per_s * n for level, n in zip(topology.levels, below, strict=True))
        device = topology.device
        return cls(tuple(level.size for level in topology.levels), rates, device.overlap, device.usable_memory_bytes)

    @property
    def num_workers(self) -> int:
        return math.prod(self.sizes)

    def inside(self, level: int) -> Workers:
        """One unit of `level`: a child of a level-`level` unit, and all below it."""
        return self._replace(sizes=self.sizes[level + 1 :], bandwidth=self.bandwidth[level + 1 :])

    def _unit(self, worker: int, level: int) -> int:
        """Index of the child at `level` that `worker` is in, counted over all."""
        return worker // math.prod(self.sizes[level + 1 :])

    def span(self, first: int, last: int) -> int:
        """The slowest level that lies between two workers; the number of levels where they are one."""
        return next((i for i in range(len(self.sizes)) if self._unit(first, i) != self._unit(last, i)), len(self.sizes))

    def sync_s_per_byte(self, first: int, count: int, width: int = 1) -> float:
        """Of an all-reduce over `count` workers from `first`: 2 (n - 1)/n / B at every level, n the children that take part.

        Of replicas of `width` workers each, as many such sums go side by side, over the links of what has several of their workers.
        """
        total = 0.0
        for i, rate in enumerate(self.bandwidth):
            parents: dict[int, set[int]] = {}
            for worker in range(first, first + count, width):
                unit = self._unit(worker, i)
                parents.setdefault(unit // self.sizes[i], set()).add(unit)
            n = max(map(len, parents.values()))
            total += 2 * (n - 1) / n * min(width, math.prod(self.sizes[i + 1 :])) / rate
        return total


class Memory(NamedTuple):
    """Bytes that a worker keeps, per byte of a stage's parameters and activations."""

    state_copies: float = 2.0  # gradient, and one copy of optimizer state: momentum
    is_limited: bool = True


def pipedream(
    graph: LayerGraph, topology: DeviceTopology, *, memory: Memory = Memory(), num_stages: int | None = None,
    all_workers: bool = False, chain: bool = False, rounds: int = 0,
) -> StagePlan:  # fmt: skip
    """The stages with the smallest bottleneck; of equally fast ones that with fewest workers, then fewest replicated stages.

    Args:
      num_stages: exactly so many (a pipeline inside units counts as one).
      chain: cut only between layers that follow one another, and let no units run pipelines inside.
      rounds: a number of minibatches that every stage's replicas must divide; 0: any number of replicas.
      all_workers: leave no device idle, as PipeDream's own program does, even where fewer are as fast.
    Raises: SoapjaxError where no partition fits into memory.
    """
    found_cuts = cuts(graph, max_cuts=1) if chain else cuts(graph)
    solver = _Solver(found_cuts, Workers.of(topology), memory, nests=not chain, rounds=rounds)
    found = solver.solve(num_stages, all_workers=all_workers)
    if found is None:
        largest = int(np.argmax(graph.parameter_bytes + graph.kept_bytes))
        raise SoapjaxError(
            Problem(
                "stages", f"layer {graph.names[largest]} alone keeps {_gigabytes(graph, largest):.3g} GB or more",
                f"stages that fit into {topology.device.usable_memory_bytes / 1e9:.3g} GB",
                "use smaller minibatches, more or larger devices, or rematerialise",
            )
        )  # fmt: skip
    segments, bottleneck = found
    members = solver.cuts.members
    stages = (
        StageChoice(tuple(np.flatnonzero(members[j] & ~members[k]).tolist()), devices) for k, j, devices in segments
    )
    return StagePlan(tuple(stages), bottleneck)


def data_parallel_s(graph: LayerGraph, topology: DeviceTopology) -> float:
    """The planner's objective for one stage on all devices, whether it fits or not: seconds per minibatch."""
    workers = Workers.of(topology)
    compute, sync = graph.compute_s.sum(), graph.parameter_bytes.sum() * workers.sync_s_per_byte(0, workers.num_workers)
    return float((max(compute, sync) if workers.overlap else compute + sync) / workers.num_workers)


def _gigabytes(graph: LayerGraph, layer: int) -> float:
    return (graph.parameter_bytes[layer] + graph.kept_bytes[layer]) / 1e9


REPLICATED_S = 1e6  # more than any link is busy: fewer replicated stages come first
Segment = tuple[int, int, tuple[int, ...]]  # cut before, cut after, workers


class _Solver:
    """The dynamic program on one unit of workers."""

    def __init__(
        self, found: Cuts, workers: Workers, memory: Memory, after: int = 0, *, nests: bool = True, rounds: int = 0
    ):
        self.cuts, self.workers, self.memory = found, workers, memory
        self.total, self.rounds = workers.num_workers, rounds
        # In flight of a nested pipeline: all that the line outside has at most, per copy of the unit; there are two or more.
        self.line = max(self.total, after // 2)
        self.compute = found.compute_s[None, :] - found.compute_s[:, None]  # [S, S], k before j
        self.parameters = found.parameter_bytes[None, :] - found.parameter_bytes[:, None]
        self.kept = found.kept_bytes[None, :] - found.kept_bytes[:, None]
        self._stages: dict[tuple[float, int, int], np.ndarray] = {}
        levels = range(len(workers.sizes) - 1) if nests else ()
        self.nested = [self._nested(i) for i in levels if workers.sizes[i] > 1]

    def _nested(self, level: int) -> tuple[int, _Solver, np.ndarray]:
        """(workers of a unit, its solver, best bottleneck of every k → j on one unit)."""
        inside = _Solver(self.cuts, self.workers.inside(level), self.memory, self.line)
        return inside.total, inside, inside.all_pairs()

    def _join(self, compute: np.ndarray, sync_s_per_byte: float) -> np.ndarray:
        sync = self.parameters * sync_s_per_byte
        return np.maximum(compute, sync) if self.workers.overlap else compute + sync

    def _stage(self, first: int, count: int) -> np.ndarray:
        """Seconds per minibatch [S, S] of k → j on `count` workers from `first`; inf where it does not fit, or is no stage."""
        in_flight = -(-(self.line - first) // count)
        sync = self.workers.sync_s_per_byte(first, count)
        key = (sync, count, in_flight)
        if key not in self._stages:
            seconds = self._join(self.compute, sync) / count
            kept = in_flight * (self.parameters + self.kept) + self.memory.state_copies * self.parameters
            fits = (kept <= self.workers.memory_bytes) | (not self.memory.is_limited)
            self._stages[key] = np.where(self.cuts.is_inside & fits, seconds, np.inf)
        return self._stages[key]

    def _choices(self, first: int, count: int) -> list[tuple[np.ndarray, int]]:
        """Ways to give `count` workers from `first` to one segment: (seconds [S, S], workers of the inner unit or 0)."""
        found = [(self._stage(first, count), 0)]
        for size, _, inner in self.nested:
            if first % size == 0 and count % size == 0 and count > size:
                sync = self.workers.sync_s_per_byte(first, count) - self.workers.sync_s_per_byte(first, size)
                found.append((self._join(inner, sync) / (count // size), size))
        return found

    def _arrive(self, best: np.ndarray, first: int, span: int, limit: float | None = None) -> tuple[np.ndarray, np.ndarray]:
        """What `best` [..., L + 1, S], by the span of the segment before, becomes with the transfer into the next segment.

        That one starts at worker `first` and spans `span`. Returns the minimum over the spans, and which one it was; for
        `limit` see `_sweep`.
        """
        near = min(self.workers.span(first - 1, first), span)
        rates = np.array([self.workers.bandwidth[min(i, near)] for i in range(len(self.workers.sizes) + 1)])
        transfer = 2 * self.cuts.crossing_bytes / rates[:, None]
        after = np.maximum(best, transfer) if limit is None else best + np.where(transfer <= limit, transfer, np.inf)
        before = after.argmin(-2)
        return np.take_along_axis(after, before[..., None, :], -2)[..., 0, :], before

    def all_pairs(self) -> np.ndarray:
        """Best bottleneck [S, S] of k → j on all or some workers."""
        s, levels = self.cuts.num_cuts, len(self.workers.sizes)
        best = np.full((self.total + 1, s, levels + 1, s), np.inf)  # [workers, start, span, cut]
        for first in range(self.total):
            for count in range(1, self.total - first + 1):
                span = self.workers.span(first, first + count - 1)
                arrived = self._arrive(best[first], first, span)[0] if first else None
                for seconds, _ in self._choices(first, count):
                    into = best[first + count, :, span]
                    if arrived is None:
                        np.minimum(into, seconds, out=into)
                        continue
                    for k in range(1, s - 1):
                        block = np.maximum(arrived[:k, k, None], seconds[None, k, k + 1 :])
                        np.minimum(into[:k, k + 1 :], block, out=into[:k, k + 1 :])
        return best.min((0, 2))

    def solve(
        self, num_stages: int | None = None, start: int = 0, end: int | None = None, *, all_workers: bool = False
    ) -> tuple[list[Segment], float] | None:
        """Segments of the best plan from cut `start` to `end`, and its bottleneck; None where nothing fits."""
        end = self.cuts.num_cuts - 1 if end is None else end
        best, came = self._sweep(num_stages, start)

        def choose(values: np.ndarray) -> tuple[int, ...]:  # [stages, workers, span]
            if all_workers:
                values = np.where(np.arange(self.total + 1)[:, None] == self.total, values, np.inf)
            workers = int(np.isclose(values, values.min(), rtol=1e-12, atol=0).any((0, 2)).argmax())
            at = np.unravel_index(np.where(np.arange(self.total + 1)[:, None] == workers, values, np.inf).argmin(), values.shape)
            return tuple(map(int, at))

        values = best[-1:, ..., end]
        at = choose(values)
        bottleneck = float(values[at])
        if not np.isfinite(bottleneck):
            return None
        # Among plans as fast: fewest replicated stages, then least busy links; where only nested ones are as fast, the first found.
        busy, came_again = self._sweep(num_stages, start, limit=bottleneck * (1 + 1e-9))
        kept = np.full_like(busy[-1:, ..., end], np.inf)
        kept[:, at[1] if not all_workers else self.total] = busy[-1:, at[1] if not all_workers else self.total, :, end]
        if np.isfinite(kept).any():
            at, came = choose(kept), came_again
        last = len(best) - 1
        return self._path(came, (last, at[1], at[2], end), num_stages is not None), bottleneck

    def _sweep(self, num_stages: int | None, start: int, limit: float | None = None) -> tuple[np.ndarray, dict]:
        """The table [stages, workers, span of the last segment, cut] of smallest bottlenecks, and how each came about.

        With a `limit`: of the fewest seconds per minibatch that links are busy (a replicated stage counts as REPLICATED_S more),
        where no stage or transfer exceeds the limit.
        Stages are counted only where their number is given; else all are in row 1.
        """
        s, levels, total = self.cuts.num_cuts, len(self.workers.sizes), self.total
        depth = num_stages or 1
        best = np.full((depth + 1, total + 1, levels + 1, s), np.inf)
        came: dict[tuple[int, int, int], np.ndarray] = {}
        best[0, 0, levels, start] = 0.0
        for first in range(total):
            for count in range(1, total - first + 1):
                if self.rounds and self.rounds % count:
                    continue
                span = self.workers.span(first, first + count - 1)
                choices = self._choices(first, count)
                for used in range(depth):
                    if first:
                        arrived, before = self._arrive(best[used if num_stages else 1, first], first, span, limit)
                    elif used == 0:
                        arrived, before = best[0, 0, levels], np.full(s, levels)
                    else:
                        continue
                    for seconds, unit in choices:
                        if limit is None:
                            candidates = np.maximum(arrived[:, None], seconds)
                        elif unit:
                            continue
                        else:
                            sync = self.parameters * self.workers.sync_s_per_byte(first, count)
                            busy = sync + (REPLICATED_S if count > 1 else 0.0)
                            candidates = arrived[:, None] + np.where(seconds <= limit, busy, np.inf)
                        k = candidates.argmin(0)
                        value = candidates[k, np.arange(s)]
                        at = (used + 1, first + count, span)
                        better = value < best[at]
                        best[at][better] = value[better]
                        rows = came.setdefault(at, np.zeros((4, s), int))
                        rows[:, better] = np.array([k, np.full(s, count), np.full(s, unit), before[k]])[:, better]
        return best, came

    def _path(self, came: dict, at: tuple[int, int, int, int], counted: bool) -> list[Segment]:
        used, workers, span, j = at
        segments: list[Segment] = []
        while workers:
            k, count, unit, before = map(int, came[used, workers, span][:, j])
            first = workers - count
            segments[:0] = self._segment(k, j, first, count, unit)
            used, workers, span, j = (used - 1 if counted else 1), first, before, k
        return segments

    def _segment(self, k: int, j: int, first: int, count: int, unit: int) -> list[Segment]:
        """One stage, or those of the pipeline inside, each with its workers in every unit."""
        if not unit:
            return [(k, j, tuple(range(first, first + count)))]
        inside = next(solver for size, solver, _ in self.nested if size == unit)
        segments, _ = inside.solve(None, k, j)
        units = range(first, first + count, unit)
        return [(a, b, tuple(u + d for u in units for d in devices)) for a, b, devices in segments]
