"""`soapjax profile`, `calibrate`, `plan --profile` and `--verify-top`, end to end on one CPU device, and their bad input."""

import ast
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import ROOT, TINY, call, done, step_of
from ranks import flags_without_devices

from soapjax import Plan
from soapjax.costs.measured.profile import load_profile, save_profile
from soapjax.costs.measured.profile_parts import Calibration
from soapjax.errors import SoapjaxError
from soapjax.planning import entry
from soapjax.planning.verify_top import measured_best, shortlist
from soapjax.search.problem import Evaluation
from soapjax.strategy.configs import Strategy


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setenv("SOAPJAX_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_a_profile_is_measured_and_a_plan_says_what_is():
    made = done("profile", "models.mlp", "--topology", "cpu8", "--no-search", *TINY)
    path = Path(made["path"])
    assert path.parent == Path("cache/profiles").absolute() and made["sha256"] in path.name and made["num_operators"] > 10
    found = load_profile(path)
    assert all(m.seconds > 0 for m in found.operators) and found.rates is not None
    assert found.device.platform == "cpu" and "cores" in found.device.processor and not found.links
    assert any("fake devices" in n for n in made["notes"])

    argv = ("plan", "models.mlp", "--topology", "cpu8", *TINY)
    for source in ("auto", str(path)):
        planned = done(*argv, "--planner", "data_parallel", "--profile", source, "-o", "plan.json")
        assert planned["compute_figures"] == {"measured": pytest.approx(1.0, abs=0.02)} | {
            k: v for k, v in planned["compute_figures"].items() if k != "measured"
        }
        plan = Plan.load("plan.json")
        assert {o.figures for o in plan.operators.values()} <= {"measured", "calibrated"}
        assert plan.profile["sources"] == [made["sha256"]]
        # The plan carries its measurements: no cache is needed to predict it anew.
        again = done("simulate", "plan.json")
        assert again["step_time_s"] == planned["step_time_s"] and again["plan_sha256"] == planned["plan_sha256"]
    plain = done(*argv, "--planner", "data_parallel")
    assert plain["compute_figures"] == {"analytic": 1.0} and plain["step_time_s"] != planned["step_time_s"]
    shown = call("simulate", "plan.json").out
    assert "compute seconds:" in shown and "measured" in shown


@pytest.mark.slow
def test_a_pipeline_is_planned_with_what_was_measured_of_its_micro_batches():
    path = Path(done("profile", "models.mlp", "--topology", "cpu8", "--no-search", "--microbatches", 2, *TINY)["path"])
    plain = done("profile", "models.mlp", "--topology", "cpu8", "--no-search", *TINY)
    assert len(load_profile(path).operators) > plain["num_operators"]
    argv = ("plan", "models.mlp", "--topology", "cpu8", "--pipeline", "gpipe", "--microbatches", 2, "--stages", 2, *TINY)
    planned = done(*argv, "--proposals", 8, "--profile", path, "-o", "plan.json")
    again = done("simulate", "plan.json")
    assert again["step_time_s"] == planned["step_time_s"] and Plan.load("plan.json").profile is not None
    refused("profile", "models.mlp", "--topology", "cpu8", "--microbatches", 7, *TINY, words=("microbatches", "7", "divisor"))
    refused(*argv, "--verify-top", 2, words=("--verify-top", "no pipeline"))
    refused("calibrate", "plan.json", words=("pipeline", "one program"))


def test_time_that_is_spent_leaves_the_smallest_out():
    made = done("profile", "models.mlp", "--topology", "cpu8", "--no-search", "--seconds", "0.001", *TINY, "-o", "p.json")
    found = load_profile("p.json")
    assert made["path"] == "p.json" and any("time was spent" in n for n in made["notes"])
    assert len(found.operators) == made["num_operators"] == 1, "the largest is always measured"
    assert not Path("cache").exists()


@pytest.fixture(scope="module")
def some_profile(tmp_path_factory):
    """A measured profile of the small model, as text."""
    path = tmp_path_factory.mktemp("profile") / "p.json"
    ended = call("profile", "models.mlp", "--topology", "cpu8", "--no-search", *TINY, "-o", path)
    assert ended.status == 0, ended.err
    return load_profile(path)


def refused(*argv, words=()):
    ended = call(*argv)
    assert ended.status == 2 and "Traceback" not in ended.err and "Remedy" in ended.err, ended.err
    for word in words:
        assert word in ended.err, ended.err


def test_a_profile_of_other_versions_is_taken_and_said(some_profile):
    """A cluster's versions are often not those of the machine that plans for it."""
    old = some_profile.model_copy(update={"versions": {"jax": "0.1", "jaxlib": "0.1"}})
    Path("old.json").write_text(old.to_text())
    ended = call("plan", "models.mlp", "--planner", "data_parallel", *TINY, "--topology", "cpu8", "--profile", "old.json")
    assert ended.status == 0 and "old.json: measured with jax 0.1, jaxlib 0.1; installed: jax " in ended.out + ended.err


def test_profiles_that_do_not_fit_are_refused(some_profile):
    argv = ("plan", "models.mlp", "--planner", "data_parallel", *TINY)
    Path("p.json").write_text(some_profile.to_text())
    refused(*argv, "--topology", "a100x8", "--profile", "p.json", words=("p.json: device", "A100"))
    Path("torn.json").write_text(some_profile.to_text()[:-9])
    refused(*argv, "--topology", "cpu8", "--profile", "torn.json", words=("torn.json", "not JSON"))
    Path("edited.json").write_text(some_profile.to_text().replace('"kind":"dot"', '"kind":"conv"'))
    refused(*argv, "--topology", "cpu8", "--profile", "edited.json", words=("damaged",))
    refused(*argv, "--topology", "cpu8", "--profile", "missing.json", words=("missing.json",))
    # What does not fit is left out of "auto", and said.
    save_profile(some_profile)
    for path in Path("cache/profiles").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    found = done(*argv, "--topology", "cpu8", "--profile", "auto")
    assert any("profile ignored" in n for n in found["notes"]) and found["compute_figures"] == {"analytic": 1.0}


def test_what_cannot_be_measured_is_refused(monkeypatch):
    refused("profile", "models.mlp", "--topology", "h200x8", *TINY, words=("devices", "H200"))
    refused("profile", "models.mlp", "--seconds", "0", *TINY, words=("--seconds",))
    Path("file").write_text("")
    monkeypatch.setenv("SOAPJAX_CACHE", "file")
    refused("profile", "models.mlp", "--topology", "cpu8", "--no-search", *TINY, words=("SOAPJAX_CACHE",))


def test_fake_devices_are_not_timed():
    refused("plan", "models.mlp", "--topology", "cpu8", "--verify-top", "2", *TINY, words=("verify_top", "fake"))
    done("plan", "models.mlp", "--topology", "cpu8", "--planner", "fsdp", "-o", "plan.json", *TINY)
    refused("calibrate", "plan.json", words=("plan.json", "fake"))
    refused("plan", "models.mlp", "--topology", "cpu8", "--verify-top", "-1", *TINY, words=("--verify-top",))


def one_device(*argv):
    """A process with one real CPU device."""
    env = os.environ | {"XLA_FLAGS": flags_without_devices(), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "soapjax", *map(str, argv), "--json"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_calibrating_needs_a_plan():
    refused("calibrate", "--model", "models.mlp", words=("PLANS", "plan files"))


@pytest.mark.slow
def test_one_device_is_timed_and_calibrated():
    planned = one_device("plan", "models.mlp", "--verify-top", 2, "--proposals", 16, "-o", "plan.json", *TINY)
    assert [t["strategy"] for t in planned["verified"]] and all(t["measured_s"] > 0 for t in planned["verified"])
    fit = one_device("calibrate", "plan.json", *step_of(), "--steps", 3)
    (name, predicted_s, measured_s) = fit["steps"][0]
    assert name == "plan.json" and predicted_s == pytest.approx(measured_s, rel=1e-3)
    assert fit["network_scale"] == 1.0, "nothing is sent"
    found = load_profile(fit["path"])
    assert found.calibration.compute_scale == fit["compute_scale"]
    again = one_device("plan", "models.mlp", "--profile", "auto", "--planner", "data_parallel", *TINY)
    assert again["step_time_s"] == pytest.approx(measured_s, rel=1e-3)


def evaluation(step_time_s, number, is_feasible=True):
    strategy = Strategy(np.full((2, 2), number, np.int8), np.zeros(2, np.int8))
    return Evaluation(strategy, step_time_s, 1.0, is_feasible, step_time_s)


def test_the_measured_best_wins_and_the_table_is_kept():
    a, b, c, big, dp = (evaluation(t, i, t != 4e-4) for i, t in enumerate((1e-3, 2e-3, 3e-3, 4e-4, 5e-3)))
    pool = [("mcmc", a), ("mcmc 2", b), ("mcmc 3", a), ("mcmc 4", c), ("big", big), ("data_parallel", dp), ("fsdp", dp)]
    chosen = shortlist(pool, 2)
    assert [n for n, _ in chosen] == ["mcmc", "mcmc 2", "data_parallel"]
    real = {1e-3: 9e-3, 2e-3: 7e-3, 5e-3: 8e-3}
    found = measured_best(chosen, lambda e: real[e.step_time_s])
    assert found.best is b and [(t.strategy, t.predicted_s, t.measured_s) for t in found.table] == [
        ("mcmc", 1e-3, 9e-3), ("mcmc 2", 2e-3, 7e-3), ("data_parallel", 5e-3, 8e-3),
    ]  # fmt: skip

    def fails_once(e):
        if e is b:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return real[e.step_time_s]

    found = measured_best(chosen, fails_once)
    assert found.best is dp and "out of memory" in found.notes[0]
    with pytest.raises(SoapjaxError, match="out of memory"):
        measured_best(chosen[1:2], fails_once)


def test_a_strategy_that_fails_without_a_word_is_out_too():
    def fails(e):
        raise RuntimeError

    with pytest.raises(SoapjaxError, match="mcmc: did not run: RuntimeError"):
        measured_best([("mcmc", evaluation(1e-3, 0))], fails)


@pytest.mark.slow
def test_a_gain_below_the_calibrated_error_takes_the_simpler_plan(some_profile):
    from soapjax.steps.sourced_models import abstract_model
    from soapjax.strategy.plan import ModelSource

    pairs = (x.split("=") for x in TINY[1::2])
    model = abstract_model(ModelSource(path="models.mlp", settings={k: int(v) for k, v in pairs}))
    for residual, taken in ((0.0, False), (0.999, True)):
        profile = some_profile.model_copy(update={"calibration": Calibration(residual=residual)})
        found = entry.plan(model.step, *model.arguments, topology="cpu8", proposals=64, profile=profile)
        baseline = found.baselines["data_parallel"].best
        assert found.result.best.step_time_s <= baseline.step_time_s
        same = (found.result.best.strategy.axes == baseline.strategy.axes).all()
        assert (same and any("calibrated error" in n for n in found.plan.provenance.notes)) == taken


@pytest.mark.slow
def test_two_real_processes_take_the_same_measured_best():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = os.environ | {"XLA_FLAGS": flags_without_devices(), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(Path(__file__).parent / "two_processes.py")]
    both = [subprocess.Popen([*command, str(r), str(port)], env=env, stdout=subprocess.PIPE, text=True) for r in range(2)]
    try:
        found = [p.communicate(timeout=240)[0].splitlines()[-1] for p in both]
    finally:
        for p in both:
            p.kill()
    assert found[0] == found[1] and found[0].startswith("plan ")
    _, _, predicted_s, table = found[0].split(" ", 3)
    table = ast.literal_eval(table)
    assert "data_parallel" in [name for name, *_ in table] and len(table) >= 2
    best = min(table, key=lambda row: row[2])
    assert best[1] == pytest.approx(float(predicted_s), rel=1e-5), "the plan is that of the measured best"
