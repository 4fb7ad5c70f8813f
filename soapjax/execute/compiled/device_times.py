"""Seconds that a device itself was busy with calls, kernel by kernel, as JAX's profiler tells.

A GPU runs what is queued while the host queues more, and the host is slow: a call takes it 40 µs, a product of two matrices of
1,024 takes an H200 7. A host's clock sees the longer of the two, so that a task of less than some hundred microseconds cannot be
timed by it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

# From the end of a kernel to the start of the next one of a program: 1.5 µs on an H200 (jax 0.11.2).
KERNEL_GAP_S = 1.5e-6


class Kernel(NamedTuple):
    """What ran on a device: a kernel, a copy, a memset."""

    start_s: float
    seconds: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds


def seconds_of_calls(run: Callable[[], Any], count: int) -> list[float] | None:
    """Seconds of each of `count` like calls that `run` makes and waits for; None where the profiler tells nothing of the device.

    It does not on CPUs, and not while somebody else's trace is taken.
    """
    kernels = _kernels_of(run)
    return busy_seconds(kernels, count) if kernels else None


def busy_seconds(kernels: Iterable[Kernel], count: int) -> list[float]:
    """Of kernels that `count` like calls ran one after the other: each call's, the gaps between its own kernels with them.

    Where they cannot be told apart, as many as there are calls take the mean.
    """
    ordered = sorted(kernels)
    each, rest = divmod(len(ordered), count)
    if rest or not each:
        return [_busy(ordered) / count] * count
    return [_busy(ordered[i : i + each]) for i in range(0, len(ordered), each)]


def _busy(kernels: Iterable[Kernel]) -> float:
    """Those that overlap (on several streams) count once."""
    total, until = 0.0, -float("inf")
    for k in kernels:
        if k.end_s > until:
            total += k.end_s - max(k.start_s, until) + (KERNEL_GAP_S if k.start_s >= until else 0.0)
            until = k.end_s
    return total


def _kernels_of(run: Callable[[], Any]) -> list[Kernel]:
    if jax.default_backend() == "cpu":
        return []
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="soapjax-trace-") as folder:
        try:
            with jax.profiler.trace(folder, profiler_options=options):
                run()
        except RuntimeError:
            return []
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        return [k for file in files for k in _kernels_in(jax.profiler.ProfileData.from_file(str(file)))]


def _kernels_in(data: Any) -> list[Kernel]:
    """Of the first device that did anything: each has a plane, with a line per stream."""
    for plane in data.planes:
        if plane.name.startswith("/device:"):
            lines = [line for line in plane.lines if line.name.startswith("Stream")]
            if found := [Kernel(e.start_ns * 1e-9, e.duration_ns * 1e-9) for line in lines for e in line.events]:
                return found
    return []
