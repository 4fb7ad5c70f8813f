"""Kernels of a device's trace, as seconds of calls."""

import types

import jax
import numpy as np
import pytest

from soapjax.execute.compiled import device_times
from soapjax.execute.compiled.device_times import KERNEL_GAP_S, Kernel, busy_seconds, seconds_of_calls
from soapjax.execute.compiled.measure import time_calls

US = 1e-6


def trace_of(lines):
    """As `jax.profiler.ProfileData` gives it: a host, an idle device, and one with a line per stream and one that repeats them."""

    def line(name, kernels):
        return types.SimpleNamespace(name=name, events=[types.SimpleNamespace(start_ns=a, duration_ns=d) for a, d in kernels])

    planes = {"/host:CPU": {"python3": [(0, 9)]}, "/device:GPU:0": {}, "/device:GPU:1": lines}
    named = [types.SimpleNamespace(name=n, lines=[line(*x) for x in of.items()]) for n, of in planes.items()]
    return types.SimpleNamespace(planes=named)


def test_kernels_are_those_of_the_streams_of_one_device():
    data = trace_of({"Stream #14(Compute)": [(1000, 500)], "Stream #15(MemcpyD2D)": [(3000, 100)], "XLA Ops": [(1000, 500)]})
    assert device_times._kernels_in(data) == [pytest.approx((1e-6, 0.5e-6)), pytest.approx((3e-6, 0.1e-6))]
    assert device_times._kernels_in(trace_of({})) == []


def test_calls_are_told_apart_by_their_number_of_kernels():
    rng = np.random.default_rng(0)
    calls = [[(float(rng.uniform(1, 50)) * US) for _ in range(3)] for _ in range(5)]
    at, kernels = 0.0, []
    for call in calls:
        for seconds in call:
            kernels.append(Kernel(at, seconds))
            at += seconds + float(rng.uniform(1, 99)) * US  # waiting for the host, too
    rng.shuffle(kernels)
    assert busy_seconds(map(Kernel._make, kernels), 5) == pytest.approx([sum(call) + 3 * KERNEL_GAP_S for call in calls])
    whole = sum(map(sum, calls)) + 15 * KERNEL_GAP_S
    assert busy_seconds(map(Kernel._make, kernels), 4) == pytest.approx([whole / 4] * 4), "15 kernels of 4 calls"


def test_kernels_of_several_streams_count_once():
    rng = np.random.default_rng(1)
    kernels = [Kernel(float(a), float(d)) for a, d in zip(rng.integers(0, 400, 60), rng.integers(1, 20, 60), strict=True)]
    covered = np.zeros(500, bool)
    for k in kernels:
        covered[int(k.start_s) : int(k.end_s)] = True
    starts = covered[0] + (covered[1:] & ~covered[:-1]).sum()
    # Kernels that touch are two: at most as many gaps as kernels, at least as many as there are pieces.
    (found,) = busy_seconds(kernels, 1)
    assert covered.sum() + starts * KERNEL_GAP_S <= found <= covered.sum() + 60 * KERNEL_GAP_S


def test_on_cpus_the_host_s_clock_is_left():
    assert seconds_of_calls(lambda: None, 1) is None


def test_tasks_are_timed_by_the_device_where_it_tells(monkeypatch):
    monkeypatch.setattr(
        "soapjax.execute.compiled.measure.seconds_of_calls", lambda run, count: [run() and 2.0] + [2.0] * 13 + [4.0]
    )
    timing = time_calls(jax.jit(lambda x: x + 1), [np.ones(3)])
    assert (timing.seconds, timing.spread, timing.num_runs) == (2.0, 0.0, 15)


def test_another_trace_is_not_disturbed(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with jax.profiler.trace(str(tmp_path)):
        assert seconds_of_calls(lambda: None, 1) is None
    assert list(tmp_path.rglob("*.xplane.pb"))
