"""The topology of this machine, as JAX sees it.

Counts come from JAX: one level of processes ("host") and one of the devices of
each ("device"). Figures come from the shipped file whose device name stands in
the `device_kind` that JAX reports, or else of the same model family (an
A100-PCIe gets the figures of the A100-SXM4), whole machines before nodes, and of
nodes the one with the slowest network; a device of no known family gets
those of `FALLBACK_TOPOLOGY`. CPUs get a conservative table, per core. Each
`source` says which of these it was.

All of it is a first guess, to be replaced by measurement: links in particular
are taken to be those of the shipped machine.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from soapjax.errors import Problem, SoapjaxError
from soapjax.topology.device_topology import SOURCED_FIGURES, DeviceKind, DeviceTopology, LinkLevel, margin_of
from soapjax.topology.toml_file import shipped_catalogue, shipped_topology

FALLBACK_TOPOLOGY = "dgx1_v100x8"
# Memory is rounded down to a multiple of this, so that all hosts and all runs of a machine find the same.
MEMORY_STEP_BYTES = 2**28

# A CPU core, conservatively: 8 float32 lanes x 2 (multiply and add) x 2 GHz; bfloat16 is emulated and gets no figure.
CORE_FLOAT32_FLOPS_PER_S = 32e9
CORE_FLOAT64_FLOPS_PER_S = 16e9
MACHINE_MEMORY_BANDWIDTH_BYTES_PER_S = 20e9  # one machine, shared by its devices
HOST_LINK_BYTES_PER_S = 1.25e9  # 10 Gb/s Ethernet, shared by the devices of the host
HOST_LINK_LATENCY_S = 50e-6
SHARED_MEMORY_LATENCY_S = 20e-6


def local_topology(devices: Sequence[Any] | None = None) -> DeviceTopology:
    """The topology of `devices`, `jax.devices()` by default. Timings on fake CPU devices mean nothing, and `fake` says so.

    Raises: SoapjaxError where devices differ in kind, or hosts in their number of devices.
    """
    import jax  # late: reading a topology file needs no JAX

    devices = jax.devices() if devices is None else list(devices)
    num_hosts, num_local = _host_and_device_counts(devices)
    first = next((d for d in devices if d.process_index == jax.process_index()), devices[0])
    if first.platform == "cpu":
        device, host_level, device_level = _cpu_figures(max(num_local, jax.local_device_count()))  # they share the machine
    else:
        device, host_level, device_level = _accelerator_figures(first, num_local)
    levels = (replace(host_level, size=num_hosts), replace(device_level, size=num_local))
    return DeviceTopology(
        name="local",
        device=device,
        levels=levels if num_hosts > 1 else levels[1:],
        fake=first.platform == "cpu" and num_local > 1,
    )


def _host_and_device_counts(devices: Sequence[Any]) -> tuple[int, int]:
    problems = []
    kinds = Counter(d.device_kind for d in devices)
    if len(kinds) > 1:
        problems.append(
            Problem("jax.devices()", f"the kinds {dict(kinds)}", "one kind of device", "hide the others (CUDA_VISIBLE_DEVICES)")
        )
    per_process = Counter(d.process_index for d in devices)
    if len(set(per_process.values())) > 1:
        problems.append(
            Problem(
                "jax.devices()",
                f"{sorted(per_process.values())} devices per process",
                "as many in each",
                "start every process with the same number of devices",
            )
        )
    if problems:
        raise SoapjaxError(problems)
    return len(per_process), len(devices) // len(per_process)


def _accelerator_figures(device: Any, num_local: int) -> tuple[DeviceKind, LinkLevel, LinkLevel]:
    shipped, how = _shipped_match(device.device_kind)
    kind = shipped.device
    source = {figure: f"{how}: {text}" for figure, text in kind.source.items()}
    memory_bytes, memory_fraction = kind.memory_bytes, kind.memory_fraction
    limit_bytes = (device.memory_stats() or {}).get("bytes_limit", 0)
    if limit_bytes >= MEMORY_STEP_BYTES:
        # What the allocator of this process may use: XLA's fraction is already taken.
        memory_bytes, memory_fraction = limit_bytes // MEMORY_STEP_BYTES * MEMORY_STEP_BYTES, 1.0
        source["memory"] = source["memory_fraction"] = "device.memory_stats()['bytes_limit'], rounded down to 1/4 GiB"
    kind = replace(
        kind,
        name=device.device_kind,
        platform=_platform_name(device),
        memory_bytes=memory_bytes,
        memory_fraction=memory_fraction,
        source=source,
    )
    within_host = shipped.levels[1] if len(shipped.levels) > 1 else shipped.levels[0]
    # Which pairs are linked on this machine is not known.
    device_level = replace(within_host, name="device", source=f"{how}: {within_host.source}", links=())
    host_level = _ethernet(num_local)
    if len(shipped.levels) > 1:
        host_level = replace(shipped.levels[0], name="host", source=f"{how}: {shipped.levels[0].source}")
    return kind, host_level, device_level


def _platform_name(device: Any) -> str:
    """JAX says "gpu" for every vendor; the topology names the vendor's platform."""
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def _shipped_match(device_kind: str) -> tuple[DeviceTopology, str]:
    """The shipped topology of this kind of device, the one with most levels first, and how it was found."""
    shipped = shipped_catalogue()
    fixed = sorted((s.node for s in shipped if s.network is None), key=lambda t: (-len(t.levels), -t.num_devices))
    nodes = sorted((s for s in shipped if s.network is not None), key=lambda s: (s.network.bandwidth_bytes_per_s, len(s.name)))
    candidates = [*fixed, *(replace(s.node, levels=(s.network, *s.node.levels)) for s in nodes)]
    words = set(re.split(r"[^a-z0-9]+", device_kind.lower()))
    exact = [t for t in candidates if re.search(rf"\b{re.escape(t.device.name)}\b", device_kind, re.IGNORECASE)]
    family = [t for t in candidates if t.device.platform != "cpu" and re.split("[^a-z0-9]+", t.device.name.lower())[0] in words]
    if exact:
        best = max(exact, key=lambda t: len(t.device.name))
        return best, f"as in {best.name}"
    if family:
        return family[0], f"assumption: {device_kind} is like the {family[0].device.name} of {family[0].name}"
    return shipped_topology(FALLBACK_TOPOLOGY), f"assumption: unknown device {device_kind!r} taken as in {FALLBACK_TOPOLOGY}"


def _cpu_figures(num_local: int) -> tuple[DeviceKind, LinkLevel, LinkLevel]:
    cores_per_device = len(os.sched_getaffinity(0)) / num_local if hasattr(os, "sched_getaffinity") else 1.0
    memory_bandwidth = MACHINE_MEMORY_BANDWIDTH_BYTES_PER_S / num_local
    assumption = "assumption: conservative table for CPUs, divided by the devices of the machine"
    device = DeviceKind(
        name="cpu",
        platform="cpu",
        memory_bytes=max(_machine_memory_bytes() // num_local // MEMORY_STEP_BYTES, 1) * MEMORY_STEP_BYTES,
        memory_bandwidth_bytes_per_s=memory_bandwidth,
        memory_efficiency=0.6,
        peak_flops_per_s={
            "float64": CORE_FLOAT64_FLOPS_PER_S * cores_per_device,
            "float32": CORE_FLOAT32_FLOPS_PER_S * cores_per_device,
        },
        efficiency={"dot": 0.5, "conv": 0.3, "other": 0.1},
        memory_margin=margin_of("cpu"),
        launch_s=5e-6,
        overlap=False,
        source=dict.fromkeys(SOURCED_FIGURES, assumption)
        | {"memory": "the machine's memory (/proc/meminfo or control group), divided by its devices, rounded down to 1/4 GiB"},
    )
    # A copy through shared memory reads and writes it.
    shared_memory = LinkLevel("device", num_local, memory_bandwidth / 2, SHARED_MEMORY_LATENCY_S, 0.6, assumption)
    return device, _ethernet(num_local), shared_memory


def _ethernet(num_local: int) -> LinkLevel:
    source = "assumption: one 10 Gb/s Ethernet port per host, shared by its devices"
    return LinkLevel("host", 1, HOST_LINK_BYTES_PER_S / num_local, HOST_LINK_LATENCY_S, 0.7, source)


def _machine_memory_bytes() -> int:
    """The memory that this process may use at most; 4 GiB where the system does not tell."""
    limits = []
    try:
        match = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        limits += [int(match[1]) * 1024] if match else []
    except OSError:
        pass
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        limits += [int(text)] if text.isdigit() else []
    except OSError:
        pass
    return min(limits, default=4 * 2**30)
