"""Divisors of weighted means: with the whole batch's, micro-batches of such a loss add up.

A loss `sum(w * errors) / sum(w)` (padded tokens have weight 0, say) is no mean of its micro-batches': each divides by the weights
that it happens to have. With the weights of all of them it is one:

    mean over m of  sum_m(w * errors) / (sum(w) / M)  =  sum(w * errors) / sum(w)

So where an equation divides by what is made of the batch alone, the number by which it divides may be computed of the whole batch
before the passes begin: the M-th part of a sum, all of a mean. What depends on parameters (an overlap of classes) is known only
after the forward pass, and has a derivative of its own; what is drawn is drawn for every micro-batch: neither is offered. Nor are
divisors within loops.

In the program such a divisor is read through an equation that changes nothing, by which executors find it again: where nothing is
given for it, an equation divides by its own batch's number, as the step says.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from soapjax.graph.trace.batch_scaling import Divisor
from soapjax.graph.trace.draws import is_key
from soapjax.graph.trace.program import Atom, FlatEqn, Program


class WholeDivisor(NamedTuple):
    """A number of the whole batch that micro-batches divide by.

    value: what it is, in the program of the whole batch; `scale` times that is divided by.
    """

    value: Atom
    scale: float


def of_batch_alone(program: Program, batch: Collection[int], divided: Mapping[str, Divisor]) -> dict[str, Divisor]:
    """Those of the equations `divided` whose divisor is made of the inputs `batch` and constants, without random numbers."""

    @functools.cache
    def is_known_before(over: int) -> bool:
        part, read = part_for(program, [over])
        is_drawn = any(is_key(program.aval(a)) for e in part.eqns for a in (*e.inputs, *e.outputs))
        return jax.numpy.issubdtype(program.avals[over].dtype, jax.numpy.floating) and not is_drawn and read <= set(batch)

    over = {e.key: e.inputs[divided[e.key].operand] for e in program.eqns if e.key in divided}
    return {key: divided[key] for key, v in over.items() if isinstance(v, int) and is_known_before(v)}


def part_for(program: Program, values: Collection[Atom]) -> tuple[Program, set[int]]:
    """The outermost equations of a program that make `values`, and the inputs that these read."""
    needed, eqns = {v for v in values if isinstance(v, int)}, []
    for eqn in reversed(program.eqns):
        if not needed.isdisjoint(eqn.outputs):
            eqns.append(eqn)
            needed.update(a for a in eqn.inputs if isinstance(a, int))
    return dataclasses.replace(program, eqns=tuple(reversed(eqns)), outputs=tuple(values)), needed & set(program.inputs)


def passed_on(program: Program, divisors: Mapping[str, int]) -> tuple[Program, dict[str, str]]:
    """The program where equations read their divisor through one more, and the keys: equation -> the one that it reads.

    Args:
      divisors: of the outermost equations (keys) the position of their divisor.
    """
    avals, eqns, through, keys = dict(program.avals), [], dict[Atom, FlatEqn](), {}
    for eqn in program.eqns:
        if eqn.key in divisors:
            at = divisors[eqn.key]
            over = eqn.inputs[at]
            if over not in through:
                made = max(avals) + 1
                avals[made] = program.aval(over)
                address, params = (len(program.eqns) + len(through),), {"name": "of the whole batch"}
                through[over] = dataclasses.replace(
                    eqn, address=address, primitive=_name(), params=params, inputs=(over,), outputs=(made,)
                )  # fmt: skip
                eqns.append(through[over])
            keys[eqn.key] = through[over].key
            eqn = dataclasses.replace(eqn, inputs=(*eqn.inputs[:at], *through[over].outputs, *eqn.inputs[at + 1 :]))
        eqns.append(eqn)
    return dataclasses.replace(program, eqns=tuple(eqns), avals=avals), keys


@functools.cache
def _name() -> Any:
    """The primitive of `checkpoint_name`: it says something of a value, and changes nothing."""
    return jax.make_jaxpr(lambda x: checkpoint_name(x, "x"))(1.0).eqns[0].primitive
