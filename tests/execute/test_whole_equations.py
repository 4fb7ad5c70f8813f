"""What an update makes of the batch itself: of its size, and of what the network made of all samples, as without micro-batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from balanced import balanced_pipeline
from families import sampled
from planned import topology_with

import soapjax
from soapjax.errors import SoapjaxError
from soapjax.execute.compiled.pipeline_proof import verify_pipeline
from soapjax.execute.compiled.stream_inspection import inspect_stream
from soapjax.execute.parts.microbatches import micro_step
from soapjax.execute.streams.stage_programs import step_of_plan
from soapjax.graph.batch import growth
from soapjax.graph.passes.build import build_graph
from soapjax.planning.pipelining.given_pipeline import pipelined
from soapjax.strategy.pipeline import Pipeline, Stage

BATCH = 8
FOUR = topology_with(4)  # what an update makes of the batch is the same on any number: two stages have two devices each
TX = optax.sgd(1e-1)


def net(p, x):
    return jnp.tanh(x @ p["a"]) @ p["b"]


def welford(s, k, x, y):
    """Running count, mean and sum of squares (Chan et al. 1979), as reinforcement learning keeps them of what it sees."""
    n, mean, squares = s
    both, delta = n + len(x), x.mean(0) - mean
    return both, mean + delta * len(x) / both, squares + ((x - x.mean(0)) ** 2).sum(0) + delta**2 * n * len(x) / both


EXTRAS = {
    "samples seen": (lambda s, k, x, y: s + x.shape[0], np.int32(0)),
    "tokens seen": (lambda s, k, x, y: s + np.float32(x.size), np.float32(0)),
    "samples counted": (lambda s, k, x, y: s + jnp.ones(len(x)).sum(), np.float32(0)),
    "metrics of logits and labels": (lambda s, k, x, y: s + (k.argmax(-1) == y.argmax(-1)).sum(), np.int32(0)),
    "a queue": (lambda s, k, x, y: jnp.roll(s, -len(k), 0).at[-len(k) :].set(k), np.zeros((24, 5), np.float32)),
    "a centre": (lambda s, k, x, y: 0.9 * s + 0.1 * k.mean(0), np.ones(5, np.float32)),
    "a mean of inputs": (lambda s, k, x, y: 0.9 * s + 0.1 * x.mean(0), np.ones(16, np.float32)),
    "a covariance": (lambda s, k, x, y: 0.9 * s + 0.1 * jnp.cov(k.T), np.eye(5, dtype=np.float32)),
    "normalisers": (welford, (np.float32(2), np.ones(16, np.float32), np.ones(16, np.float32))),
}  # fmt: skip


def arguments(extra):
    rng = np.random.default_rng(0)
    p = {"a": rng.standard_normal((16, 24)) / 4, "b": rng.standard_normal((24, 5)) / 5}
    p = jax.tree.map(np.float32, p)
    batch = [np.float32(rng.standard_normal((BATCH, n))) for n in (16, 5)]
    return {"p": p, "o": TX.init(p), "t": jax.tree.map(np.copy, p), "extra": extra}, *batch


def step_with(extra):
    def step(s, x, y):
        k = net(s["t"], x)
        loss, g = jax.value_and_grad(lambda p: ((net(p, x) - y) ** 2).mean())(s["p"])
        u, o = TX.update(g, s["o"])
        p = optax.apply_updates(s["p"], u)
        return {"p": p, "o": o, "t": optax.incremental_update(p, s["t"], 0.1), "extra": extra(s["extra"], k, x, y)}, loss

    return step


def assert_as_plain(step, args, **how):
    plain, ours = jax.jit(step), soapjax.soap_shard(step, topology=FOUR, proposals=8, check="none", **how)
    wanted, found = args[0], args[0]
    for _ in range(2):
        (wanted, *results), (found, *others) = plain(wanted, *args[1:]), ours(found, *args[1:])
        for a, b in zip(jax.tree.leaves((found, others)), jax.tree.leaves((wanted, results)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


PIPELINE = {"pipeline": "1f1b", "stages": 2, "microbatches": 2}


HOWS = {"argvalues": [{"microbatches": 2}, {"microbatches": BATCH}, PIPELINE], "ids": ["two", "of one sample", "pipeline"]}


@pytest.mark.parametrize("how", **HOWS)
@pytest.mark.parametrize("name", sampled(EXTRAS, 5))
def test_state_is_that_of_the_whole_batch(name, how):
    extra, begin = EXTRAS[name]
    assert_as_plain(step_with(extra), arguments(begin), **how)


DIVISORS = {
    "the size": lambda x: x.shape[0],
    "a fixed size": lambda x: BATCH,
    "a count": lambda x: jnp.ones(len(x)).sum(),
    "a root of the size": lambda x: np.sqrt(x.shape[0]),
}


@pytest.mark.parametrize("how", [{"microbatches": 4}, PIPELINE], ids=["four", "pipeline"])
@pytest.mark.parametrize("name", sampled(DIVISORS, 2))
def test_a_gradient_may_be_divided_after_it_was_made(name, how):
    def step(s, x, y):
        loss, g = jax.value_and_grad(lambda p: ((net(p, x) - y) ** 2).sum())(s["p"])
        u, o = TX.update(jax.tree.map(lambda v: v / DIVISORS[name](x) / 4, g), s["o"])
        sizes = {"samples": x.shape[0], "numbers": jnp.float32(x.size)}
        return {**s, "p": optax.apply_updates(s["p"], u), "o": o}, {"loss": loss, **sizes}

    assert_as_plain(step, arguments(np.int32(0)), **how)


def squares(p):
    return sum((v**2).sum() for v in jax.tree.leaves(p))


UNLIKE = {
    "a sum and a penalty": lambda p, x, y: ((net(p, x) - y) ** 2).sum() + 0.1 * squares(p),
    "a sum over a fixed size, and a penalty": lambda p, x, y: ((net(p, x) - y) ** 2).sum() / BATCH + 0.1 * squares(p),
    "a mean, and a penalty over the size": lambda p, x, y: ((net(p, x) - y) ** 2).mean() + 0.1 * squares(p) / len(x),
    "a sum and a penalty over the size": lambda p, x, y: (((net(p, x) - y) ** 2).sum() + 0.1 * squares(p)) / len(x),
    "a mean and a sum": lambda p, x, y: ((net(p, x) - y) ** 2).mean() + 0.01 * jnp.abs(jnp.tanh(x @ p["a"])).sum(),
    "a share of the data": lambda p, x, y: ((net(p, x) - y) ** 2).mean() + x.shape[0] / 100 * squares(p),
    "a step along a mean's gradient": lambda p, x, y: (
        (net(p, x + jax.grad(lambda x: ((net(p, x) - y) ** 2).mean())(x)) - y) ** 2
    ).mean(),
    "a penalty of a mean's gradient": lambda p, x, y: ((net(p, x) - y) ** 2).mean()
    + (jax.grad(lambda x: net(p, x).mean())(x) ** 2).sum(-1).mean(),
}


@pytest.mark.parametrize("name", sampled(UNLIKE, 2))
def test_a_loss_that_is_neither_a_mean_nor_a_sum_is_that_of_the_whole_batch(name, caplog):
    """Gradients of micro-batches give it neither in the mean nor in the sum: one summand of two is scaled."""
    (s, x, y), grad = arguments(np.int32(0)), jax.jit(jax.value_and_grad(UNLIKE[name]))
    parts = [grad(s["p"], *part)[1] for part in zip(np.split(x, 4), np.split(y, 4), strict=True)]
    added = sum(g["a"] for g in parts)
    for scale in (1, 1 / 4):
        assert not np.allclose(grad(s["p"], x, y)[1]["a"], scale * added, rtol=1e-3, atol=0)

    def step(s, x, y):
        loss, grads = grad(s, x, y)
        return jax.tree.map(lambda p, g: p - 0.01 * g, s, grads), loss

    assert_as_plain(step, (s["p"], x, y), **({"microbatches": 4} if "size" in name else PIPELINE | {"microbatches": 4}))
    assert not caplog.records


def test_a_sum_and_a_penalty_within_a_loop_are_refused():
    def step(p, x, y):
        def loss(p):
            errors = ((net(p, x) - y) ** 2).T
            return jax.lax.scan(lambda c, e: (c + (e * p["b"][0, 0]).sum() + 0.1 * p["b"][0, 0] ** 2, None), 0.0, errors)[0]

        return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p))

    s, x, y = arguments(np.int32(0))
    with pytest.raises(SoapjaxError, match=r"adds up what grows with the batch and what does not \(.*\.py:\d+ in"):
        soapjax.soap_shard(step, topology="cpu8", proposals=8, microbatches=2)(s["p"], x, y)


def test_of_two_losses_one_may_be_a_mean_and_the_other_a_sum():
    def step(s, x, y):
        a, grads = jax.value_and_grad(lambda p: ((net(p, x) - y) ** 2).mean())(s["p"])
        b, others = jax.value_and_grad(lambda p: (net(p, x) ** 2).sum())(s["t"])
        return jax.tree.map(lambda p, g: p - 0.01 * g, s, {"p": grads, "t": others}), (a, b)

    s, x, y = arguments(np.int32(0))
    assert_as_plain(step, ({k: s[k] for k in "pt"}, x, y), microbatches=2)


def test_minibatches_of_a_sum_and_a_penalty_are_steps_of_their_own():
    """Asynchronous pipelines update after each: nothing is scaled that others would add to."""

    def step(p, x, y):
        grads = jax.grad(UNLIKE["a sum and a penalty"])(p, x * (1 + len(x) * x), y)
        return jax.tree.map(lambda p, g: p - 0.001 * g, p, grads)

    s, x, y = arguments(np.int32(0))
    graph = build_graph(micro_step(step, s["p"], x, y, num_microbatches=2).step)[0]
    (stage,) = balanced_pipeline(graph, 1, num_microbatches=2, num_stages=1).stages
    pipeline = Pipeline(schedule="pipedream", num_microbatches=2, stages=(Stage(operators=stage.operators, devices=(0,)),))
    found, wanted = pipelined(step, s["p"], x, y, pipeline=pipeline, topology="cpu8", donate=False)(s["p"], x, y), s["p"]
    for part in zip(np.split(x, 2), np.split(y, 2), strict=True):
        wanted = step(wanted, *part)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)


def in_two_ways(h, n):
    return jnp.concatenate([2 * h[:n], h[: BATCH - n]])


@pytest.mark.parametrize("takes", [lambda h: in_two_ways(h, 2), lambda h: h[:6], lambda h: h[BATCH - 1]])
def test_a_number_of_samples_that_is_the_same_for_any_batch_is_refused(takes):
    """With a part of the batch the step is another program then: it takes all of that, or counts from another end."""

    def step(p, x, y):
        loss, grads = jax.value_and_grad(lambda p: (takes(net(p, x)) ** 2).mean())(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), loss

    s, x, y = arguments(np.int32(0))
    with pytest.raises(SoapjaxError, match=r"a fixed number of samples, or samples by their place.*x.shape\[0\]"):
        soapjax.soap_shard(step, topology="cpu8", proposals=8, microbatches=2)(s["p"], x, y)


PARTS = {  # of a micro-batch as many would be left out, nothing left, or all taken
    "without the first two": lambda e: e[2:].mean(), "without the first half": lambda e: e[BATCH // 2 :].mean(),
    "the hardest three": lambda e: jax.lax.top_k(e, 3)[0].mean(), "the first": lambda e: e[0],
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_a_loss_of_a_fixed_number_of_samples_is_refused(name):
    def step(p, x, y):
        grads = jax.grad(lambda p: PARTS[name](((net(p, x) - y) ** 2).mean(1)))(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)

    s, x, y = arguments(np.int32(0))
    with pytest.raises(SoapjaxError, match=r"test_whole_equations.py:\d+ in"):
        soapjax.soap_shard(step, topology="cpu8", proposals=8, microbatches=2)(s["p"], x, y)


def test_an_accumulation_of_the_steps_own_is_named():
    def step(p, x, y):
        def one(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(lambda p: ((net(p, part[0]) - part[1]) ** 2).mean())(p)), None

        parts = x.reshape(4, -1, 16), y.reshape(4, -1, 5)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.lax.scan(one, jax.tree.map(jnp.zeros_like, p), parts)[0])

    s, x, y = arguments(np.int32(0))
    with pytest.raises(SoapjaxError, match="stays inside a loop of the step's own.*leave the accumulation out"):
        soapjax.soap_shard(step, topology="cpu8", proposals=8, microbatches=2)(s["p"], x, y)


def test_a_cond_with_a_constant_truth_is_followed():
    """As `optax.MultiSteps` has it."""
    tx = optax.MultiSteps(optax.sgd(0.1), 2)

    def step(s, x, y):
        u, o = tx.update(jax.grad(lambda p: ((net(p, x) - y) ** 2).mean())(s["p"]), s["o"], s["p"])
        return {"p": optax.apply_updates(s["p"], u), "o": o}, x.mean()

    s, x, y = arguments(np.int32(0))
    assert_as_plain(step, ({"p": s["p"], "o": tx.init(s["p"])}, x, y), microbatches=2)


def test_a_loss_of_unknown_growth_is_warned_of(caplog):
    def step(p, x, y):
        grads = jax.grad(lambda p: (((net(p, x) - y) ** 2).mean(-1) / jnp.log(x.shape[0])).mean())(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)

    s, x, y = arguments(np.int32(0))
    for _ in range(2):  # of another step likewise
        caplog.clear()
        soapjax.soap_shard(step, topology="cpu8", proposals=8, microbatches=2)(s["p"], x, y)
        assert any("grows with the batch is not known (" in r.getMessage() for r in caplog.records)


BY_PLACE = {
    "the first": lambda o, per: o[0], "the first two": lambda o, per: o[:2], "the last": lambda o, per: o[-1],
    "two of each": lambda o, per: jnp.concatenate([per, 2 * per]), "sorted": lambda o, per: jnp.sort(per),
    "halves": lambda o, per: per.reshape(2, -1), "their order": lambda o, per: jnp.argsort(per),
    "a running sum": lambda o, per: jnp.cumsum(per), "a histogram": lambda o, per: jnp.histogram(o, bins=5)[0],
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(BY_PLACE, 2))
def test_results_by_place_are_those_of_the_whole_batch(name, caplog):
    def step(s, x, y):
        def loss(p):
            o = net(p, x)
            per = ((o - y) ** 2).mean(-1)
            return per.mean(), (o, per)

        (_, found), g = jax.value_and_grad(loss, has_aux=True)(s["p"])
        return {**s, "p": jax.tree.map(lambda p, g: p - 0.1 * g, s["p"], g)}, BY_PLACE[name](*found)

    assert_as_plain(step, arguments(np.int32(0)), **(PIPELINE if "halves" in name else {"microbatches": 2}))
    assert not caplog.records


def test_results_by_place_of_many_numbers_are_named(monkeypatch, caplog):
    monkeypatch.setattr(growth, "_MOST_JOINED", BATCH - 1)

    def step(p, x, y):
        (_, per), g = jax.value_and_grad(lambda p: (((net(p, x) - y) ** 2).mean(), ((net(p, x) - y) ** 2).mean(1)), has_aux=True)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, g), {"sorted": jnp.sort(per), "each": per}

    s, x, y = arguments(np.int32(0))
    soapjax.soap_shard(step, topology="cpu8", proposals=8, microbatches=2)(s["p"], x, y)
    (said,) = [r.getMessage() for r in caplog.records if "put together" in r.getMessage()]
    assert said.endswith("out.1.sorted")


GUARDS = {
    "where": lambda ok, new, old: jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old),
    "cond": lambda ok, new, old: jax.lax.cond(ok, lambda: new, lambda: old),
}


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("is_taken", [True, False])
def test_an_update_that_depends_on_the_whole_batchs_loss_is_not_warned_of(guard, is_taken, caplog):
    """The first micro-batch's loss is below the threshold, the second's above, or the whole batch's is. Nor is the one after."""

    def step(s, x, y):
        loss, g = jax.value_and_grad(lambda p: ((net(p, x) - y) ** 2).mean())(s["p"])
        new = {**s, "p": jax.tree.map(lambda p, g: p - 0.1 * g, s["p"], g)}
        new = GUARDS[guard](loss < (20.0 if is_taken else 8.0), new, s)
        return new, {"before": loss, "after": ((net(new["p"], x) - y) ** 2).mean()}

    s, x, y = arguments(np.int32(0))
    y = jnp.concatenate([0.1 * y[: BATCH // 2], y[BATCH // 2 :] + 5])
    assert 8 < float(jax.jit(step)(s, x, y)[1]["before"]) < 20
    assert_as_plain(step, (s, x, y), microbatches=2)
    assert not caplog.records


RUNNING = {  # of what was before, and of the batch: the new one, and what samples have of it
    "a mean by counts": lambda old, x: (new := old + (x.mean(0) - old) * len(x) / (40 + len(x)), x - new),
    "a sum": lambda old, x: (new := old + x.sum(0), x - 0.01 * new),
    "a decay by the number of samples": lambda old, x: (new := old + (x.mean(0) - old) * (1 - 0.98 ** len(x)), x - new),
    "an average": lambda old, x: (new := 0.9 * old + 0.1 * x.mean(0), x - new),
    "a deviation": lambda old, x: (new := 0.9 * old + 0.1 * x.std(0), x / (new + 1)),
    "a largest value": lambda old, x: (new := jnp.maximum(0.9 * old, jnp.abs(x).max(0)), x / new),
    "a count": lambda old, x: (new := old + len(x), 10 * x / (1 + new)),
    "what a class has": lambda old, x: (
        new := old + (x > 0).sum(0), x * (new / new.sum())[jnp.argmax(x, 1)][:, None]
    ),
    "a count within a cond": lambda old, x: (
        new := jax.lax.cond(old.max() >= 0, lambda: old + len(x), lambda: old), 10 * x / (1 + new)
    ),
    "a mean within a cond": lambda old, x: (
        new := jax.lax.cond(old.max() < 9, lambda x: 0.9 * old + 0.1 * x.mean(0), lambda x: old, x), x - new
    ),
}  # fmt: skip


def step_with_running(name):
    def step(s, x, y):
        new, inputs = RUNNING[name](s["seen"], x)
        grads = jax.grad(lambda p: ((net(p, inputs) - y) ** 2).mean())(s["p"])
        return {"p": jax.tree.map(lambda p, g: p - 0.1 * g, s["p"], grads), "seen": new}, new.mean()

    return step


@pytest.mark.parametrize("how", **HOWS)
@pytest.mark.parametrize("name", sampled(RUNNING, 5))
def test_running_statistics_that_passes_read_are_the_whole_batchs(name, how, caplog):
    s, x, y = arguments(np.int32(0))
    assert_as_plain(step_with_running(name), ({"p": s["p"], "seen": jnp.zeros(x.shape[1])}, x, y), **how)
    assert not caplog.records


@pytest.mark.parametrize("how", **HOWS)
def test_a_layer_that_running_statistics_rescale_is_that_of_the_whole_batch(how, caplog):
    """PopArt (van Hasselt et al. 2016): targets are normalised, and the last layer follows the new deviation."""

    def step(s, x, y):
        mean, square = 0.9 * s["mean"] + 0.1 * y.mean(), 0.9 * s["square"] + 0.1 * (y**2).mean()
        scale, old = jnp.sqrt(square - mean**2), jnp.sqrt(s["square"] - s["mean"] ** 2)
        p = {**s["p"], "b": s["p"]["b"] * old / scale}
        grads = jax.grad(lambda p: ((net(p, x) - (y - mean) / scale) ** 2).mean())(p)
        return {"p": jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), "mean": mean, "square": square}, scale

    s, x, y = arguments(np.int32(0))
    assert_as_plain(step, ({"p": s["p"], "mean": jnp.zeros(()), "square": jnp.ones(())}, x, y), **how)
    assert not caplog.records


def test_a_running_sum_within_a_loop_that_passes_read_is_named(caplog):
    """It adds a micro-batch's share there: no more than a warning, but one that says which state it is."""

    def step(s, x, y):
        seen, _ = jax.lax.scan(lambda total, of: (total + of, None), s["seen"], x.sum(0)[None])
        grads = jax.grad(lambda p: ((net(p, x - 0.01 * seen) - y) ** 2).mean())(s["p"])
        return {"p": jax.tree.map(lambda p, g: p - 0.1 * g, s["p"], grads), "seen": seen}

    s, x, y = arguments(np.int32(0))
    soapjax.soap_shard(step, topology="cpu8", proposals=8, microbatches=2)({"p": s["p"], "seen": jnp.zeros(x.shape[1])}, x, y)
    assert any("put together" in m and m.endswith("out.seen") for m in caplog.messages)


def test_a_statistic_within_a_cond_is_named(caplog):
    def step(s, x, y):
        def loss(p):
            centred = jax.lax.cond(s["on"], lambda h: h - h.mean(0), lambda h: 2 * h, net(p, x))
            return ((centred - y) ** 2).mean()

        return {"p": jax.tree.map(lambda p, g: p - 0.1 * g, s["p"], jax.grad(loss)(s["p"])), "on": ~s["on"]}

    s, x, y = arguments(np.int32(0))
    soapjax.soap_shard(step, topology="cpu8", proposals=8, microbatches=2)({"p": s["p"], "on": np.array(True)}, x, y)
    assert any("brings a mean, or another statistic of the batch, back to its samples" in m for m in caplog.messages)


def over(total, errors):
    return jax.lax.cond(total > 0, lambda: errors / total, lambda: 0.0)


CHOICES = {
    "of means": lambda on, e, w: jax.lax.cond(on, lambda e: e.mean(), lambda e: 2 * jnp.abs(e).mean(), e),
    "of sums": lambda on, e, w: jax.lax.cond(on, lambda e: e.sum(), lambda e: 2 * jnp.abs(e).sum(), e),
    "of a mean or nothing": lambda on, e, w: e.mean() + jax.lax.cond(on, lambda e: jnp.abs(e).mean(), lambda e: 0.0, e),
    "of a weighted mean or nothing": lambda on, e, w: over(w.sum(), (e * w).sum()),
    "of activations": lambda on, e, w: jax.lax.cond(on, jax.nn.relu, jnp.tanh, e).mean(),
    "of a sum or a mean": lambda on, e, w: jax.lax.cond(on, lambda e: e.sum(), lambda e: e.mean(), e),
}


@pytest.mark.parametrize("name", sampled(CHOICES, 2))
def test_a_loss_within_a_cond_is_that_of_the_whole_batch(name, caplog):
    def step(s, x, y):
        loss, grads = jax.value_and_grad(lambda p: CHOICES[name](s["on"], (net(p, x) - y) ** 2, jnp.abs(y)))(s["p"])
        return {"p": jax.tree.map(lambda p, g: p - 0.01 * g, s["p"], grads), "on": ~s["on"]}, loss

    s, x, y = arguments(np.int32(0))
    assert_as_plain(step, ({"p": s["p"], "on": np.array(True)}, x, y), microbatches=2)
    assert not caplog.records


MOST = {
    "fewer keys": lambda p: {"p": p, "o": TX.init(p), "rate": np.float32(0.1), "name": None},
    "another dtype": lambda p: {"p": p, "o": optax.adam(1e-2).init(p), "total": 0},
    "an average of another dtype": lambda p: {"p": p, "o": optax.adam(1e-2).init(p), "mean": jax.tree.map(jnp.bfloat16, p)},
}  # fmt: skip


@pytest.mark.parametrize("name", MOST)
def test_most_of_a_state_is_state(name):
    """Parameters and moments are, where a step returns less than it is given, or one part with another dtype."""

    def step(s, x, y):
        g = jax.grad(lambda p: ((net(p, x) - y) ** 2).mean())(s["p"])
        tx = TX if "rate" in s else optax.adam(1e-2)
        u, o = tx.update(g, s["o"])
        new = {"p": optax.apply_updates(s["p"], u), "o": o}
        new |= {"total": s["total"] + 0.5} if "total" in s else {}
        new |= {"mean": jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, s["mean"], new["p"])} if "mean" in s else {}
        return new, g["a"].sum()

    s, x, y = arguments(np.int32(0))
    args = MOST[name](s["p"]), x, y
    traced = soapjax.trace(step, *args)
    paths = {traced.in_paths[k] for k in traced.state_pairs}
    assert {"s.p.a", "s.p.b"} <= paths and not paths & {"s.rate", "s.total", "x", "y"}
    fsdp = soapjax.soap_shard(step, topology="cpu8", planner="fsdp")
    found, _ = fsdp(*args)
    assert found["p"]["a"].sharding.num_devices == 8 and not found["p"]["a"].sharding.is_fully_replicated
    found = soapjax.soap_shard(step, topology="cpu8", proposals=8, microbatches=2)(*args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_factors_of_a_merged_weight_do_not_hide_the_batch():
    rng = np.random.default_rng(2)
    w, a, b, v = (np.float32(rng.standard_normal(shape)) for shape in ((16, 24), (16, 4), (4, 24), (24, 5)))

    def step(s, given, x, y):
        loss, g = jax.value_and_grad(lambda s: ((jnp.tanh(x @ (given["w"] + s["a"] @ s["b"])) @ given["v"] - y) ** 2).mean())(s)
        return jax.tree.map(lambda p, g: p - 0.1 * g, s, g), loss

    _, x, y = arguments(np.int32(0))
    assert_as_plain(step, ({"a": a, "b": b}, {"w": w, "v": v}, x, y), microbatches=2)


def handing_on(besides=0.0):
    """A step that hands on a row for every sample, beside moments which are as long by chance, and its arguments."""

    def step(s, x, y):
        g = jax.grad(lambda p: ((net(p, x) + s["carry"] + besides - y) ** 2).mean())(s["p"])
        m = jax.tree.map(lambda m, g: 0.9 * m + g, s["m"], g)
        return {"p": jax.tree.map(lambda p, m: p - 0.1 * m, s["p"], m), "m": m, "carry": net(s["p"], x)}, s["carry"].mean()

    s, x, y = arguments(np.int32(0))
    p = s["p"] | {"a": s["p"]["a"][:BATCH]}
    return step, ({"p": p, "m": jax.tree.map(np.zeros_like, p), "carry": y * 0.5}, x[:, :BATCH], y)


@pytest.mark.parametrize("how", [{"microbatches": 2}, PIPELINE], ids=["two", "pipeline"])
def test_a_state_with_a_row_per_sample_is_cut_with_the_batch(how):
    assert_as_plain(*handing_on(), **how)


def test_a_state_with_a_row_per_sample_is_named_where_it_cannot_be_cut():
    step, args = handing_on(np.ones((BATCH, 5), np.float32))
    with pytest.raises(SoapjaxError, match="state is not cut, and s.carry has 8 rows"):
        soapjax.soap_shard(step, topology="cpu8", proposals=8, microbatches=2)(*args)


@pytest.mark.parametrize("how", [{"microbatches": 2}, PIPELINE], ids=["two", "pipeline"])
def test_what_is_only_as_long_as_the_batch_is_not_cut(how):
    """Positions and a mask beside as many samples as there are positions."""

    def step(s, tokens, positions, mask):
        def loss_fn(p):
            h = jnp.tanh(p["e"][tokens] + positions)
            mixed = jax.nn.softmax(jnp.where(mask, jnp.einsum("bth,bsh->bts", h @ p["w"], h), -1e9)) @ h
            return optax.softmax_cross_entropy_with_integer_labels(mixed @ p["e"].T, tokens).mean()

        loss, grads = jax.value_and_grad(loss_fn)(s)
        return jax.tree.map(lambda p, g: p - 0.1 * g, s, grads), loss

    rng = np.random.default_rng(0)
    s = {"e": np.float32(rng.standard_normal((11, 16)) / 4), "w": np.float32(rng.standard_normal((16, 16)) / 4)}
    tokens, positions = rng.integers(0, 11, (12, 12)).astype(np.int32), np.float32(rng.standard_normal((12, 16)))
    assert_as_plain(step, (s, tokens, positions, np.tril(np.ones((12, 12), bool))), **how)


def test_a_data_set_that_is_read_by_the_batch_is_not_cut():
    rng = np.random.default_rng(1)
    data = {"x": np.float32(rng.standard_normal((40, 16))), "y": np.float32(rng.standard_normal((40, 5)))}

    def step(s, data, rows):
        loss, g = jax.value_and_grad(lambda p: ((net(p, data["x"][rows]) - data["y"][rows]) ** 2).mean())(s["p"])
        return {**s, "p": jax.tree.map(lambda p, g: p - 0.1 * g, s["p"], g)}, loss

    args = arguments(np.int32(0))[0], data, rng.integers(0, 40, BATCH)
    micro = micro_step(step, *args, num_microbatches=2)
    assert [micro.step.in_paths[k] for k in micro.batch_leaves] == ["rows"]
    assert_as_plain(step, args, microbatches=2)


def test_what_is_given_for_every_sample_is_no_state_although_such_is_returned():
    """A step of reinforcement learning that returns values and errors of the shape of its rewards."""

    def step(s, seen, actions, rewards, done):
        def loss(p):
            values = net(p, seen)[jnp.arange(len(seen)), actions.squeeze(-1)]
            errors = values - rewards * (1 - done)
            return (errors**2).mean(), (values, errors)

        (value, (values, errors)), g = jax.value_and_grad(loss, has_aux=True)(s["p"])
        return {**s, "p": jax.tree.map(lambda p, g: p - 0.1 * g, s["p"], g)}, value, values, errors

    rng = np.random.default_rng(3)
    s, x, _ = arguments(np.int32(0))
    args = s, x, rng.integers(0, 5, (BATCH, 1)), *(np.float32(rng.random(BATCH)) for _ in range(2))
    traced = soapjax.trace(step, *args)
    assert {traced.in_paths[k].partition(".")[0] for k in traced.state_pairs} == {"s"}
    micro = micro_step(step, *args, num_microbatches=2)
    assert [micro.step.in_paths[k] for k in micro.batch_leaves] == ["seen", "actions", "rewards", "done"]
    assert_as_plain(step, args, microbatches=2)


@pytest.mark.parametrize("how", [{"microbatches": 2}, PIPELINE], ids=["two", "pipeline"])
def test_gradients_of_single_samples_may_be_clipped_and_summed_by_a_product(how):
    def step(s, x, y):
        g = jax.vmap(jax.grad(lambda p, x, y: ((net(p, x) - y) ** 2).mean()), (None, 0, 0))(s["p"], x, y)
        norm = jnp.sqrt(sum((v.reshape(len(x), -1) ** 2).sum(1) for v in jax.tree.leaves(g)))
        scale = jnp.minimum(1, 0.5 / norm) / len(x)
        u, o = TX.update(jax.tree.map(lambda v: jnp.einsum("b,b...->...", scale, v), g), s["o"])
        return {**s, "p": optax.apply_updates(s["p"], u), "o": o}, norm.mean()

    assert_as_plain(step, arguments(np.int32(0)), **how)


def test_state_that_is_made_inside_the_loss_is_of_all_samples():
    def step(s, x, y):
        def loss(p):
            o = net(p, x)
            per = ((o - y) ** 2).mean(-1)
            new = {"median": jnp.median(per), "first": y[0], "queue": jnp.concatenate([o, s["queue"]])[:16]}
            new |= {"most": jnp.maximum(s["most"], o.max(0)), "spread": 0.9 * s["spread"] + 0.1 * o.var(0)}
            new["counts"] = s["counts"] + jnp.histogram(o, bins=3, range=(-2, 2))[0]
            return per.mean(), (new, per)

        (value, (new, per)), g = jax.value_and_grad(loss, has_aux=True)(s["p"])
        shares = new["counts"] / new["counts"].sum()
        results = {"entropy": -(shares * jnp.log(shares + 1e-9)).sum(), "scores": (per - per.mean()) / per.std(), "last": per[-1]}
        return {"p": jax.tree.map(lambda p, g: p - 0.1 * g, s["p"], g), **new}, value, results

    s, x, y = arguments(np.int32(0))
    begin = {"counts": np.zeros(3, np.float32), "most": np.full(5, -9, np.float32), "queue": np.zeros((16, 5), np.float32)}
    begin |= {"spread": np.ones(5, np.float32), "median": np.float32(0), "first": np.zeros(5, np.float32)}
    for how in ({"microbatches": 2}, PIPELINE):
        assert_as_plain(step, ({"p": s["p"], **begin}, x, y), **how)


BY_SIZE = {
    "given": lambda n: np.linspace(0, 1, n, dtype=np.float32),
    "counted": lambda n: jnp.arange(n) / n,
    "a mask": lambda n: jnp.arange(n) < 5,
}


@pytest.mark.parametrize("made", BY_SIZE.values(), ids=BY_SIZE)
def test_arrays_as_long_as_the_batch_are_those_of_the_whole(made):
    def step(s, x, y):
        def loss(p):
            per = ((net(p, x) - y) ** 2).mean(-1)
            return per.mean(), per

        (_, per), g = jax.value_and_grad(loss, has_aux=True)(s["p"])
        weighed = (per * made(len(per))).sum()
        return {"p": jax.tree.map(lambda p, g: p - 0.1 * g, s["p"], g), "total": s["total"] + weighed}, weighed

    s, x, y = arguments(np.int32(0))
    assert_as_plain(step, ({"p": s["p"], "total": np.float32(0)}, x, y), microbatches=2)


def test_a_mask_of_the_first_samples_is_warned_of(caplog):
    """A padded batch: every micro-batch would count from its own first sample."""

    def step(p, x, y):
        grads = jax.grad(lambda p: jnp.where(jnp.arange(len(x)) < 5, ((net(p, x) - y) ** 2).mean(-1), 0.0).sum() / 5)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)

    s, x, y = arguments(np.int32(0))
    soapjax.soap_shard(step, topology="cpu8", proposals=8, microbatches=2, check="none")(s["p"], x, y)
    assert any("reads them by their place" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize(
    "layers, how", sampled([(4, {"pipeline": "interleaved", "stages": 4, "microbatches": 4}), (24, PIPELINE)], 2)
)
def test_a_target_network_of_scanned_layers_makes_a_result(layers, how):
    """Stages on the same devices have one array of what both read, whose memory no update of either takes; blocks that are read by
    a second network do not repeat."""
    rng = np.random.default_rng(0)
    p = {"w": np.float32(rng.standard_normal((layers, 16, 16)) / 4), "b": np.zeros((layers, 16), np.float32)}
    p["o"] = np.float32(rng.standard_normal((16, 5)) / 4)
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1e-2, momentum=0.9))

    def deep(p, x):
        return jax.lax.scan(lambda h, w: (h + 0.3 * jnp.tanh(h @ w[0] + w[1]), None), x, (p["w"], p["b"]))[0] @ p["o"]

    def step(s, x, y):
        g = jax.grad(lambda p: ((deep(p, x) - y) ** 2).mean())(s["p"])
        u, o = tx.update(g, s["o"])
        p = optax.apply_updates(s["p"], u)
        return {"p": p, "o": o, "t": optax.incremental_update(p, s["t"], 0.1)}, ((deep(s["t"], x) - y) ** 2).mean()

    _, x, y = arguments(np.int32(0))
    assert_as_plain(step, ({"p": p, "o": tx.init(p), "t": jax.tree.map(np.copy, p)}, x, y), **how)


def proof_of(step, args):
    plan, planned = soapjax.plan_pipeline(step, *args, topology="cpu8", proposals=8, **PIPELINE)

    @functools.cache  # one step is inspected and run: its programs are compiled once
    def made(is_float64):
        return step_of_plan(step, *args, plan=plan, donate=False, is_float64=is_float64, of_micro=planned.of_micro).streamed

    run = made(False)
    ops = inspect_stream(run).ops
    return verify_pipeline(made, jax.tree.leaves(args), ops)


def test_products_of_an_update_over_all_samples_are_no_reason_to_doubt_a_plan():
    extra, begin = EXTRAS["a covariance"]
    assert proof_of(step_with(extra), arguments(begin)).numbers.is_proven


def test_a_pipeline_with_running_statistics_is_proven():
    s, x, y = arguments(np.int32(0))
    found = proof_of(step_with_running("a mean by counts"), ({"p": s["p"], "seen": jnp.zeros(x.shape[1])}, x, y))
    assert found.numbers.is_proven and found.reference == "the whole batch"
