"""The orders of the event simulation, and the delta simulation: Algorithm 2 equals Algorithm 1 after every change."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import PROBLEMS, case, graph_of, topology_of
from schedules import SHAPES, list_scheduler, random_durations, random_schedule, random_streams, two_queues

from soapjax.errors import SoapjaxError
from soapjax.search.experts.placement import placed
from soapjax.search.problem import PlanningProblem
from soapjax.simulate.event import ORDERS, occupied_streams, ordered, run, simulate, task_graph
from soapjax.simulate.event_delta import DeltaSimulation
from soapjax.simulate.schedule import BARRIER, COMPUTE, RESHARD, RESOLVE, Schedule
from soapjax.strategy.space import search_space
from soapjax.topology import factor_mesh

random_cases = given(st.sampled_from(SHAPES), st.integers(0, 2**32 - 1), st.booleans())
a_hundred = settings(max_examples=100)
orders = pytest.mark.parametrize("order", ORDERS)
MODELS = [p for p in PROBLEMS if p[0] in ("mlp_of_sixes", "lenet")]


def random_problem(seed: int, shape, whole: bool) -> tuple[np.random.Generator, Schedule, np.ndarray]:
    rng = np.random.default_rng(seed)
    schedule = random_schedule(rng, shape)
    return rng, schedule, random_durations(rng, schedule, np.arange(schedule.num_tasks), whole=whole)


def times_of(schedule: Schedule, durations, order):
    schedule = ordered(schedule, order)
    return run(task_graph(schedule, order), durations, occupied_streams(schedule, durations, schedule.occupies))


def replaced(array: np.ndarray, rows: np.ndarray, values: np.ndarray | None) -> np.ndarray:
    array = array.copy()
    if values is not None:
        array[rows] = values
    return array


def by_hand() -> tuple[Schedule, np.ndarray]:
    # Two streams. 0 computes 3. 1 sends 4 of what 0 made, 2 sends 1 from the start. 3 computes 1 once 2 is there, 4 computes 2
    # once 1 is there, 5 computes 5 at any time.
    n = 6
    predecessors = np.full((n, 1), n, np.int32)
    predecessors[[1, 3, 4], 0] = 0, 2, 1
    kind = np.array([COMPUTE, RESHARD, RESHARD, COMPUTE, COMPUTE, COMPUTE], np.int32)
    occupies = np.array([kind == COMPUTE, kind == RESHARD]).T
    none = np.zeros(n, np.int32)
    return Schedule(kind, none, none, predecessors, occupies, none.astype(bool)), np.array([3.0, 4, 1, 1, 2, 5])


def test_the_two_orders_by_hand():
    schedule, durations = by_hand()
    static = simulate(schedule, durations)
    assert [tuple(e) for e in static.entries] == [(0, 0, 3), (1, 3, 7), (2, 7, 8), (3, 8, 9), (4, 9, 11), (5, 11, 16)]
    fifo = simulate(schedule, durations, order="fifo")
    assert [tuple(e) for e in fifo.entries] == [(0, 0, 3), (2, 0, 1), (1, 3, 7), (5, 3, 8), (3, 8, 9), (4, 9, 11)]
    assert static.makespan_s == 16 and fifo.makespan_s == 11
    # A task of both streams is ready at 0, behind 0 and 2: 1 and 5 do not overtake it, although 5's stream idles from 0 to 1.
    both = dataclasses.replace(schedule, occupies=schedule.occupies | (np.arange(6) == 4)[:, None])
    both.predecessors[[1, 4], 0] = 2, 6
    changed = simulate(both, np.array([0.0, 4, 1, 0, 2, 5]), order="fifo")
    assert [tuple(e) for e in changed.entries] == [(2, 0, 1), (4, 1, 3), (1, 3, 7), (5, 3, 8)]


def test_an_unknown_order_names_the_known_ones():
    schedule, durations = by_hand()
    with pytest.raises(SoapjaxError, match="'lifo'.*'static' or 'fifo'"):
        simulate(schedule, durations, order="lifo")
    with pytest.raises(SoapjaxError, match="'static' or 'fifo'"):
        DeltaSimulation(schedule, durations, order="lifo")


@a_hundred
@random_cases
def test_fifo_is_what_stepping_through_time_gives(shape, seed, _):
    _, schedule, durations = random_problem(seed, shape, whole=True)
    starts = list_scheduler(schedule, durations)
    found = simulate(schedule, durations, order="fifo")
    assert {e.task: e.start_time for e in found.entries} == {t: s for t, s in enumerate(starts) if s is not None}


@a_hundred
@random_cases
def test_fifo_keeps_streams_inputs_and_barriers_apart_and_lets_nobody_wait_in_vain(shape, seed, whole):
    _, schedule, durations = random_problem(seed, shape, whole)
    times = times_of(schedule, durations, "fifo")
    ready, start, end = map(np.array, times)
    n = schedule.num_tasks
    takes_time = durations > 0
    for t, row in enumerate(schedule.predecessors):
        assert all(end[p] <= ready[t] for p in row if p < n)
        assert end[t] == start[t] + durations[t]
    for b in np.flatnonzero(schedule.is_barrier):
        assert end[:b].max(initial=0.0) <= start[b] <= start[b + 1 :].min(initial=np.inf)
    ends_before: list[list[float]] = [[0.0] for _ in range(n)]  # of the tasks right before, one per stream
    for s in range(schedule.occupies.shape[1]):
        mine = sorted(np.flatnonzero(schedule.occupies[:, s] & takes_time), key=lambda t: (start[t], t))
        for a, b in zip(mine, mine[1:], strict=False):
            assert end[a] <= start[b]
            assert (ready[a], a) < (ready[b], b)
            ends_before[b].append(end[a])
    for t in np.flatnonzero(takes_time):
        assert start[t] == max(ready[t], *ends_before[t])
    unused = ~takes_time & ~schedule.is_barrier
    np.testing.assert_array_equal(end[unused], ready[unused])


@a_hundred
@random_cases
def test_fifo_is_static_of_the_program_in_the_order_of_fifo(shape, seed, whole):
    _, schedule, durations = random_problem(seed, shape, whole)
    n = schedule.num_tasks
    graph, fifo = task_graph(schedule, "fifo"), times_of(schedule, durations, "fifo")
    program = [place[-1] for place in sorted(graph.place(t, ready) for t, ready in enumerate(fifo.ready_s))]
    position = np.append(np.argsort(program), n)  # of a task in the new program
    fields = {f.name: getattr(schedule, f.name)[program] for f in dataclasses.fields(schedule)}
    reordered = Schedule(**(fields | {"predecessors": position[schedule.predecessors[program]]}))
    static = simulate(reordered, durations[program])
    found = simulate(schedule, durations, order="fifo")
    assert {(program[e.task], *e[1:]) for e in static.entries} == set(found.entries)
    assert static.makespan_s == found.makespan_s


@a_hundred
@random_cases
def test_trinity_is_algorithm_2_of_its_paper(shape, seed, whole):
    """Two queues to a device, first in, first out; nothing waits for a barrier."""
    rng, schedule, durations = random_problem(seed, shape, whole)
    queue_of = rng.integers(0, 4, schedule.num_tasks)
    occupies = (queue_of[:, None] == np.arange(4)) & ~schedule.is_barrier[:, None]
    found = simulate(schedule, durations, occupies, order="trinity")
    assert {e.task: (e.start_time, e.end_time) for e in found.entries} == two_queues(schedule, durations, queue_of)


def test_a_placed_step_in_the_queues_of_trinity():
    """Against its Algorithm 2, told only who computes what, and who has what is sent."""
    graph, topology = graph_of("rnnlm"), topology_of("2x2")
    problem = PlanningProblem.make(graph, search_space(graph, factor_mesh(topology), pins=True), topology)
    simulator, device = problem.simulator, np.random.default_rng(0).integers(0, 4, graph.num_operators)
    strategy = placed(problem, device)
    costs, schedule = simulator.costs(strategy), simulator.schedule
    writer = {a.tensor: t.operator for t in graph.tasks for a in t.writes}
    queue_of = np.full(schedule.num_tasks, -1)
    for t, (kind, source) in enumerate(zip(schedule.kind, schedule.source, strict=True)):
        if kind == COMPUTE:
            queue_of[t] = device[graph.tasks[source].operator]
        elif kind == RESHARD:
            tensor = int(simulator.tables.edge_tensor[source])
            stored = np.flatnonzero(costs.holders.home[tensor])  # of what no task makes: arguments of the step
            queue_of[t] = 4 + (device[writer[tensor]] if tensor in writer else int(stored[0]))
        elif kind == RESOLVE:  # a gradient's summand, to where the parameter is
            queue_of[t] = 4 + device[writer[int(source)]]
    durations = schedule.durations(costs.durations)
    assert (queue_of[durations > 0] >= 0).all(), "on single devices there are no sums in the middle of operators"
    found = simulator.timeline(strategy, order="trinity")
    assert {e.task: (e.start_time, e.end_time) for e in found.entries} == two_queues(schedule, durations, queue_of)
    assert found.makespan_s != simulator.timeline(strategy).makespan_s


@orders
@a_hundred
@random_cases
def test_delta_equals_full_after_every_change_and_undo(order, shape, seed, whole):
    rng, schedule, durations = random_problem(seed, shape, whole)
    n = schedule.num_tasks
    simulation = DeltaSimulation(schedule, durations, schedule.occupies, order=order)
    timelines = [simulate(schedule, durations, schedule.occupies, order=order)]  # what each undo goes back to
    assert simulation.timeline() == timelines[0]
    for _ in range(15):
        if len(timelines) > 1 and rng.random() < 0.4:
            simulation.undo()
            timelines.pop()
        elif rng.random() < 0.1:
            simulation.keep()
            del timelines[:-1]
        else:
            tasks = rng.choice(n, rng.integers(0, min(n, 6) + 1), replace=False)
            new_durations = random_durations(rng, schedule, tasks, whole=whole) if rng.random() < 0.8 else None
            new_streams = random_streams(rng, schedule, tasks, 0.4) if rng.random() < 0.5 else None
            wanted = replaced(simulation.durations, tasks, new_durations), replaced(simulation.occupies, tasks, new_streams)
            if rng.random() < 0.5:
                found = simulation.change(tasks, durations=new_durations, occupies=new_streams)
            else:
                found = simulation.change_to(*wanted)
            assert found.num_retimed <= n
            timelines.append(simulate(schedule, *wanted, order=order))
            assert found.makespan_s == timelines[-1].makespan_s
        assert simulation.timeline() == timelines[-1]
        assert simulation.makespan_s == timelines[-1].makespan_s


@orders
@a_hundred
@random_cases
def test_many_small_changes_stay_exact(order, shape, seed, whole):
    rng, schedule, durations = random_problem(seed, shape, whole)
    n = schedule.num_tasks
    simulation = DeltaSimulation(schedule, durations, schedule.occupies, order=order)
    for _ in range(40):
        task = rng.integers(0, n, 1)
        nudged = simulation.durations[task] * rng.choice([0.999, 1.001])
        simulation.change(task, durations=nudged if rng.random() < 0.5 else random_durations(rng, schedule, task, whole=whole))
    assert simulation.timeline() == simulate(schedule, simulation.durations, schedule.occupies, order=order)
    simulation.change_to(durations)
    assert simulation.timeline() == simulate(schedule, durations, schedule.occupies, order=order)
    for _ in range(41):
        simulation.undo()
    assert simulation.timeline() == simulate(schedule, durations, schedule.occupies, order=order)


@orders
@settings(max_examples=50)
@random_cases
def test_only_what_moves_is_retimed(order, shape, seed, whole):
    rng, schedule, durations = random_problem(seed, shape, whole)
    n = schedule.num_tasks
    simulation = DeltaSimulation(schedule, durations, schedule.occupies, order=order)
    every = np.arange(n)
    assert simulation.change(every, durations=durations, occupies=schedule.occupies).num_retimed == 0
    assert simulation.change_to(durations).num_retimed == 0
    before = times_of(schedule, durations, order)
    task = rng.integers(0, n)
    longer = durations + (every == task) * ~schedule.is_barrier
    found = simulation.change_to(longer)
    after = times_of(schedule, longer, order)
    moved = [before.start_s[t] != after.start_s[t] or before.end_s[t] != after.end_s[t] for t in every]
    graph = task_graph(schedule, order)
    later = [t for t in every if graph.place(t, after.ready_s[t]) >= graph.place(task, before.ready_s[task])]
    assert sum(moved) <= found.num_retimed <= len(later)
    if order == "static" and task == n - 1:
        assert found.num_retimed == (not schedule.is_barrier[task])


def test_a_barrier_stays_one_whatever_streams_it_is_given():
    none = np.zeros(3, np.int32)
    kind = np.array([COMPUTE, BARRIER, COMPUTE], np.int32)
    occupies = np.array([[1, 0], [1, 1], [0, 1]], bool)
    schedule = Schedule(kind, none, none, np.full((3, 1), 3, np.int32), occupies, kind == BARRIER)
    for order in ("static", "fifo"):  # Trinity's knows none
        simulation = DeltaSimulation(schedule, [2.0, 0.0, 1.0], order=order)
        assert simulation.change([1], occupies=[[False, False]]) == (3.0, 0)
        assert simulation.timeline() == simulate(schedule, [2.0, 0.0, 1.0], simulation.occupies, order=order)


@orders
def test_a_schedule_of_nothing_takes_no_time(order):
    none = np.zeros(0, np.int32)
    schedule = Schedule(none, none, none, np.zeros((0, 1), np.int32), np.zeros((0, 2), bool), none.astype(bool))
    simulation = DeltaSimulation(schedule, [], order=order)
    assert simulate(schedule, [], order=order) == simulation.timeline() == (0.0, ())
    assert simulation.change([]) == (0.0, 0)


@pytest.mark.parametrize("model, topology", MODELS)
def test_models_after_changes_of_one_operator(model, topology):
    c = case(model, topology)
    schedule = c.simulator.schedule
    rng = np.random.default_rng(14)
    base, proposals = c.data_parallel(), []
    for strategy in c.strategies(seed=15, count=31):
        n = rng.integers(c.graph.num_operators)
        proposal = dataclasses.replace(base, axes=base.axes.copy(), storage=base.storage.copy())
        proposal.axes[n], proposal.storage[n] = strategy.axes[n], strategy.storage[n]
        proposals.append(proposal)
        base = proposal if rng.random() < 0.5 else base
    start, *found = schedule.durations(c.figures([c.data_parallel(), *proposals])[0].durations).astype(np.float64)
    for order in ORDERS:
        simulation = DeltaSimulation(schedule, start, order=order)
        for d in found:
            simulation.change_to(d)
            assert simulation.timeline() == simulate(schedule, d, order=order)
            if rng.random() < 0.5:
                simulation.undo()
                assert simulation.timeline() == simulate(schedule, simulation.durations, order=order)


def test_pins_move_operators_between_devices():
    """Four devices with streams of their own: an operator computes on all of them, on half of them, or on one."""
    c = case("lenet", "dgx1_v100x8")
    schedule = c.simulator.schedule
    durations = schedule.durations(c.figures([c.data_parallel()])[0].durations)[0].astype(np.float64)
    everywhere = np.tile(schedule.occupies, (1, 4))
    computes = np.flatnonzero(schedule.kind == COMPUTE)
    of_operator = [computes[np.isin(schedule.source[computes], op.tasks)] for op in c.graph.operators]
    for order in ORDERS:
        simulation = DeltaSimulation(schedule, durations, everywhere, order=order)
        rng = np.random.default_rng(16)
        times = set()
        for _ in range(40):
            tasks = of_operator[rng.integers(len(of_operator))]
            devices = rng.choice([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1]]).astype(bool)
            pinned = everywhere[tasks] & np.repeat(devices, schedule.occupies.shape[1])
            found = simulation.change(tasks, durations=simulation.durations[tasks] * rng.choice([0.5, 1.0, 2.0]), occupies=pinned)
            assert simulation.timeline() == simulate(schedule, simulation.durations, simulation.occupies, order=order)
            times.add(found.makespan_s)
            if rng.random() < 0.3:
                simulation.undo()
        assert len(times) > 10
