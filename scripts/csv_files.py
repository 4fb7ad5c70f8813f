"""The one reader of CSV files: rows are validated like every other file, and everything wrong with one is said at once.

    class Published(CsvRow):
        model: Name
        gpus: Count
        full_s: Positive

    read_rows("table.csv", Published)    # [Published(model='alexnet', gpus=4, full_s=0.11), ...]

Other columns are left out. Lines that begin with "#" are comments. Where columns are not known before, `read_table` gives texts,
of which those in columns that name a unit are numbers.
"""

from __future__ import annotations

import csv
import math
import os
import re
from typing import Annotated, TypeVar

import pydantic

from soapjax.errors import Problem, SoapjaxError
from soapjax.helpers.files import read_text

MAX_CSV_BYTES = 16 * 2**20
MAX_PROBLEMS = 20  # more are counted, not listed
_UNITS = re.compile(r"_(s|ms|bytes|flops|bytes_per_s|fraction)$")
_REMEDY = "correct the file"

Name = Annotated[str, pydantic.Field(min_length=1, max_length=200)]
Count = Annotated[int, pydantic.Field(ge=1, le=2**40)]
Bytes = Annotated[int, pydantic.Field(ge=0, le=2**60)]
Positive = Annotated[float, pydantic.Field(ge=1e-30, le=1e30, allow_inf_nan=False)]


class CsvRow(pydantic.BaseModel):
    """Base of what a row of a file is read as; its fields are columns."""

    model_config = pydantic.ConfigDict(frozen=True, extra="ignore")


R = TypeVar("R", bound=CsvRow)


def read_rows(path: str | os.PathLike[str], row: type[R]) -> list[R]:
    """The rows of a file.

    Raises: SoapjaxError naming the line and column of everything that is not as `row` says.
    """
    place = os.fspath(path)
    columns, cells = _parsed(place)
    needed = [name for name, field in row.model_fields.items() if field.is_required()]
    _require(place, columns, needed)
    found, problems = [], []
    for line, values in cells:
        texts = {k: v for k, v in zip(columns, values, strict=True) if v != "" or k in needed}
        try:
            found.append(row.model_validate_strings(texts))
        except pydantic.ValidationError as e:
            problems += [
                Problem(f"{place}: line {line}, column {'.'.join(map(str, x['loc']))}", _quoted(x.get("input")), x["msg"], _REMEDY)
                for x in e.errors()
            ]
    _raise(place, problems)
    return found


def read_table(path: str | os.PathLike[str], columns: tuple[str, ...] = ()) -> list[dict[str, str]]:
    """The rows of a file that holds at least these columns, as texts.

    A cell in a column that names a unit ("step_s", "memory_bytes") is a number, or empty.

    Raises: SoapjaxError naming the line and column of everything else.
    """
    place = os.fspath(path)
    names, cells = _parsed(place)
    _require(place, names, columns)
    problems = []
    for line, values in cells:
        for name, value in zip(names, values, strict=True):
            if value and _UNITS.search(name) and not _is_number(value):
                expected = "a number, or nothing"
                problems.append(Problem(f"{place}: line {line}, column {name}", _quoted(value), expected, _REMEDY))
    _raise(place, problems)
    return [dict(zip(names, values, strict=True)) for _, values in cells]


def _parsed(place: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The columns, and of every row its line and cells."""
    text = read_text(place, max_bytes=MAX_CSV_BYTES).removeprefix("\ufeff")
    # Comments and empty lines stay as empty lines, so that lines are counted as an editor does.
    lines = ["" if line.startswith("#") else line for line in text.splitlines(keepends=True)]
    reader = csv.reader(lines, strict=True)
    try:
        rows = [(reader.line_num, row) for row in reader if row]
    except csv.Error as e:
        raise SoapjaxError(Problem(f"{place}: line {reader.line_num}", str(e), "comma-separated values", _REMEDY)) from None
    if not rows:
        raise SoapjaxError(Problem(place, "no line", "a line with the names of the columns, and rows", _REMEDY))
    (_, columns), *cells = rows
    problems = []
    if twice := sorted({c for c in columns if columns.count(c) > 1})[:5]:
        problems.append(Problem(f"{place}: columns", f"{_quoted(twice)} more than once", "each column once", _REMEDY))
    for line, row in cells:
        if len(row) != len(columns):
            expected = f"{len(columns)}, one for each column"
            problems.append(Problem(f"{place}: line {line}", f"{len(row)} cells", expected, _REMEDY))
    _raise(place, problems)
    return columns, cells


def _require(place: str, columns: list[str], needed: list[str] | tuple[str, ...]) -> None:
    if missing := [c for c in needed if c not in columns]:
        expected = f"the columns {', '.join(needed)}"
        raise SoapjaxError(Problem(f"{place}: columns", f"no {', '.join(missing)}", expected, "give the table with these columns"))


def _is_number(value: str) -> bool:
    try:
        return not math.isnan(float(value))
    except ValueError:
        return False


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _raise(place: str, problems: list[Problem]) -> None:
    if len(problems) > MAX_PROBLEMS:
        more = Problem(place, f"{len(problems) - MAX_PROBLEMS} more failures", "none", "mend those above first")
        problems = [*problems[:MAX_PROBLEMS], more]
    if problems:
        raise SoapjaxError(problems)
