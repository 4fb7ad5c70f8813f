"""Cutting a flat program into parts that run as programs of their own, one after the other.

A part owns equations, reads values that other parts made, and hands on those that others read. Equations that no part owns
(masks and constants, barriers, casts of weights, what a stage computes again) are *free*: every part that reads
their results evaluates them itself.

`make_part` finds a part's equations and inputs; its outputs follow from all parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.build import Binding
from soapjax.graph.passes.phases import BACKWARD, FORWARD, UPDATE
from soapjax.graph.trace.program import FlatEqn, Program
from soapjax.graph.trace.values import IDENTITIES


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Equations that run as one program at one place."""

    name: str
    place: int  # which sub-mesh
    eqns: tuple[FlatEqn, ...]
    own: frozenset[str]  # keys of those that no other part evaluates
    inputs: tuple[int, ...]  # value ids made elsewhere, or inputs of the step
    outputs: tuple[int, ...] = ()  # value ids that others read
    rows: frozenset[int] = frozenset()  # of what it makes as stacks (stacked_rows.py)
    consts: Mapping[int, Any] | None = None  # of what runs once per step: in place of the program's

    @property
    def made(self) -> frozenset[int]:
        """The values that no other part makes."""
        return self.rows.union(o for e in self.eqns if e.key in self.own for o in e.outputs)


def make_part(
    name: str, place: int, program: Program, own: Collection[str], free: Collection[str], wanted: Iterable[int] = (),
    stop: Collection[int] = (),
) -> Part:  # fmt: skip
    """The part that owns the outermost equations `own` and evaluates those of `free` that it needs.

    Args:
      wanted: values that the part makes (or reads) beside those that its own equations need; they become its outputs.
      stop: values to read although a free equation would make them.
    """
    wanted = tuple(dict.fromkeys(wanted))
    needed, made = set(wanted), set[int]()
    eqns: list[FlatEqn] = []
    for eqn in reversed(program.eqns):
        if eqn.key not in own:
            hit = [o for o in eqn.outputs if o in needed and o not in stop]
            if not hit or eqn.key not in free:
                continue
            if eqn.name in IDENTITIES and len(hit) < len(eqn.outputs):  # a barrier over many values: those that are read
                kept = [k for k, o in enumerate(eqn.outputs) if o in hit]
                eqn = dataclasses.replace(
                    eqn, inputs=tuple(eqn.inputs[k] for k in kept), outputs=tuple(eqn.outputs[k] for k in kept)
                )
        eqns.append(eqn)
        made.update(eqn.outputs)
        needed.update(eqn.read)
    inputs = needed - (made - set(stop)) - program.consts.keys()
    return Part(name, place, tuple(reversed(eqns)), frozenset(own), tuple(sorted(inputs)), wanted)


def with_outputs(parts: Sequence[Part], also: Iterable[int] = ()) -> list[Part]:
    """Every part with what other parts (or `also`) read of its own equations' results as outputs."""
    read = {v for p in parts for v in p.inputs} | set(also)
    done = []
    for part in parts:
        made = [o for e in part.eqns if e.key in part.own for o in e.outputs if o in read]
        done.append(dataclasses.replace(part, outputs=tuple(dict.fromkeys([*part.outputs, *made]))))
    return done


def read_at(parts: Iterable[Part]) -> dict[int, list[int]]:
    """Value -> the places whose parts read it, each once."""
    found: dict[int, list[int]] = {}
    for part in parts:
        for v in part.inputs:
            places = found.setdefault(v, [])
            if part.place not in places:
                places.append(part.place)
    return found


def sent_on(values: Iterable[int], readers: Mapping[int, Sequence[int]], source: int) -> list[tuple[int, list[int]]]:
    """By place what is read of `values` elsewhere than at `source`."""
    found: dict[int, list[int]] = {}
    for v in values:
        for place in readers.get(v, ()):
            if place != source:
                found.setdefault(place, []).append(v)
    return sorted(found.items())


def keys_of(eqn: FlatEqn) -> Iterable[str]:
    """The keys of an equation and, for a loop, of all that its body holds."""
    yield eqn.key
    if eqn.body is not None:
        for inner, _ in eqn.body.walk():
            yield inner.key


def tasks_of(eqn: FlatEqn, graph: OperatorGraph, binding: Binding) -> set[int]:
    """The forward, backward and heavy update tasks that an outermost equation belongs to (several for a loop)."""
    found = {binding.task_of[k] for k in keys_of(eqn) if k in binding.task_of}
    return {k for k in found if graph.tasks[k].parameter < 0}


def phase_of(eqn: FlatEqn, graph: OperatorGraph, binding: Binding) -> int | None:
    """FORWARD, BACKWARD or UPDATE of an outermost equation; None of a free one."""
    phases = {graph.tasks[k].phase for k in tasks_of(eqn, graph, binding)}
    if phases:
        return BACKWARD if BACKWARD in phases else UPDATE if UPDATE in phases else FORWARD
    if eqn.name in IDENTITIES or eqn.body is not None or binding.phases.phase.get(eqn.key) != UPDATE:
        return None
    return UPDATE


def depends_on(program: Program, seeds: Collection[int]) -> set[int]:
    """All outermost values that are computed from any of `seeds`, these included."""
    found = set(seeds)
    for eqn in program.eqns:
        if not found.isdisjoint(eqn.read):
            found.update(eqn.outputs)
    return found
