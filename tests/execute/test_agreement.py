"""Ranks agree or all end with what differs; here ranks are threads over one store, and the real store is tried once."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.processes.agreement import agree, differences, made_by_first
from soapjax.execute.processes.coordination import Job, job_of_environment


class SharedStore:
    """The store of one job, in memory; one view per rank."""

    def __init__(self, rank, num_ranks, data, lock):
        self.rank, self.num_ranks, self._data, self._lock = rank, num_ranks, data, lock

    def put(self, key, value):
        with self._lock:
            self._data[key] = value

    def items(self, folder):
        with self._lock:
            return {k.removeprefix(folder + "/"): v for k, v in self._data.items() if k.startswith(folder + "/")}


def stores(count):
    data, lock = {}, threading.Lock()
    return [SharedStore(r, count, data, lock) for r in range(count)]


def on_all(views, run):
    """What `run(store)` gave or raised on each rank."""

    def guarded(view):
        try:
            return run(view)
        except SoapjaxError as e:
            return e

    with ThreadPoolExecutor(len(views)) as pool:
        return list(pool.map(guarded, views))


def test_equal_records_are_a_barrier():
    views, arrived = stores(4), []

    def run(view):
        time.sleep(0.05 * view.rank)
        arrived.append(view.rank)
        agree(view, "x", {"plan": "a"}, timeout_s=10)
        return len(arrived)

    assert on_all(views, run) == [4] * 4


def test_a_difference_is_named_on_all_ranks_down_to_the_entry():
    def run(view):
        odd = view.rank == 2
        agree(
            view, "step#1/plan", {"plan": "b" * 64 if odd else "a" * 64, "versions.jax": "0.10.2"}, timeout_s=10,
            details=lambda: {"operators": {"dense": {"axes": {"d0": "param0" if odd else "sample"}}}},
        )  # fmt: skip

    for error in on_all(stores(4), run):
        assert isinstance(error, SoapjaxError)
        first, second = error.problems
        assert first.place == "step#1/plan: plan"
        assert first.value == f"{'a' * 12} on rank 0, 1, 3; {'b' * 12} on rank 2"
        assert second.place == "step#1/plan: operators.dense.axes.d0"
        assert "sample" in second.value and "param0" in second.value and "rank 2" in second.value


def test_only_what_differs_is_named():
    found = differences("x", [{"a": "1", "b": "2"}, {"a": "1"}, {"a": "1", "b": "3"}])
    assert [p.place for p in found] == ["x: b"]
    assert found[0].value == "'2' on rank 0; 'nothing' on rank 1; '3' on rank 2"


def test_a_rank_that_never_comes_is_named_by_all_that_did():
    views = stores(3)
    for error in on_all([views[0], views[2]], lambda v: agree(v, "x", {}, timeout_s=0.3)):
        assert "rank 1 missing after 0.3 s" in str(error)
    assert "rank 1 missing" in str(on_all([views[1]], lambda v: agree(v, "x", {}, timeout_s=0.3))[0])  # and by itself, later


def test_nobody_waits_for_a_rank_that_has_left():
    views = stores(3)
    views[1].put("soapjax/left/1", b"2")
    start = time.monotonic()
    for error in on_all([views[0], views[2]], lambda v: agree(v, "x", {}, timeout_s=60)):
        assert "rank 1 has ended" in str(error)
    assert time.monotonic() - start < 10


def test_a_rank_that_left_after_the_barrier_does_no_harm():
    views = stores(2)
    views[1].put("soapjax/agree/x/1", json.dumps({}).encode())
    views[1].put("soapjax/left/1", b"0")
    agree(views[0], "x", {}, timeout_s=1)


def test_who_comes_and_leaves_between_two_looks_has_come():
    first, second = stores(2)
    look, looks = second.items, []

    def between(folder):
        looks.append(folder)
        found = look(folder)
        if len(looks) == 1:  # rank 0 makes its record, and ends, right after the other's first look
            first.put("soapjax/agree/x/0", b'{"plan": "a"}')
            first.put("soapjax/left/0", b"0")
        return found

    second.items = between
    agree(second, "x", {"plan": "a"}, timeout_s=5)
    assert len(looks) >= 2


def test_the_first_rank_makes_and_all_take():
    made = []

    def run(view):
        return made_by_first(view, "p", lambda: made.append(view.rank) or "text ü", timeout_s=10, making_s=10)

    assert on_all(stores(3), run) == ["text ü"] * 3
    assert made == [0]


def test_a_failure_of_the_first_rank_is_everybodys():
    def fail():
        raise SoapjaxError(Problem("topology", "x", "y", "z"))

    for error in on_all(stores(3), lambda v: made_by_first(v, "p", fail, timeout_s=10, making_s=10)):
        assert error.problems == (Problem("topology", "x", "y", "z"),)


def test_an_unforeseen_failure_of_the_first_rank_does_not_leave_the_others_waiting():
    views = stores(2)
    with pytest.raises(ZeroDivisionError):
        made_by_first(views[0], "p", lambda: str(1 / 0), timeout_s=10, making_s=10)
    with pytest.raises(SoapjaxError, match="rank 0 failed"):
        made_by_first(views[1], "p", lambda: "", timeout_s=10, making_s=10)


def test_waiting_for_the_first_rank_ends():
    with pytest.raises(SoapjaxError, match="rank 0 missing after 0.2 s"):
        made_by_first(stores(2)[1], "p", lambda: "", timeout_s=0.2, making_s=10)
    views = stores(2)
    views[0].put("soapjax/made/p/begun", b"")
    with pytest.raises(SoapjaxError, match="nothing from rank 0 after 0.2 s"):
        made_by_first(views[1], "p", lambda: "", timeout_s=10, making_s=0.2)


# What soapjax uses of jax._src (coordination.py). If one of these fails, JAX has moved it: look for its new place there.


def test_jax_still_has_its_private_client():
    from jax._src import distributed

    for name in ("client", "process_id", "num_processes", "coordinator_address"):
        assert hasattr(distributed.global_state, name), f"jax._src.distributed.global_state.{name} is gone in jax {jax.__version__}"


STORE = """
import sys
import soapjax.distributed
from soapjax.execute.processes.coordination import is_joined, store
soapjax.distributed.initialize("127.0.0.1:" + sys.argv[1], 1, 0)
assert is_joined() and store().rank == 0 and store().num_ranks == 1
assert store().items("a") == {}
store().put("a/0", b"zero"), store().put("a/b/1", bytes(5 * 2**20)), store().put("ab/2", b"")
found = store().items("a")
assert sorted(found) == ["0", "b/1"] and found["0"] == b"zero" and len(found["b/1"]) == 5 * 2**20, found.keys()
soapjax.distributed.leave(7)
"""


def test_the_store_of_a_real_job_holds_what_is_put(free_port):
    environment = {k: v for k, v in os.environ.items() if "PROXY" not in k.upper()}
    done = subprocess.run(
        [sys.executable, "-c", STORE, str(free_port)], env=environment, capture_output=True, text=True, timeout=60
    )
    where = "soapjax/execute/processes/coordination.py"
    assert done.returncode == 7, f"jax {jax.__version__} and {where} do not fit:\n{done.stderr[-2000:]}"


def job_under(monkeypatch, variables):
    """The job that the environment of a launcher describes."""
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return job_of_environment(Job(None, None, None, None), timeout_s=1)


def test_slurm_tells_who_takes_part(monkeypatch):
    slurm = {
        "SLURM_JOB_ID": "4242", "SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "node[07-10]",
    }  # fmt: skip
    job = job_under(monkeypatch, slurm)
    assert job.coordinator_address.startswith("node07:")
    assert job[1:] == (8, 5, (1,))
    assert job_of_environment(Job("h:1", 2, 0, None), timeout_s=1) == Job("h:1", 2, 0, None)  # what is given counts


def test_open_mpi_tells_who_takes_part(monkeypatch):
    mpi = {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    }  # fmt: skip
    job = job_under(monkeypatch, mpi)
    assert job.coordinator_address.startswith("10.96.0.1:")
    assert job[1:] == (4, 3, (1,))


def test_a_variable_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "h:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(SoapjaxError, match="JAX_NUM_PROCESSES"):
        job_of_environment(Job(None, None, None, None), timeout_s=1)
