"""Fewer garbage collections while steps and programs are traced and graphs built.

Jaxprs and graphs are hundreds of thousands of small objects that stay: going through all of them every few hundred new ones takes
a quarter of the time that a large model needs (GPT-3 of 96 layers: 31 s, 23 without), and a third of tracing the simulator.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

NEW_OBJECTS = 100_000  # between collections of the young; Python's own is 700

_lock = threading.Lock()
_outside: list[tuple[int, int, int]] = []  # one entry per caller that is inside; the first is what thresholds were before


@contextlib.contextmanager
def fewer_collections() -> Iterator[None]:
    """Collects seldom in here, also as a decorator; not at all where the caller had turned collections off.

    May be nested, and entered by several threads: the last to leave puts the thresholds back.
    """
    with _lock:
        before = gc.get_threshold()
        _outside.append(before)
        if before[0]:
            gc.set_threshold(max(before[0], NEW_OBJECTS), *before[1:])
    try:
        yield
    finally:
        with _lock:
            if len(_outside) == 1:
                gc.set_threshold(*_outside[0])
            _outside.pop()
