"""Pipelines of one graph on one topology: what may be chosen, and what a choice costs.

`StageProblem.price` simulates a choice (choices.py, simulate/pipeline_timeline.py) with the loads of its stages (stage_loads.py),
and `StageProblem.pipeline` is the pipeline that a plan file has.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from soapjax.costs.measured.layer_graph import LayerGraph
from soapjax.costs.measured.profile import Profile
from soapjax.costs.split_share import share_of
from soapjax.errors import Problem, SoapjaxError
from soapjax.graph.condensing import prefix_crossing, repeated_blocks
from soapjax.graph.microbatch import micro_batch, sample_divisor
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.phases import BACKWARD
from soapjax.search.front import Front
from soapjax.search.objective import TIME, Objective
from soapjax.search.stages.choices import Choice, Priced, firsts_of, outline, scores_of
from soapjax.search.stages.condensed_loads import CondensedLoads
from soapjax.search.stages.stacks import Stacks, reaches
from soapjax.search.stages.stage_figures import part_of
from soapjax.search.stages.stage_flows import CrossingBytes
from soapjax.search.stages.stage_loads import StageLoads, stage_of_operators, transfers_of
from soapjax.simulate.pipeline_tasks import StageLoad, Transfer
from soapjax.simulate.pipeline_timeline import keeping_casts, memory_of, predicted_times
from soapjax.strategy.layout import Spec
from soapjax.strategy.pipeline import Pipeline, ScheduleName, Stage
from soapjax.strategy.plan import StrategyFigures
from soapjax.strategy.schedules import SCHEDULES
from soapjax.topology import DeviceTopology

SYNCHRONOUS: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "zb-h1")  # that are searched
ONLY_INTERLEAVED: tuple[ScheduleName, ...] = ("interleaved",)
MAX_BOUNDARIES = 160  # places to cut at that the planners consider
MAX_MICROBATCHES = 1024


class StageProblem:
    """A graph and a topology to be cut into stages; prices choices.

    Args:
      expert: a baseline, of whose points of the grid the best is taken; None: of all, and of what is searched from there.
      fixed: as for `StageLoads`; numbers of stages and of micro-batches that cannot keep it are left out.
    """

    def __init__(
        self, graph: OperatorGraph, topology: DeviceTopology, *, schedules: Sequence[ScheduleName] = SYNCHRONOUS,
        num_stages: int | None = None, num_microbatches: int | None = None, always_rematerialise: bool = False,
        profile: Profile | None = None, objective: Objective = TIME, keeps_front: bool = False,
        expert: str | None = None, fixed: Mapping[str, Spec] | None = None,
    ):  # fmt: skip
        self.objective, self.expert = objective, expert
        self.front = Front(topology.device.usable_memory_bytes, dataclasses.astuple) if keeps_front else None
        sums_once = all(SCHEDULES[s].is_synchronous for s in schedules)
        self.exact = StageLoads(graph, topology, profile, sums_once=sums_once, fixed=fixed)
        self.forward = self.exact.forward
        self.crossing_bytes = prefix_crossing(graph, self.forward)
        self.loads = CondensedLoads(self.exact, self.crossing_bytes)
        self.graph, self.topology = graph, self.loads.topology
        self.schedules, self.always_rematerialise = tuple(schedules), always_rematerialise
        self.usable_bytes = topology.device.usable_memory_bytes
        if num_microbatches is not None:
            micro_batch(graph, num_microbatches)  # refuses what does not divide
        self.most_microbatches = sample_divisor(graph)  # one sample each
        every = [n for n in range(2, min(self.most_microbatches, MAX_MICROBATCHES) + 1) if self.most_microbatches % n == 0] or [1]
        self.microbatches = [num_microbatches] if num_microbatches is not None else every
        self.in_loops = inside_loops(graph, self.exact.position)
        again = inside_recomputed(graph, self.exact.position) - self.in_loops
        has_others = len(self.forward) + 1 - len(self.in_loops | again) > max(num_stages or 0, 2)
        self.never_cut = self.in_loops | again if has_others else self.in_loops
        self.cuts = self._boundaries()
        self.stacks = Stacks(graph, self.exact.position)
        self.stages, self.microbatches = self._numbers_as_fixed(self._numbers_of_stages(num_stages))
        # Stacked state lies where its rows are used only where all stages have as many of them (stacks.py).
        self.even_stages = {k for k in self.stages if self.stacks and self.schedules != ONLY_INTERLEAVED and self._can_be_even(k)}
        self._transfers: dict[tuple, list[Transfer]] = {}
        self._priced: dict[Choice, Priced] = {}
        self._looked_at: tuple[Choice, list[StageLoad]] | None = None  # the last choice: memory, estimate and price ask in turn

    def _numbers_as_fixed(self, stages: Sequence[int]) -> tuple[list[int], list[int]]:
        """Numbers of stages and of micro-batches with which all that the user fixed can be on the meshes of equal stages.

        Raises: SoapjaxError where there are none.
        """
        counts = {k: self.topology.num_devices // k for k in stages}
        parts = {k: part_of(self.topology, 0, count) for k, count in counts.items()}
        pairs = [(k, num) for k in stages for num in self.microbatches]
        found = [(k, num) for k, num in pairs if not self.exact.misfits_on(parts[k], num)]
        if pairs and not found:
            k, num = pairs[0]
            problems, stage = self.exact.misfits_on(parts[k], num), f"any of {k} stages"
            raise SoapjaxError([self.exact.explained(path, p, counts[k], stage) for path, p in problems.items()])
        return [k for k in stages if k in {k for k, _ in found}], [n for n in self.microbatches if n in {n for _, n in found}]

    def _numbers_of_stages(self, given: int | None) -> list[int]:
        most = len(self.forward) - len(self.in_loops)
        devices = self.topology.num_devices
        if given is not None:
            problems = []
            if not 1 <= given <= most:
                value, expected, remedy = str(given), f"1 to {most}, the operators of the forward pass", "ask for fewer stages"
                if self.in_loops:
                    expected += ", of a loop all together"
                    remedy += ", or unroll the loop (unroll=True, --unroll)"
                problems.append(Problem("stages", value, expected, remedy))
            if given > devices:
                problems.append(Problem("stages", str(given), f"at most {devices}, the devices", "ask for fewer stages"))
            if problems:
                raise SoapjaxError(problems)
            return [given]
        # One stage, and several micro-batches: one program's way to need less memory.
        least = 1 if self.schedules == SYNCHRONOUS else 2
        numbers = range(least, min(devices, len(self.cuts) - 1) + 1)
        dividing = [k for k in numbers if devices % k == 0]
        # Of seven devices two stages get three each, and one is idle.
        return (dividing if any(1 < k < devices for k in dividing) else list(numbers)) or [1]

    def is_even(self, choice: Choice) -> bool:
        """Whether stacked state can lie where its rows are used (stacks.py)."""
        return not self.stacks or self.stacks.is_even(choice.bounds, [group[:2] for group in choice.groups])

    def _cuts_stacks_well(self, choice: Choice) -> bool:
        """Evenly where that is possible; with several stages on one group, which is never even, only where that is asked for."""
        if choice.num_stages > len(choice.counts):
            return self.schedules == ONLY_INTERLEAVED
        return choice.num_stages not in self.even_stages or self.is_even(choice)

    def _can_be_even(self, stages: int) -> bool:
        marks = {*self.cuts, *self.joints}
        return any(reaches(allowed, stages) for allowed in self.stacks.even_cuts(sorted(marks), stages))

    @functools.cached_property
    def most_inner(self) -> int:
        """How many inner strategies a stage has at the most."""
        return len(self.loads.fabric(0, self.topology.num_devices, self.microbatches[-1]).choices)

    def _boundaries(self) -> tuple[int, ...]:
        """Where to cut: all places between forward operators, or in long models the cheapest of each of MAX_BOUNDARIES runs."""
        n = len(self.forward)
        if n <= MAX_BOUNDARIES:
            return tuple(k for k in range(n + 1) if k not in self.never_cut)
        edges = np.linspace(1, n, MAX_BOUNDARIES + 1).astype(int)
        crossing = self.crossing_bytes.copy()
        crossing[list(self.never_cut)] = np.inf
        inside = {a + int(np.argmin(crossing[a:b])) for a, b in zip(edges, edges[1:], strict=False) if b > a} - self.never_cut
        return self._joints(inside) if self.loads.condensed is not None else (0, *sorted(inside - {0, n}), n)

    @functools.cached_property
    def joints(self) -> tuple[int, ...]:
        """Places to cut at as people do: between blocks that repeat, and anywhere outside them."""
        return self._joints(set(self.cuts))

    def _joints(self, places: set[int]) -> tuple[int, ...]:
        if (blocks := repeated_blocks(self.graph, self.crossing_bytes)) is not None:
            places = {k for k in places if not blocks.first < k < blocks.end}
            places |= set(range(blocks.first, blocks.end + 1, blocks.period)) - self.never_cut
        return tuple(sorted(places | {0, len(self.forward)}))

    def layers(self, num: int, marks: Sequence[int] | None = None) -> tuple[LayerGraph, tuple[int, ...]]:
        """Runs of operators between `marks` (all boundaries) as layers on one device, at `num` micro-batches; and the marks."""
        marks = self.cuts if marks is None else tuple(marks)
        loads = [self.loads.load((a, b), 0, 1, num, 0) for a, b in zip(marks, marks[1:], strict=False)]
        graph = micro_batch(self.graph, num)
        crossing = prefix_crossing(graph, self.forward)
        layers = LayerGraph(
            names=tuple(self.graph.operators[self.forward[a]].name for a in marks[:-1]),
            forward_s=np.array([x.forward_s for x in loads]),
            backward_s=np.array([x.backward_s for x in loads]),
            activation_bytes=np.array([crossing[b] for b in marks[1:]]),
            parameter_bytes=np.array([x.parameter_bytes for x in loads]),
            kept_bytes=np.array([x.kept_bytes for x in loads]),
            edges=tuple((i, i + 1) for i in range(len(loads) - 1)),
        )
        return layers, marks

    def price(self, choice: Choice) -> Priced:
        """Raises: SoapjaxError where the schedule does not fit."""
        if choice not in self._priced:
            self._priced[choice] = self._simulated(choice, self._loads_of(choice))
        return self._priced[choice]

    def memory_bytes(self, choice: Choice) -> float:
        """What `price` says of the memory, without simulating."""
        return max(memory_of(outline(choice), self._loads_of(choice))[0])

    def estimated_s(self, choice: Choice) -> float:
        """Seconds of a step without simulating: what the busiest group does, and a pass of the others while it fills and drains.

        Nothing of what stages send to one another. Gradients of weights that are put off fill a third of the bubble, and what is
        computed again for the first gradient is done while the stage waits for it.
        """
        groups, num = len(choice.counts), choice.num_microbatches
        is_split = SCHEDULES[choice.schedule].splits_backward
        pass_s, again_s, busy_s = np.zeros(groups), np.zeros(groups), np.zeros(groups)
        loads = self._loads_of(choice)
        for i, (load, stage) in enumerate(zip(loads, self._keeping_casts(outline(choice), loads).stages, strict=True)):
            pass_s[i % groups] += load.forward_s + load.backward_s + 2 * load.casts_s * (not stage.keeps_casts)
            again_s[i % groups] += load.forward_s * choice.rematerialise[i]
            busy_s[i % groups] += load.update_s + load.casts_s * stage.keeps_casts
        busy_s += num * (pass_s + again_s)
        last = int(busy_s.argmax())
        idle_s = pass_s + again_s * is_split
        bubble_s = (idle_s.sum() - idle_s[last]) * groups / choice.num_stages
        return float(busy_s[last] + bubble_s * (2 / 3 if is_split else 1))

    def _loads_of(self, choice: Choice) -> list[StageLoad]:
        if self._looked_at is None or self._looked_at[0] is not choice:
            self._looked_at = choice, [self.loads.load(*place) for place in choice.places]
        return self._looked_at[1]

    def _keeping_casts(self, pipeline: Pipeline, loads: list[StageLoad]) -> Pipeline:
        """Where they fit: a step is not slower for it."""
        return keeping_casts(pipeline, loads, self.objective.memory_limit(self.usable_bytes))

    def _simulated(self, choice: Choice, loads: list[StageLoad]) -> Priced:
        timeline = predicted_times(self._keeping_casts(outline(choice), loads), loads, self._transfers_of(choice))
        memory = max(timeline.memory_bytes)
        sent = float(self._sent_bytes(choice).max()) if self.objective.limits_bytes or self.front is not None else 0.0
        scores = scores_of(timeline.step_time_s, memory, sent)
        if self.front is not None:
            self.front.offer(scores, [choice])
        found = self.objective.standing(scores, self.usable_bytes)
        return Priced(
            choice=choice, timeline=timeline, memory_bytes=memory, is_feasible=bool(found.is_feasible[0]),
            cost=float(found.cost[0]), sent_bytes=sent, excess=float(found.excess[0]),
        )  # fmt: skip

    def _transfers_of(self, choice: Choice) -> list[Transfer]:
        key = (choice.num_microbatches, choice.bounds, choice.counts, choice.inner)
        if key not in self._transfers:
            first, counts, _ = zip(*choice.groups, strict=True)
            self._transfers[key] = transfers_of(self._crossing(choice), self.topology, first, counts)
        return self._transfers[key]

    def _crossing(self, choice: Choice) -> dict[tuple[int, int], CrossingBytes]:
        """(earlier stage, later stage) -> what crosses."""
        num, groups = choice.num_microbatches, choice.groups
        inside = [self.loads.fabric(first, count, num).choices[inner].figures for first, count, inner in groups]
        return self.loads.crossing(choice.bounds, [count for _, count, _ in groups], num, inside)

    def _sent_bytes(self, choice: Choice) -> np.ndarray:
        """What each device of every group [G] sends in one step, inside its stages and to others."""
        num, groups = choice.num_microbatches, len(choice.counts)
        sent = np.zeros(groups)
        for i, place in enumerate(choice.places):
            passes = (num * (1 + choice.rematerialise[i]), num, 1)
            sent[i % groups] += float(self.loads.sent_bytes(*place) @ passes)
        for (a, b), sizes in self._crossing(choice).items():
            a, b = a % groups, b % groups
            if a != b:
                sent[a] += (num * sizes.forward + sizes.parameters) / choice.counts[a]
                sent[b] += (num * sizes.backward + sizes.sums) / choice.counts[b]
        return sent

    def figures(self, priced: Priced) -> StrategyFigures:
        """A choice as plans are compared."""
        choice = priced.choice
        alone = [self.loads.load(*place, overlap=False) for place in choice.places]
        serial = predicted_times(self._keeping_casts(outline(choice), alone), alone, self._transfers_of(choice), overlap=False)
        sent = self._sent_bytes(choice)
        return StrategyFigures(
            step_time_s=priced.timeline.step_time_s, without_overlap_s=serial.step_time_s,
            split_flops_share=share_of(*np.array([self.loads.split_flops(*place) for place in choice.places]).T),
            memory_bytes_per_device=int(priced.memory_bytes), feasible=priced.memory_bytes <= self.usable_bytes,
            sent_bytes=int(sent @ choice.counts) // self.topology.num_devices, peak_sent_bytes=int(sent.max()),
        )  # fmt: skip

    def sentence(self, choice: Choice) -> str:
        """A choice in the words of those who tune such grids by hand."""
        groups, chunks = len(choice.counts), choice.num_stages // len(choice.counts)
        stages = "one stage" if choice.num_stages == 1 else f"{choice.num_stages} stages"
        if chunks > 1:
            stages += f", {chunks} on each of {groups} groups"
        kinds = dict.fromkeys(self._inside(g, choice) for g in range(groups))
        again = sum(choice.rematerialise)
        passes = {0: "", choice.num_stages: ", every stage computed again"}.get(again, f", {again} stages computed again")
        own = f"{choice.num_microbatches} micro-batches, {choice.schedule}{passes}"
        return f"{stages} of {' or '.join(kinds)}; {own}"

    def _inside(self, group: int, choice: Choice) -> str:
        first, count, inner = choice.group(group)
        name = self.loads.fabric(first, count, choice.num_microbatches).choices[inner].name
        degree, *others = name.removeprefix("tensor/").split(", ")
        tensor = int(degree) if degree.isdecimal() else 1
        stored = "sharded parameters" if "regathered" in others else "sharded optimizer state"
        words = {
            "sequence": "sequence parallelism", "sharded": stored, "regathered": "gathered for each pass",
            "gradients": "sharded gradients",
            "searched": "and some operators otherwise",
        }  # fmt: skip
        return ", ".join([f"tensor {tensor} x data {count // tensor}", *(words[o] for o in others)])

    def is_valid(self, choice: Choice) -> bool:
        """Whether a choice is in the space: groups of whole units, inner strategies that exist, a schedule that fits."""
        groups = len(choice.counts)
        if sum(choice.counts) > self.topology.num_devices or choice.num_microbatches not in self.microbatches:
            return False
        if choice.schedule == "interleaved" and (choice.num_microbatches % groups or choice.num_stages % groups):
            return False
        if not SCHEDULES[choice.schedule].may_share_devices and choice.num_stages != groups:
            return False
        if self.always_rematerialise and not all(choice.rematerialise):
            return False
        if self.stacks and not self._cuts_stacks_well(choice):
            return False
        if not self.has_units(choice.counts):
            return False
        if self.exact.misfits(choice.bounds, [group[:2] for group in choice.groups], choice.num_microbatches):
            return False
        of_groups = zip(firsts_of(choice.counts), choice.counts, choice.inner, strict=True)
        return all(k < len(self.loads.fabric(first, count, choice.num_microbatches).choices) for first, count, k in of_groups)

    def has_units(self, counts: Sequence[int]) -> bool:
        """Whether groups of so many devices, one after the other, are whole units: meshes then have the links that they seem to.

        Where layouts are fixed, one group has all devices: their mesh has the axes that these are said by.
        """
        if any(map(any, self.exact.fixed.values())) and len(counts) == 1 and counts[0] != self.topology.num_devices:
            return False
        return all(_is_regular(self.topology, first, count) for first, count in zip(firsts_of(counts), counts, strict=True))

    def pipeline(self, choice: Choice) -> Pipeline:
        """The pipeline as a plan has it."""
        stage = stage_of_operators(self.graph, choice.bounds, self.forward)
        stages = []
        for i, (first, count, _) in enumerate(choice.groups):
            mesh = self.loads.fabric(first, count, choice.num_microbatches).space.mesh
            stages.append(
                Stage(
                    operators=tuple(self.graph.operators[n].name for n in np.flatnonzero(stage == i)),
                    devices=tuple(range(first, first + count)),
                    mesh=dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)),
                    rematerialise=choice.rematerialise[i],
                )
            )
        made = Pipeline(schedule=choice.schedule, num_microbatches=choice.num_microbatches, stages=tuple(stages))
        return self._keeping_casts(made, self._loads_of(choice))


def inside_loops(graph: OperatorGraph, position: np.ndarray) -> set[int]:
    """Places between forward operators, those [N] that operators stand at, with operators of one loop on both sides."""
    spans: dict[str, tuple[int, int]] = {}
    for task in graph.tasks:
        at = int(position[task.operator])
        if task.scope and at >= 0:
            loop = task.scope.split("/")[0]
            first, last = spans.get(loop, (at, at))
            spans[loop] = min(first, at), max(last, at)
    return {k for first, last in spans.values() for k in range(first + 1, last + 1)}


def inside_recomputed(graph: OperatorGraph, position: np.ndarray) -> set[int]:
    """Places between forward operators before which something is computed again that the backward pass reads behind them.

    A stage that was cut off there would have to be sent it, or leave the gradient that reads it to the stage before.
    """
    made = {a.tensor: int(position[t.operator]) for t in graph.tasks if t.phase == BACKWARD for a in t.writes}
    found: set[int] = set()
    for task in graph.tasks:
        at = int(position[task.operator])
        for access in task.reads if task.phase == BACKWARD else ():
            if 0 <= made.get(access.tensor, at) < at:
                found.update(range(made[access.tensor] + 1, at + 1))
    return found


def _is_regular(topology: DeviceTopology, first: int, count: int) -> bool:
    """Whether devices are whole units."""
    part = part_of(topology, first, count)
    return count == 1 or len(part.levels) > 1 or topology.levels[-1].size % count == 0 or len(topology.levels) == 1
