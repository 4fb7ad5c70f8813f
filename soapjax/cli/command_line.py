"""The command line: plan, simulate, explain, diff, report, run, verify, profile, calibrate, topologies, demo.

Every command takes --json: one JSON object on standard output, everything else on standard error.
Bad input ends with exit status 2 and a message that names the place, the value, what was expected and
the remedy; an interrupted search keeps the best plan so far and exits with 130.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import rich.progress
import tyro

from soapjax.cli import terminal
from soapjax.cli.arguments import COMMANDS, PlanCommand, ProfileCommand, VerifyCommand
from soapjax.errors import InfeasibleError, Problem, SoapjaxError
from soapjax.helpers import files, interrupts


def main(argv: list[str] | None = None) -> None:
    """Runs a command line; ends the process with its exit status."""
    with interrupts.handled():
        try:
            terminal.check_surroundings()
            status = _run(argv)
        except SoapjaxError as e:
            for p in e.problems:
                # What was found is data, and makes no lines of its own; a remedy may be a list.
                p = p._replace(place=terminal.visible(p.place, one_line=True), value=terminal.visible(p.value, one_line=True))
                terminal.print_line(f"error: {p}")
            status = 3 if isinstance(e, InfeasibleError) else 2
        except KeyboardInterrupt:
            status = interrupts.STATUS
            terminal.print_line(interrupts.NOTHING)
            interrupts.hold("")
    sys.exit(status)


def _run(argv: list[str] | None) -> int:
    """The exit status of a command, whose result is printed.

    Raises: SoapjaxError for bad input, KeyboardInterrupt where there is nothing to keep, SystemExit after --help.
    """
    command = None
    with terminal.printing(), terminal.encodable():
        command = tyro.extras.subcommand_cli_from_dict(
            COMMANDS, args=argv, prog="soapjax", description=__doc__, sort_subcommands=False
        )
    if command is None:  # nobody reads the help any more
        return 0
    if isinstance(command, VerifyCommand):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # the partitioner's warnings are read, and not shown
    if isinstance(command, VerifyCommand | PlanCommand) and command.target not in ("local", "cpu", None):
        os.environ.update(JAX_PLATFORMS="cpu", JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1")
    # XLA's C++ warnings belong to no user of a command line; they are back with TF_CPP_MIN_LOG_LEVEL=0.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    log = logging.StreamHandler(sys.stderr)
    log.setFormatter(terminal.LogFormatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[log])
    warnings.filterwarnings("ignore", message=".*donated buffers were not usable.*")
    _check_sizes(command)
    try:
        from soapjax.cli import commands  # after parsing: --help must not wait for jax
    except Exception as e:  # of the user's variables: JAX_ENABLE_X64=banana
        remedy = "check the installation, and the variables JAX_* and XLA_*"
        raise SoapjaxError(Problem("import of JAX", f"{type(e).__name__}: {e}", "a JAX that can be imported", remedy)) from e
    try:
        # What the user's own modules print must not reach --json's standard output.
        with contextlib.redirect_stdout(sys.stderr):
            progress = interrupts.Interruptible(_progress(command))
            try:
                result, text, status = commands.run(command, progress)
            finally:
                progress.stop()  # a bar that is left behind hides the cursor
    except SoapjaxError:
        raise
    except Exception as e:
        if problem := terminal.about_surroundings(e):
            raise SoapjaxError(problem) from e
        raise
    interrupts.hold("interrupted while the result was printed")
    with terminal.printing():
        if command.json:
            print(json.dumps(_without_nan(result), allow_nan=False))
        else:
            terminal.console().print(text)
    return interrupts.STATUS if interrupts.came() else status


def _check_sizes(command: Any) -> None:
    """Refuses at once what no reader would take.

    Raises: SoapjaxError naming every file that is too large.
    """
    given = [getattr(command, name, None) for name in ("plan", "a", "b", "plans", "profile", "topology", "names")]
    problems = []
    for path in (p for g in given for p in (g if isinstance(g, list | tuple) else [g]) if isinstance(p, str)):
        with contextlib.suppress(OSError, ValueError):
            size = os.stat(path).st_size
            if size > files.MAX_TEXT_BYTES and os.path.isfile(path):
                problems.append(files.too_large(path, f"{size} bytes", files.MAX_TEXT_BYTES))
    if problems:
        raise SoapjaxError(problems)


def _without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _progress(command: Any) -> Any:
    """A bar with the best step time so far, or the operator that is measured, on a terminal only."""
    if not (isinstance(command, PlanCommand | ProfileCommand) and sys.stderr.isatty()):
        return None
    if isinstance(command, ProfileCommand):
        return _Bar("measuring", None, lambda done, total, elapsed_s, label: (done, total, f"{done} of {total}, {label}"))
    total = command.seconds or command.proposals or None

    def told(done: int, best_s: float, elapsed_s: float) -> tuple[float, float | None, str]:
        return elapsed_s if command.seconds else done, total, f"{done} proposals, best {best_s * 1e3:.4g} ms"

    return _Bar("searching", total, told)


class _Bar:
    """Is called as a search or a profile tells how far it is, of which `told` makes (completed, total, words)."""

    def __init__(self, doing: str, total: float | None, told: Callable[..., tuple[float, float | None, str]]):
        self._told = told
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn(doing), rich.progress.BarColumn(), rich.progress.TextColumn("{task.fields[words]}"),
            rich.progress.TimeElapsedColumn(), console=terminal.console(sys.stderr, soft_wrap=True), transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task(doing, total=total, words="")
        self._bar.start()

    def __call__(self, *of: Any) -> None:
        completed, total, words = self._told(*of)
        self._bar.update(self._task, completed=completed, total=total, words=words)

    def stop(self) -> None:
        self._bar.stop()
