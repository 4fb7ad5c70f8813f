"""A pipeline as its plan says: every stage's mesh over its devices, what holds on it, and the step that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.parts.microbatches import MicroStep, micro_step
from soapjax.execute.parts.part_program import Place
from soapjax.execute.spmd.planned_evaluator import BoundStep
from soapjax.execute.streams.pipedream import PipeDreamStep
from soapjax.execute.streams.pipelined_step import PipelineStep
from soapjax.execute.streams.stream_step import StreamStep
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.build import Binding, build_graph
from soapjax.strategy.pipeline import Pipeline
from soapjax.strategy.plan import MeshPlan, Plan, parse_spec
from soapjax.strategy.schedules import kind_of


class MicroGraph(NamedTuple):
    """A step traced with one micro-batch, and its graph."""

    micro: MicroStep
    graph: OperatorGraph
    binding: Binding


def step_of_plan(
    fn: Any, *args: Any, plan: Plan, devices: Sequence[Any] | None = None, reduction: str = "auto",
    static_argnums: Sequence[int] = (), donate: bool = True, is_float64: bool = False,
    anew: Callable[[OperatorGraph], list[MeshPlan]] | None = None, of_micro: MicroGraph | None = None,
) -> StreamStep:  # fmt: skip
    """`fn(*args)` as a pipeline's plan says, on `devices` (all that JAX sees by default).

    Args:
      reduction: "mean" where the loss is a mean over the batch, "sum" where it is a sum; "auto": as the step tells.
      anew: what holds on the mesh of every stage, for a micro-batch whose trace has other operands than the whole batch's: of
        one sample, say, whose dims of size 1 JAX leaves out.
      of_micro: of the step with one of the plan's micro-batches, where it has been traced so.
    Raises: SoapjaxError where plan, step, batch and devices do not go together.
    """
    if of_micro is None:
        micro = micro_step(
            fn, *args, num_microbatches=plan.pipeline.num_microbatches, static_argnums=static_argnums,
            recomputed=plan.recomputed, adds_up=kind_of(plan.pipeline).is_synchronous, **plan.tracing,
        )  # fmt: skip
        of_micro = MicroGraph(micro, *build_graph(micro.step))
    micro, graph, binding = of_micro
    stages = plan.on_stages()
    if problems := _misfits(stages, graph):
        if anew is None:
            raise SoapjaxError(problems[:5])
        stages = anew(graph)
    places = places_of(micro, graph, binding, plan.pipeline, stages, devices, is_float64=is_float64)
    return staged_step(micro, plan.pipeline, places, reduction=reduction, donate=donate)


def staged_step(
    micro: MicroStep, pipeline: Pipeline, places: Sequence[Sequence[Place]], *, reduction: str = "auto", donate: bool = True
) -> StreamStep:
    """The step of a pipeline of any schedule, on the places of every stage's replicas."""
    if not kind_of(pipeline).is_synchronous:
        return StreamStep(PipeDreamStep(micro, pipeline, places, donate=donate), micro.full)
    step = PipelineStep(micro, pipeline, [p[0] for p in places], reduction=reduction, donate=donate)
    return StreamStep(step, micro.full)


def places_of(
    micro: MicroStep, graph: OperatorGraph, binding: Binding, pipeline: Pipeline, stages: Sequence[MeshPlan],
    devices: Sequence[Any] | None = None, *, is_float64: bool = False,
) -> list[list[Place]]:  # fmt: skip
    """Of every stage its replicas: its mesh on the devices that the stage has, and what holds on it.

    Args:
      graph, binding: of the micro-batched step.
      stages: what holds on the mesh of each.
    Raises: SoapjaxError where there are fewer devices.
    """
    devices = list(jax.devices()) if devices is None else list(devices)
    needed = max(d for s in pipeline.stages for d in s.devices) + 1
    if needed > len(devices):
        expected = f"the {needed} that the pipeline is for"
        remedy = f"use fewer or smaller stages, or start JAX with {needed} devices"
        raise SoapjaxError(Problem("devices", f"{len(devices)} devices", expected, remedy))
    found = []
    for stage, plan in zip(pipeline.stages, stages, strict=True):
        width, replicas = plan.num_devices, []
        for r in range(stage.replicas):
            mine = np.array([devices[d] for d in stage.devices[r * width : (r + 1) * width]])
            mesh = Mesh(mine.reshape(plan.mesh.axis_sizes), plan.mesh.axis_names)
            replicas.append(Place(BoundStep(micro.step, plan, graph, binding, mesh), is_float64=is_float64))
        found.append(replicas)
    return found


def _misfits(stages: Sequence[MeshPlan], graph: OperatorGraph) -> list[Problem]:
    """Where plans of stages do not say what the tasks of the step, traced with one micro-batch, do with their tensors."""
    wanted: dict[str, list[list[int]]] = {op.name: [] for op in graph.operators}
    for task in graph.tasks:
        if task.parameter < 0:
            wanted[graph.operators[task.operator].name].append([len(a.dims) for a in (*task.reads, *task.writes)])
    plans = list({id(plan): plan for plan in stages}.values())
    problems = []
    for name, ranks in wanted.items():
        for plan in plans:
            part = plan.operators.get(name)
            found = [] if part is None else [[len(parse_spec(s)) for s in (*t.operands, *t.results)] for t in part.tasks]
            if found != ranks:
                value = "missing" if part is None else f"specs of {len(found)} tasks, of tensors of {found} dims"[:150]
                expected = f"specs of {len(ranks)} tasks, of {ranks} dims"[:150]
                remedy = "load the plan with soapjax.load_plan, which makes them anew, or plan with another number of micro-batches"
                problems.append(Problem(f"plan: operators.{name}.tasks", value, expected, remedy))
                break
    for path in graph.in_paths:
        if any(path not in plan.arguments for plan in plans):
            expected = "the layout of every argument"
            problems.append(Problem(f"plan: arguments.{path}", "missing", expected, "restore it, or plan anew"))
    return problems
