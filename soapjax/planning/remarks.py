"""What a reader of a plan should know of a step, beside the figures: how its structure limits any plan, and what this plan repeats.

    34 % of the FLOPs are done alike on several devices: head (no degree divides out=3, _in=5), sample (no dim to split), ...
"""

from __future__ import annotations

import math

import numpy as np

from soapjax.costs.split_share import share_of, split_flops
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.trace.tracing import TracedStep
from soapjax.search.problem import PlanningProblem
from soapjax.strategy.configs import REPLICATE, Strategy

WELL_SPLIT = 0.95  # of the FLOPs: what a plan repeats of the rest is not worth a remark
SHOWN = 4  # operators


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
