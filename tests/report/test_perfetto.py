"""The trace file: what Perfetto reads in it is what was given."""

import json

import pytest

from soapjax.errors import SoapjaxError
from soapjax.report.perfetto import TraceEvent, write_trace

EVENTS = [
    TraceEvent("backward", "device 10", 2e-3, 1e-3),
    TraceEvent("forward", "device 2", 0.0, 1.5e-3),
    TraceEvent("send", "device 2 host link", 1.5e-3, 5e-4),
]


def test_a_trace_holds_every_event_on_its_track(tmp_path):
    path = tmp_path / "trace.json"
    write_trace(path, EVENTS, title="simulated")
    found = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert list(dict(sorted(names.items())).values()) == ["device 2", "device 2 host link", "device 10"]
    spans = [TraceEvent(e["name"], names[e["tid"]], e["ts"] / 1e6, e["dur"] / 1e6) for e in found if e["ph"] == "X"]
    assert [s[:2] for s in sorted(spans)] == [e[:2] for e in sorted(EVENTS)]
    assert [s[2:] for s in sorted(spans)] == [pytest.approx(e[2:]) for e in sorted(EVENTS)]
    assert [e["ts"] for e in found if e["ph"] == "X"] == sorted(e["ts"] for e in found if e["ph"] == "X")


@pytest.mark.parametrize("start, duration", [(float("nan"), 1), (0, -1), (-1, 1), (0, float("inf"))])
def test_times_that_no_clock_shows_are_refused(tmp_path, start, duration):
    path = tmp_path / "trace.json"
    path.write_text("before")
    with pytest.raises(SoapjaxError, match="'late'"):
        write_trace(path, [TraceEvent("late", "device 0", start, duration)])
    assert path.read_text() == "before"


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(SoapjaxError):
        write_trace(tmp_path / "missing" / "trace.json", EVENTS)
