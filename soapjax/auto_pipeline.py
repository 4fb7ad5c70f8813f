"""`pipeline="auto"`: one program, or the best synchronous pipeline where that one is predicted to be faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from soapjax import planning
from soapjax.errors import SoapjaxError
from soapjax.search.stages import DEFAULT_PROPOSALS
from soapjax.strategy.plan import Plan, StrategyFigures


def plan_one_or_pipeline(
    fn: Callable[..., Any], *args: Any, microbatches: int | None = None, stages: int | None = None, proposals: int | None = None,
    seconds: float | None = None, **options: Any,
) -> tuple[Plan, str]:  # fmt: skip
    """The faster of `planning.plan` and `planning.plan_pipeline`, and what ended its search; the plan names the other's time.

    Args:
      microbatches, stages: as for `plan_pipeline`. `seconds`: of both searches together. Others as for `plan`.
    Raises: SoapjaxError for every input that does not fit; that no pipeline is possible only where numbers are asked for.
    """
    half_s = None if seconds is None else seconds / 2
    found = planning.plan(fn, *args, proposals=proposals, seconds=half_s, **options)
    one = found.plan.prediction
    if found.result.stopped_by == "interrupted":
        return found.plan, "interrupted"
    shared = (
        "topology", "seed", "unroll", "static_argnums", "model", "progress", "profile", "devices", "axis_name", "strip_constraints"
    )  # fmt: skip
    try:
        plan, best = planning.plan_pipeline(
            fn, *args, pipeline="auto", microbatches=microbatches, stages=stages, seconds=half_s,
            proposals=None if proposals is None else min(proposals, DEFAULT_PROPOSALS),
            **{k: options[k] for k in shared if k in options},
        )  # fmt: skip
    except KeyboardInterrupt:
        return _with_note(found.plan, "interrupted before a pipeline was found", {}), "interrupted"
    except SoapjaxError as e:
        if microbatches is not None or stages is not None or not one.feasible:
            raise
        return _with_note(found.plan, f"no pipeline: {e.problems[0]}", {}), found.result.stopped_by
    planner = found.plan.provenance.planner
    if one.feasible and one.step_time_s <= plan.prediction.step_time_s:
        others = {f"pipeline {plan.pipeline.schedule}": figures_of_plan(plan)}
        return _with_note(found.plan, "no pipeline is faster", others), found.result.stopped_by
    others = {f"one program ({planner})": figures_of_plan(found.plan)} | found.plan.provenance.baseline_figures
    note = "" if one.feasible else f"one program ({planner}): does not fit"
    return _with_note(plan, note, others), best.stopped_by


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
    )  # fmt: skip
