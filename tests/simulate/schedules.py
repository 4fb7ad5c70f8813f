"""Random schedules, and what a search does to them: durations that come and go, and pins."""

import collections

import numpy as np

from soapjax.simulate.schedule import BARRIER, COMPUTE, RESHARD, RESOLVE, SUM, Schedule

# (tasks, predecessors each, streams), from one compute and one link level to four devices with their own.
SHAPES = ((1, 1, 1), (12, 2, 2), (40, 3, 3), (60, 1, 3), (40, 6, 12))
KINDS = [COMPUTE, SUM, RESOLVE, RESHARD, BARRIER]


def random_schedule(rng: np.random.Generator, shape: tuple[int, int, int], *, several: float | None = None) -> Schedule:
    """Tasks of one stream, tasks of `several`, and barriers over all. Predecessors come before: near, far, or twice."""
    n, width, num_streams = shape
    predecessors = np.full((n, width), n, np.int32)
    for t in range(1, n):
        near = rng.random(width) < 0.7
        found = np.where(near, t - 1 - rng.integers(0, min(t, 4), width), rng.integers(0, t, width))
        predecessors[t] = np.where(rng.random(width) < 0.6, found, n)
    barriers = rng.choice([0.0, 0.1])
    kind = rng.choice(KINDS, n, p=[0.6 - barriers, 0.1, 0.1, 0.2, barriers]).astype(np.int32)
    predecessors[kind == BARRIER] = n
    level = np.where(kind == COMPUTE, -1, 0).astype(np.int32)
    schedule = Schedule(
        kind, np.arange(n, dtype=np.int32), level, predecessors, np.ones((n, num_streams), bool), kind == BARRIER
    )  # fmt: skip
    several = rng.choice([0.0, 0.4]) if several is None else several
    schedule.occupies[:] = random_streams(rng, schedule, np.arange(n), several)
    return schedule


def random_streams(rng: np.random.Generator, schedule: Schedule, tasks: np.ndarray, several: float) -> np.ndarray:
    """One stream for each of `tasks`, and for half of them each of the others with probability `several`: [C, S]."""
    shape = (len(tasks), schedule.occupies.shape[1])
    occupies = (rng.random(shape) < several) & (rng.random((len(tasks), 1)) < 0.5)
    occupies[np.arange(len(tasks)), rng.integers(0, shape[1], len(tasks))] = True
    return occupies | schedule.is_barrier[tasks, None]


def random_durations(rng: np.random.Generator, schedule: Schedule, tasks: np.ndarray, *, whole: bool) -> np.ndarray:
    """Of which a third are zero: whole numbers (many ties) or of all magnitudes, [C]."""
    shape = len(tasks)
    some = rng.integers(1, 5, shape).astype(float) if whole else np.exp(rng.uniform(-12, 3, shape))
    return some * rng.choice([0.0, 1.0, 1.0], shape) * ~schedule.is_barrier[tasks]


def list_scheduler(schedule: Schedule, durations: np.ndarray) -> list[int | None]:
    """When every task that takes time starts, first in, first out, by stepping through time; durations are whole.

    Every stream has a queue. A task queues at all its streams as soon as it is ready, and starts when it is at the
    head of all of them and nothing runs there.
    """
    n = schedule.num_tasks
    queues: list[list[int]] = [[] for _ in range(schedule.occupies.shape[1])]
    running: list[int | None] = [None] * len(queues)
    queued, done, starts = [False] * n, [False] * n, [None] * n
    barriers = np.flatnonzero(schedule.is_barrier).tolist()
    now = 0
    while not all(done):
        for t in range(n):
            if starts[t] is not None and starts[t] + durations[t] == now:
                done[t] = True
                running = [None if r == t else r for r in running]
        for t in range(n):  # in program order, so that what takes no time is done before what waits for it
            inputs = [p for p in schedule.predecessors[t] if p < n] + [b for b in barriers if b < t]
            if t in barriers:
                done[t] = all(done[:t])
            elif not queued[t] and all(done[p] for p in inputs):
                queued[t] = True
                done[t] = durations[t] == 0
                for s in np.flatnonzero(schedule.occupies[t] & (durations[t] > 0)):
                    queues[s].append(t)
        for t in range(n):
            mine = np.flatnonzero(schedule.occupies[t])
            if queued[t] and not done[t] and starts[t] is None and all(queues[s][0] == t and running[s] is None for s in mine):
                starts[t] = now
                for s in mine:
                    running[s] = queues[s].pop(0)
        now += 1
    return starts


def two_queues(schedule: Schedule, durations: np.ndarray, queue_of: np.ndarray) -> dict[int, tuple[float, float]]:
    """Start and end of every task that takes time in Trinity's simulator (section 4.3, Algorithm 2), event by event.

    `queue_of` [T] is the one queue that a task stands in, of a device's operators or of its tensors. What completes puts
    what waited for it into queues, in program order; then every idle queue starts its next one.
    """
    n = schedule.num_tasks
    waits = [{int(p) for p in row if p < n} for row in schedule.predecessors]
    lines = {q: collections.deque() for q in queue_of.tolist()}
    running: dict[int, tuple[float, int]] = {}
    times: dict[int, tuple[float, float]] = {}
    left, now = set(range(n)), 0.0
    while True:
        enqueued = []
        while ready := {t for t in left if not waits[t]}:
            left -= ready
            enqueued += [t for t in ready if durations[t] > 0]
            done = {t for t in ready if durations[t] == 0}
            for w in waits:
                w -= done
        for t in sorted(enqueued):
            lines[int(queue_of[t])].append(t)
        for q, line in lines.items():
            if q not in running and line:
                t = line.popleft()
                times[t] = (now, now + float(durations[t]))
                running[q] = (times[t][1], t)
        if not running:
            return times
        now = min(end for end, _ in running.values())
        for q in [q for q, (end, _) in running.items() if end == now]:
            ended = running.pop(q)[1]
            for w in waits:
                w.discard(ended)
