"""The commands that say why: explain, diff, report. They need no step: a plan is predicted anew from the figures that it carries,
unless only what is written is to count."""

from __future__ import annotations

import re

from rich.console import Group
from rich.text import Text

from soapjax.cli.arguments import DiffCommand, ExplainCommand, ReportCommand
from soapjax.cli.explaining import explain, explain_operator, with_costs
from soapjax.cli.results import Result, output_problems, plain, with_output
from soapjax.errors import Problem, SoapjaxError
from soapjax.helpers.files import write_text_atomic
from soapjax.helpers.own_config import on_cpu
from soapjax.planning.page_data import extras_of, pipeline_extras
from soapjax.planning.plan_files import Opened, opened_alone, reopened
from soapjax.report.difference import difference_of, difference_report
from soapjax.report.explanation import explanation_report, operator_report
from soapjax.report.html import Extras, page
from soapjax.strategy.plan import TRACING, Plan
from soapjax.strategy.plan_strategy import topology_of

NO_GRAPH = "the plan carries no operator graph (older versions wrote none): this is what is written in the file"


def _opened(raw: Plan, path: str, *, plan_only: bool) -> tuple[Plan, Opened | None, list[str]]:
    """The plan of a file, with what its prediction is made from unless only the file counts; and remarks."""
    if plan_only or raw.operator_graph is None:
        _check_choices(raw, path)
        return raw, None, [] if plan_only else [NO_GRAPH]
    found = opened_alone(raw, place=path)
    return found.plan, found, []


def _check_choices(plan: Plan, place: str) -> None:
    """What is not predicted anew must at least be possible to read.

    Raises: SoapjaxError naming every choice that is none.
    """
    topology_of(plan, place=place)
    problems = []
    for name, part in plan.operators.items():
        for axis, value in part.axes.items():
            if value not in part.dims and value != "replicate" and not re.fullmatch(r"pin\(\d{1,9}\)", value):
                choices = " or ".join([*part.dims, "replicate"])
                problems.append(Problem(f"{place}: operators.{name}.axes.{axis}", repr(value), choices, "choose one of these"))
    if problems:
        raise SoapjaxError(problems)


def explain_command(command: ExplainCommand) -> Result:
    plan, found, remarks = _opened(Plan.load(command.plan), command.plan, plan_only=command.plan_only)
    if command.operator is not None:
        operator = explain_operator(plan, command.operator, found, place=f"{command.plan}: operators")
        if found is not None and found.problem is None:
            remarks.append("of a pipeline no other choices are simulated")
        return plain(operator), Group(operator_report(plan, operator), Text("\n".join(remarks))), 0
    why = explain(plan, found)
    result = plain(why) | {"step_time_s": plan.prediction.step_time_s, "notes": [*remarks, *plan.provenance.notes]}
    return result, Group(explanation_report(plan, why), Text("\n".join(remarks))), 0


def diff_command(command: DiffCommand) -> Result:
    problems: list[Problem] = []
    raw: list[Plan] = []
    for path in (command.a, command.b):
        try:
            raw.append(Plan.load(path))
        except SoapjaxError as e:
            problems += e.problems
    if problems:
        raise SoapjaxError(problems)
    a, a_opened, remarks = _opened(raw[0], command.a, plan_only=command.plan_only)
    if a_opened is not None and _one_problem(*raw):
        # One problem prices both: its tables and programs are made once.
        with on_cpu():
            b_opened = reopened(raw[1], a_opened, place=command.b)
        b, found = b_opened.plan, with_costs(difference_of(a, b_opened.plan), a_opened, b_opened)
    else:
        b, _, more = _opened(raw[1], command.b, plan_only=command.plan_only)
        found, remarks = difference_of(a, b), list(dict.fromkeys([*remarks, *more]))
    steps = {"a": a.prediction.step_time_s, "b": b.prediction.step_time_s}
    result = plain(found) | {"same": found.is_none, "step_time_s": steps}
    return result, Group(difference_report(a, b, found), Text("\n".join(remarks))), 0


def _one_problem(a: Plan, b: Plan) -> bool:
    """Whether two plans are points of one space, with the same figures for their costs."""
    same = all(getattr(a, f) == getattr(b, f) for f in ("topology", "mesh", "profile", "fixed", *TRACING))
    is_one_program = a.pipeline is None and b.pipeline is None and a.recomputed == b.recomputed
    return same and is_one_program and a.graph.fingerprint == b.graph.fingerprint and bool(a.pinned) == bool(b.pinned)


def report_command(command: ReportCommand) -> Result:
    if problems := output_problems(command.output, "--output", "report.html"):
        raise SoapjaxError(problems)
    plan, found, remarks = _opened(Plan.load(command.plan), command.plan, plan_only=command.plan_only)
    extras = Extras()
    if found is not None:
        with on_cpu():
            if found.stages is not None:
                topology, _ = topology_of(plan)
                extras = pipeline_extras(found.stages.timeline, topology, found.graph)
            else:
                extras = extras_of(found.problem.simulator, found.strategy)
    text = page(plan, extras, title=_title(plan))
    with_output(command.output, lambda path: write_text_atomic(path, text))
    result = {"output": command.output, "bytes": len(text.encode()), "step_time_s": plan.prediction.step_time_s}
    lines = [*remarks, f"written to {command.output}, {len(text.encode()) / 1e3:.0f} kB: open it in a browser"]
    return result | {"notes": remarks}, Text("\n".join(lines)), 0


def _title(plan: Plan) -> str:
    model = f"{plan.model.path} " if plan.model is not None else ""
    settings = "" if plan.model is None else " ".join(f"{k}={v}" for k, v in plan.model.settings.items())
    return f"{model}{settings + ' ' if settings else ''}on {plan.topology.get('name', '?')}, {plan.num_devices} devices"
