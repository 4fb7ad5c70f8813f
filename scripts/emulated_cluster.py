"""A cluster on one machine: runs a command once per host, each in a network namespace with a shaped link.

    sudo python scripts/emulated_cluster.py --hosts 2 --rate 200mbit -- python scripts/launch_multihost.py models.mlp

Host i has the address 10.77.0.(i+1) on eth0 and one processor core; what it sends and what it receives are limited to
--rate by `tc tbf`. The links are real: a strategy that communicates more really is slower, so predictions can be held
against measurements. More hosts than cores share cores, and then only communication is as on a cluster.

The command finds in its environment JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, as
`soapjax.distributed.initialize()` reads them, one CPU device, and memory settings that keep timings steady. The machine's name
resolves to the host's own address, which is where gloo (JAX's collectives on CPUs) listens.

Output lines are prefixed by "[host] ". The exit status is 0 when all end with 0, else that of the first that failed; the
others then have --grace seconds to end by themselves. Ctrl-C and SIGTERM end everything. Nothing is left behind; after a
SIGKILL the kernel ends the processes, and the next run removes the namespaces.

Needs Linux, root and iproute2 (`ip`, `tc`). `--check` says whether it can run here. It imports the standard library only: the
launcher must not take memory and threads from what it measures.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import re
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PREFIX = "soapjax"
LOCKS = Path("/run/soapjax-cluster")  # one file per cluster, locked for as long as its owner lives
HOSTS_FILES = Path("/etc/netns")  # `ip netns exec` puts the files of a namespace's folder over /etc
COORDINATOR_PORT = 12321  # each cluster has its own addresses, so that all may use the same port
MAX_HOSTS = 64
RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit")
RATE_BOUNDS_BIT_PER_S = (1e5, 1e11)
SEGMENT_BYTES = 2**14  # the largest that passes a link at once
QUEUE_BYTES = 16 * 2**20  # of a link, before it drops: more than the windows of all its connections
STEADY_MEMORY = {  # large buffers are kept, not given back to the kernel and mapped anew at every step
    "MALLOC_TOP_PAD_": str(2**28), "MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
}  # fmt: skip
REAL_TIME_TURN_MS = Path("/proc/sys/kernel/sched_rr_timeslice_ms")
PR_SET_PDEATHSIG = 1
TERM_S = 5.0  # between SIGTERM and SIGKILL


class CannotRunError(Exception):
    """Bad input, or a machine that lacks what is needed. Each text names place, value, expected, remedy."""

    def __init__(self, *problems: tuple[str, str, str, str]):
        super().__init__("\n".join(f"error: {p}: got {v}; expected {e}. Remedy: {r}." for p, v, e, r in problems))


class Stopped(BaseException):  # noqa: N818 - a signal, as KeyboardInterrupt is
    """A signal asked for the end."""

    def __init__(self, number: int):
        self.number = number


def main(argv: Sequence[str] | None = None) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        options = parse(argv)
        bits_per_s = rate_of(options.rate)
        require_tools()
        if options.check:
            with cluster(1, bits_per_s):
                print("an emulated cluster can run here")
            return 0
        command = [resolved(options.command[0]), *options.command[1:]]
        with cluster(options.hosts, bits_per_s) as namespaces:
            return run(namespaces, command, grace_s=options.grace, timeout_s=options.timeout)
    except CannotRunError as e:
        print(e, file=sys.stderr)
        return 2
    except Stopped as e:
        print(f"ended by {signal.Signals(e.number).name}", file=sys.stderr)
        return 128 + e.number


def _stop(number: int, frame: object) -> None:
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)  # once is enough: cleaning up must not be interrupted
    raise Stopped(number)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="of each link, each way: 200mbit, 1gbit, ..., or none")
    parser.add_argument("--grace", type=float, default=15.0, help="seconds that the others have after one has failed")
    parser.add_argument("--timeout", type=float, default=None, help="end everything after so many seconds (status 124)")
    parser.add_argument("--check", action="store_true", help="only say whether it can run here (status 0 or 2)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --: what every host runs")
    options = parser.parse_args(argv)
    if options.command[:1] == ["--"]:
        del options.command[0]
    problems = []
    if not 1 <= options.hosts <= MAX_HOSTS:
        problems.append(("--hosts", str(options.hosts), f"1 to {MAX_HOSTS}", "choose fewer hosts, e.g. --hosts 2"))
    if not options.grace >= 0:
        problems.append(("--grace", str(options.grace), "seconds, 0 or more", "leave it out"))
    if options.timeout is not None and not options.timeout > 0:
        problems.append(("--timeout", str(options.timeout), "a positive number of seconds", "leave it out"))
    if not options.command and not options.check:
        problems.append(("command", "none", "what every host shall run", "write it after --, e.g. -- python train.py"))
    if problems:
        raise CannotRunError(*problems)
    return options


def rate_of(text: str) -> float | None:
    """Bits per second of a rate such as "200mbit"; None for "none".

    Raises: CannotRunError where it is no rate, or outside what `tc tbf` can hold.
    """
    if text == "none":
        return None
    match = RATE.fullmatch(text)
    rate = float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]] if match else 0.0
    low, high = RATE_BOUNDS_BIT_PER_S
    if not low <= rate <= high:
        remedy = "write for instance 200mbit or 1gbit, or none for links without a limit"
        raise CannotRunError(("--rate", repr(text), "100kbit to 100gbit, in kbit, mbit or gbit", remedy))
    return rate


def require_tools() -> None:
    """Raises: CannotRunError naming all that is missing: Linux, root, iproute2."""
    problems = []
    if sys.platform != "linux":
        problems.append(("system", sys.platform, "Linux, for network namespaces", "run it on Linux"))
    os.environ["PATH"] = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # where Debian has ip and tc
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            problems.append((f"the command {tool}", "not found", "iproute2", "apt-get install iproute2, or your system's package"))
    if hasattr(os, "geteuid") and os.geteuid() != 0:
        problems.append(("user", f"uid {os.geteuid()}", "root: network namespaces are the kernel's", "run it with sudo"))
    if problems:
        raise CannotRunError(*problems)


def resolved(command: str) -> str:
    found = shutil.which(command)
    if found is None:
        raise CannotRunError(("command", repr(command), "a program that can be run", "check its name, path and rights"))
    return found


@contextlib.contextmanager
def cluster(hosts: int, bits_per_s: float | None) -> Iterator[list[str]]:
    """The namespaces of a new cluster, removed at the end with all that runs in them. Clusters of dead owners are removed first.

    Raises: CannotRunError where the kernel refuses.
    """
    remove_stale()
    token, lock = _own_token()
    try:
        _shorten_turns(token)
        yield _build(token, hosts, bits_per_s)
    finally:
        remove(token)
        (LOCKS / token).unlink(missing_ok=True)
        os.close(lock)


def _own_token() -> tuple[str, int]:
    """A name that no other cluster has, and its locked file: the kernel unlocks it however this process ends."""
    LOCKS.mkdir(parents=True, exist_ok=True)
    while True:
        token = secrets.token_hex(3)
        lock = os.open(LOCKS / token, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(LOCKS / token).st_ino == os.fstat(lock).st_ino:
                return token, lock
        except OSError:  # another run has it, or took the file for stale before it was locked
            pass
        os.close(lock)


def remove_stale() -> None:
    """Removes what runs that were killed have left."""
    for path in sorted(LOCKS.glob("*")):
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(path.name)
                path.unlink(missing_ok=True)
            finally:
                os.close(lock)


def _shorten_turns(token: str) -> None:
    """Real-time threads of one core take turns of a scheduler tick instead of 100 ms; the cluster's file keeps what it was.

    gloo's threads poll in some collectives: with long turns a program of real-time priority waits 60 ms for a small message.
    """
    with contextlib.suppress(OSError):
        before = REAL_TIME_TURN_MS.read_text().strip()
        if before != "1":
            (LOCKS / token).write_text(before)
            REAL_TIME_TURN_MS.write_text("1")


def namespaces_of(token: str) -> list[str]:
    lines = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout.splitlines()
    return [name for line in lines if (name := line.split(" ")[0]).startswith(f"{PREFIX}-{token}-")]


def remove(token: str) -> None:
    """Ends all processes in a cluster's namespaces and removes these; links and bridge go with them. Turns are as before."""
    for name in namespaces_of(token):
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
        for pid in found.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    for folder in HOSTS_FILES.glob(f"{PREFIX}-{token}-*"):
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        HOSTS_FILES.rmdir()  # only where it is empty
    with contextlib.suppress(OSError):
        if before := (LOCKS / token).read_text():
            REAL_TIME_TURN_MS.write_text(before)


def _build(token: str, hosts: int, bits_per_s: float | None) -> list[str]:
    """One namespace for the switch, a bridge, and one for each host; nothing in the machine's own network changes."""
    switch = f"{PREFIX}-{token}-switch"
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", switch, "link", "set", "bridge", "up")
    names = [f"{PREFIX}-{token}-{i}" for i in range(hosts)]
    machine = socket.gethostname()
    for i, name in enumerate(names):
        hosts_file = HOSTS_FILES / name / "hosts"
        hosts_file.parent.mkdir(parents=True)
        hosts_file.write_text(f"127.0.0.1 localhost\n{address(i)} {machine} host{i}\n")
        _ip("netns", "add", name)
        _ip("-n", switch, "link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", switch, "link", "set", f"port{i}", "master", "bridge", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "address", "add", f"{address(i)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        if bits_per_s is not None:
            for namespace, device in ((name, "eth0"), (switch, f"port{i}")):  # what the host sends, and what it receives
                _ip("-n", namespace, "link", "set", device, "gso_max_size", str(SEGMENT_BYTES))
                _call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *_bucket(bits_per_s))
    return names


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def _bucket(bits_per_s: float) -> list[str]:
    """A token bucket; its burst is a tenth of a millisecond's worth, and at least one segment.

    What a burst lets through is free after every pause: with the 64 KiB of ordinary segments that would be 2.6 ms of every message
    at 200 Mbit/s.
    """
    burst_bytes = max(SEGMENT_BYTES + 2**12, int(bits_per_s / 8 * 1e-4))
    return ["tbf", "rate", f"{bits_per_s:.0f}bit", "burst", f"{burst_bytes}b", "limit", f"{QUEUE_BYTES}b"]


def _ip(*arguments: str) -> None:
    _call("ip", *arguments)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        value = said[-1] if said else f"status {done.returncode}"
        remedy = "run it as root, in a container with the right CAP_SYS_ADMIN, on a kernel with veth, bridge and tbf"
        raise CannotRunError((" ".join(command), value, "a kernel that does this", remedy))


def environment_of(host: int, hosts: int, key: str) -> dict[str, str]:
    """What a host's command finds: where the coordinator is, who it is, the job's key, one CPU device, steady memory."""
    inherited = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}  # no proxy is reached from a namespace
    flags = [f for f in inherited.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
    return inherited | STEADY_MEMORY | {
        "JAX_COORDINATOR_ADDRESS": f"{address(0)}:{COORDINATOR_PORT}",
        "JAX_NUM_PROCESSES": str(hosts), "JAX_PROCESS_ID": str(host), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1",
        "XLA_FLAGS": " ".join(flags), "NPROC": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
        "SOAPJAX_JOB_KEY": key,
    }  # fmt: skip


def run(namespaces: Sequence[str], command: Sequence[str], *, grace_s: float, timeout_s: float | None) -> int:
    """Runs the command in every namespace, copies the output, and returns the exit status."""
    cores = sorted(os.sched_getaffinity(0))
    if len(namespaces) > len(cores):
        print(f"{len(namespaces)} hosts share {len(cores)} cores: compute is slower than on a cluster", file=sys.stderr)
    library = ctypes.CDLL(None)
    key = os.environ.get("SOAPJAX_JOB_KEY", secrets.token_hex(16))
    processes: list[subprocess.Popen] = []
    try:
        for i, name in enumerate(namespaces):
            os.sched_setaffinity(0, {cores[i % len(cores)]})  # inherited; XLA counts the cores that it may use at its start
            processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, *command], env=environment_of(i, len(namespaces), key), stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                    preexec_fn=lambda: library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # when this process is killed
                )
            )  # fmt: skip
            os.sched_setaffinity(0, cores)
        return _watch(processes, grace_s, timeout_s)
    finally:
        os.sched_setaffinity(0, cores)
        end(processes)


def _watch(processes: list[subprocess.Popen], grace_s: float, timeout_s: float | None) -> int:
    """Copies output until all have ended, or some time after one has failed, or until the time is up; the exit status."""
    start = time.monotonic()
    failed_at = ended_at = None
    status, why = 0, ""
    with selectors.DefaultSelector() as selector:
        rest: dict[int, bytes] = {}
        for i, p in enumerate(processes):
            for source, target in ((p.stdout, sys.stdout), (p.stderr, sys.stderr)):
                selector.register(source, selectors.EVENT_READ, (i, target))
        while not why and (selector.get_map() or ended_at is None):
            for key, _ in selector.select(timeout=0.1):
                i, target = key.data
                _copy(selector, key.fileobj, i, target, rest)
            now = time.monotonic()
            codes = [p.poll() for p in processes]
            if failed_at is None and any(codes):
                failed_at, status = now, next(c for c in codes if c)
            if ended_at is None and None not in codes:
                ended_at = now
            if ended_at is not None and now > ended_at + 1.0:
                break  # a process that the command left behind holds its pipe open
            if ended_at is None and failed_at is not None and now > failed_at + grace_s:
                why = f"another failed {grace_s:g} s ago"
            if timeout_s is not None and now > start + timeout_s:
                status, why = status or 124, f"the time of {timeout_s:g} s is up"
    if late := [str(i) for i, p in enumerate(processes) if p.poll() is None]:
        print(f"ending host {', '.join(late)}: {why}", file=sys.stderr)
    return 128 - status if status < 0 else status


def _copy(selector: selectors.BaseSelector, source, host: int, target, rest: dict[int, bytes]) -> None:
    """Copies whole lines, so that those of two hosts do not mix."""
    number = source.fileno()
    data = os.read(number, 2**16)
    *lines, rest[number] = (rest.get(number, b"") + data).split(b"\n")
    if not data:
        selector.unregister(source)
        if rest[number]:
            lines.append(rest.pop(number))
    with contextlib.suppress(BrokenPipeError):
        for line in lines:
            target.write(f"[{host}] {line.decode(errors='replace')}\n")
        target.flush()


def end(processes: Sequence[subprocess.Popen]) -> None:
    """Ends what still runs: SIGTERM to each group, SIGKILL where that does not help."""
    for number, patience_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, TERM_S)):
        for p in processes:
            if p.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(p.pid, number)
        deadline = time.monotonic() + patience_s
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
    for p in processes:
        for pipe in (p.stdout, p.stderr):
            if pipe is not None:
                pipe.close()


if __name__ == "__main__":
    sys.exit(main())
