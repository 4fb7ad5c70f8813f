"""Which units form one operator: a forward unit, its recomputation, and the backward units that transpose it.

A heavy backward equation shares an operand with its forward one (the weights
for the input gradient, the input for the weight gradient) and usually the
module path; a backward region reads values that its forward region made, or
makes the gradient of a parameter that the operator owns. What has no partner
is an operator of its own.
"""

from __future__ import annotations

import collections

from soapjax.graph.passes.phases import BACKWARD, FORWARD, Phases, is_recompute, module_path
from soapjax.graph.passes.recomputed import repeated, twins_of
from soapjax.graph.passes.relayouts import LAYOUT_ONLY, behind_layouts
from soapjax.graph.passes.units import Unit
from soapjax.graph.trace.program import FlatEqn, Program
from soapjax.graph.trace.values import Values

_PARTNERS = {kind: {kind} for kind in ("dot", "ragged_dot", "conv", "pool", "sort", "fft")}
_PARTNERS |= dict.fromkeys(("gather", "scatter"), {"gather", "scatter"})


class Pairing:
    """`operators[i]` lists unit indices, forward first; `owner[p]` is the operator of parameter p."""

    def __init__(self, units: list[Unit], program: Program, values: Values, phases: Phases):
        self.units, self.program, self.values, self.phases = units, program, values, phases
        self.operators: list[list[int]] = []
        self.made_by: dict[int, int] = {}  # root -> operator that makes it
        self.reads: list[set[int]] = []  # peeled roots that each operator's heavy equations read
        self.readers: dict[int, set[int]] = {}  # such a root -> the operators that read it
        self.twins: dict[int, int] = {}  # root that is computed again -> what it repeats, behind layouts
        self.at_path: dict[str, set[int]] = {}  # module path -> the heavy operators there
        self.weights = {p.value for p in phases.parameters}
        self.owner: dict[int, int] = {}
        self._gradients: dict[int, list[int]] = {}  # root -> the parameters whose gradient it is
        for p, parameter in enumerate(phases.parameters):
            self._gradients.setdefault(parameter.gradient, []).append(p)
        self._bags: dict[int, collections.Counter] = {}
        self._behind: dict[int, set[int]] = {}
        self._holders: dict[tuple, list[int]] = {}  # what forward regions are made of (_most_alike) -> operators
        self._roots = [self._reads_of(u) for u in units]
        self._starts = [{values.first(root) for root in roots} for roots in self._roots]  # what loops carry: their first values
        for i, u in enumerate(units):
            if u.phase == FORWARD:
                self._new(i)
        rest = [i for i, u in enumerate(units) if u.phase != FORWARD]
        again = [i for i in rest if is_recompute(units[i].heavy or units[i].eqns[0])]
        self._pair_recomputed(again)
        self._own_parameters()
        is_again = set(again)
        for i in rest:
            if i not in is_again:
                self._pair_backward(i)
        self._own_parameters()

    def _new(self, i: int) -> int:
        self.operators.append([])
        self.reads.append(set())
        self._join(len(self.operators) - 1, i)
        return len(self.operators) - 1

    def _join(self, op: int, i: int) -> None:
        unit = self.units[i]
        self.operators[op].append(i)
        if unit.heavy is not None:
            read = self._read_by(unit.heavy)
            self.reads[op] |= read
            for root in read:
                self.readers.setdefault(root, set()).add(op)
            if len(self.operators[op]) == 1:
                self.at_path.setdefault(module_path(unit.heavy.stack), set()).add(op)
        for e in unit.eqns:
            self.made_by.update(dict.fromkeys(e.outputs, op))

    def _read_by(self, eqn: FlatEqn) -> set[int]:
        """Roots behind layouts and casts; of what is computed again, those that it repeats."""
        return {repeated(a, self.values, self.twins) for a in eqn.read}

    def _reads_of(self, unit: Unit) -> set[int]:
        inside = {o for e in unit.eqns for o in e.outputs}
        return {self.values.original[root].root for root in {r for e in unit.eqns for r in self.values.reads[e.key]} - inside}

    def _peeled(self, i: int) -> set[int]:
        """What a unit reads, behind layouts."""
        if i not in self._behind:
            self._behind[i] = {behind_layouts(root, self.values) for root in self._roots[i]}
        return self._behind[i]

    def _own_parameters(self) -> None:
        first: dict[int | None, int] = {}  # root -> the first operator that starts from it
        for op, members in enumerate(self.operators):
            for i in members:
                for root in self._starts[i]:
                    first.setdefault(root, op)
        for p, parameter in enumerate(self.phases.parameters):
            if p not in self.owner and parameter.value in first:
                self.owner[p] = first[parameter.value]

    def _pair_recomputed(self, again: list[int]) -> None:
        waiting: dict[tuple, dict[int, None]] = {}  # operators in order
        for op, members in enumerate(self.operators):
            waiting.setdefault(self._signature(members[0]), {})[op] = None
        for i in again:
            unit = self.units[i]
            original = [self.program.repeats.get(o) for e in unit.eqns for o in e.outputs]
            if original[0] is not None:
                op = self.made_by[original[0]]
            elif unit.heavy is not None:
                op = self._next_alike(unit.heavy, waiting.get(self._signature(i), {}))
            else:
                op = self._most_alike(i)
            if op is None:
                self._pair_backward(i)
                continue
            of_operator = self.units[self.operators[op][0]].eqns
            for e, twin in twins_of(of_operator, unit.eqns, self.program, self.values, self.twins):
                for a, b in zip(e.outputs, twin.outputs, strict=False):
                    self.twins[behind_layouts(a, self.values)] = behind_layouts(b, self.values)
            self._join(op, i)

    def _next_alike(self, eqn: FlatEqn, waiting: dict[int, None]) -> int | None:
        """Takes the operator that `eqn` repeats out of those waiting: which reads most of what it reads, else the first."""
        read = self._read_by(eqn)
        readers = [op for op in set().union(*(self.readers.get(root, ()) for root in read)) if op in waiting]
        op = min(readers, key=lambda op: (-len(read & self.reads[op]), op), default=next(iter(waiting), None))
        if op is not None:
            del waiting[op]
        return op

    def _signature(self, i: int) -> tuple:
        u = self.units[i]
        e = u.heavy or u.eqns[0]
        shapes = tuple(tuple(self.program.aval(a).shape) for a in (*e.inputs, *e.outputs))
        return (u.heavy is not None, module_path(e.stack), e.name, shapes)

    def _most_alike(self, i: int) -> int | None:
        """The forward region with most equations of this one (same module path, primitive, shape), which reads most of the same."""

        def bag(u: int) -> collections.Counter:
            if u not in self._bags:
                alike = ((module_path(e.stack), e.name, tuple(self.program.aval(e.outputs[0]).shape)) for e in self.units[u].eqns)
                self._bags[u] = collections.Counter(alike)
            return self._bags[u]

        if not self._holders:
            for op, members in enumerate(self.operators):
                first = self.units[members[0]]
                if first.heavy is None and first.phase == FORWARD:
                    for alike in bag(members[0]):
                        self._holders.setdefault(alike, []).append(op)
        mine, best, best_rank = bag(i), None, (0.5, 0)
        read = {self.twins.get(root, root) for root in self._peeled(i)}
        for op in sorted({op for alike in mine for op in self._holders.get(alike, ())}):
            theirs = bag(self.operators[op][0])
            share = (mine & theirs).total() / max(1, min(mine.total(), theirs.total()))
            rank = (share, len(read & self._peeled(self.operators[op][0])))  # of equal layers the one that reads the same
            if share > 0.5 and rank > best_rank:
                best, best_rank = op, rank
        return best

    def _pair_backward(self, i: int) -> None:
        unit = self.units[i]
        op = self._heavy_partner(unit) if unit.heavy is not None else self._region_partner(i)
        if op is None:
            self._new(i)
        else:
            self._join(op, i)

    def _heavy_partner(self, unit: Unit) -> int | None:
        partners = _PARTNERS.get(unit.kind, set())
        reads = self._read_by(unit.heavy)
        path = module_path(unit.heavy.stack)
        best, best_score = None, 2
        alike: list[int] = []  # same module: where it has one such product, the path alone tells (operands recomputed)
        # Only what shares an operand or the path; the last first.
        for op in sorted(self.at_path.get(path, set()).union(*(self.readers.get(root, ()) for root in reads)), reverse=True):
            first = self.units[self.operators[op][0]]
            if first.kind not in partners or first.phase != FORWARD:
                continue
            shared = reads & self.reads[op]
            same_path = path == module_path(first.heavy.stack)
            if same_path and path:
                alike.append(op)
            score = 2 * bool(shared) + 2 * same_path + 2 * bool(shared & self.weights) + 2 * (len(shared) > 1)
            # An input gradient and a weight gradient at most, unless the forward unit was recomputed.
            score -= sum(self.units[m].phase == BACKWARD and not is_recompute(self.units[m].heavy or self.units[m].eqns[0])
                         and self.units[m].heavy is not None for m in self.operators[op])  # fmt: skip
            if score > best_score:
                best, best_score = op, score
        return alike[0] if best is None and len(alike) == 1 else best

    def _region_partner(self, i: int) -> int | None:
        unit = self.units[i]
        made = {o for e in unit.eqns for o in e.outputs}
        score: dict[int, float] = collections.defaultdict(float)
        for root in self._roots[i]:
            op = self.made_by.get(root)
            if op is not None and self.units[self.operators[op][0]].phase == FORWARD and self._is_residual(root):
                score[op] += 1
        for root in made:
            for p in self._gradients.get(root, ()):
                if p in self.owner:
                    score[self.owner[p]] += 2
        # A gradient in a loop is stacked or summed: its owner is still the reader of the parameter.
        paths = [module_path(e.stack) for e in unit.eqns]
        for op in score:
            heads = {module_path(f.stack) for f in self.units[self.operators[op][0]].eqns[:4]}
            for path in paths:
                score[op] += 0.01 * (path in heads)
        if not score:
            return self._last_summand(unit, i)
        op, _ = max(score.items(), key=lambda kv: (kv[1], -kv[0]))
        return op

    def _last_summand(self, unit: Unit, i: int) -> int | None:
        """A running sum of gradients (a parameter used in every step): the operator of the product added last."""
        if not all(e.name in LAYOUT_ONLY or e.name == "add_any" for e in unit.eqns):
            return None
        made = [r for r in self._roots[i] if r in self.made_by and r in self.values.producer]
        last = max(made, key=lambda r: self.values.order[self.values.producer[r].key], default=None)
        return None if last is None else self.made_by[last]

    def _is_residual(self, root: int) -> bool:
        """Made in the forward pass or its recomputation: what a backward region keeps from its forward one."""
        producer: FlatEqn | None = self.values.producer.get(root)
        if producer is None:
            return False
        return self.phases.phase[producer.key] == FORWARD or is_recompute(producer)
