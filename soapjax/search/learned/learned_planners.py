"""Planners that learn where to place operators: `reinforce`, `hierarchical`, `trinity`.

    reinforce     Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", 2017: operators are grouped by
                  co-location, a sequence-to-sequence network with attention draws a device for every group; REINFORCE
    hierarchical  Mirhoseini et al., "A Hierarchical Model for Device Placement", 2018: a network groups the operators; REINFORCE
    trinity       Zeng et al., "Trinity", Algorithms 2022, 15(4), 108: the same with more features of operators; PPO

The rewards are minus the root of a placement's cost (2017, equation 1; 2018), and minus its logarithm (Trinity, equation 8),
both relative to the cost of everything on one device. Costs are simulated, of a whole batch in one call, and are those of the
problem's objective: of "mdpe" the reward is Trinity's R but for a constant. A placement that does not fit into memory is
punished by its excess, not by a constant.

The best of single device, layered expert and model parallelism is evaluated first: nothing worse is returned.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Literal, NamedTuple

import jax
import numpy as np

from soapjax.jit.array_types import Array
from soapjax.search.chain.starting_points import numpy_rng
from soapjax.search.experts.layered import layered_expert_strategies
from soapjax.search.experts.placement import (
    devices_of,
    model_parallel_strategy,
    operator_seconds,
    pins_of_devices,
    placed,
    require_pins,
)
from soapjax.search.learned.agent import AgentSizes, Recipe, agent_of
from soapjax.search.learned.features import Chosen, colocated, features_of
from soapjax.search.problem import Budget, Evaluation, PlanningProblem, SearchResult
from soapjax.strategy.configs import Strategy

DEFAULT_BATCHES = 100


class Method(NamedTuple):
    """What makes a planner: its features, how it learns, and the reward."""

    name: str
    told: Chosen
    recipe: Recipe
    reward: Literal["root", "logarithm"]
    is_grouped: bool = False  # before, by co-location


TRINITY = Method("trinity", "trinity", Recipe("ppo", 4, 32), "logarithm")
HIERARCHICAL = Method("hierarchical", "hierarchical", Recipe("reinforce", 4, 32), "root")
REINFORCE = Method("reinforce", "hierarchical", Recipe("reinforce", 1, 128), "root", is_grouped=True)


class PlacementBatch(NamedTuple):
    """What came of a batch of B placements."""

    found: list[Evaluation]
    rewards: np.ndarray  # [B]


def reward_of(costs: np.ndarray, unit: float, method: Method) -> np.ndarray:
    """[B], finite: costs relative to `unit`."""
    relative = np.minimum(costs / unit, 1e6)
    return -np.sqrt(relative) if method.reward == "root" else -np.log(np.maximum(relative, 1e-6))


def batches_of(
    rng_key: Array, problem: PlanningProblem, method: Method, starts: list[Evaluation], most: int | None = None
) -> Iterator[PlacementBatch]:  # fmt: skip
    """Draws and simulates, and learns before it draws again; rewards are relative to the cost of the first start.

    At most `most` batches will be asked for.
    """
    count, pins = problem.graph.num_operators, pins_of_devices(problem)
    features = features_of(numpy_rng(rng_key, 0), problem, method.told)
    sizes = AgentSizes.of(features, len(pins), is_grouped=method.is_grouped)
    agent, told = agent_of(sizes, method.recipe), sizes.filled(features, len(pins))
    fixed, devices = np.zeros((2, sizes.operators), np.int32)
    fixed[:count] = colocated(problem.graph, operator_seconds(problem), len(pins), method.recipe.num_groups)
    base = placed(problem, np.zeros(count, int))
    movable = np.array([problem.space.may_pin(n) for n in range(count)], bool)[:, None]
    best = min(starts, key=lambda e: e.rank)
    agent.prepare(rng_key, told, fixed, devices, learns=most is None or most > 1)
    learner = agent.first(rng_key, told, fixed)
    for number in itertools.count():
        devices[:count] = devices_of(problem, best.strategy)
        draw, device = agent.draw(jax.random.fold_in(rng_key, number), told, fixed, devices, learner)
        axes = np.where(movable, pins[np.asarray(device)[:, :count]], base.axes)  # int8 [B, N, A]
        found = problem.evaluate([Strategy(a, base.storage) for a in axes])
        rewards = reward_of(np.array([e.cost for e in found]), starts[0].cost, method).astype(np.float32)
        best = min(best, *found, key=lambda e: e.rank)
        yield PlacementBatch(found, rewards)
        learner = agent.learn(told, learner, draw, rewards)


def placement_starts(rng_key: Array, problem: PlanningProblem, budget: Budget) -> list[Evaluation]:
    """Placements by hand, everything on one device first; a random one where only such are wanted."""
    count = problem.graph.num_operators
    if budget.random_start:
        return problem.evaluate([placed(problem, numpy_rng(rng_key, 1).integers(problem.space.mesh.num_devices, size=count))])
    by_hand = [model_parallel_strategy(problem)[0], *layered_expert_strategies(problem)]
    unique = {s.key(): s for s in (placed(problem, np.zeros(count, int)), *by_hand)}
    return problem.evaluate(list(unique.values()))


def learned(method: Method, rng_key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
    """The best placement that was drawn, or the best start where that is better."""
    begin = time.monotonic()
    require_pins(problem, method.name)
    starts = placement_starts(rng_key, problem, budget)
    best = min(starts, key=lambda e: e.rank)
    limit = budget.num_proposals
    size = method.recipe.partitions * method.recipe.placements
    if limit is None and budget.seconds is None:
        limit = len(starts) + DEFAULT_BATCHES * size
    done, updates, stopped_by = len(starts), 0, "proposals"
    history = [(done, time.monotonic() - begin, best.step_time_s)]
    most = None if limit is None else -(-(limit - done) // size)
    batches = batches_of(rng_key, problem, method, starts, most)
    while limit is None or done < limit:
        if budget.seconds is not None and time.monotonic() - begin >= budget.seconds:
            stopped_by = "seconds"
            break
        batch = next(batches)
        counted = batch.found[: size if limit is None else limit - done]
        done, updates, lowest = done + len(counted), updates + 1, min(counted, key=lambda e: e.rank)
        if lowest.rank < best.rank:
            best = lowest
            history.append((done, time.monotonic() - begin, best.step_time_s))
        if budget.progress is not None:
            try:
                budget.progress(done, best.step_time_s, time.monotonic() - begin)
            except KeyboardInterrupt:
                stopped_by = "interrupted"
                break
    found_by = "a start" if len(history) == 1 else "learned"
    notes = (f"{done} placements simulated in {updates} batches; the best is {found_by}",)
    return SearchResult(best, done, time.monotonic() - begin, stopped_by, tuple(history), notes)


def trinity(rng_key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
    """Partition and schedule networks that learn by PPO (Zeng et al., 2022)."""
    return learned(TRINITY, rng_key, problem, budget)


def hierarchical(rng_key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
    """Partition and schedule networks that learn by REINFORCE (Mirhoseini et al., 2018)."""
    return learned(HIERARCHICAL, rng_key, problem, budget)


def reinforce(rng_key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
    """A schedule network for co-located groups that learns by REINFORCE (Mirhoseini et al., 2017)."""
    return learned(REINFORCE, rng_key, problem, budget)
