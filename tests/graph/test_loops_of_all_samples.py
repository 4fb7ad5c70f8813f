"""A step all of whose samples meet in a `while` has no batch that can be cut, and says so."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.ode import odeint

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
