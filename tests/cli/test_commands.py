"""The commands end to end on small models: plan, simulate, run, verify; and what a person at a terminal relies on."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from command_line import ROOT, TINY, call, done, plan_text, step_of
from ranks import flags_without_devices

from soapjax import Plan
from soapjax.cli import running_commands
from soapjax.cli.arguments import COMMANDS
from soapjax.costs.measured.profile_parts import Device
from soapjax.topology import shipped_topologies

PLAN_FIELDS = {
    "step_time_s", "baselines", "feasible", "memory_bytes_per_device", "bytes_by_collective", "num_operators",
    "num_proposals", "plan_sha256",
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working folder; what a command adds to the module search path is taken back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    return tmp_path


def test_a_machine_by_node():
    argv = ("plan", "models.mlp", "--planner", "fsdp", "-o", "plan.json", *TINY)
    by_number = done(*argv, "--topology", "dgx_a100", "--hosts", 3)
    assert by_number["num_devices"] == 24 and Plan.load("plan.json").topology["name"] == "3xdgx_a100"
    assert done("simulate", "plan.json", "--topology", "3xdgx_a100")["step_time_s"] == by_number["step_time_s"]
    assert done(*argv, "--topology", "3xdgx_a100")["plan_sha256"] == by_number["plan_sha256"]
    assert call("simulate", "plan.json", "--topology", "4xdgx_a100").status == 2


@pytest.mark.parametrize("more", [(), ("--microbatches", 2)], ids=["one program", "micro-batches"])
def test_layouts_are_fixed_on_the_command_line(more):
    argv = ("plan", "models.mlp", "--topology", "cpu8", "--planner", "fsdp", "-o", "plan.json", *TINY, "--set", "batch=16")
    fixed = {"state.params.dense0.kernel": "-, d0", "batch.features": "d1, -"}
    planned = done(*argv, *more, *(x for path, spec in fixed.items() for x in ("--fix", f"{path}={spec}")))
    assert Plan.load("plan.json").fixed == fixed
    assert done("simulate", "plan.json", *step_of())["plan_sha256"] == planned["plan_sha256"]
    said = call(*argv, *more, "--fix", "batch", "--axis-rule", "=d0").err
    assert "--fix: got 'batch'" in said and "--axis-rule: got '=d0'" in said


def test_limits_that_nothing_meets_end_with_status_3_and_the_least_violating_plan():
    argv = ("plan", "models.mlp", "--topology", "cpu8", "--planner", "fsdp", "--objective", "mdpe", "-o", "plan.json", *TINY)
    ended = call(*argv, "--max-bytes", "1B", "--max-memory", "10B", "--pareto", "--json")
    assert ended.status == 3 and "Traceback" not in ended.err
    lines = [x for x in ended.err.splitlines() if x.startswith("error: ")]
    assert [x.split(":")[1].strip() for x in lines] == ["--max-bytes", "--max-memory"]
    result, plan = ended.result, Plan.load("plan.json")
    assert result["peak_sent_bytes"] == plan.prediction.peak_sent_bytes > 1 and result["objective"].startswith("mdpe: at most 1 B")
    assert any("violates them least" in note for note in result["notes"])
    own = [result["step_time_s"], result["peak_sent_bytes"], result["memory_bytes_per_device"]]
    (taken,) = [p for p in result["front"] if p["is_taken"]]
    assert [taken["step_time_s"], taken["sent_bytes"], taken["memory_bytes"]] == pytest.approx(own)
    ended = call(*argv, "--max-bytes", "1GB")
    assert ended.status == 0 and not [x for x in ended.err.splitlines() if x.startswith("error")]


def test_topologies_are_listed():
    shipped = {t["name"]: t for t in done("topologies")["topologies"]}
    assert shipped.keys() == set(shipped_topologies())
    assert shipped["dgx_a100"]["network"]["bandwidth_bytes_per_s"] == 25e9 and shipped["dgx_a100"]["num_devices"] == 8
    assert shipped["a100x64"]["network"] is None and shipped["a100x64"]["levels"][0]["source"]
    ended = call("topologies")
    assert ended.status == 0 and all(name in ended.out for name in (*shipped, "local", "host 6.25, device 300"))
    Path("box.toml").write_text('name = "box"\nlike = "gh200"\n')
    (machine, box) = done("topologies", "4xgh200", "box.toml")["topologies"]
    assert (machine["name"], machine["num_devices"], box["num_devices"]) == ("4xgh200", 4, 1)
    told = " ".join(call("topologies", "4xgh200").out.split())
    assert "4xgh200: 4 x GH200 480GB" in told and "NVLink-C2C between the GPU and its CPU" in told
    ended = call("topologies", "nope", "4xa100x8")
    assert ended.status == 2 and "'nope'" in ended.err and "4, with a100x8" in ended.err


def test_plan_simulate_run_verify():
    planned = done("plan", "models.mlp", "--topology", "cpu8", "--proposals", 32, "-o", "plan.json", *TINY)
    assert planned.keys() >= PLAN_FIELDS
    assert planned["feasible"] is True and planned["num_proposals"] == 32 and planned["search_s"] > 0
    assert planned["baselines"].keys() == {"data_parallel", "fsdp", "tensor_parallel"}
    assert planned["step_time_s"] <= min(planned["baselines"].values())
    plan = Plan.load("plan.json")
    assert planned["plan_sha256"] == plan.plan_sha256 and planned["num_operators"] == len(plan.operators)
    assert plan.model.path == "models.mlp" and plan.model.settings["width"] == 16

    simulated = done("simulate", "plan.json")
    assert simulated.keys() >= PLAN_FIELDS
    for field in PLAN_FIELDS:
        assert simulated[field] == planned[field], field
    assert Plan.load("plan.json") == plan

    ran = done("run", "plan.json", *step_of(), "--steps", 4)
    assert ran.keys() == {"predicted_s", "measured_s", "comparable", "loss"}
    assert ran["predicted_s"] == planned["step_time_s"] and ran["measured_s"] > 0
    assert ran["comparable"] is False, "eight fake devices"
    assert len(ran["loss"]) == 4 and ran["loss"][-1] < ran["loss"][0]

    verified = done("verify", "plan.json", *step_of())
    assert verified["gradient_rel_error"] <= verified["gradient_rel_bound"]
    assert verified["loss_rel_error"] <= 1e-5 and verified["gradient_rel_error_float64"] <= 1e-9
    assert verified["ops_as_planned"] == verified["planned_ops"] - verified["ops_unchecked"] > 0
    assert verified["proven"] is True


def test_an_edit_by_hand_counts():
    text = plan_text()
    before = Plan.loads(text)
    data = json.loads(text)
    axes = data["operators"]["dense0"]["axes"]
    (feature,) = {"param0"} - set(axes.values())
    data["operators"]["dense0"]["axes"] = dict.fromkeys(axes, feature)
    Path("plan.json").write_text(json.dumps(data))
    after = done("simulate", "plan.json")
    assert after["step_time_s"] != before.prediction.step_time_s and after["plan_sha256"] != before.plan_sha256
    assert done("verify", "plan.json", *step_of())["proven"]


@pytest.mark.slow
def test_a_plan_in_the_space_of_the_paper_is_simulated_run_and_proven():
    space = ("--topology", "cpu8", "--space", "paper", "--planner", "model_parallel")
    planned = done("plan", "models.mlp", *space, "-o", "plan.json", *TINY)
    assert planned["executable"] is True and planned["bytes_by_collective"]["transfer"] > 0
    simulated = done("simulate", "plan.json")
    assert simulated["step_time_s"] == planned["step_time_s"] and simulated["plan_sha256"] == planned["plan_sha256"]
    shown = call("simulate", "plan.json").out
    assert "on device 0" in shown and "on device 1" in shown
    assert done("run", "plan.json", *step_of(), "--steps", "2")["loss"][1] > 0
    assert done("verify", "plan.json", *step_of())["proven"]


def test_an_edit_of_the_form_only_does_not_count():
    text = plan_text()
    sha256 = Plan.loads(text).plan_sha256
    data = json.loads(text)
    for same in (json.dumps(data), json.dumps(data, indent=8, sort_keys=True), text.replace("\n", "\r\n")):
        assert same != text
        Path("plan.json").write_text(same)
        assert Plan.load("plan.json").plan_sha256 == sha256


def test_without_json_people_read_tables():
    Path("plan.json").write_text(plan_text())
    ended = call("simulate", "plan.json")
    assert ended.status == 0 and ended.err == "" and ended.out.endswith(f"plan_sha256 {Plan.loads(plan_text()).plan_sha256}\n")
    for word in ("dense0", "data_parallel", "fsdp", "plan_sha256", "memory per device"):
        assert word in ended.out
    ended = call("run", "plan.json", *step_of(), "--steps", 2)
    assert ended.status == 0 and re.search(r"2 steps: loss \S+ → \S+", ended.out) and "not comparable" in ended.out


OWN_MODEL = '''
import jax
import jax.numpy as jnp

print("being imported")

def small(*, batch=8, width: int = 16):
    """Plain functions, no library."""
    print("being made")

    def step(state, batch):
        def loss(params):
            return ((jnp.tanh(batch @ params["w"]) @ params["v"]) ** 2).mean()
        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.01 * g, state, grads), {"loss": value}

    key = jax.random.key(0)
    return step, {"w": jax.random.normal(key, (8, width)), "v": 0.1 * jnp.ones((width, 1))}, jnp.ones((batch, 8))
'''


def test_a_model_of_ones_own_in_the_working_folder():
    Path("own_package").mkdir()
    Path("own_package/training.py").write_text(OWN_MODEL)
    argv = ("plan", "own_package.training:small", "--topology", "cpu8", "--planner", "fsdp", "--set", "width=24", "-o", "plan.json")
    planned = done(*argv)
    assert planned["feasible"] and Plan.load("plan.json").model.settings == {"width": 24}
    ran = done("run", "plan.json", *step_of(), "--steps", 3)
    assert ran["loss"][-1] < ran["loss"][0]


TRAIN_STATE = '''
import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState


def step(state, batch):
    def loss(params):
        logits = state.apply_fn(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), {"loss": value}


def make():
    """As in Flax's examples: a step count that is a Python int, functions in the tree that every call makes anew, int64 labels."""
    model, rng = nn.Dense(16), np.random.default_rng(0)
    batch = {"x": rng.normal(size=(16, 8)).astype(np.float32), "label": rng.integers(0, 16, 16)}
    params = model.init(jax.random.key(0), batch["x"])
    return step, TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9)), batch
'''


def test_a_flax_train_state_is_planned_run_and_proven():
    Path("flax_example.py").write_text(TRAIN_STATE)
    done("plan", "flax_example", "--topology", "cpu8", "--planner", "data_parallel", "-o", "plan.json")
    ran = done("run", "plan.json", *step_of(), "--steps", 4)
    assert ran["loss"][-1] < ran["loss"][0]
    assert done("verify", "plan.json", *step_of())["proven"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command):
    ended = call(command, "--help")
    assert ended.status == 0 and "Example" in ended.out and f"soapjax {command}" in ended.out and "--json" in ended.out


def test_help_lists_the_commands():
    ended = call("--help")
    assert ended.status == 0 and all(command in ended.out for command in COMMANDS)


def started(*argv, hash_seed="0", **streams):
    """A process of its own, which finds one CPU and must start the fake devices by itself."""
    env = os.environ | {"XLA_FLAGS": flags_without_devices(), "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "soapjax", *map(str, argv)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, **streams)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_plan_in_any_process():
    argv = ("plan", "models.mlp", "--topology", "cpu8", "--proposals", 64, "--seed", 7, "--json", *TINY)
    processes = [started(*argv, "-o", f"{s}.json", hash_seed=s, stderr=subprocess.DEVNULL) for s in ("1", "2")]
    results = [json.loads(p.communicate(timeout=240)[0]) for p in processes]
    assert [p.returncode for p in processes] == [0, 0]
    assert results[0]["plan_sha256"] == results[1]["plan_sha256"] == Plan.load("2.json").plan_sha256
    # A process with one CPU starts as many devices as the plan needs.
    process = started("run", "1.json", *step_of("1.json"), "--steps", 2, "--json", stderr=subprocess.DEVNULL)
    ran = json.loads(process.communicate(timeout=240)[0])
    assert process.returncode == 0 and len(ran["loss"]) == 2 and ran["comparable"] is False


def test_ctrl_c_keeps_the_best_so_far():
    terminal, stderr = pty.openpty()
    process = started("plan", "models.mlp", "--topology", "cpu8", "--seconds", 300, "-o", "plan.json", *TINY, stderr=stderr)
    os.close(stderr)
    shown, end = b"", time.monotonic() + 240
    while not re.search(rb"[1-9]\d* proposals, best", shown):  # the bar: the search has begun
        assert time.monotonic() < end and process.poll() is None, shown
        if select.select([terminal], [], [], 1.0)[0]:
            shown += os.read(terminal, 2**16)
    process.send_signal(signal.SIGINT)
    while process.poll() is None:  # a full terminal would block it
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                shown += os.read(terminal, 2**16)
            except OSError:
                break
    out = process.communicate(timeout=60)[0].decode()
    os.close(terminal)
    assert process.returncode == 130 and b"Traceback" not in shown
    assert "interrupted: this is the best so far" in out and "written to plan.json" in out
    plan = Plan.load("plan.json")
    assert plan.provenance.num_proposals > 0 and plan.prediction.feasible
    assert [p.name for p in Path(".").iterdir()] == ["plan.json"]


def test_a_measured_time_is_comparable_on_the_planned_kind_of_device_alone(monkeypatch):
    plan, here = Plan.loads(plan_text(topology="h200x1")), types.SimpleNamespace(platform="gpu", process_index=0)
    for name, platform, expected in (
        ("NVIDIA H200", "cuda", True), ("NVIDIA GH200 480GB", "cuda", False), ("NVIDIA H200", "rocm", False), ("cpu", "cpu", False)
    ):  # fmt: skip
        here.device_kind = name
        monkeypatch.setattr(running_commands, "device_at_hand", lambda n=name, p=platform: Device(name=n, platform=p))
        assert running_commands._is_comparable(plan, [here]) is expected, name


def test_what_is_refused_before_the_search_leaves_no_bar_behind():
    terminal, stderr = pty.openpty()
    process = started("plan", "models.mlp", "--topology", "no_such_machine", *TINY, stderr=stderr)
    os.close(stderr)
    shown = b""
    with contextlib.suppress(OSError):  # the process has ended
        while part := os.read(terminal, 2**16):
            shown += part
    process.communicate(timeout=60)
    os.close(terminal)
    assert process.returncode == 2 and b"no_such_machine" in shown
    assert shown.rfind(b"\x1b[?25h") >= shown.rfind(b"\x1b[?25l"), "the cursor is shown"
