"""The best predicted strategies, run for real: the measured best wins, and the table of predicted against measured stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.compiled.timing import are_fake
from soapjax.planning.profiling import require_kind
from soapjax.search.problem import Evaluation
from soapjax.strategy.plan import TimedStep
from soapjax.topology import DeviceTopology

FAILURES = RuntimeError, ValueError, jax.errors.JaxRuntimeError  # of a strategy that is run: out of memory, say


class Verified(NamedTuple):
    best: Evaluation
    table: tuple[TimedStep, ...]
    notes: tuple[str, ...]


def require_real_devices(topology: DeviceTopology, devices: Sequence[Any], *, place: str = "verify_top") -> None:
    """Raises: SoapjaxError where a measured time would say nothing: fake devices, other ones than planned for, or too few."""
    if topology.fake or are_fake(devices[: topology.num_devices]):
        remedy = "leave it out, or run on real devices (one process per CPU device)"
        raise SoapjaxError(Problem(place, "fake devices, which share one machine's cores", "devices that can be timed", remedy))
    if len(devices) < topology.num_devices:
        found, wanted = f"{len(devices)} devices at hand", f"the {topology.num_devices} of {topology.name}"
        raise SoapjaxError(Problem(place, found, wanted, "leave it out, or run on the machine that is planned for"))
    require_kind(topology)


def shortlist(candidates: Sequence[tuple[str, Evaluation]], count: int) -> list[tuple[str, Evaluation]]:
    """The `count` best distinct feasible strategies by predicted cost, and data parallelism."""
    distinct: dict[bytes, tuple[str, Evaluation]] = {}
    for name, e in candidates:
        key = e.strategy.key()
        if e.is_feasible and (key not in distinct or name == "data_parallel"):
            distinct[key] = name, e
    ordered = sorted(distinct.values(), key=lambda x: x[1].cost)
    chosen = ordered[:count]
    return chosen + [x for x in ordered[count:] if x[0] == "data_parallel"]


def measured_best(chosen: Sequence[tuple[str, Evaluation]], time_one: Callable[[Evaluation], float]) -> Verified:
    """Times every one of `chosen`; one that fails to run (out of memory, say) is out, and said so.

    Raises: SoapjaxError where none runs.
    """
    table, notes, timed = [], [], []
    for i, (name, e) in enumerate(chosen):
        try:
            measured_s = time_one(e)
        except FAILURES as error:
            said = str(error).strip() or type(error).__name__
            notes.append(f"{name}: did not run: {said.splitlines()[0][:200]}")
            continue
        timed.append((measured_s, i, e))
        predicted_s, measured_s = (float(f"{x:.6g}") for x in (e.step_time_s, measured_s))
        table.append(TimedStep(strategy=name, predicted_s=predicted_s, measured_s=measured_s))
    if not timed:
        raise SoapjaxError(Problem("verify_top", "; ".join(notes), "a strategy that runs", "plan for more memory, or without it"))
    return Verified(min(timed)[2], tuple(table), tuple(notes))
