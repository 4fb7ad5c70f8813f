"""Loops of unknown length and branches run split: every device does its own rows, and the rows' end is agreed on."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import soapjax


def test_a_vmapped_loop_runs_on_the_devices_that_hold_its_rows():
    def until_long(x, w):
        def is_short(c):
            return (c[0] @ c[0] < 40) & (c[1] < 50)

        return lax.while_loop(is_short, lambda c: (c[0] + 0.1 * jnp.tanh(c[0] @ w), c[1] + 1), (x, 0))

    def step(w, x):
        ends, counts = jax.vmap(until_long, (0, None))(x, w)
        return w, ends.sum(1), counts

    args = jax.random.normal(jax.random.key(1), (8, 8)) / 3, jax.random.normal(jax.random.key(0), (16, 8))
    planned = soapjax.soap_shard(step, topology="cpu8", planner="data_parallel")
    for found, wanted in zip(planned(*args), jax.jit(step)(*args), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert planned.plan.prediction.split_flops_share == 1
    program = planned.lower(*args).compile().as_text()
    assert "while(" in program and "f32[2,8]" in program and "f32[16,8]" not in program
    assert "all-gather" not in program and "all-reduce" in program  # whether any row goes on
