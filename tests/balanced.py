"""Pipelines of stages with equal work, cut by hand: what the executor's tests run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.phases import FORWARD, UPDATE
from soapjax.search.experts.placement import balanced_runs
from soapjax.strategy.pipeline import Pipeline, ScheduleName, Stage


def balanced_pipeline(
    graph: OperatorGraph, num_devices: int, *, schedule: ScheduleName = "1f1b", num_microbatches: int, num_stages: int,
    chunks: int = 1, rematerialise: bool | None = None,
) -> Pipeline:  # fmt: skip
    """Runs of operators in program order, balanced by FLOPs, each on an equal share of the devices.

    Args:
      chunks: stages per share of the devices (interleaved).
      rematerialise: keep only the stages' inputs; by default for gpipe alone.
    """
    flops = np.zeros(graph.num_operators)
    for task in graph.tasks:
        flops[task.operator] += sum(w.flops for w in task.work) * task.trip_count
    stages = forward_runs(graph, flops + 1e-9 * max(flops.sum(), 1.0), num_stages * chunks)
    width = num_devices // num_stages
    again = schedule == "gpipe" if rematerialise is None else rematerialise
    return Pipeline(
        schedule=schedule,
        num_microbatches=num_microbatches,
        stages=tuple(
            Stage(operators=names, devices=tuple(range(g * width, (g + 1) * width)), rematerialise=again)
            for g, names in ((i % num_stages, names) for i, names in enumerate(stages))
        ),
    )


def forward_runs(graph: OperatorGraph, seconds: Sequence[float], num_stages: int) -> list[tuple[str, ...]]:
    """Operator names of each stage: balanced runs of forward operators; those without a forward task go where they read."""
    phases = [{graph.tasks[t].phase for t in op.tasks} for op in graph.operators]
    forward = [n for n, p in enumerate(phases) if FORWARD in p]
    runs = balanced_runs([float(seconds[n]) for n in forward], num_stages)
    stage = dict(zip(forward, _all_used(runs, num_stages), strict=True))
    made = {a.tensor: t.operator for t in graph.tasks for a in t.writes}
    for task in graph.tasks:  # of the backward pass alone: the earliest stage that it reads from
        if task.operator not in stage and task.phase != UPDATE:
            stage[task.operator] = min((stage[made[a.tensor]] for a in task.reads if made.get(a.tensor) in stage), default=0)
    names: list[list[str]] = [[] for _ in range(num_stages)]
    for n in sorted(stage):
        names[stage[n]].append(graph.operators[n].name)
    return [tuple(x) for x in names]


def _all_used(runs: Sequence[int], parts: int) -> list[int]:
    """Runs as numbers 0 ... parts - 1, the longest ones halved until there are that many."""
    starts = [k for k in range(len(runs)) if k == 0 or runs[k] != runs[k - 1]]
    while len(starts) < parts:
        ends = [*starts[1:], len(runs)]
        k = max(range(len(starts)), key=lambda i: ends[i] - starts[i])
        starts.insert(k + 1, (starts[k] + ends[k]) // 2)
    return [int(np.searchsorted(starts, k, side="right")) - 1 for k in range(len(runs))]
