"""What goes wrong is said once, in the user's words and at the user's line."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from soapjax import SoapjaxError, soap_shard
from soapjax.graph.trace.source_lines import line_of_equation
from soapjax.graph.trace.tracing import trace
from soapjax.helpers import progress

X = np.ones((16, 8), np.float32)


def refused(step, *args, **options):
    with pytest.raises(SoapjaxError) as error:
        soap_shard(step, planner="fsdp", **options)(*args)
    return error.value


def test_an_error_in_the_users_step_keeps_its_line_and_is_the_cause():
    def inner(w, x):
        return jnp.dot(x, w.T)  # the line

    error = refused(lambda w, x: inner(w, x).sum(), jnp.ones((8, 4)), X)
    line = inner.__code__.co_firstlineno + 1
    assert f"test_errors.py:{line} in inner" in str(error)
    assert isinstance(error.__cause__, TypeError) and str(error.__cause__).split("\n")[0] in str(error)

    def decides(w, x):
        return w if x.sum() > 0 else -w

    assert isinstance(refused(decides, jnp.ones(3), X).__cause__, jax.errors.TracerBoolConversionError)
    assert "step(*args)" not in str(error)  # advice names nothing that the user does not have

    class Odd(Exception):
        pass

    def raises(w, x):
        raise Odd("my own words")

    error = refused(raises, jnp.ones(3), X)
    assert "Odd: my own words" in str(error) and isinstance(error.__cause__, Odd)


def test_equations_know_their_line():
    def fn(x):
        return jax.lax.scan(lambda c, r: (c + jnp.sin(r).sum(), None), 0.0, x)[0]

    traced = trace(fn, X)
    lines = {e.name: e.source for e, _ in traced.program.walk()}
    assert lines["sin"] == f"{__file__.rpartition('/')[2]}:{fn.__code__.co_firstlineno + 1} in <lambda>" or lines["sin"].endswith(
        f"test_errors.py:{fn.__code__.co_firstlineno + 1} in <lambda>"
    )
    assert line_of_equation(None) == ""


def test_equations_know_their_line_in_what_was_traced_before():
    """JAX traces a jitted function once: the lines in it are those of its first call, or none."""

    @jax.jit
    def own(x):
        return jax.jit(jnp.cos)(x)

    def earlier(x):
        return jnp.var(own(x), axis=1)

    def fn(x):
        return jnp.var(x, axis=1) + own(x)[:, 0]

    jax.make_jaxpr(earlier)(X)
    lines = {e.name: e.source.rpartition("test_errors.py:")[2] for e in trace(fn, X).program.eqns}
    assert lines["square" if "square" in lines else "mul"] == f"{fn.__code__.co_firstlineno + 1} in fn"
    assert lines["cos"] == f"{own.__wrapped__.__code__.co_firstlineno + 2} in own"


class Tensor:
    """As torch's: it has a shape and a dtype, and is no array to JAX."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def numpy(self):
        return self.array


def test_leaves_that_are_no_arrays_are_named():
    def step(w, batch):
        return w, batch["x"].sum()

    for bad, words in (
        ({"x": X, "id": "abc"}, ["batch.id", "'abc', a str"]),
        ({"x": Tensor(X)}, ["batch.x", "Tensor", ".numpy()"]),
    ):
        said = str(refused(step, jnp.ones(3), bad))
        assert all(w in said for w in words), said
    both = refused(step, jnp.ones(3), {"x": Tensor(X), "id": "a", "names": np.array(["a", "b"])})
    assert len(both.problems) == 3
    # Also where an earlier call had arrays.
    sharded = soap_shard(step, planner="fsdp")
    sharded(jnp.ones(3), {"x": X})
    with pytest.raises(SoapjaxError, match="batch.x"):
        sharded(jnp.ones(3), {"x": Tensor(X)})


def new_state(tx=None):
    return TrainState.create(apply_fn=lambda p, x: x @ p["w"], params={"w": jnp.ones((8, 8))}, tx=tx or optax.adam(1e-2))


def train_step(state, x):
    loss, grads = jax.value_and_grad(lambda p: (state.apply_fn(p, x) ** 2).mean())(state.params)
    return state.apply_gradients(grads=grads), loss


def test_shard_compares_trees_by_paths(caplog):
    state = new_state()
    sharded = soap_shard(train_step, planner="fsdp").prepare(state, X)
    placed = sharded.shard(new_state())  # another optimizer object: the arrays are the same ones
    assert placed.params["w"].sharding == sharded.shardings()[0].params["w"]
    assert "static parts of the tree are other objects" in caplog.text
    with pytest.raises(SoapjaxError, match=r"not planned: params.extra.*\n.*missing: opt_state.0.nu.w"):
        sharded.shard(dataclasses.replace(state, params={"w": X, "extra": X}, opt_state=(state.opt_state[0]._replace(nu={}),)))
    with pytest.raises(SoapjaxError, match="not planned: step"):
        sharded.shard(state, argument=1)


class Terminal:
    """A standard error that is one."""

    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text
        return len(text)

    def flush(self):
        pass


def test_a_line_is_shown_on_terminals_only(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    with progress.shown("planning step") as report:
        assert report is None  # pytest's standard error is a file
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress.shown("planning step") as report:
        report(1024, 0.0125, 1.0)
    assert "planning step: 1,024 proposals, best 0.0125 s per step" in terminal.text
    terminal.text = ""
    sharded = soap_shard(lambda w, x: (x @ w).sum(), planner="fsdp", check="none")
    sharded(jnp.ones((8, 8)), X)
    assert "planning <lambda>" in terminal.text and "compiling <lambda>" in terminal.text
    terminal.text = ""
    sharded(jnp.ones((8, 8)), X)
    assert terminal.text == ""
