"""What `soapjax verify` prints: the numbers, and predicted beside compiled. Takes what it shows as it is; no type of `execute`."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.text import Text

from soapjax.helpers.sizes import size
from soapjax.report.text_table import TextTable
from soapjax.strategy.plan import Plan
from soapjax.strategy.plan_strategy import topology_of

MAX_DIFFERENCES = 12
SIDES = ("predicted", "compiled", "difference")


def numeric_lines(found: Any) -> list[str]:
    """The comparison with one device (`execute.verify.Verification`)."""
    if found.num_gradients + found.num_outputs == 0:
        return ["nothing to compare: the step has neither gradients nor results in floating point"]
    return [
        f"loss: relative error {found.loss_rel_error:.2g}, bound {found.loss_rel_bound:.2g}"
        f" (float64: {found.loss_rel_error_float64:.2g}, bound 1e-9)",
        f"{found.num_gradients} gradients: relative error {found.gradient_rel_error:.2g}, bound {found.gradient_rel_bound:.2g}"
        f" (float64: {found.gradient_rel_error_float64:.2g}, bound 1e-9; worst leaf {found.worst_leaf or 'none'})",
    ]


def compiled_report(
    plan: Plan, inspected: Any, by_kind: dict[str, dict[str, int]], apart: list[Any], *, runs: bool, is_proven: bool, fits: bool
) -> list[RenderableType]:
    """The compiled program (`execute.inspect.Inspection`) beside the plan's prediction.

    Args:
      by_kind: {collective: {"predicted", "compiled"}}, bytes that each device sends per step.
      apart: operators that differ (`execute.traffic.Difference`), largest first.
      runs: whether the numbers were compared too.
    """
    table = TextTable.of("each device sends per step", ("collective",), SIDES)
    total = {side: sum(k[side] for k in by_kind.values()) for side in ("predicted", "compiled")}
    rows = {k: v for k, v in by_kind.items() if v["predicted"] or v["compiled"]} | {"all": total}
    rows["memory per device"] = {"predicted": plan.prediction.memory_bytes_per_device, "compiled": inspected.memory_bytes}
    for name, row in rows.items():
        table.add_row(name, size(row["predicted"]), size(row["compiled"]), _relative(**row))
    lines = [
        *_op_lines(inspected.ops),
        *(f"rematerialised: {r}: the partitioner builds the whole tensor to change its layout" for r in inspected.rematerialised),
        *(f"replicated: {r}" for r in inspected.replicated),
    ]
    if apart:
        lines.append(f"operators whose communication differs by more than 1 % of all ({len(apart)}):")
        lines += [str(d) for d in apart[:MAX_DIFFERENCES]]
    if not fits:
        lines.append(f"does NOT fit: compiled {size(inspected.memory_bytes)}, available {size(_available_bytes(plan))} per device")
    verdict = "proven" if runs else "compiled as planned; the numbers were not compared, nothing was run"
    lines.append(verdict if is_proven and fits else "NOT proven")
    return [table, Text("\n".join(lines))]


def _op_lines(ops: Any) -> list[str]:
    """How many products are compiled as planned (`execute.compiled.hlo.OpsCheck`), and which are not."""
    return [
        f"{ops.ops_as_planned} of {ops.planned_ops} dots and convolutions compiled with the planned local FLOPs, "
        f"{ops.ops_unchecked} not found by name",
        *(f"differs: {d}" for d in ops.differences),
    ]


def _available_bytes(plan: Plan) -> int:
    return topology_of(plan)[0].device.available_memory_bytes


def _relative(predicted: int, compiled: int) -> str:
    return f"{(predicted - compiled) / compiled:+.1%}" if compiled else "" if not predicted else "only predicted"


def programs_report(plan: Plan, found: Any, *, runs: bool, is_proven: bool, fits: bool) -> list[RenderableType]:
    """The compiled programs (`verify_programs.ProgramsVerified`) beside the plan's prediction."""
    title = "each device of a program sends per step; transfers: all devices together"
    table = TextTable.of(title, ("program",), ("devices", "runs", *SIDES), overflow="fold")
    for row in found.rows:
        totals = {side: sum(getattr(row, side).values()) for side in ("predicted", "compiled")}
        devices = "" if "transfer" in row.compiled else str(row.num_devices)
        shown = (", ".join(f"{k} {size(b)}" for k, b in getattr(row, side).items() if b) for side in totals)
        table.add_row(row.name, devices, str(row.runs), *shown, _relative(**totals))
    memory = TextTable.of("memory per device", ("",), SIDES)
    for name, (predicted, compiled) in found.memory.items():
        memory.add_row(name, size(predicted), size(compiled), _relative(predicted, compiled))
    parts = found.inspected.parts
    lines = [
        *_op_lines(found.inspected.ops),
        *(f"{p.name}: rematerialised: {r}" for p in parts for r in p.rematerialised),
        *(f"{p.name}: replicated: {r}" for p in parts for r in p.replicated),
    ]
    if not fits:
        lines.append(f"does NOT fit: available {size(_available_bytes(plan))} per device")
    if runs and found.numbers is None:
        lines.append("numbers not compared: an asynchronous schedule trains with older weights than the single-device step")
    verdict = "proven" if runs and found.numbers is not None else "compiled as planned; the numbers were not compared"
    lines.append(verdict if is_proven and fits else "NOT proven")
    return [table, memory, Text("\n".join(lines))]
