"""Errors for the person who reads them.

Every error a user can cause is a `SoapjaxError` that carries *all* the
problems found, each with the place, the value, what was expected and the
remedy. The command line prints them and exits with status 2.

>>> raise SoapjaxError([Problem("topologies/x.toml: level[0].bandwidth_bytes_per_s",
...                             "-1.0", "a positive number", "give the rate of one direction")])
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Problem(NamedTuple):
    """One thing that is wrong: where, what was found, what was expected, what to do."""

    place: str
    value: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        value = self.value if len(self.value) <= 200 else self.value[:197] + "..."
        return f"{self.place}: got {value}; expected {self.expected}. Remedy: {self.remedy}."


class SoapjaxError(ValueError):
    """Bad input. `problems` holds every failure found, not only the first."""

    def __init__(self, problems: Iterable[Problem] | Problem):
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(p) for p in self.problems))


class InfeasibleError(SoapjaxError):
    """The problem has no solution within its limits (command line: exit status 3)."""
