"""Elimination against enumeration of small random problems."""

import itertools

import numpy as np
import pytest

from soapjax.search.relaxation.dynamic_program import conditional_costs, solve, tied
from soapjax.search.relaxation.elimination import eliminate, factors_of, order_of
from soapjax.search.relaxation.integer_program import solve_integer
from soapjax.search.relaxation.relaxed import Pairwise


def random_problem(seed, *, count=6, density=0.4, least=1):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(least, 4, count)
    pairs = [p for p in itertools.combinations(range(count), 2) if rng.random() < density]
    costs = [rng.random(k) for k in sizes]
    tables = {(a, b): rng.random((sizes[a], sizes[b])) for a, b in pairs}
    return Pairwise(costs, tables, [np.arange(k) for k in sizes], costs)


def every(problem):
    choices = np.array(list(itertools.product(*(range(len(c)) for c in problem.costs))))
    return choices, np.array([problem.value(c) for c in choices])


@pytest.mark.parametrize("seed", range(12))
def test_minimum_minimiser_and_marginals(seed):
    problem = random_problem(seed)
    choices, values = every(problem)
    order, cut = order_of(problem)
    assert not cut
    found = eliminate(factors_of(problem), order)
    assert found.is_exact and found.value == pytest.approx(values.min())
    assert problem.value(found.choice({}, len(problem.costs))) == pytest.approx(values.min())
    for n, marginals in found.min_marginals().items():
        np.testing.assert_allclose(marginals, [values[choices[:, n] == k].min() for k in range(len(problem.costs[n]))])


@pytest.mark.parametrize("seed", range(12))
def test_split_buckets_bound_from_below(seed):
    problem = random_problem(seed, density=0.8)
    _, values = every(problem)
    order, _ = order_of(problem)
    found = eliminate(factors_of(problem), order, max_entries=6)
    assert found.value <= values.min() + 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_conditioning_keeps_the_fixed_values(seed):
    problem = random_problem(seed, density=0.8)
    choices, values = every(problem)
    order, cut = order_of(problem, max_entries=6)
    fixed = {n: 0 for n in cut}
    found = eliminate(factors_of(problem, fixed), order)
    inside = (choices[:, cut] == 0).all(axis=1)
    assert found.value == pytest.approx(values[inside].min())
    choice = found.choice(fixed, len(problem.costs))
    assert (choice[cut] == 0).all() and problem.value(choice) == pytest.approx(found.value)


@pytest.mark.parametrize("seed", range(4))
def test_descent_and_the_integer_program(seed):
    problem = random_problem(seed, count=7, density=0.8, least=2)
    choices, values = every(problem)
    exact = solve_integer(problem)
    assert exact.value == pytest.approx(values.min()) and exact.gap <= 1e-6
    local = solve(problem, max_entries=4)
    assert not local.is_exact and local.value >= values.min() - 1e-12
    assert local.value == pytest.approx(problem.value(local.choice))
    for n, costs in enumerate(conditional_costs(problem, local.choice)):
        for k, cost in enumerate(costs):
            other = local.choice.copy()
            other[n] = k
            assert problem.value(other) - local.value == pytest.approx(cost - costs[local.choice[n]])
    # Memory: the best of those within the limit.
    usage = [np.arange(len(c), dtype=float)[:, None] for c in problem.costs]
    used = choices.sum(axis=1)
    limited = solve_integer(problem, usage, limit=4.0)
    assert limited.value == pytest.approx(values[used <= 4].min())


def test_tied_operators_choose_alike():
    rng = np.random.default_rng(0)
    own, step = rng.random(3), rng.random((3, 3))
    chain = Pairwise([own] * 4, {(i, i + 1): step for i in range(3)}, [np.arange(3)] * 4, [own] * 4)
    small, variable = tied(chain, [7, 7, 7, 7])
    assert variable == [0, 0, 0, 0]
    np.testing.assert_allclose(small.costs[0], 4 * own + 3 * np.diagonal(step))
