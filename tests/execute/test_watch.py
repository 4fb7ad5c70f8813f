"""A rank that dies, stops or does something else ends the others, by name. Ranks are objects here that a made-up clock moves."""

import contextlib
import signal
import subprocess
import sys
import time

import pytest
from ranks import ROOT, environment

from soapjax.execute.processes.calls import Calls
from soapjax.execute.processes.start_up import Peer
from soapjax.execute.processes.watch import IDLE, Watch
from soapjax.helpers.files import OWN_FOLDER

TIMEOUT_S = 10.0


class Job:
    """Ranks that hear each other's beats once per second; those in `silent` neither speak nor look."""

    def __init__(self, num_ranks):
        self.time_s = 0.0
        peers = [Peer("10.0.0.1", 1, f"node{r}", 100 + r) for r in range(num_ranks)]
        self.calls = [Calls() for _ in peers]
        self.watches = [Watch(r, peers, TIMEOUT_S, c, lambda: self.time_s) for r, c in enumerate(self.calls)]
        self.silent = set()
        self._open = contextlib.ExitStack()  # calls that go on

    def live(self, seconds):
        """The first thing that any rank says, as text, or None."""
        for _ in range(seconds):
            self.time_s += 1.0
            awake = [w for r, w in enumerate(self.watches) if r not in self.silent]
            for speaker in awake:
                table = speaker.table()
                for w in awake:
                    if w is not speaker:
                        w.hear(table)
            said = [w.look() for w in awake]
            if any(said):
                assert all(s == said[0] for s in said if s), said  # they all name the same one
                return "\n".join(map(str, next(s for s in said if s)))
        return None

    def begin(self, ranks, name="train_step", doing=None):
        """Ranks go into a call and stay there."""
        for r in ranks:
            self._open.enter_context(self.calls[r].call(name))
            if doing in ("running", "running on the devices"):
                self.calls[r].run(on_cpu=doing == "running")
            elif doing:
                self._open.enter_context(self.calls[r].doing(doing))

    def make(self, ranks, names):
        for r in ranks:
            for name in names:
                with self.calls[r].call(name):
                    pass


@pytest.fixture
def cpu_s(monkeypatch):
    """Processor time of each rank, which would otherwise be that of this test."""
    used = {}
    real = Calls.where
    monkeypatch.setattr(Calls, "where", lambda self: real(self)._replace(cpu_s=used.get(id(self), 0.0)))
    return used


def test_ranks_at_work_are_left_alone():
    job = Job(4)
    for _ in range(20):
        job.make(range(4), ["train_step", "evaluate"])
        assert job.live(3) is None
    for c in job.calls:
        c.end(0)
    assert job.live(50) is None and all(w.all_have_ended for w in job.watches)


def test_who_is_silent_is_named_with_what_it_did_last():
    job = Job(4)
    job.make(range(4), ["train_step"] * 16)
    job.begin(range(4), doing="running")
    assert job.live(2) is None
    job.silent = {2}
    assert job.live(10) is None
    said = job.live(2)
    assert "rank 2 (node2, process 102) silent for 10 s: last seen 11 s ago in call 17 of train_step (running)" in said
    assert "rank 1 " not in said and "rank 3 " not in said


def test_who_is_stopped_between_two_calls_is_silent_not_out_of_calls():
    """It had been between them for less than the time-out when it was last heard; what it did afterwards, nobody knows."""
    job = Job(2)
    job.make(range(2), ["train_step"])
    job.make([1], ["train_step"])
    assert job.live(9) is None
    job.silent = {0}
    assert job.live(9) is None
    assert "rank 0 (node0, process 100) silent for 10 s: last seen 11 s ago after call 1 of train_step" in job.live(3)


def test_all_who_never_came_are_named():
    job = Job(3)
    job.silent = {1, 2}
    said = job.live(12)
    assert "rank 1 (node1" in said and "rank 2 (node2" in said and "never seen" in said


def test_who_stays_behind_in_the_start_is_named(cpu_s):
    """The calls before the program's first are numbered 0 and less: a program's own begin at 1."""
    job = Job(3)
    for c in job.calls:
        c.count_from(-1)
    job.make(range(3), ["the connection to rank 0"])
    job.begin((0, 2), "the exchange of devices", "running")
    said = job.live(13)
    assert "rank 1 (node1" in said and "before its first call, at " in said and "in no call for 10 s" in said
    assert "rank 0 is in the exchange of devices (running)" in said and "rank 2 (" not in said


def test_the_first_call_of_the_program_is_its_first():
    job = Job(2)
    for c in job.calls:
        c.count_from(-1)
    job.make(range(2), ["the connection to rank 0", "the exchange of devices", "train_step"])
    assert [c.where().call() for c in job.calls] == ["after call 1 of train_step"] * 2
    assert job.live(30) is None


def test_who_stands_elsewhere_at_an_end_that_does_not_come_is_named(monkeypatch):
    job = Job(3)
    real = Calls.where
    monkeypatch.setattr(Calls, "where", lambda self: real(self)._replace(at="user.py:9 (save)" if self is job.calls[1] else "exit"))
    for c in job.calls:
        c.end(0)
    assert job.live(3) is None
    (problem,) = job.watches[0].without_end()
    assert "rank 1 (node1, process 101)" in problem.value and "user.py:9 (save): does not come to its end" in problem.value


def test_a_start_that_never_ends_is_ended():
    code = "import time; from soapjax.execute.processes.channel import ends_within; from soapjax.errors import Problem\n"
    code += "with ends_within(0.5, lambda: Problem('the start', 'rank 3', 'all', 'see')): time.sleep(60)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert ran.returncode == 2 and "error: the start: got rank 3; expected all. Remedy: see." in ran.stderr.splitlines()


def test_who_was_stopped_itself_does_not_blame_the_others():
    job = Job(2)
    job.live(3)
    job.time_s += 100.0  # neither looked: both were stopped, or the machine was
    assert job.live(5) is None


def test_who_has_died_is_named_at_once():
    job = Job(3)
    job.make(range(3), ["train_step"])
    job.live(2)
    job.silent = {1}
    for r in (0, 2):
        job.watches[r].died(1)
    assert "rank 1 (node1, process 101) has died" in job.live(1)


def test_who_has_ended_with_an_error_is_named_with_its_reason():
    job = Job(3)
    job.make(range(3), ["train_step"] * 2)
    job.calls[1].end(1, "ValueError: the data ended")
    job.live(1)
    said = [str(job.watches[r].look()[0]) for r in (0, 2)]
    assert all("rank 1 (node1, process 101) has ended with status 1 (ValueError: the data ended) after call 2" in s for s in said)
    assert job.watches[0].has_left


def test_what_one_has_found_all_say():
    job = Job(2)
    job.live(1)
    job.watches[0].hear({"stopped": [["the job", "rank 5 silent", "all", "look"]]})
    assert "rank 5 silent" in str(job.watches[0].look()[0])


def test_a_step_fewer():
    job = Job(2)
    job.make([0, 1], ["train_step"] * 3)
    job.begin([0], doing="running")
    assert job.live(10) is None  # rank 1 may load data
    said = job.live(4)
    assert "rank 1 (node1" in said and "after call 3 of train_step" in said
    assert "rank 0 is in call 4 of train_step (running)" in said


def test_long_work_of_one_rank_that_says_so():
    job = Job(2)
    job.make([0, 1], ["train_step"])
    with job.calls[1].busy("saving", 40.0):
        job.begin([0], doing="running")
        assert job.live(38) is None
        assert "rank 1 (node1" in job.live(10)


def test_who_exits_early_is_named_when_others_go_on():
    job = Job(2)
    job.make([0, 1], ["train_step"] * 3)
    job.calls[1].end(0)
    assert job.live(5) is None
    job.begin([0])
    assert "rank 1 (node1, process 101) has ended with status 0 after call 3 of train_step, rank 0 is in call 4" in job.live(1)


def test_who_exits_within_a_call_is_named():
    job = Job(2)
    job.begin([0], doing="waiting for all at train_step#1/plan")
    with pytest.raises(SystemExit), job.calls[1].call("train_step"):
        raise SystemExit(0)
    job.calls[1].end(0)
    assert "rank 1 (node1, process 101) has ended with status 0 in call 1 of train_step" in job.live(1)


def test_who_does_not_end_with_the_others_is_named():
    job = Job(2)
    job.make([0, 1], ["train_step"])
    job.calls[0].end(0)
    assert job.live(10) is None
    assert "rank 1 (node1" in job.live(3)


def test_another_function_at_the_same_call():
    job = Job(3)
    job.make(range(3), ["train_step"] * 4)
    job.begin([0, 1], "train_step")
    job.begin([2], "evaluate")
    said = job.live(1)
    assert "rank 2 (node2, process 102)" in said and "call 5 is of evaluate, on rank 0 of train_step" in said


def test_another_order_is_found_calls_later():
    job = Job(3)
    job.make([0, 2], ["train_step", "evaluate", *["train_step"] * 30])
    job.make([1], ["evaluate", "train_step", *["train_step"] * 30])
    said = job.live(1)
    assert "rank 1 (node1" in said and "other calls before call" in said and "rank 2" not in said


@pytest.mark.parametrize("doing", ["planning", "compiling", "waiting for all at train_step#1/plan"])
def test_a_rank_that_does_nothing_in_a_call(cpu_s, doing):
    job = Job(2)
    job.begin([1], doing=doing)
    job.begin([0], doing="waiting for rank 0's plan")
    for _ in range(11):
        job.calls[0].num_looks += 4
        assert job.live(1) is None
    job.calls[0].num_looks += 4
    said = job.live(2)
    assert "rank 1 (node1" in said and f"in call 1 of train_step ({doing})" in said and "does nothing for 10 s" in said


def test_a_compilation_of_an_hour_is_no_silence(cpu_s):
    job = Job(2)
    job.begin([1], doing="compiling")
    job.begin([0], doing="waiting for all at train_step#3/compiled")
    for _ in range(3600):
        job.calls[0].num_looks += 1
        cpu_s[id(job.calls[1])] = cpu_s.get(id(job.calls[1]), 0.0) + 2 * IDLE
        assert job.live(1) is None


def test_a_step_of_an_hour_on_accelerators_is_no_silence(cpu_s):
    job = Job(2)
    job.begin([0, 1], doing="running on the devices")
    assert job.live(3600) is None


def test_all_in_a_step_on_cpus_that_nobody_works_at(cpu_s):
    job = Job(2)
    job.begin([0, 1], doing="running")
    said = job.live(13)
    assert "rank 0 (node0" in said and "rank 1 (node1" in said and "in call 1 of train_step (running)" in said


def test_who_runs_what_another_waits_to_agree_on(cpu_s):
    """Arguments of another shape on one rank: it plans anew, the others run."""
    job = Job(2)
    job.begin([1], doing="running")
    job.begin([0], doing="waiting for all at train_step#4/plan")
    said = None
    for _ in range(15):
        job.calls[0].num_looks += 1
        cpu_s[id(job.calls[1])] = cpu_s.get(id(job.calls[1]), 0.0) + 1.0
        said = said or job.live(1)
    assert "rank 1 (node1" in said and "rank 0 is in call 1 of train_step (waiting for all at train_step#4/plan)" in said


def test_a_folder_beside_the_package_is_the_users():
    found = {"calls": Calls()}
    exec(compile("where = calls.where()", f"{OWN_FOLDER}_training/train.py", "exec"), found)
    assert found["where"].at == "train.py:1 (<module>)"


def test_where_it_is_reads_as_a_sentence():
    calls = Calls()
    assert calls.where().call() == "before its first call"
    with calls.call("train_step"), calls.doing("compiling"):
        assert calls.where().call() == "in call 1 of train_step (compiling)"
        with calls.call("inner"):
            assert calls.where().num_calls == 1  # a call inside a call is not one of its own
    assert calls.where().call() == "after call 1 of train_step"
    where = calls.where()
    assert "test_watch.py:" in where.at and str(where) == f"after call 1 of train_step, at {where.at}"


@pytest.mark.parametrize(
    "victim, way, why",
    [
        (0, "SIGKILL", "has died (its connections are closed): last seen"),
        pytest.param(1, "SIGKILL", "has died", marks=pytest.mark.slow),
        pytest.param(0, "SIGSTOP", "silent for 3 s", marks=pytest.mark.slow),
        pytest.param(1, "SIGSTOP", "silent for 3 s", marks=pytest.mark.slow),
        pytest.param(1, "raises", "has ended with status 1 (ValueError: the data ended) after call 2", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_in_a_step_ends_the_others(free_port, victim, way, why):
    command = [sys.executable, ROOT / "tests" / "execute" / "dying_worker.py", str(victim), way, "3"]
    options = dict(cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = [subprocess.Popen(command, env=environment(free_port, r), **options) for r in range(2)]
    other = processes[1 - victim]
    try:
        if way != "SIGSTOP":
            processes[victim].wait(timeout=200)
        begin = time.monotonic()
        out, err = other.communicate(timeout=200)
        took_s = time.monotonic() - begin
    finally:
        for p in processes:
            p.send_signal(signal.SIGKILL)
            p.communicate()
    line = next((s for s in err.splitlines() if s.startswith("error: ")), "")
    assert other.returncode == 2 and "finished" not in out, err[-2000:]
    assert line.startswith(f"error: the job: got rank {victim} (") and why in line and "call" in line, err[-2000:]
    assert "stack trace" not in err and (way == "SIGSTOP" or took_s < 15)
