"""Powers of the batch, against what duplicating a batch really does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import soapjax
from soapjax.graph.batch.batch_scaling import scalings

FACTOR = 4


def case(fn, *, size=4):
    def traced(n):
        x = jax.ShapeDtypeStruct((n, 6), "float32")
        return soapjax.trace(fn, jax.ShapeDtypeStruct((6, 3), "float32"), x).program

    small, large = traced(size), traced(FACTOR * size)
    return small, scalings(small, large, FACTOR)


FUNCTIONS = {
    "mean": lambda w, x: jnp.tanh(x @ w).mean(),
    "sum": lambda w, x: jnp.tanh(x @ w).sum(),
    "mean of squares": lambda w, x: ((x @ w) ** 2).mean(axis=0).sum(),
    "root": lambda w, x: jnp.sqrt(((x @ w) ** 2).sum()),
    "normalised": lambda w, x: (((x @ w) - (x @ w).mean(0)) / jnp.sqrt((x @ w).var(0) + 1e-5)).sum(axis=1).mean(),
    "with decay": lambda w, x: jax.nn.softmax(x @ w).mean() + 0.1 * (w**2).sum(),
    "computed again": lambda w, x: jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(w, x).mean(),
    "a choice": lambda w, x: jax.lax.cond(w.sum() > 0, lambda: jnp.tanh(x @ w).mean(), lambda: 2 * (x @ w).mean()),
    "a loop": lambda w, x: jax.lax.scan(lambda c, r: (c + (x @ r).mean(), None), 0.0, w.T)[0],
}


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_powers_are_those_of_a_repeated_batch(name):
    fn = FUNCTIONS[name]
    w, x = jax.random.normal(jax.random.key(0), (6, 3)), jax.random.normal(jax.random.key(1), (4, 6))
    for f in (fn, lambda w, x: jax.grad(fn)(w, x)):
        program, found = case(f)
        scaling = found[program.outputs[0]]
        assert scaling.power is not None and not scaling.is_ratio
        run = jax.jit(f)
        once, repeated = run(w, x), run(w, np.concatenate([x] * FACTOR))
        np.testing.assert_allclose(repeated, FACTOR**scaling.power * once, rtol=1e-4, atol=1e-5)


def test_what_is_neither_mean_nor_sum():
    program, found = case(lambda w, x: jnp.tanh(x @ w).sum() + (w**2).sum())
    assert found[program.outputs[0]].power is None
    program, found = case(lambda w, x: jnp.log((x @ w).sum()))
    assert found[program.outputs[0]].power is None
    program, found = case(lambda w, x: (x @ w).sum() / (x[:, 0] > 0).sum())
    assert found[program.outputs[0]].is_ratio
    program, found = case(jax.grad(lambda w, x: (x @ w).max()))  # shared among as many as are the largest
    assert found[program.outputs[0]].is_ratio
    small = soapjax.trace(lambda x: x + 1, jnp.ones(3)).program
    assert scalings(small, soapjax.trace(lambda x: x * 2 + 1, jnp.ones(3)).program, 2) == {}


def errors(w, x):
    return (jnp.tanh(x @ w) - 0.3) ** 2


def weights(x):
    return (x[:, :1] > -0.5).astype(x.dtype) * jnp.array([1.0, 0.5, 0.0])


LOSSES = {  # whether the mean over parts of the batch is that of the whole batch
    "mean": (lambda w, x: errors(w, x).mean(), True),
    "weighted, over a constant": (lambda w, x: (errors(w, x) * weights(x)).sum() / x.size, True),
    "weighted mean": (lambda w, x: (errors(w, x) * weights(x)).sum() / weights(x).sum(), False),
    "kept from zero": (lambda w, x: (errors(w, x) * weights(x)).sum() / (weights(x).sum() + 1e-6), False),
    "bounded": (lambda w, x: (errors(w, x) * weights(x)).sum() / jnp.maximum(weights(x).sum(), 1.0), False),
    "clipped": (lambda w, x: (errors(w, x) * weights(x)).sum() / jnp.clip(weights(x).sum(), 1.0), False),
    "chosen": (lambda w, x: (errors(w, x) * weights(x)).sum() / jnp.where(weights(x).sum() > 0, weights(x).sum(), 1.0), False),
    "inverted": (lambda w, x: (errors(w, x) * weights(x)).sum() * (2 * weights(x).sum() + 1) ** -1, False),
    "of means": (lambda w, x: (errors(w, x) * weights(x)).mean() / weights(x).mean(), False),
    "overlap of classes": (lambda w, x: (1 - errors(w, x).sum(0) / (jax.nn.sigmoid(x @ w).sum(0) + 1e-5)).mean(), False),
    "explained variance": (lambda w, x: errors(w, x).sum() / ((x - x.mean(0)) ** 2).sum(), False),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_are_divided_by_data_are_known(name):
    loss, adds_up = LOSSES[name]
    w, x = jax.random.normal(jax.random.key(0), (6, 3)), jax.random.normal(jax.random.key(1), (16, 6))
    whole, parts = jax.grad(loss)(w, x), jnp.stack([jax.grad(loss)(w, part) for part in jnp.split(x, 4)]).mean(0)
    assert np.allclose(whole, parts, rtol=1e-4, atol=1e-6) == adds_up
    program, found = case(jax.grad(loss))
    assert found[program.outputs[0]].is_ratio == (not adds_up)


def test_moments_of_a_batch_are_no_weighted_mean():
    """Norms over the batch: what their derivatives divide, a root by what it is the root of, say, is no loss."""
    import flax.linen as nn

    model = nn.Sequential([nn.Dense(3), nn.BatchNorm(use_running_average=False)])
    state = model.init(jax.random.key(0), jnp.ones((4, 6)))

    def loss(w, x):
        params = {"layers_0": {"kernel": w, "bias": jnp.zeros(3)}, "layers_1": state["params"]["layers_1"]}
        return errors(jnp.eye(3), model.apply({"params": params, **{k: v for k, v in state.items() if k != "params"}}, x,
                                              mutable=["batch_stats"])[0]).mean()  # fmt: skip

    for fn in (loss, lambda w, x: jnp.sqrt((errors(w, x) ** 2).mean()), lambda w, x: jnp.cbrt(errors(w, x).mean() + 1)):
        program, found = case(jax.grad(fn))
        assert not found[program.outputs[0]].is_ratio


def batch_norm(h, w):
    mean = h.mean(0)
    return (h - mean) * jax.lax.rsqrt(((h - mean) ** 2).mean(0) + 1e-5)


def by_hand(h, w):
    scale = jnp.sqrt(h.var(0) + 1e-5)
    return h / scale - h.mean(0) / scale


def weight_norm(h, w):
    return h * (w / jnp.linalg.norm(w, axis=0)).sum()


def weight_standard(h, w):
    return h * ((w - w.mean(0)) / jnp.sqrt(w.var(0) + 1e-4)).sum()


def twice(layer):
    """In a loop over layers, which keeps the norms of weights beside activations."""
    return lambda w, x: jax.lax.scan(lambda h, w: (layer(w, h), None), layer(w, x), jnp.stack([w[:3], w[3:]]))[0]


def chosen(layer):
    return lambda w, x: jax.lax.cond(w.sum() > 0, layer, lambda w, x: 2 * layer(w, x), w, x)


@pytest.mark.parametrize("layer", [batch_norm, by_hand, weight_norm, weight_standard])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, twice, chosen])
def test_norms_of_layers_are_no_weighted_mean(layer, wrap):
    """Also where they are computed again, behind one barrier for weights and activations, or inside a loop or a choice."""

    def loss(w, x):
        return errors(jnp.eye(3), wrap(lambda w, x: jnp.tanh(layer(x @ w, w)))(w, x)).mean()

    for fn in (jax.grad(loss), lambda w, x: jax.value_and_grad(loss)(w, x)[::-1]):
        program, found = case(fn)
        assert not found[program.outputs[0]].is_ratio


def test_what_is_largest_adds_up_to_nothing():
    def history(w, x):
        return jnp.roll(w.ravel(), 1).at[0].set(jnp.abs(x).max())

    program, found = case(history)
    assert found[program.outputs[0]].extreme == "made"
    for fn in (lambda w, x: jnp.abs(x @ w).max(1).mean(), lambda w, x: (x @ w).mean() * jnp.abs(w).max()):
        program, found = case(fn)
        assert not found[program.outputs[0]].extreme
    kinds = {"max": lambda w, x: jnp.abs(x).max(1).max(), "min": lambda w, x: (x @ w).min(), "made": lambda w, x: -x.max()}
    for kind, fn in kinds.items():
        program, found = case(fn)
        assert found[program.outputs[0]].extreme == kind


def test_what_is_stacked_grows_as_its_parts():
    for join in (jnp.stack, jnp.concatenate):
        program, found = case(lambda w, x, join=join: join([(x @ w > 0).sum(0), (x @ w < 0).sum(0)]))
        assert found[program.outputs[0]].power == 1.0
