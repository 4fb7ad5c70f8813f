"""What a task computes, shapes left out: equal for tasks that differ in sizes only.

A measured time belongs to a structure and local shapes, so that it serves every layer, batch size and
degree that ask for the same work. The structure is a hash over the task's equations: primitives, their parameters but
those that repeat shapes, dtypes, and which value flows where.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from soapjax.graph.trace.program import FlatEqn

# Parameters that follow from the shapes of operands and results, or say where a slice begins.
_SHAPES = {
    "shape", "new_sizes", "sizes", "start_indices", "limit_indices", "slice_sizes", "sharding", "out_sharding", "axis_size",
    "split_dims", "dimensions_sharding",
}  # fmt: skip
# Parameters whose value does not change what is computed, or that hold code of jax itself.
_SILENT = {"name", "accuracy", "update_jaxpr", "update_consts", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "num_consts", "unreduced"}


def structure_of(eqns: Sequence[FlatEqn], aval: Callable[[Any], Any], root: Callable[[Any], int]) -> str:
    """16 hex digits for equations in program order; `aval` and `root` of an atom (values.py) tell dtypes and which is which."""
    number: dict[int, int] = {}

    def described(a: Any) -> str:
        t = aval(a)
        which = number.setdefault(root(a), len(number)) if isinstance(a, int) else '"literal"'
        return f'[{which},"{dtype_name(t.dtype)}",{len(t.shape)}]'

    # The text of [primitive, parameters, operands, results] as JSON, put together by hand: most equations have no parameters.
    found = []
    for e in eqns:
        parameters = json.dumps(_parameters(e.params), separators=(",", ":")) if e.params else "[]"
        operands, results = ",".join(map(described, e.inputs)), ",".join(map(described, e.outputs))
        found.append(f'["{e.name}",{parameters},[{operands}],[{results}]]')
    return hashlib.sha256(f"[{','.join(found)}]".encode()).hexdigest()[:16]


@functools.cache
def dtype_name(dtype: Any) -> str:
    """`str(dtype)`, which NumPy puts together anew every time."""
    return str(dtype)


def _parameters(params: dict[str, Any]) -> list[Any]:
    return [[k, _plain(v)] for k, v in sorted(params.items()) if k not in _SHAPES and k not in _SILENT]


def _plain(value: Any) -> Any:
    """A parameter as JSON; of what has no plain form (functions, meshes) only the kind."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return [[str(k), _plain(v)] for k, v in sorted(value.items(), key=str)]
    if isinstance(value, np.dtype) or (isinstance(value, type) and _is_dtype(value)):
        return np.dtype(value).name
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, np.generic):
        return value.item()
    inner = getattr(value, "jaxpr", value)
    if hasattr(inner, "eqns"):
        return [[e.primitive.name, _parameters(e.params), [str(v.aval) for v in e.outvars]] for e in inner.eqns]
    fields = getattr(value, "__dataclass_fields__", None)
    if fields:
        return [[k, _plain(getattr(value, k))] for k in fields]
    return type(value).__name__


def _is_dtype(value: Any) -> bool:
    try:
        np.dtype(value)
    except TypeError:
        return False
    return True
