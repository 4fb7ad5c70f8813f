"""Results of a micro-batched step have the shapes that the plain step's have, also where nothing is known of how values grow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro_batched import MODES, PARAMS, assert_equal, descended, net, sharded

from soapjax.errors import SoapjaxError

RNG = np.random.default_rng(0)
BATCH = RNG.standard_normal((16, 6)), RNG.standard_normal((16, 4))


def run(results, mode):
    """Results of the plain step and of the micro-batched one, whose product over samples takes more equations for more samples."""

    def step(p, x, t):
        def f(p):
            h = net(p, x)
            return ((h - t) ** 2).mean(), (jnp.prod(jnp.abs(h[:, 0])), results(h))

        (_, (product, found)), g = jax.value_and_grad(f, has_aux=True)(p)
        return descended(p, g), found, product

    with jax.enable_x64(True):
        want = jax.jit(step)(PARAMS, *BATCH)
        return want[:2], sharded(step, mode)(PARAMS, *BATCH)[:2]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "results",
    [lambda h: h, lambda h: h.T, lambda h: {"best": h.argmax(-1), "errors": (h**2).mean(1)}],
    ids=["rows", "columns", "two"],
)
def test_results_with_samples_are_joined(results, mode):
    want, got = run(results, mode)
    assert_equal(got, want)


@pytest.mark.parametrize("mode", MODES)
def test_pairs_of_samples_are_refused(mode):
    with pytest.raises(SoapjaxError, match="out.1"):
        run(lambda h: h @ h.T, mode)
