"""Machines by node: so many of them, joined as the file's [network] says."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from test_toml_file import GOOD

from soapjax.errors import SoapjaxError
from soapjax.topology import DeviceTopology, factor_mesh, load_topology, shipped_catalogue
from soapjax.topology.toml_file import parse_topology

NODES = {s.name: s for s in shipped_catalogue() if s.network is not None}
NETWORK = """
[network]
bandwidth_gbytes_per_s = 12.5
latency_us = 3
efficiency_fraction = 0.8
source = "datasheet"
"""
HOST_LEVEL = GOOD[GOOD.index("[[levels]]") : GOOD.rindex("[[levels]]")]
NODE = GOOD.replace(HOST_LEVEL, "") + NETWORK


PAGE = (Path(__file__).parents[2] / "docs" / "topologies.md").read_text(encoding="utf-8")


def problems_of(call, *args, **options):
    with pytest.raises(SoapjaxError) as caught:
        call(*args, **options)
    assert all(p.value and p.expected and p.remedy for p in caught.value.problems)
    return caught.value.problems


def test_a_node_and_a_number_are_the_machine_in_full():
    """GOOD is two hosts, written out."""
    machine = parse_topology(NODE, place="box.toml", hosts=2)
    assert replace(machine, name="box") == parse_topology(GOOD, place="box.toml") and machine.name == "2xbox"
    one = parse_topology(NODE, place="box.toml")
    assert one == parse_topology(NODE, place="box.toml", hosts=1)
    assert one == replace(machine, name="box", levels=machine.levels[1:])


@pytest.mark.parametrize(
    "node, fixed",
    [
        ("8xdgx_a100", "a100x64"), ("128xdgx_a100", "a100x1024"), ("dgx_a100", "a100x8"), ("1xdgx_a100", "a100x8"),
        ("8xdgx_h100", "h100x64"), ("h200", "h200x8"), ("4xazure_ndm_a100_v4", "4xdgx_a100"),
    ],
)  # fmt: skip
def test_machines_that_have_two_names(node, fixed):
    assert load_topology(node).fingerprint() == load_topology(fixed).fingerprint()


@pytest.mark.parametrize("name", NODES)
def test_every_shipped_node_scales(name):
    node, network = NODES[name].node, NODES[name].network
    machine = load_topology(name, hosts=6)
    assert machine == load_topology(f"6x{name}") and machine.name == f"6x{name}"
    assert machine.num_devices == 6 * node.num_devices and machine.levels == (replace(network, size=6), *node.levels)
    assert network.name == "host" and network.source
    assert load_topology(name) == node
    assert factor_mesh(machine).axis_names[:2] == ("h0", "h1") and factor_mesh(machine).num_devices == machine.num_devices
    assert DeviceTopology.from_dict(json.loads(json.dumps(machine.to_dict()))) == machine  # as a plan holds it


# Of an instance, as its cloud publishes them, in Gb/s; of all its devices together.
NETWORKS = {
    "aws_g5_48xlarge": 100, "aws_g6_48xlarge": 100, "aws_g6e_48xlarge": 400, "aws_p4d_24xlarge": 400, "aws_p4de_24xlarge": 400,
    "aws_p5_48xlarge": 3200, "aws_p5e_48xlarge": 3200, "aws_p5en_48xlarge": 3200, "aws_p6_b200_48xlarge": 3200,
    "azure_nd_a100_v4": 8 * 200, "azure_ndm_a100_v4": 8 * 200, "azure_nd_h100_v5": 8 * 400, "azure_nd_h200_v5": 8 * 400,
    "gcp_a2_highgpu_8g": 100, "gcp_a2_ultragpu_8g": 100, "gcp_a3_highgpu_8g": 4 * 200, "gcp_a3_megagpu_8g": 8 * 200,
    "gcp_a3_ultragpu_8g": 8 * 400, "gcp_a4_highgpu_8g": 8 * 400,
}  # fmt: skip


def test_networks_of_clouds():
    assert NETWORKS.keys() == {n for n in NODES if n.startswith(("aws_", "azure_", "gcp_"))}
    for name, gbits_per_s in NETWORKS.items():
        assert NODES[name].network.bandwidth_bytes_per_s * NODES[name].node.num_devices == gbits_per_s * 1e9 / 8, name


def test_own_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "box.toml").write_text(NODE)
    assert load_topology("3xbox.toml") == load_topology("box.toml", hosts=3) == load_topology(f"3x{tmp_path}/box.toml")
    (tmp_path / "3xbox.toml").write_text(GOOD)  # a file of that very name
    assert load_topology("3xbox.toml").name == "box"


def test_a_file_like_a_shipped_one():
    mine = f'name = "mine"\nlike = "dgx_h100"\n{NETWORK}'
    machine, base = parse_topology(mine, place="mine.toml", hosts=4), load_topology("dgx_h100", hosts=4)
    assert (machine.device, machine.levels[1:], machine.name) == (base.device, base.levels[1:], "4xmine")
    assert machine.levels[0].bandwidth_bytes_per_s == 12.5e9 and machine.levels[0].size == 4
    assert parse_topology('name = "m"\nlike = "a100x64"', place="m.toml").fingerprint() == load_topology("a100x64").fingerprint()
    (problem,) = problems_of(parse_topology, 'like = "dgx_h100"', place="mine.toml")
    assert problem.place == "mine.toml: name"
    (problem,) = problems_of(parse_topology, 'name = "m"\nlike = "dgx_h1000"', place="mine.toml")
    assert problem.place == "mine.toml: like" and "dgx_h100 " in problem.remedy
    (problem,) = problems_of(parse_topology, f'name = "m"\nlike = "a100x64"\n{NETWORK}', place="mine.toml")
    assert problem.place == "mine.toml: levels" and "host" in problem.value


BAD = {
    # name: (line of NODE, what stands there instead, places of the problems)
    "a size": ("[network]", "[network]\nsize = 4", ["network.size"]),
    "a name": ("[network]", '[network]\nname = "rack"', ["network.name"]),
    "no source": ('efficiency_fraction = 0.8\nsource = "datasheet"\n', "", ["network.efficiency_fraction", "network.source"]),
    "no unit": ("bandwidth_gbytes_per_s = 12.5", "bandwidth = 12.5", ["network.bandwidth"]),
    "no table": (NETWORK, "", ["network"]),
    "network and node": ("overlap = true", "overlap = 3\n", ["device.overlap"]),
    "misspelled": ("[network]", "[netwrok]", ["netwrok"]),
    "description": ('name = "box"', 'name = "box"\ndescription = 3', ["description"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused(case):
    old, new, places = BAD[case]
    assert old in NODE
    text = NODE[::-1].replace(old[::-1], new[::-1], 1)[::-1]  # the last: that of the network
    text = f"network = 3\n{text}" if case == "no table" else text
    problems = problems_of(parse_topology, text, place="box.toml")
    assert sorted(p.place for p in problems) == [f"box.toml: {p}" for p in sorted(places)]
    assert case != "misspelled" or "write network" in problems[0].remedy


@pytest.mark.parametrize("hosts", [0, -1, 2.0, "2", True, 2**21, 10**30])
def test_numbers_that_are_none(hosts):
    (problem,) = problems_of(load_topology, "dgx_a100", hosts=hosts)
    assert problem.place == "hosts" and "whole number" in problem.expected


@pytest.mark.parametrize(
    "name, hosts, words",
    [
        ("a100x64", 2, ("2, with a100x64", "[network]", "soapjax topologies")),
        ("2xa100x64", None, ("2, with a100x64", "[network]")),
        ("local", 2, ("local", "JAX")),
        ("2xdgx_a100", 4, ("4", "2xdgx_a100", "write dgx_a100")),
        ("0xdgx_a100", None, ("whole number",)),
        ("dgx_a100", 2**18, ("devices", "fewer")),
        ("4xdgx_a1000", None, ("'dgx_a1000'", "write 'dgx_a100'", "DGX H100")),
        ("x4dgx_a100", None, ("x4dgx_a100",)),
        ("4x", None, ("'4x'",)),
    ],
)
def test_machines_that_are_none(name, hosts, words):
    (problem,) = problems_of(load_topology, name, hosts=hosts)
    assert all(word in str(problem) or word in problem.remedy for word in words), problem


def test_the_page_on_topologies_tells_all_of_them_and_its_files_are_right():
    rows = "".join(re.findall(r"^\|.*", PAGE, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", rows)) == {s.name for s in shipped_catalogue()}
    files = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    like, box = (parse_topology(text, place="page") for text in files)
    assert (like.num_devices, box.num_devices) == (8, 8)
    assert parse_topology(files[0], place="page", hosts=16).levels[0].bandwidth_bytes_per_s == 4 * 200e9 / 8 / 8
    for name in re.findall(r"\b\d+x[a-z]\w+", PAGE):
        assert load_topology(name).num_devices > 8
