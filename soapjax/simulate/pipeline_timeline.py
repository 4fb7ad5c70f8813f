"""Simulates a pipeline: every pass of every stage on every micro-batch is a task on the simulators' streams.

A schedule (strategy/schedules.py) fixes the order of passes on each group of devices. Beside passes there are

    transfer    an output that a later stage reads, and its gradient on the way back: one at a time leaves a device, one arrives
    sync        of the gradients of replicas that worked on different minibatches (PipeDream), on all replicas' link streams
    update      of the weights

and the event-driven simulator (event.py) runs them: passes of a group in their order, transfers first come, first served on
each link and direction. They run beside the passes on every backend (what cannot overlap on CPUs are the collectives inside a
program, and those are in a pass' time). A bubble is what is left:

>>> from soapjax.strategy.pipeline import Stage
>>> stages = tuple(Stage(operators=(f"block{i}",), devices=(i,)) for i in range(4))
>>> of_stage = StageLoad(forward_s=1.0, backward_s=2.0, update_s=0.0)
>>> found = simulate_pipeline(Pipeline(schedule="gpipe", num_microbatches=8, stages=stages), [of_stage] * 4, ())
>>> found.step_time_s / (8 * 3.0)  # (M + S - 1)/M
1.375

Memory per device: weights, optimizer state and gradients; what the micro-batches in flight keep, all activations or (with
rematerialisation) only the stage's inputs; one micro-batch's working set; stashed versions of the weights (PipeDream).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from soapjax.simulate.event import TaskGraph, run, successors_of
from soapjax.strategy.held import held_by, in_flight
from soapjax.strategy.pipeline import Action, Pipeline
from soapjax.strategy.schedules import actions, groups_of, kind_of, recomputes_apart, splits_backward

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
    split_working_bytes: float = 0.0  # the same where the backward pass is two programs
    inputs_s: float = 0.0  # of the backward pass what earlier stages wait for, as a program of its own
    weights_s: float = 0.0  # the rest of it, likewise
    between_bytes: float = 0.0  # what the second reads of the first
    kept_for_weights_bytes: float = 0.0  # and of the forward pass
    casts_s: float = 0.0  # of casting weights to what passes read: in every pass, or once per step
    casts_bytes: float = 0.0  # of these copies, where they stay for the step


OF_MICROBATCHES = "input_bytes", "kept_bytes", "between_bytes", "kept_for_weights_bytes"


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
    memory_bytes: tuple[float, ...]  # [stages]: peak on each of the stage's devices; stages that share devices are added up
    in_flight: tuple[int, ...]  # [stages]: most micro-batches held


class _Row(NamedTuple):
    name: str
    stage: int
    devices: tuple[int, ...]
    level: int
    seconds: float
    streams: tuple[int, ...]


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
    tasks = _Expansion(simulated, loads, transfers, overlap)
    graph = tasks.graph()
    times = run(graph, [r.seconds for r in tasks.rows], [r.streams if r.seconds > 0 else () for r in tasks.rows])
    makespan = max(times.end_s)
    step = makespan
    if not kind_of(pipeline).is_synchronous:
        step = _steady_s(simulated, [times.end_s[i] for i in tasks.updates]) * pipeline.num_microbatches
    timeline = sorted(
        (
            PipelineTask(r.name, r.stage, r.devices, r.level, s, r.seconds)
            for r, s in zip(tasks.rows, times.start_s, strict=True)
            if r.seconds > 0
        ),
        key=lambda t: (t.start_s, t.stage),
    )  # fmt: skip
    return PipelineTimeline(step, makespan, tuple(timeline), *memory_of(pipeline, loads))


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
    most = in_flight(pipeline)
    stays, own = np.array([_memory(pipeline, i, load, n) for i, (load, n) in enumerate(zip(loads, most, strict=True))]).T
    peak = np.zeros(len(loads))
    for group, held in zip(groups_of(pipeline), held_by(pipeline), strict=True):
        mine = list(group)  # stages on the same devices: what stays of all is there at once, and one of them works
        of_inputs, kept, between, for_weights = (np.array([getattr(loads[i], name) for i in mine]) for name in OF_MICROBATCHES)
        again = np.array([pipeline.stages[i].rematerialise for i in mine])
        waits, put_off = np.where(again, of_inputs, kept), between + np.where(again, of_inputs, for_weights)
        others = (held.kept - held.put_off) @ waits + held.put_off @ put_off + held.recomputed @ kept
        peak[mine] = stays[mine].sum() + (others + own[mine][held.stage]).max(initial=0.0)
    return tuple(peak.tolist()), most


def keeping_casts(pipeline: Pipeline, loads: Sequence[StageLoad], limit_bytes: float) -> Pipeline:
    """With weights cast once per step, for all micro-batches, on stages where the copies fit."""
    if not kind_of(pipeline).is_synchronous or pipeline.num_microbatches == 1 or not any(load.casts_bytes for load in loads):
        return pipeline

    def with_copies(flags: Sequence[bool]) -> Pipeline:
        stages = zip(pipeline.stages, flags, strict=True)
        return pipeline.model_copy(update={"stages": tuple(s.model_copy(update={"keeps_casts": k}) for s, k in stages)})

    has_casts = [load.casts_bytes > 0 for load in loads]
    memory, _ = memory_of(with_copies(has_casts), loads)
    return with_copies([has and size <= limit_bytes for has, size in zip(has_casts, memory, strict=True)])


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


def _memory(pipeline: Pipeline, stage: int, load: StageLoad, most: int) -> tuple[float, float]:
    """Bytes on one device of a stage that stay for the step, and those of the micro-batch that it works on.

    Args:
      most: micro-batches in flight.
    """
    replicas = pipeline.stages[stage].replicas
    per_replica, num = -(-most // replicas), -(-pipeline.num_microbatches // replicas)
    # The whole batch is laid out as one array, and taken apart before the first pass.
    stays = load.state_bytes + load.gradient_bytes + 2 * num * load.batch_bytes
    stays += load.casts_bytes * pipeline.stages[stage].keeps_casts
    if not kind_of(pipeline).is_synchronous:
        # Stashed versions. Of a stage with replicas the weights that were given stay, and an update takes no version's memory.
        stays += (max(per_replica - 1, 0) if replicas == 1 else per_replica + 1) * load.parameter_bytes
    own = max(load.split_working_bytes if splits_backward(pipeline) else load.working_bytes, load.kept_bytes)
    if pipeline.stages[stage].rematerialise and not recomputes_apart(pipeline, stage):
        own += load.input_bytes  # beside what one program makes of it
    if num > 1:
        own += load.unsummed_bytes
    if per_replica < num:
        own += load.input_bytes  # of the next micro-batch, which arrives meanwhile
    return stays, own


class _Expansion:
    """All tasks of a step; `updates` are those of the first stage. Inputs may be named before they exist."""

    def __init__(self, pipeline: Pipeline, loads: Sequence[StageLoad], transfers: Sequence[Transfer], overlap: bool):
        self.rows: list[_Row] = []
        self.inputs: list[list[object]] = []  # keys
        self.index: dict[object, int] = {}
        self.pipeline, self.stages, self.loads, self.overlap = pipeline, pipeline.stages, loads, overlap
        self.group_of = {i: g for g, group in enumerate(groups_of(pipeline)) for i in group}
        self.levels = 1 + max([t.level for t in transfers] + [load.sync_level for load in loads], default=0)
        self.most = max(s.replicas for s in pipeline.stages)
        self.into = [[t for t in transfers if t.target == i] for i in range(len(pipeline.stages))]
        self.out = [[t for t in transfers if t.source == i] for i in range(len(pipeline.stages))]
        self.is_split = splits_backward(pipeline)
        self.updates: list[int] = []
        for t in transfers:
            if t.parameters_s:
                self._send_once(t, "parameters", t.parameters_s, ())
        for order in actions(pipeline):
            self._add_actions(order)

    def add(self, key: object, row: _Row, inputs: Sequence[object]) -> None:
        self.index[key] = len(self.rows)
        self.rows.append(row)
        self.inputs.append(list(inputs))

    def graph(self) -> TaskGraph:
        inputs = [tuple(sorted({self.index[k] for k in mine if k in self.index})) for mine in self.inputs]
        n = len(inputs)
        return TaskGraph("fifo", tuple(inputs), successors_of(inputs), (0,) * n, (False,) * n)

    # Streams.
    def _compute(self, i: int, replica: int) -> int:
        return (self.group_of[i] * self.most + replica) * (1 + 2 * self.levels)

    def _leaving(self, i: int, replica: int, level: int) -> int:
        return self._compute(i, replica) + 1 + 2 * level

    def _arriving(self, i: int, replica: int, level: int) -> int:
        return self._leaving(i, replica, level) + 1

    def _replica_of(self, i: int, microbatch: int) -> int:
        return microbatch % self.stages[i].replicas

    def _devices(self, i: int, replica: int) -> tuple[int, ...]:
        share = len(self.stages[i].devices) // self.stages[i].replicas
        return self.stages[i].devices[replica * share : (replica + 1) * share]

    def _between(self, name: str, t: Transfer, a: tuple[int, int], b: tuple[int, int], seconds: float) -> _Row:
        """A transfer from a stage and replica to another, which is none between stages on the same devices."""
        streams: tuple[int, ...] = (self._leaving(*a, t.level), self._arriving(*b, t.level))
        streams += () if self.overlap else (self._compute(*a), self._compute(*b))
        seconds = seconds if self.group_of[a[0]] != self.group_of[b[0]] else 0.0
        return _Row(f"{name}: stage {a[0]} to {b[0]}", a[0], self._devices(*a) + self._devices(*b), t.level, seconds, streams)

    def _send(self, t: Transfer, m: int, backward: bool) -> None:
        a, b = (t.target, t.source) if backward else (t.source, t.target)
        seconds, kind = (t.backward_s, "backward") if backward else (t.forward_s, "forward")
        ends = (a, self._replica_of(a, m)), (b, self._replica_of(b, m))
        row = self._between(f"{'gradient' if backward else 'activation'} {m}", t, *ends, seconds)
        self.add(("send", t.source, t.target, m, backward), row, [(kind, a, m)])

    def _send_once(self, t: Transfer, kind: str, seconds: float, after: Sequence[object]) -> None:
        """What is sent once per step, between the first replicas."""
        a, b = (t.source, t.target) if kind == "parameters" else (t.target, t.source)
        self.add((kind, t.source, t.target), self._between(kind, t, (a, 0), (b, 0), seconds), after)

    def _add_actions(self, order: Sequence[Action]) -> None:
        """What one group of devices does in a step, in order."""
        before: dict[int, object] = {}  # replica -> what ran there last
        waiting: list[object] = []  # backward passes that the next update sums up
        for action in order:
            if action.kind == "update":
                self._update(action, waiting, before)
                waiting = []
                # Replicas go on with passes on the version that they have; the update only has its place in their order.
                before = {r: action for r in range(self.stages[action.stage].replicas)}
                continue
            replica = self._replica_of(action.stage, action.microbatch)
            before[replica] = key = self._pass(action, replica, before.get(replica))
            if action.kind == ("weights" if self.is_split else "backward"):
                waiting.append(key)
        for i in {a.stage for a in order}:
            last = [(a.kind, i, a.microbatch) for a in order if a.stage == i and a.kind != "update"][-1:]
            for t in self.into[i]:
                if t.sums_s:
                    self._send_once(t, "sums", t.sums_s, last)

    def _pass(self, action: Action, replica: int, before: object | None) -> object:
        """One pass, with what it sends; its key."""
        i, m = action.stage, action.microbatch
        key, seconds = (action.kind, i, m), _pass_s(action, self.pipeline, self.loads[i], self.is_split)
        row = _Row(f"{action.kind} {m}: stage {i}", i, self._devices(i, replica), -1, seconds, (self._compute(i, replica),))
        self.add(key, row, [*self._needed(action), *([] if before is None else [before])])
        for t in {"forward": self.out, "backward": self.into}.get(action.kind, [()] * len(self.stages))[i]:
            self._send(t, m, action.kind == "backward")
        return key

    def _needed(self, action: Action) -> list[object]:
        """What a pass waits for."""
        i, m, into, out = action.stage, action.microbatch, self.into[action.stage], self.out[action.stage]
        if action.kind == "forward":
            needed: list[object] = [("send", t.source, i, m, False) for t in into]
            if not into and i:
                needed = [("forward", i - 1, m)]
            return needed + [("parameters", t.source, i) for t in into if t.parameters_s]
        if action.kind == "backward":
            after = [("backward", i + 1, m)] if i + 1 < len(self.stages) else []
            again = [("recompute", i, m)] if recomputes_apart(self.pipeline, i) else []
            return [*([("send", i, t.target, m, True) for t in out] or after), ("forward", i, m), *again]
        return [("forward" if action.kind == "recompute" else "backward", i, m)]

    def _update(self, action: Action, waiting: list[object], before: dict[int, object]) -> None:
        i, m, load, every = action.stage, action.microbatch, self.loads[action.stage], range(self.stages[action.stage].replicas)
        waiting = waiting + [("sums", t.source, t.target) for t in self.out[i] if t.sums_s]
        key, devices = (action, "sync"), self.stages[i].devices
        computing = tuple(self._compute(i, r) for r in every)
        streams = tuple(way(i, r, load.sync_level) for r in every for way in (self._leaving, self._arriving))
        streams += () if self.overlap else computing
        row = _Row(f"sum of gradients {m}: stage {i}", i, devices, load.sync_level, load.sync_s, streams)
        self.add(key, row, waiting or list(before.values()))
        update_s = load.update_s + load.casts_s * self.stages[i].keeps_casts  # these for the next step
        self.add(action, _Row(f"update {m}: stage {i}", i, devices, -1, update_s, computing), [key, *before.values()])
        if i == 0:
            self.updates.append(self.index[action])


def _pass_s(action: Action, pipeline: Pipeline, load: StageLoad, is_split: bool) -> float:
    if action.kind == "weights":  # which reads no weights
        return load.weights_s
    casts_s = load.casts_s * (not pipeline.stages[action.stage].keeps_casts)
    if action.kind in ("forward", "recompute"):
        return casts_s + load.forward_s
    is_within = pipeline.stages[action.stage].rematerialise and not recomputes_apart(pipeline, action.stage)
    again_s = load.forward_s if is_within else 0.0
    return casts_s + again_s + (load.inputs_s if is_split else load.backward_s)
