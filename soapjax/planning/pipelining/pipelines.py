"""The best pipeline of a schedule: searched, and priced on the whole graph as it runs; PipeDream's by its dynamic program. And what
it is compared with beside other pipelines."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from soapjax.costs.split_share import share_of
from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.streams.stage_programs import MicroGraph
from soapjax.graph.microbatch import sample_divisor
from soapjax.graph.operators import OperatorGraph
from soapjax.planning.pipelining.stage_times import StageTimes, simulated_stages
from soapjax.planning.request import Understood
from soapjax.search.front import Front, FrontPoint
from soapjax.search.objective import LEAST_VIOLATING
from soapjax.search.stages.choices import Choice, Priced
from soapjax.search.stages.condensed_loads import CondensedLoads
from soapjax.search.stages.joint_search import search_stages
from soapjax.search.stages.pipedream_stages import Memory, pipedream
from soapjax.search.stages.stage_figures import expert_of
from soapjax.search.stages.stage_loads import stage_of_operators
from soapjax.search.stages.stage_problem import SYNCHRONOUS, StageProblem
from soapjax.strategy.layout import Spec
from soapjax.strategy.pipeline import Pipeline, Stage
from soapjax.strategy.plan import Provenance, StrategyFigures
from soapjax.strategy.schedules import SCHEDULES
from soapjax.topology import DeviceTopology

NOT_EVEN = (
    "stages have unequal numbers of a loop's layers: its stacked arrays lie on the first, and rows go to and fro in every step"
)
NEAR = 0.02  # relative step time that few blocks of a deep model may be off
EXACT_SHARE = 0.3  # of the seconds, for pricing what was found on the whole graph
FIRST_EXACT, MOST_EXACT = 3, 4  # pipelines that are priced on the whole graph; and until one fits
MAX_ROUNDS = 64  # minibatches of one step that PipeDream's replicas share out, where no number was given


class Beaten(Exception):
    """The best pipeline found is slower than what it is compared with; `is_bound` as in `FoundPipeline`."""

    def __init__(self, schedule: str, figures: StrategyFigures, *, is_bound: bool = False):
        super().__init__(f"{schedule}: {figures.step_time_s:.3g} s")
        self.schedule, self.figures, self.is_bound = schedule, figures, is_bound


class NoneFits(SoapjaxError):
    """The nearest pipeline lacks memory."""


class FoundPipeline(NamedTuple):
    graph: OperatorGraph
    times: StageTimes
    baselines: dict[str, float]
    notes: tuple[str, ...]
    num_proposals: int
    search_s: float
    stopped_by: str
    baseline_figures: dict[str, StrategyFigures] = {}
    front: tuple[FrontPoint, ...] = ()
    chosen: Choice | Pipeline | None = None  # as the front has it
    is_bound: bool = False  # by memory: keeping more for the backward pass would be faster
    of_micro: MicroGraph | None = None  # of the step with one micro-batch, where it was traced to see that it will run


def find_pipeline(
    graph: OperatorGraph, topology: DeviceTopology, *, asked: Understood, proposals: int | None = None,
    seconds: float | None = None, slower_than_s: float = math.inf, share_if_bound: float = 1.0,
    fixed: Mapping[str, Spec] | None = None,
) -> FoundPipeline:  # fmt: skip
    """The best pipeline of the schedule that is asked for, or ("auto") of all synchronous ones.

    Args:
      topology: that which was asked for, or with less memory.
      proposals, seconds: of this search.
      share_if_bound: of the seconds, where memory binds (joint_search.py).
      fixed: as for `StageProblem`.
    Raises: Beaten where the best is slower than `slower_than_s` by more than NEAR; SoapjaxError where none is possible, or none
      fits: the stage that is too large, and by how much; KeyboardInterrupt where Ctrl-C came before one was found that fits.
    """
    schedule, objective = asked.pipeline, asked.objective
    if schedule != "auto" and not SCHEDULES[schedule].is_synchronous:
        found = _found_pipedream(graph, topology, asked)
    else:
        until = math.inf if seconds is None else time.monotonic() + seconds
        again = schedule != "auto" and SCHEDULES[schedule].is_rematerialised
        problem = StageProblem(
            graph, topology, schedules=SYNCHRONOUS if schedule == "auto" else (schedule,),
            num_stages=asked.num_stages, num_microbatches=asked.num_microbatches, always_rematerialise=again,
            profile=asked.profile, objective=objective, keeps_front=asked.pareto or not objective.is_time, expert=asked.expert,
            fixed=fixed,
        )  # fmt: skip
        searched_s = None if seconds is None else (1 - EXACT_SHARE) * seconds
        result = search_stages(
            problem, seed=asked.seed, num_proposals=proposals, seconds=searched_s, progress=asked.progress,
            share_if_bound=share_if_bound,
        )  # fmt: skip
        is_slower = objective.is_time and result.best.cost > (1 + NEAR) * slower_than_s
        if is_slower and result.stopped_by != "interrupted":
            raise Beaten(result.best.choice.schedule, problem.figures(result.best), is_bound=result.is_bound)
        figures = whole_baselines(problem.loads)
        baselines = {name: f.step_time_s for name, f in figures.items()}
        baselines |= {name: p.timeline.step_time_s for name, p in result.baselines.items()}
        notes = tuple(
            f"{name}: does not fit ({p.memory_bytes / 1e9:.3g} GB per device)"
            for name, p in result.baselines.items() if p.memory_bytes > problem.usable_bytes
        )  # fmt: skip
        points = () if problem.front is None else problem.front.points()
        seen = min((problem.price(p.plan) for p in points), key=lambda p: p.rank, default=result.best)
        priced, times = _as_it_runs(problem, [result.best, seen, *result.others], until)
        # Rows of a report: a deep pipeline takes seconds, which are not taken where they are over.
        figures |= {name: problem.figures(p) for name, p in result.baselines.items() if time.monotonic() <= until}
        done = result.num_proposals, result.search_s, result.stopped_by
        if not problem.is_even(priced.choice):
            notes = (NOT_EVEN, *notes)
        notes = (problem.sentence(priced.choice), *notes)
        front = points if asked.pareto else ()
        found = FoundPipeline(graph, times, baselines, notes, *done, figures, front, priced.choice, result.is_bound)
    if not found.times.is_feasible:
        if found.stopped_by == "interrupted":  # a longer search might have found one that fits
            raise KeyboardInterrupt
        raise NoneFits(_does_not_fit(found.times, found.notes))
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


def _as_it_runs(problem: StageProblem, found: Sequence[Priced], until: float) -> tuple[Priced, StageTimes]:
    """The first of these that fits, or ranks best, where every stage of the whole graph has its own plan, as when it runs.

    The search prices a stage as if its plan held on all stages, and a deep model by few of its blocks. Once one fits, no other is
    priced that would not be ready by `until` (of `time.monotonic`).
    """
    priced: dict[Priced, StageTimes] = {}
    took_s = 0.0
    for p in dict.fromkeys(found):
        fits, begin = any(t.is_feasible for t in priced.values()), time.monotonic()
        if fits and (p not in found[:FIRST_EXACT] or begin + took_s > until) or len(priced) >= MOST_EXACT:
            break
        priced[p] = times_as_it_runs(problem, p)
        took_s = time.monotonic() - begin
    return min(priced.items(), key=lambda x: x[1].rank(problem.objective))


def times_as_it_runs(problem: StageProblem, priced: Priced) -> StageTimes:
    """What a choice takes on the whole graph, every stage with a plan of its own."""
    choice: Choice = priced.choice
    pipeline, loads = problem.pipeline(choice), problem.loads
    row_of = {op.name: n for n, op in enumerate(problem.graph.operators)}
    groups = [choice.group(i) for i in range(choice.num_stages)]
    inside = [loads.fabric(first, count, choice.num_microbatches).choices for first, count, _ in groups]
    options = [loads.strategy(x[inner].strategy) for x, (*_, inner) in zip(inside, groups, strict=True)]
    others = [loads.strategy(x[0].strategy) for x in inside]  # of operators that no stage on such a mesh has
    strategies = {}
    for i, stage in enumerate(pipeline.stages):
        strategies[i] = others[i]
        for other, chosen in zip(pipeline.stages, options, strict=True):
            if other.mesh == stage.mesh:
                rows = [row_of[name] for name in other.operators]
                strategies[i] = strategies[i].but(rows, chosen.axes[rows], chosen.storage[rows])
    limit_bytes = problem.objective.memory_limit(problem.usable_bytes)
    return simulated_stages(problem.exact, pipeline, choice.bounds, strategies, limit_bytes)


def _found_pipedream(graph: OperatorGraph, topology: DeviceTopology, asked: Understood) -> FoundPipeline:
    begin = time.monotonic()
    front = Front(topology.device.usable_memory_bytes, lambda times: times.pipeline.model_dump_json())
    times = _pipedream(graph, topology, asked, front)
    figures = whole_baselines(StageProblem(graph, topology, profile=asked.profile).loads)
    baselines = {name: f.step_time_s for name, f in figures.items()}
    points = tuple(p._replace(plan=p.plan.pipeline) for p in front.points()) if asked.pareto else ()
    done = 0, time.monotonic() - begin, "complete"
    return FoundPipeline(graph, times, baselines, (), *done, figures, points, times.pipeline)


def _pipedream(graph: OperatorGraph, topology: DeviceTopology, asked: Understood, front: Front) -> StageTimes:
    """PipeDream's plan: each minibatch an `n`-th of the batch, stages replicated; of several numbers the fastest that fits."""
    whole, num_stages = sample_divisor(graph), asked.num_stages
    numbers = [asked.num_microbatches]
    if asked.num_microbatches is None:
        numbers = [n for n in range(1, min(whole, MAX_ROUNDS) + 1) if whole % n == 0]
    best: StageTimes | None = None
    problems: list[Problem] = []
    for n in numbers:
        problem = StageProblem(
            graph, topology, schedules=("pipedream",), num_stages=num_stages, num_microbatches=n, profile=asked.profile
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
        times = simulated_stages(problem.exact, pipeline, bounds, {})
        front.offer(times.scores(), [times])
        if best is None or times.rank(asked.objective) < best.rank(asked.objective):
            best = times
    if best is None:
        raise SoapjaxError(problems[:3])
    return best


def _replicated_pipeline(problem: StageProblem, bounds: tuple[int, ...], devices: Sequence[tuple[int, ...]], num: int) -> Pipeline:
    stage = stage_of_operators(problem.graph, bounds, problem.forward)
    mesh = problem.loads.fabric(0, 1, num).space.mesh
    stages = tuple(
        Stage(
            operators=tuple(problem.graph.operators[n].name for n in np.flatnonzero(stage == i)), devices=mine,
            mesh=dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)), replicas=len(mine),
        )
        for i, mine in enumerate(devices)
    )  # fmt: skip
    return Pipeline(schedule="pipedream", num_microbatches=num, stages=stages)


def whole_baselines(loads: CondensedLoads) -> dict[str, StrategyFigures]:
    """Strategies without a pipeline, by the same rules: one stage of all operators on all devices."""
    usable, count = loads.topology.device.usable_memory_bytes, loads.topology.num_devices
    best: dict[str, StrategyFigures] = {}
    everything = (0, len(loads.whole.forward))
    for k, inside in enumerate(loads.fabric(0, count, 1).choices):
        if not inside.is_by_hand:
            continue
        load = loads.load(everything, 0, count, 1, k)
        name = expert_of(inside.name)
        step_s = load.forward_s + load.backward_s + load.update_s
        memory = load.state_bytes + load.gradient_bytes + load.working_bytes
        if (name == "data_parallel" or memory <= usable) and (name not in best or step_s < best[name].step_time_s):
            serial = loads.load(everything, 0, count, 1, k, overlap=False)
            sent_bytes = int(loads.sent_bytes(everything, 0, count, 1, k).sum())
            split = loads.split_flops(everything, 0, count, 1, k)[None]
            best[name] = StrategyFigures(
                step_time_s=step_s, without_overlap_s=serial.forward_s + serial.backward_s + serial.update_s,
                split_flops_share=share_of(*split.T), memory_bytes_per_device=int(memory),
                sent_bytes=sent_bytes, feasible=memory <= usable, peak_sent_bytes=sent_bytes,
            )  # fmt: skip
    return best


def provenance_of(found: FoundPipeline, base: Provenance, *, planner: str, seed: int) -> Provenance:
    """Where a pipeline plan came from."""
    return base.model_copy(
        update=dict(
            planner=planner, seed=seed, num_proposals=found.num_proposals, search_s=round(found.search_s, 3),
            baselines=found.baselines, baseline_figures=found.baseline_figures, notes=found.notes,
        )
    )  # fmt: skip
