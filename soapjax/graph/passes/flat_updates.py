"""Gradients behind an update of one long vector: parameters are put end to end, updated together, and cut apart again.

    flat = concatenate([g.ravel() for g in grads]);  p + split(update(flat))[k].reshape(p.shape)

as `optax.flatten` and `ravel_pytree` do, or matrices of one shape in a stack. No value on the way has the parameter's shape; what
it keeps is its place among the elements, in row-major order, which reshapes do not change and pieces along the leading dim shift.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from soapjax.graph.passes.through_branches import ThroughBranches
from soapjax.graph.trace.program import FlatEqn, Program
from soapjax.graph.trace.values import Values


def gradient_in_pieces(
    program: Program, values: Values, inside: ThroughBranches, out: int,
    is_backward: Callable[[FlatEqn], bool], is_update: Callable[[FlatEqn], bool],
) -> int | None:  # fmt: skip
    """The nearest root of the backward phase, of the shape of `out`, whose elements come to stand where those of `out` are."""
    shape = program.aval(out).shape
    queue = [(out, 0)]  # a value, and which of its elements is the first of `out`; the others follow
    seen = set(queue)
    size = math.prod(shape)
    for value, first in queue:  # grows
        root = values.of(value).root
        producer = values.producer.get(root)
        if producer is None or program.aval(value).shape != program.aval(root).shape:  # one trip's part, say
            continue
        if is_backward(producer) and program.aval(root).shape == shape:
            return root
        if is_update(producer):
            fresh = [found for found in _read_for(program, inside, producer, root, first, size) if found not in seen]
            seen.update(fresh)
            queue += fresh
    return None


def _read_for(
    program: Program, inside: ThroughBranches, eqn: FlatEqn, out: int, first: int, size: int
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """The operands whose elements stand at `size` places from `first` on of the result `out`, and where they stand in these."""
    if (eqn.name == "concatenate" and eqn.params["dimension"] == 0) or (eqn.name == "stack" and eqn.params["axis"] == 0):
        for a in eqn.inputs:
            length = math.prod(program.aval(a).shape)
            if 0 <= first and first + size <= length and isinstance(a, int):
                yield a, first
            first -= length
        return
    if eqn.name == "cond":
        for branch in eqn.params["branches"]:
            yield from _through_branch(inside, eqn, branch, eqn.outputs.index(out), first, size)
        return
    rows = _first_row(eqn, out, program.aval(eqn.inputs[0]).shape) if eqn.inputs else None
    if rows is not None and isinstance(whole := eqn.inputs[0], int):
        yield whole, first + rows * math.prod(program.aval(whole).shape[1:])
    elif eqn.name in ("reshape", "squeeze", "expand_dims", "broadcast_in_dim") and eqn.read:
        (a,) = eqn.read[:1]
        if math.prod(program.aval(a).shape) == math.prod(program.aval(out).shape):
            yield a, first
    else:
        shape = tuple(program.aval(out).shape)
        read = inside.operands(eqn, out, lambda other: other == shape)
        yield from ((a, first) for a in read if tuple(program.aval(a).shape) == shape)


def _through_branch(
    inside: ThroughBranches, eqn: FlatEqn, branch: Any, k: int, first: int, size: int
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """The same of result `k` of a `cond`, by what is inside of one of its branches."""
    program, makers = inside.flat(branch)
    queue = [(v, first)] if isinstance(v := program.outputs[k], int) else []
    for value, start in queue:  # grows
        if value in makers:
            queue += [found for found in _read_for(program, inside, makers[value], value, start, size) if found not in queue]
        elif value in program.inputs and isinstance(a := eqn.inputs[1 + program.inputs.index(value)], int):
            yield a, start


def _first_row(eqn: FlatEqn, out: int, shape: tuple[int, ...]) -> int | None:
    """Of whole rows that an equation cuts out of an array of `shape`: which is the first of `out`. None of any other."""
    if eqn.name == "split" and eqn.params["axis"] == 0:
        return sum(eqn.params["sizes"][: eqn.outputs.index(out)])
    if eqn.name == "unstack" and eqn.params["axis"] == 0:
        return eqn.outputs.index(out)
    if eqn.name == "slice" and shape and eqn.params["strides"] is None:
        starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
        if not any(starts[1:]) and tuple(limits[1:]) == tuple(shape[1:]):
            return starts[0]
    return None
