"""What the commands share: what they give back, plans opened with their steps, and files written."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import RenderableType

from soapjax.cli.arguments import PlanCommand, ProfileCommand
from soapjax.errors import Problem
from soapjax.graph.trace.tracing import TracedStep, trace
from soapjax.helpers import files, interrupts
from soapjax.planning import plan_files
from soapjax.report.plan_tables import gains
from soapjax.steps.sourced_models import Model, abstract_model, with_arrays
from soapjax.strategy.plan import ModelSource, Plan
from soapjax.topology import DeviceTopology, load_topology

# Of every command: the object for --json, the renderable text, the exit status.
Result = tuple[dict[str, Any], RenderableType, int]
Progress = Callable[[int, float, float], None] | None


def wanted_topology(command: PlanCommand | ProfileCommand) -> DeviceTopology:
    """`--topology`, of `--hosts` nodes."""
    text = command.hosts
    hosts: Any = int(text) if text is not None and re.fullmatch("[0-9]{1,9}", text) else text  # what is no number is refused there
    return load_topology(command.topology, hosts=hosts)


def opened(plan: Plan, path: str, source: ModelSource, topology: str | None) -> tuple[plan_files.Opened, Model, TracedStep]:
    wanted = load_topology(topology) if topology is not None else None
    model = abstract_model(source)
    step = trace(model.step, *model.arguments, **plan.tracing)
    return plan_files.opened(plan, step, place=path, topology=wanted), model, step


def loaded(
    plan: Plan, path: str, source: ModelSource, *, topology: str | None = None, concrete: bool = False
) -> tuple[Plan, Model, TracedStep]:  # fmt: skip
    """The plan of a file with its step, which the user chose, traced, and its prediction made anew."""
    found, model, step = opened(plan, path, source, topology)
    return found.plan, with_arrays(model) if concrete else model, step


@contextlib.contextmanager
def closing(progress: Any) -> Iterator[None]:
    try:
        yield
    finally:
        if progress is not None:
            progress.stop()


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


def with_output(path: str, write: Callable[[str], None]) -> None:
    """Writes a command's file; from here on Ctrl-C no longer means that nothing was written."""
    interrupts.hold(f"interrupted again: {path} is whole, the old one or the new one")
    write(path)


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


def plain(value: Any) -> Any:
    """Named tuples and pydantic parts as what JSON has."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if hasattr(value, "_asdict"):
        return {k: plain(v) for k, v in value._asdict().items()}
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value
