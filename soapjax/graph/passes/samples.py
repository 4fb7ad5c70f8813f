"""Which dims of a step's values are of samples, and which of its inputs hold samples at all.

The batch is the leading dim of the data, or the second of what begins with time, and what the equations' labels tie to that.
Time is what a loop runs over, or along which neighbours meet (`v[1:] - v[:-1]`); gradients are then sums over the second dim, too.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable

from soapjax.graph.batch.sample_order import BY_NUMBER
from soapjax.graph.passes.dims import LabelCache
from soapjax.graph.rules.light_rules import BLOCKED, CUMULATIVE, MadeOf
from soapjax.graph.trace.dataflow import follow
from soapjax.graph.trace.program import Atom, FlatEqn, Program
from soapjax.graph.trace.union_find import UnionFind
from soapjax.graph.trace.values import Values

_OFTEN = 0.25  # of the gradients that sum a dim away, for it to be one of samples


class SampleDims:
    """All (root, dim) nodes that some equation labels, and which of them labels and loops make one."""

    def __init__(self, program: Program, values: Values, labels: LabelCache):
        self.program, self.values, self.labels = program, values, labels
        self.uf, self.nodes = UnionFind(), set[tuple[int, int]]()
        for eqn in program.leaves:
            self._tie_labels(eqn)
        for carry in values.carries.values():
            for d in range(len(program.avals[carry.argument].shape)):
                ends = [values.node(a, d) for a in (carry.argument, carry.init, carry.result) if isinstance(a, int)]
                for end in ends[1:]:
                    if None not in (ends[0], end):
                        self.uf.union(ends[0], end)
        # What loops run over: the class of a dim, and its size.
        loops = {(alias.root, d) for alias in values.alias.values() for d in range(-alias.shift)}
        self.over_loops = {(self.uf.find(n), program.avals[n[0]].shape[n[1]]) for n in loops}

    def _tie_labels(self, eqn: FlatEqn) -> None:
        found = self.labels[eqn]
        first: dict[int, tuple[int, int]] = {}  # label -> the first node that has it
        for atom, labs in zip((*eqn.inputs, *eqn.outputs), (*found.inputs, *found.outputs), strict=True):
            if not isinstance(atom, int):
                continue
            root, shift = self.values.original[atom]
            for d, lab in enumerate(labs):
                if lab != BLOCKED and d >= shift:
                    node = (root, d - shift)
                    self.nodes.add(node)
                    if (twin := first.setdefault(lab, node)) is not node:
                        self.uf.union(twin, node)

    def nodes_of(
        self, *, data: set[int], walkers: set[int], trained: set[int], gradients: Iterable[int]
    ) -> set[tuple[int, int]]:  # fmt: skip
        """All (root, dim) nodes that descend from the leading dim of the step's data, or the second of what begins with time.

        What is made anew of a whole batch (two batches joined, one shuffled, cut or regrouped) is a batch too: `labels` then lets
        it be split, every device takes its block of what the equation makes of whole operands. So is what the step draws as many
        times as the data have examples (a generator's noise), or at all where it has no data (rows to pick, a population).

        Args:
          data: inputs that hold data. `walkers`: state that is handled as data. `trained`: parameters and their optimizer's state.
          gradients: roots of the parameters' gradients.
        """
        avals, nodes = self.program.avals, set(self.nodes)
        behind = self._behind_time(data, gradients)
        seeds = {(v, self._batch_dim(v, behind)) for v in data if avals[v].shape}
        seeds |= self._drawn({avals[v].shape[d] for v, d in seeds}, trained)
        seeds |= {(v, 0) for v in walkers}
        sizes = {avals[v].shape[d] for v, d in seeds}
        making = [eqn for eqn in self.program.leaves if self.labels[eqn].made_of]
        for _ in range(8):  # a batch is cut and joined a few times at most
            samples = {self.uf.find(n) for n in seeds}
            found: set[tuple[int, int]] = set()
            for eqn in making:
                for made in self.labels[eqn].made_of:
                    target = self._new_sample(eqn, made, samples, sizes)
                    if target is not None and target not in seeds | found:
                        found.add(target)
                        if self.labels[eqn].outputs[made.result][made.result_dim] == BLOCKED or eqn.name == "reshape":
                            self.labels.free(eqn, made.result, made.result_dim)
            seeds |= found
            nodes |= found
            if not found:
                break
        samples = {self.uf.find(n) for n in seeds}
        return {n for n in nodes if self.uf.find(n) in samples}

    def given_weights(self, candidates: Iterable[int], gradients: Iterable[int]) -> set[int]:
        """Inputs that are no data, although no state either: frozen weights, a teacher, a codebook, the mean of a data set.

        Gradients are summed over the samples. An input that has no such dim, and meets what has one, is the same for all samples.

        Args:
          candidates: inputs that are no state. `gradients`: roots of the parameters' gradients.
        """
        program, original = self.program, self.values.original
        candidates = list(candidates)
        summed = self._sums_of(gradients, candidates)

        def has_samples(atom: Atom) -> bool:
            nodes = (self.values.node(atom, d) for d in range(len(program.aval(atom).shape))) if isinstance(atom, int) else ()
            return any(n is not None and self.uf.find(n) in summed for n in nodes)

        shaped = {v for v in candidates if program.avals[v].shape}
        # What is computed of such inputs alone -> which, and whether of their elements, or of one number of all of them.
        own = {v: frozenset({(v, True)}) for v in shaped if not has_samples(v)}
        if len(own) == len(shaped):
            return set()
        found: set[tuple[int, bool]] = set()
        of_something = set(program.inputs)
        follow(program, of_something)
        for eqn in program.leaves:
            # Numbers by which rows are picked, or added to, are no weights, whatever is made of them. Nor is what a scatter adds:
            # that goes with its numbers, as the weights of samples do in the derivative of logits that were picked.
            read = eqn.inputs[:1] if eqn.name in BY_NUMBER else eqn.inputs
            of = [own.get(original[a].root) for a in read if isinstance(a, int) and a in of_something]
            inputs = frozenset[tuple[int, bool]]().union(*(x for x in of if x is not None))
            if eqn.name == "reshape" and any(map(has_samples, eqn.outputs)):
                continue  # the samples of a chunk, side by side: what they were made of has samples, too
            if of and None not in of:
                number = frozenset((v, False) for v, _ in inputs)
                own.update({o: inputs if program.avals[o].shape else number for o in eqn.outputs})
            elif any(map(has_samples, (*eqn.inputs, *eqn.outputs))):
                found |= inputs
        # Weights of samples are counted, too, and every sample meets the count: what is as long as what has samples may be such.
        lengths = {program.avals[v].shape[0] for v in shaped - own.keys()}
        return {v for v, is_met in found if is_met or program.avals[v].shape[0] not in lengths}

    def _sums_of(self, gradients: Iterable[int], given: Iterable[int]) -> set[Hashable]:
        """Classes of the dims of samples by what gradients are sums over; `given`: inputs that are no state."""
        of_inputs = set(given)
        follow(self.program, of_inputs)
        return self._summed_in_gradients(set(gradients), of_inputs)

    def _summed_in_gradients(self, gradients: set[int], of_inputs: set[int]) -> set[Hashable]:
        """Classes of the dims over which many gradients are sums, and of those that these are made of: joined, cut, put in order.

        Args:
          of_inputs: values that depend on inputs that are no state.
        """
        program, values, uf = self.program, self.values, self.uf
        producer = {values.original[o].root: eqn for eqn in program.leaves for o in eqn.outputs}
        counts = collections.Counter(c for g in gradients for c in self._summed_away(g, producer, of_inputs))
        found = {c for c, n in counts.items() if n >= _OFTEN * len(gradients)}
        for eqn in reversed(program.leaves):
            for made in self.labels[eqn].made_of:
                a, out = eqn.inputs[made.operand], eqn.outputs[made.result]
                before = values.node(a, made.dim) if isinstance(a, int) else None
                after = values.node(out, made.result_dim)
                is_table = eqn.name == "gather" and program.aval(a).shape[made.dim] != program.avals[out].shape[made.result_dim]
                if None not in (before, after) and uf.find(after) in found and not is_table:
                    found.add(uf.find(before))
        return found

    def _summed_away(self, gradient: int, producer: dict[int, FlatEqn], of_inputs: set[int]) -> set[Hashable]:
        """Classes of the dims that are summed over where a gradient is made: of its last product or sum, and of all its summands.

        Of a product with state alone the other operand counts: the gradient of a merged weight, where factors of it are trained.
        """
        avals, values = self.program.avals, self.values
        found, seen, queue = set[Hashable](), set[int](), [gradient]
        while queue:
            root = queue.pop()
            eqn = producer.get(root)
            if root in seen or eqn is None:
                continue
            seen.add(root)
            labels = self.labels[eqn]
            made = {lab for labs in labels.outputs for lab in labs}
            atoms = zip(eqn.inputs, labels.inputs, strict=True)
            gone = [(a, d) for a, labs in atoms if isinstance(a, int) for d, lab in enumerate(labs) if lab not in (*made, BLOCKED)]
            data = [a for a in eqn.read if a in of_inputs]
            if gone and eqn.name == "dot_general" and len(data) == 1:
                queue.append(values.original[data[0]].root)
            elif gone:
                found |= {self.uf.find(node) for a, d in gone if (node := values.node(a, d)) is not None}
            else:
                size = avals[eqn.outputs[0]].size
                queue += [values.original[a].root for a in eqn.read if avals[a].size == size]
        return found

    def _drawn(self, sizes: set[int], trained: set[int]) -> set[tuple[int, int]]:
        """The leading dim of what is drawn with one key: as long as the data's batches, of any length where `sizes` is empty.

        Not what is drawn for a parameter, nor what a loop runs over (a key for every move of a game); nor, where neither data nor
        parameters are given, what loops carry on: a whole training begins with the weights.
        """
        program, values, uf = self.program, self.values, self.uf
        kept = {(v, d) for v in trained for d in range(len(program.avals[v].shape))}
        if not sizes and not trained:
            kept |= {(c.argument, d) for c in values.carries.values() for d in range(len(program.avals[c.argument].shape))}
        tied = {uf.find(values.node(v, d)) for v, d in kept if values.node(v, d) is not None}
        found = set()
        for eqn in program.leaves:
            if eqn.name in ("random_bits", "random_split"):
                shape, first = program.avals[eqn.outputs[0]].shape, len(program.aval(eqn.inputs[0]).shape)
                node = values.node(eqn.outputs[0], first) if len(shape) > first else None
                if node is None or shape[first] == 1 or (sizes and shape[first] not in sizes):
                    continue
                if uf.find(node) not in tied and (uf.find(node), shape[first]) not in self.over_loops:
                    found.add(node)
        return found

    def _new_sample(self, eqn: FlatEqn, made: MadeOf, samples: set[Hashable], sizes: set[int]) -> tuple[int, int] | None:
        """The node of a result that is made anew of a batch and is not known as one; None where it is neither."""
        a, out = eqn.inputs[made.operand], eqn.outputs[made.result]
        source = self.values.node(a, made.dim) if isinstance(a, int) else None
        target = self.values.node(out, made.result_dim)
        if source is None or target is None or self.uf.find(source) not in samples or self.uf.find(target) in samples:
            return None
        before, after = self.program.aval(a).shape, self.program.avals[out].shape
        if eqn.name == "reshape" and len(after) > len(before) and before[made.dim] not in sizes:
            return None  # positions within an example, merged with the examples before
        return target if after[made.result_dim] > 1 else None

    def _batch_dim(self, v: int, behind: set[Hashable]) -> int:
        """The first dim of a step's data that is no time: of [time, batch, ...] the second; `behind`: as of `_behind_time`."""
        shape, of = self.program.avals[v].shape, self.uf.find
        first = next((d for d in range(len(shape)) if (of((v, d)), shape[d]) not in self.over_loops), 0)
        return next((d for d in range(len(shape)) if of((v, d)) in behind), first)

    def _behind_time(self, data: set[int], gradients: Iterable[int]) -> set[Hashable]:
        """Classes of the batch behind a first dim along which neighbours meet: gradients are sums over it too."""
        meeting, of = self._where_neighbours_meet(), self.uf.find
        shapes = {v: self.program.avals[v].shape for v in data}
        second = {of((v, 1)) for v, s in shapes.items() if len(s) > 1 and s[1] > 1 and (of((v, 0)), s[0]) in meeting}
        return second & self._sums_of(gradients, data) - {where for where, _ in meeting} if second else set()

    def _where_neighbours_meet(self) -> set[tuple[Hashable, int]]:
        """Classes of dims, and sizes, that are summed up one after the other, or of which two slices overlap, as all but the first
        do and all but the last. (Tokens of all examples in one dim, which places in experts are counted along, are more.)"""
        found, avals = set[tuple[Hashable, int]](), self.program.avals
        slices: dict[tuple[Hashable, int], set[tuple[int, int]]] = {}
        for eqn in self.program.leaves:
            if not eqn.inputs or not isinstance(a := eqn.inputs[0], int):
                continue
            if eqn.name in CUMULATIVE:
                node = self.values.node(a, axis := eqn.params[CUMULATIVE[eqn.name]])
                found |= set() if node is None else {(self.uf.find(node), avals[a].shape[axis])}
            elif eqn.name == "slice" and eqn.params["strides"] is None:
                bounds = zip(eqn.params["start_indices"], eqn.params["limit_indices"], avals[a].shape, strict=True)
                for d, (start, limit, size) in enumerate(bounds):
                    if limit - start < size and (node := self.values.node(a, d)) is not None:
                        slices.setdefault((self.uf.find(node), size), set()).add((start, limit))
        overlap = (any(a < b < end for a, end in of for b, _ in of) for of in slices.values())
        return found | {where for where, is_so in zip(slices, overlap, strict=True) if is_so}
