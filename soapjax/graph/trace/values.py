"""Which value is which: loops made transparent.

A body's argument that is a constant of the loop is the outer value; a slice of
what another loop stacked is that loop's body value; and so on. Every value id
maps to a *root* and a *shift*: +1 where the id stacks the root over the trips of
a loop (an extra leading dim), -1 where it is one trip's slice of the root.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import NamedTuple

from soapjax.graph.trace.program import Atom, FlatEqn, Program

# Results that are their operands: barriers (rematerialisation) and names.
IDENTITIES = {"optimization_barrier", "name"}


class Alias(NamedTuple):
    root: int
    shift: int


class _Aliases(dict[int, Alias]):
    """Of every value: one that has not been given another root is its own."""

    def __missing__(self, value: int) -> Alias:
        self[value] = found = Alias(value, 0)
        return found


class _Originals(dict[int, Alias]):
    """Of every value: its root; of what a plan recomputes (`Program.repeats`) that of the forward pass, whose dims it has."""

    def __init__(self, alias: _Aliases, repeats: dict[int, int]):
        self._alias, self._repeats = alias, repeats

    def __missing__(self, value: int) -> Alias:
        root, shift = self._alias[value]
        self[value] = found = Alias(self._repeats.get(root, root), shift)
        return found


class Carry(NamedTuple):
    """A loop-carried value: the body's argument, its first value, and the body's result that becomes it."""

    argument: int
    init: Atom
    result: Atom


class Values:
    """Aliases, producers and loop carries of a program."""

    def __init__(self, program: Program):
        self.program = program
        self.alias = _Aliases()
        self.producer: dict[int, FlatEqn] = {}  # root -> the equation that makes it
        self.carries: dict[int, Carry] = {}  # body argument -> its carry
        self.order: dict[str, int] = {}  # equation key -> position in program order, bodies in place
        self.scope: dict[str, tuple[str, ...]] = {}  # equation key -> the loops around it
        self.trips: dict[tuple[str, ...], int] = {(): 1}  # such loops -> how often what is in them runs in a step
        self._stacks: dict[Alias, int] = {}  # what loops stack -> how many values
        self._sources: dict[str, set[int]] = {}  # of equations that were asked for
        self.reads: dict[str, tuple[int, ...]] = {}  # equation key -> roots of the values that it reads, in order
        self._visit(program, ())
        self.original = _Originals(self.alias, program.repeats) if program.repeats else self.alias
        self.stacked: dict[int, int] = {}  # roots of which a loop keeps every trip's value -> how many at once
        for (root, _), count in self._stacks.items():
            tensor = self.tensor(root).root
            self.stacked[tensor] = max(self.stacked.get(tensor, 1), count)
        by_result = {self.of(c.result).root: c for c in self.carries.values() if isinstance(c.result, int)}
        self._carried = by_result | self.carries

    def of(self, atom: Atom) -> Alias | None:
        """The root of an atom; None for a literal."""
        return self.alias[atom] if isinstance(atom, int) else None

    @functools.cached_property
    def uses(self) -> Uses:
        return Uses(self.program, self)

    def _visit(self, program: Program, scope: tuple[str, ...]) -> None:
        alias = self.alias
        for eqn in program.eqns:
            self.order[eqn.key] = len(self.order)
            self.scope[eqn.key] = scope
            self.reads[eqn.key] = tuple([alias[a].root for a in eqn.read])
            if eqn.name in IDENTITIES and all(isinstance(a, int) for a in eqn.inputs):
                for out, a in zip(eqn.outputs, eqn.inputs, strict=True):
                    self.alias[out] = self.of(a)
            elif eqn.body is None:
                self.producer.update(dict.fromkeys(eqn.outputs, eqn))
            else:
                self._loop(eqn, (*scope, eqn.key))

    def _loop(self, eqn: FlatEqn, scope: tuple[str, ...]) -> None:
        body, p = eqn.body, eqn.params
        num_consts, num_carry = p["num_consts"], p["num_carry"]
        self.trips[scope] = self.trips[scope[:-1]] * p["length"]
        for k, (arg, outer) in enumerate(zip(body.inputs, eqn.inputs, strict=True)):
            found = self.of(outer)
            if num_consts <= k < num_consts + num_carry:
                result = body.outputs[k - num_consts]
                if result == arg and found is not None:  # handed through unchanged
                    self.alias[arg] = found
                else:
                    self.carries[arg] = Carry(arg, outer, result)
            elif found is not None:
                self.alias[arg] = found if k < num_consts else Alias(found.root, found.shift - 1)
        self._visit(body, scope)
        for k, (out, result) in enumerate(zip(eqn.outputs, body.outputs, strict=True)):
            if not isinstance(result, int):
                continue
            found = self.alias[result]
            if k >= num_carry:
                inside = self._stacks.get(found, 1)
                found = Alias(found.root, found.shift + 1)
                self._stacks[found] = inside * p["length"] if found.shift > 0 else 1
            self.alias[out] = found

    def sources(self, eqn: FlatEqn) -> Collection[int]:
        """Roots that an equation reads; through a loop-carried argument also its first value and the trip before's."""
        if not self.carries:
            return self.reads[eqn.key]
        if eqn.key not in self._sources:
            self._sources[eqn.key] = self._all_sources(eqn)
        return self._sources[eqn.key]

    def _all_sources(self, eqn: FlatEqn) -> set[int]:
        roots: set[int] = set()
        queue = list(self.reads[eqn.key])
        while queue:
            root = queue.pop()
            if root not in roots:
                roots.add(root)
                carry = self.carries.get(root)
                if carry is not None:
                    queue += [self.of(a).root for a in (carry.init, carry.result) if isinstance(a, int)]
        return roots

    def first(self, atom: Atom) -> int | None:
        """The root of which a loop-carried argument, or the body's result that becomes it, is a later value; else its own root.

        None where a loop starts from a literal.
        """
        found = self.of(atom)
        while found is not None and (carry := self._carried.get(found.root)) is not None:
            found = self.of(carry.init)
        return None if found is None else found.root

    def tensor(self, atom: Atom) -> Alias | None:
        """As `of`, and a loop-carried argument is the result that becomes it: they share one layout."""
        found = self.of(atom)
        for _ in range(64):
            carry = self.carries.get(found.root) if found is not None else None
            result = self.of(carry.result) if carry is not None else None
            if result is None:
                break
            found = Alias(result.root, found.shift + result.shift)
        return found

    def node(self, atom: Atom, dim: int) -> tuple[int, int] | None:
        """Dim `dim` of a value as (root, root's dim); None for a dim that stacks loop trips.

        A loop-carried argument stays apart from the result that becomes it: a recurrent weight's input and output
        features are carried in one layout, yet are two dims.
        """
        if not isinstance(atom, int):
            return None
        root, shift = self.original[atom]
        return (root, dim - shift) if dim >= shift else None


class Uses:
    """Who reads which value: what only one equation reads need not have its true value until then."""

    def __init__(self, program: Program, values: Values):
        self._readers: dict[int, list[FlatEqn]] = {}
        for eqn in program.leaves:
            for root in values.reads[eqn.key]:
                self._readers.setdefault(root, []).append(eqn)
        self._outputs = {values.of(o).root for o in program.outputs if isinstance(o, int)}
        self.carried = {values.of(c.result).root for c in values.carries.values() if isinstance(c.result, int)}

    def readers(self, root: int) -> Sequence[FlatEqn]:
        return self._readers.get(root, ())

    def is_private(self, root: int, reader: FlatEqn) -> bool:
        """Whether no equation but `reader` reads it, nor the program's caller; loops may carry it."""
        return root not in self._outputs and all(e is reader for e in self._readers.get(root, []))

    def only_reader(self, root: int) -> FlatEqn | None:
        """The one equation that reads it, where the program's caller and the next trip of a loop do not."""
        readers = self._readers.get(root, [])
        is_private = len(readers) == 1 and root not in self._outputs | self.carried
        return readers[0] if is_private else None
