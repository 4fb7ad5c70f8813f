"""Sums over all elements of an array that was made flat first, as norms are often written, are taken over its dims as they are.

    jnp.vdot(g, g);  jnp.linalg.norm(g.ravel());  jnp.sum(g.reshape(-1) ** 2)

The order of the elements is nothing to such a sum, but an array that is split in any other dim than its first has to be gathered to
be made flat: every gradient, and every parameter, of an optimizer that scales updates by norms. The product of two vectors in an
update is multiplied and summed up like all else in it: as a product it would be an operator with a layout of its own.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Container, MutableMapping
from typing import Any

import jax
import jax.numpy as jnp

Traced = Callable[[Callable[..., Any], list[Any], str, list[dict]], list[Any]]  # a function of ours, inlined over atoms

_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"}
_NOT_EACH = {"optimization_barrier", "name", "threefry2x32", "random_gamma"}  # of primitives that work element by element


def of_all_elements(
    records: list[dict], kept: set[int], *, avals: MutableMapping[int, Any], elementwise: Container[str], traced: Traced
) -> list[dict]:
    """The same records without what makes arrays flat for such sums; `kept`: what is read of them from outside."""
    shapes = _flat_values(records, kept, avals, elementwise)
    before: dict[int, Any] = {}  # what a reshape made -> of what
    found: list[dict] = []
    for r in records:
        if "const" in r:
            found.append(r)
            continue
        is_flat = any(isinstance(a, int) and a in shapes for a in r["inputs"])
        out = r["outputs"][0] if len(r["outputs"]) == 1 else None
        r = dict(r, inputs=tuple(before.get(a, a) if isinstance(a, int) else a for a in r["inputs"]))
        name = r["primitive"].name
        if r["body"] is not None:
            args, results, inner = r["body"]
            read = {a for a in results if isinstance(a, int)}
            r["body"] = args, results, of_all_elements(inner, read, avals=avals, elementwise=elementwise, traced=traced)
        elif out in shapes and name == "reshape":
            before[out] = r["inputs"][0]
            continue
        elif out in shapes:
            avals[out] = avals[out].update(shape=shapes[out])
        elif is_flat and name in _REDUCTIONS:
            r["params"] = r["params"] | {"axes": tuple(range(len(avals[r["inputs"][0]].shape)))}
        elif name == "dot_general" and (is_flat or _is_of_vectors(r, avals)):
            begin: list[dict] = []
            traced(_product(avals[out].dtype, r["params"]["preferred_element_type"]), list(r["inputs"]), r["stack"], begin)
            found += [dict(b, source_info=r["source_info"], calls=r["calls"]) for b in begin]
            r = dict(found.pop(), outputs=r["outputs"], trip=r.get("trip"))
        found.append(r)
    return found


def _flat_values(
    records: list[dict], kept: set[int], avals: MutableMapping[int, Any], elementwise: Container[str]
) -> dict[int, tuple[int, ...]]:
    """Values that are made flat, and what is computed of them element by element, for such sums alone -> their shapes before."""
    shapes: dict[int, tuple[int, ...]] = {}
    made_of: dict[int, list[int]] = {}
    readers: dict[int, list[dict]] = collections.defaultdict(list)
    for r in (r for r in records if "const" not in r):
        operands = [a for a in r["inputs"] if isinstance(a, int)]
        for a in operands:
            readers[a].append(r)
        if len(r["outputs"]) != 1 or r["effects"]:
            continue
        out, name = r["outputs"][0], r["primitive"].name
        if name == "reshape" and operands and len(avals[out].shape) == 1 < len(avals[operands[0]].shape) and _is_plain(avals[out]):
            shapes[out] = tuple(avals[operands[0]].shape)
        elif name in elementwise and name not in _NOT_EACH:
            of = {shapes.get(a) if isinstance(a, int) else None for a in r["inputs"] if _shape(a, avals)}
            if len(of) == 1 and (shape := of.pop()) is not None:
                shapes[out], made_of[out] = shape, [a for a in operands if a in shapes]
    known = -1
    while len(shapes) != known:  # what is read as it lies stays flat, with what it is computed of and beside
        known = len(shapes)
        for v in reversed(list(shapes)):
            is_flat_before = any(a not in shapes for a in made_of.get(v, ()))
            if v in kept or is_flat_before or not all(_takes(r, shapes, avals) for r in readers[v]):
                del shapes[v]
    return shapes


def _shape(atom: Any, avals: MutableMapping[int, Any]) -> tuple[int, ...]:
    return tuple((avals[atom] if isinstance(atom, int) else atom.aval).shape)


def _takes(record: dict, shapes: dict[int, tuple[int, ...]], avals: MutableMapping[int, Any]) -> bool:
    """Whether an equation that reads a flat value gives the same where that has its shape before."""
    name = record["primitive"].name
    if name == "dot_general":
        of = {shapes.get(a) if isinstance(a, int) else None for a in record["inputs"]}
        return len(of) == 1 and None not in of and _is_of_vectors(record, avals)
    if name in _REDUCTIONS:
        return tuple(record["params"]["axes"]) == (0,)
    return name != "reshape" and record["outputs"][0] in shapes


def _is_of_vectors(record: dict, avals: MutableMapping[int, Any]) -> bool:
    """Whether a product is one number, of two vectors, and in no gradient: its operands are parameters and what updates them."""
    is_marked = "jvp(" in record["stack"] or "transpose(" in record["stack"]
    of_numbers = all(isinstance(a, int) and jnp.issubdtype(avals[a].dtype, jnp.inexact) for a in record["inputs"])
    (contracted, _), _ = record["params"]["dimension_numbers"]
    ranks = [len(avals[a].shape) for a in record["inputs"] if isinstance(a, int)]
    return not is_marked and of_numbers and ranks == [1, 1] and len(contracted) == 1 and _is_plain(avals[record["inputs"][0]])


def _is_plain(aval: Any) -> bool:
    """Whether no layout is in its type."""
    sharding = getattr(aval, "sharding", None)
    return sharding is None or sharding.mesh.empty


def _product(dtype: Any, preferred: Any) -> Callable[..., Any]:
    """The sum of the products of all elements, computed as exactly as by a product of two vectors at least."""
    wide = jnp.promote_types(preferred or dtype, jnp.float32)
    return lambda a, b: jax.lax.convert_element_type(jnp.sum(a.astype(wide) * b.astype(wide)), dtype)
