"""What the user fixed: `fixed={path: spec}` and Flax's partitioning metadata, as layouts by argument path.

Constraints inside the step (`with_sharding_constraint`) are operators of the graph; see strategy/space.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from soapjax.errors import Problem, SoapjaxError
from soapjax.graph.rules import user_spec
from soapjax.graph.trace import TracedStep, leaf_paths
from soapjax.strategy.layout import Spec
from soapjax.strategy.plan import parse_spec
from soapjax.topology import FactorMesh


def user_layouts(args: Sequence[Any], in_paths: Sequence[str], fixed: Mapping[str, Any] | None) -> dict[str, Spec]:
    """Specs by argument path.

    A path that names a subtree fixes all leaves in it: each to the one spec that it is given, or to
    its own where a pytree of shardings is given, such as a part of another step's `.shardings()`.

    Raises: SoapjaxError naming every entry that is no spec, and every path that names nothing.
    """
    layouts = _flax_metadata(args, in_paths)
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


def check_constraints(step: TracedStep, mesh: FactorMesh) -> None:
    """Axes that the user's own constraints and the plan's mesh both name must have one size.

    Raises: SoapjaxError naming those that have not. (Axes that the plan's mesh lacks are named by the space.)
    """
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    constraints = [s for eqn, _ in step.program.walk() if (s := user_spec(eqn)) is not None]
    used = {(a, s.mesh.shape[a]) for s in constraints for a in jax.tree.leaves(tuple(s.spec)) if a in s.mesh.axis_names}
    problems = [
        Problem(f"sharding constraint over {a!r}", f"size {n}", f"size {sizes[a]}, the plan's", f"use a mesh of {sizes}")
        for a, n in sorted(used)
        if sizes.get(a, n) != n
    ]
    if problems:
        raise SoapjaxError(problems)


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
        names = getattr(x, "names", None) if hasattr(x, "unbox") else None
        if names is None and hasattr(x, "get_metadata"):
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
