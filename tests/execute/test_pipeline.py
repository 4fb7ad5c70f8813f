"""Pipelines give the single-device step's gradients, and hold no more than their schedules say."""

import functools
import importlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from balanced import balanced_pipeline

import soapjax
from soapjax import soap_shard
from soapjax.errors import SoapjaxError
from soapjax.execute.compiled.pipeline_proof import verify_pipeline
from soapjax.execute.compiled.proof import OpsCheck
from soapjax.execute.compiled.stream_inspection import inspect_stream
from soapjax.execute.parts.microbatches import micro_step
from soapjax.execute.spmd.evaluator import ProgramEvaluator
from soapjax.graph.microbatch import sample_divisor
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import trace
from soapjax.planning.pipelining.given_pipeline import pipelined
from soapjax.strategy.held import in_flight
from soapjax.strategy.pipeline import Pipeline, Stage

MODELS = {
    "mlp": ("mlp", dict(batch=16, width=16, layers=3, features=8)),
    "tied_lm": ("transformer_lm", dict(batch=8, seq=8, width=16, layers=2, heads=2, vocab=32, tie=True, dropout=0.0)),
    "resnet": ("resnet", dict(batch=8, image=32, classes=8, width=4, depth="tiny")),
    "nmt": ("nmt", dict(batch=8, seq=2, hidden=8, layers=1, vocab=32)),
}
CASES = [  # model, schedule, stages, micro-batches, stages per group of devices
    ("mlp", "1f1b", 4, 4, 1),
    ("mlp", "gpipe", 2, 8, 1),
    ("mlp", "interleaved", 2, 4, 2),
    ("mlp", "zb-h1", 4, 8, 1),
    pytest.param("tied_lm", "zb-h1", 2, 4, 1, marks=pytest.mark.slow),
    pytest.param("tied_lm", "1f1b", 4, 4, 1, marks=pytest.mark.slow),
    pytest.param("tied_lm", "gpipe", 2, 2, 1, marks=pytest.mark.slow),  # by default in test_pipeline_processes.py
    pytest.param("resnet", "1f1b", 2, 2, 1, marks=pytest.mark.slow),
    pytest.param("resnet", "gpipe", 4, 4, 1, marks=pytest.mark.slow),
    pytest.param("nmt", "1f1b", 4, 4, 1, marks=pytest.mark.slow),
    pytest.param("nmt", "gpipe", 2, 2, 1, marks=pytest.mark.slow),
]


def made(name):
    module, sizes = MODELS[name]
    return importlib.import_module(f"models.{module}").make(**sizes)


def outputs_and_gradients(step, leaves):
    """Outputs and gradients of a traced step on one device, in float64."""
    _, binding = build_graph(step)
    at = {binding.values.of(o).root: o for e in reversed(step.program.eqns) for o in e.outputs}
    ids = tuple(at[p.gradient] for p in binding.phases.parameters)
    run = jax.jit(lambda *x: ProgramEvaluator(step.program, is_float64=True).run(list(x), ids))
    return jax.tree.map(np.asarray, run(*leaves))


def distance(found, wanted):
    """DESIGN's measure: ||g - g1|| / max(||g1||, 1e-6 ||all gradients||), the largest."""
    everything = np.sqrt(sum(np.linalg.norm(g) ** 2 for g in wanted))
    return max(
        np.linalg.norm(np.asarray(f) - w) / max(np.linalg.norm(w), 1e-6 * everything) for f, w in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("name, schedule, stages, microbatches, chunks", CASES)
def test_gradients_are_the_single_device_steps(name, schedule, stages, microbatches, chunks):
    """Two devices per stage. With batch norm the reference averages micro-batches: its statistics are those of each.

    Its moving variance is the whole batch's: the mean of the micro-batches', and the variance of their means.
    """
    step, state, batch = made(name)
    leaves = jax.tree_util.tree_leaves((state, batch))
    micro = micro_step(step, state, batch, num_microbatches=microbatches)
    pipeline = balanced_pipeline(
        build_graph(micro.step)[0], 2 * stages, schedule=schedule, num_microbatches=microbatches, num_stages=stages, chunks=chunks
    )
    with jax.enable_x64(True):
        run = pipelined(step, state, batch, pipeline=pipeline, topology="cpu8", is_float64=True, donate=False).streamed
        outputs, gradients = run.run(leaves, with_gradients=True)
        if name == "resnet":
            parts = []
            for m in range(microbatches):
                part = list(leaves)
                for k in micro.batch_leaves:
                    part[k] = np.split(np.asarray(leaves[k]), microbatches)[m]
                parts.append(outputs_and_gradients(micro.step, part))
            wanted = [np.mean(g, axis=0) for g in zip(*(p[1] for p in parts), strict=True)]
            wanted_out = [np.mean(o, axis=0) for o in zip(*(p[0] for p in parts), strict=True)]
            keep, own = (np.float64(np.float32(x)) for x in (0.9, 1 - 0.9))  # as the step is traced
            at = {path: k for k, path in enumerate(micro.step.out_paths)}
            for path, k in at.items():
                if "batch_stats" in path and path.endswith("var"):
                    before = np.float64(leaves[next(i for i, o in micro.step.state_pairs.items() if o == at[path[:-3] + "mean"])])
                    means = [(p[0][at[path[:-3] + "mean"]] - keep * before) / own for p in parts]
                    wanted_out[k] = wanted_out[k] + own * np.var(means, axis=0)
        else:
            wanted_out, wanted = outputs_and_gradients(micro.full, leaves)
    assert len(gradients) == len(wanted) > 0
    assert distance(gradients, wanted) <= 1e-9
    for path, found, value in zip(micro.step.out_paths, outputs, wanted_out, strict=True):
        if "loss" in path or "batch_stats" in path or path.endswith("step"):
            np.testing.assert_allclose(np.asarray(found), value, rtol=1e-9, err_msg=path)
    assert all(len({d.id for d in p.mesh.devices.flat}) == 2 for p in run.places)
    if schedule == "gpipe":
        assert held(run) == in_flight(pipeline) == (microbatches,) * stages
    if schedule == "1f1b":
        assert held(run) == in_flight(pipeline) == tuple(min(microbatches, stages - i) for i in range(stages))


def held(run):
    """The most micro-batches whose residuals a stage holds, counted on the list of dispatches by what it frees."""
    counts, most = [0] * len(run.places), [0] * len(run.places)
    stream = run.dispatches(with_gradients=True)
    residuals = {}  # slot -> stage, of what a forward pass makes and its own backward pass reads
    backward = {}
    for d in stream.dispatches:
        if d.label.startswith("backward"):
            backward.setdefault(d.track, set()).update(d.ins)
    alive = {}
    for d in stream.dispatches:
        stage = int(d.track.split()[-1]) if d.track.startswith("stage") else None
        if d.label.startswith("forward"):
            m = int(d.label.split()[-1])
            kept = {s for s in (*d.outs, *d.ins) if s in backward[d.track]} - set(d.free)
            mine = {s for s in kept if all(s not in o for o in alive.values())}
            alive[stage, m] = mine
            residuals.update(dict.fromkeys(mine, stage))
            counts[stage] += 1
            most[stage] = max(most[stage], counts[stage])
        if d.label.startswith("backward"):
            counts[stage] -= 1
            assert alive[stage, int(d.label.split()[-1])] & set(d.ins) or not alive[stage, int(d.label.split()[-1])]
    return tuple(most)


def halves(step, *arguments):
    """Two stages of four devices each, 1F1B with four micro-batches."""
    return balanced_pipeline(build_graph(soapjax.trace(step, *arguments))[0], 8, num_microbatches=4, num_stages=2)


def test_the_global_norm_is_that_of_all_stages():
    """Clipping by the norm of all gradients: what mixes stages runs in a second round."""
    optimizer = optax.chain(optax.clip_by_global_norm(1e-3), optax.adam(1e-2))

    def loss_fn(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    def step(state, x):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], x)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, {"loss": loss}

    params = [jax.random.normal(k, (8, 8)) for k in jax.random.split(jax.random.key(0), 4)]
    x = jax.random.normal(jax.random.key(1), (8, 8))
    mine = theirs = {"params": params, "opt_state": optimizer.init(params)}
    sharded = soap_shard(step, topology="cpu8", pipeline=halves(step, mine, x))
    plain = jax.jit(step)
    for _ in range(2):
        mine, _ = sharded(mine, x)
        theirs, _ = plain(theirs, x)
    assert sharded.pipeline.schedule == "1f1b"
    moments = [jax.tree.leaves(s["opt_state"][1][0].mu) for s in (mine, theirs)]
    assert distance(*[[np.asarray(g, np.float64) for g in m] for m in moments]) <= 1e-5


def test_any_number_of_devices_per_stage():
    """15-1: fifteen devices do not form a part of a mesh of sixteen. Here 7-1 of eight."""
    step, state, batch = made("mlp")
    batch = jax.tree.map(lambda x: x[:14], batch)
    micro = micro_step(step, state, batch, num_microbatches=2)
    two = balanced_pipeline(build_graph(micro.step)[0], 2, num_microbatches=2, num_stages=2)
    stages = tuple(s.model_copy(update={"devices": d}) for s, d in zip(two.stages, (tuple(range(7)), (7,)), strict=True))
    run = pipelined(
        step, state, batch, pipeline=two.model_copy(update={"stages": stages}), topology="cpu8", donate=False
    ).streamed
    _, gradients = run.run(jax.tree_util.tree_leaves((state, batch)), with_gradients=True)
    with jax.enable_x64(True):
        _, wanted = outputs_and_gradients(micro.full, jax.tree_util.tree_leaves((state, batch)))
    assert run.places[0].mesh.size == 7
    assert distance(gradients, wanted) <= 1e-5


def test_results_of_every_kind():
    """A mean, a count, what has a batch dim, and a state that the data does not touch."""

    def step(state, batch):
        def loss_fn(w):
            h = jnp.tanh(batch["x"] @ w["a"])
            out = (h @ w["b"])[:, 0]
            return ((out - batch["y"]) ** 2).mean(), out

        (loss, out), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["w"])
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state["w"], grads)
        return {"w": new, "key": state["key"]}, {"loss": loss, "above": (out > batch["y"]).sum(), "out": out, "seven": 7}

    w = {"a": jax.random.normal(jax.random.key(0), (4, 8)), "b": jax.random.normal(jax.random.key(1), (8, 1))}
    state = {"w": w, "key": jax.random.PRNGKey(3)}
    batch = {"x": jax.random.normal(jax.random.key(2), (8, 4)), "y": np.arange(8, dtype=np.float32) / 8}
    (new, metrics), (wanted, wanted_metrics) = (
        f(state, batch)
        for f in (soap_shard(step, topology="cpu8", pipeline=halves(step, state, batch)), jax.jit(step))
    )
    assert int(metrics["above"]) == int(wanted_metrics["above"]) > 0 and int(metrics["seven"]) == 7
    np.testing.assert_allclose(metrics["out"], wanted_metrics["out"], rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], wanted_metrics["loss"], rtol=1e-5)
    np.testing.assert_array_equal(new["key"], state["key"])
    np.testing.assert_allclose(new["w"]["a"], wanted["w"]["a"], rtol=1e-4, atol=1e-6)


def losses(kind):
    def step(state, batch):
        def loss_fn(w):
            error = (jnp.tanh(batch["x"] @ w["a"]) @ w["b"])[:, 0] - batch["y"]
            if kind == "mean":
                return (error**2).mean()
            if kind == "sum":
                return (error**2).sum()
            return (error**2).sum() / (jnp.abs(error) * batch["mask"]).sum()

        loss, grads = jax.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.01 * g, state, grads), {"loss": loss}

    w = {"a": jnp.ones((4, 8)), "b": 0.1 * jnp.ones((8, 1))}
    batch = {"x": jax.random.normal(jax.random.key(2), (8, 4)), "y": jnp.arange(8.0), "mask": jnp.arange(8.0) % 2}
    return step, w, batch


def test_a_loss_that_is_a_sum_is_summed():
    step, w, batch = losses("sum")
    options = dict(topology="cpu8", pipeline=halves(step, w, batch))
    with pytest.raises(SoapjaxError, match="is a sum over the batch.*microbatch_reduction='sum'"):
        soap_shard(step, **options, microbatch_reduction="mean")(w, batch)
    wanted, wanted_metrics = jax.jit(step)(w, batch)
    for said in ({}, {"microbatch_reduction": "sum"}):
        new, metrics = soap_shard(step, **options, **said)(w, batch)
        np.testing.assert_allclose(new["a"], wanted["a"], rtol=1e-5)
        np.testing.assert_allclose(metrics["loss"], wanted_metrics["loss"], rtol=1e-5)
    step, w, batch = losses("mean")
    with pytest.raises(SoapjaxError, match="say 'mean'"):
        soap_shard(step, **options, microbatch_reduction="sum")(w, batch)
    step, w, batch = losses("a ratio")
    with pytest.raises(SoapjaxError, match="divided by a sum over the batch's results.*fixed count"):
        soap_shard(step, **options)(w, batch)


def lora(state, frozen, x, y):
    def loss(state):
        h = x
        for w, own in zip(frozen, state, strict=True):
            h = h + jnp.tanh(h @ w + (h @ own["a"]) @ own["b"])
        return ((h.sum(1) - y) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def codebooks(state, books, x, y):
    def loss(state):
        z = jnp.tanh(x @ state[0]["a"]) @ state[0]["b"] + jnp.tanh(x @ state[1]["a"]) @ state[1]["b"]
        return sum(((z[:, None] - book[None]) ** 2).sum(-1).min(1) * y for book in books).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def normalised(state, constants, x, y):
    """By constants that meet before they meet the batch, with frozen layers in a loop; the batch is put into another order."""
    deviation, scale, stacked = constants

    def loss(state):
        h = (x * (jnp.exp(scale) / (1 + deviation**2)))[jnp.argsort(y)]
        h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w) @ state[0]["a"] @ state[0]["b"], None), h, stacked)[0]
        return (h.sum(1) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


@pytest.mark.parametrize("width", [12, 8, 16])
@pytest.mark.parametrize("step", [lora, codebooks, normalised], ids=lambda f: f.__name__)
def test_weights_that_are_given_are_no_batch(step, width):
    """Frozen ones, codebooks and constants, also as long as the batch, or as many as its parts."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) / 3, jnp.float32)  # noqa: E731
    state = [{"a": draw(width, 4), "b": draw(4, width)} for _ in range(2)]
    given = [draw(width), draw(width), draw(3, width, width)] if step is normalised else [draw(width, width), draw(width, width)]
    x, y = draw(16, width), draw(16)
    micro = micro_step(step, state, given, x, y, num_microbatches=2)
    assert [micro.full.in_paths[k] for k in micro.batch_leaves] == ["x", "y"]
    assert len(build_graph(micro.full)[1].given) == len(given)
    if step is not normalised:
        assert sample_divisor(build_graph(micro.full)[0]) == 16
        gradient = jax.jit(jax.grad(lambda s, x, y: step(s, given, x, y)[1]))
        parts = [gradient(state, x[m::2], y[m::2]) for m in (0, 1)]
        whole = gradient(state, x, y)
        for a, b, c in zip(*map(jax.tree.leaves, (whole, *parts)), strict=True):
            np.testing.assert_allclose(a, (b + c) / 2, atol=1e-5)


def test_positions_and_counters_beside_the_batch_are_no_batch():
    """Nor counts that change their type: neither need be cut into as many parts."""

    def step(state, positions, batch):
        def loss_fn(w):
            return ((jnp.tanh((batch["x"] + positions) @ w["a"]) @ w["b"] - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["w"])
        w = jax.tree.map(lambda p, g: p - 0.1 * g, state["w"], grads)
        return {"w": w, "seen": state["seen"] + (batch["x"] > 0).sum((0, 1)).astype(jnp.float32)}, loss

    rng = np.random.default_rng(0)
    w = {"a": rng.normal(size=(7, 12)), "b": rng.normal(size=(12, 5))}
    arrays = {"w": w, "seen": np.zeros(7, np.int32)}, rng.normal(size=(6, 7)), {
        "x": rng.normal(size=(8, 6, 7)), "y": rng.normal(size=(8, 6, 5))
    }  # fmt: skip
    given = jax.tree.map(lambda x: jnp.asarray(x, x.dtype if x.dtype == np.int32 else jnp.float32), arrays)
    assert sample_divisor(build_graph(trace(step, *given))[0]) == 8
    found = soap_shard(step, topology="cpu8", proposals=8, microbatches=4)(*given)
    for a, b in zip(*map(jax.tree.leaves, (found, jax.jit(step)(*given))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_batch_is_what_all_leaves_of_an_argument_share():
    """A teacher's parameters are given, too: more arrays, of one leading size, are no batch."""

    def step(state, teacher, batch):
        def loss_fn(w):
            wanted = jnp.tanh(batch["x"] @ teacher["a"] + teacher["b"]) @ teacher["c"]
            return ((jnp.tanh(batch["x"] @ w["a"]) @ w["b"] - wanted) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.01 * g, state, grads), loss

    teacher = {"a": jnp.ones((4, 6)), "b": jnp.ones(6), "c": jnp.ones((6, 4)), "unused": jnp.ones((6, 6))}
    state, batch = {"a": jnp.ones((4, 8)), "b": jnp.ones((8, 4))}, {"x": jnp.ones((2, 4))}
    micro = micro_step(step, state, teacher, batch, num_microbatches=2)
    assert [micro.full.in_paths[k] for k in micro.batch_leaves] == ["batch.x"]
    micro = micro_step(step, state, teacher, {"x": jnp.ones((1, 4))}, num_microbatches=1)
    assert micro.batch_size == 6  # one sample is no batch


def test_a_gradient_that_stays_in_a_loop_is_refused():
    def step(w, x):
        def add(total, part):
            return total + jax.grad(lambda w: (jnp.tanh(part @ w) ** 2).mean())(w), None

        def ascend(w, _):
            total, _ = jax.lax.scan(add, jnp.zeros_like(w), x.reshape(2, 4, 4))
            return w - 0.1 * total, None

        return jax.lax.scan(ascend, w, None, length=2)[0]

    with pytest.raises(SoapjaxError, match="gradient"):
        soap_shard(step, topology="cpu8", pipeline="1f1b", stages=1, microbatches=2)(jnp.ones((4, 4)), jnp.ones((8, 4)))


def test_an_update_that_reads_the_data_reads_all_of_it():
    """Statistics of the observations, as agents keep them: they are no part of the loss. Where a part of the batch makes another
    step, nothing is known of what is the whole batch's, and such an update is refused."""

    def step(state, batch, like=None):
        x = batch["x"] if like is None or len(batch["x"]) == like else jnp.sin(batch["x"])
        loss, grads = jax.value_and_grad(lambda w: ((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2).mean())(state["w"])
        mean = 0.9 * state["mean"] + 0.1 * batch["x"].mean(0)
        return {"w": jax.tree.map(lambda p, g: p - 0.01 * g, state["w"], grads), "mean": mean}, loss

    state = {"w": {"a": jnp.ones((4, 8)), "b": jnp.ones((8, 1))}, "mean": jnp.zeros(4)}
    batch, how = {"x": jnp.arange(32.0).reshape(8, 4) / 32}, dict(topology="cpu8", pipeline="1f1b", stages=1, microbatches=2)
    wanted = jax.jit(step)(state, batch)[0]
    np.testing.assert_allclose(soap_shard(step, **how)(state, batch)[0]["mean"], wanted["mean"], rtol=1e-6)
    with pytest.raises(SoapjaxError, match="argument batch.x: got read by an update.*in the loss.*without a pipeline"):
        soap_shard(functools.partial(step, like=8), **how)(state, batch)


def test_complex_parameters_are_proven():
    """Their gradients are summed and compared with both parts."""

    def step(state, batch):
        def loss_fn(w):
            h = batch["x"] @ w["a"].astype(jnp.complex64)
            return (jnp.abs(h @ w["b"]) ** 2).mean(), (h @ w["b"]).mean()

        (loss, field), grads = jax.value_and_grad(loss_fn, has_aux=True)(state)
        return jax.tree.map(lambda p, g: p - 0.01 * jnp.conj(g), state, grads), {"loss": loss, "field": field}

    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=s) + 1j * rng.normal(size=s), jnp.complex64) for s in ((4, 6), (6, 3)))
    state, batch = {"a": a, "b": b}, {"x": jnp.asarray(rng.normal(size=(8, 4)), jnp.float32)}
    graph = build_graph(micro_step(step, state, batch, num_microbatches=2).step)[0]
    pipeline = balanced_pipeline(graph, 2, num_microbatches=2, num_stages=2)

    def make(is_float64):
        with jax.enable_x64(is_float64):
            return pipelined(step, state, batch, pipeline=pipeline, topology="cpu8", donate=False, is_float64=is_float64).streamed

    found = verify_pipeline(make, jax.tree.leaves((state, batch)), OpsCheck(0, 0, 0, ()))
    assert found.reference == "the whole batch" and found.numbers.is_proven_in_float64
    assert found.numbers.num_gradients == 2 and found.numbers.num_outputs == 2


def test_what_does_not_fit_is_refused():
    step, w, batch = losses("mean")

    def run(**options):
        return soap_shard(step, topology="cpu8", **options)(w, batch)

    with pytest.raises(SoapjaxError, match="divisor of the batch .8..*choose one of 1, 2, 4, 8"):
        run(pipeline="1f1b", microbatches=3)
    with pytest.raises(SoapjaxError, match="1 to ., the operators of the forward pass.*fewer stages"):
        run(pipeline="1f1b", stages=8, microbatches=2)
    with pytest.raises(SoapjaxError, match="gpipe or 1f1b"):
        soap_shard(step, pipeline="pipe")
    with pytest.raises(SoapjaxError, match='given without a pipeline.*pipeline="1f1b"'):
        soap_shard(step, stages=2)
    names = [
        s.operators
        for s in balanced_pipeline(build_graph(soapjax.trace(step, w, batch))[0], 2, num_microbatches=1, num_stages=2).stages
    ]

    def pipeline(*stages):
        made = tuple(Stage(operators=o, devices=d) for o, d in stages)
        return Pipeline(schedule="1f1b", num_microbatches=2, stages=made)

    with pytest.raises(SoapjaxError, match="its own devices"):
        run(pipeline=pipeline((names[0], (0, 1)), (names[1], (1, 2))))
    with pytest.raises(SoapjaxError, match=r"stages\[1\].devices: got .9,.; expected devices of cpu8, 0 to 7"):
        run(pipeline=pipeline((names[0], (0,)), (names[1], (9,))))
    with pytest.raises(SoapjaxError, match="operators in no stage"):
        run(pipeline=pipeline((names[0], (0,)), (names[1][:1], (1,))))
    with pytest.raises(SoapjaxError, match="flow from stage to stage.*move it to the later"):
        run(pipeline=pipeline((names[1], (0,)), (names[0], (1,))))
    with pytest.raises(SoapjaxError, match="in stage 0 too.*drop it"):
        run(pipeline=pipeline((names[0], (0,)), (names[0] + names[1], (1,))))

    def forward_only(w, batch):
        return w, {"loss": (batch["x"] @ w["a"]).mean()}

    with pytest.raises(SoapjaxError, match="no gradient boundary.*value_and_grad"):
        soap_shard(forward_only, topology="cpu8", pipeline="1f1b", stages=1, microbatches=2)(w, batch)

    def errors(w, batch):
        return ((batch["x"] @ w["a"]) ** 2).mean()

    def twice(w, batch):  # two updates: the lines that show it are named
        near = {k: w[k] - 0.1 * g for k, g in jax.grad(errors)(w, batch).items()}
        return {k: near[k] - g for k, g in jax.grad(errors)(near, batch).items()}

    first = twice.__code__.co_firstlineno
    lines = rf"py:{errors.__code__.co_firstlineno + 1} in errors reads what .*py:{first + 1} in <dictcomp> makes"
    with pytest.raises(SoapjaxError, match=rf"depends on an update, or on another gradient \(.*{lines}\)"):
        soap_shard(twice, topology="cpu8", microbatches=2)(w, batch)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint])
def test_statistics_of_layers_beside_the_loss(wrap, caplog):
    """What is computed again stands behind one barrier with the gradient of an earlier stage; counts are summed, stacked or not."""
    keys = jax.random.split(jax.random.key(0), 3)
    w, x = [jax.random.normal(k, (16, 16)) / 4 for k in keys[:2]], jax.random.normal(keys[2], (16, 16))

    @wrap
    def layer(h, w):
        return h + jnp.tanh(h @ w), jax.nn.one_hot((h @ w).argmax(-1), 16).sum(0)

    def step(w, x):
        def loss(w):
            h, counts = x, []
            for one in w:
                h, n = layer(h, one)
                counts.append(n)
            return ((h - 1) ** 2).mean(), {"load": jnp.stack(counts), "range": h.max() - h.min()}

        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(w)
        return [a - 0.1 * g for a, g in zip(w, grads, strict=True)], {"loss": value, **metrics}

    wanted, metrics = jax.jit(step)(w, x)
    found = soap_shard(step, topology="cpu8", pipeline="1f1b", stages=2, microbatches=4, proposals=16, donate=False)(w, x)
    for a, b in zip(found[0], wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[1]["load"], metrics["load"])
    np.testing.assert_allclose(found[1]["range"], metrics["range"], rtol=1e-5)
    assert "put together" not in caplog.text


def test_what_ran_when():
    """Events of a real run: one per dispatch, none of a track overlap, each after what it needs."""
    step, state, batch = made("mlp")
    sharded = soap_shard(step, topology="cpu8", pipeline="1f1b", stages=4, microbatches=4, proposals=16)
    state, _ = sharded(state, batch)
    start = time.perf_counter()
    _, events = sharded.traced(state, batch)
    took_s = time.perf_counter() - start
    ends = {e.name: e.start_s + e.duration_s for e in events}
    starts = {e.name: e.start_s for e in events}
    assert len(ends) == len(events) and max(ends.values()) <= took_s
    assert {f"{kind} {s}, micro-batch {m}" for kind in ("forward", "backward") for s in range(4) for m in range(4)} <= ends.keys()
    for m in range(4):
        assert starts[f"forward 3, micro-batch {m}"] >= ends[f"forward 2, micro-batch {m}"]
        assert starts[f"backward 0, micro-batch {m}"] >= ends[f"backward 1, micro-batch {m}"]
    for track in {e.track for e in events}:
        mine = sorted(e for e in events if e.track == track)
        by_start = sorted(mine, key=lambda e: e.start_s)
        assert all(a.start_s + a.duration_s <= b.start_s + 1e-9 for a, b in zip(by_start, by_start[1:], strict=False))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_devices_sum_gradients_once_per_step(schedule):
    """Data parallelism inside two stages: passes reduce no gradient, updates reduce all of them, whatever the micro-batches."""
    step, state, batch = made("mlp")
    micro = micro_step(step, state, batch, num_microbatches=4)
    graph = build_graph(micro.step)[0]
    pipeline = balanced_pipeline(graph, 8, schedule=schedule, num_microbatches=4, num_stages=2)
    run = pipelined(step, state, batch, pipeline=pipeline, topology="cpu8", donate=False).streamed
    found = inspect_stream(run)
    sent = {part.name: sum(part.bytes_by_collective.values()) for part in found.parts}
    gradient_bytes = sum(graph.tensors[p.gradient].size_bytes for p in graph.parameters)
    # An all-reduce over four devices sends 2 * 3/4 of its operand.
    assert sent["update 0"] + sent["update 1"] == pytest.approx(1.5 * gradient_bytes)
    assert sent["backward 0"] == 0 and sent["backward 1"] + sent.get("weights 1", 0) < 0.01 * gradient_bytes


@pytest.mark.parametrize("stages", [1, 2])
def test_the_largest_of_all_micro_batches_is_that_of_the_batch(stages):
    def step(w, x):
        def loss(w):
            h = jnp.tanh(x @ w[0]) @ w[1]
            return (h**2).mean(), {"largest": h.max(), "least": jnp.abs(h).min().astype(jnp.bfloat16), "of all": h.sum(1).max()}

        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(w)
        return [a - 0.1 * g for a, g in zip(w, grads, strict=True)], metrics | {"loss": value}

    x = jax.random.normal(jax.random.key(0), (16, 8))
    w = [jax.random.normal(jax.random.key(k), (8, 8)) for k in (1, 2)]
    graph = build_graph(micro_step(step, w, x, num_microbatches=4).step)[0]
    pipeline = balanced_pipeline(graph, 2 * stages, schedule="1f1b", num_microbatches=4, num_stages=stages)
    found = pipelined(step, w, x, pipeline=pipeline, topology="cpu8", donate=False)(w, x)[1]
    wanted = step(w, x)[1]
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(np.float32(found[name]), np.float32(wanted[name]), rtol=1e-5)
