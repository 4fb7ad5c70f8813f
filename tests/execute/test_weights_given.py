"""Micro-batches of losses whose weights are given beside the samples, or by class: loss and gradients are the whole step's.

The oracle is the plain step on one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import sampled
from micro_batched import MODES, PARAMS, assert_as_plain, descended, net

from soapjax.execute.parts.microbatches import micro_step

RNG = np.random.default_rng(0)
X, Y, W = RNG.standard_normal((16, 6)), RNG.integers(0, 4, 16), np.abs(RNG.standard_normal(16))
OF_CLASS, TARGET = np.abs(RNG.standard_normal(4)), RNG.standard_normal((16, 4))


def picked(p, x, y):
    return -jax.nn.log_softmax(net(p, x))[jnp.arange(len(x)), y]


def whitened(p, x, t):
    x = x - x.mean(0)
    root = jnp.linalg.cholesky(x.T @ x / len(x) + 1e-3 * jnp.eye(6))
    return ((net(p, jax.scipy.linalg.solve_triangular(root, x.T, lower=True).T) - t) ** 2).mean()


LOSSES = {
    "picked by place, weights of samples": (lambda p, x, y, w: (w * picked(p, x, y)).sum() / w.sum(), (X, Y, W)),
    "weights of classes": (lambda p, x, y, c: (c[y] * picked(p, x, y)).sum() / c[y].sum(), (X, Y, OF_CLASS)),
    "the largest of them": (lambda p, x, y, c: (c[y] / (c**2)[y].max() * picked(p, x, y)).mean(), (X, Y, OF_CLASS)),
    "a power that is given": (lambda p, x, w, g: ((w**g)[:, None] * net(p, x)).sum() / (w**g).sum(), (X, W, np.full(1, 0.7))),
    "whitened": (whitened, (X, TARGET)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", sampled(LOSSES, 2))
def test_loss_and_gradients_are_the_whole_steps(loss, mode):
    fn, batch = LOSSES[loss]

    def step(p, *batch):
        value, g = jax.value_and_grad(fn)(p, *batch)
        return descended(p, g), value

    assert_as_plain(step, (PARAMS, *batch), mode)


def test_a_teacher_is_not_run_for_the_whole_batch_at_once():
    def step(p, teacher, x):
        def loss(p):
            sure = net(teacher, x).max(-1)
            return (sure[:, None] * net(p, x)).mean() / sure.max()

        return descended(p, jax.grad(loss)(p))

    micro = micro_step(step, PARAMS, PARAMS, X, num_microbatches=2)
    assert not micro.whole
