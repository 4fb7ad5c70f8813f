"""A small net in micro-batches, of one program and of two stages, beside the plain step on one device."""

import jax
import jax.numpy as jnp
import numpy as np

import soapjax

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.standard_normal((6, 10)) / 2, "u": RNG.standard_normal((10, 4)) / 2}
MODES = {
    "one program": {"planner": "data_parallel", "microbatches": 2},
    "two stages": {"pipeline": "1f1b", "stages": 2, "microbatches": 2},
}


def net(p, x):
    return jnp.tanh(x @ p["w"]) @ p["u"]


def descended(p, gradient):
    return jax.tree.map(lambda a, b: a - 0.1 * b, p, gradient)


def sharded(step, mode):
    return soapjax.soap_shard(step, topology="cpu8", check="none", proposals=8, **MODES[mode])


def assert_equal(got, want):
    """In float64."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def assert_as_plain(step, args, mode):
    with jax.enable_x64(True):
        assert_equal(sharded(step, mode)(*args), jax.jit(step)(*args))
