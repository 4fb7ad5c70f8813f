"""What `soapjax profile` and `soapjax calibrate` do."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import jax
from rich.console import Group
from rich.text import Text

from soapjax.cli.arguments import CalibrateCommand, ProfileCommand
from soapjax.cli.results import Result, closing, loaded, output_problems, wanted_topology
from soapjax.cli.step_source import required_source
from soapjax.costs.measured.fit import fitted_scales
from soapjax.costs.measured.profile import Profile, merged, profile_of, save_profile
from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.compiled.timing import time_steps
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.graph.trace.tracing import argument_names, trace
from soapjax.helpers import interrupts
from soapjax.helpers.files import write_text_atomic
from soapjax.helpers.own_config import on_cpu
from soapjax.planning import plan_files
from soapjax.planning.profiling import calibrated, communicates, measure_profile, require_kind, scaled_prediction
from soapjax.planning.request import find_profile
from soapjax.planning.verify_top import require_real_devices
from soapjax.report.plan_tables import seconds
from soapjax.report.text_table import TextTable
from soapjax.steps.call_checks import check_planned
from soapjax.steps.sourced_models import abstract_model, model_source
from soapjax.strategy.plan import TRACING, Plan
from soapjax.strategy.plan_strategy import strategy_of, topology_of


def profile_command(command: ProfileCommand, progress: Any = None) -> Result:
    topology = wanted_topology(command)
    require_kind(topology)
    model = abstract_model(model_source(command.model, command.set))
    check_planned(model.arguments, argument_names(model.step, len(model.arguments)))
    step = trace(model.step, *model.arguments, **{name: getattr(command, name) for name in TRACING})
    with closing(progress):
        found, notes = measure_profile(
            step, topology, seconds=command.seconds, command=_command_line(), search=command.search,
            microbatches=command.microbatches, progress=progress,
        )  # fmt: skip
    if not found.operators and not found.links:
        if interrupts.came():
            raise KeyboardInterrupt
        raise SoapjaxError(Problem("profile", "; ".join(notes) or "nothing measured", "measurements", "give it more --seconds"))
    path = _saved(found, command.output)
    rates, links = found.rates, found.links
    result = {
        "path": str(path), "sha256": found.sha256, "device": found.device.model_dump(), "num_operators": len(found.operators),
        "rates": rates.model_dump() if rates is not None else None, "links": [link.model_dump() for link in links],
        "notes": notes,
    }  # fmt: skip
    lines = [f"{len(found.operators)} distinct tasks measured on {found.device.name}"]
    if rates is not None:
        reached = ", ".join(f"{name} {r / 1e9:.4g} GFLOP/s" for name, r in rates.flops_per_s.items())
        lines += [
            f"roofline of those not measured: {reached}; memory {rates.memory_bytes_per_s / 1e9:.4g} GB/s, "
            f"{seconds(rates.launch_s)} per task; median error {rates.median_error:.0%}"
        ]
    for k in links:
        less = "".join(f", {kind} at {fraction:.0%}" for kind, fraction in k.fractions.items())
        lines.append(f"{k.level}: {k.bytes_per_s / 1e9:.4g} GB/s{less}, {seconds(k.latency_s)} per step")
    lines += [*(f"note: {n}" for n in notes), f"written to {path}"]
    table = TextTable.of("the largest measured tasks", ("task",), ("measured", "spread"))
    for m in sorted(found.operators, key=lambda m: -m.seconds)[:10]:
        table.add_row(m.label, seconds(m.seconds), f"{m.spread:.0%}")
    return result, Group(table, Text("\n".join(lines))), 0


def _saved(profile: Profile, output: str | None) -> Path:
    """Where a profile was written: a file of the user's choice, or a new one in the cache."""
    interrupts.hold("interrupted again: what is there of the profile is whole")
    if output is None:
        return save_profile(profile)
    write_text_atomic(output, profile.to_text())
    return Path(output)


def _command_line() -> str:
    return shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])


def calibrate_command(command: CalibrateCommand) -> Result:
    problems = output_problems(command.output) if command.output is not None else []
    if not command.plans:
        problems.append(Problem("PLANS", "none", "plan files for the devices at hand", "name one or more"))
    if problems:
        raise SoapjaxError(problems)
    rows, measured, bases = [], [], []
    fingerprints: dict[str, str] = {}
    for path in command.plans:
        plan = Plan.load(path)
        if plan.pipeline is not None:
            value, expected = f"{plan.pipeline.schedule} of {len(plan.pipeline.stages)} stages", "a plan of one program"
            raise SoapjaxError(Problem(f"{path}: pipeline", value, expected, "calibrate on data parallelism, say"))
        topology, _ = topology_of(plan, place=path)
        fingerprints.setdefault(topology.fingerprint(), path)
        if len(fingerprints) > 1:
            value, first = topology.name, next(iter(fingerprints.values()))
            raise SoapjaxError(Problem(f"{path}: topology", value, f"the topology of {first}", "calibrate one cluster at a time"))
        require_real_devices(topology, jax.devices(), place=path)
        plan, model, step = loaded(plan, path, required_source(command, plan, place=path), concrete=True)
        base = find_profile(command.profile, topology)[0]
        if base is None and plan.profile is not None:
            base = profile_of(plan.profile, place=f"{path}: profile")
        if base is not None:  # fitted beside the measurements, without earlier scalars
            base = base.model_copy(update={"calibration": None})
            bases.append(base)
        with on_cpu():
            problem = plan_files.problem_of_plan(plan.model_copy(update={"profile": None}), step, place=path, profile=base)
            strategy = strategy_of(plan, problem.space, place=path)
            rows.append((path, problem.simulator, strategy))
        program = bind_plan(step, plan, devices=jax.devices()[: plan.num_devices])
        measured.append(time_steps(program, jax.tree_util.tree_leaves(model.arguments), num_steps=command.steps))
    has_network = any(communicates(simulator, strategy) for _, simulator, strategy in rows)

    def predict(compute: float, network: float) -> list[float]:
        return [scaled_prediction(simulator, strategy, compute, network) for _, simulator, strategy in rows]

    fit = fitted_scales([path for path, *_ in rows], predict, measured, has_network=has_network)
    fit = fit.model_copy(update={"topology": topology.fingerprint()})
    device = require_kind(topology)
    found = calibrated(merged(bases) if bases else None, device, fit, _command_line())
    saved = _saved(found, command.output)
    before = predict(1.0, 1.0)
    table = TextTable.of("steps", ("plan",), ("predicted before", "predicted", "measured", "error"))
    for (name, predicted, real), raw in zip(fit.steps, before, strict=True):
        table.add_row(name, seconds(raw), seconds(predicted), seconds(real), f"{predicted / real - 1:+.1%}")
    lines = [
        f"compute × {fit.compute_scale:.4g}, network × {fit.network_scale:.4g}"
        + ("" if has_network else " (nothing was sent: not fitted)"),
        f"error left: median {fit.residual:.1%}, worst {fit.worst:.1%}"
        + (" (give more plans: so few steps tell no error)" if len(rows) <= 1 + has_network else ""),
        f"written to {saved}",
    ]
    result = {"path": str(saved), "sha256": found.sha256, "predicted_before_s": [float(x) for x in before]} | fit.model_dump()
    result["measured_s"] = [float(x) for x in measured]
    return result, Group(table, Text("\n".join(lines))), 0
