"""The cases: a name, the family, what has to be at hand, and a factory of the step with its arguments.

    @case("gcn_karate", "graphs", source="google-deepmind+jraph", packages=["jraph", "haiku"])
    def gcn(): return Made(step, (params, opt_state, graph), feed={0: 0, 1: 1})

A step gives `Made.feed`: which argument of the next call is which of its results.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

WHOLE = -1  # in `Made.feed`: the result as a whole, where the step does not return a tuple


class Made(NamedTuple):
    """A step with real arguments. `feed`: argument's position -> position in the result that it is next time."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    feed: Mapping[int, int] = {0: 0}  # noqa: RUF012 - never written to

    def next_args(self, args: tuple[Any, ...], result: Any) -> tuple[Any, ...]:
        following = list(args)
        for position, taken in self.feed.items():
            following[position] = result if taken == WHOLE else result[taken]
        return tuple(following)


class Case(NamedTuple):
    """`source`: its folder below the sources, "" where installed packages are enough; `packages`: modules that it imports.

    `is_listed`: the issue that asked for this table names it; the others are chosen here.
    """

    name: str
    family: str
    make: Callable[[], Made]
    source: str
    packages: tuple[str, ...]
    is_listed: bool

    def build(self) -> Made:
        """The step. Its packages are imported first: they must not meet the stand-ins that public code is imported with."""
        for name in self.packages:
            with contextlib.suppress(ImportError):  # one that itself needs a stand-in is imported later
                importlib.import_module(name)
        return self.make()

    def missing(self, sources: Path) -> str:
        """Why it cannot be run here; "" where it can."""
        if self.source and not (sources / self.source).is_dir():
            return f"no folder {self.source} in the sources"
        absent = [p for p in self.packages if importlib.util.find_spec(p.split(".")[0]) is None]
        return f"not installed: {', '.join(absent)}" if absent else ""


CASES: dict[str, Case] = {}


def case(
    name: str, family: str, *, source: str = "", packages: Sequence[str] = (), is_listed: bool = False
) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Registers a factory.

    Raises: ValueError where the name is taken, or nothing says where the code comes from.
    """
    if name in CASES:
        raise ValueError(f"case {name!r} is registered twice")
    if not source and not packages:
        raise ValueError(f"case {name!r} names neither a source nor a package")

    def register(make: Callable[[], Made]) -> Callable[[], Made]:
        CASES[name] = Case(name, family, make, source, tuple(packages), is_listed)
        return make

    return register


def all_cases() -> dict[str, Case]:
    """Every case of the family files beside this one."""
    folder = Path(__file__).parent
    for found in pkgutil.iter_modules([str(folder)]):
        importlib.import_module(f"{__package__}.{found.name}")
    return CASES


_RNG = np.random.default_rng(0)


def ints(high: int, *shape: int, low: int = 0) -> np.ndarray:
    return _RNG.integers(low, high, shape).astype(np.int32)


def floats(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape).astype(np.float32)
