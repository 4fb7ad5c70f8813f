"""Units, and an order in which each comes after those that it reads from.

Light equations are grouped by heuristics (units.py), and groups may read each other in a circle: one holds a mask, another
reads it, and the first reads what the other makes. Such groups are taken apart, so that every program has an order.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import scipy

from soapjax.graph.trace.program import FlatEqn
from soapjax.graph.trace.values import Values


@dataclasses.dataclass(eq=False)
class Unit:
    """One task: equations in program order, of one phase and loop."""

    eqns: list[FlatEqn]
    phase: int
    scope: tuple[str, ...]
    kind: str  # a value of units.HEAVY, "fused", or "unknown"
    heavy: FlatEqn | None = None


def ordered(units: list[Unit], values: Values) -> list[Unit]:
    """Units so that each comes after those it reads from, otherwise in program order.

    A region's place is its last equation: the first may prepare an operand long before (a dropout mask).
    """
    needs = reads_between(units, values)
    order = sorted(range(len(units)), key=lambda i: values.order[(units[i].heavy or units[i].eqns[-1]).key])
    placed: list[Unit] = []
    seen: set[int] = set()

    def place(i: int) -> None:
        seen.add(i)
        stack = [(i, iter(sorted(needs[i])))]
        while stack:
            k, rest = stack[-1]
            nxt = next((j for j in rest if j not in seen), None)
            if nxt is None:
                stack.pop()
                placed.append(units[k])
            else:
                seen.add(nxt)
                stack.append((nxt, iter(sorted(needs[nxt]))))

    for i in order:
        if i not in seen:
            place(i)
    return placed


def without_circles(units: list[Unit], values: Values) -> list[Unit]:
    """The units, those that read each other in a circle taken apart.

    Each equation of such a circle gets a level: one more than that of what it reads from another unit of the circle, and at
    least that of what it reads from its own. A unit's equations of one level stay together. Between units levels only rise,
    so that no circle is left.
    """
    circles = _circles(reads_between(units, values))
    if not circles:
        return units
    parts = dict(enumerate([unit] for unit in units))
    for circle in circles:
        home = {e.key: i for i in circle for e in units[i].eqns}
        maker = {o: e.key for i in circle for e in units[i].eqns for o in e.outputs}
        level: dict[str, int] = {}
        for e in sorted((e for i in circle for e in units[i].eqns), key=lambda e: values.order[e.key]):
            makers = {maker[root] for root in _read_first(e, values) if root in maker}
            level[e.key] = max([0, *(level[m] + (home[m] != home[e.key]) for m in makers if m in level)])
        for i in circle:
            parts[i] = _split(units[i], level)
    return [part for i in range(len(units)) for part in parts[i]]


def _split(unit: Unit, level: dict[str, int]) -> list[Unit]:
    found: dict[int, list[FlatEqn]] = {}
    for e in unit.eqns:
        found.setdefault(level[e.key], []).append(e)
    parts = []
    for eqns in found.values():
        is_heavy = unit.heavy in eqns
        kind, heavy = (unit.kind, unit.heavy) if is_heavy else ("fused", None)
        parts.append(Unit(eqns, unit.phase, unit.scope, kind, heavy))
    return parts


def _circles(needs: list[set[int]]) -> list[list[int]]:
    if not _has_circle(needs):
        return []
    rows = [i for i, found in enumerate(needs) for _ in found]
    columns = [j for found in needs for j in found]
    edges = scipy.sparse.csr_array((np.ones(len(rows), np.int8), (rows, columns)), shape=(len(needs), len(needs)))
    _, component = scipy.sparse.csgraph.connected_components(edges, directed=True, connection="strong")
    members: dict[int, list[int]] = {}
    for i, c in enumerate(component):
        members.setdefault(int(c), []).append(i)
    return [found for found in members.values() if len(found) > 1]


def _has_circle(needs: list[set[int]]) -> bool:
    """Whether some unit is left when those that need nothing are taken away, again and again."""
    readers: list[list[int]] = [[] for _ in needs]
    for i, found in enumerate(needs):
        for j in found:
            readers[j].append(i)
    missing = [len(found) for found in needs]
    free = [i for i, n in enumerate(missing) if n == 0]
    for i in free:  # grows
        for reader in readers[i]:
            missing[reader] -= 1
            if missing[reader] == 0:
                free.append(reader)
    return len(free) < len(needs)


def _read_first(eqn: FlatEqn, values: Values) -> list[int]:
    """Roots that must be there before the equation first runs: of what a loop carries only the first value."""
    roots = list(values.reads[eqn.key])
    for k, root in enumerate(roots) if values.carries else ():
        while (carry := values.carries.get(root)) is not None and (first := values.of(carry.init)) is not None:
            root = first.root
        roots[k] = root
    return roots


def reads_between(units: list[Unit], values: Values) -> list[set[int]]:
    """Per unit the others that it reads from; of what a loop carries only what makes the first value."""
    maker = {o: i for i, u in enumerate(units) for e in u.eqns for o in e.outputs}
    return [{maker[root] for e in u.eqns for root in _read_first(e, values) if root in maker} - {i} for i, u in enumerate(units)]
