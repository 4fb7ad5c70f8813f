"""Each example runs on 8 fake devices and prints what it prints under plain `jax.jit` on one."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
TINY = ["--width", "16", "--planner", "fsdp"]
NEEDS = {"equinox_step": "equinox", "flax_loop": "orbax", "hugging_face": "transformers"}
SETTINGS = {"flax_loop": ["--folder", "."], "hugging_face": ["--layers", "1"], "ppo": ["--worlds", "16"]}


def missing(name):
    """The package that an example needs and that is not installed."""
    return NEEDS[name] if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None else None


def command_lines(name):
    tiny = [*TINY, *SETTINGS.get(name, [])]
    if name == "flax_loop":  # ends after three steps; a second run goes on from its checkpoint
        return {"planned": [[*tiny, "--steps", "3"], [*tiny, "--steps", "5"]], "plain": [[*tiny, "--steps", "5"]]}
    return {"planned": [[*tiny, "--steps", "3"]], "plain": [[*tiny, "--steps", "3"]]}


@pytest.fixture(scope="module")
def results():
    """One process for all of them: importing jax and compiling the simulator take longer than most examples."""
    runs = {str(path): command_lines(name) for name, path in EXAMPLES.items() if not missing(name)}
    # Of what else is installed transformers imports neither TensorFlow nor PyTorch: that takes longer than the example.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "USE_TF": "0", "USE_TORCH": "0"}
    command = [sys.executable, ROOT / "tests" / "example_worker.py", json.dumps(runs)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return {Path(r["example"]).stem: r for r in map(json.loads, ran.stdout.splitlines())}


def figures(lines):
    """Of each printed step: its number, and the figures beside it."""
    return {int(line.split()[1]): [float(x) for x in re.findall(r"-?\d+\.\d+", line)] for line in lines if line.startswith("step ")}


MUTATES = pytest.mark.xfail(reason="soap_shard does not write an nnx step's changes back yet", strict=False)


@pytest.mark.parametrize("name", [pytest.param(n, marks=MUTATES) if n == "nnx_step" else n for n in EXAMPLES])
def test_an_example_prints_what_it_prints_under_plain_jit(name, results):
    if missing(name):
        pytest.skip(f"{missing(name)} is not installed")
    ran = results[name]
    assert "failed" not in ran, ran["failed"]
    planned, plain = figures(ran["planned"]), figures(ran["plain"])
    assert len(planned) >= 3 and planned.keys() == plain.keys()
    for step in plain:
        assert planned[step] == pytest.approx(plain[step], rel=1e-3, abs=1e-5), f"step {step}"
    assert ran["num_sharded"] > 0


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_marks_the_two_lines_that_change(name):
    lines = EXAMPLES[name].read_text(encoding="utf-8").splitlines()
    assert len(lines) < 90
    marked = [line for line in lines if re.search(r"# \([12]\)", line)]
    assert len(marked) == 2 and marked[0].startswith("from soapjax import soap_shard") and " was: " in marked[1]
