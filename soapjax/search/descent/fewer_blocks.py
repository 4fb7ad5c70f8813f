"""A step of many equal blocks, judged by the same step with few of them: descents and kicks take as long as for a shallow model.

A model of 96 equal layers has nothing more to choose than one of three: a first, a last, and those between, which are split alike.
So a strategy is simulated with three blocks and with four, and what the fourth adds is added for every block that is left out.
Of 48 layers that is within 0.1 % of the step time of the whole graph, at a sixth of the work; within 2 % where embeddings are tied
and what crosses the step can hide more. Memory is exact but where, with more blocks, another moment is the fullest. So what is
found is judged again in the whole graph, where the search goes on.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from soapjax.graph.condensing import Condensed, condense, forward_operators, prefix_crossing
from soapjax.search.problem import Evaluation, PlanningProblem
from soapjax.simulate.simulator import Scores
from soapjax.strategy.space import SearchSpace
from soapjax.strategy.strategy import Strategy

KEPT = (2, 1), (3, 1)  # blocks at the beginning and the end of the run; the second tells what one more costs between the others
MOST_OPERATORS = 0.5  # of the whole graph's, in both together: with more of them it is no shortcut


class FewerBlocks:
    """`problem` by two graphs of few blocks; strategies are of the smaller one, scores those of the whole graph."""

    def __init__(self, problem: PlanningProblem, fewer: Condensed, more: Condensed):
        self.whole, self.operator_of = problem, fewer.operator_of
        self.kept = _first_of_each(fewer)
        self.fewer = _problem_of(problem, fewer)
        self.more = _problem_of(problem, more)
        self.in_more = fewer.operator_of[_first_of_each(more)]
        self.num_left_out = fewer.num_removed
        self.usable_memory_bytes: float = problem.usable_memory_bytes

    @property
    def space(self) -> SearchSpace:
        return self.fewer.space

    def evaluate(self, strategies: list[Strategy]) -> list[Evaluation]:
        """Of strategies of the smaller graph: what the whole graph's would be."""
        one = self.fewer.simulator.step_times(strategies)
        two = self.more.simulator.step_times([_taken(s, self.in_more) for s in strategies])
        scores = Scores(*(a + self.num_left_out * (b.astype(np.float64) - a) for a, b in zip(one, two, strict=True)))
        scores = scores._replace(violations=np.maximum(one.violations, two.violations))
        return self.whole.judged_at(strategies, scores, self.usable_memory_bytes)

    def of_whole(self, strategy: Strategy) -> Strategy:
        """What a strategy of the whole graph does in the blocks that are left."""
        return _taken(strategy, self.kept)

    def for_whole(self, strategy: Strategy) -> Strategy:
        """The whole graph's strategy: blocks that are left out are as the one before them."""
        return _taken(strategy, self.operator_of)


def fewer_blocks(problem: PlanningProblem) -> FewerBlocks | None:
    """The same problem by few of its blocks; None where it does not consist of equal ones, or an operator may be pinned."""
    graph, space = problem.graph, problem.space
    if space.offers_pins:
        return None
    crossing = prefix_crossing(graph, forward_operators(graph))
    found = [condense(graph, crossing, kept) for kept in KEPT]
    fewer, more = found
    if fewer is None or more is None:
        return None
    if fewer.graph.num_operators + more.graph.num_operators > MOST_OPERATORS * graph.num_operators:
        return None
    alike = _first_of_each(fewer)[fewer.operator_of]  # an operator of the kept blocks for each of the whole graph
    offers = space.allowed, space.divisors, space.owns_parameters
    return FewerBlocks(problem, fewer, more) if all(np.array_equal(x, x[alike]) for x in offers) else None


def _first_of_each(condensed: Condensed) -> np.ndarray:
    """int [n]: the whole graph's operator that each of a condensed graph is."""
    return np.unique(condensed.operator_of, return_index=True)[1]


def _taken(strategy: Strategy, operators: np.ndarray) -> Strategy:
    return Strategy(strategy.axes[operators], strategy.storage[operators])


def _problem_of(problem: PlanningProblem, condensed: Condensed) -> PlanningProblem:
    kept, space, tables = _first_of_each(condensed), problem.space, problem.simulator.tables
    rows = {name: getattr(space, name)[kept] for name in ("divisors", "allowed", "owns_parameters")}
    space = dataclasses.replace(space, graph=condensed.graph, **rows)
    return PlanningProblem.make(condensed.graph, space, tables.topology, tables.profile, problem.objective)
