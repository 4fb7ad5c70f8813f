"""Which tensors occupy memory, and until when: XLA keeps no result of light equations that its readers can compute themselves.

The derivative of an activation is read by the backward pass, yet never stored: the compiler fuses it into its readers, which
compute it from the value before, and that one stays alive instead, with what takes long to compute from it (a tanh). Stored are
results of heavy equations, what heavy equations read, what leaves the step or a loop, and what is summed or drawn. A light task
writes its result over an operand of the same size that nobody reads any more. A sum that something is scattered into has a place
of its own: what it was computed from is free when it is cast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from soapjax.graph.operators import HEAVY_RESULT, OperatorGraph, Task
from soapjax.graph.passes.phases import BACKWARD, FORWARD
from soapjax.graph.rules.pools import needed_at


class Lifetimes(NamedTuple):
    """Of every tensor of a graph."""

    is_stored: np.ndarray  # bool [T]
    last_use: np.ndarray  # int32 [T]: the last task that reads it, or computes from it what is not stored; -1 where none does
    computed_until: np.ndarray  # int32 [T]: the last task for which something is computed from it that is not stored; -1
    is_reused: np.ndarray  # bool [T]: the task of its last use writes a result in its place
    is_stand_in: np.ndarray  # bool [T]: counted for a heavy equation's own result, which is no tensor: that one is kept
    scale: np.ndarray  # float32 [T]: how many times as large what is kept is: a sign may stand for the number that it is of


def lifetimes(graph: OperatorGraph) -> Lifetimes:
    """Goes backward through the tasks: what is not stored lengthens the lives of what it is made from."""
    num = len(graph.tensors)
    is_stored, last_use, computed_until = np.ones(num, bool), np.full(num, -1, np.int32), np.full(num, -1, np.int32)
    is_stand_in, scale = np.zeros(num, bool), np.ones(num, np.float32)
    early = needed_at(graph)
    kept = {i for e in graph.entries for i in e} | {p.gradient for p in graph.trained} | {p.tensor for p in graph.parameters}
    kept |= {i for i, t in enumerate(graph.tensors) if t.output_leaves or t.copies > 1}
    is_fused = np.ones(num, bool)  # by every reader
    scope = {a.tensor: t.scope for t in graph.tasks for a in t.writes}
    for k, task in enumerate(graph.tasks):
        for access in task.reads:
            i = access.tensor
            last_use[i] = max(last_use[i], early.get((k, i), k))
            is_fused[i] &= access.operand < 0 and task.parameter < 0 and scope.get(i, "") == task.scope
    for task in reversed(graph.tasks):
        free = {i: sources for i, sources in task.sources.items() if i not in kept and is_fused[i] and last_use[i] >= 0}
        stands_for = _stand_in(graph, free)
        if stands_for >= 0:
            is_stand_in[stands_for] = True
            kept_bytes = task.memory.result_bytes * task.memory.keeps_result + task.memory.costly_bytes
            scale[stands_for] = kept_bytes / graph.tensors[stands_for].size_bytes
        elif task.memory.costly_bytes and (own := _own_result(task, free)) >= 0:
            scale[own] += task.memory.costly_bytes / graph.tensors[own].size_bytes
        for i, sources in free.items():
            if sources is not None and i != stands_for:
                is_stored[i] = False
                for s in sources:
                    s = stands_for if s == HEAVY_RESULT else s
                    computed_until[s] = max(computed_until[s], last_use[i])
                    last_use[s] = max(last_use[s], last_use[i])
    return Lifetimes(is_stored, last_use, computed_until, _reused(graph, is_stored, last_use, kept), is_stand_in, scale)


def makers(graph: OperatorGraph) -> np.ndarray:
    """The task [T] that writes each tensor, -1 where none does."""
    found = np.full(len(graph.tensors), -1)
    for k, task in enumerate(graph.tasks):
        found[[a.tensor for a in task.writes]] = k
    return found


def kept_between_passes(
    graph: OperatorGraph, lives: Lifetimes, maker: np.ndarray, tasks: Iterable[int], is_here: Callable[[Task], bool],
) -> set[int]:  # fmt: skip
    """Forward tensors that backward tasks read, or compute what they read from, where both passes are programs of their own.

    Of what is not stored, and of a heavy equation's own result that is no tensor, that from which it is computed, or what stands
    for it. Not by tasks that are elsewhere: what they make is given.

    Args:
      maker: as `makers`.
      tasks: of the program, forward ones may be among them.
    """
    queue = [a.tensor for k in tasks if graph.tasks[k].phase == BACKWARD for a in graph.tasks[k].reads if maker[a.tensor] >= 0]
    seen, kept = set(queue), set()
    while queue:
        tensor = queue.pop()
        task = graph.tasks[maker[tensor]]
        if task.phase != FORWARD:
            continue
        if lives.is_stored[tensor] or not is_here(task):
            kept.add(tensor)
            continue
        for s in task.sources[tensor] or ():
            if s == HEAVY_RESULT:
                s = next(a.tensor for a in task.writes if lives.is_stand_in[a.tensor])
            if s not in seen and maker[s] >= 0:
                seen.add(s)
                queue.append(s)
    return kept


def kept_for_result(graph: OperatorGraph, lives: Lifetimes, task: Task) -> tuple[int, ...]:
    """The tensors that one program gives another for a heavy equation's own result; none where that one is smaller, or a tensor."""
    made = [
        i for i, sources in task.sources.items()
        if sources is not None and HEAVY_RESULT in sources and (lives.is_stand_in[i] or not lives.is_stored[i])
    ]  # fmt: skip
    has_stand_in = any(lives.is_stand_in[t] for t in made)
    return tuple(made) if has_stand_in and sum(graph.tensors[t].size_bytes for t in made) < task.memory.result_bytes else ()


def _stand_in(graph: OperatorGraph, free: dict[int, tuple[int, ...] | None]) -> int:
    """The result that is counted for the heavy equation's own, where others are computed from that one: the largest."""
    found = [i for i, sources in free.items() if sources is not None and HEAVY_RESULT in sources]
    return max(found, key=lambda i: graph.tensors[i].size_bytes, default=-1)


def _own_result(task: Task, free: dict[int, tuple[int, ...] | None]) -> int:
    """The heavy equation's own result, where it is a tensor from which others are computed; -1."""
    own = next((i for i, sources in task.sources.items() if sources is None), -1)
    return own if any(own in (sources or ()) for sources in free.values()) else -1


def _reused(graph: OperatorGraph, is_stored: np.ndarray, last_use: np.ndarray, kept: set[int]) -> np.ndarray:
    reused = np.zeros(len(graph.tensors), bool)
    passing = {a.tensor for t in graph.tasks for a in t.writes} - kept
    sources = {i: found for t in graph.tasks for i, found in t.sources.items()}
    scattered = {a.tensor for t in graph.tasks if t.memory.adds_to_sum for a in t.writes}
    for k, task in enumerate(graph.tasks):
        if task.is_heavy:
            continue
        read = dict.fromkeys(a.tensor for a in task.reads)
        queue = list(read) if scattered & read.keys() else []
        while queue:
            i = queue.pop()
            more = () if is_stored[i] else [s for s in sources.get(i) or () if s != HEAVY_RESULT and s not in read]
            read.update(dict.fromkeys(more))
            queue += more
        free = [i for i in read if last_use[i] == k and i in passing and is_stored[i]]
        for access in task.writes:
            size = graph.tensors[access.tensor].size_bytes
            place = next((i for i in free if graph.tensors[i].size_bytes == size and not reused[i]), None)
            if is_stored[access.tensor] and place is not None:
                reused[place] = True
    return reused
