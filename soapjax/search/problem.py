"""What every planner gets and gives: one function type for all of them.

`Planner = (rng_key, problem, budget) -> SearchResult`. Strategies compare by the problem's objective (objective.py): the step
time, plus a penalty that grows with the memory that a device lacks, or time, communication and memory together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from soapjax.costs.measured.profile import Profile
from soapjax.costs.tables.buckets import Bucket
from soapjax.costs.tables.problem_tables import cost_tables
from soapjax.graph.operators import OperatorGraph
from soapjax.helpers.garbage import fewer_collections
from soapjax.jit.array_types import Array
from soapjax.search.front import Front
from soapjax.search.objective import TIME, Objective
from soapjax.simulate.simulator import Scores, Simulator
from soapjax.strategy.configs import Strategy
from soapjax.strategy.space import SearchSpace
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
    objective: Objective = TIME
    front: Front | None = None  # of what is judged, where it is wanted

    @classmethod
    @fewer_collections()
    def make(
        cls, graph: OperatorGraph, space: SearchSpace, topology: DeviceTopology, profile: Profile | None = None,
        objective: Objective = TIME, front: Front | None = None, bucket: Bucket | None = None,
    ) -> PlanningProblem:  # fmt: skip
        """`bucket` of the cost program, where another problem has compiled that already."""
        return cls(graph, space, Simulator(cost_tables(graph, space, topology, profile), bucket), objective, front)

    def keeping_front(self) -> PlanningProblem:
        """The same, which keeps the front of all that is judged."""
        return dataclasses.replace(self, front=Front(self.usable_memory_bytes, Strategy.key))

    def usable_up_to(self, limit_bytes: float) -> PlanningProblem:
        """The same where a plan may be predicted to take so many bytes of a device, and no more."""
        topology = self.simulator.tables.topology.usable_up_to(limit_bytes)
        usable = topology.device.usable_memory_bytes
        tables = dataclasses.replace(self.simulator.tables, topology=topology, usable_memory_bytes=usable)
        found = dataclasses.replace(self, simulator=Simulator(tables))
        return found if self.front is None else found.keeping_front()

    def without_pins(self) -> PlanningProblem:
        """The same where no operator may be pinned: a smaller space, whose strategies cost the same and are judged faster."""
        tables = self.simulator.tables
        space = dataclasses.replace(self.space, offers_pins=False)
        return self.make(self.graph, space, tables.topology, tables.profile, self.objective, self.front)

    @property
    def usable_memory_bytes(self) -> int:
        return self.simulator.tables.usable_memory_bytes

    def cost(self, scores: Scores) -> Array:
        """Seconds [B], by the objective: what a search minimises."""
        return self.objective.cost(scores, float(self.usable_memory_bytes))

    def evaluate(self, strategies: list[Strategy]) -> list[Evaluation]:
        """Step time, memory, communication and cost of each."""
        return self.judged(strategies, self.simulator.step_times(strategies))

    def judged(self, strategies: list[Strategy], scores: Scores) -> list[Evaluation]:
        """The same of strategies whose scores are known, as NumPy arrays."""
        self.see(scores, strategies)
        return self.judged_at(strategies, scores, self.usable_memory_bytes)

    def judged_at(self, strategies: list[Strategy], scores: Scores, usable_bytes: float) -> list[Evaluation]:
        """The same where a device has so much memory; takes no note of them."""
        cost, is_feasible, excess = self.objective.standing(scores, usable_bytes)
        rows = zip(strategies, scores.step_time_s, scores.memory_bytes, is_feasible, cost, scores.sent_bytes, excess, strict=True)
        return [Evaluation(
            strategy=s, step_time_s=float(t), memory_bytes=float(m), is_feasible=bool(f), cost=float(c), sent_bytes=float(b),
            excess=float(e),
        ) for s, t, m, f, c, b, e in rows]  # fmt: skip

    def see(self, scores: Scores, strategies: Sequence[Strategy]) -> None:
        """Takes note of strategies that were judged."""
        if self.front is not None:
            self.front.offer(scores, strategies)

    def best_seen(self) -> Evaluation | None:
        """The best of the front; None where nothing that fits was judged, or no front is kept."""
        points = () if self.front is None else self.front.points()
        if not points:
            return None
        figures = np.array([p[:3] for p in points])
        scores = Scores(figures[:, 0], figures[:, 2], np.zeros(len(points), int), figures[:, 1])
        return min(self.judged([p.plan for p in points], scores), key=lambda e: e.rank)


class Evaluation(NamedTuple):
    strategy: Strategy
    step_time_s: float
    memory_bytes: float
    is_feasible: bool  # fits the device, and meets the objective's limits
    cost: float  # seconds, by the objective
    sent_bytes: float = 0.0  # in a step by the device that sends most
    excess: float = 0.0  # over the objective's limits; inf where it does not fit the device

    @property
    def exceeds_limits(self) -> bool:
        """Whether it fits the device, and not the objective's limits."""
        return not self.is_feasible and 0 < self.excess < np.inf

    @property
    def rank(self) -> tuple[bool, float, float]:
        """By this the best is the least: what is feasible by cost, then what violates the limits least, then what does not fit."""
        return not self.is_feasible, self.excess, self.cost


class Judging(Protocol):
    """What descents ask of a problem."""

    @property
    def usable_memory_bytes(self) -> float: ...

    def evaluate(self, strategies: list[Strategy]) -> list[Evaluation]: ...


class SearchResult(NamedTuple):
    """`best` by cost among all that was consumed; `history` holds (proposals, seconds, lowest cost) as it improved."""

    best: Evaluation
    num_proposals: int
    search_s: float
    stopped_by: str  # "proposals", "seconds", "converged", "interrupted", "complete", "nodes" (of branch and bound)
    history: tuple[tuple[int, float, float], ...] = ()
    notes: tuple[str, ...] = ()
    candidates: tuple[Evaluation, ...] = ()  # distinct good ones, best first, where the planner kept them


Planner = Callable[[Array, PlanningProblem, Budget], SearchResult]
