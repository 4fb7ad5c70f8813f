"""Every option once: what it may be, in words too. `soap_shard`, `soapjax.plan` and the command line share the table.

Options are checked before anything is loaded, imported or traced, all together:

>>> check({"steps": 0, "seed": -1})
Traceback (most recent call last):
soapjax.errors.SoapjaxError: steps: got 0; expected at least 1: a whole number from 1 to 2147483647. Remedy: train one step or more.
seed: got -1; expected a whole number from 0 to 2147483647. Remedy: choose another seed.

A NumPy number is as good as Python's own; a text, or True, is no number.
"""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pydantic
from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf

from soapjax.costs.measured.profile import Profile
from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.parts.joinings import REDUCTIONS
from soapjax.search.objective import OBJECTIVES, Objective, objective_problems
from soapjax.search.planners import PLANNERS
from soapjax.strategy.pipeline import Pipeline
from soapjax.strategy.plan import Plan
from soapjax.strategy.schedules import SCHEDULES
from soapjax.strategy.space import SPACES
from soapjax.topology import DeviceTopology
from soapjax.topology.table_reader import shown

MOST = 2**31 - 1  # of whole numbers: seeds and proposals are int32 in the search's programs
MOST_SECONDS = 1e9
PIPELINES = ("auto", *(name for name in SCHEDULES if name != "own"))
CHECKS = ("none", "compile")


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.bool_ | np.integer | np.floating) else value


def _listed(value: Any) -> Any:
    """An option of `jax.jit` that is one value or several."""
    value = _plain(value)
    if isinstance(value, int | str):
        return (value,)
    if value is None or isinstance(value, Mapping | bytes):
        return value
    return tuple(map(_plain, value)) if isinstance(value, Iterable) else value


def _devices(value: Any) -> Any:
    devices = None if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable) else list(value)
    if not devices or not all(hasattr(d, "platform") and hasattr(d, "device_kind") for d in devices):
        raise ValueError("not a list of devices")
    if len({id(d) for d in devices}) < len(devices):
        twice = next(d for i, d in enumerate(devices) if any(d is e for e in devices[:i]))
        raise ValueError(f"{twice} {sum(d is twice for d in devices)} times")
    return value


def _path(value: Any) -> Any:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError("not a path")
    return value


Whole = Annotated[int, BeforeValidator(_plain), Field(ge=1, le=MOST, strict=True)]
Natural = Annotated[int, BeforeValidator(_plain), Field(ge=0, le=MOST, strict=True)]
Seconds = Annotated[float, BeforeValidator(_plain), Field(gt=0, le=MOST_SECONDS, strict=True, allow_inf_nan=False)]
Percent = Annotated[float, BeforeValidator(_plain), Field(ge=0, le=100, strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, BeforeValidator(_plain), Field(strict=True)]
PathLike = Annotated[Any, AfterValidator(_path)]
Number = Annotated[int, BeforeValidator(_plain), Field(strict=True)]
Numbers = Annotated[tuple[Number, ...], BeforeValidator(_listed)]
Name = Annotated[str, Field(min_length=1, strict=True)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_listed)]
Axes = Name | tuple[Name, ...] | list[Name] | None
Rules = Annotated[tuple[tuple[Name, Axes], ...], BeforeValidator(_listed)]


class Option(NamedTuple):
    """What an option may be: a type with its range, or one of some names."""

    kind: Any
    expected: str
    remedy: str
    names: Collection[str] = ()  # live: whoever adds a planner has added its name

    def problem(self, place: str, value: Any) -> Problem | None:
        """What is wrong with a value, if anything."""
        if self.names and isinstance(value, str):
            if value in self.names:
                return None
            close = difflib.get_close_matches(value[:100], self.names, 1)
            remedy = f"did you mean {close[0]!r}" if close else self.remedy
            return Problem(place, shown(value), " or ".join(self.names) + self.expected, remedy)
        try:
            _validator(self.kind).validate_python(value)
        except (pydantic.ValidationError, RecursionError) as e:
            found = shown(value)
            if isinstance(e, pydantic.ValidationError) and " times" in (said := str(e.errors()[0].get("ctx", {}).get("error", ""))):
                found = said  # a list of devices is long: the one that is there twice says more
            return Problem(place, found, (" or ".join(self.names) if self.names else "") + self.expected, self.remedy)
        return None


@functools.cache
def _validator(kind: Any) -> pydantic.TypeAdapter:
    """Made once: that takes a hundred times as long as to check a value."""
    return pydantic.TypeAdapter(kind)


_never = Literal["\0"]  # of options that are a name: nothing that is no text
_flag = Option(Flag, "True or False", "write one of these")
_natural = f"a whole number from 0 to {MOST}"
_whole = f"a whole number from 1 to {MOST}"
_auto = Option(Whole | Literal["auto"] | None, "auto, or a number from 1 on", "correct the number")
_numbers = Option(Numbers | None, "a position or several", "write e.g. 2, or (2, 3)")
_names = Option(Names | None, "a name or several", 'write e.g. "train", or ("train", "rate")')
OPTIONS: dict[str, Option] = {
    "topology": Option(
        InstanceOf[DeviceTopology] | PathLike, 'a name such as "a100x64", the path of a TOML file, "local", or a DeviceTopology',
        'leave it out for the devices at hand ("local")',
    ),
    "plan": Option(InstanceOf[Plan] | PathLike | None, "the path of a plan file, or a Plan", "give the file that Plan.save wrote"),
    "planner": Option(_never, "", "choose one of these", PLANNERS),
    "space": Option(_never, "", "choose one of these", SPACES),
    "objective": Option(InstanceOf[Objective], ", or an Objective", "choose one of these, or pass an Objective", OBJECTIVES),
    "pareto": _flag,
    "seed": Option(Natural, _natural, "choose another seed"),
    "proposals": Option(Whole | None, f"a positive number: {_whole}", "give the search at least one"),
    "seconds": Option(Seconds | None, f"a positive number of seconds, {MOST_SECONDS:.0e} at most".replace("e+0", "e"),
                      "give the search some time"),
    "fixed": Option(
        dict[Name, Any] | None, "a dict from argument paths to specs", "write {'state.params.w': P('d0', None)}"
    ),
    "unroll": _flag, "donate": _flag, "strip_constraints": _flag,
    "static_argnums": _numbers, "donate_argnums": _numbers, "static_argnames": _names, "donate_argnames": _names,
    "axis_name": Option(Names, "the name of an axis, or several", 'write e.g. axis_name="batch"'),
    "logical_axis_rules": Option(Rules | None, "pairs of a logical name and a mesh axis, several or None",
                                 "write (('embed', 'd0'),)"),
    "devices": Option(Annotated[Any, AfterValidator(_devices)] | None, "devices of jax.devices(), one or more, each once",
                      "leave it out for all of them, or pass e.g. jax.devices()[:4]"),
    "profile": Option(InstanceOf[Profile] | PathLike | None, 'the path of a profile, "auto", or a Profile',
                      "give a file of `soapjax profile`"),
    "verify_top": Option(Natural, f"0 or more: {_natural}", "say how many of the best to run"),
    "pipeline": Option(InstanceOf[Pipeline] | None, ", or a Pipeline", "choose one of these, or pass a Pipeline", PIPELINES),
    "microbatches": _auto, "stages": _auto,
    "microbatch_reduction": Option(_never, "", "choose one of these", REDUCTIONS),
    "simplicity": Option(Percent, "a percentage from 0 to 100", "leave it out for 0.5, or write 0 for the fastest plan as found"),
    "check": Option(_never, "", "choose one of these", CHECKS),
    "steps": Option(Whole, f"at least 1: {_whole}", "train one step or more"),
}  # fmt: skip


def problems_of(values: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with options by name, of all of them; of those that the table does not know nothing."""
    found = (OPTIONS[name].problem(name, value) for name, value in values.items() if name in OPTIONS)
    return [*(p for p in found if p is not None), *objective_problems(values.get("objective"))]


def check(values: Mapping[str, Any], also: Iterable[Problem] = ()) -> None:
    """Raises: SoapjaxError with everything that is wrong with options by name, and what the caller has found beside."""
    if problems := [*problems_of(values), *also]:
        raise SoapjaxError(problems)


def objective(value: str | Objective) -> Objective:
    """The objective that is meant by an option that was checked."""
    return value if isinstance(value, Objective) else Objective(value)


def check_step(fn: Any) -> list[Problem]:
    """What is wrong with a step function."""
    if callable(fn):
        return []
    return [Problem("the step", shown(fn), "a function of pytrees, (state, batch) -> (state, metrics)", "pass the function first")]
