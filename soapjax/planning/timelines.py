"""Simulated timelines as events on tracks, one per device and one per device and level of links (report/perfetto.py)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from soapjax.costs.evaluate import Costs
from soapjax.graph.passes.phases import PHASE_NAMES
from soapjax.report.perfetto import TraceEvent
from soapjax.simulate.pipeline_timeline import PipelineTimeline
from soapjax.simulate.schedule import BARRIER, COMPUTE, KIND_NAMES, RESHARD, RESOLVE, SUM
from soapjax.simulate.simulator import Simulator
from soapjax.strategy.configs import Strategy
from soapjax.topology import DeviceTopology


def pipeline_events(timeline: PipelineTimeline, topology: DeviceTopology) -> list[TraceEvent]:
    """A track per device, and per device and level of links."""
    events = []
    for t in timeline.tasks:
        link = "" if t.level < 0 else f" {topology.levels[t.level].name} link"
        events += [TraceEvent(t.name, f"device {d}{link}", t.start_s, t.duration_s) for d in sorted(set(t.devices))]
    return events


def spmd_events(simulator: Simulator, strategy: Strategy) -> list[TraceEvent]:
    """The timeline of a plan of one program (or of pinned operators): on every device that takes part."""
    schedule, topology = simulator.schedule, simulator.tables.topology
    costs, names = simulator.costs(strategy), TaskNames(simulator)
    takes_part = None if costs.holders is None else devices_taking_part(costs)
    events = []
    for entry in simulator.timeline(strategy).entries:
        kind, source, level = (int(x[entry.task]) for x in (schedule.kind, schedule.source, schedule.level))
        if kind == BARRIER:
            continue
        link = "" if level < 0 else f" {topology.levels[level].name} link"
        devices = range(topology.num_devices) if takes_part is None else takes_part(kind, source)
        name, duration_s = names[entry.task], entry.end_time - entry.start_time
        events += [TraceEvent(name, f"device {d}{link}", entry.start_time, duration_s) for d in devices]
    return events


def devices_taking_part(costs: Costs) -> Callable[[int, int], list[int]]:
    """(kind, source) -> devices that take part, where pins tell devices apart."""
    found = costs.holders
    by_kind = {COMPUTE: found.compute, SUM: found.sum, RESOLVE: found.resolve, RESHARD: found.reshard}

    def devices(kind: int, source: int) -> list[int]:
        return np.flatnonzero(np.asarray(by_kind[kind])[source]).tolist()

    return devices


class TaskNames:
    """What a person calls the scheduled tasks: `names[task]`."""

    def __init__(self, simulator: Simulator):
        self.schedule, self.tables, self.graph = simulator.schedule, simulator.tables, simulator.tables.graph
        self.made: dict[int, str] = {}  # tensor -> "what an operator made", or the argument's path
        for task in self.graph.tasks:
            for access in task.writes:
                self.made.setdefault(access.tensor, f"what {self.graph.operators[task.operator].name} made")

    def __getitem__(self, scheduled: int) -> str:
        kind, source = int(self.schedule.kind[scheduled]), int(self.schedule.source[scheduled])
        if kind == BARRIER:
            return KIND_NAMES[kind]
        if kind == COMPUTE:
            task = self.graph.tasks[source]
            if task.parameter >= 0:
                return f"update {self.graph.parameters[task.parameter].path}"
            return f"{self.graph.operators[task.operator].name} {PHASE_NAMES[task.phase]}"
        if kind == SUM:
            operator = self.graph.tasks[int(self.tables.sum_task[source])].operator
            return f"{KIND_NAMES[kind]} in {self.graph.operators[operator].name}"
        tensor = source if kind == RESOLVE else int(self.tables.edge_tensor[source])
        leaf = self.graph.tensors[tensor].input_leaf
        argument = self.graph.in_paths[leaf] if leaf >= 0 else "an argument"
        return f"{KIND_NAMES[kind]} {self.made.get(tensor, argument)}"
