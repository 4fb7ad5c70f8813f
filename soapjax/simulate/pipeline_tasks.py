"""The tasks of one step of a pipeline: which there are, what each waits for, and on whose streams it runs.

They follow from the order of actions and from which stages send to which; how long each takes is a number among `seconds_of`, which
a task names by its place. So a search, which prices many pipelines of the same shape, expands it once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from soapjax.simulate.event import TaskGraph, successors_of
from soapjax.strategy.pipeline import Action, OrderShape, Pipeline
from soapjax.strategy.schedules import actions, groups_of, recomputes_apart, splits_backward

KINDS = "forward", "recompute", "backward", "weights", "update", "sync"  # of a stage's seconds
SENT = "activation", "gradient", "parameters", "sums"  # of a transfer's
MOST_KEPT = 6  # shapes: a search alternates between few, and one of a thousand devices may have a hundred thousand tasks


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


class TaskRow(NamedTuple):
    """A task; `target` is the stage that a transfer goes to, -1 of what is none, and `seconds` the place of its time."""

    kind: str
    stage: int
    target: int
    microbatch: int  # -1 of what is sent once
    devices: tuple[int, ...]
    level: int  # of links, -1 of a pass
    seconds: int
    streams: tuple[int, ...]

    @property
    def name(self) -> str:
        what = {"sync": "sum of gradients"}.get(self.kind, self.kind) + (f" {self.microbatch}" if self.microbatch >= 0 else "")
        return f"{what}: stage {self.stage}" + (f" to {self.target}" if self.target >= 0 else "")


class StepTasks(NamedTuple):
    rows: tuple[TaskRow, ...]
    graph: TaskGraph
    updates: tuple[int, ...]  # those of the first stage


def step_tasks(pipeline: Pipeline, loads: Sequence[StageLoad], transfers: Sequence[Transfer], *, overlap: bool) -> StepTasks:
    """The tasks of a step.

    Args:
      overlap: whether transfers and sums of gradients run beside passes; without, the devices that they are between wait.
    Raises: SoapjaxError where the schedule does not fit the stages (see `schedules.actions`).
    """
    sends = tuple(_Send(t.source, t.target, t.level, t.parameters_s > 0, t.sums_s > 0) for t in transfers)
    return _expanded(OrderShape.of(pipeline), sends, tuple(load.sync_level for load in loads), overlap)


def seconds_of(pipeline: Pipeline, loads: Sequence[StageLoad], transfers: Sequence[Transfer]) -> list[float]:
    """What `TaskRow.seconds` names: of every stage by KINDS, then of every transfer by SENT, and 0 of what stays on its devices."""
    is_split = splits_backward(pipeline)
    found: list[float] = []
    for i, (stage, load) in enumerate(zip(pipeline.stages, loads, strict=True)):
        each_s, once_s = load.casts_s * (not stage.keeps_casts), load.casts_s * stage.keeps_casts  # the latter for the next step
        again_s = load.forward_s if stage.rematerialise and not recomputes_apart(pipeline, i) else 0.0
        backward_s = each_s + again_s + (load.inputs_s if is_split else load.backward_s)
        pass_s = each_s + load.forward_s
        found += [pass_s, pass_s, backward_s, load.weights_s, load.update_s + once_s, load.sync_s]
    for t in transfers:
        found += t.seconds
    return [*found, 0.0]


class _Send(NamedTuple):
    """What of a transfer shapes the tasks."""

    source: int
    target: int
    level: int
    has_parameters: bool
    has_sums: bool


@functools.lru_cache(maxsize=MOST_KEPT)
def _expanded(shape: OrderShape, sends: tuple[_Send, ...], sync_levels: tuple[int, ...], overlap: bool) -> StepTasks:
    return _Expansion(shape.pipeline(), sends, sync_levels, overlap).found()


class _Expansion:
    """Inputs may be named before they exist."""

    def __init__(self, pipeline: Pipeline, sends: Sequence[_Send], sync_levels: Sequence[int], overlap: bool):
        self.rows: list[TaskRow] = []
        self.inputs: list[list[object]] = []  # keys
        self.index: dict[object, int] = {}
        self.pipeline, self.stages, self.sync_levels, self.overlap = pipeline, pipeline.stages, sync_levels, overlap
        self.group_of = {i: g for g, group in enumerate(groups_of(pipeline)) for i in group}
        self.levels = 1 + max([s.level for s in sends] + list(sync_levels), default=0)
        self.most = max(s.replicas for s in pipeline.stages)
        num = len(pipeline.stages)
        self.into: list[list[tuple[int, _Send]]] = [[(k, s) for k, s in enumerate(sends) if s.target == i] for i in range(num)]
        self.out: list[list[tuple[int, _Send]]] = [[(k, s) for k, s in enumerate(sends) if s.source == i] for i in range(num)]
        self.nothing = len(KINDS) * num + len(SENT) * len(sends)  # the place of 0 seconds
        self.is_split = splits_backward(pipeline)
        self.updates: list[int] = []
        for k, s in enumerate(sends):
            if s.has_parameters:
                self._send_once(k, s, "parameters", ())
        for order in actions(pipeline):
            self._add_actions(order)

    def found(self) -> StepTasks:
        inputs = tuple(tuple(sorted({self.index[k] for k in mine if k in self.index})) for mine in self.inputs)
        n = len(inputs)
        graph = TaskGraph("fifo", inputs, successors_of(inputs), (0,) * n, (False,) * n)
        return StepTasks(tuple(self.rows), graph, tuple(self.updates))

    def _add(self, key: object, row: TaskRow, inputs: Sequence[object]) -> None:
        self.index[key] = len(self.rows)
        self.rows.append(row)
        self.inputs.append(list(inputs))

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

    def _of_stage(self, kind: str, i: int, m: int, devices: tuple[int, ...], streams: tuple[int, ...], level: int = -1) -> TaskRow:
        return TaskRow(kind, i, -1, m, devices, level, len(KINDS) * i + KINDS.index(kind), streams)

    def _between(self, k: int, level: int, kind: str, m: int, a: tuple[int, int], b: tuple[int, int]) -> TaskRow:
        """Transfer number `k` from a stage and replica to another, which is none between stages on the same devices."""
        streams: tuple[int, ...] = (self._leaving(*a, level), self._arriving(*b, level))
        streams += () if self.overlap else (self._compute(*a), self._compute(*b))
        is_sent = self.group_of[a[0]] != self.group_of[b[0]]
        seconds = len(KINDS) * len(self.stages) + len(SENT) * k + SENT.index(kind) if is_sent else self.nothing
        return TaskRow(kind, a[0], b[0], m, self._devices(*a) + self._devices(*b), level, seconds, streams)

    def _send(self, k: int, s: _Send, m: int, backward: bool) -> None:
        a, b = (s.target, s.source) if backward else (s.source, s.target)
        ends = (a, self._replica_of(a, m)), (b, self._replica_of(b, m))
        row = self._between(k, s.level, "gradient" if backward else "activation", m, *ends)
        self._add(("send", s.source, s.target, m, backward), row, [("backward" if backward else "forward", a, m)])

    def _send_once(self, k: int, s: _Send, kind: str, after: Sequence[object]) -> None:
        """What is sent once per step, between the first replicas."""
        a, b = (s.source, s.target) if kind == "parameters" else (s.target, s.source)
        self._add((kind, s.source, s.target), self._between(k, s.level, kind, -1, (a, 0), (b, 0)), after)

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
            for k, s in self.into[i]:
                if s.has_sums:
                    self._send_once(k, s, "sums", last)

    def _pass(self, action: Action, replica: int, before: object | None) -> object:
        """One pass, with what it sends; its key."""
        i, m = action.stage, action.microbatch
        key = action.kind, i, m
        row = self._of_stage(action.kind, i, m, self._devices(i, replica), (self._compute(i, replica),))
        self._add(key, row, [*self._needed(action), *([] if before is None else [before])])
        for k, s in {"forward": self.out, "backward": self.into}.get(action.kind, [()] * len(self.stages))[i]:
            self._send(k, s, m, action.kind == "backward")
        return key

    def _needed(self, action: Action) -> list[object]:
        """What a pass waits for."""
        i, m, into, out = action.stage, action.microbatch, self.into[action.stage], self.out[action.stage]
        if action.kind == "forward":
            needed: list[object] = [("send", s.source, i, m, False) for _, s in into]
            if not into and i:
                needed = [("forward", i - 1, m)]
            return needed + [("parameters", s.source, i) for _, s in into if s.has_parameters]
        if action.kind == "backward":
            after = [("backward", i + 1, m)] if i + 1 < len(self.stages) else []
            again = [("recompute", i, m)] if recomputes_apart(self.pipeline, i) else []
            return [*([("send", i, s.target, m, True) for _, s in out] or after), ("forward", i, m), *again]
        return [("forward" if action.kind == "recompute" else "backward", i, m)]

    def _update(self, action: Action, waiting: list[object], before: dict[int, object]) -> None:
        i, m, every = action.stage, action.microbatch, range(self.stages[action.stage].replicas)
        waiting = waiting + [("sums", s.source, s.target) for _, s in self.out[i] if s.has_sums]
        key, devices, level = (action, "sync"), self.stages[i].devices, self.sync_levels[i]
        computing = tuple(self._compute(i, r) for r in every)
        streams = tuple(way(i, r, level) for r in every for way in (self._leaving, self._arriving))
        streams += () if self.overlap else computing
        self._add(key, self._of_stage("sync", i, m, devices, streams, level), waiting or list(before.values()))
        self._add(action, self._of_stage("update", i, m, devices, computing), [key, *before.values()])
        if i == 0:
            self.updates.append(self.index[action])
