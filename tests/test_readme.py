"""README and docs: short, their links hold, their Python is Python, and the example runs as it is printed."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import soapjax

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = {path.name: path for path in [README, *sorted((ROOT / "docs").glob("*.md"))]}
RUN = ["planning.md", "training_loops.md"]  # all Python of these is one program; of other pages it is only compiled
FILE = re.compile(r"`((?:docs|examples|models|results|scripts|soapjax|tests|topologies)/[\w./-]+\.[a-z]+)`")


def text(name):
    return PAGES[name].read_text(encoding="utf-8")


def python_blocks(name):
    return re.findall(r"^```python\n(.*?)^```", text(name), re.DOTALL | re.MULTILINE)


def run_python(code, folder):
    """In a process of its own, which has the eight fake devices of this one and compiles as quickly."""
    ran = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def test_the_example_runs_on_eight_devices(tmp_path):
    losses = [float(line) for line in run_python(python_blocks("README.md")[0], tmp_path).split()]
    assert losses[-1] < losses[0]
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert len(plan["mesh"]["device_order"]) == 8
    assert plan["provenance"]["baselines"].keys() == {"data_parallel", "fsdp", "tensor_parallel"}


@pytest.mark.parametrize("name", RUN)
def test_the_python_of_a_page_runs(name, tmp_path):
    run_python("\n".join(python_blocks(name)), tmp_path)


@pytest.mark.parametrize("name", PAGES)
def test_python_compiles_and_blocks_are_closed(name):
    for code in python_blocks(name):
        compile(code, name, "exec")
    assert text(name).count("```") % 2 == 0


@pytest.mark.parametrize("name", PAGES)
def test_links_and_named_files_exist(name):
    here = PAGES[name].parent
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text(name)) if not link.startswith("http")]
    missing = [link for link in links if not (here / link).exists()]
    missing += [file for file in FILE.findall(text(name)) if not (ROOT / file).exists()]
    assert not missing


def test_the_readme_is_read():
    assert len(text("README.md").splitlines()) <= 150


def test_every_page_is_linked_from_the_readme():
    assert {f"docs/{name}" for name in PAGES if name != "README.md"} <= set(re.findall(r"\]\(([^)\s]+)\)", text("README.md")))


def test_every_option_of_soap_shard_is_told():
    table = re.search(r"^## Options\n(.*?)^## ", text("steps.md"), re.DOTALL | re.MULTILINE)[1]
    told = {option for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for option in re.findall(r"`(\w+)`", row)}
    assert inspect.signature(soapjax.soap_shard).parameters.keys() - {"fn"} <= told


def test_the_index_of_scripts_names_each_of_them():
    index = (ROOT / "scripts" / "README.md").read_text()
    assert sorted(re.findall(r"`(\w+\.py)`", index)) == sorted(p.name for p in (ROOT / "scripts").glob("*.py"))
