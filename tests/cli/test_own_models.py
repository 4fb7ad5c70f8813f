"""Models that people write: steps that close over arrays which their factory made."""

import functools
import json
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_line import call

import soapjax
from soapjax.cli.running_commands import _batches, train
from soapjax.errors import SoapjaxError
from soapjax.graph.trace.closures import holds_tracers
from soapjax.steps.sourced_models import abstract_model, concrete_model, with_arrays
from soapjax.strategy.plan import ModelSource

MODULE = """
import functools, jax, jax.numpy as jnp, numpy as np
from flax import nnx
def _step(w, x, bins):
    loss, grad = jax.value_and_grad(lambda w: (jax.nn.softmax(x @ w) * bins).sum(-1).mean())(w)
    return w - 0.1 * grad, loss
def arguments(batch): return jnp.ones((32, 16)), jnp.ones((batch, 32))
def closed(batch=16):
    bins = jnp.linspace(-5.0, 5.0, 16)
    return (lambda w, x: _step(w, x, bins)), *arguments(batch)
def partial(batch=16): return functools.partial(_step, bins=jax.random.normal(jax.random.key(0), (16,))), *arguments(batch)
def pmapped(batch=16):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("of_another_machine",))
    def step(w, x):
        x = jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P("of_another_machine")))
        loss, grad = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
        return w - 0.1 * jax.lax.pmean(grad, "batch"), jax.lax.pmean(loss, "batch")
    return step, *arguments(batch)
class Trainer:
    def __init__(self): self.support = {"bins": [jnp.arange(16.0)]}
    def step(self, w, x): return _step(w, x, self.support["bins"][0])
def method(batch=16): return Trainer().step, *arguments(batch)
def frozen(batch=16):
    fixed = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    return (lambda w, x: _step(w, x, fixed(jnp.ones(16)))), *arguments(batch)
class Odd:
    def __getattr__(self, name): raise KeyError(name)
def odd(batch=16):
    held = Odd()
    return (lambda w, x: _step(w, x, 1.0 if held else 2.0)), *arguments(batch)
def wrapped(batch=16):
    bins = jnp.ones(16)
    return jax.jit(functools.partial(lambda bins, w, x: _step(w, x, bins), bins)), *arguments(batch)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    (tmp_path / "own_steps.py").write_text(MODULE)
    yield tmp_path
    for name in ("own_steps", "own_stream"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("factory", ["closed", "partial", "method", "wrapped", "frozen", "odd"])
def test_a_step_may_close_over_arrays_of_its_factory(factory):
    model = abstract_model(ModelSource(path=f"own_steps:{factory}", settings={"batch": 8}))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(model.arguments)) and not holds_tracers(model.step)
    assert soapjax.trace(model.step, *model.arguments).in_paths == ("w", "x")
    real = with_arrays(model)
    assert jax.eval_shape(model.step, *model.arguments)[0].shape == real.step(*real.arguments)[0].shape


def test_such_a_step_is_planned_and_proven():
    ended = call("plan", "own_steps:closed", "--topology", "cpu8", "--planner", "fsdp", "-o", "plan.json")
    assert ended.status == 0, ended.err
    ended = call("verify", "plan.json", "--model", "own_steps:closed")
    assert ended.status == 0 and "proven" in ended.out


def test_what_holds_a_tracer_is_found():
    seen = {}

    def look(x):
        held = {
            "cell": lambda: x, "default": lambda a=x: a, "partial": functools.partial(jnp.add, x),
            "keyword": functools.partial(max, key=x), "object": types.SimpleNamespace(inner=[{"a": x}]),
            "wrapped": functools.wraps(lambda: x)(lambda: None), "nothing": lambda: seen, "empty": lambda: later,
        }  # fmt: skip
        seen.update({name: holds_tracers(f) for name, f in held.items()})
        later = x
        return later

    jax.eval_shape(look, 1.0)
    assert seen == {name: name not in ("nothing", "empty") for name in seen} and len(seen) == 8


def test_a_tracer_in_a_step_is_named():
    kept = []
    jax.eval_shape(lambda x: kept.append(x) or x, jnp.ones(3))
    with pytest.raises(SoapjaxError, match="closes over a tracer.*pass it as an argument"):
        soapjax.trace(lambda w: w * kept[0], jnp.ones(3))


STREAM = """
import jax, jax.numpy as jnp, numpy as np
def step(w, y): return w - jax.grad(lambda w: ((w - y) ** 2).sum())(w), {}
def make(*, batch=4, highest=1): return step, jnp.zeros(4), np.zeros(batch, np.float32)
def batches(*, batch, highest):
    while True: yield np.full(batch, highest, np.float32)
"""


def test_batches_are_those_of_the_settings_in_use(folder):
    (folder / "own_stream.py").write_text(STREAM)
    stream = _batches(concrete_model(ModelSource(path="own_stream", settings={"highest": 3})))
    assert next(stream).tolist() == [3.0] * 4


@pytest.mark.parametrize("given", ["", "yield np.full(4, 2, np.float32)", "yield 1.0"])
def test_a_stream_may_end_or_be_another(folder, given):
    text = STREAM.replace("while True: yield np.full(batch, highest, np.float32)", f"yield from (); {given}")
    (folder / "own_stream.py").write_text(text)
    model = concrete_model(ModelSource(path="own_stream"))
    assert len(train(model.step, model, 3)[0]) == 3


@pytest.mark.parametrize("how", [["--planner", "fsdp"], ["--planner", "fsdp", "--microbatches", "2"]], ids=str)
def test_a_plan_says_how_its_step_is_traced(how):
    """A step for pmap, with a mesh of its own: every command that reads the plan traces it so."""
    plan = ["plan", "own_steps:pmapped", "--topology", "cpu8", "-o", "plan.json", *how]
    assert "--axis-name batch" in call(*plan).err
    assert "--strip-constraints" in call(*plan, "--axis-name", "batch").err
    ended = call(*plan, "--axis-name", "batch", "--strip-constraints")
    assert ended.status == 0, ended.err
    for command in ("simulate", "verify", "run"):
        ended = call(command, "plan.json", "--model", "own_steps:pmapped")
        assert ended.status == 0, ended.err
    made = concrete_model(ModelSource(path="own_steps:pmapped"))
    found, _ = soapjax.soap_shard(made.step, plan="plan.json")(*made.arguments)
    w, x = made.arguments
    expected = w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert {"axis_name", "strip_constraints"} <= json.loads(Path("plan.json").read_text()).keys()
