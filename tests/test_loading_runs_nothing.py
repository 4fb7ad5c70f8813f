"""What Python does while files from others are loaded, by an audit hook: it reads these files, and that is all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import plan_text

from soapjax.costs.measured.profile import Profile
from soapjax.costs.measured.profile_parts import Device, Measurement

ROOT = Path(__file__).parent.parent
HOSTILE = {"path": "trap:make", "settings": {"a": 1}}
TRAP = "open('trapped', 'w')\ndef make(a):\n    return a\n"


def with_model(text, model):
    return json.dumps(json.loads(text) | {"model": model})


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audited")
    (folder / "trap.py").write_text(TRAP)
    (folder / "warm.json").write_text(plan_text())
    (folder / "plan.json").write_text(with_model(plan_text(planner="fsdp"), HOSTILE))
    text = (ROOT / "topologies" / "cpu8.toml").read_text()
    (folder / "warm.toml").write_text(text)
    (folder / "box.toml").write_text(text)
    measured = Measurement(
        label="a", structure="0" * 16, kind="dot", dtype="float32", reads=(), writes=(), flops=1.0, moved_bytes=1.0, seconds=1e-6
    )  # fmt: skip
    profile = Profile(device=Device(name="cpu", platform="cpu"), versions={}, operators=(measured,))
    (folder / "profile.json").write_text(profile.to_text())
    # Without the tests' own compilation cache, which is JAX's and the user's.
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    env |= {"SOAPJAX_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT), "SOAPJAX_PROGRAM_CACHE": "on"}
    command = [sys.executable, str(Path(__file__).parent / "audited_worker.py"), str(folder)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert not (folder / "trapped").exists()
    return json.loads(ran.stdout.splitlines()[-1]), folder


READ = {"plan": "plan.json", "topology": "box.toml", "profile": "profile.json", "run": "plan.json", "verify": "plan.json"}


@pytest.mark.parametrize("name", READ)
def test_only_the_named_file_is_opened_and_nothing_imported(report, name):
    found, folder = report[0][name], report[1]
    assert found["events"], "the hook sees the file"
    for event, what in found["events"]:
        assert event == "open" and folder / what == folder / READ[name], (event, what)
    assert found["result"] == {"plan": 8, "topology": 8, "profile": 1, "run": 2, "verify": 2}[name]


def test_a_plan_is_predicted_from_its_file_and_programs_of_ones_own(report):
    found, folder = report[0]["simulate"], report[1]
    cache = folder / "cache" / "programs"
    assert found["result"] == 0
    for event, what in found["events"]:
        is_cache = event in ("open", "os.rename", "pickle.find_class", "os.mkdir")
        is_key = what == str(cache) or len(what) == 64 or what.startswith(".writing-") or event == "pickle.find_class"
        assert (event == "open" and what == "plan.json") or (is_cache and is_key), (event, what)


def test_only_ones_own_cache_is_unpickled(report):
    own, others = report[0]["own cache"], report[0]["another user's cache"]
    assert own["result"] == others["result"] == 7
    assert any(event == "pickle.find_class" for event, _ in own["events"]), "the hook sees unpickling"
    opened = [what for event, what in others["events"] if event == "open"]
    assert opened and set(opened) == {str(report[1] / "cache" / "programs")}, "the folder is looked at, and no file in it"
    assert {event for event, _ in others["events"]} <= {"open", "os.mkdir"}
