"""The plain chain of the FlexFlow paper (Jia, Zaharia and Aiken 2019, section 6): what `mcmc` is compared with.

A proposal replaces the configuration of one operator, drawn at random, by a random one: each of its valid configs (axes, and a
storage where it owns parameters) is as likely, so that the proposal is symmetric. It is accepted with probability

    min(1, exp(beta (cost(S) - cost(S*)))),                                      (equation 1)

the cost relative to that of data parallelism, so that beta means the same for every model; the paper does not give its beta.
For each initial strategy, data parallelism and a random one (section 8.1), it goes on until one of two holds: that strategy's
share of the budget is spent, or the best has not improved for half of the search. That is half of what it has done so far: the
paper's searches end within minutes, with a budget of thirty. At the very beginning it is half of nothing, so LEAST proposals per
operator are made.

Proposals are judged by the full simulator, AT_ONCE from the same strategy: the first that its uniform accepts is taken, those
behind it are thrown away and do not count. Draws belong to the step, so that the chain is that of one proposal at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from soapjax.jit.array_types import Array
from soapjax.search.chain.starting_points import numpy_rng
from soapjax.search.experts.baselines import data_parallel_strategy
from soapjax.search.problem import Budget, Evaluation, PlanningProblem, SearchResult
from soapjax.strategy.configs import Strategy
from soapjax.strategy.space import SearchSpace

# Of the relative cost: a proposal that is 0.1 % slower is accepted once in five times. Of 25, 100, 400, 1,600 and 6,400 the best in
# the mean of LeNet, a Transformer layer and RNNLM on 8 devices (three seeds, 6,000 proposals); 400 is 0.4 % behind, 100 is 4 %.
BETA = 1600.0
DEFAULT_PROPOSALS = 100_000
AT_ONCE = 16  # proposals that are judged together: the simulator's batches are no smaller
LEAST = 50  # proposals per operator and initial strategy, before a lack of improvement ends it

Judge = Callable[[list[Strategy]], list[Evaluation]]


class Step(NamedTuple):
    """What a step has drawn: a proposal, and the uniform that accepts it."""

    proposed: Strategy
    uniform: float


class Chain:
    """One chain from one strategy; what it does depends on `seed` and the strategy alone.

    Args:
      seed: of the draws: those of step k are of the generator (*seed, k).
      reference: the cost that beta is relative to.
      at_once: proposals that are judged together, which changes nothing but the time that it takes.
    """

    def __init__(
        self, space: SearchSpace, judge: Judge, start: Evaluation, *, seed: Sequence[int], reference: float, beta: float = BETA,
        at_once: int = AT_ONCE,
    ):  # fmt: skip
        self.space, self.judge, self.seed, self.reference, self.beta, self.at_once = space, judge, seed, reference, beta, at_once
        self.now = self.best = start
        self.done = self.best_at = self.accepted = 0
        self.choices = [space.choices(n) for n in range(space.graph.num_operators)]

    def draw(self, k: int) -> Step:
        """Step `k` from where the chain stands."""
        rng, space = np.random.default_rng((*self.seed, k)), self.space
        n = int(rng.integers(space.graph.num_operators))
        while True:  # each valid config is as likely
            axes = [values[int(rng.integers(len(values)))] for values in self.choices[n]]
            if space.divides(n, axes):
                break
        now = self.now.strategy
        storage = rng.integers(len(space.storages)) if space.owns_parameters[n] else now.storage[n]
        return Step(now.but(n, axes, storage), float(rng.random()))

    def advance(self, limit: int) -> None:
        """Up to `limit` steps: as many as it takes to accept one, `at_once` at the most."""
        steps = [self.draw(self.done + i) for i in range(min(self.at_once, limit))]
        for step, found in zip(steps, self.judge([s.proposed for s in steps]), strict=True):
            self.done += 1
            if found.rank < self.best.rank:
                self.best, self.best_at = found, self.done
            if step.uniform < math.exp(min(0.0, self.beta * (self.now.cost - found.cost) / self.reference)):
                self.accepted += 1
                self.now = found
                break

    def is_idle(self, least: int) -> bool:
        """Whether the best has not improved for half of the search."""
        return self.done >= least and self.done - self.best_at >= self.done / 2


def mcmc_paper(rng_key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
    """The paper's search: a chain from data parallelism and one from a random strategy, one after the other."""
    begin = time.monotonic()
    rng = numpy_rng(rng_key, 0)
    data_parallel, random = problem.evaluate([data_parallel_strategy(problem)[0], problem.space.random(rng)])
    begun = {"data parallelism": data_parallel, "a random strategy": random}
    if budget.random_start:
        del begun["data parallelism"]
    limit = budget.num_proposals
    if limit is None and budget.seconds is None:
        limit = DEFAULT_PROPOSALS
    best, done = min(begun.values(), key=lambda e: e.rank), 0
    history, notes, stopped_by = [(0, time.monotonic() - begin, best.step_time_s)], [], "converged"
    least = LEAST * problem.graph.num_operators
    try:
        for i, (name, start) in enumerate(begun.items()):
            seed = tuple(rng.integers(2**32, size=2).tolist())
            chain = Chain(problem.space, problem.evaluate, start, seed=seed, reference=data_parallel.cost)
            until = None if limit is None else limit * (i + 1) // len(begun)
            end = math.inf if budget.seconds is None else begin + budget.seconds * (i + 1) / len(begun)
            why = "half of it brought nothing"
            before = done
            while not chain.is_idle(least):
                if until is not None and done >= until or time.monotonic() >= end:
                    why = "its share of the budget was spent"
                    stopped_by = "proposals" if until is not None and done >= until else "seconds"
                    break
                chain.advance(chain.at_once if until is None else until - done)
                done = before + chain.done
                if chain.best.rank < best.rank:
                    best = chain.best
                    history.append((done, time.monotonic() - begin, best.step_time_s))
                if budget.progress is not None:
                    budget.progress(done, best.cost, time.monotonic() - begin)
            counts = f"{chain.done} proposals, {chain.accepted} accepted"
            notes.append(f"from {name}: {counts}, best {chain.best.step_time_s:.6g} s; {why}")
    except KeyboardInterrupt:
        stopped_by = "interrupted"
    return SearchResult(best, done, time.monotonic() - begin, stopped_by, tuple(history), tuple(notes))
