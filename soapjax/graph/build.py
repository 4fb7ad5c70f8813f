"""From a `TracedStep` to its `OperatorGraph`, and the `Binding` by which an executor finds its way back.

>>> graph, binding = build_graph(trace(train_step, state, batch))
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np

from soapjax.graph import accumulation as traced
from soapjax.graph.dims import DimClasses, LabelCache, sample_nodes
from soapjax.graph.flops import flops_of
from soapjax.graph.naming import grouped, operator_names
from soapjax.graph.operators import (
    HEAVY_RESULT,
    NOT_SPLIT,
    Access,
    Accumulation,
    Dim,
    InnerSum,
    LoopEntry,
    Operator,
    OperatorGraph,
    Parameter,
    Task,
    Tensor,
    Work,
    check_graph,
)
from soapjax.graph.pairing import Pairing
from soapjax.graph.phases import UPDATE, Phases, find_phases
from soapjax.graph.program import FlatEqn
from soapjax.graph.rules import BLOCKED, LIGHT, user_spec
from soapjax.graph.structure import structure_of
from soapjax.graph.trace import TracedStep
from soapjax.graph.units import Unit, find_units, generated_values, is_relayout
from soapjax.graph.updates import update_work
from soapjax.graph.values import Values

DimsOf = Callable[[Task, FlatEqn], tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Binding:
    """Where the graph's tasks and tensors are in the traced program."""

    values: Values
    task_of: dict[str, int]  # equation key -> task
    tensor_of: dict[int, int]  # root -> tensor
    phases: Phases
    sums: dict[int, traced.Accumulation]  # parameter -> how its gradient is summed up
    dims_of: dict[str, EqnDims]  # equation key -> op dims of its operands and results
    partial_of: dict[str, int]  # key of an equation whose result is partial up to the task's result -> the latter's root
    local_dims: DimsOf  # (task, equation of it) -> op dims of every operand and result, in their own shapes


class EqnDims(NamedTuple):
    """Per operand and result of an equation: which op dim splits each of its dims, or NOT_SPLIT."""

    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]


def build_graph(step: TracedStep) -> tuple[OperatorGraph, Binding]:
    """The operator graph of a traced step, checked."""
    builder = _Builder(step)
    graph = builder.build()
    check_graph(graph)
    task_of = {key: k for k, t in enumerate(graph.tasks) for key in t.equations}
    b = builder
    return graph, Binding(b.values, task_of, b.tensor_of, b.phases, b.sums, b.dims_of, b.partial_of, b.local_dims)


class _Builder:
    def __init__(self, step: TracedStep):
        self.step, self.program = step, step.program
        self.values = Values(self.program)
        self.phases = find_phases(step, self.values)
        self.generated = generated_values(self.program, self.values)
        self.sums = traced.find_accumulations(self.program, self.values, self.phases)
        additions = frozenset(key for found in self.sums.values() for key in found.additions)
        self.units, self.updates = find_units(self.program, self.values, self.phases, additions)
        self.labels = LabelCache(self.program)
        self.tensor_of: dict[int, int] = {}
        self.tensors: list[Tensor] = []
        self.leaves = {v: i for i, v in enumerate(self.program.inputs)}
        data = {v for i, v in enumerate(self.program.inputs) if i not in step.state_pairs}
        self.samples = sample_nodes(self.program, self.values, self.labels, data)
        self.parameter_values = {p.value for p in self.phases.parameters}
        self.readers = self._readers()
        self.dims_of: dict[str, EqnDims] = {}
        self.partial_of: dict[str, int] = {}
        self.by_key = {e.key: e for e in self.updates}
        self.places: dict[str, tuple[DimClasses, dict[Hashable, int]]] = {}  # a task's first equation -> its operator's dims

    def build(self) -> OperatorGraph:
        pairing = Pairing(self.units, self.program, self.values, self.phases)
        operators: list[tuple[list[int], DimClasses]] = []
        for members in pairing.operators:
            operators += self._split_unmatched(sorted(members, key=lambda i: (self.units[i].phase, i)))
        op_of_unit = {i: k for k, (members, _) in enumerate(operators) for i in members}
        # Operators in the order of their first unit.
        order = sorted(range(len(operators)), key=lambda k: min(operators[k][0]))
        rank = {k: n for n, k in enumerate(order)}
        dims = [self._dims(*operators[k]) for k in order]
        tasks = [
            self._task(i, rank[op_of_unit[i]], operators[op_of_unit[i]][1], dims[rank[op_of_unit[i]]][1])
            for i in range(len(self.units))
        ]
        names = operator_names([self.units[operators[k][0][0]] for k in order], self.values, self.phases)
        parameters, update_tasks = self._parameters(tasks)
        tasks = self._ordered([*tasks, *update_tasks])
        entries = self._entries()
        self._mark_outputs()
        tasks_of: list[list[int]] = [[] for _ in order]
        for t, task in enumerate(tasks):
            tasks_of[task.operator].append(t)
        built = []
        for n, k in enumerate(order):
            first = self.units[operators[k][0][0]]
            built.append(
                Operator(
                    names[n],
                    first.kind,
                    dims[n][0],
                    tuple(tasks_of[n]),
                    tuple(p for p, parameter in enumerate(parameters) if parameter.owner == n),
                    0,
                    _fixed_axes(first),
                )
            )
        return OperatorGraph(
            tuple(grouped(built, tasks, self.tensors)),
            tuple(tasks),
            tuple(self.tensors),
            tuple(parameters),
            tuple(entries),
            self.step.in_paths,
            self.step.out_paths,
            tuple(sorted(self.step.state_pairs.items())),
            self.phases.is_single_phase or not self.phases.parameters,
            tuple(self._accumulations(tasks, parameters)),
        )

    def _classes(self, members: list[int]) -> DimClasses:
        units = [self.units[i] for i in members]
        return DimClasses(units, self.program, self.values, self.phases, self.labels, self.generated)

    def _split_unmatched(self, members: list[int]) -> list[tuple[list[int], DimClasses]]:
        """A backward region with dims that its forward unit lacks becomes an operator of its own."""
        classes = self._classes(members)
        first = self.units[members[0]]
        known = classes.touched(first)
        loose = [
            i
            for i in members[1:]
            if not (found := classes.touched(self.units[i])) <= known and (self.units[i].heavy is None or not found & known)
        ]
        if not loose:
            return [(members, classes)]
        kept = [i for i in members if i not in loose]
        return [(kept, self._classes(kept)), *((([i], self._classes([i]))) for i in loose)]

    def _dims(self, members: list[int], classes: DimClasses) -> tuple[tuple[Dim, ...], dict[Hashable, int]]:
        """Names and orders the dims: those of the main result first, then those that it sums over."""
        first = self.units[members[0]]
        main = (first.heavy or max(first.eqns, key=lambda e: math.prod(self.program.avals[e.outputs[0]].shape))).outputs[0]
        rank = len(self.program.avals[main].shape)
        ordered = [classes.of(self.values.node(main, d)) for d in range(rank)]
        ordered = [c for c in dict.fromkeys(ordered) if c is not None]
        in_result = set(ordered)
        for i in members:
            for e in self.units[i].eqns:
                for a in (*e.inputs, *e.outputs):
                    if isinstance(a, int):
                        for d in range(len(self.program.avals[a].shape)):
                            c = classes.of(self.values.node(a, d))
                            if c is not None and c not in ordered:
                                ordered.append(c)
        dims, counts = [], {}
        for c in ordered:
            nodes = classes.classes[c]
            is_parameter = any(t in self.parameter_values for t, _ in nodes)
            kind = "P" if is_parameter else "S" if any(n in self.samples for n in nodes) else "A"
            word = {"P": "param", "S": "sample", "A": "attr"}[kind]
            index = counts[word] = counts.get(word, -1) + 1
            name = word if word == "sample" and index == 0 else f"{word}{index}"
            is_reduced = first.heavy is not None and c not in in_result and c in classes.touched(first)
            spatial = any(n in classes.spatial_nodes for n in nodes)
            sizes = [classes.sizes[n] for n in nodes]
            dims.append(Dim(name + ("_in" if is_reduced else ""), max(sizes), classes.divisor(nodes), kind, is_reduced, spatial))
        return tuple(dims), {c: k for k, c in enumerate(ordered)}

    def _readers(self) -> dict[int, set[int]]:
        """Root -> units that read it (-1: the update, -2: the step's outputs, -3: the next trip of a loop)."""
        readers: dict[int, set[int]] = {}
        for i, u in enumerate(self.units):
            for e in u.eqns:
                for a in e.inputs:
                    if isinstance(a, int):
                        readers.setdefault(self.values.of(a).root, set()).add(i)
        for e in self.updates:
            for a in e.inputs:
                if isinstance(a, int):
                    readers.setdefault(self.values.of(a).root, set()).add(-1)
        for o in self.program.outputs:
            if isinstance(o, int):
                readers.setdefault(self.values.of(o).root, set()).add(-2)
        for c in self.values.carries.values():
            for a in (c.init, c.result):
                if isinstance(a, int):
                    readers.setdefault(self.values.of(a).root, set()).add(-3)
        return readers

    def _tensor(self, root: int) -> int:
        if root not in self.tensor_of:
            aval = self.program.avals[root]
            self.tensor_of[root] = len(self.tensors)
            itemsize = getattr(aval.dtype, "itemsize", 4)
            leaf = self.leaves.get(root, -1)
            producer = self.values.producer.get(root)
            copies = 1
            if producer is not None and root in self.values.stacked:
                loops = {e.key: e.params["length"] for e, _ in self.program.walk() if e.body is not None}
                copies = math.prod(loops[k] for k in self.values.scope[producer.key])
            self.tensors.append(Tensor(root, tuple(aval.shape), str(aval.dtype), itemsize, copies, leaf))
        return self.tensor_of[root]

    def _access(self, atom: int, classes: DimClasses, index: dict, reduced=(), operand: int = -1) -> Access:
        alias = self.values.tensor(atom)
        rank = len(self.program.avals[alias.root].shape)
        nodes = [self.values.node(atom, d + alias.shift) if d + alias.shift >= 0 else None for d in range(rank)]
        dims = tuple(index.get(classes.of(node), NOT_SPLIT) for node in nodes)
        return Access(self._tensor(alias.root), dims, tuple(reduced), operand)

    def _heavy_access(self, eqn: FlatEqn, k: int, classes: DimClasses, index: dict, *, is_result: bool, reduced=()) -> Access:
        atom = eqn.outputs[k] if is_result else eqn.inputs[k]
        labs = (self.labels[eqn].outputs if is_result else self.labels[eqn].inputs)[k]
        alias = self.values.tensor(atom)
        dims = [NOT_SPLIT] * len(self.program.avals[alias.root].shape)
        for d, lab in enumerate(labs):
            c = classes.of_label(eqn, lab)
            if c is not None and d >= alias.shift:
                dims[d - alias.shift] = index[c]
        return Access(self._tensor(alias.root), tuple(dims), tuple(reduced), k)

    def _task(self, i: int, op: int, classes: DimClasses, index: dict[Hashable, int]) -> Task:
        unit = self.units[i]
        inside = {o for e in unit.eqns for o in e.outputs}
        results = [
            o for e in unit.eqns for o in e.outputs
            if self.readers.get(o, set()) - {i} and o not in self.generated
        ]  # fmt: skip
        reads: dict[tuple, Access] = {}
        for e in unit.eqns:
            for k, a in enumerate(e.inputs):
                if not isinstance(a, int) or (root := self.values.of(a).root) in inside or root in self.generated:
                    continue
                root = self.values.tensor(a).root
                if math.prod(self.program.avals[root].shape) <= 1:
                    continue
                if e is unit.heavy:
                    access = self._heavy_access(e, k, classes, index, is_result=False)
                else:
                    access = self._access(a, classes, index)
                reads.setdefault((access.tensor, access.dims), access)
        for e in unit.eqns:
            found = self.labels[e]
            one, other = (
                tuple(tuple(index.get(classes.of_label(e, lab), NOT_SPLIT) for lab in labs) for labs in side)
                for side in (found.inputs, found.outputs)
            )
            self.dims_of[e.key] = EqnDims(one, other)
        sums: list[InnerSum] = []
        partial = self._partial_results(unit, classes, index, results, sums)
        writes = []
        for o in results:
            reduced = partial.get(o, ())
            if unit.heavy is not None and o in unit.heavy.outputs:
                k = unit.heavy.outputs.index(o)
                writes.append(self._heavy_access(unit.heavy, k, classes, index, is_result=True, reduced=reduced))
            else:
                writes.append(self._access(o, classes, index, reduced))
        main = unit.heavy or unit.eqns[0]
        floats = [str(self.program.aval(a).dtype) for a in (*main.inputs, *main.outputs)]
        dtype = next((t for t in floats if t.startswith(("float", "bfloat"))), floats[0] if floats else "float32")
        kind = unit.kind if unit.kind in ("dot", "conv") else "other"
        self.places[unit.eqns[0].key] = classes, index
        heavy = self.dims_of[unit.heavy.key] if unit.heavy is not None else EqnDims((), ((),))
        return Task(
            op, unit.phase, kind, dtype, self._work(unit, classes, index), tuple(reads.values()), tuple(writes), tuple(sums),
            tuple(e.key for e in unit.eqns), unit.heavy.key if unit.heavy else "", unit.trip_count, "/".join(unit.scope),
            -1, heavy.operands, heavy.results[0], tuple(self._recomputed_from(unit, o, results) for o in results),
            self._structure(unit.eqns),
        )  # fmt: skip

    def _recomputed_from(self, unit: Unit, result: int, results: list[int]) -> tuple[int, ...] | None:
        """The tensors that a result is made of by light equations alone; sums on the way are small, and taken as stored."""
        maker = {o: e for e in unit.eqns for o in e.outputs}
        found: dict[int, None] = {}
        queue, seen = [result], {result}
        while queue:
            atom = queue.pop()
            e = maker.get(atom)
            if e is not None and (e is unit.heavy or e.name not in LIGHT):
                if atom != result and atom in results:
                    found[self._tensor(atom)] = None
                elif e is unit.heavy and atom != result:
                    found[HEAVY_RESULT] = None
                elif atom == result or not e.name.startswith("reduce"):
                    return None
                continue
            if e is None:
                root = self.values.tensor(atom).root
                if root not in self.generated and math.prod(self.program.avals[root].shape) > 1:
                    found[self._tensor(root)] = None
                continue
            for a in e.inputs:
                root = self.values.of(a).root if isinstance(a, int) else None
                if root is not None and root not in seen:
                    seen.add(root)
                    queue.append(root)
        return tuple(found)

    def _structure(self, eqns: list[FlatEqn]) -> str:
        return structure_of(eqns, self.program.aval, lambda a: self.values.of(a).root)

    def local_dims(self, task: Task, eqn: FlatEqn) -> EqnDims:
        """Op dims, or NOT_SPLIT, of the operands and results of one of a task's equations, in their own shapes."""
        labelled = self.dims_of[eqn.key]
        if eqn.key == task.heavy:
            return labelled
        classes, index = self.places[task.equations[0]]

        def dims(atom: object, as_labelled: tuple[int, ...]) -> tuple[int, ...]:
            if not isinstance(atom, int):
                return (NOT_SPLIT,) * len(as_labelled)
            if self.values.of(atom).root in self.generated:  # made on each device, as the equation wants it
                return as_labelled
            return tuple(index.get(classes.of(self.values.node(atom, d)), NOT_SPLIT) for d in range(len(as_labelled)))

        return EqnDims(tuple(map(dims, eqn.inputs, labelled.operands)), tuple(map(dims, eqn.outputs, labelled.results)))

    def _partial_results(self, unit: Unit, classes, index, results: list[int], sums: list[InnerSum]) -> dict[int, tuple[int, ...]]:
        """Op dims over which each result is a sum of parts; sums whose value is used inside the unit go to `sums`."""
        readers: dict[int, list[FlatEqn]] = {}
        for e in unit.eqns:
            for a in e.inputs:
                if isinstance(a, int):
                    readers.setdefault(self.values.of(a).root, []).append(e)
        partial: dict[int, tuple[int, ...]] = {}
        for e in unit.eqns:
            found = self.labels[e]
            kept = {lab for labs in found.outputs for lab in labs}
            gone = sorted({lab for labs in found.inputs for lab in labs} - kept - {BLOCKED})
            reduced = tuple(index[c] for c in dict.fromkeys(classes.of_label(e, lab) for lab in gone) if c is not None)
            if not reduced:
                continue
            out = e.outputs[0]
            # Follow transposes and casts of the sum: it stays partial up to the unit's result.
            while out not in results and len(readers.get(out, [])) == 1 and is_relayout(readers[out][0], self.program):
                out = readers[out][0].outputs[0]
            if out in results and not readers.get(out) and (unit.heavy is None or len(results) == 1):
                partial[out] = reduced
                self.partial_of[e.key] = out
            else:
                root = e.outputs[0]
                aval = self.program.avals[root]
                dims = {index.get(classes.of_label(e, lab), NOT_SPLIT) for lab in found.outputs[0]}
                size = math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 4)
                sums.append(InnerSum(float(size), tuple(sorted(dims - {NOT_SPLIT})), reduced))
        return partial

    def _work(self, unit: Unit, classes: DimClasses, index: dict) -> tuple[Work, ...]:
        total: dict[tuple[int, ...], float] = {}
        for e in unit.eqns:
            found = self.labels[e]
            labs = {lab for one in (*found.inputs, *found.outputs) for lab in one}
            dims = {index[c] for lab in labs if (c := classes.of_label(e, lab)) is not None}
            flops = flops_of(e, self.program)
            if flops or e is unit.heavy:
                key = tuple(sorted(dims))
                total[key] = total.get(key, 0.0) + flops
        return tuple(Work(f, d) for d, f in sorted(total.items()))

    def _parameters(self, tasks: list[Task]) -> tuple[list[Parameter], list[Task]]:
        first_reader: dict[int, int] = {}
        for t in tasks:
            for access in t.reads:
                first_reader.setdefault(access.tensor, t.operator)
        work, equations = update_work(self.updates, self.program, self.values, self.phases)
        parameters, updates = [], []
        for p, parameter in enumerate(self.phases.parameters):
            tensor = self._tensor(parameter.value)
            gradient = self._tensor(parameter.gradient)
            shape = self.tensors[tensor].shape
            stacked = len(shape) - len(self.tensors[gradient].shape)
            dims = sorted(range(max(0, stacked), len(shape)), key=lambda d: (-shape[d], d))
            owner = first_reader.get(tensor, 0)
            parameters.append(
                Parameter(
                    parameter.path, tensor, gradient, owner, parameter.leaf, parameter.state_leaves,
                    tuple(d for d in dims if shape[d] > 1),
                )
            )  # fmt: skip
            read = Access(gradient, (NOT_SPLIT,) * len(self.tensors[gradient].shape))
            dtype = self.tensors[tensor].dtype
            structure = self._structure([self.by_key[key] for key in equations[p]])
            updates.append(
                Task(
                    owner, UPDATE, "other", dtype, (Work(work[p], ()),), (read,), (), (), tuple(equations[p]), "", 1, "", p,
                    structure=structure,
                )
            )  # fmt: skip
        return parameters, updates

    def _ordered(self, tasks: list[Task]) -> list[Task]:
        """Forward, backward, update: a heavy update equation (rare) stays behind what it reads."""
        keys = [(t.phase, k) for k, t in enumerate(tasks)]
        return tasks if self.phases.is_single_phase else [tasks[k] for _, k in sorted(keys)]

    def _accumulations(self, tasks: list[Task], parameters: list[Parameter]) -> list[Accumulation]:
        writer = {access.tensor: task.operator for task in tasks for access in task.writes}
        found = []
        for p, chain in self.sums.items():
            if math.prod(self.program.avals[chain.total].shape) > 1:  # scalars are no tensors
                summands, running = (tuple(self.tensor_of[r] for r in roots) for roots in (chain.summands, chain.running))
                own = [t for t in summands if writer[t] == parameters[p].owner]
                carried = any(self.values.tensor(a).root == chain.total for a in chain.starts)
                found.append(Accumulation(p, summands, running, self.tensor_of[chain.total], carried, (own or summands)[-1]))
        return found

    def _entries(self) -> list[LoopEntry]:
        entries = []
        sums = {a for chain in self.sums.values() for a in chain.starts}
        for carry in self.values.carries.values():
            if carry.argument in sums:  # starts from zeros, or in the layout of the sum before
                continue
            target = self.values.tensor(carry.argument)
            init = self.values.of(carry.init) if isinstance(carry.init, int) else None
            if init is None or init.root in self.generated or init.root in self.values.carries:
                continue
            source = self.values.tensor(carry.init)
            if target.root in self.tensor_of and source.root in self.tensor_of and target.root != source.root:
                entries.append(LoopEntry(self.tensor_of[source.root], self.tensor_of[target.root]))
        return entries

    def _mark_outputs(self) -> None:
        leaves: dict[int, list[int]] = {}
        for leaf, o in enumerate(self.program.outputs):
            if isinstance(o, int):
                leaves.setdefault(self.values.tensor(o).root, []).append(leaf)
        for root, found in leaves.items():
            if root in self.tensor_of:
                k = self.tensor_of[root]
                self.tensors[k] = self.tensors[k]._replace(output_leaves=tuple(found))


def _fixed_axes(unit: Unit) -> tuple[tuple[str, ...], ...] | None:
    """A user's own sharding constraint as axis names per dim."""
    sharding = user_spec(unit.heavy) if unit.kind == "constraint" else None
    if sharding is None:
        return None
    # P.UNCONSTRAINED stays as a name, which no mesh has: the space refuses it by this name.
    spec = [() if s is None else tuple(s) if isinstance(s, tuple) else (str(s),) for s in sharding.spec]
    return tuple(spec)


def total_flops(graph: OperatorGraph) -> float:
    """FLOPs of one step on one device, loops counted with their trips."""
    return float(np.sum([w.flops * t.trip_count for t in graph.tasks for w in t.work]))
