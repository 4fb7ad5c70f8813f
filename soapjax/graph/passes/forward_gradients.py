"""Gradients that are forward work although no other gradient is outside them: a later forward pass reads them.

Samples are perturbed along a gradient before they are trained with (adversarial training, PGD), or parameters are before the
gradient that updates them is taken (SAM). No parameter is updated by such a gradient: where one is, and another gradient is
taken of what that made, the step has several updates, and no forward, backward and update part in this order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from soapjax.graph.trace.program import FlatEqn
from soapjax.graph.trace.tracing import TracedStep
from soapjax.graph.trace.values import Values


def read_by_forward(leaves: Sequence[FlatEqn], values: Values, forward: Collection[str]) -> set[str]:
    """The equations (keys) that what the `forward` ones read is made by, beside these."""
    read, found = set[int](), set[str]()
    for _ in range(2 if values.carries else 1):  # twice: the second time sees what flows round the loops
        for eqn in reversed(leaves):
            if eqn.key in forward or not read.isdisjoint(eqn.outputs):
                found.add(eqn.key)
                read.update(values.sources(eqn))
    return found - set(forward)


def updated_by(step: TracedStep, values: Values, updates: Collection[str], keys: Collection[str]) -> bool:
    """Whether new state is made of what the equations `keys` make, through equations of `updates`."""
    program = step.program
    made = {o for eqn in program.leaves if eqn.key in keys for o in eqn.outputs}
    needed = {values.of(o).root for k in step.state_pairs.values() if isinstance(o := program.outputs[k], int)}
    for eqn in reversed(program.leaves):
        if eqn.key in updates and not needed.isdisjoint(eqn.outputs):
            needed.update(values.sources(eqn))
    return not made.isdisjoint(needed)
