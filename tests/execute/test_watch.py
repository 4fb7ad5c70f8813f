"""A rank that dies or hangs ends the others, by name. The clock and the store are made up, but for one real job."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.agreement import LEFT
from soapjax.execute.watch import Watch

ROOT = Path(__file__).resolve().parents[2]


class Clock:
    def __init__(self):
        self.time_s = 0.0

    def __call__(self):
        return self.time_s


class SharedStore:
    """One rank's view of a dict that all share."""

    def __init__(self, data, rank, num_ranks):
        self.data, self.rank, self.num_ranks, self.is_up = data, rank, num_ranks, True

    def put(self, key, data):
        self._require()
        self.data[key] = data

    def items(self, folder):
        self._require()
        return {k.removeprefix(folder + "/"): v for k, v in self.data.items() if k.startswith(folder + "/")}

    def _require(self):
        if not self.is_up:
            raise SoapjaxError(Problem("the coordination service", "gone", "an answer", "none"))


def job(num_ranks, timeout_s=10.0):
    clock, data = Clock(), {}
    stores = [SharedStore(data, r, num_ranks) for r in range(num_ranks)]
    return clock, stores, [Watch(s, timeout_s, clock) for s in stores]


def live(clock, watches, seconds):
    """What each of `watches` says first; they look once per second."""
    said = [None] * len(watches)
    for _ in range(seconds):
        clock.time_s += 1
        for k, w in enumerate(watches):
            said[k] = said[k] or w.look()
    return said


def test_who_is_silent_is_named_by_all_alike():
    clock, _, watches = job(4)
    assert live(clock, watches, 30) == [None] * 4
    assert live(clock, watches[:2] + watches[3:], 9) == [None] * 3
    said = live(clock, watches[:2] + watches[3:], 3)
    assert len(set(said)) == 1 and "rank 2 silent for 10 s" in str(said[0])


def test_who_never_came_is_silent_too():
    clock, _, watches = job(3)
    said = live(clock, watches[:1], 12)
    assert "ranks 1, 2 silent" in str(said[0])


def test_who_has_ended_with_an_error_is_named_at_once():
    clock, stores, watches = job(3)
    assert live(clock, watches, 2) == [None] * 3
    stores[1].put(f"{LEFT}/1", b"2")
    for said in live(clock, [watches[0], watches[2]], 1):
        assert "rank 1 has ended with status 2" in str(said)


def test_who_is_done_is_not_missed():
    clock, stores, watches = job(3)
    live(clock, watches, 2)
    stores[1].put(f"{LEFT}/1", b"0")
    assert live(clock, [watches[0], watches[2]], 50) == [None] * 2


def test_a_store_that_is_gone_is_rank_0():
    clock, stores, watches = job(2)
    live(clock, watches, 2)
    stores[1].is_up = False
    (said,) = live(clock, watches[1:], 4)
    assert said is None
    (said,) = live(clock, watches[1:], 3)
    assert "rank 0" in str(said)


@pytest.mark.parametrize(
    "way, why",
    [
        ("SIGKILL", "rank 1 silent for 3 s"),
        pytest.param("SIGSTOP", "rank 1 silent for 3 s", marks=pytest.mark.slow),
        pytest.param("raises", "rank 1 has ended with status 1", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_in_a_step_ends_the_others(free_port, way, why):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS" and "PROXY" not in k.upper()} | {
        "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port}", "JAX_NUM_PROCESSES": "2",
    }  # fmt: skip
    command = [sys.executable, ROOT / "tests" / "execute" / "dying_worker.py", "1", way, "3"]
    options = dict(cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = [subprocess.Popen(command, env=environment | {"JAX_PROCESS_ID": str(r)}, **options) for r in range(2)]
    try:
        if way != "SIGSTOP":
            processes[1].wait(timeout=200)
        begin = time.monotonic()
        out, err = processes[0].communicate(timeout=200)
        took_s = time.monotonic() - begin
    finally:
        for p in processes:
            p.kill()
            p.communicate()
    assert processes[0].returncode == 2 and f"error: the job: got {why}" in err and "finished" not in out, err[-2000:]
    assert way == "SIGSTOP" or took_s < 30  # the time-out, and the moments that ending takes
