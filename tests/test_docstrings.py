"""Examples in docstrings run, and print what they say: with the module's own names, and those of a small step."""

import doctest
import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import soapjax
from models import mlp
from soapjax.planning.entry import planning_problem

ROOT = Path(__file__).parent.parent
WITH_EXAMPLES = sorted(p for p in (ROOT / "soapjax").rglob("*.py") if ">>> " in p.read_text(encoding="utf-8"))
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.fixture(scope="module")
def names():
    """What an example may use without saying where it is from."""
    step, state, batch = mlp.make(batch=16, width=16, layers=2, features=8)
    problem = planning_problem(soapjax.trace(step, state, batch), soapjax.load_topology("cpu8"))
    common = {k: getattr(soapjax, k) for k in ("load_topology", "soap_shard", "trace")} | {"soapjax": soapjax}
    return common | dict(jax=jax, jnp=jnp, np=np, train_step=step, state=state, batch=batch, problem=problem)


@pytest.mark.parametrize("name", [module_of(path) for path in WITH_EXAMPLES])
def test_the_examples_of_a_module_are_true(name, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    report = []
    for test in doctest.DocTestFinder().find(module, name, globs=names | vars(module)):
        runner.run(test, out=report.append)
    assert runner.tries and not runner.failures, "".join(report)
