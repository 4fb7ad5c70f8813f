"""Every parameter has its own gradient, also where all are updated in one `cond` or `while` and others have its shape."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from soapjax.execute.compiled.proof import gradient_ids
from soapjax.execute.spmd.evaluator import ProgramEvaluator
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import trace

X = jax.random.normal(jax.random.key(0), (16, 4))
PARAMS = {k: jax.random.normal(jax.random.key(n), (4, 4)) for n, k in enumerate("abc", 1)}


def loss(params):
    h = X
    for k in "abc":
        h = jnp.tanh(h @ params[k])
    return (h**2).mean()


def moved(params, grads):
    size = optax.tree.norm(grads)  # each is made of all of them, too
    return jax.tree.map(lambda p, g: p - 0.1 * g / size, params, grads)


def of_optax(tx):
    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return update


def only_if_finite(params, state, grads):
    return lax.cond(jnp.isfinite(grads["a"][0, 0]), lambda: moved(params, grads), lambda: params), state


def some_trips(params, state, grads):
    def trip(carry):
        return carry[0] + 1, moved(carry[1], grads)

    return lax.while_loop(lambda carry: carry[0] < 1 + (grads["a"][0, 0] > 0), trip, (0, params))[1], state


def behind_a_barrier(params, state, grads):
    return lax.optimization_barrier(moved(params, lax.optimization_barrier(grads))), state


def within_two_choices(params, state, grads):
    is_so = jnp.isfinite(grads["b"][0, 0])
    return lax.cond(is_so, lambda: only_if_finite(params, state, grads)[0], lambda: params), state


TX = {"every second step": optax.MultiSteps(optax.adam(0.1), 2), "if finite": optax.apply_if_finite(optax.adam(0.1), 3)}
WAYS = {f.__name__: (f, lambda p: None) for f in (only_if_finite, some_trips, behind_a_barrier, within_two_choices)}
WAYS |= {name: (of_optax(tx), tx.init) for name, tx in TX.items()}


@pytest.mark.parametrize("way", WAYS)
def test_every_parameter_has_its_own_gradient(way):
    update, init = WAYS[way]
    state = init(PARAMS)
    step = trace(lambda params, state: update(params, state, jax.grad(loss)(params)), PARAMS, state)
    _, binding = build_graph(step)
    assert [p.path for p in binding.phases.parameters] == ["params.a", "params.b", "params.c"]
    found = ProgramEvaluator(step.program).run(jax.tree.leaves((PARAMS, state)), gradient_ids(step, binding))[1]
    for name, gradient, wanted in zip("abc", found, jax.tree.leaves(jax.grad(loss)(PARAMS)), strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-5, err_msg=name)
