"""A step as one flat list of equations, loops kept as nested programs: plain data (flattening.py makes it)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from jax.extend import core as jex_core

from soapjax.graph.trace.source_lines import Call, line_of_equation
from soapjax.graph.trace.trips import Trip

Atom = int | jex_core.Literal


@dataclasses.dataclass(frozen=True, eq=False)
class FlatEqn:
    """One equation of a flat program.

    `address` is its position at every nesting level: (12,) or (12, 3) for the
    fourth equation in the body of loop 12.
    """

    address: tuple[int, ...]
    primitive: Any
    params: dict[str, Any]
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    stack: str
    ctx: Any
    body: Program | None = None
    source_info: Any = None
    trip: Trip | None = None
    calls: tuple[Call, ...] = ()  # that it was within, outermost first
    name: str = dataclasses.field(init=False)  # of the primitive
    key: str = dataclasses.field(init=False)  # the address as text, e.g. '12' or '12.3'

    def __post_init__(self) -> None:
        # Past the frozen setter: every pass asks for both, of every equation.
        self.__dict__["name"] = self.primitive.name
        self.__dict__["key"] = ".".join(map(str, self.address))

    @property
    def source(self) -> str:
        """The line of the user's code that it comes from, "" where that is not known."""
        return line_of_equation(self.source_info, self.calls)

    @functools.cached_property
    def read(self) -> tuple[int, ...]:
        """The values among its inputs: all but the literals."""
        return tuple(a for a in self.inputs if isinstance(a, int))


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Equations in order; `avals` (shared by all nesting levels) gives the type of each value id.

    `repeats`: value -> the value of the forward pass that it repeats, where that is not kept for the backward pass (recompute.py).
    `rows`: of a whole step how many values stand for every input and every output leaf (unstacking.py).
    """

    inputs: tuple[int, ...]
    outputs: tuple[Atom, ...]
    eqns: tuple[FlatEqn, ...]
    consts: dict[int, Any]
    avals: dict[int, Any]
    repeats: dict[int, int] = dataclasses.field(default_factory=dict)
    rows: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def walk(self, trip_count: int = 1) -> Iterator[tuple[FlatEqn, int]]:
        """Every equation with the number of times it runs in a step; a loop comes before its body."""
        for eqn in self.eqns:
            yield eqn, trip_count
            if eqn.body is not None:
                yield from eqn.body.walk(trip_count * eqn.params["length"])

    @functools.cached_property
    def leaves(self) -> tuple[FlatEqn, ...]:
        """Every equation but the loops, bodies in place."""
        return tuple(eqn for eqn, _ in self.walk() if eqn.body is None)

    def aval(self, atom: Atom) -> Any:
        return self.avals[atom] if isinstance(atom, int) else atom.aval


def bytes_of(aval: Any) -> float:
    """Of a value, 4 an element where its type does not say."""
    return float(aval.size * getattr(aval.dtype, "itemsize", 4))
