"""A plan as tables for a terminal: what every operator does, and what it is predicted to cost beside the baselines."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from soapjax.helpers.sizes import size
from soapjax.report.text_table import TextTable
from soapjax.strategy.plan import OperatorPart, Plan
from soapjax.strategy.plan_strategy import topology_of


def seconds(s: float) -> str:
    return f"{s:.3g} s" if s >= 1 or not s else f"{s * 1e3:.3g} ms" if s >= 1e-3 else f"{s * 1e6:.3g} µs"


FOLDED = 0.001  # of the time: what takes less together is folded


class OperatorRow(NamedTuple):
    """Operators that differ only in a layer number and share their config."""

    names: tuple[str, ...]
    kind: str
    split: str
    storage: str
    time_share: float | None  # of all operators' seconds, computing and communicating; None where no costs are known

    @property
    def title(self) -> str:
        names = self.names
        return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"


def merged_name(name: str) -> str:
    """A name with its numbers as "#": those of the layers of a model are one."""
    return re.sub(r"\d+", "#", name)


def meshes_of(plan: Plan) -> dict[str, dict[str, int]]:
    """Of every operator the axes of its mesh, with their sizes: in a pipeline those of its stage."""
    whole = dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True))
    own = {} if plan.pipeline is None else {name: stage.mesh for stage in plan.pipeline.stages for name in stage.operators}
    return {name: own.get(name, whole) for name in plan.operators}


def operator_rows(plan: Plan) -> list[OperatorRow]:
    """Equal operators merged, in the plan's order."""
    meshes = meshes_of(plan)
    merged: dict[tuple, list[str]] = {}
    for name, part in plan.operators.items():
        how = split_of(part, meshes[name]), short_storage(part.storage, meshes[name])
        merged.setdefault((merged_name(name), part.kind, *how), []).append(name)
    total = sum(seconds_of(part) for part in plan.operators.values())
    rows = []
    for (_, kind, split, storage), names in merged.items():
        known = total > 0 and all(plan.operators[name].cost is not None for name in names)
        share = sum(seconds_of(plan.operators[name]) for name in names) / total if known else None
        rows.append(OperatorRow(tuple(names), kind, split, storage, share))
    return rows


def folded(rows: list[OperatorRow]) -> list[OperatorRow]:
    """Those that are shown as one: several that take less than FOLDED of the time."""
    small = [row for row in rows if row.time_share is not None and row.time_share < FOLDED]
    return small if len(small) > 1 else []


def short_storage(storage: str, sizes: dict[str, int]) -> str:
    """With "/64" in place of the names of all axes."""
    return storage.replace(f"({','.join(sizes)})", f"/{math.prod(sizes.values())}")


def seconds_of(part: OperatorPart) -> float:
    """That an operator computes and communicates; 0 where they are not known."""
    return part.cost.compute_s + part.cost.communication_s if part.cost is not None else 0.0


def _degrees(part: OperatorPart, sizes: dict[str, int]) -> dict[str, int]:
    """Dim -> into how many parts it is split."""
    degrees: dict[str, int] = {}
    for axis, dim in part.axes.items():
        if dim != "replicate" and not dim.startswith("pin("):
            degrees[dim] = degrees.get(dim, 1) * sizes.get(axis, 1)
    return degrees


def split_of(part: OperatorPart, sizes: dict[str, int]) -> str:
    """How an operator is split, in words: "sample/4 (d0+d2)"; and whether the backward pass computes it again."""
    degrees = _degrees(part, sizes)
    axes_of = {d: [a for a, v in part.axes.items() if v == d] for d in degrees}
    split = "  ".join(f"{d}/{n} ({_axes(axes_of[d], sizes)})" for d, n in degrees.items())
    split = "  ".join(filter(None, (split, _pins(part.axes, sizes)))) or "replicated"
    return f"{split}, recomputed" if part.recompute else split


def operator_table(plan: Plan) -> TextTable:
    """One row per kind of operator; those that take less than FOLDED of the time are one row at the end."""
    table = TextTable(title="the plan: into how many parts each dim of an operator is split", title_justify="left")
    for column in ("operators", "kind", "split", "parameters stored"):
        table.add_column(column, overflow="fold")
    table.add_column("time", justify="right")
    rows = operator_rows(plan)
    small = folded(rows)
    for row in rows:
        if row not in small:
            share = "" if row.time_share is None else f"{row.time_share:.1%}"
            table.add_row(row.title, row.kind, row.split, row.storage, share)
    if small:
        count = sum(len(row.names) for row in small)
        words = "replicated" if all(row.split == "replicated" for row in small) else "as the plan file says"
        title = f"{count} others, each line under {FOLDED:.1%}"
        table.add_row(title, "", words, "", f"{sum(row.time_share for row in small):.1%}")
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


def stage_table(plan: Plan) -> TextTable:
    """One row per stage of a pipeline: operators, devices, how most of them are split, memory."""
    pipeline = plan.pipeline
    table = TextTable(title=f"{len(pipeline.stages)} stages, {pipeline.num_microbatches} micro-batches, {pipeline.schedule}")
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
        kept += ", weights as they are cast" * stage.keeps_casts
        memory = plan.prediction.memory_parts_bytes.get(f"stage {i}")
        table.add_row(
            str(i), f"{names} ({len(stage.operators)})", devices, copies + inside, kept, size(memory) if memory is not None else ""
        )
    return table


def _split(part: OperatorPart, mesh: dict[str, int]) -> str:
    found = "  ".join(f"{d}/{n}" for d, n in _degrees(part, mesh).items() if n > 1) or "whole"
    return found if part.storage == "as used" else f"{found}, {part.storage}"


FULLY_SPLIT = 0.9  # a baseline that splits less of the FLOPs is no measure of a plan, and its gain says so
FEW_TIMES = 2.0  # nor is one that does every FLOP on so many devices


def caveat(share: float | None, num_devices: int) -> str:
    """What to know of a strategy that repeats work, "" where it repeats little: "splits only 12 % of the FLOPs"."""
    if share is None:
        return ""
    times = num_devices - share * (num_devices - 1)  # on how many devices a FLOP is done, in the mean
    if share >= FULLY_SPLIT and times < FEW_TIMES:
        return ""
    return f"splits only {percent(share)} of the FLOPs (each is done on {times:.3g} devices in the mean)"


def percent(share: float | None) -> str:
    """Rounded down: 100 % is all. "?" where a plan does not say it."""
    return "?" if share is None else f"{math.floor(share * 1000) / 10:.3g} %"


def gains(plan: Plan) -> dict[str, tuple[float, str]]:
    """Per baseline how many times as fast the plan is, and what to know of that figure: "" or a clause."""
    known, unfit = plan.provenance.baseline_figures, _unfit(plan)
    found = {}
    for name, s in plan.provenance.baselines.items():
        if s:
            share = known[name].split_flops_share if name in known else None
            fits = "" if name not in unfit else "does not fit"
            words = " and ".join(filter(None, (caveat(share, plan.num_devices), fits)))
            found[name] = (s / plan.prediction.step_time_s, words)
    return found


def _unfit(plan: Plan) -> set[str]:
    """The baselines that do not fit, as the notes say."""
    return {n.split(":")[0] for n in plan.provenance.notes if "does not fit" in n}


def gain_lines(plan: Plan) -> list[str]:
    """ "1.9 × data_parallel, which splits only 12 % of the FLOPs"; what needs no clause comes first, on one line."""
    plain = [f"{gain:.2f} × {name}" for name, (gain, words) in gains(plan).items() if not words]
    others = [f"{gain:.2f} × {name}, which {words}" for name, (gain, words) in gains(plan).items() if words]
    if not (plain or others):
        return []
    own = caveat(plan.prediction.split_flops_share, plan.num_devices)
    lines = [*([", ".join(plain)] if plain else []), *others]
    return [f"this plan's speed: {lines[0]}", *(f"  {line}" for line in lines[1:]), *([f"this plan {own}"] if own else [])]


def comparison_table(plan: Plan) -> TextTable:
    """Predicted step times of the plan and of the baselines, with what they are made of."""
    title = "predicted step time; how much communication is hidden under compute, and the step if none were"
    # A head of two lines, so that a terminal of 80 columns has room for the strategies' names.
    table = TextTable.of(title, ("strategy",), ("step", "hidden", "if none", "FLOPs\nsplit", "sends", "memory"))
    p = plan.prediction
    known, unfit = plan.provenance.baseline_figures, _unfit(plan)

    def overlapped(step_s: float, serial_s: float | None, share: float | None) -> tuple[str, str, str]:
        if serial_s is None:
            return "", "", ""
        hidden_s = max(serial_s - step_s, 0.0)
        return seconds(hidden_s) if hidden_s > 1e-4 * step_s else "none", seconds(serial_s), percent(share)

    table.add_row(
        f"this plan ({plan.provenance.planner})", seconds(p.step_time_s),
        *overlapped(p.step_time_s, p.without_overlap_s, p.split_flops_share), _sends(p.peak_sent_bytes),
        size(p.memory_bytes_per_device) + ("" if p.feasible else " — does not fit"),
    )  # fmt: skip
    for name, s in plan.provenance.baselines.items():
        if s is not None:
            of = known.get(name)
            memory = "fits" if of is None else size(of.memory_bytes_per_device)
            if name in unfit:
                memory = "does not fit" if of is None else f"{memory} — does not fit"
            columns = ("", "", "") if of is None else overlapped(s, of.without_overlap_s, of.split_flops_share)
            table.add_row(name, seconds(s), *columns, _sends(None if of is None else of.peak_sent_bytes), memory)
    return table


def _sends(peak_bytes: int | None) -> str:
    return "" if peak_bytes is None else size(peak_bytes)


def overlap_words(plan: Plan) -> str:
    """ " (with 511 µs of communication hidden; 1.89 ms if none were)", "" where nothing is hidden."""
    hidden_s = plan.prediction.hidden_communication_s
    if not hidden_s or hidden_s <= 1e-4 * plan.prediction.step_time_s:
        return ""
    return f" (with {seconds(hidden_s)} of communication hidden; {seconds(plan.prediction.without_overlap_s)} if none were)"


def verified_table(plan: Plan) -> TextTable:
    """What was run on the devices at hand; the fastest is the plan."""
    table = TextTable.of("run on the devices at hand", ("strategy",), ("predicted", "measured", "error"))
    for t in sorted(plan.provenance.verified, key=lambda t: t.measured_s):
        table.add_row(t.strategy, seconds(t.predicted_s), seconds(t.measured_s), f"{t.predicted_s / t.measured_s - 1:+.0%}")
    return table


def memory_words(plan: Plan) -> str:
    """What is usable, what the plan keeps free of it, and what the compiler said."""
    p, device = plan.prediction, topology_of(plan)[0].device
    words = f"{size(p.usable_memory_bytes)} are usable"
    if device.memory_margin:
        words += f" ({device.memory_margin:.3g} of {size(device.available_memory_bytes)} are kept free)"
    compiled = plan.provenance.compiled_as(p)
    if compiled is None:
        return words + "; not compiled"
    verdict = "fits" if compiled.fits else "does NOT fit"
    return f"{words}; compiled for {compiled.target}: {size(compiled.compiled_memory_bytes)}, {verdict}"


def plan_report(plan: Plan) -> RenderableType:
    """Everything a person wants to know about a plan."""
    p = plan.prediction
    moved = ", ".join(f"{k} {size(v)}" for k, v in p.bytes_by_collective.items() if v) or "nothing"
    parts = ", ".join(f"{k.replace('_', ' ')} {size(v)}" for k, v in p.memory_parts_bytes.items())
    figures = ", ".join(f"{share:.0%} {source}" for source, share in p.compute_figures.items())
    devices_differ = (plan.pipeline is not None or plan.pinned) and p.peak_sent_bytes is not None
    lines = [
        *gain_lines(plan),
        f"{plan.graph.num_operators} operators on {plan.topology.get('name', '?')}, {plan.num_devices} devices: "
        + " ".join(f"{n}={s}" for n, s in zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True)),
        *([] if plan.pipeline is not None or plan.pinned else [f"each device sends per step: {moved}"]),
        *([f"the device that sends most sends {_sends(p.peak_sent_bytes)} per step"] if devices_differ else []),
        f"memory per device: {parts}; {memory_words(plan)}",
        *([f"compute seconds: {figures}"] if figures else []),
        *(["for simulation only: a loop's operators are on different devices"] if not plan.executable else []),
        *(f"note: {note}" for note in plan.provenance.notes),
        f"plan_sha256 {plan.plan_sha256}",
    ]
    what = operator_table(plan) if plan.pipeline is None else stage_table(plan)
    tables = [what, comparison_table(plan), *([verified_table(plan)] if plan.provenance.verified else [])]
    return Group(*tables, Text("\n".join(lines)))
