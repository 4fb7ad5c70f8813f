"""Writes a timeline as a trace for https://ui.perfetto.dev (or chrome://tracing): one track per device and link.

The format is the JSON array of complete events ("ph": "X") of the Trace Event Format; times are microseconds. The same
function serves simulated timelines and those of real runs.

>>> write_trace("trace.json", [TraceEvent("forward 0: stage 0", "device 0", 0.0, 1.5e-3)], title="simulated")
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from soapjax.errors import Problem, SoapjaxError
from soapjax.helpers.files import write_text_atomic


class TraceEvent(NamedTuple):
    """Something that ran on a track; seconds from the start of the step."""

    name: str
    track: str
    start_s: float
    duration_s: float


def write_trace(path: str | os.PathLike[str], events: Iterable[TraceEvent], *, title: str = "soapjax") -> None:
    """Writes `events` as a trace file, atomically.

    Raises: SoapjaxError for times that are not finite or negative, and where the file cannot be written.
    """
    write_text_atomic(path, json.dumps(trace_events(list(events), title=title), separators=(",", ":"), allow_nan=False) + "\n")


def trace_events(events: Sequence[TraceEvent], *, title: str = "soapjax") -> dict[str, Any]:
    """The JSON object of a trace: tracks in natural order ("device 2" before "device 10"), events by start."""
    wrong = [e for e in events if not all(math.isfinite(s) and s >= 0 for s in (e.start_s, e.duration_s))]
    if wrong:
        expected, remedy = "finite seconds, zero or more", "correct it"
        raise SoapjaxError(
            Problem(f"event {e.name!r}", f"start {e.start_s}, duration {e.duration_s}", expected, remedy) for e in wrong[:5]
        )
    tracks = {name: i + 1 for i, name in enumerate(sorted({e.track for e in events}, key=_natural))}
    meta: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": title}}]
    for name, tid in tracks.items():
        meta.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": tid, "args": {"name": name}})
        meta.append({"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": tid, "args": {"sort_index": tid}})
    spans = [
        {"name": e.name, "ph": "X", "pid": 1, "tid": tracks[e.track], "ts": e.start_s * 1e6, "dur": e.duration_s * 1e6}
        for e in sorted(events, key=lambda e: (e.start_s, tracks[e.track]))
    ]
    return {"traceEvents": [*meta, *spans], "displayTimeUnit": "ms"}


def _natural(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]
