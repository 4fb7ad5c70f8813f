"""Sums of what grows differently with the batch: a sum of errors and a penalty of the weights, say, in a gradient.

    gradient = sum over samples of dE + dP        of M micro-batches, added up: M times dP

Where it is known by which power of the batch each summand grows, one of them is scaled by what it lacks, and both grow alike:

    gradient of a micro-batch = sum over its samples of dE + dP / M

So it is where a `cond` of the step gives a sum over the batch in one branch and a mean in another: what the second gives is scaled.
Where a larger batch makes a summand M^j times as large, and the other M^k times, the first is scaled by M^(j - k).

A sum stays one equation, with its scales among its parameters: the step with one micro-batch has the operators of the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core

from soapjax.graph.trace.program import FlatEqn, Program

# (key of an equation, operand of a sum, or result of a `cond`) -> by which powers of the batch that is to be scaled: one of a sum,
# one for every branch of a `cond`.
Lacks = dict[tuple[str, int], tuple[float, ...]]
SCALES = "scales"  # the parameter: of a sum the scales of its operands, of a `cond` those of the results of every branch


def scaled(program: Program, lacks: Mapping[tuple[str, int], Sequence[float]], num: int) -> Program:
    """The program of one of `num` micro-batches, in which summands have what they lack."""
    by_key: dict[str, dict[int, Sequence[float]]] = {}
    for (key, k), powers in lacks.items():
        by_key.setdefault(key, {})[k] = powers

    def with_scales(eqn: FlatEqn) -> FlatEqn:
        if (mine := by_key.get(eqn.key)) is None:
            return eqn
        if eqn.name == "cond":
            one = (0.0,) * len(eqn.params["branches"])
            scales: Any = tuple(zip(*(_scales(mine.get(k, one), num) for k in range(len(eqn.outputs))), strict=True))
        else:
            scales = tuple(_scales(mine.get(j, (0.0,)), num)[0] for j in range(len(eqn.inputs)))
        return dataclasses.replace(eqn, params={**eqn.params, SCALES: scales})

    return dataclasses.replace(program, eqns=tuple(map(with_scales, program.eqns))) if lacks else program


def _scales(powers: Sequence[float], num: int) -> tuple[float, ...]:
    return tuple(float(num) ** p for p in powers)


def as_plain(inputs: Sequence[Any], params: Mapping[str, Any], *, is_scaled: bool = True) -> tuple[list[Any], dict[str, Any]]:
    """Operands and parameters of the plain equation that a scaled one is; as if it had no scales where not `is_scaled`."""
    scales, plain = params[SCALES], {k: v for k, v in params.items() if k != SCALES}
    if not is_scaled:
        return list(inputs), plain
    if "branches" not in params:
        return _times(inputs, scales), plain
    return list(inputs), {**plain, "branches": tuple(map(_with_scales, params["branches"], scales))}


def _times(values: Sequence[Any], scales: Sequence[float]) -> list[Any]:
    return [x if s == 1 else x * s for x, s in zip(values, scales, strict=True)]  # a Python number, which changes no dtype


def _with_scales(branch: Any, scales: Sequence[float]) -> Any:
    """A branch of a `cond` whose results are scaled."""
    run = jex_core.jaxpr_as_fun(branch)
    return jax.make_jaxpr(lambda *given: _times(run(*given), scales))(*branch.in_avals)
