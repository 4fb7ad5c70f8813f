"""Pipelines as plan files: planned, and predicted anew.

A pipeline plan is a plan whose `pipeline` says which operators form a stage on which devices. The `axes` and specs of an operator
are those of its stage's own mesh (strategy/pipeline_plan.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from soapjax.costs.evaluate import Layouts
from soapjax.costs.measured.profile import Profile, carried, profile_of
from soapjax.costs.split_share import share_of
from soapjax.errors import Problem, SoapjaxError
from soapjax.graph.microbatch import sample_divisor
from soapjax.graph.operators import OperatorGraph
from soapjax.planning.stage_baselines import whole_baselines
from soapjax.planning.stage_sends import mean_sent_bytes, peak_sent_bytes, sends_among_replicas, sends_between, sends_of_stage
from soapjax.planning.stage_strategies import strategy_with
from soapjax.search.front import Front, FrontPoint
from soapjax.search.objective import LEAST_VIOLATING, TIME, Objective
from soapjax.search.stages.joint_search import search_stages
from soapjax.search.stages.pipedream import Memory, Workers, pipedream
from soapjax.search.stages.stage_figures import level_between
from soapjax.search.stages.stage_loads import StageLoads, stage_of_operators
from soapjax.search.stages.stage_problem import SYNCHRONOUS, Choice, Priced, StageProblem
from soapjax.simulate.pipeline import PipelineTimeline, StageLoad, Transfer, simulate_pipeline
from soapjax.simulate.simulator import Scores
from soapjax.strategy.pipeline import Pipeline, Stage
from soapjax.strategy.pipeline_plan import make_pipeline_plan
from soapjax.strategy.plan import (
    MeshPlan,
    ModelSource,
    Plan,
    Prediction,
    Provenance,
    SentPart,
    StrategyFigures,
)
from soapjax.strategy.plan_strategy import mesh_plan
from soapjax.strategy.schedules import SCHEDULES, kind_of
from soapjax.strategy.space import SearchSpace
from soapjax.strategy.strategy import Strategy
from soapjax.topology import DeviceTopology, FactorMesh

PIPELINES = ("auto", *(name for name in SCHEDULES if name != "own"))
NEAR = 0.02  # relative step time that few blocks of a deep model may be off
EXACT_SHARE = 0.3  # of the seconds, for pricing what was found on the whole graph
MOST_EXACT = 4  # pipelines that are priced on the whole graph, until one fits
MAX_ROUNDS = 64  # minibatches of one step that PipeDream's replicas share out, where no number was given


class Beaten(Exception):
    """The best pipeline found is slower than what it is compared with."""

    def __init__(self, schedule: str, figures: StrategyFigures):
        super().__init__(f"{schedule}: {figures.step_time_s:.3g} s")
        self.schedule, self.figures = schedule, figures


class OnMesh(NamedTuple):
    """What holds on the mesh of a stage."""

    space: SearchSpace
    strategy: Strategy
    layouts: Layouts

    def plan(self) -> MeshPlan:
        return mesh_plan(self.space, self.strategy, self.layouts.slots, self.layouts.home)


class StageTimes(NamedTuple):
    """A pipeline with its simulation."""

    pipeline: Pipeline
    timeline: PipelineTimeline
    inside: tuple[OnMesh, ...]  # of every stage
    usable_bytes: int
    sends: tuple[SentPart, ...]  # per step: of a program what each device of its stage sends, of a transfer all together
    without_overlap_s: float
    split_flops_share: float

    @property
    def is_feasible(self) -> bool:
        """Whether it fits the devices."""
        return max(self.timeline.memory_bytes) <= self.usable_bytes

    @property
    def peak_sent_bytes(self) -> float:
        return peak_sent_bytes(self.pipeline, self.sends)

    def scores(self) -> Scores:
        figures = self.timeline.step_time_s, max(self.timeline.memory_bytes), 0, self.peak_sent_bytes
        return Scores(*(np.array([x], np.float64) for x in figures))

    def rank(self, objective: Objective) -> tuple[bool, float, float]:
        """By this the best is the least, as in search/problem.py."""
        found = objective.standing(self.scores(), self.usable_bytes)
        return not found.is_feasible[0], float(found.excess[0]), float(found.cost[0])


class FoundPipeline(NamedTuple):
    times: StageTimes
    baselines: dict[str, float]
    notes: tuple[str, ...]
    num_proposals: int
    search_s: float
    stopped_by: str
    baseline_figures: dict[str, StrategyFigures] = {}
    front: tuple[FrontPoint, ...] = ()
    chosen: Choice | Pipeline | None = None  # as the front has it


def find_pipeline(
    graph: OperatorGraph, topology: DeviceTopology, *, schedule: str, num_stages: int | None = None,
    num_microbatches: int | None = None, seed: int = 0, proposals: int | None = None, seconds: float | None = None,
    progress: Callable[[int, float, float], None] | None = None, profile: Profile | None = None, objective: Objective = TIME,
    pareto: bool = False, slower_than_s: float = math.inf,
) -> FoundPipeline:  # fmt: skip
    """The best pipeline of a schedule, or ("auto") of all synchronous ones, by an objective; `pareto` keeps the front.

    Raises: Beaten where the best is slower than `slower_than_s` by more than NEAR; SoapjaxError where none is possible, or none
      fits: the stage that is too large, and by how much; KeyboardInterrupt where Ctrl-C came before one was found that fits.
    """
    if schedule not in PIPELINES:
        raise SoapjaxError(Problem("pipeline", repr(schedule), " or ".join(PIPELINES), "choose one of these"))
    if schedule != "auto" and not SCHEDULES[schedule].is_synchronous:
        begin = time.monotonic()
        front = Front(topology.device.usable_memory_bytes, lambda times: times.pipeline.model_dump_json())
        times = _pipedream(graph, topology, num_stages, num_microbatches, profile, objective, front)
        figures = whole_baselines(StageProblem(graph, topology, profile=profile).loads)
        baselines = {name: f.step_time_s for name, f in figures.items()}
        points = tuple(p._replace(plan=p.plan.pipeline) for p in front.points()) if pareto else ()
        done = 0, time.monotonic() - begin, "complete"
        found = FoundPipeline(times, baselines, (), *done, figures, points, times.pipeline)
    else:
        again = schedule != "auto" and SCHEDULES[schedule].is_rematerialised
        problem = StageProblem(
            graph, topology, schedules=SYNCHRONOUS if schedule == "auto" else (schedule,),
            num_stages=num_stages, num_microbatches=num_microbatches, always_rematerialise=again, profile=profile,
            objective=objective, keeps_front=pareto or not objective.is_time,
        )  # fmt: skip
        searched_s = None if seconds is None else (1 - EXACT_SHARE) * seconds
        result = search_stages(problem, seed=seed, num_proposals=proposals, seconds=searched_s, progress=progress)
        is_slower = objective.is_time and result.best.cost > (1 + NEAR) * slower_than_s
        if is_slower and result.stopped_by != "interrupted":
            raise Beaten(result.best.choice.schedule, problem.figures(result.best))
        figures = whole_baselines(problem.loads)
        baselines = {name: f.step_time_s for name, f in figures.items()}
        baselines |= {name: p.timeline.step_time_s for name, p in result.baselines.items()}
        notes = tuple(
            f"{name}: does not fit ({p.memory_bytes / 1e9:.3g} GB per device)"
            for name, p in result.baselines.items() if p.memory_bytes > problem.usable_bytes
        )  # fmt: skip
        points = () if problem.front is None else problem.front.points()
        seen = min((problem.price(p.plan) for p in points), key=lambda p: p.rank, default=result.best)
        priced, times = _as_it_runs(problem, [result.best, seen, *sorted(result.seen, key=lambda p: p.rank)])
        figures |= {name: problem.figures(p) for name, p in result.baselines.items()}
        done = result.num_proposals, result.search_s, result.stopped_by
        notes = (problem.sentence(priced.choice), *notes)
        found = FoundPipeline(times, baselines, notes, *done, figures, points if pareto else (), priced.choice)
    if not found.times.is_feasible:
        if found.stopped_by == "interrupted":  # a longer search might have found one that fits
            raise KeyboardInterrupt
        raise SoapjaxError(_does_not_fit(found.times, found.notes))
    if found.times.rank(objective)[0]:
        found = found._replace(notes=(*found.notes, LEAST_VIOLATING))
    return found


def _does_not_fit(times: StageTimes, notes: Sequence[str]) -> list[Problem]:
    usable, nearest = times.usable_bytes, f"the nearest pipeline, {notes[0]}: " if notes else ""
    return [
        Problem(
            f"{nearest}stage {i} ({stage.operators[0]} ... {stage.operators[-1]} on {len(stage.devices)} devices)",
            f"{size / 1e9:.3g} GB per device", f"at most {usable / 1e9:.3g} GB",
            "use more stages, more micro-batches or larger devices, or a schedule that holds fewer (1f1b, rematerialised)",
        )
        for i, (stage, size) in enumerate(zip(times.pipeline.stages, times.timeline.memory_bytes, strict=True)) if size > usable
    ]  # fmt: skip


def _as_it_runs(problem: StageProblem, found: Sequence[Priced]) -> tuple[Priced, StageTimes]:
    """The first of these that fits, or ranks best, where every stage of the whole graph has its own plan, as when it runs.

    The search prices a stage as if its plan held on all stages, and a deep model by few of its blocks.
    """
    priced = {p: _times_of(problem, p) for p in dict.fromkeys(found[:2])}
    for p in dict.fromkeys(found):
        if any(t.is_feasible for t in priced.values()) or len(priced) >= MOST_EXACT:
            break
        priced.setdefault(p, _times_of(problem, p))
    return min(priced.items(), key=lambda x: x[1].rank(problem.objective))


def _times_of(problem: StageProblem, priced: Priced) -> StageTimes:
    choice: Choice = priced.choice
    pipeline, loads = problem.pipeline(choice), problem.loads
    row_of = {op.name: n for n, op in enumerate(problem.graph.operators)}
    groups = [choice.group(i) for i in range(choice.num_stages)]
    inside = [loads.choices(first, count, choice.num_microbatches) for first, count, _ in groups]
    options = [loads.strategy(x[inner].strategy) for x, (*_, inner) in zip(inside, groups, strict=True)]
    others = [loads.strategy(x[0].strategy) for x in inside]  # of operators that no stage on such a mesh has
    strategies = {}
    for i, stage in enumerate(pipeline.stages):
        axes, storage = np.array(others[i].axes), np.array(others[i].storage)
        for other, chosen in zip(pipeline.stages, options, strict=True):
            if other.mesh == stage.mesh:
                rows = [row_of[name] for name in other.operators]
                axes[rows], storage[rows] = chosen.axes[rows], chosen.storage[rows]
        strategies[i] = Strategy(axes, storage)
    return _simulated(problem.exact, pipeline, choice.bounds, strategies)


def _pipedream(
    graph: OperatorGraph, topology: DeviceTopology, num_stages: int | None, num: int | None, profile: Profile | None,
    objective: Objective, front: Front,
) -> StageTimes:  # fmt: skip
    """PipeDream's plan: each minibatch a `num`-th of the batch, stages replicated; of several numbers the fastest that fits."""
    whole = sample_divisor(graph)
    numbers = [num] if num is not None else [n for n in range(1, min(whole, MAX_ROUNDS) + 1) if whole % n == 0]
    best: StageTimes | None = None
    problems: list[Problem] = []
    for n in numbers:
        problem = StageProblem(
            graph, topology, schedules=("pipedream",), num_stages=num_stages, num_microbatches=n, profile=profile
        )
        layers, marks = problem.layers(n)
        whole_load = problem.loads.load((0, len(problem.forward)), 0, 1, n, 0)
        copies = (whole_load.state_bytes + whole_load.gradient_bytes) / max(whole_load.parameter_bytes, 1.0) - 1
        try:
            found = pipedream(layers, problem.topology, memory=Memory(copies), num_stages=num_stages, chain=True, rounds=n)
        except SoapjaxError as e:
            problems += e.problems
            continue
        bounds = (0, *(marks[s.layers[-1] + 1] for s in found.stages))
        pipeline = _replicated_pipeline(problem, bounds, [s.devices for s in found.stages], n)
        times = _simulated(problem.exact, pipeline, bounds, {})
        front.offer(times.scores(), [times])
        if best is None or times.rank(objective) < best.rank(objective):
            best = times
    if best is None:
        raise SoapjaxError(problems[:3])
    return best


def _replicated_pipeline(problem: StageProblem, bounds: tuple[int, ...], devices: Sequence[tuple[int, ...]], num: int) -> Pipeline:
    stage = stage_of_operators(problem.graph, bounds, problem.forward)
    mesh = problem.loads.mesh(0, 1, num)
    stages = tuple(
        Stage(
            operators=tuple(problem.graph.operators[n].name for n in np.flatnonzero(stage == i)), devices=mine,
            mesh=dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)), replicas=len(mine),
        )
        for i, mine in enumerate(devices)
    )  # fmt: skip
    return Pipeline(schedule="pipedream", num_microbatches=num, stages=stages)


def _simulated(
    loads: StageLoads, pipeline: Pipeline, bounds: tuple[int, ...], strategies: Mapping[int, Strategy]
) -> StageTimes:  # fmt: skip
    """A pipeline of any stages; `strategies` by stage, data parallelism where there is none."""
    topology, num = loads.topology, pipeline.num_microbatches
    workers = Workers.of(topology)
    found: list[StageLoad] = []
    serial: list[StageLoad] = []  # without overlap
    inside, figures, sends, split = [], [], [], []
    shares = [(min(s.devices), len(s.devices) // s.replicas) for s in pipeline.stages]
    for i, (stage, (first, count)) in enumerate(zip(pipeline.stages, shares, strict=True)):
        strategy = strategies[i] if i in strategies else loads.choices(first, count, num)[0].strategy
        figures.append(loads.figures(first, count, num, strategy))
        where = ((bounds[i], bounds[i + 1]), first, count, num)
        load, load_alone = (loads.load_of(*where, figures[i], overlap=overlap) for overlap in (True, False))
        split.append(loads.split_flops(*where, strategy, figures[i]))
        if stage.replicas > 1:
            last = first + len(stage.devices) - 1
            level = level_between(topology, first, last)
            sync = load.gradient_bytes * workers.sync_s_per_byte(first, len(stage.devices), width=count)
            sync += 2 * (stage.replicas - 1) * topology.levels[level].latency_s
            load, load_alone = (x._replace(sync_s=sync, sync_level=level) for x in (load, load_alone))
        found.append(load)
        serial.append(load_alone)
        inside.append(OnMesh(loads.space(first, count, num), strategy, figures[i].layouts))
        once = loads.sends((bounds[i], bounds[i + 1]), first, count, num, strategy, figures[i])
        sends += sends_of_stage(pipeline, i, once)
        sends += sends_among_replicas(pipeline, i, load, len(loads.whole.tasks))
    crossing = loads.crossing(bounds, [c for _, c in shares], num, figures)
    sends += sends_between(len(loads.whole.tasks), crossing, num)
    transfers = loads.transfers(bounds, [f for f, _ in shares], [c for _, c in shares], num, figures)
    # Replicas of both sides may be anywhere on the stage's devices: the slowest link between any two.
    reach = [(min(s.devices), max(s.devices)) for s in pipeline.stages]
    for k, t in enumerate(transfers):
        ends = [*reach[t.source], *reach[t.target]]
        level = level_between(topology, min(ends), max(ends))
        if level != t.level:
            old, new = topology.levels[t.level], topology.levels[level]
            ratio = old.achieved_bytes_per_s / new.achieved_bytes_per_s
            seconds = ((s - old.latency_s) * ratio + new.latency_s if s else 0.0 for s in t.seconds)
            transfers[k] = Transfer(t.source, t.target, level, *seconds)
    timeline = simulate_pipeline(pipeline, found, transfers)
    without_overlap_s = simulate_pipeline(pipeline, serial, transfers, overlap=False).step_time_s
    share = share_of(*np.array(split).T)
    return StageTimes(
        pipeline, timeline, tuple(inside), topology.device.usable_memory_bytes, tuple(sends), without_overlap_s, share
    )


def pipeline_plan(
    graph: OperatorGraph, topology: DeviceTopology, times: StageTimes, *, model: ModelSource | None = None,
    provenance: Provenance = Provenance(), unroll: bool = False, profile: Profile | None = None,
) -> Plan:  # fmt: skip
    """The plan file of a pipeline, with what of `profile` its times come from."""
    plans: dict[FactorMesh, MeshPlan] = {}
    for planned in times.inside:
        if planned.space.mesh not in plans:
            plans[planned.space.mesh] = planned.plan()
    return make_pipeline_plan(
        graph, topology, times.pipeline, [plans[p.space.mesh] for p in times.inside], _prediction(times, topology.num_devices),
        model=model, provenance=provenance, unroll=unroll, profile=carried(profile, {t.structure for t in graph.tasks}),
    )  # fmt: skip


def _prediction(times: StageTimes, num_devices: int) -> Prediction:
    timeline = times.timeline
    return Prediction(
        step_time_s=float(f"{timeline.step_time_s:.6g}"),
        memory_bytes_per_device=int(max(timeline.memory_bytes)),
        usable_memory_bytes=times.usable_bytes,
        memory_parts_bytes={f"stage {i}": int(size) for i, size in enumerate(timeline.memory_bytes)},
        feasible=times.is_feasible,
        bytes_by_collective=mean_sent_bytes(times.pipeline, times.sends, num_devices),
        peak_sent_bytes=int(times.peak_sent_bytes),
        sends=times.sends,
        without_overlap_s=float(f"{times.without_overlap_s:.6g}"),
        split_flops_share=times.split_flops_share,
    )


def recost_pipeline(
    loaded: Plan, graph: OperatorGraph, topology: DeviceTopology, *, place: str = "plan"
) -> tuple[Plan, StageTimes]:  # fmt: skip
    """A pipeline plan with its prediction made anew, and the simulation.

    Raises: SoapjaxError naming stages that are no runs of operators, and axes, dims and storages that do not fit.
    """
    pipeline = loaded.pipeline
    profile = profile_of(loaded.profile, place=f"{place}: profile") if loaded.profile is not None else None
    loads = StageLoads(graph, topology, profile, sums_once=kind_of(pipeline).is_synchronous)
    loads.graph(pipeline.num_microbatches)
    bounds = _bounds(pipeline, graph, loads, place)
    if pipeline.stages and max(d for s in pipeline.stages for d in s.devices) >= topology.num_devices:
        expected = f"0 to {topology.num_devices - 1}"
        raise SoapjaxError(Problem(f"{place}: pipeline.stages", "a device that is not there", expected, "plan anew"))
    strategies = {}
    in_stages = {name for stage in pipeline.stages for name in stage.operators}
    for i, stage in enumerate(pipeline.stages):
        first, count = min(stage.devices), len(stage.devices) // stage.replicas
        space = loads.space(first, count, pipeline.num_microbatches)
        own, wanted = tuple(space.mesh.axis_names), tuple(stage.mesh)
        if (own, tuple(space.mesh.axis_sizes)) != (wanted, tuple(stage.mesh.values())):
            expected = str(dict(zip(own, space.mesh.axis_sizes, strict=True)))
            raise SoapjaxError(Problem(f"{place}: pipeline.stages.{i}.mesh", str(stage.mesh), expected, "restore it, or plan anew"))
        # Operators of stages on another mesh are data-parallel on this one.
        others = {name for other in pipeline.stages if other.mesh != stage.mesh for name in other.operators}
        of_update = {op.name for op in space.graph.operators} - in_stages
        given = {name: part for name, part in loaded.operators.items() if name not in others | of_update}
        strategies[i] = strategy_with(space, given, place=place)
    times = _simulated(loads, pipeline, bounds, strategies)
    made = pipeline_plan(
        graph, topology, times, model=loaded.model, provenance=loaded.provenance, unroll=loaded.unroll, profile=profile
    )
    return made, times


def _bounds(pipeline: Pipeline, graph: OperatorGraph, loads: StageLoads, place: str) -> tuple[int, ...]:
    """Where the stages cut the forward operators."""
    position = {graph.operators[n].name: k for k, n in enumerate(loads.forward)}
    problems, bounds = [], [0]
    for i, stage in enumerate(pipeline.stages):
        mine = sorted(position[name] for name in stage.operators if name in position)
        where = f"{place}: pipeline.stages.{i}.operators"
        if mine != list(range(bounds[-1], bounds[-1] + len(mine))) or not mine:
            at = graph.operators[loads.forward[min(bounds[-1], len(loads.forward) - 1)]].name
            expected = f"the operators from {at!r} on, without a gap"
            problems.append(Problem(where, ", ".join(stage.operators[:3]) or "none", expected, "restore it, or plan anew"))
            break
        bounds.append(bounds[-1] + len(mine))
    if not problems and bounds[-1] != len(loads.forward):
        left = graph.operators[loads.forward[bounds[-1]]].name
        remedy = "restore it, or plan anew"
        problems.append(Problem(f"{place}: pipeline.stages", f"{left!r} in no stage", "every operator in one", remedy))
    if problems:
        raise SoapjaxError(problems)
    return tuple(bounds)


def provenance_of(found: FoundPipeline, base: Provenance, *, planner: str, seed: int) -> Provenance:
    """Where a pipeline plan came from."""
    return base.model_copy(
        update=dict(
            planner=planner, seed=seed, num_proposals=found.num_proposals, search_s=round(found.search_s, 3),
            baselines=found.baselines, baseline_figures=found.baseline_figures, notes=found.notes,
        )
    )  # fmt: skip
