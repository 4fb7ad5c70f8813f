"""Sums over all elements of what was made flat first: the same numbers, without the reshape."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import soapjax
from soapjax.execute.compiled.inspection import inspect
from soapjax.execute.compiled.traffic import compare_by_kind
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.graph.rules.light_rules import ELEMENTWISE
from soapjax.graph.trace.flattening import flatten

SUMS = {
    "vdot": lambda x, y: jnp.vdot(x, y),
    "norm of a ravelled": lambda x, y: jnp.linalg.norm(x.ravel()),
    "squares": lambda x, y: jnp.sum(jnp.abs(x.reshape(-1) - y.reshape(-1)) ** 2),
    "largest": lambda x, y: jnp.abs(x.flatten()).max() + y.ravel().min(),
    "optax": lambda x, y: optax.tree.vdot({"a": x, "b": y[0]}, {"a": y, "b": x[0]}),
    "in a loop": lambda x, y: jax.lax.scan(lambda c, z: (c + jnp.vdot(z, z), None), 0.0, jnp.stack([x, y]))[0],
}
OTHERS = {
    "returned": lambda x, y: (x.ravel(), jnp.sum(x.ravel() ** 2)),
    "beside others": lambda x, y: jnp.sum(x.ravel() * jnp.arange(x.size)),
    "joined": lambda x, y: jnp.linalg.norm(jnp.concatenate([x.ravel(), y.ravel()])),
    "other shapes": lambda x, y: jnp.vdot(x, y.T),
    "sorted beside": lambda x, y: (jnp.sort(x.ravel()), jnp.any(jnp.abs(x.ravel()) > 1), jnp.median(y)),
    "places": lambda x, y: jnp.argmax(x.ravel()),
}


def values_of(program, args):
    """What the equations of a program give one after the other."""
    env = dict(zip(program.inputs, args, strict=True)) | program.consts
    read = lambda a: env[a] if isinstance(a, int) else a.val  # noqa: E731
    for eqn in program.eqns:
        out = eqn.primitive.bind(*map(read, eqn.inputs), **eqn.primitive.get_bind_params(eqn.params))
        env.update(zip(eqn.outputs, out if eqn.primitive.multiple_results else [out], strict=True))
        assert all(env[o].shape == program.avals[o].shape for o in eqn.outputs)
    return [read(o) for o in program.outputs]


def flat(fn, *args):
    return flatten(jax.jit(fn).trace(*args).jaxpr, elementwise=ELEMENTWISE)


def arrays(dtype=jnp.float32):
    return [jnp.asarray(np.random.default_rng(k).normal(size=(6, 8)), dtype) for k in range(2)]


@pytest.mark.parametrize("name", [*SUMS, *OTHERS])
def test_sums_are_of_the_dims_as_they_are_and_other_readers_get_what_is_flat(name):
    fn = (SUMS | OTHERS)[name]
    program = flat(fn, *arrays())
    names = {e.name for e in program.leaves}
    assert names.isdisjoint({"reshape", "dot_general"}) == (name in SUMS)
    if name != "in a loop":
        for a, b in zip(values_of(program, arrays()), jax.tree.leaves(fn(*arrays())), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6)


def test_products_in_half_precision_are_summed_up_in_single():
    x, y = arrays(jnp.bfloat16)
    (found,) = values_of(flat(lambda x, y: jnp.vdot(x, y), x, y), [x, y])
    exact = np.vdot(np.asarray(x, np.float64), np.asarray(y, np.float64))
    assert found.dtype == jnp.bfloat16 and abs(float(found) - exact) <= 2**-8 * abs(exact)


def test_a_product_in_a_gradient_stays_one():
    loss = lambda w, x: jnp.tanh(jnp.vdot(w, x))  # noqa: E731
    assert "dot_general" in {e.name for e in flat(jax.grad(loss), *arrays()).leaves}


def sent_by_step(norm):
    """What a step of FSDP sends whose updates are scaled by norms, predicted and compiled."""

    def step(params, x, y):
        def loss_fn(params):
            return ((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        scale = jax.tree.map(lambda g: 0.1 / jnp.maximum(1, norm(g, g)), grads)
        return jax.tree.map(lambda p, g, s: p - s * g, params, grads, scale), loss

    params = {"a": jnp.ones((12, 48)), "b": jnp.ones((48, 8))}
    found = soapjax.plan(step, params, jnp.ones((16, 12)), jnp.ones((16, 8)), topology="cpu8", planner="fsdp")
    compiled = inspect(bind_plan(found.step, found.plan, devices=jax.devices()[:8]))
    figures = compare_by_kind(found.plan, compiled.collectives).values()
    return [sum(f[kind] for f in figures) for kind in ("predicted", "compiled")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vdot", "norm of a ravelled"])
def test_updates_scaled_by_norms_send_as_much_however_these_are_written(name):
    """With dims of which the second alone can be split over all devices: nothing is gathered for norms."""
    assert sent_by_step(SUMS[name]) == sent_by_step(lambda g, _: jnp.sqrt(jnp.sum(g**2)))
