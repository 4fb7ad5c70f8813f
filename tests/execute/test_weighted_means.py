"""Micro-batches of a mean with weights divide by the weights of the whole batch: gradients and metrics are the whole batch's.

The oracle is the plain step on one device, given all samples at once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from balanced import balanced_pipeline
from families import sampled
from planned import topology_with

from soapjax import soap_shard
from soapjax.errors import SoapjaxError
from soapjax.execute.compiled.pipeline_proof import verify_pipeline
from soapjax.execute.compiled.proof import OpsCheck
from soapjax.execute.parts.microbatches import micro_step
from soapjax.execute.streams.stage_programs import MicroGraph
from soapjax.graph.batch import growth
from soapjax.graph.passes.build import build_graph
from soapjax.planning.pipelining.given_pipeline import pipelined
from soapjax.strategy.pipeline import Pipeline, Stage

BATCH, SEQ, WIDTH, VOCAB = 8, 6, 8, 12
FOUR = topology_with(4)  # numbers of the batch are the same on any number of devices: two stages have two each


def of_class(w):
    return (w[:, 3] > 0).astype(int)


def balanced(c):
    return len(c) / (2 * jnp.maximum(jnp.bincount(c, length=2), 1))


def normalised_by_class(e, c):
    weights = (1 / jnp.maximum(jnp.bincount(c, length=2), 1))[c][:, None]
    return (e * weights).sum() / weights.sum()


def one_at_least(w):
    return jax.lax.cond(w.sum() > 0, lambda: w.sum(), lambda: jnp.ones((), w.dtype))


# Numbers are such as float32 has exactly: the plain step has them in float64.
DIVISORS = {  # what the sum of weighted errors is divided by
    "a sum": lambda w: w.sum(),
    "kept from zero": lambda w: w.sum() + 2**-10,
    "bounded": lambda w: jnp.maximum(w.sum(), 30.0),  # more than a micro-batch has, and less than all
    "chosen": lambda w: jnp.where(w.sum() > 30, w.sum(), 1.0),
    "counted": lambda w: jnp.sum(w > 0).astype(w.dtype),
    "a square": lambda w: (w**2).sum(),
}
LOSSES = {
    **{name: lambda e, w, d=d: (e * w).sum() / d(w) for name, d in DIVISORS.items()},
    "of means": lambda e, w: (e * w).mean() / w.mean(),
    "inverted": lambda e, w: (e * w).sum() * (2 * w.sum() + 1) ** -1,
    "normalised weights": lambda e, w: (e * (w / w.sum())).sum(),
    "by class": lambda e, w: ((e * w).sum(0) / (w.sum(0) + 1)).mean(),
    "two of them": lambda e, w: (e * w).sum() / w.sum() + 0.125 * (e * (1 - w)).sum() / (1 - w).sum(),
    "where": lambda e, w: jnp.mean(e, where=w > 0.2),
    "given to a loop": lambda e, w: jax.lax.map(lambda r: (r[0] * r[1]).sum() / r[2], (e.T, w.T, jnp.full(SEQ, w.sum()))).sum(),
    # Other numbers of the batch alone.
    "over the largest": lambda e, w: (e * (w / w.max())).mean(),
    "by the size and the largest": lambda e, w: (lambda i: (e * i / i.max()).mean())((len(w) * (w + 1)) ** -0.5),
    "softmax": lambda e, w: (e * jax.nn.softmax(w.sum(1))[:, None]).sum(),
    "standardised": lambda e, w: (e * ((w - w.mean()) / (w.std() + 2**-20))).mean(),
    "by what each class has": lambda e, w: (e / jax.nn.one_hot(of_class(w), 2).sum(0)[of_class(w)][:, None]).sum(),
    "as long as the longest": lambda e, w: (e * (jnp.arange(SEQ) < (w > 0).sum(1).max())).mean(),
    "above the mean": lambda e, w: (e * (w > w.mean())).mean(),
    "where there are any": lambda e, w: jnp.where(w.sum() > 0, (e * w).sum() / w.sum(), 0.0),
    "where any counts": lambda e, w: jnp.where((w > 2).sum() == 0, (e * w).sum() / jnp.maximum((w > 0).sum(), 1), 0.0),
    "weights of classes": lambda e, w: (e * (1 / jnp.bincount(of_class(w), length=2))[of_class(w)][:, None]).sum(),
    "balanced classes": lambda e, w: (e * balanced(of_class(w))[of_class(w)][:, None]).mean(),
    "weights of classes, normalised": lambda e, w: normalised_by_class(e, of_class(w)),
    "effective numbers": lambda e, w: (e * (0.5 / (1 - 0.5 ** jnp.bincount(of_class(w), length=2)))[of_class(w)][:, None]).mean(),
    "below a quantile": lambda e, w: (e * jnp.minimum(w, jnp.quantile(w, 0.625))).mean(),
    "over what a cond makes": lambda e, w: (e * w).sum() / one_at_least(w),
}


def step_of(weighted, decay=0.0, dropped=False):
    def step(state, batch):
        new_key, key = jax.random.split(state["key"]) if dropped else (state["key"], None)

        def loss_fn(params):
            h = jnp.tanh(params["embed"][batch["tokens"]] @ params["w"])
            if dropped:
                h = jnp.where(jax.random.uniform(key, h.shape, jnp.float32) < 0.7, h, 0)
            logits = jnp.tanh(h @ params["v"]) @ params["out"]
            errors = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
            weights = batch["weights"].astype(errors.dtype)
            hits = (logits.argmax(-1) == batch["labels"]) * weights
            metrics = {"accuracy": hits.sum() / weights.sum(), "tokens": weights.sum()}
            return weighted(errors, weights) + decay * (params["w"] ** 2).sum(), metrics

        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.125 * g, state["params"], grads)
        return {"params": params, "key": new_key}, {"loss": loss, **metrics}

    return step


def arguments():
    rng = np.random.default_rng(0)
    shapes = {"embed": (VOCAB, WIDTH), "w": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "out": (WIDTH, VOCAB)}
    params = {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}
    lengths = np.array([6, 1, 5, 2, 6, 6, 3, 4])  # micro-batches of unequal weights
    weights = (np.arange(SEQ) < lengths[:, None]) * rng.choice([0.25, 1.0, 1.5], (BATCH, SEQ))
    tokens = rng.integers(0, VOCAB, (2, BATCH, SEQ)).astype(np.int32)
    return {"params": params, "key": jax.random.key(3)}, {
        "tokens": tokens[0], "labels": tokens[1], "weights": weights.astype(np.float32)
    }  # fmt: skip


def pipeline_step(step, schedule, stages, num, chunks=1, **options):
    state, batch = arguments()
    micro = micro_step(step, state, batch, num_microbatches=num)
    graph, binding = build_graph(micro.step)
    pipeline = balanced_pipeline(graph, 2 * stages, schedule=schedule, num_microbatches=num, num_stages=stages, chunks=chunks)
    options |= dict(topology="cpu8", donate=False, of_micro=MicroGraph(micro, graph, binding))
    return pipelined(step, state, batch, pipeline=pipeline, **options).streamed


def assert_right(step, schedule="1f1b", stages=2, num=4, chunks=1):
    """State (and so gradients) and metrics of a pipeline are those of the plain step, in float64."""
    given = arguments()
    with jax.enable_x64(True):
        run = pipeline_step(step, schedule, stages, num, chunks, is_float64=True)
        found = run.step.out_tree.unflatten(run.run(jax.tree_util.tree_leaves(given))[0])
        wanted = jax.jit(step)(*jax.tree.map(lambda x: x.astype("float64") if x.dtype == "float32" else x, given))
    (state, metrics), (wanted_state, wanted_metrics) = found, wanted
    for name, w in wanted_state["params"].items():
        np.testing.assert_allclose(state["params"][name], w, rtol=1e-9, atol=1e-12)
    assert len(metrics) == 3
    for name, w in wanted_metrics.items():
        assert float(metrics[name]) == pytest.approx(float(w), rel=1e-9)


@pytest.mark.parametrize("name", sampled(LOSSES, 3))
def test_a_weighted_mean_is_that_of_the_whole_batch(name):
    assert_right(step_of(LOSSES[name], decay=2**-7))


LATER = {
    **DIVISORS,
    "rounded": lambda w: jnp.round(w.sum()),
    "a count": lambda w: jnp.maximum((w > 0).sum(), 1),
    "a root": lambda w: jnp.sqrt(w.sum()),
    "the largest and the mean": lambda w: w.max() + w.mean(),
    "in a cond": one_at_least,
    "a quantile": lambda w: jnp.quantile(w, 0.75),
    "added up in a loop": lambda w: jax.lax.scan(lambda c, x: (c + x.sum(), None), jnp.zeros((), w.dtype), w)[0],
}


@pytest.mark.parametrize("how", [{"microbatches": 4}, {"pipeline": "1f1b", "stages": 2, "microbatches": 2}], ids=["one", "stages"])
@pytest.mark.parametrize("name", sampled(LATER, 5))
def test_what_updates_and_metrics_divide_by_is_the_whole_batchs(name, how):
    """A sum of errors whose gradient is divided after it was made, and metrics of all samples that are divided by such a number."""
    divisor = LATER[name]

    def step(params, batch):
        def loss_fn(params):
            logits = jnp.tanh(params["embed"][batch["tokens"]] @ params["w"]) @ params["out"]
            errors = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
            return (errors * batch["weights"]).sum(), errors

        (loss, errors), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        over = divisor(batch["weights"])
        metrics = {"loss": loss / over, "median": jnp.median(errors) / over, "deviation": errors.std() * over}
        return jax.tree.map(lambda p, g: p - 0.125 * g / over, params, grads), metrics

    with jax.enable_x64(True):
        state, batch = jax.tree.map(lambda x: x.astype("float64") if x.dtype == "float32" else x, arguments())
        params = {k: v for k, v in state["params"].items() if k != "v"}
        planned = soap_shard(step, topology=FOUR, proposals=8, check="none", **how)
        wanted = jax.jit(step)(params, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), planned(params, batch), wanted)


CASES = [("gpipe", 2, 4, 1), ("zb-h1", 2, 2, 1), ("interleaved", 2, 4, 2), ("1f1b", 4, 2, 1), ("1f1b", 1, 4, 1), ("1f1b", 2, 8, 1)]


@pytest.mark.parametrize("schedule, stages, num, chunks", sampled(CASES, 2))
def test_under_every_schedule(schedule, stages, num, chunks):
    """Micro-batches of one sample, too, whose program has other equations."""
    assert_right(step_of(LOSSES["kept from zero"]), schedule, stages, num, chunks)


@pytest.mark.slow
@pytest.mark.parametrize("dropped", sampled([True, False], 2))
def test_it_is_proven(dropped):
    """With random numbers of its own for every micro-batch, too, where the micro-batches on one device are the reference."""

    def make(is_float64):
        with jax.enable_x64(is_float64):
            return pipeline_step(step_of(LOSSES["a sum"], dropped=dropped), "1f1b", 2, 4, is_float64=is_float64)

    found = verify_pipeline(make, jax.tree_util.tree_leaves(arguments()), OpsCheck(0, 0, 0, ()))
    assert found.numbers.num_gradients == 4 and found.numbers.num_outputs == 3
    assert found.reference == ("its micro-batches" if dropped else "the whole batch") and found.numbers.is_proven_in_float64


def test_what_goes_wrong_without_the_whole_batch():
    """Each micro-batch's own weights give another gradient: the pipelines above would not be proven by chance."""
    step, (state, batch) = jax.jit(step_of(LOSSES["a sum"])), arguments()
    whole = step(state, batch)[1]["loss"]
    parts = [step(state, jax.tree.map(lambda x, m=m: np.split(x, 4)[m], batch))[1]["loss"] for m in range(4)]
    assert abs(np.mean(parts) - whole) > 0.01 * whole


def test_minibatches_have_their_own_weights():
    """Asynchronous pipelines update after every micro-batch, by what the step makes of that alone."""
    state, batch = arguments()
    step = step_of(LOSSES["a sum"])
    graph = build_graph(micro_step(step, state, batch, num_microbatches=2).step)[0]
    (stage,) = balanced_pipeline(graph, 1, num_microbatches=2, num_stages=1).stages
    stage = Stage(operators=stage.operators, devices=(0,))
    pipeline = Pipeline(schedule="pipedream", num_microbatches=2, stages=(stage,))
    found = pipelined(step, state, batch, pipeline=pipeline, topology="cpu8", donate=False)(state, batch)[0]
    wanted = state
    for m in range(2):
        wanted, _ = jax.jit(step)(wanted, jax.tree.map(lambda x, m=m: np.split(x, 2)[m], batch))
    for k, w in wanted["params"].items():
        np.testing.assert_allclose(found["params"][k], w, rtol=1e-5, atol=1e-6)


REFUSED = {
    "an overlap": lambda e, w: (e * w).sum() / (jax.nn.sigmoid(e) * w).sum(),
    "summed in a loop": lambda e, w: jax.lax.map(lambda r: (r[0] * r[1]).sum() / r[1].sum(), (e.T, w.T))[0],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_made_of_the_batch_alone_is_refused(name):
    with pytest.raises(SoapjaxError, match=r"a sum over the batch's results \(.*\.py:\d+ in .*made of the batch alone"):
        pipeline_step(step_of(REFUSED[name]), "1f1b", 2, 2)


def test_a_divisor_inside_a_branch_is_to_be_made_before_it():
    def step_with(divides):
        def step(p, x, w):
            def loss(p):
                return divides(jnp.tanh(x @ p).mean(-1) ** 2, w, p.sum() > 0)

            value, grads = jax.value_and_grad(loss)(p)
            return p - 0.1 * grads, value

        return step

    def inside(e, w, is_so):
        return jax.lax.cond(is_so, lambda: (e * w).sum() / w.sum(), lambda: e.mean())

    def before(e, w, is_so):
        total = w.sum()
        return jax.lax.cond(is_so, lambda: (e * w).sum() / total, lambda: e.mean())

    rng = np.random.default_rng(0)
    p, x, w = (rng.uniform(size=shape).astype(np.float32) for shape in [(6, 3), (BATCH, 6), (BATCH,)])
    how = dict(topology=FOUR, planner="data_parallel", microbatches=2, donate=False)
    with pytest.raises(SoapjaxError, match="outside of loops and of branches of a `cond`.*make a sum of weights before the loop"):
        soap_shard(step_with(inside), **how)(p, x, w)
    found = soap_shard(step_with(before), **how)(p, x, w)
    for mine, wanted in zip(found, jax.jit(step_with(inside))(p, x, w), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-6)


def test_it_runs_by_the_decorator():
    state, batch = arguments()
    step = step_of(LOSSES["a sum"])
    planned = soap_shard(step, topology="cpu8", pipeline="1f1b", stages=1, microbatches=4, proposals=8)
    metrics = (jax.tree.leaves(run(state, batch)[1]) for run in (planned, jax.jit(step)))
    for found, wanted in zip(*metrics, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("most", [None, 8], ids=["of all samples", "too many"])
def test_results_that_are_no_means_are_those_of_the_whole_batch(most, caplog, monkeypatch):
    """A perplexity is that of the mean loss, not the mean of perplexities; what no mean tells is made of all samples at the end.
    Where too much would be kept for that, it is averaged, and named."""
    if most is not None:
        monkeypatch.setattr(growth, "_MOST_JOINED", most)

    def step(w, x, y):
        def loss(w):
            z = jnp.tanh(x @ w)
            error = ((z - y) ** 2).mean()
            exact = {"perplexity": jnp.exp(error), "psnr": -10 * jnp.log10(error), "r2": 1 - error / y.var()}
            right, there = (z[:, 0] > y[:, 0]) & (y[:, 0] > 0), y[:, 0] > 0
            no_means = {"deviation": z.std(), "norm": jnp.sqrt((z**2).sum()), "median": jnp.median(z), "spread": z.max() - z.min()}
            no_means["f1"] = 2 * right.sum() / (right.sum() + there.sum() + (z[:, 0] > y[:, 0]).sum())
            return error, exact | no_means | {"hits": (z > y).mean()}

        (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(w)
        return w - 0.1 * gradient, metrics | {"loss": value, "gradient_norm": jnp.sqrt((gradient**2).sum())}

    rng = np.random.default_rng(0)
    w, x, y = (rng.normal(size=s).astype(np.float32) for s in ((6, 4), (16, 6), (16, 4)))
    x *= np.linspace(0.2, 3, 16, dtype=np.float32)[:, None]
    wanted = jax.jit(step)(w, x, y)[1]
    found = soap_shard(step, microbatches=4, donate=False)(w, x, y)[1]
    other = set() if most is None else {"deviation", "norm", "median", "spread", "f1"}
    for name in wanted:
        assert np.allclose(found[name], wanted[name], rtol=1e-5) == (name not in other), name
    named = " ".join(m for m in caplog.messages if "put together" in m)
    assert {name for name in wanted if f".{name}" in named} == other


WARNED = {
    "a product of means": lambda v, x: v.mean() * jnp.abs(v).mean(),
    "a mean's square": lambda v, x: (v.mean(0) ** 2).sum(),
    "a covariance": lambda v, x: ((v.T @ v / len(x)) ** 2).sum(),
    "advantages of the values": lambda v, x: (v * jax.lax.stop_gradient(v - v.mean())).mean(),
}


@pytest.mark.parametrize("name", WARNED)
def test_statistics_of_results_that_come_back_are_warned_of(name, caplog):
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: WARNED[name](jnp.tanh(x @ w), x))(w)

    w, x = jnp.eye(6, 4), jax.random.normal(jax.random.key(0), (8, 6))
    soap_shard(step, microbatches=2, donate=False)(w, x)
    assert any("statistic of the batch" in m for m in caplog.messages)


NUMBERED = {
    "edges": lambda w, x, i: (jnp.tanh(x @ w) * jnp.tanh(x @ w)[i]).mean(),
    "sums of edges": lambda w, x, i: (jax.ops.segment_sum(jnp.tanh(x @ w), i, len(x)) ** 2).mean(),
    # As many whatever the batch is: beyond a micro-batch's samples they would be clamped, or read NaN.
    "a constant permutation": lambda w, x, i: (jnp.tanh(x[jax.random.permutation(jax.random.key(0), 8)] @ w)).mean(),
    "a constant's order": lambda w, x, i: (jnp.tanh(x[jnp.arange(8)[::-1]] @ w)).mean(),
    "a minibatch that is drawn": lambda w, x, i: (
        jnp.tanh(jnp.take(x, jax.random.randint(jax.random.key(0), (4,), 0, 8), axis=0) @ w)
    ).mean(),
    "a window": lambda w, x, i: (jnp.tanh(jax.lax.dynamic_slice_in_dim(x, i[0], 4) @ w)).mean(),
}


@pytest.mark.parametrize("name", NUMBERED)
def test_samples_read_by_numbers_that_come_with_the_batch_are_refused(name):
    def step(w, x, i):
        return w - 0.1 * jax.grad(NUMBERED[name])(w, x, i)

    arguments = jnp.eye(6, 4), jax.random.normal(jax.random.key(0), (8, 6)), jnp.arange(8)[::-1]
    with pytest.raises(SoapjaxError, match="by numbers that come with the batch"):
        soap_shard(step, microbatches=2, donate=False)(*arguments)


def test_a_largest_over_the_edges_of_each_node_is_refused():
    """The batch is what most data are as long as: the edges. Of the largest at a node it is not known how it grows."""

    def step(w, nodes, edges, to):
        def loss(w):
            score = edges @ w
            largest = jax.ops.segment_max(score, to, len(nodes))
            weighted = jnp.exp(score - largest[to]) * score
            return ((jax.ops.segment_sum(weighted, to, len(nodes)) - nodes) ** 2).mean()

        return w - 0.1 * jax.grad(loss)(w)

    arguments = jnp.ones(6), jnp.ones(4), jax.random.normal(jax.random.key(0), (8, 6)), jnp.arange(8) % 4
    with pytest.raises(SoapjaxError, match="over the batch what is no sum.* the batch is dim 0 of edges, to"):
        soap_shard(step, microbatches=2, donate=False)(*arguments)


def test_a_permutation_of_as_many_samples_as_there_are_is_every_micro_batchs_own():
    def step(w, x):
        def loss(w):
            return jnp.tanh(x[jax.random.permutation(jax.random.key(0), len(x))] @ w).mean()

        return w - 0.1 * jax.grad(loss)(w)

    w, x = jnp.eye(6, 4), jax.random.normal(jax.random.key(0), (8, 6))
    np.testing.assert_allclose(soap_shard(step, microbatches=2, donate=False)(w, x), jax.jit(step)(w, x), rtol=1e-5)


@pytest.mark.parametrize("take", [lambda x, i: x[i], lambda x, i: jax.lax.dynamic_index_in_dim(x, i, keepdims=False)])
def test_a_loop_over_samples_is_no_reading_by_constant_numbers(take):
    """It reads them one by one, as many as there are."""

    def step(w, x):
        def loss(w):
            one = lambda i, total: total + jnp.tanh(take(x, i) @ w).sum()  # noqa: E731
            return jnp.tanh(x @ w).mean() + jax.lax.fori_loop(0, len(x), one, 0.0) / len(x)

        return w - 0.1 * jax.grad(loss)(w)

    micro = micro_step(step, jnp.eye(6, 4), jnp.ones((8, 6)), num_microbatches=2)
    assert micro.growth.mixing(micro.step.program.outputs).by_number() is None


def test_a_step_that_takes_other_samples_of_a_part_is_refused():
    def step(w, x):
        def loss(w):
            both = jnp.tanh(jnp.concatenate([x, x + 1]) @ w["a"]) @ w["b"]
            return jax.nn.softplus(-both[:8]).mean() + jax.nn.softplus(both[8:]).sum()

        return jax.tree.map(lambda a, b: a - 0.1 * b, w, jax.grad(loss)(w))

    w = {"a": jnp.eye(6, 4), "b": jnp.eye(4, 3)}
    with pytest.raises(SoapjaxError, match=r"a fixed number of samples, or samples by their place"):
        soap_shard(step, microbatches=2, donate=False)(w, jnp.ones((8, 6)))


@pytest.mark.parametrize("num", [4, 8])
def test_a_constant_as_long_as_the_batch_is_refused_with_one_sample_too(num):
    """One sample would be broadcast against all of it."""

    def step(w, x):
        weights = jnp.arange(8.0)[:, None]
        return w - 0.1 * jax.grad(lambda w: (jnp.tanh(x @ w) * weights).mean())(w)

    with pytest.raises(SoapjaxError, match=r"traced with 2 of 8 samples .*incompatible shapes.*x.shape\[0\]"):
        soap_shard(step, microbatches=num, donate=False)(jnp.eye(6, 4), jnp.ones((8, 6)))


def in_chunks(term):
    """`term(weights, rows, labels)` of eight tokens at a time, added up."""

    def added(p, x):
        rows, labels = jnp.tanh(p["e"][x[:, :-1]]).reshape(-1, 8, WIDTH), x[:, 1:].reshape(-1, 8)
        body = jax.checkpoint(lambda total, chunk: (total + term(p, *chunk), None))
        return jax.lax.scan(body, 0.0, (rows, labels))[0]

    return added


def cross_entropy(p, rows, labels):
    return optax.softmax_cross_entropy_with_integer_labels(rows @ p["o"], labels)


def over_what_counts(count):
    """Errors of the tokens that count, over how many these are: both added up by one loop."""

    def loss(p, x):
        rows, labels = jnp.tanh(p["e"][x[:, :-1]]).reshape(-1, 8, WIDTH), x[:, 1:].reshape(-1, 8)

        def body(carry, chunk):
            (total, number), counts = carry, chunk[1] % 3 > 0
            return (total + jnp.where(counts, cross_entropy(p, *chunk), 0).sum(), number + count(counts)), None

        total, number = jax.lax.scan(jax.checkpoint(body), (0.0, count(jnp.zeros(()))), (rows, labels))[0]
        return total / number

    return loss


CHUNKED = {
    "over an own count": over_what_counts(lambda counts: counts.sum().astype(jnp.float32)),
    "over an own whole number": over_what_counts(lambda counts: counts.sum().astype(jnp.int32)),
    "over a constant": lambda p, x: in_chunks(lambda *a: cross_entropy(*a).sum())(p, x) / x[:, 1:].size,
    "a mean of means": lambda p, x: in_chunks(lambda *a: cross_entropy(*a).mean())(p, x) / (x[:, 1:].size // 8),
    "centred in chunks": lambda p, x: in_chunks(lambda p, h, y: cross_entropy(p, h - h.mean(0), y).sum())(p, x) / x[:, 1:].size,
    "chosen in chunks": lambda p, x: in_chunks(
        lambda *a: jax.lax.cond(p["o"].sum() > 0, lambda e: (e**2).sum(), lambda e: (e - e.mean() + 1).sum(), cross_entropy(*a))
    )(p, x) / x[:, 1:].size,
    "a sum": in_chunks(lambda *a: cross_entropy(*a).sum()),
}


@pytest.mark.parametrize("num", (2, 4))
@pytest.mark.parametrize("name", sampled(CHUNKED, 4))
def test_a_loss_added_up_in_chunks_is_the_whole_batchs(name, num, caplog):
    rng = np.random.default_rng(0)
    weights = {"e": rng.normal(size=(VOCAB, WIDTH)).astype(np.float32), "o": rng.normal(size=(WIDTH, VOCAB)).astype(np.float32)}
    x = rng.integers(VOCAB, size=(BATCH, 17))

    def step(p, x):
        loss, gradients = jax.value_and_grad(CHUNKED[name])(p, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, gradients), loss

    planned = soap_shard(step, topology=FOUR, donate=False, proposals=8, check="none", microbatches=num)
    wanted, found = jax.jit(step)(weights, x), planned(weights, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, wanted)
    assert not [m for m in caplog.messages if "batch" in m]


@pytest.mark.parametrize("body", (
    lambda c, loss: jnp.maximum(c, loss.max()), lambda c, loss: 0.9 * c + loss.mean(), lambda c, loss: c * 0.5 + loss.sum(),
), ids=("largest", "moving average", "discounted"))  # fmt: skip
def test_a_loop_that_hands_on_more_than_sums_is_refused(body):
    """Of micro-batches it would begin anew with each: another loss, and other gradients."""

    def step(w, x):
        def loss(w):
            chunks = (x @ w).reshape(-1, 4, 4)
            return jax.lax.scan(lambda c, rows: (body(c, jnp.tanh(rows)), None), 0.0, chunks)[0]

        return w - 0.1 * jax.grad(loss)(w)

    with pytest.raises(SoapjaxError, match="hands on more than sums from one chunk"):
        soap_shard(step, microbatches=2)(jnp.eye(6, 4), jnp.ones((16, 6)))
