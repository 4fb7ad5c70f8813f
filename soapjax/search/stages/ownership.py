"""Which operators the tasks of a schedule and the tensors of its graph belong to, and what else of them every part of it asks."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import NamedTuple

import numpy as np

from soapjax.costs.tables.problem_tables import CostTables
from soapjax.graph.lifespans import Lifetimes, makers
from soapjax.graph.microbatch import data_sizes
from soapjax.graph.passes.phases import BACKWARD, UPDATE
from soapjax.simulate.schedule import BARRIER, COMPUTE, RESHARD, RESOLVE, SUM, Schedule


class _Numbers(NamedTuple):
    """What is asked of single tensors, many times in a search."""

    maker: list[int]
    phase: list[int]  # of its maker, -1 of what none makes
    death: list[int]
    is_stored: list[bool]
    is_state: list[bool]  # a parameter, a gradient, or what an update makes: no activation
    state: frozenset[int]  # input leaves


@dataclasses.dataclass(frozen=True, eq=False)
class Ownership:
    """Of the tasks of a schedule and the tensors of its graph, which operators they belong to; the same for all strategies."""

    tables: CostTables
    schedule: Schedule
    lives: Lifetimes

    @cached_property
    def maker(self) -> np.ndarray:
        """The task [tensors] that writes each tensor, -1 where none does."""
        return makers(self.tables.graph)

    @cached_property
    def numbers(self) -> _Numbers:
        """As lists, which are read several times as fast."""
        graph, tables = self.tables.graph, self.tables
        parameters = {p.tensor for p in graph.parameters}
        phase = [graph.tasks[k].phase if k >= 0 else -1 for k in self.maker.tolist()]
        return _Numbers(
            maker=self.maker.tolist(), phase=phase, death=tables.tensor_death.tolist(), is_stored=self.lives.is_stored.tolist(),
            is_state=[
                i in parameters or p >= 0 or phase[i] == UPDATE for i, p in enumerate(self.parameter_of_gradient.tolist())
            ],
            state=frozenset(leaf for leaf, _ in graph.state_pairs),
        )  # fmt: skip

    @cached_property
    def operator(self) -> np.ndarray:
        """The operator of each of the graph's tasks; of an update the one that owns the parameter."""
        tables = self.tables
        if not len(tables.parameter_op):
            return tables.task_op
        owner = tables.parameter_op[np.maximum(tables.task_parameter, 0)]
        return np.where(tables.task_parameter >= 0, owner, tables.task_op)

    @cached_property
    def tasks_of(self) -> list[list[int]]:
        """The graph's tasks of every operator."""
        found: list[list[int]] = [[] for _ in self.tables.graph.operators]
        for k, n in enumerate(self.operator.tolist()):
            found[n].append(k)
        return found

    @cached_property
    def tensors_of(self) -> list[list[int]]:
        """What the tasks of every operator make."""
        found: list[list[int]] = [[] for _ in self.tables.graph.operators]
        for i, k in enumerate(self.maker.tolist()):
            if k >= 0:
                found[self.operator[k]].append(i)
        return found

    @cached_property
    def parameter_of_gradient(self) -> np.ndarray:
        """The parameter [tensors] whose gradient a tensor is, -1 of all others."""
        found = np.full(len(self.tables.tensor_bytes), -1)
        for p, parameter in enumerate(self.tables.graph.trained):
            found[parameter.gradient] = p
        return found

    @cached_property
    def given(self) -> np.ndarray:
        """bool [tensors]: inputs that are neither state, nor frozen weights, nor data: there all the time, once."""
        graph = self.tables.graph
        data, state = data_sizes(graph), {leaf for leaf, _ in graph.state_pairs} | {p.leaf for p in graph.parameters}
        return np.array([t.input_leaf >= 0 and t.input_leaf not in state and i not in data for i, t in enumerate(graph.tensors)])

    @cached_property
    def graph_task(self) -> np.ndarray:
        """The graph's task that each scheduled task stands beside, -1 of a barrier."""
        num_k, schedule = self.tables.num_tasks, self.schedule
        by_kind = {
            COMPUTE: np.arange(num_k), SUM: self.tables.sum_task, RESOLVE: self.maker,
            RESHARD: np.minimum(self.tables.edge_task, num_k - 1),
        }  # fmt: skip
        found = np.full(schedule.num_tasks, -1)
        for kind, tasks in by_kind.items():
            where = schedule.kind == kind
            if where.any():
                found[where] = np.asarray(tasks)[schedule.source[where]]
        return np.where(schedule.kind == BARRIER, -1, found)

    @cached_property
    def graph_tasks(self) -> list[int]:
        return self.graph_task.tolist()

    @cached_property
    def summed_parameter(self) -> np.ndarray:
        """The parameter whose gradient each scheduled task sums over devices, -1 of all others."""
        is_sum = self.schedule.kind == RESOLVE
        return np.where(is_sum, self.parameter_of_gradient[np.where(is_sum, self.schedule.source, 0)], -1)

    @cached_property
    def phase(self) -> np.ndarray:
        phase = np.array([t.phase for t in self.tables.graph.tasks])
        return np.where(self.graph_task >= 0, phase[np.maximum(self.graph_task, 0)], -1)

    @cached_property
    def needs(self) -> list[list[int]]:
        return self.schedule.needs()

    def streams(self, *, overlap: bool) -> list[list[int]]:
        """What each scheduled task occupies; without overlap communication also the stream that computes."""
        return self._overlapping if overlap else self._alone

    @cached_property
    def _overlapping(self) -> list[list[int]]:
        return [np.flatnonzero(row).tolist() for row in self.schedule.occupies]

    @cached_property
    def _alone(self) -> list[list[int]]:
        return [np.flatnonzero(row).tolist() for row in self.schedule.without_overlap().occupies]

    @cached_property
    def backward_readers(self) -> list[set[int]]:
        """The operators [tensors] whose backward tasks read each tensor; none of what is added to a gradient on several stages."""
        graph = self.tables.graph
        found: list[set[int]] = [set() for _ in graph.tensors]
        for k, task in enumerate(graph.tasks):
            for access in task.reads if task.phase == BACKWARD else ():
                found[access.tensor].add(int(self.operator[k]))
        for s in graph.accumulations:
            for i in (*s.summands, *s.running, s.total):
                found[i] = set()
        return found

    @cached_property
    def copied_first(self) -> list[list[tuple[int, int]]]:
        """Of the backward tasks of every operator those that read a forward tensor of which a program makes a copy before all else,
        and the tensor."""
        graph = self.tables.graph
        found: list[list[tuple[int, int]]] = [[] for _ in graph.operators]
        for k, tensor in self.tables.compiler.copied_first(graph):
            if graph.tasks[k].phase == BACKWARD and self.maker[tensor] >= 0:
                found[self.operator[k]].append((k, tensor))
        return found

    @cached_property
    def edges_of(self) -> list[list[int]]:
        """The reshards before the tasks of every operator, but those of the update."""
        found: list[list[int]] = [[] for _ in self.tables.graph.operators]
        for e, k in enumerate(self.tables.edge_task.tolist()):
            if k < self.tables.num_tasks and self.tables.graph.tasks[k].phase != UPDATE:
                found[self.operator[k]].append(e)
        return found
