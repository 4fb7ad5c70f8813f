"""What public training scripts are made of, and random programs of the same kinds: planned, they compute what one device does."""

import functools

import jax
import numpy as np
import pytest
from families import sampled
from patterns import PATTERNS
from planned import Case, data_parallel, rotated
from random_steps import random_step

from soapjax.execute.compiled.proof import gradient_ids
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import trace

# Products of one example's Hessian with the identity, norms of gradients, one matrix' factors and its product with itself have no
# batch; rows that meet the matrix of their group are no batch that can be split.
LEAST_SPLIT = {"cholesky": 0.7, "literal_in_a_product": 0.95}


@functools.cache
def made(name):
    return Case(*PATTERNS[name]())


def split_share(case, strategy):
    """Which share of the FLOPs of products is split over devices."""
    tasks = case.graph.tasks
    flops = np.array([
        sum(w.flops * tasks[t].trip_count for t in op.tasks if "dot" in (tasks[t].kind, op.kind[-3:]) for w in tasks[t].work)
        for op in case.graph.operators
    ])  # fmt: skip
    return float(flops[(strategy.axes >= 0).any(axis=1)].sum() / max(flops.sum(), 1))


@pytest.mark.parametrize("name", sampled(PATTERNS, 3))
def test_a_planned_pattern_computes_what_one_device_does(name):
    case = made(name)
    strategy = data_parallel(case.space)
    assert split_share(case, strategy) >= LEAST_SPLIT.get(name, 0.98)
    case.check(strategy)


OTHERWISE = ["adversaries", "scan_of_updates", "joined_batches", "inner_update", "trained_scalar", "constant_gradients"]


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_pattern_under_another_strategy(name):
    made(name).check_plain(1e-3)
    made(name).check(rotated(made(name).space, 0))


def test_experts_side_by_side_are_split_by_rows_columns_and_what_they_sum_over():
    case = made("sorted_experts")
    products = [n for n, op in enumerate(case.graph.operators) if op.kind == "ragged_dot"]
    flops = [max(w.flops for w in case.graph.tasks[case.graph.operators[n].tasks[0]].work) for n in products]
    assert flops == [2 * 32 * 16 * 24] * 2  # however many groups there are
    used = set()
    for start in range(3):
        strategy = rotated(case.space, start)
        used |= {int(k) for n in products for k in strategy.axes[n]}
        case.check(strategy)
    assert used >= {0, 1, 2}


def test_gradients_inside_a_loop_of_updates_are_proven_by_what_it_returns():
    case = made("scan_of_updates")
    ids = gradient_ids(case.step, case.binding)
    new = {case.step.program.outputs[case.step.state_pairs[p.leaf]] for p in case.binding.phases.parameters}
    assert set(ids) == new and len(ids) == len(case.graph.parameters)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_steps_have_graphs(first):
    """Every pass leaves a consistent graph (checks.py), whatever the structure."""
    for seed in range(first, first + 20):
        step, args, what = random_step(seed)
        graph, _ = build_graph(trace(step, *args))
        assert graph.tasks, what


@pytest.mark.parametrize("seed", [0, 2, 8])
def test_a_random_step_computes_what_one_device_does(seed):
    step, args, what = random_step(seed)
    case = Case(step, args)
    for strategy in (data_parallel(case.space), rotated(case.space, seed)):
        case.check(strategy)
    plain, flat = jax.tree.leaves(jax.eval_shape(step, *args)), case.expected
    assert [x.shape for x in plain] == [x.shape for x in flat], what
