"""A plan as tables for a terminal: what every operator does, and what it is predicted to cost beside the baselines."""

from __future__ import annotations

import re

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from soapjax.strategy.plan import OperatorPart, Plan


def seconds(s: float) -> str:
    return f"{s:.3g} s" if s >= 1 else f"{s * 1e3:.3g} ms" if s >= 1e-3 else f"{s * 1e6:.3g} µs"


def size(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"


def operator_table(plan: Plan) -> Table:
    """One row per kind of operator: those that differ only in a layer number and share their config are one row."""
    table = Table(title="the plan: into how many parts each dim of an operator is split", title_justify="left")
    for column in ("operators", "kind", "split", "parameters stored"):
        table.add_column(column, overflow="fold")
    sizes = dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True))
    rows: dict[tuple, list[str]] = {}
    for name, part in plan.operators.items():
        degrees: dict[str, int] = {}
        for axis, dim in part.axes.items():
            if dim != "replicate" and not dim.startswith("pin("):
                degrees[dim] = degrees.get(dim, 1) * sizes[axis]
        axes_of = {d: [a for a, v in part.axes.items() if v == d] for d in degrees}
        split = "  ".join(f"{d}/{n} ({_axes(axes_of[d], sizes)})" for d, n in degrees.items())
        split = "  ".join(filter(None, (split, _pins(part.axes, sizes)))) or "replicated"
        storage = part.storage.replace(f"({','.join(sizes)})", f"/{plan.num_devices}")
        rows.setdefault((re.sub(r"\d+", "#", name), part.kind, split, storage), []).append(name)
    for (_, kind, split, storage), names in rows.items():
        shown = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
        table.add_row(shown, kind, split, storage)
    return table


def _pins(axes: dict[str, str], sizes: dict[str, int]) -> str:
    """Where an operator runs, if not everywhere: "on device 5", or "where h0=1 d1=0"."""
    pins = {a: int(v[4:-1]) for a, v in axes.items() if v.startswith("pin(")}
    if not pins:
        return ""
    if all(a in pins or n == 1 for a, n in sizes.items()):
        device = 0
        for a, n in sizes.items():
            device = device * n + pins.get(a, 0)
        return f"on device {device}"
    return "where " + " ".join(f"{a}={c}" for a, c in pins.items())


def _axes(names: list[str], sizes: dict[str, int]) -> str:
    return "all axes" if len(names) == len(sizes) and len(sizes) > 1 else "+".join(names)


def stage_table(plan: Plan) -> Table:
    """One row per stage of a pipeline: operators, devices, how most of them are split, memory."""
    pipeline = plan.pipeline
    table = Table(title=f"{len(pipeline.stages)} stages, {pipeline.num_microbatches} micro-batches, {pipeline.schedule}")
    table.title_justify = "left"
    for column in ("stage", "operators", "devices", "inside", "keeps", "memory per device"):
        table.add_column(column, overflow="fold")
    for i, stage in enumerate(pipeline.stages):
        first, last = min(stage.devices), max(stage.devices)
        whole = list(stage.devices) == list(range(first, last + 1)) and last > first
        devices = f"{first}-{last}" if whole else ", ".join(map(str, stage.devices))
        splits = [_split(plan.operators[name], stage.mesh) for name in stage.operators if name in plan.operators]
        inside = max(sorted(set(splits)), key=splits.count) if splits else ""
        copies = f"{stage.replicas} replicas; " if stage.replicas > 1 else ""
        names = stage.operators[0] if len(stage.operators) == 1 else f"{stage.operators[0]} … {stage.operators[-1]}"
        kept = "its inputs, and computes again" if stage.rematerialise else "activations"
        memory = plan.prediction.memory_parts_bytes.get(f"stage {i}")
        table.add_row(
            str(i), f"{names} ({len(stage.operators)})", devices, copies + inside, kept, size(memory) if memory is not None else ""
        )
    return table


def _split(part: OperatorPart, mesh: dict[str, int]) -> str:
    degrees: dict[str, int] = {}
    for axis, dim in part.axes.items():
        if dim != "replicate":
            degrees[dim] = degrees.get(dim, 1) * mesh.get(axis, 1)
    found = "  ".join(f"{d}/{n}" for d, n in degrees.items() if n > 1) or "whole"
    return found if part.storage == "as used" else f"{found}, {part.storage}"


def comparison_table(plan: Plan) -> Table:
    """Predicted step time of the plan and of the baselines."""
    table = Table(title="predicted step time", title_justify="left")
    for column in ("strategy", "step", "against data parallelism", "memory per device"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    p = plan.prediction
    baselines = plan.provenance.baselines
    base = baselines.get("data_parallel")
    unfit = {n.split(":")[0] for n in plan.provenance.notes if "does not fit" in n}

    def gain(s: float | None) -> str:
        return f"{base / s:.2f} ×" if base and s else ""

    fits = "" if p.feasible else " — does not fit"
    table.add_row(
        f"this plan ({plan.provenance.planner})", seconds(p.step_time_s), gain(p.step_time_s),
        f"{size(p.memory_bytes_per_device)} of {size(p.usable_memory_bytes)}{fits}",
    )  # fmt: skip
    for name, s in baselines.items():
        if s is not None:
            table.add_row(name, seconds(s), gain(s), "does not fit" if name in unfit else "fits")
    return table


def verified_table(plan: Plan) -> Table:
    """What was run on the devices at hand; the fastest is the plan."""
    table = Table(title="run on the devices at hand", title_justify="left")
    for column in ("strategy", "predicted", "measured", "error"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for t in sorted(plan.provenance.verified, key=lambda t: t.measured_s):
        table.add_row(t.strategy, seconds(t.predicted_s), seconds(t.measured_s), f"{t.predicted_s / t.measured_s - 1:+.0%}")
    return table


def plan_report(plan: Plan) -> RenderableType:
    """Everything a person wants to know about a plan."""
    p = plan.prediction
    moved = ", ".join(f"{k} {size(v)}" for k, v in p.bytes_by_collective.items() if v) or "nothing"
    parts = ", ".join(f"{k.replace('_', ' ')} {size(v)}" for k, v in p.memory_parts_bytes.items())
    figures = ", ".join(f"{share:.0%} {source}" for source, share in p.compute_figures.items())
    lines = [
        f"{plan.graph.num_operators} operators on {plan.topology.get('name', '?')}, {plan.num_devices} devices: "
        + " ".join(f"{n}={s}" for n, s in zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True)),
        *([] if plan.pipeline is not None else [f"each device sends per step: {moved}"]),
        f"memory per device: {parts}",
        *([f"compute seconds: {figures}"] if figures else []),
        *(["for simulation only: a loop's operators are on different devices"] if not plan.executable else []),
        *(f"note: {note}" for note in plan.provenance.notes),
        f"plan_sha256 {plan.plan_sha256}",
    ]
    what = operator_table(plan) if plan.pipeline is None else stage_table(plan)
    tables = [what, comparison_table(plan), *([verified_table(plan)] if plan.provenance.verified else [])]
    return Group(*tables, Text("\n".join(lines)))
