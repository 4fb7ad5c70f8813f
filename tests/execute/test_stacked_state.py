"""Stacked state of pipelines: one array for the user, whose rows lie on the stages that work with them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import sampled
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from problems import abstract

import soapjax
from soapjax.execute.compiled.stream_inspection import inspect_stream
from soapjax.execute.streams.stage_programs import step_of_plan
from soapjax.execute.transfers.stacked_state import Stack
from soapjax.graph.trace.tracing import trace
from soapjax.planning.pipelining.pipelines import NOT_EVEN
from soapjax.planning.plan_files import recost
from soapjax.strategy.plan import Plan

SPECS = [PartitionSpec(), PartitionSpec("d"), PartitionSpec(None, "d"), PartitionSpec("d", None)]


def on(devices, spec):
    return NamedSharding(Mesh(np.array(jax.devices()[devices]), ("d",)), spec)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stages", [[4, 4], [2, 2, 2, 2], [4, 2], [3, 5], [8]])
def test_rows_go_apart_and_together_again(stages, seed):
    rng = np.random.default_rng([seed, *stages])
    ends = list(itertools.accumulate(stages))
    each = rng.integers(1, 3, len(stages)) if seed % 2 else np.full(len(stages), 2)
    slices = [slice(end - n, end) for n, end in zip(stages, ends, strict=True)]
    shardings = [on(s, SPECS[rng.integers(len(SPECS))]) for s, n in zip(slices, each, strict=True) for _ in range(n)]
    stack = Stack([0] * len(shardings), shardings)
    assert stack.is_even == (len(set(stages)) == 1 and len(set(each)) == 1)
    given = np.asarray(rng.normal(size=(len(shardings), 120, 120)), np.float32)
    rows = stack.apart(jnp.asarray(given), give=False)
    for row, sharding, wanted in zip(rows, shardings, given, strict=True):
        assert row.sharding.is_equivalent_to(sharding, 2)
        np.testing.assert_array_equal(row, wanted)
    whole = stack.together(rows, [False] * len(rows))
    np.testing.assert_array_equal(whole, given)
    assert whole.sharding.is_equivalent_to(stack.sharding, 3)
    assert rows[0].is_deleted()
    if stack.is_even:  # every device holds rows of its own stage alone
        for shard in whole.addressable_shards:
            mine = next(k for k, s in enumerate(slices) if shard.device.id in range(s.start, s.stop))
            assert shard.index[0] == slice(mine * each[0], (mine + 1) * each[0], None) or len(stages) == 1
    again = stack.apart(whole, give=True)
    assert whole.is_deleted()
    np.testing.assert_array_equal(np.stack(again), given)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("rows", [[(2,), (2,)], [(3,), (0, 2)], [(2, 0), (3,)], [(3,), (2,)], [(4, 0)], [(0, 0, 2), (0,)], [(5,)]])
def test_pieces_go_apart_and_together_again(rows, spec):
    """Rows that a stage's programs have as one array are that in the whole, too."""
    num = 4 // len(rows)
    meshes = [slice(num * k, num * (k + 1)) for k in range(len(rows))]
    shardings = [
        on(m, PartitionSpec(None, *spec) if n else spec) for m, pieces in zip(meshes, rows, strict=True) for n in pieces
    ]  # fmt: skip
    pieces = [n for own in rows for n in own]
    stack = Stack(pieces, shardings)
    totals = [sum(max(n, 1) for n in own) for own in rows]
    assert stack.is_even == (len(set(totals)) == 1)
    given = np.random.default_rng(0).normal(size=(sum(totals), 8, 12)).astype(np.float32)
    parts = stack.apart(jnp.asarray(given), give=False)
    ends = list(itertools.accumulate((max(n, 1) for n in pieces), initial=0))
    for x, sharding, n, at in zip(parts, shardings, pieces, ends, strict=False):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
        np.testing.assert_array_equal(x, given[at : at + n] if n else given[at])
    whole = stack.together(parts, [False] * len(parts))
    np.testing.assert_array_equal(whole, given)
    assert whole.sharding.is_equivalent_to(stack.sharding, 3)
    again = stack.apart(whole, give=True)
    np.testing.assert_array_equal(np.concatenate([x if n else x[None] for x, n in zip(again, pieces, strict=True)]), given)


def scanning(layers, optimizer):
    """Layers of a scan, computed again in the backward pass."""

    @jax.checkpoint
    def layer(h, w):
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    def loss(params, batch):
        return (jax.lax.scan(layer, batch @ params["first"], params["layers"])[0] ** 2).mean()

    def step(state, batch):
        params, inner = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, inner = optimizer.update(gradients, inner, params)
        return (optax.apply_updates(params, updates), inner), value

    keys = jax.random.split(jax.random.key(0), 4)
    layers = {"up": jax.random.normal(keys[0], (layers, 16, 24)) / 4, "down": jax.random.normal(keys[1], (layers, 24, 16)) / 4}
    params = {"first": jax.random.normal(keys[2], (8, 16)), "layers": layers}
    return step, (params, optimizer.init(params)), jax.random.normal(keys[3], (32, 8))


@pytest.mark.parametrize(
    ("layers", "stages", "schedule"),
    sampled([(4, 2, "interleaved"), (5, 3, "1f1b"), (6, 4, "gpipe"), (4, 2, "zb-h1")], 4),
)
def test_a_pipeline_of_a_loop_trains_as_one_device(layers, stages, schedule):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    step, state, batch = scanning(layers, optimizer)
    plan, _ = soapjax.plan_pipeline(
        step, state, batch, pipeline=schedule, topology="cpu8", stages=stages, microbatches=4, proposals=20
    )  # fmt: skip
    assert (NOT_EVEN in plan.provenance.notes) == ((layers, stages) == (5, 3) or schedule == "interleaved")
    plan = Plan.loads(plan.dumps())
    run, wanted = soapjax.soap_shard(step, plan=plan), state
    single = jax.jit(step)
    state = jax.tree.map(jnp.copy, state)
    for _ in range(3):
        state, value = run(state, batch)
        wanted, value_alone = single(wanted, batch)
        np.testing.assert_allclose(value, value_alone, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), state, wanted)
    placed = run.shard(wanted)
    assert jax.tree.map(lambda x: x.sharding, placed) == jax.tree.map(lambda x: x.sharding, state)
    jax.tree.map(np.testing.assert_array_equal, placed, wanted)


@pytest.mark.slow
def test_memory_of_a_scanned_model_is_as_predicted():
    """Stages once held all layers' weights, of which the prediction knew nothing."""
    made = abstract("transformer_lm", layers=2, width=64, heads=2, batch=8, seq=16, vocab=64, scan=True)
    plan, _ = soapjax.plan_pipeline(*made, pipeline="1f1b", topology="cpu8", stages=2, microbatches=2, proposals=1)
    assert recost(plan, trace(*made, unroll=plan.unroll)).prediction == plan.prediction
    run = step_of_plan(*made, plan=plan).streamed
    found = inspect_stream(run).memory_bytes
    for i, stage in enumerate(plan.pipeline.stages):
        compiled = max(found[d] for d in stage.devices)
        assert plan.prediction.memory_parts_bytes[f"stage {i}"] == pytest.approx(compiled, rel=0.15)


def test_keys_of_all_layers_in_one_array_are_taken_apart_and_put_together():
    """As those of dropout in a loop over layers: a stage's programs are compiled for keys, whose type no name brings back."""

    def step(state, batch):
        def loss(w):
            def layer(h, x):
                w, key = x
                return h + jnp.tanh(h @ w) * jax.random.bernoulli(key, 0.5, w.shape[1:2]), jax.random.fold_in(key, 1)

            h, keys = jax.lax.scan(layer, batch, (w, state["keys"]))
            return (h**2).mean(), keys

        (value, keys), gradient = jax.value_and_grad(loss, has_aux=True)(state["w"])
        return {"w": state["w"] - 0.1 * gradient, "keys": keys}, value

    state = {"w": jax.random.normal(jax.random.key(1), (4, 8, 8)) * 0.3, "keys": jax.random.split(jax.random.key(0), 4)}
    batch = jax.random.normal(jax.random.key(2), (8, 8))
    how = {"pipeline": "1f1b", "stages": 2, "microbatches": 1, "proposals": 1}
    piped = soapjax.soap_shard(step, topology="cpu8", check="none", donate=False, **how)
    ours, theirs = state, state
    for _ in range(2):
        ours, value = piped(ours, batch)
        theirs, wanted = jax.jit(step)(theirs, batch)
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(ours["w"], theirs["w"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(jax.random.key_data(ours["keys"]), jax.random.key_data(theirs["keys"]))


def test_what_is_returned_beside_the_state_is_not_used_up():
    """A row, an old row, and the new state twice; layers of a Python loop, backwards; nothing of the caller's is given away."""

    def step(state, w0, batch):
        def loss(w):
            h = batch
            for t in reversed(range(4)):
                h = h + jnp.tanh(h @ w[t])
            return (h**2).mean() + 1e-3 * ((w - w0) ** 2).sum()

        value, gradient = jax.value_and_grad(loss)(state["w"])
        w = state["w"] - 0.1 * gradient
        return {"w": w, "target": w}, {"loss": value, "first": w[0], "old": state["w"][0]}

    keys = jax.random.split(jax.random.key(0), 2)
    w, batch = jax.random.normal(keys[0], (4, 16, 16)) / 8, jax.random.normal(keys[1], (32, 16))
    run = soapjax.soap_shard(step, topology="cpu8", pipeline="1f1b", stages=2, microbatches=4, proposals=5)
    state, wanted, w0 = {"w": jnp.copy(w), "target": jnp.copy(w)}, {"w": w, "target": w}, jnp.copy(w)
    for _ in range(3):
        state, metrics = run(state, w0, batch)
        wanted, expected = jax.jit(step)(wanted, w, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), (state, metrics), (wanted, expected))
    assert not w0.is_deleted() and any("[3]" in path for path in run.plan.arguments)


@pytest.mark.parametrize("optimizer", [optax.adam(1e-2), optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))])
def test_new_state_takes_the_memory_of_the_old(optimizer):
    """Also where the update waits for the norm of all stages' gradients: else weights and moments lie there twice."""

    def step(state, x):
        params, inner = state
        value, gradient = jax.value_and_grad(lambda p: (jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]).mean())(params)
        updates, inner = optimizer.update(gradient, inner, params)
        return (optax.apply_updates(params, updates), inner), value

    keys = jax.random.split(jax.random.key(0), 3)
    params = {k: jax.random.normal(key, (48, 48)) / 7 for k, key in zip("abc", keys, strict=True)}
    state, x = (params, optimizer.init(params)), jax.random.normal(keys[0], (16, 48))
    run, wanted = soapjax.soap_shard(step, topology="cpu8", pipeline="1f1b", stages=2, microbatches=4, proposals=5), state
    for _ in range(3):
        old, (state, value) = state, run(jax.tree.map(jnp.copy, state) if state is wanted else state, x)
        wanted, expected = jax.jit(step)(wanted, x)
        np.testing.assert_allclose(value, expected, rtol=1e-4)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old) if leaf.ndim)
    found = inspect_stream(run._last.streamed).memory_bytes
    for i, stage in enumerate(run.plan.pipeline.stages):
        # With the norm the gradients' sums and what the first round makes of them lie there at a time.
        assert max(found[d] for d in stage.devices) <= 1.2 * run.plan.prediction.memory_parts_bytes[f"stage {i}"]
