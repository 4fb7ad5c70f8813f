"""The update phase: which equations update which parameter."""

from __future__ import annotations

from soapjax.graph.passes.phases import Phases
from soapjax.graph.rules.flops import flops_of
from soapjax.graph.trace.program import FlatEqn, Program
from soapjax.graph.trace.values import Values


def update_work(updates: list[FlatEqn], program: Program, values: Values, phases: Phases) -> tuple[list[float], list[list[str]]]:
    """FLOPs and equations of each parameter's update; what mixes parameters (a global norm) belongs to none."""
    owner: dict[int, int] = {}
    for p, parameter in enumerate(phases.parameters):
        owner[parameter.gradient] = p
        owner[parameter.value] = p
        owner.update({program.inputs[j]: p for j in parameter.state_leaves})
    work = [0.0] * len(phases.parameters)
    equations: list[list[str]] = [[] for _ in work]
    for e in updates:
        mine = {owner[r] for a in e.read if (r := values.of(a).root) in owner}
        if len(mine) == 1:
            p = mine.pop()
            work[p] += flops_of(e, program)
            equations[p].append(e.key)
            if program.avals[e.outputs[0]].shape:
                owner.update(dict.fromkeys(e.outputs, p))
    return work, equations
