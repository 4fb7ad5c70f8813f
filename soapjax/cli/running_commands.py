"""The commands that run or compile plans: run, verify, demo; and the devices that they do it on."""

from __future__ import annotations

import importlib
import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from rich.console import Group
from rich.text import Text

from soapjax.cli.arguments import DemoCommand, RunCommand, VerifyCommand
from soapjax.cli.program_proofs import ProgramsVerified, verify_programs
from soapjax.cli.results import Result, loaded, plan_result
from soapjax.cli.step_source import required_source
from soapjax.costs.measured.profile import is_same_kind
from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.compiled.devices import devices_of_target, start_devices
from soapjax.execute.compiled.hlo import OpsCheck
from soapjax.execute.compiled.inspection import inspect as inspect_program
from soapjax.execute.compiled.proof import Verification, verify
from soapjax.execute.compiled.timing import are_fake
from soapjax.execute.compiled.traffic import compare_by_kind, differences
from soapjax.execute.spmd.compiled_step import CompiledStep
from soapjax.execute.spmd.planned_evaluator import bind_plan, not_executable
from soapjax.execute.streams.stream_step import StreamStep, compile_step
from soapjax.graph.trace.tracing import TracedStep
from soapjax.planning import entry
from soapjax.planning.pipelining.given_pipeline import planned_pipeline
from soapjax.planning.profiling import device_at_hand
from soapjax.report.plan_tables import overlap_words, plan_report, seconds
from soapjax.report.verification import compiled_report, numeric_lines, programs_report
from soapjax.steps.factories import OWN_MODELS
from soapjax.steps.sourced_models import Model, abstract_model, with_arrays
from soapjax.strategy.plan import ModelSource, Plan
from soapjax.strategy.plan_strategy import topology_of
from soapjax.topology import DeviceTopology, load_topology


def _checked(command: RunCommand | VerifyCommand) -> tuple[Plan, ModelSource, DeviceTopology]:
    """The plan of a file, the step that the user chose for it, and its topology: before a device is started or a module imported.

    Raises: SoapjaxError where the plan's mesh is not its topology's, where it cannot be run, or no step was chosen.
    """
    plan = Plan.load(command.plan)
    topology, _ = topology_of(plan, place=command.plan)
    if problems := not_executable(plan, place=command.plan):
        raise SoapjaxError(problems)
    return plan, required_source(command, plan, place=command.plan), topology


def _is_comparable(plan: Plan, devices: list[Any]) -> bool:
    """Whether a measured time says something about the prediction: real devices of the planned kind."""
    topology = DeviceTopology.from_dict(plan.topology)
    return not (topology.fake or are_fake(devices)) and is_same_kind(topology.device, device_at_hand())


def run_command(command: RunCommand) -> Result:
    plan, source, topology = _checked(command)
    devices = start_devices(topology.num_devices)
    plan, model, step = loaded(plan, command.plan, source, concrete=True)
    _require_state(model, step)
    compiled: CompiledStep | StreamStep
    if plan.pipeline is not None:
        compiled = planned_pipeline(model.step, *model.arguments, plan=plan, devices=devices)
    else:
        compiled = compile_step(bind_plan(step, plan, devices=devices))
    losses, times = train(compiled, model, command.steps)
    result: dict[str, Any] = {
        "predicted_s": plan.prediction.step_time_s,
        "measured_s": statistics.median(times),
        "comparable": _is_comparable(plan, devices),
        "loss": losses,
    }
    remark = "" if result["comparable"] else " (not comparable: these are not the planned devices)"
    text = Text(
        f"{command.steps} steps: loss {losses[0]:.6g} → {losses[-1]:.6g}\n"
        f"predicted {seconds(result['predicted_s'])} per step{overlap_words(plan)}, "
        f"measured {seconds(result['measured_s'])}{remark}"
    )
    return result, text, 0


def _require_state(model: Model, step: TracedStep) -> None:
    count = len(jax.tree_util.tree_leaves(model.arguments[0]))
    if not count or any(i not in step.state_pairs for i in range(count)):
        raise SoapjaxError(
            Problem(
                f"model {model.source.path}",
                "a step that does not return its first argument's new value",
                "(state, batch) -> (state, metrics)",
                "return the new state, with the same tree, shapes and dtypes, first",
            )
        )


def train(step: Callable[..., Any], model: Model, steps: int) -> tuple[list[float], list[float]]:
    """Losses and seconds of `steps` steps on the model's own data: its module's `batches` (the last repeats), or its one batch."""
    arguments = step.place(*model.arguments) if isinstance(step, CompiledStep | StreamStep) else model.arguments
    state, rest = arguments[0], arguments[1:]
    data = _batches(model)
    losses, times = [], []
    for _ in range(steps):
        if data is not None:
            rest = (next(data, rest[0]),)
        start = time.perf_counter()
        out = step(state, *rest)
        state, metrics = out if isinstance(out, tuple) and len(out) == 2 else (out, {})
        loss = _loss(metrics)
        jax.block_until_ready(state)
        times.append(time.perf_counter() - start)
        losses.append(loss)
    # The first step compiles.
    return losses, times[1:] or times


def _loss(metrics: Any) -> float:
    if isinstance(metrics, dict) and "loss" in metrics:
        return float(metrics["loss"])
    scalars = [x for x in jax.tree_util.tree_leaves(metrics) if np.ndim(x) == 0]
    return float(scalars[0]) if scalars else float("nan")


def _batches(model: Model) -> Iterator[Any] | None:
    """The module's stream of batches, where it has one for the settings in use."""
    path, _, name = model.source.path.partition(":")
    module = importlib.import_module(path)
    stream = getattr(module, "batches", None)
    if stream is None or len(model.arguments) != 2:
        return None
    shapes = jax.tree.map(_shape, model.arguments[1])
    try:
        # The factory's own defaults where nothing was set.
        parameters = inspect.signature(getattr(module, name or "make")).parameters
        settings = {k: p.default for k, p in parameters.items() if p.default is not p.empty} | model.source.settings
        wanted = inspect.signature(stream).parameters
        settings = {k: v for k, v in settings.items() if k in wanted}
        sample = next(stream(**settings))
    except (TypeError, ValueError, StopIteration):
        return None
    if jax.tree.map(_shape, sample) != shapes:
        return None
    return stream(**settings)


def _shape(x: Any) -> tuple[tuple[int, ...], str]:
    return np.shape(x), str(getattr(x, "dtype", type(x)))


def verify_command(command: VerifyCommand) -> Result:
    plan, source, topology = _checked(command)
    runs = command.target in ("local", "cpu")
    if command.topology is not None and load_topology(command.topology).fingerprint() != topology.fingerprint():
        loaded(plan, command.plan, source, topology=command.topology)  # raises, and says what differs
    devices = devices_of_target(topology, command.target)
    plan, model, step = loaded(plan, command.plan, source, topology=command.topology, concrete=runs)
    if plan.pipeline is not None or plan.pinned:
        return _verified_programs(command, plan, verify_programs(plan, model, step, devices, runs=runs), runs=runs)
    program = bind_plan(step, plan, devices=devices)
    inspected = inspect_program(program)
    numbers = verify(program, jax.tree_util.tree_leaves(model.arguments)) if runs else None
    by_kind = compare_by_kind(plan, inspected.collectives)
    apart = differences(plan, inspected.collectives)
    is_proven, fits = _is_proven(inspected.ops, numbers), _fits(plan, inspected.memory_bytes)
    result = {} if numbers is None else numbers._asdict()
    result |= _as_planned(inspected.ops) | {
        "target": command.target,
        "collective_bytes": by_kind,
        "collective_differences": [
            {"operators": list(d.operators), "predicted": d.predicted, "compiled": d.compiled, "cause": d.cause} for d in apart
        ],
        "memory_bytes": {"predicted": plan.prediction.memory_bytes_per_device, "compiled": inspected.memory_bytes},
        "rematerialised": list(inspected.rematerialised),
        "replicated": list(inspected.replicated),
        "compile_s": round(inspected.compile_s, 3),
        "proven": is_proven and fits,
    }
    tables = compiled_report(plan, inspected, by_kind, apart, runs=runs, is_proven=is_proven, fits=fits)
    lines = [] if numbers is None else numeric_lines(numbers)
    return result, Group(Text("\n".join(lines)), *tables), 0 if is_proven and fits else 1


def _is_proven(ops: OpsCheck, numbers: Verification | None) -> bool:
    """Of a program with nothing to find again, and whose numbers were not compared, nothing is shown."""
    shown = ops.ops_as_planned > 0 if numbers is None else numbers.is_proven
    return shown and ops.ops_as_planned == ops.planned_ops - ops.ops_unchecked


def _fits(plan: Plan, compiled_bytes: float) -> bool:
    """Whether what was compiled fits the devices; nothing is asked of a plan that is said not to fit."""
    return compiled_bytes <= topology_of(plan)[0].device.available_memory_bytes or not plan.prediction.feasible


def _as_planned(ops: OpsCheck) -> dict[str, Any]:
    return ops._asdict() | {"differences": list(ops.differences)}


def _verified_programs(command: VerifyCommand, plan: Plan, found: ProgramsVerified, *, runs: bool) -> Result:
    """The result and report of a plan that is several programs."""
    inspected, numbers = found.inspected, found.numbers
    compiled_bytes = max(compiled for _, compiled in found.memory.values())
    is_proven, fits = _is_proven(inspected.ops, numbers), _fits(plan, compiled_bytes)
    result = {} if numbers is None else numbers._asdict() | {"reference": found.reference}
    result |= _as_planned(inspected.ops) | {
        "target": command.target,
        "collective_bytes": found.by_kind,
        "collective_differences": [
            {"program": r.name, "predicted": r.predicted, "compiled": r.compiled, "bytes": r.difference_bytes} for r in found.apart
        ],
        "programs": [r._asdict() for r in found.rows],
        "memory_bytes": {"predicted": plan.prediction.memory_bytes_per_device, "compiled": compiled_bytes},
        "stage_memory_bytes": {name: {"predicted": p, "compiled": c} for name, (p, c) in found.memory.items()},
        "rematerialised": [r for p in inspected.parts for r in p.rematerialised],
        "replicated": [r for p in inspected.parts for r in p.replicated],
        "compile_s": round(inspected.compile_s, 3),
        "proven": is_proven and fits,
    }  # fmt: skip
    lines = [] if numbers is None else [f"compared with one device, given {found.reference}", *numeric_lines(numbers)]
    tables = programs_report(plan, found, runs=runs, is_proven=is_proven, fits=fits)
    return result, Group(Text("\n".join(lines)), *tables), 0 if is_proven and fits else 1


def demo_command(command: DemoCommand) -> Result:
    begin = time.perf_counter()
    devices = start_devices(8)
    sizes: dict[str, bool | int | float | str] = {"batch": 16, "seq": 64, "width": 128, "layers": 2, "heads": 8}
    source = ModelSource(path=f"{OWN_MODELS}.transformer_lm", settings=sizes)
    model = abstract_model(source)
    found = entry.plan(model.step, *model.arguments, topology="cpu8", proposals=2048, model=source)
    real = with_arrays(model)
    program = bind_plan(found.step, found.plan, devices=devices)
    losses, _ = train(compile_step(program), real, command.steps)
    single, _ = train(jax.jit(real.step), real, command.steps)
    difference = max(abs(a - b) / abs(b) for a, b in zip(losses, single, strict=True))
    result = plan_result(found.plan) | {"loss": losses, "loss_single_device": single, "max_rel_difference": difference}
    result["seconds"] = time.perf_counter() - begin
    lines = [
        f"{command.steps} training steps on the standard library's own source, 8 fake CPU devices against one:",
        *(
            f"  step {i + 1:3d}   loss {a:.6f}   one device {b:.6f}"
            for i, (a, b) in enumerate(zip(losses, single, strict=True))
            if i % 4 == 0 or i == len(losses) - 1
        ),
        f"largest relative difference {difference:.2g}; {result['seconds']:.0f} s in all",
    ]
    return result, Group(plan_report(found.plan), Text("\n".join(lines))), 0 if difference < 1e-3 else 1
