"""The whole space inside the stages of a pipeline: a descent over all operators' splits and storages, by the pipeline's step time.

The descent is that of one program (search/descent/descending.py), on the operators at micro-batch size and on a stage's mesh. A
strategy is judged by the pipeline that has it on every group of devices that is linked alike and had the same before: stages
that are alike are planned once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from soapjax.helpers import interrupts
from soapjax.search.descent.assignments import Assignments
from soapjax.search.descent.descending import Descent
from soapjax.search.problem import Evaluation
from soapjax.search.stages.choices import Choice, Priced
from soapjax.search.stages.stage_problem import StageProblem
from soapjax.strategy.configs import Strategy

AT_ONCE = 4  # strategies of one round
SEARCHED = ", searched"  # behind the name of the inner strategy that a descent began with
LEAST_GAIN = 0.005  # of the step time, for which stages are not as people write them


class InsideStages:
    """What a descent asks of a problem: strategies inside some groups of a choice, judged by the whole pipeline."""

    def __init__(self, problem: StageProblem, at: Priced, groups: tuple[int, ...]):
        self.problem, self.best, self.groups = problem, at, groups
        first, count, inner = at.choice.group(groups[0])
        self.fabric = problem.loads.fabric(first, count, at.choice.num_microbatches)
        self.start, self.space = self.fabric.choices[inner], self.fabric.space
        self.estimate_s = problem.estimated_s(at.choice)

    def evaluate(self, strategies: list[Strategy]) -> list[Evaluation]:
        """Step time, memory and cost of the pipeline with each of them inside."""
        name = self.start.name.removesuffix(SEARCHED) + SEARCHED
        places = self.fabric.offer(name, strategies)
        return [self._judged(s, i) for s, i in zip(strategies, places, strict=True)]

    @property
    def usable_memory_bytes(self) -> float:
        return self.problem.usable_bytes

    def _judged(self, strategy: Strategy, place: int) -> Evaluation:
        """A pipeline that is slower than the best one by its estimate, or does not fit, is not simulated."""
        choice, best, problem = self._with(place), self.best, self.problem
        if problem.objective.is_time and best.is_feasible:
            estimate_s, memory = problem.estimated_s(choice), problem.memory_bytes(choice)
            if estimate_s > self.estimate_s or memory > problem.usable_bytes:
                slower_s = best.timeline.step_time_s * max(estimate_s / self.estimate_s, memory / problem.usable_bytes)
                return Evaluation(strategy, slower_s, memory, memory <= problem.usable_bytes, slower_s)
        found = problem.price(choice)
        if found.rank < best.rank:
            self.best, self.estimate_s = found, problem.estimated_s(choice)
        return Evaluation(strategy, found.timeline.step_time_s, found.memory_bytes, found.is_feasible, found.cost)

    def _with(self, place: int) -> Choice:
        choice = self.best.choice
        inner = tuple(place if g in self.groups else i for g, i in enumerate(choice.inner))
        return dataclasses.replace(choice, inner=inner)


def searched_inside(problem: StageProblem, rng: np.random.Generator, at: Priced) -> Iterator[Priced]:
    """The best pipeline after each strategy that is judged, until no move inside any stage helps; the groups of most stages first.

    `at` itself as long as what is found is not faster by LEAST_GAIN.
    """
    by_hand = at
    for groups in _alike_groups(problem, at.choice):
        inside = InsideStages(problem, at, groups)
        descent = Descent(inside, inside.evaluate([inside.start.strategy])[0], rng, Assignments(inside.space))
        while not descent.is_over:
            for _ in range(descent.round(AT_ONCE)):
                pays = inside.best.is_feasible > by_hand.is_feasible or inside.best.cost < (1 - LEAST_GAIN) * by_hand.cost
                yield inside.best if pays else by_hand
            interrupts.check()
        at = inside.best


def _alike_groups(problem: StageProblem, choice: Choice) -> list[tuple[int, ...]]:
    """The groups of a choice that have the same devices, linked alike, and the same strategy inside; the most first."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for g in range(len(choice.counts)):
        first, count, inner = choice.group(g)
        kinds.setdefault((id(problem.loads.fabric(first, count, choice.num_microbatches)), inner), []).append(g)
    return sorted(map(tuple, kinds.values()), key=lambda groups: (-len(groups), groups))
