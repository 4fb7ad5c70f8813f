"""One line that says what takes so long, on a terminal or in a notebook; elsewhere the log has a line when it is done."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

import jax
import rich.console
import rich.progress

log = logging.getLogger("soapjax")

Report = Callable[[int, float, float], None]  # of a search: proposals, best step time in seconds, elapsed seconds


def _console() -> rich.console.Console | None:
    """Where a line may be shown and taken away again; None where there is none, or another process shows its own."""
    if jax.process_index():
        return None
    console = rich.console.Console()
    if console.is_jupyter:
        return console
    return rich.console.Console(stderr=True) if sys.stderr is not None and sys.stderr.isatty() else None


@contextlib.contextmanager
def shown(what: str) -> Iterator[Report | None]:
    """Shows `what` and the seconds since, while the body runs; gives what a search reports to, None where nothing is shown."""
    console = _console()
    if console is None:
        yield None
        return
    columns = rich.progress.SpinnerColumn(), rich.progress.TextColumn("{task.description}"), rich.progress.TimeElapsedColumn()
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what)
        last = [0.0]

        def report(done: int, best_s: float, elapsed_s: float) -> None:
            if time.monotonic() - last[0] > 0.1:
                last[0] = time.monotonic()
                bar.update(task, description=f"{what}: {done:,} proposals, best {best_s:.4g} s per step")

        yield report
