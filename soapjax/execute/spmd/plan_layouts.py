"""Where a plan puts the tensors of a step: the layout in which every task reads them, and in which they are kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from soapjax.execute.spmd.on_blocks import axes_of, partition_spec
from soapjax.execute.spmd.resharder import reshard
from soapjax.graph.operators import NOT_SPLIT, Accumulation, Operator, OperatorGraph, Task
from soapjax.graph.passes.build import Binding
from soapjax.graph.trace.program import FlatEqn, Program
from soapjax.strategy.configs import StorageName
from soapjax.strategy.layout import Spec
from soapjax.strategy.plan import MeshPlan, TaskPart, parse_spec


def split_of(plan: MeshPlan, operator: Operator, dims: Iterable[int]) -> Spec:
    """The mesh axes over which a plan splits dims of an operator, in mesh order."""
    axes = plan.operators[operator.name].axes
    names = (None if d == NOT_SPLIT else operator.dims[d].name for d in dims)
    return tuple(tuple(a for a in plan.mesh.axis_names if axes.get(a, "") == name) for name in names)


def axes_on(plan: MeshPlan, operator: Operator, dims: Iterable[int]) -> tuple[str, ...]:
    """All of these axes, in mesh order."""
    found = axes_of(split_of(plan, operator, dims))
    return tuple(a for a in plan.mesh.axis_names if a in found)


class PlanLayouts:
    """Layouts by tensor and task, and reshards between them.

    Args:
      parts: every task with the plan's specs of it.
      unplaced: tensors that are kept as they are made, whatever the plan says.
    """

    def __init__(
        self, plan: MeshPlan, program: Program, graph: OperatorGraph, binding: Binding, mesh: Mesh,
        parts: Iterable[tuple[Task, TaskPart]], *, unplaced: Set[int],
    ):  # fmt: skip
        self.program, self.graph, self.binding, self.mesh = program, graph, binding, mesh
        self.values = binding.values
        self._plan = plan
        self.writer = {a.tensor: (k, a) for k, task in enumerate(graph.tasks) for a in task.writes}  # tensor -> task, its result
        # Per task: tensor -> spec as used (by operand position for heavy equations), tensor -> spec as kept.
        self.used: list[dict[tuple[int, int], Spec]] = []
        self.kept: list[dict[int, Spec]] = []
        for task, part in parts:
            self.used.append({(a.tensor, a.operand): parse_spec(s) for a, s in zip(task.reads, part.operands, strict=True)})
            kept = {a.tensor: parse_spec(s) for a, s in zip(task.writes, part.results, strict=True)}
            self.kept.append({t: s for t, s in kept.items() if t not in unplaced})
        # The layout in which a tensor is kept, an argument's too.
        self.home = {
            i: parse_spec(plan.arguments[graph.in_paths[t.input_leaf]]) for i, t in enumerate(graph.tensors) if t.input_leaf >= 0
        }
        self.home |= {t: s for kept in self.kept for t, s in kept.items()}

    def spec_from(self, operator: int, dims: tuple[int, ...]) -> Spec:
        """The spec of an operand from its operator's config."""
        return split_of(self._plan, self.graph.operators[operator], dims)

    def made_as(self, tensor: int) -> tuple[Spec, tuple[str, ...]]:
        """How a tensor lies where it is made, and the axes over which it is a partial sum there."""
        k, access = self.writer[tensor]
        operator = self.graph.operators[self.graph.tasks[k].operator]
        return split_of(self._plan, operator, access.dims), axes_on(self._plan, operator, access.reduced)

    def summed_as(self, chain: Accumulation) -> tuple[Spec, tuple[str, ...]]:
        """How the summands of a gradient are kept, and the axes over which they stay partial sums until the last is added."""
        owner = self.graph.operators[self.graph.parameters[chain.parameter].owner]
        if chain.follows_storage and StorageName.parse(self._plan.operators[owner.name].storage).is_scattering:
            return self.home[chain.total], ()
        return self.made_as(chain.layout_of)

    def left(self, parameter: int, again: tuple[str, ...]) -> Spec:
        """What the forward pass leaves of a parameter that is gathered `again` over some axes: a slice of what it reads."""
        read = next(spec for used in self.used for (tensor, _), spec in used.items() if tensor == parameter)
        place = {name: i for i, name in enumerate(self._plan.mesh.axis_names)}
        found = []
        for stored, used in zip(self.home[parameter], read, strict=True):
            last = max((place[n] for n in used), default=-1)
            found.append(tuple(n for n in stored if n in used or (n in again and place[n] > last)))
        return tuple(found)

    def shifted(self, atom: int, spec: Spec) -> Spec:
        """A tensor's spec as that of a value that stacks it, or is one trip's slice of it."""
        shift = self.values.tensor(atom).shift
        return ((),) * shift + spec if shift > 0 else spec[-shift:]

    def resolved(self, k: int, eqn: FlatEqn, raw: Spec, dims: tuple[int, ...], partial: set[str]) -> Spec:
        """How a result is kept: `raw` of op dims `dims`, and those of the axes in `partial` over which it is scattered."""
        root = self.binding.partial_of.get(eqn.key, eqn.outputs[0])
        tensor = self.binding.tensor_of.get(root, -1)
        home = self.kept[k].get(tensor)
        if home is None:
            return raw
        (access,) = (a for a in self.graph.tasks[k].writes if a.tensor == tensor)
        made = self.spec_from(self.graph.tasks[k].operator, access.dims)
        found = [list(names) for names in raw]
        shape, sizes = self.program.avals[eqn.outputs[0]].shape, self.mesh.shape
        for d, names in enumerate(home):
            where = d if root == eqn.outputs[0] else dims.index(access.dims[d]) if access.dims[d] in dims else -1
            for n in (n for n in names if where >= 0 and n in partial and n not in made[d]):
                if shape[where] % math.prod(sizes[m] for m in (*found[where], n)) == 0:
                    found[where].append(n)
        return tuple(map(tuple, found))

    def constrain(self, x: Any, spec: Spec) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, partition_spec(spec)))

    def resharded(self, atom: int, x: Any, source: Spec | None, target: Spec) -> Any:
        """A value from one layout to another, by the steps that the plan's prediction counts."""
        sizes = self.mesh.shape
        shape = x.shape
        # A value from another program, on other devices, comes in a layout of its own.
        is_known = source is not None and all(a in sizes for spec in (source, target) for names in spec for a in names)
        is_even = is_known and all(
            n % math.prod(sizes[a] for a in names) == 0
            for spec in (source, target) for n, names in zip(shape, spec, strict=True)
        )
        if not is_even or source == target or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
            return self.constrain(x, target)
        return reshard(x, source, target, self.mesh)
