"""`soapjax verify` of plans that are several programs: each is compiled, and is what was predicted."""

import pytest
from command_line import call, done, step_of

SIZES = [f"--set={k}={v}" for k, v in dict(batch=16, width=16, layers=2, features=8, classes=4).items()]


@pytest.mark.parametrize("schedule, microbatches", [("1f1b", 4), pytest.param("pipedream", 4, marks=pytest.mark.slow)])
def test_every_program_of_a_pipeline_sends_what_was_predicted(schedule, microbatches, tmp_path):
    path = tmp_path / "plan.json"
    options = ("--pipeline", schedule, "--stages", 2, "--microbatches", microbatches, "--proposals", 5, "-o", path)
    assert call("plan", "models.mlp", "--topology", "cpu8", *SIZES, *options).status == 0
    found = done("verify", path, *step_of(path))
    assert found["proven"] and not found["differences"]
    assert found["ops_as_planned"] + found["ops_unchecked"] == found["planned_ops"] > found["ops_unchecked"]
    programs = {p["name"]: p for p in found["programs"]}
    assert {f"{kind} {s}" for kind in ("forward", "backward", "update") for s in (0, 1)} <= programs.keys()
    assert programs["forward 0"]["runs"] + 0 <= microbatches
    sent = programs["send 0 to 1"]
    assert sent["compiled"]["transfer"] > 0
    for p in programs.values():
        total = sum(p["compiled"].values())
        assert sum(p["predicted"].values()) == pytest.approx(total, rel=0.02, abs=64), p
    assert set(found["stage_memory_bytes"]) == {"stage 0", "stage 1"}
    if schedule == "1f1b":  # an asynchronous schedule trains other weights
        assert found["gradient_rel_error_float64"] <= 1e-9 and found["reference"] == "the whole batch"
        assert found["num_gradients"] == 6


def test_pinned_programs_are_verified_one_by_one(tmp_path):
    path = tmp_path / "plan.json"
    options = ("--space", "paper", "--planner", "model_parallel", "-o", path)
    assert call("plan", "models.mlp", "--topology", "cpu8", *SIZES, *options).status == 0
    found = done("verify", path, *step_of(path))
    assert found["proven"] and found["gradient_rel_error_float64"] <= 1e-9
    assert all(p["num_devices"] == 1 for p in found["programs"])
    moved = found["collective_bytes"]["transfer"]
    assert moved["compiled"] > 0 and moved["predicted"] == pytest.approx(moved["compiled"], rel=0.05)


def test_memory_of_an_asynchronous_pipeline_is_as_predicted(tmp_path):
    """Stashed versions are counted, and an update takes the memory of what no pass reads any more."""
    path = tmp_path / "plan.json"
    sizes = [f"--set={k}={v}" for k, v in dict(batch=16, width=128, layers=8, features=128, classes=128).items()]
    options = ("--pipeline", "pipedream", "--stages", 8, "--microbatches", 16, "--proposals", 5, "-o", path)
    assert call("plan", "models.mlp", "--topology", "cpu8", *sizes, *options).status == 0
    found = done("verify", path, *step_of(path))["stage_memory_bytes"]
    first, *others = found.values()
    assert len(others) == 7 and first["predicted"] >= first["compiled"]  # the backward pass of the first layer reads no weights
    for figures in others:
        assert figures["predicted"] == pytest.approx(figures["compiled"], rel=0.02), found
