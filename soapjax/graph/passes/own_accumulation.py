"""Gradient accumulation that a step does itself: gradients of several backward passes, or of a loop's trips, which it adds up.

`jax.grad` leaves no mark on these additions, since the step writes them. They are backward work all the same, as the additions
that the transpose of a loop makes: the gradient is the last of these sums, and devices may sum it up once.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from soapjax.graph.operators import BACKWARD, UPDATE
from soapjax.graph.passes.relayouts import ADDITIONS, operand_of
from soapjax.graph.trace.program import Atom, FlatEqn, Program
from soapjax.graph.trace.values import Carry, Values


def own_additions(program: Program, values: Values, phase: Mapping[str, int]) -> frozenset[str]:
    """Keys of the equations that add up gradients, and of those that cast one, scale it or lay it out anew before it is added."""
    carries = {a: c for a, c in values.carries.items() if program.avals[a].shape}
    while True:
        sums = _Sums(program, values, phase, carries.keys())
        kept = {a: c for a, c in carries.items() if sums.goes_on(c)}
        if len(kept) == len(carries):
            return frozenset(sums.keys)
        carries = kept


class _Sums:
    """The sums that are found where loops with the arguments `carried` add to what they carry."""

    def __init__(self, program: Program, values: Values, phase: Mapping[str, int], carried: Set[int]):
        self.program, self.values, self.phase, self.carried = program, values, phase, carried
        self.keys: set[str] = set()
        self.made: set[int] = set()  # roots of sums
        for eqn in program.leaves:
            self._visit(eqn)

    def goes_on(self, carry: Carry) -> bool:
        """Whether a loop begins with zeros, or with gradients, and ends every trip with a sum that nothing in it reads besides."""
        root = self._root(carry.result)
        if root not in self.made or root in self.values.stacked or not self._begins_a_sum(carry.init):
            return False
        inside = self.values.scope[self.values.producer[root].key]
        return all(self.values.scope[e.key][: len(inside)] != inside for e in self.values.uses.readers(root))

    def _begins_a_sum(self, init: Atom) -> bool:
        root = self._root(init)
        maker = self.values.producer.get(root)
        if root is None or root in self.made or root in self.carried:
            return True
        return maker is not None and (not maker.read or self.phase[maker.key] == BACKWARD)

    def _root(self, atom: Atom) -> int | None:
        found = self.values.of(atom)
        return None if found is None else found.root

    def _visit(self, eqn: FlatEqn) -> None:
        if eqn.name not in ADDITIONS or self.phase[eqn.key] != UPDATE or len(eqn.read) != 2:
            return
        shape = self.program.avals[eqn.outputs[0]].shape
        if not shape or any(self.program.avals[a].shape != shape for a in eqn.read):
            return
        gradients = list[str]()
        for a in eqn.read:
            before = self.values.of(a)
            if before.shift or not self.values.uses.is_private(before.root, eqn):
                return
            if before.root in self.made or before.root in self.carried:
                continue
            if (between := self._on_way(before.root, eqn)) is None:
                return
            gradients += between
        self.keys.update((eqn.key, *gradients))
        self.made.add(eqn.outputs[0])

    def _on_way(self, root: int, reader: FlatEqn) -> list[str] | None:
        """The keys between a gradient and the equation that adds it; None where what is added is no gradient."""
        keys = list[str]()
        while (maker := self.values.producer.get(root)) is not None and self.values.uses.is_private(root, reader):
            if self.phase[maker.key] == BACKWARD:
                return keys
            operand = operand_of(maker, self.program)
            if operand is None or self.values.scope[maker.key] != self.values.scope[reader.key] or self.values.of(operand).shift:
                return None
            keys.append(maker.key)
            root, reader = self.values.of(operand).root, maker
        return None
