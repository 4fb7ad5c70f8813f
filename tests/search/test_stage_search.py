"""Loads of stages against the SPMD simulator, and the joint search against everything there is to choose."""

import dataclasses
import importlib
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import family
from problems import MODELS, graph_of, graph_with, topology_of

from soapjax.costs.measured.interpolation import local_task
from soapjax.costs.measured.profile import Profile, installed_versions
from soapjax.costs.measured.profile_parts import Calibration, Device, Link, Measurement
from soapjax.errors import SoapjaxError
from soapjax.graph.condensing import prefix_crossing
from soapjax.graph.microbatch import micro_batch, sample_divisor
from soapjax.graph.passes.build import build_graph
from soapjax.graph.passes.phases import BACKWARD, FORWARD, UPDATE
from soapjax.graph.trace.tracing import trace
from soapjax.planning.pipelining.pipelines import whole_baselines
from soapjax.planning.pipelining.staging import plan_pipeline
from soapjax.planning.plan_files import recost
from soapjax.planning.profiling import in_stages
from soapjax.search.stages import condensed_loads, stage_problem
from soapjax.search.stages.choices import Choice
from soapjax.search.stages.condensed_loads import CondensedLoads
from soapjax.search.stages.grid import Grid
from soapjax.search.stages.inside_search import LEAST_GAIN, searched_inside
from soapjax.search.stages.joint_search import CHAINS, _Best, _price_starts, search_stages
from soapjax.search.stages.stage_figures import part_of
from soapjax.search.stages.stage_flows import crossing_bytes
from soapjax.search.stages.stage_loads import StageLoads, stage_of_operators
from soapjax.search.stages.stage_problem import StageProblem
from soapjax.simulate.simulator import Simulator
from soapjax.strategy.configs import Strategy
from soapjax.strategy.plan import Plan
from soapjax.topology import factor_mesh


@pytest.mark.parametrize("model", ["mlp", "lm", "resnet", "rnnlm", "lm_scan"])
def test_a_micro_batch_is_the_step_traced_at_its_size(model):
    whole, small = graph_of(model), graph_with(model, batch=MODELS[model][1]["batch"] // 4)
    found = micro_batch(whole, 4)
    assert found.operators == small.operators and found.tensors == small.tensors
    for a, b in zip(found.tasks, small.tasks, strict=True):
        assert (a.reads, a.writes, a.sums) == (b.reads, b.writes, b.sums)
        assert [w.dims for w in a.work] == [w.dims for w in b.work]
    # A sum over n numbers is n - 1 additions: those are not proportional.
    flops = [sum(w.flops for t in g.tasks if t.parameter < 0 for w in t.work) for g in (found, small)]
    assert flops[0] == pytest.approx(flops[1], rel=0.02)
    assert sample_divisor(whole) == 4 * sample_divisor(small)


@pytest.mark.parametrize("num", [2, 4, 8])
def test_a_share_of_the_samples_is_split_as_micro_batches_can(num):
    """Every second loss, returned, is as long as half of the batch: of a micro-batch, half of that."""

    def step(w, x):
        def losses(w):
            return jnp.square(x @ w)

        grad = jax.grad(lambda w: losses(w).mean())(w)
        return w - grad, losses(w)[::2]

    def of_batch(size):
        return build_graph(trace(step, np.ones(4, np.float32), np.ones((size, 4), np.float32)))[0]

    found, small = micro_batch(of_batch(16), num), of_batch(16 // num)
    assert [op.name for op in found.operators] == [op.name for op in small.operators]
    for mine, traced in zip(found.operators, small.operators, strict=True):
        divisors = {d.name: d.divisor for d in traced.dims}
        assert all(divisors.get(d.name, 1) % d.divisor == 0 for d in mine.dims)


@pytest.mark.parametrize("marks", [{"remat": True}, {"remat": "attention"}])
def test_what_is_computed_again_is_not_cut_off_from_what_reads_it(marks):
    """A stage would be sent it, or its readers' gradients would move to the stage before."""
    graph = graph_with("lm", layers=4, **marks)
    problem = StageProblem(graph, topology_of("2x4"))
    names = [graph.operators[n].name for n in problem.forward]
    blocks = [next(i for i, name in enumerate(names) if name.startswith(f"blk{k}/")) for k in range(4)]
    assert set(blocks) <= set(problem.cuts)
    made = {x.tensor: t for t in graph.tasks if t.phase == BACKWARD for x in t.writes}
    for k in problem.cuts[1:-1]:
        stage = stage_of_operators(graph, (0, k, len(names)), problem.forward)
        for task in graph.tasks:
            for x in task.reads if task.phase == BACKWARD and stage[task.operator] >= 0 else ():
                assert x.tensor not in made or stage[made[x.tensor].operator] >= stage[task.operator]


def test_micro_batches_that_do_not_divide_are_refused():
    with pytest.raises(SoapjaxError, match="choose one of 1, 2, 4, 8"):
        micro_batch(graph_of("lm"), 3)


@pytest.mark.parametrize("model, name", family([("lm", "2x4"), ("mlp", "cpu8"), ("lenet", "dgx1_v100x8")], slow=[("lm", "2x4")]))
def test_one_stage_takes_the_time_of_one_program(model, name):
    """Exactly: the same tasks by the same rules, with communication beside compute or not."""
    graph, machine = graph_of(model), topology_of(name)
    loads = StageLoads(graph, machine)
    choices = loads.fabric(0, 8, 1).choices
    assert choices[0].name == "data" and len(choices) > 3
    simulator = Simulator(loads.fabric(0, 8, 1).tables)
    times = simulator.step_times([c.strategy for c in choices]).step_time_s
    figures = simulator.figures([c.strategy for c in choices])
    named = whole_baselines(CondensedLoads(loads, prefix_crossing(graph, loads.forward)))
    assert named.keys() == {"data_parallel", "fsdp", "tensor_parallel"}
    for k, (inside, expected) in enumerate(zip(choices, times, strict=True)):
        load = loads.load((0, len(loads.forward)), 0, 8, 1, k)
        assert load.forward_s + load.backward_s + load.update_s == pytest.approx(float(expected), rel=1e-5)
        # So does the step without overlap, and the share of FLOPs that is split is the same.
        serial = loads.load_of((0, len(loads.forward)), 0, 8, 1, inside.figures, overlap=False)
        assert serial.forward_s + serial.backward_s + serial.update_s == pytest.approx(figures[k].without_overlap_s, rel=1e-5)
        flops, split = loads.split_flops((0, len(loads.forward)), 0, 8, 1, inside.strategy, inside.figures)
        assert split / flops == pytest.approx(figures[k].split_flops_share, abs=1e-5)
        # Memory is an upper bound, and no wild one.
        memory = float(simulator.costs(inside.strategy).memory_bytes[3])
        assert memory * (1 - 1e-6) <= load.state_bytes + load.gradient_bytes + load.working_bytes + load.batch_bytes <= 1.6 * memory


NUM = 4


def measured_in_micro_batches(graph):
    """A profile of every task at a quarter of the batch on one device, with seconds drawn at random."""
    rng, small, found = np.random.default_rng(0), micro_batch(graph, NUM), []
    for k, task in enumerate(small.tasks):
        local = local_task(small, k, [1] * max(1, len(small.operators[task.operator].dims)))
        found.append(
            Measurement(
                label="", structure=local.structure, kind=task.kind, dtype=task.dtype, reads=local.reads, writes=local.writes,
                elements=local.elements, flops=local.flops, moved_bytes=local.moved_bytes, seconds=10 ** rng.uniform(-4, -3),
            )
        )  # fmt: skip
    distinct = {m.identity: m for m in found}
    calibration = Calibration(compute_scale=2.0, network_scale=3.0, steps=(), residual=0.0, worst=0.0)
    profile = Profile(
        device=Device(name="A100-SXM4-80GB", platform="cuda"), versions=installed_versions(), operators=tuple(distinct.values()),
        links=(Link(level=topology_of("2x4").levels[0].name, bytes_per_s=6e9, latency_s=3e-5, median_error=0.0, points=()),),
        calibration=calibration,
    )  # fmt: skip
    return profile, [distinct[m.identity].seconds * t.trip_count for m, t in zip(found, small.tasks, strict=True)]


@pytest.mark.parametrize("model", ["mlp", "lm"])
def test_a_stage_takes_what_was_measured_of_its_micro_batch(model):
    graph, machine = graph_of(model), topology_of("2x4")
    profile, seconds = measured_in_micro_batches(graph)
    loads = StageLoads(graph, machine, profile)
    load = loads.load((0, len(loads.forward)), 0, 1, NUM, 0)
    spent = {FORWARD: 0.0, BACKWARD: 0.0, UPDATE: 0.0}
    for measured_s, task in zip(seconds, graph.tasks, strict=True):
        spent[task.phase] += 2.0 * measured_s
    device = machine.device
    sums_s = 2.0 * load.gradient_bytes / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
    assert load.forward_s == pytest.approx(spent[FORWARD], rel=1e-4)
    assert load.backward_s == pytest.approx(spent[BACKWARD] + sums_s, rel=1e-4)
    assert load.update_s == pytest.approx(spent[UPDATE] + sums_s, rel=1e-4)
    assert loads.topology.levels[0].achieved_bytes_per_s == pytest.approx(6e9 / 3)
    # What is measured for such stages is found again as tasks of the whole step.
    for request in in_stages(graph, machine, NUM):
        assert local_task(graph, request.task, request.degrees).identity == request.local.identity


def test_a_pipeline_plan_keeps_what_its_times_come_from():
    module, sizes = MODELS["mlp"]
    made = importlib.import_module(f"models.{module}").make(**sizes)
    profile, _ = measured_in_micro_batches(graph_of("mlp"))
    options = dict(pipeline="1f1b", topology=topology_of("2x4"), microbatches=NUM, stages=2, proposals=16)
    plan, _ = plan_pipeline(*made, profile=profile, **options)
    plain, _ = plan_pipeline(*made, **options)
    assert plan.profile is not None and plain.profile is None
    assert plan.prediction.step_time_s > 2 * plain.prediction.step_time_s
    again = recost(Plan.loads(plan.dumps()), trace(*made))
    assert again.prediction == plan.prediction and again.profile == plan.profile


def test_stages_share_out_the_work():
    graph, machine = graph_of("lm"), topology_of("2x4")
    loads = StageLoads(graph, machine)
    n = len(loads.forward)
    whole = loads.load((0, n), 0, 1, 1, 0)
    parts = [loads.load((a, b), 0, 1, 1, 0) for a, b in itertools.pairwise((0, n // 3, n // 2, n))]
    for field in ("forward_s", "backward_s", "update_s", "parameter_bytes", "state_bytes", "gradient_bytes"):
        assert sum(getattr(p, field) for p in parts) == pytest.approx(getattr(whole, field), rel=1e-5)
    for cut in range(1, n):
        stage = stage_of_operators(graph, (0, cut, n), loads.forward)
        assert prefix_crossing(graph, loads.forward)[cut] == pytest.approx(crossing_bytes(graph, stage)[0, 1][0])


@pytest.mark.parametrize("first, count, sizes", [(0, 8, [2, 4]), (4, 4, [4]), (2, 2, [2]), (3, 1, [1]), (0, 6, [6]), (3, 2, [2])])
def test_devices_of_a_stage_as_a_topology_of(first, count, sizes):
    machine = topology_of("2x4")
    part = part_of(machine, first, count)
    assert [level.size for level in part.levels] == sizes and factor_mesh(part).num_devices == count
    # What is no whole unit talks over the slowest link between its devices.
    crosses = first // 4 != (first + count - 1) // 4
    assert part.levels[0].name == (machine.levels[0].name if crosses else machine.levels[-1].name)


def every_choice(problem, stages):
    cuts = problem.cuts
    devices = problem.topology.num_devices
    for inner_cuts in itertools.combinations(cuts[1:-1], stages - 1):
        for counts in itertools.product(range(1, devices), repeat=stages):
            for num, schedule in itertools.product(problem.microbatches, problem.schedules):
                for inner in itertools.product(range(6), repeat=stages):
                    for again in itertools.product((False, True), repeat=stages):
                        choice = Choice(schedule, num, (0, *inner_cuts, cuts[-1]), counts, inner, again)
                        if sum(counts) <= devices and problem.is_valid(choice):
                            yield choice


def two_stage_problem(**options):
    machine = dataclasses.replace(topology_of("2x4"), levels=topology_of("2x4").levels[1:])
    machine = dataclasses.replace(machine, levels=(dataclasses.replace(machine.levels[0], size=2),))
    return StageProblem(graph_of("mlp"), machine, schedules=("gpipe", "1f1b"), num_stages=2, **options)


def test_the_search_finds_the_best_of_all_choices():
    problem = two_stage_problem()
    best = min((problem.price(c) for c in every_choice(problem, 2)), key=lambda p: p.cost)
    found = search_stages(problem, seed=1, num_proposals=600)
    assert found.best.cost == pytest.approx(best.cost, rel=1e-9)
    assert all(found.best.cost <= p.cost for p in found.baselines.values())
    again = search_stages(two_stage_problem(), seed=1, num_proposals=600)
    assert again.best.choice == found.best.choice


@pytest.mark.slow
def test_inside_the_stages_the_best_of_all_strategies_is_found():
    """Of two stages on two devices each, by enumeration; from data parallelism, and priced as the search prices it."""
    machine = dataclasses.replace(topology_of("2x4"), levels=topology_of("2x4").levels[1:])
    problem = StageProblem(graph_with("mlp", layers=1, width=512), machine, num_stages=2, num_microbatches=4)
    n = len(problem.forward)
    at = problem.price(Choice("1f1b", 4, (0, n // 2, n), (2, 2), (0, 0), (False, False)))
    space = problem.loads.fabric(0, 2, 4).space
    every = itertools.product(*(list(space.configs(k)) for k in range(space.graph.num_operators)))
    as_used = np.zeros(space.graph.num_operators, np.int8)
    strategies = [Strategy(np.array(axes, np.int8), as_used) for axes in every]
    assert len(strategies) > 100
    inner = problem.loads.fabric(0, 2, 4).offer("any", strategies)
    wanted = min(problem.price(dataclasses.replace(at.choice, inner=(i, i))).cost for i in inner)
    found = at
    for found in searched_inside(problem, np.random.default_rng(0), at):
        assert found.cost <= at.cost
    assert found.cost <= wanted * (1 + LEAST_GAIN) and wanted < (1 - LEAST_GAIN) * at.cost
    assert problem.price(found.choice) == found


def test_what_a_search_offers_is_no_baseline():
    problem = StageProblem(graph_of("mlp"), topology_of("cpu8"), num_stages=1, num_microbatches=1)
    before, space = whole_baselines(problem.loads), problem.loads.fabric(0, 8, 1).space
    rng = np.random.default_rng(0)
    problem.loads.fabric(0, 8, 1).offer("tensor/8, searched", [space.random(rng) for _ in range(50)])
    assert whole_baselines(problem.loads) == before


def test_what_does_not_fit_is_recomputed():
    """With memory for the best choice less a byte, another one is best, fits, and is slower."""
    free = search_stages(two_stage_problem(num_microbatches=8), num_proposals=200).best
    problem = two_stage_problem(num_microbatches=8)
    tight = [problem.price(c) for c in every_choice(problem, 2)]
    least = min(p.memory_bytes for p in tight)
    assert least < free.memory_bytes
    problem = two_stage_problem(num_microbatches=8)
    problem.usable_bytes = (least + free.memory_bytes) / 2
    found = search_stages(problem, num_proposals=400).best
    assert found.is_feasible and found.memory_bytes <= problem.usable_bytes
    assert found.timeline.step_time_s >= free.timeline.step_time_s


@pytest.mark.slow
def test_a_long_model_is_cut_at_the_joints_of_its_blocks_too(monkeypatch):
    """Of many places only the cheapest of each run are looked at; joints between blocks need not be among them."""
    monkeypatch.setattr(stage_problem, "MAX_BOUNDARIES", 9)
    monkeypatch.setattr(condensed_loads, "condense", lambda *_: None)
    problem = StageProblem(graph_with("lm", layers=8, batch=64), topology_of("2x4"), num_microbatches=8)
    assert set(problem.joints) - set(problem.cuts)
    choices = list(Grid(problem).choices())
    assert {c.num_stages for *_, c in choices} >= {1, 2, 4, 8}
    assert all(seconds > 0 for _, seconds, _ in choices)


@pytest.mark.parametrize("stages", [3, 5, 7])
def test_stages_that_do_not_divide_the_devices_leave_some_idle(stages):
    problem = StageProblem(graph_of("lm"), topology_of("cpu8"), num_stages=stages)
    starts = [c for *_, c in Grid(problem).choices()]
    assert starts and all(set(c.counts) == {8 // stages} for c in starts)
    assert search_stages(problem, num_proposals=10).best.is_feasible


@pytest.mark.parametrize(
    "batch, devices, stages, num, width",
    [(14, 7, 2, 2, 1), (14, 7, 2, None, 2), (12, 7, 2, None, 3), (10, 8, 2, None, 2), (9, 5, 4, 3, 1)],
)
def test_stages_are_as_wide_as_no_device_repeats_anothers_work(batch, devices, stages, num, width):
    """Of samples and widths that no number of devices beyond `width` divides: the other devices are idle."""
    graph = graph_with("mlp", batch=batch, width=13, features=11, classes=17)
    problem = StageProblem(graph, part_of(topology_of("cpu8"), 0, devices), num_stages=stages, num_microbatches=num)
    widths = {choice.counts for _, _, choice in Grid(problem).choices()}
    assert widths == {(width,) * stages}


def test_stages_of_parts_of_two_hosts_are_made_narrower():
    """Three stages on two hosts of three devices: the second of two devices each would be half of each host."""
    place = topology_of("2x4")
    six = dataclasses.replace(place, levels=(place.levels[0], dataclasses.replace(place.levels[1], size=3)))
    problem = StageProblem(graph_of("lm"), six, num_stages=3)
    assert {choice.counts for _, _, choice in Grid(problem).choices()} == {(1, 1, 1)}


def test_a_start_is_simulated_only_where_it_fits_or_none_does():
    free = two_stage_problem()
    search_stages(free, num_proposals=1)
    sizes = sorted(p.memory_bytes for p in free._priced.values())
    for c, p in free._priced.items():
        assert free.memory_bytes(c) == p.memory_bytes
    for usable_bytes, fits in ((sizes[len(sizes) // 2], True), (sizes[0] / 2, False)):
        problem, priced = two_stage_problem(), []
        problem.usable_bytes = usable_bytes
        simulated = problem.price
        problem.price = lambda c, priced=priced, simulated=simulated: priced.append(simulated(c)) or priced[-1]
        found = _Best()
        _price_starts(problem, found, math.inf)
        assert found.best.is_feasible == fits
        assert all(p.memory_bytes <= usable_bytes for p in priced) if fits else 0 < len(priced) <= 2 * CHAINS


def test_gpipe_is_planned_as_published():
    """Rematerialised always, and all micro-batches in flight; a partition no worse than that into equal numbers of operators."""
    problem = StageProblem(graph_of("lm"), topology_of("2x4"), schedules=("gpipe",), num_stages=4, always_rematerialise=True)
    found = search_stages(problem, num_proposals=50)
    assert all(found.best.choice.rematerialise) and found.best.choice.num_stages == 4
    assert found.best.timeline.in_flight == (found.best.choice.num_microbatches,) * 4
    pipeline = problem.pipeline(found.best.choice)
    names = [name for s in pipeline.stages for name in s.operators]
    assert len(names) == len(set(names))
    assert {problem.graph.operators[n].name for n in problem.forward} <= set(names)
    n = len(problem.forward)
    even = Choice("gpipe", 8, tuple(np.linspace(0, n, 5).astype(int).tolist()), (2,) * 4, (0,) * 4, (True,) * 4)
    assert found.best.cost <= problem.price(even).cost


def test_more_stages_than_operators_or_devices():
    with pytest.raises(SoapjaxError, match="the operators of the forward pass") as caught:
        StageProblem(graph_of("mlp"), topology_of("2x4"), num_stages=99)
    assert len(caught.value.problems) == 2


def test_what_interleaved_needs_is_said():
    problem = StageProblem(graph_of("lm"), topology_of("cpu8"), schedules=["interleaved"], num_stages=4, num_microbatches=2)
    with pytest.raises(SoapjaxError, match="4 stages and 2 micro-batches.*several groups.*a multiple of as many micro-batches"):
        search_stages(problem, num_proposals=1)


def test_a_loop_over_single_samples_has_no_batch_to_cut():
    def step(w, x):
        grad = jax.grad(lambda w: jax.lax.map(lambda a: ((a @ w) ** 2).sum(), x).mean())(w)
        return w - 0.1 * grad

    graph = build_graph(trace(step, jnp.ones((4, 4)), jnp.ones((8, 4))))[0]
    with pytest.raises(SoapjaxError, match="microbatches: got 2; expected a batch that can be cut.*batch_size"):
        micro_batch(graph, 2)


@pytest.mark.parametrize("priced", [0, 1, 3])
def test_ctrl_c_while_starts_are_priced_keeps_the_best_of_them(priced, monkeypatch):
    problem, price, costs = two_stage_problem(), StageProblem.price, []

    def interrupted(self, choice):
        if len(costs) == priced:
            raise KeyboardInterrupt
        found = price(self, choice)
        costs.append((not found.is_feasible, found.cost))
        return found

    monkeypatch.setattr(StageProblem, "price", interrupted)
    if not priced:
        with pytest.raises(KeyboardInterrupt):  # "cannot run" would be wrong
            search_stages(problem)
        return
    found = search_stages(problem)
    assert found.stopped_by == "interrupted" and found.num_proposals == 0
    assert (not found.best.is_feasible, found.best.cost) == min(costs)
