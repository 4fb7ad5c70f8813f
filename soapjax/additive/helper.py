"""A second process on the same core: a fork, and two places in shared memory where each leaves its best choice.

Nothing is locked: a reader that meets a half-written choice checks what it read, as any choice, and drops it.
The child ends when its parent does.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import warnings
from collections.abc import Callable
from typing import NoReturn

import numpy as np

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


class Helper:
    """Both sides of the fork hold one; `is_child` tells them apart."""

    def __init__(self, num_nodes: int, expand: Callable[[np.ndarray], np.ndarray]):
        self.expand = expand
        self.shared = np.frombuffer(mmap.mmap(-1, 16 * (num_nodes + 1)), np.int64).reshape(2, num_nodes + 1)
        self.seen = 0
        self.sent: np.ndarray | None = None
        self.parent = os.getpid()
        # An interrupt between the fork and the child's own handlers must not run the parent's code twice.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the child runs numpy only: no threads, no accelerator
            self.pid = os.fork()
        self.is_child = self.pid == 0
        if self.is_child:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def run(self, work: Callable[[], None]) -> NoReturn:
        """The child's whole life."""
        with contextlib.suppress(BaseException):
            work()
        os._exit(0)

    def has_parent(self) -> bool:
        return os.getppid() == self.parent

    def send(self, choice: np.ndarray) -> None:
        if choice is not self.sent:
            mine = self.shared[int(self.is_child)]
            mine[1:] = choice
            mine[0] += 1
            self.sent = choice

    def receive(self) -> np.ndarray | None:
        """The other's choice, if it is new."""
        theirs = self.shared[1 - int(self.is_child)]
        if theirs[0] == self.seen:
            return None
        self.seen = int(theirs[0])
        return theirs[1:].copy()

    def close(self) -> None:
        if not self.is_child:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
