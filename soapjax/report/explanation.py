"""Why a plan is as it is, in words and tables: `soapjax explain`. Takes plain data; what makes it is soapjax/cli/explaining.py."""

from __future__ import annotations

from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from soapjax.helpers.sizes import size
from soapjax.report.plan_tables import comparison_table, gain_lines, merged_name, percent, seconds
from soapjax.report.text_table import TextTable
from soapjax.strategy.plan import OperatorCost, Plan

MOST_ROWS = 12


class PathPart(NamedTuple):
    """Tasks of one name (but for numbers) in one place on the critical path."""

    name: str
    where: str  # "compute", or "d link"
    num_tasks: int
    seconds: float


class OperatorTotal(NamedTuple):
    """One of the largest costs: operators of one name, but for numbers."""

    name: str
    num_operators: int
    compute_s: float
    communication_s: float
    sent_bytes: int
    memory_bytes: int


class Explanation(NamedTuple):
    """Of a whole plan."""

    path: tuple[PathPart, ...]  # largest first; empty where the model is not at hand
    where: dict[str, float]  # seconds of the critical path by stream
    totals: tuple[OperatorTotal, ...]  # largest first
    limits: tuple[str, ...]  # which limit binds, in words


class Neighbour(NamedTuple):
    """The plan with another config of one operator."""

    changes: str  # "d1: param0, not sample"
    step_time_s: float
    sent_bytes: int
    memory_bytes: int
    is_feasible: bool
    like: tuple[str, ...] = ()  # baselines that split the operator so


class OperatorExplanation(NamedTuple):
    """Of one operator."""

    name: str
    kind: str
    dims: dict[str, int]
    split: str
    storage: str
    cost: OperatorCost | None
    seconds_on_path: float | None  # of its tasks on the critical path; None where the model is not at hand
    sends: tuple[tuple[str, int], ...]  # why, and how many bytes
    neighbours: tuple[Neighbour, ...] = ()  # that were costed, fastest first
    num_neighbours: int = 0  # that the space has; more than were costed where it is large
    now: Neighbour | None = None  # the plan itself


def totals_of(plan: Plan) -> tuple[OperatorTotal, ...]:
    """Operators by what they take, those that differ in numbers only added up; none where the plan has no costs."""
    merged: dict[str, list[str]] = {}
    for name, part in plan.operators.items():
        if part.cost is not None:
            merged.setdefault(merged_name(name), []).append(name)
    found = []
    for names in merged.values():
        costs = [plan.operators[name].cost for name in names]
        title = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        sums = (sum(getattr(c, f) for c in costs) for f in ("compute_s", "communication_s", "sent_bytes", "memory_bytes"))
        found.append(OperatorTotal(title, len(names), *sums))
    return tuple(sorted(found, key=lambda t: -(t.compute_s + t.communication_s)))


def largest_sends(plan: Plan) -> list[tuple[str, str, int, int]]:
    """(where, what, how many, bytes of each device), those that differ in layers' numbers only added up, largest first."""
    merged: dict[tuple[str, str], list] = {}
    for s in plan.prediction.sends:
        what, colon, layouts = s.reason.partition(": ")
        merged.setdefault((merged_name(s.program or s.operator), merged_name(what) + colon + layouts), []).append(s)
    found = []
    for (where, what), parts in merged.items():
        if len(parts) == 1:
            where, what = parts[0].program or parts[0].operator, parts[0].reason
        found.append((where, what, len(parts), sum(sum(p.bytes.values()) for p in parts)))
    return sorted(found, key=lambda x: -x[3])


def explanation_report(plan: Plan, found: Explanation) -> RenderableType:
    """What takes the time, which limit binds, and what the step would cost under each baseline."""
    step_s, out = plan.prediction.step_time_s, []
    if found.where:
        title = f"the critical path: what the step of {seconds(step_s)} is made of"
        table = TextTable.of(title, ("tasks", "where"), ("number", "time", "share"), overflow="fold")
        for part in found.path[:MOST_ROWS]:
            table.add_row(part.name, part.where, str(part.num_tasks), seconds(part.seconds), f"{part.seconds / step_s:.1%}")
        rest = found.path[MOST_ROWS:]
        if rest:
            took = sum(p.seconds for p in rest)
            table.add_row(f"{len(rest)} others", "", str(sum(p.num_tasks for p in rest)), seconds(took), f"{took / step_s:.1%}")
        out.append(table)
    if found.totals:
        heads = ("number", "computing", "communicating", "sends", "memory")
        table = TextTable.of("the largest costs of operators, hidden or not", ("operators",), heads, overflow="fold")
        for t in found.totals[:MOST_ROWS]:
            columns = seconds(t.compute_s), seconds(t.communication_s), size(t.sent_bytes), size(t.memory_bytes)
            table.add_row(t.name, str(t.num_operators), *columns)
        out.append(table)
    if sends := largest_sends(plan):
        words = ("in", "what, from which layout to which")
        table = TextTable.of("what is sent most, per device and step", words, ("number", "bytes"), overflow="fold")
        for where, reason, count, bytes_ in sends[:MOST_ROWS]:
            table.add_row(where, reason, str(count), size(bytes_))
        out.append(table)
    return Group(*out, comparison_table(plan), Text("\n".join([*gain_lines(plan), *found.limits])))


def operator_report(plan: Plan, found: OperatorExplanation) -> RenderableType:
    """One operator beside its neighbours in the space."""
    dims = ", ".join(f"{name}={n}" for name, n in found.dims.items())
    lines = [f"{found.name} ({found.kind}): {dims}", f"split: {found.split}; parameters stored: {found.storage}"]
    if (cost := found.cost) is not None:
        lines.append(
            f"computes {seconds(cost.compute_s)}, communicates {seconds(cost.communication_s)}, sends {size(cost.sent_bytes)} and "
            f"holds {size(cost.memory_bytes)} at the peak of memory, on each device; splits {percent(cost.split_flops_share)} of "
            f"its FLOPs ({cost.flops:.3g})"
        )
    if found.seconds_on_path is not None:
        share = found.seconds_on_path / plan.prediction.step_time_s
        lines.append(f"{seconds(found.seconds_on_path)} of it are on the critical path, {share:.1%} of the step")
    lines += [f"sends {size(bytes_)}: {why}" for why, bytes_ in found.sends]
    out: list[RenderableType] = [Text("\n".join(lines))]
    if found.now is not None:
        title = "the plan, and what one change of this operator alone would make of it"
        table = TextTable.of(title, ("change",), ("step", "against the plan", "sends", "memory"), overflow="fold")
        for row in (found.now, *found.neighbours[:MOST_ROWS]):
            table.add_row(*neighbour_columns(row, found.now))
        out += [table, Text("\n".join(verdict(found)))]
    return Group(*out)


def neighbour_columns(row: Neighbour, now: Neighbour) -> tuple[str, ...]:
    like = f" (as {', '.join(row.like)})" if row.like else ""
    against = "" if row is now else f"{(row.step_time_s / now.step_time_s - 1) * 100:+.2f} %"
    memory = size(row.memory_bytes) + ("" if row.is_feasible else " — does not fit")
    return row.changes + like, seconds(row.step_time_s), against, size(row.sent_bytes), memory


def verdict(found: OperatorExplanation) -> list[str]:
    """Whether a change of the operator alone would be better."""
    now, count = found.now, len(found.neighbours)
    every = f"all {count}" if count == found.num_neighbours else f"the {count} nearest"
    faster = [n for n in found.neighbours if n.step_time_s < now.step_time_s * (1 - 1e-6)]
    fit = [n for n in faster if n.is_feasible]
    if not found.neighbours:
        return ["there is no other choice for this operator"]
    lines = [f"{every} other choices of this operator were simulated, everything else as it is; {len(faster)} are faster"]
    if fit:
        gain = 1 - fit[0].step_time_s / now.step_time_s
        more = fit[0].sent_bytes - now.sent_bytes
        sends = f" and sends {size(abs(more))} {'more' if more > 0 else 'less'}" if more else ""
        lines.append(f"the best, {fit[0].changes}, would take {gain:.2%} less{sends}")
    if len(fit) < len(faster):
        lines.append(f"memory binds: {len(faster) - len(fit)} of them do not fit")
    same = [n for n in found.neighbours if abs(n.step_time_s / now.step_time_s - 1) <= 1e-6]
    if same:
        lines.append(f"{len(same)} take the same time")
    return lines


def limit_lines(plan: Plan, path: dict[str, float]) -> tuple[str, ...]:
    """Which limit binds: what most of the critical path is spent on, and whether memory keeps something faster out.

    Args:
      path: seconds of the critical path by stream; of all operators, hidden or not, where it is empty.
    """
    p, lines = plan.prediction, []
    where, of_what = path, "the critical path"
    if not path:
        totals, of_what = totals_of(plan), "all seconds of operators, hidden or not"
        where = {"compute": sum(t.compute_s for t in totals), "communication": sum(t.communication_s for t in totals)}
    named = plan.provenance.baseline_figures
    faster_but_large = [n for n, f in named.items() if not f.feasible and f.step_time_s < p.step_time_s]
    total = sum(where.values())
    if total:
        shares = sorted(where.items(), key=lambda x: -x[1])
        parts = ", ".join(f"{name} {s / total:.0%}" for name, s in shares)
        lines.append(f"what binds is {shares[0][0]}: {parts} of {of_what}")
    used = p.memory_bytes_per_device / p.usable_memory_bytes
    words = f"{size(p.memory_bytes_per_device)} of {size(p.usable_memory_bytes)} usable, {used:.1%}"
    if not p.feasible:
        lines.append(f"memory binds: the plan does not fit ({words})")
    elif faster_but_large:
        lines.append(f"memory binds: {', '.join(faster_but_large)} would be faster and does not fit; the plan takes {words}")
    else:
        close = "is close to the limit" if used > 0.9 else "does not bind"
        lines.append(f"memory {close}: {words}")
    return tuple(lines)
