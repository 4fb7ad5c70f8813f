"""Rows in CSV files, tables on the terminal, figures as PNG, and the command line that the paper's scripts share."""

from __future__ import annotations

import argparse
import csv
import io
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from csv_files import read_table
from rich.console import Console
from rich.table import Table

from soapjax.errors import SoapjaxError
from soapjax.helpers.files import write_text_atomic
from soapjax.search.problem import Budget

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED_FILES = ROOT / "results" / "published"  # others' figures, with their sources
MAX_SEED = 2**32 - 1
Row = dict[str, str]


def text(value: Any) -> str:
    """A cell: six digits of a number, nothing for None."""
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Rows may lack columns; others than these are left out."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text_atomic(path, out.getvalue())


class Rows:
    """The rows of a CSV file; each is known by its first columns, the arguments that it was computed with."""

    def __init__(self, path: Path, arguments: Sequence[str], *, again: bool = False):
        self.path, self.arguments, self.again = path, tuple(arguments), again
        self.rows: list[Row] = []
        self.fresh: set[tuple[str, ...]] = set()
        if path.exists():
            self.rows = read_table(path)

    def _key(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(text(row.get(c)) for c in self.arguments)

    def find(self, arguments: Mapping[str, Any]) -> Row | None:
        """The row with these arguments; with `again`, only if it was computed in this run."""
        key = self._key(arguments)
        if self.again and key not in self.fresh:
            return None
        return next((r for r in self.rows if self._key(r) == key), None)

    def add(self, row: Mapping[str, Any]) -> Row:
        """Adds a row, in place of one with the same arguments, and writes the file."""
        made, key = {k: text(v) for k, v in row.items()}, self._key(row)
        at = next((i for i, r in enumerate(self.rows) if self._key(r) == key), None)
        if at is None:
            self.rows.append(made)
        else:
            self.rows[at] = made
        self.fresh.add(key)
        columns = list(dict.fromkeys([*self.arguments, *(c for r in self.rows for c in r)]))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_csv(self.path, columns, self.rows)
        return made

    def get(self, arguments: Mapping[str, Any], compute: Callable[[], Mapping[str, Any]]) -> Row:
        """The row with these arguments, computed where it is missing; a note says which."""
        found = self.find(arguments)
        if found is None:
            note("computing " + " ".join(f"{k}={text(v)}" for k, v in arguments.items() if text(v)))
            found = self.add({**arguments, **compute()})
        return found


def note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def show(title: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Prints a table; cells are looked up by column."""
    table = Table(title=title, title_justify="left")
    for c in columns:
        table.add_column(c.replace("_", " "), overflow="fold")
    for r in rows:
        table.add_row(*(text(r.get(c)) for c in columns))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def markdown(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    lines = ["| " + " | ".join(c.replace("_", " ") for c in columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(text(r.get(c)) for c in columns) + " |" for r in rows]
    return "\n".join(lines) + "\n"


@contextmanager
def figure(path: Path, **subplots: Any) -> Iterator[Any]:
    """Axes [rows, columns] to draw on, saved as PNG at the end; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        note(f"no {path.name}: pip install -e '.[figures]' draws it")
        yield None
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(squeeze=False, layout="constrained", **subplots)
    try:
        yield axes
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".png")
        os.close(handle)
        try:
            drawn.savefig(temporary, dpi=120)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        finally:
            if os.path.exists(temporary):
                os.unlink(temporary)
    finally:
        pyplot.close(drawn)


def _seed(value: str) -> int:
    number = int(value)
    if not 0 <= number <= MAX_SEED:
        raise ValueError
    return number


def positive_int(value: str) -> int:
    number = int(value)
    if number < 1:
        raise ValueError
    return number


def positive_float(value: str) -> float:
    number = float(value)
    if not 0 < number < float("inf"):
        raise ValueError
    return number


_seed.__name__ = f"whole number from 0 to {MAX_SEED}"
positive_int.__name__ = "whole number above 0"
positive_float.__name__ = "number above 0"


def parser_of(doc: str, *, seconds: float | None = 10.0) -> argparse.ArgumentParser:
    """What every script takes; `seconds` is the default budget of a search (None: the script has its own)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=_seed, default=0)
    if seconds is not None:
        parser.add_argument("--seconds", type=positive_float, default=seconds, help="of a search, compilation included")
        parser.add_argument("--proposals", type=positive_int, default=None, help="of a search, in place of --seconds: reproducible")
    parser.add_argument("--tiny", action="store_true", help="the models' small sizes, to try it out")
    parser.add_argument("--again", action="store_true", help="compute also what the CSV has already")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of CSV and PNG files")
    return parser


def budget_of(options: argparse.Namespace) -> tuple[Budget, dict[str, Any]]:
    """The budget of a search, and the columns that name it."""
    seconds = None if options.proposals else options.seconds
    return Budget(options.proposals, seconds), dict(seconds=seconds, proposals=options.proposals, seed=options.seed)


BUDGET_COLUMNS = ("seconds", "proposals", "seed")
CASE_COLUMNS = ("model", "cluster", "devices", "space", "sizes")


def guarded(body: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> int:
    """The exit status: 2 for bad input, with a message; 130 where Ctrl-C (or a SIGTERM) ended it."""
    before = [(name, signal.signal(name, signal.default_int_handler)) for name in (signal.SIGINT, signal.SIGTERM)]
    try:
        body(options)
    except SoapjaxError as e:
        for problem in e.problems:
            note(f"error: {problem}")
        return 2
    except KeyboardInterrupt:
        note("interrupted; the rows so far are in the CSV, and the same command goes on from there")
        return 130
    finally:
        for name, handler in before:
            signal.signal(name, handler)
    return 0
