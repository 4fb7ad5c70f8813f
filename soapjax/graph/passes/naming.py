"""Names of operators, and which of them repeat one another."""

from __future__ import annotations

import hashlib

from soapjax.graph.operators import Operator, Task, Tensor
from soapjax.graph.passes.phases import BACKWARD, UPDATE, Phases, module_path
from soapjax.graph.passes.units import Unit
from soapjax.graph.trace.values import Values


def operator_names(first_units: list[Unit], values: Values, phases: Phases) -> list[str]:
    """A readable, unique name per operator, from its first unit: the module path, or the kind where there is none."""
    names: dict[str, int] = {}  # name -> how many of the units have it, numbered
    parameters = _parameters_of(values, phases)
    for unit in first_units:
        paths = [module_path(e.stack) for e in ([unit.heavy] if unit.heavy else unit.eqns)]
        path = max(sorted(set(paths), reverse=True), key=lambda p: (paths.count(p), p.count("/")))
        path = path or _parameter_path(unit, values, phases, parameters)
        base = path or {"fused": "step"}.get(unit.kind, unit.kind)
        base += "~backward" if unit.phase == BACKWARD else "~update" if unit.phase == UPDATE else ""
        name, n = base, names.get(base, 1)
        while name in names:
            n += 1
            name = f"{base}#{n}"
        names[base] = n
        names.setdefault(name, 1)
    return list(names)


def _parameters_of(values: Values, phases: Phases) -> tuple[dict[int, int], dict[int, int]]:
    """Root -> the first parameter that has it as its value; the same, where the optimizer's state counts too."""
    inputs = values.program.inputs
    value: dict[int, int] = {}
    state: dict[int, int] = {}
    for p, parameter in enumerate(phases.parameters):
        value.setdefault(parameter.value, p)
        for root in (parameter.value, *(inputs[k] for k in parameter.state_leaves)):
            state.setdefault(root, p)
    return value, state


def _parameter_path(unit: Unit, values: Values, phases: Phases, parameters: tuple[dict[int, int], dict[int, int]]) -> str:
    """Where the name stacks carry no modules (nnx, updates): the module of the first parameter that the unit reads.

    In a loop of updates that is what the loop starts from; a moment counts for its parameter.
    """
    roots = {values.first(a) for e in unit.eqns for a in e.read}
    known = parameters[unit.phase == UPDATE]
    first = min((known[root] for root in roots if root in known), default=None)
    if first is None:
        return ""
    parts = [p for p in phases.parameters[first].path.removesuffix(".value").split(".") if p not in ("params", "0")]
    return "/".join(parts[1:] if unit.phase == UPDATE else parts[1:-1])


def grouped(operators: list[Operator], tasks: list[Task], tensors: list[Tensor]) -> list[Operator]:
    """Numbers operators of equal structure and shapes alike."""
    seen: dict[str, int] = {}
    grouped = []
    for op in operators:
        own = [tasks[t] for t in op.tasks]
        text = repr(
            (op.kind, op.dims, len(op.parameters))
            + tuple(
                (t.phase, t.kind, t.dtype, t.work, t.trip_count)
                + tuple((tensors[a.tensor].shape, a.dims, a.reduced) for a in (*t.reads, *t.writes))
                for t in own
            )
        )
        key = hashlib.sha256(text.encode()).hexdigest()
        grouped.append(op._replace(group=seen.setdefault(key, len(seen))))
    return grouped
