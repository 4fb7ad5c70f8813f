"""Who reads a parameter: of which micro-batches, or two passes, can share one copy."""

from __future__ import annotations

from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.phases import BACKWARD, FORWARD, UPDATE


def kept_copies(graph: OperatorGraph) -> dict[int, str | None]:
    """Parameters (by number) of which one copy may serve all passes -> the type that all readers cast it to first; None where they
    do not, or differ.

    Left out is what a loop over layers reads, a layer at a time.
    """
    casts = {k: {cast for _, cast in found} for k, found in _readers(graph).items()}
    return {k: next(iter(found)) if len(found) == 1 else None for k, found in casts.items()}


def _readers(graph: OperatorGraph) -> dict[int, set[tuple[int, str | None]]]:
    """Of parameters (by number) that no loop reads the operators that read them, each with the type that it casts it to first."""
    number = {p.tensor: k for k, p in enumerate(graph.parameters)}
    found: dict[int, set[tuple[int, str | None]]] = {}
    in_loops = set()
    for task in graph.tasks:
        for access in task.reads if task.phase != UPDATE else ():
            if (k := number.get(access.tensor)) is not None:
                found.setdefault(k, set()).add((task.operator, dict(task.casts).get(access.tensor)))
                if task.scope:
                    in_loops.add(k)
    return {k: readers for k, readers in found.items() if k not in in_loops}


def left_parameters(graph: OperatorGraph) -> dict[int, int]:
    """Parameters (by number) of which the forward pass can leave a part, from which the backward pass gathers: of one operator both
    read them.

    Each with the first task that reads it.
    """
    number = {p.tensor: k for k, p in enumerate(graph.parameters)}
    phases: dict[int, set[int]] = {}
    first: dict[int, int] = {}
    for i, task in enumerate(graph.tasks):
        for access in task.reads:
            if (k := number.get(access.tensor)) is not None:
                first.setdefault(k, i)
                phases.setdefault(k, set()).add(task.phase)
    single = (k for k, readers in _readers(graph).items() if len(readers) == 1)
    return {k: first[k] for k in single if {FORWARD, BACKWARD} <= phases[k]}


def served_by_loop(graph: OperatorGraph) -> frozenset[tuple[int, int]]:
    """(backward task, tensor) where a parameter is read in a loop whose forward tasks read it too, as of gradients added up in it.

    The loop holds until its end what it reads of outside: one copy serves both passes. Not meant are slices of it, by trip.
    """
    parameters = {p.tensor for p in graph.parameters}
    read = [(k, a.tensor) for k, t in enumerate(graph.tasks) if t.scope for a in t.reads if a.tensor in parameters]
    loop = [task.scope.partition("/")[0] for task in graph.tasks]
    forward = {(loop[k], i) for k, i in read if graph.tasks[k].phase == FORWARD}
    return frozenset((k, i) for k, i in read if graph.tasks[k].phase == BACKWARD and (loop[k], i) in forward)
