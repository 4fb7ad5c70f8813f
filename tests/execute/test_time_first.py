"""Data that begin with time, [time, batch, ...]: micro-batches are cut along the batch where steps in time depend on each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planned import topology_with

import soapjax
from soapjax.errors import SoapjaxError
from soapjax.execute.parts.microbatches import micro_step
from soapjax.graph.microbatch import sample_divisor
from soapjax.graph.passes.build import build_graph

TIME, BATCH = 6, 8
PIPELINE = {"pipeline": "1f1b", "stages": 2, "microbatches": 2}


def net(p, x):
    return jnp.tanh(x @ p["a"]) @ p["b"]


def returns(rewards, last):
    def back(after, reward):
        now = reward + 0.9 * after
        return now, now

    return jax.lax.scan(back, last, rewards, reverse=True)[1]


def recurrent(p, x, h):
    def one(h, x):
        h = jnp.tanh(x @ p["a"] + h)
        return h, h

    return jax.lax.scan(one, h, x)[1] @ p["b"]


LOSSES = {
    "differences": lambda p, x, y, h: ((net(p, x)[1:] - net(p, x)[:-1] - y[1:]) ** 2).mean(),
    "a running sum": lambda p, x, y, h: ((jnp.cumsum(net(p, x), 0) - y) ** 2).mean(),
    "returns": lambda p, x, y, h: ((net(p, x)[..., 0] - returns(y[..., 0], h[:, 0])) ** 2).mean(),
    "a weighted mean": lambda p, x, y, h: ((recurrent(p, x, h) - y) ** 2 * (y > 0)).sum() / (y > 0).sum(),
    "attention": lambda p, x, y, h: (
        (jnp.einsum("bts,sbd->tbd", jax.nn.softmax(jnp.einsum("tbd,sbd->bts", x, net(p, x) @ p["b"].T @ p["a"].T)), y) - y) ** 2
    ).mean(),
}


def arguments():
    rng = np.random.default_rng(0)
    shapes = {"a": (12, 16), "b": (16, 5)}
    p = {k: np.float32(rng.standard_normal(s) / 4) for k, s in shapes.items()}
    x, y, h = (np.float32(rng.standard_normal(s)) for s in ((TIME, BATCH, 12), (TIME, BATCH, 5), (BATCH, 16)))
    return p, x * np.linspace(0.3, 2, BATCH, dtype=np.float32)[:, None], y, h


def step_of(loss):
    def step(p, x, y, h):
        value, grads = jax.value_and_grad(loss)(p, x, y, h)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), value, net(p, x)[..., 0] * y.mean(0)[:, 0]

    return step


@pytest.mark.parametrize("name", LOSSES)
def test_the_second_dim_is_the_batch_where_steps_in_time_depend_on_each_other(name, caplog):
    step, args = step_of(LOSSES[name]), arguments()
    how = PIPELINE if name == "a weighted mean" else {"microbatches": 2 if name == "attention" else BATCH}
    found = soapjax.soap_shard(step, topology=topology_with(4), proposals=8, check="none", **how)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, jax.jit(step)(*args))
    assert not caplog.records


@pytest.mark.parametrize("name", ["differences", "a running sum", "returns"])
def test_data_parallelism_splits_the_second_dim_too(name):
    graph, _ = build_graph(soapjax.trace(step_of(LOSSES[name]), *arguments()))
    assert sample_divisor(graph) == BATCH


def test_one_trajectory_of_many_features_is_split_along_the_first():
    def step(p, x):
        grads = jax.grad(lambda p: ((net(p, x)[1:] - net(p, x)[:-1]) ** 2).mean())(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)

    p, x, *_ = arguments()
    graph, _ = build_graph(soapjax.trace(step, p, x[:, 0]))
    assert {d.size for op in graph.operators for d in op.dims if d.kind == "S"} == {TIME}


def test_places_in_experts_are_counted_along_the_tokens_of_a_batch_that_is_first():
    """All examples' tokens in one dim: that begins with the batch, whose second dim is no batch."""

    def step(p, x):
        def loss(p):
            tokens = net(p, x).reshape(-1, 5)
            places = jnp.cumsum(jax.nn.one_hot(tokens.argmax(-1), 5), 0)
            return (jnp.where(places < 4, tokens, 0) ** 2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p))

    p, x, *_ = arguments()
    graph, _ = build_graph(soapjax.trace(step, p, x.transpose(1, 0, 2)))
    assert sample_divisor(graph) == BATCH


def test_each_argument_is_cut_where_it_has_the_batch():
    micro = micro_step(step_of(LOSSES["returns"]), *arguments(), num_microbatches=2)
    cut = {micro.full.in_paths[k]: d for k, d in zip(micro.batch_leaves, micro.batch_dims, strict=True)}
    assert cut == {"x": 1, "y": 1, "h": 0} and micro.batch_size == BATCH


def test_observations_before_and_after_every_action_are_cut_too():
    """Of a rollout with the value of what comes last: one time more than rewards."""

    def step(p, x, rewards):
        def loss(p):
            values = net(p, x)[..., 0]
            return ((values[:-1] - jax.lax.stop_gradient(returns(rewards, values[-1]))) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), value

    p, x, y, _ = arguments()
    args = p, x, y[1:, :, 0]
    micro = micro_step(step, *args, num_microbatches=4)
    assert set(micro.batch_dims) == {1} and len(micro.batch_leaves) == 2
    found = soapjax.soap_shard(step, topology=topology_with(4), proposals=8, check="none", microbatches=4)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, jax.jit(step)(*args))


@pytest.mark.parametrize("num", [TIME // 2, TIME])
def test_targets_of_a_trajectory_begin_with_time_beside_where_it_begins(num):
    """With as many micro-batches as times, one time of the targets would be broadcast against all, and the numbers be others."""

    def step(p, x, y):
        def loss(p):
            path = jax.lax.scan(lambda h, _: ((new := h + 0.1 * net(p, h)), new), x, None, length=TIME)[1]
            return ((path - y) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), value

    rng = np.random.default_rng(0)
    args = {"a": rng.standard_normal((5, 7)) / 4, "b": rng.standard_normal((7, 5)) / 4}, np.zeros((12, 5)), np.zeros((TIME, 12, 5))
    args = jax.tree.map(lambda a: np.float32(a + rng.standard_normal(a.shape) / 4), args)
    found = soapjax.soap_shard(step, topology=topology_with(4), proposals=8, check="none", microbatches=num)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, jax.jit(step)(*args))


def test_one_sample_that_would_be_broadcast_is_refused():
    def step(p, y):
        def loss(p):
            return ((jnp.tanh(p["a"]) - y) ** 2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p))

    with pytest.raises(SoapjaxError, match=r"test_time_first.py:\d+ .*one sample of the batch meets several"):
        micro_step(step, {"a": np.ones((4, 3), np.float32)}, np.ones((4, 3), np.float32), num_microbatches=4)


def test_an_associative_scan_over_the_batch_is_refused():
    """It is another program with fewer samples, of which nothing else is known."""

    def step(p, x):
        def loss(p):
            risk = net(p, x)[:, 0]
            return -(risk - jax.lax.associative_scan(jnp.logaddexp, risk)).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p))

    p, x, _, _ = arguments()
    with pytest.raises(SoapjaxError, match=r"test_time_first.py:\d+ .*8 samples one after the other.*one micro-batch"):
        soapjax.soap_shard(step, topology="cpu8", proposals=8, microbatches=2)(p, x[0])


def test_samples_that_are_apart_are_cut_along_the_first_dim():
    micro = micro_step(step_of(lambda p, x, y, h: ((net(p, x) - y) ** 2).mean()), *arguments(), num_microbatches=2)
    assert set(micro.batch_dims) == {0}


MIXED = {  # along both dims, or in data without a second one: what is cut is named
    "time and batch": (lambda p, x, y, h: ((net(p, x)[1:, 1:] - net(p, x)[:-1, :-1]) ** 2).mean(), "dim 0 of x, y"),
    "but the first": (lambda p, x, y, h: ((net(p, x[0])[1:] * h[1:, :5]) ** 2).mean(), "dim 0 of x, y"),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_depends_on_others_along_both_is_refused(name):
    loss, cut = MIXED[name]
    with pytest.raises(SoapjaxError, match=rf"test_time_first.py:\d+ .*{cut}.*data with the batch first"):
        soapjax.soap_shard(step_of(loss), topology="cpu8", proposals=8, microbatches=2)(*arguments())


def test_edges_that_are_as_many_as_the_batch_are_no_samples():
    def step(p, nodes, senders, receivers, y):
        def loss(p):
            h = jnp.tanh(nodes @ p["a"])
            return (((h + jax.ops.segment_sum(h[senders], receivers, len(nodes))) @ p["b"] - y) ** 2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p))

    rng, (p, x, y, _) = np.random.default_rng(1), arguments()
    edges = rng.integers(0, BATCH, (2, 24))
    with pytest.raises(SoapjaxError, match=r"makes of a sum over the batch.*dim 0 of senders, receivers.*counts edges"):
        soapjax.soap_shard(step, topology="cpu8", proposals=8, microbatches=2)(p, x[0], *edges, y[0])
