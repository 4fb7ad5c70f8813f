"""Parameters that all passes of a stage read in one copy: gathered, or cast to what they compute with.

A stage's passes are programs of their own, and each would gather and cast what it reads. What is to be kept (ZeRO-1: parameters
are whole while a step computes, optimizer state is sharded) is gathered once per step instead, by one program before the first
pass; and on stages that keep casts, that program casts what lies there as it is used. What is gathered for each pass is left to
these.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from soapjax.execute.parts.cut import Part
from soapjax.execute.spmd.planned_evaluator import BoundStep
from soapjax.graph.passes.phases import UPDATE
from soapjax.graph.readers import kept_copies
from soapjax.strategy.configs import StorageName
from soapjax.strategy.layout import Spec
from soapjax.strategy.plan import format_spec, parse_spec


class Gathered(NamedTuple):
    """A parameter as the passes of a stage read it."""

    spec: Spec
    cast: str | None

    def stacked(self) -> Gathered:
        """As of rows that are alike."""
        return Gathered(((), *self.spec), self.cast)


def gathered_once(bound: BoundStep, *, keeps_casts: bool) -> dict[int, Gathered]:
    """By value the parameters that are gathered, or cast, once per step."""
    graph, plan, found = bound.graph, bound.plan, {}
    used: dict[int, set[Spec]] = {}
    for task, part in bound.task_parts():
        for access, text in zip(task.reads, part.operands, strict=True) if task.phase != UPDATE else ():
            used.setdefault(access.tensor, set()).add(parse_spec(text))
    for k, cast in kept_copies(graph).items():
        parameter = graph.parameters[k]
        specs, stored = used[parameter.tensor], parse_spec(plan.arguments[graph.in_paths[parameter.leaf]])
        storage = StorageName.parse(plan.operators[graph.operators[parameter.owner].name].storage)
        if len(specs) > 1 or storage.again:
            continue
        (spec,) = specs
        if (storage.axes and spec != stored) or (keeps_casts and cast is not None and spec == stored):
            found[bound.step.program.inputs[parameter.leaf]] = Gathered(spec, cast)
    return found


def passing(bound: BoundStep, gathered: dict[int, Gathered]) -> BoundStep:
    """What passes are evaluated by: gathered parameters lie as they are given them."""
    paths = dict(zip(bound.step.program.inputs, bound.step.in_paths, strict=True))
    arguments = {**bound.plan.arguments, **{paths[v]: format_spec(g.spec) for v, g in gathered.items() if v in paths}}
    return dataclasses.replace(bound, plan=bound.plan.model_copy(update={"arguments": arguments}))


def gather_program(place: Any, stage: int, values: tuple[int, ...]) -> tuple[Part, Any]:
    """The program of a stage that gathers parameters, cast first where their reader casts them."""
    chosen = [place.gathered[v] for v in values]

    def fn(*arguments: Any) -> tuple[Any, ...]:
        found = []
        for v, x, one in zip(values, arguments, chosen, strict=True):
            x = x if one.cast is None or place.is_float64 else jax.lax.convert_element_type(x, one.cast)
            stored = place.spec(v)
            found.append(x if one.spec == stored else place.evaluator.layouts.resharded(v, x, stored, one.spec))
        return tuple(found)

    fn.__name__ = fn.__qualname__ = f"gather_{stage}"
    shardings = tuple(place.bound.sharding(one.spec) for one in chosen)
    return Part(f"gather {stage}", stage, (), frozenset(), values, values), jax.jit(fn, out_shardings=shardings)
