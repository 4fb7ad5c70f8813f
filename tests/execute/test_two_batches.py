"""Micro-batches of a step with two batches of different sizes, as of labelled samples and of others: loss and gradients are the
whole step's.

The oracle is the plain step on one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import soapjax

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.standard_normal((6, 10)) / 2, "u": RNG.standard_normal((10, 4)) / 2}
MODES = {
    "one program": {"planner": "data_parallel", "microbatches": 2},
    "two stages": {"pipeline": "1f1b", "stages": 2, "microbatches": 2},
}


def net(p, x):
    return jnp.tanh(x @ p["w"]) @ p["u"]


def error(p, x, t):
    return (net(p, x) - t) ** 2


LOSSES = {
    "means": lambda p, x, t, x2, t2: error(p, x, t).mean() + 0.5 * error(p, x2, t2).mean(),
    "sums": lambda p, x, t, x2, t2: error(p, x, t).sum() + 0.5 * error(p, x2, t2).sum(),
    "a mean and a sum": lambda p, x, t, x2, t2: error(p, x, t).mean() + 0.5 * error(p, x2, t2).sum(),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("sizes", [(16, 24), (24, 16), (4, 24)])
def test_loss_and_gradients_are_the_whole_steps(loss, sizes, mode):
    def step(p, x, t, x2, t2):
        value, g = jax.value_and_grad(LOSSES[loss])(p, x, t, x2, t2)
        return jax.tree.map(lambda a, b: a - 0.1 * b, p, g), value, error(p, x, t).mean(1), error(p, x2, t2).mean(1)

    with jax.enable_x64(True):
        rng = np.random.default_rng(1)
        batches = [rng.standard_normal((n, width)) for n in sizes for width in (6, 4)]
        want = jax.jit(step)(PARAMS, *batches)
        got = soapjax.soap_shard(step, topology="cpu8", check="none", proposals=8, **MODES[mode])(PARAMS, *batches)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
