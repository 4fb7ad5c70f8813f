"""Equations that add, and those that lay out their one operand anew, cast it or scale it."""

from __future__ import annotations

from soapjax.graph.trace.program import Atom, FlatEqn, Program
from soapjax.graph.trace.values import Values

ADDITIONS = {"add_any", "add"}
LAYOUT_ONLY = {"transpose", "reshape", "squeeze", "convert_element_type", "copy"}


def is_relayout(eqn: FlatEqn, program: Program) -> bool:
    """Whether an equation only lays out its operand anew, or casts it; a sum over dims of one element is such too."""
    if eqn.name == "reduce_sum":
        return program.aval(eqn.inputs[0]).size == program.aval(eqn.outputs[0]).size
    return eqn.name in LAYOUT_ONLY


def operand_of(eqn: FlatEqn, program: Program) -> int | None:
    """What an equation lays out anew, casts, or multiplies or divides by a number; None of one that does none of these."""
    found: Atom | None = eqn.inputs[0] if is_relayout(eqn, program) else None
    if eqn.name in ("mul", "div"):
        first, second = (program.aval(a).shape for a in eqn.inputs)
        found = eqn.inputs[0] if second == () else eqn.inputs[1] if first == () and eqn.name == "mul" else None
    return found if isinstance(found, int) else None


def behind_layouts(atom: int, values: Values) -> int:
    """The root behind transposes, reshapes and casts."""
    root = values.original[atom].root
    for _ in range(64):
        producer = values.producer.get(root)
        if producer is None or producer.name not in LAYOUT_ONLY or not isinstance(producer.inputs[0], int):
            break
        root = values.original[producer.inputs[0]].root
    return root
