"""The one place where a command prints: text as it is meant, on whatever standard output and standard error are.

What a file says is data. A name such as "[red]x" or "\\x1b[2J" reaches the terminal as these characters: no markup is
interpreted, and control characters are written as escapes (`visible`). An output that has no "…", "×" or "µ" gets "...", "x" and
"u", and tables drawn with "+", "-" and "|". A pipe that nobody reads any more ends a command quietly; an output that is closed or
full is bad input.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import resource
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

import rich.console
import rich.segment

from soapjax.errors import Problem, SoapjaxError

MIN_ADDRESS_SPACE_BYTES = 1_900_000_000  # measured with jaxlib 0.10 on two cores: with 1.5e9 it aborts, 350 MB are used
# Control characters but tab and newline, what turns the direction of text, line separators, and halves of surrogate pairs.
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_ASCII = str.maketrans(
    {"…": "...", "×": "x", "µ": "u", "μ": "u", "–": "-", "—": "-", "−": "-", "→": "->", "≤": "<=", "≥": ">=", "≈": "~", "·": ".",
     "“": '"', "”": '"', "‘": "'", "’": "'", "•": "*", "²": "^2", "ᵀ": "^T", "\xa0": " ", "╭": "+", "╮": "+", "╰": "+", "╯": "+",
     "─": "-", "━": "-", "│": "|", "┃": "|"}
)  # fmt: skip


def visible(text: str, *, one_line: bool = False) -> str:
    """`text` without characters that a terminal would obey: "\\x1b" is written as an escape; with `one_line` newlines are too."""
    text = _INVISIBLE.sub(lambda m: m[0].encode("unicode_escape", "surrogatepass").decode(), text)
    return text.replace("\n", "\\n") if one_line else text


class _Encodable(io.TextIOBase):
    """A stream that is given only what it can encode."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]  # read-only
        found = getattr(self._stream, "encoding", None) or "utf-8"
        # Python takes the C locale for UTF-8 (PEP 538, 540), which a terminal of that locale need not know.
        is_c = os.environ.get("LC_ALL") in ("C", "POSIX") and not {"PYTHONIOENCODING", "PYTHONUTF8"} & os.environ.keys()
        return "ascii" if is_c else found

    def write(self, text: str) -> int:
        encoding = self.encoding
        try:
            text.encode(encoding)
        except UnicodeEncodeError:
            text = text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
        return self._stream.write(text)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def flush(self) -> None:
        self._stream.flush()


class _AsText:
    """A renderable, with what a terminal would obey made visible."""

    def __init__(self, renderable: Any):
        self.renderable = renderable

    def __rich_console__(self, console: rich.console.Console, options: rich.console.ConsoleOptions) -> Iterable[Any]:
        for segment in console.render(self.renderable, options):
            yield segment if segment.control else rich.segment.Segment(visible(segment.text), segment.style)


class _Hook(rich.console.RenderHook):
    def process_renderables(self, renderables: list[Any]) -> list[Any]:
        return [r if isinstance(r, rich.segment.Segment | rich.console.Control) else _AsText(r) for r in renderables]


class _Console(rich.console.Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # for `printing`; rich would end with status 1


def console(stream: TextIO | None = None, **options: Any) -> rich.console.Console:
    """A console on standard output, or on another stream."""
    file: Any = _Encodable(sys.stdout if stream is None else stream)
    made = _Console(file=file, markup=False, emoji=False, highlight=False, **options)
    made.push_render_hook(_Hook())
    return made


@contextlib.contextmanager
def encodable() -> Iterator[None]:
    """Inside, what others print is encoded as what is printed here."""
    with contextlib.redirect_stdout(_Encodable(sys.stdout)), contextlib.redirect_stderr(_Encodable(sys.stderr)):
        yield


def print_line(text: str) -> None:
    """A line on standard error, if that can be written to."""
    with contextlib.suppress(OSError, ValueError):
        _Encodable(sys.stderr).write(visible(text) + "\n")
        sys.stderr.flush()


class LogFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def check_surroundings() -> None:
    """Makes sure that no file that is opened becomes standard output or error.

    Raises: SoapjaxError where there is no standard output, no working folder, or hardly any address space.
    """
    problems = []
    if sys.stdout is None:
        expected = "an open file, pipe or terminal"
        problems.append(Problem("standard output", "closed", expected, "leave out >&-, or write to /dev/null"))
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:  # the lowest free number is taken: these were closed
        os.set_inheritable(fd, True)
        fd = os.dup(fd)
    os.close(fd)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    try:
        os.getcwd()
    except OSError as e:
        problems.append(Problem("working folder", e.strerror, "a folder that is there", "go to another one: cd /"))
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= limit < MIN_ADDRESS_SPACE_BYTES:  # -1 is none
        expected = f"at least {MIN_ADDRESS_SPACE_BYTES}, which XLA's threads reserve and hardly use"
        problems.append(Problem("address space (ulimit -v)", f"{limit} bytes", expected, "raise it, or limit memory by a cgroup"))
    if problems:
        raise SoapjaxError(problems)


def about_surroundings(e: Exception) -> Problem | None:
    """What is wrong around the command, where that is what an exception says; None for all others, which are mistakes of ours."""
    what = f"{type(e).__name__}: {visible(str(e), one_line=True)}"
    if isinstance(e, OSError):
        remedy = "check the place, its rights and the space there"
        return Problem(str(e.filename or "the operating system"), e.strerror or what, "to be able to use it", remedy)
    if isinstance(e, MemoryError):
        return Problem("memory", str(e) or "none left", "as much as the command needs", "free some, or raise the limit")
    if "RESOURCE_EXHAUSTED" in str(e) or "bad_alloc" in str(e):
        return Problem("memory", what, "as much as the command needs", "free some, or raise the limit")
    if "initialize backend" in str(e):
        return Problem("JAX_PLATFORMS", what, "a backend that starts here", "correct JAX_PLATFORMS, or leave it out")
    return None


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Inside, standard output is written to; it is flushed at the end. That nobody reads it any more is no error.

    Raises: SoapjaxError where it cannot be written to.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        _silence()
    except OSError as e:
        _silence()
        expected, remedy = "an output that takes the result", "free space there, or send it elsewhere"
        raise SoapjaxError(Problem("standard output", e.strerror or str(e), expected, remedy)) from None


def _silence() -> None:
    """What standard output still holds goes nowhere, so that the interpreter's own flush at its end does not fail."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
