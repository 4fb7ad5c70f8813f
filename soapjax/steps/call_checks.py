"""What is looked at of a call's arguments before anything is planned for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.transfers.arrivals import require_arrays
from soapjax.graph.trace.tracing import check_leaves, leaf_paths
from soapjax.topology.table_reader import shown


def check_planned(args: Sequence[Any], names: Sequence[str]) -> None:
    """Raises: SoapjaxError naming leaves that are no arrays, and the arguments of a call whose data have no row at all.

    The first of several arguments is the state. One empty argument beside others that have rows is something else.
    """
    check_leaves(args, names)
    data = list(zip(names, args, strict=False))[len(args) > 1 :]
    shapes = {n: [x.shape for x in jax.tree_util.tree_leaves(a) if getattr(x, "shape", ())] for n, a in data}
    if any(shape[0] for found in shapes.values() for shape in found):
        return
    problems = [
        Problem(f"argument {name}", f"an empty batch: no array of it has a row ({shown(found[:2])})", "one example or more",
                "give it one, and skip empty batches")
        for name, found in shapes.items() if found
    ]  # fmt: skip
    if problems:
        raise SoapjaxError(problems)


def check_run(args: Sequence[Any], names: Sequence[str]) -> None:
    """Raises: SoapjaxError naming leaves that a call cannot run with: used up, or shapes alone."""
    require_arrays(jax.tree_util.tree_leaves(tuple(args)), [p for n, a in zip(names, args, strict=True) for p in leaf_paths(a, n)])


def planned_tree(tree: Any, wanted: tuple[Any, ...], argument: Any, before: int, place: str) -> tuple[Any, bool]:
    """The shardings for `tree` among those of all arguments, and whether the trees are the same, static parts and all.

    Raises: SoapjaxError where there is no such argument, or naming the leaves that one has and the other has not.
    """
    if isinstance(argument, bool) or not isinstance(argument, int) or not 0 <= argument - before < len(wanted):
        expected = f"the position of an argument that is no constant, {before} to {before + len(wanted) - 1}"
        raise SoapjaxError(Problem(f"{place}: argument", shown(argument), expected, "count from 0, the state's"))
    own = wanted[argument - before]
    paths, planned = leaf_paths(tree, ""), leaf_paths(own, "")
    if paths != planned:
        expected, remedy = "the tree that was planned", "pass argument=, or the same tree"
        sides = ("not planned", paths, planned), ("missing", planned, paths)
        more = [(kind, [p or "(a single leaf)" for p in ours if p not in set(theirs)]) for kind, ours, theirs in sides]
        found = [Problem(place, f"{kind}: {', '.join(names)}", expected, remedy) for kind, names in more if names]
        raise SoapjaxError(found or [Problem(place, "the same leaves in another order", expected, remedy)])
    check_leaves([tree], [f"{place}:"])
    leaves = jax.tree_util.tree_leaves(tree)
    require_arrays(leaves, paths)
    problems = []
    for path, x, sharding in zip(paths, leaves, jax.tree_util.tree_leaves(own), strict=True):
        try:
            sharding.shard_shape(jax.numpy.shape(x))
        except ValueError as e:
            value = f"the shape {jax.numpy.shape(x)}, {str(e).split('. ')[0]}"
            problems.append(Problem(f"{place}: {path}", value, "the planned shape", "pass the planned state"))
    if problems:
        raise SoapjaxError(problems)
    wanted = jax.tree_util.tree_structure(own)
    return own, jax.tree_util.tree_structure(tree) == wanted  # type: ignore[operator]  # the stub's PyTreeDef is no type
