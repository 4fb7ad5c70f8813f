"""Simulates a pipeline: every pass of every stage on every micro-batch is a task on the simulators' streams.

A schedule (strategy/schedules.py) fixes the order of passes on each group of devices. Beside passes there are

    transfer    an output that a later stage reads, and its gradient on the way back: one at a time leaves a device, one arrives
    sync        of the gradients of replicas that worked on different minibatches (PipeDream), on all replicas' link streams
    update      of the weights

and the event-driven simulator (event.py) runs them: passes of a group in their order, transfers first come, first served on
each link and direction. They run beside the passes on every backend (what cannot overlap on CPUs are the collectives inside a
program, and those are in a pass' time). A bubble is what is left:

>>> found = simulate_pipeline(gpipe_of_4_equal_stages, loads, ())
>>> found.step_time_s / (8 * pass_s)       # M = 8: (M + S - 1)/M
1.375

Memory per device: weights, optimizer state and gradients; what the micro-batches in flight keep, all activations or (with
rematerialisation) only the stage's inputs; one micro-batch's working set; stashed versions of the weights (PipeDream).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from soapjax.simulate.event import TaskGraph, run
from soapjax.strategy.pipeline import Action, Pipeline
from soapjax.strategy.schedules import actions, groups_of, in_flight, kind_of, most_put_off, splits_backward

ROUNDS = 3  # of as many micro-batches as there are groups of devices, until a synchronous pipeline is in its steady state


class StageLoad(NamedTuple):
    """What one micro-batch costs on one replica of a stage; seconds of its devices together, bytes per device."""

    forward_s: float
    backward_s: float  # with the sums of its gradients over the stage's devices, without recomputation
    update_s: float
    sync_s: float = 0.0  # among replicas, per update
    sync_level: int = 0
    parameter_bytes: float = 0.0  # of one version of the weights
    state_bytes: float = 0.0  # weights and optimizer state
    gradient_bytes: float = 0.0
    unsummed_bytes: float = 0.0  # of one micro-batch's gradients, beside their running sums
    batch_bytes: float = 0.0  # of the data that it reads, per micro-batch
    input_bytes: float = 0.0  # what arrives from other stages for one micro-batch
    kept_bytes: float = 0.0  # all that its backward pass needs, inputs too, `batch_bytes` not
    working_bytes: float = 0.0  # peak during one micro-batch's own passes, `kept_bytes` in it, gradients not
    inputs_s: float = 0.0  # of the backward pass what earlier stages wait for, as a program of its own
    weights_s: float = 0.0  # the rest of it, likewise
    between_bytes: float = 0.0  # what the second reads of the first


class Transfer(NamedTuple):
    """Of all that one stage makes and a later one reads; at most one per pair of stages."""

    source: int
    target: int
    level: int
    forward_s: float  # per micro-batch
    backward_s: float  # of its gradient, per micro-batch; 0 where it has none
    parameters_s: float = 0.0  # per step, before the first pass: parameters that `source` holds and `target` reads too
    sums_s: float = 0.0  # per step, behind the last pass of `target`: what it adds to the gradients of these

    @property
    def seconds(self) -> tuple[float, ...]:
        return self[3:]


class PipelineTask(NamedTuple):
    """A task of the timeline. `devices` take part; `level` is the link level of a communication, -1 of a pass."""

    name: str
    stage: int
    devices: tuple[int, ...]
    level: int
    start_s: float
    duration_s: float


class PipelineTimeline(NamedTuple):
    """Of one step: M micro-batches; of `pipedream` the time is M minibatches' in the steady state."""

    step_time_s: float
    makespan_s: float
    tasks: tuple[PipelineTask, ...]  # that take time, by start
    idle_fraction: tuple[float, ...]  # [stages]: of the makespan that the stage's devices do not compute
    memory_bytes: tuple[float, ...]  # [stages]: peak on each of the stage's devices; stages that share devices are added up
    in_flight: tuple[int, ...]  # [stages]: most micro-batches held


class _Row(NamedTuple):
    name: str
    stage: int
    devices: tuple[int, ...]
    level: int
    seconds: float
    streams: tuple[int, ...]


class _Tasks:
    """Grows a task graph; inputs may be named before they exist."""

    def __init__(self):
        self.rows: list[_Row] = []
        self.inputs: list[list[object]] = []  # keys
        self.index: dict[object, int] = {}

    def add(self, key: object, row: _Row, inputs: Sequence[object]) -> None:
        self.index[key] = len(self.rows)
        self.rows.append(row)
        self.inputs.append(list(inputs))

    def graph(self) -> TaskGraph:
        n = len(self.rows)
        inputs = [tuple(sorted({self.index[k] for k in mine if k in self.index})) for mine in self.inputs]
        successors: list[list[int]] = [[] for _ in range(n)]
        for t, mine in enumerate(inputs):
            for i in mine:
                successors[i].append(t)
        return TaskGraph("fifo", tuple(inputs), tuple(map(tuple, successors)), (0,) * n, (False,) * n)


def simulate_pipeline(
    pipeline: Pipeline, loads: Sequence[StageLoad], transfers: Sequence[Transfer], *, overlap: bool = True
) -> PipelineTimeline:
    """The timeline and the memory of one step.

    Args:
      loads: per stage. `transfers`: between stages, forwards.
      overlap: whether transfers and sums of gradients run beside passes; without, the devices that they are between wait.
    Raises: SoapjaxError where the schedule does not fit the stages (see `schedules.actions`).
    """
    simulated = _long_enough(pipeline)
    tasks, updates = _expand(simulated, loads, transfers, overlap)
    graph = tasks.graph()
    times = run(graph, [r.seconds for r in tasks.rows], [r.streams if r.seconds > 0 else () for r in tasks.rows])
    makespan = max(times.end_s)
    step = makespan
    if not kind_of(pipeline).is_synchronous:
        step = _steady_s(simulated, [times.end_s[i] for i in updates]) * pipeline.num_microbatches
    busy = [0.0] * len(pipeline.stages)
    for row, start, end in zip(tasks.rows, times.start_s, times.end_s, strict=True):
        if row.level < 0:
            busy[row.stage] += (end - start) * len(row.devices) / len(pipeline.stages[row.stage].devices)
    groups = {i: group for group in groups_of(pipeline) for i in group}
    idle = [1 - sum(busy[j] for j in groups[i]) / makespan if makespan else 0.0 for i in range(len(busy))]
    timeline = sorted(
        (
            PipelineTask(r.name, r.stage, r.devices, r.level, s, r.seconds)
            for r, s in zip(tasks.rows, times.start_s, strict=True)
            if r.seconds > 0
        ),
        key=lambda t: (t.start_s, t.stage),
    )  # fmt: skip
    return PipelineTimeline(step, makespan, tuple(timeline), tuple(idle), *memory_of(pipeline, loads))


def predicted_times(
    pipeline: Pipeline, loads: Sequence[StageLoad], transfers: Sequence[Transfer], *, overlap: bool = True
) -> PipelineTimeline:
    """As `simulate_pipeline`, without the end of a long step: in the steady state every round of micro-batches takes as long.

    Its tasks are those of the short step that was simulated; step time, memory and micro-batches in flight are the long one's.
    """
    groups, num = len(groups_of(pipeline)), pipeline.num_microbatches
    rounds = [ROUNDS * groups + num % groups, (ROUNDS + 1) * groups + num % groups]
    if not kind_of(pipeline).is_synchronous or pipeline.order or rounds[-1] >= num:
        return simulate_pipeline(pipeline, loads, transfers, overlap=overlap)
    short, longer = (
        simulate_pipeline(pipeline.model_copy(update={"num_microbatches": n}), loads, transfers, overlap=overlap) for n in rounds
    )
    more_s = (longer.step_time_s - short.step_time_s) * (num - rounds[-1]) / groups
    memory, held = memory_of(pipeline, loads)
    return longer._replace(
        step_time_s=longer.step_time_s + more_s, makespan_s=longer.makespan_s + more_s, memory_bytes=memory, in_flight=held
    )


def memory_of(pipeline: Pipeline, loads: Sequence[StageLoad]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Peak bytes on each of a stage's devices [stages], and most micro-batches held [stages]."""
    held = in_flight(pipeline)
    rows = zip(loads, held, most_put_off(pipeline), strict=True)
    own = [_memory(pipeline, i, *row) for i, row in enumerate(rows)]
    groups = {i: group for group in groups_of(pipeline) for i in group}
    # Stages on the same devices: all that stays is there at once, of the working sets only one is.
    return tuple(sum(own[j][0] for j in groups[i]) + max(own[j][1] for j in groups[i]) for i in range(len(own))), held


def _long_enough(pipeline: Pipeline) -> Pipeline:
    """Of `pipedream` so many minibatches that the middle of the run is in the steady state."""
    if kind_of(pipeline).is_synchronous:
        return pipeline
    most = max(max(in_flight(pipeline)), math.lcm(*(s.replicas for s in pipeline.stages)))
    num = pipeline.num_microbatches
    return pipeline.model_copy(update={"num_microbatches": num * max(1, -(-6 * most // num))})


def _steady_s(pipeline: Pipeline, ends: Sequence[float]) -> float:
    """Seconds per minibatch between the first stage's updates in the middle of the run, over whole rounds of all replicas."""
    per_update = pipeline.stages[0].replicas
    round_updates = math.lcm(*(s.replicas for s in pipeline.stages)) // per_update
    first = len(ends) // 3
    count = max((len(ends) // 3) // round_updates, 1) * round_updates
    if first + count >= len(ends):
        return ends[-1] / (len(ends) * per_update)
    return (ends[first + count] - ends[first]) / (count * per_update)


def _memory(pipeline: Pipeline, stage: int, load: StageLoad, held: int, put_off: int) -> tuple[float, float]:
    """Bytes on one device of a stage that stay for the step, and those of one micro-batch's passes beyond."""
    replicas = pipeline.stages[stage].replicas
    per_replica = -(-held // replicas)
    keeps = load.input_bytes if pipeline.stages[stage].rematerialise else load.kept_bytes
    num = -(-pipeline.num_microbatches // replicas)
    # The whole batch is laid out as one array, and taken apart before the first pass.
    stays = load.state_bytes + load.gradient_bytes + 2 * num * load.batch_bytes + max(per_replica - 1, 0) * keeps
    stays += put_off * load.between_bytes
    if not kind_of(pipeline).is_synchronous:
        stays += max(per_replica - 1, 0) * load.parameter_bytes  # stashed versions
    own = max(load.working_bytes, load.kept_bytes) + (load.input_bytes if pipeline.stages[stage].rematerialise else 0.0)
    if num > 1:
        own += load.unsummed_bytes
    if per_replica < num:
        own += load.input_bytes  # of the next micro-batch, which arrives meanwhile
    return stays, own


def _expand(pipeline: Pipeline, loads, transfers, overlap: bool) -> tuple[_Tasks, list[int]]:
    """All tasks of a step; and which are the updates of the first stage."""
    stages = pipeline.stages
    group_of = {i: g for g, group in enumerate(groups_of(pipeline)) for i in group}
    levels = 1 + max([t.level for t in transfers] + [load.sync_level for load in loads], default=0)
    most = max(s.replicas for s in stages)

    def compute(i: int, replica: int) -> int:
        return (group_of[i] * most + replica) * (1 + 2 * levels)

    def leaving(i: int, replica: int, level: int) -> int:
        return compute(i, replica) + 1 + 2 * level

    def arriving(i: int, replica: int, level: int) -> int:
        return leaving(i, replica, level) + 1

    def replica_of(i: int, microbatch: int) -> int:
        return microbatch % stages[i].replicas

    def devices(i: int, replica: int) -> tuple[int, ...]:
        share = len(stages[i].devices) // stages[i].replicas
        return stages[i].devices[replica * share : (replica + 1) * share]

    tasks = _Tasks()
    into = [[t for t in transfers if t.target == i] for i in range(len(stages))]
    out = [[t for t in transfers if t.source == i] for i in range(len(stages))]

    def send(t: Transfer, m: int, backward: bool) -> None:
        a, b = (t.target, t.source) if backward else (t.source, t.target)
        ra, rb = replica_of(a, m), replica_of(b, m)
        seconds, kind = (t.backward_s, "backward") if backward else (t.forward_s, "forward")
        row = _Row(
            f"{'gradient' if backward else 'activation'} {m}: stage {a} to {b}", a, devices(a, ra) + devices(b, rb), t.level,
            seconds if group_of[a] != group_of[b] else 0.0,
            (leaving(a, ra, t.level), arriving(b, rb, t.level), *(() if overlap else (compute(a, ra), compute(b, rb)))),
        )  # fmt: skip
        tasks.add(("send", t.source, t.target, m, backward), row, [(kind, a, m)])

    def send_once(t: Transfer, kind: str, seconds: float, after: Sequence[object]) -> object:
        """What is sent once per step, between the first replicas."""
        a, b = (t.source, t.target) if kind == "parameters" else (t.target, t.source)
        streams = (leaving(a, 0, t.level), arriving(b, 0, t.level), *(() if overlap else (compute(a, 0), compute(b, 0))))
        seconds = seconds if group_of[a] != group_of[b] else 0.0
        row = _Row(f"{kind}: stage {a} to {b}", a, devices(a, 0) + devices(b, 0), t.level, seconds, streams)
        tasks.add((kind, t.source, t.target), row, after)
        return kind, t.source, t.target

    for t in transfers:
        if t.parameters_s:
            send_once(t, "parameters", t.parameters_s, ())
    is_split = splits_backward(pipeline)
    updates: list[int] = []
    for order in actions(pipeline):
        before: dict[int, object] = {}  # replica -> what ran there last
        waiting: list[object] = []  # backward passes that the next update sums up
        for action in order:
            i, m, load = action.stage, action.microbatch, loads[action.stage]
            if action.kind == "update":
                waiting += [("sums", t.source, t.target) for t in out[i] if t.sums_s]
                key = (action, "sync")
                every = range(stages[i].replicas)
                streams = tuple(way(i, r, load.sync_level) for r in every for way in (leaving, arriving))
                streams += () if overlap else tuple(compute(i, r) for r in every)
                row = _Row(f"sum of gradients {m}: stage {i}", i, stages[i].devices, load.sync_level, load.sync_s, streams)
                tasks.add(key, row, waiting or list(before.values()))
                row = _Row(f"update {m}: stage {i}", i, stages[i].devices, -1, load.update_s, tuple(compute(i, r) for r in every))
                tasks.add(action, row, [key, *before.values()])
                if i == 0:
                    updates.append(tasks.index[action])
                waiting = []
                # Replicas go on with passes on the version that they have; the update only has its place in their order.
                before = {r: action for r in every}
                continue
            replica = replica_of(i, m)
            key = (action.kind, i, m)
            seconds = _pass_s(action, pipeline, load, is_split)
            row = _Row(f"{action.kind} {m}: stage {i}", i, devices(i, replica), -1, seconds, (compute(i, replica),))
            if action.kind == "forward":
                needed = [("send", t.source, i, m, False) for t in into[i]]
                if not into[i] and i:
                    needed = [("forward", i - 1, m)]
                needed += [("parameters", t.source, i) for t in into[i] if t.parameters_s]
            elif action.kind == "backward":
                after = [("backward", i + 1, m)] if i + 1 < len(stages) else []
                needed = [*([("send", i, t.target, m, True) for t in out[i]] or after), ("forward", i, m)]
            else:
                needed = [("backward", i, m)]
            if action.kind == ("weights" if is_split else "backward"):
                waiting.append(key)
            tasks.add(key, row, [*needed, *([before[replica]] if replica in before else [])])
            before[replica] = key
            for t in {"forward": out, "backward": into}.get(action.kind, [()] * len(stages))[i]:
                send(t, m, action.kind == "backward")
        for i in {a.stage for a in order}:
            last = [(a.kind, i, a.microbatch) for a in order if a.stage == i and a.kind != "update"][-1:]
            for t in into[i]:
                if t.sums_s:
                    send_once(t, "sums", t.sums_s, last)
    return tasks, updates


def _pass_s(action: Action, pipeline: Pipeline, load: StageLoad, is_split: bool) -> float:
    if action.kind == "forward":
        return load.forward_s
    if action.kind == "weights":
        return load.weights_s
    again_s = load.forward_s if pipeline.stages[action.stage].rematerialise else 0.0
    return again_s + (load.inputs_s if is_split else load.backward_s)
