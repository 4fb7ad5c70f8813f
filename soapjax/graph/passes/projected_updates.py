"""Gradients behind an update that has no value of the parameter's shape: one in a projection to few rows, as GaLore makes it.

    rows = q.T @ gradient;  moment = 0.9 * moment + rows;  w - 0.1 * q @ moment

The gradient is told by being the only one of the parameter's shape that its new value is made of. Single numbers are not followed:
norms of all gradients, counters and whether all is finite lead from every parameter to every other's gradient.
"""

from __future__ import annotations

from collections.abc import Callable

from soapjax.graph.passes.through_branches import ThroughBranches
from soapjax.graph.trace.program import FlatEqn, Program
from soapjax.graph.trace.values import Values


def only_gradient(
    program: Program, values: Values, inside: ThroughBranches, out: int,
    is_backward: Callable[[FlatEqn], bool], is_update: Callable[[FlatEqn], bool],
) -> int | None:  # fmt: skip
    """The root of the backward phase, of the shape of `out`, that updates make `out` of; None where there are several, or none."""
    shape, found = program.aval(out).shape, set[int]()
    queue = [values.of(out).root]
    for root in queue:  # grows
        producer = values.producer.get(root)
        if producer is None:
            continue
        if is_backward(producer):
            found.update({root} if program.aval(root).shape == shape else ())
        elif is_update(producer):
            read = inside.operands(producer, root, lambda other: len(other) > 0)
            queue += [r for a in read if program.aval(a).shape and (r := values.of(a).root) not in queue]
    return found.pop() if len(found) == 1 else None
