"""Steps that change their nnx objects in place: `def train_step(model, optimizer, batch): ... optimizer.update(model, grads)`.

As under `nnx.jit`: the objects among the arguments are split into what is constant of them (the graph definition) and their arrays;
the step is planned as a function of the arrays, which puts the objects together, runs the user's code and returns the new arrays,
and the caller's objects get these. Flax is asked only where the user's code has imported it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from soapjax.errors import Problem, SoapjaxError


class Constants:
    """What is constant of a step's objects, as a key: the graph definition, of which an attribute may be unhashable."""

    def __init__(self, graph: Any):
        self.graph = graph

    def __hash__(self) -> int:
        try:
            return hash(self.graph)
        except TypeError:  # a configuration that is a dataclass, say: nnx.jit takes it
            return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self.graph == other.graph


def is_object(x: Any) -> bool:
    """Whether `x` is an nnx module, optimizer, metric or stream of random numbers."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    return isinstance(x, nnx.Pytree) or (isinstance(x, tuple | list) and any(isinstance(y, nnx.Pytree) for y in x))


def object_positions(args: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(i for i, a in enumerate(args) if is_object(a))


def split(args: tuple[Any, ...], positions: tuple[int, ...]) -> tuple[Any, tuple[Any, ...]]:
    """What is constant of the objects at `positions`, and the arguments with arrays in their places."""
    nnx = sys.modules["flax.nnx"]
    graph, arrays = nnx.split(tuple(args[i] for i in positions))
    parts = {i: arrays[k] if k in arrays else nnx.State({}) for k, i in enumerate(positions)}
    return graph, tuple(parts.get(i, a) for i, a in enumerate(args))


def _joined(nnx: Any, parts: list[Any]) -> Any:
    return nnx.State({k: part for k, part in enumerate(parts) if part})


def functional(fn: Callable[..., Any], graph: Any, positions: tuple[int, ...]) -> Callable[..., Any]:
    """`fn` as a function of arrays: `(*args) -> (result, *new arrays of the objects)`.

    Raises: SoapjaxError where the step changes more of its objects than their arrays.
    """
    nnx = sys.modules["flax.nnx"]

    @functools.wraps(fn)
    def step(*args: Any) -> Any:
        objects = nnx.merge(graph, _joined(nnx, [args[i] for i in positions]))
        made = dict(zip(positions, objects, strict=True))
        result = fn(*(made.get(i, a) for i, a in enumerate(args)))
        after, arrays = nnx.split(objects)
        if after != graph:
            expected = "a step that changes arrays of its nnx objects only"
            remedy = "make new variables and layers before the first step (eager initialisation), not inside it"
            raise SoapjaxError(Problem(getattr(fn, "__qualname__", str(fn)), "other variables than before", expected, remedy))
        return (result, *(arrays[k] if k in arrays else nnx.State({}) for k in range(len(positions))))

    return step


def update(args: tuple[Any, ...], positions: tuple[int, ...], parts: tuple[Any, ...]) -> None:
    """Gives the caller's objects their new arrays."""
    nnx = sys.modules["flax.nnx"]
    nnx.update(tuple(args[i] for i in positions), _joined(nnx, list(parts)))
