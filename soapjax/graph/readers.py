"""Parameters that one operator alone reads, all of its tasks alike: what micro-batches, or two passes, can share one copy of."""

from __future__ import annotations

from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.phases import BACKWARD, FORWARD, UPDATE


def single_readers(graph: OperatorGraph) -> dict[int, tuple[int, str | None]]:
    """Parameter (by number) -> the operator that reads it, and the type that it casts it to first.

    Left out is what several operators read, or a loop over layers, which reads a layer at a time.
    """
    number = {p.tensor: k for k, p in enumerate(graph.parameters)}
    found: dict[int, set[tuple[int, str | None]]] = {}
    in_loops = set()
    for task in graph.tasks:
        for access in task.reads if task.phase != UPDATE else ():
            if (k := number.get(access.tensor)) is not None:
                found.setdefault(k, set()).add((task.operator, dict(task.casts).get(access.tensor)))
                if task.scope:
                    in_loops.add(k)
    return {k: next(iter(readers)) for k, readers in found.items() if len(readers) == 1 and k not in in_loops}


def left_parameters(graph: OperatorGraph) -> dict[int, int]:
    """Parameters (by number) of which the forward pass can leave a part, from which the backward pass gathers: both read them.

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
    return {k: first[k] for k in single_readers(graph) if {FORWARD, BACKWARD} <= phases[k]}
