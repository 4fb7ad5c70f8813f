"""Ctrl-C that is not lost.

Python raises KeyboardInterrupt wherever the main thread is; inside a finalizer, or inside the hook that JAX has after every garbage
collection, it is printed as "ignored" and forgotten, and a search of minutes would run on. So it is remembered as well.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupts:
    """Handles SIGINT from now on; in the main thread, where alone Python allows it."""

    def __init__(self) -> None:
        self._is_pending = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._is_pending = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raises: KeyboardInterrupt where one came since the last time."""
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def checked(self, progress: Callable[..., None] | None) -> Callable[..., None]:
        """`progress`, which a search calls again and again, and before it a look at what may have been lost."""

        def update(*of: Any) -> None:
            self.check()
            if progress is not None:
                progress(*of)

        update.stop = getattr(progress, "stop", lambda: None)
        return update
