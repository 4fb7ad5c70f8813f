"""What every planner gets and gives: one function type for all of them.

`Planner = (rng_key, problem, budget) -> SearchResult`. Costs compare by `objective`: the step
time, plus a penalty that grows with the memory that a device lacks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from soapjax.costs.profile import Profile
from soapjax.costs.tables import cost_tables
from soapjax.garbage import fewer_collections
from soapjax.graph.operators import OperatorGraph
from soapjax.simulate.simulator import Scores, Simulator
from soapjax.strategy.space import SearchSpace
from soapjax.strategy.strategy import Strategy
from soapjax.topology import DeviceTopology


class Budget(NamedTuple):
    """What a planner may spend; whichever ends first. `progress(done, best_s, elapsed_s)` may raise KeyboardInterrupt.

    `random_start` leaves out every start but random ones: to measure a search, not to plan. `baselines` are the baselines'
    strategies where the caller has them, so that they are not planned twice.
    """

    num_proposals: int | None = None
    seconds: float | None = None
    progress: Callable[[int, float, float], None] | None = None
    random_start: bool = False
    baselines: tuple[Strategy, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class PlanningProblem:
    graph: OperatorGraph
    space: SearchSpace
    simulator: Simulator

    @classmethod
    @fewer_collections()
    def make(
        cls, graph: OperatorGraph, space: SearchSpace, topology: DeviceTopology, profile: Profile | None = None
    ) -> PlanningProblem:
        return cls(graph, space, Simulator(cost_tables(graph, space, topology, profile)))

    def without_pins(self) -> PlanningProblem:
        """The same where no operator may be pinned: a smaller space, whose strategies cost the same and are judged faster."""
        tables = self.simulator.tables
        space = dataclasses.replace(self.space, offers_pins=False)
        return self.make(self.graph, space, tables.topology, tables.profile)

    @property
    def usable_memory_bytes(self) -> int:
        return self.simulator.tables.usable_memory_bytes

    def evaluate(self, strategies: list[Strategy]) -> list[Evaluation]:
        """Step time, memory and cost of each."""
        scores = self.simulator.step_times(strategies)
        costs = objective(scores, self.usable_memory_bytes)
        return [
            Evaluation(s, float(t), float(m), bool(m <= self.usable_memory_bytes and not v), float(c))
            for s, t, m, v, c in zip(strategies, *scores, costs, strict=True)
        ]


class Evaluation(NamedTuple):
    strategy: Strategy
    step_time_s: float
    memory_bytes: float
    is_feasible: bool
    cost: float


class SearchResult(NamedTuple):
    """`best` by cost among all that was consumed; `history` holds (proposals, seconds, best step time) as it improved."""

    best: Evaluation
    num_proposals: int
    search_s: float
    stopped_by: str  # "proposals", "seconds", "converged", "interrupted", "complete"
    history: tuple[tuple[int, float, float], ...] = ()
    notes: tuple[str, ...] = ()
    candidates: tuple[Evaluation, ...] = ()  # distinct good ones, best first, where the planner kept them


Planner = Callable[[Array, PlanningProblem, Budget], SearchResult]


def objective(scores: Scores, usable_memory_bytes: float) -> Array | np.ndarray:
    """The cost of strategies by their scores."""
    return cost_of(scores.step_time_s, scores.memory_bytes, scores.violations, usable_memory_bytes)


def cost_of(
    step_time_s: Array | np.ndarray, memory_bytes: Array | np.ndarray, violations: Array | np.ndarray, usable_bytes: float
) -> Array | np.ndarray:
    """Step time in seconds, times 2 + 8 × the excess over the usable memory where a plan does not fit; inf if invalid."""
    xp = jnp if isinstance(step_time_s, Array) else np  # eager operations of JAX are compiled one by one
    excess = xp.maximum(memory_bytes / usable_bytes - 1, 0)
    penalised = xp.where(excess > 0, 2 + 8 * excess, 1.0) * step_time_s
    return xp.where(violations > 0, np.inf, penalised)
