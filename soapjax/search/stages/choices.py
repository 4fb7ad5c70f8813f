"""One pipeline of a graph as a search has it: small, frozen data; and what it costs, and how two of them compare."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from soapjax.search.objective import Objective
from soapjax.simulate.pipeline_timeline import PipelineTimeline
from soapjax.simulate.simulator import Scores
from soapjax.strategy.pipeline import Pipeline, ScheduleName, Stage


@dataclasses.dataclass(frozen=True)
class Choice:
    """One pipeline: S stages on G groups of devices, stage i on group i mod G."""

    schedule: ScheduleName
    num_microbatches: int
    bounds: tuple[int, ...]  # [S + 1]: stage i has the forward operators bounds[i] : bounds[i + 1]
    counts: tuple[int, ...]  # [G]: devices of each group, one after the other
    inner: tuple[int, ...]  # [G]: index into the group's inner strategies
    rematerialise: tuple[bool, ...]  # [S]

    @property
    def num_stages(self) -> int:
        return len(self.bounds) - 1

    def group(self, stage: int) -> tuple[int, int, int]:
        """(first device, devices, inner strategy) of a stage."""
        g = stage % len(self.counts)
        return sum(self.counts[:g]), self.counts[g], self.inner[g]

    @property
    def groups(self) -> list[tuple[int, int, int]]:
        """`group` of every stage."""
        return [self.group(i) for i in range(self.num_stages)]

    @property
    def places(self) -> list[tuple[tuple[int, int], int, int, int, int]]:
        """Of every stage what its loads are asked for by: its bounds, first device, devices, micro-batches, inner strategy."""
        bounds, num = zip(self.bounds, self.bounds[1:], strict=False), self.num_microbatches
        return [(b, first, count, num, inner) for b, (first, count, inner) in zip(bounds, self.groups, strict=True)]


def firsts_of(counts: Sequence[int]) -> list[int]:
    """The first device of every group of so many, one after the other."""
    return list(itertools.accumulate(counts[:-1], initial=0))


class Priced(NamedTuple):
    choice: Choice
    timeline: PipelineTimeline
    memory_bytes: float  # of the fullest device
    is_feasible: bool  # fits the devices, and meets the objective's limits
    cost: float  # seconds, by the objective
    sent_bytes: float = 0.0  # in a step by the device that sends most; 0 where nobody asks
    excess: float = 0.0  # over the objective's limits; inf where it does not fit the devices

    @property
    def rank(self) -> tuple[bool, float, float]:
        """By this the best is the least, as in search/problem.py."""
        return not self.is_feasible, self.excess, self.cost


def scores_of(step_time_s: float, memory_bytes: float, sent_bytes: float) -> Scores:
    """Of one plan, which is valid."""
    return Scores(*(np.array([x], np.float64) for x in (step_time_s, memory_bytes, 0, sent_bytes)))


def rank_of(scores: Scores, usable_bytes: float, objective: Objective) -> tuple[bool, float, float]:
    """Of the first of some plans: by this the best is the least, as in search/problem.py."""
    found = objective.standing(scores, usable_bytes)
    return not found.is_feasible[0], float(found.excess[0]), float(found.cost[0])


def outline(choice: Choice) -> Pipeline:
    """The pipeline of a choice without its operators, for the simulation."""
    stages = tuple(
        Stage.model_construct(
            operators=(), devices=tuple(range(first, first + count)), mesh={}, replicas=1, rematerialise=again, keeps_casts=False,
        )
        for (first, count, _), again in zip(choice.groups, choice.rematerialise, strict=True)
    )  # fmt: skip
    return Pipeline.model_construct(
        schedule=choice.schedule, num_microbatches=choice.num_microbatches, stages=stages, vertical_sync=False, order=()
    )
