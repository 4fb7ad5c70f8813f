"""Where this process is in its job: which call of which step, and what it does there. The watch (watch.py) tells the others.

Every process makes the same calls in the same order, so a number is enough to compare them: the n-th call is of one step on all
ranks. A digest of the names so far, n by n, tells another order even where the ranks have met at no call for a while.

    with HERE.call("train_step"):      # call 17
        with HERE.doing("compiling"):
            ...
"""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import sysconfig
import threading
import time
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import jax

from soapjax.helpers.files import OWN_FOLDER

_FOLDERS = sysconfig.get_path("stdlib"), os.path.dirname(jax.__file__), OWN_FOLDER
_NOT_THE_USERS = (*(os.path.join(folder, "") for folder in _FOLDERS), "<")
NUM_RECENT = 8
DISPATCHING, RUNNING, WAITING = "dispatching", "running", "waiting for"


class Where(NamedTuple):
    """A moment of one process. Plain data: it travels as JSON."""

    num_calls: int = 0  # begun so far, this one included; those of the start are 0 and less
    name: str = ""  # of the last call's step
    is_inside: bool = False
    doing: str = ""  # what, inside a call or (`busy`) outside
    is_broken: bool = False  # the last call was left by an exception
    busy_s: float = 0.0  # it has said that it does something of its own that may take so long
    num_looks: int = 0  # for the others, while it waits for them
    recent: tuple[tuple[int, str, int], ...] = ()  # (number, name, digest of all names so far) of the last calls
    status: int | None = None  # the exit status, where it is about to end
    why: str = ""  # it ends so
    at: str = ""  # the line of the user's program
    cpu_s: float = 0.0  # processor time of the process, without that of the thread that asks

    def call(self) -> str:
        """As in "in call 17 of train_step (compiling)"."""
        doing = f" ({self.doing})" if self.doing else ""
        is_in = self.is_inside or self.is_broken
        if self.num_calls <= 0:
            return f"in {self.name}{doing}" if is_in else f"before its first call{doing}"
        return f"{'in' if is_in else 'after'} call {self.num_calls} of {self.name}{doing}"

    def __str__(self) -> str:
        """As `call`, with the line of the program."""
        return f"{self.call()}, at {self.at}" if self.at else self.call()


class Calls:
    """Counts the calls of one process. One thread calls; any may ask."""

    def __init__(self):
        self.num_calls, self.name, self.status, self.why = 0, "", None, ""
        self.num_looks = 0
        self._depth, self._doing, self._digest, self._busy_s, self._is_broken = 0, "", 0, 0.0, False
        self._recent: collections.deque[tuple[int, str, int]] = collections.deque(maxlen=NUM_RECENT)

    def where(self) -> Where:
        return Where(
            num_calls=self.num_calls, name=self.name, is_inside=self._depth > 0, doing=self._doing, is_broken=self._is_broken,
            busy_s=self._busy_s, num_looks=self.num_looks, recent=tuple(self._recent), status=self.status, why=self.why,
            at=_line(), cpu_s=time.process_time() - time.thread_time(),
        )  # fmt: skip

    def count_from(self, number: int) -> None:
        """The next call is `number`: what all ranks do before a program's first call is numbered so that this stays call 1."""
        self.num_calls = number - 1

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """A call of the step `name` that all ranks make; one inside another is no call of its own."""
        if not self._depth:
            self.num_calls += 1
            self.name, self._doing, self._is_broken = name, DISPATCHING, False
            self._digest = zlib.crc32(name.encode(), self._digest)
            self._recent.append((self.num_calls, name, self._digest))
        self._depth += 1
        try:
            yield
        except BaseException:
            self._is_broken = True
            raise
        finally:
            self._depth -= 1
            if not self._depth:
                self._doing = ""

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        before, self._doing = self._doing, what
        try:
            yield
        finally:
            self._doing = before

    def run(self, *, on_cpu: bool) -> None:
        """From here on the call is in the hands of the devices; of CPUs it takes this process' own time."""
        if self._depth:
            self._doing = RUNNING if on_cpu else f"{RUNNING} on the devices"

    @contextlib.contextmanager
    def busy(self, what: str, at_most_s: float) -> Iterator[None]:
        """Outside of calls, while others may already wait in the next one."""
        before = self._busy_s
        self._busy_s = max(before, at_most_s)
        try:
            with self.doing(what):
                yield
        finally:
            self._busy_s = before

    def end(self, status: int, why: str = "") -> None:
        if self.status is None:
            self.status, self.why = status, why


def _line() -> str:
    """Where the main thread is: the innermost line that is not of JAX, soapjax or the standard library, else the innermost."""
    innermost = frame = sys._current_frames().get(threading.main_thread().ident)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    frame = frame or innermost
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_name})" if frame else ""


HERE = Calls()  # a process belongs to one job
