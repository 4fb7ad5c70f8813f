"""What is said of a strategy's parts adds up to what the simulator says of the whole."""

import numpy as np
import pytest
from problems import case, topology_of

from soapjax.costs.by_operator import operator_costs
from soapjax.costs.itemize import sent_parts
from soapjax.costs.memory.memory_over_time import memory_curve
from soapjax.costs.split_share import share_of, split_flops
from soapjax.costs.tables.problem_tables import cost_tables
from soapjax.simulate.event import simulate
from soapjax.simulate.simulator import Simulator, occupied_by
from soapjax.strategy.space import search_space
from soapjax.topology import factor_mesh

CASES = [("lm", "a100x8"), ("casts", "a100x8"), ("mlp_of_sixes", "2x6")]


def pinned_problem():
    space = search_space(case("mlp", "a100x8").graph, factor_mesh(topology_of("a100x8")), pins=True)
    return Simulator(cost_tables(space.graph, space, topology_of("a100x8"))), space


def strategies_of(found, count=2):
    return [found.data_parallel(), *found.strategies(0, count)]


@pytest.mark.parametrize("model, topology", CASES)
def test_parts_add_up(model, topology):
    found = case(model, topology)
    for strategy in strategies_of(found):
        costs = found.simulator.costs(strategy)
        d = costs.durations
        parts = operator_costs(found.tables, costs, strategy, sent_parts(found.tables, costs.layouts, strategy))
        assert sum(p.compute_s for p in parts) == pytest.approx(d.compute_s.sum(), rel=1e-3)
        assert sum(p.communication_s for p in parts) == pytest.approx(sum(x.sum() for x in d[1:]), rel=1e-3)
        whole = sum(p.compute_s + p.communication_s for p in parts)
        assert whole == pytest.approx(found.simulator.without_overlap_s(costs), rel=1e-3)
        assert max(p.memory_bytes for p in parts) > 0
        assert sum(p.memory_bytes for p in parts) <= costs.memory_bytes[3] * 1.0001 + found.tables.tensor_bytes.sum()


@pytest.mark.parametrize("model, topology", CASES)
def test_the_memory_curve_peaks_where_the_simulator_says(model, topology):
    found = case(model, topology)
    for strategy in strategies_of(found):
        costs = found.simulator.costs(strategy)
        curve = memory_curve(found.tables, costs)
        assert curve.total.shape == (1, found.tables.num_tasks) and (curve.total >= curve.persistent[:, None] - 1).all()
        assert curve.total.max() == pytest.approx(float(costs.memory_bytes[3]), rel=1e-4)
        np.testing.assert_allclose(found.simulator.in_detail([strategy]).memory[:, 0], curve.total.max(0), rtol=1e-4)


def test_pinned_operators_are_counted_on_the_devices_that_they_run_on():
    simulator, space = pinned_problem()
    for seed in range(3):
        strategy = space.random(np.random.default_rng(seed))
        costs = simulator.costs(strategy)
        curve = memory_curve(simulator.tables, costs)
        assert curve.total.shape == (8, simulator.tables.num_tasks)
        assert curve.total.max() == pytest.approx(float(costs.memory_bytes[3]), rel=1e-4)
        np.testing.assert_allclose(simulator.in_detail([strategy]).memory[:, 0], curve.total.max(0), rtol=1e-4)
        # One thing at a time on a device is never faster, and slower than nothing but one after the other.
        step, serial = simulator.timeline(strategy).makespan_s, simulator.without_overlap_s(costs)
        assert step <= serial * (1 + 1e-6) <= float(simulator.schedule.durations(costs.durations).sum()) * (1 + 2e-6)


@pytest.mark.parametrize("model, topology", CASES)
def test_without_overlap_is_what_a_device_without_overlap_takes(model, topology):
    found = case(model, topology)
    for strategy in strategies_of(found):
        costs = found.simulator.costs(strategy)
        serial = found.simulator.schedule.without_overlap()
        simulated = simulate(serial, serial.durations(costs.durations), occupied_by(serial, costs)).makespan_s
        assert found.simulator.without_overlap_s(costs) == pytest.approx(simulated, rel=1e-6)
        assert simulated >= found.simulator.timeline(strategy).makespan_s * (1 - 1e-6)


def shares(tables, strategy, simulator):
    flops, split = split_flops(tables, strategy.axes, tables.stored(simulator.costs(strategy).layouts.slots))
    return share_of(flops, split), flops, split


def test_replicated_work_shows():
    found = case("mlp", "a100x64")
    share, flops, split = shares(found.tables, found.replicated(), found.simulator)
    assert share == 0 and flops.sum() > 0 and not split.any()
    share, flops, split = shares(found.tables, found.data_parallel(), found.simulator)
    updates = sum(w.flops for t in found.graph.tasks if t.parameter >= 0 for w in t.work)
    assert share == pytest.approx(1 - updates / flops.sum(), abs=1e-5)  # 64 ways, the optimizer alone on every device
    sharded = found.data_parallel()
    sharded.storage[found.space.owns_parameters] = 1
    assert max(share, 0.98) < shares(found.tables, sharded, found.simulator)[0] <= 1


def test_a_part_of_the_devices_counts_in_part():
    found = case("mlp", "a100x64")
    strategy = found.replicated()
    dot = next(n for n, op in enumerate(found.graph.operators) if op.kind == "dot")
    strategy.axes[dot, :2] = 0  # 4 ways: 16 devices do the same
    _, flops, split = shares(found.tables, strategy, found.simulator)
    update = sum(w.flops for t in found.graph.tasks if t.operator == dot and t.parameter >= 0 for w in t.work)
    assert split[dot] == pytest.approx((flops[dot] - update) * (64 - 16) / 63)


def test_what_runs_on_one_device_is_not_repeated():
    simulator, space = pinned_problem()
    strategy = space.random(np.random.default_rng(0))
    strategy.axes[:] = -2  # all on device 0
    strategy.storage[:] = 0
    assert shares(simulator.tables, strategy, simulator)[0] == 1
