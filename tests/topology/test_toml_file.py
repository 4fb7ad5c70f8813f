"""Topology files: the shipped ones are sane, and bad ones are reported in full."""

import copy
import json
import re
from pathlib import Path

import pytest

import soapjax.topology as topology_package
from soapjax.errors import SoapjaxError
from soapjax.topology import DeviceTopology, load_topology, shipped_catalogue, shipped_topologies
from soapjax.topology.device_topology import OPERATOR_CLASSES, SOURCED_FIGURES
from soapjax.topology.toml_file import parse_topology

FIXED = (
    "a100x1024", "a100x64", "a100x8", "cpu8", "dgx1_v100x8", "h100x64", "h200x1", "h200x8", "k80x64", "p100x16", "pcie_p100x4",
    "v100x32",
)  # fmt: skip
SHIPPED = shipped_topologies()

GOOD = """
name = "box"

[device]
name = "X1"
platform = "cuda"
memory_gib = 16
memory_bandwidth_gbytes_per_s = 900
memory_efficiency_fraction = 0.8
launch_us = 4
overlap = true
source = "datasheet"

[device.peak_tflops_per_s]
float32 = 15.7
float16 = 125

[device.efficiency_fraction]
dot = 0.6
conv = 0.5
other = 0.5

[[levels]]
name = "host"
size = 2
bandwidth_gbytes_per_s = 12.5
latency_us = 3
efficiency_fraction = 0.8
source = "datasheet"

[[levels]]
name = "device"
size = 4
bandwidth_gbytes_per_s = 150
latency_us = 2
efficiency_fraction = 0.8
source = "datasheet"
"""


def problems_of(text):
    with pytest.raises(SoapjaxError) as caught:
        parse_topology(text, place="box.toml")
    problems = caught.value.problems
    assert all(p.value and p.expected and p.remedy for p in problems)
    return problems


def test_shipped_names():
    assert tuple(s.name for s in shipped_catalogue()) == SHIPPED == tuple(sorted(SHIPPED))
    assert tuple(s.name for s in shipped_catalogue() if s.network is None) == FIXED
    assert all(len(s.description) <= 100 for s in shipped_catalogue())
    assert all(s.description.startswith("node: ") == (s.name not in FIXED) for s in shipped_catalogue())


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_figures_are_sane(name):
    topology = load_topology(name) if name in FIXED else load_topology(name, hosts=2)
    device = topology.device
    assert topology.name == (name if name in FIXED else f"2x{name}")
    if name in FIXED:
        assert topology.num_devices == int(re.search(r"(\d+)$", name)[1])
    assert topology.fake == (name == "cpu8")
    assert device.overlap == (device.platform != "cpu")
    bandwidths = [level.bandwidth_bytes_per_s for level in topology.levels]
    assert bandwidths == sorted(set(bandwidths))
    latencies = [level.latency_s for level in topology.levels]
    assert latencies == sorted(latencies, reverse=True)
    assert all(1e-7 < latency < 1e-3 for latency in latencies)
    assert bandwidths[-1] < device.memory_bandwidth_bytes_per_s
    assert device.peak("bfloat16") >= device.peak("float32") >= device.peak("float64")
    assert device.peak("float16") >= device.peak("float32")
    assert device.peak("float32", operator_class="dot") >= device.peak("float32")
    assert 2**30 <= device.memory_bytes <= 200 * 2**30
    assert 0 < device.usable_memory_bytes < device.memory_bytes
    assert set(device.efficiency) == set(OPERATOR_CLASSES)
    assert set(device.source) == set(SOURCED_FIGURES)
    assert all(device.source.values()) and all(level.source for level in topology.levels)


def test_shipped_links_are_physical():
    """Per GPU and direction: 100 Gb/s of a node shared by four GPUs, 200 and 400 Gb/s for each GPU."""
    by_name = {name: load_topology(name).levels for name in FIXED}
    assert by_name["p100x16"][0].bandwidth_bytes_per_s == 100e9 / 8 / 4
    assert by_name["k80x64"][0].bandwidth_bytes_per_s == 100e9 / 8 / 4
    assert by_name["a100x64"][0].bandwidth_bytes_per_s == 200e9 / 8
    assert by_name["h100x64"][0].bandwidth_bytes_per_s == 400e9 / 8
    assert by_name["a100x64"][1].bandwidth_bytes_per_s == 300e9
    assert [level.size for level in by_name["k80x64"]] == [16, 2, 2]


def test_units_are_exact():
    topology = parse_topology(GOOD, place="box.toml")
    assert topology.levels[0].latency_s == 3e-6
    assert topology.levels[0].bandwidth_bytes_per_s == 12.5e9
    assert topology.device.memory_bytes == 16 * 2**30
    assert topology.device.memory_fraction == 0.75
    assert topology.device.peak_flops_per_s == {"float32": 15.7e12, "float16": 125e12}
    assert topology.device.peak("bfloat16") == 15.7e12
    assert topology.device.source["peak"] == "datasheet"


def test_source_per_figure():
    lines = "\n".join(f'{figure} = "about {figure}"' for figure in SOURCED_FIGURES)
    text = GOOD.replace('source = "datasheet"\n\n[device.peak', f"[device.source]\n{lines}\n\n[device.peak")
    assert parse_topology(text, place="box.toml").device.source["launch"] == "about launch"
    (problem,) = problems_of(text.replace('launch = "about launch"\n', ""))
    assert problem.place == "box.toml: device.source.launch"


BAD = {
    # name: (line of GOOD, what stands there instead, place of the one problem, part of its remedy)
    "no unit": ("latency_us = 3", "latency = 3", "levels[0].latency", "latency_us"),
    "no unit, bandwidth": ("bandwidth_gbytes_per_s = 150", "bandwidth = 150", "levels[1].bandwidth", "bandwidth_gbytes_per_s"),
    "no unit, memory": ("memory_gib = 16", "memory = 16", "device.memory", "memory_gib"),
    "no unit, share": ("memory_efficiency_fraction", "memory_efficiency", "device.memory_efficiency", "_fraction"),
    "two units": ("latency_us = 3", "latency_us = 3\nlatency_s = 3e-6", "levels[0].latency_s", "latency_us"),
    "negative": ("latency_us = 3", "latency_us = -3", "levels[0].latency_us", "latency_us"),
    "zero": ("bandwidth_gbytes_per_s = 12.5", "bandwidth_gbytes_per_s = 0", "levels[0].bandwidth_gbytes_per_s", "number"),
    "nan": ("launch_us = 4", "launch_us = nan", "device.launch_us", "launch_us"),
    "infinite": ("launch_us = 4", "launch_us = inf", "device.launch_us", "launch_us"),
    "overflow": ("float16 = 125", "float16 = 1e308", "device.peak_tflops_per_s.float16", "float16"),
    "huge integer": ("float16 = 125", f"float16 = 1{'0' * 400}", "device.peak_tflops_per_s.float16", "float16"),
    "underflow": ("latency_us = 3", "latency_us = 5e-324", "levels[0].latency_us", "latency_us"),
    "text for number": ("latency_us = 3", 'latency_us = "3"', "levels[0].latency_us", "without quotes"),
    "true for number": ("latency_us = 3", "latency_us = true", "levels[0].latency_us", "without quotes"),
    "number for flag": ("overlap = true", "overlap = 1", "device.overlap", "true or"),
    "text for flag": ("overlap = true", 'overlap = "yes"', "device.overlap", "true or"),
    "number for text": ('platform = "cuda"', "platform = 3", "device.platform", 'platform = "..."'),
    "empty source": ('source = "datasheet"\n\n[device.peak', 'source = " "\n\n[device.peak', "device.source", "source"),
    "missing source": ('source = "datasheet"\n\n[[levels]]', "\n[[levels]]", "levels[0].source", "source"),
    "missing figure": ("launch_us = 4\n", "", "device.launch_us", "launch_us or launch_s"),
    "missing peak": ("float32 = 15.7", "float64 = 7.8", "device.peak_tflops_per_s.float32", "float32"),
    "unknown dtype": ("float16 = 125", "float17 = 125", "device.peak_tflops_per_s.float17", "float16"),
    "missing class": ("conv = 0.5\n", "", "device.efficiency_fraction.conv", "conv"),
    "share above one": ("dot = 0.6", "dot = 60", "device.efficiency_fraction.dot", "0.8 for 80 percent"),
    "unknown key": ("overlap = true", "overlap = true\noverlaps = 2", "device.overlaps", "write overlap"),
    "far key": ("overlap = true", "overlap = true\nqqqq = 2", "device.qqqq", "remove it; the keys are"),
    "foreign unit": ("size = 4", "size = 4\nlatency_ms = 2", "levels[1].latency_ms", "convert it and write latency_us"),
    "bits": ("size = 4", "size = 4\nbandwidth_gbits_per_s = 2", "levels[1].bandwidth_gbits_per_s", "convert it"),
    "fraction of a device": ("size = 4", "size = 4.0", "levels[1].size", "size"),
    "no devices": ("size = 4", "size = 0", "levels[1].size", "size"),
    "too many devices": ("size = 4", "size = 1048576", "levels", "smaller"),
    "two levels of one name": ('name = "device"', 'name = "host"', "levels", "rename"),
    "level name": ('name = "host"', 'name = "Host 1"', "levels[0].name", "a-z"),
    "control character": ('name = "X1"', 'name = "X\\n1"', "device.name", "control"),
    "missing table": (GOOD[GOOD.index("[device]") : GOOD.index("[[levels]]")], "", "device", "[device]"),
    "missing levels": (GOOD[GOOD.index("[[levels]]") :], "", "levels", "[[levels]]"),
    "one bracket": (GOOD[GOOD.index("[[levels]]") :], "[levels]\nsize = 2", "levels", "two brackets"),
    "unknown collective": (
        "latency_us = 3", "latency_us = 3\ncollective_fraction = { all-to-some = 0.5 }",
        "levels[0].collective_fraction.all-to-some", "all-to-all",
    ),
    "collective at no rate": (
        "latency_us = 3", "latency_us = 3\ncollective_fraction = { all-to-all = 0 }",
        "levels[0].collective_fraction.all-to-all", "number",
    ),
    "links of others": ("size = 4", "size = 4\nlinks = [[0, 1], [1, 0]]", "levels[1].links", "driver's table"),
    "links one way": ("size = 4", f"size = 4\nlinks = {[[0, 1, 1, 1]] + 3 * [[0] * 4]}", "levels[1].links", "driver's table"),
    "links as text": ("size = 4", 'size = 4\nlinks = "NV1"', "levels[1].links", "driver's table"),
    "links in pairs": (
        "size = 4", "size = 4\nlinks = [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]",
        "levels[1].links", "level of their own",
    ),
    "links of many": ("size = 4", "size = 16\nlinks = []", "levels[1].links", "two levels"),
    "memory beyond sense": ("memory_gib = 16", "memory_gib = 1e20", "device.memory", "unit"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_figure_is_named(case):
    old, new, place, remedy = BAD[case]
    assert old in GOOD
    (problem,) = problems_of(GOOD.replace(old, new, 1))
    assert problem.place == f"box.toml: {place}"
    assert remedy in problem.remedy


def test_all_problems_are_reported_at_once():
    text = GOOD
    changes = [
        ("latency_us = 3", "latency = 3"),
        ("size = 4", "size = -4"),
        ("memory_gib = 16", 'memory_gib = "16"'),
        ("dot = 0.6", "dot = nan"),
        ('name = "box"', 'nam = "box"'),
    ]
    for old, new in changes:
        text = text.replace(old, new, 1)
    assert {p.place.removeprefix("box.toml: ") for p in problems_of(text)} == {
        "levels[0].latency",
        "levels[1].size",
        "device.memory_gib",
        "device.efficiency_fraction.dot",
        "name",
        "nam",
    }


@pytest.mark.parametrize("table", ["3", '"text"', "[1, 2]", "[]"])
def test_wrong_shapes(table):
    assert problems_of(f'name = "box"\ndevice = {table}\nlevels = [{table}]')
    assert problems_of(f'name = "box"\nlevels = {table}\n[device]\npeak_tflops_per_s = {table}\nefficiency_fraction = {table}')


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n" * 10,
        "name = ",
        'name = "a"\nname = "b"',
        GOOD[: len(GOOD) // 2],
        "[" * 1000,
        "\n".join(["a = " + "[" * 900] * 3),
        "a = {" * 390,
        "a" + ".a" * 900 + " = 1",
        "a." * 100_000 + "a = 1",
        "size = " + "9" * 1900,
        "\x00\x01",
        "\N{ZERO WIDTH NO-BREAK SPACE}" + GOOD,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_text_that_is_no_topology(text):
    assert problems_of(text)[0].place.startswith("box.toml")


def test_files(tmp_path):
    path = tmp_path / "box.toml"
    path.write_text(GOOD)
    assert load_topology(path) == load_topology(str(path)) == parse_topology(GOOD, place="")
    other = tmp_path / "no_ending"
    other.write_text(GOOD)
    assert load_topology(str(other)).name == "box"
    path.write_text(GOOD.replace("size = 4", "size = x"))
    with pytest.raises(SoapjaxError, match=r"box\.toml: got text that is not TOML .*line 33"):
        load_topology(path)
    path.write_text(GOOD.replace("latency_us = 3", "latency = 3"))
    with pytest.raises(SoapjaxError, match=re.escape(f"{path}: levels[0].latency: got 3")):
        load_topology(path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"name = '\xe9'", b"# " + b"x" * 10**6, b"name = 'caf\xc3"])
def test_unreadable_files(tmp_path, content):
    path = tmp_path / "box.toml"
    path.write_bytes(content)
    with pytest.raises(SoapjaxError, match="box.toml"):
        load_topology(path)


@pytest.mark.parametrize("name", ["missing.toml", "folder/missing", ".", Path("a100x65")])
def test_missing_files(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SoapjaxError, match="Remedy"):
        load_topology(name)


@pytest.mark.parametrize("name", ["a100x65", "nothing alike", "", "a\0b", 3, None, b"a100x8", "x" * 10_000])
def test_unknown_names_list_the_valid_ones(name):
    with pytest.raises(SoapjaxError) as caught:
        load_topology(name)
    (problem,) = caught.value.problems
    assert all(known in problem.remedy for known in (*SHIPPED, "local"))
    assert ("write 'a100x64'" in problem.remedy) == (name == "a100x65")


@pytest.mark.parametrize("name", SHIPPED)
def test_round_trip_as_json(name):
    topology = load_topology(name)
    again = DeviceTopology.from_dict(json.loads(json.dumps(topology.to_dict())))
    assert again == topology and hash(again) == hash(topology)
    assert again.fingerprint() == topology.fingerprint()
    assert name in topology.describe() and topology.device.name in topology.describe()


def test_fractions_of_collectives():
    plain = load_topology("a100x64")
    data = plain.to_dict()
    assert "collective_fraction" not in data["levels"][0]
    data["levels"][0]["collective_fraction"] = {"all-to-all": 0.5}
    slower = DeviceTopology.from_dict(data)
    assert slower.levels[0].collective_fraction == {"all-to-all": 0.5} and not slower.levels[1].collective_fraction
    assert DeviceTopology.from_dict(slower.to_dict()) == slower and slower.fingerprint() != plain.fingerprint()


def test_from_dict_checks_as_the_file_does():
    data = load_topology("a100x64").to_dict()
    data["levels"][0]["latency"] = data["levels"][0].pop("latency_s")
    data["device"]["memory_bytes"] = -1
    data["device"]["source"].pop("peak")
    with pytest.raises(SoapjaxError) as caught:
        DeviceTopology.from_dict(data, place="plan.json")
    assert {p.place for p in caught.value.problems} == {
        "plan.json: levels[0].latency",
        "plan.json: device.memory_bytes",
        "plan.json: device.source.peak",
    }


@pytest.mark.parametrize("data", [None, 3, [], "text", {}, {1: 2}, {"device": None, "levels": None}, {"levels": {}}])
def test_from_dict_of_anything(data):
    with pytest.raises(SoapjaxError):
        DeviceTopology.from_dict(data)


def test_fingerprints():
    topologies = [load_topology(name) for name in FIXED]
    assert len({t.fingerprint() for t in topologies}) == len(FIXED)
    data = topologies[0].to_dict()
    same = copy.deepcopy(data)
    same["name"] = "other"
    same["device"]["source"] = same["levels"][0]["source"] = "measured"
    assert DeviceTopology.from_dict(same).fingerprint() == topologies[0].fingerprint()
    changed = copy.deepcopy(data)
    changed["levels"][0]["latency_s"] *= 2
    assert DeviceTopology.from_dict(changed).fingerprint() != topologies[0].fingerprint()


def test_fingerprint_does_not_move():
    """Plans on disk carry it: a change of this value makes them strangers to their topology."""
    text = GOOD.replace("datasheet", "elsewhere")
    assert parse_topology(text, place="").fingerprint()[:12] == "d28358f2a63a"


def test_reading_needs_no_jax():
    """Topology files are checked in a fraction of a second, on machines without JAX too."""
    folder = Path(topology_package.__file__).parent
    for path in folder.glob("*.py"):
        imports = re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.MULTILINE)
        assert "jax" not in imports, path


def test_the_margin_of_memory_is_the_files_or_the_platforms():
    topology = load_topology("a100x8")
    data = topology.to_dict()
    assert topology.device.memory_margin == data["device"]["memory_margin_fraction"] == 0.1
    assert load_topology("cpu8").device.memory_margin > 0.1
    data["device"]["memory_margin_fraction"] = 0.0
    none = DeviceTopology.from_dict(data)
    assert none.device.usable_memory_bytes == none.device.available_memory_bytes
    assert none.fingerprint() == topology.fingerprint()  # the machine is the same
    limited = topology.usable_up_to(2**30).device.usable_memory_bytes
    assert abs(limited - 2**30) <= 1 and topology.usable_up_to(2**60).device.usable_memory_bytes == none.device.usable_memory_bytes
    data["device"]["memory_margin_fraction"] = 1.5
    with pytest.raises(SoapjaxError, match="memory_margin_fraction: got 1.5; expected a share from 0 to 1"):
        DeviceTopology.from_dict(data)
