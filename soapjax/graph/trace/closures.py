"""What a function closes over."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

MOST_HELD = 20_000  # objects that are looked at
_NOTHING_IN = type, types.ModuleType, str, bytes, int, float, complex, np.ndarray, jax.Array


def holds_tracers(fn: Any) -> bool:
    """Whether a function closes over a tracer: in a cell, a default, a partial's arguments, or what its object holds."""
    seen: set[int] = set()
    left: list[Any] = [fn]
    while left and len(seen) < MOST_HELD:
        x = left.pop()
        if isinstance(x, jax.core.Tracer):
            return True
        if id(x) in seen or isinstance(x, _NOTHING_IN):
            continue
        seen.add(id(x))
        if isinstance(x, Mapping):
            left += x.values()
        elif isinstance(x, list | tuple | set | frozenset):
            left += x
        elif isinstance(x, functools.partial):
            left += (x.func, *x.args, *x.keywords.values())
        else:
            left += (c.cell_contents for c in getattr(x, "__closure__", None) or () if _is_filled(c))
            left += [getattr(x, name, None) for name in ("__wrapped__", "__func__", "__self__", "__defaults__", "__kwdefaults__")]
            left += (getattr(x, "__dict__", None) or {}).values()
    return False


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises where it is empty
    except ValueError:
        return False
    return True
