"""What a search minimises: the step time, or (`mdpe`) time, communication and memory together.

MDPE, the multi-dimensional performance evaluation of Trinity (Zeng et al. 2022, section 3, equation 8), is the reward

    R = log(alpha f(E, C) + beta q(C, M)),

f the simulated run time, q a penalty where a device communicates or stores more than the user tolerates (limits C^ and M^;
section 5.2: weights 0.5, 0.3 and 0.2, both limits 8). The paper leaves room; it is read so:

* It names two weights and gives three: alpha of time, one of communication and one of memory, as its three dimensions are
  "linearly superimposed". The limits are bytes of one device (its tables give GB), C the bytes that the device sends in a step.
* A reward is maximised, and its f grows with the run time: R is minus the logarithm here.
* q has no formula. "It implements penalties for the strategy that exceed the upper limit to ensure" that limits are met: so
  it is zero within a limit, and beyond it the load in units of the limit, times f, so that weights mean the same for a step
  of a millisecond and of a minute:

      R = -log(f (alpha + beta [C > C^] C/C^ + gamma [M > M^] M/M^)).

`Objective.cost` is exp(-R)/alpha: seconds, and the step time itself where the limits are met. No cost is below the step time, so
that lower bounds of time are bounds of every objective. Of what a search has seen, a strategy within the limits goes before all
that exceed one; the weights decide how a search passes through these, and, by the weighted excess, which one violates least.

>>> limited = Objective("mdpe", max_bytes="8GB", max_memory="40GB")  # 0.1 s, 16 GB sent: alpha 0.5, beta 0.3, twice the limit
>>> print(limited.cost(Scores(*np.array([[0.1], [30e9], [0], [16e9]])), usable_bytes=80e9))
[0.22]
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from soapjax.errors import Problem, SoapjaxError
from soapjax.helpers.sizes import size, size_of
from soapjax.jit.array_types import Array
from soapjax.simulate.simulator import Scores
from soapjax.topology.table_reader import shown

OBJECTIVES = ("time", "mdpe")
LEAST_VIOLATING = "no plan that was judged meets the limits: this one violates them least"
WEIGHTS = (0.5, 0.3, 0.2)  # of time, communication and memory: section 5.2
_ROUNDING = 1e-6  # of weights that sum to one
_FAR = 1e30  # bytes: no limit
_LEAST_EXCESS = 1e-9  # of a limit that is exceeded by any amount, also one of no weight


class Standing(NamedTuple):
    """How B strategies stand with an objective: NumPy arrays."""

    cost: np.ndarray  # [B]: seconds, inf where a degree does not divide
    is_feasible: np.ndarray  # bool [B]: fits the device, and meets the limits
    excess: np.ndarray  # [B]: weighted, relative, over the limits; 0 where they are met


@dataclasses.dataclass(frozen=True)
class Objective:
    """What a plan is judged by.

    Args:
      name: "time" or "mdpe".
      max_bytes: of "mdpe", what a device may send in a step: bytes, or a text such as "8GB"; no limit by default.
      max_memory: what a device may store at a time, likewise. What the device has is a limit of every objective.
      weights: of time, communication and memory, from 0 to 1, together 1, that of time above 0.
    Raises: SoapjaxError with everything that is wrong.
    """

    name: str = "time"
    max_bytes: float = math.inf
    max_memory: float = math.inf
    weights: tuple[float, float, float] = WEIGHTS

    def __post_init__(self) -> None:
        values, problems = _read(self.name, self.max_bytes, self.max_memory, self.weights)
        if self.is_time and not problems and any(map(math.isfinite, values[:2])):
            problems.append(Problem("objective", "time with a limit", "an objective that has limits", "take objective mdpe"))
        if problems:
            raise SoapjaxError(problems)
        for field, value in zip(("max_bytes", "max_memory", "weights"), values, strict=True):
            object.__setattr__(self, field, value)

    @property
    def is_time(self) -> bool:
        return self.name == "time"

    @property
    def limits_bytes(self) -> bool:
        return math.isfinite(self.max_bytes)

    def memory_limit(self, usable_bytes: float) -> float:
        """The smaller of what the device has and what is tolerated."""
        return min(usable_bytes, self.max_memory)

    def cost(self, scores: Scores, usable_bytes: float) -> Array:
        """Seconds [B]: see above; times 2 + 8 × the excess over the usable memory where a plan does not fit; inf if invalid."""
        return cost_by(limits_of(self, usable_bytes), scores.step_time_s, scores.memory_bytes, scores.sent_bytes, scores.violations)

    def reward(self, scores: Scores, usable_bytes: float) -> Array:
        """R [B], larger is better; -inf if invalid. Of objective "time" minus the logarithm of the seconds."""
        cost = self.cost(scores, usable_bytes)
        xp = jnp if isinstance(cost, jax.Array) else np
        return -xp.log(cost if self.is_time else self.weights[0] * cost)

    def standing(self, scores: Scores, usable_bytes: float) -> Standing:
        """Of scores that are NumPy arrays."""
        scores = Scores(*(np.asarray(x, np.float64) for x in scores))
        excess = np.zeros(len(scores.step_time_s))
        is_met = np.ones(len(excess), bool)
        for load, limit, weight in self._limited(scores):
            over = load > limit
            excess += np.where(over, weight * np.maximum(load / limit - 1, 0.0) + _LEAST_EXCESS, 0.0)
            is_met &= ~over
        fits = (scores.memory_bytes <= usable_bytes) & ~(scores.violations > 0)
        return Standing(np.asarray(self.cost(scores, usable_bytes)), np.asarray(fits & is_met), np.where(fits, excess, np.inf))

    def _limited(self, scores: Scores) -> list[tuple[Any, float, float]]:
        """(load [B], limit, weight) of what is limited."""
        both = ((scores.sent_bytes, self.max_bytes, self.weights[1]), (scores.memory_bytes, self.max_memory, self.weights[2]))
        return [row for row in both if math.isfinite(row[1])]

    def unmet(self, sent_bytes: float | None, memory_bytes: float) -> list[Problem]:
        """Which limits a plan exceeds, in words; for those who ask for a plan."""
        loads = (
            ("max_bytes", sent_bytes or 0.0, self.max_bytes, "sent by a device in a step"),
            ("max_memory", memory_bytes, self.max_memory, "of memory on a device"),
        )  # fmt: skip
        return [
            Problem(
                name, f"no plan was found within it: the least violating has {size(load)} {what}",
                f"at most {size(limit)}, as asked for",
                "raise the limit, search for longer, or use more devices",
            )
            for name, load, limit, what in loads if load > limit
        ]  # fmt: skip

    def describe(self) -> str:
        """In words, for the plan file."""
        if self.is_time:
            return "time"
        limits = ((self.max_bytes, "sent by a device in a step"), (self.max_memory, "of memory on it"))
        words = [f"at most {size(limit)} {what}" for limit, what in limits if math.isfinite(limit)]
        return f"mdpe: {', '.join(words)}; weights {', '.join(f'{w:g}' for w in self.weights)}"


def limits_of(objective: Objective, usable_bytes: float) -> np.ndarray:
    """float32 [7], what `cost_by` reads of an objective on devices of so much memory.

    Usable bytes; limits of bytes sent and of memory; the weight of bytes over that of time, 0 where there is no limit; up to
    which memory no exact figure is needed; 1 where bytes sent are limited; the weight of memory over that of time, likewise.
    """
    of_time, of_bytes, of_memory = objective.weights if not objective.is_time else (1.0, 0.0, 0.0)
    return np.array(
        [
            usable_bytes, min(objective.max_bytes, _FAR), min(objective.max_memory, _FAR),
            (of_bytes if objective.limits_bytes else 0.0) / of_time, objective.memory_limit(usable_bytes), objective.limits_bytes,
            (of_memory if math.isfinite(objective.max_memory) else 0.0) / of_time,
        ],
        np.float32,
    )  # fmt: skip


def cost_by(
    limits: Array, step_time_s: Array, memory_bytes: Array, sent_bytes: Array,
    violations: Array,
) -> Array:  # fmt: skip
    """`Objective.cost` by numbers (`limits_of`), for programs that know no objective; all [B]."""
    xp = jnp if isinstance(step_time_s, jax.Array) else np  # eager operations of JAX are compiled one by one
    excess = xp.maximum(memory_bytes / limits[0] - 1, 0)
    seconds = xp.where(excess > 0, 2 + 8 * excess, 1.0) * step_time_s
    of_bytes = xp.where(sent_bytes > limits[1], limits[3] * sent_bytes / limits[1], 0.0)
    of_memory = xp.where(memory_bytes > limits[2], limits[6] * memory_bytes / limits[2], 0.0)
    return xp.where(violations > 0, np.inf, seconds * (1 + of_bytes + of_memory))


def objective_of(
    name: str, max_bytes: str | None = None, max_memory: str | None = None, weights: str | None = None
) -> tuple[Objective, list[Problem]]:
    """The objective that a command line asks for, or all that is wrong with it, by its options."""
    given = {"max_bytes": max_bytes, "max_memory": max_memory, "weights": weights}
    parts = None if weights is None else [x.strip() for x in weights.split(",")]
    read = WEIGHTS if parts is None else tuple(float(x) if _is_number(x) else x for x in parts)
    of_bytes, of_memory = (math.inf if x is None else x for x in (max_bytes, max_memory))
    values, problems = _read(name, of_bytes, of_memory, read)
    # A name that is unknown is an option's problem, found with the others (options.py).
    problems = [p for p in problems if name in OBJECTIVES or p.place != "objective"]
    problems = [p._replace(place="--" + p.place.replace("_", "-")) for p in problems]
    if name == "time":
        unused = [k for k, v in given.items() if v is not None]
        problems += [
            Problem("--" + k.replace("_", "-"), given[k], "an objective that has limits", "add --objective mdpe, or leave it out")
            for k in unused
        ]  # fmt: skip
    return (TIME if problems or name != "mdpe" else Objective(name, *values)), problems


def objective_problems(value: Any) -> list[Problem]:
    """What is wrong with the `objective` of a call, a name or an `Objective`, but for names that are unknown."""
    return _read(value, math.inf, math.inf, WEIGHTS)[1] if isinstance(value, str) and value in OBJECTIVES else []


def _read(name: Any, max_bytes: Any, max_memory: Any, weights: Any) -> tuple[tuple[Any, ...], list[Problem]]:
    """The limits as numbers, the weights as three, and what is wrong with any of them."""
    problems = []
    if not isinstance(name, str) or name not in OBJECTIVES:
        close = difflib.get_close_matches(name[:100], OBJECTIVES, 1) if isinstance(name, str) else []
        remedy = f"did you mean {close[0]!r}" if close else "choose one of these"
        problems.append(Problem("objective", shown(name), " or ".join(OBJECTIVES), remedy))
    read = []
    for place, value in (("max_bytes", max_bytes), ("max_memory", max_memory)):
        size = size_of(value)
        if size is None:
            expected = "a positive size, as 8GB, 500MB, 1.5GiB or a number of bytes"
            problems.append(Problem(place, shown(value), expected, "correct the limit, or leave it out for none"))
        read.append(math.inf if size is None else size)
    if name == "mdpe" and not problems and all(map(math.isinf, read)):
        expected, remedy = "a limit of communication or of memory", "give max_bytes, max_memory or both; or take objective time"
        problems.append(Problem("objective", "mdpe without a limit", expected, remedy))
    plain = tuple(weights) if isinstance(weights, tuple | list | np.ndarray) else ()
    numbers = [float(w) for w in plain if isinstance(w, int | float | np.number) and not isinstance(w, bool)]
    are_good = len(numbers) == len(plain) == 3 and all(0 <= w <= 1 for w in numbers) and abs(sum(numbers) - 1) <= _ROUNDING
    if not are_good or numbers[0] <= 0:
        expected = "three numbers from 0 to 1 that sum to 1, of time (above 0), communication and memory"
        found = shown(weights) if len(plain) != 3 or len(numbers) != 3 else f"{shown(weights)}, which sum to {sum(numbers):.6g}"
        problems.append(Problem("weights", found, expected, "write e.g. 0.5,0.3,0.2"))
    return (*read, tuple(numbers)), problems


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


TIME = Objective()
