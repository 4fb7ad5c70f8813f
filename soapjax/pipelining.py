"""Where pipelines meet plans: the plan inside every stage, and the step that runs them.

Inside a stage operators follow a plan of the micro-batched step on the stage's own mesh. Stages with equal meshes share one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from soapjax.costs.evaluate import costs_of
from soapjax.costs.tables import cost_tables
from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.microbatches import MicroStep, micro_step
from soapjax.execute.part_program import Place
from soapjax.execute.pipedream import PipeDreamStep
from soapjax.execute.pipeline import PipelineStep
from soapjax.execute.spmd import Program
from soapjax.execute.stream_step import StreamStep
from soapjax.graph.build import Binding, build_graph
from soapjax.graph.operators import OperatorGraph
from soapjax.own_config import own_configuration
from soapjax.search.baselines import data_parallel_strategy
from soapjax.search.problem import PlanningProblem
from soapjax.search.stage_figures import part_of
from soapjax.strategy.pipeline import Pipeline, Stage
from soapjax.strategy.plan import Plan, Prediction
from soapjax.strategy.plan_strategy import make_plan, strategy_of
from soapjax.strategy.schedules import kind_of
from soapjax.strategy.space import SearchSpace, search_space
from soapjax.strategy.strategy import Strategy
from soapjax.topology import DeviceTopology, FactorMesh, factor_mesh, load_topology


def stage_mesh(stage: Stage, topology: DeviceTopology) -> tuple[FactorMesh, DeviceTopology]:
    """The mesh inside a stage (one replica of it), and its devices: their factor mesh, or axes of its own over one level of links.

    Raises: SoapjaxError where its mesh is not of as many devices as it has.
    """
    num = len(stage.devices) // stage.replicas
    part = part_of(topology, min(stage.devices), num)
    planned = factor_mesh(part)
    if not stage.mesh or stage.mesh == dict(zip(planned.axis_names, planned.axis_sizes, strict=True)):
        return planned, part
    if math.prod(stage.mesh.values()) != num:
        expected = f"a mesh of {num} devices"
        raise SoapjaxError(Problem("stage mesh", str(stage.mesh), expected, "change the mesh or the stage's devices"))
    alike = dataclasses.replace(topology, levels=(topology.levels[-1].part(0, num),))
    return FactorMesh(tuple(stage.mesh), tuple(stage.mesh.values()), (0,) * len(stage.mesh)), alike


@own_configuration()
def inside_plan(
    graph: OperatorGraph, mesh: FactorMesh, part: DeviceTopology, axes: Mapping[str, Mapping[str, str]] | None = None,
    storage: Mapping[str, str] | None = None,
) -> Plan:  # fmt: skip
    """The plan of a (micro-batched) graph on a stage's mesh.

    Args:
      part: the mesh's devices.
      axes: operator -> mesh axis -> dim, "replicate"; data parallelism for operators that are not in it.
      storage: operator -> storage, "as used" where it is not given.
    Raises: SoapjaxError naming what does not fit.
    """
    space = search_space(graph, mesh)
    tables = cost_tables(graph, space, part)
    strategy = _data_parallel(graph, space)
    if axes:
        plan = _plan(graph, space, part, strategy, tables)
        operators = {
            name: o.model_copy(update={"axes": dict(axes.get(name, o.axes)), "storage": (storage or {}).get(name, o.storage)})
            for name, o in plan.operators.items()
        }
        strategy = strategy_of(plan.model_copy(update={"operators": operators}), space, place="stages")
    return _plan(graph, space, part, strategy, tables)


def _data_parallel(graph: OperatorGraph, space: SearchSpace) -> Strategy:
    return data_parallel_strategy(PlanningProblem(graph, space, None))[0]


def _plan(graph: OperatorGraph, space: SearchSpace, topology: DeviceTopology, strategy: Strategy, tables: Any) -> Plan:
    found = costs_of(tables, strategy.axes, strategy.storage).layouts
    num_u, num_p = len(tables.access_op), len(tables.parameter_op)
    nothing = Prediction.model_construct(  # a part of a step, which is not predicted by itself; in a file a step takes time
        step_time_s=0.0, memory_bytes_per_device=0, usable_memory_bytes=0, memory_parts_bytes={}, feasible=True,
        bytes_by_collective={},
    )  # fmt: skip
    return make_plan(space, topology, strategy, found.slots[:num_u], found.home, found.slots[num_u : num_u + num_p], nothing)


def places_of(
    micro: MicroStep, graph: OperatorGraph, binding: Binding, pipeline: Pipeline, topology: DeviceTopology,
    devices: Sequence[Any], *, axes: Mapping[str, Mapping[str, str]] | None = None, storage: Mapping[str, str] | None = None,
    is_float64: bool = False,
) -> list[list[Place]]:  # fmt: skip
    """Of every stage its replicas: mesh, devices and the plan inside."""
    plans: dict[Any, Plan] = {}
    found = []
    needed = max(d for s in pipeline.stages for d in s.devices) + 1
    if needed > len(devices):
        expected = f"the {needed} that the pipeline is for"
        remedy = f"use fewer or smaller stages, or start JAX with {needed} devices"
        raise SoapjaxError(Problem("devices", f"{len(devices)} devices", expected, remedy))
    meshes = [stage_mesh(stage, topology) for stage in pipeline.stages]
    for stage, (mesh, part) in zip(pipeline.stages, meshes, strict=True):
        key = mesh
        if key not in plans:
            # Stages on equal meshes follow one plan; the operators of others are laid out by data parallelism there.
            same = [s for s, (m, _) in zip(pipeline.stages, meshes, strict=True) if m == key]
            alike = {n for s in same for n in s.operators}
            own = ({n: x for n, x in (of or {}).items() if n in alike} for of in (axes, storage))
            plans[key] = inside_plan(graph, mesh, part, *own)
        width = mesh.num_devices
        replicas = []
        for r in range(stage.replicas):
            mine = [devices[d] for d in stage.devices[r * width : (r + 1) * width]]
            jax_mesh = Mesh(np.array(mine).reshape(mesh.axis_sizes), mesh.axis_names)
            replicas.append(Place(Program(micro.step, plans[key], graph, binding, jax_mesh), is_float64=is_float64))
        found.append(replicas)
    return found


class PipelineOptions(NamedTuple):
    """What a user says of a pipeline."""

    pipeline: Pipeline | str  # or one of PIPELINES, to be planned
    num_microbatches: int | None = None  # to be searched where it is None
    num_stages: int | None = None
    reduction: str = "mean"

    @staticmethod
    def problems(
        pipeline: Pipeline | str | None, microbatches: int | str | None, stages: int | str | None, **others: Any
    ) -> list[Problem]:
        """Which options do not go together."""
        problems = []
        microbatches, stages = (None if n == "auto" else n for n in (microbatches, stages))
        given = [n for n, v in (("microbatches", microbatches), ("stages", stages)) if v is not None]
        if pipeline is None:
            problems += [Problem(n, "given without a pipeline", "a pipeline", f'say pipeline="1f1b", or drop {n}') for n in given]
        elif isinstance(pipeline, Pipeline):
            problems += [Problem(n, "given beside a Pipeline", "one of them", f"the Pipeline has its own: drop {n}") for n in given]
        for name, value in others.items():
            if pipeline is not None and value is not None:
                problems.append(Problem(name, "given beside a pipeline", "one of them", "drop it"))
        return problems

    @classmethod
    def of(
        cls, pipeline: Pipeline | str | None, microbatches: int | str | None, stages: int | str | None, reduction: str
    ) -> PipelineOptions | None:  # fmt: skip
        """None where no pipeline is asked for."""
        numbers = (None if n == "auto" else n for n in (microbatches, stages))
        return None if pipeline is None else cls(pipeline, *numbers, reduction)


def pipelined(
    fn: Any, *args: Any, pipeline: Pipeline, topology: str | DeviceTopology, reduction: str = "mean",
    devices: Sequence[Any] | None = None, static_argnums: Sequence[int] = (), donate: bool = True,
    axes: Mapping[str, Mapping[str, str]] | None = None, storage: Mapping[str, str] | None = None, is_float64: bool = False,
    **tracing: Any,
) -> StreamStep:  # fmt: skip
    """The step of a given pipeline, of any schedule.

    Args:
      reduction: "mean" where the loss is a mean over the batch, "sum" where it is a sum.
      axes, storage: of operators, as for `pipeline_step`.
      tracing: `unroll`, `axis_name` and `strip_constraints` of `trace`.
    Raises: SoapjaxError where pipeline, step, batch and devices do not go together.
    """
    topology = load_topology(topology) if isinstance(topology, str) else topology
    devices = list(jax.devices()) if devices is None else list(devices)
    num_microbatches = pipeline.num_microbatches
    micro = micro_step(fn, *args, num_microbatches=num_microbatches, static_argnums=static_argnums, **tracing)
    graph, binding = build_graph(micro.step)
    places = places_of(micro, graph, binding, pipeline, topology, devices, axes=axes, storage=storage, is_float64=is_float64)
    if not kind_of(pipeline).is_synchronous:
        return StreamStep(PipeDreamStep(micro, pipeline, places), micro.full)
    step = PipelineStep(micro, pipeline, [p[0] for p in places], reduction=reduction, donate=donate)
    return StreamStep(step, micro.full)


def planned_pipeline(
    fn: Any, *args: Any, plan: Plan, topology: DeviceTopology, reduction: str = "mean", **options: Any
) -> StreamStep:  # fmt: skip
    """The step of a pipeline plan: its stages, and inside them the axes and storages of its operators."""
    own = {name: part for name, part in plan.operators.items() if part.axes}
    return pipelined(
        fn, *args, pipeline=plan.pipeline, reduction=reduction, topology=topology, unroll=plan.unroll,
        axes={name: part.axes for name, part in own.items()}, storage={name: part.storage for name, part in own.items()}, **options,
    )  # fmt: skip


def pipeline_step(
    fn: Any, *args: Any, pipeline: Pipeline, topology: DeviceTopology, devices: Sequence[Any] | None = None,
    axes: Mapping[str, Mapping[str, str]] | None = None, storage: Mapping[str, str] | None = None, reduction: str = "mean",
    static_argnums: Sequence[int] = (), unroll: bool = False, donate: bool = True, is_float64: bool = False,
) -> PipelineStep:  # fmt: skip
    """`fn(*args)` as a synchronous pipeline on `devices` (all that JAX sees by default).

    Args:
      axes, storage: of operators, as in a plan, by the axis names of their stage's mesh; data parallelism by default.
      reduction: "mean" where the loss is a mean over the batch, "sum" where it is a sum.
    Raises: SoapjaxError where pipeline, step, batch and devices do not go together.
    """
    micro = micro_step(fn, *args, num_microbatches=pipeline.num_microbatches, static_argnums=static_argnums, unroll=unroll)
    graph, binding = build_graph(micro.step)
    devices = list(jax.devices()) if devices is None else list(devices)
    places = places_of(
        micro, graph, binding, pipeline, topology, devices, axes=axes, storage=storage, is_float64=is_float64
    )  # fmt: skip
    return PipelineStep(micro, pipeline, [p[0] for p in places], reduction=reduction, donate=donate)
