"""What a step does once, although it is traced with one micro-batch: as the whole batch has it.

An update that divides by the size of the batch, or counts samples, has other literals in the step with one micro-batch, and other
sizes of what it makes of nothing (`jnp.ones(len(x)).sum()`). Sums and means that cross into it are the whole batch's; so are the
equations then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from soapjax.graph.batch.correspondence import corresponding
from soapjax.graph.batch.two_traces import are_alike, has_other_literals
from soapjax.graph.trace.program import FlatEqn, Program

_PLAIN = (int, float, str, tuple, type(None))


def equations_of_whole(step: Program, full: Program, factor: int) -> dict[str, FlatEqn]:
    """By the key of an outermost equation of `step` what `full`, of a batch `factor` times as large, has in its place, where it is
    another: by a literal, a parameter, or the size of a result."""
    return {a.key: b for a, b in _pairs(step, full, factor) if _differs(step, full, a, b)}


def with_size_of_whole(step: Program, full: Program, batch: Collection[int]) -> Program:
    """The step with one micro-batch, where the whole batch's size stands in what every sample has of the inputs `batch` alone: in
    weights such as `1 / (len(x) * p)`."""
    if not are_alike(step, full):
        return step
    alone, eqns = set(batch), []
    for eqn, other in zip(step.eqns, full.eqns, strict=True):
        values = [a for a in eqn.read if a not in step.consts]
        avals = [(step.avals[o], full.avals[o]) for o in eqn.outputs]
        is_of_samples = all(a.shape != b.shape for a, b in avals)
        if values and alone.issuperset(values) and is_of_samples and eqn.body is None and eqn.name != "cond":
            alone.update(eqn.outputs)
            if has_other_literals(eqn, other) and all(jax.dtypes.issubdtype(a.dtype, np.inexact) for a, _ in avals):
                inputs = tuple(a if isinstance(a, int) else b for a, b in zip(eqn.inputs, other.inputs, strict=True))
                eqn = dataclasses.replace(eqn, inputs=inputs)
        eqns.append(eqn)
    return dataclasses.replace(step, eqns=tuple(eqns))


def consts_of_whole(step: Program, full: Program) -> dict[int, Any]:
    """Arrays that the step closes over, as the whole batch has them, where their shape follows its size."""
    if not are_alike(step, full):
        return {}
    return {k: full.consts[k] for k, x in step.consts.items() if k in full.consts and np.shape(x) != np.shape(full.consts[k])}


def as_whole(eqn: FlatEqn, whole: Mapping[str, FlatEqn]) -> FlatEqn:
    """An equation of a part, with the literals and parameters of the whole batch's."""
    other = whole.get(eqn.key)
    if other is None or len(other.inputs) != len(eqn.inputs) or len(other.outputs) != len(eqn.outputs):
        return eqn
    inputs = tuple(a if isinstance(a, int) else b for a, b in zip(eqn.inputs, other.inputs, strict=True))
    return dataclasses.replace(eqn, params=other.params, inputs=inputs, body=other.body)


def _pairs(step: Program, full: Program, factor: int) -> Iterator[tuple[FlatEqn, FlatEqn]]:
    if are_alike(step, full):
        yield from zip(step.eqns, full.eqns, strict=True)
        return
    _, keys = corresponding(step, full, factor)
    by_key = {e.key: e for e in step.eqns}
    for other in full.eqns:
        eqn = by_key.get(keys.get(other.key, ""))
        if eqn is not None and eqn.body is None and other.body is None:  # values inside bodies have other numbers
            yield eqn, other


def _differs(step: Program, full: Program, a: FlatEqn, b: FlatEqn) -> bool:
    if has_other_literals(a, b):
        return True
    if any(step.avals[x].shape != full.avals[y].shape for x, y in zip(a.outputs, b.outputs, strict=False)):
        return True
    if any(_is_other_parameter(a.params[name], b.params.get(name)) for name in a.params):
        return True
    if a.body is None or b.body is None:
        return False
    return any(_differs(step, full, x, y) for x, y in zip(a.body.eqns, b.body.eqns, strict=True))


def _is_other_parameter(a: Any, b: Any) -> bool:
    return isinstance(a, _PLAIN) and isinstance(b, _PLAIN) and a != b
