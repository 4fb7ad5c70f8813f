"""The environment of a process that is one of a job on this machine."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def flags_without_devices():
    """XLA's flags of this process without those that make its fake devices: what makes compiling quick."""
    return " ".join(f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f)


def environment(port, rank, count=2, *, devices=1):
    """That of this process, without its fake devices and proxies; it compiles as quickly."""
    kept = {k: v for k, v in os.environ.items() if "PROXY" not in k.upper()}
    return kept | {
        "XLA_FLAGS": flags_without_devices(), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(rank),
    }  # fmt: skip
