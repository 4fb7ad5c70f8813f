"""Simulated steps as a reader sees them: what runs when, on which devices and links, by names; and what of it is critical."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from soapjax.graph.passes.phases import PHASE_NAMES
from soapjax.report.perfetto import TraceEvent
from soapjax.simulate.critical_tasks import PathStep, critical_path
from soapjax.simulate.event import Timeline
from soapjax.simulate.pipeline_timeline import PipelineTimeline
from soapjax.simulate.schedule import BARRIER, COMPUTE, KIND_NAMES, RESHARD, RESOLVE, SUM
from soapjax.simulate.simulator import Simulator, occupied_by
from soapjax.strategy.configs import Strategy
from soapjax.topology import DeviceTopology


class TimelineSpan(NamedTuple):
    """What runs in a simulated step."""

    task: int  # of the schedule, or of the pipeline's timeline
    name: str
    devices: tuple[int | None, ...]  # None: all devices do the same
    link: str  # that it occupies; "" where devices compute
    start_s: float
    duration_s: float

    @property
    def place(self) -> str:
        return self.link or "compute"


def pipeline_spans(timeline: PipelineTimeline, topology: DeviceTopology) -> list[TimelineSpan]:
    """Passes and transfers."""
    return [
        TimelineSpan(i, t.name, tuple(sorted(set(t.devices))), _link(topology, t.level), t.start_s, t.duration_s)
        for i, t in enumerate(timeline.tasks)
    ]


def program_spans(simulator: Simulator, strategy: Strategy, timeline: Timeline) -> list[TimelineSpan]:
    """Of a strategy of one program (or of pinned operators), by its timeline: on every device that takes part."""
    schedule, costs, names = simulator.schedule, simulator.costs(strategy), _TaskNames(simulator)
    holders = costs.holders
    by_kind = {} if holders is None else {
        COMPUTE: holders.compute, SUM: holders.sum, RESOLVE: holders.resolve, RESHARD: holders.reshard
    }  # fmt: skip
    found = []
    for task, start_s, end_s in timeline.entries:
        kind, source, level = (int(x[task]) for x in (schedule.kind, schedule.source, schedule.level))
        if kind != BARRIER:
            devices = tuple(np.flatnonzero(np.asarray(by_kind[kind])[source]).tolist()) if by_kind else (None,)
            link = _link(simulator.tables.topology, level)
            found.append(TimelineSpan(task, names[task], devices, link, start_s, end_s - start_s))
    return found


def _link(topology: DeviceTopology, level: int) -> str:
    return "" if level < 0 else f"{topology.levels[level].name} link"


def trace_of(spans: Iterable[TimelineSpan], topology: DeviceTopology) -> list[TraceEvent]:
    """Events on a track per device, and per device and level of links."""
    events = []
    for s in spans:
        for d in range(topology.num_devices) if s.devices == (None,) else s.devices:
            events.append(TraceEvent(s.name, f"device {d} {s.link}".rstrip(), s.start_s, s.duration_s))
    return events


def program_path(simulator: Simulator, strategy: Strategy) -> list[PathStep]:
    """The critical path of a strategy, in tasks of the schedule."""
    schedule, costs = simulator.schedule, simulator.costs(strategy)
    return critical_path(schedule, schedule.durations(costs.durations), occupied_by(schedule, costs))


class _TaskNames:
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
