"""The strategies that experts write by hand: data parallelism, FSDP, Megatron's tensor parallelism.

Each is a planner of the common type that evaluates a few strategies and returns the
best. A degree that does not divide is lowered to the largest that does, and a note says so.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Iterable, Sequence

import numpy as np

from soapjax.graph.operators import NOT_SPLIT, OperatorGraph
from soapjax.graph.passes.phases import UPDATE
from soapjax.jit.array_types import Array
from soapjax.search.problem import Budget, PlanningProblem, SearchResult
from soapjax.strategy.configs import REPLICATE, Strategy, replicated
from soapjax.strategy.space import SearchSpace


def split_axes(space: SearchSpace, n: int, dim: int, axes: Iterable[int]) -> tuple[int, ...]:
    """Which of `axes` split dim `dim` of operator `n`: as far as its size divides."""
    may_split = tuple(a for a in axes if space.allowed[n, a, dim + 1])
    return largest_split(space.graph.operators[n].dims[dim].divisor, may_split, space.mesh.axis_sizes)


@functools.cache
def largest_split(divisor: int, axes: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The subset of `axes` with the largest product that divides `divisor`; the first such, slowest axes first."""
    best: tuple[int, ...] = ()
    for r in range(len(axes), 0, -1):
        for chosen in itertools.combinations(axes, r):
            product = math.prod(sizes[a] for a in chosen)
            if divisor % product == 0 and product > math.prod(sizes[a] for a in best):
                best = chosen
    return best


def _sample_dim(space: SearchSpace, n: int, axes: Sequence[int]) -> int | None:
    """The sample dim that `axes` split most, the first of equals: of four groups of sixteen the sixteen."""
    op = space.graph.operators[n]
    found = [k for k, d in enumerate(op.dims) if d.kind == "S"]
    degree = {k: math.prod(space.mesh.axis_sizes[a] for a in split_axes(space, n, k, axes)) for k in found}
    return max(found, key=lambda k: degree[k], default=None)


def data_parallel_strategy(problem: PlanningProblem, axes: Sequence[int] | None = None) -> tuple[Strategy, tuple[str, ...]]:
    """Every operator split over its sample dim, everything else replicated; over `axes`, all by default."""
    space, sizes = problem.space, problem.space.mesh.axis_sizes
    axes = range(space.num_axes) if axes is None else axes
    wanted = math.prod(sizes[a] for a in axes)
    lowered = set()

    @functools.cache
    def config(like: int) -> np.ndarray:
        found, dim = np.full(space.num_axes, REPLICATE, np.int8), _sample_dim(space, like, axes)
        if dim is not None:
            chosen = split_axes(space, like, dim, axes)
            found[list(chosen)] = dim
            reached = math.prod(sizes[a] for a in chosen)
            if reached < wanted:
                lowered.add((problem.graph.operators[like].dims[dim].divisor, reached))
        return found

    strategy = replicate_all(problem)
    for n, (op, like) in enumerate(zip(problem.graph.operators, space.alike, strict=True)):
        if op.fixed is None:
            strategy.axes[n] = config(like)
    notes = tuple(f"a sample dim of {size} does not split {wanted} ways: {reached} used" for size, reached in sorted(lowered))
    return strategy, notes


def tensor_parallel_strategy(problem: PlanningProblem, axes: Sequence[int], *, sequence_parallel: bool = False) -> Strategy:
    """Megatron's pairs over `axes`, data parallelism over the others.

    In program order: an operator whose input is split on what it sums over is split there too (row parallel, the result is
    summed); one whose input is split elsewhere follows its input (heads, channels); a weighted operator with a whole
    input is split on its output features (column parallel). A lookup is split over the rows of its table (the vocabulary), and
    a product with the same table (a tied head) over the same rows. Shoeybi et al., Megatron-LM (2019), section 3.

    Args:
      sequence_parallel: what is between two pairs (norms, dropout, the residual stream) is split along the sequence instead of
        repeated by all of `axes`. Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022),
        section 4.2.2.
    """
    graph, space = problem.graph, problem.space
    others = [a for a in range(space.num_axes) if a not in set(axes)]
    strategy, _ = data_parallel_strategy(problem, others)
    split_dim: dict[int, int] = {}  # tensor -> its dim that the tensor-parallel axes split
    parameters = {p.tensor for p in graph.parameters}
    fits = functools.cache(lambda like, dim: _fits(problem, like, dim, axes))
    for n, op in enumerate(graph.operators):
        if op.fixed is not None:
            continue
        like = space.alike[n]
        first = graph.tasks[op.tasks[0]]
        chosen = None
        for access in sorted(first.reads, key=lambda a: -graph.tensors[a.tensor].size_bytes):
            d = split_dim.get(access.tensor)
            if d is not None and access.dims[d] != NOT_SPLIT and chosen is None:
                chosen = access.dims[d]
        if chosen is None and op.parameters:
            features = [k for k, d in enumerate(op.dims) if d.kind == "P" and not d.is_reduced]
            offered = features if first.kind in ("dot", "conv") or op.kind == "ragged_dot" else _table_rows(graph, n)
            chosen = next((k for k in offered if fits(like, k)), None)
        is_pair = chosen is not None and fits(like, chosen)
        if not is_pair and sequence_parallel:
            along = [k for k, d in enumerate(op.dims) if d.kind == "A" and not d.is_reduced]
            chosen = next((k for k in along if fits(like, k)), None)
        if chosen is None or not fits(like, chosen):
            continue
        strategy.axes[n, list(axes)] = chosen
        for access in (*first.writes, *(a for a in first.reads if a.tensor in parameters)) if is_pair else ():
            if chosen in access.dims:
                split_dim[access.tensor] = access.dims.index(chosen)
    return strategy


def _table_rows(graph: OperatorGraph, n: int) -> list[int]:
    """The dims of an operator that are the rows of a table it looks up, where these are more than what a sample looks up.

    Smaller tables (positions, types of segments) stay whole: to sum up the parts of the result costs more than they take.
    """
    op = graph.operators[n]
    first = graph.tasks[op.tasks[0]]
    samples = max((d.size for d in op.dims if d.kind == "S"), default=1)
    looked_up = sum(math.prod(graph.tensors[a.tensor].shape) for a in first.writes) / samples
    tables = {graph.parameters[p].tensor for p in op.parameters}
    found = []
    for access in first.reads:
        if access.tensor in tables and math.prod(graph.tensors[access.tensor].shape) > looked_up:
            found += [k for k in access.dims if k != NOT_SPLIT and op.dims[k].kind == "P" and op.dims[k].is_reduced]
    return found


def _fits(problem: PlanningProblem, n: int, dim: int, axes: Sequence[int]) -> bool:
    sizes = problem.space.mesh.axis_sizes
    taken = math.prod(sizes[a] for a in axes)
    return bool(problem.space.divisors[n, dim] % taken == 0 and problem.space.allowed[n, list(axes), dim + 1].all())


def result_of(problem: PlanningProblem, strategies: list[Strategy], start: float, notes: tuple[str, ...] = ()) -> SearchResult:
    """The best of a few strategies, by a planner that began at `start`."""
    best = min(problem.evaluate(strategies), key=lambda e: e.rank)
    return SearchResult(best, len(strategies), time.monotonic() - start, "complete", (), notes)


def data_parallel(rng_key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
    """Replicated parameters, split batch, gradients summed once."""
    start = time.monotonic()
    strategy, notes = data_parallel_strategy(problem)
    return result_of(problem, [strategy], start, notes)


def fsdp(rng_key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
    """Data parallelism with parameters, gradients and optimizer state sharded (ZeRO-3): kept or regathered, by cost."""
    start = time.monotonic()
    strategy, notes = data_parallel_strategy(problem)
    variants = []
    for k, storage in enumerate(problem.space.storages):
        if any(storage.axes) or len(problem.space.storages) == 1:
            chosen = np.where(problem.space.owns_parameters, k, 0).astype(np.int8)
            variants.append(Strategy(_updated_in_shards(problem, strategy, storage.axes), chosen))
    return result_of(problem, variants, start, notes)


def _updated_in_shards(problem: PlanningProblem, strategy: Strategy, stored: Sequence[bool]) -> np.ndarray:
    """int8 [N, A]: what updates state, and is an operator because another one reads it, is split as the state is stored."""
    space, axes = problem.space, strategy.axes.copy()
    spread = [a for a, is_spread in enumerate(stored) if is_spread]
    for n, op in enumerate(problem.graph.operators):
        if op.fixed is None and {problem.graph.tasks[t].phase for t in op.tasks} == {UPDATE} and (axes[n] == REPLICATE).all():
            splits = [split_axes(space, n, k, spread) for k in range(len(op.dims))]
            degree = [math.prod(space.mesh.axis_sizes[a] for a in split) for split in splits]
            if degree:
                k = degree.index(max(degree))
                axes[n, list(splits[k])] = k
    return axes


def tensor_parallel(rng_key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
    """Megatron's pairs over the fastest axes, every possible degree, what is between them repeated or split along the sequence,
    with whole or sharded storage; the best by cost."""
    start = time.monotonic()
    num_axes = problem.space.num_axes
    variants: dict[bytes, Strategy] = {}
    for first, is_split in itertools.product(range(num_axes), (False, True)):
        strategy = tensor_parallel_strategy(problem, range(first, num_axes), sequence_parallel=is_split)
        for k in range(len(problem.space.storages)):
            storage = np.where(problem.space.owns_parameters, k, 0).astype(np.int8)
            one = Strategy(strategy.axes, storage)
            variants.setdefault(one.key(), one)
    valid = [s for s in variants.values() if problem.space.is_valid(s)] or [data_parallel_strategy(problem)[0]]
    return result_of(problem, valid, start)


def replicate_all(problem: PlanningProblem) -> Strategy:
    """One device's program on every device: always feasible to run, never fast."""
    strategy = replicated(problem.graph, problem.space.mesh)
    for n, op in enumerate(problem.graph.operators):
        if op.fixed is not None:
            strategy.axes[n] = problem.space.allowed[n].argmax(axis=1) - 1  # its only config
    return strategy


BASELINES = {"data_parallel": data_parallel, "fsdp": fsdp, "tensor_parallel": tensor_parallel}
