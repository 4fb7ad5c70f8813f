"""Two traces of one step, with two sizes of its batch, side by side: are they alike, what has the size in it, which dims grow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from soapjax.graph.trace.flattening import flatten
from soapjax.graph.trace.program import Atom, FlatEqn, Program


def are_alike(small: Program, large: Program) -> bool:
    """Whether two traces have the same equations, by name, with the same values."""
    ours, theirs = list(small.walk()), list(large.walk())
    return len(ours) == len(theirs) and all(
        (a.name, a.outputs, len(a.inputs)) == (b.name, b.outputs, len(b.inputs))
        for (a, _), (b, _) in zip(ours, theirs, strict=True)
    )


def branches_of(eqn: FlatEqn, other: FlatEqn) -> Iterator[tuple[Program, Program]]:
    """The programs of the branches of a `cond`, in two traces."""
    for pair in zip(eqn.params["branches"], other.params["branches"], strict=True):
        small, large = (flatten(b, stack=eqn.stack) for b in pair)
        yield small, large


def has_other_literals(a: FlatEqn, b: FlatEqn) -> bool:
    """Whether two equations that are alike have other numbers among their operands."""

    def is_other(x: Atom, y: Atom) -> bool:
        if isinstance(x, int) or isinstance(y, int):
            return False
        return not np.array_equal(np.asarray(x.val), np.asarray(y.val), equal_nan=np.asarray(x.val).dtype.kind == "f")

    return any(map(is_other, a.inputs, b.inputs)) or any(map(_have_other_literals, _jaxprs(a.params), _jaxprs(b.params)))


def _jaxprs(params: Mapping[str, Any]) -> list[Any]:
    """Those of an equation's parameters, as of the branches of a `cond`."""
    values = [x for v in params.values() for x in (v if isinstance(v, tuple | list) else (v,))]
    return [getattr(x, "jaxpr", x) for x in values if hasattr(x, "eqns")]


def _have_other_literals(a: Any, b: Any) -> bool:
    """As `has_other_literals`, of two jaxprs."""

    def numbers(jaxpr: Any) -> Iterator[np.ndarray]:
        atoms = [*(v for e in jaxpr.eqns for v in e.invars), *jaxpr.outvars]
        yield from (np.asarray(v.val) for v in atoms if hasattr(v, "val"))
        for inner in (j for e in jaxpr.eqns for j in _jaxprs(e.params)):
            yield from numbers(inner)

    pairs = zip(numbers(a), numbers(b), strict=False)
    return any(not np.array_equal(x, y, equal_nan=x.dtype.kind == "f") for x, y in pairs)


def sample_dims(small: Program, large: Program, atom: Atom) -> tuple[int, ...]:
    """Dims of a value that grow with the batch."""
    if not isinstance(atom, int):
        return ()
    a, b = small.avals[atom].shape, large.avals[atom].shape
    return tuple(d for d in range(len(a)) if len(a) == len(b) and a[d] != b[d])
