"""The plan that a request asks for: of one program, of a pipeline, or of "auto", the one that is predicted to be better.

Where no plan of one program fits, its batch is cut into micro-batches whose gradients are added up: a pipeline of one stage.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from soapjax.costs.evaluate import forget_results
from soapjax.errors import InfeasibleError, SoapjaxError
from soapjax.execute.spmd.compiled_step import CompiledStep
from soapjax.execute.streams.stage_programs import MicroGraph
from soapjax.execute.streams.stream_step import StreamStep
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import TracedStep, trace
from soapjax.helpers.garbage import fewer_collections
from soapjax.planning import entry, options
from soapjax.planning.compile_check import PlannedStages
from soapjax.planning.fronts import joined_rows, rows_of_pipelines, rows_of_planned
from soapjax.planning.pipelining import staging
from soapjax.planning.pipelining.given_pipeline import require_same_result
from soapjax.planning.pipelining.pipelines import Beaten
from soapjax.planning.request import PlanRequest
from soapjax.report.front_table import FrontRow
from soapjax.search.objective import Objective
from soapjax.search.stages.choices import rank_of, scores_of
from soapjax.search.stages.joint_search import DEFAULT_PROPOSALS
from soapjax.strategy.plan import Plan, Prediction, StrategyFigures

LEAST_LEFT = 0.5  # of their part of the seconds, that pipelines have however long one program took
FOR_MICROBATCHES = 0.5  # of the seconds, where no baseline fits


class Chosen(NamedTuple):
    plan: Plan
    stopped_by: str
    front: tuple[FrontRow, ...]  # of all that was searched, where `pareto` asked for it
    step: TracedStep | None = None  # where the plan is of one program
    program: CompiledStep | StreamStep | None = None  # the plan's, where a check compiled it
    of_micro: MicroGraph | None = None  # the step with one micro-batch, where the plan is of a pipeline, and it was traced


@fewer_collections()
def as_asked(request: PlanRequest, fn: Callable[..., Any], *args: Any) -> Chosen:
    """The plan of one program, of a schedule, or of "auto", the better of both.

    Raises: as `plan` and `plan_pipeline`.
    """
    try:
        return _as_asked(request, fn, *args)
    finally:
        forget_results()


def _as_asked(request: PlanRequest, fn: Callable[..., Any], *args: Any) -> Chosen:
    if request.pipeline == "auto":
        return _one_program_or_pipeline(request, fn, *args)
    if request.pipeline is not None or request.adds_up:
        return _of_stages(staging.plan_staged(request.adding_up() if request.adds_up else request, fn, *args))
    if _may_add_up(request):
        return _one_program_that_fits(request, fn, *args)
    return _of_one_program(entry.plan_one_program(request, fn, *args))


def _of_one_program(found: entry.Planned) -> Chosen:
    return Chosen(found.plan, found.result.stopped_by, rows_of_planned(found), found.step, found.program)


def _of_stages(staged: PlannedStages) -> Chosen:
    found = staged.found
    return Chosen(staged.plan, found.stopped_by, rows_of_pipelines(found), program=staged.program, of_micro=found.of_micro)


def _may_add_up(request: PlanRequest) -> bool:
    """Whether several micro-batches are offered: not by another planner, nor beside what only one program can do."""
    is_searched = request.planner == "mcmc" and request.space == "soap" and not request.pareto and not request.verify_top
    return is_searched and request.num_microbatches is None


def _one_program_that_fits(request: PlanRequest, fn: Callable[..., Any], *args: Any) -> Chosen:
    """One program; with micro-batches where it does not fit without, and does with."""
    begin = time.monotonic()
    one, failed = None, None
    try:
        found = entry.plan_one_program(request, fn, *args, kept=FOR_MICROBATCHES)
        one, step = _of_one_program(found), found.step
        if found.plan.prediction.feasible or one.stopped_by == "interrupted":
            return one
        missed = f"does not fit ({found.plan.prediction.memory_bytes_per_device / 1e9:.3g} GB per device)"
    except InfeasibleError as e:
        failed, step = e, trace(fn, *args, **request.tracing)
        missed = "does not fit as compiled"
    kept_s = None if request.seconds is None else FOR_MICROBATCHES * request.seconds
    asked = request.adding_up().but(
        proposals=_proposals_of_stages(request.proposals),
        seconds=None if kept_s is None else max(request.seconds + begin - time.monotonic(), LEAST_LEFT * kept_s),
    )  # fmt: skip
    try:
        require_same_result(fn, *args, step=step, **asked.tracing)
        staged = staging.plan_staged(asked, fn, *args, traced=_traced(step), is_asked_for=False)
    except KeyboardInterrupt:
        if one is None:
            raise
        return one._replace(plan=_with_note(one.plan, "interrupted before micro-batches were tried", {}), stopped_by="interrupted")
    except SoapjaxError as e:
        if failed is not None:
            raise failed from None
        return one._replace(plan=_with_note(one.plan, f"micro-batches do not help: {e.problems[0]}", {}))
    others = {} if one is None else _figures_of_others(one)
    num = staged.plan.pipeline.num_microbatches
    note = f"the whole batch at once {missed}: gradients are added up over {num} micro-batches"
    return _of_stages(staged)._replace(plan=_with_note(staged.plan, note, others), front=())


def _one_program_or_pipeline(request: PlanRequest, fn: Callable[..., Any], *args: Any) -> Chosen:
    """The better of one program, for half of the seconds, and of all schedules, for what is left; the plan names the other's time.

    Raises: SoapjaxError for every input that does not fit; that no pipeline is possible only where numbers are asked for.
    """
    begin = time.monotonic()
    half_s = None if request.seconds is None else request.seconds / 2
    asked = request.but(seconds=half_s)
    try:
        found = entry.plan_one_program(asked.but(pipeline=None, microbatches="auto", stages="auto"), fn, *args)
    except InfeasibleError as e:
        return _pipeline_that_fits(request, e, begin, fn, *args)
    one, wanted = _of_one_program(found), options.objective(request.objective)
    predicted = found.plan.prediction
    if one.stopped_by == "interrupted":
        return one
    of_pipelines = asked.but(
        proposals=_proposals_of_stages(request.proposals),
        seconds=None if half_s is None else max(half_s + found.left_s, LEAST_LEFT * half_s),
    )
    slower_than_s = predicted.step_time_s if predicted.feasible and not request.pareto else math.inf
    try:
        staged = staging.plan_staged(of_pipelines, fn, *args, traced=_traced(found.step), slower_than_s=slower_than_s)
    except Beaten as e:
        return _no_better(one, wanted, e.schedule, e.figures)
    except KeyboardInterrupt:
        return one._replace(plan=_with_note(one.plan, "interrupted before a pipeline was found", {}), stopped_by="interrupted")
    except SoapjaxError as e:
        if request.num_microbatches is not None or request.num_stages is not None or not predicted.feasible:
            raise
        return one._replace(plan=_with_note(one.plan, f"no pipeline: {e.problems[0]}", {}))
    pipeline, plan = _of_stages(staged), staged.plan
    if predicted.feasible and _rank(predicted, wanted) <= _rank(plan.prediction, wanted):
        chosen = _no_better(one, wanted, plan.pipeline.schedule, figures_of_plan(plan))
        return chosen._replace(front=joined_rows(one.front, pipeline.front))
    note = "" if predicted.feasible else f"{_name(one)}: does not fit"
    noted = _with_note(plan, note, _figures_of_others(one))
    return pipeline._replace(plan=noted, front=joined_rows(pipeline.front, one.front))


def _pipeline_that_fits(request: PlanRequest, of_one: InfeasibleError, begin: float, fn: Callable[..., Any], *args: Any) -> Chosen:
    """A pipeline where one program does not fit as compiled.

    Raises: SoapjaxError where that does not help: `of_one`, but where a number of stages or micro-batches was asked for.
    """
    seconds = request.seconds
    if seconds is not None:
        seconds = max(seconds + begin - time.monotonic(), LEAST_LEFT * seconds / 2)
    try:
        staged = staging.plan_staged(request.but(proposals=_proposals_of_stages(request.proposals), seconds=seconds), fn, *args)
    except SoapjaxError:
        if request.num_microbatches is not None or request.num_stages is not None:
            raise
        raise of_one from None
    return _of_stages(staged)._replace(plan=_with_note(staged.plan, "one program does not fit as compiled", {}))


def _proposals_of_stages(proposals: int | None) -> int | None:
    """Of those that one program may have, what stages get: theirs take longer."""
    return None if proposals is None else min(proposals, DEFAULT_PROPOSALS)


def _name(one: Chosen) -> str:
    return f"one program ({one.plan.provenance.planner})"


def _figures_of_others(one: Chosen) -> dict[str, StrategyFigures]:
    """What a plan of stages is compared with: one program's, and the baselines."""
    return {_name(one): figures_of_plan(one.plan)} | one.plan.provenance.baseline_figures


def _traced(step: TracedStep) -> staging.Traced:
    return staging.Traced(step, build_graph(step)[0])


def _no_better(one: Chosen, wanted: Objective, schedule: str, figures: StrategyFigures) -> Chosen:
    note = "no pipeline is faster" if wanted.is_time else "no pipeline is better by the objective"
    return one._replace(plan=_with_note(one.plan, note, {f"pipeline {schedule}": figures}))


def _rank(p: Prediction, wanted: Objective) -> tuple[bool, float, float]:
    scores = scores_of(p.step_time_s, p.memory_bytes_per_device, p.peak_sent_bytes)
    return rank_of(scores, p.usable_memory_bytes, wanted)


def _with_note(plan: Plan, note: str, others: dict[str, StrategyFigures]) -> Plan:
    old = plan.provenance
    more = {
        "notes": (*old.notes, note) if note else old.notes,
        "baselines": {**old.baselines, **{name: f.step_time_s for name, f in others.items()}},
        "baseline_figures": {**old.baseline_figures, **others},
    }
    return plan.model_copy(update={"provenance": old.model_copy(update=more)})


def figures_of_plan(plan: Plan) -> StrategyFigures:
    p = plan.prediction
    return StrategyFigures(
        step_time_s=p.step_time_s, without_overlap_s=p.without_overlap_s, split_flops_share=p.split_flops_share,
        memory_bytes_per_device=p.memory_bytes_per_device, sent_bytes=sum(p.bytes_by_collective.values()), feasible=p.feasible,
        peak_sent_bytes=p.peak_sent_bytes,
    )  # fmt: skip
