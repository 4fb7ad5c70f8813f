"""The critical path of a simulated step: the tasks that no other could have made shorter by getting out of the way.

From the task that ends last one goes back, each time to what ended at the very moment when the task started: one of its inputs,
or the task before it on one of its streams. The tasks on the path follow one another without a gap, so that their durations add
up to the step time (tested). Tasks without duration (reshards that a strategy does not need, barriers) are passed through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from soapjax.simulate.event import occupied_streams, run, task_graph
from soapjax.simulate.pipeline_timeline import PipelineTask
from soapjax.simulate.schedule import Schedule


class PathStep(NamedTuple):
    """A task on the path."""

    task: int
    start_s: float
    duration_s: float


def critical_path(schedule: Schedule, durations: Sequence[float] | np.ndarray, occupies: np.ndarray) -> list[PathStep]:
    """Of a step in program order, first task first; `occupies` bool [T, S]."""
    if not schedule.num_tasks:
        return []
    graph = task_graph(schedule)
    streams = occupied_streams(schedule, durations, occupies)
    times = run(graph, durations, streams)
    before: list[tuple[int, ...]] = []  # the task before each one on each of its streams
    last: dict[int, int] = {}
    for i, mine in enumerate(streams):
        before.append(tuple(last[s] for s in mine if s in last))
        last.update(dict.fromkeys(mine, i))
    t: int | None = int(np.argmax(times.end_s))
    path: list[PathStep] = []
    while t is not None:
        if durations[t] > 0:
            path.append(PathStep(t, times.start_s[t], float(durations[t])))
        start_s = times.start_s[t]
        earlier = (*graph.inputs[t][::-1], *before[t][::-1]) if start_s > 0 else ()
        t = next((p for p in earlier if times.end_s[p] == start_s), None)
    return path[::-1]


def pipeline_path(tasks: Sequence[PipelineTask]) -> list[PathStep]:
    """Of a pipeline's timeline, as `PipelineTimeline` keeps it; a step back goes to a task on a common device if one ended then."""
    by_end: dict[float, list[int]] = {}
    for i, task in enumerate(tasks):
        by_end.setdefault(task.start_s + task.duration_s, []).append(i)
    ends = np.array(sorted(by_end))
    t: int | None = by_end[ends[-1]][-1] if len(ends) else None
    path: list[PathStep] = []
    while t is not None:
        task = tasks[t]
        # Ends are sums of floats, made again here: the last digit may differ.
        near = ends[np.abs(ends - task.start_s) <= 1e-9 * ends[-1]] if task.start_s > 0 else ()
        before = [p for e in near for p in by_end[e] if p != t and tasks[p].start_s < task.start_s]
        shared = [p for p in before if set(tasks[p].devices) & set(task.devices)]
        path.append(PathStep(t, task.start_s, task.duration_s))
        t = (shared or before or [None])[-1]
    return path[::-1]
