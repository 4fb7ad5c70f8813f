"""State that is no tensor of the graph: what only updates read, and no parameter has.

A parameter that the loss does not read, with its optimizer state; rows and columns of squares, as Adafactor keeps. Nothing splits
it: every device that updates it keeps it whole.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from soapjax.graph.operators import Parameter, UnplacedState
from soapjax.graph.passes.phases import UPDATE, Phases
from soapjax.graph.trace.program import bytes_of
from soapjax.graph.trace.tracing import TracedStep
from soapjax.graph.trace.values import Values


def unplaced_state(
    step: TracedStep, values: Values, phases: Phases, parameters: Sequence[Parameter], placed: Collection[int]
) -> tuple[UnplacedState, ...]:
    """By input, all that is no single number.

    Args:
      parameters: those in `phases`, and frozen ones.
      placed: inputs (values of the program) that are tensors of the graph.
    """
    program = step.program
    taken = {*placed, *(program.inputs[i] for p in parameters for i in p.leaves)}
    leaves = [
        i for i, v in enumerate(program.inputs)
        if v not in taken and program.avals[v].size > 1 and (step.is_read[i] or i in step.state_pairs)
    ]  # fmt: skip
    owners = _first_owners(step, values, phases, parameters) if leaves else {}
    found = []
    for i in leaves:
        out = program.outputs[step.state_pairs[i]] if i in step.state_pairs else None
        operator = owners.get(values.of(out).root, 0) if isinstance(out, int) else 0
        found.append(UnplacedState(i, bytes_of(program.avals[program.inputs[i]]), operator))
    return tuple(found)


def _first_owners(step: TracedStep, values: Values, phases: Phases, parameters: Sequence[Parameter]) -> dict[int, int]:
    """What an update makes of gradients (roots) -> the first of the operators whose parameters these are: it stands in the stage
    where a pipeline keeps the result (execute/parts/update_cut.py)."""
    found: dict[int, int] = {}
    for traced, parameter in zip(phases.parameters, parameters, strict=False):  # behind those that are trained come frozen ones
        found[traced.gradient] = min(parameter.owner, found.get(traced.gradient, parameter.owner))
    for eqn in step.program.leaves:
        if phases.phase[eqn.key] == UPDATE:
            owners = [found[root] for root in values.sources(eqn) if root in found]
            if owners:
                found.update(dict.fromkeys(eqn.outputs, min(owners)))
    return found
