"""Bad input: one clear error with place, value, expectation and remedy, exit status 2, nothing written or overwritten."""

import json
import math
import os
import sys
import time
from pathlib import Path

import pytest
from command_line import TINY, call, plan_text, step_of


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working folder; what a command adds to the module search path is taken back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    return tmp_path


def contents(folder):
    """Every file there, by its bytes (large ones by their size)."""
    files = [p for p in Path(folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return {str(p): p.read_bytes() if p.stat().st_size < 2**20 else p.stat().st_size for p in files if os.access(p, os.R_OK)}


def refused(*argv, words=()):
    """Runs a command that must fail, and returns what it said."""
    before = contents(".")
    ended = call(*argv)
    assert ended.status == 2, ended
    assert "Traceback" not in ended.err and ended.out == ""
    lines = ended.err.splitlines()
    assert any(x.startswith("error: ") for x in lines)
    for line in lines:
        if line.startswith("error: "):
            place, rest = line.removeprefix("error: ").split(": got ", 1)
            value, rest = rest.split("; expected ", 1)
            expected, remedy = rest.split(". Remedy: ", 1)
            assert all(x.strip() for x in (place, value, expected, remedy))
            assert len(line) < 1500
    for word in words:
        assert word in ended.err, (word, ended.err)
    assert contents(".") == before
    return ended.err


def edited(edit, text=None):
    """A plan file in the working folder, changed by hand."""
    data = json.loads(text or plan_text())
    edit(data)
    Path("plan.json").write_text(json.dumps(data))
    return "plan.json"


# --- plans for something else


def for_another_size(data):
    data["model"]["settings"]["width"] = 32


def for_another_model(data):
    data["model"] = {"path": "models.lenet", "settings": {"batch": 8}}


def for_another_count(data):
    data["topology"]["levels"][0]["size"] = 4


def for_another_mesh(data):
    data["mesh"] = {"axis_names": ["d0"], "axis_sizes": [8], "device_order": list(range(8))}


def for_a_million_devices(data):
    data["mesh"] = {"axis_names": ["d0"], "axis_sizes": [1000003], "device_order": list(range(8))}


def for_devices_out_of_order(data):
    data["mesh"]["device_order"][0] = 7


def of_a_newer_schema(data):
    data["schema_version"] = 2


def of_a_broken_topology(data):
    data["topology"]["levels"][0]["bandwidth_bytes_per_s"] = -1.0


def without_a_model(data):
    data["model"] = None


# --- plans edited by hand


def degree_over_the_batch(data):
    """Eight parts of a batch of four."""
    data["operators"]["dense0"]["axes"] = dict.fromkeys(("d0", "d1", "d2"), "sample")


def unknown_axis(data):
    data["operators"]["dense0"]["axes"]["x9"] = "sample"


def missing_axis(data):
    del data["operators"]["dense0"]["axes"]["d1"]


def unknown_dim(data):
    data["operators"]["dense0"]["axes"]["d1"] = "smaple"


def unknown_storage(data):
    data["operators"]["dense0"]["storage"] = "somewhere"


def missing_operator(data):
    del data["operators"]["dense0"]


def unknown_operator(data):
    data["operators"]["dense9"] = data["operators"]["dense0"]


def not_a_number(data):
    data["prediction"]["step_time_s"] = math.nan


def infinite(data):
    data["provenance"]["baselines"]["fsdp"] = math.inf


def infinite_rate(data):
    data["topology"]["levels"][0]["latency_s"] = -math.inf


def wrong_types(data):
    data["mesh"]["axis_sizes"] = "two"
    data["operators"] = []
    data["prediction"]["feasible"] = {"a": 1}


def unknown_entry(data):
    data["operators"]["dense0"]["colour"] = "red"


def unknown_fixed_axis(data):
    data["fixed"] = {"batch.features": "x9, -"}


def fixed_does_not_divide(data):
    data["fixed"] = {"batch.features": "d0+d1+d2, -"}


EDITS = {
    for_another_size: ["plan.json: graph.fingerprint", "plan anew"],
    for_another_model: ["plan.json: graph.fingerprint"],
    for_another_count: ["plan.json: mesh", "(2, 2, 2)", "(2, 2)"],
    for_another_mesh: ["plan.json: mesh", "(8,)", "(2, 2, 2)"],
    for_a_million_devices: ["plan.json: mesh", "1000003"],
    for_devices_out_of_order: ["plan.json: mesh.device_order", "0 to 7"],
    of_a_newer_schema: ["plan.json: schema_version", "got 2", "at most 1", "update soapjax"],
    of_a_broken_topology: ["plan.json: topology", "bandwidth_bytes_per_s", "-1.0"],
    without_a_model: ["plan.json: model", "missing"],
    degree_over_the_batch: ["plan.json: operators.dense0.sample", "degree 8", "divisor of 4"],
    unknown_axis: ["plan.json: operators.dense0.axes.x9", "'d0', 'd1', 'd2'"],
    missing_axis: ["plan.json: operators.dense0.axes.d1", "None"],
    unknown_dim: ["plan.json: operators.dense0.axes.d1", "'smaple'", "sample or "],
    unknown_storage: ["plan.json: operators.dense0.storage", "'somewhere'", "'as used'"],
    missing_operator: ["plan.json: operators.dense0", "missing"],
    unknown_operator: ["plan.json: operators.dense9", "unknown operator"],
    not_a_number: ["plan.json", "NaN", "finite numbers"],
    infinite: ["plan.json", "Infinity", "finite numbers"],
    infinite_rate: ["plan.json", "-Infinity", "finite numbers"],
    wrong_types: ["plan.json: mesh.axis_sizes", "'two'", "plan.json: operators", "plan.json: prediction.feasible"],
    unknown_entry: ["plan.json: operators.dense0.colour", "'red'"],
    unknown_fixed_axis: ["plan.json: fixed['batch.features']", "x9"],
    fixed_does_not_divide: ["plan.json: fixed['batch.features']", "(4, 8)"],
}


OF_THE_STEP = (for_another_size, for_another_model, without_a_model)  # no matter where no step is needed
COMMANDS = [("simulate", edit) for edit in EDITS if edit not in OF_THE_STEP] + [("run", edit) for edit in OF_THE_STEP]
COMMANDS += [("run", for_a_million_devices), ("verify", degree_over_the_batch), ("verify", not_a_number)]


@pytest.mark.parametrize("command, edit", COMMANDS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_plan_that_does_not_fit_is_refused(command, edit):
    refused(command, edited(edit), *(["--trust"] if command != "simulate" else []), words=EDITS[edit])


@pytest.mark.parametrize("edit", OF_THE_STEP, ids=lambda x: x.__name__)
def test_a_plan_is_simulated_whatever_it_says_of_its_step(edit):
    ended = call("simulate", edited(edit))
    assert ended.status == 0, ended.err


def test_every_mistake_is_named_at_once():
    def several(data):
        unknown_axis(data)
        unknown_operator(data)
        unknown_storage(data)

    said = refused("simulate", edited(several), words=["axes.x9", "dense9", "'somewhere'"])
    assert said.count("error: ") == 3


def test_a_plan_for_another_topology():
    edited(lambda data: None)
    refused("simulate", "plan.json", "--topology", "a100x8", words=["plan.json: topology", "cpu8", "a100x8", "plan anew"])


# --- files that are no plan


def truncated(path):
    path.write_text(plan_text()[:2000])


def nested(path):
    path.write_text('{"operators": ' + "[" * 100_000 + "]" * 100_000 + "}")


def unclosed(path):
    path.write_text("[" * 100_000)


def huge(path):
    with open(path, "wb") as f:
        f.truncate(10**9)


def not_utf8(path):
    path.write_bytes(plan_text().encode("utf-16"))


def empty(path):
    path.write_text("")


def a_list(path):
    path.write_text("[]")


def twice(path):
    path.write_text('{"schema_version": 1, ' + plan_text()[1:])


def digits(path):
    path.write_text('{"schema_version": ' + "9" * 10_000 + "}")


def a_folder(path):
    path.mkdir()


def missing(path):
    pass


def unreadable(path):
    path.write_text(plan_text())
    path.chmod(0)


FILES = {
    truncated: ["plan.json: line", "column"],
    nested: ["plan.json", "nested 100001 deep"],
    unclosed: ["plan.json", "nested 100000 deep"],
    huge: ["plan.json", "1000000000 bytes", "at most"],
    not_utf8: ["plan.json: byte 0", "UTF-8"],
    empty: ["plan.json: line 1, column 1"],
    a_list: ["plan.json", "list", "a JSON object"],
    twice: ["plan.json: schema_version", "given twice"],
    digits: ["plan.json", "digits"],
    a_folder: ["plan.json", "a folder"],
    missing: ["plan.json", "nothing there"],
    unreadable: ["plan.json", "denied"],
}


@pytest.mark.parametrize("make", FILES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("command", ["simulate", "run", "verify"])
def test_a_file_that_is_no_plan_is_refused(make, command, folder, monkeypatch):
    make(folder / "plan.json")
    if make is unreadable and os.access(folder / "plan.json", os.R_OK):
        pytest.skip("this user may read everything")
    if make is huge:
        begin = time.monotonic()
        with monkeypatch.context() as patched:
            patched.setattr("soapjax.helpers.files.open", lambda *a: pytest.fail("a huge file must not be opened"), raising=False)
        ended = call(command, "plan.json")
        assert ended.status == 2 and all(word in ended.err for word in FILES[huge]) and time.monotonic() - begin < 1
    refused(command, "plan.json", words=FILES[make])


# --- batches


@pytest.mark.parametrize("command", [("plan",), ("plan", "--pipeline", "1f1b", "--stages", "2"), ("profile",)], ids=" ".join)
def test_an_empty_batch_is_refused_before_anything_is_planned(command, monkeypatch):
    monkeypatch.setattr("soapjax.planning.entry.trace", lambda *a, **k: pytest.fail("traced"))
    monkeypatch.setattr("soapjax.cli.measuring_commands.trace", lambda *a, **k: pytest.fail("traced"))
    words = ["argument batch", "an empty batch", "(0, 64)", "one example or more"]
    refused(*command, "models.mlp", "--set", "batch=0", "--topology", "cpu8", words=words)


# --- topologies


GOOD_TOPOLOGY = """
name = "box"
[device]
name = "cpu"
platform = "cpu"
memory_gib = 2.0
memory_bandwidth_gbytes_per_s = 2.5
memory_efficiency_fraction = 0.6
launch_us = 5.0
overlap = false
source = "assumption"
[device.peak_tflops_per_s]
float32 = 0.016
[device.efficiency_fraction]
dot = 0.5
conv = 0.3
other = 0.1
[[levels]]
name = "device"
size = 7
bandwidth_gbytes_per_s = 1.25
latency_us = 20.0
efficiency_fraction = 0.6
source = "assumption"
"""


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("latency_us = 20.0", "latency = 20.0", ["levels[0].latency", "latency_us"]),
        ("memory_gib = 2.0", "memory = 2.0", ["device.memory", "memory_gib"]),
        ("bandwidth_gbytes_per_s = 1.25", "bandwidth_gbytes_per_s = -1.25", ["levels[0].bandwidth_gbytes_per_s", "-1.25"]),
        ("float32 = 0.016", "float32 = 0", ["float32", "positive"]),
        ("launch_us = 5.0", "launch_us = nan", ["launch_us", "nan"]),
        ("size = 7", "size = 0", ["levels[0].size", "got 0"]),
        ('name = "box"', 'name = "box', ["not TOML"]),
    ],
)
def test_a_bad_topology_file_is_refused(old, new, words):
    Path("box.toml").write_text(GOOD_TOPOLOGY.replace(old, new, 1))
    argv = ("plan", "models.mlp", "--topology", "box.toml", "-o", "plan.json")
    refused(*argv, words=["box.toml", *words])


# --- models


def module(name, text):
    Path(f"{name}.py").write_text(text)
    return name


def named(name, of):
    module(of, "def make(): pass")
    return name


FACTORY = """
import jax.numpy as jnp
def make(*, batch=8):
    {inside}
    def step(state, batch):
        {step}
    return {returned}
"""
ARRAYS = "step, {'w': jnp.ones((8, 8))}, jnp.ones((batch, 8))"


def factory(name, *, inside="pass", step="return state", returned=ARRAYS):
    return module(name, FACTORY.format(inside=inside, step=step, returned=returned))


@pytest.mark.parametrize(
    "name, make, words",
    [
        ("bad_absent.model", lambda n: n, ["No module named 'bad_absent'", "importable"]),
        ("bad_dot.train", lambda n: named(n, "bad_dot"), ["No module named 'bad_dot.train'", "did you mean bad_dot:train"]),
        ("bad_file.py", lambda n: named(n, "bad_file"), ["No module named 'bad_file.py'", "did you mean bad_file"]),
        ("", lambda n: n, ["got ''", "package.module:factory"]),
        ("bad_syntax", lambda n: module(n, "def make(:"), ["SyntaxError"]),
        ("bad_import", lambda n: module(n, "import no_such_thing"), ["No module named 'no_such_thing'", "a module that imports"]),
        ("bad_raises", lambda n: module(n, "raise RuntimeError('no luck')"), ["RuntimeError: no luck"]),
        ("bad_exits", lambda n: module(n, "import sys; sys.exit(0)"), ["SystemExit"]),
        ("bad_without_make", lambda n: module(n, "def mak(): pass"), ["no function 'make'", "it has mak"]),
        ("bad_number", lambda n: module(n, "make = 3"), ["no function 'make'"]),
        ("models.mlp:mkae", lambda n: n, ["no function 'mkae'", "make"]),
        ("bad_factory", lambda n: factory(n, inside="raise KeyError('oh')"), ["KeyError", "'oh'"]),
        ("bad_factory_exits", lambda n: factory(n, inside="raise SystemExit(0)"), ["SystemExit"]),
        ("bad_nothing", lambda n: factory(n, returned="None"), ["NoneType", "(train_step, state, batch)"]),
        ("bad_word", lambda n: factory(n, returned="step, 'word'"), ["bad_word"]),
        ("bad_tuple", lambda n: factory(n, returned=f"step, ({ARRAYS.partition(', ')[2]})"), ["1 argument", "one by one"]),
        ("bad_too_many", lambda n: factory(n, returned=f"{ARRAYS}, 1, 2"), ["(state, batch)", "4 arguments", "as many"]),
        ("bad_step", lambda n: factory(n, step="return state['v']"), ["KeyError: 'v'", "jax.jit"]),
    ],
)
def test_a_model_that_does_not_work_is_refused(name, make, words):
    path = make(name)
    Path("plan.json").write_text("an older plan")
    refused("plan", path, "--topology", "cpu8", "-o", "plan.json", words=words)


# --- arguments of plan


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--set", "wdith=3"], ["--set wdith", "width"]),
        (["--set", "width"], ["--set width", "key=value"]),
        (["--set", "=3"], ["--set =3", "key=value"]),
        (["--set", "width=NaN"], ["--set width=NaN", "finite"]),
        (["--set", "width=[1]"], ["--set width=[1]", "a finite number, true, false or a word"]),
        (["--set", "width=1e999"], ["--set width=1e999", "finite"]),
        (["--set", "width=wide"], ["models.mlp", "settings", "wide"]),
        (["--set", "width=-4"], ["models.mlp"]),
        (["--seconds", "0"], ["--seconds", "positive"]),
        (["--seconds", "-1"], ["--seconds", "-1"]),
        (["--seconds", "nan"], ["--seconds", "nan"]),
        (["--proposals", "0"], ["--proposals", "got 0"]),
        (["--objective", "speed"], ["--objective: got 'speed'; expected time or mdpe", "choose one of these"]),
        (["--objective", "mdpe"], ["--objective: got mdpe without a limit"]),
        (["--objective", "mdpe", "--max-bytes=-8GB"], ["--max-bytes: got '-8GB'; expected a positive size"]),
        (["--max-memory", "40GB"], ["--max-memory: got 40GB; expected an objective that has limits"]),
        (["--objective", "mdpe", "--max-bytes", "8GB", "--weights", "0.5,0.3"], ["--weights", "three numbers"]),
        (
            ["--objective", "mdpo", "--max-bytes", "8 apples", "--max-memory=-1", "--weights=0.7,0.5,-0.2", "--seed", "-1"],
            ["--objective", "did you mean 'mdpe'", "--max-bytes", "--max-memory", "--weights", "which sum to 1", "--seed"],
        ),
        (["--seed", "-1"], ["--seed", "got -1"]),
        (["--planner", "mcmcm"], ["planner", "'mcmcm'", "did you mean 'mcmc'"]),
        (["--planner", "reinforce"], ["planner 'reinforce'", 'space "soap"', "--space paper"]),
        (["--space", "papre"], ["space", "'papre'", "soap or paper"]),
        (["--topology", "a100x46"], ["topology", "a100x46", "a100x64"]),
        (["--topology", "p5.48xlarge"], ["write 'aws_p5_48xlarge'", "dgx_h100", "DGX H100, 8 H100"]),
        (["--topology", "a100x64", "--hosts", "2"], ["hosts", "2, with a100x64", "[network]"]),
        (["--topology", "dgx_a100", "--hosts", "0"], ["hosts", "got 0", "whole number"]),
        (["--topology", "dgx_a100", "--hosts", "2.5"], ["hosts", "'2.5'", "whole number", "leave it out for one"]),
        (["--topology", "none.toml"], ["none.toml", "nothing there"]),
        (["--topology", "."], ["topology"]),
        (["-o", "absent/plan.json"], ["--output", "absent/plan.json", "make the folder"]),
        (["-o", "."], ["--output", "a folder"]),
        (["-o", ""], ["--output"]),
        (["--seconds", "0", "--proposals", "0", "-o", "."], ["--seconds", "--proposals", "--output"]),
    ],
    ids=" ".join,
)
def test_bad_arguments_of_plan_are_refused(arguments, words):
    Path("plan.json").write_text("an older plan")
    output = [] if "-o" in arguments else ["-o", "plan.json"]
    topology = [] if "--topology" in arguments else ["--topology", "cpu8"]
    refused("plan", "models.mlp", *topology, *output, *arguments, words=words)


def test_bad_arguments_are_found_before_the_search(monkeypatch):
    monkeypatch.setattr("soapjax.planning.entry.plan_one_program", lambda *a, **k: pytest.fail("the search began"))
    refused("plan", "models.mlp", "--topology", "cpu8", "-o", ".")


@pytest.mark.parametrize(
    "argv", [["plan"], ["paln", "models.mlp"], ["run", "plan.json", "--stesp", "3"], ["run", "p", "--steps", "x"]]
)
def test_arguments_that_are_none(argv):
    ended = call(*argv)
    assert ended.status == 2 and "Traceback" not in ended.err and not contents(".")


def test_a_write_that_fails_leaves_the_older_plan(monkeypatch):
    Path("plan.json").write_text("an older plan")

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    argv = ("plan", "models.mlp", "--topology", "cpu8", "--planner", "data_parallel", "-o", "plan.json", *TINY)
    refused(*argv, words=["plan.json", "No space left", "free space"])


# --- running


@pytest.mark.parametrize("steps", [0, -3])
def test_no_steps(steps):
    edited(lambda data: None)
    refused("run", "plan.json", "--steps", steps, words=["--steps", str(steps)])


def test_run_on_a_step_that_returns_no_state():
    factory("bad_stateless", step="return (batch @ state['w']).sum()")
    Path("plan.json").write_text(plan_text("bad_stateless", "--set", "batch=8"))
    refused("run", "plan.json", *step_of(), words=["model bad_stateless", "does not return", "(state, batch) -> (state, metrics)"])


@pytest.mark.parametrize("command", [pytest.param("run", marks=pytest.mark.slow), "verify"])
def test_fewer_devices_than_planned(command):
    Path("plan.json").write_text(plan_text(topology="a100x64"))
    refused(command, "plan.json", "--trust", words=["8 cpu devices", "the 64", "plan for 8 devices"])


def test_baselines_say_what_they_lowered():
    Path("box.toml").write_text(GOOD_TOPOLOGY)
    argv = ("plan", "models.mlp", "--topology", "box.toml", "--planner", "data_parallel", "--json", "-o", "plan.json")
    ended = call(*argv, *TINY, "--set", "batch=10", "--set", "width=14")
    assert ended.status == 0 and ended.result["feasible"] and ended.result["num_devices"] == 7
    assert any("sample dim of 10 does not split 7 ways: 1 used" in note for note in ended.result["notes"])
