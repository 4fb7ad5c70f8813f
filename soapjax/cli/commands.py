"""What the commands do: each returns (result for --json, renderable text, exit status)."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from soapjax import files, interrupts, plan_files, planning
from soapjax.auto_pipeline import Chosen, plan_one_or_pipeline
from soapjax.cli import command_line as cli
from soapjax.cli import step_source, terminal
from soapjax.devices import devices_of_backend, devices_of_target
from soapjax.errors import Problem, SoapjaxError
from soapjax.fronts import rows_of_pipelines, rows_of_planned
from soapjax.graph.trace import TracedStep, trace
from soapjax.model_source import Model, abstract_model, model_source, with_arrays
from soapjax.options import command_problems
from soapjax.report.front import FrontRow, front_view
from soapjax.report.perfetto import write_trace
from soapjax.report.tables import gains, plan_report
from soapjax.search.objective import Objective, objective_of
from soapjax.search.planners import get_planner
from soapjax.strategy.plan import ModelSource, Plan
from soapjax.topology import DeviceTopology, load_topology

Result = tuple[dict[str, Any], RenderableType, int]
Progress = Callable[[int, float, float], None] | None


def run(command: Any, progress: Progress) -> Result:
    """Runs a parsed command, once its options are checked: nothing is imported or searched for one that is wrong."""
    problems = command_problems(command)
    if isinstance(command, cli.PlanCommand):
        problems += _pipeline_problems(command) + _check_problems(command) + _objective(command)[1]
    if isinstance(command, cli.PlanCommand | cli.ProfileCommand) and command.output is not None:
        problems += output_problems(command.output)
    if problems:
        raise SoapjaxError(problems)
    from soapjax.cli import (  # they use the helpers below
        explaining_commands,
        measuring_commands,
        running_commands,
        topology_commands,
    )

    handlers = {
        cli.PlanCommand: functools.partial(plan_command, progress=progress),
        cli.SimulateCommand: simulate_command,
        cli.ExplainCommand: explaining_commands.explain_command,
        cli.DiffCommand: explaining_commands.diff_command,
        cli.ReportCommand: explaining_commands.report_command,
        cli.RunCommand: running_commands.run_command,
        cli.VerifyCommand: running_commands.verify_command,
        cli.ProfileCommand: functools.partial(measuring_commands.profile_command, progress=progress),
        cli.CalibrateCommand: measuring_commands.calibrate_command,
        cli.TopologiesCommand: topology_commands.topologies_command,
        cli.DemoCommand: running_commands.demo_command,
    }
    try:
        return handlers[type(command)](command)
    except SystemExit as e:  # the user's step or model, whatever its status: this command has not done what it was asked to do
        value, remedy = f"SystemExit: {str(e)[:100]}", "take sys.exit() out of the step, and of what it calls"
        raise SoapjaxError(Problem("model", value, "a step that returns", remedy)) from None


def plan_command(command: cli.PlanCommand, progress: Progress = None) -> Result:
    numbers = {k: None if (n := getattr(command, k)) == "auto" else int(n) for k in ("microbatches", "stages")}
    topology = wanted_topology(command)
    get_planner(command.planner, space=command.space)
    model = abstract_model(model_source(command.model, command.set))
    if command.pipeline is not None and command.pipeline != "auto":
        return _pipeline_command(command, model, topology, numbers, progress)
    options = dict(
        topology=topology, planner=command.planner, seed=command.seed, proposals=command.proposals, seconds=command.seconds,
        unroll=command.unroll, space=command.space, model=model.source, progress=progress, profile=command.profile,
        verify_top=command.verify_top, objective=_objective(command)[0], pareto=command.pareto,
        simplicity=command.simplicity, check=command.check, devices=_devices_to_compile_for(command, topology),
    )  # fmt: skip
    begin = time.monotonic()
    with closing(progress):
        if command.pipeline is not None:
            chosen = plan_one_or_pipeline(model.step, *model.arguments, **numbers, **options)
        else:
            found = planning.plan(model.step, *model.arguments, **options)
            chosen = Chosen(found.plan, found.result.stopped_by, rows_of_planned(found))
    return _planned(command, *chosen, search_s=time.monotonic() - begin)


def _devices_to_compile_for(command: cli.PlanCommand, topology: DeviceTopology) -> list[Any] | None:
    """Of `--check compile`; None for those at hand."""
    if command.check == "none":
        return None
    return devices_of_backend(topology) if command.target is None else devices_of_target(topology, command.target)


def _check_problems(command: cli.PlanCommand) -> list[Problem]:
    """What does not go together with `--check` and `--target`."""
    problems = []
    if command.target is not None and command.check != "compile":
        problems.append(Problem("--target", command.target, "--check compile", "add it, or drop --target"))
    if command.check == "compile" and command.pipeline is not None:
        expected, remedy = "one program: stages are not compiled", "drop one of them; soapjax verify compiles a pipeline's stages"
        problems.append(Problem("--check", f"compile with --pipeline {command.pipeline}", expected, remedy))
    if command.target is not None and command.verify_top:
        problems.append(Problem("--target", command.target, "the devices at hand with --verify-top", "drop one of them"))
    return problems


def wanted_topology(command: cli.PlanCommand | cli.ProfileCommand) -> DeviceTopology:
    """`--topology`, of `--hosts` nodes."""
    text = command.hosts
    return load_topology(command.topology, hosts=int(text) if text is not None and re.fullmatch("[0-9]{1,9}", text) else text)


def _objective(command: cli.PlanCommand) -> tuple[Objective, list[Problem]]:
    return objective_of(command.objective, command.max_bytes, command.max_memory, command.weights)


def _planned(command: cli.PlanCommand, plan: Plan, stopped_by: str, front: Sequence[FrontRow], *, search_s: float) -> Result:
    """Saves a plan and reports it, with the seconds that planning took, which no file keeps."""
    stopped_by = "interrupted" if interrupts.came() else stopped_by
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
    views = [front_view(front)] if command.pareto else []
    if command.pareto:
        result |= {"front": [row._asdict() for row in front]}
    return result, Group(plan_report(plan), *views, Text("\n".join(lines))), status


def _pipeline_problems(command: cli.PlanCommand) -> list[Problem]:
    """Which options do not go together."""
    problems = []
    for name in ("microbatches", "stages"):
        text = getattr(command, name)
        if text != "auto" and command.pipeline is None:
            problems.append(Problem(f"--{name}", text, "a pipeline", "add --pipeline auto, or another"))
    if command.pipeline is not None and command.space != "soap":
        problems.append(Problem("--space", command.space, "soap with --pipeline", "drop one of them"))
    if command.pipeline not in (None, "auto") and command.verify_top:
        expected, remedy = "no pipeline, or auto: only plans of one program are compared", "drop one of them"
        problems.append(Problem("--verify-top", str(command.verify_top), expected, remedy))
    return problems


def _pipeline_command(
    command: cli.PlanCommand, model: Model, topology: DeviceTopology, numbers: dict[str, int | None], progress: Progress
) -> Result:
    begin = time.monotonic()
    with closing(progress):
        plan, found = planning.plan_pipeline(
            model.step, *model.arguments, pipeline=command.pipeline, topology=topology, seed=command.seed,
            proposals=command.proposals, seconds=command.seconds, unroll=command.unroll, model=model.source, progress=progress,
            profile=command.profile, objective=_objective(command)[0], pareto=command.pareto, **numbers,
        )  # fmt: skip
    return _planned(command, plan, found.stopped_by, rows_of_pipelines(found), search_s=time.monotonic() - begin)


def with_output(path: str, write: Callable[[str], None]) -> None:
    """Writes a command's file; from here on Ctrl-C no longer means that nothing was written."""
    interrupts.hold(f"interrupted again: {path} is whole, the old one or the new one")
    write(path)


def output_problems(output: str, option: str = "--output", example: str = "plan.json") -> list[Problem]:
    """What would keep a file from being written there: found before the search, not after it."""
    try:
        if into := files.special_file(output):  # a device or a pipe, which is written into
            is_writable = os.access(into, os.W_OK)
            return [] if is_writable else [Problem(option, repr(output), "a place that you may write to", "choose another")]
        path = os.path.realpath(output)
    except (OSError, ValueError) as e:  # a deleted working folder, a zero byte
        why = f"{output!r} ({getattr(e, 'strerror', None) or e})"
        return [Problem(option, why, "a file that can be written", "name one by a whole path")]
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        return [Problem(option, repr(output), "a path in an existing folder", "make the folder first")]
    if not output or os.path.isdir(path):
        return [Problem(option, f"{output!r}, a folder", "a file", f"name the file, e.g. {example}")]
    if not os.access(folder, os.W_OK):
        return [Problem(option, repr(output), "a folder that you may write to", "choose another folder")]
    return []


@contextlib.contextmanager
def closing(progress: Any) -> Iterator[None]:
    try:
        yield
    finally:
        if progress is not None:
            progress.stop()


def plan_result(plan: Plan) -> dict[str, Any]:
    p, source = plan.prediction, plan.provenance
    return {
        "step_time_s": p.step_time_s,
        "without_overlap_s": p.without_overlap_s,
        "hidden_communication_s": p.hidden_communication_s,
        "split_flops_share": p.split_flops_share,
        "baselines": source.baselines,
        "baseline_figures": {name: f.model_dump() for name, f in source.baseline_figures.items()},
        "gains": {name: {"times_as_fast": gain, "caveat": words} for name, (gain, words) in gains(plan).items()},
        "feasible": p.feasible,
        "executable": plan.executable,
        "memory_bytes_per_device": p.memory_bytes_per_device,
        "usable_memory_bytes": p.usable_memory_bytes,
        "bytes_by_collective": p.bytes_by_collective,
        "peak_sent_bytes": p.peak_sent_bytes,
        "objective": source.objective,
        "num_operators": plan.graph.num_operators,
        "num_devices": plan.num_devices,
        "num_proposals": source.num_proposals,
        "notes": list(source.notes),
        "compute_figures": p.compute_figures,
        "verified": [t.model_dump() for t in source.verified],
        "compiled": [f.model_dump() | {"fits": f.fits} for f in source.compiled],
        "plan_sha256": plan.plan_sha256,
    }


def loaded(
    plan: Plan, path: str, source: ModelSource, *, topology: str | None = None, concrete: bool = False
) -> tuple[Plan, Model, TracedStep]:  # fmt: skip
    """The plan of a file with its step, which the user chose, traced, and its prediction made anew."""
    found, model, step = _opened(plan, path, source, topology)
    return found.plan, with_arrays(model) if concrete else model, step


def _opened(plan: Plan, path: str, source: ModelSource, topology: str | None) -> tuple[plan_files.Opened, Model, TracedStep]:
    wanted = load_topology(topology) if topology is not None else None
    model = abstract_model(source)
    step = trace(model.step, *model.arguments, unroll=plan.unroll)
    return plan_files.opened(plan, step, place=path, topology=wanted), model, step


def simulate_command(command: cli.SimulateCommand) -> Result:
    if command.trace is not None and (problems := output_problems(command.trace, "--trace", "trace.json")):
        raise SoapjaxError(problems)
    plan = Plan.load(command.plan)
    if (source := step_source.chosen_source(command, plan, place=command.plan)) is not None:
        found, _, _ = _opened(plan, command.plan, source, command.topology)
    else:
        wanted = load_topology(command.topology) if command.topology is not None else None
        found = plan_files.opened_alone(plan, place=command.plan, topology=wanted)
    result, report = plan_result(found.plan), plan_report(found.plan)
    if command.trace is not None:
        events = plan_files.timeline_events(found)
        with_output(command.trace, lambda path: write_trace(path, events, title=f"simulated: {command.plan}"))
        result, report = result | {"trace": command.trace}, Group(report, Text(f"timeline written to {command.trace}"))
    return result, report, 0
