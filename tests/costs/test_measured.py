"""Measured seconds in the cost tables: exact where measured, interpolated nearby, alike in the full and the exact delta costs."""

import functools

import numpy as np
import pytest
from families import family
from problems import graph_of, topology_of

from soapjax.costs.measured.fit import fitted_rates
from soapjax.costs.measured.interpolation import degrees_behind, local_task, visible_dims
from soapjax.costs.measured.profile import Profile, installed_versions
from soapjax.costs.measured.profile_parts import Calibration, Device, Link, Measurement
from soapjax.planning.profiling import asked_degrees, compute_figures, requests_of, scaled_prediction
from soapjax.search.chain.engine import Engine
from soapjax.search.experts.baselines import data_parallel_strategy
from soapjax.search.problem import PlanningProblem
from soapjax.strategy.configs import Strategy
from soapjax.strategy.space import search_space
from soapjax.topology import factor_mesh

MODELS = ("mlp", "lm_scan")


@functools.cache
def plain_problem(model):
    return problem_of(model, None)


def problem_of(model, profile):
    graph, place = graph_of(model), topology_of("2x4")
    return PlanningProblem.make(graph, search_space(graph, factor_mesh(place)), place, profile)


def profile_with(measurements, **parts):
    device = Device(name="A100-SXM4-80GB", platform="cuda")
    return Profile(device=device, versions=installed_versions(), operators=tuple(measurements), **parts)


def measured(problem, strategies, seed=0):
    """Every task that the strategies ask for, with seconds drawn at random, as a measurement would find them."""
    rng = np.random.default_rng(seed)
    graph = problem.graph
    found = {}
    for strategy in strategies:
        degrees, _ = asked_degrees(problem.simulator, strategy)
        for k, task in enumerate(graph.tasks):
            local = local_task(graph, k, degrees[k])
            found.setdefault(
                local.identity,
                Measurement(
                    label="", structure=local.structure, kind=task.kind, dtype=task.dtype, reads=local.reads, writes=local.writes,
                    elements=local.elements, flops=local.flops, moved_bytes=local.moved_bytes, seconds=10 ** rng.uniform(-5, -3),
                ),
            )  # fmt: skip
    return found


def some_strategies(problem, count=3):
    rng = np.random.default_rng(7)
    return [data_parallel_strategy(problem)[0], *(problem.space.random(rng) for _ in range(count - 1))]


@functools.cache
def measured_problem(model):
    plain = plain_problem(model)
    strategies = some_strategies(plain)
    return problem_of(model, profile_with(measured(plain, strategies).values())), strategies


@pytest.mark.parametrize("model", family(MODELS, slow=["lm_scan"]))
def test_a_measured_task_costs_what_was_measured(model):
    problem, strategies = measured_problem(model)
    table = measured(plain_problem(model), strategies)
    for strategy in strategies:
        degrees, seconds = asked_degrees(problem.simulator, strategy)
        for k, task in enumerate(problem.graph.tasks):
            wanted = table[local_task(problem.graph, k, degrees[k]).identity].seconds * task.trip_count
            assert seconds[k] == pytest.approx(wanted, rel=1e-4), (k, degrees[k])
        figures, shares = compute_figures(problem.simulator, strategy)
        assert set(figures) == {"measured"} and shares == {"measured": 1.0}


@pytest.mark.parametrize("model", ["mlp", "lm_scan"])
def test_the_exact_delta_sees_the_measurements_too(model):
    problem, strategies = measured_problem(model)
    engine = Engine(problem)
    rng = np.random.default_rng(3)
    for n in rng.permutation(problem.graph.num_operators)[:4]:
        base = strategies[1]
        drawn = [problem.space.random(rng) for _ in range(32)]
        changed = []
        for d in drawn:
            axes, storage = base.axes.copy(), base.storage.copy()
            axes[n], storage[n] = d.axes[n], d.storage[n]
            changed.append(Strategy(axes, storage))
        axes, storage = np.stack([d.axes[n] for d in drawn]), np.stack([d.storage[n] for d in drawn])
        found = engine.judged(engine.at(base), int(n), axes, storage)
        np.testing.assert_allclose(found.step_time_s, problem.simulator.step_times(changed).step_time_s, rtol=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_degrees_are_found_again_from_local_shapes(model):
    problem = plain_problem(model)
    for strategy in some_strategies(problem):
        for request in requests_of(problem.simulator, [strategy]):
            local, task = request.local, problem.graph.tasks[request.task]
            m = Measurement(
                label="", structure=local.structure, kind=task.kind, dtype=task.dtype, reads=local.reads, writes=local.writes,
                elements=local.elements, flops=local.flops, moved_bytes=local.moved_bytes, seconds=1.0,
            )  # fmt: skip
            found = degrees_behind(problem.graph, request.task, m)
            visible = visible_dims(problem.graph, request.task)
            assert [found[d] for d in visible] == [request.degrees[d] for d in visible]
            other = m.model_copy(update={"flops": 3 * m.flops + 1})
            assert degrees_behind(problem.graph, request.task, other) is None


def test_between_measurements_the_ratio_to_the_roofline_is_interpolated():
    """Measured at twice and at four times the roofline: in between in between, elsewhere not outside."""
    plain = plain_problem("mlp")
    strategies = some_strategies(plain, 2)
    table = measured(plain, strategies[:1])
    slowed = []
    for factor, strategy in ((2.0, strategies[0]), (4.0, strategies[1])):
        degrees, seconds = asked_degrees(plain.simulator, strategy)
        for k in range(len(plain.graph.tasks)):
            local = local_task(plain.graph, k, degrees[k])
            like = next(m for m in table.values() if m.structure == local.structure)
            update = dict(
                reads=local.reads, writes=local.writes, elements=local.elements, flops=local.flops,
                moved_bytes=local.moved_bytes, seconds=factor * float(seconds[k]) / plain.graph.tasks[k].trip_count,
            )  # fmt: skip
            slowed.append(like.model_copy(update=update))
    problem = problem_of("mlp", profile_with({m.identity: m for m in slowed}.values()))
    rng = np.random.default_rng(5)
    for strategy in [plain.space.random(rng) for _ in range(4)]:
        _, before = asked_degrees(plain.simulator, strategy)
        _, after = asked_degrees(problem.simulator, strategy)
        ratio = after / before
        assert (ratio > 1.999).all() and (ratio < 4.001).all()
    assert compute_figures(problem.simulator, strategy)[1].keys() <= {"measured", "calibrated"}


def test_scales_and_links_of_a_profile_count():
    plain = plain_problem("mlp")
    strategy = data_parallel_strategy(plain)[0]
    scales = Calibration(compute_scale=2.0, network_scale=3.0, residual=0.1)
    scaled = problem_of("mlp", profile_with((), calibration=scales))
    found = float(scaled.simulator.step_times([strategy]).step_time_s[0])
    assert found == pytest.approx(scaled_prediction(plain.simulator, strategy, 2.0, 3.0), rel=1e-4)
    links = (Link(level="host", latency_s=1e-3, bytes_per_s=1e6),)
    slow = problem_of("mlp", profile_with((), links=links))
    assert float(slow.simulator.step_times([strategy]).step_time_s[0]) > 10 * found
    assert slow.simulator.tables.topology == plain.simulator.tables.topology, "the plan's topology stays the user's"


def test_a_fitted_roofline_replaces_the_topology_s():
    plain = plain_problem("mlp")
    strategy = data_parallel_strategy(plain)[0]
    rates = fitted_rates(tuple(measured(plain, some_strategies(plain)).values()))
    problem = problem_of("mlp", profile_with((), rates=rates))
    _, seconds = asked_degrees(problem.simulator, strategy)
    k = next(k for k, t in enumerate(problem.graph.tasks) if t.kind == "dot")
    local = local_task(problem.graph, k, asked_degrees(problem.simulator, strategy)[0][k])
    wanted = max(local.flops / rates.flops_per_s["dot float32"], local.moved_bytes / rates.memory_bytes_per_s) + rates.launch_s
    assert seconds[k] == pytest.approx(wanted, rel=1e-4)
    assert set(compute_figures(problem.simulator, strategy)[1]) == {"calibrated"}
    assert set(compute_figures(plain.simulator, strategy)[1]) == {"analytic"}
