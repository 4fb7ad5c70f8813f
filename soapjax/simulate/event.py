"""The reference simulator: the paper's Algorithm 1 (FlexFlow, section 5.2), plain and readable.

Event-driven: a priority queue of ready tasks; every stream runs its tasks in
program order; a task starts when its inputs are there and all its streams are free and have come to it.
Emits the timeline. The jitted simulators are tested against it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from soapjax.simulate.schedule import Schedule


class TimelineEntry(NamedTuple):
    task: int
    start_time: float
    end_time: float


class Timeline(NamedTuple):
    makespan_s: float
    entries: tuple[TimelineEntry, ...]  # of tasks that took time, by start


def simulate(schedule: Schedule, durations: Sequence[float] | np.ndarray, occupies: np.ndarray | None = None) -> Timeline:
    """The timeline of one step.

    Args:
      durations: seconds per scheduled task, [T]; zero means that the strategy does not need the task.
      occupies: streams per task, [T, S]; the schedule's own by default (placements have their own).
    """
    occupies = schedule.occupies if occupies is None else occupies
    n, num_streams = occupies.shape
    predecessors = [[int(p) for p in row if p < n] for row in schedule.predecessors]
    uses = [
        [s for s in range(num_streams) if occupies[t, s]] if durations[t] > 0 or schedule.is_barrier[t] else [] for t in range(n)
    ]
    queues = [[t for t in range(n) if s in set(uses[t])] for s in range(num_streams)]
    position = [0] * num_streams
    stream_free = [0.0] * num_streams
    waiting = [len(set(p)) for p in predecessors]
    successors: list[list[int]] = [[] for _ in range(n)]
    for t, needs in enumerate(predecessors):
        for p in set(needs):
            successors[p].append(t)
    end = [0.0] * n
    ready_time = [0.0] * n
    entries = []
    ready = [t for t in range(n) if waiting[t] == 0]
    heapq.heapify(ready)
    blocked: set[int] = set()
    while ready:
        t = heapq.heappop(ready)
        if any(queues[s][position[s]] != t for s in uses[t]):
            blocked.add(t)  # an earlier task of one of its streams has not run yet
            continue
        start = max([ready_time[t], *(stream_free[s] for s in uses[t])])
        end[t] = start + float(durations[t])
        if durations[t] > 0:
            entries.append(TimelineEntry(t, start, end[t]))
        for s in uses[t]:
            stream_free[s] = end[t]
            position[s] += 1
            if position[s] < len(queues[s]) and queues[s][position[s]] in blocked:
                blocked.discard(queues[s][position[s]])
                heapq.heappush(ready, queues[s][position[s]])
        for u in successors[t]:
            ready_time[u] = max(ready_time[u], end[t])
            waiting[u] -= 1
            if waiting[u] == 0:
                heapq.heappush(ready, u)
    makespan = max(end, default=0.0)
    return Timeline(makespan, tuple(sorted(entries, key=lambda e: (e.start_time, e.task))))
