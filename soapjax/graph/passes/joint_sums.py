"""Sums of products that a region adds up: they may stay partial sums until the last one is added.

The input gradients of the projections of one activation (queries, keys and values; both matrices of an LSTM; the
branches of a residual block) meet in such a sum. Where a plan makes them partial sums in one layout,
devices sum up the total once, not every product: Megatron's one all-reduce per block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TypeGuard

from soapjax.graph.batch.unlike_sums import SCALES
from soapjax.graph.passes.relayouts import ADDITIONS, is_relayout
from soapjax.graph.passes.units import Unit
from soapjax.graph.trace.program import Atom, FlatEqn, Program
from soapjax.graph.trace.values import Alias, Values


@dataclasses.dataclass(frozen=True)
class TracedJointSum:
    """One sum, as values of the program."""

    summands: tuple[int, ...]  # products that may be partial sums, in the order in which they are made; two at least
    others: tuple[Atom, ...]  # what else is added
    total: int
    additions: frozenset[str]  # keys of the equations that add, the last one included
    last: str
    products: dict[int, str]  # summand -> key of the heavy equation that it comes from
    relayouts: frozenset[str]  # keys of the equations between such an equation and the summand

    def with_summands(self, chosen: Iterable[int]) -> TracedJointSum:
        """The same sum, where only the products in `chosen` may be partial."""
        kept = set(chosen)
        others = (*self.others, *(s for s in self.summands if s not in kept))
        return dataclasses.replace(self, summands=tuple(s for s in self.summands if s in kept), others=others)


def find_joint_sums(units: list[Unit], program: Program, values: Values, apart: frozenset[str]) -> list[TracedJointSum]:
    """The sums of two or more products in regions of `units` (in order of execution).

    `apart`: keys of additions that are dealt with elsewhere.
    """
    finder = _Finder(units, program, values)
    found = []
    for unit in units:
        if unit.heavy is None:
            additions = {e.outputs[0]: e for e in unit.eqns if e.key not in apart and finder.is_addition(e)}
            for eqn in additions.values():
                if not finder.is_inside(eqn.outputs[0], additions):
                    found += finder.sum(eqn, unit, additions)
    return found


class _Finder:
    def __init__(self, units: list[Unit], program: Program, values: Values):
        self.program, self.values, self.uses = program, values, values.uses
        self.place = {o: i for i, u in enumerate(units) for e in u.eqns for o in e.outputs}
        self.units = units
        inits = {values.of(c.init).root for c in values.carries.values() if isinstance(c.init, int)}
        self.of_loops = self.uses.carried | inits | values.stacked.keys()

    def is_addition(self, eqn: FlatEqn) -> bool:
        """Of two values of one shape and dtype."""
        avals = [self.program.aval(a) for a in (*eqn.inputs, *eqn.outputs)]
        is_plain = eqn.name in ADDITIONS and SCALES not in eqn.params
        return is_plain and len({(a.shape, a.dtype) for a in avals}) == 1

    def is_private(self, atom: Atom, reader: FlatEqn) -> TypeGuard[int]:
        if not isinstance(atom, int) or self.values.of(atom) != Alias(atom, 0):
            return False
        return atom not in self.of_loops and self.uses.is_private(atom, reader)

    def is_inside(self, value: int, additions: dict[int, FlatEqn]) -> bool:
        """Whether a sum is only one on the way to another."""
        return any(value in e.inputs and self.is_private(value, e) for e in additions.values())

    def sum(self, last: FlatEqn, unit: Unit, additions: dict[int, FlatEqn]) -> list[TracedJointSum]:
        summands: dict[int, str] = {}
        others: list[Atom] = []
        keys: set[str] = set()
        relayouts: set[str] = set()
        queue = [last]
        while queue:
            eqn = queue.pop()
            keys.add(eqn.key)
            for a in eqn.inputs:
                if not self.is_private(a, eqn) or eqn.inputs[0] == eqn.inputs[1]:
                    others.append(a)
                elif a in additions:
                    queue.append(additions[a])
                elif (way := self._from_product(a, unit)) is not None:
                    summands[a] = way[0].key
                    relayouts.update(e.key for e in way[1:])
                else:
                    others.append(a)
        if len(summands) < 2:
            return []
        order = sorted(summands, key=lambda a: (self.place[a], self.values.order[summands[a]]))
        return [
            TracedJointSum(
                summands=tuple(order), others=tuple(others), total=last.outputs[0], additions=frozenset(keys), last=last.key,
                products=summands, relayouts=frozenset(relayouts),
            )  # fmt: skip
        ]

    def _from_product(self, value: int, reader: Unit) -> list[FlatEqn] | None:
        """The product that a value is, and the equations that lay it out; None where it is something else."""
        unit = self.units[self.place[value]] if value in self.place else None
        if unit is None or unit.kind not in ("dot", "conv") or (unit.phase, unit.scope) != (reader.phase, reader.scope):
            return None
        way = [self.values.producer[value]]
        while way[0] is not unit.heavy:
            eqn, a = way[0], way[0].inputs[0]
            if not is_relayout(eqn, self.program) or not self.is_private(a, eqn) or self.place.get(a) != self.place[value]:
                return None
            if self.program.aval(a).dtype != self.program.aval(value).dtype:
                return None
            way.insert(0, self.values.producer[a])
        return way
