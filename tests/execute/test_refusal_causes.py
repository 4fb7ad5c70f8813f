"""What is refused of micro-batches names what the user wrote, and its line, not an equation of its derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import soapjax
from soapjax.errors import SoapjaxError

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.standard_normal((6, 10)) / 2, "u": RNG.standard_normal((10, 16)) / 2}
X, T, Y, OF_CLASS = RNG.standard_normal((16, 6)), RNG.standard_normal((16, 16)), RNG.integers(0, 16, 16), np.arange(1.0, 17)
CHOSEN = RNG.permutation(16)


def net(p, x):
    return jnp.tanh(x @ p["w"]) @ p["u"]


def errors(p, x, t):
    return ((net(p, x) - t) ** 2).mean(-1)


def hard(p, x, t):
    e = errors(p, x, t)
    return (e * (e > jax.lax.stop_gradient(jnp.quantile(e, 0.5)))).mean()


def of_class(p, x, y, c):
    return -(c[y] * jnp.take_along_axis(jax.nn.log_softmax(net(p, x)), y[:, None], 1)[:, 0]).mean()


def apart(p, x, t):
    h = net(p, x)
    return jnp.maximum(errors(p, x, t) - ((h - h[CHOSEN]) ** 2).mean(-1) + 1, 0).mean()


@pytest.mark.parametrize(
    "loss, batch, told",
    [
        (lambda p, x, t: errors(p, x, t).max(), (X, T), "largest or least of all samples .*test_refusal_causes"),
        (lambda p, x, t: -errors(p, x, t).min(), (X, T), "largest or least of all samples .*test_refusal_causes"),
        (hard, (X, T), "quantile .*what the network makes .*in hard.*"),
        (of_class, (X, Y, OF_CLASS), "a table as long by chance, use another batch size than its 16 rows"),
        (apart, (X, T), "closes over is not cut.*samples that they choose"),
        (lambda p, x, t: jnp.log(errors(p, x, t).mean()), (X, T), "is divided by a sum over the batch's results"),
    ],
    ids=["the largest", "the least", "a quantile", "a table as long", "a permutation", "a logarithm of a mean"],
)  # fmt: skip
def test_the_cause_is_named(loss, batch, told):
    def step(p, *batch):
        value, g = jax.value_and_grad(loss)(p, *batch)
        return jax.tree.map(lambda a, b: a - 0.1 * b, p, g), value

    with jax.enable_x64(True), pytest.raises(SoapjaxError) as e:
        soapjax.soap_shard(step, topology="cpu8", planner="data_parallel", microbatches=2, check="none")(PARAMS, *batch)
    assert e.match("(?s)" + told)
