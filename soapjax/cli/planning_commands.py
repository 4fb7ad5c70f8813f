"""What `soapjax plan` and `soapjax simulate` do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from soapjax.cli import terminal
from soapjax.cli.arguments import PlanCommand, SimulateCommand
from soapjax.cli.results import Progress, Result, closing, opened, output_problems, plan_result, wanted_topology, with_output
from soapjax.cli.step_source import chosen_source
from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.compiled.devices import devices_of_backend, devices_of_target
from soapjax.helpers import interrupts
from soapjax.planning import plan_files
from soapjax.planning.choosing import Chosen, as_asked
from soapjax.planning.request import PlanRequest, planners_beside
from soapjax.report.front_table import front_view
from soapjax.report.perfetto import write_trace
from soapjax.report.plan_tables import plan_report
from soapjax.search.objective import Objective, objective_of
from soapjax.search.planners import PLANNERS, get_planner
from soapjax.steps.sourced_models import abstract_model, model_source
from soapjax.strategy.plan import Plan
from soapjax.topology import DeviceTopology, load_topology


def plan_problems(command: PlanCommand) -> list[Problem]:
    """Which options of `soapjax plan` do not go together."""
    return _pipeline_problems(command) + _check_problems(command) + _objective(command)[1] + _layouts(command)[2]


def plan_command(command: PlanCommand, progress: Progress = None) -> Result:
    topology = wanted_topology(command)
    get_planner(command.planner, space=command.space)
    model = abstract_model(model_source(command.model, command.set))
    alike = {name: value for name, value in vars(command).items() if hasattr(PlanRequest, name)}
    numbers = {name: n if (n := getattr(command, name)) == "auto" else int(n) for name in ("microbatches", "stages")}
    fixed, rules, _ = _layouts(command)
    meant = dict(
        topology=topology, objective=_objective(command)[0], devices=_devices_to_compile_for(command, topology),
        fixed=fixed or None, logical_axis_rules=rules or None, **numbers,
    )  # fmt: skip
    request = PlanRequest(**alike | meant | {"model": model.source, "progress": progress})
    begin = time.monotonic()
    with closing(progress):
        chosen = as_asked(request, model.step, *model.arguments)
    return _planned(command, chosen, search_s=time.monotonic() - begin)


def _devices_to_compile_for(command: PlanCommand, topology: DeviceTopology) -> list[Any] | None:
    """Of `--check compile`; None for those at hand."""
    if command.check == "none":
        return None
    return devices_of_backend(topology) if command.target is None else devices_of_target(topology, command.target)


def _layouts(command: PlanCommand) -> tuple[dict[str, str], tuple[tuple[str, tuple[str, ...]], ...], list[Problem]]:
    """What is fixed by path, logical axis rules, and what of either is no pair."""
    problems = []

    def pairs(flag: str, given: Sequence[str], example: str) -> list[tuple[str, str]]:
        found = [tuple(x.strip() for x in text.partition("=")) for text in given]
        for text, (name, is_pair, _) in zip(given, found, strict=True):
            if not (name and is_pair):
                problems.append(Problem(flag, repr(text), "a name, =, and axes", f"write e.g. {flag} {example}"))
        return [(name, axes) for name, _, axes in found]

    fixed, rules = pairs("--fix", command.fix, "batch.x=d0"), pairs("--axis-rule", command.axis_rule, "mlp=d0")
    return dict(fixed), tuple((name, tuple(a.strip() for a in axes.split("+") if a.strip())) for name, axes in rules), problems


def _check_problems(command: PlanCommand) -> list[Problem]:
    """What does not go together with `--check` and `--target`."""
    problems = []
    if command.target is not None and command.check != "compile":
        problems.append(Problem("--target", command.target, "--check compile", "add it, or drop --target"))
    if command.target is not None and command.verify_top:
        problems.append(Problem("--target", command.target, "the devices at hand with --verify-top", "drop one of them"))
    return problems


def _objective(command: PlanCommand) -> tuple[Objective, list[Problem]]:
    return objective_of(command.objective, command.max_bytes, command.max_memory, command.weights)


def _planned(command: PlanCommand, chosen: Chosen, *, search_s: float) -> Result:
    """Saves a plan and reports it, with the seconds that planning took, which no file keeps."""
    plan, stopped_by = chosen.plan, "interrupted" if interrupts.came() else chosen.stopped_by
    if command.output is not None:
        with_output(command.output, plan.save)
    result = plan_result(plan) | {"stopped_by": stopped_by, "output": command.output, "search_s": round(search_s, 3)}
    lines = [f"planned in {search_s:.3g} s; {plan.provenance.num_proposals:,} proposals"]
    lines += [f"written to {command.output}"] if command.output else ["not written: give -o plan.json"]
    status = 0
    p, named = plan.prediction, {"max_bytes": "--max-bytes", "max_memory": "--max-memory"}
    for problem in _objective(command)[0].unmet(p.peak_sent_bytes, p.memory_bytes_per_device):
        terminal.print_line(f"error: {problem._replace(place=named[problem.place])}")
        status = 3
    if stopped_by == "interrupted":
        lines.append("interrupted: this is the best so far")
        status = interrupts.STATUS
    views = [front_view(chosen.front)] if command.pareto else []
    if command.pareto:
        result |= {"front": [row._asdict() for row in chosen.front]}
    return result, Group(plan_report(plan), *views, Text("\n".join(lines))), status


def _pipeline_problems(command: PlanCommand) -> list[Problem]:
    """What does not go together with `--pipeline` and `--microbatches`."""
    problems = []
    if command.stages != "auto" and command.pipeline is None:
        problems.append(Problem("--stages", command.stages, "a pipeline", "add --pipeline auto, or another"))
    adds_up = command.pipeline is None and command.microbatches not in ("auto", "1")  # as `PlanRequest.adds_up`
    if command.planner in PLANNERS and command.planner not in (allowed := planners_beside(command.pipeline, adds_up)):
        expected = f"{' or '.join(allowed)} with {'--microbatches' if adds_up else '--pipeline'}"
        problems.append(Problem("--planner", command.planner, expected, "drop one of them"))
    if (command.pipeline is not None or adds_up) and command.space != "soap":
        beside = "--microbatches" if adds_up else "--pipeline"
        problems.append(Problem("--space", command.space, f"soap with {beside}", "drop one of them"))
    if (command.pipeline not in (None, "auto") or adds_up) and command.verify_top:
        expected, remedy = "no pipeline, or auto: only plans of one program are compared", "drop one of them"
        problems.append(Problem("--verify-top", str(command.verify_top), expected, remedy))
    return problems


def simulate_command(command: SimulateCommand) -> Result:
    if command.trace is not None and (problems := output_problems(command.trace, "--trace", "trace.json")):
        raise SoapjaxError(problems)
    plan = Plan.load(command.plan)
    if (source := chosen_source(command, plan, place=command.plan)) is not None:
        found, _, _ = opened(plan, command.plan, source, command.topology)
    else:
        wanted = load_topology(command.topology) if command.topology is not None else None
        found = plan_files.opened_alone(plan, place=command.plan, topology=wanted)
    result, report = plan_result(found.plan), plan_report(found.plan)
    if command.trace is not None:
        events = plan_files.timeline_events(found)
        with_output(command.trace, lambda path: write_trace(path, events, title=f"simulated: {command.plan}"))
        result, report = result | {"trace": command.trace}, Group(report, Text(f"timeline written to {command.trace}"))
    return result, report, 0
