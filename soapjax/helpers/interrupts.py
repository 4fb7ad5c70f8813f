"""Ctrl-C at any moment of a command: status 130 with a word about it, and the best so far where there is one.

Three things may happen to it, by what there is to lose:

    leave    nothing yet: the process ends at once. Raising KeyboardInterrupt would surface anywhere: inside an import, a callback
             from C++, a finalizer, where it is turned into another error or printed and forgotten
    raise    while a search has a best so far (`searching`): KeyboardInterrupt, which the search catches
    hold     once a search is over: it is remembered, and the command ends with 130 when its result is written

A second one, later than half a second, always leaves. Python runs its handler between two bytecodes of the main thread only, and a
compilation takes seconds, so a thread hears of the signal too (`signal.set_wakeup_fd`) and leaves where that is what is to be done.
Outside of commands nothing is installed: a user's own Ctrl-C is theirs.

This module is the first that a command imports, and imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

STATUS = 130
NOTHING = "interrupted: nothing was written"
_AGAIN_S = 0.5  # two within this time are one press
_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it


class _Handler:
    """The process's SIGINT, from `install` to `remove`."""

    def __init__(self) -> None:
        self.action = "leave"
        self.words = NOTHING
        self.first_s: float | None = None  # when it came
        self.is_pending = False  # and has not been raised by `check`
        self._is_leaving = threading.Lock()
        self._before: list[Any] = []
        self._pipe: tuple[int, int] | None = None
        self._stderr = 2

    def install(self) -> None:
        with contextlib.suppress(OSError):  # a copy of its own: file descriptor 2 may be a file that a compiler's messages go to
            self._stderr = os.dup(2)
        read, write = self._pipe = os.pipe()
        os.set_blocking(write, False)
        self._before = [
            signal.signal(signal.SIGINT, self._handle), signal.set_wakeup_fd(write, warn_on_full_buffer=False), sys.unraisablehook
        ]  # fmt: skip
        sys.unraisablehook = self._unraisable
        threading.Thread(target=self._listen, args=(read,), daemon=True, name="soapjax-interrupts").start()

    def remove(self) -> None:
        handler, wakeup, hook = self._before
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGINT, handler)
        sys.unraisablehook = hook
        os.close(self._pipe[1])  # ends the thread
        if self._stderr != 2:
            os.close(self._stderr)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = self.first_s is not None
        if self.action == "leave" or (again and now - self.first_s > _AGAIN_S):
            self.leave()
        self.first_s = self.first_s or now
        if not again:
            self.is_pending = True
            if self.action == "raise":
                raise KeyboardInterrupt

    def _listen(self, read: int) -> None:
        """Leaves, where the main thread is too busy to."""
        heard_s = None  # `_handle` may not have had its turn yet
        with os.fdopen(read, "rb", buffering=0) as signals:
            while numbers := signals.read(64):
                if signal.SIGINT not in numbers:
                    continue
                now = time.monotonic()
                if self.action == "leave" or (heard_s is not None and now - heard_s > _AGAIN_S):
                    self.leave()
                heard_s = heard_s or now

    def leave(self) -> NoReturn:
        if not self._is_leaving.acquire(blocking=False):
            time.sleep(1.0)  # the other thread says so
        else:
            with contextlib.suppress(Exception):
                cursor = _SHOW_CURSOR if os.isatty(self._stderr) else b""
                os.write(self._stderr, cursor + (self.words + "\n" if self.words else "").encode())
        os._exit(STATUS)

    def _unraisable(self, found: Any) -> None:
        """A KeyboardInterrupt in a finalizer is not lost: it is pending."""
        if not (found.exc_type is not None and issubclass(found.exc_type, KeyboardInterrupt)):
            self._before[2](found)


_installed: _Handler | None = None  # a process has one SIGINT


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Inside, Ctrl-C does as described above. Only in the main thread, where alone Python allows it."""
    global _installed
    if _installed is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _installed = _Handler()
    _installed.install()
    try:
        yield
    finally:
        _installed.remove()
        _installed = None


@contextlib.contextmanager
def searching() -> Iterator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt; afterwards it is held: there is a best so far to keep.

    Raises: KeyboardInterrupt at once where one was held before.
    """
    if _installed is None:
        yield
        return
    try:
        _installed.action = "raise"
        check()
        yield
    finally:
        _installed.action = "hold"


def hold(words: str) -> None:
    """From now on Ctrl-C is only remembered; a second one leaves with these words, "" where they are said already."""
    if _installed is not None:
        _installed.action, _installed.words = "hold", words


def came() -> bool:
    """Whether Ctrl-C was pressed."""
    return _installed is not None and _installed.first_s is not None


def end(status: int) -> NoReturn:
    """Ends the process, with 130 and a word where Ctrl-C was pressed: all that was to be written and shown has been."""
    if came():
        if _installed.words:  # not said yet
            _installed.words = "interrupted: what is written or shown above is the best so far"
        _installed.leave()
    os._exit(status)


def check() -> None:
    """Raises: KeyboardInterrupt where one came since the last time, lost in a finalizer or held."""
    if _installed is not None and _installed.is_pending:
        _installed.is_pending = False
        raise KeyboardInterrupt


class Interruptible:
    """`progress`, which a search calls again and again, and before it a look at what may have been lost."""

    def __init__(self, progress: Any):
        self._progress = progress

    def __call__(self, *of: Any) -> None:
        check()
        if self._progress is not None:
            self._progress(*of)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
