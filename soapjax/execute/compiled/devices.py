"""Devices that plans are run on or compiled for: those at hand, fake CPU devices, GPUs that are not there."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import jax

from soapjax.execute.compiled.aot import cuda_devices, target_for
from soapjax.topology import DeviceTopology

MAX_FAKE_DEVICES = 1024  # more would cost minutes and gigabytes on any machine


def devices_of_target(topology: DeviceTopology, target: str) -> list[Any]:
    """Devices to compile for: "local", "cpu" (fake ones), "cuda" (the topology's GPU, which need not be there) or a GPU's name.

    Raises: SoapjaxError where there are none, or the topology is of another GPU.
    """
    if target in ("local", "cpu"):
        devices = start_devices(topology.num_devices)
        return jax.devices("cpu")[: topology.num_devices] if target == "cpu" else devices
    name = target_for(topology.device.name, target)
    return cuda_devices(name, topology.num_devices, topology.levels[-1].size, topology.device.memory_bytes)


def start_devices(count: int) -> list[Any]:
    """At least `count` devices: the accelerators at hand, or as many fake CPU devices, started if need be."""
    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", "") and count <= MAX_FAKE_DEVICES:
        with contextlib.suppress(RuntimeError):  # the backend runs already: what it has must do
            jax.config.update("jax_num_cpu_devices", max(count, 1))
    devices = jax.devices()
    if len(devices) < count and len(jax.devices("cpu")) >= count:
        devices = jax.devices("cpu")
    return devices[:count] if len(devices) >= count else devices


def devices_of_backend(topology: DeviceTopology) -> list[Any] | None:
    """Devices that a topology's own compiler compiles for: CPU devices, its GPUs, at hand or not; None where none are known.

    Raises: SoapjaxError where the topology is of GPUs, none of which are at hand, and no compiler for them is either.
    """
    if topology.device.platform == "cpu":
        return devices_of_target(topology, "cpu")
    is_at_hand = jax.default_backend() == "gpu" and len(jax.devices()) >= topology.num_devices
    return devices_of_target(topology, "cuda") if topology.device.platform == "cuda" and not is_at_hand else None
