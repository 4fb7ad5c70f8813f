"""From a step function to a plan of stages and micro-batches: pipelines, and one stage whose gradients are added up."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.streams.stream_step import StreamStep
from soapjax.graph.condensing import loops_over_layers, reads_rows
from soapjax.graph.microbatch import require_phases
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import TracedStep, trace
from soapjax.helpers.own_config import on_cpu, own_configuration
from soapjax.planning.compile_check import PlannedStages, checked_stages, devices_to_compile_for
from soapjax.planning.entry import given_arguments, require_operators, versions
from soapjax.planning.options import PIPELINES
from soapjax.planning.pipelining.given_pipeline import MOST_TASKS, planned_pipeline, require_runnable
from soapjax.planning.pipelining.pipeline_files import pipeline_plan
from soapjax.planning.pipelining.pipelines import FoundPipeline, find_pipeline, provenance_of
from soapjax.planning.pipelining.recomputing_stages import best_of_steps, recomputation_of
from soapjax.planning.request import PlanRequest, Understood, takes_options
from soapjax.planning.searching import AGAIN
from soapjax.planning.user_shardings import layouts_of_rows, user_layouts
from soapjax.search.stages.joint_search import DEFAULT_PROPOSALS
from soapjax.strategy.layout import Spec
from soapjax.strategy.plan import Plan, Provenance
from soapjax.topology import DeviceTopology, factor_mesh

log = logging.getLogger("soapjax")

UNROLLED = "a loop over layers was unrolled: its iterations are in several stages"
NOT_CUT = "stacked parameters stay whole on the first stage that reads them: something reads all their rows at once"
LEAST_S = 0.01  # that a search has, when time is over: a pipeline that fits is looked for all the same
OF_ONE_PROGRAM = "space", "simplicity", "verify_top"


class Traced(NamedTuple):
    step: TracedStep
    graph: OperatorGraph


@takes_options("microbatch_reduction", *OF_ONE_PROGRAM)
def plan_pipeline(fn: Callable[..., Any], *args: Any, pipeline: str, **options: Any) -> tuple[Plan, FoundPipeline]:
    """Plans `fn(*args)` as a pipeline: "gpipe", "1f1b", "interleaved", "pipedream", or "auto", the best of the synchronous ones.

    Options are those of `PlanRequest` (soapjax/planning/request.py), those of one program excepted; numbers of micro-batches and
    stages that are not given are searched.

    Raises: SoapjaxError for every input that does not fit, and where no pipeline fits into memory.
    """
    if not isinstance(pipeline, str):
        raise SoapjaxError(Problem("pipeline", repr(pipeline), " or ".join(PIPELINES), "choose one of these"))
    staged = plan_staged(PlanRequest(pipeline=pipeline, **options), fn, *args)
    return staged.plan, staged.found


def plan_staged(
    request: PlanRequest, fn: Callable[..., Any], *args: Any, traced: Traced | None = None, slower_than_s: float = math.inf,
    is_asked_for: bool = True,
) -> PlannedStages:  # fmt: skip
    """As `plan_pipeline`.

    Args:
      traced: the step and its graph, where it has been traced before, as the request says.
      slower_than_s: a step time that the pipeline is to come near; one that is slower is not compiled.
      is_asked_for: whether a pipeline or micro-batches were; otherwise no plan is made that the caller's options could not run.
    Raises: as `plan_pipeline`, and InfeasibleError where no pipeline fits as compiled; `Beaten` where the best is slower than
      `slower_than_s`, before it is priced on the whole graph.
    """
    asked, remarks = request.understood(fn)
    given = given_arguments(asked, fn, args)
    compile_for: Sequence[Any] | None = None
    if asked.check == "compile":
        compile_for = devices_to_compile_for(asked.topology, asked.devices)
        asked = asked.but(topology=asked.topology.usable_up_to(asked.topology.device.available_memory_bytes))
    if not asked.unroll:
        traced = _traced(asked, fn, *args) if traced is None else traced
    if asked.unroll or loops_over_layers(traced.graph) or reads_rows(traced.graph):
        has_loops = not asked.unroll and any(task.scope for task in traced.graph.tasks)
        asked = asked.but(unroll="rows")
        traced = _traced(asked, fn, *args)
        remarks = (*remarks, *((UNROLLED,) if has_loops else ()), *((NOT_CUT,) if has_loops and not traced.graph.leaf_of else ()))
    if traced.graph.is_single_phase:
        require_phases(traced.graph, build_graph(traced.step)[1].phases.lines_of_late)
    fixed = _fixed(asked, given, traced.step)
    deadline = math.inf if asked.seconds is None else time.monotonic() + asked.seconds
    planning = _Planning(
        asked=asked, remarks=remarks, fn=fn, args=args, traced=traced, is_asked_for=is_asked_for, deadline=deadline,
        devices=compile_for, slower_than_s=slower_than_s, fixed=fixed,
    )  # fmt: skip
    found = planning.find(asked.topology)
    is_beaten = asked.objective.is_time and found.times.timeline.step_time_s > slower_than_s
    if compile_for is None or is_beaten or found.stopped_by == "interrupted":
        return PlannedStages(planning.plan_of(found, asked.topology), found)
    return checked_stages(found, asked.topology, asked.objective, planning.find, planning.plan_of, planning.made_of)


class _Planning(NamedTuple):
    """What `plan_staged` was asked for."""

    asked: Understood
    remarks: Sequence[str]
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    traced: Traced
    is_asked_for: bool
    deadline: float  # of `time.monotonic`
    devices: Sequence[Any] | None  # to compile for, where that is asked for
    slower_than_s: float
    fixed: Mapping[str, Spec]

    def find(self, topology: DeviceTopology, share: float = 1.0) -> FoundPipeline:
        """The best pipeline, which is sure to run, by such a share of the proposals. Further ones get some of the seconds."""
        asked, (step, graph) = self.asked, self.traced
        left_s = None if asked.seconds is None else max(self.deadline - time.monotonic(), LEAST_S)
        if left_s is not None and self.devices is not None:
            left_s *= 1 - AGAIN if share == 1 else 0.5

        def find_in(step: TracedStep, seconds: float | None, if_bound: float, part: float, slower_than_s: float) -> FoundPipeline:
            proposals = DEFAULT_PROPOSALS if asked.proposals is None and asked.seconds is None else asked.proposals
            proposals = None if proposals is None else max(1, int(share * part * proposals))
            with on_cpu():
                graph = build_graph(step)[0]
                found = find_pipeline(
                    graph, topology, asked=asked, proposals=proposals, seconds=seconds, slower_than_s=slower_than_s,
                    share_if_bound=if_bound, fixed=self.fixed,
                )  # fmt: skip
            at_most = MOST_TASKS if self.is_asked_for else math.inf
            of_micro = require_runnable(
                self.fn, *self.args, pipeline=found.times.pipeline, step=step, graph=graph, reduction=asked.microbatch_reduction,
                at_most=at_most, is_asked_for=self.is_asked_for, **asked.tracing,
            )  # fmt: skip
            return found._replace(of_micro=of_micro)

        with on_cpu():
            options = recomputation_of(asked, step, graph, topology)
        if options is None:
            found = find_in(step, left_s, 1.0, 1.0, self.slower_than_s)
        else:
            found = best_of_steps(options, topology, left_s, self.slower_than_s, find_in)
        return found._replace(notes=(*self.remarks, *found.notes))

    def plan_of(self, found: FoundPipeline, topology: DeviceTopology) -> Plan:
        asked = self.asked
        base = Provenance(versions=versions(), objective=asked.objective.describe())
        planner = f"pipeline {asked.pipeline}" + (f", {asked.expert}" if asked.expert else "")
        provenance = provenance_of(found, base, planner=planner, seed=asked.seed)
        with on_cpu():
            return pipeline_plan(
                found.graph, topology, found.times, model=asked.model, provenance=provenance, tracing=asked.tracing_in_plan,
                profile=asked.profile,
            )  # fmt: skip

    def made_of(self, plan: Plan, found: FoundPipeline) -> StreamStep:
        asked = self.asked
        how = dict(devices=self.devices, donate=bool(asked.donate), reduction=asked.microbatch_reduction)
        return planned_pipeline(
            self.fn, *self.args, plan=plan, of_micro=found.of_micro, static_argnums=asked.static_argnums, **how
        )  # fmt: skip


def _fixed(asked: Understood, given: Sequence[Any], step: TracedStep) -> dict[str, Spec]:
    """What the user fixed, by axes of the mesh of the stage that holds it: of one stage that of all devices.

    What was asked for beside stages that cannot keep it is refused (`request.problems`).
    """
    names, rules = factor_mesh(asked.topology).axis_names, asked.logical_axis_rules
    layouts = user_layouts(given, step.leaf_paths, asked.fixed, axis_names=names, rules=rules)
    if layouts and not asked.keeps_layouts:
        log.info("layouts in Flax's metadata are not kept by replicas of pipedream's stages: %s", ", ".join(layouts))
        return {}
    return layouts_of_rows(step, layouts)


def _traced(asked: Understood, fn: Callable[..., Any], *args: Any) -> Traced:
    step = trace(fn, *args, **asked.tracing)
    with own_configuration():
        graph = build_graph(step)[0]
    require_operators(graph)
    return Traced(step, graph)
