"""How the dims of an equation's operands and results relate: one short rule per primitive.

A rule gives every dim of every operand and result a label, as in einsum
notation. Dims with equal labels are split together; a label that operands have
and results lack is *reduced* (splitting it makes the result a partial sum, or
partial maximum); BLOCKED dims are never split.

>>> product = trace(jax.jit(jax.numpy.matmul), *[jax.ShapeDtypeStruct((4, 4, 4), "float32")] * 2).program
>>> labels_of(product.eqns[-1], product)
Labels(inputs=((0, 1, 3), (0, 3, 2)), outputs=((0, 1, 2),), ...)

An unknown primitive is replicated (all BLOCKED) with one warning that names it;
`register` adds a rule.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import jax

from soapjax.graph.trace.program import FlatEqn, Program

BLOCKED = -1
log = logging.getLogger("soapjax")


class MadeOf(NamedTuple):
    """Dim `dim` of operand `operand`, whole, becomes dim `result_dim` of result `result`."""

    operand: int
    dim: int
    result: int
    result_dim: int


class SumInside(NamedTuple):
    """What an equation sums up inside, and all devices have then: by labels its dims, and those that are summed over."""

    size_bytes: float
    own: tuple[int, ...]
    reduced: tuple[int, ...]


class Labels(NamedTuple):
    """Labels of each operand's and each result's dims.

    `made_of` names results' dims that are made anew of a whole dim of an operand (a slice, a concatenation, rows picked by
    index): the two are not split together, but where the operand's is the batch, the result's is a batch too, and split so.
    `spatial` maps the labels whose neighbours are read across the border of a shard (windows) to the largest degree at
    which a shard still holds a window: they cost a halo exchange, and convolutions need manual axes.
    `sums` are those of a branch of a `cond`: where its labels are reduced, no result is a partial sum.
    """

    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    spatial: dict[int, int] = {}  # noqa: RUF012 - never written to
    made_of: tuple[MadeOf, ...] = ()
    sums: tuple[SumInside, ...] = ()


Rule = Callable[[FlatEqn, list[tuple[int, ...]], list[tuple[int, ...]]], Labels]
_RULES: dict[str, Rule] = {}
_BY_SHAPES: set[Rule] = set()
_warned: set[str] = set()


def register(*names: str, by_shapes: bool = False) -> Callable[[Rule], Rule]:
    """Registers a rule `(eqn, input shapes, output shapes) -> Labels` for the named primitives.

    Args:
      by_shapes: the rule looks at the equation's primitive and shapes only.
    """

    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        if by_shapes:
            _BY_SHAPES.add(rule)
        return rule

    return add


def labels_of(eqn: FlatEqn, program: Program, alike: dict[tuple, Labels] | None = None) -> Labels:
    """The labels of one equation; dims of size 1 are BLOCKED (nothing to split).

    `alike` remembers the labels of equations whose rule looks at their shapes only.
    """
    ins = [tuple(program.aval(a).shape) for a in eqn.inputs]
    outs = [tuple(program.aval(a).shape) for a in eqn.outputs]
    rule = _RULES.get(eqn.name)
    key = (eqn.name, *ins, None, *outs) if alike is not None and rule in _BY_SHAPES else None
    if key is not None and (known := alike.get(key)) is not None:
        return known
    if rule is None:
        if outs and eqn.name not in _warned:  # a callback without results leaves nothing to be split
            _warned.add(eqn.name)
            log.warning(
                "no dimension rule for primitive %r (%s): it is replicated on every device "
                "(add one with soapjax.graph.rules.light_rules.register)",
                eqn.name, eqn.source or "line unknown",
            )
        return replicated(ins, outs)
    found = rule(eqn, ins, outs)

    def clean(labels: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(BLOCKED if n <= 1 else lab for lab, n in zip(labels, shape, strict=True))

    inputs, outputs = tuple(map(clean, found.inputs, ins)), tuple(map(clean, found.outputs, outs))
    found = found._replace(inputs=inputs, outputs=outputs)
    if key is not None:
        alike[key] = found
    return found


def replicated(ins: list[tuple[int, ...]], outs: list[tuple[int, ...]]) -> Labels:
    """Nothing can be split."""
    return Labels(tuple((BLOCKED,) * len(s) for s in ins), tuple((BLOCKED,) * len(s) for s in outs))


def is_known(name: str) -> bool:
    return name in _RULES


def user_spec(eqn: FlatEqn) -> jax.sharding.NamedSharding | None:
    """The sharding of a user's own constraint, None for any other equation."""
    sharding = eqn.params.get("sharding") if eqn.name == "sharding_constraint" else None
    return sharding if isinstance(sharding, jax.sharding.NamedSharding) else None
