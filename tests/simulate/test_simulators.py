"""Event-driven, batched and longest-path simulations give one timeline, on random schedules and on real models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import family
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import PROBLEMS, SLOW, case, case_with, graph_with, topology_of
from schedules import SHAPES, random_durations, random_schedule

from soapjax.costs.evaluate import Durations
from soapjax.search.chain.engine import Engine
from soapjax.search.chain.moves import State
from soapjax.search.problem import PlanningProblem
from soapjax.simulate.busy import least_s
from soapjax.simulate.event import simulate
from soapjax.simulate.items import LINK, NONE, Items
from soapjax.simulate.schedule import BARRIER, COMPUTE, RESHARD, RESOLVE, SUM, Schedule
from soapjax.simulate.simulated_trace import no_trace, traced
from soapjax.simulate.simulator import Simulator
from soapjax.simulate.walk import ItemCosts, ItemSizes, makespans, records_of_items
from soapjax.simulate.window import Changed, no_windows, passing_by, widened, window_times
from soapjax.strategy.space import search_space
from soapjax.topology import factor_mesh

FLOAT32_ERROR = 3e-6  # largest relative difference: 3e-7 on random schedules, 1e-6 on the models; the contract is 1e-5
FLOAT64_ERROR = 1e-12
BATCH = 6
names = pytest.mark.parametrize("model, topology", family(PROBLEMS, slow=set(SLOW) - {("lm_scan", "2x4"), ("rnnlm", "2x4")}))


def longest_paths(schedule: Schedule, durations) -> list[float]:
    """When every task ends: longest paths over written-out edges, inputs and the order on each stream."""
    n, num_streams = schedule.occupies.shape
    active = [durations[t] > 0 or bool(schedule.is_barrier[t]) for t in range(n)]
    edges = {(int(p), t) for t in range(n) for p in schedule.predecessors[t] if p < n}
    for s in range(num_streams):
        queue = [t for t in range(n) if active[t] and schedule.occupies[t, s]]
        edges |= set(zip(queue, queue[1:], strict=False))
    end = [float(d) for d in durations]
    for a, b in sorted(edges, key=lambda edge: (edge[1], edge[0])):  # every edge points forward
        end[b] = max(end[b], end[a] + float(durations[b]))
    return end


def makespan(schedule: Schedule, durations) -> float:
    return max(longest_paths(schedule, durations), default=0.0)


def critical_path(schedule: Schedule, durations) -> float:
    return makespan(dataclasses.replace(schedule, occupies=np.zeros_like(schedule.occupies)), durations)


def scheduled(rng: np.random.Generator, shape: tuple[int, int, int]) -> tuple[Schedule, np.ndarray]:
    """A random schedule, and durations [BATCH, T] of it."""
    schedule = random_schedule(rng, shape)
    return schedule, np.stack([random_durations(rng, schedule, np.arange(schedule.num_tasks), whole=False) for _ in range(BATCH)])


def items_of_schedule(schedule: Schedule) -> tuple[Items, np.ndarray]:
    """Random tasks as items: a link per input, then a compute item (one stream; the schedule's streams are its device groups).

    Gives the item of every task too.
    """
    n = schedule.num_tasks
    kind, predecessor, item_of = [], [], []
    start = 0
    for t in range(n):
        if schedule.is_barrier[t]:
            start = len(kind)
            item_of.append(len(kind))
            kind.append(BARRIER)
            predecessor.append(NONE)
            continue
        for p in sorted({int(p) for p in schedule.predecessors[t] if p < n}):
            if item_of[p] >= start:
                kind.append(LINK)
                predecessor.append(item_of[p])
        item_of.append(len(kind))
        kind.append(COMPUTE)
        predecessor.append(NONE)
    kind = np.array(kind, np.int32)
    none = np.zeros(0, np.int32)
    return Items(
        kind, np.zeros(len(kind), np.int32), np.array(predecessor, np.int32), kind == LINK, kind == COMPUTE, none, none, none, none
    ), np.array(item_of, np.int32)  # fmt: skip


def records(items: Items, *, overlap: bool, size: int | None = None):
    """Records of items each of which has figures of its own, by its number; padded, so that there is one trace per shape."""
    size = size or -(-items.num_items // 200) * 200
    every = np.arange(items.num_items)
    of_tasks, of_rows = (np.where(items.is_compute == is_task, every, size) for is_task in (True, False))
    return records_of_items(items, every, of_tasks, of_rows, ItemSizes(size, size), num_tasks=size, num_rows=size, overlap=overlap)


def padded_items(schedule: Schedule):
    """(records, item of every task, number of items)."""
    items, item_of = items_of_schedule(schedule)
    found = records(items, overlap=True)
    return found, item_of, len(found.item) - 1


def on_items(schedule: Schedule, item_of: np.ndarray, size: int, durations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds [B, T, 1] and holders [B, T, G] of items, from durations [B, tasks]."""
    seconds = np.zeros((len(durations), size, 1), durations.dtype)
    on = np.zeros((len(durations), size, schedule.occupies.shape[1]), bool)
    tasks = np.flatnonzero(~schedule.is_barrier)
    seconds[:, item_of[tasks], 0], on[:, item_of[tasks]] = durations[:, tasks], schedule.occupies[tasks]
    return seconds, on


def figures(seconds, on) -> ItemCosts:
    """Of items: seconds [.., T, S] and holders [.., T, G] or None, candidates last; and a row of nothing."""
    def last(x):
        x = jnp.moveaxis(x, 0, -1) if x.ndim == 3 else x
        return jnp.concatenate([x, jnp.zeros_like(x[:1])])

    seconds = last(seconds)
    both = (None, None) if on is None else (last(on),) * 2
    return ItemCosts(seconds[:, 0], seconds[:, 1:], *both)


@jax.jit
def batched(items, seconds, on):
    return makespans(items, items.item.shape[0] - 1, figures(seconds, on))


def run_batched(schedule: Schedule, durations) -> np.ndarray:
    """Step times of durations [B, T]."""
    items, item_of, size = padded_items(schedule)
    return np.asarray(batched(items, *on_items(schedule, item_of, size, durations)))


@jax.jit
def windows(items, seconds, on, item, new_seconds, new_on):
    """Step times [B] where items `item` [R] (T for nobody) take `new_seconds` [B, R, S] and `new_on` [B, R, G]."""
    of, size, rows = figures(seconds, on), items.item.shape[0] - 1, len(item)
    streams = 1 + of.paid_s.shape[1]
    trace = no_trace(size, streams - 1, 0 if on is None else on.shape[-1])
    trace = jax.tree.map(lambda x: x.astype(seconds.dtype), trace)
    trace = traced(items, of, trace, jnp.int32(0), items.num_items - 1, jnp.bool_(True))
    is_task = items.item[item, 1] != 0
    numbers = jnp.arange(1, rows + 1, dtype=jnp.int32)
    nobody = jnp.zeros(size + 1, jnp.int32)
    task_of = nobody.at[jnp.where(is_task, item, size)].set(numbers).at[size].set(0)
    row_of = nobody.at[jnp.where(is_task, size, item)].set(numbers).at[size].set(0)
    new = jnp.moveaxis(new_seconds, 0, -1)  # [R, S, B]
    first_row = jnp.zeros((1, *new.shape[1:]), new.dtype)
    holding = (None, None)
    if on is not None:
        held = jnp.moveaxis(new_on, 0, -1)
        holding = (held, jnp.concatenate([jnp.zeros_like(held[:1]), held]))
    full = jnp.concatenate([first_row, new])[:, 1:]
    changed = Changed(task_of, row_of, new[:, 0], full, jnp.ones((rows + 1, new.shape[-1]), new.dtype), *holding)
    first, last = no_windows()
    for t in item:
        first, last = widened(items, (first, last), t, t < size)
    around = passing_by(items, trace, first, last)
    places = jnp.zeros((size + 1, new.shape[-1]), seconds.dtype)
    return window_times(items, of, trace, changed, first, last, around, places)[0]


ROWS = 8


def run_windows(schedule: Schedule, durations, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Step times [B] when up to ROWS tasks take the durations of each of [B, T] beside those of the first, and these [B, T]."""
    items, item_of, size = padded_items(schedule)
    tasks = rng.permutation(np.flatnonzero(~schedule.is_barrier))[: rng.integers(1, ROWS + 1)]
    mixed = np.repeat(durations[:1], len(durations), 0)
    mixed[:, tasks] = durations[:, tasks]
    seconds, on = on_items(schedule, item_of, size, mixed)
    rows = np.full(ROWS, size, np.int32)
    rows[: len(tasks)] = item_of[tasks]
    inside = np.minimum(rows, size - 1)
    return np.asarray(windows(items, seconds[0], on[0], rows, seconds[:, inside], on[:, inside])), mixed


random_cases = given(st.sampled_from(SHAPES), st.integers(0, 2**32 - 1))
a_hundred = settings(max_examples=100)


@a_hundred
@random_cases
def test_three_simulations_of_random_schedules_agree(shape, seed):
    schedule, durations = scheduled(np.random.default_rng(seed), shape)
    short = durations.astype(np.float32)
    events = [simulate(schedule, d).makespan_s for d in short]
    np.testing.assert_allclose(events, [makespan(schedule, d) for d in short], rtol=FLOAT64_ERROR)
    np.testing.assert_allclose(run_batched(schedule, short), events, rtol=FLOAT32_ERROR)


@a_hundred
@random_cases
def test_in_float64_they_agree_to_the_last_digits(shape, seed):
    schedule, durations = scheduled(np.random.default_rng(seed), shape)
    with jax.enable_x64(True):
        found = run_batched(schedule, durations)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, [simulate(schedule, d).makespan_s for d in durations], rtol=FLOAT64_ERROR)


@a_hundred
@random_cases
def test_windows_of_random_changes_take_the_time_of_the_whole(shape, seed):
    rng = np.random.default_rng(seed)
    schedule, durations = scheduled(rng, shape)
    found, mixed = run_windows(schedule, durations.astype(np.float32), rng)
    np.testing.assert_allclose(found, [simulate(schedule, d).makespan_s for d in mixed], rtol=FLOAT32_ERROR)


@pytest.mark.slow
@a_hundred
@random_cases
def test_in_float64_windows_agree_to_the_last_digits(shape, seed):
    rng = np.random.default_rng(seed)
    schedule, durations = scheduled(rng, shape)
    with jax.enable_x64(True):
        found, mixed = run_windows(schedule, durations, rng)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, [simulate(schedule, d).makespan_s for d in mixed], rtol=FLOAT64_ERROR)


def random_items(rng: np.random.Generator, size: int) -> Items:
    """Compute items, links and followers in one to three phases, as a schedule without pins has them."""
    kind = rng.choice([COMPUTE, SUM, RESOLVE, RESHARD, LINK], size, p=[0.3, 0.1, 0.1, 0.2, 0.3]).astype(np.int32)
    kind[rng.integers(0, size, rng.integers(0, 3))] = BARRIER
    predecessor = np.full(size, NONE, np.int32)
    start = 0
    for t in range(size):
        if kind[t] == BARRIER:
            start = t + 1
        waited_for = [p for p in range(start, t) if kind[p] in (COMPUTE, SUM, RESOLVE)]
        if kind[t] not in (BARRIER, COMPUTE) and waited_for:
            predecessor[t] = rng.choice(waited_for[-4:] if rng.random() < 0.6 else waited_for)
    none = np.zeros(0, np.int32)
    return Items(
        kind, np.zeros(size, np.int32), predecessor, np.isin(kind, (RESHARD, LINK)), kind == COMPUTE, none, none, none, none
    )  # fmt: skip


@pytest.mark.parametrize("overlap", (True, False))
@a_hundred
@given(seed=st.integers(0, 2**32 - 1))
def test_windows_without_pins_take_the_time_of_the_whole(overlap, seed):
    """Waits that the order on the compute stream implies, runs of compute items, and what crosses a window's ends."""
    rng, size, streams = np.random.default_rng(seed), 80, 3
    items = random_items(rng, size)
    found = records(items, overlap=overlap, size=size)
    seconds = np.exp(rng.uniform(-6, 2, (BATCH, size, streams))) * (rng.random((BATCH, size, 1)) < rng.choice([0.1, 0.5]))
    seconds[..., 0] = np.where(items.is_compute, np.exp(rng.uniform(-6, 2, (BATCH, size))), 0.0)
    seconds[:, items.is_compute, 1:] = 0.0
    seconds[:, np.isin(items.kind, (BARRIER, LINK))] = 0.0
    rows = rng.permutation(np.flatnonzero(~items.is_barrier))[:ROWS].astype(np.int32)
    rows[rng.random(len(rows)) < 0.3] = size
    mixed = np.repeat(seconds[:1], BATCH, 0)
    mixed[:, rows[rows < size]] = seconds[:, rows[rows < size]]
    with jax.enable_x64(True):
        whole = batched(found, mixed, None)
        new = seconds[:, np.minimum(rows, size - 1)]
        np.testing.assert_allclose(windows(found, mixed[0], None, rows, new, None), whole, rtol=FLOAT64_ERROR)


@a_hundred
@random_cases
def test_every_task_of_the_timeline_starts_as_early_as_it_may(shape, seed):
    schedule, durations = scheduled(np.random.default_rng(seed), shape)
    for d in durations:
        timeline = simulate(schedule, d)
        ends = longest_paths(schedule, d)
        assert sorted(e.task for e in timeline.entries) == np.flatnonzero(d > 0).tolist()
        assert list(timeline.entries) == sorted(timeline.entries, key=lambda e: (e.start_time, e.task))
        for entry in timeline.entries:
            assert entry.end_time == pytest.approx(ends[entry.task], rel=FLOAT64_ERROR)
            assert entry.end_time == entry.start_time + d[entry.task]


@a_hundred
@random_cases
def test_bounds_and_exclusive_streams(shape, seed):
    schedule, durations = scheduled(np.random.default_rng(seed), shape)
    for d in durations:
        timeline = simulate(schedule, d)
        busiest = (schedule.occupies * d[:, None]).sum(0).max()
        assert timeline.makespan_s >= busiest * (1 - FLOAT64_ERROR)
        assert timeline.makespan_s >= critical_path(schedule, d) * (1 - FLOAT64_ERROR)
        assert timeline.makespan_s <= d.sum() * (1 + FLOAT64_ERROR)
        assert_no_overlap(schedule, timeline)


def assert_no_overlap(schedule: Schedule, timeline):
    for s in range(schedule.occupies.shape[1]):
        mine = sorted((e for e in timeline.entries if schedule.occupies[e.task, s]), key=lambda e: e.task)
        for a, b in zip(mine, mine[1:], strict=False):  # in program order, one after the other
            assert b.start_time >= a.end_time


@a_hundred
@random_cases
def test_barriers_separate_phases(shape, seed):
    schedule, durations = scheduled(np.random.default_rng(seed), shape)
    barriers = np.flatnonzero(schedule.is_barrier)
    for d in durations[:2]:
        entries = simulate(schedule, d).entries
        for b in barriers:
            before = [e.end_time for e in entries if e.task < b]
            after = [e.start_time for e in entries if e.task > b]
            assert max(before, default=0.0) <= min(after, default=np.inf)
        # So that the phases add up.
        bounds = [0, *barriers, len(d)]
        phases = [(d * ((np.arange(len(d)) >= a) & (np.arange(len(d)) < b))) for a, b in zip(bounds, bounds[1:], strict=False)]
        total = sum(simulate(schedule, p).makespan_s for p in phases)
        assert total == pytest.approx(simulate(schedule, d).makespan_s, rel=FLOAT64_ERROR)


@a_hundred
@random_cases
def test_tasks_without_duration_neither_delay_nor_occupy(shape, seed):
    rng = np.random.default_rng(seed)
    schedule, durations = scheduled(rng, shape)
    d = durations[0]
    unused = (d == 0) & ~schedule.is_barrier
    expected = simulate(schedule, d)
    for value in (True, False):
        occupies = np.where(unused[:, None], value, schedule.occupies)
        changed = dataclasses.replace(schedule, occupies=occupies)
        assert simulate(changed, d) == simulate(schedule, d, occupies) == expected
        assert run_batched(changed, d[None].astype(np.float32)) == run_batched(schedule, d[None].astype(np.float32))


def test_streams_order_and_inputs_by_hand():
    # Two streams. 0 computes 3; 1 sends 2 from the start; 2 needs 1 and computes 1 after 0; 3 sends what 2 made, 4;
    # 4 computes beside it, 2; barrier; 6 computes 1. 7 is not needed: it takes no time and waits for nothing but 0.
    n = 8
    predecessors = np.full((n, 2), n, np.int32)
    predecessors[2, 0], predecessors[3, 0], predecessors[7, 0] = 1, 2, 0
    kind = np.array([COMPUTE, RESHARD, COMPUTE, RESHARD, COMPUTE, BARRIER, COMPUTE, RESHARD], np.int32)
    occupies = np.array([kind != RESHARD, (kind == RESHARD) | (kind == BARRIER)]).T
    schedule = Schedule(kind, np.zeros(n, np.int32), np.zeros(n, np.int32), predecessors, occupies, kind == BARRIER)
    durations = np.array([3.0, 2, 1, 4, 2, 0, 1, 0])
    timeline = simulate(schedule, durations)
    assert timeline.makespan_s == 9
    assert [tuple(e) for e in timeline.entries] == [(0, 0, 3), (1, 0, 2), (2, 3, 4), (3, 4, 8), (4, 4, 6), (6, 8, 9)]
    assert longest_paths(schedule, durations) == [3, 2, 4, 8, 6, 8, 9, 3]
    assert run_batched(schedule, np.float32(durations)[None]) == [9]
    # One stream for all: nothing overlaps.
    alone = dataclasses.replace(schedule, occupies=occupies | [True, False])
    assert simulate(alone, durations).makespan_s == run_batched(alone, np.float32(durations)[None])[0] == 13


def test_a_schedule_of_nothing_takes_no_time():
    none = np.zeros(0, np.int32)
    schedule = Schedule(none, none, none, np.zeros((0, 1), np.int32), np.zeros((0, 2), bool), none.astype(bool))
    assert simulate(schedule, np.zeros(0)) == (0.0, ())


@names
def test_models_take_the_same_time_in_every_simulation(model, topology):
    c = case(model, topology)
    schedule = c.simulator.schedule
    costs, times = c.figures([c.replicated(), c.data_parallel(), *c.strategies(seed=11, count=30)])
    durations = schedule.durations(costs.durations)
    for d, time in zip(durations, times, strict=True):
        timeline = simulate(schedule, d)
        assert timeline.makespan_s == pytest.approx(makespan(schedule, d), rel=FLOAT64_ERROR)
        assert time == pytest.approx(timeline.makespan_s, rel=FLOAT32_ERROR)
        assert_no_overlap(schedule, timeline)


@names
def test_what_a_schedule_holds(model, topology):
    c = case(model, topology)
    t, schedule = c.tables, c.simulator.schedule
    n = schedule.num_tasks
    assert all(p == n or p < i for i, row in enumerate(schedule.predecessors) for p in row)
    assert (schedule.occupies[schedule.is_barrier]).all() and (schedule.is_barrier == (schedule.kind == BARRIER)).all()
    assert schedule.is_barrier.sum() == (0 if c.graph.is_single_phase else 2)
    levels = t.links.num_levels
    counts = {k: int((schedule.kind == k).sum()) for k in (COMPUTE, SUM, RESOLVE, RESHARD)}
    assert counts == {
        COMPUTE: len(c.graph.tasks),
        SUM: levels * len(t.sum_task),
        RESOLVE: levels * int(t.may_be_partial.sum()),
        RESHARD: levels * len(t.edge_task),
    }
    # Every figure is scheduled once, and what is resharded for a task comes before it.
    position = {int(k): i for i, k in enumerate(schedule.source) if schedule.kind[i] == COMPUTE}
    assert list(position) == list(range(len(c.graph.tasks)))
    assert all(i < position.get(int(t.edge_task[e]), n) for i, e in enumerate(schedule.source) if schedule.kind[i] == RESHARD)
    for kind in (SUM, RESOLVE, RESHARD):
        rows = [(int(s), int(lv)) for s, lv, k in zip(schedule.source, schedule.level, schedule.kind, strict=True) if k == kind]
        assert len(set(rows)) == len(rows)


def test_durations_are_gathered_from_the_right_figures():
    c = case("mlp", "a100x64")
    t, schedule, levels = c.tables, c.simulator.schedule, c.tables.links.num_levels
    sizes = (t.num_tasks, (len(t.tensor_bytes), levels), (len(t.edge_task), levels), (len(t.sum_task), levels))
    rng = np.random.default_rng(0)
    one = Durations(*(rng.random(size) for size in sizes))
    found = schedule.durations(one)
    for d, kind, source, level in zip(found, schedule.kind, schedule.source, schedule.level, strict=True):
        if kind == COMPUTE:
            assert d == one.compute_s[source]
        elif kind == BARRIER:
            assert d == 0
        else:
            assert d == {SUM: one.sum_s, RESOLVE: one.resolve_s, RESHARD: one.reshard_s}[kind][source, level]
    batch = Durations(*(np.stack([x, 2 * x, 0 * x]) for x in one))
    np.testing.assert_array_equal(schedule.durations(batch), [found, 2 * found, 0 * found])
    np.testing.assert_allclose(schedule.durations(Durations(*map(jnp.asarray, batch))), schedule.durations(batch), rtol=1e-6)


def test_without_overlap_communication_occupies_the_compute_stream():
    beside, instead = (case_with("mlp", "a100x64", overlap=overlap) for overlap in (True, False))
    assert instead.simulator.schedule.occupies[:, 0].all()
    communicates = np.isin(beside.simulator.schedule.kind, (SUM, RESOLVE, RESHARD))
    assert not beside.simulator.schedule.occupies[communicates, 0].any()
    costs, times = case("mlp", "a100x64").figures(beside.strategies(seed=12, count=16))
    durations = beside.simulator.schedule.durations(costs.durations)
    gains = []
    for d, time in zip(durations, times, strict=True):
        alone = simulate(instead.simulator.schedule, d)
        assert alone.makespan_s == pytest.approx(d.sum(dtype=np.float64), rel=FLOAT64_ERROR)  # one after the other
        together = simulate(beside.simulator.schedule, d).makespan_s
        assert together == pytest.approx(time, rel=FLOAT32_ERROR)
        assert together <= alone.makespan_s
        gains.append(alone.makespan_s - together)
    assert max(gains) > 0


def test_simulator_reports_what_its_parts_say():
    c = case("mlp_of_sixes", "2x6")
    simulator = Simulator(c.tables)
    strategies = c.strategies(seed=13, count=20)
    costs, times = c.figures(strategies)
    scores = [simulator.step_times([s]) for s in strategies]
    np.testing.assert_allclose([s.step_time_s[0] for s in scores], times, rtol=FLOAT32_ERROR)
    np.testing.assert_allclose([s.memory_bytes[0] for s in scores], costs.memory_bytes[:, 3], rtol=1e-6)
    assert not any(s.violations[0] for s in scores)
    prediction = simulator.prediction(strategies[0])
    assert prediction.step_time_s == pytest.approx(times[0], rel=1e-5)
    assert prediction.memory_bytes_per_device == int(costs.memory_bytes[0, 3])
    assert list(prediction.memory_parts_bytes.values()) == [int(x) for x in costs.memory_bytes[0, :3]]
    assert list(prediction.bytes_by_collective.values()) == [int(x) for x in costs.bytes_by_collective[0]]
    assert prediction.feasible and prediction.usable_memory_bytes == c.topology.device.usable_memory_bytes
    assert simulator.timeline(strategies[0]).makespan_s == pytest.approx(times[0], rel=FLOAT32_ERROR)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["8x8", "a100x1024"])
def test_pins_on_many_devices(topology):
    """Their groups make reductions as large as XLA compiles none in a kernel."""
    graph, place = graph_with("mlp", batch=1024, width=1024), topology_of(topology)
    problem = PlanningProblem.make(graph, search_space(graph, factor_mesh(place), pins=True), place)
    rng = np.random.default_rng(0)
    strategies = [problem.space.random(rng) for _ in range(4)]
    found = problem.simulator.step_times(strategies).step_time_s
    assert found == pytest.approx([problem.simulator.timeline(s).makespan_s for s in strategies], rel=FLOAT32_ERROR)
    engine = Engine(problem)
    walker = engine.walk(rng, 20.0, engine.walker(strategies[0], found[0]), 2)
    now = engine.strategy(State(walker.at.base.axes, walker.at.base.storage))
    assert problem.evaluate([now])[0].cost == pytest.approx(float(walker.cost), rel=1e-5)


@pytest.mark.parametrize("model, topology, overlap", [("lm", "2x4", True), ("lm", "2x4", False), ("mlp", "a100x8", True)])
def test_no_step_takes_less_than_its_busiest_streams(model, topology, overlap):
    c = case_with(model, topology, overlap=overlap)
    strategies, schedule = [c.data_parallel(), *c.strategies(0, BATCH)], c.simulator.schedule
    found = c.simulator.in_detail(strategies)
    phase = np.cumsum(schedule.is_barrier) - schedule.is_barrier
    for q, strategy in enumerate(strategies):
        takes_s = schedule.durations(c.simulator.costs(strategy).durations)[:, None] * schedule.occupies
        busy_s = [takes_s[phase == f].sum(0) for f in range(phase.max() + 1)]
        own = [0, *range(1 - takes_s.shape[1], 0)]  # the cost program has more levels than the topology, which come first
        np.testing.assert_allclose(found.busy_s[:, own, q], busy_s, rtol=1e-5)
        assert found.busy_s[..., q].sum() == pytest.approx(np.sum(busy_s), rel=1e-5)
    least = least_s(found.busy_s)
    assert (least <= found.scores.step_time_s * (1 + 1e-5)).all() and (least > 0.2 * found.scores.step_time_s).any()
