"""The proof of a pipeline whose draws or statistics are its micro-batches' own: what is made once is no reason for doubt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from balanced import balanced_pipeline
from families import sampled

from soapjax.execute.compiled.pipeline_proof import verify_pipeline
from soapjax.execute.compiled.proof import OpsCheck
from soapjax.execute.parts.microbatches import micro_step
from soapjax.graph.passes.build import build_graph
from soapjax.planning.pipelining.given_pipeline import pipelined

LOSSES = {
    "dropout": lambda e, h: e.mean(),
    "a root": lambda e, h: jnp.sqrt(e.mean()),
    "batch norm": lambda e, h: e.mean(),
}
METRICS = {
    "perplexity": lambda loss, g: jnp.exp(loss),
    "norm": lambda loss, g: jnp.sqrt(sum((x**2).sum() for x in jax.tree.leaves(g))),
}


def step_of(kind, metric):
    def step(p, x, y):
        def loss(p):
            h = jnp.tanh(x @ p["w"])
            if kind == "dropout":
                h = jnp.where(jax.random.uniform(jax.random.key(0), h.shape, jnp.float32) < 0.5, h, 0)
            if kind == "batch norm":
                h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
            return LOSSES[kind]((h @ p["u"] - y) ** 2, h)

        value, g = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda a, b: a - 0.1 * b, p, g), {"loss": value, "metric": METRICS[metric](value, g)}

    return step


def arguments():
    keys = jax.random.split(jax.random.key(1), 4)
    p = {"w": jax.random.normal(keys[0], (6, 8)), "u": jax.random.normal(keys[1], (8, 2))}
    return p, jax.random.normal(keys[2], (8, 6)), jax.random.normal(keys[3], (8, 2))


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("metric", sampled(METRICS, 2))
def test_it_is_proven(kind, metric):
    given, step = arguments(), step_of(kind, metric)
    graph = build_graph(micro_step(step, *given, num_microbatches=2).step)[0]
    pipeline = balanced_pipeline(graph, 4, schedule="1f1b", num_microbatches=2, num_stages=2)

    def make(is_float64):
        with jax.enable_x64(is_float64):
            return pipelined(step, *given, pipeline=pipeline, topology="cpu8", donate=False, is_float64=is_float64).streamed

    found = verify_pipeline(make, jax.tree_util.tree_leaves(given), OpsCheck(0, 0, 0, ()))
    assert found.reference == "its micro-batches" and found.numbers.num_gradients == 2
    assert found.numbers.is_proven_in_float64


def picks(p, x, y):
    return -jax.nn.log_softmax(jnp.tanh(x @ p["w"]) @ p["u"])[jnp.arange(len(y)), y].mean()


def test_numbers_that_pick_from_every_sample_are_cut_with_it():
    """The derivative adds constants by such numbers alone; they were read as a weight, all of which met a part of the samples."""
    p, x, _ = arguments()
    micro = micro_step(lambda p, x, y: jax.grad(picks)(p, x, y), p, x, np.arange(8) % 2, num_microbatches=2)
    assert [micro.full.in_paths[k] for k in micro.batch_leaves] == ["x", "y"] and micro.growth.is_known


def test_whole_numbers_are_those_that_were_traced():
    """In float64 a Python number, or NumPy's own integers, would have 64 bits, beside what was traced with 32."""

    def step(state, x, y):
        value, g = jax.value_and_grad(picks)(state[0], x, y)
        return (jax.tree.map(lambda a, b: a - 0.1 * b, state[0], g), state[1] + 1), value

    p, x, _ = arguments()
    given = (p, 0), x, np.arange(8) % 2
    graph = build_graph(micro_step(step, *given, num_microbatches=2).step)[0]
    pipeline = balanced_pipeline(graph, 4, schedule="1f1b", num_microbatches=2, num_stages=2)

    def make(is_float64):
        return pipelined(step, *given, pipeline=pipeline, topology="cpu8", donate=False, is_float64=is_float64).streamed

    found = verify_pipeline(make, jax.tree_util.tree_leaves(given), OpsCheck(0, 0, 0, ()))
    assert found.reference == "the whole batch" and found.numbers.is_proven_in_float64
