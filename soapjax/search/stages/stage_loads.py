"""What a stage costs: seconds of its forward, backward and update programs and the bytes that it keeps, per micro-batch.

A stage is a run of operators on n devices with a plan inside: a strategy of the whole graph at micro-batch size on n devices.
The cost model prices the whole graph once per strategy and micro-batch size; a stage is the part of the static schedule that
its operators own (stage_part.py). So one stage of all operators and one micro-batch takes exactly the time that the SPMD simulator
gives for the same strategy (tested). Memory is an upper bound: a part's gradients count from the start of its backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from soapjax.costs.compilers.of_backend import compiler_of
from soapjax.costs.itemize import Sent, described_items, sent_items
from soapjax.costs.measured.interpolation import ComputeRates, linked, without_links
from soapjax.costs.measured.profile import Profile
from soapjax.costs.split_share import split_flops
from soapjax.errors import Problem
from soapjax.graph.condensing import forward_operators
from soapjax.graph.lifespans import lifetimes
from soapjax.graph.microbatch import micro_batch
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.phases import BACKWARD, PHASE_NAMES, UPDATE
from soapjax.search.stages.ownership import Ownership
from soapjax.search.stages.stage_figures import Fabric, Figures, level_between, part_of
from soapjax.search.stages.stage_flows import OF_UPDATE, CrossingBytes, Flow, flows_between, sums_of
from soapjax.search.stages.stage_part import StagePart
from soapjax.simulate.pipeline_tasks import StageLoad, Transfer
from soapjax.strategy.configs import Strategy
from soapjax.strategy.layout import Spec
from soapjax.strategy.pipeline_plan import holders_of
from soapjax.strategy.plan import SentPart
from soapjax.strategy.space import fixed_layouts
from soapjax.topology import DeviceTopology, FactorMesh, factor_mesh


def positions(graph: OperatorGraph, forward: Sequence[int]) -> np.ndarray:
    """int [N]: the place of every operator among the `forward` ones.

    Operators of the backward pass alone stand where the earliest of those stand that they read from; OF_UPDATE.
    """
    position = np.full(graph.num_operators, OF_UPDATE)
    position[list(forward)] = np.arange(len(forward))
    made = {a.tensor: t.operator for t in graph.tasks for a in t.writes}
    is_forward = position >= 0
    for task in graph.tasks:
        if not is_forward[task.operator] and position[task.operator] < 0 and task.phase != UPDATE:
            read = [position[made[a.tensor]] for a in task.reads if a.tensor in made and position[made[a.tensor]] >= 0]
            position[task.operator] = min(read, default=0)
    return position


def stage_of_operators(graph: OperatorGraph, bounds: Sequence[int], forward: Sequence[int]) -> np.ndarray:
    """The stage [N] of every operator: stage i has the forward operators bounds[i] : bounds[i + 1]; OF_UPDATE."""
    return _stages(positions(graph, forward), bounds)


def _stages(position: np.ndarray, bounds: Sequence[int]) -> np.ndarray:
    return np.where(position < 0, OF_UPDATE, np.searchsorted(np.asarray(bounds), position, side="right") - 1)


class StageLoads:
    """Loads of any stages of one graph on one topology; everything is kept once it is known.

    Args:
      profile: measurements to cost with; `topology` then has its links as measured.
      sums_once: whether devices sum up gradients once per step; in PipeDream every minibatch is a step.
      fixed: layouts that the user decided, by argument path: by axes of the mesh of the stage that holds the argument.
    """

    def __init__(
        self, graph: OperatorGraph, topology: DeviceTopology, profile: Profile | None = None, *, sums_once: bool = True,
        fixed: Mapping[str, Spec] | None = None,
    ):  # fmt: skip
        micro_batch(graph, 1)  # refuses what cannot be a pipeline
        self.whole, self.topology, self.profile = graph, linked(topology, profile), without_links(profile)
        self.sums_once, self.fixed = sums_once, dict(fixed or {})
        self.forward = forward_operators(graph)
        self.position = positions(graph, self.forward)
        self.lives = lifetimes(graph)  # as those of its micro-batches
        self._graphs: dict[int, OperatorGraph] = {}
        self._holders = holders_of(graph) if self.fixed else {}
        self._misfits: dict[tuple[FactorMesh, int], dict[str, Problem]] = {}
        self._fabrics: dict[tuple, tuple[Fabric, Ownership]] = {}
        self._loads: dict[tuple, tuple[Figures, StageLoad]] = {}
        self._sent: dict[tuple, np.ndarray] = {}  # [phases, K + 1] by an inner strategy
        self._described: dict[int, tuple[Figures, list[tuple[Sent, SentPart]]]] = {}
        self._flows: dict[tuple[int, ...], list[Flow]] = {}

    def graph(self, num_microbatches: int) -> OperatorGraph:
        if num_microbatches not in self._graphs:
            self._graphs[num_microbatches] = micro_batch(self.whole, num_microbatches)
        return self._graphs[num_microbatches]

    def misfits_on(self, part: DeviceTopology, num: int) -> dict[str, Problem]:
        """What the user fixed, by path, that cannot be on the mesh of a stage of these devices."""
        mesh = factor_mesh(part)
        if (mesh, num) not in self._misfits:
            self._misfits[mesh, num] = fixed_layouts(self.graph(num), mesh, self.fixed)[1]
        return self._misfits[mesh, num]

    def misfits(self, bounds: Sequence[int], groups: Sequence[tuple[int, int]], num: int) -> list[Problem]:
        """What the user fixed that cannot be on the stage that holds it; `groups`: the (first device, devices) of every stage."""
        found, stage = [], _stages(self.position, bounds)
        for path in self.fixed:
            holder = self._holders.get(path)
            i = 0 if holder is None else int(stage[holder]) % len(groups)  # of the update alone: on the last
            if (problem := self.misfits_on(part_of(self.topology, *groups[i]), num).get(path)) is not None:
                found.append(self.explained(path, problem, groups[i][1], f"stage {i}"))
        return found

    def explained(self, path: str, problem: Problem, count: int, stage: str) -> Problem:
        """A problem with the operator that holds the argument, in such a stage of so many devices."""
        if count == self.topology.num_devices:
            return problem
        holder = self._holders.get(path)
        reader = "" if holder is None else f" of operator {self.whole.operators[holder].name!r}"
        place = f"{problem.place}{reader} in {stage}, on {count} devices"
        return problem._replace(place=place, remedy=f"{problem.remedy}, or ask for fewer stages")

    def _fabric(self, first: int, count: int, num: int) -> tuple[Fabric, Ownership]:
        part = part_of(self.topology, first, count)
        links = tuple((level.name, level.size, level.bandwidth_bytes_per_s) for level in part.levels)
        if (links, num) not in self._fabrics:
            has_sums = self.sums_once and num > 1
            # What other stages hold need not fit here. A formula asks for fewer devices, too, and for single samples.
            misfits = self.misfits_on(part, num)
            fixed = {path: spec for path, spec in self.fixed.items() if path not in misfits}
            fabric = Fabric(self.graph(num), part, self.profile, has_passes=num > 1, has_sums=has_sums, fixed=fixed)
            self._fabrics[links, num] = fabric, Ownership(fabric.tables, fabric.schedule, self.lives)
        return self._fabrics[links, num]

    def fabric(self, first: int, count: int, num: int) -> Fabric:
        """The devices of a stage, at so many micro-batches, with the inner strategies that it may have."""
        return self._fabric(first, count, num)[0]

    def load(self, bounds: tuple[int, int], first: int, count: int, num: int, inner: int) -> StageLoad:
        """Of the forward operators bounds[0] : bounds[1] on `count` devices from `first`, at `num` micro-batches."""
        return self.load_of(bounds, first, count, num, self.fabric(first, count, num).choices[inner].figures)

    def load_of(
        self, bounds: tuple[int, int], first: int, count: int, num: int, figures: Figures, *, overlap: bool = True
    ) -> StageLoad:  # fmt: skip
        """As `load`, for any strategy of the graph on the stage's mesh, by its figures; `overlap` False: one thing at a time."""
        own = self._fabric(first, count, num)[1]
        key = bounds, id(own), id(figures), overlap
        if key not in self._loads:
            apart = num > 1
            part = StagePart(
                own, figures, self._mine(bounds), overlap=overlap, has_passes=apart, sums_once=self.sums_once and apart
            )  # fmt: skip
            self._loads[key] = figures, self._summing(part.load(), num)  # the figures live as long as their id is a key
        return self._loads[key][1]

    def _mine(self, bounds: tuple[int, int]) -> np.ndarray:
        """bool [N]: the operators of a stage; the last one has those of the update alone."""
        is_last = bounds[1] == len(self.forward)
        return (self.position >= bounds[0]) & (self.position < bounds[1]) | ((self.position == OF_UPDATE) & is_last)

    def _summing(self, load: StageLoad, num: int) -> StageLoad:
        """With the running sums of gradients: zeros per step; per micro-batch a gradient and a sum read, a sum written.

        Where the product that makes a gradient adds to the sum in place only the sum is read besides.
        """
        if num == 1 or not self.sums_once:
            return load
        once_s = load.gradient_bytes / ComputeRates(self.topology, self.profile).memory_bytes_per_s
        in_place = compiler_of(self.topology).adds_in_place
        summing_s = (1 if in_place else 3) * once_s
        is_split = load.weights_s > 0
        return load._replace(
            backward_s=load.backward_s + summing_s, update_s=load.update_s + once_s,
            weights_s=load.weights_s + is_split * summing_s, inputs_s=load.inputs_s + (not is_split) * summing_s,
            unsummed_bytes=0.0 if in_place else load.gradient_bytes,
        )  # fmt: skip

    def split_flops(
        self, bounds: tuple[int, int], first: int, count: int, num: int, strategy: Strategy, figures: Figures
    ) -> tuple[float, float]:  # fmt: skip
        """FLOPs of a stage per micro-batch, and those that are split (costs/split_share.py)."""
        tables = self.fabric(first, count, num).tables
        every = split_flops(tables, strategy.axes, tables.stored(figures.layouts.slots), num_devices=self.topology.num_devices)
        flops, split = (x[self._mine(bounds)].sum() for x in every)
        return flops, split

    def sends(
        self, bounds: tuple[int, int], first: int, count: int, num: int, strategy: Strategy, figures: Figures
    ) -> list[tuple[str, SentPart]]:  # fmt: skip
        """What each device of such a stage sends in one pass over one micro-batch, in an update, and to gather parameters for all
        passes, with the program of each.
        """
        fabric, own = self._fabric(first, count, num)
        mine, is_last = self._mine(bounds), bounds[1] == len(self.forward)
        late = self._once(fabric, figures, num)
        weights = StagePart(own, figures, mine).weights
        end = len(fabric.tables.graph.tasks)
        found, growth = [], self._growth(fabric, figures)
        if id(figures) not in self._described:
            self._described[id(figures)] = figures, described_items(fabric.tables, figures.layouts, strategy)
        for item, sent in self._described[id(figures)][1]:
            if mine[own.operator[item.task]] if item.task < end else is_last:
                phase = UPDATE if item.task == end else fabric.tables.graph.tasks[item.task].phase
                program = late.get((item.reason, item.tensor)) if phase != UPDATE else None
                kind = "weights" if phase == BACKWARD and item.task in weights else PHASE_NAMES[phase]
                if more := growth.get((item.reason, item.tensor)):
                    sent = sent.model_copy(update={"bytes": {k: round(n * more) for k, n in sent.bytes.items()}})
                found.append((program or kind, sent))
        return found

    def _once(self, fabric: Fabric, figures: Figures, num: int) -> dict[tuple[str, int], str]:
        """What passes leave to programs that run once per step (reason, tensor), and to which: sums and gathered parameters."""
        if not self.sums_once or num == 1:
            return {}
        late = zip(fabric.tables.graph.parameters, figures.may_sum_late, strict=True)
        gathered = fabric.tables.edge_tensor[figures.gathers_once].tolist()
        return {("resolve", p.gradient): "update" for p, is_late in late if is_late} | {("reshard", t): "gather" for t in gathered}

    def _growth(self, fabric: Fabric, figures: Figures) -> dict[tuple[str, int], float]:
        """By how much more is sent of sums that run once per step (reason, tensor)."""
        grown = zip(fabric.tables.graph.parameters, figures.late_growth.tolist(), strict=True)
        return {("resolve", p.gradient): growth for p, growth in grown if growth != 1}

    def sent_bytes(self, bounds: tuple[int, int], first: int, count: int, num: int, inner: int) -> np.ndarray:
        """What each device of such a stage sends in a forward and in a backward pass over one micro-batch, and in an update [3]."""
        fabric, own = self._fabric(first, count, num)
        key = id(fabric), inner
        tables = fabric.tables
        if key not in self._sent:
            inside = fabric.choices[inner]
            late = self._once(fabric, inside.figures, num)
            growth = self._growth(fabric, inside.figures)
            self._sent[key] = every = np.zeros((3, tables.num_tasks + 1))
            for item in sent_items(tables, inside.figures.layouts, inside.strategy):
                is_late = item.task == tables.num_tasks or (item.reason, item.tensor) in late
                sent = sum(item.bytes.values()) * growth.get((item.reason, item.tensor), 1)
                every[UPDATE if is_late else tables.graph.tasks[item.task].phase, item.task] += sent
        return self._sent[key] @ np.append(self._mine(bounds)[own.operator], bounds[1] == len(self.forward)).astype(np.float64)

    def crossing(
        self, bounds: Sequence[int], count: Sequence[int], num: int, inside: Sequence[Figures]
    ) -> dict[tuple[int, int], CrossingBytes]:  # fmt: skip
        """(earlier stage, later stage) -> what crosses.

        Args:
          inside: of every stage the figures of its strategy; a tensor is sent as the stage that gets it keeps it.
        """
        return sums_of(self.flows(bounds), lambda f: inside[f.reader].shard_bytes[f.tensor] * count[f.reader])

    def flows(self, bounds: Sequence[int]) -> list[Flow]:
        """What crosses between stages; every tensor once per stage that reads it."""
        key = tuple(bounds)
        if key not in self._flows:
            self._flows[key] = flows_between(self.whole, _stages(self.position, bounds))
        return self._flows[key]


def transfers_of(
    crossing: dict[tuple[int, int], CrossingBytes], topology: DeviceTopology, first: Sequence[int], count: Sequence[int]
) -> list[Transfer]:  # fmt: skip
    """What crosses, over the slowest link between the devices of two stages; all devices of the smaller one send or receive."""
    found = []
    for (a, b), sizes in sorted(crossing.items()):
        ends = (min(first[a], first[b]), max(first[a] + count[a], first[b] + count[b]) - 1)
        level = level_between(topology, *ends)
        link = topology.levels[level]
        rate = link.achieved_bytes_per_s * min(count[a], count[b])
        seconds = [link.latency_s + size / rate if size else 0.0 for size in sizes]
        found.append(Transfer(a, b, level, *seconds))
    return found
