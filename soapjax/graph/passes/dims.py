"""The iteration dims of an operator: classes of tensor dims that its equations tie together.

Union-find over (tensor, dim) nodes; every equation's labels (rule_table.py) unite
nodes, a forward unit is tied to its backward units by the values that they share and
by "the cotangent of x has the dims of x".
"""

from __future__ import annotations

import collections
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence

from soapjax.graph.passes.phases import FORWARD, Phases, is_recompute, module_path
from soapjax.graph.passes.units import LAYOUT_ONLY, Unit
from soapjax.graph.rules import control_rules
from soapjax.graph.rules.light_rules import BLOCKED, Labels, MadeOf, labels_of
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


def sample_nodes(
    program: Program, values: Values, labels: LabelCache, *, data: set[int], walkers: set[int], trained: set[int]
) -> set[tuple[int, int]]:
    """All (root, dim) nodes that descend from the leading dim of the step's data, or the second of what a loop runs over.

    What is made anew of a whole batch (two batches joined, one shuffled, cut or regrouped) is a batch too: `labels` then lets
    it be split, every device takes its block of what the equation makes of whole operands. So is what the step draws as many
    times as the data have examples (a generator's noise), or at all where it has no data (rows to pick, a population).

    Args:
      data: inputs that hold data. `walkers`: state that is handled as data. `trained`: parameters and their optimizer's state.
    """
    leaves = program.leaves
    uf, nodes = _tied_nodes(leaves, program, values, labels)
    over = _dims_of_loops(program, values, uf)
    seeds = {(v, _batch_dim(v, program, uf, over)) for v in data if program.avals[v].shape}
    seeds |= _drawn(leaves, program, values, uf, {program.avals[v].shape[d] for v, d in seeds}, trained, over)
    seeds |= {(v, 0) for v in walkers}
    sizes = {program.avals[v].shape[d] for v, d in seeds}
    making = [eqn for eqn in leaves if labels[eqn].made_of]
    for _ in range(8):  # a batch is cut and joined a few times at most
        samples = {uf.find(n) for n in seeds}
        found: set[tuple[int, int]] = set()
        for eqn in making:
            for made in labels[eqn].made_of:
                target = _new_sample(eqn, made, program, values, uf, samples, sizes)
                if target is not None and target not in seeds | found:
                    found.add(target)
                    if labels[eqn].outputs[made.result][made.result_dim] == BLOCKED or eqn.name == "reshape":
                        labels.free(eqn, made.result, made.result_dim)
        seeds |= found
        nodes |= found
        if not found:
            break
    samples = {uf.find(n) for n in seeds}
    return {n for n in nodes if uf.find(n) in samples}


def _drawn(
    leaves: Sequence[FlatEqn], program: Program, values: Values, uf: UnionFind, sizes: set[int], trained: set[int],
    over: set[tuple[Hashable, int]],
) -> set[tuple[int, int]]:  # fmt: skip
    """The leading dim of what is drawn with one key: as long as the data's batches, of any length where `sizes` is empty.

    Not what is drawn for a parameter, nor what a loop runs `over` (a key for every move of a game); nor, where neither data nor
    parameters are given, what loops carry on: a whole training begins with the weights.
    """
    kept = {(v, d) for v in trained for d in range(len(program.avals[v].shape))}
    if not sizes and not trained:
        kept |= {(c.argument, d) for c in values.carries.values() for d in range(len(program.avals[c.argument].shape))}
    tied = {uf.find(values.node(v, d)) for v, d in kept if values.node(v, d) is not None}
    found = set()
    for eqn in leaves:
        if eqn.name in ("random_bits", "random_split"):
            shape, first = program.avals[eqn.outputs[0]].shape, len(program.aval(eqn.inputs[0]).shape)
            node = values.node(eqn.outputs[0], first) if len(shape) > first else None
            if node is None or shape[first] == 1 or (sizes and shape[first] not in sizes):
                continue
            if uf.find(node) not in tied and (uf.find(node), shape[first]) not in over:
                found.add(node)
    return found


def _tied_nodes(
    leaves: Sequence[FlatEqn], program: Program, values: Values, labels: LabelCache
) -> tuple[UnionFind, set[tuple[int, int]]]:
    """All nodes that some equation labels, and which of them labels and loops make one."""
    uf, nodes = UnionFind(), set()
    for eqn in leaves:
        found = labels[eqn]
        first: dict[int, tuple[int, int]] = {}  # label -> the first node that has it
        for atom, labs in zip((*eqn.inputs, *eqn.outputs), (*found.inputs, *found.outputs), strict=True):
            if not isinstance(atom, int):
                continue
            root, shift = values.original[atom]
            for d, lab in enumerate(labs):
                if lab != BLOCKED and d >= shift:
                    node = (root, d - shift)
                    nodes.add(node)
                    if (twin := first.setdefault(lab, node)) is not node:
                        uf.union(twin, node)
    for carry in values.carries.values():
        for d in range(len(program.avals[carry.argument].shape)):
            ends = [values.node(a, d) for a in (carry.argument, carry.init, carry.result) if isinstance(a, int)]
            for end in ends[1:]:
                if None not in (ends[0], end):
                    uf.union(ends[0], end)
    return uf, nodes


def _new_sample(
    eqn: FlatEqn, made: MadeOf, program: Program, values: Values, uf: UnionFind, samples: set[Hashable], sizes: set[int]
) -> tuple[int, int] | None:
    """The node of a result that is made anew of a batch and is not known as one; None where it is neither."""
    a, out = eqn.inputs[made.operand], eqn.outputs[made.result]
    source = values.node(a, made.dim) if isinstance(a, int) else None
    target = values.node(out, made.result_dim)
    if source is None or target is None or uf.find(source) not in samples or uf.find(target) in samples:
        return None
    before, after = program.aval(a).shape, program.avals[out].shape
    if eqn.name == "reshape" and len(after) > len(before) and before[made.dim] not in sizes:
        return None  # positions within an example, merged with the examples before
    return target if after[made.result_dim] > 1 else None


def _dims_of_loops(program: Program, values: Values, uf: UnionFind) -> set[tuple[Hashable, int]]:
    """What loops run over: the class of a dim, and its size."""
    loops = {(alias.root, d) for alias in values.alias.values() for d in range(-alias.shift)}
    return {(uf.find(n), program.avals[n[0]].shape[n[1]]) for n in loops}


def _batch_dim(v: int, program: Program, uf: UnionFind, over: set[tuple[Hashable, int]]) -> int:
    """The first dim of a step's data that no loop runs over: of [time, batch, ...] the second."""
    shape = program.avals[v].shape
    return next((d for d in range(len(shape)) if (uf.find((v, d)), shape[d]) not in over), 0)


class DimClasses:
    """The classes of one operator; `of(node)` is the class of a (root, dim), None where it cannot be split."""

    def __init__(
        self, units: list[Unit], program: Program, values: Values, phases: Phases, labels: LabelCache, generated: set[int]
    ):
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
        first = units[0]
        for unit in units[1:]:
            if unit.eqns[0].outputs and unit.eqns[0].outputs[0] in self.program.repeats:
                continue  # its dims are those of what it repeats
            if is_recompute(unit.heavy or unit.eqns[0]) and first.phase == FORWARD:
                self._tie_recomputed(first, unit)
            elif unit.heavy is not None and first.heavy is not None and len(first.heavy.inputs) >= 2:
                self._tie_cotangents(first, unit, phases.trained)
            elif unit.heavy is not None and first.heavy is not None and len(unit.heavy.inputs) == len(first.heavy.inputs) == 1:
                # A mean over windows: nothing is shared with its transpose, whose result is the cotangent of its operand.
                self._unite(first.heavy.inputs[0], unit.heavy.outputs[0])

    def _tie_recomputed(self, first: Unit, unit: Unit) -> None:
        def signature(e: FlatEqn) -> tuple:
            return module_path(e.stack), e.name, self._shape(e.outputs[0])

        waiting: dict[tuple, collections.deque[FlatEqn]] = collections.defaultdict(collections.deque)
        for e in first.eqns:
            waiting[signature(e)].append(e)
        for e in unit.eqns:
            queue = waiting[signature(e)]
            if queue:
                twin = queue.popleft()
                for a, b in zip((*e.inputs, *e.outputs), (*twin.inputs, *twin.outputs), strict=False):
                    if isinstance(a, int) and isinstance(b, int) and self._shape(a) == self._shape(b):
                        self._unite(a, b)

    def _tie_cotangents(self, first: Unit, unit: Unit, trained: frozenset[int]) -> None:
        """A backward unit that reads one operand of the forward equation makes the cotangent of the other.

        A parameter is tied to its gradient already; here a square one may not be transposed yet. Nor may another square
        value, which for a product needs no tie: its operands' labels and the result's cotangent have all of its dims.
        What reads the indices of a scatter makes the cotangent of its updates, which may be as many as the rows that they go to.
        """
        a, b = first.heavy.inputs[1:3] if first.heavy.name.startswith("scatter") else first.heavy.inputs[:2]
        original = self.values.original
        read = {original[x].root for e in unit.eqns for x in e.inputs if isinstance(x, int)}
        result = unit.eqns[-1].outputs[0]
        is_square = first.heavy.name == "dot_general" and len(set(self._shape(result))) < len(self._shape(result))
        for mine, other in () if is_square else ((a, b), (b, a)):
            if isinstance(mine, int) and isinstance(other, int) and original[mine].root in read:
                if self._shape(other) == self._shape(result) and original[other].root not in trained:
                    self._unite(other, result)
        # The cotangent of the result has the result's dims.
        out, operands = first.heavy.outputs[0], [original[x] for x in (a, b) if isinstance(x, int)]
        for x in unit.heavy.inputs:
            if isinstance(x, int) and self._shape(x) == self._shape(out) and original[x] not in operands:
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

    def of_label(self, eqn: FlatEqn, label: int) -> Hashable | None:
        return self.of_labels(eqn).get(label)

    def of_labels(self, eqn: FlatEqn) -> dict[int, Hashable]:
        """Label -> class, of the equation's labels that have one."""
        return self._of_labels.get(eqn.key, {})

    def in_order(self, units: Iterable[Unit]) -> Iterator[Hashable]:
        """Classes of the values that units read or make, each where it is first met."""
        met: set[Hashable] = set()
        seen: set[int] = set()
        for unit in units:
            for e in unit.eqns:
                for a in (*e.inputs, *e.outputs):
                    if isinstance(a, int) and a not in seen:
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
