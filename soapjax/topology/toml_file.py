"""Topology files: TOML, edited by hand.

The unit of every figure is in its key, and every figure has a `source`: a
datasheet, a measurement, or `assumption: ...`. Two scales are understood, one
for hands and one in base units (which `DeviceTopology.to_dict` writes):

    figure             by hand                           base units
    memory             memory_gib                        memory_bytes
    memory bandwidth   memory_bandwidth_gbytes_per_s     memory_bandwidth_bytes_per_s
    arithmetic         [device.peak_tflops_per_s]        [device.peak_flops_per_s]
    link bandwidth     bandwidth_gbytes_per_s            bandwidth_bytes_per_s
    times              latency_us, launch_us             latency_s, launch_s
    shares (0, 1]      memory_fraction, memory_efficiency_fraction, efficiency_fraction

GB is 10**9 bytes (8 Gb), GiB is 2**30. A bandwidth is that of one device in one direction: a
host's 100 Gb/s card shared by four GPUs is 100 / 8 / 4 = 3.125. A file, in full:

    name = "mybox"
    fake = false                            # optional; true: devices share one machine's cores
    rings_across_levels = false             # optional; true: a collective over hosts is one ring through all GPUs, as NCCL's

    [device]
    name = "A100-SXM4-80GB"
    platform = "cuda"
    memory_gib = 79.15
    memory_fraction = 0.75                  # optional: XLA takes this share
    memory_bandwidth_gbytes_per_s = 2039
    memory_efficiency_fraction = 0.8        # achieved share of the line above
    launch_us = 4                           # fixed cost of a task
    overlap = true                          # communication runs beside compute
    source = "NVIDIA A100 datasheet"        # or a table: one text per figure

    [device.peak_tflops_per_s]              # float32 is needed; others, where absent, run at its rate
    float32 = 19.5
    tensorfloat32 = 156                     # dots and convolutions of float32 at default precision
    bfloat16 = 312

    [device.efficiency_fraction]            # achieved share of the peak, by class of operator
    dot = 0.6
    conv = 0.5
    other = 0.5

    [[levels]]                              # slowest links first
    name = "host"
    size = 4                                # four hosts ...
    bandwidth_gbytes_per_s = 25
    latency_us = 8                          # per step of a collective
    efficiency_fraction = 0.8
    source = "HDR InfiniBand, 200 Gb/s per GPU; latency and efficiency: assumption"

    [[levels]]
    name = "device"
    size = 8                                # ... of eight GPUs
    ...
    links = [[0, 1, 1, 2, ...], ...]        # optional: how many join any two, where no switch joins all; the bandwidth is
                                            # that of all links of one, and smaller groups' rings find fewer
    [levels.collective_fraction]            # optional: kinds that reach more or less of the bandwidth than the others
    all-to-all = 0.6
"""

from __future__ import annotations

import difflib
import importlib.resources
import os
import tomllib
from importlib.resources.abc import Traversable
from pathlib import Path

from soapjax.errors import Problem, SoapjaxError
from soapjax.files import read_text
from soapjax.topology.device_topology import DeviceTopology
from soapjax.topology.table_reader import shown

LOCAL = "local"
# A topology is a page of text. The bounds keep odd input from costing minutes: the parser's time
# grows with the square of the length of a dotted key.
MAX_FILE_BYTES = 2**16
MAX_LINE_CHARACTERS = 2000


def load_topology(name_or_path: str | os.PathLike[str]) -> DeviceTopology:
    """The topology of a TOML file, of a shipped name such as "a100x64", or of this machine ("local").

    Raises: SoapjaxError with everything that is wrong with the file, or the valid names.
    """
    if not isinstance(name_or_path, str | os.PathLike):
        raise SoapjaxError(
            Problem("topology", shown(name_or_path), "a name or the path of a TOML file", _remedy_with_names("pass a text"))
        )
    name = os.fspath(name_or_path)
    if name == LOCAL:
        from soapjax.topology.local import local_topology

        return local_topology()
    if not isinstance(name, str) or "\0" in name:
        raise SoapjaxError(Problem("topology", shown(name), "a name or the path of a TOML file", _remedy_with_names("correct it")))
    shipped = _shipped_files()
    if name in shipped:
        return parse_topology(shipped[name].read_text(encoding="utf-8"), place=f"{name}.toml")
    if isinstance(name_or_path, os.PathLike) or name.endswith(".toml") or os.path.isfile(name) or len(Path(name).parts) > 1:
        return parse_topology(read_text(name, max_bytes=MAX_FILE_BYTES), place=name)
    close = difflib.get_close_matches(name[:100], [LOCAL, *shipped], n=1)
    remedy = _remedy_with_names(f"write {close[0]!r}" if close else "choose one of these, or give the path of a TOML file")
    raise SoapjaxError(Problem("topology", shown(name), "a known topology", remedy))


def parse_topology(text: str, *, place: str) -> DeviceTopology:
    """The topology that the TOML `text` describes; `place` names it in errors."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_LINE_CHARACTERS:
            raise SoapjaxError(
                Problem(
                    f"{place}: line {number}",
                    f"{len(line)} characters",
                    f"at most {MAX_LINE_CHARACTERS}",
                    "this is not a topology file; the shipped ones are examples",
                )
            )
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise SoapjaxError(
            Problem(place, "brackets nested too deep", "a topology file", "this is not one; the shipped ones are examples")
        ) from None
    except ValueError as e:  # TOMLDecodeError, or a number with thousands of digits
        raise SoapjaxError(
            Problem(place, f"text that is not TOML ({e})", "a TOML file", "correct that line; strings need quotes")
        ) from None
    return DeviceTopology.from_dict(data, place=place)


def shipped_topologies() -> tuple[str, ...]:
    """The names of the topologies that come with soapjax."""
    return tuple(sorted(_shipped_files()))


def _shipped_files() -> dict[str, Traversable]:
    """The shipped files by name: package data of an installed wheel, or in a checkout the folder beside the package."""
    folder: Traversable = importlib.resources.files("soapjax") / "topologies"
    if not folder.is_dir():
        folder = Path(__file__).resolve().parents[2] / "topologies"
    if not folder.is_dir():
        return {}
    return {f.name.removesuffix(".toml"): f for f in folder.iterdir() if f.name.endswith(".toml")}


def _remedy_with_names(remedy: str) -> str:
    return f"{remedy} (shipped: {', '.join(shipped_topologies())}; {LOCAL!r} is this machine)"
