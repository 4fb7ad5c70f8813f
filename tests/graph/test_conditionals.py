"""A `cond` between two updates of the state is planned and run as they are, element by element; others stay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import soapjax

P = {k: np.float32(np.random.default_rng(n).standard_normal((16, 16)) / 4) for n, k in enumerate("ab")}
X = np.float32(np.random.default_rng(2).standard_normal((16, 16)))


def loss(p, x):
    return (jnp.tanh(x @ p["a"]) @ p["b"]).var()


def step_of(tx):
    def step(p, o, x):
        u, o = tx.update(jax.grad(loss)(p, x), o, p)
        return optax.apply_updates(p, u), o

    return step, (P, tx.init(P), X)


def test_updates_that_are_skipped_send_what_other_updates_send():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    makes = (tx, optax.apply_if_finite(tx, 2), optax.MultiSteps(tx, 2))
    plans = [soapjax.plan(step, *args, topology="cpu8", planner="fsdp").plan for step, args in map(step_of, makes)]
    plain, *others = (sum(plan.prediction.bytes_by_collective.values()) for plan in plans)
    assert all(abs(sent - plain) < 100 for sent in others)  # whether all are finite is sent, too


@pytest.mark.parametrize("index", [-1, 2, True])
def test_what_is_chosen_is_what_cond_chooses(index):
    def step(p, x):
        old = lambda p: jax.tree.map(jnp.negative, p)  # noqa: E731
        new = lambda p: jax.tree.map(lambda a: a + 1 / jnp.sum(a), p)  # noqa: E731
        return (lax.cond(index, new, old, p) if isinstance(index, bool) else lax.switch(jnp.int32(index), [old, new], p)), x.sum()

    traced = soapjax.trace(step, P, X)
    assert not [e for e in traced.program.eqns if e.name == "cond"]
    found = soapjax.soap_shard(step, topology="cpu8", planner="data_parallel")(P, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, jax.jit(step)(P, X))


BRANCHES = {
    "a product": (lambda p: {"a": p["a"] @ p["b"], "b": p["b"]}, lambda p: p),
    "one array": (lambda p: p["a"] * 2, lambda p: p["a"]),
    "another type": (lambda p: jax.tree.map(lambda a: a > 0, p), lambda p: jax.tree.map(lambda a: a < 0, p)),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_cond_of_anything_else_stays(name):
    one, other = BRANCHES[name]
    traced = soapjax.trace(lambda p, x: lax.cond(x[0, 0] > 0, one, other, p), P, X)
    assert [e for e in traced.program.eqns if e.name == "cond"]
