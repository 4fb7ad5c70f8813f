"""Pipeline plans on the command line: planned, predicted anew, traced, and refused with a remedy."""

import collections
import json
import re

import pytest
from command_line import ROOT, call

TINY = [f"--set={k}={v}" for k, v in dict(batch=8, width=16, layers=2, features=8, classes=4).items()]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("pipelines") / "plan.json"
    options = ("--pipeline", "1f1b", "--stages", 2, "--microbatches", 4, "--proposals", 40, "--json", "-o", path)
    ended = call("plan", "models.mlp", "--topology", "cpu8", *TINY, *options)
    assert ended.status == 0, ended.err
    return path, ended.result


def test_a_pipeline_plan_says_which_operators_run_where(plan):
    path, result = plan
    found = json.loads(path.read_text())
    pipeline = found["pipeline"]
    assert (pipeline["schedule"], pipeline["num_microbatches"], len(pipeline["stages"])) == ("1f1b", 4, 2)
    names = [name for s in pipeline["stages"] for name in s["operators"]]
    assert sorted(names) == sorted(found["operators"]) and len(names) == len(set(names))
    devices = [d for s in pipeline["stages"] for d in s["devices"]]
    assert len(devices) == len(set(devices)) and set(devices) <= set(range(8))
    for s in pipeline["stages"]:
        for name in s["operators"]:
            assert set(found["operators"][name]["axes"]) == set(s["mesh"])
    assert {"data_parallel", "1f1b", "1f1b, rematerialised"} <= set(result["baselines"])
    assert result["step_time_s"] <= result["baselines"]["1f1b"] * (1 + 1e-5)


def test_predicting_anew_gives_the_same_plan_and_a_trace(plan, tmp_path):
    path, result = plan
    trace = tmp_path / "trace.json"
    again = call("simulate", path, "--trace", trace, "--json").result
    assert again["plan_sha256"] == result["plan_sha256"]
    events = json.loads(trace.read_text())["traceEvents"]
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    devices = {d for s in json.loads(path.read_text())["pipeline"]["stages"] for d in s["devices"]}
    assert {f"device {d}" for d in devices} <= tracks
    spans = [e for e in events if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(again["step_time_s"] * 1e6, rel=1e-4)
    # Every pass of every micro-batch that takes time, on every device of its stage.
    passes = collections.Counter(e["name"] for e in spans if e["name"].startswith(("forward", "backward")))
    sizes = [len(s["devices"]) for s in json.loads(path.read_text())["pipeline"]["stages"]]
    assert sum(n for name, n in passes.items() if name.startswith("forward")) == 4 * len(devices)
    assert all(n == sizes[int(name.split()[-1])] for name, n in passes.items())
    assert {f"backward {m}: stage 0" for m in range(4)} <= passes.keys()


@pytest.mark.slow
def test_a_plan_of_one_program_has_a_trace_too(tmp_path):
    path, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    assert call("plan", "models.mlp", "--topology", "cpu8", *TINY, "--planner", "data_parallel", "-o", path).status == 0
    result = call("simulate", path, "--trace", trace, "--json").result
    spans = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(result["step_time_s"] * 1e6, rel=1e-4)


def edited(path, folder, change):
    data = json.loads(path.read_text())
    change(data)
    target = folder / "edited.json"
    target.write_text(json.dumps(data))
    return target


def test_edits_count_and_mistakes_are_named(plan, tmp_path):
    path, result = plan

    def recompute(data):
        data["pipeline"]["stages"][-1]["rematerialise"] = True

    slower = call("simulate", edited(path, tmp_path, recompute), "--json").result
    was = json.loads(path.read_text())["pipeline"]["stages"][-1]["rematerialise"]
    assert was or slower["step_time_s"] > result["step_time_s"]

    def leave_out(data):
        data["pipeline"]["stages"][1]["operators"].pop(0)

    def no_axis(data):
        name = data["pipeline"]["stages"][0]["operators"][0]
        data["operators"][name]["axes"] = {"nowhere": "sample"}

    def odd(data):
        data["pipeline"]["num_microbatches"] = 3

    def unknown(data):
        data["pipeline"]["schedule"] = "fastest"

    for change, place in (
        (leave_out, "pipeline.stages.1.operators"), (no_axis, "axes.nowhere"), (odd, "choose one of 1, 2, 4, 8"),
        (unknown, "pipeline.schedule"),
    ):  # fmt: skip
        ended = call("simulate", edited(path, tmp_path, change))
        assert ended.status == 2 and place in ended.err and "Traceback" not in ended.err


def test_pipedream_deals_minibatches_out_to_replicas(tmp_path):
    path = tmp_path / "plan.json"
    options = ("--pipeline", "pipedream", "--microbatches", 8, "--json", "-o", path)
    ended = call("plan", "models.mlp", "--topology", "cpu8", *TINY, *options)
    assert ended.status == 0, ended.err
    pipeline = json.loads(path.read_text())["pipeline"]
    assert all(8 % s["replicas"] == 0 and s["replicas"] == len(s["devices"]) for s in pipeline["stages"])
    assert call("simulate", path, "--json").result["plan_sha256"] == ended.result["plan_sha256"]


def test_auto_is_no_worse_than_one_program(tmp_path):
    options = ("--planner", "data_parallel", "--pipeline", "auto", "--microbatches", 4, "--proposals", 20, "--json")
    found = call("plan", "models.mlp", "--topology", "cpu8", *TINY, *options).result
    assert found["step_time_s"] <= found["baselines"]["data_parallel"] * (1 + 1e-6)
    assert any(name.startswith("pipeline ") or name.startswith("one program") for name in found["baselines"])


@pytest.mark.parametrize(
    "options, message",
    [
        (("--pipeline", "1f1b", "--stages", 99), "ask for fewer stages"),
        (("--pipeline", "1f1b", "--microbatches", 3), "choose one of 1, 2, 4, 8"),
        (("--pipeline", "zigzag"), "auto or gpipe or 1f1b"),
        (("--pipeline", "auto", "--stages", "many"), "auto, or a number from 1 on"),
        (("--stages", 2), "add --pipeline auto"),
        (("--pipeline", "auto", "--space", "paper"), "soap with --pipeline"),
    ],
)
def test_bad_input_ends_with_2_and_a_remedy(options, message):
    ended = call("plan", "models.mlp", "--topology", "cpu8", *TINY, *options)
    assert ended.status == 2 and message in ended.err


def test_a_stage_that_does_not_fit_is_named(tmp_path):
    machine = tmp_path / "small.toml"
    shipped = (ROOT / "topologies" / "cpu8.toml").read_text()
    machine.write_text(re.sub(r"memory_gib = .*", "memory_gib = 0.0000005", shipped))
    for schedule in ("1f1b", "pipedream"):
        options = ("--pipeline", schedule, "--microbatches", 4, "--proposals", 5)
        ended = call("plan", "models.mlp", "--topology", machine, *TINY, *options)
        assert ended.status == 2 and "GB" in ended.err and "Remedy: use" in ended.err
