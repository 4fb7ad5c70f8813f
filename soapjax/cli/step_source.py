"""The step of a plan on the command line comes from the user: `--model`, or `--trust` where the plan's own is meant.

A plan says where its step came from. That is a remark: it may be from a stranger, and whoever wrote it would choose what code runs.
So the commands that need the step print what to type, and end.
"""

from __future__ import annotations

import dataclasses
import shlex

from soapjax.cli.arguments import COMMANDS, StepOptions
from soapjax.errors import Problem, SoapjaxError
from soapjax.steps.sourced_models import model_source, setting_pairs
from soapjax.strategy.plan import ModelSource, Plan

MOST_TYPED = 1000  # characters of a command line that is printed


def chosen_source(command: StepOptions, plan: Plan, *, place: str) -> ModelSource | None:
    """The step that the user chose, None where nothing was said. Imports nothing.

    Raises: SoapjaxError where options contradict each other, or `--trust` finds no name in the plan.
    """
    problems = []
    if command.model is not None and command.trust:
        problems.append(Problem("--trust", f"with --model {command.model}", "one of them", "drop --trust to run your own step"))
    if command.model is None and command.set:
        problems.append(Problem("--set", ", ".join(command.set), "settings of --model", "add --model package.module:factory"))
    if command.trust and plan.model is None:
        problems.append(Problem(f"{place}: model", "missing", "the name of a step to trust", "give the step with --model"))
    if problems:
        raise SoapjaxError(problems)
    if command.model is not None:
        return model_source(command.model, command.set, place="--model")
    return plan.model if command.trust else None


def required_source(command: StepOptions, plan: Plan, *, place: str) -> ModelSource:
    """As `chosen_source`.

    Raises: SoapjaxError where nothing was said, with the command line to type.
    """
    if (found := chosen_source(command, plan, place=place)) is not None:
        return found
    expected = "the step from you: nothing that a plan names is run unasked"
    if plan.model is None:
        remedy = "add --model package.module:factory, or use soap_shard(plan=...) in your own code"
        raise SoapjaxError(Problem(f"{place}: model", "missing", expected, remedy))
    line = typed(command, plan.model)
    if len(line) > MOST_TYPED:
        line = "it with --model, and a --set for each of the plan's settings"
    remedy = f"if this is your step, type: {line} (--trust does the same, where you trust whoever wrote the plan)"
    raise SoapjaxError(Problem(f"{place}: model", repr(plan.model.path), expected, remedy))


def typed(command: StepOptions, source: ModelSource) -> str:
    """The command line that runs a command with this step."""
    name = next(n for n, kind in COMMANDS.items() if kind is type(command))
    words = ["soapjax", name]
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        if field.name in ("model", "set", "trust"):
            continue
        if field.default is dataclasses.MISSING:  # plan files, by position
            words += value if isinstance(value, list) else [value]
        elif value != field.default:
            words += [f"--{field.name}"] if value is True else [f"--{field.name}", str(value)]
    words += ["--model", source.path]
    for pair in setting_pairs(source.settings):
        words += ["--set", pair]
    return shlex.join(words)
