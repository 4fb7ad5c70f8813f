"""The SOAP space of a graph on a mesh: what the search may choose, and nothing that cannot run.

An axis may split any dim that its size divides; together the axes on a dim must
divide it. Pins (the O dimension) are offered on request: the paper's whole space.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from soapjax.errors import Problem, SoapjaxError
from soapjax.graph.operators import OperatorGraph
from soapjax.strategy.configs import (
    FIRST_PIN,
    MOST_AXES,
    MOST_PLACES,
    PIN,
    REPLICATE,
    Storage,
    Strategy,
    replicated,
    stage_storages,
    storage_options,
)
from soapjax.strategy.layout import divides, layout_of
from soapjax.topology.mesh import FactorMesh

NOT_FIXED = -9
MOST_DIMS = 127  # of an operator that an axis may split: a config value is an int8, and values + 1 are used as rows
SPACES = ("soap", "paper")  # what executors run; the paper's whole space, with operators on parts of the devices


def has_pins(space: str) -> bool:
    """Whether the space of that name offers pins.

    Raises: SoapjaxError listing the valid names.
    """
    if space not in SPACES:
        raise SoapjaxError(Problem("space", repr(space), " or ".join(SPACES), "choose one of these"))
    return space == "paper"


@dataclasses.dataclass(frozen=True, eq=False)
class SearchSpace:
    graph: OperatorGraph
    mesh: FactorMesh
    storages: tuple[Storage, ...]
    divisors: np.ndarray  # int32 [N, K]: what a degree on each dim must divide; 1 where there is no such dim
    allowed: np.ndarray  # bool [N, A, K + 1]: whether axis a may take value v - 1 (-1: replicate)
    owns_parameters: np.ndarray  # bool [N]
    fixed_layouts: dict[int, np.ndarray]  # input leaf -> layout that the user fixed, int8 [A]
    offers_pins: bool = False  # the paper's whole space: an operator may run on a part of the devices

    @property
    def groups(self) -> np.ndarray:
        """int8 [G, A]: coordinates of the devices that pins can tell apart; one stands for all where none are offered."""
        if not self.offers_pins:
            return np.zeros((1, self.num_axes), np.int8)
        return np.array([self.mesh.device_coordinates(i) for i in range(self.mesh.num_devices)], np.int8)

    @property
    def num_axes(self) -> int:
        return len(self.mesh.axis_names)

    @property
    def num_assignments(self) -> np.ndarray:
        """float64 [N]: axis assignments of each operator, before degrees are checked; without pins and storage."""
        return self.allowed.sum(axis=2, dtype=float).prod(axis=1)

    @functools.cached_property
    def alike(self) -> list[int]:
        """Of every operator the first that has the same dims and may choose the same on each."""
        first: dict[tuple[object, ...], int] = {}
        choices = zip(self.graph.operators, self.allowed, self.divisors, strict=True)
        return [first.setdefault((op.dims, a.tobytes(), d.tobytes()), n) for n, (op, a, d) in enumerate(choices)]

    def is_valid(self, strategy: Strategy) -> bool:
        return not self.violations(strategy)

    def _suspects(self, strategy: Strategy) -> np.ndarray:
        """Operators that may violate the space: all that do, and those with pins."""
        axes, sizes = strategy.axes, np.array(self.mesh.axis_sizes)
        is_known = (axes >= REPLICATE) & (axes < self.allowed.shape[2] - 1)
        n, a = np.indices(axes.shape)
        is_allowed = is_known & self.allowed[n, a, np.where(is_known, axes, REPLICATE) + 1]
        degrees = np.where(axes[:, :, None] == np.arange(self.divisors.shape[1]), sizes[:, None], 1).prod(axis=1)
        is_stored = (strategy.storage >= 0) & (strategy.storage < len(self.storages))
        return np.flatnonzero(~(is_allowed.all(axis=1) & (self.divisors % degrees == 0).all(axis=1) & is_stored))

    def violations(self, strategy: Strategy) -> list[Problem]:
        """Everything about a strategy that this space does not offer."""
        problems = []
        for n in self._suspects(strategy).tolist():
            op = self.graph.operators[n]
            for a, value in enumerate(strategy.axes[n]):
                name = self.mesh.axis_names[a]
                if value <= FIRST_PIN and self.may_pin(n) and FIRST_PIN - value < self.mesh.axis_sizes[a]:
                    continue
                if not (-1 <= value < self.allowed.shape[2] - 1 and self.allowed[n, a, value + 1]):
                    shown = op.dims[value].name if 0 <= value < len(op.dims) else str(int(value))
                    pins = [f"pin({i})" for i in range(self.mesh.axis_sizes[a]) if self.may_pin(n)]
                    choices = ["replicate", *(d.name for k, d in enumerate(op.dims) if self.allowed[n, a, k + 1]), *pins]
                    problems.append(Problem(f"operators.{op.name}.axes.{name}", shown, " or ".join(choices), "choose one of these"))
            for k, dim in enumerate(op.dims):
                split = int(np.prod([s for v, s in zip(strategy.axes[n], self.mesh.axis_sizes, strict=True) if v == k]))
                if dim.divisor % split:
                    problems.append(
                        Problem(
                            f"operators.{op.name}.{dim.name}", f"degree {split}", f"a divisor of {dim.divisor}",
                            "assign fewer axes to this dim, or replicate",
                        )
                    )  # fmt: skip
            if not 0 <= strategy.storage[n] < len(self.storages):
                problems.append(
                    Problem(f"operators.{op.name}.storage", str(strategy.storage[n]), "a storage option", "choose 'as used'")
                )
        return problems

    def may_pin(self, n: int) -> bool:
        """Whether operator `n` may run on a part of the devices; one that the user constrained may not."""
        return self.offers_pins and self.graph.operators[n].fixed is None

    def configs(self, n: int) -> Iterator[tuple[int, ...]]:
        """All valid axis assignments of operator `n`, without storage."""
        for values in itertools.product(*self.choices(n)):
            if self.divides(n, values):
                yield values

    @functools.cached_property
    def _choices(self) -> list[list[list[int]]]:
        """By operator."""
        return [self.choices(n) for n in range(self.graph.num_operators)]

    def choices(self, n: int) -> list[list[int]]:
        """Per axis what operator `n` may do with it, whatever it does with the others."""
        per_axis = [[v - 1 for v in range(self.allowed.shape[2]) if self.allowed[n, a, v]] for a in range(self.num_axes)]
        if self.may_pin(n):
            for values, size in zip(per_axis, self.mesh.axis_sizes, strict=True):
                values += [PIN(i) for i in range(size) if size > 1]
        return per_axis

    def nearest(self, n: int, axes: Sequence[int], storage: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """The other valid configs (axes, storage) of operator `n`; those that differ in fewest choices first."""
        choices = self.choices(n)
        choices.append(list(range(len(self.storages))) if self.owns_parameters[n] else [storage])
        now = [*map(int, axes), int(storage)]
        for count in range(1, len(now) + 1):
            for places in itertools.combinations(range(len(now)), count):
                for values in itertools.product(*([v for v in choices[p] if v != now[p]] for p in places)):
                    found = [*now]
                    for p, v in zip(places, values, strict=True):
                        found[p] = v
                    if self.divides(n, found[:-1]):
                        yield tuple(found[:-1]), found[-1]

    def divides(self, n: int, values: Sequence[int]) -> bool:
        """Whether the degrees of an axis assignment of operator `n` divide its dims."""
        split: dict[int, int] = {}
        for v, s in zip(values, self.mesh.axis_sizes, strict=True):
            if v >= 0:
                split[v] = split.get(v, 1) * s
        return all(self.divisors[n, k] % d == 0 for k, d in split.items())

    def random(self, rng: np.random.Generator) -> Strategy:
        """A valid strategy: axis by axis a uniform choice among what still divides."""
        start = replicated(self.graph, self.mesh)
        for n, left in enumerate(self.divisors.tolist()):  # what of each dim is not split yet
            per_axis = self._choices[n]
            for a in rng.permutation(self.num_axes).tolist():
                size = self.mesh.axis_sizes[a]
                choices = [v for v in per_axis[a] if v < 0 or left[v] % size == 0]
                start.axes[n, a] = value = choices[rng.integers(len(choices))]
                if value >= 0:
                    left[value] //= size
            if self.owns_parameters[n]:
                start.storage[n] = rng.integers(len(self.storages))
        return start


def search_space(
    graph: OperatorGraph, mesh: FactorMesh, *, fixed: Mapping[str, Sequence[Sequence[str]]] | None = None, pins: bool = False,
    storages: tuple[Storage, ...] | None = None,
) -> SearchSpace:  # fmt: skip
    """The space of `graph` on `mesh`; `fixed` maps argument paths to axis names per dim.

    `pins` offers the paper's whole space: also operators on parts of the devices. `storages` are those of one program by default;
    with pins those of several.

    Raises: SoapjaxError naming every fixed path that is unknown or whose spec does not fit, every constraint of the
    user's own code that this mesh cannot express, and a mesh of too many axes, or of one that is too long for pins.
    """
    n, k = graph.num_operators, max((len(o.dims) for o in graph.operators), default=0)
    divisors = np.ones((n, max(k, 1)), np.int32)
    allowed = np.zeros((n, len(mesh.axis_names), max(k, 1) + 1), bool)
    allowed[:, :, 0] = True
    problems: list[Problem] = []
    for i, op in enumerate(graph.operators):
        for j, dim in enumerate(op.dims):
            divisors[i, j] = dim.divisor
            for a, size in enumerate(mesh.axis_sizes):
                allowed[i, a, j + 1] = dim.divisor % size == 0 and size > 1 and j < MOST_DIMS
        if op.fixed is not None:
            problems += _fix_operator(graph, mesh, i, allowed)
    owns = np.array([bool(o.parameters) for o in graph.operators])
    layouts, misfits = fixed_layouts(graph, mesh, fixed or {})
    problems += misfits.values()
    if len(mesh.axis_sizes) > MOST_AXES:
        expected = f"at most {MOST_AXES} prime factors of the sizes of all levels"
        problems.append(Problem("topology", f"{mesh.num_devices} devices", expected, "plan for a part of the devices"))
    if pins and (longest := max(mesh.axis_sizes, default=1)) > MOST_PLACES:
        expected = f"levels whose sizes have no prime factor above {MOST_PLACES}"
        problems.append(Problem("space", f"'paper' on an axis of {longest}", expected, "use the space soap, or another topology"))
    if problems:
        raise SoapjaxError(problems)
    if storages is None:
        adds_up = any(chain.follows_storage for chain in graph.accumulations)
        storages = (stage_storages if pins else storage_options)(mesh, adds_up=adds_up)
    return SearchSpace(
        graph=graph, mesh=mesh, storages=storages, divisors=divisors, allowed=allowed, owns_parameters=owns, fixed_layouts=layouts,
        offers_pins=pins,
    )  # fmt: skip


def _fix_operator(graph: OperatorGraph, mesh: FactorMesh, i: int, allowed: np.ndarray) -> list[Problem]:
    """Leaves a user's constraint exactly one config."""
    op = graph.operators[i]
    task = graph.tasks[op.tasks[0]]
    access = (*task.writes, *task.reads)[0]
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    own = mesh.axes_of(op.fixed_mesh)
    problems = []
    allowed[i, :, 1:] = False
    for d, theirs in enumerate(op.fixed):
        place = f"sharding constraint at {op.name}, dim {d}"
        unknown = [name for name in theirs if name not in own]
        if unknown and op.kind == "shard_map":
            continue  # it runs on its own mesh all the same, on whole operands
        names = [name for axis in theirs for name in own.get(axis, ())]
        dim = d if op.kind == "shard_map" else access.dims[d]
        split = math.prod(sizes.get(name, 1) for name in names)
        if unknown:
            expected = f"axes of the plan's mesh {mesh.axis_names}, or a mesh that has products of them in this order"
            remedy = "name these axes in the constraint, or pass strip_constraints=True (--strip-constraints)"
            problems.append(Problem(place, repr(unknown), expected, remedy))
        elif split > 1 and (dim < 0 or op.dims[dim].divisor % split):
            whole = 1 if dim < 0 else op.dims[dim].divisor
            value = f"{names}, a split into {split}"
            problems.append(Problem(place, value, f"axes whose product divides {whole}", "drop axes from the constraint"))
        else:
            for name in names if split > 1 else ():
                allowed[i, mesh.axis_names.index(name), :] = False
                allowed[i, mesh.axis_names.index(name), dim + 1] = True
    return problems


def fixed_layouts(
    graph: OperatorGraph, mesh: FactorMesh, fixed: Mapping[str, Sequence[Sequence[str]]]
) -> tuple[dict[int, np.ndarray], dict[str, Problem]]:  # fmt: skip
    """Layouts by input leaf, and by path what cannot be on this mesh.

    A parameter and its optimizer state have one layout: fixing any of them fixes the parameter.
    """
    layouts: dict[int, np.ndarray] = {}
    misfits: dict[str, Problem] = {}
    shapes = {t.input_leaf: t.shape for t in graph.tensors if t.input_leaf >= 0}
    parameter_of = {leaf: p for p in graph.parameters for leaf in p.state_leaves}
    shapes |= {leaf: graph.tensors[p.tensor].shape for leaf, p in parameter_of.items()}
    fixed_by: dict[int, str] = {}
    for path, spec in fixed.items():
        place, shown = f"fixed[{path!r}]", repr(tuple(spec))
        if path not in graph.in_paths:
            close = [p for p in graph.in_paths if path.split(".")[-1] in p][:3]
            misfits[path] = Problem(place, "an unknown argument path", "a path of the step's arguments", f"e.g. {close}")
            continue
        leaf = graph.in_paths.index(path)
        unknown = [a for names in spec for a in names if a not in mesh.axis_names]
        if unknown:
            misfits[path] = Problem(place, repr(unknown), f"axes of the plan's mesh {mesh.axis_names}", "use these names")
            continue
        layout = np.array(layout_of(spec, mesh.axis_names), np.int8)
        if leaf not in shapes:  # no operator reads it: it stays as the user wants it
            layouts[leaf] = layout
            continue
        twice = len({a for names in spec for a in names}) < sum(map(len, spec))
        if twice or len(spec) > len(shapes[leaf]) or not divides(layout.tolist(), shapes[leaf], mesh.axis_sizes):
            expected = f"a spec that divides shape {shapes[leaf]}"
            misfits[path] = Problem(place, shown, expected, "use fewer axes, each once")
            continue
        owner = parameter_of[leaf].leaf if leaf in parameter_of else leaf
        if (layouts.setdefault(owner, layout) != layout).any():
            expected = f"the layout that {fixed_by[owner]!r} has: a parameter and its optimizer state share one"
            misfits[path] = Problem(place, shown, expected, "fix one of them, or both alike")
        fixed_by.setdefault(owner, path)
    return layouts, misfits
