"""Work beside a search, in a thread of its own: programs that are compiled, a start that takes long to find."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from soapjax.jit.programs import threads

T = TypeVar("T")


class Beside(Generic[T]):
    """What `work` gives, from a thread, which runs from `begin` on.

    Args:
      latest: the share of a budget from which on `begin_by` does not put it off.
    """

    def __init__(self, work: Callable[[], T], latest: float = 0.0):
        self._work, self.latest = work, latest
        self._found: Future[T] | None = None

    def begin(self) -> None:
        if self._found is None:
            pool = threads(1)
            self._found = pool.submit(self._work)
            pool.shutdown(wait=False)

    def begin_by(self, spent: float) -> None:
        """Begins if so much of the budget is spent that it is time."""
        if spent >= self.latest:
            self.begin()

    @property
    def is_ready(self) -> bool:
        return self._found is not None and self._found.done()

    @property
    def is_running(self) -> bool:
        return self._found is not None and not self._found.done()

    def wait(self) -> T:
        self.begin()
        return self._found.result()
