"""What a plan's page shows beside the plan file: timeline, memory over the step, who reads whom, the critical path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from soapjax.costs.memory.memory_over_time import memory_curve
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.phases import BACKWARD, FORWARD, PHASE_NAMES, UPDATE
from soapjax.planning.timelines import TimelineSpan, pipeline_spans, program_path, program_spans
from soapjax.report.html import Extras, MemoryOverStep, TimelineView
from soapjax.simulate.critical_tasks import PathStep, pipeline_path
from soapjax.simulate.pipeline_timeline import PipelineTimeline
from soapjax.simulate.schedule import COMPUTE, RESHARD, RESOLVE, SUM
from soapjax.simulate.simulator import Simulator
from soapjax.strategy.configs import Strategy
from soapjax.topology import DeviceTopology

UNITS = 10_000_000  # of a step: how finely times are written
KINDS = {RESHARD: 3, RESOLVE: 4, SUM: 5}  # of spans, as page.js names them; 0 to 2 are the phases
TRANSFER = 6  # likewise, from one stage to another
MOST_TRACKS = 64


def extras_of(simulator: Simulator, strategy: Strategy) -> Extras:
    """Of a plan of one program, or of placed operators."""
    schedule, tables, costs = simulator.schedule, simulator.tables, simulator.costs(strategy)
    timeline = simulator.timeline(strategy)
    spans = program_spans(simulator, strategy, timeline)
    start_of_task = np.zeros(tables.num_tasks)
    kinds = []
    for s in spans:
        kind, source = int(schedule.kind[s.task]), int(schedule.source[s.task])
        if kind == COMPUTE:
            start_of_task[source] = s.start_s
        kinds.append(KINDS[kind] if kind != COMPUTE else tables.graph.tasks[source].phase)
    every = tables.topology.num_devices
    note = f"All {every} devices do the same: one stands for all." if costs.holders is None else f"{every} devices."
    view, where = _timeline(spans, kinds, program_path(simulator, strategy), timeline.makespan_s, note)
    return Extras(view, _memory(simulator, costs, start_of_task), edges_of(tables.graph), where)


def pipeline_extras(timeline: PipelineTimeline, topology: DeviceTopology, graph: OperatorGraph) -> Extras:
    """Of a pipeline: passes and transfers. What a stage's memory holds when is not simulated, its peak is in the plan."""
    spans = pipeline_spans(timeline, topology)
    phases = {"forward": FORWARD, "recompute": FORWARD, "backward": BACKWARD, "weights": BACKWARD}
    kinds = [TRANSFER if s.link else phases.get(s.name.split()[0], UPDATE) for s in spans]
    note = f"{topology.num_devices} devices; a pass's own collectives are in its time."
    view, where = _timeline(spans, kinds, pipeline_path(timeline.tasks), timeline.makespan_s, note)
    return Extras(view, None, edges_of(graph), where)


def _timeline(
    spans: Sequence[TimelineSpan], kinds: Sequence[int], path: Sequence[PathStep], makespan_s: float, note: str
) -> tuple[TimelineView, tuple[tuple[str, float], ...]]:  # fmt: skip
    """Spans as tracks, where equal devices are one; and the seconds of the critical path by place, most first."""
    on_path = {step.task for step in path}
    where: dict[str, float] = {}
    by_device: dict[int | None, list[tuple]] = {}
    for s, kind in zip(spans, kinds, strict=True):
        if s.task in on_path:
            where[s.place] = where.get(s.place, 0.0) + s.duration_s
        for device in s.devices:
            by_device.setdefault(device, []).append((s.link, s.start_s, s.duration_s, s.name, kind, s.task in on_path))
    alike: dict[tuple, list[int | None]] = {}
    for device in sorted(by_device, key=lambda d: -1 if d is None else d):
        alike.setdefault(tuple(by_device[device]), []).append(device)
    unit_s = makespan_s / UNITS if makespan_s else 1.0
    names: dict[str, int] = {}
    tracks: list[str] = []
    shown_spans: list[tuple[int, int, int, int, int, int]] = []
    shown = 0
    for mine, devices in alike.items():
        links = sorted({row[0] for row in mine})
        if len(tracks) + len(links) > MOST_TRACKS:
            break
        shown += len(devices)
        title = "every device" if devices == [None] else f"device {_ranges(devices)}"
        track_of = {link: len(tracks) + i for i, link in enumerate(links)}
        tracks += [f"{title} {link or 'computes'}" for link in links]
        for link, start_s, took_s, name, kind, critical in mine:
            at = (round(start_s / unit_s), max(round(took_s / unit_s), 1))
            shown_spans.append((track_of[link], *at, names.setdefault(name, len(names)), kind, int(critical)))
    if shown < len(by_device):
        note += f" The first {shown} are shown."
    view = TimelineView(makespan_s, unit_s, tuple(tracks), tuple(names), tuple(shown_spans), note)
    return view, tuple(sorted(where.items(), key=lambda x: -x[1]))


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
