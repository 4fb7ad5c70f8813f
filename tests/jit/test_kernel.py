"""What is compiled as one kernel gives the same numbers, whatever its arguments are: XLA would abort the process on some."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from soapjax.jit.kernel import any_of, as_one_kernel, largest


def running_sum(x, y, unread):
    return jax.lax.fori_loop(0, len(x), lambda i, s: s + x[i] * y[i], jnp.float32(0))


@pytest.mark.parametrize("size", [1, 1_000, 2_600, 20_000])
def test_constants_of_any_size(size):
    constant = np.random.default_rng(0).random(size).astype(np.float32)
    found = jax.jit(lambda x: as_one_kernel(running_sum)(x, constant, constant))(jnp.ones(size))
    assert float(found) == pytest.approx(constant.sum(dtype=np.float64), rel=1e-4)


def test_arguments_that_nothing_reads_and_plain_calls():
    x, y = jnp.arange(5.0), jnp.ones(5)
    assert float(jax.jit(as_one_kernel(running_sum))(x, y, jnp.zeros((1, 7)))) == 10
    assert float(as_one_kernel(running_sum)(x, y, jnp.zeros(()))) == 10


@pytest.mark.parametrize("groups", [1, 2, 3, 7, 64, 256])
def test_reductions_over_groups_of_devices(groups):
    """As large as pins on so many devices make them: XLA compiles no `max(0)` of them in a kernel."""
    x = np.random.default_rng(0).normal(size=(groups, 128)).astype(np.float32)
    found = jax.jit(as_one_kernel(lambda x: (largest(x), any_of(x > 1).any() & (x[0] < 9))))(x)
    np.testing.assert_array_equal(found[0], x.max(0))
    assert (np.asarray(found[1]) == (x > 1).any()).all()
