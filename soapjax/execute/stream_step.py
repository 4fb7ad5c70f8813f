"""A step of several programs as a function that feels like `jax.jit`'s, as `CompiledStep` is of one program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.compiled import CompiledStep, ShapesChanged, signature
from soapjax.execute.placement import PlacedStep
from soapjax.execute.spmd import Program
from soapjax.execute.stream import Event
from soapjax.graph.trace import TracedStep


class Streamed(Protocol):
    """`PipelineStep`, `PlacedStep` and `PipeDreamStep`."""

    in_shardings: list[Any]  # of flat arguments; None where an argument is taken as it comes (a batch that is split)

    def run(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]: ...
    def run_traced(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Event]]: ...
    def place(self, leaves: Sequence[Any]) -> list[Any]: ...


class StreamStep:
    """Pytrees in, pytrees out.

    Args:
      streamed: what runs.
      step: the whole step, as the user calls it: its trees and shapes.
    """

    spans_processes = False  # that must agree before they run: its programs are on devices of one process each

    def __init__(self, streamed: Streamed, step: TracedStep):
        self.streamed, self._step = streamed, step
        self._shapes = tuple((tuple(a.shape), str(a.dtype)) for a in step.in_avals)
        (self.in_shardings, _) = step.in_tree.unflatten(streamed.in_shardings)

    def _leaves(self, args: tuple[Any, ...]) -> list[Any]:
        if signature((args, {})) != (self._step.in_tree, self._shapes):
            raise ShapesChanged
        return jax.tree_util.tree_leaves(args)

    def __call__(self, *args: Any) -> Any:
        return self._step.out_tree.unflatten(self.streamed.run(self._leaves(args))[0])

    def traced(self, *args: Any) -> tuple[Any, list[Event]]:
        """As a call, and what ran when: one event per program and transfer."""
        outputs, events = self.streamed.run_traced(self._leaves(args))
        return self._step.out_tree.unflatten(outputs), events

    def place(self, *args: Any) -> tuple[Any, ...]:
        """The arguments laid out as planned."""
        return self._step.in_tree.unflatten(self.streamed.place(self._leaves(args)))[0]

    place_state = place

    def lower(self, *args: Any) -> Any:
        value, expected = "a step of several programs", "a plan that is one program"
        raise SoapjaxError(Problem("lower", value, expected, "plan without pins and pipeline to read the compiled program"))


def compile_step(program: Program, *, donate: bool = True) -> CompiledStep | StreamStep:
    """A bound plan as a function: one program, or several where operators are pinned to parts of the devices."""
    if program.plan.pinned:
        return StreamStep(PlacedStep(program, donate=donate), program.step)
    return CompiledStep(program, donate=donate)
