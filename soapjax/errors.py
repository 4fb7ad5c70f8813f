"""Errors for the person who reads them.

Every error a user can cause is a `SoapjaxError` that carries *all* the
problems found, each with the place, the value, what was expected and the
remedy. The command line prints them and exits with status 2.

>>> raise SoapjaxError([Problem("x.toml: levels[0].bandwidth_gbytes_per_s", "-1.0", "a positive number", "give the rate")])
Traceback (most recent call last):
soapjax.errors.SoapjaxError: x.toml: levels[0].bandwidth_gbytes_per_s: got -1.0; expected a positive number. Remedy: give the rate.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

MOST_CHARACTERS = 200  # of what a message repeats
_LONG_WORD = re.compile(rf"\S{{{MOST_CHARACTERS + 1},}}")


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "..."


class Problem(NamedTuple):
    """One thing that is wrong: where, what was found, what was expected, what to do."""

    place: str
    value: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        expected, remedy = (_LONG_WORD.sub(lambda m: _cut(m[0]), text) for text in (self.expected, self.remedy))
        return f"{_cut(self.place)}: got {_cut(self.value)}; expected {expected}. Remedy: {remedy}."


class SoapjaxError(ValueError):
    """Bad input. `problems` holds every failure found, not only the first."""

    def __init__(self, problems: Iterable[Problem] | Problem):
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(p) for p in self.problems))


class InfeasibleError(SoapjaxError):
    """The problem has no solution within its limits (command line: exit status 3)."""
