"""Training over two processes: one plan, one program, the numbers of one device; and what does not agree ends all of them."""

import json
import os
import re
import subprocess
import sys

import jax
import pytest
from command_line import TINY, plan_text
from ranks import ROOT, environment

from models import mlp
from soapjax.strategy.plan import Plan

SETTINGS = {"batch": 4, "width": 16, "layers": 1, "features": 8, "classes": 4}  # TINY


def launched(port, *arguments_by_rank, timeout=100):
    """(status, out, err) of each rank."""
    script = [sys.executable, str(ROOT / "scripts" / "launch_multihost.py"), "models.mlp", *TINY]
    options = dict(cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = [
        subprocess.Popen([*script, *a], env=environment(port, r), **options) for r, a in enumerate(arguments_by_rank)
    ]  # fmt: skip
    try:
        ended = [p.communicate(timeout=timeout) for p in processes]
    finally:
        for p in processes:
            p.kill()
    return [(p.returncode, *e) for p, e in zip(processes, ended, strict=True)]


def losses(out):
    return [float(line.split("loss ")[1].split(",")[0]) for line in out.splitlines() if line.startswith("step ")]


def launch_here(*arguments):
    """The script as a user starts it on one machine."""
    command = [sys.executable, ROOT / "scripts" / "launch_multihost.py", "models.mlp", *TINY, *arguments]
    kept = {k: v for k, v in os.environ.items() if "PROXY" not in k.upper()}
    return subprocess.run(command, env=kept, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


def test_two_processes_train_as_one_device():
    done = launch_here("--processes", "2", "--planner", "fsdp", "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert "2 processes, 2 devices" in done.stdout
    step, state, batch = mlp.make(**SETTINGS)
    expected = []
    for _ in range(3):
        state, metrics = jax.jit(step)(state, batch)
        expected.append(float(metrics["loss"]))
    assert losses(done.stdout) == pytest.approx(expected, rel=1e-4)  # printed with six digits, by one of the two


def test_no_shorter_name_starts_processes_that_start_processes(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import launch_multihost

    with pytest.raises(SystemExit):
        launch_multihost.parse(["models.mlp", "--process", "2"])
    assert "unrecognized arguments: --process" in capsys.readouterr().err


def test_no_processes_are_refused():
    done = launch_here("--processes", "0")
    assert done.returncode == 2 and "--processes" in done.stderr and "Traceback" not in done.stderr


def two_device_plans(folder):
    """A plan for two devices, and one that differs in one operator."""
    topology = folder / "two.toml"
    text = (ROOT / "topologies" / "cpu8.toml").read_text()
    topology.write_text(text.replace("size = 8", "size = 2"))
    plan = json.loads(plan_text(topology=str(topology)))
    other = json.loads(json.dumps(plan))
    name = next(n for n, o in other["operators"].items() if o["kind"] == "dot")
    other["operators"][name]["axes"] = dict.fromkeys(other["operators"][name]["axes"], "replicate")
    paths = []
    for i, data in enumerate((plan, other)):
        paths.append(folder / f"plan{i}.json")
        paths[-1].write_text(json.dumps(data))
        Plan.load(str(paths[-1]))
    return name, *map(str, paths)


def test_two_plans_end_both_with_the_difference(free_port, tmp_path):
    name, one, other = two_device_plans(tmp_path)
    for status, out, err in launched(free_port, ["--plan", one], ["--plan", other]):
        assert status == 2 and "Traceback" not in err and not losses(out)
        assert "/plan: plan: got " in err and "on rank 0; " in err and "on rank 1" in err
        assert f"/plan: operators.{name}.axes." in err and "replicate" in err


def test_a_rank_that_does_not_come_is_named(free_port):
    ((status, _, err),) = launched(free_port, ["--timeout", "2"])
    assert status == 2 and "rank 1 missing after 2 s" in err and "Traceback" not in err


def test_a_rank_that_fails_alone_does_not_keep_the_other_waiting(free_port):
    first, second = launched(free_port, ["--planner", "fsdp"], ["--planner", "fsdp", "--set", "nonsense=1"])
    assert second[0] == 2 and "nonsense" in second[2]
    assert first[0] == 2 and re.search(r"error: the job: got rank 1 \(.*\) has ended with status 2 \(.*nonsense", first[2])


@pytest.mark.slow
def test_a_failed_search_ends_all_with_its_reason(free_port):
    for status, _, err in launched(free_port, *[["--planner", "no_such_planner"]] * 2):
        assert status == 2 and "no_such_planner" in err and "Traceback" not in err
