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

from soapjax.simulate.event import Times, run
from soapjax.simulate.pipeline_tasks import StageLoad, StepTasks, Transfer, seconds_of, step_tasks
from soapjax.strategy.held import held_by, in_flight
from soapjax.strategy.pipeline import Pipeline
from soapjax.strategy.schedules import groups_of, kind_of, recomputes_apart, splits_backward

ROUNDS = 3  # of as many micro-batches as there are groups of devices, until a synchronous pipeline is in its steady state
OF_MICROBATCHES = "input_bytes", "kept_bytes", "between_bytes", "kept_for_weights_bytes"


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
    tasks: tuple[PipelineTask, ...]  # that take time, by start, where they are told
    memory_bytes: tuple[float, ...]  # [stages]: peak on each of the stage's devices; stages that share devices are added up
    in_flight: tuple[int, ...]  # [stages]: most micro-batches held


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
    tasks, seconds, times = _run(simulated, loads, transfers, overlap)
    makespan = step = max(times.end_s)
    if not kind_of(pipeline).is_synchronous:
        step = _steady_s(simulated, [times.end_s[i] for i in tasks.updates]) * pipeline.num_microbatches
    timeline = sorted(
        (
            PipelineTask(r.name, r.stage, r.devices, r.level, start_s, s)
            for r, s, start_s in zip(tasks.rows, seconds, times.start_s, strict=True) if s > 0
        ),
        key=lambda t: (t.start_s, t.stage),
    )  # fmt: skip
    return PipelineTimeline(step, makespan, tuple(timeline), *memory_of(pipeline, loads))


def _run(
    pipeline: Pipeline, loads: Sequence[StageLoad], transfers: Sequence[Transfer], overlap: bool
) -> tuple[StepTasks, list[float], Times]:
    """The tasks of a step, the seconds that each takes, and when it runs."""
    tasks, values = step_tasks(pipeline, loads, transfers, overlap=overlap), seconds_of(pipeline, loads, transfers)
    seconds = [values[r.seconds] for r in tasks.rows]
    return tasks, seconds, run(tasks.graph, seconds, [r.streams if s > 0 else () for r, s in zip(tasks.rows, seconds, strict=True)])


def predicted_times(
    pipeline: Pipeline, loads: Sequence[StageLoad], transfers: Sequence[Transfer], *, overlap: bool = True
) -> PipelineTimeline:
    """As `simulate_pipeline`, without the end of a long step: in the steady state every round of micro-batches takes as long. Of a
    long step no tasks are told."""
    groups, num = len(groups_of(pipeline)), pipeline.num_microbatches
    rounds = [ROUNDS * groups + num % groups, (ROUNDS + 1) * groups + num % groups]
    if not kind_of(pipeline).is_synchronous or pipeline.order or rounds[-1] >= num:
        return simulate_pipeline(pipeline, loads, transfers, overlap=overlap)
    few = (pipeline.model_copy(update={"num_microbatches": n}) for n in rounds)
    short_s, longer_s = (max(_run(p, loads, transfers, overlap)[2].end_s) for p in few)
    step_s = longer_s + (longer_s - short_s) * (num - rounds[-1]) / groups
    return PipelineTimeline(step_s, step_s, (), *memory_of(pipeline, loads))


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
