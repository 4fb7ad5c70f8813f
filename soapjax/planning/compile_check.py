"""The compiler's word on a plan: what its programs take of a device at the peak, and what they send.

The winner of a search is compiled. Where it takes more than a device has for it, the limit of what may be *predicted* falls below
that plan by what was missed, and the search goes on from what it found, of stages anew; until a plan fits as compiled, or ROUNDS
are over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from soapjax.errors import InfeasibleError, Problem, SoapjaxError
from soapjax.execute.compiled.collectives import bytes_by_kind, collectives_of
from soapjax.execute.compiled.stream_inspection import inspect_stream
from soapjax.execute.spmd.compiled_step import CompiledStep
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.execute.streams.placed_step import PlacedStep
from soapjax.execute.streams.stream import Streamed
from soapjax.execute.streams.stream_step import StreamStep
from soapjax.graph.trace.tracing import TracedStep
from soapjax.helpers.sizes import size
from soapjax.planning.pipelining.pipelines import FoundPipeline
from soapjax.planning.searching import AGAIN, Search, Searched, least_memory
from soapjax.search.objective import Objective
from soapjax.strategy.plan import CompiledFigures, Plan
from soapjax.strategy.plan_strategy import topology_of
from soapjax.topology import DeviceKind, DeviceTopology

ROUNDS = 6  # plans that are compiled, at most; of one program one more where none fits: what is predicted to take least
MISSES, MISSED = 3, 0.02  # searches of stages that may find nothing under a limit, and by how much of it that falls then
_LEAST = 1e-3  # of the device's memory, by which the limit falls at least: so every round is another plan


class Compiled(NamedTuple):
    target: str  # what it was compiled for
    memory_bytes: int  # per device, at the peak
    sent_bytes: dict[str, int]  # by each device in one step, by collective; of several programs nothing
    program: CompiledStep | None  # to be run, where the plan is one program


class Checked(NamedTuple):
    searched: Searched
    figures: tuple[CompiledFigures, ...]
    program: CompiledStep | None


class PlannedStages(NamedTuple):
    plan: Plan
    found: FoundPipeline
    program: StreamStep | None = None  # the plan's, where a check compiled it


def compiled_plan(step: TracedStep, plan: Plan, devices: Sequence[Any], donate: bool | Sequence[int] = True) -> Compiled:
    """A plan's program, or programs, compiled for devices that need not be there."""
    program = bind_plan(step, plan, devices=list(devices))
    if plan.pinned:
        return compiled_stream(PlacedStep(program))
    with jax.default_device(None):
        made = CompiledStep(program, donate=donate)
        return Compiled(_target(program.mesh.devices.flat[0]), made.peak_memory_bytes(), sent_bytes(made), made)


def compiled_stream(step: Streamed) -> Compiled:
    """A step of several programs, compiled for its devices."""
    with jax.default_device(None):
        inspected = inspect_stream(step)
    target = _target(step.all_places[0].mesh.devices.flat[0])
    return Compiled(target, max(inspected.memory_bytes.values()), {}, None)


def _target(device: Any) -> str:
    return device.platform if device.device_kind == device.platform else f"{device.platform}, {device.device_kind}"


def sent_bytes(made: CompiledStep) -> dict[str, int]:
    """What each device sends in one step, by collective; nothing where the program has collectives of an unknown kind."""
    try:
        return bytes_by_kind(collectives_of(made.as_text(), made.program.mesh.size))
    except SoapjaxError:
        return {}


def over_memory(plan: Plan, made: CompiledStep) -> Problem | None:
    """What a compiled step lacks of memory, if anything."""
    topology, _ = topology_of(plan)
    needed, available = made.peak_memory_bytes(), topology.device.available_memory_bytes
    if needed <= available:
        return None
    expected, remedy = f"at most {size(available)} on {topology.name}", 'plan anew with check="compile"'
    return Problem("memory", f"{size(needed)} per device as compiled", expected, remedy)


def devices_to_compile_for(topology: DeviceTopology, devices: Sequence[Any] | None) -> list[Any]:
    """Those that are given, whatever they are, or those at hand where they are of the topology's platform.

    Raises: SoapjaxError where these are too few, or those at hand others than planned for.
    """
    if devices is not None:
        if len(devices) < topology.num_devices:
            expected, remedy = f"the {topology.num_devices} of {topology.name}", "name more devices, or plan for fewer"
            raise SoapjaxError(Problem("devices", f"{len(devices)} devices", expected, remedy))
        return list(devices)
    found = list(jax.devices())
    platforms = {"gpu": ("cuda", "rocm")}.get(found[0].platform, (found[0].platform,))
    wanted = f"{topology.num_devices} devices of {topology.device.platform}, those of {topology.name}"
    if len(found) < topology.num_devices or topology.device.platform not in platforms:
        remedy = "name the devices (--target cpu for fake ones), or leave the check out: the plan keeps a margin of memory then"
        raise SoapjaxError(Problem("check", f"{len(found)} of {found[0].platform}", wanted, remedy))
    return found


def checked(
    search: Search, searched: Searched, plan_of: Callable[[Searched], Plan], compile_one: Callable[[Plan], Compiled]
) -> Checked:
    """What a search found, or what it finds with less memory, that fits as compiled.

    Raises: InfeasibleError where no plan that was compiled fits.
    """
    figures: list[CompiledFigures] = []
    tried: set[bytes] = set()
    topology = searched.problem.simulator.tables.topology
    device = topology.device

    def compile_best(searched: Searched) -> Compiled:
        plan = plan_of(searched)
        compiled = compile_one(plan)
        tried.add(searched.result.best.strategy.key())
        figures.append(_figures(plan, compiled, device, searched.problem.objective))
        return compiled

    while True:
        compiled = compile_best(searched)
        last = figures[-1]
        if last.fits:
            return Checked(_accepted(searched), tuple(figures), compiled.program)
        limit = _tightened(last, searched.problem.usable_memory_bytes)
        if len(figures) == ROUNDS or limit <= 0:
            break
        searched = search.again(searched, limit)
        if searched.result.stopped_by == "interrupted" or searched.result.best.strategy.key() in tried:
            break
    least = least_memory(searched)
    if least.strategy.key() not in tried:
        searched = searched.with_best(least)
        compiled = compile_best(searched)
        if figures[-1].fits:
            return Checked(_accepted(searched), tuple(figures), compiled.program)
    raise InfeasibleError(_refusal(figures, topology))


def checked_stages(
    found: FoundPipeline, topology: DeviceTopology, objective: Objective, find: Callable[[DeviceTopology, float], FoundPipeline],
    plan_of: Callable[[FoundPipeline, DeviceTopology], Plan], made_of: Callable[[Plan, FoundPipeline], StreamStep],
) -> PlannedStages:  # fmt: skip
    """The pipeline that was `found` on a topology, or what is found with less memory, that fits as compiled.

    Args:
      find: the best pipeline on a topology, with such a share of the first search's proposals.
    Raises: InfeasibleError where no pipeline that was compiled fits.
    """
    figures: list[CompiledFigures] = []
    here = topology
    for _ in range(ROUNDS):
        plan = plan_of(found, here)
        made = made_of(plan, found)
        figures.append(_figures(plan, compiled_stream(made.streamed), topology.device, objective))
        if figures[-1].fits:
            return PlannedStages(_with_figures(plan, figures), found, made)
        lower = _found_below(_tightened(figures[-1], found.times.usable_bytes), topology, find)
        if lower is None:
            break
        before, (found, here) = found, lower
        done, took_s = (getattr(before, k) + getattr(found, k) for k in ("num_proposals", "search_s"))
        found = found._replace(num_proposals=done, search_s=took_s)
        if found.stopped_by == "interrupted":
            return PlannedStages(_with_figures(plan_of(found, here), figures), found)
    raise InfeasibleError(_refusal(figures, topology))


def _found_below(
    limit: float, topology: DeviceTopology, find: Callable[[DeviceTopology, float], FoundPipeline]
) -> tuple[FoundPipeline, DeviceTopology] | None:  # fmt: skip
    """A pipeline that is predicted to take less than a limit. A search prices by less than the whole graph, and may miss it."""
    for k in range(1, MISSES + 1):
        if limit < 1:
            break
        here = topology.usable_up_to(limit)
        try:
            return find(here, AGAIN), here
        except SoapjaxError:
            limit -= k * MISSED * limit
    return None


def _with_figures(plan: Plan, figures: Sequence[CompiledFigures]) -> Plan:
    return plan.model_copy(update={"provenance": plan.provenance.model_copy(update={"compiled": tuple(figures)})})


def _tightened(last: CompiledFigures, usable_bytes: float) -> float:
    """What the next plan may be predicted to take of a device."""
    missed = max(last.compiled_memory_bytes - last.available_memory_bytes, _LEAST * last.available_memory_bytes)
    return min(last.predicted_memory_bytes, usable_bytes) - missed


def _accepted(searched: Searched) -> Searched:
    """A plan that fits as compiled fits, whatever the search was told: its limit is at least what is predicted of the plan."""
    needed, problem = searched.result.best.memory_bytes, searched.problem
    return searched if needed <= problem.usable_memory_bytes else searched.under(needed + 1)


def _figures(plan: Plan, compiled: Compiled, device: DeviceKind, objective: Objective) -> CompiledFigures:
    p = plan.prediction
    return CompiledFigures(
        target=compiled.target, step_time_s=p.step_time_s, predicted_memory_bytes=p.memory_bytes_per_device,
        compiled_memory_bytes=compiled.memory_bytes,
        available_memory_bytes=int(objective.memory_limit(device.available_memory_bytes)),
        predicted_sent_bytes=p.bytes_by_collective if compiled.sent_bytes else {}, compiled_sent_bytes=compiled.sent_bytes,
    )  # fmt: skip


def _refusal(figures: Sequence[CompiledFigures], topology: DeviceTopology) -> Problem:
    least = min(figures, key=lambda f: f.compiled_memory_bytes)
    value = (
        f"{size(least.compiled_memory_bytes)} per device as compiled (predicted {size(least.predicted_memory_bytes)}), the least "
        f"of {len(figures)} plan{'s' * (len(figures) > 1)} that the compiler was asked about"
    )
    remedy = (
        "use more devices, a smaller batch, more micro-batches or stages, or jax.checkpoint around layers; "
        'check="none" (--check none) takes the prediction for it'
    )
    return Problem("memory", value, f"at most {size(least.available_memory_bytes)} on {topology.name}", remedy)
