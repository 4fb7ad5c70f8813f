"""Equations and values of a step with one sample that correspond to those of the step with several.

JAX drops sums over one sample, and reshapes where it would gather: equations are matched in order, the same primitive in the same
scope, with operands that correspond where these have counterparts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from soapjax.graph.trace.program import FlatEqn, Program

_MOST_SKIPPED = 32  # equations of both programs between two that correspond
_IN_A_ROW = 3  # equations that correspond after some that do not


def corresponding(one: Program, two: Program, factor: int = 2) -> tuple[dict[int, int], dict[str, str]]:
    """Values of `one` -> of `two`, and keys of equations of `two` -> of `one`: a step with one sample, and with `factor`."""
    values = dict(zip(one.inputs, two.inputs, strict=True)) if len(one.inputs) == len(two.inputs) else {}
    equations: dict[str, str] = {}
    _follow(one, two, factor, values, equations)
    return values, equations


def _follow(one: Program, two: Program, factor: int, values: dict[int, int], equations: dict[str, str]) -> None:
    for a, b in _in_step(one.eqns, two.eqns):
        operands = list(zip(a.inputs, b.inputs, strict=False))
        if len(a.inputs) != len(b.inputs) or any(values.get(x, y) != y for x, y in operands if isinstance(x, int)):
            continue
        made = zip(_avals(one, a.outputs), _avals(two, b.outputs), strict=False)
        if len(a.outputs) != len(b.outputs) or not all(_is_grown(x, y, factor) for x, y in made):
            continue
        equations[b.key] = a.key
        values.update(zip(a.outputs, b.outputs, strict=True))
        if a.body is not None and b.body is not None:
            values.update(zip(a.body.inputs, b.body.inputs, strict=True))
            _follow(a.body, b.body, factor, values, equations)


def _avals(program: Program, values: Sequence[int]) -> list[Any]:
    return [program.avals[v] for v in values]


def _is_grown(a: Any, b: Any, factor: int) -> bool:
    """Whether a value of one sample may be that of several: every dim as large, or so many times as large."""
    alike = getattr(a, "dtype", None) == getattr(b, "dtype", None) and len(a.shape) == len(b.shape)
    return alike and all(n in (m, factor * m) for m, n in zip(a.shape, b.shape, strict=True))


def _in_step(one: Sequence[FlatEqn], two: Sequence[FlatEqn]) -> Iterator[tuple[FlatEqn, FlatEqn]]:
    """Pairs of equations in order, each the same by name and scope; what has no partner is passed over."""
    a, b = ([(eqn.name, eqn.stack) for eqn in eqns] for eqns in (one, two))
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            yield one[i], two[j]
            i, j = i + 1, j + 1
            continue
        skips = ((k, n - k) for n in range(1, _MOST_SKIPPED) for k in range(n + 1))
        found = next(((k, m) for k, m in skips if _meet(a, i + k, b, j + m)), None)
        if found is None:
            return
        i, j = i + found[0], j + found[1]


def _meet(a: Sequence[tuple], i: int, b: Sequence[tuple], j: int) -> bool:
    row = min(_IN_A_ROW, len(a) - i, len(b) - j)
    return row > 0 and a[i : i + row] == b[j : j + row]
