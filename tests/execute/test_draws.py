"""Every micro-batch draws random numbers of its own, alike under every schedule.

The oracle is plain JAX on one device: micro-batch by micro-batch, with its number folded into each key that is drawn from.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from balanced import balanced_pipeline
from families import sampled

from soapjax.execute.compiled.pipeline_proof import verify_pipeline
from soapjax.execute.compiled.proof import OpsCheck
from soapjax.execute.parts.microbatches import micro_step
from soapjax.execute.streams.stage_programs import MicroGraph
from soapjax.graph.passes.build import build_graph
from soapjax.graph.recompute import Recomputation
from soapjax.graph.trace.tracing import trace
from soapjax.planning.pipelining.given_pipeline import pipelined
from soapjax.strategy.pipeline import Pipeline, Stage

BATCH, WIDTH, LAYERS = 8, 6, 4


def drawn(key, shape):
    return jax.random.uniform(key, shape, jnp.float32) < 0.7  # of 32 bits also where everything else has 64


def layers(params, batch, key, fold):
    x = batch["x"]
    for k, key in enumerate(jax.random.split(key, LAYERS)):
        mask = drawn(fold(key), x.shape)
        x = jnp.where(mask, jnp.tanh(x @ params[k]), 0)
    return x, mask


def scanned(params, batch, key, fold):
    """Keys are what the loop goes over; the layer's own is derived within."""

    def layer(x, inputs):
        w, key = inputs
        mask = drawn(fold(jax.random.fold_in(key, 7)), x.shape)
        return jnp.where(mask, jnp.tanh(x @ w), 0), mask

    x, masks = jax.lax.scan(layer, batch["x"], (params, jax.random.split(key, LAYERS)))
    return x, masks[-1]


def checkpointed(params, batch, key, fold):
    """What is not kept is drawn again in the backward pass."""

    @jax.checkpoint
    def layer(x, w, key):
        mask = drawn(fold(key), x.shape)
        return jnp.where(mask, jnp.tanh(x @ w), 0), mask

    x = batch["x"]
    for k, key in enumerate(jax.random.split(key, LAYERS)):
        x, mask = layer(x, params[k], key)
    return x, mask


def branched(params, batch, key, fold):
    """A branch that JAX keeps closed draws for a layer."""

    def noisy(key, x):
        return x + jax.random.uniform(key, x.shape, jnp.float32)

    x = batch["x"]
    for k, key in enumerate(jax.random.split(key, LAYERS)):
        mask = drawn(fold(key), x.shape)
        x = jnp.where(mask, jnp.tanh(jax.lax.cond(jnp.sum(params[k]) > 0, noisy, lambda key, x: x, fold(key), x) @ params[k]), 0)
    return x, mask


def loss_fn(params, batch, key, fold, forward):
    x, mask = forward(params, batch, key, fold)
    return ((x - batch["y"]) ** 2).mean(), (mask, mask.astype(x.dtype).mean())


def step_of(forward):
    def step(state, batch):
        new_key, key = jax.random.split(state["key"])
        (loss, (mask, kept)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            state["w"], batch, key, lambda k: k, forward
        )
        w = jax.tree.map(lambda p, g: p - 0.1 * g, state["w"], grads)
        return {"w": w, "key": new_key}, {"loss": loss, "mask": mask, "kept": kept}

    return step


def arguments(raw=False):
    w = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH))
    key = jax.random.PRNGKey(5) if raw else jax.random.key(5)
    x, y = (jax.random.normal(jax.random.key(k), (BATCH, WIDTH)) for k in (1, 2))
    return {"w": w, "key": key}, {"x": x, "y": y}


def one_device(state, batch, num, forward):
    """Gradient, loss, masks and their mean, in float64."""
    state, batch = jax.tree.map(lambda x: x.astype("float64") if x.dtype == "float32" else x, (state, batch))
    _, key = jax.random.split(state["key"])
    found = []

    @jax.jit
    def graded(mine, m):
        return jax.value_and_grad(loss_fn, has_aux=True)(state["w"], mine, key, lambda k: jax.random.fold_in(k, m), forward)

    for m in range(num):
        mine = jax.tree.map(lambda x, m=m: np.asarray(x)[m * BATCH // num : (m + 1) * BATCH // num], batch)
        found.append(graded(mine, m))
    gradient = np.mean([g for _, g in found], axis=0)
    loss, kept = np.mean([x for (x, _), _ in found]), np.mean([x for (_, (_, x)), _ in found])
    return gradient, loss, np.concatenate([mask for (_, (mask, _)), _ in found]), kept


CASES = [  # schedule, stages, micro-batches, stages per group, forward pass, whether the key is raw
    ("1f1b", 4, 4, 1, layers, False),
    ("gpipe", 2, 4, 1, layers, True),
    ("zb-h1", 2, 2, 1, layers, False),
    ("interleaved", 2, 4, 2, layers, False),
    ("1f1b", 1, 4, 1, layers, False),
    ("1f1b", 1, 2, 1, scanned, True),
    ("gpipe", 1, 4, 1, scanned, False),
    ("1f1b", 2, 4, 1, branched, False),
    ("1f1b", 2, 4, 1, checkpointed, False),
    ("gpipe", 1, 2, 1, checkpointed, True),
]


def pipeline_step(schedule, stages, num, chunks, forward, raw, **options):
    state, batch = arguments(raw)
    step = step_of(forward)
    micro = micro_step(step, state, batch, num_microbatches=num)
    graph, binding = build_graph(micro.step)
    pipeline = balanced_pipeline(graph, 2 * stages, schedule=schedule, num_microbatches=num, num_stages=stages, chunks=chunks)
    options |= dict(topology="cpu8", donate=False, of_micro=MicroGraph(micro, graph, binding))
    run = pipelined(step, state, batch, pipeline=pipeline, **options).streamed
    return run, state, batch


@pytest.mark.parametrize("schedule, stages, num, chunks, forward, raw", sampled(CASES, 3))
def test_each_micro_batch_draws_its_own(schedule, stages, num, chunks, forward, raw):
    with jax.enable_x64(True):
        run, state, batch = pipeline_step(schedule, stages, num, chunks, forward, raw, is_float64=True)
        leaves = jax.tree_util.tree_leaves((state, batch))
        (outputs, (gradient,)), (again, _) = (run.run(leaves, with_gradients=True) for _ in range(2))
        new, metrics = run.step.out_tree.unflatten(outputs)
        wanted, loss, masks, kept = one_device(state, batch, num, forward)
        wanted_key, _ = jax.random.split(state["key"])
    mask = np.asarray(metrics["mask"])
    np.testing.assert_array_equal(mask, masks)
    parts = np.split(mask, num)
    assert all((a != b).any() for k, a in enumerate(parts) for b in parts[:k])
    assert np.linalg.norm(np.asarray(gradient) - wanted) <= 1e-9 * np.linalg.norm(wanted)
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-9) and float(metrics["kept"]) == pytest.approx(kept, rel=1e-9)
    data = (lambda k: k) if raw else jax.random.key_data
    np.testing.assert_array_equal(data(new["key"]), data(wanted_key))  # what goes on is the step's own
    np.testing.assert_array_equal(mask, run.step.out_tree.unflatten(again)[1]["mask"])


def test_what_a_plan_computes_again_draws_the_same():
    """Masks that are not kept are drawn again in the backward pass, by the micro-batch's own keys."""
    (state, batch), step = arguments(), step_of(layers)
    with jax.enable_x64(True):
        options = Recomputation(trace(step, state, batch))
        recomputed = options.offered.intersection(itertools.chain(*options.closed.values()))
        micro = micro_step(step, state, batch, num_microbatches=4, recomputed=recomputed)
        pipeline = balanced_pipeline(build_graph(micro.step)[0], 1, num_microbatches=4, num_stages=1)
        how = dict(pipeline=pipeline, topology="cpu8", donate=False, is_float64=True, recomputed=recomputed)
        run = pipelined(step, state, batch, **how).streamed
        _, (gradient,) = run.run(jax.tree_util.tree_leaves((state, batch)), with_gradients=True)
        wanted, *_ = one_device(state, batch, 4, layers)
    assert recomputed and len(micro.step.program.eqns) > len(trace(step, state, batch).program.eqns)
    assert np.linalg.norm(np.asarray(gradient) - wanted) <= 1e-9 * np.linalg.norm(wanted)


@pytest.mark.slow
def test_the_proof_knows_what_a_micro_batch_draws():
    state, batch = arguments()
    leaves = jax.tree_util.tree_leaves((state, batch))

    def make(is_float64):
        with jax.enable_x64(is_float64):
            return pipeline_step("1f1b", 2, 4, 1, layers, False, is_float64=is_float64)[0]

    found = verify_pipeline(make, leaves, OpsCheck(0, 0, 0, ()))
    assert found.reference == "its micro-batches" and found.numbers.is_proven_in_float64


def test_the_proof_knows_what_a_sample_has_of_a_mean():
    """A gradient of every sample is of a mean over the whole batch, not over its micro-batch."""

    def step(w, key, batch):
        def loss_fn(w, x):
            return (jnp.where(drawn(key, x.shape), jnp.tanh(x @ w), 0) ** 2).mean()

        loss, (grad, of_x) = jax.value_and_grad(loss_fn, (0, 1))(w, batch["x"])
        return w - 0.1 * grad, {"loss": loss, "of_x": of_x}

    state, batch = arguments()
    args = state["w"][0], state["key"], {"x": batch["x"]}
    graph = build_graph(micro_step(step, *args, num_microbatches=4).step)[0]
    pipeline = balanced_pipeline(graph, 1, num_microbatches=4, num_stages=1)

    def make(is_float64):
        with jax.enable_x64(is_float64):
            return pipelined(step, *args, pipeline=pipeline, topology="cpu8", donate=False, is_float64=is_float64).streamed

    found = verify_pipeline(make, jax.tree_util.tree_leaves(args), OpsCheck(0, 0, 0, ()))
    assert found.reference == "its micro-batches" and found.numbers.is_proven_in_float64


def test_minibatches_of_replicas_draw_their_own():
    """One round of two replicas: the mean of two minibatches' gradients, applied at once."""
    state, batch = arguments()
    step = step_of(lambda *a: (layers(*a)[0], jnp.zeros(())))
    graph = build_graph(micro_step(step, state, batch, num_microbatches=2).step)[0]
    (stage,) = balanced_pipeline(graph, 1, num_microbatches=2, num_stages=1).stages
    stage = Stage(operators=stage.operators, devices=(0, 1), replicas=2)
    pipeline = Pipeline(schedule="pipedream", num_microbatches=2, stages=(stage,))
    with jax.enable_x64(True):
        run = pipelined(step, state, batch, pipeline=pipeline, topology="cpu8", is_float64=True)
        new, _ = run(state, batch)
        wanted, _, _, _ = one_device(state, batch, 2, layers)
        moved = np.asarray(state["w"], np.float64) - new["w"]
        np.testing.assert_allclose(moved, np.float64(np.float32(0.1)) * wanted, rtol=1e-9, atol=1e-12)


def test_keys_that_come_with_the_data_stay_as_they_are():
    """One key per sample: micro-batches then draw what the whole batch draws."""

    def step(w, batch):
        def loss_fn(w):
            mask = jax.vmap(lambda key: drawn(key, (WIDTH,)))(batch["key"])
            return (jnp.where(mask, jnp.tanh(batch["x"] @ w), 0) ** 2).mean()

        loss, grad = jax.value_and_grad(loss_fn)(w)
        return w - 0.1 * grad, loss

    batch = {"x": arguments()[1]["x"], "key": jax.random.split(jax.random.PRNGKey(3), BATCH)}
    w = arguments()[0]["w"][0]
    assert not micro_step(step, w, batch, num_microbatches=4).draws
    graph = build_graph(micro_step(step, w, batch, num_microbatches=4).step)[0]
    stages = balanced_pipeline(graph, 1, num_microbatches=4, num_stages=1)
    run = pipelined(step, w, batch, pipeline=stages, topology="cpu8", donate=False)
    for found, wanted in zip(run(w, batch), step(w, batch), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_without_randomness_and_with_one_micro_batch_nothing_changes():
    def labels(step, num):
        state, batch = arguments()
        micro = micro_step(step, state, batch, num_microbatches=num)
        pipeline = balanced_pipeline(build_graph(micro.step)[0], 2, num_microbatches=num, num_stages=2)
        run = pipelined(step, state, batch, pipeline=pipeline, topology="cpu8", donate=False)
        return micro.draws, run, state, batch, [d.label for d in run.streamed.dispatches().dispatches]

    def quiet(params, batch, key, fold):
        x = batch["x"]
        for k in range(LAYERS):
            x = jnp.tanh(x @ params[k])
        return x, x > 0

    draws, *_, names = labels(step_of(quiet), 4)
    assert not draws and not any("numbers" in n for n in names)
    draws, run, state, batch, names = labels(step_of(layers), 1)
    assert not draws and not any("numbers" in n for n in names)
    np.testing.assert_array_equal(run(state, batch)[1]["mask"], jax.jit(step_of(layers))(state, batch)[1]["mask"])


@pytest.mark.parametrize("words", [jax.random.key_data, jnp.asarray], ids=["raw", "typed"])
def test_the_words_of_one_key_are_no_samples(words):
    """Neither where nothing else is an argument with one leading dim, nor where the batch is as long as a key."""

    def step(w, batch, key):
        new, key = jax.random.split(key)

        def loss(w):
            h = jnp.where(jax.random.bernoulli(key, 0.5, batch["x"].shape), batch["x"], 0)
            return ((jnp.tanh(h @ w) * batch["of_class"].mean()) ** 2).mean()

        return w - jax.grad(loss)(w), new

    for samples in (2, 8):
        batch = {"x": jnp.ones((samples, 4)), "of_class": jnp.ones((5, 4))}
        micro = micro_step(step, jnp.ones((4, 4)), batch, words(jax.random.key(0)), num_microbatches=2)
        assert [micro.full.in_paths[k] for k in micro.batch_leaves] == ["batch.x"]
