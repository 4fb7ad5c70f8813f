"""Timed steps on a cluster: in several sittings, at real-time priority where that helps, as many on every rank.

Other machines' work and the state of TCP's congestion control change within minutes: what is to be compared is timed in turn,
a few steps each, several times over (`in_rounds`), and the median is of all steps.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from soapjax.execute.processes.agreement import made_by_first
from soapjax.execute.processes.coordination import store

log = logging.getLogger(__name__)
ROUNDS = 3
SITTING_S = 1.5  # of each strategy, per round
LEAST_STEPS = 3  # per sitting


class Timing(NamedTuple):
    median_s: float
    spread: float  # (largest - smallest) / median
    steps: int
    loss: float


class Timer:
    """A compiled step and the state it goes on from.

    Args:
      name: another for each step of a process.
      most: steps, at most, in all rounds.
      overlaps: the step sends while it computes, on the same core: without real-time priority then, under which what computes
        would not let go of the core for what sends.
    """

    def __init__(
        self, name: str, step: Callable[..., Any], state: Any, rest: tuple[Any, ...], most: int, *, overlaps: bool = False
    ):
        self.name, self.step, self.state, self.rest = name, step, state, rest
        self.most, self.priority = -(-most // ROUNDS), contextlib.nullcontext if overlaps else undisturbed
        self.count, self.times_s, self.loss = 0, [], float("nan")

    def once(self) -> float:
        start = time.perf_counter()
        self.state, metrics = jax.block_until_ready(self.step(self.state, *self.rest))
        seconds = time.perf_counter() - start
        self.loss = float(metrics["loss"])
        return seconds

    def sit(self) -> None:
        """One round's steps, after one that is not counted. Every rank must call it at the same point."""
        if not self.count:
            self.once()  # compiles
        with self.priority():
            first_s = self.once()
            if not self.count:
                self.count = shared(f"steps {self.name}", lambda: int(np.clip(SITTING_S / first_s, LEAST_STEPS, self.most)))
            self.times_s += [self.once() for _ in range(self.count)]

    def take_slowest(self) -> None:
        """A step takes as long as on the host where it takes longest: not all plans make hosts wait. Every rank must call it."""
        hosts = np.reshape(multihost_utils.process_allgather(np.float32(self.times_s)), (-1, len(self.times_s)))
        self.times_s = hosts[np.median(hosts, axis=1).argmax()].tolist()

    def timing(self) -> Timing:
        median = statistics.median(self.times_s)
        return Timing(median, (max(self.times_s) - min(self.times_s)) / median, len(self.times_s), self.loss)


def in_rounds(timers: Sequence[Timer]) -> None:
    """Times all of them, in turn, on every rank; then all ranks have the same times."""
    for _ in range(ROUNDS):
        for timer in timers:
            timer.sit()
    for timer in timers:
        timer.take_slowest()


def shared(name: str, make: Callable[[], Any]) -> Any:
    """JSON data that rank 0 makes, on all ranks."""
    return json.loads(made_by_first(store(), name, lambda: json.dumps(make()), timeout_s=300, making_s=1800))


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Real-time priority for all threads of this process, where that is allowed.

    Other work on the machine would otherwise hold a core for a scheduler tick (4 ms) whenever a message arrives, which is
    forty times the latency of a small collective. The kernel leaves the others a twentieth of the time. Threads must take short
    turns, as scripts/emulated_cluster.py sets them: gloo's thread polls while the buffer that a message is for is not there yet,
    and would keep the thread that makes it waiting. Not where processes share cores: one that waits for a message would keep
    the other from sending it.
    """
    if jax.process_count() > (os.cpu_count() or 1):
        yield
        return
    try:
        _set_policy(os.SCHED_RR, 5)
    except PermissionError:
        log.warning("no real-time priority: other work on this machine shows in the timings")
    try:
        yield
    finally:
        _set_policy(os.SCHED_OTHER, 0)


def _set_policy(policy: int, priority: int) -> None:
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(int(task), policy, os.sched_param(priority))
