"""The emulated cluster: what it refuses, what its hosts find, and that nothing is left, however it ends."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import emulated_cluster
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "emulated_cluster.py"


def started(*arguments, **options):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def call(*arguments, **options):
    process = started(*arguments, **options)
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out, err


def why_not():
    status, _, err = call("--check")
    return "" if status == 0 else err.strip()


@pytest.fixture
def machine():
    """A machine that may have namespaces; whatever the test, none is left."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    before = namespaces(), hosts_files()  # of clusters that others run
    yield
    assert namespaces() <= before[0] and hosts_files() <= before[1]


def hosts_files():
    return set(Path("/etc/netns").glob("soapjax-*"))


def namespaces():
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split(" ")[0] for line in found.splitlines() if line.startswith("soapjax-")}


def runs(command):
    """Whether a process with exactly this command line runs: not the launcher, whose arguments hold it too."""
    return subprocess.run(["pgrep", "-x", "-f", command], capture_output=True, check=False).returncode == 0


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize(
    "arguments, place",
    [
        (["--rate", "fast", "--", "true"], "--rate"),
        (["--rate", "0mbit", "--", "true"], "--rate"),
        (["--rate", "1e9", "--", "true"], "--rate"),
        (["--rate", "900gbit", "--", "true"], "--rate"),
        (["--rate=-1mbit", "--", "true"], "--rate"),
        (["--rate", "1mbit; reboot", "--", "true"], "--rate"),
        (["--hosts", "0", "--", "true"], "--hosts"),
        (["--hosts", "999", "--", "true"], "--hosts"),
        (["--grace", "nan", "--", "true"], "--grace"),
        (["--timeout", "0", "--", "true"], "--timeout"),
        (["--hosts", "2"], "command"),
        ([], "command"),
    ],
)
def test_bad_input_is_named(arguments, place):
    status, out, err = call(*arguments)
    assert status == 2 and not out
    assert err.startswith(f"error: {place}: got ") and "Remedy: " in err and "Traceback" not in err


def test_without_iproute2_it_says_so(tmp_path):
    status, _, err = call("--", "true", env={"PATH": str(tmp_path)}, executable=sys.executable)
    if shutil.which("ip", path="/usr/sbin:/sbin") is None:
        assert status == 2 and "iproute2" in err
    else:
        pytest.skip("iproute2 is where the script looks by itself")


def test_a_missing_tool_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(emulated_cluster.shutil, "which", lambda tool: None)
    with pytest.raises(emulated_cluster.CannotRunError) as e:
        emulated_cluster.require_tools()
    assert "the command ip: got not found" in str(e.value) and "the command tc" in str(e.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_without_root_it_says_so(tmp_path):
    copy = tmp_path / "emulated_cluster.py"  # where the other user may read it
    copy.write_text(SCRIPT.read_text())
    for folder in (tmp_path, *tmp_path.parents):
        if folder != folder.parent and folder.stat().st_uid == 0 and folder != Path("/tmp"):
            folder.chmod(0o755)
    python = Path("/usr/bin/python3")
    if not python.exists():
        pytest.skip("no Python that every user may run")
    done = subprocess.run([python, copy, "--", "true"], user=65534, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "uid 65534" in done.stderr and "Traceback" not in done.stderr


def test_a_command_that_is_not_there(machine):
    status, _, err = call("--", "no-such-command")
    assert status == 2 and "'no-such-command'" in err


def test_every_host_has_its_own_network(machine):
    asks = "hostname -I; getent hosts $(hostname); echo $JAX_PROCESS_ID of $JAX_NUM_PROCESSES"
    status, out, _ = call("--hosts", 3, "--", "sh", "-c", asks)
    assert status == 0
    for i in range(3):
        mine = [line.removeprefix(f"[{i}] ").strip() for line in out.splitlines() if line.startswith(f"[{i}] ")]
        assert mine[0] == f"10.77.0.{i + 1}"
        assert mine[1].startswith(f"10.77.0.{i + 1} ")
        assert mine[2] == f"{i} of 3"


COPY = """
import os, socket, sys, time
size = 2_500_000
if os.environ["JAX_PROCESS_ID"] == "0":
    with socket.create_server(("10.77.0.1", 5000)) as s:
        c = s.accept()[0]
        start, got = time.perf_counter(), 0
        while got < size:
            got += len(c.recv(1 << 16))
        print(size * 8 / (time.perf_counter() - start))
else:
    while True:
        try:
            c = socket.create_connection(("10.77.0.1", 5000))
            break
        except OSError:
            time.sleep(0.05)
    c.sendall(bytes(size))
"""


def test_links_have_the_rate(machine):
    status, out, err = call("--rate", "20mbit", "--", sys.executable, "-c", COPY)
    assert status == 0, err
    assert 0.8 * 20e6 < float(out.removeprefix("[0] ")) < 1.1 * 20e6


def test_two_clusters_at_once(machine):
    first = started("--", "sh", "-c", "sleep 2; hostname -I")
    second = started("--", "sh", "-c", "sleep 2; hostname -I")
    for process in (first, second):
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert sorted(line.split()[1] for line in out.splitlines()) == ["10.77.0.1", "10.77.0.2"]


def test_the_status_is_the_commands_and_the_others_are_ended(machine):
    start = time.monotonic()
    status, _, err = call("--grace", 0.5, "--", "sh", "-c", "test $JAX_PROCESS_ID = 1 && exit 7; exec sleep 50")
    assert status == 7 and "ending host 0: another failed" in err
    assert time.monotonic() - start < 20


def test_time_is_up(machine):
    status, _, err = call("--timeout", 0.5, "--", "sleep", "50")
    assert status == 124 and "ending host 0, 1" in err


def test_real_time_threads_take_short_turns_for_as_long_as_it_runs(machine):
    turn = Path("/proc/sys/kernel/sched_rr_timeslice_ms")
    if not os.access(turn, os.W_OK):
        pytest.skip(f"{turn} cannot be written here")
    before = turn.read_text()  # "1" where another test's cluster runs beside
    status, out, _ = call("--hosts", 1, "--", "cat", turn)
    assert status == 0 and out.split() == ["[0]", "1"]
    assert turn.read_text() == before or before == "1\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_clean_up(machine, number):
    mark = f"50.{int(number)}{os.getpid()}"
    process = started("--", "sh", "-c", f"exec sleep {mark}")
    assert until(lambda: runs(f"sleep {mark}"))
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number and "Traceback" not in err
    assert not runs(f"sleep {mark}")


def test_what_a_killed_run_leaves_the_next_removes(machine):
    mark = f"50.9{os.getpid()}"
    before = namespaces()
    process = started("--", "sh", "-c", f"sleep {mark} & exec sleep {mark}")  # a child too, that no signal reaches
    assert until(lambda: runs(f"sleep {mark}") and len(namespaces() - before) == 3)
    process.kill()
    process.communicate(timeout=30)
    assert len(namespaces() - before) == 3
    status, *_ = call("--check")
    assert status == 0
    assert namespaces() == before
    assert until(lambda: not runs(f"sleep {mark}"))
