"""From units of equations to the tasks of the graph: what each reads, writes, sums and computes, dim by dim."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from soapjax.graph.operators import HEAVY_RESULT, NOT_SPLIT, Access, Halo, InnerSum, Task, TaskEquations, TaskMemory, Tensor, Work
from soapjax.graph.passes.dims import LabelCache, OperatorDims
from soapjax.graph.passes.relayouts import ADDITIONS, is_relayout
from soapjax.graph.passes.structure import dtype_name, structure_of
from soapjax.graph.passes.units import Unit
from soapjax.graph.rules.flops import flops_of
from soapjax.graph.rules.heavy_rules import border_rows, conv_results
from soapjax.graph.rules.light_rules import BLOCKED, LIGHT
from soapjax.graph.rules.pools import IMAGE, is_made_of_choices
from soapjax.graph.rules.rule_table import Labels
from soapjax.graph.trace.program import Atom, FlatEqn, Program, bytes_of
from soapjax.graph.trace.values import Alias, Uses, Values


class EqnDims(NamedTuple):
    """Per operand and result of an equation: which op dim splits each of its dims, or NOT_SPLIT."""

    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]


class Tensors:
    """The graph's tensors, in the order in which they are first asked for."""

    def __init__(self, program: Program, values: Values):
        self.program, self.values = program, values
        self.all: list[Tensor] = []
        self.of_root: dict[int, int] = {}
        self._leaves = {v: i for i, v in enumerate(program.inputs)}

    def index(self, root: int) -> int:
        if root not in self.of_root:
            aval = self.program.avals[root]
            self.of_root[root] = len(self.all)
            producer = self.values.producer.get(root)
            copies = 1 if producer is None else self.values.stacked.get(root, 1)
            itemsize = getattr(aval.dtype, "itemsize", 4)
            self.all.append(Tensor(root, tuple(aval.shape), dtype_name(aval.dtype), itemsize, copies, self._leaves.get(root, -1)))
        return self.of_root[root]

    def sum_as(self, root: int, dtype: Any) -> None:
        """The parts of tensor `root` are added up in `dtype`."""
        k = self.index(root)
        if str(dtype) != self.all[k].dtype:
            self.all[k] = self.all[k]._replace(sum_dtype=str(dtype), sum_itemsize=dtype.itemsize)


def _costly(unit: Unit) -> list[FlatEqn]:
    """Light equations of what a heavy one makes that XLA does not compute twice: tanh (0.10.2, read off plans for CUDA).

    In float32 where it is narrower, and beside what it is computed from where something else is computed from that.
    """
    return [e for e in unit.eqns if unit.heavy is not None and e.name == "tanh"]


def _adds_to_sum(eqn: FlatEqn, values: Values, uses: Uses) -> bool:
    """Whether an equation adds to zeros what its only reader adds to something else: a scatter onto that, as XLA makes it.

    The gradient of picking the labels' scores is added so into that of their normalisation.
    """
    if eqn.name != "scatter-add" or not isinstance(eqn.inputs[0], int):
        return False
    onto = values.producer.get(values.of(eqn.inputs[0]).root)
    start = onto.inputs[0] if onto is not None and onto.name == "broadcast_in_dim" else None
    reader = uses.only_reader(values.of(eqn.outputs[0]).root)
    is_zero = isinstance(start, jex_core.Literal) and not np.any(start.val)
    return is_zero and reader is not None and reader.name in ADDITIONS


def readers_of(units: list[Unit], updates: list[FlatEqn], program: Program, values: Values) -> dict[int, set[int]]:
    """Root -> units that read it (-1: the update, -2: the step's outputs, -3: the next trip of a loop)."""
    readers: dict[int, set[int]] = {}
    wanted = [(a, i) for i, u in enumerate(units) for e in u.eqns for a in e.inputs]
    wanted += [(a, -1) for e in updates for a in e.inputs]
    wanted += [(o, -2) for o in program.outputs]
    wanted += [(a, -3) for c in values.carries.values() for a in (c.init, c.result)]
    for atom, reader in wanted:
        if isinstance(atom, int):
            readers.setdefault(values.of(atom).root, set()).add(reader)
    return readers


class TaskBuilder:
    """Makes tasks, and remembers how their equations' dims are those of their operators."""

    def __init__(
        self, units: list[Unit], program: Program, values: Values, labels: LabelCache, generated: set[int],
        readers: dict[int, set[int]], own: Set[str],
    ):  # fmt: skip
        self.units, self.program, self.values, self.labels = units, program, values, labels
        self.generated, self.readers, self.uses = generated, readers, values.uses
        self.own = own  # keys of what a step does with gradients that it adds up (own_accumulation.py)
        self.tensors = Tensors(program, values)
        self.dims_of: dict[str, EqnDims] = {}  # equation key -> op dims of its operands and results
        self.partial_of: dict[str, int] = {}  # key of an equation partial up to the task's result -> the latter's root
        self.with_halos: set[tuple] = set()  # images with halos that an earlier task needs too
        self.places: dict[str, OperatorDims] = {}  # a task's first equation -> its operator's dims

    def task(self, i: int, op: int, dims: OperatorDims) -> Task:
        unit = self.units[i]
        alias, generated = self.values.alias, self.generated
        inside = {o for e in unit.eqns for o in e.outputs}
        results = [
            o for e in unit.eqns for o in e.outputs
            if (readers := self.readers.get(o)) and (len(readers) > 1 or i not in readers) and o not in generated
        ]  # fmt: skip
        reads: dict[tuple, Access] = {}
        seen: set[int] = set()  # values that a light equation has read
        for e in unit.eqns:
            is_heavy = e is unit.heavy
            for k, a in enumerate(e.inputs):
                if not isinstance(a, int) or a in seen or (root := alias[a].root) in inside or root in generated:
                    continue
                if not is_heavy:
                    seen.add(a)
                root = self.values.tensor(a).root
                if math.prod(self.program.avals[root].shape) <= 1:
                    continue
                access = self._heavy_access(e, k, dims, is_result=False) if is_heavy else self._access(a, dims)
                reads.setdefault((access.tensor, access.dims), access)
        for e in unit.eqns:
            found = self.labels[e]
            split = dims.of_labels(e)
            self.dims_of[e.key] = EqnDims(
                tuple([tuple([split.get(lab, NOT_SPLIT) for lab in labs]) for labs in found.inputs]),
                tuple([tuple([split.get(lab, NOT_SPLIT) for lab in labs]) for labs in found.outputs]),
            )
        sums: list[InnerSum] = []
        partial = self._partial_results(unit, dims, results, sums)
        writes = []
        for o in results:
            reduced = partial.get(o, ())
            if unit.heavy is not None and o in unit.heavy.outputs:
                k = unit.heavy.outputs.index(o)
                writes.append(self._heavy_access(unit.heavy, k, dims, is_result=True, reduced=reduced))
            else:
                writes.append(self._access(o, dims, reduced))
        main = unit.heavy or unit.eqns[0]
        floats = [dtype_name(self.program.aval(a).dtype) for a in (*main.inputs, *main.outputs)]
        dtype = next((t for t in floats if t.startswith(("float", "bfloat"))), floats[0] if floats else "float32")
        kind = unit.kind if unit.kind in ("dot", "conv") else "other"
        self.places[unit.eqns[0].key] = dims
        heavy = self.dims_of[unit.heavy.key] if unit.heavy is not None else EqnDims((), ((),))
        memory = TaskMemory(
            0.0 if unit.heavy is None else bytes_of(self.program.aval(unit.heavy.outputs[0])),
            tuple(self._recomputed_from(unit, o, results) for o in results),
            self._image(unit.heavy), unit.heavy is not None and _adds_to_sum(unit.heavy, self.values, self.uses),
            self._costly_bytes(unit), not _costly(unit) or self._is_read_itself(unit, results),
        )  # fmt: skip
        keys, heavy_key = tuple(e.key for e in unit.eqns), unit.heavy.key if unit.heavy else ""
        return Task(
            operator=op, phase=unit.phase, kind=kind, dtype=dtype, work=self._work(unit, dims),
            reads=tuple(reads.values()), writes=tuple(writes), sums=tuple(sums),
            trip_count=self.values.trips[unit.scope], scope="/".join(unit.scope), structure=self.structure(unit.eqns),
            halos=self._halos(unit, op), casts=self._casts(unit, {access.tensor for access in reads.values()}),
            memory=memory, equations=TaskEquations(keys, heavy_key, heavy.operands, heavy.results[0]),
        )  # fmt: skip

    def _costly_bytes(self, unit: Unit) -> float:
        made = [self.program.aval(e.outputs[0]) for e in _costly(unit)]
        return float(sum(math.prod(aval.shape) * max(aval.dtype.itemsize, 4) for aval in made))

    def _is_read_itself(self, unit: Unit, results: list[int]) -> bool:
        """Whether a result is computed from the heavy equation's on a way that does not lead through a costly one."""
        maker = {o: e for e in unit.eqns for o in e.outputs}
        costly = {e.key for e in _costly(unit)}
        queue, seen = list(results), set(results)
        while queue:
            e = maker.get(queue.pop())
            if e is unit.heavy:
                return True
            for root in self.values.reads[e.key] if e is not None and e.key not in costly else ():
                if root not in seen:
                    seen.add(root)
                    queue.append(root)
        return False

    def _image(self, heavy: FlatEqn | None) -> int:
        """The tensor that a pooling's gradient makes its choices in, -1 of other equations."""
        if heavy is None or not is_made_of_choices(heavy) or not isinstance(heavy.inputs[IMAGE], int):
            return -1
        return self.tensors.of_root.get(self.values.tensor(heavy.inputs[IMAGE]).root, -1)

    def _casts(self, unit: Unit, tensors: set[int]) -> tuple[tuple[int, str], ...]:
        """Which of `tensors` all equations of the unit that read them cast to one narrower dtype, and to which."""
        found: dict[int, set[str | None]] = {}
        of_root = self.tensors.of_root
        for e in unit.eqns:
            for a in e.read:
                root = self.values.tensor(a).root
                if (tensor := of_root.get(root, -1)) in tensors:
                    is_cast = e.name == "convert_element_type"
                    found.setdefault(tensor, set()).add(self._narrower(root, e.params["new_dtype"]) if is_cast else None)
        return tuple((tensor, only) for tensor, dtypes in sorted(found.items()) if len(dtypes) == 1 and (only := min(dtypes)))

    def _narrower(self, root: int, dtype: Any) -> str | None:
        """The name of a floating dtype that takes fewer bytes than the tensor's own, which is floating too."""
        own = self.program.avals[root].dtype
        are_floats = jnp.issubdtype(own, jnp.floating) and jnp.issubdtype(dtype, jnp.floating)
        return str(dtype) if are_floats and dtype.itemsize < own.itemsize else None

    def local_dims(self, task: Task, eqn: FlatEqn) -> EqnDims:
        """Op dims, or NOT_SPLIT, of the operands and results of one of a task's equations, in their own shapes."""
        labelled = self.dims_of[eqn.key]
        if eqn.key == task.equations.heavy:
            return labelled
        of_operator = self.places[task.equations.keys[0]]

        def dims(atom: object, as_labelled: tuple[int, ...]) -> tuple[int, ...]:
            if not isinstance(atom, int):
                return (NOT_SPLIT,) * len(as_labelled)
            if self.values.of(atom).root in self.generated:  # made on each device, as the equation wants it
                return as_labelled
            return tuple(of_operator.of(self.values.node(atom, d)) for d in range(len(as_labelled)))

        return EqnDims(tuple(map(dims, eqn.inputs, labelled.operands)), tuple(map(dims, eqn.outputs, labelled.results)))

    def _access(self, atom: int, dims: OperatorDims, reduced: tuple[int, ...] = ()) -> Access:
        alias = self.values.tensor(atom)
        rank = len(self.program.avals[alias.root].shape)
        nodes = [self.values.node(atom, d + alias.shift) if d + alias.shift >= 0 else None for d in range(rank)]
        split = tuple(map(dims.of, nodes))
        return Access(self.tensors.index(alias.root), split, reduced, -1, self._trips(atom, alias.shift), self._slices(alias))

    def _heavy_access(
        self, eqn: FlatEqn, k: int, dims: OperatorDims, *, is_result: bool, reduced: tuple[int, ...] = ()
    ) -> Access:  # fmt: skip
        atom = eqn.outputs[k] if is_result else eqn.inputs[k]
        labs = (self.labels[eqn].outputs if is_result else self.labels[eqn].inputs)[k]
        alias = self.values.tensor(atom)
        split, of_labels = [NOT_SPLIT] * len(self.program.avals[alias.root].shape), dims.of_labels(eqn)
        for d, lab in enumerate(labs):
            if lab in of_labels and d >= alias.shift:
                split[d - alias.shift] = of_labels[lab]
        trips, slices = self._trips(atom, alias.shift), self._slices(alias)
        return Access(self.tensors.index(alias.root), tuple(split), reduced, k, trips, slices)

    def _trips(self, atom: Atom, shift: int) -> int:
        """Of how many trips a value stacks what a loop makes."""
        return math.prod(self.program.aval(atom).shape[: max(shift, 0)])

    def _slices(self, alias: Alias) -> int:
        """Into how many slices loops take an argument apart that is read."""
        return math.prod(self.program.avals[alias.root].shape[: max(-alias.shift, 0)])

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
                    found[self.tensors.index(atom)] = None
                elif e is unit.heavy and atom != result:
                    found[HEAVY_RESULT] = None
                elif atom == result or not e.name.startswith("reduce"):
                    return None
                continue
            if e is None:
                root = self.values.tensor(atom).root
                if root not in self.generated and math.prod(self.program.avals[root].shape) > 1:
                    found[self.tensors.index(root)] = None
                continue
            for a in e.read:
                root = self.values.of(a).root
                if root not in seen:
                    seen.add(root)
                    queue.append(root)
        return tuple(found)

    def _partial_results(
        self, unit: Unit, dims: OperatorDims, results: list[int], sums: list[InnerSum]
    ) -> dict[int, tuple[int, ...]]:  # fmt: skip
        """Op dims over which each result is a sum of parts; sums whose value is used inside the unit go to `sums`."""
        readers: dict[int, list[FlatEqn]] = {}
        for e in unit.eqns:
            for root in self.values.reads[e.key]:
                readers.setdefault(root, []).append(e)
        partial: dict[int, tuple[int, ...]] = {}
        for e in unit.eqns:
            found = self.labels[e]
            if e.name == "cond":  # whose branches sum up over devices themselves
                sums += _inner_sums(found, dims.of_labels(e))
                continue
            kept = {BLOCKED, *(lab for labs in found.outputs for lab in labs)}
            gone = {lab for labs in found.inputs for lab in labs if lab not in kept}
            split = dims.of_labels(e)
            reduced = tuple(dict.fromkeys(split[lab] for lab in sorted(gone) if lab in split))
            if not reduced or e.name == "shard_map":  # which sums over devices itself
                continue
            out = e.outputs[0]
            # Follow transposes and casts of the sum: it stays partial up to the unit's result.
            while out not in results and len(readers.get(out, [])) == 1 and self._is_linear(readers[out][0]):
                out = readers[out][0].outputs[0]
            if out in results and not readers.get(out) and (unit.heavy is None or len(results) == 1):
                partial[out] = reduced
                self.partial_of[e.key] = out
                self.tensors.sum_as(self.values.of(out).root, self.program.aval(e.outputs[0]).dtype)
            else:
                own = {split[lab] for lab in found.outputs[0] if lab in split}
                sums.append(InnerSum(bytes_of(self.program.avals[e.outputs[0]]), tuple(sorted(own)), reduced))
        return partial

    def _is_linear(self, eqn: FlatEqn) -> bool:
        return is_relayout(eqn, self.program) or eqn.key in self.own

    def _halos(self, unit: Unit, op: int) -> tuple[Halo, ...]:
        """Dims of the operator with equal halos stand together: they are one item of the simulation.

        The gradient of the kernel reads the image with the same halos as the convolution did: they are sent once.
        """
        eqn = unit.heavy
        if eqn is None or eqn.name != "conv_general_dilated":
            return ()
        image, kernel = (self.program.aval(a) for a in eqn.inputs)
        dims, spatial = self.dims_of[eqn.key].operands[0], eqn.params["dimension_numbers"].lhs_spec[2:]
        results = conv_results(eqn, image.shape, kernel.shape)
        edges: dict[float, list[int]] = {}
        for k, (d, m) in enumerate(zip(spatial, results, strict=True)):
            w = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[2 + k]]
            rows = border_rows(eqn, k, image.shape[d], w, m)[:2]
            key = (self.values.of(eqn.inputs[0]).root, op, unit.scope, d, rows)
            if sum(rows) and dims[d] != NOT_SPLIT and key not in self.with_halos:
                self.with_halos.add(key)
                size = math.prod(image.shape) * image.dtype.itemsize / image.shape[d] * sum(rows)
                edges.setdefault(size, []).append(dims[d])
        return tuple(
            Halo(float(size), tuple(sorted({*dims} - {*along, NOT_SPLIT})), tuple(along)) for size, along in edges.items()
        )

    def _work(self, unit: Unit, dims: OperatorDims) -> tuple[Work, ...]:
        total: dict[tuple[int, ...], float] = {}
        for e in unit.eqns:
            flops = flops_of(e, self.program)
            if flops or e is unit.heavy:
                key = tuple(sorted(set(dims.of_labels(e).values())))
                total[key] = total.get(key, 0.0) + flops
        return tuple(Work(f, d) for d, f in sorted(total.items()))

    def structure(self, eqns: list[FlatEqn]) -> str:
        alias = self.values.alias
        return structure_of(eqns, self.program.aval, lambda a: alias[a].root)


def _inner_sums(labels: Labels, split: Mapping[int, int]) -> Iterator[InnerSum]:
    """What an equation sums up inside, by the op dims of its labels."""
    for size_bytes, own, reduced in labels.sums:
        if over := tuple(dict.fromkeys(split[lab] for lab in reduced if lab in split)):
            yield InnerSum(size_bytes, tuple(sorted({split[lab] for lab in own if lab in split})), over)
