"""The joint search of pipelines: stages, devices, the plan inside, micro-batches, schedule and rematerialisation at once.

A choice is priced by the pipeline simulation (simulate/pipeline.py) of its stages' loads (stage_loads.py): a bubble is idle time
there, recomputation is time, and what does not fit is penalised as in every search. Starts are GPipe's balanced partitions
and PipeDream's dynamic program, for every number of stages, micro-batches and schedule; the best go on by Metropolis-Hastings. The
number of stages is fixed within a chain, so every move has its reverse, as likely:

    boundary    between two stages, some operators on or back
    devices     of two groups, any split of their sum
    inside      of one group: data parallelism, Megatron's pairs over the fastest axes, parameters as used or sharded
    micro-batches, schedule, rematerialisation of one stage or all

The asynchronous schedule of PipeDream trains other weights, so it is planned only where it is asked for.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from soapjax.costs.layers import LayerGraph
from soapjax.errors import Problem, SoapjaxError
from soapjax.graph.microbatch import sample_divisor
from soapjax.graph.operators import OperatorGraph
from soapjax.search.gpipe import balanced_partition
from soapjax.search.pipedream import Memory, pipedream
from soapjax.search.stage_loads import StageLoads, part_of, stage_of_operators
from soapjax.simulate.pipeline import PipelineTimeline, StageLoad, Transfer, simulate_pipeline
from soapjax.strategy.pipeline import Pipeline, ScheduleName, Stage
from soapjax.topology import DeviceTopology

SYNCHRONOUS: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved")
MAX_BOUNDARIES = 160  # places to cut at that the planners consider
MAX_MICROBATCHES = 64
BETA = 100.0  # of the chain: a choice 1 % slower than the start is accepted with probability 1/e
CHAINS = 3
DEFAULT_PROPOSALS = 600


@dataclasses.dataclass(frozen=True)
class Choice:
    """One pipeline: S stages on G groups of devices, stage i on group i mod G."""

    schedule: ScheduleName
    num_microbatches: int
    bounds: tuple[int, ...]  # [S + 1]: stage i has the forward operators bounds[i] : bounds[i + 1]
    counts: tuple[int, ...]  # [G]: devices of each group, one after the other
    inner: tuple[int, ...]  # [G]: index into the group's inner strategies
    rematerialise: tuple[bool, ...]  # [S]

    @property
    def num_stages(self) -> int:
        return len(self.bounds) - 1

    def group(self, stage: int) -> tuple[int, int, int]:
        """(first device, devices, inner strategy) of a stage."""
        g = stage % len(self.counts)
        return sum(self.counts[:g]), self.counts[g], self.inner[g]


class Priced(NamedTuple):
    choice: Choice
    timeline: PipelineTimeline
    memory_bytes: float  # of the fullest device
    is_feasible: bool
    cost: float


class StageSearch(NamedTuple):
    """What a search of pipelines found; `baselines` are the best of every start by its name."""

    best: Priced
    baselines: dict[str, Priced]
    num_proposals: int
    search_s: float
    stopped_by: str


class StageProblem:
    """A graph and a topology to be cut into stages; prices choices."""

    def __init__(
        self, graph: OperatorGraph, topology: DeviceTopology, *, schedules: Sequence[ScheduleName] = SYNCHRONOUS,
        num_stages: int | None = None, num_microbatches: int | None = None, always_rematerialise: bool = False,
    ):  # fmt: skip
        self.loads = StageLoads(graph, topology)
        self.graph, self.topology = graph, topology
        self.schedules, self.always_rematerialise = tuple(schedules), always_rematerialise
        self.usable_bytes = topology.device.usable_memory_bytes
        if num_microbatches is not None:
            self.loads.graph(num_microbatches)  # refuses what does not divide
        whole = sample_divisor(graph)
        every = [n for n in range(2, min(whole, MAX_MICROBATCHES) + 1) if whole % n == 0] or [1]
        self.microbatches = [num_microbatches] if num_microbatches is not None else every
        self.stages = self._numbers_of_stages(num_stages)
        self._cuts = self._boundaries()
        self._transfers: dict[tuple, list[Transfer]] = {}
        self._priced: dict[Choice, Priced] = {}

    def _numbers_of_stages(self, given: int | None) -> list[int]:
        most = len(self.loads.forward)
        devices = self.topology.num_devices
        if given is not None:
            problems = []
            if not 1 <= given <= most:
                value, expected = str(given), f"1 to {most}, the operators of the forward pass"
                problems.append(Problem("stages", value, expected, "ask for fewer stages"))
            if given > devices:
                problems.append(Problem("stages", str(given), f"at most {devices}, the devices", "ask for fewer stages"))
            if problems:
                raise SoapjaxError(problems)
            return [given]
        return [k for k in range(2, min(devices, most, 16) + 1) if devices % k == 0] or [1]

    def _boundaries(self) -> tuple[int, ...]:
        """Where to cut: all places between forward operators, or in long models the cheapest of each of MAX_BOUNDARIES runs."""
        n = len(self.loads.forward)
        if n <= MAX_BOUNDARIES:
            return tuple(range(n + 1))
        crossing = prefix_crossing(self.graph, self.loads.forward)
        edges = np.linspace(1, n, MAX_BOUNDARIES + 1).astype(int)
        inside = [a + int(np.argmin(crossing[a:b])) for a, b in zip(edges, edges[1:], strict=False) if b > a]
        return (0, *inside, n)

    def layers(self, num: int) -> tuple[LayerGraph, tuple[int, ...]]:
        """Runs of operators between boundaries as layers on one device, at `num` micro-batches; and the boundaries."""
        marks = self._cuts
        loads = [self.loads.load((a, b), 0, 1, num, 0) for a, b in zip(marks, marks[1:], strict=False)]
        crossing = prefix_crossing(self.loads.graph(num), self.loads.forward)
        graph = LayerGraph(
            names=tuple(self.graph.operators[self.loads.forward[a]].name for a in marks[:-1]),
            forward_s=[x.forward_s for x in loads],
            backward_s=[x.backward_s for x in loads],
            activation_bytes=[crossing[b] for b in marks[1:]],
            parameter_bytes=[x.parameter_bytes for x in loads],
            kept_bytes=[x.kept_bytes for x in loads],
            edges=tuple((i, i + 1) for i in range(len(loads) - 1)),
        )
        return graph, marks

    def price(self, choice: Choice) -> Priced:
        """Raises: SoapjaxError where the schedule does not fit."""
        if choice not in self._priced:
            num = choice.num_microbatches
            groups = [choice.group(i) for i in range(choice.num_stages)]
            loads = [
                self.loads.load((choice.bounds[i], choice.bounds[i + 1]), *groups[i][:2], num, groups[i][2])
                for i in range(choice.num_stages)
            ]
            key = (num, choice.bounds, choice.counts)
            if key not in self._transfers:
                first, counts = [g[0] for g in groups], [g[1] for g in groups]
                self._transfers[key] = self.loads.transfers(choice.bounds, first, counts, num)
            self._priced[choice] = self._simulated(choice, loads, self._transfers[key])
        return self._priced[choice]

    def _simulated(self, choice: Choice, loads: list[StageLoad], transfers: list[Transfer]) -> Priced:
        timeline = simulate_pipeline(outline(choice), loads, transfers, overlap=self.topology.device.overlap)
        memory = max(timeline.memory_bytes)
        excess = max(memory / self.usable_bytes - 1, 0.0)
        cost = timeline.step_time_s * (2 + 8 * excess if excess else 1.0)  # as search/problem.py
        return Priced(choice, timeline, memory, not excess, cost)

    def is_valid(self, choice: Choice) -> bool:
        """Whether a choice is in the space: groups of whole units, inner strategies that exist, a schedule that fits."""
        groups = len(choice.counts)
        if sum(choice.counts) > self.topology.num_devices or choice.num_microbatches not in self.microbatches:
            return False
        if choice.schedule == "interleaved" and (choice.num_microbatches % groups or choice.num_stages % groups):
            return False
        if choice.schedule in ("1f1b", "pipedream") and choice.num_stages != groups:
            return False
        if self.always_rematerialise and not all(choice.rematerialise):
            return False
        first = 0
        for count, inner in zip(choice.counts, choice.inner, strict=True):
            if not _is_regular(self.topology, first, count):
                return False
            if inner >= len(self.loads.choices(first, count, choice.num_microbatches)):
                return False
            first += count
        return True

    def pipeline(self, choice: Choice) -> Pipeline:
        """The pipeline as a plan has it."""
        stage = stage_of_operators(self.graph, choice.bounds, self.loads.forward)
        stages = []
        for i in range(choice.num_stages):
            first, count, _ = choice.group(i)
            mesh = self.loads.mesh(first, count, choice.num_microbatches)
            stages.append(
                Stage(
                    operators=tuple(self.graph.operators[n].name for n in np.flatnonzero(stage == i)),
                    devices=tuple(range(first, first + count)),
                    mesh=dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)),
                    rematerialise=choice.rematerialise[i],
                )
            )
        return Pipeline(schedule=choice.schedule, num_microbatches=choice.num_microbatches, stages=tuple(stages))


def outline(choice: Choice) -> Pipeline:
    """The pipeline of a choice without its operators, for the simulation."""
    stages = []
    for i in range(choice.num_stages):
        first, count, _ = choice.group(i)
        stages.append(Stage.model_construct(
            operators=(), devices=tuple(range(first, first + count)), mesh={}, replicas=1, rematerialise=choice.rematerialise[i]
        ))  # fmt: skip
    return Pipeline.model_construct(
        schedule=choice.schedule, num_microbatches=choice.num_microbatches, stages=tuple(stages), vertical_sync=False
    )


def prefix_crossing(graph: OperatorGraph, forward: Sequence[int]) -> np.ndarray:
    """Bytes [n + 1] that cross forwards where the first k forward operators are one stage and the others the next."""
    place = {op: k for k, op in enumerate(forward)}
    made = {a.tensor: t.operator for t in graph.tasks if t.phase == 0 for a in t.writes}
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


def _is_regular(topology: DeviceTopology, first: int, count: int) -> bool:
    """Whether devices are whole units: their mesh then has the links that it seems to have."""
    part = part_of(topology, first, count)
    return count == 1 or len(part.levels) > 1 or topology.levels[-1].size % count == 0 or len(topology.levels) == 1


def _partitions(problem: StageProblem, num: int, stages: int) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(name, bounds, device counts) from GPipe's and PipeDream's planners."""
    layers, marks = problem.layers(num)
    if stages > layers.num_layers:
        return
    devices = problem.topology.num_devices
    parts = balanced_partition(layers, stages)
    bounds = (0, *(marks[p[-1] + 1] for p in parts))
    if devices % stages == 0:
        yield "gpipe", bounds, (devices // stages,) * stages
    else:
        yield "gpipe", bounds, (1,) * stages
    if stages <= devices and layers.num_layers > 1:
        found = pipedream(layers, problem.topology, memory=Memory(is_limited=False), num_stages=stages, chain=True)
        yield "pipedream", (0, *(marks[s.layers[-1] + 1] for s in found.stages)), tuple(len(s.devices) for s in found.stages)


def _starts(problem: StageProblem) -> Iterator[tuple[str, Choice]]:
    for stages in problem.stages:
        for num in problem.microbatches:
            for name, bounds, counts in _partitions(problem, num, stages):
                for schedule in problem.schedules:
                    keeps = (True,) if problem.always_rematerialise else (False, True)
                    for again in keeps:
                        if schedule == "interleaved":
                            if name != "gpipe" or num % stages or 2 * stages > len(problem.loads.forward):
                                continue
                            layers, marks = problem.layers(num)
                            if 2 * stages > layers.num_layers:
                                continue
                            parts = balanced_partition(layers, 2 * stages)
                            cut = (0, *(marks[p[-1] + 1] for p in parts))
                        else:
                            cut = bounds
                        choice = Choice(schedule, num, cut, counts, (0,) * len(counts), (again,) * (len(cut) - 1))
                        yield f"{schedule}{', rematerialised' if again else ''}", choice


Move = Callable[[np.random.Generator, StageProblem, Choice], Choice | None]


def _move_boundary(rng: np.random.Generator, problem: StageProblem, c: Choice) -> Choice | None:
    if c.num_stages < 2:
        return None
    i = int(rng.integers(1, c.num_stages))
    step = int(rng.choice([1, 2, 4, 8])) * int(rng.choice([-1, 1]))
    cuts = problem._cuts
    at = int(np.searchsorted(cuts, c.bounds[i])) + step
    if not 0 <= at < len(cuts) or not c.bounds[i - 1] < cuts[at] < c.bounds[i + 1]:
        return None
    return dataclasses.replace(c, bounds=(*c.bounds[:i], cuts[at], *c.bounds[i + 1 :]))


def _move_devices(rng: np.random.Generator, problem: StageProblem, c: Choice) -> Choice | None:
    if len(c.counts) < 2:
        return None
    i, j = map(int, rng.choice(len(c.counts), 2, replace=False))
    total = c.counts[i] + c.counts[j]
    mine = int(rng.integers(1, total))
    counts = list(c.counts)
    counts[i], counts[j] = mine, total - mine
    return dataclasses.replace(c, counts=tuple(counts))


def _move_inside(rng: np.random.Generator, problem: StageProblem, c: Choice) -> Choice | None:
    inner = list(c.inner)
    most = 3 * (1 + math.ceil(math.log2(problem.topology.num_devices + 1)))
    picked = int(rng.integers(most))
    if rng.random() < 0.5:
        inner = [picked] * len(inner)
    else:
        inner[int(rng.integers(len(inner)))] = picked
    return dataclasses.replace(c, inner=tuple(inner))


def _move_microbatches(rng: np.random.Generator, problem: StageProblem, c: Choice) -> Choice | None:
    return dataclasses.replace(c, num_microbatches=int(rng.choice(problem.microbatches)))


def _move_schedule(rng: np.random.Generator, problem: StageProblem, c: Choice) -> Choice | None:
    return dataclasses.replace(c, schedule=str(rng.choice(problem.schedules)))


def _move_memory(rng: np.random.Generator, problem: StageProblem, c: Choice) -> Choice | None:
    again = list(c.rematerialise)
    i = int(rng.integers(len(again)))
    again[i] = not again[i]
    return dataclasses.replace(c, rematerialise=tuple(again))


MOVES: tuple[Move, ...] = (
    _move_boundary, _move_boundary, _move_devices, _move_inside, _move_microbatches, _move_schedule, _move_memory,
)  # fmt: skip


def search_stages(
    problem: StageProblem, *, seed: int = 0, num_proposals: int | None = None, seconds: float | None = None,
    progress: Callable[[int, float, float], None] | None = None,
) -> StageSearch:  # fmt: skip
    """The best pipeline found: from all starts, then by chains from the best of them.

    Args:
      num_proposals, seconds: budget of the chains; DEFAULT_PROPOSALS where neither is given. Ctrl-C ends them early.
    Raises: SoapjaxError where no pipeline is possible.
    """
    begin = time.monotonic()
    if num_proposals is None and seconds is None:
        num_proposals = DEFAULT_PROPOSALS
    best_of: dict[str, Priced] = {}
    by_stages: dict[int, Priced] = {}
    done, stopped = 0, "proposals"

    def better(a: Priced, b: Priced | None) -> bool:
        return b is None or (not a.is_feasible, a.cost) < (not b.is_feasible, b.cost)

    try:
        for name, choice in _starts(problem):
            if problem.is_valid(choice):
                found = problem.price(choice)
                if better(found, best_of.get(name)):
                    best_of[name] = found
                if better(found, by_stages.get(choice.num_stages)):
                    by_stages[choice.num_stages] = found
    except KeyboardInterrupt:
        stopped = "interrupted"
    if not best_of:
        stages, batches = (" or ".join(map(str, x[:8])) for x in (problem.stages, problem.microbatches))
        value = f"{stages} stages and {batches} micro-batches on {problem.topology.num_devices} devices"
        remedy = "ask for another number of stages or micro-batches, or for more devices"
        raise SoapjaxError(Problem("pipeline", value, f"what {' or '.join(problem.schedules)} can run", remedy))
    seeds = sorted(by_stages.values(), key=lambda p: (not p.is_feasible, p.cost))[:CHAINS]
    best, reference = seeds[0], seeds[0].cost
    rng = np.random.default_rng(seed)
    share = None if num_proposals is None else -(-num_proposals // len(seeds))
    try:
        for k, at in enumerate(seeds if stopped != "interrupted" else ()):
            chain = 0
            while (share is None or chain < share) and (
                seconds is None or time.monotonic() - begin < seconds * (k + 1) / len(seeds)
            ):
                chain += 1
                done += 1
                move = MOVES[int(rng.integers(len(MOVES)))](rng, problem, at.choice)
                uniform = rng.random()
                if move is None or not problem.is_valid(move):
                    continue
                found = problem.price(move)
                if uniform < math.exp(min(0.0, BETA * (at.cost - found.cost) / reference)):
                    at = found
                if better(found, best):
                    best = found
                if progress is not None and done % 16 == 0:
                    progress(done, best.timeline.step_time_s, time.monotonic() - begin)
        if seconds is not None and (num_proposals is None or done < num_proposals):
            stopped = "seconds"
    except KeyboardInterrupt:
        stopped = "interrupted"
    return StageSearch(best, best_of, done, time.monotonic() - begin, stopped)
