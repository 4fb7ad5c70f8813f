"""Real text that every machine has: the source of Python's own standard library, byte by byte.

No download and no tokenizer: the vocabulary is the 256 bytes. The text depends on the Python version, so losses
are comparable between runs on one machine, not to the last digit between machines.
"""

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np


@functools.cache
def library_source(limit: int = 1 << 20) -> np.ndarray:
    """The first ``limit`` bytes of the library's top-level modules in order of name, as uint8, read-only."""
    folder = Path(os.__file__).parent
    pieces, missing = [], limit
    for path in sorted(folder.glob("*.py")):
        piece = path.read_bytes()[:missing]
        pieces.append(piece)
        missing -= len(piece)
        if missing <= 0:
            break
    if not any(pieces):
        raise FileNotFoundError(f"no Python source under {folder}; text batches need an unzipped standard library")
    return np.frombuffer(b"".join(pieces), np.uint8)


def batches(*, batch: int, seq: int, vocab: int = 256, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless ``{"tokens": int32[batch, seq + 1]}``: random windows, inputs and targets overlapping by ``seq``."""
    source = library_source()
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(source), size=(batch, 1))
        # Wrapping around keeps any sequence length legal.
        window = np.take(source, starts + np.arange(seq + 1), mode="wrap")
        yield {"tokens": window.astype(np.int32) % vocab}
