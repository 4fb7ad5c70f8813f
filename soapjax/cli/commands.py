"""Runs a parsed command. This module and those below it import JAX."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from soapjax.cli import explaining_commands, measuring_commands, planning_commands, running_commands, topology_commands
from soapjax.cli.arguments import (
    CalibrateCommand,
    DemoCommand,
    DiffCommand,
    ExplainCommand,
    PlanCommand,
    ProfileCommand,
    ReportCommand,
    RunCommand,
    SimulateCommand,
    TopologiesCommand,
    VerifyCommand,
)
from soapjax.cli.results import Progress, Result, output_problems
from soapjax.errors import Problem, SoapjaxError
from soapjax.planning.options import OPTIONS


def run(command: Any, progress: Progress) -> Result:
    """Runs a parsed command, once its options are checked: nothing is imported or searched for one that is wrong."""
    problems = option_problems(command)
    if isinstance(command, PlanCommand):
        problems += planning_commands.plan_problems(command)
    if isinstance(command, PlanCommand | ProfileCommand) and command.output is not None:
        problems += output_problems(command.output)
    if problems:
        raise SoapjaxError(problems)
    handlers: dict[type, Callable[..., Result]] = {
        PlanCommand: functools.partial(planning_commands.plan_command, progress=progress),
        SimulateCommand: planning_commands.simulate_command,
        ExplainCommand: explaining_commands.explain_command,
        DiffCommand: explaining_commands.diff_command,
        ReportCommand: explaining_commands.report_command,
        RunCommand: running_commands.run_command,
        VerifyCommand: running_commands.verify_command,
        ProfileCommand: functools.partial(measuring_commands.profile_command, progress=progress),
        CalibrateCommand: measuring_commands.calibrate_command,
        TopologiesCommand: topology_commands.topologies_command,
        DemoCommand: running_commands.demo_command,
    }
    try:
        return handlers[type(command)](command)
    except SystemExit as e:  # the user's step or model, whatever its status: this command has not done what it was asked to do
        value, remedy = f"SystemExit: {str(e)[:100]}", "take sys.exit() out of the step, and of what it calls"
        raise SoapjaxError(Problem("model", value, "a step that returns", remedy)) from None


def option_problems(command: Any) -> list[Problem]:
    """What is wrong with a parsed command line, by the table of all options. What was left out is not looked at."""
    problems = []
    for field in dataclasses.fields(command):
        given = getattr(command, field.name)
        if field.name not in OPTIONS or given is None and field.default is None:
            continue
        place = "--" + field.name.replace("_", "-")
        for value in given if isinstance(given, tuple) else (given,):
            if field.type in ("str", str) and field.name in ("microbatches", "stages") and value.isdecimal() and len(value) < 10:
                value = int(value)
            problem = OPTIONS[field.name].problem(place, value)
            problems += [] if problem is None else [problem]
    return problems
