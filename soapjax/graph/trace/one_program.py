"""A step written for many devices as the step of one program over the whole batch.

A step for `jax.pmap` or `shard_map` names an axis: `jax.lax.pmean(grads, "batch")`. Under one program the whole batch is the only
member of that axis. So the step is traced with the axis bound to size 1, and what its collectives then are is written down here:

    psum, pmean, pmax, pmin, ppermute, pbroadcast, all_to_all, tiled all_gather    their operand
    all_gather, psum_scatter                                                       their operand, with a dim of size 1 more or less
    axis_index                                                                     0

A mean over members of means over their samples is the mean over the whole batch, and so is BatchNorm's; a sum over members of sums
is the sum over the whole batch. Only where a step adds up *means* by `psum` it saw the number of members, which is 1 now; one that
asks `jax.device_count()` for it, to divide its loss by, is told what it should ask.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from soapjax.graph.trace.source_lines import line_of_caller

log = logging.getLogger("soapjax")
_COUNTS = "device_count", "local_device_count"  # of jax

_MEMBERS = {
    "psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "reduce_scatter", "ppermute", "pbroadcast",
    "pvary", "all_to_all", "axis_index",
}  # fmt: skip


def for_one_program(closed: Any, axis_names: Collection[str], *, strip_constraints: bool = False) -> Any:
    """A ClosedJaxpr without collectives over `axis_names` (bound to size 1) and, where wanted, without sharding constraints."""
    return closed.replace(jaxpr=_Rewriting(frozenset(axis_names), strip_constraints).jaxpr(closed.jaxpr))


@contextlib.contextmanager
def noting_device_counts(axis_names: Collection[str]) -> Iterator[None]:
    """While a step is traced with axes of one member: warns where it asks how many devices there are."""
    own, asked = {name: getattr(jax, name) for name in _COUNTS}, dict[str, str]()

    def noted(name: str, count: Callable[..., int]) -> Callable[..., int]:
        def counted(*args: Any, **kwargs: Any) -> int:
            if (found := count(*args, **kwargs)) > 1 and (line := line_of_caller()):
                asked[line] = f"jax.{name}() ({found})"
            return found

        return counted

    try:
        for name, count in own.items():
            setattr(jax, name, noted(name, count))
        yield
    finally:
        for name, count in own.items():
            setattr(jax, name, count)
    for line, what in asked.items():
        axes = ", ".join(map(repr, axis_names))
        log.warning(
            "%s: asks %s; under axis_name=%s the whole batch is the one member of the axis: a loss that is divided by the number "
            "of its members (and summed by psum), or a rate that is scaled by it, wants jax.lax.axis_size, which is 1 here",
            line, what, axes,
        )  # fmt: skip


def in_nested(param: Any, rewrite: Callable[[Any], Any]) -> Any:
    """An equation's parameter with each Jaxpr in it (a body, branches) rewritten; as it is, where it has none."""
    if isinstance(param, jex_core.ClosedJaxpr):
        return param.replace(jaxpr=rewrite(param.jaxpr))
    if isinstance(param, jex_core.Jaxpr):
        return rewrite(param)
    if isinstance(param, tuple | list) and any(isinstance(v, jex_core.ClosedJaxpr | jex_core.Jaxpr) for v in param):
        return type(param)(in_nested(v, rewrite) for v in param)
    return param


class _Rewriting:
    def __init__(self, axis_names: frozenset[str], strip_constraints: bool):
        self.axis_names, self.strip_constraints = axis_names, strip_constraints

    def jaxpr(self, jaxpr: Any) -> Any:
        same: dict[Any, Any] = {}  # a result -> the value that it is

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, jex_core.Literal) else same.get(atom, atom)

        eqns = []
        for eqn in jaxpr.eqns:
            eqn = eqn.replace(invars=[read(v) for v in eqn.invars])
            name = eqn.primitive.name
            if self.strip_constraints and name == "sharding_constraint":
                same[eqn.outvars[0]] = eqn.invars[0]
            elif name in _MEMBERS and self._is_over_these_only(eqn) and eqn.params.get("perm") != ():  # () sends to nobody: zeros
                eqns += self._member(eqn, same)
            else:
                params = {k: in_nested(v, self.jaxpr) for k, v in eqn.params.items()}
                eqns.append(eqn.replace(params=params, effects=self._effects(eqn.effects)))
        return jaxpr.replace(eqns=eqns, outvars=[read(v) for v in jaxpr.outvars], effects=self._effects(jaxpr.effects))

    def _is_over_these_only(self, eqn: Any) -> bool:
        axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        axes = axes if isinstance(axes, tuple | list) else (axes,)
        return bool(axes) and all(a in self.axis_names for a in axes)

    def _member(self, eqn: Any, same: dict[Any, Any]) -> list[Any]:
        """What a collective of one member is: its operands, or equations that make it."""
        if eqn.primitive.name == "axis_index":
            (out,) = eqn.outvars
            same[out] = jex_core.Literal(np.zeros((), out.aval.dtype)[()], out.aval)
            return []
        made = []
        for x, out in zip(eqn.invars, eqn.outvars, strict=True):
            if x.aval.shape == out.aval.shape:
                same[out] = x
            else:
                params = dict(new_sizes=tuple(out.aval.shape), dimensions=None, sharding=None)
                effects = self._effects(eqn.effects)
                made.append(eqn.replace(primitive=jax.lax.reshape_p, params=params, invars=[x], outvars=[out], effects=effects))
        return made

    def _effects(self, effects: Any) -> Any:
        """Without those that only say that an axis is named."""
        return type(effects)(e for e in effects if getattr(e, "name", None) not in self.axis_names)
