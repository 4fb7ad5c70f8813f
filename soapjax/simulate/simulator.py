"""The simulator that searches and reports use: strategies in, step times and memory out.

One trace per batch size; `step_times` is what a search calls, `costs` and `timeline` are for one strategy.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jax import Array

from soapjax.costs.conversion import COLLECTIVES
from soapjax.costs.evaluate import Costs, evaluator
from soapjax.costs.itemize import sent_parts
from soapjax.costs.tables import CostTables
from soapjax.simulate.batched import simulate_batch
from soapjax.simulate.event import Timeline, simulate
from soapjax.simulate.items import items_of
from soapjax.simulate.programs import Program
from soapjax.simulate.schedule import schedule_of
from soapjax.simulate.trace import ItemArrays, item_arrays
from soapjax.strategy.plan import Prediction
from soapjax.strategy.strategy import Strategy


class Scores(NamedTuple):
    """Of a batch of B strategies."""

    step_time_s: Array  # [B]
    memory_bytes: Array  # [B]: total per device
    violations: Array  # [B]: degrees that do not divide; such a strategy is in no space


BATCH = 32  # strategies per call of `step_times` and `costs`: one size, so that they are traced and compiled once


class Simulator:
    """Simulates strategies of one problem (graph, space, topology)."""

    def __init__(self, tables: CostTables):
        self.tables = tables
        self.schedule = schedule_of(tables)
        self._evaluate = evaluator(tables, is_batched=True)
        self.items = items_of(tables, self.schedule)
        self.item_arrays = item_arrays(self.items)
        self._batch = Program(self._scores_and_costs, is_urgent=True)

    def batch(self, axes: Array, storage: Array) -> tuple[Scores, Costs]:
        """Scores and costs of BATCH strategies [BATCH, N, A] and [BATCH, N]; one trace."""
        return self._batch(self.item_arrays, axes, storage)

    @property
    def compile_s(self) -> float:
        """Seconds that the program took to compile or to load; 0 before its first call."""
        return self._batch.compile_s

    def _scores_and_costs(self, items: ItemArrays, axes: Array, storage: Array) -> tuple[Scores, Costs]:
        costs = self._evaluate(axes, storage)
        on = None if costs.holders is None else self.items.holders(costs.holders)
        overlap = self.tables.topology.device.overlap
        times = simulate_batch(items, self.items.durations(costs.durations), overlap=overlap, on=on)
        return Scores(times, costs.memory_bytes[:, 3], costs.penalty), costs

    def _padded(self, strategies: list[Strategy]) -> tuple[Scores, Costs]:
        padded = strategies + [strategies[-1]] * (BATCH - len(strategies))
        axes, storage = np.stack([s.axes for s in padded]), np.stack([s.storage for s in padded])
        return jax.tree.map(np.asarray, self.batch(axes, storage))

    def step_times(self, strategies: list[Strategy]) -> Scores:
        """Scores of any number of strategies, as NumPy arrays."""
        parts = [
            jax.tree.map(lambda x, k=k: x[: len(strategies) - k], self._padded(strategies[k : k + BATCH])[0])
            for k in range(0, len(strategies), BATCH)
        ]
        return jax.tree.map(lambda *x: np.concatenate(x), *parts)

    def costs(self, strategy: Strategy) -> Costs:
        """All figures of one strategy, as NumPy arrays."""
        return jax.tree.map(lambda x: x[0], self._padded([strategy])[1])

    def timeline(self, strategy: Strategy) -> Timeline:
        costs = self.costs(strategy)
        occupies = self.schedule.occupies
        if costs.holders is not None:
            occupies = self.schedule.occupies_of_groups(costs.holders)
        return simulate(self.schedule, self.schedule.durations(costs.durations), occupies)

    def prediction(self, strategy: Strategy, compute_figures: dict[str, float] | None = None) -> Prediction:
        costs = self.costs(strategy)
        time = float(self.step_times([strategy]).step_time_s[0])
        parts = dict(zip(("parameters_and_state", "activations_and_gradients", "transient"), costs.memory_bytes, strict=False))
        usable = self.tables.usable_memory_bytes
        return Prediction(
            # Rounded to what float32 carries, so that the file is the same on every host.
            step_time_s=float(f"{time:.6g}"),
            memory_bytes_per_device=int(costs.memory_bytes[3]),
            usable_memory_bytes=usable,
            memory_parts_bytes={k: int(v) for k, v in parts.items()},
            feasible=bool(costs.memory_bytes[3] <= usable) and not int(costs.penalty),
            sends=sent_parts(self.tables, costs.layouts, strategy),
            bytes_by_collective={k: int(v) for k, v in zip(COLLECTIVES, costs.bytes_by_collective, strict=True)},
            compute_figures=compute_figures or {},
        )


def layouts_for_plan(tables: CostTables, costs: Costs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(used [U, A], home [T, A], stored [P, A]) as `make_plan` takes them."""
    num_u, num_p = len(tables.access_op), len(tables.parameter_op)
    slots = costs.layouts.slots
    return slots[:num_u], costs.layouts.home, slots[num_u : num_u + num_p]
