"""The equations of a part that are trips of unrolled loops, as loops again.

A plan speaks of every layer by itself, so a loop over layers is unrolled before its layers go to stages. The program of a stage
that holds equal layers, planned alike, need not hold their equations once per layer:

    forward 0:   a0 = f(x, w0); a1 = f(a0, w1); a2 = f(a1, w2)       ->       a2, (a0, a1, a2) = scan(f, x, (w0, w1, w2))

Equations that are alike in all trips are a *family*. What a family reads is the same for all trips (a constant), made in the same
trip, made in the trip before (carried), or a value for each trip: a tuple of rows, one array [trips, ...] (stacked_rows.py).
Families (trip_families.py) are put into as few loops as their order (trip_order.py) allows, and each as late as its readers let it:
what is cheap to make again for the backward pass is made in the loop that reads it, and not kept for all trips.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from soapjax.execute.parts.cut import Part
from soapjax.execute.parts.stacked_rows import StackedRows
from soapjax.execute.parts.trip_families import Alike, Family, Rows, families, shift_of
from soapjax.execute.parts.trip_order import FORWARDS, SAME, Irregular, TripOrder
from soapjax.graph.rules.light_rules import LIGHT
from soapjax.graph.trace.program import Atom, FlatEqn, Program


class _Carry(NamedTuple):
    argument: int  # in the body
    init: Atom
    result: int  # in the body
    rows: tuple[Atom, ...]  # what every row reads
    last: int  # the value after the last trip


@dataclasses.dataclass(eq=False)
class TripLoop:
    """Families of one loop, its body told by one row's equations."""

    order: list[int]  # rows in the order of trips
    eqns: tuple[FlatEqn, ...]
    consts: list[int]
    carries: list[_Carry]
    xs: dict[Rows, int]  # -> in the body
    results: dict[Rows, int]  # -> in the body
    places: dict[Rows, tuple[int, int]] = dataclasses.field(default_factory=dict)  # of xs: a longer stack, and where in it they are
    wanted: dict[Rows, int] = dataclasses.field(default_factory=dict)  # what it stacks
    added: dict[Rows, tuple[int, int]] = dataclasses.field(default_factory=dict)  # what it adds to a running sum, and where in it

    @functools.cached_property
    def made(self) -> dict[Rows, int]:
        """What it can stack: its results, and what its trips begin with."""
        begun = {_values(c.rows): c.argument for c in self.carries if all(isinstance(v, int) for v in c.rows)}
        return {**begun, **self.results}

    def equation(self, number: int, program: Program, stacks: StackedRows) -> FlatEqn:
        """As one equation, whose results are the last of what is carried, and the stacks that are wanted."""
        carried = [c.argument for c in self.carries]
        body = Program(
            (*self.consts, *carried, *self.xs.values()), (*(c.result for c in self.carries), *self.wanted.values()), self.eqns, {},
            program.avals,
        )  # fmt: skip
        found = [self.places.get(rows) or (stacks.of(rows, v), 0) for rows, v in self.xs.items()]
        inputs = (*self.consts, *(c.init for c in self.carries), *(stack for stack, _ in found))
        outputs = (*(c.last for c in self.carries), *(stacks.of(rows, v) for rows, v in self.wanted.items()))
        num = len(self.order)
        params = dict(
            num_consts=len(self.consts), num_carry=len(carried), length=num, reverse=self.order[0] > self.order[-1],
            begins={k: at for k, (stack, at) in enumerate(found) if len(stacks.rows[stack]) > num},
            sums=tuple((self.made[rows], stack, at) for rows, (stack, at) in self.added.items()),
            # One operation on all rows, where that keeps no more than trips do: of an update, which is element by element.
            is_mapped=not (self.carries or self.added) and all(e.name in LIGHT for e in self.eqns),
        )  # fmt: skip
        return FlatEqn((-1, number), jax.lax.scan_p, params, inputs, outputs, stack="", ctx=self.eqns[0].ctx, body=body)


class Rolled:
    """A part, some rows of which are loops.

    Args:
      rows: those rows, one after the other; none: the part stays as it is.
      alike: of an equation what must be the same for all trips beside what it computes: what the plan says of it.
    Raises: Irregular where these rows are no loop.
    """

    def __init__(self, part: Part, program: Program, rows: Sequence[int] = (), alike: Alike = id):
        self.part, self.program, self.rows = part, program, list(rows)
        self.loops: list[TripLoop] = []
        self.items: list[FlatEqn | TripLoop] = list(part.eqns)
        found = families(part.eqns, alike) if rows else {}
        shifts = ((by_row, shift_of(by_row.keys(), rows)) for by_row in found.values())
        if mine := [Family({t: by_row[t + shift] for t in rows}) for by_row, shift in shifts if shift is not None]:
            self._roll(mine)
        self._maker = {v: (loop, own) for loop in self.loops for own in loop.results for v in own}
        self._last = {c.last for loop in self.loops for c in loop.carries}
        singles = (e for e in self.items if isinstance(e, FlatEqn))
        self._single = {o for e in singles for o in e.outputs}

    def _roll(self, families: list[Family]) -> None:
        graph = TripOrder(families, self.part.eqns, self.rows)
        position = {e.key: k for k, e in enumerate(self.part.eqns)}
        by_time: dict[int, list[int]] = collections.defaultdict(list)
        for f, time in enumerate(graph.time[: len(families)]):
            by_time[time].append(f)
        entries: list[tuple[int, int, FlatEqn | TripLoop]] = []
        for time, members in by_time.items():
            loop = _loop([families[f] for f in members], members, graph, graph.direction.get(time, FORWARDS), position)
            self.loops.append(loop)
            entries.append((time, 0, loop))
        for e, time in zip(graph.singles, graph.time[len(families) :], strict=True):
            entries.append((time, position[e.key], e))
        self.items = [item for *_, item in sorted(entries, key=lambda x: x[:2])]

    # What it can give, and what it needs.

    def makes(self, rows: Rows) -> bool:
        """Whether a loop has these values, trip by trip."""
        return any(rows in loop.made for loop in self.loops)

    def like(self, rows: Rows) -> int:
        """Of a tuple that a loop makes the row that all are laid out as."""
        return next(loop.made[rows] for loop in self.loops if rows in loop.made)

    def is_made(self, value: int) -> bool:
        return value in self._maker or value in self._single

    def tuples(self) -> Iterator[Rows]:
        """Those that its loops read."""
        for loop in self.loops:
            yield from loop.xs

    def give(self, rows: Rows) -> None:
        """Has a tuple that a loop makes stacked."""
        loop = next(loop for loop in self.loops if rows in loop.made)
        loop.wanted[rows] = loop.made[rows]

    def give_all(self, rows: Rows) -> None:
        """Has values ready, stacked where one loop makes all of them."""
        if self.makes(rows):
            self.give(rows)
        else:
            for v in rows:
                self.give_one(v)

    def give_one(self, value: int) -> None:
        """Has a value ready: by itself, or as one row of a stack."""
        if value not in self._single and value not in self._last and value in self._maker:
            loop, rows = self._maker[value]
            loop.wanted[rows] = loop.made[rows]

    def singly(self, stacked: Collection[Rows]) -> set[int]:
        """The values that it reads one by one, where it has the tuples `stacked` as arrays."""
        found: set[int] = set()
        for item in self.items:
            if isinstance(item, FlatEqn):
                read: list[Atom] = list(item.inputs)
            else:
                read = [*item.consts, *(c.init for c in item.carries)]
                read += [v for rows in item.xs if rows not in stacked for v in rows]
            found.update(a for a in read if isinstance(a, int))
        return found

    def settle(self, stacked: Collection[Rows]) -> None:
        """Has all ready that its own equations read, where the tuples `stacked` come from elsewhere."""
        for rows in self.tuples():
            if rows not in stacked and self.makes(rows):
                self.give(rows)
        given = {*stacked, *(rows for loop in self.loops for rows in loop.wanted)}
        for v in self.singly(given):
            self.give_one(v)

    def equations(self, stacks: StackedRows) -> tuple[FlatEqn, ...]:
        made = {id(loop): loop.equation(n, self.program, stacks) for n, loop in enumerate(self.loops)}
        return tuple(item if isinstance(item, FlatEqn) else made[id(item)] for item in self.items)


def _is_same(a: Atom, b: Atom) -> bool:
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return a.aval == b.aval and np.array_equal(a.val, b.val)


def _values(atoms: Sequence[Atom]) -> Rows:
    """Raises: Irregular where there are literals among them."""
    values = tuple(a for a in atoms if isinstance(a, int))
    if len(values) < len(atoms):
        raise Irregular
    return values


def _loop(
    members: list[Family], numbers: list[int], graph: TripOrder, direction: int, position: dict[str, int]
) -> TripLoop:  # fmt: skip
    """Families as one loop: its body is the second trip's, whose carried values are made by the first."""
    rows = graph.rows
    order = rows if direction == FORWARDS else rows[::-1]
    first, own = order[0], order[1]
    inside = set(numbers)
    consts: dict[int, None] = {}
    carries: dict[tuple[int, Any], _Carry] = {}
    xs: dict[Rows, int] = {}
    results: dict[Rows, int] = {}
    for f, family in zip(numbers, members, strict=True):
        template = family.eqns[own]
        for j, a in enumerate(template.inputs):
            atoms = tuple(family.eqns[t].inputs[j] for t in rows)
            way = graph.read[f][j]
            if way is not None and way[0] in inside and way[2] == SAME:
                continue
            if all(_is_same(a, b) for b in atoms):
                consts.update({a: None} if isinstance(a, int) else {})
            elif not isinstance(a, int):
                raise Irregular
            elif way is not None and way[0] in inside and way[2] == direction:
                source, k = graph.families[way[0]], way[1]
                init = family.eqns[first].inputs[j]
                key = a, init if isinstance(init, int) else str(init)
                carries[key] = _Carry(a, init, source.eqns[own].outputs[k], atoms, source.eqns[order[-1]].outputs[k])
            else:
                xs[_values(atoms)] = a
        results.update({family.outputs(k, rows): o for k, o in enumerate(template.outputs)})
    roles = [*consts, *(c.argument for c in carries.values()), *xs.values()]
    if len(set(roles)) < len(roles):  # one value in two roles
        raise Irregular
    eqns = sorted((family.eqns[own] for family in members), key=lambda e: position[e.key])
    return TripLoop(order, tuple(eqns), list(consts), list(carries.values()), xs, results)
