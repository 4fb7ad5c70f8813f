"""Which devices there are and how they are linked: plain data, in base units.

A `DeviceTopology` is a kind of device and a list of link levels, slowest
first. Each level joins `size` units of the next-lower level, so that 8 hosts of
8 GPUs are two levels, and device number i sits at host i // 8, place i % 8:

>>> topology = load_topology("a100x64")
>>> [(level.name, level.size) for level in topology.levels]
[('host', 8), ('device', 8)]
>>> topology.num_devices, topology.device.peak("bfloat16")
(64, 312000000000000.0)
>>> topology == DeviceTopology.from_dict(topology.to_dict())
True

`from_dict` and the TOML files share one schema (toml_file.py documents it) and
one checker; `to_dict` writes it in base units.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from soapjax.errors import Problem, SoapjaxError
from soapjax.helpers.canonical_json import sha256_of
from soapjax.topology.rings import MOST_DEVICES, Matrix, detour_share, group_shares, is_matrix
from soapjax.topology.table_reader import (
    BANDWIDTH_UNITS,
    FRACTION_UNITS,
    LATENCY_UNITS,
    MEMORY_UNITS,
    PEAK_UNITS,
    TableReader,
    shown,
)

MAX_DEVICES = 2**20
MAX_LEVELS = 20
DEFAULT_MEMORY_FRACTION = 0.75  # what XLA's GPU allocator takes unless told otherwise
# What plans that nobody compiled leave free, since a compiled step may take more than was predicted. Of 10 planners' plans on GPUs
# 9 take at most 9.4 % more (results/verify_bytes.csv, large models on a100x64), on CPUs, where XLA tells a sum, 49 % (cpu8).
MEMORY_MARGINS = {"cpu": 0.33}
DEFAULT_MEMORY_MARGIN = 0.1
OPERATOR_CLASSES = ("dot", "conv", "other")
COLLECTIVE_KINDS = ("reduce-scatter", "all-reduce", "all-to-all", "all-gather", "collective-permute")
PEAK_DTYPES = ("float64", "float32", "tensorfloat32", "bfloat16", "float16")
# The keys of `DeviceKind.source`: one per figure of the device, without its unit.
SOURCED_FIGURES = (
    "memory",
    "memory_fraction",
    "memory_bandwidth",
    "memory_efficiency",
    "peak",
    "efficiency",
    "launch",
    "overlap",
)


@dataclass(frozen=True)
class LinkLevel:
    """One level of links; collectives within it run at its bandwidth and latency."""

    name: str  # lower-case word: "host", "device"
    size: int  # how many of the next-lower units this level joins
    bandwidth_bytes_per_s: float  # per device, one direction
    latency_s: float  # per step of a collective
    efficiency: float  # achieved fraction of the bandwidth
    source: str
    collective_fraction: dict[str, float] = field(default_factory=dict, hash=False)  # by kind: of what others achieve, 1 if absent
    links: Matrix = ()  # between any two of the units, where the bandwidth is that of all links of one; empty: a switch

    @property
    def achieved_bytes_per_s(self) -> float:
        return self.bandwidth_bytes_per_s * self.efficiency

    def part(self, begin: int, size: int) -> LinkLevel:
        """The level of `size` of its units from `begin`; of more units than it has, all linked alike.

        Where some of them have no links to form a ring they detour (`detour_share`).
        """
        end = begin + size
        links = tuple(row[begin:end] for row in self.links[begin:end]) if size <= self.size else ()
        if not links or size == 1:
            return replace(self, size=size, links=())
        is_joined = all(map(any, links)) and all(share for share, _ in group_shares(links, _prime_factors(size)).values())
        if not is_joined:
            return replace(self, size=size, links=(), bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * detour_share(self.links))
        inside = max(map(sum, links)) / max(map(sum, self.links))  # of a unit's links, those that do not lead elsewhere
        return replace(self, size=size, links=links, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * inside)

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """Of its axes in the factor mesh: the prime factors of its size, largest first; none for 1."""
        return _prime_factors(self.size)


@dataclass(frozen=True)
class DeviceKind:
    """One device: its memory, its arithmetic and what a task costs on it at least."""

    name: str
    platform: str  # as JAX names backends: "cpu", "cuda", "rocm", "tpu"
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    memory_efficiency: float  # achieved fraction of the memory bandwidth
    peak_flops_per_s: dict[str, float] = field(hash=False)  # by dtype, see `peak`
    efficiency: dict[str, float] = field(hash=False)  # by operator class: achieved fraction of the peak
    launch_s: float  # fixed cost per task
    overlap: bool  # whether communication runs beside compute
    source: dict[str, str] = field(hash=False)  # where each figure comes from; keys: SOURCED_FIGURES
    memory_fraction: float = DEFAULT_MEMORY_FRACTION
    memory_margin: float = 0.0  # of what a program may take: what a plan leaves free, for the error of its prediction

    @property
    def available_memory_bytes(self) -> int:
        """What a compiled program may take at its peak."""
        return int(self.memory_bytes * self.memory_fraction)

    @property
    def usable_memory_bytes(self) -> int:
        """What a plan may be predicted to take: the one limit of all planners, baselines and reports."""
        return int(self.available_memory_bytes * (1 - self.memory_margin))

    def peak(self, dtype: str, *, operator_class: str | None = None) -> float:
        """Peak FLOP/s for `dtype` (a NumPy dtype name); a dtype without a figure runs at the rate of float32.

        With `operator_class` "dot" or "conv", float32 is counted at the rate of `tensorfloat32`
        where there is one: XLA's default precision multiplies so on these GPUs.
        """
        if dtype == "float32" and operator_class in ("dot", "conv"):
            dtype = "tensorfloat32"
        return self.peak_flops_per_s.get(dtype, self.peak_flops_per_s["float32"])


@dataclass(frozen=True)
class DeviceTopology:
    """A kind of device, and the levels of links between them, slowest first."""

    name: str
    device: DeviceKind
    levels: tuple[LinkLevel, ...]
    fake: bool = False  # devices of one machine that share its cores: timings mean nothing
    # Collectives of groups on several levels are one ring through all devices, as NCCL's; else they go level by level.
    rings_across_levels: bool = False

    @property
    def num_devices(self) -> int:
        return math.prod(level.size for level in self.levels)

    def usable_up_to(self, limit_bytes: float) -> DeviceTopology:
        """The same, with a margin of which plans may be predicted to take so much of a device."""
        share = min(max(limit_bytes / self.device.available_memory_bytes, 0.0), 1.0)
        return replace(self, device=replace(self.device, memory_margin=1 - share))

    def describe(self) -> str:
        """A few lines for people."""
        device = self.device
        lines = [
            f"{self.name}: {self.num_devices} x {device.name} ({device.platform}), "
            f"{device.usable_memory_bytes / 2**30:.4g} of {device.memory_bytes / 2**30:.4g} GiB usable each"
            + (" [fake devices: timings mean nothing]" if self.fake else "")
        ]
        peaks = ", ".join(f"{dtype} {peak / 1e12:.4g}" for dtype, peak in device.peak_flops_per_s.items())
        lines.append(f"  peak TFLOP/s: {peaks}; memory {device.memory_bandwidth_bytes_per_s / 1e9:.4g} GB/s")
        lines += [
            f"  {level.name} x{level.size}: {level.bandwidth_bytes_per_s / 1e9:.4g} GB/s per device and direction, "
            f"{level.latency_s * 1e6:.4g} us per step, {level.efficiency:.0%} achieved"
            for level in self.levels
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data in the schema of the TOML files, in base units."""
        device = self.device
        return {
            "name": self.name,
            "fake": self.fake,
            "device": {
                "name": device.name,
                "platform": device.platform,
                "memory_bytes": device.memory_bytes,
                "memory_fraction": device.memory_fraction,
                "memory_margin_fraction": device.memory_margin,
                "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s,
                "memory_efficiency_fraction": device.memory_efficiency,
                "peak_flops_per_s": dict(device.peak_flops_per_s),
                "efficiency_fraction": dict(device.efficiency),
                "launch_s": device.launch_s,
                "overlap": device.overlap,
                "source": dict(device.source),
            },
            "levels": [
                {
                    "name": level.name,
                    "size": level.size,
                    "bandwidth_bytes_per_s": level.bandwidth_bytes_per_s,
                    "latency_s": level.latency_s,
                    "efficiency_fraction": level.efficiency,
                    "source": level.source,
                }
                | ({"collective_fraction": dict(level.collective_fraction)} if level.collective_fraction else {})
                | ({"links": [list(row) for row in level.links]} if level.links else {})
                for level in self.levels
            ],
        } | ({"rings_across_levels": True} if self.rings_across_levels else {})

    @staticmethod
    def from_dict(data: Mapping[str, Any], *, place: str = "topology", also: tuple[str, ...] = ()) -> DeviceTopology:
        """The topology that `data` describes; `also`: further keys that whoever calls has taken out of it.

        Raises: SoapjaxError with every problem found, each named as `place: table.key`.
        """
        problems: list[Problem] = []
        reader = TableReader(data, place, problems, separator=": ")
        for key in also:
            reader.offers(key)
        topology = _read_topology(reader)
        if problems:
            raise SoapjaxError(problems)
        return topology

    def fingerprint(self) -> str:
        """SHA-256 (hex) of the machine's figures, whatever its name, their sources, and the margin that a plan keeps."""
        data = self.to_dict()
        del data["name"], data["device"]["memory_margin_fraction"]
        for table in (data["device"], *data["levels"]):
            del table["source"]
        return sha256_of(data)


def _read_topology(reader: TableReader) -> DeviceTopology:
    topology = DeviceTopology(
        name=reader.name("name"),
        device=_read_device(reader.table("device")),
        levels=tuple(read_level(r) for r in reader.tables("levels", at_most=MAX_LEVELS)),
        fake=reader.boolean("fake", default=False),
        rings_across_levels=reader.boolean("rings_across_levels", default=False),
    )
    names = [level.name for level in topology.levels if level.name]
    for name in sorted({n for n in names if names.count(n) > 1}):
        reader.report("levels", f"{names.count(name)} levels named {name!r}", "a name of its own for each", "rename all but one")
    if topology.num_devices > MAX_DEVICES:
        reader.report("levels", f"{topology.num_devices} devices", f"at most {MAX_DEVICES}", "make the sizes smaller")
    reader.finish()
    return topology


def _read_device(reader: TableReader) -> DeviceKind:
    memory_bytes = reader.figure("memory", MEMORY_UNITS)
    if memory_bytes < 1.0 or memory_bytes > 2**60:
        reader.report("memory", f"{memory_bytes:g} bytes", "between 1 byte and 2**60 bytes", "correct the figure or its unit")
    platform = reader.name("platform")
    device = DeviceKind(
        name=reader.name("name"),
        platform=platform,
        memory_bytes=int(memory_bytes),
        memory_fraction=reader.number("memory_fraction", at_most=1.0, default=DEFAULT_MEMORY_FRACTION),
        memory_margin=_read_margin(reader, platform),
        memory_bandwidth_bytes_per_s=reader.figure("memory_bandwidth", BANDWIDTH_UNITS),
        memory_efficiency=reader.figure("memory_efficiency", FRACTION_UNITS, at_most=1.0),
        peak_flops_per_s=_read_peak(reader),
        efficiency=_read_efficiency(reader),
        launch_s=reader.figure("launch", LATENCY_UNITS),
        overlap=reader.boolean("overlap"),
        source=_read_source(reader),
    )
    reader.finish()
    return device


def _read_margin(reader: TableReader, platform: str) -> float:
    if not reader.offers("memory_margin_fraction"):
        return margin_of(platform)
    found = reader.get("memory_margin_fraction")
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 <= found <= 1:
        reader.report("memory_margin_fraction", shown(found), "a share from 0 to 1", "leave it out for the platform's")
        return 0.0
    return float(found)


def margin_of(platform: str) -> float:
    """The share of a device's memory that plans which nobody compiled leave free."""
    return MEMORY_MARGINS.get(platform, DEFAULT_MEMORY_MARGIN)


def _read_peak(reader: TableReader) -> dict[str, float]:
    keys = {f"peak_{unit.suffix}": unit for unit in PEAK_UNITS}
    key = reader.unit_key("peak", keys)
    if key is None:
        return {"float32": 1.0}
    table = reader.table(key)
    peak = {d: table.number(d, unit=keys[key]) for d in PEAK_DTYPES if d == "float32" or table.offers(d)}
    table.finish()
    return peak


def _read_efficiency(reader: TableReader) -> dict[str, float]:
    key = reader.unit_key("efficiency", {"efficiency_fraction": FRACTION_UNITS[0]})
    if key is None:
        return dict.fromkeys(OPERATOR_CLASSES, 1.0)
    table = reader.table(key)
    efficiency = {c: table.number(c, at_most=1.0) for c in OPERATOR_CLASSES}
    table.finish()
    return efficiency


def _read_source(reader: TableReader) -> dict[str, str]:
    """`source` is one text for every figure of the device, or a table with one text for each."""
    if isinstance(reader.get("source"), Mapping):
        table = reader.table("source")
        source = {figure: table.text(figure) for figure in SOURCED_FIGURES}
        table.finish()
        return source
    return dict.fromkeys(SOURCED_FIGURES, reader.text("source"))


def _read_collectives(reader: TableReader) -> dict[str, float]:
    if not reader.offers("collective_fraction"):
        return {}
    table = reader.table("collective_fraction")
    fractions = {kind: table.number(kind, at_most=10.0) for kind in COLLECTIVE_KINDS if table.offers(kind)}
    table.finish()
    return fractions


def _read_links(reader: TableReader, size: int) -> Matrix:
    if not reader.offers("links"):
        return ()
    found = reader.get("links")
    if size > MOST_DEVICES:
        reader.report("links", f"{size} units", f"at most {MOST_DEVICES}", "leave links out, or make two levels of it")
    elif not is_matrix(found, size):
        expected = f"{size} rows of {size} whole numbers, how many links join any two: both ways alike, none to itself"
        remedy = "write what the driver's table of links shows (NV2 is 2), or leave links out where a switch joins all"
        reader.report("links", shown(found), expected, remedy)
    else:
        links = tuple(tuple(row) for row in found)
        apart = [group for share, group in group_shares(links, _prime_factors(size)).values() if not share]
        if not apart:
            return links
        value, expected = f"no ring through {', '.join(map(str, apart[0]))}", "a ring through every group along axes of the mesh"
        reader.report("links", value, expected, "describe those that are linked by a level of their own")
    return ()


def _prime_factors(n: int) -> tuple[int, ...]:
    """The prime factors of `n`, largest first; none for 1."""
    factors, divisor = [], 2
    while divisor * divisor <= n:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    return tuple(sorted(factors + ([n] if n > 1 else []), reverse=True))


def read_level(reader: TableReader) -> LinkLevel:
    """The level of a table; what is wrong with it becomes problems of the reader's."""
    size = reader.count("size", at_most=MAX_DEVICES)
    level = LinkLevel(
        name=reader.name("name"),
        size=size,
        bandwidth_bytes_per_s=reader.figure("bandwidth", BANDWIDTH_UNITS),
        latency_s=reader.figure("latency", LATENCY_UNITS),
        efficiency=reader.figure("efficiency", FRACTION_UNITS, at_most=1.0),
        source=reader.text("source"),
        collective_fraction=_read_collectives(reader),
        links=_read_links(reader, size),
    )
    if level.name and not re.fullmatch("[a-z][a-z_]*", level.name):
        reader.report("name", shown(level.name), "a lower-case word", "mesh axes are named after it: write it with a-z and _ only")
    reader.finish()
    return level
