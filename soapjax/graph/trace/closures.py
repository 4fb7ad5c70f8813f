"""What a function closes over."""

from __future__ import annotations

import functools
import inspect
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
        try:
            left += _held(x)
        except Exception:  # noqa: BLE001, S112 - what objects of other people do when they are looked at
            continue
    return False


def _held(x: Any) -> list[Any]:
    if isinstance(x, Mapping):
        return [*x.values()]
    if isinstance(x, list | tuple | set | frozenset):
        return [*x]
    if isinstance(x, functools.partial):
        return [x.func, *x.args, *x.keywords.values()]
    held = [_contents(c) for c in inspect.getattr_static(x, "__closure__", None) and x.__closure__ or ()]
    names = ["__wrapped__", "__func__", "__self__", "__defaults__", "__kwdefaults__"]
    names += [name for kind in type(x).__mro__ for name in _slots(kind)]
    held += [getattr(x, name, None) for name in names if inspect.getattr_static(x, name, None) is not None]
    return [*held, *(inspect.getattr_static(x, "__dict__", None) and vars(x) or {}).values()]


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
