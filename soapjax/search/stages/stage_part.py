"""A part of a step's static schedule: the tasks of some operators under one strategy, run by the simulators' rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TypedDict

import numpy as np

from soapjax.costs.layouts import waiting_spans
from soapjax.graph.lifespans import kept_between_passes, kept_for_result
from soapjax.graph.passes.phases import BACKWARD, FORWARD, UPDATE
from soapjax.search.stages.ownership import Ownership
from soapjax.search.stages.stage_figures import Figures
from soapjax.simulate.pipeline_tasks import StageLoad
from soapjax.simulate.schedule import RESHARD


class _Activations(TypedDict):
    batch_bytes: float
    input_bytes: float
    kept_bytes: float
    working_bytes: float
    split_working_bytes: float
    between_bytes: float


class StagePart:
    """The scheduled tasks of some operators under one strategy.

    Args:
      mine: bool [N], the operators.
      has_passes: whether the forward and the backward pass are programs of their own.
      sums_once: whether gradients are summed over devices with the update, where `Figures.may_sum_late` says so.
    """

    def __init__(
        self, own: Ownership, figures: Figures, mine: np.ndarray, *, overlap: bool = True, has_passes: bool = True,
        sums_once: bool = False,
    ):  # fmt: skip
        self.own, self.figures, self.mine, self.overlap, self.has_passes = own, figures, mine, overlap, has_passes
        self.tables, self.graph, self.lives = own.tables, own.tables.graph, own.lives
        self.sums_late = figures.may_sum_late & sums_once  # [P]
        parameter = own.summed_parameter
        is_late = parameter >= 0
        if len(self.sums_late):
            is_late &= self.sums_late[np.maximum(parameter, 0)]
        is_copy = own.schedule.kind == RESHARD
        is_late[is_copy] = figures.gathers_once[own.schedule.source[is_copy]]
        self.phase = np.where(is_late, UPDATE, own.phase)
        self.owned = (own.graph_task >= 0) & mine[own.operator[np.maximum(own.graph_task, 0)]]
        self.tasks = sorted(k for n in np.flatnonzero(mine) for k in own.tasks_of[n])

    def seconds(self, phase: int, tasks: set[int] | None = None) -> float:
        """Makespan of one phase's tasks, or of those of the graph's `tasks`, each stream in program order."""
        own, durations = self.own, self._durations
        needs, streams, graph_tasks = own.needs, own.streams(overlap=self.overlap), own.graph_tasks
        free = [0.0] * own.schedule.occupies.shape[1]
        end = [0.0] * own.schedule.num_tasks
        last = 0.0
        for t in np.flatnonzero(self.owned & (self.phase == phase)).tolist():  # thousands of times in a search: no call per task
            if tasks is not None and graph_tasks[t] not in tasks:
                continue
            ready, took = 0.0, durations[t]
            for p in needs[t]:
                if end[p] > ready:
                    ready = end[p]
            if took > 0:
                for s in streams[t]:
                    if free[s] > ready:
                        ready = free[s]
                ready += took
                for s in streams[t]:
                    free[s] = ready
            end[t] = ready
            if ready > last:
                last = ready
        return last

    @cached_property
    def _durations(self) -> list[float]:
        return self.figures.seconds.tolist()

    @cached_property
    def weights(self) -> set[int]:
        """The backward tasks that no earlier stage waits for: gradients of weights; none where no stage is earlier."""
        graph, own = self.graph, self.own
        backward = [k for k in self.tasks if graph.tasks[k].phase == BACKWARD]
        mine = set(np.flatnonzero(self.mine).tolist())
        leaving = {a.tensor for k in backward for a in graph.tasks[k].writes if not own.backward_readers[a.tensor] <= mine}
        if not leaving:
            return set()
        needed = set()
        for k in reversed(backward):
            if any(a.tensor in leaving for a in graph.tasks[k].writes):
                needed.add(k)
                leaving |= {a.tensor for a in graph.tasks[k].reads}
        return set(backward) - needed

    @cached_property
    def between(self) -> set[int]:
        """What gradients of weights read of the rest of the backward pass."""
        graph, maker = self.graph, self.own.maker
        read = {a.tensor for k in self.weights for a in graph.tasks[k].reads if maker[a.tensor] >= 0}
        return {i for i in read if graph.tasks[maker[i]].phase == BACKWARD and int(maker[i]) not in self.weights}

    def _kept(self, tasks: Iterable[int]) -> dict[int, float]:
        """Bytes of the forward tensors that backward tasks are given."""
        graph, lives, maker, size = self.graph, self.lives, self.own.maker, self.figures.shard_bytes
        kept = kept_between_passes(graph, lives, maker, tasks, lambda task: bool(self.mine[task.operator]))
        found = {t: float(size[t]) for t in kept}
        for t in kept:
            task = graph.tasks[maker[t]]
            if lives.is_stand_in[t] and not kept_for_result(graph, lives, task):
                found[t] *= task.memory.result_bytes / graph.tensors[t].size_bytes
        return found

    def load(self) -> StageLoad:
        """Seconds of its programs, and the bytes that it keeps."""
        tables, figures, graph = self.tables, self.figures, self.graph
        owns = self.mine[tables.parameter_op] if len(tables.parameter_op) else np.zeros(0, bool)
        gradients = [p.gradient for p, o in zip(graph.trained, owns, strict=False) if o]
        copies, sums = self._of_others(owns)
        unplaced_bytes = sum(x.size_bytes for x in graph.unplaced if self.mine[x.operator])
        backward_s = inputs_s = self.seconds(BACKWARD)
        if self.weights:
            inputs_s = self.seconds(BACKWARD, {k for k in self.tasks if graph.tasks[k].phase == BACKWARD} - self.weights)
        return StageLoad(
            forward_s=self.seconds(FORWARD), backward_s=backward_s, update_s=self.seconds(UPDATE),
            parameter_bytes=float(figures.parameter_bytes[owns].sum()),
            state_bytes=float((figures.stored_bytes + figures.gathered_bytes)[owns].sum() + figures.shard_bytes[copies].sum())
            + unplaced_bytes,
            gradient_bytes=float(figures.shard_bytes[[*gradients, *sums]].sum()), inputs_s=inputs_s,
            weights_s=self.seconds(BACKWARD, self.weights) if self.weights else 0.0, casts_s=float(figures.cast_s[owns].sum()),
            casts_bytes=float(figures.cast_bytes[owns].sum()),
            kept_for_weights_bytes=sum(self._kept(self.weights).values()), **self._activations(),
        )  # fmt: skip

    def _of_others(self, owns: np.ndarray) -> tuple[list[int], list[int]]:
        """Parameters that it reads and others hold, as copies for the step, and weights that are given; and its own sums of what it
        adds to gradients of others."""
        graph = self.graph
        others = {p.tensor for p, o in zip(graph.parameters, owns, strict=True) if not o} | set(np.flatnonzero(self.own.given))
        passes = [graph.tasks[k] for k in self.tasks if graph.tasks[k].phase != UPDATE]
        copies = {a.tensor for task in passes for a in task.reads if a.tensor in others}
        gradients = {p.gradient for p in graph.trained if p.tensor in copies}
        parts = {i for s in graph.accumulations if s.total in gradients for i in s.summands}
        sums = {a.tensor for task in passes for a in task.writes if a.tensor in parts}
        return sorted(copies), sorted(sums)

    def _activations(self) -> _Activations:
        """What arrives and is kept per micro-batch, and the peak while it is computed with.

        Programs neither free what they are given nor make results where something else was: what one pass hands on to another is
        there all the time.
        """
        tables, figures, graph, own = self.tables, self.figures, self.graph, self.own
        reads: dict[int, list[int]] = {}  # tensor -> tasks of this part that read it
        for k in self.tasks:
            if graph.tasks[k].parameter < 0:
                for access in graph.tasks[k].reads:
                    reads.setdefault(access.tensor, []).append(k)
        made = {i for n in np.flatnonzero(self.mine).tolist() for i in own.tensors_of[n]}
        numbers, is_between = own.numbers, self.between
        kept_bytes = self._kept(self.tasks)
        kept = arrives = batch = 0.0
        steps, between = np.zeros(tables.num_tasks + 2), np.zeros(tables.num_tasks + 2)
        for tensor in sorted({*reads, *made}):
            if numbers.is_state[tensor]:
                continue
            size, k, mine = figures.shard_bytes[tensor], numbers.maker[tensor], reads.get(tensor, [])
            made_here = tensor in made
            if not made_here and numbers.death[tensor] < 0:
                continue
            if k < 0:
                batch += size if graph.tensors[tensor].input_leaf not in numbers.state and not own.given[tensor] else 0.0
                steps[0] += tables.working.more[tensor] * size
                steps[max(mine) + 1] -= tables.working.more[tensor] * size
                continue
            if made_here and not numbers.is_stored[tensor]:
                continue
            if numbers.phase[tensor] == FORWARD and not made_here and any(graph.tasks[r].phase != UPDATE for r in mine):
                arrives += size
            kept += kept_bytes.get(tensor, 0.0)
            if tensor in kept_bytes and self.has_passes:
                continue
            birth = k if made_here else min(mine)
            size *= self.lives.scale[tensor] * (1 + tables.working.more[tensor])
            # What XLA fuses into its readers keeps its own operands alive until these run.
            death = max([birth, *mine, numbers.death[tensor]])
            for those in (steps, between) if tensor in is_between else (steps,):
                those[birth] += size
                those[death + 1] -= size
        steps += self._copies(kept_bytes)
        is_made = sorted(made)
        alive = np.cumsum(steps) + self._waiting(is_made)
        np.add.at(alive, own.maker[is_made], figures.transient_bytes[is_made])
        stays = kept if self.has_passes else 0.0
        handed = float(figures.shard_bytes[list(self.between)].sum())
        most, most_split = (float(x.max(initial=0.0)) for x in (alive, alive - np.cumsum(between)))
        return {
            "batch_bytes": batch, "input_bytes": arrives, "kept_bytes": kept, "working_bytes": stays + most,
            "split_working_bytes": stays + handed + most_split, "between_bytes": handed,
        }

    def _copies(self, kept_bytes: Mapping[int, float]) -> np.ndarray:
        """Bytes [tasks + 2] by which resharded copies, and what a program copies before all else, are more than a task before."""
        tables, figures, own = self.tables, self.figures, self.own
        first = min((k for k in self.tasks if self.graph.tasks[k].phase == BACKWARD), default=0)
        steps, is_copied = np.zeros(tables.num_tasks + 2), (figures.copy_bytes != 0).tolist()
        for n in np.flatnonzero(self.mine).tolist():
            for e in own.edges_of[n]:
                if is_copied[e]:
                    steps[figures.copy_since[e]] += figures.copy_bytes[e]
                    steps[tables.edge_handed_on[e]] -= figures.copy_bytes[e]
            for k, tensor in own.copied_first[n] if self.has_passes else ():
                steps[first] += kept_bytes.get(tensor, 0.0)
                steps[k + 1] -= kept_bytes.get(tensor, 0.0)
        return steps

    def _waiting(self, made: list[int]) -> np.ndarray:
        """Bytes [tasks + 2] of gradients that wait to be summed in one collective of their pass."""
        own, tables, figures = self.own, self.tables, self.figures
        merging = np.zeros((tables.num_tasks + 2, 2))
        made = [i for i in made if own.numbers.is_state[i]]
        gradients = [i for i in made if (p := own.parameter_of_gradient[i]) >= 0 and not self.sums_late[p]]
        merged_at = int(max((own.maker[i] for i in gradients), default=-1)) + 1
        for i in gradients:
            k = int(own.maker[i])
            for waiting, since in waiting_spans(figures.merging_bytes[i], k, tables.working.operand_share, merged_at):
                merging[since] += waiting
                merging[max(int(tables.tensor_death[i]) + 1, since)] -= waiting
        return np.minimum(np.cumsum(merging, 0), tables.working.most_waiting).sum(1)
