"""The reference simulator: the paper's Algorithm 1 (FlexFlow, arXiv 1807.05358, section 5.2), plain and readable.

A priority queue holds the tasks whose inputs are there; the first one is taken, starts when all its streams are free, and
may complete the inputs of others. Nothing else decides the order on a stream than the *place* of a task in this queue:

    order="static"   program order, as an XLA executable runs it. What searches and reports use.
    order="fifo"     the paper's assumption A3: the task that was ready first, and of those ready at the same time
                     the first in program order.
    order="trinity"  the simulator of Trinity (Zeng et al., Algorithms 2022, 15(4), 108, section 4.3 and Algorithm 2): also
                     first in, first out, but of two queues per device, one of operators to run and one of tensors to send.

Trinity's was read so: it starts whatever is at the head of a queue as soon as the one before has ended. A tensor waits
in the queue of the device that has it, whatever links it takes, and keeps no queue of its receiver busy; it goes to each other
device once. Nothing waits for a phase to end: backward tasks and updates begin when their inputs are there. Which queues a
task stands in says `Schedule.queues_of_groups`.

A task of several streams has one place for all of them, so that FIFO is well defined for it too: it starts when every
earlier task of any of its streams has ended. In other words: whenever a task gets ready, it queues at all its streams at
once; it starts as soon as it is at the head of all these queues and all the streams are free. A stream may idle meanwhile:
nobody overtakes.

A barrier occupies every stream; all that comes before it in program order ends before, all that comes after it starts
after. So to FIFO it is an input of every later task: what was ready before it runs in program order once it has ended. A task
of duration zero that is no barrier occupies no stream: it ends when it is ready.

Emits the timeline. The jitted simulators are tested against it, and so is `event_delta`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from soapjax.errors import Problem, SoapjaxError
from soapjax.simulate.schedule import Schedule

Order = Literal["static", "fifo", "trinity"]
ORDERS: tuple[Order, ...] = ("static", "fifo", "trinity")
Place = tuple  # in the queue, and on streams; its last entry is the task


class TimelineEntry(NamedTuple):
    task: int
    start_time: float
    end_time: float


class Timeline(NamedTuple):
    makespan_s: float
    entries: tuple[TimelineEntry, ...]  # of tasks that took time, by start


class TaskGraph(NamedTuple):
    """Which task waits for which, and who goes first; independent of durations and streams."""

    order: Order
    inputs: tuple[tuple[int, ...], ...]  # [T]
    successors: tuple[tuple[int, ...], ...]  # [T]
    phase: tuple[int, ...]  # [T]: how many barriers come before
    is_barrier: tuple[bool, ...]  # [T]

    def place(self, t: int, ready_s: float) -> Place:
        """Of two tasks the one with the smaller place goes first; a task's place is larger than those of its inputs."""
        if self.order == "static":
            return (t,)
        # A barrier is the last of its phase, whenever its inputs are there.
        return (self.phase[t], math.inf if self.is_barrier[t] else ready_s, t)

    def placing(self) -> Callable[[int, float], Place]:
        """`place`, quicker where no task is a barrier."""
        if self.order == "static" or any(self.is_barrier):
            return self.place
        return lambda t, ready_s: (ready_s, t)


class Times(NamedTuple):
    """Seconds per task, [T]."""

    ready_s: list[float]
    start_s: list[float]
    end_s: list[float]


def simulate(
    schedule: Schedule, durations: Sequence[float] | np.ndarray, occupies: np.ndarray | None = None, *, order: Order = "static"
) -> Timeline:
    """The timeline of one step.

    Args:
      schedule: its tasks come after their inputs.
      durations: seconds per scheduled task, [T], finite; zero means that the strategy does not need the task.
      occupies: streams per task, [T, S]; the schedule's own by default (placements have their own).
      order: of the tasks of a stream: "static" (program order), "fifo" (by the time they are ready) or "trinity" (likewise, in
        two queues per device).
    """
    occupies = streams_of(schedule, order) if occupies is None else occupies
    schedule = ordered(schedule, order)
    times = run(task_graph(schedule, order), durations, occupied_streams(schedule, durations, occupies))
    return timeline_of(durations, times.start_s, times.end_s)


def run(graph: TaskGraph, durations: Sequence[float] | np.ndarray, streams: Sequence[Sequence[int]]) -> Times:
    """Algorithm 1. `streams` are those that a task occupies, [T]."""
    n = len(streams)
    free = [0.0] * (1 + max((s for mine in streams for s in mine), default=0))
    ready, start, end = [0.0] * n, [0.0] * n, [0.0] * n
    missing = [len(inputs) for inputs in graph.inputs]
    place, seconds = graph.placing(), np.asarray(durations, np.float64).tolist()
    queue = [place(t, 0.0) for t in range(n) if not missing[t]]
    heapq.heapify(queue)
    while queue:
        t = heapq.heappop(queue)[-1]
        begin = ready[t]
        for s in streams[t]:
            begin = max(begin, free[s])
        start[t], end[t] = begin, begin + seconds[t]
        for s in streams[t]:
            free[s] = end[t]
        for u in graph.successors[t]:
            ready[u] = max(ready[u], end[t])
            missing[u] -= 1
            if not missing[u]:
                heapq.heappush(queue, place(u, ready[u]))
    return Times(ready, start, end)


def ordered(schedule: Schedule, order: Order) -> Schedule:
    """The schedule as it is run in that order: Trinity's knows no barriers. Raises: SoapjaxError listing the orders."""
    if order not in ORDERS:
        raise SoapjaxError(Problem("order", repr(order), " or ".join(map(repr, ORDERS)), "choose one of these"))
    return schedule.without_barriers() if order == "trinity" else schedule


def streams_of(schedule: Schedule, order: Order) -> np.ndarray:
    """bool [T, S]: what every task occupies where no pins tell devices apart."""
    return schedule.queues if order == "trinity" else schedule.occupies


def task_graph(schedule: Schedule, order: Order = "static") -> TaskGraph:
    """Inputs are the schedule's predecessors and, for "fifo", the barrier before the task."""
    schedule = ordered(schedule, order)
    is_barrier = schedule.is_barrier.tolist()
    inputs, phase = [], []
    barriers: list[int] = []
    for t, row in enumerate(schedule.needs()):
        needs = set(row)
        if order == "fifo":
            needs.update(barriers[-1:])
        inputs.append(tuple(sorted(needs)))
        phase.append(len(barriers))
        if is_barrier[t]:
            barriers.append(t)
    return TaskGraph(order, tuple(inputs), successors_of(inputs), tuple(phase), tuple(is_barrier))


def successors_of(inputs: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Which tasks wait for each."""
    found: list[list[int]] = [[] for _ in inputs]
    for t, before in enumerate(inputs):
        for p in before:
            found[p].append(t)
    return tuple(map(tuple, found))


def occupied_streams(
    schedule: Schedule, durations: Sequence[float] | np.ndarray, occupies: np.ndarray, tasks: Sequence[int] | None = None
) -> list[tuple[int, ...]]:
    """The streams that each of `tasks` (all by default) occupies: none if it takes no time, every one if it is a barrier."""
    durations, every = np.asarray(durations), tuple(range(occupies.shape[1]))
    return [
        every if schedule.is_barrier[t] else tuple(np.flatnonzero(occupies[t]).tolist()) if durations[t] > 0 else ()
        for t in (range(schedule.num_tasks) if tasks is None else tasks)
    ]


def timeline_of(durations: Sequence[float] | np.ndarray, start_s: Sequence[float], end_s: Sequence[float]) -> Timeline:
    entries = [TimelineEntry(t, s, e) for t, (d, s, e) in enumerate(zip(durations, start_s, end_s, strict=True)) if d > 0]
    return Timeline(max(end_s, default=0.0), tuple(sorted(entries, key=lambda e: (e.start_time, e.task))))
