"""What a stage costs: seconds of its forward, backward and update programs and the bytes that it keeps, per micro-batch.

A stage is a run of operators on n devices with a plan inside: a strategy of the whole graph at micro-batch size on n devices.
The cost model prices the whole graph once per strategy and micro-batch size; a stage is the part of the static schedule that
its operators own, run by the simulators' rules. So one stage of all operators takes exactly the time that the SPMD simulator
gives for the same strategy (tested). Memory is an upper bound: a part's gradients count from the start of its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from soapjax.costs.itemize import sent_items, sent_parts
from soapjax.costs.layouts import waiting_spans
from soapjax.costs.measured import ComputeRates, linked, without_links
from soapjax.costs.profile import Profile
from soapjax.costs.split_share import split_flops
from soapjax.graph.lifetimes import Lifetimes, lifetimes
from soapjax.graph.microbatch import micro_batch
from soapjax.graph.operators import HEAVY_RESULT, OperatorGraph
from soapjax.graph.phases import BACKWARD, FORWARD, UPDATE
from soapjax.search.stage_figures import Fabric, Figures, Inside, level_between, part_of
from soapjax.simulate.pipeline import StageLoad, Transfer
from soapjax.simulate.schedule import BARRIER, COMPUTE, CONVERT, RESOLVE, SUM
from soapjax.strategy.plan import SentPart
from soapjax.strategy.space import SearchSpace
from soapjax.strategy.strategy import Strategy
from soapjax.topology import DeviceTopology, FactorMesh


def stage_of_operators(graph: OperatorGraph, bounds: Sequence[int], forward: Sequence[int]) -> np.ndarray:
    """The stage [N] of every operator: stage i has the forward operators bounds[i] : bounds[i + 1] of `forward`.

    Operators of the backward pass alone go to the earliest stage that they read from; those of the update alone stand at -1.
    """
    stage = np.full(graph.num_operators, -1)
    for i, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)):
        stage[list(forward[a:b])] = i
    made = {a.tensor: t.operator for t in graph.tasks for a in t.writes}
    for task in graph.tasks:
        if stage[task.operator] < 0 and task.phase != UPDATE:
            read = [stage[made[a.tensor]] for a in task.reads if a.tensor in made and stage[made[a.tensor]] >= 0]
            stage[task.operator] = min(read, default=0)
    return stage


def forward_operators(graph: OperatorGraph) -> tuple[int, ...]:
    """Operators with a part in the forward pass, in program order: what stages are cut from."""
    first: dict[int, int] = {}
    for k, task in enumerate(graph.tasks):
        if task.phase == FORWARD:
            first.setdefault(task.operator, k)
    return tuple(sorted(first, key=first.get))


class StageLoads:
    """Loads of any stages of one graph on one topology; everything is kept once it is known.

    Args:
      profile: measurements to cost with; `topology` then has its links as measured.
    """

    def __init__(self, graph: OperatorGraph, topology: DeviceTopology, profile: Profile | None = None):
        micro_batch(graph, 1)  # refuses what cannot be a pipeline
        self.whole, self.topology, self.profile = graph, linked(topology, profile), without_links(profile)
        self.forward = forward_operators(graph)
        self._graphs: dict[int, OperatorGraph] = {}
        self._fabrics: dict[tuple, Fabric] = {}
        self._loads: dict[tuple, StageLoad] = {}
        self._sent: dict[tuple, np.ndarray] = {}  # [phases, K + 1] by an inner strategy
        self.lives = lifetimes(graph)  # as those of its micro-batches

    def graph(self, num_microbatches: int) -> OperatorGraph:
        if num_microbatches not in self._graphs:
            self._graphs[num_microbatches] = micro_batch(self.whole, num_microbatches)
        return self._graphs[num_microbatches]

    def _fabric(self, first: int, count: int, num: int) -> Fabric:
        part = part_of(self.topology, first, count)
        links = tuple((level.name, level.size, level.bandwidth_bytes_per_s) for level in part.levels)
        if (links, num) not in self._fabrics:
            self._fabrics[links, num] = Fabric(self.graph(num), part, self.profile)
        return self._fabrics[links, num]

    def choices(self, first: int, count: int, num: int) -> list[Inside]:
        """The inner strategies that a stage on these devices may have; the first is data parallelism."""
        return self._fabric(first, count, num).choices

    def mesh(self, first: int, count: int, num: int) -> FactorMesh:
        return self._fabric(first, count, num).mesh

    def load(self, bounds: tuple[int, int], first: int, count: int, num: int, inner: int) -> StageLoad:
        """Of the forward operators bounds[0] : bounds[1] on `count` devices from `first`, at `num` micro-batches."""
        fabric = self._fabric(first, count, num)
        key = (bounds, id(fabric), inner)
        if key not in self._loads:
            self._loads[key] = self._summing(self._part(fabric, fabric.choices[inner].figures, bounds), num)
        return self._loads[key]

    def load_of(
        self, bounds: tuple[int, int], first: int, count: int, num: int, figures: Figures, *, overlap: bool = True
    ) -> StageLoad:  # fmt: skip
        """As `load`, for any strategy of the graph on the stage's mesh, by its figures; `overlap` False: one thing at a time."""
        return self._summing(self._part(self._fabric(first, count, num), figures, bounds, overlap), num)

    def split_flops(
        self, bounds: tuple[int, int], first: int, count: int, num: int, strategy: Strategy, figures: Figures
    ) -> tuple[float, float]:  # fmt: skip
        """FLOPs of a stage per micro-batch, and those that are split (costs/split_share.py)."""
        fabric = self._fabric(first, count, num)
        every = split_flops(fabric.tables, strategy.axes, figures.layouts.slots, num_devices=self.topology.num_devices)
        flops, split = (x[self._mine(fabric, bounds)].sum() for x in every)
        return flops, split

    def _summing(self, load: StageLoad, num: int) -> StageLoad:
        """With the running sums of gradients: zeros per step; per micro-batch a gradient and a sum read, a sum written.

        Compilers for GPUs let the product that makes a gradient add to the sum in place: only the sum is read besides.
        """
        if num == 1:
            return load
        once_s = load.gradient_bytes / ComputeRates(self.topology, self.profile).memory_bytes_per_s
        in_place = self.topology.device.platform != "cpu"
        return load._replace(
            backward_s=load.backward_s + (1 if in_place else 3) * once_s, update_s=load.update_s + once_s,
            unsummed_bytes=0.0 if in_place else load.gradient_bytes,
        )  # fmt: skip

    def space(self, first: int, count: int, num: int) -> SearchSpace:
        return self._fabric(first, count, num).space

    def _mine(self, fabric: Fabric, bounds: tuple[int, int]) -> np.ndarray:
        """bool [N]: the operators of a stage; the last one has those of the update alone."""
        stage = stage_of_operators(fabric.tables.graph, (0, bounds[0], bounds[1], len(self.forward)), self.forward)
        return (stage == 1) | ((stage == -1) & (bounds[1] == len(self.forward)))

    def figures(self, first: int, count: int, num: int, strategy: Strategy) -> Figures:
        return self._fabric(first, count, num).figures(strategy)

    def _part(self, fabric: Fabric, figures: Figures, bounds: tuple[int, int], overlap: bool = True) -> StageLoad:
        mine = self._mine(fabric, bounds)
        return _Part(fabric, figures, mine, self.lives, overlap).load()

    def sends(
        self, bounds: tuple[int, int], first: int, count: int, num: int, strategy: Strategy, figures: Figures
    ) -> list[SentPart]:  # fmt: skip
        """What each device of such a stage sends in one pass over one micro-batch, and in an update."""
        fabric = self._fabric(first, count, num)
        part = _Part(fabric, figures, self._mine(fabric, bounds), self.lives)
        end = len(part.graph.tasks)
        every = sent_parts(fabric.tables, part.figures.layouts, strategy)
        return [s for s in every if (part.mine[part.operator[s.task]] if s.task < end else bounds[1] == len(self.forward))]

    def sent_bytes(self, bounds: tuple[int, int], first: int, count: int, num: int, inner: int) -> np.ndarray:
        """What each device of such a stage sends in a forward and in a backward pass over one micro-batch, and in an update [3]."""
        fabric = self._fabric(first, count, num)
        key = id(fabric), inner
        tables = fabric.tables
        if key not in self._sent:
            inside = fabric.choices[inner]
            self._sent[key] = every = np.zeros((3, tables.num_tasks + 1))
            for item in sent_items(tables, inside.figures.layouts, inside.strategy):
                phase = tables.graph.tasks[item.task].phase if item.task < tables.num_tasks else UPDATE
                every[phase, item.task] += sum(item.bytes.values())
        mine = self._mine(fabric, bounds)
        operator = tables.task_op
        if len(tables.parameter_op):
            owner = tables.parameter_op[np.maximum(tables.task_parameter, 0)]
            operator = np.where(tables.task_parameter >= 0, owner, operator)
        return self._sent[key] @ np.append(mine[operator], bounds[1] == len(self.forward)).astype(np.float64)

    def transfers(
        self, bounds: Sequence[int], first: Sequence[int], count: Sequence[int], num: int, inside: Sequence[Figures]
    ) -> list[Transfer]:  # fmt: skip
        """Between the stages with forward operators bounds[i] : bounds[i + 1], on devices first[i] : first[i] + count[i].

        Args:
          inside: of every stage the figures of its strategy; a tensor is sent as the stage that gets it keeps it.
        """
        flows = self.crossing(bounds, count, num, inside)
        found = []
        for (a, b), (there, back) in sorted(flows.items()):
            ends = (min(first[a], first[b]), max(first[a] + count[a], first[b] + count[b]) - 1)
            level = level_between(self.topology, *ends)
            link = self.topology.levels[level]
            rate = link.achieved_bytes_per_s * min(count[a], count[b])
            seconds = [link.latency_s + size / rate if size else 0.0 for size in (there, back)]
            found.append(Transfer(a, b, level, *seconds))
        return found

    def crossing(
        self, bounds: Sequence[int], count: Sequence[int], num: int, inside: Sequence[Figures]
    ) -> dict[tuple[int, int], tuple[float, float]]:  # fmt: skip
        """(earlier stage, later stage) -> bytes that cross forwards and backwards per micro-batch, all devices together."""
        graph = self.graph(num)
        stage = stage_of_operators(graph, bounds, self.forward)
        return crossing_bytes(graph, stage, lambda tensor, reader: inside[reader].shard_bytes[tensor] * count[reader])


def crossing_bytes(
    graph: OperatorGraph, stage: np.ndarray, size: Callable[[int, int], float] | None = None
) -> dict[tuple[int, int], tuple[float, float]]:  # fmt: skip
    """(earlier stage, later stage) -> bytes that cross forwards and backwards per micro-batch, each tensor once per reader.

    Args:
      size: (tensor, reading stage) -> bytes; the tensor's own by default.
    """
    made = {a.tensor: task for task in graph.tasks for a in task.writes}
    seen: set[tuple[int, int]] = set()
    flows: dict[tuple[int, int], list[float]] = {}
    for task in graph.tasks:
        if task.phase == UPDATE:
            continue
        reader = stage[task.operator]
        for access in task.reads:
            source = stage[made[access.tensor].operator] if access.tensor in made else -1
            if source < 0 or source == reader or (access.tensor, int(reader)) in seen:
                continue
            seen.add((access.tensor, int(reader)))
            tensor = graph.tensors[access.tensor]
            pair = flows.setdefault((int(min(source, reader)), int(max(source, reader))), [0.0, 0.0])
            is_back = source > reader or made[access.tensor].phase == BACKWARD
            pair[int(is_back)] += tensor.size_bytes * tensor.copies if size is None else float(size(access.tensor, int(reader)))
    return {pair: (there, back) for pair, (there, back) in flows.items()}


class _Part:
    """The scheduled tasks of some operators under one strategy, run by the simulators' rules."""

    def __init__(self, fabric: Fabric, figures: Figures, mine: np.ndarray, lives: Lifetimes, overlap: bool = True):
        self.tables, self.figures, self.mine, self.lives = fabric.tables, figures, mine, lives
        self.schedule = fabric.schedule if overlap else fabric.schedule.without_overlap()
        self.graph = fabric.tables.graph
        tables, schedule = self.tables, self.schedule
        num_k = tables.num_tasks
        maker = np.full(len(tables.tensor_bytes), -1)
        for k, task in enumerate(self.graph.tasks):
            for access in task.writes:
                maker[access.tensor] = k
        by_kind = {
            COMPUTE: np.arange(num_k), SUM: tables.sum_task, RESOLVE: maker, CONVERT: np.minimum(tables.edge_task, num_k - 1),
        }  # fmt: skip
        task_of = np.full(schedule.num_tasks, -1)
        for kind, tasks in by_kind.items():
            where = schedule.kind == kind
            if where.any():
                task_of[where] = np.asarray(tasks)[schedule.source[where]]
        operator = tables.task_op
        if len(tables.parameter_op):
            owner = tables.parameter_op[np.maximum(tables.task_parameter, 0)]
            operator = np.where(tables.task_parameter >= 0, owner, operator)
        phase = np.array([t.phase for t in self.graph.tasks])
        self.phase = np.where(task_of >= 0, phase[np.maximum(task_of, 0)], -1)
        self.owned = (task_of >= 0) & mine[operator[np.maximum(task_of, 0)]] & (schedule.kind != BARRIER)
        gradients = np.zeros(len(tables.tensor_bytes), bool)
        gradients[[p.gradient for p in self.graph.parameters]] = True
        self.gradients, self.maker, self.operator = gradients, maker, operator

    def seconds(self, phase: int) -> float:
        """Makespan of one phase's tasks, each stream in program order."""
        schedule, durations = self.schedule, self.figures.seconds
        free = np.zeros(schedule.occupies.shape[1]).tolist()
        end: dict[int, float] = {}
        chosen = np.flatnonzero(self.owned & (self.phase == phase))
        last = 0.0
        for t in chosen.tolist():
            ready = max((end.get(p, 0.0) for p in schedule.predecessors[t].tolist()), default=0.0)
            took = float(durations[t])
            if took > 0:
                streams = np.flatnonzero(schedule.occupies[t]).tolist()
                ready = max([ready, *(free[s] for s in streams)])
                for s in streams:
                    free[s] = ready + took
            end[t] = ready + took
            last = max(last, end[t])
        return last

    def _kept(self) -> set[int]:
        """Forward tensors that the backward pass reads, or from which it computes what is not stored (graph/lifetimes.py)."""
        graph, lives = self.graph, self.lives
        maker = self.maker
        queue = [
            a.tensor for k, task in enumerate(graph.tasks) for a in task.reads
            if task.phase == BACKWARD and self.mine[self.operator[k]] and maker[a.tensor] >= 0
        ]  # fmt: skip
        seen, kept = set(queue), set()
        while queue:
            tensor = queue.pop()
            task = graph.tasks[maker[tensor]]
            if task.phase != FORWARD:
                continue
            if lives.is_stored[tensor] or not self.mine[self.operator[maker[tensor]]]:
                kept.add(tensor)
                continue
            position = [a.tensor for a in task.writes].index(tensor)
            for s in task.recomputed_from[position] or ():
                if s == HEAVY_RESULT:
                    s = next(a.tensor for a in task.writes if lives.is_stand_in[a.tensor])
                if s not in seen and maker[s] >= 0:
                    seen.add(s)
                    queue.append(s)
        return kept

    def load(self) -> StageLoad:
        tables, figures, graph = self.tables, self.figures, self.graph
        owns = self.mine[tables.parameter_op] if len(tables.parameter_op) else np.zeros(0, bool)
        reads: dict[int, list[int]] = {}  # tensor -> tasks of this part that read it
        for k, task in enumerate(graph.tasks):
            if self.mine[self.operator[k]] and task.parameter < 0:
                for access in task.reads:
                    reads.setdefault(access.tensor, []).append(k)
        parameters = {p.tensor for p in graph.parameters}
        phases = [t.phase for t in graph.tasks]
        state = {leaf for leaf, _ in graph.state_pairs}
        is_kept = self._kept()
        kept = arrives = batch = 0.0
        steps, merging = np.zeros(tables.num_tasks + 2), np.zeros((tables.num_tasks + 2, 2))
        is_own = (self.maker >= 0) & self.mine[self.operator[np.maximum(self.maker, 0)]]
        merged_at = int(self.maker[is_own & self.gradients].max(initial=-1)) + 1
        for tensor, size in enumerate(figures.shard_bytes):
            k = int(self.maker[tensor])
            made_here = is_own[tensor]
            mine = reads.get(tensor, [])
            if self.gradients[tensor] and made_here:
                for waiting, since in waiting_spans(figures.merging_bytes[tensor], k, tables.working.operand_share, merged_at):
                    merging[since] += waiting
                    merging[max(int(tables.tensor_death[tensor]) + 1, since)] -= waiting
            if tensor in parameters or self.gradients[tensor] or not (mine or made_here) or (k >= 0 and phases[k] == UPDATE):
                continue
            if not made_here and tables.tensor_death[tensor] < 0:
                continue
            if k < 0:
                batch += size if graph.tensors[tensor].input_leaf not in state else 0.0
                steps[0] += tables.working.more[tensor] * size
                steps[max(mine) + 1] -= tables.working.more[tensor] * size
                continue
            if made_here and not self.lives.is_stored[tensor]:
                continue
            if phases[k] == FORWARD and not made_here and any(phases[r] != UPDATE for r in mine):
                arrives += size
            if tensor in is_kept:
                kept += size
            birth = k if made_here else min(mine)
            size *= self.lives.scale[tensor] * (1 + tables.working.more[tensor])
            steps[birth] += size
            # What XLA fuses into its readers keeps its own operands alive until these run.
            steps[max([birth, *mine, int(tables.tensor_death[tensor])]) + 1] -= size
        for e, k in enumerate(tables.edge_task.tolist()):
            if k < tables.num_tasks and self.mine[self.operator[k]] and phases[k] != UPDATE:
                steps[figures.copy_since[e]] += figures.copy_bytes[e]
                steps[k + 1] -= figures.copy_bytes[e]
        waiting = np.minimum(np.cumsum(merging, 0), tables.working.most_waiting).sum(1)
        passing = np.zeros(len(steps))
        np.add.at(passing, self.maker[is_own], figures.passing_bytes[is_own])
        working = float((np.cumsum(steps) + waiting + passing).max(initial=0.0))
        return StageLoad(
            forward_s=self.seconds(FORWARD), backward_s=self.seconds(BACKWARD), update_s=self.seconds(UPDATE),
            parameter_bytes=float(figures.parameter_bytes[owns].sum()), state_bytes=float(figures.stored_bytes[owns].sum()),
            gradient_bytes=float(figures.shard_bytes[[p.gradient for p, o in zip(graph.parameters, owns, strict=True) if o]].sum()),
            batch_bytes=batch, input_bytes=arrives, kept_bytes=kept, working_bytes=working,
        )  # fmt: skip
