"""The topology of the cluster that this process belongs to, measured: rates of one device, and the links; and its operators.

Rates are those of the model's own largest dots and convolutions, forward and backward; memory, elementwise arithmetic and the
cost of a small task come from three small programs; the links from all-reduces of several sizes. `measured_operators` is what
`soapjax profile` does. All hosts measure at once, so that what they share (memory, say) counts. `fitted_factors` then scales
compute and network by one factor each, so that a few measured steps come out right.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cluster_timing import undisturbed

from soapjax.costs.measured.fit import fitted_link
from soapjax.costs.measured.profile import Profile
from soapjax.execute.compiled.measure_links import time_collectives
from soapjax.execute.processes.agreement import agree
from soapjax.execute.processes.coordination import store
from soapjax.graph.rules.flops import flops_of
from soapjax.graph.trace.tracing import TracedStep
from soapjax.planning.profiling import measure_profile
from soapjax.topology import DeviceTopology

MAX_OPERATORS = 6  # of each class, by FLOPs
BUDGET_S = 0.5  # per figure
LINK_BYTES = (2**12, 2**16, 2**18, 2**20, 2**22)
MEMORY_BYTES = 2**31
RIDGE = 0.03  # pulls both factors towards 1 where the steps do not tell them apart


def seconds_of(run: Callable[[], Any], *, budget_s: float = BUDGET_S, at_most: int = 20) -> float:
    """The median time of `run`, after one that is not counted."""
    jax.block_until_ready(run())
    times: list[float] = []
    while len(times) < 3 or (sum(times) < budget_s and len(times) < at_most):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def heavy_rate(step: TracedStep, name: str) -> float | None:
    """FLOP/s over the largest equations called `name`; None where there is none."""
    distinct: dict[str, tuple[float, Any]] = {}
    program = step.program
    for eqn, trips in program.walk():
        if eqn.name == name:
            key = str([program.aval(a) for a in eqn.inputs]) + str(eqn.params)
            flops = flops_of(eqn, program)
            distinct[key] = distinct.get(key, (0.0, eqn))[0] + flops * trips, eqn
    rng = np.random.default_rng(0)
    flops = seconds = 0.0
    for total, eqn in sorted(distinct.values(), key=lambda x: -x[0])[:MAX_OPERATORS]:
        values = [jnp.asarray(rng.normal(size=program.aval(a).shape), program.aval(a).dtype) for a in eqn.inputs]
        run = jax.jit(lambda *x, eqn=eqn: eqn.primitive.bind(*x, **eqn.primitive.get_bind_params(eqn.params)))
        flops += total
        seconds += total / flops_of(eqn, program) * seconds_of(lambda run=run, values=values: run(*values))
    return flops / seconds if flops else None


def memory_rate() -> float:
    """Bytes per second of an update `p - 0.1 g`, which reads two arrays and writes one; they are larger than caches are."""
    p, g = jnp.ones(2**24), jnp.ones(2**24)
    run = jax.jit(lambda p, g: p - 0.1 * g, donate_argnums=0)
    held = [p]

    def once() -> jax.Array:
        held[0] = run(held[0], g)
        return held[0]

    return 3 * p.nbytes / seconds_of(once)


def elementwise_rate() -> float:
    """FLOP/s of fused elementwise arithmetic in the mixture of a gelu or a gate: mostly cheap, some transcendental."""
    x = jnp.linspace(-1.0, 1.0, 2**18)
    run = jax.jit(lambda x: jnp.tanh(x * 0.5 + x * x * x * 0.04) * x + 0.5)
    return 9 * x.size / seconds_of(lambda: run(x))


def launch_seconds() -> float:
    """What a task costs that does nearly nothing: one of a chain of small dots."""
    count = 64
    x = jnp.eye(8)

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(count):
            x = jax.lax.optimization_barrier(x @ x)
        return x

    run = jax.jit(chain)
    return seconds_of(lambda: run(x)) / count


def measured_topology(step: TracedStep, rate: str) -> DeviceTopology:
    """All figures, as this process sees them; every process of the job must call it."""
    agree(store(), "calibration", {}, timeout_s=120)
    with undisturbed():
        other = elementwise_rate()
        dot = heavy_rate(step, "dot_general") or other
        conv = heavy_rate(step, "conv_general_dilated") or dot
        memory, launch = memory_rate(), launch_seconds()
        agree(store(), "links", {}, timeout_s=60)
        # Of one kind: alone and in a row, gloo's others reach half of a link, but in a model's steps about as much as all-reduces.
        devices = jax.devices()
        points = time_collectives((len(devices),), 0, devices, sizes_bytes=LINK_BYTES, kinds=("all-reduce",))
        link = fitted_link("host", points)
    peak = max(dot, conv, other)
    return DeviceTopology.from_dict(
        {
            "name": f"cluster{jax.device_count()}x{rate}",
            "device": {
                "name": "cpu", "platform": "cpu", "memory_bytes": MEMORY_BYTES, "memory_fraction": 1.0,
                "memory_bandwidth_bytes_per_s": memory, "memory_efficiency_fraction": 1.0,
                "peak_flops_per_s": {"float32": peak},
                "efficiency_fraction": {"dot": dot / peak, "conv": conv / peak, "other": other / peak},
                "launch_s": launch, "overlap": False, "source": "measured by scripts/cluster_calibration.py",
            },
            "levels": [
                {
                    "name": "host", "size": jax.device_count(), "bandwidth_bytes_per_s": link.bytes_per_s,
                    "latency_s": max(link.latency_s, 1e-6), "efficiency_fraction": 1.0,
                    "source": f"measured all-reduces, links of {rate}",
                }
            ],
        }
    )  # fmt: skip


def measured_operators(
    step: TracedStep, topology: DeviceTopology, *, seconds: float, seed: int, microbatches: Sequence[int] = ()
) -> tuple[Profile, list[str]]:
    """The profile of this process' device, and notes; every process of the job must call it.

    Whole operators are measured too: one of the plans that the factors are fitted on does all the work on every host.
    """
    agree(store(), "operators", {}, timeout_s=120)
    with undisturbed():
        return measure_profile(step, topology, seconds=seconds, seed=seed, microbatches=(1, *microbatches))


def fitted_factors(compute_s: Sequence[float], network_s: Sequence[float], measured_s: Sequence[float]) -> tuple[float, float]:
    """(compute, network): the factors that bring predicted steps to measured ones, in relative terms."""
    measured = np.array(measured_s)
    rows = np.stack([compute_s, network_s], 1) / measured[:, None]
    rows = np.concatenate([rows, RIDGE * np.eye(2)])
    wanted = np.concatenate([np.ones(len(measured)), RIDGE * np.ones(2)])
    (c, k), *_ = np.linalg.lstsq(rows, wanted, rcond=None)
    return float(np.clip(c, 0.25, 4.0)), float(np.clip(k, 0.25, 4.0))
