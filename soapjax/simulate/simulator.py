"""The simulator that searches and reports use: strategies in, step times and memory out.

One trace; `step_times` and `batch` are what a search calls, `costs` and `timeline` are for one strategy.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, SupportsFloat, TypeVar

import jax
import numpy as np

from soapjax.costs.evaluate import LANES, Costs, Evaluator, Outline
from soapjax.costs.itemize import sent_parts
from soapjax.costs.rules.links import COLLECTIVES
from soapjax.costs.split_share import share_of, split_flops
from soapjax.costs.tables.buckets import Bucket
from soapjax.costs.tables.problem_tables import CostTables
from soapjax.costs.whole import Evaluated
from soapjax.graph.lifespans import makers
from soapjax.jit.array_types import Array
from soapjax.jit.programs import PlannerProgram, threads
from soapjax.simulate.busy import BusyStreams
from soapjax.simulate.event import Order, Timeline, simulate
from soapjax.simulate.items import items_of
from soapjax.simulate.schedule import Schedule, schedule_of
from soapjax.simulate.walk import ItemRecords, ItemSizes, item_records, program
from soapjax.strategy.configs import Strategy
from soapjax.strategy.plan import Prediction, StrategyFigures

T = TypeVar("T")


class Scores(NamedTuple):
    """Of a batch of B strategies."""

    step_time_s: Array  # [B]
    memory_bytes: Array  # [B]: total per device
    violations: Array  # [B]: degrees that do not divide; such a strategy is in no space
    sent_bytes: Array  # [B]: in a step, by the device that sends most


class InDetail(NamedTuple):
    """Of a batch of B strategies, what adds up over equal blocks."""

    scores: Scores
    memory: np.ndarray  # [K, B]: bytes while each task runs, of the device that holds most then
    busy_s: np.ndarray  # [F, 1 + L, B]: of each stream in each phase (busy.py), levels as the cost program has them


BATCH = LANES  # strategies that a search asks for at once: one call


class Batch(NamedTuple):
    """Of B strategies: their scores, as NumPy arrays, and all that was found."""

    scores: Scores
    evaluator: Evaluator
    parts: list[Evaluated]  # of LANES strategies each

    def costs(self, i: int) -> Costs:
        """Of the strategy number i, as NumPy arrays."""
        return self.evaluator.costs(self.parts[i // LANES], i % LANES)

    def outline(self, i: int) -> Outline:
        """Of the strategy number i, sooner than `costs`."""
        return self.evaluator.outline(self.parts[i // LANES], i % LANES)

    def done(self) -> None:
        """Nobody will ask for more costs: what is judged next is written over these."""
        for part in self.parts:
            self.evaluator.take_back(part)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="simulator")


class Simulator:
    """Simulates strategies of one problem (graph, space, topology)."""

    def __init__(self, tables: CostTables, bucket: Bucket | None = None):
        """`bucket` of the cost program; by default the smallest of the usual ones that holds the problem."""
        self.tables, self._bucket = tables, bucket
        self.schedule = schedule_of(tables)
        self.items = items_of(tables, self.schedule)
        self.compile_s = 0.0  # that the longer of the programs took to trace and to compile, or to load
        self._is_prepared, self._preparing = False, threading.Lock()

    @functools.cached_property
    def evaluator(self) -> Evaluator:
        """The cost program on this problem."""
        return Evaluator(self.tables, self._bucket)

    @functools.cached_property
    def item_records(self) -> tuple[ItemRecords, ItemSizes]:
        records, sizes = item_records(self.items, self.tables, self.evaluator.bucket)
        return jax.device_put(records), sizes

    @functools.cached_property
    def busy_streams(self) -> BusyStreams:
        return BusyStreams(self.items, overlap=self.tables.topology.device.overlap)

    @property
    def _walk(self) -> tuple[ItemRecords, PlannerProgram]:
        records, sizes = self.item_records
        return records, program(sizes, self.evaluator.bucket)

    def batch(self, axes: Array, storage: Array) -> Batch:
        """Scores and costs of B strategies int8 [B, N, A] and [B, N]; any number, at least one."""
        found = self._by_parts(lambda scores, of: (scores, of), axes, storage)
        return Batch(_joined([scores for scores, _ in found], len(axes)), self.evaluator, [of for _, of in found])

    def _by_parts(self, keep: Callable[[Scores, Evaluated], T], axes: Array, storage: Array) -> list[T]:
        """What `keep` makes of scores and costs of LANES strategies each."""
        axes, storage = np.asarray(axes), np.asarray(storage)
        parts = [(axes[k : k + LANES], storage[k : k + LANES]) for k in range(0, len(axes), LANES)]
        self.prepare()  # here: what the caller's thread says of devices holds
        run = map if len(parts) == 1 else _pool().map
        return list(run(lambda part: keep(*self._judged(*part)), parts))

    def prepare(self) -> None:
        """Compiles, or loads, the programs that are not there yet."""
        with self._preparing:
            if self._is_prepared:
                return
            (items, walk), evaluator = self._walk, self.evaluator
            b = evaluator.bucket
            sizes = ((b.tasks + 1, LANES), (b.rows + 1, b.levels, LANES))
            groups = max(b.groups, 1)
            on = [jax.ShapeDtypeStruct((n, groups, LANES), bool) for n in (b.tasks + 1, b.rows + 1)]
            with threads(1) as other:
                waiting = other.submit(walk.prepare, items, *(jax.ShapeDtypeStruct(x, np.float32) for x in sizes), *on)
                evaluator.prepare()
                waiting.result()
            self.compile_s, self._is_prepared = max(walk.took_s, evaluator.program.took_s), True

    def _judged(self, axes: np.ndarray, storage: np.ndarray) -> tuple[Scores, Evaluated]:
        items, walk = self._walk
        of = self.evaluator(axes, storage)
        each = of.per_record
        times, memory = walk(items, each.compute_s, each.paid_s, each.on_compute, each.on_rows), np.asarray(of.memory_bytes)
        return Scores(*(np.asarray(x) for x in (times, memory[3], of.violations, of.sent_bytes))), of

    def step_times(self, strategies: list[Strategy]) -> Scores:
        """Scores of any number of strategies, as NumPy arrays; their costs are not kept."""
        return self._scores_and(lambda of: None, strategies)[0]

    def in_detail(self, strategies: list[Strategy]) -> InDetail:
        """The same, and what their step times and memory are made of."""
        count, busy = self.tables.num_tasks, self.busy_streams

        def keep(of: Evaluated) -> tuple[np.ndarray, np.ndarray]:
            each = of.per_record
            return np.array(np.asarray(each.memory)[:count]), busy.seconds(np.asarray(each.compute_s), np.asarray(each.paid_s))

        scores, found = self._scores_and(keep, strategies)
        memory, busy_s = (np.concatenate(x, axis=-1)[..., : len(strategies)] for x in zip(*found, strict=True))
        return InDetail(scores, memory, busy_s)

    def _scores_and(self, keep: Callable[[Evaluated], T], strategies: list[Strategy]) -> tuple[Scores, list[T]]:
        """Scores of all, and what `keep` makes of the costs of LANES each before others are written over them."""

        def kept(scores: Scores, of: Evaluated) -> tuple[Scores, T]:
            found = keep(of)
            self.evaluator.take_back(of)
            return scores, found

        found = self._by_parts(kept, *_stacked(strategies))
        return _joined([scores for scores, _ in found], len(strategies)), [some for _, some in found]

    def costs(self, strategy: Strategy) -> Costs:
        """All figures of one strategy, as NumPy arrays."""
        self.prepare()  # here: what the caller's thread says of devices holds
        return self.evaluator.alone(strategy.axes, strategy.storage)

    def timeline(self, strategy: Strategy, *, order: Order = "static") -> Timeline:
        """Of one strategy, in program order, which step times are of, or in one of `event.ORDERS`."""
        costs, schedule = self.costs(strategy), self.schedule
        return simulate(schedule, schedule.durations(costs.durations), self._streams(costs, order), order=order)

    def _streams(self, costs: Costs, order: Order) -> np.ndarray:
        """bool [T, streams or queues of all groups]: what every scheduled task occupies."""
        schedule, holders = self.schedule, costs.holders
        if order != "trinity":
            return occupied_by(schedule, costs)
        if holders is None:
            return schedule.queues
        return schedule.queues_of_groups(holders, self.tables.edge_tensor, makers(self.tables.graph))

    def without_overlap_s(self, costs: Costs | Outline) -> float:
        """The step time if every device did one thing at a time: communication and computing one after the other."""
        if costs.holders is None:
            # Every task runs on every device: one after the other.
            return float(np.sum(self.schedule.durations(costs.durations), dtype=np.float64))
        schedule = self.schedule.without_overlap()
        return simulate(schedule, schedule.durations(costs.durations), occupied_by(schedule, costs)).makespan_s

    def figures(self, strategies: Sequence[Strategy]) -> list[StrategyFigures]:
        """What strategies are compared by."""
        found = self.batch(*_stacked(strategies))
        times = found.scores.step_time_s
        figures = [self._figures(strategy, found.costs(i), times[i]) for i, strategy in enumerate(strategies)]
        found.done()
        return figures

    def _figures(self, strategy: Strategy, costs: Costs, step_time_s: SupportsFloat) -> StrategyFigures:
        return StrategyFigures(
            step_time_s=_rounded(step_time_s), without_overlap_s=_rounded(self.without_overlap_s(costs)),
            split_flops_share=share_of(*split_flops(self.tables, strategy.axes, self.tables.stored(costs.layouts.slots))),
            memory_bytes_per_device=int(costs.memory_bytes[3]), sent_bytes=int(costs.bytes_by_collective.sum()),
            peak_sent_bytes=int(costs.sent_bytes),
            feasible=bool(costs.memory_bytes[3] <= self.tables.usable_memory_bytes) and not int(costs.penalty),
        )  # fmt: skip

    def prediction(self, strategy: Strategy, compute_figures: dict[str, float] | None = None) -> Prediction:
        costs = self.costs(strategy)
        figures = self._figures(strategy, costs, self.step_times([strategy]).step_time_s[0])
        parts = dict(zip(("parameters_and_state", "activations_and_gradients", "transient"), costs.memory_bytes, strict=False))
        return Prediction(
            **figures.model_dump(exclude={"sent_bytes"}),
            usable_memory_bytes=self.tables.usable_memory_bytes,
            memory_parts_bytes={k: int(v) for k, v in parts.items()},
            sends=sent_parts(self.tables, costs.layouts, strategy),
            bytes_by_collective={k: int(v) for k, v in zip(COLLECTIVES, costs.bytes_by_collective, strict=True)},
            compute_figures=compute_figures or {},
        )


def occupied_by(schedule: Schedule, costs: Costs | Outline) -> np.ndarray:
    """bool [T, S * G]: the streams that every scheduled task occupies, those of each group of devices where pins are."""
    return schedule.occupies if costs.holders is None else schedule.occupies_of_groups(costs.holders)


def _rounded(seconds: SupportsFloat) -> float:
    """To what float32 carries, so that a file is the same on every host."""
    return float(f"{float(seconds):.6g}")


def _stacked(strategies: Sequence[Strategy]) -> tuple[np.ndarray, np.ndarray]:
    return np.stack([s.axes for s in strategies]), np.stack([s.storage for s in strategies])


def _joined(parts: list[Scores], count: int) -> Scores:
    return jax.tree.map(lambda *x: np.concatenate(x)[:count], *parts)
