"""What the commands do: each returns (result for --json, renderable text, exit status)."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from soapjax import api, cli
from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.aot import cuda_devices, target_for
from soapjax.execute.compiled import CompiledStep
from soapjax.execute.inspect import inspect as inspect_program
from soapjax.execute.spmd import bind_plan, not_executable
from soapjax.execute.stream_step import StreamStep, compile_step
from soapjax.execute.traffic import compare_by_kind, differences
from soapjax.execute.verify import verify
from soapjax.graph.trace import TracedStep, trace
from soapjax.model_source import Model, abstract_model, concrete_model, parse_settings
from soapjax.pipelining import planned_pipeline
from soapjax.report.perfetto import write_trace
from soapjax.report.tables import plan_report, seconds
from soapjax.report.verification import compiled_report, numeric_lines
from soapjax.search.planners import get_planner
from soapjax.search.stages import DEFAULT_PROPOSALS
from soapjax.stage_plans import PIPELINES
from soapjax.strategy.plan import ModelSource, Plan, topology_of
from soapjax.topology import DeviceTopology, load_topology

Result = tuple[dict[str, Any], RenderableType, int]
Progress = Callable[[int, float, float], None] | None
MAX_FAKE_DEVICES = 1024  # more would cost minutes and gigabytes on any machine


def run(command: Any, progress: Progress) -> Result:
    """Runs a parsed command."""
    from soapjax import measuring_commands  # it uses the helpers below

    handlers = {
        cli.PlanCommand: functools.partial(plan_command, progress=progress),
        cli.SimulateCommand: simulate_command,
        cli.RunCommand: run_command,
        cli.VerifyCommand: verify_command,
        cli.ProfileCommand: functools.partial(measuring_commands.profile_command, progress=progress),
        cli.CalibrateCommand: measuring_commands.calibrate_command,
        cli.DemoCommand: demo_command,
    }
    return handlers[type(command)](command)


def plan_command(command: cli.PlanCommand, progress: Progress = None) -> Result:
    problems = []
    if command.seconds is not None and not command.seconds > 0:
        problems.append(Problem("--seconds", str(command.seconds), "a positive number of seconds", "give the search some time"))
    if command.proposals is not None and command.proposals < 1:
        problems.append(Problem("--proposals", str(command.proposals), "a positive number", "give the search at least one"))
    if not 0 <= command.seed < 2**31:
        problems.append(Problem("--seed", str(command.seed), "0 to 2147483647", "choose another seed"))
    if command.verify_top < 0:
        problems.append(Problem("--verify-top", str(command.verify_top), "0 or more", "say how many of the best to run"))
    if command.output is not None:
        problems += output_problems(command.output)
    if problems:
        raise SoapjaxError(problems)
    numbers = _pipeline_numbers(command)
    topology = load_topology(command.topology)
    get_planner(command.planner, space=command.space)
    model = abstract_model(ModelSource(path=command.model, settings=parse_settings(command.set)))
    if command.pipeline is not None and command.pipeline != "auto":
        return _pipeline_command(command, model, topology, numbers, progress)
    with closing(progress):
        found = api.plan(
            model.step, *model.arguments, topology=topology, planner=command.planner, seed=command.seed,
            proposals=command.proposals, seconds=_share_of_seconds(command), unroll=command.unroll, space=command.space,
            model=model.source, progress=progress, profile=command.profile, verify_top=command.verify_top,
        )  # fmt: skip
    plan, stopped_by = found.plan, found.result.stopped_by
    if command.pipeline is not None and stopped_by != "interrupted":
        plan, stopped_by = _or_pipeline(command, model, topology, numbers, found, progress)
    return _planned(command, plan, stopped_by)


def _share_of_seconds(command: cli.PlanCommand) -> float | None:
    """`--pipeline auto` searches twice."""
    return command.seconds / 2 if command.seconds is not None and command.pipeline is not None else command.seconds


def _planned(command: cli.PlanCommand, plan: Plan, stopped_by: str) -> Result:
    """Saves a plan and reports it."""
    if command.output is not None:
        plan.save(command.output)
    result = _plan_result(plan) | {"stopped_by": stopped_by, "output": command.output}
    lines = [f"written to {command.output}"] if command.output else ["not written: give -o plan.json"]
    if stopped_by == "interrupted":
        lines.append("interrupted: this is the best so far")
    return result, Group(plan_report(plan), Text("\n".join(lines))), 130 if stopped_by == "interrupted" else 0


def _pipeline_numbers(command: cli.PlanCommand) -> dict[str, int | None]:
    """`--microbatches` and `--stages` as numbers; None is auto."""
    problems, found = [], {}
    if command.pipeline is not None and command.pipeline not in PIPELINES:
        expected, remedy = " or ".join(PIPELINES), "choose one of these"
        problems.append(Problem("--pipeline", repr(command.pipeline), expected, remedy))
    for name in ("microbatches", "stages"):
        text = getattr(command, name)
        found[name] = None if text == "auto" else int(text) if text.isdecimal() and len(text) < 7 else 0
        if found[name] == 0:
            problems.append(Problem(f"--{name}", repr(text), "auto, or a number from 1 on", "correct the number"))
        elif text != "auto" and command.pipeline is None:
            problems.append(Problem(f"--{name}", text, "a pipeline", "add --pipeline auto, or another"))
    if command.pipeline is not None and command.space != "soap":
        problems.append(Problem("--space", command.space, "soap with --pipeline", "drop one of them"))
    if problems:
        raise SoapjaxError(problems)
    return found


def _pipeline_command(
    command: cli.PlanCommand, model: Model, topology: DeviceTopology, numbers: dict[str, int | None], progress: Progress
) -> Result:
    with closing(progress):
        plan, found = api.plan_pipeline(
            model.step, *model.arguments, pipeline=command.pipeline, topology=topology, seed=command.seed,
            proposals=command.proposals, seconds=command.seconds, unroll=command.unroll, model=model.source, progress=progress,
            **numbers,
        )  # fmt: skip
    return _planned(command, plan, found.stopped_by)


def _or_pipeline(
    command: cli.PlanCommand, model: Model, topology: DeviceTopology, numbers: dict[str, int | None], found: api.Planned,
    progress: Progress,
) -> tuple[Plan, str]:  # fmt: skip
    """The best synchronous pipeline where it beats the plan of one program, else that plan; either names the other's time."""
    proposals = None if command.proposals is None else min(command.proposals, DEFAULT_PROPOSALS)
    try:
        with closing(progress):
            plan, best = api.plan_pipeline(
                model.step, *model.arguments, pipeline="auto", topology=topology, seed=command.seed, proposals=proposals,
                seconds=_share_of_seconds(command), unroll=command.unroll, model=model.source, progress=progress, **numbers,
            )  # fmt: skip
    except SoapjaxError as e:
        if any(v is not None for v in numbers.values()) or not found.plan.prediction.feasible:
            raise
        return _with_note(found.plan, f"no pipeline: {e.problems[0]}", {}), found.result.stopped_by
    one = found.plan.prediction
    if one.feasible and one.step_time_s <= plan.prediction.step_time_s:
        times = {f"pipeline {plan.pipeline.schedule}": plan.prediction.step_time_s}
        return _with_note(found.plan, "no pipeline is faster", times), found.result.stopped_by
    times = {f"one program ({found.plan.provenance.planner})": one.step_time_s} | found.plan.provenance.baselines
    note = "" if one.feasible else f"one program ({found.plan.provenance.planner}): does not fit"
    return _with_note(plan, note, times), best.stopped_by


def _with_note(plan: Plan, note: str, baselines: dict[str, float | None]) -> Plan:
    old = plan.provenance
    more = {"notes": (*old.notes, note) if note else old.notes, "baselines": {**old.baselines, **baselines}}
    return plan.model_copy(update={"provenance": old.model_copy(update=more)})


def output_problems(output: str, option: str = "--output", example: str = "plan.json") -> list[Problem]:
    """What would keep a file from being written there: found before the search, not after it."""
    path = os.path.abspath(output)
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


def _plan_result(plan: Plan) -> dict[str, Any]:
    p, source = plan.prediction, plan.provenance
    return {
        "step_time_s": p.step_time_s,
        "baselines": source.baselines,
        "feasible": p.feasible,
        "executable": plan.executable,
        "memory_bytes_per_device": p.memory_bytes_per_device,
        "usable_memory_bytes": p.usable_memory_bytes,
        "bytes_by_collective": p.bytes_by_collective,
        "num_operators": plan.graph.num_operators,
        "num_devices": plan.num_devices,
        "num_proposals": source.num_proposals,
        "search_s": source.search_s,
        "notes": list(source.notes),
        "compute_figures": p.compute_figures,
        "verified": [t.model_dump() for t in source.verified],
        "plan_sha256": plan.plan_sha256,
    }


def loaded(path: str, *, topology: str | None = None, concrete: bool = False) -> tuple[Plan, Model, TracedStep]:
    """A plan file with its model, traced, and its prediction made anew."""
    raw = Plan.load(path)
    if raw.model is None:
        expected = "the model that the plan is for"
        remedy = 'add "model": {"path": "package.module", "settings": {}}, or use soap_shard(plan=...) in your own code'
        raise SoapjaxError(Problem(f"{path}: model", "missing", expected, remedy))
    wanted = load_topology(topology) if topology is not None else None
    model = abstract_model(raw.model)
    step = trace(model.step, *model.arguments, unroll=raw.unroll)
    plan = api.recost(raw, step, place=path, topology=wanted)
    return plan, concrete_model(raw.model) if concrete else model, step


def simulate_command(command: cli.SimulateCommand) -> Result:
    if command.trace is not None and (problems := output_problems(command.trace, "--trace", "trace.json")):
        raise SoapjaxError(problems)
    plan, _, step = loaded(command.plan, topology=command.topology)
    result, report = _plan_result(plan), plan_report(plan)
    if command.trace is not None:
        write_trace(command.trace, api.timeline_events(plan, step), title=f"simulated: {command.plan}")
        result, report = result | {"trace": command.trace}, Group(report, Text(f"timeline written to {command.trace}"))
    return result, report, 0


def _devices_for(path: str) -> list[Any]:
    """The devices for a plan file; its mesh, and that it can be run, are checked before any are started."""
    plan = Plan.load(path)
    topology, _ = topology_of(plan, place=path)
    if problems := not_executable(plan, place=path):
        raise SoapjaxError(problems)
    return start_devices(topology.num_devices)


def devices_of_target(topology: DeviceTopology, target: str) -> list[Any]:
    """Devices to compile for: "local", "cpu" (fake ones), "cuda" (the topology's GPU, which need not be there) or a GPU's name.

    Raises: SoapjaxError where there are none, or the topology is of another GPU.
    """
    if target in ("local", "cpu"):
        devices = start_devices(topology.num_devices)
        return jax.devices("cpu")[: topology.num_devices] if target == "cpu" else devices
    name = target_for(topology.device.name, target)
    return cuda_devices(name, topology.num_devices, topology.levels[-1].size, topology.device.memory_bytes)


def start_devices(count: int) -> list[Any]:
    """At least `count` devices: the accelerators at hand, or as many fake CPU devices, started if need be."""
    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", "") and count <= MAX_FAKE_DEVICES:
        with contextlib.suppress(RuntimeError):  # the backend runs already: what it has must do
            jax.config.update("jax_num_cpu_devices", max(count, 1))
    devices = jax.devices()
    if len(devices) < count and len(jax.devices("cpu")) >= count:
        devices = jax.devices("cpu")
    return devices[:count] if len(devices) >= count else devices


def _is_comparable(plan: Plan, devices: list[Any]) -> bool:
    """Whether a measured time says something about the prediction: real devices of the planned kind."""
    topology = DeviceTopology.from_dict(plan.topology)
    kind = devices[0].device_kind.lower()
    same_kind = topology.device.platform == devices[0].platform or (
        topology.device.platform == "cuda" and devices[0].platform == "gpu"
    )
    fake = devices[0].platform == "cpu" and len(devices) > jax.process_count()
    name = topology.device.name.lower()
    return same_kind and not fake and not topology.fake and (devices[0].platform == "cpu" or name in kind or kind in name)


def run_command(command: cli.RunCommand) -> Result:
    if command.steps < 1:
        raise SoapjaxError(Problem("--steps", str(command.steps), "at least 1", "train one step or more"))
    devices = _devices_for(command.plan)
    plan, model, step = loaded(command.plan, concrete=True)
    _require_state(model, step)
    if plan.pipeline is not None:
        topology, _ = topology_of(plan, place=command.plan)
        compiled = planned_pipeline(model.step, *model.arguments, plan=plan, topology=topology, devices=devices)
    else:
        compiled = compile_step(bind_plan(step, plan, devices=devices))
    losses, times = train(compiled, model, command.steps)
    result = {
        "predicted_s": plan.prediction.step_time_s,
        "measured_s": statistics.median(times),
        "comparable": _is_comparable(plan, devices),
        "loss": losses,
    }
    remark = "" if result["comparable"] else " (not comparable: these are not the planned devices)"
    text = Text(
        f"{command.steps} steps: loss {losses[0]:.6g} → {losses[-1]:.6g}\n"
        f"predicted {seconds(result['predicted_s'])} per step, measured {seconds(result['measured_s'])}{remark}"
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
    """Losses and seconds of `steps` steps on the model's own data (its module's `batches`, or one batch again and again)."""
    arguments = step.place(*model.arguments) if isinstance(step, CompiledStep | StreamStep) else model.arguments
    state, rest = arguments[0], arguments[1:]
    data = _batches(model)
    losses, times = [], []
    for _ in range(steps):
        if data is not None:
            rest = (next(data),)
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
    module = importlib.import_module(model.source.path.partition(":")[0])
    stream = getattr(module, "batches", None)
    if stream is None or len(model.arguments) != 2:
        return None
    shapes = jax.tree.map(lambda x: (np.shape(x), str(x.dtype)), model.arguments[1])
    settings = {k: v for k, v in model.source.settings.items() if k in ("batch", "seq", "vocab", "seed")}
    try:
        first = stream(**_defaults(model, settings))
        sample = next(first)
    except (TypeError, ValueError):
        return None
    if jax.tree.map(lambda x: (np.shape(x), str(x.dtype)), sample) != shapes:
        return None
    return stream(**_defaults(model, settings))


def _defaults(model: Model, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings for `batches`, with the factory's own defaults where none was given."""
    module = importlib.import_module(model.source.path.partition(":")[0])
    factory = getattr(module, model.source.path.partition(":")[2] or "make")
    defaults = {k: p.default for k, p in inspect.signature(factory).parameters.items() if p.default is not p.empty}
    wanted = inspect.signature(module.batches).parameters
    return {k: v for k, v in {**defaults, **settings}.items() if k in wanted}


def verify_command(command: cli.VerifyCommand) -> Result:
    topology, _ = topology_of(Plan.load(command.plan), place=command.plan)
    if problems := not_executable(Plan.load(command.plan), place=command.plan):
        raise SoapjaxError(problems)
    runs = command.target in ("local", "cpu")
    if command.topology is not None and load_topology(command.topology).fingerprint() != topology.fingerprint():
        loaded(command.plan, topology=command.topology)  # raises, and says what differs
    devices = devices_of_target(topology, command.target)
    plan, model, step = loaded(command.plan, topology=command.topology, concrete=runs)
    program = bind_plan(step, plan, devices=devices)
    inspected = inspect_program(program)
    result, lines, is_proven = {}, [], True
    if runs:
        found = verify(program, jax.tree_util.tree_leaves(model.arguments))
        result = found._asdict() | {"differences": list(found.differences)}
        is_proven = found.is_proven
        lines = numeric_lines(found)
    ops = inspected.ops
    result |= {
        "planned_ops": ops.planned_ops, "ops_as_planned": ops.ops_as_planned, "ops_unchecked": ops.ops_unchecked,
        "differences": list(ops.differences),
    }  # fmt: skip
    is_proven &= ops.ops_as_planned == ops.planned_ops - ops.ops_unchecked
    by_kind = compare_by_kind(plan, inspected.collectives)
    apart = differences(plan, inspected.collectives)
    usable = plan.prediction.usable_memory_bytes
    fits = inspected.memory_bytes <= usable or not plan.prediction.feasible
    result |= {
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
    return result, Group(Text("\n".join(lines)), *tables), 0 if is_proven and fits else 1


def demo_command(command: cli.DemoCommand) -> Result:
    begin = time.perf_counter()
    devices = start_devices(8)
    source = ModelSource(path="models.transformer_lm", settings={"batch": 16, "seq": 64, "width": 128, "layers": 2, "heads": 8})
    model = abstract_model(source)
    found = api.plan(model.step, *model.arguments, topology="cpu8", proposals=2048, model=source)
    real = concrete_model(source)
    program = bind_plan(found.step, found.plan, devices=devices)
    losses, _ = train(compile_step(program), real, command.steps)
    single, _ = train(jax.jit(real.step), real, command.steps)
    difference = max(abs(a - b) / abs(b) for a, b in zip(losses, single, strict=True))
    result = _plan_result(found.plan) | {"loss": losses, "loss_single_device": single, "max_rel_difference": difference}
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
