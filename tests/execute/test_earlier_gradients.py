"""A gradient that another gradient's forward pass reads is forward work: of samples it is theirs, of all samples it is refused with
micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import soapjax
from soapjax import soap_shard
from soapjax.errors import SoapjaxError
from soapjax.execute.compiled.inspection import inspect
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.graph.passes.build import build_graph


def loss(p, x, y):
    return ((jnp.tanh(x @ p["first"]) @ p["last"] - y) ** 2).mean()


def trained(p, at, x, y):
    value, grads = jax.value_and_grad(loss)(at, x, y)
    return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), value


def moved(p, x, y, d):
    return jnp.clip(d + 0.3 * jnp.sign(jax.grad(lambda d: loss(p, x + d, y))(d)), -0.5, 0.5)


def adversarial(p, x, y):
    d = jnp.zeros_like(x)
    for _ in range(2):
        d = moved(p, x, y, d)
    return trained(p, p, x + d, y)


def adversarial_loop(p, x, y):
    return trained(p, p, x + jax.lax.fori_loop(0, 2, lambda _, d: moved(p, x, y, d), jnp.zeros_like(x)), y)


def along_gradients(p, x, y):  # which a loss over fewer samples makes larger
    return trained(p, p, x + 9.0 * jax.grad(lambda x: loss(p, x, y))(x), y)


def sharpness_aware(p, x, y):
    grads = jax.grad(loss)(p, x, y)
    norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    return trained(p, jax.tree.map(lambda a, g: a + 0.05 * g / norm, p, grads), x, y)


def two_updates(p, x, y):
    p, _ = trained(p, p, x, y)
    return trained(p, p, x, y)


def arguments():
    rng = np.random.default_rng(0)
    p = {"first": rng.normal(size=(8, 16)).astype(np.float32) / 3, "last": rng.normal(size=(16, 8)).astype(np.float32) / 4}
    return p, rng.normal(size=(16, 8)).astype(np.float32), rng.normal(size=(16, 8)).astype(np.float32)


@pytest.mark.parametrize("how", [dict(microbatches=2), dict(pipeline="1f1b", stages=2, microbatches=2)], ids=["one", "two stages"])
@pytest.mark.parametrize("step", [adversarial, adversarial_loop, along_gradients], ids=lambda step: step.__name__)
def test_samples_that_are_perturbed_are_their_own(step, how):
    args = arguments()
    found = soap_shard(step, topology="cpu8", proposals=4, donate=False, **how)(*args)
    for mine, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-6)


def test_parameters_that_are_perturbed_are_the_whole_batchs():
    with pytest.raises(SoapjaxError, match="a gradient that is a sum over all samples.*as SAM does.*add both gradients up in"):
        soap_shard(sharpness_aware, topology="cpu8", proposals=4, microbatches=2)(*arguments())
    found = soapjax.plan(sharpness_aware, *arguments(), topology="cpu8", planner="fsdp")
    made = inspect(bind_plan(found.step, found.plan)).bytes_by_collective
    assert {k: v for k, v in found.plan.prediction.bytes_by_collective.items() if v} == {k: v for k, v in made.items() if v}


def test_what_parameters_are_updated_by_is_no_forward_work():
    steps = (adversarial, sharpness_aware, two_updates)
    graphs = [build_graph(soapjax.trace(step, *arguments()))[0] for step in steps]
    assert [graph.is_single_phase for graph in graphs] == [False, False, True]
