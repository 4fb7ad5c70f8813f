"""What the user fixed: `fixed={path: spec}` and Flax's partitioning metadata, as layouts by argument path.

Constraints inside the step (`with_sharding_constraint`) are operators of the graph; see strategy/space.py.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from soapjax.errors import Problem, SoapjaxError
from soapjax.graph.rules.light_rules import user_spec
from soapjax.graph.trace.tracing import TracedStep, leaf_paths
from soapjax.strategy.layout import Spec
from soapjax.strategy.plan import format_spec, parse_spec
from soapjax.topology import FactorMesh

log = logging.getLogger("soapjax")


def user_layouts(
    args: Sequence[Any], in_paths: Sequence[str], fixed: Mapping[str, Any] | None, *, axis_names: Sequence[str],
    rules: Sequence[tuple[str, Any]] | None = None,
) -> dict[str, Spec]:  # fmt: skip
    """Specs by argument path.

    A path that names a subtree fixes all leaves in it: each to the one spec that it is given, or to
    its own where a pytree of shardings is given, such as a part of another step's `.shardings()`.

    Args:
      axis_names: those of the plan's mesh. Names in Flax's metadata that are none of them are logical ones ("embed", "mlp").
      rules: what logical names map to, as Flax's `logical_axis_rules`. Others are ignored, with one note.
    Raises: SoapjaxError naming every entry that is no spec, and every path that names nothing.
    """
    layouts = _mapped(_flax_metadata(args, in_paths), axis_names, rules)
    problems = []
    for path, value in (fixed or {}).items():
        specs = _specs(path, value)
        if specs is None:
            expected = "a PartitionSpec, a NamedSharding, axis names per dim, a plan file's spec, or a pytree of shardings"
            problems.append(Problem(f"fixed[{path!r}]", repr(value), expected, "write P('d0', None)"))
        for inner, spec in (specs or {}).items():
            leaves = [p for p in in_paths if p == inner or p.startswith(inner + ".")]
            layouts.update(dict.fromkeys(leaves, spec))
            if not leaves:
                close = [p for p in in_paths if inner.split(".")[-1] in p][:3] or list(in_paths[:3])
                problems.append(Problem(f"fixed[{inner!r}]", "no such argument", "a path of the step's arguments", f"e.g. {close}"))
    if problems:
        raise SoapjaxError(problems)
    return layouts


def layouts_of_rows(step: TracedStep, layouts: Mapping[str, Spec]) -> dict[str, Spec]:
    """Specs by the paths of a step whose stacked state is taken apart into its rows, from those by its arguments' own paths.

    Raises: SoapjaxError naming every stack that is fixed to be split between its rows.
    """
    found, problems, paths = {}, [], iter(step.in_paths)
    for path, n in zip(step.leaf_paths, step.program.rows[0], strict=True):
        mine = list(itertools.islice(paths, n))
        spec = layouts.get(path)
        if spec is None:
            continue
        if n > 1 and any(spec[:1]):
            value, expected = f"its first dim split over {' and '.join(spec[0])}", "layers that are whole: each is a stage's"
            problems.append(Problem(f"layout of {path}", value, expected, "split another dim, or plan without micro-batches"))
        found.update(dict.fromkeys(mine, spec[n > 1 :]))
    if problems:
        raise SoapjaxError(problems)
    return found


def check_constraints(step: TracedStep, mesh: FactorMesh) -> None:
    """Axes that the user's own constraints name must be axes of the plan's mesh, or of a mesh of products of these in order.

    Raises: SoapjaxError naming those that are not, and the line of the constraint.
    """
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    problems: dict[Problem, None] = {}
    expected = f"axes of the plan's mesh {sizes}, or a mesh that has products of them in this order"
    remedy = "use such a mesh, or pass strip_constraints=True (--strip-constraints) to leave the step's constraints out"
    for eqn, _ in step.program.walk():
        constraint = user_spec(eqn)
        line = f" at {eqn.source}" if constraint is not None and eqn.source else ""
        known = {} if constraint is None else mesh.axes_of(tuple(constraint.mesh.shape.items()))
        for d, names in enumerate(() if constraint is None else constraint.spec):
            place = f"sharding constraint{line}, dim {d}"
            for a in names if isinstance(names, tuple) else (names,):
                n = constraint.mesh.shape.get(a) if isinstance(a, str) else None
                if n is not None and a not in known:
                    problems[Problem(place, f"{a!r} of size {n}", expected, remedy)] = None
    if problems:
        raise SoapjaxError(problems)


def logical_axes(args: Sequence[Any], in_paths: Sequence[str], axis_names: Sequence[str]) -> dict[str, str]:
    """The logical names in Flax's metadata by argument path, "-" for a dim without one; paths of mesh axes alone are left out."""
    named = _flax_metadata(args, in_paths)
    return {p: format_spec(s) for p, s in named.items() if any(n not in axis_names for names in s for n in names)}


def _mapped(named: dict[str, Spec], axis_names: Sequence[str], rules: Sequence[tuple[str, Any]] | None) -> dict[str, Spec]:
    """Names of Flax's metadata as axes of the mesh; a leaf of which nothing maps to any is not fixed."""
    layouts: dict[str, Spec] = {}
    unknown: dict[str, None] = {}
    problems = []
    for path, spec in named.items():
        used: set[str] = set()
        found = []
        for names in spec:
            axes: list[str] = []
            for name in names:
                if name in axis_names:
                    axes.append(name)
                    continue
                target = _rule(name, rules or (), used | set(axes))
                if target is None:
                    unknown[name] = None
                elif wrong := [a for a in target if a not in axis_names]:
                    value, expected = f"{wrong} for {name!r}", f"axes of the plan's mesh {tuple(axis_names)}"
                    problems.append(Problem("logical_axis_rules", value, expected, "use these names"))
                else:
                    axes += target
            used.update(axes)
            found.append(tuple(axes))
        if any(found):
            layouts[path] = tuple(found)
    if problems:
        raise SoapjaxError(dict.fromkeys(problems))
    if unknown:
        log.info(
            "the axis names %s in Flax's metadata are none of the mesh %s and are ignored: the plan decides "
            "(logical_axis_rules= maps them)", ", ".join(map(repr, unknown)), tuple(axis_names),
        )  # fmt: skip
    return layouts


def _rule(name: str, rules: Sequence[tuple[str, Any]], used: set[str]) -> tuple[str, ...] | None:
    """The axes of the first rule for a name whose axes are free, () where a rule says None; None where there is no such rule."""
    for logical, target in rules:
        axes = () if target is None else (target,) if isinstance(target, str) else tuple(target)
        if logical == name and not used.intersection(axes):
            return axes
    return None


def _specs(path: str, value: Any) -> dict[str, Spec] | None:
    """`value` as specs by path: one, or one per leaf of a pytree of shardings."""
    spec = _spec(value)
    if spec is not None:
        return {path: spec}
    kinds = (jax.sharding.NamedSharding, jax.sharding.PartitionSpec)
    leaves = jax.tree_util.tree_leaves(value, is_leaf=lambda x: isinstance(x, kinds))
    if not leaves or not all(isinstance(x, kinds) for x in leaves):
        return None
    specs = dict(zip(leaf_paths(value, path), map(_spec, leaves), strict=True))
    return None if None in specs.values() else specs


def _spec(value: Any) -> Spec | None:
    if isinstance(value, str):
        return parse_spec(value)
    if isinstance(value, jax.sharding.NamedSharding):
        value = value.spec
    if not isinstance(value, jax.sharding.PartitionSpec | tuple | list):
        return None
    parts = []
    for part in value:
        names = () if part is None else (part,) if isinstance(part, str) else part
        if not isinstance(names, tuple | list) or not all(isinstance(n, str) for n in names):
            return None
        parts.append(tuple(names))
    return tuple(parts)


def _flax_metadata(args: Sequence[Any], in_paths: Sequence[str]) -> dict[str, Spec]:
    """Specs of `nn.Partitioned` boxes (linen) and of `sharding` metadata (nnx); all None means not fixed."""

    def names_of(x: Any) -> tuple[Any, ...] | None:
        names = getattr(x, "names", None) if hasattr(type(x), "unbox") else None  # of its class: some states answer any name
        if names is None and hasattr(type(x), "get_metadata"):
            metadata = x.get_metadata()
            names = metadata.get("sharding_names") or metadata.get("sharding") or metadata.get("out_sharding")
        return tuple(names) if isinstance(names, tuple | list) else None

    layouts: dict[str, Spec] = {}
    position = 0
    for a in args:
        for box in jax.tree_util.tree_leaves(a, is_leaf=lambda x: names_of(x) is not None):
            count = len(jax.tree_util.tree_leaves(box))
            names = names_of(box)
            if names is not None and count == 1 and any(n is not None for n in names):
                layouts[in_paths[position]] = tuple(() if n is None else (n,) if isinstance(n, str) else tuple(n) for n in names)
            position += count
    return layouts
