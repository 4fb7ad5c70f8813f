"""A step of several programs as a function that feels like `jax.jit`'s, as `CompiledStep` is of one program."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.spmd.compiled_step import CompiledStep, ShapesChanged
from soapjax.execute.spmd.planned_evaluator import BoundStep
from soapjax.execute.streams.placed_step import PlacedStep
from soapjax.execute.streams.stream import Event, Streamed, other_shape
from soapjax.execute.transfers.arrivals import place_all, require_arrays
from soapjax.execute.transfers.pieces import on_every_process, piecewise
from soapjax.execute.transfers.stacked_state import Pieces, StackedState
from soapjax.graph.trace.tracing import TracedStep, signature
from soapjax.helpers.own_config import compiled_as_planned


class StreamStep:
    """Pytrees in, pytrees out. Over several processes state stays where it is used; other results come to every process, whole.

    Args:
      streamed: what runs.
      step: the whole step, as the user calls it: its trees and shapes.
      devices: of the plan, where nothing may run on some of them: their processes take part all the same. By default those of
        all places.
    """

    def __init__(self, streamed: Streamed, step: TracedStep, devices: Sequence[Any] | None = None):
        self.streamed, self._step = streamed, step
        of_places = (d for p in streamed.all_places for d in p.mesh.devices.flat)
        self._devices = list(dict.fromkeys(of_places if devices is None else devices))
        self.spans_processes = any(d.process_index != jax.process_index() for d in self._devices)
        self._tell: Callable[..., Sequence[jax.Array]] | None = None
        pairs = {o: i for i, o in step.leaf_pairs.items()}
        pieces = streamed.pieces or Pieces.figure_of_rows(step.program.rows)
        self._told = _no_state(step, pieces) if self.spans_processes else []
        self._state = StackedState(pieces, pairs, streamed.in_shardings, donate=streamed.donate)
        self.is_compiled = False
        self.state_outputs = frozenset(step.leaf_pairs.values())  # leaves
        self._shapes = _results_of_one_row(step)

    @property
    def in_shardings(self) -> Any:
        """Layouts of the arguments, in trees like theirs."""
        return self._step.in_tree.unflatten(self._state.in_shardings)[0]

    def _leaves(self, args: tuple[Any, ...]) -> list[Any]:
        if signature((args, {})) != (self._step.in_tree, self._step.leaf_shapes):
            raise ShapesChanged
        leaves = jax.tree_util.tree_leaves(args)
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            value, expected = "a call inside another transformation (jit, scan, eval_shape, ...)", "a plan that is one program"
            remedy = "call it outside, or plan without pins and pipeline"
            raise SoapjaxError(Problem("a step of several programs", value, expected, remedy))
        require_arrays(leaves, self._step.leaf_paths)
        return leaves

    def __call__(self, *args: Any) -> Any:
        with compiled_as_planned():
            return self._results(self.streamed.run(self._state.apart(self._leaves(args), give=True))[0])

    def traced(self, *args: Any) -> tuple[Any, list[Event]]:
        """As a call, and what ran when: one event per program and transfer."""
        outputs, events = self.streamed.run_traced(self._state.apart(self._leaves(args), give=True))
        return self._results(outputs), events

    def _results(self, outputs: list[Any]) -> Any:
        leaves = self._state.together(self._everywhere(outputs))
        if others := [other_shape(path, leaves[k].shape, s) for k, (path, s) in self._shapes.items() if leaves[k].shape != s]:
            raise SoapjaxError(others)
        return self._step.out_tree.unflatten(leaves)

    def _everywhere(self, outputs: list[Any]) -> list[Any]:
        """Outputs, those that are no state on every process."""
        if self._told and self._tell is None:
            sources = [outputs[k].sharding for k in self._told]
            self._tell = piecewise(sources, [on_every_process(self._devices, s) for s in sources])
        if self._told:
            for k, x in zip(self._told, self._tell(*(outputs[k] for k in self._told)), strict=True):
                outputs[k] = x
        return outputs

    def compile(self) -> None:
        """Compiles all programs of this process' devices, which calls find again, on as many cores as there are."""
        given = self.streamed.argument_structs()
        programs = self._state.lowered(self._step.leaf_shapes, given), self.streamed.dispatches().lowered(given)
        with compiled_as_planned(), ThreadPoolExecutor(os.cpu_count()) as pool:
            waiting = [pool.submit(lowered.compile) for lowered in itertools.chain(*programs)]
        for each in waiting:
            each.result()
        self.is_compiled = True

    def to_agree(self, *args: Any) -> tuple[dict[str, str], Callable[[], Any]]:
        """What all processes must have alike before any of them runs, and what compiles the programs of this one."""
        places, stream = self.streamed.all_places, self.streamed.dispatches()
        stages = [f"{p.bound.plan.mesh_plan_sha256} on {[d.id for d in p.mesh.devices.flat]}" for p in places]
        fields = {"graph": places[0].bound.graph.fingerprint(), "stages": "\n".join(stages), "program": stream.text()}
        return fields, self.compile

    def place(self, *args: Any) -> tuple[Any, ...]:
        """The arguments laid out as planned."""
        return self._step.in_tree.unflatten(place_all(self._leaves(args), self._state.in_shardings))[0]

    place_state = place

    def trace(self, *args: Any) -> Any:
        return self.lower(*args)

    def lower(self, *args: Any) -> Any:
        value, expected = "a step of several programs", "a plan that is one program"
        raise SoapjaxError(Problem("lower", value, expected, "plan without pins and pipeline to read the compiled program"))


def _results_of_one_row(step: TracedStep) -> dict[int, tuple[str, tuple[int, ...]]]:
    """Paths and shapes of the results, by leaf, that are no state, whose rows may be taken apart."""
    found, row = dict[int, tuple[str, tuple[int, ...]]](), 0
    for leaf, n in enumerate(step.program.rows[1]):
        if n == 1 and leaf not in step.leaf_pairs.values():
            found[leaf] = step.out_paths[row], tuple(step.out_avals[row].shape)
        row += n
    return found


def _no_state(step: TracedStep, pieces: Pieces) -> list[int]:
    """Positions, among what a program returns, of results that are no state and are made by it."""
    found, at, row = [], 0, 0
    for leaf, rows in enumerate(pieces.outputs):
        v = step.program.outputs[row]
        if leaf not in step.leaf_pairs.values() and isinstance(v, int) and v not in step.program.inputs:
            found.append(at)
        at, row = at + len(rows), row + sum(max(n, 1) for n in rows)
    return found


def compile_step(program: BoundStep, *, donate: bool | Sequence[int] = True) -> CompiledStep | StreamStep:
    """A bound plan as a function: one program, or several where operators are pinned to parts of the devices.

    Args:
      donate: positions of arguments whose memory results may take; True: of state. Several programs know state alone.
    """
    if program.plan.pinned:
        return StreamStep(PlacedStep(program, donate=bool(donate)), program.step, list(program.mesh.devices.flat))
    return CompiledStep(program, donate=donate)
