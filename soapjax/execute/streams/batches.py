"""A batch, taken apart into micro-batches, on the stages that read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from soapjax.execute.spmd.arrivals import place


def put_batch(arrays: Sequence[Any], shardings: Sequence[NamedSharding], num: int) -> list[Any]:
    """Arrays [batch, ...] as [num, batch / num, ...], each under its sharding (of the stacked shape)."""
    stacked = {id(x): _stacked(x, num) for x in arrays}
    found = [stacked[id(x)] for x in arrays]
    if all(s.is_fully_addressable for s in shardings):
        return jax.device_put(found, list(shardings))
    return [place(x, s) for x, s in zip(found, shardings, strict=True)]


def structs(
    avals: Sequence[Any], shardings: Sequence[Any], fed: Sequence[Any], fed_shardings: Sequence[NamedSharding], num: int
) -> list[jax.ShapeDtypeStruct]:
    """Of the arguments that have a layout, and of what `put_batch` makes of micro-batches like those in `fed`."""
    given = zip(avals, shardings, strict=True)
    return [
        *(jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in given if s is not None),
        *(jax.ShapeDtypeStruct((num, *a.shape), a.dtype, sharding=s) for a, s in zip(fed, fed_shardings, strict=True)),
    ]


def _stacked(x: Any, num: int) -> Any:
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    return x.reshape(num, x.shape[0] // num, *x.shape[1:])
