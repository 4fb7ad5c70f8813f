"""What people do with a train step in their first hour: each does under `soap_shard` what it does under `jax.jit`."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training import train_state

from soapjax import soap_shard

pytestmark = pytest.mark.usefixtures("no_search")
X = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 4, 16).astype(np.int32)
BATCH = {"x": X, "y": Y}
MODEL = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(4)])
ADAM = optax.adam(1e-2)


def fresh(tx=ADAM, dtype=None):
    params = MODEL.init(jax.random.key(0), X[:1])["params"]
    if dtype is not None:
        params = jax.tree.map(lambda x: x.astype(dtype), params)
    return train_state.TrainState.create(apply_fn=MODEL.apply, params=params, tx=tx)


def step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["y"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def both(fn, state, *more, calls=2, tolerance=1e-5):
    """The metrics of a few calls, each fed with its own state, under `soap_shard` as under `jax.jit`."""
    planned, plain = soap_shard(fn), jax.jit(fn)
    ours = theirs = state
    for _ in range(calls):
        ours, found = planned(ours, *more)
        theirs, expected = plain(theirs, *more)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=tolerance)
    return planned, ours


def test_a_last_batch_that_is_smaller():
    planned, state = both(step, fresh(), BATCH, calls=1)
    for size in (10, 7):
        state, metrics = planned(state, {"x": X[:size], "y": Y[:size]})
        assert np.isfinite(metrics["loss"])


@pytest.mark.parametrize("batch", [
    {"x": (X * 10).astype(np.int8), "y": Y}, {"x": X.astype(np.float64), "y": Y.astype(np.int64)}, {"x": [X], "y": Y, "mask": None},
], ids=["int8", "float64", "list and None"])  # fmt: skip
def test_batches_of_other_kinds(batch):
    def other(state, batch):
        x = batch["x"][0] if isinstance(batch["x"], list) else batch["x"]
        return step(state, {"x": jnp.asarray(x, jnp.float32) * 0.1, "y": batch["y"]})

    both(other, fresh(), batch)


def test_parameters_in_bfloat16():
    both(step, fresh(dtype=jnp.bfloat16), BATCH, tolerance=3e-2)


def test_gradients_that_are_accumulated_over_calls():
    both(step, fresh(optax.MultiSteps(optax.adam(1e-2), 2)), BATCH, calls=4)


def test_a_state_whose_dtypes_change():
    def other(state, batch):
        state, metrics = step(state, batch)
        return state.replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params)), metrics

    planned = soap_shard(other)
    state, _ = planned(fresh(), BATCH)
    assert state.params["layers_0"]["kernel"].dtype == jnp.bfloat16
    assert np.isfinite(planned(state, BATCH)[1]["loss"])


def test_python_scalars_in_and_out():
    def other(state, batch, rate):
        state, metrics = step(state, batch)
        return state, {**metrics, "rate": rate, "n": 5, "name": None}

    planned = soap_shard(other)
    state, first = planned(fresh(), BATCH, 0.1)
    state, second = planned(state, BATCH, 0.2)
    assert (float(first["rate"]), int(second["n"]), second["name"]) == (pytest.approx(0.1), 5, None)
    assert float(second["rate"]) == pytest.approx(0.2)


def test_a_step_that_returns_no_state():
    loss = soap_shard(lambda state, batch: step(state, batch)[1])(fresh(), BATCH)["loss"]
    np.testing.assert_allclose(loss, jax.jit(step)(fresh(), BATCH)[1]["loss"], rtol=1e-5)


def test_what_is_printed_from_within(capfd):
    def other(state, batch):
        state, metrics = step(state, batch)
        jax.debug.print("the loss is {loss}", loss=metrics["loss"])
        return state, metrics

    soap_shard(other)(fresh(), BATCH)
    jax.effects_barrier()
    assert "the loss is" in capfd.readouterr().out


def test_keys_of_both_kinds_and_one_per_example():
    def noisy(state, batch, key):
        return step(state, {**batch, "x": batch["x"] + jax.random.normal(key, batch["x"].shape)})

    def per_example(state, batch, keys):
        noise = jax.vmap(lambda k: jax.random.normal(k, batch["x"].shape[1:]))(keys)
        return step(state, {**batch, "x": batch["x"] + noise})

    both(noisy, fresh(), BATCH, jax.random.key(0))
    both(noisy, fresh(), BATCH, jax.random.PRNGKey(0))
    both(per_example, fresh(), BATCH, jax.random.split(jax.random.key(0), len(X)))


def test_a_step_that_is_jitted_already():
    both(jax.jit(step, donate_argnums=0), jax.tree.map(jnp.copy, fresh()), BATCH, calls=1)


def test_state_in_several_arguments_and_another_order():
    def other(key, params, opt, batch):
        grads = jax.grad(lambda p: (MODEL.apply({"params": p}, batch["x"]) ** 2).mean())(params)
        updates, opt = ADAM.update(grads, opt, params)
        return optax.apply_updates(params, updates), jax.random.split(key)[0], opt, optax.tree.norm(grads)

    params = fresh().params
    planned = soap_shard(other)
    new, key, opt, norm = planned(jax.random.PRNGKey(0), params, ADAM.init(params), BATCH)
    kernel, moment = new["layers_0"]["kernel"], opt[0].mu["layers_0"]["kernel"]
    assert kernel.sharding == moment.sharding and not kernel.sharding.is_fully_replicated
    assert np.isfinite(planned(key, new, opt, BATCH)[3])


def test_sharded_initialisation_and_a_checkpoint():
    checkpoint = pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")
    shapes = jax.eval_shape(fresh)
    planned = soap_shard(step).prepare(shapes, jax.eval_shape(lambda: BATCH))
    layouts = planned.shardings()[0]
    state, before = planned(jax.jit(fresh, out_shardings=layouts)(), BATCH)
    kernel = state.params["layers_0"]["kernel"]
    assert not kernel.sharding.is_fully_replicated
    with tempfile.TemporaryDirectory() as folder, checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "state", state)
        checkpointer.wait_until_finished()
        target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, layouts)
        restored = checkpointer.restore(Path(folder) / "state", target)
    assert restored.params["layers_0"]["kernel"].sharding == kernel.sharding
    np.testing.assert_array_equal(planned(restored, BATCH)[1]["loss"], planned(state, BATCH)[1]["loss"])
    assert float(before["loss"]) > 0


def test_the_program_has_readable_names():
    text = soap_shard(step).lower(fresh(), BATCH).compile().as_text()
    assert "layers_0" in text and "layers_2" in text
