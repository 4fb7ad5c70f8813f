"""The graph of a deep model with few of its repeated blocks: what planners of pipelines price instead of the whole.

A model of 128 equal layers has 128 times the operators of one, and nothing more to choose. `condense` finds the longest run of
blocks that repeat one another, keeps some at both ends, and joins these as if the model had been written with so few: what a
block reads of a removed neighbour it reads of the neighbour that is kept, in the forward and in the backward pass.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from soapjax.graph.operators import NO_GRADIENT, NOT_SPLIT, Access, Accumulation, Operator, OperatorGraph, Task
from soapjax.graph.passes.phases import FORWARD

MOST_LAYERS = 512  # iterations of a loop that is unrolled
KEPT = 2, 2  # blocks, at the beginning and at the end of a run: those at its ends have other neighbours than those between
MOST_KEPT = sum(KEPT)  # two between the ends tell what one more costs


class BlockRun(NamedTuple):
    """A run of forward operators that consists of `num_blocks` blocks of `period` operators each."""

    first: int  # position of the first block's first operator among the forward operators
    period: int
    num_blocks: int

    @property
    def end(self) -> int:
        return self.first + self.period * self.num_blocks


@dataclasses.dataclass(frozen=True, eq=False)
class Condensed:
    """A graph without some of its blocks.

    `operator_of` and `tensor_of` say which operator and tensor of `graph` stands for one of the whole graph (-1: none does).
    """

    graph: OperatorGraph
    blocks: BlockRun  # of the whole graph
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


def prefix_crossing(graph: OperatorGraph, forward: Sequence[int]) -> np.ndarray:
    """Bytes [n + 1] that cross forwards where the first k forward operators are one stage and the others the next."""
    place = {op: k for k, op in enumerate(forward)}
    made = {a.tensor: t.operator for t in graph.tasks if t.phase == FORWARD for a in t.writes}
    last: dict[int, int] = {}
    for task in graph.tasks:
        for access in task.reads:
            if access.tensor in made and task.operator in place and task.parameter < 0:
                last[access.tensor] = max(last.get(access.tensor, 0), place[task.operator])
    steps = np.zeros(len(forward) + 2)
    for tensor, k in last.items():
        begin = place.get(made[tensor], len(forward))
        if begin < k:
            steps[begin + 1] += graph.tensors[tensor].size_bytes * graph.tensors[tensor].copies
            steps[k + 1] -= graph.tensors[tensor].size_bytes * graph.tensors[tensor].copies
    return np.cumsum(steps)[: len(forward) + 1]


def loops_over_layers(graph: OperatorGraph) -> bool:
    """Whether a loop gives every iteration a layer of its own: parameters that are stacked, one row per iteration, or their casts.

    Not where a loop has more than MOST_LAYERS iterations, those of loops around it included: unrolled, it would be too large.
    """
    stacked = {p.tensor for p in graph.parameters if graph.tensors[p.tensor].shape}
    in_loops = [task for task in graph.tasks if task.scope]
    for task in graph.tasks:
        if task.phase == FORWARD and not task.scope:
            shapes = {graph.tensors[a.tensor].shape for a in task.reads if a.tensor in stacked}
            stacked |= {a.tensor for a in task.writes if graph.tensors[a.tensor].shape in shapes}
    return max((task.trip_count for task in in_loops), default=0) <= MOST_LAYERS and any(
        access.tensor in stacked and access.dims[0] == NOT_SPLIT and graph.tensors[access.tensor].shape[0] > 1
        and task.trip_count % graph.tensors[access.tensor].shape[0] == 0
        for task in in_loops for access in task.reads
    )  # fmt: skip


def reads_rows(graph: OperatorGraph) -> bool:
    """Whether a step without loops reads a parameter row by row, as a Python loop over stacked layers does."""
    readers: dict[int, int] = {}
    for task in graph.tasks:
        for access in task.reads if task.phase == FORWARD else ():
            if access.dims and access.dims[0] == NOT_SPLIT and graph.tensors[access.tensor].shape[0] > 1:
                readers[access.tensor] = readers.get(access.tensor, 0) + 1
    return not any(task.scope for task in graph.tasks) and any(readers.get(p.tensor, 0) > 1 for p in graph.parameters)


def repeated_blocks(graph: OperatorGraph, crossing_bytes: np.ndarray) -> BlockRun | None:
    """The run of repeated blocks, two at least, with most operators; None where nothing repeats.

    Args:
      crossing_bytes: [n + 1] what crosses forwards at each place between forward operators; blocks begin where least does.
    """
    forward = forward_operators(graph)
    groups = np.array([graph.operators[n].group for n in forward])
    paths = [graph.operators[n].name.split("/") for n in forward]
    best: BlockRun | None = None
    for period in range(1, len(groups) // 2 + 1):
        # Runs of positions that repeat the one a period later: in 0 1 1 1 0 they begin and end where the difference is 1 and -1.
        same = np.diff(np.r_[0, (groups[period:] == groups[:-period]).astype(int), 0])
        for a, b in zip(np.flatnonzero(same == 1), np.flatnonzero(same == -1), strict=True):
            count = (b - a + period) // period
            if count > 1 and (best is None or count * period > best.num_blocks * best.period):
                spare = b - a + period - count * period
                starts = np.arange(a, a + spare + 1)
                best = BlockRun(int(starts[crossing_bytes[starts].argmin()]), period, int(count))
    if best is None:
        return None
    shared = [0, *(len(os.path.commonprefix([a, b])) for a, b in itertools.pairwise(paths))]
    return _cheapest(best, groups, list(zip(crossing_bytes.tolist(), shared, strict=False)))


def _cheapest(found: BlockRun, groups: np.ndarray, cost: Sequence[tuple[float, int]]) -> BlockRun:
    """The same run from where least crosses, and of equals where a module ends; one block less if it has to be."""
    starts = np.arange(found.first, found.first + found.period)
    counts = np.where(starts == found.first, found.num_blocks, found.num_blocks - 1)
    for k, start in enumerate(starts):  # as many blocks as fit behind a later start
        while start + (counts[k] + 1) * found.period <= len(groups) and np.array_equal(
            groups[start : start + found.period], groups[start + counts[k] * found.period : start + (counts[k] + 1) * found.period]
        ):
            counts[k] += 1
    usable = np.flatnonzero(counts >= min(found.num_blocks, MOST_KEPT + 1)).tolist()
    k = min(usable, key=lambda k: cost[int(starts[k])], default=0)
    return BlockRun(int(starts[k]), found.period, int(counts[k]))


def condense(graph: OperatorGraph, crossing_bytes: np.ndarray, kept: tuple[int, int] = KEPT) -> Condensed | None:
    """The graph with so many blocks of each end of the run; None where it has no more, or where its blocks are not wired alike."""
    blocks = repeated_blocks(graph, crossing_bytes)
    return None if blocks is None or blocks.num_blocks <= sum(kept) else _Condensing(graph, blocks, kept).run()


class _Unlike(Exception):
    """Two blocks of equal operators read other things."""


class _Numbers(dict[int, int]):
    """Of what is kept, by the old ones."""

    def __missing__(self, old: int) -> int:
        raise _Unlike


class _Condensing:
    def __init__(self, graph: OperatorGraph, blocks: BlockRun, kept: tuple[int, int]):
        self.graph, self.blocks = graph, blocks
        self.removed = blocks.num_blocks - sum(kept)
        forward = forward_operators(graph)
        p = blocks.period
        self.members = [forward[blocks.first + j * p : blocks.first + (j + 1) * p] for j in range(blocks.num_blocks)]
        self.block_of = np.full(graph.num_operators, -1)
        for j, mine in enumerate(self.members):
            self.block_of[list(mine)] = j
        self.first_removed = kept[0]
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
        self.earlier = {b: a for a, b in later.items()}
        removed = np.flatnonzero(self.is_removed).tolist()
        self.gone_parameters = {p for n in removed for p in graph.operators[n].parameters}
        self.gone = self._gone_tensors()
        self.kept_task = [not self.is_removed[t.operator] and t.parameter not in self.gone_parameters for t in graph.tasks]
        self.operator, self.task, self.tensor, self.parameter = (
            _Numbers({old: new for new, old in enumerate(kept)})
            for kept in (
                [n for n in range(graph.num_operators) if not self.is_removed[n]],
                [k for k, is_kept in enumerate(self.kept_task) if is_kept],
                [i for i in range(len(graph.tensors)) if i not in self.gone],
                [p for p in range(len(graph.parameters)) if p not in self.gone_parameters],
            )
        )  # new index by old
        if any(self.gone & {*s.summands, *s.running, s.total} for s in graph.accumulations if s.parameter in self.parameter):
            raise _Unlike  # every block adds to the gradient of one parameter
        found = dataclasses.replace(
            graph,
            operators=tuple(map(self._operator, self.operator)),
            tasks=tuple(map(self._task, self.task)),
            tensors=tuple(graph.tensors[i] for i in self.tensor),
            parameters=tuple(
                p._replace(
                    tensor=self.tensor[p.tensor], gradient=self.tensor.get(p.gradient, NO_GRADIENT), owner=self.operator[p.owner]
                )
                for p in (graph.parameters[k] for k in self.parameter)
            ),
            entries=tuple(
                e._replace(source=self.tensor[e.source], target=self.tensor[e.target])
                for e in graph.entries if e.source not in self.gone and e.target not in self.gone
            ),
            accumulations=tuple(self._accumulation(s) for s in graph.accumulations if s.parameter in self.parameter),
            joint_sums=tuple(
                s._replace(summands=tuple(map(self.tensor.get, s.summands)))
                for s in graph.joint_sums if not set(s.summands) & self.gone
            ),
            unplaced=tuple(
                x._replace(operator=self.operator[x.operator]) for x in graph.unplaced if x.operator in self.operator
            ),
        )  # fmt: skip
        operator_of = np.array([self.operator.get(n, -1) for n in range(graph.num_operators)])
        tensor_of = np.array([self.tensor.get(i, -1) for i in range(len(graph.tensors))])
        self._stand_for(operator_of, tensor_of)
        return Condensed(found, self.blocks, self.removed, operator_of, tensor_of)

    def _gone_tensors(self) -> set[int]:
        """What removed blocks make, and their parameters with gradients and state."""
        graph = self.graph
        gone = {a.tensor for t in graph.tasks if self.is_removed[t.operator] for a in t.writes}
        leaves = set()
        for p in self.gone_parameters:
            parameter = graph.parameters[p]
            gone |= {parameter.tensor, parameter.gradient}
            leaves |= set(parameter.leaves)
        return gone | {i for i, t in enumerate(graph.tensors) if t.input_leaf in leaves}

    def _read(self, tensor: int, reader: int) -> int | None:
        """What stands for a tensor, where a task of block `reader` (-1: of none) reads it.

        None where nothing does: what reads every block, as the norm of all gradients does, reads those that are left.
        """
        if tensor not in self.gone:
            return self.tensor[tensor]
        if reader < 0:
            return None
        moved = (self.earlier if reader >= self.first_removed + self.removed else self.later).get(tensor)
        if moved is None or moved in self.gone:
            raise _Unlike
        return self.tensor[moved]

    def _accesses(self, found: Sequence[Access], reader: int) -> tuple[Access, ...]:
        named = ((a, self._read(a.tensor, reader)) for a in found)
        return tuple(a._replace(tensor=t) for a, t in named if t is not None)

    def _task(self, k: int) -> Task:
        task = self.graph.tasks[k]
        reader = int(self.block_of[task.operator])
        image = task.memory.choices_of
        choices_of = None if image < 0 else self._read(image, reader)
        sources = tuple(
            None if s is None else tuple(x for i in s if (x := i if i < 0 else self._read(i, reader)) is not None)
            for s in task.memory.recomputed_from
        )
        return task._replace(
            operator=self.operator[task.operator], parameter=self.parameter.get(task.parameter, -1),
            reads=self._accesses(task.reads, reader), writes=self._accesses(task.writes, reader),
            casts=tuple((t, c) for i, c in task.casts if (t := self._read(i, reader)) is not None),
            memory=task.memory._replace(recomputed_from=sources, choices_of=-1 if choices_of is None else choices_of),
        )  # fmt: skip

    def _operator(self, n: int) -> Operator:
        op = self.graph.operators[n]
        return op._replace(
            tasks=tuple(self.task[t] for t in op.tasks if self.kept_task[t]),
            parameters=tuple(self.parameter[p] for p in op.parameters if p in self.parameter),
        )

    def _accumulation(self, s: Accumulation) -> Accumulation:
        summands, running = (tuple(map(self.tensor.__getitem__, x)) for x in (s.summands, s.running))
        return s._replace(
            parameter=self.parameter[s.parameter], summands=summands, running=running, total=self.tensor[s.total],
            layout_of=self.tensor[s.layout_of],
        )  # fmt: skip

    def _stand_for(self, operator_of: np.ndarray, tensor_of: np.ndarray) -> None:
        """A removed block is like the last one before it."""
        model = self.members[self.first_removed - 1]
        for j in range(self.first_removed, self.first_removed + self.removed):
            for a, b in zip(model, self.members[j], strict=True):
                operator_of[b] = operator_of[a]
                for s, t in zip(self.graph.operators[a].tasks, self.graph.operators[b].tasks, strict=False):
                    for x, y in zip(self.graph.tasks[s].writes, self.graph.tasks[t].writes, strict=False):
                        tensor_of[y.tensor] = tensor_of[x.tensor]
