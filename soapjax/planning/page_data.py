"""What a plan's page shows beside the plan file: timeline, memory over the step, who reads whom, the critical path."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from soapjax.costs.memory.memory_over_time import memory_curve
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.phases import BACKWARD, FORWARD, PHASE_NAMES, UPDATE
from soapjax.planning.timelines import TaskNames, devices_taking_part
from soapjax.report.html import Extras, MemoryOverStep, TimelineView
from soapjax.simulate.critical_tasks import critical_path, pipeline_path
from soapjax.simulate.event import simulate
from soapjax.simulate.pipeline_timeline import PipelineTimeline
from soapjax.simulate.schedule import BARRIER, COMPUTE, RESHARD, RESOLVE, SUM
from soapjax.simulate.simulator import Simulator, occupied_by
from soapjax.strategy.configs import Strategy
from soapjax.topology import DeviceTopology

UNITS = 10_000_000  # of a step: how finely times are written
KINDS = {RESHARD: 3, RESOLVE: 4, SUM: 5}  # of spans, as page.js names them; 0 to 2 are the phases
TRANSFER = 6  # likewise, from one stage to another
MOST_TRACKS = 64


def extras_of(simulator: Simulator, strategy: Strategy) -> Extras:
    """Of a plan of one program, or of placed operators."""
    schedule, tables, names = simulator.schedule, simulator.tables, TaskNames(simulator)
    topology, costs = tables.topology, simulator.costs(strategy)
    durations, occupies = schedule.durations(costs.durations), occupied_by(schedule, costs)
    timeline = simulate(schedule, durations, occupies)
    path = critical_path(schedule, durations, occupies)
    on_path = {step.task for step in path}
    takes_part = None if costs.holders is None else devices_taking_part(costs)
    rows: list[tuple] = []
    where: dict[str, float] = {}
    start_of_task = np.zeros(tables.num_tasks)
    for task, start_s, end_s in timeline.entries:
        kind, source, level = (int(x[task]) for x in (schedule.kind, schedule.source, schedule.level))
        if kind == BARRIER:
            continue
        if kind == COMPUTE:
            start_of_task[source] = start_s
        link = "" if level < 0 else f" {topology.levels[level].name} link"
        if task in on_path:
            place = link.strip() or "compute"
            where[place] = where.get(place, 0.0) + (end_s - start_s)
        devices = (None,) if takes_part is None else takes_part(kind, source)
        span = KINDS[kind] if kind != COMPUTE else tables.graph.tasks[source].phase
        rows += [(d, link, start_s, end_s - start_s, names[task], span, task in on_path) for d in devices]
    every = topology.num_devices
    note = f"All {every} devices do the same: one stands for all." if takes_part is None else f"{every} devices."
    return Extras(
        _timeline(rows, timeline.makespan_s, note), _memory(simulator, costs, start_of_task), edges_of(tables.graph),
        tuple(sorted(where.items(), key=lambda x: -x[1])),
    )  # fmt: skip


def pipeline_extras(timeline: PipelineTimeline, topology: DeviceTopology, graph: OperatorGraph) -> Extras:
    """Of a pipeline: passes and transfers. What a stage's memory holds when is not simulated, its peak is in the plan."""
    on_path = {step.task for step in pipeline_path(timeline.tasks)}
    rows: list[tuple] = []
    where: dict[str, float] = {}
    for t, task in enumerate(timeline.tasks):
        link = "" if task.level < 0 else f" {topology.levels[task.level].name} link"
        if t in on_path:
            place = link.strip() or "compute"
            where[place] = where.get(place, 0.0) + task.duration_s
        kinds = {"forward": FORWARD, "recompute": FORWARD, "backward": BACKWARD, "weights": BACKWARD}
        kind = TRANSFER if link else kinds.get(task.name.split()[0], UPDATE)
        rows += [(d, link, task.start_s, task.duration_s, task.name, kind, t in on_path) for d in sorted(set(task.devices))]
    note = f"{topology.num_devices} devices; a pass's own collectives are in its time."
    path = tuple(sorted(where.items(), key=lambda x: -x[1]))
    return Extras(_timeline(rows, timeline.makespan_s, note), None, edges_of(graph), path)


def _timeline(rows: list[tuple], makespan_s: float, note: str) -> TimelineView:
    """Rows of (device or None, link, start, duration, name, kind, on the critical path) as tracks; equal devices are one."""
    by_device: dict[int | None, list[tuple]] = {}
    for device, *row in rows:
        by_device.setdefault(device, []).append(tuple(row))
    alike: dict[tuple, list[int | None]] = {}
    for device in sorted(by_device, key=lambda d: -1 if d is None else d):
        alike.setdefault(tuple(by_device[device]), []).append(device)
    unit_s = makespan_s / UNITS if makespan_s else 1.0
    names: dict[str, int] = {}
    tracks: list[str] = []
    spans: list[tuple[int, int, int, int, int, int]] = []
    shown = 0
    for mine, devices in alike.items():
        links = sorted({row[0] for row in mine})
        if len(tracks) + len(links) > MOST_TRACKS:
            break
        shown += len(devices)
        title = "every device" if devices == [None] else f"device {_ranges(devices)}"
        track_of = {link: len(tracks) + i for i, link in enumerate(links)}
        tracks += [f"{title}{link or ' computes'}" for link in links]
        for link, start_s, took_s, name, kind, critical in mine:
            at = (round(start_s / unit_s), max(round(took_s / unit_s), 1))
            spans.append((track_of[link], *at, names.setdefault(name, len(names)), kind, int(critical)))
    if shown < len(by_device):
        note += f" The first {shown} are shown."
    return TimelineView(makespan_s, unit_s, tuple(tracks), tuple(names), tuple(spans), note)


def _ranges(devices: Iterable[int]) -> str:
    """ "0-3, 6" for 0, 1, 2, 3, 6."""
    out: list[list[int]] = []
    for d in devices:
        if out and d == out[-1][-1] + 1:
            out[-1] = [out[-1][0], d]
        else:
            out.append([d, d])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def _memory(simulator: Simulator, costs, start_of_task: np.ndarray) -> MemoryOverStep | None:
    """On the devices that hold most at the peak."""
    tables = simulator.tables
    curve = memory_curve(tables, costs)
    if not curve.total.size:
        return None
    g = int(np.argmax(curve.total.max(1)))
    title = "every device" if len(curve.total) == 1 else f"device {g}"
    starts = np.maximum.accumulate(start_of_task)  # a task that takes no time begins with the one before
    graph = tables.graph
    names: dict[str, int] = {}
    titles = [f"{graph.operators[t.operator].name} {PHASE_NAMES[t.phase]}" for t in graph.tasks]
    of_task = [names.setdefault(title, len(names)) for title in titles]
    return MemoryOverStep(
        title=title, times_s=tuple(float(f"{s:.5g}") for s in starts), persistent=int(curve.persistent[g]),
        alive=tuple(curve.alive[g].astype(int).tolist()), transient=tuple(curve.transient[g].astype(int).tolist()),
        names=tuple(names), name=tuple(of_task), usable_bytes=tables.usable_memory_bytes,
    )  # fmt: skip


def edges_of(graph: OperatorGraph) -> tuple[tuple[int, int], ...]:
    """Pairs of operators in the forward pass: the second reads what the first makes."""
    maker: dict[int, int] = {}
    found: set[tuple[int, int]] = set()
    for task in graph.tasks:
        if task.phase == FORWARD:
            found |= {(maker[a.tensor], task.operator) for a in task.reads if a.tensor in maker}
            maker.update((a.tensor, task.operator) for a in task.writes)
    return tuple(sorted((a, b) for a, b in found if a != b))
