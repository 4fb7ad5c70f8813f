"""The steps of pipelines: of one whose stages the user gives, and of one that is planned; and whether a planned one will run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.parts.batch_axes import batch_leaves
from soapjax.execute.parts.cutter import outermost_gradients
from soapjax.execute.parts.joinings import found_reduction
from soapjax.execute.parts.microbatches import micro_step
from soapjax.execute.streams.pipelined_step import cut_and_joined
from soapjax.execute.streams.stage_programs import MicroGraph, places_of, staged_step, step_of_plan
from soapjax.execute.streams.stream_step import StreamStep
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import TracedStep
from soapjax.helpers.own_config import own_configuration
from soapjax.planning.pipelining.stage_strategies import plans_of_stages
from soapjax.strategy.pipeline import Pipeline
from soapjax.strategy.plan import MeshPlan, Plan
from soapjax.strategy.plan_strategy import fixed_specs, topology_of
from soapjax.strategy.schedules import kind_of
from soapjax.topology import DeviceTopology, load_topology

MOST_TASKS = 2_500  # of a step that is traced for this with one micro-batch: about 48 blocks of a Transformer, a few seconds


def pipelined(
    fn: Any, *args: Any, pipeline: Pipeline, topology: str | DeviceTopology, reduction: str = "auto",
    devices: Sequence[Any] | None = None, static_argnums: Sequence[int] = (), donate: bool = True,
    axes: Mapping[str, Mapping[str, str]] | None = None, storage: Mapping[str, str] | None = None, is_float64: bool = False,
    of_micro: MicroGraph | None = None, **tracing: Any,
) -> StreamStep:  # fmt: skip
    """The step of a given pipeline, of any schedule, on `devices` (all that JAX sees by default).

    Args:
      reduction: "mean" where the loss is a mean over the batch, "sum" where it is a sum; "auto": as the step tells.
      axes, storage: of operators, as in a plan, by the axis names of their stage's mesh; data parallelism by default.
      of_micro: of the step with one of the pipeline's micro-batches, where it has been traced so.
      tracing: `unroll`, `axis_name` and `strip_constraints` of `trace`.
    Raises: SoapjaxError where pipeline, step, batch and devices do not go together.
    """
    topology = load_topology(topology) if isinstance(topology, str) else topology
    if of_micro is None:
        micro = micro_step(
            fn, *args, num_microbatches=pipeline.num_microbatches, static_argnums=static_argnums,
            adds_up=kind_of(pipeline).is_synchronous, **tracing,
        )  # fmt: skip
        of_micro = MicroGraph(micro, *build_graph(micro.step))
    micro, graph, binding = of_micro
    plans = plans_of_stages(graph, pipeline, topology, axes, storage)
    places = places_of(micro, graph, binding, pipeline, plans, devices, is_float64=is_float64)
    return staged_step(micro, pipeline, places, reduction=reduction, donate=donate)


def planned_pipeline(fn: Any, *args: Any, plan: Plan, **options: Any) -> StreamStep:
    """As `step_of_plan`; specs that do not fit the micro-batched step are made anew from `axes` and `storage`."""
    axes = {name: part.axes for name, part in plan.operators.items() if part.axes}
    storage = {name: part.storage for name, part in plan.operators.items()}

    def anew(graph: OperatorGraph) -> list[MeshPlan]:
        return plans_of_stages(graph, plan.pipeline, topology_of(plan)[0], axes, storage, fixed=fixed_specs(plan))

    return step_of_plan(fn, *args, plan=plan, anew=anew, **options)


def require_same_result(fn: Any, *args: Any, step: TracedStep, **tracing: Any) -> None:
    """Refuses a step that computes something else, however little, with its batch in parts: nobody asked for micro-batches.

    Args:
      step: of the whole batch.
      tracing: as for `trace`.
    Raises: SoapjaxError where the batch has no parts, or a statistic of it comes back to its samples.
    """
    size = step.in_avals[batch_leaves(step)[0]].shape[0]
    parts = next((n for n in range(2, size + 1) if size % n == 0), 1)
    micro = micro_step(fn, *args, num_microbatches=parts, full=step, **tracing)
    if not micro.growth.is_known:
        value = f"a batch of {size} that is not the same step in parts"
        expected = "a batch of several samples, and no loop over them"
        raise SoapjaxError(Problem("microbatches", value, expected, "use another batch, or more devices"))
    mixing = micro.growth.mixing([micro.step.program.outputs[k] for k in step.state_pairs.values()])
    if (found := mixing.any()) is not None:
        at = f" ({found.source})" if found.source else ""
        value = f"samples of the batch are mixed{at}, as by its statistics, and micro-batches would compute something else"
        expected = "a loss of every sample by itself"
        raise SoapjaxError(Problem("microbatches", value, expected, "if that will do, as it does for batch norm, say their number"))


def require_runnable(
    fn: Any, *args: Any, pipeline: Pipeline, step: TracedStep, graph: OperatorGraph, reduction: str = "auto",
    at_most: float = MOST_TASKS, is_asked_for: bool = True, **tracing: Any,
) -> MicroGraph | None:  # fmt: skip
    """The step with one micro-batch, which is known to add up to the whole; None of the largest steps: running them says it.

    Args:
      step, graph: of the whole batch.
      reduction: what the loss is said to be of its batch.
      at_most: tasks of a step that is looked at.
      is_asked_for: whether somebody asked for micro-batches.
      tracing: as for `trace`.
    Raises: SoapjaxError as running the stages would.
    """
    num = pipeline.num_microbatches
    if num == 1 or len(graph.tasks) > at_most or not kind_of(pipeline).is_synchronous:
        return None
    micro = micro_step(fn, *args, num_microbatches=num, full=step, recomputed=graph.recomputed, **tracing)
    with own_configuration():
        own, binding = build_graph(micro.step)
    paths = [p.path for p in binding.phases.parameters]
    gradients = list(zip(paths, outermost_gradients(micro.step, binding), strict=True))
    found_reduction(micro, gradients, reduction, is_asked_for=is_asked_for)
    # Of one sample JAX leaves dims out, which the plan's are then made anew for.
    has_dims = micro.batch_size > num
    mine, theirs = ({(op.name, has_dims and any(d.kind == "S" for d in op.dims)) for op in g.operators} for g in (own, graph))
    if other := sorted({name for name, _ in mine ^ theirs}):
        value = f"{num}: the step with one of them has other operators ({', '.join(other[:3])})"
        expected = "the same operators for every size of the batch"
        remedy = "choose another number, or another batch: its size may equal another dim's; or plan without a pipeline"
        raise SoapjaxError(Problem("microbatches", value, expected, remedy))
    with own_configuration():
        cut_and_joined(micro, own, binding, pipeline, reduction, is_asked_for=is_asked_for)
    return MicroGraph(micro, own, binding)
