"""What depends on values of a program, and what they depend on: through loops, and through barriers value by value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from soapjax.graph.trace.program import FlatEqn, Program


def follow(program: Program, data: set[int], stop: frozenset[int] = frozenset()) -> None:
    """Adds to `data` all that depends on it but for `stop`; what one trip of a loop makes, the next one reads."""
    for eqn in program.eqns:
        moved = [isinstance(a, int) and a in data for a in eqn.inputs]
        if not any(moved):
            continue
        if eqn.body is None:
            if eqn.name == "cond":
                moved = _through_branches(eqn, moved)
            elif eqn.name != "optimization_barrier":  # of many values, each as it was
                moved = [True] * len(eqn.outputs)
            data.update(o for o, m in zip(eqn.outputs, moved, strict=True) if m and o not in stop)
            continue
        body, first = eqn.body, eqn.params["num_consts"]
        data.update(i for i, m in zip(body.inputs, moved, strict=True) if m)
        carried = list(zip(body.inputs[first : first + eqn.params["num_carry"]], body.outputs, strict=False))
        before = -1
        while len(data) > before:
            before = len(data)
            follow(body, data, stop)
            data.update(i for i, o in carried if isinstance(o, int) and o in data)
        made = zip(eqn.outputs, body.outputs, strict=True)
        data.update(o for o, inside in made if isinstance(inside, int) and inside in data and o not in stop)


def _through_branches(eqn: FlatEqn, moved: Sequence[bool]) -> list[bool]:
    """Which results of a `cond` depend on these of its operands: a branch may pass on what it is given."""
    if moved[0]:
        return [True for _ in eqn.outputs]
    found = [_through(branch.jaxpr, moved[1:]) for branch in eqn.params["branches"]]
    return [any(of) for of in zip(*found, strict=True)]


def _through(jaxpr: Any, moved: Sequence[bool]) -> list[bool]:
    data = {v for v, is_moved in zip(jaxpr.invars, moved, strict=True) if is_moved}
    for eqn in jaxpr.eqns:
        if any(not hasattr(v, "val") and v in data for v in eqn.invars):
            data.update(eqn.outvars)
    return [not hasattr(v, "val") and v in data for v in jaxpr.outvars]


def needed_for(program: Program, wanted: set[int]) -> Iterator[FlatEqn]:
    """The equations that `wanted` is made by, last ones first; of a loop all of its body."""
    for eqn in reversed(program.eqns):
        if wanted.isdisjoint(eqn.outputs):
            continue
        if eqn.name == "optimization_barrier":
            wanted.update(a for a, o in zip(eqn.inputs, eqn.outputs, strict=True) if isinstance(a, int) and o in wanted)
            continue
        wanted.update(eqn.read)
        if eqn.body is None:
            yield eqn
        else:
            yield from eqn.body.leaves
