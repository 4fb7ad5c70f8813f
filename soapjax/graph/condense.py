"""The graph of a deep model with few of its repeated blocks: what planners of pipelines price instead of the whole.

A model of 128 equal layers has 128 times the operators of one, and nothing more to choose. `condense` finds the longest run of
blocks that repeat one another, keeps MOST_KEPT of them, and joins the ends as if the model had been written with so few: what a
block reads of a removed neighbour it reads of the neighbour that is kept, in the forward and in the backward pass.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from soapjax.graph.operators import Access, OperatorGraph, Task
from soapjax.graph.phases import FORWARD

MOST_KEPT = 4  # the first and the last block have other neighbours than those between; and two of these tell what one more costs


class Blocks(NamedTuple):
    """A run of forward operators that consists of `count` blocks of `period` operators each."""

    first: int  # position of the first block's first operator among the forward operators
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.period * self.count


@dataclasses.dataclass(frozen=True, eq=False)
class Condensed:
    """A graph without some of its blocks.

    `operator_of` and `tensor_of` say which operator and tensor of `graph` stands for one of the whole graph (-1: none does).
    """

    graph: OperatorGraph
    blocks: Blocks  # of the whole graph
    num_removed: int  # blocks
    operator_of: np.ndarray  # int [N]
    tensor_of: np.ndarray  # int [T]


def forward_operators(graph: OperatorGraph) -> tuple[int, ...]:
    """Operators with a part in the forward pass, in program order: what stages are cut from."""
    first: dict[int, int] = {}
    for k, task in enumerate(graph.tasks):
        if task.phase == FORWARD:
            first.setdefault(task.operator, k)
    return tuple(sorted(first, key=first.get))


def repeated_blocks(graph: OperatorGraph, crossing_bytes: np.ndarray) -> Blocks | None:
    """The run of repeated blocks, two at least, with most operators; None where nothing repeats.

    Args:
      crossing_bytes: [n + 1] what crosses forwards at each place between forward operators; blocks begin where least does.
    """
    forward = forward_operators(graph)
    groups = np.array([graph.operators[n].group for n in forward])
    paths = [graph.operators[n].name.split("/") for n in forward]
    best: Blocks | None = None
    for period in range(1, len(groups) // 2 + 1):
        # Runs of positions that repeat the one a period later: in 0 1 1 1 0 they begin and end where the difference is 1 and -1.
        same = np.diff(np.r_[0, (groups[period:] == groups[:-period]).astype(int), 0])
        for a, b in zip(np.flatnonzero(same == 1), np.flatnonzero(same == -1), strict=True):
            count = (b - a + period) // period
            if count > 1 and (best is None or count * period > best.count * best.period):
                spare = b - a + period - count * period
                starts = np.arange(a, a + spare + 1)
                best = Blocks(int(starts[crossing_bytes[starts].argmin()]), period, int(count))
    if best is None:
        return None
    shared = [0, *(len(os.path.commonprefix([a, b])) for a, b in itertools.pairwise(paths))]
    return _cheapest(best, groups, list(zip(crossing_bytes.tolist(), shared, strict=False)))


def _cheapest(found: Blocks, groups: np.ndarray, cost: Sequence[tuple[float, int]]) -> Blocks:
    """The same run from where least crosses, and of equals where a module ends; one block less if it has to be."""
    starts = np.arange(found.first, found.first + found.period)
    counts = np.where(starts == found.first, found.count, found.count - 1)
    for k, start in enumerate(starts):  # as many blocks as fit behind a later start
        while start + (counts[k] + 1) * found.period <= len(groups) and np.array_equal(
            groups[start : start + found.period], groups[start + counts[k] * found.period : start + (counts[k] + 1) * found.period]
        ):
            counts[k] += 1
    usable = np.flatnonzero(counts >= min(found.count, MOST_KEPT + 1)).tolist()
    k = min(usable, key=lambda k: cost[starts[k]], default=0)
    return Blocks(int(starts[k]), found.period, int(counts[k]))


def condense(graph: OperatorGraph, crossing_bytes: np.ndarray) -> Condensed | None:
    """The graph with MOST_KEPT blocks; None where it has no more, or where its blocks are not wired alike."""
    blocks = repeated_blocks(graph, crossing_bytes)
    return None if blocks is None or blocks.count <= MOST_KEPT else _Condensing(graph, blocks).run()


class _Unlike(Exception):
    """Two blocks of equal operators read other things."""


class _Condensing:
    def __init__(self, graph: OperatorGraph, blocks: Blocks):
        self.graph, self.blocks = graph, blocks
        self.removed = blocks.count - MOST_KEPT
        forward = forward_operators(graph)
        p = blocks.period
        self.members = [forward[blocks.first + j * p : blocks.first + (j + 1) * p] for j in range(blocks.count)]
        self.block_of = np.full(graph.num_operators, -1)
        for j, mine in enumerate(self.members):
            self.block_of[list(mine)] = j
        # The second half of what is kept is the end of the run.
        self.first_removed = MOST_KEPT // 2
        self.is_removed = (self.block_of >= self.first_removed) & (self.block_of < self.first_removed + self.removed)

    def run(self) -> Condensed | None:
        try:
            return self._condensed(self._later())
        except _Unlike:
            return None

    def _later(self) -> dict[int, int]:
        """Of every tensor that a block makes the same one of the block as many places on as are removed.

        Raises: _Unlike where blocks make, or read of one another, other things.
        """
        self.later: dict[int, int] = {}
        pairs = [
            (self.graph.tasks[s], self.graph.tasks[t])
            for mine, others in zip(self.members, self.members[self.removed :], strict=False)
            for a, b in zip(mine, others, strict=True)
            for s, t in zip(self.graph.operators[a].tasks, self.graph.operators[b].tasks, strict=True)
        ]  # groups have as many tasks
        for one, other in pairs:
            self._pair(one, other)
        for one, other in pairs:
            if any(self.later.get(x.tensor, y.tensor) != y.tensor for x, y in zip(one.reads, other.reads, strict=True)):
                raise _Unlike
        return self.later

    def _pair(self, one: Task, other: Task) -> None:
        if (len(one.writes), len(one.reads)) != (len(other.writes), len(other.reads)):
            raise _Unlike
        for a, b in zip(one.writes, other.writes, strict=True):
            if self.later.setdefault(a.tensor, b.tensor) != b.tensor:
                raise _Unlike

    def _condensed(self, later: dict[int, int]) -> Condensed:
        graph = self.graph
        earlier = {b: a for a, b in later.items()}
        maker = {a.tensor: t.operator for t in graph.tasks for a in t.writes}
        gone_parameters = {p for n in np.flatnonzero(self.is_removed) for p in graph.operators[n].parameters}
        gone = {i for i, n in maker.items() if self.is_removed[n]}
        for p in gone_parameters:
            parameter = graph.parameters[p]
            leaves = {parameter.leaf, *parameter.state_leaves}
            gone |= {parameter.tensor, parameter.gradient}
            gone |= {i for i, t in enumerate(graph.tensors) if t.input_leaf in leaves}
        operators = [n for n in range(graph.num_operators) if not self.is_removed[n]]
        kept_task = [not self.is_removed[t.operator] and t.parameter not in gone_parameters for t in graph.tasks]
        tasks = [k for k, keep in enumerate(kept_task) if keep]
        tensors = [i for i in range(len(graph.tensors)) if i not in gone]
        new_operator, new_task, new_tensor = (
            {old: new for new, old in enumerate(x)} for x in (operators, tasks, tensors)
        )  # fmt: skip
        parameters = [p for p in range(len(graph.parameters)) if p not in gone_parameters]
        new_parameter = {old: new for new, old in enumerate(parameters)}
        if any(gone & {*s.summands, *s.running, s.total} for s in graph.accumulations if s.parameter in new_parameter):
            raise _Unlike  # every block adds to the gradient of one parameter

        def read(tensor: int, reader: int) -> int | None:
            """What stands for a tensor, where a task of block `reader` (-1: of none) reads it; None: nothing does."""
            if tensor not in gone:
                return new_tensor[tensor]
            if reader < 0:
                # The end of the run, read behind it, is still there; what reads every block reads those that are left.
                return None
            moved = earlier.get(tensor) if reader >= self.first_removed + self.removed else later.get(tensor)
            if moved is None or moved in gone:
                raise _Unlike
            return new_tensor[moved]

        def accesses(found: Sequence[Access], reader: int) -> tuple[Access, ...]:
            named = ((a, read(a.tensor, reader)) for a in found)
            return tuple(a._replace(tensor=t) for a, t in named if t is not None)

        def moved_task(k: int) -> Task:
            task = graph.tasks[k]
            reader = int(self.block_of[task.operator])
            choices_of = -1 if task.choices_of < 0 else read(task.choices_of, reader)
            sources = tuple(
                None if s is None else tuple(x for i in s if (x := i if i < 0 else read(i, reader)) is not None)
                for s in task.recomputed_from
            )
            return task._replace(
                operator=new_operator[task.operator], reads=accesses(task.reads, reader), writes=accesses(task.writes, reader),
                parameter=new_parameter.get(task.parameter, -1), recomputed_from=sources,
                casts=tuple((t, c) for i, c in task.casts if (t := read(i, reader)) is not None),
                choices_of=-1 if choices_of is None else choices_of,
            )  # fmt: skip

        found = dataclasses.replace(
            graph,
            operators=tuple(
                graph.operators[n]._replace(
                    tasks=tuple(new_task[t] for t in graph.operators[n].tasks if kept_task[t]),
                    parameters=tuple(new_parameter[p] for p in graph.operators[n].parameters if p in new_parameter),
                )
                for n in operators
            ),
            tasks=tuple(moved_task(k) for k in tasks),
            tensors=tuple(graph.tensors[i] for i in tensors),
            parameters=tuple(
                p._replace(tensor=new_tensor[p.tensor], gradient=new_tensor[p.gradient], owner=new_operator[p.owner])
                for p in (graph.parameters[k] for k in parameters)
            ),
            entries=tuple(
                e._replace(source=new_tensor[e.source], target=new_tensor[e.target])
                for e in graph.entries if e.source not in gone and e.target not in gone
            ),
            accumulations=tuple(
                s._replace(
                    parameter=new_parameter[s.parameter], summands=tuple(map(new_tensor.__getitem__, s.summands)),
                    running=tuple(map(new_tensor.__getitem__, s.running)),
                    total=new_tensor[s.total], layout_of=new_tensor[s.layout_of],
                )
                for s in graph.accumulations if s.parameter in new_parameter
            ),
            joint_sums=tuple(
                s._replace(summands=tuple(map(new_tensor.__getitem__, s.summands)))
                for s in graph.joint_sums if not set(s.summands) & gone
            ),
        )  # fmt: skip
        operator_of = np.array([new_operator.get(n, -1) for n in range(graph.num_operators)])
        tensor_of = np.array([new_tensor.get(i, -1) for i in range(len(graph.tensors))])
        self._stand_for(operator_of, tensor_of)
        return Condensed(found, self.blocks, self.removed, operator_of, tensor_of)

    def _stand_for(self, operator_of: np.ndarray, tensor_of: np.ndarray) -> None:
        """A removed block is like the last one before it."""
        model = self.members[self.first_removed - 1]
        for j in range(self.first_removed, self.first_removed + self.removed):
            for a, b in zip(model, self.members[j], strict=True):
                operator_of[b] = operator_of[a]
                for s, t in zip(self.graph.operators[a].tasks, self.graph.operators[b].tasks, strict=False):
                    for x, y in zip(self.graph.tasks[s].writes, self.graph.tasks[t].writes, strict=False):
                        tensor_of[y.tensor] = tensor_of[x.tensor]
