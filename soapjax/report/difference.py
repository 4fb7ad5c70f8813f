"""Two plans beside each other: `soapjax diff`. What can be read from the files is here; what a change costs is found in
soapjax/cli/explaining.py."""

from __future__ import annotations

from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from soapjax.helpers.sizes import size
from soapjax.report.plan_tables import merged_name, meshes_of, percent, seconds, seconds_of, short_storage, split_of
from soapjax.report.text_table import TextTable
from soapjax.strategy.plan import OperatorPart, Plan

MOST_ROWS = 40


class Side(NamedTuple):
    """Some operators in one of the plans."""

    split: str
    storage: str
    seconds: float  # that they compute and communicate, hidden or not; 0 where the plan has no costs
    sent_bytes: int
    memory_bytes: int


class Alone(NamedTuple):
    """What changes if plan a takes these operators from b and nothing else."""

    step_s: float
    sent_bytes: int
    memory_bytes: int


class ChangedOperators(NamedTuple):
    """Operators that differ in numbers only and are changed alike."""

    names: tuple[str, ...]
    a: Side
    b: Side
    alone: Alone | None = None  # None where it was not simulated, or is not possible


class PlanDifference(NamedTuple):
    changed: tuple[ChangedOperators, ...]  # largest first
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    others: tuple[str, ...]  # what else differs, in words

    @property
    def is_none(self) -> bool:
        return not (self.changed or self.only_a or self.only_b or self.others)


def difference_of(a: Plan, b: Plan) -> PlanDifference:
    """What is written differently in two plans."""
    of_a, of_b = meshes_of(a), meshes_of(b)
    merged: dict[tuple, list[str]] = {}
    for name in a.operators.keys() & b.operators.keys():
        here, there = _place(a.operators[name], of_a[name]), _place(b.operators[name], of_b[name])
        if here != there:
            merged.setdefault((merged_name(name), here, there), []).append(name)
    order = {name: i for i, name in enumerate(a.operators)}
    changed = []
    for some in merged.values():
        names = tuple(sorted(some, key=order.__getitem__))
        changed.append(ChangedOperators(names, _side(a, names, of_a[names[0]]), _side(b, names, of_b[names[0]])))
    changed.sort(key=lambda c: (-abs(c.a.seconds - c.b.seconds), order[c.names[0]]))
    others = []
    if a.graph.fingerprint != b.graph.fingerprint:
        others.append(f"they are for different steps: {a.graph.num_operators} and {b.graph.num_operators} operators")
    if a.topology != b.topology:
        others.append(f"topologies {a.topology.get('name', '?')} and {b.topology.get('name', '?')} differ")
    stages = [f"{len(p.pipeline.stages)} stages of {p.pipeline.schedule}" if p.pipeline else "one program" for p in (a, b)]
    if a.pipeline != b.pipeline:
        same = stages[0] == stages[1]
        others.append(f"{stages[0]} differ in operators, devices or micro-batches" if same else f"{stages[0]}, and {stages[1]}")
    only_a, only_b = (tuple(n for n in x.operators if n not in y.operators) for x, y in ((a, b), (b, a)))
    return PlanDifference(tuple(changed), only_a, only_b, tuple(others))


def _place(part: OperatorPart, sizes: dict[str, int]) -> tuple[str, str]:
    return split_of(part, sizes), part.storage


def _side(plan: Plan, names: tuple[str, ...], sizes: dict[str, int]) -> Side:
    parts = [plan.operators[name] for name in names]
    costs = [p.cost for p in parts if p.cost is not None]
    split, storage = _place(parts[0], sizes)
    sent, memory = sum(c.sent_bytes for c in costs), sum(c.memory_bytes for c in costs)
    return Side(split, short_storage(storage, sizes), sum(map(seconds_of, parts)), sent, memory)


def difference_report(a: Plan, b: Plan, found: PlanDifference) -> RenderableType:
    """Totals, then operators that differ, those with the largest difference first."""
    if found.is_none:
        return Text("the plans are the same")
    total = TextTable.of("predicted", ("",), ("a", "b", "b against a"))
    for name, values, show in _totals(a, b):
        change = f"{(values[1] / values[0] - 1) * 100:+.2f} %" if None not in values and values[0] else ""
        total.add_row(name, *("" if v is None else show(v) for v in values), change)
    out: list[RenderableType] = [total]
    if found.changed:
        is_known = any(c.alone is not None for c in found.changed)
        title = "operators that differ" + ("; what b's choice costs: in a, nothing else changed" if is_known else "")
        heads = ("step", "sends", "memory") if is_known else ("seconds in a", "in b")
        table = TextTable.of(title, ("operators", "a", "b"), heads, overflow="fold")
        for c in found.changed[:MOST_ROWS]:
            title = c.names[0] if len(c.names) == 1 else f"{c.names[0]} … {c.names[-1]} ({len(c.names)})"
            sides = _shown(c.a, c.b), _shown(c.b, c.a)
            if is_known:
                columns: tuple[str, ...] = ("", "", "") if c.alone is None else (
                    signed(c.alone.step_s, seconds), signed(c.alone.sent_bytes, size), signed(c.alone.memory_bytes, size)
                )  # fmt: skip
            else:
                columns = (seconds(c.a.seconds), seconds(c.b.seconds))
            table.add_row(title, *sides, *columns)
        if len(found.changed) > MOST_ROWS:
            table.add_row(f"{len(found.changed) - MOST_ROWS} more rows", *[""] * (len(table.columns) - 1))
        out.append(table)
    lines, only = [*found.others], (("a", found.only_a), ("b", found.only_b))
    lines += [f"only in {x}: {', '.join(names[:10])}{' …' if len(names) > 10 else ''}" for x, names in only if names]
    return Group(*out, Text("\n".join(lines)))


def _shown(side: Side, other: Side) -> str:
    return side.split if side.storage == other.storage else f"{side.split}, {side.storage}"


def _totals(a: Plan, b: Plan):
    p, q = a.prediction, b.prediction
    yield "step", (p.step_time_s, q.step_time_s), seconds
    yield "if no communication were hidden", (p.without_overlap_s, q.without_overlap_s), seconds
    yield "FLOPs split", (p.split_flops_share, q.split_flops_share), percent
    yield "each device sends", (sum(p.bytes_by_collective.values()), sum(q.bytes_by_collective.values())), size
    yield "the one that sends most", (p.peak_sent_bytes, q.peak_sent_bytes), size
    yield "memory per device", (p.memory_bytes_per_device, q.memory_bytes_per_device), size


def signed(value: float, show) -> str:
    """A difference with its sign."""
    return "0" if not value else ("+" if value > 0 else "−") + show(abs(value))
