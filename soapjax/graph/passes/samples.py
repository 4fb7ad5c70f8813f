"""Which dims of a step's values are of samples, and which of its inputs hold samples at all.

The batch is the leading dim of the data, or the second of what a loop runs over, and what the equations' labels tie to that.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from soapjax.graph.batch.sample_mixing import BY_NUMBER
from soapjax.graph.passes.dims import LabelCache
from soapjax.graph.rules.light_rules import BLOCKED, MadeOf
from soapjax.graph.trace.dataflow import follow
from soapjax.graph.trace.program import Atom, FlatEqn, Program
from soapjax.graph.trace.union_find import UnionFind
from soapjax.graph.trace.values import Values

_OFTEN = 0.25  # of the gradients that sum a dim away, for it to be one of samples


class Ties(NamedTuple):
    """All (root, dim) nodes that some equation labels, and which of them labels and loops make one."""

    uf: UnionFind
    nodes: frozenset[tuple[int, int]]


def tied_nodes(program: Program, values: Values, labels: LabelCache) -> Ties:
    uf, nodes = UnionFind(), set()
    for eqn in program.leaves:
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
    return Ties(uf, frozenset(nodes))


def sample_nodes(
    program: Program, values: Values, labels: LabelCache, ties: Ties, *, data: set[int], walkers: set[int], trained: set[int]
) -> set[tuple[int, int]]:
    """All (root, dim) nodes that descend from the leading dim of the step's data, or the second of what a loop runs over.

    What is made anew of a whole batch (two batches joined, one shuffled, cut or regrouped) is a batch too: `labels` then lets
    it be split, every device takes its block of what the equation makes of whole operands. So is what the step draws as many
    times as the data have examples (a generator's noise), or at all where it has no data (rows to pick, a population).

    Args:
      data: inputs that hold data. `walkers`: state that is handled as data. `trained`: parameters and their optimizer's state.
    """
    leaves = program.leaves
    uf, nodes = ties.uf, set(ties.nodes)
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


def given_weights(
    program: Program, values: Values, labels: LabelCache, ties: Ties, *, candidates: Iterable[int], gradients: Iterable[int]
) -> set[int]:
    """Inputs that are no data, although no state either: frozen weights, a teacher, a codebook, the mean of a data set.

    Gradients are summed over the samples. An input that has no such dim, and meets what has one, is the same for all samples.

    Args:
      candidates: inputs that are no state. `gradients`: roots of the parameters' gradients.
    """
    candidates = list(candidates)
    of_inputs = set(candidates)
    follow(program, of_inputs)
    summed = _summed_in_gradients(program, values, labels, ties.uf, set(gradients), of_inputs)

    def has_samples(atom: Atom) -> bool:
        nodes = (values.node(atom, d) for d in range(len(program.aval(atom).shape))) if isinstance(atom, int) else ()
        return any(n is not None and ties.uf.find(n) in summed for n in nodes)

    shaped = {v for v in candidates if program.avals[v].shape}
    own = {v: v for v in shaped if not has_samples(v)}  # what is computed of one such input alone -> which
    if len(own) == len(shaped):
        return set()
    found: set[int] = set()
    of_something = set(program.inputs)
    follow(program, of_something)
    for eqn in program.leaves:
        of = {own.get(values.original[a].root) for a in eqn.inputs if isinstance(a, int) and a in of_something}
        if len(of) == 1 and None not in of:
            own.update(dict.fromkeys(eqn.outputs, of.pop()))
        elif any(map(has_samples, (*eqn.inputs, *eqn.outputs))):
            if eqn.name in BY_NUMBER:  # numbers by which rows are picked are no weights, whatever they meet
                of = {own.get(values.original[a].root) for a in eqn.inputs[:1] if isinstance(a, int)}
            found |= of - {None}
    return found


def _summed_in_gradients(
    program: Program, values: Values, labels: LabelCache, uf: UnionFind, gradients: set[int], of_inputs: set[int]
) -> set[Hashable]:  # fmt: skip
    """Classes of the dims over which many gradients are sums, and of those that these are made of: joined, cut, put in order.

    Args:
      of_inputs: values that depend on inputs that are no state.
    """
    producer = {values.original[o].root: eqn for eqn in program.leaves for o in eqn.outputs}
    away = (_summed_away(g, program, values, labels, uf, producer, of_inputs) for g in gradients)
    counts = collections.Counter(c for found in away for c in found)
    found = {c for c, n in counts.items() if n >= _OFTEN * len(gradients)}
    for eqn in reversed(program.leaves):
        for made in labels[eqn].made_of:
            a, out = eqn.inputs[made.operand], eqn.outputs[made.result]
            before = values.node(a, made.dim) if isinstance(a, int) else None
            after = values.node(out, made.result_dim)
            is_table = eqn.name == "gather" and program.aval(a).shape[made.dim] != program.avals[out].shape[made.result_dim]
            if None not in (before, after) and uf.find(after) in found and not is_table:
                found.add(uf.find(before))
    return found


def _summed_away(
    gradient: int, program: Program, values: Values, labels: LabelCache, uf: UnionFind, producer: Mapping[int, FlatEqn],
    of_inputs: set[int],
) -> set[Hashable]:  # fmt: skip
    """Classes of the dims that are summed over where a gradient is made: of its last product or sum, and of all its summands.

    Of a product with state alone the other operand counts: the gradient of a merged weight, where factors of it are trained.
    """
    found, seen, queue = set[Hashable](), set[int](), [gradient]
    while queue:
        root = queue.pop()
        eqn = producer.get(root)
        if root in seen or eqn is None:
            continue
        seen.add(root)
        made = {lab for labs in labels[eqn].outputs for lab in labs}
        atoms = zip(eqn.inputs, labels[eqn].inputs, strict=True)
        summed = [(a, d) for a, labs in atoms if isinstance(a, int) for d, lab in enumerate(labs) if lab not in (*made, BLOCKED)]
        data = [a for a in eqn.inputs if isinstance(a, int) and a in of_inputs]
        if summed and eqn.name == "dot_general" and len(data) == 1:
            queue.append(values.original[data[0]].root)
        elif summed:
            found |= {uf.find(node) for a, d in summed if (node := values.node(a, d)) is not None}
        else:
            size = program.avals[eqn.outputs[0]].size
            queue += [values.original[a].root for a in eqn.inputs if isinstance(a, int) and program.avals[a].size == size]
    return found


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
