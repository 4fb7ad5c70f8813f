"""The rules of `while` and `cond`: a dim that everything in their bodies keeps apart is split.

Chains, trajectories and environments that are computed side by side in a loop of unknown length (an ODE solver, a sampler, a
simulator under `vmap`) stay on the devices that hold them; so do parameters that a branch updates element by element. What a body
reduces to one number (does any chain go on? how long is the vector?) is summed up by the partitioner where it is needed. A dim
that is contracted, cut, joined or sorted inside is not split.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence

from soapjax.graph.rules.rule_table import BLOCKED, Labels, is_known, labels_of, register
from soapjax.graph.trace.program import Atom, FlatEqn, Program, flatten
from soapjax.graph.trace.union_find import UnionFind
from soapjax.graph.trace.values import Values

NAMES = ("while", "cond")
Ends = list[tuple[Hashable, Atom]]  # an operand or result of the equation, and the value of the body that it is


@register("while")
def _while(eqn: FlatEqn, ins, outs) -> Labels:
    p = eqn.params
    num_cond, num_body = p["cond_nconsts"], p["body_nconsts"]
    carried = [("in", num_cond + num_body + r) for r in range(len(outs))]
    known = _Body()
    condition, body = _program(p["cond_jaxpr"]), _program(p["body_jaxpr"])
    known.add(condition, _ends([*_operands(range(num_cond)), *carried], condition.inputs))
    consts = _operands(range(num_cond, num_cond + num_body))
    known.add(body, _ends([*consts, *carried], body.inputs) + _ends(carried, body.outputs))
    known.same(_ends(carried, [("out", r) for r in range(len(outs))]), outs)
    return known.labels(ins, outs)


@register("cond")
def _cond(eqn: FlatEqn, ins, outs) -> Labels:
    known = _Body()
    for closed in eqn.params["branches"]:
        branch = _program(closed)
        results = [("out", r) for r in range(len(outs))]
        known.add(branch, _ends(_operands(range(1, len(ins))), branch.inputs) + _ends(results, branch.outputs))
    return known.labels(ins, outs)


def body_flops(eqn: FlatEqn) -> Iterator[tuple[Program, float]]:
    """The programs that one run of a `while` or `cond` evaluates, and how often: one trip, every branch as often as the others."""
    if eqn.name == "while":
        yield from ((_program(eqn.params[k]), 1.0) for k in ("cond_jaxpr", "body_jaxpr"))
    else:
        yield from ((_program(b), 1 / len(eqn.params["branches"])) for b in eqn.params["branches"])


def _program(closed) -> Program:
    return flatten(closed, has_rule=is_known)


def _operands(positions: range) -> list[tuple[str, int]]:
    return [("in", k) for k in positions]


def _ends(names: list, atoms) -> Ends:
    return list(zip(names, atoms, strict=True))


class _Body:
    """Dims of operands, results and the values between them that are one, over all programs of an equation."""

    def __init__(self) -> None:
        self.uf = UnionFind()
        self.whole: set[Hashable] = set()  # nodes whose class stays in one piece
        self.count = 0

    def add(self, program: Program, ends: Ends) -> None:
        self.count += 1
        values = Values(program)
        for eqn in program.leaves:
            self._equation(eqn, program, values)
        for carry in values.carries.values():
            for d in range(len(program.aval(carry.argument).shape)):
                nodes = [self._node(values, a, d) for a in (carry.argument, carry.init, carry.result) if isinstance(a, int)]
                self._unite(nodes)
        for name, atom in ends:
            for d in range(len(program.aval(atom).shape)):
                self._unite([(name, d), self._node(values, atom, d)] if isinstance(atom, int) else [(name, d)])

    def same(self, pairs: Ends, shapes) -> None:
        for (a, b), shape in zip(pairs, shapes, strict=True):
            for d in range(len(shape)):
                self._unite([(a, d), (b, d)])

    def labels(self, ins, outs) -> Labels:
        """Labels of the dims that stay apart; those that only operands have go into numbers, which are the body's own affair."""
        whole = {self.uf.find(n) for n in self.whole}
        number: dict[Hashable, int] = {}

        def labelled(name: tuple[str, int], shape: tuple[int, ...]) -> tuple[int, ...]:
            roots = [self.uf.find((name, d)) for d in range(len(shape))]
            return tuple(BLOCKED if root in whole else number.setdefault(root, len(number)) for root in roots)

        inputs = tuple(labelled(("in", k), shape) for k, shape in enumerate(ins))
        return Labels(inputs, tuple(labelled(("out", r), shape) for r, shape in enumerate(outs)))

    def _node(self, values: Values, atom: int, d: int) -> tuple[Hashable, ...]:
        node = values.node(atom, d)
        return (self.count, "trips", atom, d) if node is None else (self.count, *node)

    def _unite(self, nodes: Sequence[Hashable]) -> None:
        for n in nodes:
            self.uf.union(nodes[0], n)

    def _equation(self, eqn: FlatEqn, program: Program, values: Values) -> None:
        found = labels_of(eqn, program)
        kept = {lab for labs in found.outputs for lab in labs}
        is_summed = eqn.name in NAMES or all(math.prod(program.aval(o).shape) == 1 for o in eqn.outputs)
        for atom, labs in zip((*eqn.inputs, *eqn.outputs), (*found.inputs, *found.outputs), strict=True):
            for d, lab in enumerate(labs):
                if not isinstance(atom, int) or program.aval(atom).shape[d] <= 1:
                    continue
                node = self._node(values, atom, d)
                if lab == BLOCKED or "trips" in node or lab in found.spatial:
                    self.whole.add(node)
                else:
                    self.uf.union(node, (self.count, eqn.key, lab))
                    if lab not in kept and not is_summed:
                        self.whole.add(node)
