"""The gradient of max- and min-pooling as sums of padded arrays, against XLA's own."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from soapjax.execute.spmd.max_pool import pool_gradient


def equation(x, source_of, window, strides, padding, pool, init):
    """The gradient of a pooling of x: its equation's parameters, the other operand, and what XLA computes of both."""

    def fn(x, source):
        return jax.vjp(lambda x: lax.reduce_window(x, init, pool, window, strides, padding), x)[1](source)[0]

    source = source_of(jax.eval_shape(lambda x: lax.reduce_window(x, init, pool, window, strides, padding), x).shape)
    jaxpr = jax.make_jaxpr(fn)(x, source).jaxpr
    found = [e for e in jaxpr.eqns if e.primitive.name == "select_and_scatter_add"]
    return found[0].params, source, jax.jit(fn)


@st.composite
def poolings(draw):
    dims = draw(st.integers(1, 2))
    window = (1, *(draw(st.integers(1, 3)) for _ in range(dims)), 1)
    strides = (1, *(draw(st.integers(1, 3)) for _ in range(dims)), 1)
    padding = ((0, 0), *((draw(st.integers(0, w - 1)), draw(st.integers(0, w - 1))) for w in window[1:-1]), (0, 0))
    shape = (2, *(draw(st.integers(w, 7)) for w in window[1:-1]), 3)
    return shape, window, strides, padding, draw(st.sampled_from(["max", "min"])), draw(st.integers(0, 2**31 - 1))


@settings(max_examples=25)
@given(poolings())
def test_it_is_xlas(case):
    shape, window, strides, padding, name, seed = case
    rng = np.random.default_rng(seed)
    x = rng.integers(-2, 3, shape).astype(np.float32)  # many equal elements: the first one is chosen
    pool, init = (lax.max, -jnp.inf) if name == "max" else (lax.min, jnp.inf)
    x = np.where(rng.random(shape) < 0.1, np.float32(init), x)  # as what lies outside the image
    params, source, of_xla = equation(
        x, lambda s: rng.normal(size=s).astype(np.float32), window, strides, padding, pool, init
    )  # fmt: skip
    found = jax.jit(lambda a, b: pool_gradient(a, b, params))(source, x)
    np.testing.assert_allclose(found, of_xla(x, source), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_are_added_up_in_float32(dtype):
    x = jnp.asarray(np.random.default_rng(0).integers(0, 4, (2, 9, 9, 3)), dtype)
    args = (1, 3, 3, 1), (1, 1, 1, 1), ((0, 0), (1, 1), (1, 1), (0, 0))
    params, source, _ = equation(x, lambda s: jnp.ones(s, dtype), *args, lax.max, -jnp.inf)
    wide = x.astype(jnp.float32)
    _, ones, of_xla = equation(wide, jnp.ones, *args, lax.max, -jnp.inf)
    found = jax.jit(lambda a, b: pool_gradient(a, b, params))(source, x)
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found, np.float32), of_xla(wide, ones))


def test_a_window_without_a_number_goes_to_xlas_choice():
    """NaN beats nothing, and nothing keeps its place before it."""
    whole = jnp.ones((1, 2, 2, 1))
    params, source, of_xla = equation(whole, jnp.ones, (1, 2, 2, 1), (1, 2, 2, 1), ((0, 0),) * 4, lax.max, -jnp.inf)
    ours = jax.jit(lambda a, b: pool_gradient(a, b, params))
    for nan in itertools.product([False, True], repeat=4):
        x = np.where(nan, np.nan, np.arange(4.0)).astype(np.float32).reshape(1, 2, 2, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            np.testing.assert_array_equal(ours(source, x), of_xla(x, source))
