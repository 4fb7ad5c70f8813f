"""Names of operators, and which of them repeat one another."""

from __future__ import annotations

import hashlib

from soapjax.graph.operators import Operator, Task, Tensor
from soapjax.graph.phases import BACKWARD, UPDATE, Phases, module_path
from soapjax.graph.units import Unit
from soapjax.graph.values import Values


def operator_names(first_units: list[Unit], values: Values, phases: Phases) -> list[str]:
    """A readable, unique name per operator, from its first unit: the module path, or the kind where there is none."""
    names: list[str] = []
    for unit in first_units:
        paths = [module_path(e.stack) for e in ([unit.heavy] if unit.heavy else unit.eqns)]
        path = max(sorted(set(paths), reverse=True), key=lambda p: (paths.count(p), p.count("/")))
        path = path or _parameter_path(unit, values, phases)
        base = path or {"fused": "step"}.get(unit.kind, unit.kind)
        base += "~backward" if unit.phase == BACKWARD else "~update" if unit.phase == UPDATE else ""
        name, n = base, 1
        while name in names:
            n += 1
            name = f"{base}#{n}"
        names.append(name)
    return names


def _parameter_path(unit: Unit, values: Values, phases: Phases) -> str:
    """Where the name stacks carry no modules (nnx, updates): the module of the first parameter that the unit reads.

    In a loop of updates that is what the loop starts from; a moment counts for its parameter.
    """
    roots = {values.first(a) for e in unit.eqns for a in e.inputs if isinstance(a, int)}
    inputs = values.program.inputs
    for parameter in phases.parameters:
        mine = {parameter.value} if unit.phase != UPDATE else {parameter.value, *(inputs[k] for k in parameter.state_leaves)}
        if mine & roots:
            parts = [part for part in parameter.path.removesuffix(".value").split(".") if part not in ("params", "0")]
            return "/".join(parts[1:] if unit.phase == UPDATE else parts[1:-1])
    return ""


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
