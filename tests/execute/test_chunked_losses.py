"""A loss over chunks of tokens in a loop with a derivative of its own, as for large vocabularies, and micro-batches of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from soapjax import soap_shard
from soapjax.execute.parts.microbatches import micro_step

BATCH, LENGTH, WIDTH, VOCABULARY, CHUNKS = 8, 4, 6, 10, 2


def of_chunk(head, hidden, labels, mask):
    logits = hidden @ head
    return ((jax.nn.logsumexp(logits, -1) - (logits * jax.nn.one_hot(labels, VOCABULARY)).sum(-1)) * (mask != 0)).sum()


@jax.custom_vjp
def chunked(head, hidden, labels, mask):
    return forward(head, hidden, labels, mask)[0]


def forward(head, hidden, labels, mask):
    chunks = jax.tree.map(lambda a: a.reshape(CHUNKS, a.shape[0] * LENGTH // CHUNKS, *a.shape[2:]), (hidden, labels, mask))
    return jax.lax.scan(lambda total, c: (total + of_chunk(head, *c), None), 0.0, chunks)[0], (head, chunks, hidden.shape)


def backward(kept, cotangent):
    head, chunks, shape = kept

    def body(total, chunk):
        of_head, of_hidden = jax.grad(of_chunk, (0, 1))(head, *chunk)
        return total + of_head, of_hidden

    of_head, of_hidden = jax.lax.scan(body, jnp.zeros_like(head), chunks)
    return of_head * cotangent, of_hidden.reshape(shape) * cotangent, None, None


chunked.defvjp(forward, backward)


def step(state, tokens, labels, mask):
    def loss_fn(w):
        hidden = w["table"][tokens]
        for layer in w["layers"]:
            hidden = jnp.tanh(hidden @ layer)
        return chunked(w["head"], hidden, labels, mask) / (mask != 0).sum()

    loss, grads = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def arguments(layers):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 2, jnp.float32)  # noqa: E731
    state = {"table": draw(VOCABULARY, WIDTH), "layers": [draw(WIDTH, WIDTH)] * layers, "head": draw(WIDTH, VOCABULARY)}
    tokens, labels = jnp.asarray(rng.integers(0, VOCABULARY, (2, BATCH, LENGTH)))
    return state, tokens, labels, jnp.asarray(rng.integers(0, 2, (BATCH, LENGTH)))


@pytest.mark.parametrize("layers", [1, 4])
def test_labels_and_weights_of_chunks_are_cut_with_the_batch(layers):
    """Whether or not many of the gradients are sums over a chunk. The mask meets what has samples by its count alone."""
    micro = micro_step(step, *arguments(layers), num_microbatches=2)
    assert [micro.full.in_paths[k] for k in micro.batch_leaves] == ["tokens", "labels", "mask"]


@pytest.mark.slow
def test_microbatches_of_a_loss_in_chunks_have_the_numbers_of_the_step():
    given = arguments(1)
    wanted = jax.jit(step)(*given)
    found = soap_shard(step, topology="cpu8", planner="data_parallel", microbatches=2)(*given)
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
