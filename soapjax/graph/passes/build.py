"""From a `TracedStep` to its `OperatorGraph`, and the `Binding` by which an executor finds its way back.

>>> graph, binding = build_graph(trace(train_step, state, batch))
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax

from soapjax.graph.operators import (
    NO_GRADIENT,
    NOT_SPLIT,
    Access,
    Accumulation,
    Dim,
    JointSum,
    LoopEntry,
    Operator,
    OperatorGraph,
    Parameter,
    Task,
    TaskEquations,
    Work,
)
from soapjax.graph.passes import accumulation as traced
from soapjax.graph.passes import joint_sums as joint
from soapjax.graph.passes.checks import check_graph, check_operators, check_phases, check_program, check_units
from soapjax.graph.passes.dims import DimClasses, LabelCache, OperatorDims
from soapjax.graph.passes.frozen import frozen_weights
from soapjax.graph.passes.naming import grouped, operator_names
from soapjax.graph.passes.pairing import Pairing
from soapjax.graph.passes.phases import UPDATE, Phases, find_phases
from soapjax.graph.passes.samples import SampleDims
from soapjax.graph.passes.tasks import EqnDims, TaskBuilder, readers_of
from soapjax.graph.passes.units import Unit, find_units, generated_values
from soapjax.graph.passes.unplaced import unplaced_state
from soapjax.graph.passes.updates import update_work
from soapjax.graph.rules.light_rules import BLOCKED, shard_map_axes, user_spec
from soapjax.graph.trace.program import FlatEqn
from soapjax.graph.trace.tracing import TracedStep
from soapjax.graph.trace.values import Values
from soapjax.helpers.garbage import fewer_collections


@dataclasses.dataclass(frozen=True, eq=False)
class Binding:
    """Where the graph's tasks and tensors are in the traced program."""

    values: Values
    task_of: dict[str, int]  # equation key -> task
    tensor_of: dict[int, int]  # root -> tensor
    phases: Phases
    sums: dict[int, traced.TracedAccumulation]  # parameter -> how its gradient is summed up
    joint_sums: list[joint.TracedJointSum]  # as in the graph
    dims_of: dict[str, EqnDims]  # equation key -> op dims of its operands and results
    partial_of: dict[str, int]  # key of an equation whose result is partial up to the task's result -> the latter's root
    local_dims: Callable[[Task, FlatEqn], EqnDims]  # (task, equation of it) -> as `dims_of`, in their own shapes
    given: frozenset[int]  # inputs that are neither state nor data (samples.py)
    generated: frozenset[int]  # values that every device makes of constants


_BUILT: weakref.WeakKeyDictionary[TracedStep, tuple[OperatorGraph, Binding]] = weakref.WeakKeyDictionary()


def build_graph(step: TracedStep) -> tuple[OperatorGraph, Binding]:
    """The operator graph of a traced step, checked after every pass; built once for each step.

    A step whose phases cannot be told apart in order (a second gradient of updated parameters) is one phase in program order.

    Raises: SoapjaxError where a pass left something inconsistent: a defect, named with the pass.
    """
    if step not in _BUILT:
        _BUILT[step] = _built(step)
    return _BUILT[step]


@fewer_collections()
def _built(step: TracedStep) -> tuple[OperatorGraph, Binding]:
    builder = _Builder(step)
    graph = builder.build()
    check_graph(graph)
    task_of = {key: k for k, t in enumerate(graph.tasks) for key in t.equations.keys}
    b, made = builder, builder.tasks
    return graph, Binding(
        values=b.values, task_of=task_of, tensor_of=b.tensors.of_root, phases=b.phases, sums=b.sums, joint_sums=b.joint_sums,
        dims_of=made.dims_of, partial_of=made.partial_of, local_dims=made.local_dims, given=frozenset(b.given),
        generated=frozenset(b.generated),
    )  # fmt: skip


class _Builder:
    def __init__(self, step: TracedStep):
        self.step, self.program = step, step.program
        check_program(self.program)
        self.values = Values(self.program)
        self.phases = find_phases(step, self.values)
        check_phases(self.program, self.values, self.phases)
        self.generated = generated_values(self.program, self.values, self.phases.by_gradient.keys())
        self.sums = traced.find_accumulations(self.program, self.values, self.phases, self.generated)
        additions = frozenset(key for found in self.sums.values() for key in found.additions)
        self.units, self.updates = find_units(self.program, self.values, self.phases, self.generated, additions)
        check_units(self.units, self.updates, self.values, self.phases)
        self.joint_sums = joint.find_joint_sums(self.units, self.program, self.values, additions)
        self.labels = LabelCache(self.program)
        trained = {self.program.inputs[i] for p in self.phases.parameters for i in p.leaves}
        data, walkers = self._data(trained)
        dims = SampleDims(self.program, self.values, self.labels)
        gradients = self.phases.by_gradient.keys()
        self.given = dims.given_weights(data, gradients)
        self.samples = dims.nodes_of(data=data - self.given, walkers=walkers, trained=trained, gradients=gradients)
        self.frozen = frozen_weights(step, self.values, self.phases, self.given)
        self.parameter_values = self.phases.trained | {one.value for one in self.frozen}
        readers = readers_of(self.units, self.updates, self.program, self.values)
        own = self.phases.own_additions
        self.tasks = TaskBuilder(self.units, self.program, self.values, self.labels, self.generated, readers, own)
        self.tensors = self.tasks.tensors
        self.by_key = {e.key: e for e in self.updates}

    def _data(self, trained: set[int]) -> tuple[set[int], set[int]]:
        """The inputs whose leading dim is the batch: those that are no state; of a step that has none (chains of a sampler,
        walkers, environments) the state that is not `trained`, but for vectors, which may be of features."""
        inputs, avals = self.program.inputs, self.program.avals
        data = {v for i, v in enumerate(inputs) if i not in self.step.state_pairs and not _is_key(avals[v])}
        if any(avals[v].shape for v in data):
            return data, set()
        return set(), {v for v in inputs if v not in trained and len(avals[v].shape) > 1 and not _is_key(avals[v])}

    def build(self) -> OperatorGraph:
        pairing = Pairing(self.units, self.program, self.values, self.phases)
        self.twins = pairing.twins
        operators: list[tuple[list[int], DimClasses]] = []
        for members in pairing.operators:
            operators += self._split_unmatched(sorted(members, key=lambda i: (self.units[i].phase, i)))
        check_operators([members for members, _ in operators], len(self.units))
        operators.sort(key=lambda operator: min(operator[0]))  # in the order of their first unit
        dims = [self._dims(members, classes) for members, classes in operators]
        operator_of = {i: n for n, (members, _) in enumerate(operators) for i in members}
        tasks = [self.tasks.task(i, operator_of[i], dims[operator_of[i]]) for i in range(len(self.units))]
        names = operator_names([self.units[members[0]] for members, _ in operators], self.values, self.phases)
        parameters, update_tasks = self._parameters(tasks)
        tasks = self._ordered([*tasks, *update_tasks])
        accumulations = self._accumulations(tasks, parameters)
        entries = self._entries({a for found in accumulations for a in self.sums[found.parameter].starts})
        joint_sums = self._joint_sums(tasks)
        self._mark_outputs()
        self._mark_summands(accumulations)
        unplaced = unplaced_state(self.step, self.values, self.phases, parameters, self.tensors.of_root)
        tasks_of: list[list[int]] = [[] for _ in operators]
        for t, task in enumerate(tasks):
            tasks_of[task.operator].append(t)
        owned: list[list[int]] = [[] for _ in operators]
        for p, parameter in enumerate(parameters):
            owned[parameter.owner].append(p)
        built = []
        for n, (members, _) in enumerate(operators):
            first = self.units[members[0]]
            fixed, fixed_mesh = _fixed(first, dims[n])
            is_recomputed = any(self.units[i].eqns[0].outputs[0] in self.program.repeats for i in members)
            built.append(
                Operator(
                    name=names[n], kind=first.kind, dims=dims[n].dims, tasks=tuple(tasks_of[n]), parameters=tuple(owned[n]),
                    group=0, fixed=fixed, fixed_mesh=fixed_mesh, is_recomputed=is_recomputed,
                )  # fmt: skip
            )
        return OperatorGraph(
            operators=tuple(grouped(built, tasks, self.tensors.all)), tasks=tuple(tasks), tensors=tuple(self.tensors.all),
            parameters=tuple(parameters), entries=tuple(entries), in_paths=self.step.in_paths, out_paths=self.step.out_paths,
            state_pairs=tuple(sorted(self.step.state_pairs.items())),
            is_single_phase=self.phases.is_single_phase or not self.phases.parameters, accumulations=tuple(accumulations),
            joint_sums=tuple(joint_sums), leaf_of=self.step.leaf_of if max(self.step.program.rows[0], default=1) > 1 else (),
            unplaced=unplaced, step_fingerprint=self.step.fingerprint,
        )  # fmt: skip

    def _classes(self, members: list[int]) -> DimClasses:
        units = [self.units[i] for i in members]
        return DimClasses(units, self.program, self.values, self.phases, self.labels, self.generated, twins=self.twins)

    def _split_unmatched(self, members: list[int]) -> list[tuple[list[int], DimClasses]]:
        """A backward region with dims that its forward unit lacks becomes an operator of its own.

        So does one that makes two dims of a product one: of x xᵀ the gradients of both operands are added up.
        """
        classes = self._classes(members)
        first = self.units[members[0]]
        if self._lost_dims(first, classes):
            heavy = [i for i in members if self.units[i].heavy is not None]
            apart = self._classes(heavy)
            if not self._lost_dims(first, apart):
                return [(heavy, apart), *(([i], self._classes([i])) for i in members if i not in heavy)]
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

    def _lost_dims(self, unit: Unit, classes: DimClasses) -> bool:
        """Whether a dim of a product's result cannot be split although its own rule says so."""
        if unit.kind != "dot":
            return False
        out = unit.heavy.outputs[0]
        sizes, labelled = self.program.avals[out].shape, self.labels[unit.heavy].outputs[0]
        return any(
            n > 1 and label != BLOCKED and classes.of(self.values.node(out, d)) is None
            for d, (n, label) in enumerate(zip(sizes, labelled, strict=True))
        )

    def _size_of_one_sample(self, eqn: FlatEqn) -> tuple[bool, int]:
        """Whether a result has samples, and how large it is but for their number: a part of the batch has the same main results."""
        out = eqn.outputs[0]
        nodes = [(n, self.values.node(out, d)) for d, n in enumerate(self.program.avals[out].shape)]
        return any(node in self.samples for _, node in nodes), math.prod(n for n, node in nodes if node not in self.samples)

    def _dims(self, members: list[int], classes: DimClasses) -> OperatorDims:
        """Names and orders the dims: those of the main result first, then those that it sums over."""
        first = self.units[members[0]]
        main = (first.heavy or max(first.eqns, key=self._size_of_one_sample)).outputs[0]
        rank = len(self.program.avals[main].shape)
        ordered = [classes.of(self.values.node(main, d)) for d in range(rank)]
        ordered = [c for c in dict.fromkeys(ordered) if c is not None]
        in_result = set(ordered)
        ordered += [c for c in classes.in_order(self.units[i] for i in members) if c not in in_result]
        touched = classes.touched(first)
        dims: list[Dim] = []
        counts: dict[str, int] = {}
        for c in ordered:
            nodes = classes.classes[c]
            is_parameter = any(self.values.first(t) in self.parameter_values for t, _ in nodes)
            kind = "P" if is_parameter else "S" if any(n in self.samples for n in nodes) else "A"
            word = {"P": "param", "S": "sample", "A": "attr"}[kind]
            index = counts[word] = counts.get(word, -1) + 1
            name = word if word == "sample" and index == 0 else f"{word}{index}"
            is_reduced = first.heavy is not None and c not in in_result and c in touched
            spatial = any(n in classes.spatial_nodes for n in nodes)
            sizes = [classes.sizes[n] for n in nodes]
            dims.append(Dim(name + ("_in" if is_reduced else ""), max(sizes), classes.divisor(nodes), kind, is_reduced, spatial))
        return OperatorDims(tuple(dims), classes, {c: k for k, c in enumerate(ordered)})

    def _parameters(self, tasks: list[Task]) -> tuple[list[Parameter], list[Task]]:
        first_reader: dict[int | None, int] = {}  # root -> operator, of a loop-carried parameter too
        for t in tasks:
            for access in t.reads:
                first_reader.setdefault(self.values.first(self.tensors.all[access.tensor].value), t.operator)
        work, equations = update_work(self.updates, self.program, self.values, self.phases)
        parameters, updates = [], []
        for p, parameter in enumerate(self.phases.parameters):
            tensor = self.tensors.index(parameter.value)
            gradient = self.tensors.index(parameter.gradient)
            shape = self.tensors.all[tensor].shape
            stacked = len(shape) - len(self.tensors.all[gradient].shape)
            owner = first_reader.get(parameter.value, 0)
            parameters.append(
                Parameter(
                    path=parameter.path, tensor=tensor, gradient=gradient, owner=owner, leaf=parameter.leaf,
                    state_leaves=parameter.state_leaves,
                    # Blocks of a leading dim lie together: gathering and scattering them copies nothing.
                    storage_dims=tuple(d for d in range(max(0, stacked), len(shape)) if shape[d] > 1),
                )  # fmt: skip
            )
            read = Access(gradient, (NOT_SPLIT,) * len(self.tensors.all[gradient].shape), slices=1)
            dtype = self.tensors.all[tensor].dtype
            structure = self.tasks.structure([self.by_key[key] for key in equations[p]])
            updates.append(
                Task(
                    operator=owner, phase=UPDATE, kind="other", dtype=dtype, work=(Work(work[p], ()),), reads=(read,), writes=(),
                    parameter=p, structure=structure, equations=TaskEquations(tuple(equations[p])),
                )  # fmt: skip
            )  # fmt: skip
        return [*parameters, *self._frozen(first_reader)], updates

    def _frozen(self, first_reader: Mapping[int | None, int]) -> list[Parameter]:
        stacked: dict[int, int] = {}  # root -> its leading dims that loops over layers take apart
        for root, shift in self.values.alias.values() if self.frozen else ():
            stacked[root] = max(stacked.get(root, 0), -shift)
        found = []
        for one in (one for one in self.frozen if one.value in first_reader):
            tensor = self.tensors.index(one.value)
            shape = self.tensors.all[tensor].shape
            dims = tuple(d for d in range(stacked.get(one.value, 0), len(shape)) if shape[d] > 1)
            owner = first_reader[one.value]
            found.append(Parameter(one.path, tensor, NO_GRADIENT, owner, one.leaf, state_leaves=(), storage_dims=dims))
        return found

    def _ordered(self, tasks: list[Task]) -> list[Task]:
        """Forward, backward, update: a heavy update equation (rare) stays behind what it reads."""
        keys = [(t.phase, k) for k, t in enumerate(tasks)]
        return tasks if self.phases.is_single_phase else [tasks[k] for _, k in sorted(keys)]

    def _accumulations(self, tasks: list[Task], parameters: list[Parameter]) -> list[Accumulation]:
        writer = {access.tensor: task.operator for task in tasks for access in task.writes}
        found = []
        for p, chain in self.sums.items():
            if math.prod(self.program.avals[chain.total].shape) > 1:  # scalars are no tensors
                summands, running = (tuple(self.tensors.of_root[r] for r in roots) for roots in (chain.summands, chain.running))
                own = [t for t in summands if writer[t] == parameters[p].owner]
                carried = any(self.values.tensor(a).root == chain.total for a in chain.starts)
                follows = not chain.additions.isdisjoint(self.phases.own_additions)
                if follows and not own:
                    continue  # its layout is for the owner's config to decide, by its storage and by how it lays out its summand
                total, layout_of = self.tensors.of_root[chain.total], (own or summands)[-1]
                found.append(Accumulation(p, summands, running, total, carried, layout_of, follows))
        return found

    def _joint_sums(self, tasks: list[Task]) -> list[JointSum]:
        """Only products that some config makes partial sums take part."""
        partial = {a.tensor: a for task in tasks for a in task.writes if a.reduced}
        found = [one.with_summands(s for s in one.summands if self.tensors.of_root.get(s) in partial) for one in self.joint_sums]
        self.joint_sums = [one for one in found if len(one.summands) > 1]
        return [JointSum(tuple(self.tensors.of_root[s] for s in one.summands)) for one in self.joint_sums]

    def _entries(self, sums: set[int]) -> list[LoopEntry]:
        """Of what loops carry, but for the arguments of running `sums` of gradients."""
        entries = []
        for carry in self.values.carries.values():
            if carry.argument in sums:  # starts from zeros, or in the layout of the sum before
                continue
            target = self.values.tensor(carry.argument)
            init = self.values.of(carry.init) if isinstance(carry.init, int) else None
            if init is None or init.root in self.generated or init.root in self.values.carries:
                continue
            source = self.values.tensor(carry.init)
            if source.root in self.step.program.inputs and target.root in self.tensors.of_root:
                self.tensors.index(source.root)  # data that only begin a loop: nothing else reads them
            if target.root in self.tensors.of_root and source.root in self.tensors.of_root and target.root != source.root:
                entries.append(LoopEntry(self.tensors.of_root[source.root], self.tensors.of_root[target.root]))
        return entries

    def _mark_outputs(self) -> None:
        leaves: dict[int, list[int]] = {}
        for leaf, o in enumerate(self.program.outputs):
            if isinstance(o, int):
                leaves.setdefault(self.values.tensor(o).root, []).append(leaf)
        for root, found in leaves.items():
            if root in self.tensors.of_root:
                k = self.tensors.of_root[root]
                self.tensors.all[k] = self.tensors.all[k]._replace(output_leaves=tuple(found))

    def _mark_summands(self, accumulations: list[Accumulation]) -> None:
        """They are added up as what they are cast to: over devices too, since their sums stay apart until then."""
        for i in {i for chain in accumulations for i in chain.summands}:
            self.tensors.all[i] = self.tensors.all[i]._replace(sum_dtype="", sum_itemsize=0)


def _is_key(aval: Any) -> bool:
    """Whether a value is one random key, in either of JAX's forms."""
    is_typed = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key) and not aval.shape
    return is_typed or (str(aval.dtype), aval.shape) == ("uint32", (2,))


def _fixed(unit: Unit, dims: OperatorDims) -> tuple[tuple[tuple[str, ...], ...] | None, Any]:
    """A user's own layout: axis names per dim (of the tensor, or of the operator for a shard_map), and the axes of their mesh."""
    if unit.kind == "shard_map":
        names: list[tuple[str, ...]] = [()] * len(dims.dims)
        of_labels = dims.of_labels(unit.heavy)
        for label, axes in enumerate(shard_map_axes(unit.heavy)):
            if label in of_labels:
                names[of_labels[label]] = axes
        return tuple(names), tuple(unit.heavy.params["mesh"].shape.items())
    sharding = user_spec(unit.heavy) if unit.kind == "constraint" else None
    if sharding is None:
        return None, ()
    # P.UNCONSTRAINED stays as a name, which no mesh has: the space refuses it by this name.
    spec = [() if s is None else tuple(s) if isinstance(s, tuple) else (str(s),) for s in sharding.spec]
    return tuple(spec), tuple(sharding.mesh.shape.items())
