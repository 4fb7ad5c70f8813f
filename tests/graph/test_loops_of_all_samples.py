"""A step all of whose samples meet in a `while` has no batch that can be cut, and says so; of chunks of it whole ones are cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.ode import odeint

from soapjax import soap_shard
from soapjax.errors import SoapjaxError
from soapjax.graph.microbatch import micro_batch
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import trace


def test_a_solver_that_chooses_its_steps_by_the_error_of_all_samples():
    def step(w, x):
        def loss(w):
            return (odeint(lambda h, t, w: jnp.tanh(h @ w), x, jnp.array([0.0, 1.0]), w)[-1] ** 2).mean()

        return w - 0.1 * jax.grad(loss)(w)

    graph, _ = build_graph(trace(step, jnp.eye(4), jnp.ones((16, 4))))
    with pytest.raises(SoapjaxError, match="a `while` or `cond` computes of all together is in one piece"):
        micro_batch(graph, 4)


def test_a_loop_over_chunks_of_the_batch_is_cut_between_these():
    def step(w, x):
        def loss(w):
            return jax.lax.map(lambda one: (jnp.tanh(one @ w) ** 2).mean(), x, batch_size=size).mean()

        value, grads = jax.value_and_grad(loss)(w)
        return w - 0.1 * grads, value

    w, x = (jax.random.normal(jax.random.key(k), shape) for k, shape in enumerate([(4, 4), (32, 4)]))
    size = 8
    found = soap_shard(step, topology="cpu8", proposals=4, microbatches=2, donate=False)(w, x)
    for mine, wanted in zip(found, jax.jit(step)(w, x), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-5)
    with pytest.raises(SoapjaxError, match="a divisor of 4: the batch of 32 is taken in parts.*choose one of 1, 2, 4, or make"):
        soap_shard(step, topology="cpu8", microbatches=8)(w, x)
    size = 6  # five chunks, and two samples
    with pytest.raises(SoapjaxError, match="a batch that can be cut.*nor one over chunks and a rest.*of a batch that 8 divides"):
        soap_shard(step, topology="cpu8", microbatches=2)(w, x)
