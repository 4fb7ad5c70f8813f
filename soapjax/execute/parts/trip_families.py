"""Equations of unrolled loops that are alike in all trips, by row: families."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Hashable, Sequence

from soapjax.execute.parts.cut import Part
from soapjax.graph.trace.program import FlatEqn

Rows = tuple[int, ...]  # a value for each row
Alike = Callable[[FlatEqn], Hashable]


@dataclasses.dataclass(eq=False)
class Family:
    """Equations that are alike, by row."""

    eqns: dict[int, FlatEqn]

    def outputs(self, j: int, rows: Sequence[int]) -> Rows:
        return tuple(self.eqns[t].outputs[j] for t in rows)


def families(eqns: Sequence[FlatEqn], alike: Alike) -> dict[tuple, dict[int, FlatEqn]]:
    """Equations of trips that are alike, by family and row: of each family most of its rows."""
    by_trip: dict[tuple, dict[int, FlatEqn]] = collections.defaultdict(dict)
    twice: set[tuple] = set()
    for e in eqns:
        if e.trip is not None and e.body is None:
            if e.trip.row in by_trip[e.trip.of]:
                twice.add(e.trip.of)
            by_trip[e.trip.of][e.trip.row] = e
    return {of: _most(by_row, alike) for of, by_row in by_trip.items() if of not in twice}


def _most(by_row: dict[int, FlatEqn], alike: Alike) -> dict[int, FlatEqn]:
    classes: list[list[int]] = []
    for row, e in by_row.items():
        same = (rows for rows in classes[:2] if _is_like(by_row[rows[0]], e) and alike(by_row[rows[0]]) == alike(e))
        mine = next(same, None)
        if mine is None:
            classes.append(mine := [])
        mine.append(row)
    return {row: by_row[row] for row in max(classes, key=len)}


def shift_of(having: Collection[int], rows: Sequence[int]) -> int | None:
    """By how many rows a family that has some is behind, or ahead of, the trips `rows`; None where it has not as many.

    Where a stage begins within a layer, say behind its norm, the norm of the next layer ends a trip.
    """
    return next((k for k in (0, 1, -1) if all(t + k in having for t in rows)), None)


def runs_of_rows(parts: Sequence[Part], alike: Alike, least: int) -> list[list[int]]:
    """Runs of at least so many rows of which the parts have families, those with the most equations first."""
    having = [frozenset(by_row) for part in parts for by_row in families(part.eqns, alike).values() if len(by_row) > 1]
    counts = collections.Counter(having)
    rows = sorted({t for h in having for t in h})
    found = []
    for first in rows:
        for last in rows:
            run = range(first, last + 1)
            if len(run) >= least:
                found.append((sum(n * len(run) for h, n in counts.items() if shift_of(h, run) is not None), -first, list(run)))
    return [run for n, _, run in sorted(found, reverse=True) if n]


def _is_like(a: FlatEqn, b: FlatEqn) -> bool:
    """Whether two equations compute the same of other operands."""
    if a.name != b.name or len(a.inputs) != len(b.inputs) or len(a.outputs) != len(b.outputs):
        return False
    if a.params is b.params:
        return True
    try:
        return bool(a.params == b.params)
    except ValueError:  # arrays among them
        return False
