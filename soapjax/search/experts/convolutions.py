"""Expert-designed strategies for one kind of network.

`expert_cnn` is Krizhevsky's for convolutional networks ("One weird trick for parallelizing convolutional neural networks",
2014, section 3): convolutions hold few parameters and most of the work, so that the batch is split over all devices; dense
layers hold most of the parameters, so that their output features are. Activations are gathered before the first dense layer.
"""

from __future__ import annotations

import math
import time

from soapjax.graph.operators import NOT_SPLIT
from soapjax.jit.array_types import Array
from soapjax.search.experts.baselines import data_parallel_strategy, result_of, split_axes
from soapjax.search.problem import Budget, PlanningProblem, SearchResult
from soapjax.strategy.configs import REPLICATE, Strategy


def expert_cnn_strategy(problem: PlanningProblem) -> tuple[Strategy, tuple[str, ...]]:
    """Data parallel up to the dense layers; these, and the regions without sums that follow them, split on features.

    Returns the strategy, and notes on degrees that were lowered to the largest that divides.
    """
    graph, space, mesh = problem.graph, problem.space, problem.space.mesh
    strategy, notes = data_parallel_strategy(problem)
    lowered = dict.fromkeys(notes)
    features: dict[int, int] = {}  # tensor -> its dim that is split on features
    for n, op in enumerate(graph.operators):
        if op.fixed is not None:
            continue
        first = graph.tasks[op.tasks[0]]
        dim = None
        if first.kind == "dot":
            dim = next((k for k, d in enumerate(op.dims) if d.kind == "P" and not d.is_reduced), None)
        elif first.kind != "conv" and not any(graph.tasks[k].sums for k in op.tasks):
            dims = [access.dims[features[access.tensor]] for access in first.reads if access.tensor in features]
            dim = next((d for d in dims if d != NOT_SPLIT and not op.dims[d].is_reduced), None)
        if dim is None:
            continue
        chosen = split_axes(space, n, dim, range(space.num_axes))
        reached = math.prod(mesh.axis_sizes[a] for a in chosen)
        if reached < mesh.num_devices:
            size = op.dims[dim].divisor
            lowered[f"{op.name}: a feature dim of {size} does not split {mesh.num_devices} ways: {reached} used"] = None
        strategy.axes[n] = REPLICATE
        strategy.axes[n, list(chosen)] = dim
        for access in first.writes:
            if dim in access.dims:
                features[access.tensor] = access.dims.index(dim)
    return strategy, tuple(lowered)


def expert_cnn(rng_key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
    """One weird trick: convolutions data parallel, dense layers split on their outputs."""
    start = time.monotonic()
    strategy, notes = expert_cnn_strategy(problem)
    return result_of(problem, [strategy], start, notes)
