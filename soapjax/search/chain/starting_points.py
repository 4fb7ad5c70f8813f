"""Where chains begin: every baseline, the replicated strategy, and random ones."""

from __future__ import annotations

import jax
import numpy as np

from soapjax.jit.array_types import Array
from soapjax.search.experts.baselines import BASELINES, replicate_all
from soapjax.search.experts.layered import layered_expert
from soapjax.search.experts.placement import model_parallel
from soapjax.search.experts.recurrent import expert_rnn
from soapjax.search.problem import Budget, Evaluation, PlanningProblem

NUM_RANDOM = 4


def numpy_rng(rng_key: Array, number: int) -> np.random.Generator:
    """The generator of this number that belongs to a key; splitting keys would compile programs first."""
    return np.random.default_rng((*np.asarray(jax.random.key_data(rng_key)).tolist(), number))


def starts(rng_key: Array, problem: PlanningProblem, budget: Budget) -> list[Evaluation]:
    """Distinct starting points, best first."""
    rng = numpy_rng(rng_key, 0)
    random = [problem.space.random(rng) for _ in range(NUM_RANDOM)]
    found = random
    if not budget.random_start:
        found = list(budget.baselines) or [planner(rng_key, problem, Budget()).best.strategy for planner in BASELINES.values()]
        found += [replicate_all(problem), *random]
        if problem.space.offers_pins:
            found += [planner(rng_key, problem, Budget()).best.strategy for planner in (model_parallel, layered_expert, expert_rnn)]
    unique = {s.key(): s for s in found}
    return sorted(problem.evaluate(list(unique.values())), key=lambda e: e.rank)
