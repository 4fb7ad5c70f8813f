"""What a reader of a plan should know of a step, beside the figures: how its structure limits any plan, what this plan repeats,
and what starting its programs takes.

    34 % of the FLOPs are done alike on several devices: head (no degree divides out=3, _in=5), sample (no dim to split), ...
"""

from __future__ import annotations

import math

import numpy as np

from soapjax.costs.split_share import share_of, split_flops
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.phases import UPDATE
from soapjax.graph.trace.tracing import TracedStep
from soapjax.search.problem import PlanningProblem
from soapjax.strategy.configs import FIRST_PIN, REPLICATE, Strategy

WELL_SPLIT = 0.95  # of the FLOPs: what a plan repeats of the rest is not worth a remark
SHOWN = 4  # operators
# To start one program, with the transfers before it: of a pipeline's some 30 us on two cores at 3 GHz (bench_pipeline_dispatch.py).
DISPATCH_S = 50e-6
HARDLY = 0.2  # of a step


def structure_remarks(step: TracedStep, graph: OperatorGraph) -> tuple[str, ...]:
    """What holds for every plan of the step."""
    remarks = []
    if not graph.parameters and step.state_pairs and any("transpose(" in eqn.stack for eqn in step.program.leaves):
        what = "no argument is updated by a gradient and returned, as far as the step shows"
        remarks.append(f"{what}: nothing is stored sharded, and no gradient is compared by verify")
    if graph.is_single_phase and graph.parameters:
        why = "a gradient depends on another gradient, or on an update"
        remarks.append(f"{why}: forward, backward and update run as one phase, in program order")
    if whole := [op.name for op in graph.operators if op.kind == "unknown" or (op.kind in ("loop", "linalg") and not op.dims)]:
        what = "no dim of a while, a cond, a decomposition of one matrix or an unknown primitive is kept apart"
        remarks.append(f"{what}: every device does all of {_some(whole)}")
    return tuple(remarks)


def repeated_remarks(problem: PlanningProblem, strategy: Strategy) -> tuple[str, ...]:
    """Which operators a strategy does several times over, most FLOPs first, and why; nothing where it splits nearly all."""
    simulator = problem.simulator
    flops, split = split_flops(simulator.tables, strategy.axes, simulator.tables.stored(simulator.costs(strategy).layouts.slots))
    share, repeated = share_of(flops, split), flops - split
    if share >= WELL_SPLIT:
        return ()
    most = [int(n) for n in np.argsort(-repeated, kind="stable") if repeated[n] > 0]
    named = [f"{problem.graph.operators[n].name} ({_reason(problem, strategy, n)})" for n in most]
    return (f"{100 * (1 - share):.3g} % of the FLOPs are done alike on several devices: {_some(named)}",)


def dispatch_remarks(problem: PlanningProblem, strategy: Strategy, step_time_s: float) -> tuple[str, ...]:
    """What the host takes to start a pinned plan's programs, which no cost counts; nothing where that hardly matters."""
    count = num_programs(problem.graph, strategy)
    if count * DISPATCH_S < HARDLY * step_time_s:
        return ()
    takes = f"to start them takes a host that has all devices some {count * DISPATCH_S * 1e3:.2g} ms"
    beside = f"beside {step_time_s * 1e3:.3g} ms of a step it may be slower than predicted"
    return (f"pins make {count} programs a step: {takes}, which no prediction counts; {beside}",)


def num_programs(graph: OperatorGraph, strategy: Strategy) -> int:
    """Runs of forward and backward tasks on one part of the devices, which the placement executor makes programs of; 0 without
    pins."""
    places = np.where(strategy.axes <= FIRST_PIN, strategy.axes, REPLICATE)
    if (places == REPLICATE).all():
        return 0
    rows = places[[t.operator for t in graph.tasks if t.phase != UPDATE]]
    return 1 + int((rows[1:] != rows[:-1]).any(axis=1).sum())


def _reason(problem: PlanningProblem, strategy: Strategy, n: int) -> str:
    """Why operator `n` is not split over all devices, as far as its dims say."""
    op, space = problem.graph.operators[n], problem.space
    degree = math.prod(s for v, s in zip(strategy.axes[n], space.mesh.axis_sizes, strict=True) if v != REPLICATE)
    if op.fixed is not None:
        return "the step's own layout"
    if degree > 1:
        return f"split {degree} ways, where its work has that dim"
    if op.kind == "loop":
        return "a while or cond: a dim that its body contracts or cuts is in one piece"
    if not space.allowed[n, :, 1:].any():
        sizes = ", ".join(f"{d.name}={d.size}" for d in op.dims)
        return f"no degree divides {sizes}" if sizes else "no dim to split"
    if any(d.kind == "S" for d in op.dims):
        return "whole"
    names = ", ".join(d.name for k, d in enumerate(op.dims) if space.allowed[n, :, k + 1].any())
    return f"whole: none of the dims that may be split, {names}, comes from the batch"


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f", ... ({len(names)} in all)" if len(names) > SHOWN else "")
