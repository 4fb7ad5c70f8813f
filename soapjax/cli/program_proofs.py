"""`soapjax verify` of a plan that runs as several programs: pipelines, and operators pinned to parts of the devices.

Every program is compiled. Beside the plan's prediction stand what each program's devices send by collective, what goes from one
to another, and the memory of every stage; loss and gradients are compared with the single-device step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from soapjax.costs.rules.links import COLLECTIVES, TRANSFER
from soapjax.execute.compiled.pipeline_proof import verify_pipeline
from soapjax.execute.compiled.proof import Verification, verify
from soapjax.execute.compiled.stream_inspection import InspectedPart, StreamInspection, inspect_stream
from soapjax.execute.parts.cut import keys_of
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.execute.streams.pipedream import PipeDreamStep
from soapjax.execute.streams.placed_step import PlacedStep
from soapjax.execute.streams.stage_programs import MicroGraph
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import TracedStep
from soapjax.planning.pipelining.given_pipeline import planned_pipeline
from soapjax.steps.sourced_models import Model
from soapjax.strategy.plan import Plan, SentPart

AT_LEAST = 0.01  # of all that is sent: programs that differ by less are not listed


class ProgramRow(NamedTuple):
    """One program, or all transfers from one place to another."""

    name: str
    num_devices: int  # 1 of a transfer: its bytes are of all devices together
    runs: int
    predicted: dict[str, int]  # what each of its devices sends per step, by collective
    compiled: dict[str, int]

    @property
    def difference_bytes(self) -> int:
        return self.num_devices * sum(abs(self.predicted.get(k, 0) - self.compiled.get(k, 0)) for k in COLLECTIVES)


class ProgramsVerified(NamedTuple):
    numbers: Verification | None  # None where nothing was compared
    reference: str  # what one device was given
    inspected: StreamInspection
    rows: tuple[ProgramRow, ...]
    memory: dict[str, tuple[int, int]]  # "stage 0", or "fullest device" of pins -> bytes per device (predicted, compiled)
    num_devices: int

    @property
    def by_kind(self) -> dict[str, dict[str, int]]:
        """What a device sends per step, on average over all devices."""

        def mean(side: str, kind: str) -> int:
            return round(sum(r.num_devices * getattr(r, side).get(kind, 0) for r in self.rows) / self.num_devices)

        return {k: {"predicted": mean("predicted", k), "compiled": mean("compiled", k)} for k in COLLECTIVES}

    @property
    def apart(self) -> list[ProgramRow]:
        """Programs whose communication is not the predicted one, largest difference first."""
        sides = ([(r.num_devices, getattr(r, s)) for r in self.rows] for s in ("predicted", "compiled"))
        total = max(sum(n * sum(sent.values()) for n, sent in side) for side in sides)
        found = [r for r in self.rows if r.difference_bytes > AT_LEAST * total]
        return sorted(found, key=lambda r: -r.difference_bytes)


def verify_programs(plan: Plan, model: Model, step: TracedStep, devices: Sequence[Any], *, runs: bool) -> ProgramsVerified:
    """Compiles the programs of a plan on `devices`, and (where it `runs`) compares its numbers.

    Raises: SoapjaxError where plan, step and devices do not go together.
    """
    numbers, reference = None, "the whole batch"
    if plan.pipeline is None:
        program = bind_plan(step, plan, devices=list(devices))
        placed = PlacedStep(program)
        inspected = inspect_stream(placed)
        rows = [_placed_row(plan, placed, part) for part in inspected.parts]
        sent = sum(p.bytes.get(TRANSFER, 0) for p in plan.prediction.sends)
        moved = sum(inspected.transfers.values())
        rows.append(ProgramRow("between programs", 1, len(inspected.transfers), {TRANSFER: sent}, {TRANSFER: moved}))
        memory = {"fullest device": (plan.prediction.memory_bytes_per_device, max(inspected.memory_bytes.values()))}
        if runs:
            numbers = verify(program, jax.tree_util.tree_leaves(model.arguments))
        return ProgramsVerified(numbers, reference, inspected, tuple(rows), memory, plan.num_devices)

    def made(is_float64: bool, donate: bool = False, of_micro: MicroGraph | None = None) -> Any:
        return planned_pipeline(
            model.step, *model.arguments, plan=plan, devices=devices, donate=donate,
            is_float64=is_float64, of_micro=of_micro,
        ).streamed  # fmt: skip

    streamed = made(False, donate=True)
    of_micro = MicroGraph(streamed.micro, *build_graph(streamed.micro.step))  # traced once for all of them
    inspected = inspect_stream(streamed)
    rows = [_stage_row(plan, part) for part in _together(inspected.parts)]
    names = dict.fromkeys([p.program for p in plan.prediction.sends if TRANSFER in p.bytes] + list(inspected.transfers))
    for name in names:
        compiled = {TRANSFER: inspected.transfers.get(name, 0)}
        rows.append(ProgramRow(name, 1, plan.pipeline.num_microbatches, _summed(plan.prediction.sends, name), compiled))
    memory = {}
    for i, places in enumerate(streamed.places):
        ids = [d.id for p in (places if isinstance(places, list) else [places]) for d in p.mesh.devices.flat]
        name = f"stage {i}"
        memory[name] = (plan.prediction.memory_parts_bytes[name], max(inspected.memory_bytes.get(d, 0) for d in ids))
    if runs and not isinstance(streamed, PipeDreamStep):
        rows_of_all = step.rows_of(jax.tree_util.tree_leaves(model.arguments))
        numbers, reference = verify_pipeline(functools.partial(made, of_micro=of_micro), rows_of_all, inspected.ops)
    return ProgramsVerified(numbers, reference, inspected, tuple(rows), memory, plan.num_devices)


def _together(parts: Sequence[InspectedPart]) -> list[InspectedPart]:
    """Replicas of a stage run one program each: one of them stands for all."""
    return list({p.name: p for p in reversed(parts)}.values())[::-1]


def _summed(sends: Sequence[SentPart], program: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in sends:
        if part.program == program:
            for kind, size in part.bytes.items():
                found[kind] = found.get(kind, 0) + size
    return found


def _compiled(part: InspectedPart) -> dict[str, int]:
    return {k: round(b) for k, b in part.bytes_by_collective.items() if b}


def _stage_row(plan: Plan, part: InspectedPart) -> ProgramRow:
    name = part.name.partition(" mixed")[0]
    predicted = _summed(plan.prediction.sends, name) if name == part.name else {}
    width = len(plan.pipeline.stages[part.place].devices)
    return ProgramRow(part.name, width, part.runs, predicted, _compiled(part))


def _placed_row(plan: Plan, placed: PlacedStep, part: InspectedPart) -> ProgramRow:
    """Predicted is what the tasks of the program's own equations send among its devices."""
    own = next(p for p in (*placed.parts, *placed.updates.updates) if p.name == part.name)
    task_of = placed.program.binding.task_of
    tasks = {task_of[k] for e in own.eqns for k in keys_of(e) if e.key in own.own and k in task_of}
    predicted: dict[str, int] = {}
    for sent in plan.prediction.sends:
        for kind, size in sent.bytes.items() if sent.task in tasks else ():
            if kind != TRANSFER:
                predicted[kind] = predicted.get(kind, 0) + size
    return ProgramRow(part.name, part.num_devices, part.runs, predicted, _compiled(part))
