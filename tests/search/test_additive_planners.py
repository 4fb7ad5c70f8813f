"""optcnn, ilp, lower bounds and the branch and bound, against enumeration of whole spaces."""

import dataclasses
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import PROBLEMS, case

import soapjax
from soapjax.errors import SoapjaxError
from soapjax.planning.entry import planning_problem
from soapjax.search.descent import incumbent
from soapjax.search.experts.convolutions import expert_cnn, expert_cnn_strategy
from soapjax.search.problem import Budget, PlanningProblem
from soapjax.search.proofs import branch_and_bound
from soapjax.search.proofs.bound import bound_of, lower_bound, streams_of
from soapjax.search.proofs.branch_and_bound import exhaustive
from soapjax.search.relaxation.candidates import coarse_candidates
from soapjax.search.relaxation.coarse_optimum import TOLLS, additive_start
from soapjax.search.relaxation.dynamic_program import optcnn, seeds, solve, tied_solution, tolled
from soapjax.search.relaxation.integer_program import ilp, reduced, solve_integer
from soapjax.search.relaxation.relaxed import relax, relaxation_on
from soapjax.strategy.configs import Strategy
from soapjax.topology import load_topology


def trained(params, x):
    loss = lambda p: jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)  # noqa: E731
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def twice_read(params, x):
    """One activation read by two layers, one parameter by two products: reshards to share."""

    def loss(p):
        h = jnp.tanh(x @ p["a"])
        return jnp.mean((h @ p["b"]) ** 2) + jnp.mean((h @ p["b"] @ p["c"]) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


SIZES = {"a": (256, 512), "b": (512, 256), "c": (256, 256)}
STEPS = {"trained": (trained, "ab"), "twice_read": (twice_read, "abc")}


@pytest.fixture(scope="module", params=["trained", "twice_read"])
def tiny(request):
    """A few dots on two devices with overlap, and every strategy of the space with its simulated time."""
    fn, names = STEPS[request.param]
    topology = load_topology("a100x8")
    topology = dataclasses.replace(topology, levels=(dataclasses.replace(topology.levels[-1], size=2),))
    params = {n: jax.ShapeDtypeStruct(SIZES[n], "float32") for n in names}
    problem = planning_problem(soapjax.trace(fn, params, jax.ShapeDtypeStruct((512, 256), "float32")), topology)
    relaxation = relax(problem, max_candidates=None)
    options = [list(zip(c.axes, c.storage, strict=True)) for c in relaxation.candidates]
    count = np.prod([float(len(o)) for o in options])
    rng = np.random.default_rng(0)
    every = list(itertools.product(*options)) if count < 3000 else [[o[rng.integers(len(o))] for o in options] for _ in range(3000)]
    strategies = [Strategy(np.stack([a for a, _ in p]), np.array([s for _, s in p], np.int8)) for p in every]
    return problem, relaxation, strategies, problem.evaluate(strategies), count < 3000


def test_space_of_the_trained_step_is_enumerated(tiny, request):
    assert tiny[4] or "twice_read" in request.node.name


def test_optcnn_and_ilp_minimise_the_additive_objective(tiny):
    problem, relaxation, strategies, _, is_all = tiny
    pairwise = relaxation.pairwise()
    lowest = min(relaxation.value(s) for s in strategies)
    found = solve(pairwise)
    assert found.is_exact and found.value <= lowest * (1 + 1e-5)
    if is_all:
        assert found.value == pytest.approx(lowest, rel=1e-5)
    assert relaxation.value(relaxation.strategy(pairwise, found.choice)) == pytest.approx(found.value, rel=1e-5)
    assert solve_integer(pairwise).value == pytest.approx(found.value, rel=1e-5)
    for planner in (optcnn, ilp):
        result = planner(jax.random.key(0), problem, Budget(seconds=20))
        assert problem.space.is_valid(result.best.strategy) and result.best.is_feasible
        assert f"{found.value:.4g}"[:4] in result.notes[0] and "all configs" in result.notes[0]


def test_bounds_are_below_every_simulated_time(tiny):
    problem, relaxation, strategies, evaluations, _ = tiny
    lowest = min(e.step_time_s for e in evaluations)
    bound = lower_bound(problem, 10)
    assert not bound.is_pruned and 0.5 * lowest < bound.value_s <= lowest * (1 + 1e-6)
    assert "whole space" in bound.describe()
    value, w = bound_of(relaxation)
    assert value == pytest.approx(bound.value_s)
    np.testing.assert_allclose(w.sum(axis=1), 1.0, rtol=1e-6)
    streams = streams_of(problem.simulator.tables)
    for s, e in zip(strategies[:50], evaluations[:50], strict=True):
        busy = streams.busy(problem.simulator.costs(s).durations)
        assert busy.max(axis=1).sum() <= e.step_time_s * (1 + 1e-5)


def test_branch_and_bound_finds_the_brute_force_optimum(tiny, monkeypatch):
    """Also where it must branch: with hardly any node enumerated, and from no good incumbent."""
    problem, _, _, evaluations, is_all = tiny
    lowest = min(e.cost for e in evaluations if e.is_feasible)
    monkeypatch.setattr(branch_and_bound, "_LEAVES", 2)
    monkeypatch.setattr(incumbent, "_PERTURBATIONS", 0)
    monkeypatch.setattr(branch_and_bound, "descend", lambda search, root, keep, start: start)
    found = exhaustive(jax.random.key(0), problem, Budget())
    assert found.stopped_by == "complete" and "proven" in found.notes[0]
    assert found.best.cost <= lowest * (1 + 1e-6)
    if is_all:
        assert found.best.cost == pytest.approx(lowest, rel=2e-5)


def test_a_budget_ends_the_proof_and_says_so(tiny, monkeypatch):
    problem = tiny[0]
    found = exhaustive(jax.random.key(0), problem, Budget(num_proposals=1))
    assert found.stopped_by == "proposals" and "no proof" in found.notes[0]
    assert problem.space.is_valid(found.best.strategy)


def test_exhaustive_refuses_what_is_hopeless():
    found = case("mlp", "a100x64")
    with pytest.raises(SoapjaxError, match="planner exhaustive.*use planner mcmc"):
        exhaustive(jax.random.key(0), PlanningProblem(found.graph, found.space, found.simulator), Budget())


@pytest.mark.slow
def test_repeated_layers_on_many_devices():
    """A model of some size: starts are valid, no worse than replicating, and pruned bounds say so."""
    found = case("lm", "a100x8")
    problem = PlanningProblem(found.graph, found.space, found.simulator)
    start = additive_start(problem)
    assert problem.space.is_valid(start)
    relaxation = relax(problem, max_candidates=8)
    bound, _ = bound_of(relaxation)
    assert 0 < bound
    pairwise = relaxation.pairwise()
    small, keep = reduced(pairwise, solve(pairwise).choice)
    assert sum(t.size for t in small.tables.values()) <= 40_000 and all(len(k) for k in keep)


@pytest.mark.parametrize("model, topology", [("mlp", "a100x64"), ("mlp_of_sixes", None)])
def test_additive_start_is_the_better_of_two_optima(model, topology):
    """Of 64 devices, too, whose operators have thousands of configs, and of axes of three and more."""
    found = case(model, topology) if topology else next(case(*p) for p in PROBLEMS if p[0] == model)
    problem = PlanningProblem(found.graph, found.space, found.simulator)
    start = problem.evaluate([additive_start(problem)])[0]
    assert problem.space.is_valid(start.strategy) and start.is_feasible
    relaxation = relaxation_on(problem, coarse_candidates(problem.space, seeds(problem)))
    for toll in TOLLS:
        pairwise = relaxation.pairwise(tolled(relaxation, toll))
        optimum = problem.evaluate([relaxation.strategy(pairwise, tied_solution(relaxation, pairwise, []).choice)])[0]
        assert start.cost <= optimum.cost * 1.02  # by more rounds of descent
    with pytest.raises(TimeoutError):
        additive_start(problem, deadline=time.monotonic() - 1)


def test_additive_start_fits_into_memory(tiny):
    """Where the cheapest does not fit, memory is given a price."""
    problem, _, _, evaluations, is_all = tiny
    device = problem.simulator.tables.topology.device
    needed = problem.evaluate([additive_start(problem)])[0].memory_bytes
    least = min(e.memory_bytes for e in evaluations)
    assert least < 0.95 * needed or is_all
    available = int(max(0.9 * needed, 1.01 * least) / device.memory_fraction)
    small = dataclasses.replace(device, memory_bytes=available, memory_margin=0.0)
    topology = dataclasses.replace(problem.simulator.tables.topology, device=small)
    tight = PlanningProblem.make(problem.graph, problem.space, topology)
    evaluation = tight.evaluate([additive_start(tight)])[0]
    assert evaluation.is_feasible or not any(e.is_feasible for e in tight.evaluate(seeds(tight)))
    assert evaluation.is_feasible or is_all, "of the larger space's strategies, one is found that fits"


def test_expert_cnn_splits_convolutions_by_sample_and_dense_layers_by_feature():
    """A convolution and two dense layers, the last of 10 classes, on eight devices."""

    def step(params, x):
        def loss(p):
            h = jax.lax.conv_general_dilated(x, p["conv"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            h = jnp.tanh(h).reshape(x.shape[0], -1)
            return jnp.mean((jnp.tanh(h @ p["dense"]) @ p["head"]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    shapes = {"conv": (3, 3, 3, 8), "dense": (512, 64), "head": (64, 10)}
    params = {k: jax.ShapeDtypeStruct(s, "float32") for k, s in shapes.items()}
    problem = planning_problem(soapjax.trace(step, params, jax.ShapeDtypeStruct((16, 8, 8, 3), "float32")), load_topology("cpu8"))
    strategy, notes = expert_cnn_strategy(problem)
    for op, axes in zip(problem.graph.operators, strategy.axes, strict=True):
        split = {op.dims[v] for v in axes if v >= 0}
        if op.kind == "conv":
            assert {d.kind for d in split} == {"S"}
        elif op.kind == "dot":
            assert split and all(d.kind == "P" and not d.is_reduced for d in split)
    assert len(notes) == 1 and "a feature dim of 10 does not split 8 ways: 2 used" in notes[0]
    result = expert_cnn(jax.random.key(0), problem, Budget())
    assert problem.space.is_valid(result.best.strategy) and result.notes == notes
