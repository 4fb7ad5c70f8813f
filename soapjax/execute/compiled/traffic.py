"""Predicted beside compiled communication: by kind, and operator by operator where they differ.

The compiler merges collectives of several operators into one; such operators are compared together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from soapjax.execute.compiled.collectives import KINDS, Collective, bytes_by_kind
from soapjax.strategy.plan import Plan, SentPart

_MARKS = re.compile(r"\bsj(\d+)\b")
_NAMELESS = -1


class Difference(NamedTuple):
    """Operators whose compiled communication is not the predicted one."""

    operators: tuple[str, ...]
    predicted: dict[str, int]
    compiled: dict[str, int]
    reasons: tuple[str, ...]  # what was predicted, in words that name the tensors
    instructions: tuple[str, ...]  # what was compiled

    @property
    def excess_bytes(self) -> int:
        return sum(self.compiled.values()) - sum(self.predicted.values())

    def __str__(self) -> str:
        shown = ", ".join(self.operators[:3]) + (f" and {len(self.operators) - 3} more" if len(self.operators) > 3 else "")
        lines = [f"{shown}: predicted {_shown(self.predicted)}, compiled {_shown(self.compiled)}; {self.cause}"]
        lines += [f"  predicted {r}" for r in self.reasons[:4]]
        lines += [f"  compiled {i}" for i in self.instructions[:4]]
        return "\n".join(lines)

    @property
    def cause(self) -> str:
        if not any(self.compiled.values()):
            return "the compiler found it needless (the same value is at hand), or merged it with another operator's"
        if not any(self.predicted.values()):
            return "the compiler reshards where the plan does not: a value inside the operator is split otherwise"
        if self.excess_bytes < 0:
            return "the compiler adds up before it communicates, or shares a copy"
        return "the compiler takes another way between the layouts"


def _match_nameless(predicted: dict[int, list[SentPart]], compiled: dict[int, list[Collective]]) -> None:
    """Takes merged collectives without a name off, with what they were predicted as: what nobody else compiled, largest first."""
    nameless = compiled.pop(_NAMELESS, [])
    rest = []
    for kind in KINDS:
        mine = [c for c in nameless if c.kind == kind]
        pool = total = sum(c.step_bytes for c in mine)
        missing = [
            (p.bytes[kind], group, p) for group, parts in predicted.items() for p in parts
            if kind in p.bytes and not any(c.kind == kind for c in compiled.get(group, []))
        ]  # fmt: skip
        for size, group, part in sorted(missing, key=lambda m: (-m[0], m[1])):
            if size <= pool + 0.005 * total:
                pool -= size
                left = {k: b for k, b in part.bytes.items() if k != kind}
                parts = predicted[group]
                parts[parts.index(part)] = part.model_copy(update={"bytes": left})
        if total and pool > 0.005 * total:
            rest.append(mine[0]._replace(sent_bytes=pool, trips=1, op_name="what is left of merged collectives without a name"))
    if rest:
        compiled[_NAMELESS] = rest


def _shown(by_kind: dict[str, int]) -> str:
    return " + ".join(f"{k} {b} B" for k, b in by_kind.items() if b) or "nothing"


def compare_by_kind(plan: Plan, collectives: Sequence[Collective]) -> dict[str, dict[str, int]]:
    """{kind: {"predicted": bytes, "compiled": bytes}} that each device sends in one step."""
    compiled = bytes_by_kind(collectives)
    return {k: {"predicted": plan.prediction.bytes_by_collective.get(k, 0), "compiled": compiled[k]} for k in KINDS}


def differences(plan: Plan, collectives: Sequence[Collective]) -> list[Difference]:
    """Largest first; those of less than a hundredth of all bytes are left out."""
    parent: dict[int, int] = {}

    def find(k: int) -> int:
        while parent.setdefault(k, k) != k:
            k = parent[k]
        return k

    tasks_of: list[list[int]] = []
    for c in collectives:
        tasks = [int(t) for t in _MARKS.findall(c.op_name)] or [c.task]
        tasks_of.append(tasks)
        for t in tasks:
            parent[find(t)] = find(tasks[0])
    total = max(sum(c.step_bytes for c in collectives), sum(plan.prediction.bytes_by_collective.values()), 1)
    predicted: dict[int, list[SentPart]] = {}
    compiled: dict[int, list[Collective]] = {}
    names: dict[int, str] = {}
    for part in plan.prediction.sends:
        predicted.setdefault(find(part.task), []).append(part)
        names[part.task] = part.operator
    for c, tasks in zip(collectives, tasks_of, strict=True):
        compiled.setdefault(find(tasks[0]), []).append(c)
    found = []
    _match_nameless(predicted, compiled)
    for group in {*predicted, *compiled}:
        parts, made = predicted.get(group, []), compiled.get(group, [])
        planned = {k: sum(p.bytes.get(k, 0) for p in parts) for k in KINDS}
        measured = bytes_by_kind(made)
        if sum(abs(planned[k] - measured[k]) for k in KINDS) >= 0.01 * total:
            members = dict.fromkeys(p.operator for p in parts)
            shown = [
                f"{c.kind} {round(c.step_bytes)} B in groups of {len(c.group)}: {c.op_name[-100:] or 'nameless'}" for c in made
            ]
            found.append(
                Difference(
                    tuple(members) or (f"task {group}" if group != _NAMELESS else "merged or nameless collectives",),
                    planned, measured,
                    tuple(p.reason for p in sorted(parts, key=lambda p: -sum(p.bytes.values()))), tuple(shown),
                )
            )  # fmt: skip
    return sorted(found, key=lambda d: -sum(abs(d.predicted[k] - d.compiled[k]) for k in KINDS))
