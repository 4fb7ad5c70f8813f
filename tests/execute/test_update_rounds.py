"""The update of a pipeline: stages hand each other numbers that they made of their parameters, not the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from balanced import balanced_pipeline

from soapjax.execute.parts.microbatches import micro_step
from soapjax.graph.passes.build import build_graph
from soapjax.planning.pipelining.given_pipeline import pipelined

WIDTH = 4


def step(state, x, y):
    params, moments = state
    value, grads = jax.value_and_grad(loss)(params, x, y)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    new = optax.apply_updates(params, updates)
    seen = {"new": optax.global_norm(new), "old": optax.global_norm(params), "moved": optax.global_norm(updates)}
    seen["relative"] = seen["moved"] / (seen["old"] + optax.global_norm(grads))
    return (new, moments), seen | {"loss": value}


def loss(p, x, y):
    for name in "dacb":  # norms are added up by name: from one stage, the other, and the first again
        x = jnp.tanh(x @ p[name])
    return ((x - y) ** 2).mean()


OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-2))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_numbers_alone_are_sent_between_rounds(schedule):
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for name in "abcd"}
    given = (params, OPTIMIZER.init(params)), *rng.normal(size=(2, 8, WIDTH)).astype(np.float32)
    graph = build_graph(micro_step(step, *given, num_microbatches=2).step)[0]
    pipeline = balanced_pipeline(graph, 4, schedule=schedule, num_microbatches=2, num_stages=2)
    made = pipelined(step, *given, pipeline=pipeline, topology="cpu8", donate=False)
    wanted = jax.jit(step)(*given)
    for found, value in zip(jax.tree.leaves(made(*given)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(found, value, rtol=2e-5, atol=1e-6)
    cut, program = made.streamed.cut, made.streamed.step.program
    assert [len(parts) > 0 for parts in cut.rounds] == [True, True, True]
    own = {v: part.place for part in cut.updates for v in part.outputs} | cut.home
    sent = {v for part in cut.updates for v in part.inputs if own.get(v, part.place) != part.place}
    assert sent and all(program.avals[v].size == 1 for v in sent)
