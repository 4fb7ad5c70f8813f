"""What crosses between the stages of a pipeline: every tensor once per stage that reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from soapjax.graph.operators import BACKWARD, UPDATE, OperatorGraph

OF_UPDATE = -1  # the position of an operator that has tasks in the update alone


class Flow(NamedTuple):
    """A tensor that one stage makes, or holds, and another reads."""

    source: int
    reader: int
    tensor: int
    kind: str  # a field of `CrossingBytes`
    share: float = 1.0  # of what is kept of the tensor: of a loop's values the last one, where nothing else is read behind it


class CrossingBytes(NamedTuple):
    """Bytes between two stages, all devices together."""

    forward: float = 0.0  # per micro-batch
    backward: float = 0.0
    parameters: float = 0.0  # per step: what the earlier stage holds and the later one reads too
    sums: float = 0.0  # per step: of the gradients of these


def flows_between(graph: OperatorGraph, stage: np.ndarray) -> list[Flow]:
    """What crosses between stages [N] of operators; every tensor once per stage that reads it.

    A parameter that several stages read lives on the first of them; what the others add to its gradient is summed over their
    micro-batches before it comes there (execute/parts/stage_cut.py).
    """
    made = {a.tensor: task for task in graph.tasks for a in task.writes}
    tied = {i for s in graph.accumulations for i in (*s.summands, *s.running, s.total)}
    parameters = {p.tensor for p in graph.parameters}
    read = _read_behind_loops(graph, stage)
    home: dict[int, int] = {}
    stage = stage.tolist()
    seen: set[tuple[int, int]] = set()
    found = []
    reads = [(access.tensor, stage[task.operator]) for task in graph.tasks if task.phase != UPDATE for access in task.reads]
    begins = [(e.source, stage[made[e.target].operator]) for e in graph.entries if e.target in made and e.source in made]
    for tensor, reader in (*reads, *begins):
        source = stage[made[tensor].operator] if tensor in made else OF_UPDATE
        if tensor in parameters:
            source = home.setdefault(tensor, reader)
        if source < 0 or source == reader or (tensor, reader) in seen:
            continue
        seen.add((tensor, reader))
        if tensor in parameters:
            kind = "parameters"
        elif tensor in tied:
            kind = "sums"
        else:
            kind = "backward" if source > reader or made[tensor].phase == BACKWARD else "forward"
        values = read.get((tensor, reader))
        found.append(Flow(source, reader, tensor, kind, min(1.0, sum(values) / graph.tensors[tensor].copies) if values else 1.0))
    return found


def _read_behind_loops(graph: OperatorGraph, stage: np.ndarray) -> dict[tuple[int, int], set[int]]:
    """(tensor, stage) -> how many of the values that a loop makes of it are read at once, where no loop of the stage reads them."""
    found: dict[tuple[int, int], set[int]] = {}
    inside: set[tuple[int, int]] = set()
    for task in graph.tasks:
        for access in task.reads if task.phase != UPDATE else ():
            key = access.tensor, int(stage[task.operator])
            if task.scope:
                inside.add(key)
            else:
                found.setdefault(key, set()).add(access.trips)
    return {key: values for key, values in found.items() if key not in inside}


def sums_of(flows: Sequence[Flow], size: Callable[[Flow], float]) -> dict[tuple[int, int], CrossingBytes]:
    """(earlier stage, later stage) -> what crosses, by the size of each flow in bytes."""
    found: dict[tuple[int, int], CrossingBytes] = {}
    for f in flows:
        pair = min(f.source, f.reader), max(f.source, f.reader)
        before = found.get(pair, CrossingBytes())
        found[pair] = before._replace(**{f.kind: getattr(before, f.kind) + f.share * float(size(f))})
    return found


def crossing_bytes(graph: OperatorGraph, stage: np.ndarray) -> dict[tuple[int, int], CrossingBytes]:
    """`sums_of` of whole tensors."""
    return sums_of(flows_between(graph, stage), lambda f: graph.tensors[f.tensor].size_bytes * graph.tensors[f.tensor].copies)
