"""Delta simulation: the paper's Algorithm 2 (FlexFlow, arXiv 1807.05358, section 5.3), for every order.

Keeps the timeline of the current durations and streams, and after a change works out only what it moves:

    simulation = DeltaSimulation(schedule, durations)
    found = simulation.change([7, 8], durations=[0.0, 2e-3])   # or change_to(all durations)
    found.makespan_s, found.num_retimed
    simulation.undo()                                          # the proposal was rejected

The paper's update queue takes the tasks to look at by ready time; here by their *place* (`event.TaskGraph.place`): the phase,
the ready time and the program index for "fifo" and "trinity", the program index alone for "static". Whatever the times of a
task depend on, its inputs and the tasks before it on its streams, has a smaller place than it. So when the queue comes to a
place, all before it is final, and every task is timed at most once:

  * a task that its inputs make ready at another time is looked at where it was and where it belongs, the earlier one first;
  * where it was: if it now gets ready later, it is *taken back*: off its streams, to end at infinity, until its time comes;
  * where it belongs: it is put there on its streams and timed; if its end changed, what waits for it is looked at next,
    that is, its successors and the next tasks on its streams.

With "static" no place ever changes, and only the last remains. The result equals Algorithm 1 bit for bit: the same maxima and
the same single addition per task.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from soapjax.simulate.event import Order, Place, Timeline, occupied_streams, ordered, run, streams_of, task_graph, timeline_of
from soapjax.simulate.schedule import Schedule


class Retiming(NamedTuple):
    """What came of a change."""

    makespan_s: float
    num_retimed: int  # tasks whose times were worked out anew


class _Task(NamedTuple):
    duration_s: float
    streams: tuple[int, ...]
    place: Place | None  # None: taken back
    ready_s: float
    start_s: float
    end_s: float


class _Before(NamedTuple):
    """What a change overwrote."""

    changed: np.ndarray  # int [C]
    durations: np.ndarray  # [C]
    occupies: np.ndarray  # [C, S]
    tasks: dict[int, _Task]


class DeltaSimulation:
    """The timeline of a schedule, kept up to date. Arguments as of `event.simulate`."""

    def __init__(
        self, schedule: Schedule, durations: Sequence[float] | np.ndarray, occupies: np.ndarray | None = None, *,
        order: Order = "static",
    ):  # fmt: skip
        occupies = streams_of(schedule, order) if occupies is None else occupies
        self.schedule = ordered(schedule, order)
        self.durations = np.array(durations, np.float64)  # [T]
        self.occupies = np.array(occupies, bool)  # [T, S]
        self._graph = task_graph(schedule, order)
        streams = occupied_streams(self.schedule, self.durations, self.occupies)
        times = run(self._graph, self.durations, streams)
        places = [self._graph.place(t, ready) for t, ready in enumerate(times.ready_s)]
        self._tasks = list(map(_Task, self.durations.tolist(), streams, places, *times))
        self._on_stream: list[list[Place]] = [[] for _ in range(self.occupies.shape[1])]
        for place in sorted(places):
            for s in streams[place[-1]]:
                self._on_stream[s].append(place)
        self._queue: list[Place] = []
        self._history: list[_Before] = []

    @property
    def makespan_s(self) -> float:
        return max([task.end_s for task in self._tasks], default=0.0)

    def timeline(self) -> Timeline:
        """The same as `event.simulate` of the current durations and streams."""
        return timeline_of(self.durations, [t.start_s for t in self._tasks], [t.end_s for t in self._tasks])

    def change(
        self, tasks: Sequence[int] | np.ndarray, *, durations: Sequence[float] | np.ndarray | None = None,
        occupies: np.ndarray | None = None,
    ) -> Retiming:  # fmt: skip
        """Gives C different tasks new durations [C], new streams [C, S], or both."""
        tasks = np.asarray(tasks, np.int64)
        self._history.append(_Before(tasks, self.durations[tasks], self.occupies[tasks], {}))
        if durations is not None:
            self.durations[tasks] = durations
        if occupies is not None:
            self.occupies[tasks] = occupies
        self._enqueue(tasks.tolist())
        return Retiming(num_retimed=self._propagate(), makespan_s=self.makespan_s)

    def change_to(self, durations: Sequence[float] | np.ndarray, occupies: np.ndarray | None = None) -> Retiming:
        """As `change`, from the figures of all tasks, [T] and [T, S] (the current streams by default)."""
        occupies = self.occupies if occupies is None else occupies
        tasks = np.flatnonzero((self.durations != durations) | (self.occupies != occupies).any(1))
        return self.change(tasks, durations=np.asarray(durations)[tasks], occupies=occupies[tasks])

    def undo(self) -> None:
        """Takes the last change back that is still remembered; may be repeated."""
        before = self._history.pop()
        self.durations[before.changed] = before.durations
        self.occupies[before.changed] = before.occupies
        for t, old in before.tasks.items():
            now = self._tasks[t]
            self._tasks[t] = old
            if (now.place, now.streams) != (old.place, old.streams):
                for s in now.streams:
                    del self._on_stream[s][bisect_left(self._on_stream[s], now.place)]
                for s in old.streams:
                    self._on_stream[s].insert(bisect_left(self._on_stream[s], old.place), old.place)

    def keep(self) -> None:
        """Forgets what the changes so far overwrote: they stay."""
        self._history.clear()

    def _enqueue(self, changed: list[int]) -> None:
        """The paper's UPDATETASKGRAPH: tasks come and go on their streams, in their place."""
        for t, streams in zip(changed, occupied_streams(self.schedule, self.durations, self.occupies, changed), strict=True):
            task, duration = self._tasks[t], float(self.durations[t])
            if streams != task.streams:
                self._leave(task)
                self._enter(streams, task.place)
            if streams != task.streams or duration != task.duration_s:
                self._write(t, task._replace(duration_s=duration, streams=streams))
                heapq.heappush(self._queue, task.place)

    def _propagate(self) -> int:
        """Algorithm 2: until nothing is left to look at; returns how many tasks were timed."""
        timed, last = 0, None
        while self._queue:
            place = heapq.heappop(self._queue)
            if place == last:
                continue
            last, t = place, place[-1]
            task, ready = self._tasks[t], self._ready(t)
            if self._graph.place(t, ready) == place:
                self._time(t, task, place, ready)
                timed += 1
            elif task.place == place:
                self._take_back(t, task)  # where it belongs is in the queue, or will be
        return timed

    def _ready(self, t: int) -> float:
        return max([self._tasks[p].end_s for p in self._graph.inputs[t]], default=0.0)

    def _take_back(self, t: int, task: _Task) -> None:
        self._leave(task)
        self._write(t, _Task(task.duration_s, task.streams, None, math.inf, math.inf, math.inf))
        for u in self._graph.successors[t]:
            if self._tasks[u].place is not None:
                heapq.heappush(self._queue, self._tasks[u].place)

    def _time(self, t: int, task: _Task, place: Place, ready: float) -> None:
        """The times of a task in its place; all that they depend on is final."""
        if task.place != place:
            if task.place is not None:
                self._leave(task)
            self._enter(task.streams, place)
        start, following = ready, []
        for s in task.streams:
            others = self._on_stream[s]
            i = bisect_left(others, place)
            if i:
                start = max(start, self._tasks[others[i - 1][-1]].end_s)
            following += others[i + 1 : i + 2]
        end = start + task.duration_s
        if (place, ready, start, end) != task[2:]:
            self._write(t, _Task(task.duration_s, task.streams, place, ready, start, end))
        if end != task.end_s:
            for other in following:
                heapq.heappush(self._queue, other)
            self._look_at_successors(t)

    def _look_at_successors(self, t: int) -> None:
        """At those that are ready at another time: where they are, and where they belong."""
        for u in self._graph.successors[t]:
            task, ready = self._tasks[u], self._ready(u)
            if ready == task.ready_s:
                continue
            if task.place is not None:
                heapq.heappush(self._queue, task.place)
            if ready < math.inf and (belongs := self._graph.place(u, ready)) != task.place:
                heapq.heappush(self._queue, belongs)

    def _leave(self, task: _Task) -> None:
        """Off its streams; the next ones move up."""
        for s in task.streams:
            others = self._on_stream[s]
            i = bisect_left(others, task.place)
            del others[i]
            if i < len(others):
                heapq.heappush(self._queue, others[i])

    def _enter(self, streams: tuple[int, ...], place: Place) -> None:
        """Onto its streams; the next ones wait for it."""
        for s in streams:
            others = self._on_stream[s]
            i = bisect_left(others, place)
            others.insert(i, place)
            if i + 1 < len(others):
                heapq.heappush(self._queue, others[i + 1])

    def _write(self, t: int, task: _Task) -> None:
        self._history[-1].tasks.setdefault(t, self._tasks[t])
        self._tasks[t] = task
