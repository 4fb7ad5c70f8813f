"""Run as a program by test_profile.py: processes that write profiles, at once, killed, or without room.

python profile_writers.py writers|killed|full FOLDER
"""

import os
import resource
import signal
import sys
import time
from pathlib import Path

from soapjax.costs.measured.profile import Profile, installed_versions, save_profile
from soapjax.costs.measured.profile_parts import Device, Measurement
from soapjax.errors import SoapjaxError


def profile(number, size=200):
    operators = tuple(
        Measurement(
            label=f"task {i}", structure=f"{number:08x}{i:08x}", kind="dot", dtype="float32", reads=((number + 1, i + 1),),
            writes=(), flops=1e6, moved_bytes=1e3, seconds=1e-3,
        )
        for i in range(size)
    )  # fmt: skip
    device = Device(name="cpu", platform="cpu", processor="test")
    return Profile(device=device, versions=installed_versions(), created=f"2026-01-01T00:00:{number:02d}", operators=operators)


def fork(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def writers(folder):
    """16 processes, each writes three profiles that all write, and one of its own."""

    def work(n):
        for k in (0, 1, 2, 10 + n):
            save_profile(profile(k), folder)

    for pid in [fork(lambda n=n: work(n)) for n in range(16)]:
        os.waitpid(pid, 0)


def killed(folder):
    """Writers that are killed at any moment."""

    first = profile(0, size=500)

    def work():
        for k in range(10_000):
            save_profile(first.model_copy(update={"created": f"{os.getpid()} {k}"}), folder)

    for i in range(12):
        pid = fork(work)
        time.sleep(0.05 + 0.033 * i)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def full(folder):
    """A disk on which a file may grow to 4 kB only."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        save_profile(profile(1), folder)
    except SoapjaxError as e:
        print(e)


if __name__ == "__main__":
    {"writers": writers, "killed": killed, "full": full}[sys.argv[1]](Path(sys.argv[2]))
