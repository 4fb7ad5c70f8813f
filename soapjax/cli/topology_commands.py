"""What `soapjax topologies` does."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.text import Text

from soapjax.cli.arguments import TopologiesCommand
from soapjax.cli.results import Result
from soapjax.errors import Problem, SoapjaxError
from soapjax.report.text_table import TextTable
from soapjax.topology import DeviceTopology, LinkLevel, ShippedTopology, load_topology, shipped_catalogue
from soapjax.topology.shipped import LOCAL, LOCAL_DESCRIPTION


def topologies_command(command: TopologiesCommand) -> Result:
    if command.names:
        return _in_full(command.names)
    shipped = shipped_catalogue()
    table = TextTable(box=None, pad_edge=False, title="links in GB/s per device and direction", title_justify="left")
    for column in ("name", "links", "what it is"):
        table.add_column(column, no_wrap=column == "name", overflow="fold")
    for s in shipped:
        table.add_row(s.name, _links(s), s.description)
    table.add_row(LOCAL, "", LOCAL_DESCRIPTION)
    lines = (
        "--topology dgx_a100 --hosts 64 is 64 such nodes; so is 64xdgx_a100 wherever a topology is named.",
        "All figures of one, and where each comes from: soapjax topologies NAME",
    )
    return {"topologies": [_data(s) for s in shipped]}, Group(table, Text("\n".join(lines))), 0


def _links(shipped: ShippedTopology) -> str:
    levels = [*([shipped.network] if shipped.network is not None else []), *shipped.node.levels]
    return ", ".join(f"{level.name} {level.bandwidth_bytes_per_s / 1e9:.4g}" for level in levels)


def _data(shipped: ShippedTopology) -> dict[str, Any]:
    """The figures in base units, as a plan file has them; "network" joins the hosts of a topology by node."""
    network = None if shipped.network is None else _level_data(shipped.network)
    return shipped.node.to_dict() | {
        "description": shipped.description, "num_devices": shipped.node.num_devices, "network": network,
    }  # fmt: skip


def _level_data(level: LinkLevel) -> dict[str, Any]:
    return {
        "bandwidth_bytes_per_s": level.bandwidth_bytes_per_s, "latency_s": level.latency_s,
        "efficiency_fraction": level.efficiency, "source": level.source,
    }  # fmt: skip


def _in_full(names: tuple[str, ...]) -> Result:
    found: list[DeviceTopology] = []
    problems: list[Problem] = []
    for name in names:
        try:
            found.append(load_topology(name))
        except SoapjaxError as e:
            problems += e.problems
    if problems:
        raise SoapjaxError(problems)
    text = "\n\n".join(f"{t.describe()}\n{_all_sources(t)}" for t in found)
    return {"topologies": [t.to_dict() | {"num_devices": t.num_devices} for t in found]}, Text(text), 0


def _all_sources(topology: DeviceTopology) -> str:
    sources = topology.device.source | {f"level {level.name}": level.source for level in topology.levels}
    return "\n".join(["  where these come from:", *(f"    {figure}: {text}" for figure, text in sources.items())])
