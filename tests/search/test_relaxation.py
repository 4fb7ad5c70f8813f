"""The additive relaxation against the cost model: what is pairwise is exact, and no weighted sum exceeds the true one."""

import itertools
import time

import jax
import numpy as np
import pytest
from families import family
from problems import PROBLEMS, case

from soapjax.search.problem import PlanningProblem
from soapjax.search.proofs.paths import chains_of, flat, longest_paths, unflat
from soapjax.search.relaxation.candidates import coarse_candidates, enumerate_candidates
from soapjax.search.relaxation.relaxed import relax
from soapjax.strategy.configs import Strategy

SCANNED = [p for p in PROBLEMS if p[0] == "lm_tied_scan_remat"]
ODD_SIZED = family([p for p in PROBLEMS if p[0] in ("mlp_of_sixes", "lm")] + SCANNED, slow=SCANNED)


def problem_of(model, topology):
    found = case(model, topology)
    return PlanningProblem(found.graph, found.space, found.simulator)


def drawn(relaxation, count, *, seed=0):
    """Random strategies made of candidates; in every other one repeated operators choose alike, so that reshards are shared."""
    rng = np.random.default_rng(seed)
    graph = relaxation.problem.graph
    out = []
    for i in range(count):
        picked, axes, storage = {}, [], []
        for op, c in zip(graph.operators, relaxation.candidates, strict=True):
            k = int(rng.integers(len(c.storage)))
            k = picked.setdefault((op.group, len(c.storage)), k) if i % 2 else k
            axes.append(c.axes[k])
            storage.append(c.storage[k])
        out.append(Strategy(np.stack(axes), np.array(storage, np.int8)))
    return out


def test_a_relaxation_that_comes_too_late_is_given_up():
    problem = problem_of(*PROBLEMS[0])
    with pytest.raises(TimeoutError):
        relax(problem, deadline=time.monotonic() - 1)
    assert relax(problem, max_candidates=4, deadline=time.monotonic() + 600).num_candidates > 0


@pytest.mark.parametrize("model, topology", ODD_SIZED)
def test_terms_are_the_cost_models_or_less(model, topology):
    problem = problem_of(model, topology)
    relaxation = relax(problem, max_candidates=12)
    pairwise = relaxation.pairwise()
    rng = np.random.default_rng(1)
    for strategy in drawn(relaxation, 6):
        assert problem.space.is_valid(strategy)
        true, relaxed = problem.simulator.costs(strategy).durations, relaxation.durations(strategy)
        # What waits for another product is known, what does not is resolved towards any reader.
        joint = problem.simulator.tables.is_joint
        assert (relaxed.resolve_s[joint] <= np.asarray(true.resolve_s)[joint] * (1 + 1e-5)).all()
        relaxed.resolve_s[joint] = np.asarray(true.resolve_s)[joint]
        for name in ("compute_s", "sum_s", "resolve_s"):
            np.testing.assert_allclose(getattr(relaxed, name), getattr(true, name), rtol=1e-5, atol=1e-12, err_msg=name)
        # Reshards as a whole: who pays for a shared one differs, what is paid is never more.
        for _ in range(4):
            weights = unflat(rng.random(sum(x.size for x in true)) ** 3, relaxation.weights())
            paid = sum(float((np.asarray(d, float) * w).sum()) for d, w in zip(true, weights, strict=True))
            assert relaxation.value(strategy, weights) <= paid * (1 + 1e-5)
        choice = relaxation.choice(pairwise, strategy)
        # The class' representative has the cheapest own cost, and the same tables.
        assert pairwise.value(choice) <= relaxation.value(strategy) * (1 + 1e-5)
        again = relaxation.strategy(pairwise, choice)
        assert pairwise.value(choice) == pytest.approx(relaxation.value(again), rel=1e-5)


@pytest.mark.parametrize("model, topology", [p for p in PROBLEMS if p[0] in ("mlp_of_sixes", "lm")])
def test_longest_chains_bound_the_simulated_time(model, topology):
    """Exactly, where the chains know which tasks a strategy needs; from below, where they know nothing."""
    problem = problem_of(model, topology)
    rng = np.random.default_rng(0)
    strategies = [problem.space.random(rng) for _ in range(6)]
    nothing = jax.tree.map(np.zeros_like, problem.simulator.costs(strategies[0]).durations)
    safe = chains_of(problem.simulator.tables, nothing)
    for strategy, e in zip(strategies, problem.evaluate(strategies), strict=True):
        d = problem.simulator.costs(strategy).durations
        known = chains_of(problem.simulator.tables, jax.tree.map(lambda x: x > 0, d))
        value, weights, _ = longest_paths(known, flat(d))
        assert value == pytest.approx(e.step_time_s, rel=1e-5)
        assert weights @ flat(d) == pytest.approx(value)
        below, weights, _ = longest_paths(safe, flat(d))
        assert 0.3 * e.step_time_s < below <= e.step_time_s * (1 + 1e-5)
        # These weights hold for every other strategy too.
        for other, bounded in zip(strategies, problem.evaluate(strategies), strict=True):
            assert weights @ flat(problem.simulator.costs(other).durations) <= bounded.step_time_s * (1 + 1e-5)


def test_candidates_are_all_configs_or_a_documented_part():
    space = case("lm", "a100x8").space
    complete, is_pruned = enumerate_candidates(space, is_complete=True)
    assert not is_pruned
    for n, c in enumerate(complete):
        storages = len(space.storages) if space.owns_parameters[n] else 1
        wanted = {tuple(values) for values in space.configs(n)}
        assert {tuple(a) for a in c.axes.tolist()} == wanted and len(c.storage) == len(wanted) * storages
    many = case("mlp", "a100x64").space
    fewer, is_pruned = enumerate_candidates(many)
    assert is_pruned
    for n, c in enumerate(fewer):
        assert 0 < len(c.storage) <= len(list(many.configs(n))) * len(many.storages)


def test_coarse_candidates_have_two_dims_at_most_and_those_of_the_seeds():
    space = case("mlp", "a100x64").space
    seeds = [space.random(np.random.default_rng(k)) for k in range(3)]
    for n, c in enumerate(coarse_candidates(space, seeds)):
        storages = len(space.storages) if space.owns_parameters[n] else 1
        axes = {tuple(a) for a in c.axes.tolist()}
        assert len(c.storage) == len(axes) * storages and all(tuple(s.axes[n].tolist()) in axes for s in seeds)
        coarse = axes - {tuple(a) for s in seeds for a in s.axes.tolist()}
        assert coarse <= {tuple(v) for v in space.configs(n)}
        changes = [sum(x != y for x, y in itertools.pairwise(a)) for a in coarse]
        assert len(changes) < len(list(space.configs(n))) and max(changes) == 1 and changes.count(0) >= 2


def test_pruning_keeps_the_seeds_and_says_so():
    problem = problem_of("lm", "a100x8")
    rng = np.random.default_rng(5)
    seeds = [problem.space.random(rng)]
    relaxation = relax(problem, max_candidates=6, seeds=seeds)
    assert relaxation.is_pruned and not relax(problem, max_candidates=None).is_pruned
    in_order, _ = enumerate_candidates(problem.space)
    for n, c in enumerate(relaxation.candidates):
        is_listed = (in_order[n].axes == seeds[0].axes[n]).all(axis=1).any()
        assert (c.axes == seeds[0].axes[n]).all(axis=1).any() or not is_listed
        storages = len(problem.space.storages) if problem.space.owns_parameters[n] else 1
        assert len(c.storage) <= (6 + sum(o.group == problem.graph.operators[n].group for o in problem.graph.operators)) * storages
