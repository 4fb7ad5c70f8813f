"""Pipelines as plan files: written, and predicted anew.

A pipeline plan is a plan whose `pipeline` says which operators form a stage on which devices. The `axes` and specs of an operator
are those of its stage's own mesh (strategy/pipeline_plan.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soapjax.costs.measured.profile import Profile, carried, profile_of
from soapjax.errors import Problem, SoapjaxError
from soapjax.graph.operators import OperatorGraph
from soapjax.planning.pipelining.stage_sends import mean_sent_bytes
from soapjax.planning.pipelining.stage_strategies import strategy_with
from soapjax.planning.pipelining.stage_times import StageTimes, simulated_stages
from soapjax.search.stages.stage_loads import StageLoads
from soapjax.strategy.pipeline import Pipeline
from soapjax.strategy.pipeline_plan import make_pipeline_plan
from soapjax.strategy.plan import MeshPlan, ModelSource, Plan, Prediction, Provenance
from soapjax.strategy.plan_strategy import fixed_specs
from soapjax.strategy.schedules import kind_of
from soapjax.topology import DeviceTopology, FactorMesh


def pipeline_plan(
    graph: OperatorGraph, topology: DeviceTopology, times: StageTimes, *, model: ModelSource | None = None,
    provenance: Provenance = Provenance(), tracing: Mapping[str, Any] = {}, profile: Profile | None = None,
) -> Plan:  # fmt: skip
    """The plan file of a pipeline, with what of `profile` its times come from."""
    plans: dict[FactorMesh, MeshPlan] = {}
    for planned in times.inside:
        if planned.space.mesh not in plans:
            plans[planned.space.mesh] = planned.plan()
    stages = [plans[p.space.mesh] for p in times.inside]
    fixed = sorted({leaf for p in times.inside for leaf in p.space.fixed_layouts})
    return make_pipeline_plan(
        graph, topology, times.pipeline, stages, _prediction(times, topology.num_devices), model=model, provenance=provenance,
        tracing=tracing, profile=carried(profile, {t.structure for t in graph.tasks}),
        fixed=[graph.in_paths[leaf] for leaf in fixed],
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
    sums_once = kind_of(pipeline).is_synchronous
    loads = StageLoads(graph, topology, profile, sums_once=sums_once, fixed=fixed_specs(loaded))
    loads.graph(pipeline.num_microbatches)
    bounds = _bounds(pipeline, graph, loads, place)
    if pipeline.stages and max(d for s in pipeline.stages for d in s.devices) >= topology.num_devices:
        expected = f"0 to {topology.num_devices - 1}"
        raise SoapjaxError(Problem(f"{place}: pipeline.stages", "a device that is not there", expected, "plan anew"))
    groups = [(min(stage.devices), len(stage.devices) // stage.replicas) for stage in pipeline.stages]
    if problems := loads.misfits(bounds, groups, pipeline.num_microbatches):
        raise SoapjaxError([p._replace(place=f"{place}: {p.place}") for p in problems])
    strategies = {}
    in_stages = {name for stage in pipeline.stages for name in stage.operators}
    for i, stage in enumerate(pipeline.stages):
        space = loads.fabric(*groups[i], pipeline.num_microbatches).space
        own, wanted = tuple(space.mesh.axis_names), tuple(stage.mesh)
        if (own, tuple(space.mesh.axis_sizes)) != (wanted, tuple(stage.mesh.values())):
            expected = str(dict(zip(own, space.mesh.axis_sizes, strict=True)))
            raise SoapjaxError(Problem(f"{place}: pipeline.stages.{i}.mesh", str(stage.mesh), expected, "restore it, or plan anew"))
        # Operators of stages on another mesh are data-parallel on this one.
        others = {name for other in pipeline.stages if other.mesh != stage.mesh for name in other.operators}
        of_update = {op.name for op in space.graph.operators} - in_stages
        given = {name: part for name, part in loaded.operators.items() if name not in others | of_update}
        strategies[i] = strategy_with(space, given, place=place)
    times = simulated_stages(loads, pipeline, bounds, strategies)
    made = pipeline_plan(
        graph, topology, times, model=loaded.model, provenance=loaded.provenance, tracing=loaded.tracing, profile=profile
    )
    return made, times


def _bounds(pipeline: Pipeline, graph: OperatorGraph, loads: StageLoads, place: str) -> tuple[int, ...]:
    """Where the stages cut the forward operators."""
    position = {graph.operators[n].name: k for k, n in enumerate(loads.forward)}
    bounds, remedy = [0], "restore it, or plan anew"
    for i, stage in enumerate(pipeline.stages):
        mine = sorted(position[name] for name in stage.operators if name in position)
        where = f"{place}: pipeline.stages.{i}.operators"
        if mine != list(range(bounds[-1], bounds[-1] + len(mine))) or not mine:
            at = graph.operators[loads.forward[min(bounds[-1], len(loads.forward) - 1)]].name
            expected = f"the operators from {at!r} on, without a gap"
            raise SoapjaxError(Problem(where, ", ".join(stage.operators[:3]) or "none", expected, remedy))
        bounds.append(bounds[-1] + len(mine))
    if bounds[-1] != len(loads.forward):
        left = graph.operators[loads.forward[bounds[-1]]].name
        raise SoapjaxError(Problem(f"{place}: pipeline.stages", f"{left!r} in no stage", "every operator in one", remedy))
    return tuple(bounds)
