"""Costs of whole strategies: the jitted evaluator against the plain oracle, and what known strategies must cost."""

import dataclasses
import functools

import jax
import numpy as np
import oracles
import pytest
from families import family
from problems import PROBLEMS, SLOW, case, case_with, graph_of, topology_of

from soapjax.costs.evaluate import LANES, Evaluator, costs_of, figure_of_rows
from soapjax.costs.itemize import sent_items
from soapjax.costs.rules import sets
from soapjax.costs.rules.links import COLLECTIVES
from soapjax.costs.tables.problem_tables import cost_tables
from soapjax.graph.passes.phases import BACKWARD, FORWARD
from soapjax.jit import programs
from soapjax.simulate.simulator import Simulator
from soapjax.strategy.configs import Strategy
from soapjax.strategy.layout import PARTIAL, divides
from soapjax.strategy.space import search_space
from soapjax.topology import factor_mesh

SECONDS_ERROR = 1e-5
MEMORY_ERROR = 1e-5
names = pytest.mark.parametrize("model, topology", family(PROBLEMS, slow=SLOW))


def assert_equals_oracle(c, strategies):
    costs, _ = c.figures(strategies)
    for b, strategy in enumerate(strategies):
        found = jax.tree.map(lambda x, b=b: x[b], costs)
        plain = oracles.plain_costs(c.graph, c.space, c.topology, strategy)
        assert [tuple(row) for row in found.layouts.home.tolist()] == plain.home
        d, t = found.durations, c.tables
        np.testing.assert_allclose(d.compute_s, plain.compute_s, rtol=SECONDS_ERROR)
        resolved = {i: s for i, s in enumerate(d.resolve_s) if s.any()}
        assert_same_seconds(resolved, plain.resolve_s)
        assert_same_seconds(summed(zip(t.edge_task, t.edge_tensor, strict=True), d.reshard_s), plain.reshard_s)
        assert_same_seconds(summed(t.sum_task, d.sum_s), plain.sum_s)
        sent = [plain.bytes_by_collective[k] for k in COLLECTIVES]
        np.testing.assert_allclose(found.bytes_by_collective, sent, rtol=SECONDS_ERROR)
        np.testing.assert_allclose(found.memory_bytes[:3], plain.memory_bytes, rtol=MEMORY_ERROR)
        np.testing.assert_allclose(found.memory_bytes[3], sum(plain.memory_bytes), rtol=MEMORY_ERROR)


def summed(keys, seconds) -> dict:
    total = {}
    for key, s in zip(keys, seconds, strict=True):
        key = tuple(map(int, key)) if isinstance(key, tuple) else int(key)
        total[key] = total.get(key, 0.0) + s
    return total


def assert_same_seconds(found: dict, expected: dict):
    assert {k for k, s in found.items() if np.any(s)} == {k for k, s in expected.items() if np.any(s)}
    for k, s in found.items():
        if np.any(s):
            np.testing.assert_allclose(s, expected[k], rtol=SECONDS_ERROR, err_msg=str(k))


@names
def test_evaluator_equals_the_plain_oracle(model, topology):
    c = case(model, topology)
    assert_equals_oracle(c, [c.replicated(), c.data_parallel(), *c.strategies(seed=1, count=30)])


@pytest.mark.parametrize("pins", [False, True])
@pytest.mark.parametrize("cases", [(("lm", "2x4"), ("mlp", "a100x8")), (("mlp_of_sixes", "cpu8"), ("lm", "2x4"))])
def test_what_was_judged_before_leaves_no_trace(cases, pins):
    """Results are written over those of earlier calls, of another problem perhaps, once nobody reads them."""
    made = [case_with(*names, pins=pins) for names in cases]
    judged = [(c, Evaluator(c.tables), [c.replicated(), *c.strategies(seed=3, count=2 * LANES)]) for c in made]
    assert len({evaluator.bucket for _, evaluator, _ in judged}) == 1
    parts = [slice(0, LANES), slice(1, LANES + 1), slice(LANES, 2 * LANES)]
    plan = [(*one, part) for part in parts for one in judged]
    anew = [call(evaluator, strategies[part]) for _, evaluator, strategies, part in plan]
    for (c, evaluator, strategies, part), expected in zip(plan, anew, strict=True):
        found = call(evaluator, strategies[part])
        jax.tree.map(np.testing.assert_array_equal, of_the_problem(c, found), of_the_problem(c, expected))
        kept, place = evaluator.costs(found, 3), found.per_record.layout.unsafe_buffer_pointer()
        before = jax.tree.map(np.copy, kept)
        evaluator.take_back(found)
        again = call(evaluator, strategies[:LANES])
        assert again.per_record.layout.unsafe_buffer_pointer() == place
        jax.tree.map(np.testing.assert_array_equal, kept, before)
        evaluator.take_back(again)


def call(evaluator, strategies):
    return evaluator(np.stack([s.axes for s in strategies]), np.stack([s.storage for s in strategies]))


def of_the_problem(c, of):
    """Without what stands behind its last records."""
    t, each = c.tables, of.per_record
    counts = np.cumsum([len(t.tensor_bytes), len(t.edge_task), len(t.sum_task)])
    rows = {name: np.stack([figure_of_rows(each, name, lane) for lane in range(LANES)], -1) for name in each.rows._fields}
    sizes = {"full_s": counts[2], "sent": counts[2], "full_bytes": counts[2], "on": counts[2], "on_kept": counts[2]}
    sizes |= dict.fromkeys(("copy", "is_sent"), len(t.edge_task))
    own = {name: x[: sizes.get(name, counts[0])] for name, x in rows.items()}
    whole = of.memory_bytes, of.sent_bytes, of.violations
    figures = each.paid_s[: counts[2]], *whole, each.previous[: len(t.edge_task)]
    records = each.layout[: t.replicated_slot + 1], each.compute_s[: t.num_tasks]
    return own, *map(np.asarray, (*figures, *records))


@pytest.mark.parametrize("axis_sizes", [(2, 2, 2), (3, 2, 5), (7, 7, 3, 2), (5, 5, 5, 5, 3)])
def test_divides_is_exact_for_all_sizes(axis_sizes):
    rng, mesh = np.random.default_rng(0), sets.mesh_of(axis_sizes)
    chosen = rng.integers(0, 2 ** len(axis_sizes), 4000)
    parts = np.array([np.prod([n for a, n in enumerate(axis_sizes) if s >> a & 1], dtype=np.int64) for s in chosen])
    size = rng.integers(1, 2**31, 4000, dtype=np.int64)
    size = np.where(rng.random(4000) < 0.7, size // parts * parts + rng.integers(-1, 2, 4000), size).clip(0, 2**31 - 1)
    found = jax.jit(functools.partial(sets.divides, mesh))(chosen.astype(np.int16), size.astype(np.int32))
    assert set((size % parts == 0).tolist()) == {True, False}
    np.testing.assert_array_equal(found, size % parts == 0)


@names
def test_evaluator_equals_the_plain_oracle_on_neighbours_that_agree(model, topology):
    """Random operators seldom agree; here most do, so that sums scatter, copies are shared and inputs come as read."""
    c = case(model, topology)
    strategies = []
    for seed, random in enumerate(c.strategies(seed=2, count=16)):
        rng = np.random.default_rng(seed)
        keep = rng.random(c.graph.num_operators) < 0.3
        base = c.data_parallel()
        base.storage[:] = np.where(c.space.owns_parameters, seed % len(c.space.storages), 0)
        axes = np.where(keep[:, None] | [bool(c.space.violations(base))], random.axes, base.axes)
        strategies.append(Strategy(axes.astype(np.int8), base.storage))
    assert_equals_oracle(c, strategies)


def test_oracle_covers_the_rules_it_is_there_for():
    """The random strategies above do scatter sums, refuse to for both reasons, share copies and gather again."""
    seen = set()
    for model, topology in set(PROBLEMS) - set(SLOW):
        c = case(model, topology)
        t, sizes = c.tables, c.space.mesh.axis_sizes
        costs, _ = c.figures(c.strategies(seed=1, count=30))
        for b in range(30):
            found = jax.tree.map(lambda x, b=b: x[b], costs.layouts)
            for i in np.flatnonzero((found.raw == PARTIAL).any(1)):
                raw, home, reader = found.raw[i], found.home[i], found.slots[t.tensor_reader[i]]
                for a in np.flatnonzero(raw == PARTIAL):
                    if reader[a] >= 0:
                        ordered = reader[a] not in raw[a + 1 :]
                        wanted = np.where((raw == PARTIAL) & (reader >= 0), reader, raw)
                        fits = divides(wanted.tolist(), c.graph.tensors[i].shape, sizes)
                        seen.add(("scattered" if home[a] >= 0 else "summed", ordered, fits))
            seen.add(("shared", bool(found.is_shared.any())))
            made = {g: t.edge_is_backward[e] for e, g in reversed(list(enumerate(t.edge_group.tolist())))}  # by the first reader
            late = [t.edge_is_backward[e] and not made[g] for e, g in enumerate(t.edge_group.tolist())]
            seen.add(("crosses", bool((found.is_shared & late).any())))
    assert {("scattered", True, True), ("summed", False, True), ("summed", True, False)} <= seen
    assert {("shared", True), ("crosses", True)} <= seen


@names
def test_replicated_sends_nothing(model, topology):
    c = case(model, topology)
    costs, _ = c.figures([c.replicated()])
    assert not costs.bytes_by_collective.any()
    assert not any(x.any() for x in (costs.durations.resolve_s, costs.durations.reshard_s, costs.durations.sum_s))


@pytest.mark.parametrize("topology", ["a100x64", "a100x8"])
def test_data_parallelism_of_the_mlp_all_reduces_its_gradients_and_its_loss(topology):
    c = case("mlp", topology)
    strategy = c.data_parallel()
    assert c.space.is_valid(strategy)
    costs, _ = c.figures([strategy])
    n = c.space.mesh.num_devices
    numbers = 64 * 64 + 64 + 64 * 64 + 64 + 64 * 64 + 64 + 1  # three dense layers and the loss
    assert dict(zip(COLLECTIVES, costs.bytes_by_collective[0], strict=True)) == pytest.approx(
        dict.fromkeys(COLLECTIVES, 0) | {"all-reduce": 2 * 4 * numbers * (n - 1) / n}, rel=1e-6
    )


@pytest.mark.parametrize("topology", ["a100x64", "a100x8"])
def test_fully_sharded_mlp_keeps_one_nth_of_its_state_and_sends_three_times_its_parameters(topology):
    c = case("mlp", topology)
    n = c.space.mesh.num_devices
    described = [s.describe(c.space.mesh.axis_names) for s in c.space.storages]
    everywhere = ",".join(c.space.mesh.axis_names)
    options = [described.index(x) for x in ("as used", f"sharded({everywhere}), kept", f"sharded({everywhere}), regathered")]
    strategies = []
    for option in options:
        strategy = c.data_parallel()
        strategy.storage[c.space.owns_parameters] = option
        strategies.append(strategy)
    costs, _ = c.figures(strategies)
    state = costs.memory_bytes[:, 0]
    parameters = 4 * 3 * (64 * 64 + 64)
    assert state[0] == 3 * parameters  # adam: the parameter and two moments
    assert state[1] == state[2] == state[0] / n
    part = (n - 1) / n
    sent = [dict(zip(COLLECTIVES, row, strict=True)) for row in costs.bytes_by_collective]
    for s in sent[1:]:
        assert s["reduce-scatter"] == pytest.approx(parameters * part, rel=1e-6)
        assert s["all-reduce"] == pytest.approx(2 * 4 * part, rel=1e-6)  # the loss
    assert sent[1]["all-gather"] == pytest.approx(parameters * part, rel=1e-6)
    # The backward pass reads the kernels of the second and third layer again.
    assert sent[2]["all-gather"] == pytest.approx((parameters + 2 * 4 * 64 * 64) * part, rel=1e-6)


@names
def test_random_strategies_are_valid_and_all_layouts_divide(model, topology):
    c = case(model, topology)
    strategies = c.strategies(seed=3, count=30)
    costs, _ = c.figures(strategies)
    assert not costs.penalty.any()
    t, sizes = c.tables, c.space.mesh.axis_sizes
    shapes = [x.shape for x in c.graph.tensors]
    num_u = len(t.access_op)
    slot_shapes = [shapes[i] for i in t.access_tensor]
    slot_shapes += [shapes[p.tensor] for p in c.graph.parameters] + [shapes[p.gradient] for p in c.graph.parameters]
    is_whole = ~np.isin(np.arange(t.replicated_slot + 1), t.parameter_slots[:, 5])  # but for sums of gradients
    is_whole[:num_u] = False
    for b in range(len(strategies)):
        slots, home = costs.layouts.slots[b], costs.layouts.home[b]
        assert (home[t.tensor_sum < 0] >= -1).all() and (slots[: len(is_whole)][is_whole] >= -1).all()
        for layout, shape in (*zip(home.tolist(), shapes, strict=True), *zip(slots.tolist(), slot_shapes, strict=False)):
            assert max(layout) < len(shape)
            assert divides(layout, shape, sizes), (layout, shape)


@pytest.mark.parametrize("model, topology, pins", [("lm_scan", "cpu8", False), ("mlp", "2x4", True)])
def test_a_batch_is_the_strategies_one_by_one(model, topology, pins):
    graph, place = graph_of(model), topology_of(topology)
    space = search_space(graph, factor_mesh(place), pins=pins)
    tables, rng = cost_tables(graph, space, place), np.random.default_rng(8)
    strategies = [space.random(rng) for _ in range(3)]
    axes, storage = np.stack([s.axes for s in strategies]), np.stack([s.storage for s in strategies])
    evaluator = Evaluator(tables)
    together = evaluator(axes, storage)
    for b, s in enumerate(strategies):
        one = costs_of(tables, s.axes, s.storage)
        jax.tree.map(np.testing.assert_array_equal, evaluator.costs(together, b), one)


@names
def test_the_listed_sends_add_up_to_the_bytes_by_collective(model, topology):
    c = case(model, topology)
    strategies = [c.data_parallel(), *c.strategies(seed=5, count=6)]
    costs, _ = c.figures(strategies)
    for b, strategy in enumerate(strategies):
        total = dict.fromkeys(COLLECTIVES, 0.0)
        for item in sent_items(c.tables, jax.tree.map(lambda x, b=b: np.asarray(x[b]), costs.layouts), strategy):
            for kind, size in item.bytes.items():
                total[kind] += size
        np.testing.assert_allclose(list(total.values()), costs.bytes_by_collective[b], rtol=1e-5)


def test_penalty_counts_the_degrees_that_do_not_divide():
    c = case("mlp_of_sixes", "2x6")
    strategy = c.replicated()
    dims = [[d.size for d in op.dims] for op in c.graph.operators]
    assert dims[0] == [24, 36, 6]
    strategy.axes[0] = 0  # 24 over 12 devices
    strategy.axes[1] = [2, 2, 2]  # 36 over 12 devices
    bad = Strategy(strategy.axes.copy(), strategy.storage)
    bad.axes[0] = [2, 0, 2]  # 6 over 4
    worse = Strategy(bad.axes.copy(), bad.storage)
    worse.axes[2] = 1  # 42 classes over 12
    worse.axes[3] = 0
    worse.axes[0] = [2, 2, 2]  # 6 over 12
    costs, _ = c.figures([strategy, bad, worse])
    assert costs.penalty.tolist() == [0, 1, 2]
    assert [len(c.space.violations(s)) for s in (strategy, bad, worse)] == [0, 1, 2]


@names
def test_gathering_again_saves_memory_and_sends_more_than_keeping(model, topology):
    c = case(model, topology)
    scatters = any(s.scatters for s in c.space.storages)  # as gathering again does, gradients that the step itself adds up
    pairs = [
        (i, j) for i, kept in enumerate(c.space.storages) for j, again in enumerate(c.space.storages)
        if any(kept.axes) and kept.axes == again.axes and again.again == again.axes and not kept.regathers
        and kept.scatters == scatters
    ]  # fmt: skip
    strategies = []
    for kept, again in pairs:
        for random in [c.data_parallel(), *c.strategies(seed=4, count=7)]:
            for option in (kept, again):
                storage = np.where(c.space.owns_parameters, option, 0).astype(np.int8)
                strategies.append(Strategy(random.axes, storage))
    costs, times = c.figures(strategies)
    sent, peak = costs.bytes_by_collective.sum(-1), costs.memory_bytes[:, 1:3].sum(-1)
    assert (sent[1::2] >= sent[0::2]).all()
    # A loop reads its slices of a parameter anew in the backward pass, whatever the storage.
    reads_again = any(
        a.phase == FORWARD and b.phase == BACKWARD and a.scope == b.scope and p.tensor in tensors_read(a) & tensors_read(b)
        for p in c.graph.parameters for a in c.graph.tasks for b in c.graph.tasks
    )  # fmt: skip
    assert (sent[1::2] > sent[0::2]).any() == (reads_again and c.topology.device.platform != "cpu")
    assert (peak[1::2] <= peak[0::2] * (1 + MEMORY_ERROR)).all()
    assert (times[1::2] >= times[0::2] * (1 - SECONDS_ERROR)).all()
    # Nothing else changes.
    assert (costs.memory_bytes[1::2, 0] == costs.memory_bytes[0::2, 0]).all()
    assert (costs.durations.compute_s[1::2] == costs.durations.compute_s[0::2]).all()


def tensors_read(task) -> set[int]:
    return {a.tensor for a in task.reads}


def test_gathering_again_lowers_the_peak_of_a_deep_model():
    c = case("lm", "a100x8")
    described = [s.describe(c.space.mesh.axis_names) for s in c.space.storages]
    strategies = []
    for ending in ("kept", "regathered"):
        strategy = c.data_parallel()
        strategy.storage[c.space.owns_parameters] = next(k for k, s in enumerate(described) if s.endswith(ending))
        strategies.append(strategy)
    costs, _ = c.figures(strategies)
    assert costs.memory_bytes[1, 3] < costs.memory_bytes[0, 3]


def test_a_part_that_is_left_is_gathered_over_fast_links_alone():
    """Between keeping the whole parameter and gathering all of it again, in memory and in seconds of either kind of link."""
    c = case("lm", "2x4")
    options = {s.again: k for k, s in enumerate(c.space.storages) if all(s.axes)}
    strategies = []
    for option in (options[False, False, False], options[False, True, True], options[True, True, True]):
        strategy = c.data_parallel()
        strategy.storage[c.space.owns_parameters] = option
        strategies.append(strategy)
    costs, times = c.figures(strategies)
    slow_s, fast_s = np.moveaxis(costs.durations.reshard_s.sum(1), -1, 0)
    assert slow_s[0] == slow_s[1] < slow_s[2] and fast_s[0] < fast_s[1] == fast_s[2]
    assert costs.memory_bytes[2, 3] <= costs.memory_bytes[1, 3] < costs.memory_bytes[0, 3]
    assert (costs.memory_bytes[:, 0] == costs.memory_bytes[0, 0]).all()  # nothing else is stored


def test_fixed_layouts_are_kept_and_costed():
    kernel, features = "state.params.dense0.kernel", "batch.features"
    c = case_with("mlp", "a100x8", fixed={kernel: (("d0",), ("d1", "d2")), features: ((), ("d0",))})
    strategies = [c.replicated(), c.data_parallel(), *c.strategies(seed=5, count=10)]
    assert_equals_oracle(c, strategies)
    costs, _ = c.figures(strategies)
    tensor_of = {x.input_leaf: i for i, x in enumerate(c.graph.tensors)}
    assert (costs.layouts.home[:, tensor_of[c.leaf(kernel)]] == [0, 1, 1]).all()
    assert (costs.layouts.home[:, tensor_of[c.leaf(features)]] == [1, -1, -1]).all()
    # The replicated step gathers both before it uses them: 64 x 64 and 64 x 64 floats.
    assert costs.bytes_by_collective[0, COLLECTIVES.index("all-gather")] == 4 * 64 * 64 * (7 / 8 + 1 / 2)


def test_one_program_for_many_problems(monkeypatch):
    """The next problem of a bucket, of any model and topology, is judged by what was compiled for another."""
    case("mlp", "a100x8").simulator.prepare()
    monkeypatch.setattr(programs, "compiled_with", lambda *_: pytest.fail("compiled again"))
    for model, topology in (("lm", "a100x8"), ("mlp_of_sixes", "2x6"), ("casts", "a100x8")):
        c = case(model, topology)
        c.figures(c.strategies(0, 3))


def test_problems_of_two_buckets_take_turns():
    """What is compiled for one bucket is not called with the arrays of another, also where their items are as many."""
    c = case("mlp", "a100x8")
    expected = c.figures(c.strategies(0, 3))[1]
    tables = dataclasses.replace(c.tables)
    larger = Simulator(tables)
    larger.evaluator = Evaluator(tables, Evaluator(tables).bucket._replace(tasks=2048, rows=8192))
    strategies = c.strategies(0, 3)
    found = larger.step_times(strategies).step_time_s
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(c.simulator.step_times(strategies).step_time_s, expected)
