"""Moving statistics of micro-batches are the whole batch's, where the step computes them from means over the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from balanced import balanced_pipeline
from planned import topology_with

import soapjax
from soapjax.execute.parts.microbatches import micro_step
from soapjax.graph.passes.build import build_graph
from soapjax.planning.pipelining.given_pipeline import pipelined
from soapjax.strategy.pipeline import Pipeline, Stage

BATCH, WIDTH, NUM = 8, 6, 4


def fast(x):
    """As Flax computes it."""
    return jnp.maximum(0.0, (x**2).mean(0) - x.mean(0) ** 2)


def two_passes(x):
    return jnp.var(x, axis=0)


def unbiased(x):
    return fast(x) * (x.shape[0] / (x.shape[0] - 1))


def largest(x):
    return jnp.abs(x).max(0)


def deviation(x):
    return jnp.sqrt(fast(x) + 1e-3)


def step_of(variance, is_moved_inside):
    """Batch norm by the micro-batch's own statistics between two layers; the average moves inside or behind the gradient."""

    def move(old, new):
        return 0.75 * old + 0.25 * new

    def loss_fn(w, moving, batch):
        x = batch["x"] @ w[0]
        mean, var = x.mean(0), variance(x)
        x = jnp.tanh((x - mean) / jnp.sqrt(jax.lax.stop_gradient(var) + 1.0)) @ w[1]
        found = {"mean": mean, "var": var}
        return ((x - batch["y"]) ** 2).mean(), jax.tree.map(move, moving, found) if is_moved_inside else found

    def step(state, batch):
        (loss, found), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["w"], state["moving"], batch)
        moving = found if is_moved_inside else jax.tree.map(move, state["moving"], found)
        return {"w": jax.tree.map(lambda p, g: p - 0.125 * g, state["w"], grads), "moving": moving}, {"loss": loss}

    return step


def arguments():
    w = list(jax.random.normal(jax.random.key(0), (2, WIDTH, WIDTH)))
    x, y = (jax.random.normal(jax.random.key(k), (BATCH, WIDTH)) for k in (1, 2))
    x = x + jnp.arange(BATCH)[:, None]  # micro-batches whose means differ
    return {"w": w, "moving": {"mean": jnp.ones(WIDTH), "var": jnp.ones(WIDTH)}}, {"x": x, "y": y}


def moved_by(step, schedule, stages):
    """The moving statistics by a pipeline, in float64."""
    state, batch = arguments()
    graph = build_graph(micro_step(step, state, batch, num_microbatches=NUM).step)[0]
    if schedule == "pipedream":  # one round of replicas
        (one,) = balanced_pipeline(graph, 1, num_microbatches=NUM, num_stages=1).stages
        one = Stage(operators=one.operators, devices=tuple(range(NUM)), replicas=NUM)
        pipeline = Pipeline(schedule="pipedream", num_microbatches=NUM, stages=(one,))
    else:
        pipeline = balanced_pipeline(graph, 2 * stages, schedule=schedule, num_microbatches=NUM, num_stages=stages)
    with jax.enable_x64(True):
        run = pipelined(step, state, batch, pipeline=pipeline, topology="cpu8", donate=False, is_float64=True)
        return jax.tree.map(np.asarray, run(state, batch)[0]["moving"])


def one_device(step, num):
    """The mean of `num` parts' moving statistics."""
    given = arguments()
    with jax.enable_x64(True):
        state, batch = jax.tree.map(lambda x: x.astype("float64"), given)
        parts = [jax.tree.map(lambda x, m=m: np.split(np.asarray(x), num)[m], batch) for m in range(num)]
        return jax.tree.map(lambda *x: np.mean(x, axis=0), *(jax.jit(step)(state, part)[0]["moving"] for part in parts))


CASES = [("1f1b", 2, fast, True), ("gpipe", 1, fast, False), ("pipedream", 1, fast, True), ("1f1b", 1, deviation, True)]


@pytest.mark.parametrize("schedule, stages, variance, is_moved_inside", CASES)
def test_a_variance_of_means_is_the_whole_batchs(schedule, stages, variance, is_moved_inside):
    step = step_of(variance, is_moved_inside)
    found, wanted, averaged = moved_by(step, schedule, stages), one_device(step, 1), one_device(step, NUM)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, err_msg=name)
    assert np.abs(averaged["var"] / wanted["var"] - 1).max() > 0.1  # which is not what micro-batches have on average


@pytest.mark.parametrize("variance", [two_passes, unbiased, largest])
def test_what_is_no_function_of_means_is_averaged(variance):
    step = step_of(variance, True)
    found, averaged = moved_by(step, "1f1b", 1), one_device(step, NUM)
    for name, value in averaged.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, err_msg=name)


def penalised(w, batch):
    """A mean beside a penalty of the weights, and its exponential."""
    h = jnp.tanh(batch["x"] @ w[0])
    loss = ((h @ w[1] - batch["y"]) ** 2).mean() + 0.1 * sum((v**2).sum() for v in w)
    return loss, {"loss": loss, "exp": jnp.exp(0.01 * loss)}


def penalised_step(state, batch):
    (_, metrics), grads = jax.value_and_grad(penalised, has_aux=True)(state["w"], batch)
    return {"w": jax.tree.map(lambda p, g: p - 0.1 * g, state["w"], grads)}, metrics


def test_a_mean_beside_a_penalty_is_averaged_and_the_update_reads_no_weights_for_it():
    state, batch = arguments()
    micro = micro_step(penalised_step, {"w": state["w"]}, batch, num_microbatches=NUM)
    assert {e.name for e in micro.step.program.eqns if e.key in micro.after_all} == {"exp"}


@pytest.mark.parametrize("how", [{"planner": "fsdp"}, {"pipeline": "1f1b", "stages": 2}], ids=["one stage", "two stages"])
def test_a_loss_with_a_penalty_is_the_whole_batchs(how):
    state, batch = arguments()
    step = soapjax.soap_shard(penalised_step, topology=topology_with(2), proposals=8, check="none", microbatches=NUM, **how)
    expected = jax.jit(penalised_step)({"w": state["w"]}, batch)
    found = step({"w": state["w"]}, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, expected)
