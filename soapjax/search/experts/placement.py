"""Model parallelism: whole layers on single devices (the operator dimension of SOAP, by pins).

The baseline of the paper (Jia, Zaharia and Aiken, "Beyond Data and Model Parallelism for Deep Neural Networks", 2019,
section 8.2.1): disjoint parts of the network on different devices, nothing is split. Layers stand in program order, and
contiguous runs of them go to devices 0, 1, ... so that the busiest device computes as little as possible. All time steps of
a recurrent layer are one layer (layers.py): its parameters lie in one place.

The planners want a space that offers pins.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from soapjax.errors import Problem, SoapjaxError
from soapjax.jit.array_types import Array
from soapjax.search.experts.baselines import replicate_all, result_of
from soapjax.search.experts.layers import Layer, layers_of
from soapjax.search.problem import Budget, PlanningProblem, SearchResult
from soapjax.strategy.configs import PIN, REPLICATE, Strategy


def require_pins(problem: PlanningProblem, planner: str) -> None:
    """Raises: SoapjaxError where the space offers no pins."""
    if not problem.space.offers_pins:
        raise placement_error(planner)


def placement_error(planner: str) -> SoapjaxError:
    """What a planner that places operators says of a space without pins."""
    expected = 'the space "paper": it places operators on single devices'
    remedy = 'use soapjax.plan(..., space="paper") or --space paper'
    return SoapjaxError(Problem(f"planner {planner!r}", 'space "soap"', expected, remedy))


def pins_of_devices(problem: PlanningProblem, axes: Sequence[int] | None = None) -> np.ndarray:
    """int8 [D, len(axes)]: the config values that pin an operator to each device of the sub-mesh of `axes` (all by default)."""
    sizes: Sequence[int] = problem.space.mesh.axis_sizes
    sizes = sizes if axes is None else [sizes[a] for a in axes]
    coordinates = np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes), axis=1) if len(sizes) else np.zeros((1, 0))
    return np.where(np.array(sizes) > 1, PIN(0) - coordinates, REPLICATE).astype(np.int8)


def devices_of(problem: PlanningProblem, strategy: Strategy) -> np.ndarray:
    """The device that every operator is pinned to, int [N]; the first one that runs it where there are several."""
    coordinates = np.maximum(PIN(0) - strategy.axes.astype(int), 0)
    return np.ravel_multi_index(coordinates.T, problem.space.mesh.axis_sizes)


def operator_seconds(problem: PlanningProblem) -> np.ndarray:
    """Compute of every operator on one device, forward, backward and update, float [N]."""
    compute_s = problem.simulator.costs(replicate_all(problem)).durations.compute_s
    return np.bincount(
        [t.operator for t in problem.graph.tasks], np.asarray(compute_s, float), problem.graph.num_operators
    )  # fmt: skip


def balanced_runs(seconds: Sequence[float] | np.ndarray, parts: int) -> list[int]:
    """The part of each element: at most `parts` runs of neighbours whose longest sum is the smallest there is."""
    ends = np.cumsum([0.0, *seconds])

    def cut(limit: float) -> list[int] | None:
        found: list[int] = []
        start = 0
        while start < len(seconds):
            end = int(np.searchsorted(ends, ends[start] + limit, side="right")) - 1
            if end <= start or len(found) == parts:
                return None
            found.append(end)
            start = end
        return found

    low, high = 0.0, float(ends[-1]) * (1 + 1e-9) + 1e-30
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if cut(middle) is not None else (middle, high)
    stops = cut(high)
    return [int(np.searchsorted(stops, i, side="right")) for i in range(len(seconds))]


def placed(problem: PlanningProblem, device: np.ndarray) -> Strategy:
    """Every operator on one device, int [N]; what the user constrained stays as it is."""
    strategy = replicate_all(problem)
    movable = np.array([problem.space.may_pin(n) for n in range(problem.graph.num_operators)], bool)
    strategy.axes[movable] = pins_of_devices(problem)[device][movable]
    return strategy


def placed_layers(problem: PlanningProblem, layers: Sequence[Layer], home: Sequence[int] | np.ndarray) -> Strategy:
    """Every layer on the device that `home` says."""
    device = np.zeros(problem.graph.num_operators, int)
    for layer, d in zip(layers, home, strict=True):
        device[list(layer.operators)] = d
    return placed(problem, device)


def model_parallel_strategy(problem: PlanningProblem) -> tuple[Strategy, tuple[str, ...]]:
    """Runs of layers on devices, balanced by compute; notes where devices are left over."""
    seconds = operator_seconds(problem)
    layers = layers_of(problem.graph)
    run = balanced_runs([seconds[list(layer.operators)].sum() for layer in layers], problem.space.mesh.num_devices)
    used, count = len(set(run)), problem.space.mesh.num_devices
    notes = [f"{used} of {count} devices used: with more, the busiest would have no less to do"] if used < count else []
    return placed_layers(problem, layers, run), tuple(notes)


def model_parallel(rng_key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
    """Every layer on one device, the devices balanced by compute."""
    start = time.monotonic()
    require_pins(problem, "model_parallel")
    strategy, notes = model_parallel_strategy(problem)
    return result_of(problem, [strategy], start, notes)
