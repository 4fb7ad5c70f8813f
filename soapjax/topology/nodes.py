"""Machines by node: a file that has a table `[network]` describes one node, and how nodes of its kind are joined.

A machine of `hosts` such nodes has one more level of links, "host", whose figures are those of `[network]`; one node has
none. Wherever a topology is named, number and name in one word do:

>>> load_topology("64xdgx_a100") == load_topology("dgx_a100", hosts=64)
True
>>> [(level.name, level.size) for level in load_topology("64xdgx_a100").levels]
[('host', 64), ('device', 8)]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from soapjax.errors import Problem, SoapjaxError
from soapjax.topology.device_topology import MAX_DEVICES, DeviceTopology, LinkLevel, read_level
from soapjax.topology.table_reader import TableReader, shown

NETWORK = "network"
HOST = "host"  # the name of the level that joins nodes
FILE_KEYS = ("description", "like", NETWORK)  # of files only: a topology inside a plan has its levels in full


def hosts_and_name(name: str) -> tuple[int | None, str]:
    """64 and "dgx_a100" of "64xdgx_a100"; None where no number leads."""
    match = re.fullmatch(r"([0-9]{1,9})x(.+)", name, re.DOTALL)
    return (int(match[1]), match[2]) if match else (None, name)


def hosts_problems(hosts: Any) -> list[Problem]:
    """What is wrong with a number of nodes."""
    if hosts is None or (isinstance(hosts, int) and not isinstance(hosts, bool) and 1 <= hosts <= MAX_DEVICES):
        return []
    expected = f"a whole number from 1 to {MAX_DEVICES}"
    return [Problem("hosts", shown(hosts), expected, "say of how many nodes the machine is, or leave it out for one")]


def machine(data: Mapping[str, Any], *, place: str, hosts: int | None = None) -> DeviceTopology:
    """The machine of `hosts` nodes that a file's table describes, or what it describes where it is no node.

    Raises: SoapjaxError with everything that is wrong with the table, or where `hosts` is given and it is no node.
    """
    node, network = node_and_network(data, place=place)
    if network is None:
        if hosts is not None:
            value, expected = f"{hosts}, with {node.name}", "a topology by node: a file with a table [network]"
            remedy = "leave the number out, or name a node (`soapjax topologies` lists them)"
            raise SoapjaxError(Problem("hosts", value, expected, remedy))
        return node
    if hosts is None or hosts == 1:
        return node
    if hosts * node.num_devices > MAX_DEVICES:
        value, expected = f"{hosts} nodes of {node.num_devices} devices", f"at most {MAX_DEVICES} devices"
        raise SoapjaxError(Problem("hosts", value, expected, "choose fewer"))
    return replace(node, name=f"{hosts}x{node.name}", levels=(replace(network, size=hosts), *node.levels))


def node_and_network(data: Mapping[str, Any], *, place: str) -> tuple[DeviceTopology, LinkLevel | None]:
    """One node, and the level that joins such nodes, of size 1; None where the table is no node.

    Raises: SoapjaxError with everything that is wrong with the table.
    """
    problems: list[Problem] = []
    network = node = None
    TableReader(data, place, problems, separator=": ").text("description", default="none")
    if NETWORK in data:
        reader = TableReader(data[NETWORK], f"{place}: {NETWORK}", problems)
        if reader.is_table:
            for key in [k for k in ("name", "size") if reader.offers(k)]:
                reader.report(key, shown(reader.get(key)), "no such key here", "remove it: the number of nodes is given by hosts")
            network = read_level(TableReader(data[NETWORK] | {"name": HOST, "size": 1}, f"{place}: {NETWORK}", problems))
    try:
        rest = {k: v for k, v in data.items() if k not in FILE_KEYS}
        node = DeviceTopology.from_dict(rest, place=place, also=FILE_KEYS)
    except SoapjaxError as e:
        problems += e.problems
    if node is not None and network is not None and any(level.name == HOST for level in node.levels):
        value = f"[{NETWORK}] beside a level named {HOST!r}"
        problems.append(Problem(f"{place}: levels", value, "one of them", f"describe the links between nodes in [{NETWORK}] only"))
    if problems:
        raise SoapjaxError(problems)
    return node, network
