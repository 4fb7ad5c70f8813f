"""The rules of `while` and `cond`: a dim that everything in their bodies keeps apart is split.

Chains, trajectories and environments that are computed side by side in a loop of unknown length (an ODE solver, a sampler, a
simulator under `vmap`) stay on the devices that hold them; so do parameters that a branch updates element by element. What a body
reduces to one number (does any chain go on? how long is the vector?) is summed up by the partitioner where it is needed. So is
what a branch of a `cond` sums up over a dim, as the gradient of a matrix over the samples: that is named, with its size. A dim
that is contracted in a `while`, or cut, joined or sorted inside, is not split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

from soapjax.graph.rules.rule_table import BLOCKED, Labels, SumInside, is_known, labels_of, register
from soapjax.graph.trace.flattening import flatten
from soapjax.graph.trace.program import Atom, FlatEqn, Program
from soapjax.graph.trace.union_find import UnionFind
from soapjax.graph.trace.values import Values

NAMES = ("while", "cond")
_SUMS = {"dot_general", "reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"}
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
    known = _Body(names_sums=True)
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
    """Dims of operands, results and the values between them that are one, over all programs of an equation.

    Args:
      names_sums: whether what is summed up outside of loops is named with its size, and so may be over dims that are split.
    """

    def __init__(self, *, names_sums: bool = False) -> None:
        self.uf = UnionFind()
        self.whole: set[Hashable] = set()  # nodes whose class stays in one piece
        self.count, self.names_sums = 0, names_sums
        self.sums: list[tuple[float, list[Hashable], list[Hashable]]] = []  # bytes, nodes of its dims, nodes that are summed over
        self.beside: list[list[Hashable]] = []  # nodes of all dims of one value that such a sum reads or is

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
        sums = [(size, [*map(self.uf.find, own)], [*map(self.uf.find, reduced)]) for size, own, reduced in self.sums]
        # A dim is not split together with another of the same value, nor summed over where the sum has it.
        for roots in [list(map(self.uf.find, nodes)) for nodes in self.beside]:
            whole.update(n for n in roots if roots.count(n) > 1)
        whole.update(n for _, own, reduced in sums for n in reduced if n in own)
        number: dict[Hashable, int] = {}

        def labelled(name: tuple[str, int], shape: tuple[int, ...]) -> tuple[int, ...]:
            roots = [self.uf.find((name, d)) for d in range(len(shape))]
            return tuple(BLOCKED if root in whole else number.setdefault(root, len(number)) for root in roots)

        inputs = tuple(labelled(("in", k), shape) for k, shape in enumerate(ins))
        outputs = tuple(labelled(("out", r), shape) for r, shape in enumerate(outs))

        def known(roots: list[Hashable]) -> tuple[int, ...]:
            return tuple(number[n] for n in roots if n in number)

        inside = (SumInside(size, known(own), known(reduced)) for size, own, reduced in sums)
        return Labels(inputs, outputs, sums=tuple(s for s in inside if s.reduced))

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
        if self.names_sums and eqn.name in _SUMS and "." not in eqn.key:
            is_summed = True
            self._sum(eqn, program, values, kept, found)
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

    def _sum(self, eqn: FlatEqn, program: Program, values: Values, kept: Collection[int], found: Labels) -> None:
        def nodes(atom: Atom, labs: Sequence[int], of: Callable[[int], bool]) -> list[Hashable]:
            dims = [d for d, lab in enumerate(labs) if lab != BLOCKED and of(lab)]
            return [self._node(values, atom, d) for d in dims] if isinstance(atom, int) else []

        made = program.aval(eqn.outputs[0])
        own = nodes(eqn.outputs[0], found.outputs[0], lambda lab: True)
        operands = list(zip(eqn.inputs, found.inputs, strict=True))
        reduced = [n for a, labs in operands for n in nodes(a, labs, lambda lab: lab not in kept)]
        self.beside += [own, *(nodes(a, labs, lambda lab: True) for a, labs in operands)]
        self.sums.append((float(math.prod(made.shape) * made.dtype.itemsize), own, reduced))
