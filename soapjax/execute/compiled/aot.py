"""CUDA devices that are not there: compiling for GPUs on a machine without one.

The CUDA plugin of JAX holds the whole GPU compiler. Given a description of the GPU (`cuda_targets/*.txt`, a
`GpuTargetConfigProto` in text form) and a topology "slices x hosts x GPUs" it gives device objects that programs can be
compiled for, with the collectives, the fusions and the memory plan of the real machine. Nothing is run.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import os
import re
from typing import Any

from soapjax.errors import Problem, SoapjaxError

# What must be set before jax is imported: the plugin must neither look for GPUs nor check drivers.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
_FOLDER = importlib.resources.files("soapjax.execute.compiled") / "cuda_targets"


def target_names() -> list[str]:
    """GPUs that a description is shipped for."""
    return sorted(f.name.removesuffix(".txt") for f in _FOLDER.iterdir() if f.name.endswith(".txt"))


def target_for(device_name: str, wanted: str = "cuda") -> str:
    """The shipped target of a topology's device.

    Args:
      device_name: as in the topology, "A100-SXM4-80GB".
      wanted: "cuda" for the one that fits, or a name, which must fit.
    Raises: SoapjaxError where there is none, or `wanted` is another GPU than the topology's.
    """
    names = target_names()
    if wanted != "cuda" and wanted not in names:
        raise SoapjaxError(
            Problem("--target", repr(wanted), f"local, cpu, cuda, {', '.join(names)}", "choose one of these")
        )  # fmt: skip
    fitting = [n for n in names if n in re.split(r"[^a-z0-9]+", device_name.lower())]
    if wanted == "cuda" and not fitting:
        raise SoapjaxError(
            Problem("--target cuda", f"devices {device_name!r}", f"a topology of {', '.join(names)}",
                    "these are the GPUs that a description is shipped for: plan for one of them, or use --target cpu")
        )  # fmt: skip
    if wanted not in ("cuda", *fitting):
        raise SoapjaxError(
            Problem("--target", f"{wanted}, but the topology's devices are {device_name!r}",
                    f"the topology's GPU ({', '.join(fitting) or 'none'})",
                    "give --target cuda, or plan for a topology of that GPU")
        )  # fmt: skip
    return fitting[0]


def description(target: str, memory_bytes: int | None = None) -> str:
    """The text of a target's description, without its comments; `memory_bytes` of the device where it has less or more."""
    text = re.sub(r"(?m)^#.*\n", "", (_FOLDER / f"{target}.txt").read_text())
    return text if memory_bytes is None else re.sub(r"(device_memory_size): \d+", rf"\1: {memory_bytes}", text)


def cuda_devices(target: str, num_devices: int, devices_per_host: int, memory_bytes: int | None = None) -> list[Any]:
    """Device objects of `num_devices` GPUs of a shipped target.

    Raises: SoapjaxError where the plugin is not installed, with the command that installs it.
    """
    import jax
    from jax.experimental import topologies

    version = jax.__version__
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_cuda12_plugin") is None:
        remedy = (
            f"pip install --no-deps jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version}   "
            "(or pip install soapjax[cuda-aot]; 180 MB, no GPU and no CUDA toolkit needed)"
        )
        raise SoapjaxError(Problem("--target cuda", "no CUDA plugin", "jax-cuda12-plugin of jax's version", remedy))
    hosts = max(1, num_devices // devices_per_host)
    try:
        found = topologies.get_topology_desc(
            "", "cuda", target_config=description(target, memory_bytes), topology=f"1x{hosts}x{num_devices // hosts}"
        )
    except (NotImplementedError, RuntimeError, ValueError) as e:
        unset = [f"{k}={v}" for k, v in ENVIRONMENT.items() if os.environ.get(k) != v]
        remedy = f"set {' '.join(unset)} before jax is imported" if unset else f"install the plugin of jax {version}"
        raise SoapjaxError(Problem("--target cuda", str(e).splitlines()[0][:200], "devices of the CUDA plugin", remedy)) from None
    return list(found.devices)
