"""Results of a micro-batched step have the shapes that the plain step's have, also where nothing is known of how values grow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import soapjax
from soapjax.errors import SoapjaxError

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.standard_normal((6, 10)) / 2, "u": RNG.standard_normal((10, 4)) / 2}
BATCH = RNG.standard_normal((16, 6)), RNG.standard_normal((16, 4))
MODES = {
    "one program": {"planner": "data_parallel", "microbatches": 2},
    "two stages": {"pipeline": "1f1b", "stages": 2, "microbatches": 2},
}


def run(results, mode):
    """Results of the plain step and of the micro-batched one, whose product over samples takes more equations for more samples."""

    def step(p, x, t):
        def f(p):
            h = jnp.tanh(x @ p["w"]) @ p["u"]
            return ((h - t) ** 2).mean(), (jnp.prod(jnp.abs(h[:, 0])), results(h))

        (_, (product, found)), g = jax.value_and_grad(f, has_aux=True)(p)
        return jax.tree.map(lambda a, b: a - 0.1 * b, p, g), found, product

    with jax.enable_x64(True):
        sharded = soapjax.soap_shard(step, topology="cpu8", check="none", proposals=8, **MODES[mode])
        want = jax.jit(step)(PARAMS, *BATCH)
        return want[:2], sharded(PARAMS, *BATCH)[:2]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "results",
    [lambda h: h, lambda h: h.T, lambda h: {"best": h.argmax(-1), "errors": (h**2).mean(1)}],
    ids=["rows", "columns", "two"],
)
def test_results_with_samples_are_joined(results, mode):
    want, got = run(results, mode)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_pairs_of_samples_are_refused(mode):
    with pytest.raises(SoapjaxError, match="out.1"):
        run(lambda h: h @ h.T, mode)
