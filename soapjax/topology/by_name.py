"""Topologies by name: this machine, those that come with soapjax, files, and a number of nodes of either."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from soapjax.errors import Problem, SoapjaxError
from soapjax.topology.device_topology import DeviceTopology
from soapjax.topology.local import local_topology
from soapjax.topology.nodes import hosts_and_name, hosts_problems
from soapjax.topology.shipped import LOCAL, remedy_with_names, shipped_topologies
from soapjax.topology.table_reader import shown
from soapjax.topology.toml_file import read_topology, shipped_topology


def load_topology(name_or_path: str | os.PathLike[str], *, hosts: int | None = None) -> DeviceTopology:
    """The topology of a TOML file, of a shipped name such as "a100x64", or of this machine ("local").

    Args:
      name_or_path: "64xdgx_a100" is 64 nodes of the kind that "dgx_a100", a name or a file, describes.
      hosts: the same number apart from the name; one node where neither says it.
    Raises: SoapjaxError with everything that is wrong with the file, or the valid names.
    """
    if not isinstance(name_or_path, str | os.PathLike):
        remedy = remedy_with_names("pass a text, one of these for example")
        raise SoapjaxError(Problem("topology", shown(name_or_path), "a name or the path of a TOML file", remedy))
    name = os.fspath(name_or_path)
    if not isinstance(name, str) or "\0" in name:
        remedy = remedy_with_names("correct it, to one of these for example")
        raise SoapjaxError(Problem("topology", shown(name), "a name or the path of a TOML file", remedy))
    if problems := hosts_problems(hosts):
        raise SoapjaxError(problems)
    if name == LOCAL:
        if hosts is not None:
            value, expected = f"{hosts}, with {LOCAL!r}", "a topology by node"
            raise SoapjaxError(Problem("hosts", value, expected, "leave the number out: JAX says how many hosts there are"))
        return local_topology()
    shipped = shipped_topologies()
    if name in shipped:
        return shipped_topology(name, hosts=hosts)
    leading, rest = (None, name) if os.path.isfile(name) else hosts_and_name(name)
    if leading is not None:
        problems = hosts_problems(leading)
        if hosts is not None:
            value, remedy = f"{hosts}, with {shown(name)}", f"write {rest}, or leave hosts out"
            problems.append(Problem("hosts", value, "one number of hosts", remedy))
        if problems:
            raise SoapjaxError(problems)
        return load_topology(rest, hosts=leading)
    if isinstance(name_or_path, os.PathLike) or name.endswith(".toml") or os.path.isfile(name) or len(Path(name).parts) > 1:
        return read_topology(name, hosts=hosts)
    close = difflib.get_close_matches(name[:100], [LOCAL, *shipped], n=1)
    remedy = f"write {close[0]!r}, or another of these" if close else "choose one of these"
    remedy = remedy_with_names(f"{remedy}, or give the path of a TOML file")
    raise SoapjaxError(Problem("topology", shown(name), "a known topology", remedy))
