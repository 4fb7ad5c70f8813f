"""A batch of a weak type, such as `mask * 1.0`, which takes the dtype of what it meets: a micro-batch of it does, too."""

import jax
import jax.numpy as jnp
import numpy as np
from balanced import balanced_pipeline

from soapjax.execute.parts.microbatches import micro_step
from soapjax.graph.batch.two_traces import are_alike
from soapjax.graph.passes.build import build_graph
from soapjax.planning.pipelining.given_pipeline import pipelined

NUM = 4


def step(state, batch):
    def loss(w):
        errors = (batch["x"] @ w).astype(jnp.bfloat16) * batch["mask"]  # of bfloat16; with a mask of float32 it were of that
        return (errors**2).mean()

    value, gradient = jax.value_and_grad(loss)(state)
    return state - 0.125 * gradient, value


def test_a_micro_batch_is_of_the_batchs_type():
    mask = (jnp.arange(16) % 3 > 0)[:, None] * 1.0
    assert mask.weak_type and mask.dtype == jnp.float32
    state, batch = jnp.ones((8, 4)), {"x": jax.random.normal(jax.random.key(0), (16, 8)), "mask": mask}
    micro = micro_step(step, state, batch, num_microbatches=NUM)
    assert are_alike(micro.step.program, micro.full.program) and micro.growth.is_known
    pipeline = balanced_pipeline(build_graph(micro.step)[0], 2, schedule="1f1b", num_microbatches=NUM, num_stages=1)
    found = pipelined(step, state, batch, pipeline=pipeline, topology="cpu8", donate=False)(state, batch)
    wanted = jax.jit(step)(state, batch)
    assert [x.dtype for x in found] == [x.dtype for x in wanted] == [jnp.float32, jnp.bfloat16]
    np.testing.assert_allclose(found[0], wanted[0], rtol=0.02)
