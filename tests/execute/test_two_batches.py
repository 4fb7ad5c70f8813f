"""Micro-batches of a step with two batches of different sizes, as of labelled samples and of others: loss and gradients are the
whole step's.

The oracle is the plain step on one device.
"""

import jax
import numpy as np
import pytest
from families import sampled
from micro_batched import MODES, PARAMS, assert_as_plain, descended, net


def error(p, x, t):
    return (net(p, x) - t) ** 2


LOSSES = {
    "means": lambda p, x, t, x2, t2: error(p, x, t).mean() + 0.5 * error(p, x2, t2).mean(),
    "sums": lambda p, x, t, x2, t2: error(p, x, t).sum() + 0.5 * error(p, x2, t2).sum(),
    "a mean and a sum": lambda p, x, t, x2, t2: error(p, x, t).mean() + 0.5 * error(p, x2, t2).sum(),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("sizes", sampled([[16, 24], [24, 16], [4, 24]], 3), ids=str)
def test_loss_and_gradients_are_the_whole_steps(loss, sizes, mode):
    def step(p, x, t, x2, t2):
        value, g = jax.value_and_grad(LOSSES[loss])(p, x, t, x2, t2)
        return descended(p, g), value, error(p, x, t).mean(1), error(p, x2, t2).mean(1)

    rng = np.random.default_rng(1)
    batches = [rng.standard_normal((n, width)) for n in sizes for width in (6, 4)]
    assert_as_plain(step, (PARAMS, *batches), mode)
