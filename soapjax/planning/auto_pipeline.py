"""`pipeline="auto"`: one program, or the best synchronous pipeline where that one is predicted to be better."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from soapjax.errors import SoapjaxError
from soapjax.graph.operators import OperatorGraph
from soapjax.options import objective
from soapjax.planning import entry
from soapjax.planning.fronts import joined_rows, rows_of_pipelines, rows_of_planned
from soapjax.planning.pipelines import Beaten
from soapjax.report.front import FrontRow
from soapjax.search.objective import Objective
from soapjax.search.stages.joint_search import DEFAULT_PROPOSALS
from soapjax.simulate.simulator import Scores
from soapjax.strategy.plan import Plan, Prediction, StrategyFigures


class Chosen(NamedTuple):
    plan: Plan
    stopped_by: str
    front: tuple[FrontRow, ...]  # of both, where `pareto` asked for it


def plan_one_or_pipeline(
    fn: Callable[..., Any], *args: Any, microbatches: int | None = None, stages: int | None = None, proposals: int | None = None,
    seconds: float | None = None, **options: Any,
) -> Chosen:  # fmt: skip
    """The better of `entry.plan` and `entry.plan_pipeline`, and what ended its search; the plan names the other's time.

    Args:
      microbatches, stages: as for `plan_pipeline`. `seconds`: of both searches together. Others as for `plan`.
    Raises: SoapjaxError for every input that does not fit; that no pipeline is possible only where numbers are asked for.
    """
    half_s = None if seconds is None else seconds / 2
    found = entry.plan(fn, *args, proposals=proposals, seconds=half_s, **options)
    one = found.plan.prediction
    wanted = objective(options.get("objective", "time"))
    if found.result.stopped_by == "interrupted":
        return Chosen(found.plan, "interrupted", rows_of_planned(found))
    shared = (
        "topology", "seed", "unroll", "static_argnums", "model", "progress", "profile", "devices", "axis_name", "strip_constraints",
        "objective", "pareto",
    )  # fmt: skip
    try:
        plan, best = entry.plan_pipeline(
            fn, *args, pipeline="auto", microbatches=microbatches, stages=stages, seconds=half_s,
            proposals=None if proposals is None else min(proposals, DEFAULT_PROPOSALS), graph=_graph(found),
            slower_than_s=one.step_time_s if one.feasible and not options.get("pareto") else math.inf,
            **{k: options[k] for k in shared if k in options},
        )  # fmt: skip
    except Beaten as e:
        return _one_program(found, wanted, e.schedule, e.figures)
    except KeyboardInterrupt:
        return Chosen(_with_note(found.plan, "interrupted before a pipeline was found", {}), "interrupted", rows_of_planned(found))
    except SoapjaxError as e:
        if microbatches is not None or stages is not None or not one.feasible:
            raise
        return Chosen(_with_note(found.plan, f"no pipeline: {e.problems[0]}", {}), found.result.stopped_by, rows_of_planned(found))
    planner, rows, staged = found.plan.provenance.planner, rows_of_planned(found), rows_of_pipelines(best)
    if one.feasible and _rank(one, wanted) <= _rank(plan.prediction, wanted):
        chosen = _one_program(found, wanted, plan.pipeline.schedule, figures_of_plan(plan))
        return chosen._replace(front=joined_rows(rows, staged))
    others = {f"one program ({planner})": figures_of_plan(found.plan)} | found.plan.provenance.baseline_figures
    note = "" if one.feasible else f"one program ({planner}): does not fit"
    return Chosen(_with_note(plan, note, others), best.stopped_by, joined_rows(staged, rows))


def _graph(found: entry.Planned) -> OperatorGraph | None:
    """The step's graph; None where the plan recomputes, and so has another."""
    graph = found.problem.graph
    return None if any(op.is_recomputed for op in graph.operators) else graph


def _one_program(found: entry.Planned, wanted: Objective, schedule: str, figures: StrategyFigures) -> Chosen:
    note = "no pipeline is faster" if wanted.is_time else "no pipeline is better by the objective"
    made = _with_note(found.plan, note, {f"pipeline {schedule}": figures})
    return Chosen(made, found.result.stopped_by, rows_of_planned(found))


def _rank(p: Prediction, wanted: Objective) -> tuple[bool, float, float]:
    figures = p.step_time_s, p.memory_bytes_per_device, 0, p.peak_sent_bytes
    found = wanted.standing(Scores(*(np.array([x], np.float64) for x in figures)), p.usable_memory_bytes)
    return not found.is_feasible[0], float(found.excess[0]), float(found.cost[0])


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
