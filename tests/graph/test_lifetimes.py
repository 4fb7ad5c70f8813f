"""Which tensors stay in memory, until when and as what, by hand on small steps."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from soapjax.graph.lifespans import lifetimes
from soapjax.graph.passes.build import build_graph
from soapjax.graph.passes.phases import BACKWARD, FORWARD
from soapjax.graph.trace.tracing import trace


def graph_of(loss, *arguments):
    """Of a step of gradient descent on the first argument."""

    def step(parameters, *batch):
        value, gradients = jax.value_and_grad(loss)(parameters, *batch)
        return jax.tree.map(lambda p, g: p - g.astype(p.dtype), parameters, gradients), value

    return build_graph(trace(step, *arguments))[0]


def structs(*shapes, dtype=jnp.float32):
    return [jax.ShapeDtypeStruct(s, dtype) for s in shapes]


def pooled(parameters, images, size=2):
    kernel, head = parameters
    x = jax.nn.relu(lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, size, size, 1), (1, size, size, 1), "VALID")
    return jnp.mean((x.reshape(x.shape[0], -1) @ head) ** 2)


@pytest.mark.parametrize(("size", "is_kept"), [(2, False), (12, True)])
def test_a_pooled_image_is_kept_for_its_choices_only_of_large_windows(size, is_kept):
    kernel, head = (3, 3, 2, 4), ((12 // size) ** 2 * 4, 5)
    graph = graph_of(lambda p, x: pooled(p, x, size), structs(kernel, head), *structs((8, 12, 12, 2)))
    pools = [k for k, t in enumerate(graph.tasks) if t.is_heavy and t.kind == "other"]
    forward, backward = (next(k for k in pools if graph.tasks[k].phase == phase) for phase in (FORWARD, BACKWARD))
    (image,) = {a.tensor for a in graph.tasks[forward].reads} & {a.tensor for a in graph.tasks[backward].reads}
    assert lifetimes(graph).last_use[image] == (backward if is_kept else forward)


def test_a_sign_stands_for_the_convolution_that_it_is_of():
    graph = graph_of(pooled, structs((3, 3, 2, 4), (144, 5)), *structs((8, 12, 12, 2)))
    lives = lifetimes(graph)
    (sign,) = lives.is_stand_in.nonzero()[0]
    assert graph.tensors[sign].dtype == "bool" and graph.tensors[sign].shape == (8, 12, 12, 4)
    assert lives.scale[sign] == 4 and set(lives.scale) == {1, 4}


@pytest.mark.parametrize(("dtype", "is_free"), [("bfloat16", True), ("float32", False)])
def test_scores_are_free_when_the_gradient_of_their_loss_is_cast(dtype, is_free):
    def loss(head, x, labels):
        scores = (x.astype(dtype) @ head.astype(dtype)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

    graph = graph_of(loss, *structs((16, 32), (8, 16)), *structs((8,), dtype=jnp.int32))
    product = next(t for t in graph.tasks if t.kind == "dot")
    picked = [t for t in graph.tasks if t.memory.adds_to_sum]
    assert len(picked) == 1 and picked[0].phase == BACKWARD
    (scores,) = {a.tensor for a in product.writes if graph.tensors[a.tensor].shape == (8, 32)}
    assert lifetimes(graph).is_reused[scores] == is_free


def test_a_scatter_that_somebody_else_reads_is_no_part_of_a_sum():
    def loss(table, rows):
        return jnp.sum(table[rows] ** 2)

    graph = graph_of(loss, *structs((32, 4)), *structs((8,), dtype=jnp.int32))
    assert not any(t.memory.adds_to_sum for t in graph.tasks)


@pytest.mark.parametrize(("activation", "dtype", "times"), [
    (lambda x: x * jax.nn.relu(x), "float32", 1),
    (jnp.tanh, "float32", 1),  # its derivative is computed from it alone
    (jax.nn.gelu, "float32", 2),
    (jax.nn.gelu, "bfloat16", 3),  # the tanh in float32
])  # fmt: skip
def test_a_tanh_is_kept_beside_what_it_is_of_where_that_is_read_too(activation, dtype, times):
    """XLA (0.10.2) does not compute it twice; nor what it is computed from, where the derivative reads both."""

    def loss(parameters, x):
        up, down = parameters
        hidden = activation(x.astype(dtype) @ up.astype(dtype))
        return jnp.mean((hidden @ down.astype(dtype)).astype(jnp.float32) ** 2)

    graph = graph_of(loss, structs((8, 16), (16, 4)), *structs((32, 8)))
    lives = lifetimes(graph)
    up, down = [t for t in graph.tasks if t.phase == FORWARD and t.is_heavy]
    hidden = {a.tensor for a in down.reads}
    kept = [a.tensor for a in up.writes if lives.is_stored[a.tensor] and a.tensor not in hidden]
    total = sum(lives.scale[i] * graph.tensors[i].size_bytes for i in kept)
    assert total == times * 32 * 16 * jnp.dtype(dtype).itemsize
