"""Gradients of parameters that are used more than once: sums of the products of all uses.

The transpose of "used k times" is a chain of additions, some of them carried through loops. Its
summands can stay partial sums until the last one is added, so that devices sum up the gradient once, not once per use.
The additions therefore become tasks of their own, instead of parts of whatever region stands next to them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set

from soapjax.graph.passes.phases import BACKWARD, Phases
from soapjax.graph.passes.relayouts import ADDITIONS, is_relayout, operand_of
from soapjax.graph.trace.program import FlatEqn, Program
from soapjax.graph.trace.values import Values


@dataclasses.dataclass(frozen=True)
class TracedAccumulation:
    """How one parameter's gradient is summed up; all are roots of the program."""

    summands: tuple[int, ...]  # what uses of the parameter contribute, in program order
    running: tuple[int, ...]  # sums before the last
    starts: tuple[int, ...]  # arguments of loop bodies that carry a running sum
    total: int  # the last sum: the gradient, or what is only laid out anew to become it
    additions: frozenset[str]  # keys of the equations that add
    relayouts: dict[str, str]  # key of an equation between a product and its addition -> key of the product's equation


def find_accumulations(program: Program, values: Values, phases: Phases, generated: Set[int]) -> dict[int, TracedAccumulation]:
    """Parameter index -> how its gradient is summed up, where there is more than one summand.

    `generated`: values that every device makes of constants (the gradient of a mean); a sum with such a summand is none of these.
    """
    context = _Context(program, values, phases, generated)
    found = {}
    for p, parameter in enumerate(phases.parameters):
        walk = _Walk(context)
        total = walk.behind_relayouts(parameter.gradient)
        if walk.sum(total, is_total=True) and not walk.is_broken:
            found[p] = TracedAccumulation(
                tuple(sorted(walk.summands, key=context.order)), tuple(sorted(walk.running, key=context.order)),
                tuple(walk.starts), total, frozenset(walk.additions), walk.relayouts,
            )  # fmt: skip
    return found


def summand_alone(root: int, program: Program, values: Values, phases: Phases) -> TracedAccumulation:
    """A gradient, or a part of one, that is no sum of products, as the only summand: the product and how it is laid out anew."""
    walk = _Walk(_Context(program, values, phases, set()))
    walk._summand(root)
    return TracedAccumulation((root,), (), (), root, frozenset(), walk.relayouts)


class _Context:
    """What every walk looks up."""

    def __init__(self, program: Program, values: Values, phases: Phases, generated: Set[int]):
        self.program, self.values, self.phases, self.generated = program, values, phases, generated
        self.uses = values.uses

    def order(self, root: int) -> int:
        return self.values.order[self.values.producer[root].key]

    def backward(self, root: int) -> FlatEqn | None:
        eqn = self.values.producer.get(root)
        return eqn if eqn is not None and self.phases.phase[eqn.key] == BACKWARD else None


class _Walk:
    """One gradient's chain, from its end to its beginnings."""

    def __init__(self, context: _Context):
        self.context, self.values, self.program = context, context.values, context.program
        self.summands: list[int] = []
        self.running: list[int] = []
        self.starts: list[int] = []
        self.additions: set[str] = set()
        self.relayouts: dict[str, str] = {}
        self.is_broken = False  # something that no task makes takes part

    def behind_relayouts(self, root: int) -> int:
        """The sum that is cast or transposed, once, to become the gradient."""
        eqn = self.context.backward(root)
        while eqn is not None and is_relayout(eqn, self.program) and isinstance(eqn.inputs[0], int):
            before = self.values.of(eqn.inputs[0])
            if before.shift or not self.context.uses.is_private(before.root, eqn):
                break
            root, eqn = before.root, self.context.backward(before.root)
        return root

    def sum(self, root: int, *, is_total: bool = False) -> bool:
        """Whether `root` is a sum; if so, it and all before it are noted."""
        eqn = self.context.backward(root)
        if eqn is None or eqn.name not in ADDITIONS:
            return False
        shape = self.program.avals[root].shape
        if any(not isinstance(a, int) or self.program.avals[a].shape != shape for a in eqn.inputs):
            return False
        operands = [self.values.of(a) for a in eqn.inputs]
        if any(o.shift or not self.context.uses.is_private(o.root, eqn) for o in operands):
            return False
        self.additions.add(eqn.key)
        if not is_total:
            self.running.append(root)
        for o in operands:
            if o.root in self.values.carries:
                self._start(o.root)
            elif not self.sum(o.root):
                self._summand(o.root)
        return True

    def _start(self, argument: int) -> None:
        """A loop's running sum: it starts from zeros, or from the sum of what came before the loop."""
        self.starts.append(argument)
        init = self.values.carries[argument].init
        first = self.values.of(init)
        if first is None:
            return
        made = self.values.producer.get(first.root)
        if made is None or first.shift:
            self.is_broken = True
        elif made.read and not self.sum(first.root):
            self._summand(first.root)

    def _summand(self, root: int) -> None:
        self.summands.append(root)
        eqn = self.context.backward(root)
        if eqn is None or root in self.context.uses.carried or root in self.context.generated:
            self.is_broken = True
            return
        between: list[FlatEqn] = []
        own = self.context.phases.own_additions  # what a step does with a gradient before it adds it
        while is_relayout(eqn, self.program) or eqn.key in own:
            if (operand := operand_of(eqn, self.program)) is None:
                break
            before = self.values.of(operand)
            maker = self.context.backward(before.root)
            if maker is None or before.shift or not self.context.uses.is_private(before.root, eqn):
                break
            if self.values.scope[maker.key] != self.values.scope[eqn.key]:
                break
            between.append(eqn)
            eqn = maker
        self.relayouts.update((e.key, eqn.key) for e in between)
