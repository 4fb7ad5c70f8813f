"""Every process watches the others: when one dies or hangs in the middle of a step, all end, and say which it was.

Each rank writes a beat into the job's key-value store (coordination.py), and reads those of the others. A rank whose beat stays
the same for `timeout_s` is named, in the store first, so that all name the same one; then this process ends with status 2. Where
rank 0 dies, so does the store, and JAX aborts the others at once (status 134; it calls rank 0 the leader). Without the watch it
would leave them in a transfer that nobody answers, and abort them after 100 s.

An exception that nobody catches ends a process at once, and says so in the store (`agreement.leave`): JAX's own ending would wait
minutes for ranks that wait for this one. Where it comes from JAX it may be the echo of another rank's death: then the watch has
its time to find out.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.agreement import LEFT, ROOT, leave
from soapjax.execute.coordination import Store

BEAT_S = 1.0  # at most; a tenth of the time-out where that is less
OWN_REASON_S = 3.0  # less than rank 0 stays for the others (agreement.LEAVE_S)


class Watch:
    """Finds out whether a rank has stopped.

    Args:
      now: the clock, in seconds.
    """

    def __init__(self, store: Store, timeout_s: float, now: Callable[[], float] = time.monotonic):
        self.store, self.timeout_s, self.now = store, timeout_s, now
        self._beats = 0
        self._seen: dict[int, tuple[bytes, float]] = {}  # rank -> its last beat, and when it was new
        self._begin = self._answered = now()
        self.has_left = False  # a rank ended of its own accord

    def look(self) -> Problem | None:
        """Beats, and names the rank that has stopped, if one has."""
        place, remedy = "the job", "see what it printed, and start all processes again"
        try:
            found = self._look()
        except SoapjaxError:
            if self.now() - self._answered < min(self.timeout_s, 5.0):  # it may be busy
                return None
            return Problem(place, "rank 0, where the job's store is, does not answer", "all ranks at work", remedy)
        self._answered = self.now()
        return None if found is None else Problem(place, found, f"all {self.store.num_ranks} ranks at work", remedy)

    def _look(self) -> str | None:
        store = self.store
        self._beats += 1
        store.put(f"{ROOT}/beat/{store.rank}", str(self._beats).encode())
        if named := store.items(f"{ROOT}/stopped"):
            return next(iter(named.values())).decode()
        if left := {r: s for r, s in store.items(LEFT).items() if int(r) != store.rank and s != b"0"}:
            self.has_left = True
            return f"rank {min(left, key=int)} has ended with status {next(iter(left.values())).decode()}"
        for rank, beat in store.items(f"{ROOT}/beat").items():
            if self._seen.get(int(rank), (None, 0.0))[0] != beat:
                self._seen[int(rank)] = beat, self.now()
        ended = {int(r) for r in store.items(LEFT)}
        silent = [r for r in range(store.num_ranks) if r != store.rank and r not in ended and self._silence_s(r) > self.timeout_s]
        if not silent:
            return None
        text = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))} silent for {self.timeout_s:g} s"
        store.put(f"{ROOT}/stopped/{store.rank}", text.encode())
        return text

    def _silence_s(self, rank: int) -> float:
        return self.now() - self._seen.get(rank, (b"", self._begin))[1]


def start(store: Store, timeout_s: float) -> None:
    """Watches from now on, in a thread of its own, until this process ends."""
    watch = Watch(store, timeout_s)
    ended = threading.Event()
    threading.Thread(target=_watch, args=(watch, ended), name="soapjax-watch", daemon=True).start()

    def end_well() -> None:  # before JAX's own ending, which waits for the others
        ended.set()
        with contextlib.suppress(SoapjaxError):
            store.put(f"{LEFT}/{store.rank}", b"0")

    atexit.register(end_well)
    before = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        before(kind, error, trace)
        sys.stderr.flush()
        if issubclass(kind, jax.errors.JaxRuntimeError):
            time.sleep(timeout_s + OWN_REASON_S + 5 * BEAT_S)  # the watch ends this process where another rank is the cause
        leave(store, 130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = end


def _watch(watch: Watch, ended: threading.Event) -> None:
    problem = None
    while problem is None:
        if ended.wait(min(BEAT_S, watch.timeout_s / 10)):
            return
        problem = watch.look()
    if watch.has_left:
        time.sleep(OWN_REASON_S)  # what ended it may be about to end this process too, which then says why
    print(f"error: {problem}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if watch.store.rank == 0:
        time.sleep(3 * BEAT_S)  # the store is here: the others read who it was
    os._exit(2)
