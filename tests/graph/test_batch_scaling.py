"""Powers of the batch, against what duplicating a batch really does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import soapjax
from soapjax.graph.trace.batch_scaling import scalings

FACTOR = 4


def case(fn, *, size=4):
    def traced(n):
        x = jax.ShapeDtypeStruct((n, 6), "float32")
        return soapjax.trace(fn, jax.ShapeDtypeStruct((6, 3), "float32"), x).program

    small, large = traced(size), traced(FACTOR * size)
    return small, scalings(small, large, FACTOR)


FUNCTIONS = {
    "mean": lambda w, x: jnp.tanh(x @ w).mean(),
    "sum": lambda w, x: jnp.tanh(x @ w).sum(),
    "mean of squares": lambda w, x: ((x @ w) ** 2).mean(axis=0).sum(),
    "root": lambda w, x: jnp.sqrt(((x @ w) ** 2).sum()),
    "normalised": lambda w, x: (((x @ w) - (x @ w).mean(0)) / jnp.sqrt((x @ w).var(0) + 1e-5)).sum(axis=1).mean(),
    "with decay": lambda w, x: jax.nn.softmax(x @ w).mean() + 0.1 * (w**2).sum(),
    "computed again": lambda w, x: jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(w, x).mean(),
    "a loop": lambda w, x: jax.lax.scan(lambda c, r: (c + (x @ r).mean(), None), 0.0, w.T)[0],
}


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_powers_are_those_of_a_repeated_batch(name):
    fn = FUNCTIONS[name]
    w, x = jax.random.normal(jax.random.key(0), (6, 3)), jax.random.normal(jax.random.key(1), (4, 6))
    for f in (fn, lambda w, x: jax.grad(fn)(w, x)):
        program, found = case(f)
        scaling = found[program.outputs[0]]
        assert scaling.power is not None and not scaling.is_ratio
        once, repeated = f(w, x), f(w, jnp.concatenate([x] * FACTOR))
        np.testing.assert_allclose(repeated, FACTOR**scaling.power * once, rtol=1e-4, atol=1e-5)


def test_what_is_neither_mean_nor_sum():
    program, found = case(lambda w, x: jnp.tanh(x @ w).sum() + (w**2).sum())
    assert found[program.outputs[0]].power is None
    program, found = case(lambda w, x: jnp.log((x @ w).sum()))
    assert found[program.outputs[0]].power is None
    program, found = case(lambda w, x: (x @ w).sum() / (x[:, 0] > 0).sum())
    assert found[program.outputs[0]].is_ratio
    program, found = case(jax.grad(lambda w, x: (x @ w).max()))  # shared among as many as are the largest
    assert found[program.outputs[0]].is_ratio
    small = soapjax.trace(lambda x: x + 1, jnp.ones(3)).program
    assert scalings(small, soapjax.trace(lambda x: x * 2 + 1, jnp.ones(3)).program, 2) == {}
