"""Fewer garbage collections while programs are traced and steps planned.

Jaxprs and graphs are hundreds of thousands of small objects that stay: going through all of them every few hundred new ones takes
a quarter of the time that a large model needs (GPT-3 of 96 layers: 31 s, 23 without), and a third of tracing the simulator.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

NEW_OBJECTS = 100_000  # between collections of the young; Python's own is 700


@contextlib.contextmanager
def fewer_collections() -> Iterator[None]:
    """Collects seldom in here, also as a decorator; not at all where the caller had turned collections off."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], NEW_OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
