"""The steps of pipelines: of one whose stages the user gives, and of one that is planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soapjax.execute.streams.microbatches import micro_step
from soapjax.execute.streams.stages import places_of, staged_step, step_of_plan
from soapjax.execute.streams.stream_step import StreamStep
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.build import build_graph
from soapjax.planning.stage_strategies import plans_of_stages
from soapjax.strategy.pipeline import Pipeline
from soapjax.strategy.plan import MeshPlan, Plan
from soapjax.strategy.plan_strategy import topology_of
from soapjax.topology import DeviceTopology, load_topology


def pipelined(
    fn: Any, *args: Any, pipeline: Pipeline, topology: str | DeviceTopology, reduction: str = "mean",
    devices: Sequence[Any] | None = None, static_argnums: Sequence[int] = (), donate: bool = True,
    axes: Mapping[str, Mapping[str, str]] | None = None, storage: Mapping[str, str] | None = None, is_float64: bool = False,
    **tracing: Any,
) -> StreamStep:  # fmt: skip
    """The step of a given pipeline, of any schedule, on `devices` (all that JAX sees by default).

    Args:
      reduction: "mean" where the loss is a mean over the batch, "sum" where it is a sum.
      axes, storage: of operators, as in a plan, by the axis names of their stage's mesh; data parallelism by default.
      tracing: `unroll`, `axis_name` and `strip_constraints` of `trace`.
    Raises: SoapjaxError where pipeline, step, batch and devices do not go together.
    """
    topology = load_topology(topology) if isinstance(topology, str) else topology
    num_microbatches = pipeline.num_microbatches
    micro = micro_step(fn, *args, num_microbatches=num_microbatches, static_argnums=static_argnums, **tracing)
    graph, binding = build_graph(micro.step)
    plans = plans_of_stages(graph, pipeline, topology, axes, storage)
    places = places_of(micro, graph, binding, pipeline, plans, devices, is_float64=is_float64)
    return staged_step(micro, pipeline, places, reduction=reduction, donate=donate)


def planned_pipeline(fn: Any, *args: Any, plan: Plan, **options: Any) -> StreamStep:
    """As `step_of_plan`; specs that do not fit the micro-batched step are made anew from `axes` and `storage`."""
    axes = {name: part.axes for name, part in plan.operators.items() if part.axes}
    storage = {name: part.storage for name, part in plan.operators.items()}

    def anew(graph: OperatorGraph) -> list[MeshPlan]:
        return plans_of_stages(graph, plan.pipeline, topology_of(plan)[0], axes, storage)

    return step_of_plan(fn, *args, plan=plan, anew=anew, **options)
