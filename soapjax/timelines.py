"""Simulated timelines as events on tracks, one per device and one per device and level of links (report/perfetto.py)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from soapjax.costs.evaluate import Costs
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.phases import PHASE_NAMES
from soapjax.report.perfetto import Event
from soapjax.simulate.pipeline import PipelineTimeline
from soapjax.simulate.schedule import BARRIER, COMPUTE, CONVERT, KIND_NAMES, RESOLVE, SUM
from soapjax.simulate.simulator import Simulator
from soapjax.strategy.strategy import Strategy
from soapjax.topology import DeviceTopology


def pipeline_events(timeline: PipelineTimeline, topology: DeviceTopology) -> list[Event]:
    """A track per device, and per device and level of links."""
    events = []
    for t in timeline.tasks:
        link = "" if t.level < 0 else f" {topology.levels[t.level].name} link"
        events += [Event(t.name, f"device {d}{link}", t.start_s, t.duration_s) for d in sorted(set(t.devices))]
    return events


def spmd_events(simulator: Simulator, strategy: Strategy) -> list[Event]:
    """The timeline of a plan of one program (or of pinned operators): on every device that takes part."""
    schedule, graph, topology = simulator.schedule, simulator.tables.graph, simulator.tables.topology
    costs = simulator.costs(strategy)
    takes_part = None if costs.holders is None else _holders(costs)
    events = []
    for entry in simulator.timeline(strategy).entries:
        kind, source, level = (int(x[entry.task]) for x in (schedule.kind, schedule.source, schedule.level))
        if kind == BARRIER:
            continue
        name = _task_name(graph, simulator, kind, source)
        link = "" if level < 0 else f" {topology.levels[level].name} link"
        devices = range(topology.num_devices) if takes_part is None else takes_part(kind, source)
        events += [Event(name, f"device {d}{link}", entry.start_time, entry.end_time - entry.start_time) for d in devices]
    return events


def _holders(costs: Costs) -> Callable[[int, int], list[int]]:
    """(kind, source) -> devices that take part, where pins tell devices apart."""
    found = costs.holders
    by_kind = {COMPUTE: found.compute, SUM: found.sum, RESOLVE: found.resolve, CONVERT: found.convert}

    def devices(kind: int, source: int) -> list[int]:
        return np.flatnonzero(np.asarray(by_kind[kind])[source]).tolist()

    return devices


def _task_name(graph: OperatorGraph, simulator: Simulator, kind: int, source: int) -> str:
    tables = simulator.tables
    if kind == COMPUTE:
        task = graph.tasks[source]
        if task.parameter >= 0:
            return f"update {graph.parameters[task.parameter].path}"
        return f"{graph.operators[task.operator].name} {PHASE_NAMES[task.phase]}"
    if kind == SUM:
        return f"{KIND_NAMES[kind]} in {graph.operators[graph.tasks[int(tables.sum_task[source])].operator].name}"
    tensor = source if kind == RESOLVE else int(tables.edge_tensor[source])
    maker = next((graph.operators[t.operator].name for t in graph.tasks for a in t.writes if a.tensor == tensor), "an argument")
    return f"{KIND_NAMES[kind]} what {maker} made"
