"""explain, diff and report: their figures are the simulator's, they read plan files of any origin, and name what is wrong."""

import json
import sys
from pathlib import Path

import pytest
from command_line import call, done, plan_text

from soapjax import Plan, load_topology, plan
from soapjax.steps.sourced_models import abstract_model
from soapjax.strategy.plan import ModelSource


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    Path("plan.json").write_text(plan_text())
    Path("fsdp.json").write_text(plan_text(planner="fsdp"))
    return tmp_path


def edited(path, **changes):
    """The plan with other axes for one operator, as a file."""
    data = json.loads(Path("plan.json").read_text())
    for name, part in changes.items():
        data["operators"][name].update(part)
    Path(path).write_text(json.dumps(data))


def test_explain_says_what_the_step_is_made_of():
    found = done("explain", "plan.json")
    assert sum(found["where"].values()) == pytest.approx(found["step_time_s"], rel=1e-4)
    assert sum(p["seconds"] for p in found["path"]) == pytest.approx(found["step_time_s"], rel=1e-4)
    assert found["limits"][0].startswith("what binds is") and any("memory does not bind" in line for line in found["limits"])
    shown = call("explain", "plan.json")
    assert shown.status == 0 and all(w in shown.out for w in ("critical path", "largest costs", "data_parallel", "what binds"))


def test_neighbours_cost_what_the_edited_plan_costs():
    found = done("explain", "plan.json", "dense0")
    assert found["name"] == "dense0" and len(found["neighbours"]) == found["num_neighbours"]
    times = [n["step_time_s"] for n in found["neighbours"] if n["is_feasible"]]
    assert times == sorted(times) and found["now"]["step_time_s"] == pytest.approx(done("simulate", "plan.json")["step_time_s"])
    plan = Plan.loads(plan_text())
    axes = plan.operators["dense0"].axes
    axis = next(iter(axes))
    want = f"{axis}: replicate, not {axes[axis]}"
    (neighbour,) = (n for n in found["neighbours"] if n["changes"] == want)
    edited("other.json", dense0={"axes": axes | {axis: "replicate"}})
    simulated = done("simulate", "other.json")
    assert neighbour["step_time_s"] == pytest.approx(simulated["step_time_s"], rel=1e-5)
    assert neighbour["sent_bytes"] == pytest.approx(sum(simulated["bytes_by_collective"].values()), abs=6)
    assert neighbour["memory_bytes"] == pytest.approx(simulated["memory_bytes_per_device"], rel=1e-5)
    # The same change as a difference of two plans.
    changed = done("diff", "plan.json", "other.json")
    (row,) = changed["changed"]
    assert row["names"] == ["dense0"] and changed["same"] is False
    gain = simulated["step_time_s"] - found["now"]["step_time_s"]
    assert row["alone"]["step_s"] == pytest.approx(gain, abs=1e-5 * simulated["step_time_s"])
    shown = call("explain", "plan.json", "dense0")
    assert shown.status == 0 and "other choices of this operator were simulated" in shown.out


def test_diff_merges_what_differs_alike():
    found = done("diff", "plan.json", "fsdp.json")
    plans = Plan.load("plan.json"), Plan.load("fsdp.json")
    differ = {n for n in plans[0].operators if plans[0].operators[n].storage != plans[1].operators[n].storage}
    assert {n for row in found["changed"] for n in row["names"]} == differ and differ
    assert found["step_time_s"] == {"a": plans[0].prediction.step_time_s, "b": plans[1].prediction.step_time_s}
    shown = call("diff", "plan.json", "fsdp.json")
    assert shown.status == 0 and "operators that differ" in shown.out
    assert done("diff", "plan.json", "plan.json")["same"] is True
    assert "the plans are the same" in call("diff", "plan.json", "plan.json").out


def test_the_file_alone_is_enough():
    data = json.loads(plan_text())
    data["model"] = {"path": "no.such.module"}
    Path("foreign.json").write_text(json.dumps(data))
    for command in ("explain", "diff", "report"):
        for options in ([], ["--plan-only"]):
            ended = call(command, *(["plan.json"] if command == "diff" else []), "foreign.json", *options, "--json")
            assert ended.status == 0, ended.err
    operator = done("explain", "foreign.json", "dense0", "--plan-only")
    assert operator["neighbours"] == [] and operator["cost"]["compute_s"] > 0
    del data["operator_graph"], data["graph"]["figures_sha256"]
    Path("older.json").write_text(json.dumps(data))
    found = done("explain", "older.json")
    assert found["path"] == [] and found["totals"] and found["notes"][0].startswith("the plan carries no operator graph")


def test_report_writes_one_page():
    found = done("report", "plan.json", "-o", "page.html")
    text = Path("page.html").read_text()
    assert found["output"] == "page.html" and found["bytes"] == len(text.encode())
    data = json.loads(text.partition('id="plan-data">')[2].partition("</script>")[0])
    step_s = Plan.load("plan.json").prediction.step_time_s
    timeline = data["timeline"]
    assert timeline["makespan_s"] == pytest.approx(step_s, rel=1e-4) and timeline["tracks"][0] == "every device computes"
    assert max((s + d) * timeline["unit_s"] for _, s, d, *_ in timeline["spans"]) == pytest.approx(step_s, rel=1e-3)
    memory = data["memory"]
    peak = max(memory["persistent"] + a + p for a, p in zip(memory["alive"], memory["transient"], strict=True))
    assert peak == pytest.approx(Plan.load("plan.json").prediction.memory_bytes_per_device, rel=1e-3)
    assert data["edges"] and all(0 <= a < b < len(data["operators"]) for a, b in data["edges"])


BAD = [
    (("explain", "missing.json"), "missing.json"),
    (("explain", "plan.json", "no_such_operator"), "no operator's name"),
    (("explain", "plan.json", "e"), "in the names of"),
    (("explain", "plan.json", ""), "no operator's name"),
    (("explain", "plan.json", "no_such_operator", "--plan-only"), "no operator's name"),
    (("explain", "broken.json"), "broken.json"),
    (("explain", "odd.json", "--plan-only"), "pin(x)"),
    (("diff", "plan.json", "missing.json"), "missing.json"),
    (("diff", "broken.json", "missing.json"), "broken.json"),
    (("report", "plan.json", "-o", "nowhere/report.html"), "existing folder"),
    (("report", "plan.json", "-o", "."), "a folder"),
    (("report", "odd.json", "-o", "x.html", "--plan-only"), "pin(x)"),
]


@pytest.mark.parametrize("argv, says", BAD)
def test_bad_input_is_named(argv, says):
    Path("broken.json").write_text("{")
    edited("odd.json", dense0={"axes": dict.fromkeys(Plan.loads(plan_text()).operators["dense0"].axes, "pin(x)")})
    ended = call(*argv, "--json")
    assert ended.status == 2 and ended.out == "" and says in ended.err and "Traceback" not in ended.err
    assert "Remedy" in ended.err and not Path("x.html").exists()


def test_what_plan_returns_shows_itself_in_a_notebook():
    source = ModelSource(path="models.mlp", settings={"batch": 8, "width": 16, "layers": 1, "features": 8, "classes": 4})
    model = abstract_model(source)
    found = plan(model.step, *model.arguments, topology=load_topology("cpu8"), planner="fsdp")
    text = found._repr_html_()
    assert "<iframe srcdoc=" in text and "timeline-canvas" in text and found.plan._repr_html_() in text
