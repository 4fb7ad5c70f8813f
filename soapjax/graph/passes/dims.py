"""The iteration dims of an operator: classes of tensor dims that its equations tie together.

Union-find over (tensor, dim) nodes; every equation's labels (rule_table.py) unite
nodes, a forward unit is tied to its backward units by the values that they share and
by "the cotangent of x has the dims of x".
"""

from __future__ import annotations

import collections
import math
from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

from soapjax.graph.operators import NOT_SPLIT, Dim
from soapjax.graph.passes.phases import FORWARD, UPDATE, Phases, is_recompute
from soapjax.graph.passes.recomputed import repeated, twins_of
from soapjax.graph.passes.relayouts import LAYOUT_ONLY
from soapjax.graph.passes.units import Unit
from soapjax.graph.rules import control_rules
from soapjax.graph.rules.light_rules import BLOCKED, Labels, labels_of
from soapjax.graph.trace.program import Atom, FlatEqn, Program
from soapjax.graph.trace.union_find import UnionFind
from soapjax.graph.trace.values import Values


class LabelCache:
    """Each equation's labels, computed once."""

    def __init__(self, program: Program):
        self.program = program
        self._found: dict[str, Labels] = {}
        self._alike: dict[tuple, Labels] = {}  # of equations that differ in nothing that their rule looks at

    def __getitem__(self, eqn: FlatEqn) -> Labels:
        found = self._found.get(eqn.key)
        if found is None:
            found = labels_of(eqn, self.program, self._alike)
            if eqn.name in control_rules.NAMES:
                made = {lab for labs in found.outputs for lab in labs}
                read = tuple(tuple(lab if lab in made else BLOCKED for lab in labs) for labs in found.inputs)
                found = found._replace(inputs=read)
            self._found[eqn.key] = found
        return found

    def free(self, eqn: FlatEqn, result: int, dim: int) -> None:
        """Gives a dim of a result a label of its own: it may be split although no operand's dim is split with it."""
        found = self[eqn]
        label = 1 + max(lab for labs in (*found.inputs, *found.outputs, (BLOCKED,)) for lab in labs)
        outputs = [list(labs) for labs in found.outputs]
        outputs[result][dim] = label
        self._found[eqn.key] = found._replace(outputs=tuple(map(tuple, outputs)))


class DimClasses:
    """The classes of one operator; `of(node)` is the class of a (root, dim), None where it cannot be split.

    Args:
      twins: of what is computed again anywhere, by root, what it repeats (pairing.py).
    """

    def __init__(
        self, units: list[Unit], program: Program, values: Values, phases: Phases, labels: LabelCache, generated: set[int],
        *, twins: dict[int, int],
    ):  # fmt: skip
        self.twins = twins
        self.program, self.values, self.labels, self.generated = program, values, labels, generated
        self.uf = UnionFind()
        self.poisoned: set[Hashable] = set()
        self.sizes: dict[tuple[int, int], int] = {}
        self.spatial_nodes: dict[tuple[int, int], int] = {}  # -> the largest degree
        self.labelled: set[tuple[int, int]] = set()
        self.labels_of: dict[str, dict[int, tuple[int, int]]] = {}  # equation key -> label -> a node that has it
        for unit in units:
            apart = self._second_reading(unit)
            for eqn in unit.eqns:
                if eqn.key not in apart:
                    self._equation(eqn, is_heavy=eqn is unit.heavy)
        self._tie_backward(units, phases)
        self._finish()

    def _second_reading(self, unit: Unit) -> set[str]:
        """Keys of the equations that lay out a value anew for a product with itself: of x xᵀ both dims are rows of x.

        The value is read twice then, split in two ways.
        """
        if unit.kind != "dot":
            return set()
        makers = {e.outputs[0]: e for e in unit.eqns if e.name in LAYOUT_ONLY and isinstance(e.inputs[0], int)}
        roots, chains = [], []
        for a in unit.heavy.inputs:
            chain = set()
            while isinstance(a, int) and a in makers:  # a product may have a literal: the cotangent 1 of a number
                chain.add(makers[a].key)
                a = makers[a].inputs[0]
            roots.append(a)
            chains.append(chain)
        return (chains[1] or chains[0]) if roots[0] == roots[1] and chains[0] != chains[1] else set()

    def _equation(self, eqn: FlatEqn, *, is_heavy: bool) -> None:
        found = self.labels[eqn]
        avals, alias, sizes = self.program.avals, self.values.original, self.sizes
        read: set[int] = set()
        first: dict[int, tuple[int, int]] = {}  # label -> the first node that has it
        whole: set[int] = set()
        for atom, labs in zip((*eqn.inputs, *eqn.outputs), (*found.inputs, *found.outputs), strict=True):
            if not isinstance(atom, int):
                continue
            root, shift = alias[atom]
            if root in self.generated:
                continue
            if is_heavy:
                if atom in read:
                    continue  # of x xᵀ both results' dims are rows of x: x is read twice, split in two ways
                read.add(atom)
            shape = avals[atom].shape
            for d, lab in enumerate(labs):
                if d < shift:
                    if lab != BLOCKED and not is_heavy:
                        whole.add(lab)
                    continue
                node = (root, d - shift)
                sizes.setdefault(node, shape[d])
                if lab != BLOCKED:
                    if (twin := first.setdefault(lab, node)) is not node:
                        self.uf.union(twin, node)
                    self.labelled.add(node)
                    if lab in found.spatial:
                        self.spatial_nodes[node] = min(found.spatial[lab], self.spatial_nodes.get(node, found.spatial[lab]))
                elif shape[d] > 1 and not is_heavy:
                    self.poisoned.add(node)
        self.poisoned.update(first[lab] for lab in whole if lab in first)
        self.labels_of[eqn.key] = first

    def _unite(self, a: Atom, b: Atom) -> None:
        """Ties two values of equal trailing dims (a stacked value against one trip of it included)."""
        sa, sb = self._shape(a), self._shape(b)
        n = min(len(sa), len(sb))
        if sa[len(sa) - n :] != sb[len(sb) - n :]:
            return
        for k in range(1, n + 1):
            na, nb = self.values.node(a, len(sa) - k), self.values.node(b, len(sb) - k)
            if na in self.sizes and nb in self.sizes:
                self.uf.union(na, nb)

    def _shape(self, atom: Atom) -> tuple[int, ...]:
        return self.program.aval(atom).shape

    def _tie_backward(self, units: list[Unit], phases: Phases) -> None:
        roots = {root for root, _ in self.sizes}
        for root in roots:
            for parameter in phases.by_gradient.get(root, ()):
                if (root, 0) in self.sizes and parameter.value in roots:
                    self._unite(parameter.value, root)
        first, operands = units[0], self._operands(units)
        for unit in units[1:]:
            if unit.eqns[0].outputs and unit.eqns[0].outputs[0] in self.program.repeats:
                continue  # its dims are those of what it repeats
            if unit.phase == UPDATE:
                continue  # no cotangents: a loss that is evaluated with the new parameters, say
            if is_recompute(unit.heavy or unit.eqns[0]) and first.phase == FORWARD:
                self._tie_recomputed(first, unit)
            elif unit.heavy is not None and first.heavy is not None and len(first.heavy.inputs) >= 2:
                self._tie_cotangents(first, unit, phases.trained, operands)
            elif unit.heavy is not None and first.heavy is not None and len(unit.heavy.inputs) == len(first.heavy.inputs) == 1:
                # A mean over windows: nothing is shared with its transpose, whose result is the cotangent of its operand.
                self._unite(first.heavy.inputs[0], unit.heavy.outputs[0])

    def _tie_recomputed(self, first: Unit, unit: Unit) -> None:
        for e, twin in twins_of(first.eqns, unit.eqns, self.program, self.values, self.twins):
            for a, b in zip((*e.inputs, *e.outputs), (*twin.inputs, *twin.outputs), strict=False):
                if isinstance(a, int) and isinstance(b, int) and self._shape(a) == self._shape(b):
                    self._unite(a, b)

    def _operands(self, units: list[Unit]) -> set[int]:
        """What the forward equation reads, and its recomputation."""
        computing = [u.heavy for u in units if u.heavy is not None and (u is units[0] or is_recompute(u.heavy))]
        return {repeated(a, self.values, self.twins) for e in computing for a in e.read}

    def _tie_cotangents(self, first: Unit, unit: Unit, trained: frozenset[int], operands: set[int]) -> None:
        """A backward unit that reads one operand of the forward equation makes the cotangent of the other.

        A parameter is tied to its gradient already; here a square one may not be transposed yet. Nor may another square
        value, which for a product needs no tie: its operands' labels and the result's cotangent have all of its dims.
        Of gathers and scatters one is the transpose of the other: a scatter's result is the cotangent of the table, a gather's that
        of the updates, which may be as many as the rows that they go to.
        """
        is_scatter, is_gathered = first.heavy.name.startswith("scatter"), first.heavy.name == "gather"
        a, b = first.heavy.inputs[1:3] if is_scatter else first.heavy.inputs[:2]
        cotangents = unit.heavy.inputs
        if is_scatter or is_gathered:
            if (unit.heavy.name == "gather") != is_scatter:
                return  # another reader of the same indices
            cotangents = cotangents[:1] if is_scatter else cotangents[2:]
        original = self.values.original
        read = {original[x].root for e in unit.eqns for x in e.read}
        result = unit.eqns[-1].outputs[0]
        is_square = first.heavy.name == "dot_general" and len(set(self._shape(result))) < len(self._shape(result))
        for mine, other in () if is_square else ((a, b), (b, a)):
            if isinstance(mine, int) and isinstance(other, int) and original[mine].root in read:
                if self._shape(other) == self._shape(result) and original[other].root not in trained:
                    self._unite(other, result)
        # The cotangent of the result has the result's dims.
        # An operand may have its shape too: an input as wide as the result, or a weight with as many rows as the batch.
        out = first.heavy.outputs[0]
        for x in cotangents:
            if isinstance(x, int) and self._shape(x) == self._shape(out) and repeated(x, self.values, self.twins) not in operands:
                self._unite(out, x)

    def _finish(self) -> None:
        bad = {self.uf.find(n) for n in self.poisoned}
        members: dict[Hashable, list[tuple[int, int]]] = collections.defaultdict(list)
        for node in self.sizes:
            members[self.uf.find(node)].append(node)
        self.classes: dict[Hashable, list[tuple[int, int]]] = {}
        for root, nodes in members.items():
            tensors = [t for t, _ in nodes]
            if (
                root not in bad
                and self.labelled.intersection(nodes)
                and len(set(tensors)) == len(tensors)
                and self.divisor(nodes) > 1
            ):
                self.classes[root] = nodes
        self._class_of = {node: root for root, nodes in self.classes.items() for node in nodes}
        # Equation key -> label -> class, of the labels that have one.
        self._of_labels = {
            key: {lab: self._class_of[node] for lab, node in first.items() if node in self._class_of}
            for key, first in self.labels_of.items()
        }

    def divisor(self, nodes: list[tuple[int, int]]) -> int:
        """What a degree must divide: every dim of the class; for windows also so little that a shard holds one."""
        divisor = math.gcd(*(self.sizes[n] for n in nodes))
        limit = min((self.spatial_nodes[n] for n in nodes if n in self.spatial_nodes), default=divisor)
        return next(d for d in range(min(limit, divisor), 0, -1) if divisor % d == 0)

    def of(self, node: tuple[int, int] | None) -> Hashable | None:
        return self._class_of.get(node)

    def of_labels(self, eqn: FlatEqn) -> dict[int, Hashable]:
        """Label -> class, of the equation's labels that have one."""
        return self._of_labels.get(eqn.key, {})

    def in_order(self, units: Iterable[Unit]) -> Iterator[Hashable]:
        """Classes of the values that units read or make, each where it is first met."""
        met: set[Hashable] = set()
        seen: set[int] = set()
        for unit in units:
            for e in unit.eqns:
                for a in (*e.read, *e.outputs):
                    if a not in seen:
                        seen.add(a)
                        root, shift = self.values.original[a]
                        for d in range(max(0, shift), len(self._shape(a))):
                            found = self._class_of.get((root, d - shift))
                            if found is not None and found not in met:
                                met.add(found)
                                yield found
                if len(met) == len(self.classes):
                    return

    def touched(self, unit: Unit) -> set[Hashable]:
        """Classes of the values that a unit reads or makes."""
        return set(self.in_order([unit]))


class OperatorDims(NamedTuple):
    """The dims of an operator, and the classes that they are."""

    dims: tuple[Dim, ...]
    classes: DimClasses
    number: dict[Hashable, int]  # class -> its dim

    def of(self, node: tuple[int, int] | None) -> int:
        """The dim that splits a (root, dim), or NOT_SPLIT."""
        return self.number.get(self.classes.of(node), NOT_SPLIT)

    def of_labels(self, eqn: FlatEqn) -> dict[int, int]:
        """Label -> dim, of the equation's labels that have one."""
        return {lab: self.number[c] for lab, c in self.classes.of_labels(eqn).items()}
