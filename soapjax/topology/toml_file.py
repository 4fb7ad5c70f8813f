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
    shares (0, 1]      memory_fraction, memory_efficiency_fraction, efficiency_fraction; memory_margin_fraction may be 0

GB is 10**9 bytes (8 Gb), GiB is 2**30. A bandwidth is that of one device in one direction: a
host's 100 Gb/s card shared by four GPUs is 100 / 8 / 4 = 3.125. A file, in full:

    name = "mybox"
    description = "four hosts of eight A100"  # optional
    fake = false                            # optional; true: devices share one machine's cores
    rings_across_levels = false             # optional; true: a collective over hosts is one ring through all GPUs, as NCCL's

    [device]
    name = "A100-SXM4-80GB"
    platform = "cuda"
    memory_gib = 79.15
    memory_fraction = 0.75                  # optional: XLA takes this share
    memory_margin_fraction = 0.1            # optional: of that, what plans leave free that nobody compiled
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

A file may describe one node and say how many later (`--hosts`, `hosts=` or "64xmynode.toml"; see nodes.py). Its levels are
those within the node, and one more table holds the links between nodes: it has the keys of a level, less name and size.

    [network]
    bandwidth_gbytes_per_s = 25
    latency_us = 8
    efficiency_fraction = 0.8
    source = "..."

With `like = "dgx_a100"` a file has all tables and keys of that shipped one, but for those that it gives itself, each as a whole:
a cluster of such nodes with a network of its own is three keys and `[network]`.
"""

from __future__ import annotations

import tomllib
from typing import Any, NamedTuple

from soapjax.errors import Problem, SoapjaxError
from soapjax.helpers.files import read_text
from soapjax.topology.device_topology import DeviceTopology, LinkLevel
from soapjax.topology.nodes import machine, node_and_network
from soapjax.topology.shipped import remedy_with_names, shipped_descriptions, shipped_files
from soapjax.topology.table_reader import shown

# A topology is a page of text. The bounds keep odd input from costing minutes: the parser's time
# grows with the square of the length of a dotted key.
MAX_FILE_BYTES = 2**16
MAX_LINE_CHARACTERS = 2000


class ShippedTopology(NamedTuple):
    """A topology that comes with soapjax; `network` joins nodes, and is None where the number of hosts is fixed."""

    name: str
    description: str
    node: DeviceTopology
    network: LinkLevel | None


def parse_topology(text: str, *, place: str, hosts: int | None = None) -> DeviceTopology:
    """The topology that the TOML `text` describes, `hosts` nodes of it; `place` names it in errors."""
    return machine(_with_base(_table(text, place), place), place=place, hosts=hosts)


def shipped_topology(name: str, *, hosts: int | None = None) -> DeviceTopology:
    """The topology that comes with soapjax under `name`."""
    return parse_topology(shipped_files()[name].read_text(encoding="utf-8"), place=f"{name}.toml", hosts=hosts)


def read_topology(path: str, *, hosts: int | None = None) -> DeviceTopology:
    """The topology of a file."""
    return parse_topology(read_text(path, max_bytes=MAX_FILE_BYTES), place=path, hosts=hosts)


def shipped_catalogue() -> tuple[ShippedTopology, ...]:
    """All that comes with soapjax, by name."""
    files, found = shipped_files(), []
    for name, description in shipped_descriptions().items():
        place = f"{name}.toml"
        data = _with_base(_table(files[name].read_text(encoding="utf-8"), place), place)
        found.append(ShippedTopology(name, description, *node_and_network(data, place=place)))
    return tuple(found)


def _table(text: str, place: str) -> dict[str, Any]:
    """The table of a TOML text, of whatever keys."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_LINE_CHARACTERS:
            value, expected = f"{len(line)} characters", f"at most {MAX_LINE_CHARACTERS}"
            remedy = "this is not a topology file; the shipped ones are examples"
            raise SoapjaxError(Problem(f"{place}: line {number}", value, expected, remedy))
    try:
        return tomllib.loads(text)
    except RecursionError:
        remedy = "this is not one; the shipped ones are examples"
        raise SoapjaxError(Problem(place, "brackets nested too deep", "a topology file", remedy)) from None
    except ValueError as e:  # TOMLDecodeError, or a number with thousands of digits
        value, remedy = f"text that is not TOML ({e})", "correct that line; strings need quotes"
        raise SoapjaxError(Problem(place, value, "a TOML file", remedy)) from None


def _with_base(data: dict[str, Any], place: str) -> dict[str, Any]:
    """What the shipped file that `data` is like has and `data` lacks, added; the name and the description are its own."""
    if "like" not in data:
        return data
    like, shipped = data["like"], shipped_files()
    if not isinstance(like, str) or like not in shipped:
        remedy = remedy_with_names("name one of these") if shipped else "leave it out, and give all tables"
        raise SoapjaxError(Problem(f"{place}: like", shown(like), "a shipped topology", remedy))
    base = _with_base(_table(shipped[like].read_text(encoding="utf-8"), f"{like}.toml"), f"{like}.toml")
    return {k: v for k, v in base.items() if k not in ("name", "description")} | data
