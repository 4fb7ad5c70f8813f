"""Steps that users write: every one builds, and computes the single-device numbers under any strategy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import family
from flax import nnx
from jax import lax
from planned import Case, data_parallel

CASES = {}


def case(*, tolerance=1e-3, devices=8, slow=False):
    """Registers `make() -> (fn, args)`; `tolerance` is that of the function's own precision."""

    def add(make):
        CASES[make.__name__] = (make, tolerance, devices, slow)
        return make

    return add


def normal(seed, *shape, scale=0.3):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32)


def integers(seed, high, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(high, size=shape), jnp.int32)


def sgd_step(loss_fn):
    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss, grads

    return step


def optax_step(loss_fn, optimizer):
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt_state}, loss

    return step


def optax_state(params, optimizer):
    return {"params": params, "opt": optimizer.init(params)}


def mlp_params(features=8, width=16, classes=4):
    return {"w0": normal(0, features, width), "b0": normal(1, width), "w1": normal(2, width, classes), "b1": normal(3, classes)}


def mlp_logits(params, x):
    return jax.nn.relu(x @ params["w0"] + params["b0"]) @ params["w1"] + params["b1"]


def mlp_loss(params, batch):
    x, y = batch
    log_p = jax.nn.log_softmax(mlp_logits(params, x))
    return -jnp.mean(jnp.take_along_axis(log_p, y[:, None], 1))


def mlp_batch(batch=8, features=8, classes=4):
    return normal(4, batch, features), integers(5, classes, batch)


@case(slow=True)
def plain_mlp():
    return sgd_step(mlp_loss), (mlp_params(), mlp_batch())


@case()
def batch_of_ten():
    return sgd_step(mlp_loss), (mlp_params(6, 12, 5), mlp_batch(10, 6, 5))


@case(devices=7)
def seven_devices():
    return sgd_step(mlp_loss), (mlp_params(7, 14, 3), mlp_batch(7, 7, 3))


@case(devices=6, slow=True)
def six_devices():
    return sgd_step(mlp_loss), (mlp_params(6, 12, 3), mlp_batch(9, 6, 3))


@case(slow=True)
def clipped_by_global_norm():
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    return optax_step(mlp_loss, optimizer), (optax_state(mlp_params(), optimizer), mlp_batch())


@case(slow=True)
def adafactor():
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=4)
    return optax_step(mlp_loss, optimizer), (optax_state(mlp_params(), optimizer), mlp_batch())


@case(slow=True)
def lion():
    optimizer = optax.lion(1e-2)
    return optax_step(mlp_loss, optimizer), (optax_state(mlp_params(), optimizer), mlp_batch())


@case(tolerance=0.1)
def bfloat16():
    def loss(params, batch):
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        logits = mlp_logits(low, batch[0].astype(jnp.bfloat16)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    return sgd_step(loss), (mlp_params(), mlp_batch())


@case()
def lstm():
    """The weights are constants of the scan."""

    def cell(params, carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ params["wx"] + h @ params["wh"] + params["b"], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    def loss(params, batch):
        start = jnp.zeros((batch.shape[1], 4))
        _, hs = lax.scan(functools.partial(cell, params), (start, start), batch)
        return jnp.mean(hs**2)

    params = {"wx": normal(0, 4, 16), "wh": normal(1, 4, 16), "b": normal(2, 16)}
    return sgd_step(loss), (params, normal(3, 3, 8, 4))


@case(slow=True)
def gru_reversed():
    def cell(params, h, x):
        r, z = jnp.split(jax.nn.sigmoid(x @ params["wx"] + h @ params["wh"]), 2, axis=-1)
        h = z * h + (1 - z) * jnp.tanh((r * h) @ params["wn"])
        return h, h

    def loss(params, batch):
        x, h = batch
        last, hs = lax.scan(functools.partial(cell, params), h, x, reverse=True)
        return jnp.mean(hs**2) + jnp.sum(last)

    params = {"wx": normal(0, 4, 16), "wh": normal(1, 8, 16), "wn": normal(2, 8, 8)}
    return sgd_step(loss), (params, (normal(3, 3, 8, 4), normal(4, 8, 8)))


@case(slow=True)
def gradient_accumulation():
    def step(params, batch):
        def add(total, one):
            loss, grads = jax.value_and_grad(mlp_loss)(params, one)
            return jax.tree.map(jnp.add, total, grads), loss

        grads, losses = lax.scan(add, jax.tree.map(jnp.zeros_like, params), batch)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), losses.mean()

    x, y = mlp_batch(16)
    return step, (mlp_params(), (x.reshape(2, 8, 8), y.reshape(2, 8)))


@case()
def while_and_cond():
    def loss(params, batch):
        x, y = batch
        return jnp.mean((mlp_logits(params, x) - y) ** 2)

    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        # Halve the step until it is short enough; then leave the largest steps out.
        size = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        rate, _ = lax.while_loop(lambda c: c[0] * c[1] > 0.05, lambda c: (c[0] / 2, c[1]), (jnp.float32(1.0), size))
        grads = lax.cond(value > 0.1, lambda g: g, lambda g: jax.tree.map(jnp.zeros_like, g), grads)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), value

    return step, (mlp_params(), (normal(4, 8, 8), normal(5, 8, 4)))


@case()
def tied_embeddings():
    def loss(params, batch):
        h = jnp.tanh(params["table"][batch] @ params["mix"])
        logits = h @ params["table"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch[:, 1:]).mean()

    return sgd_step(loss), ({"table": normal(0, 12, 8), "mix": normal(1, 8, 8)}, integers(2, 12, 8, 4))


def conv(x, w, *, stride=1, groups=1, padding="SAME", dilation=1):
    return lax.conv_general_dilated(
        x, w, (stride, stride), padding, rhs_dilation=(dilation, dilation), feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip


@case(slow=True)
def depthwise_and_grouped_conv():
    def loss(params, x):
        x = jax.nn.relu(conv(x, params["depthwise"], groups=8))
        x = jax.nn.relu(conv(x, params["grouped"], groups=2, stride=2))
        return jnp.mean(conv(x, params["point"]) ** 2)

    params = {"depthwise": normal(0, 3, 3, 1, 8), "grouped": normal(1, 3, 3, 4, 8), "point": normal(2, 1, 1, 8, 4)}
    return sgd_step(loss), (params, normal(3, 4, 8, 8, 8))


@case(slow=True)
def strided_and_dilated_conv():
    def loss(params, x):
        x = jax.nn.gelu(conv(x, params["strided"], stride=2))
        x = jax.nn.gelu(conv(x, params["dilated"], dilation=2))
        return jnp.mean(conv(x, params["valid"], padding="VALID") ** 2)

    params = {"strided": normal(0, 3, 3, 4, 8), "dilated": normal(1, 3, 3, 8, 8), "valid": normal(2, 4, 4, 8, 4)}
    return sgd_step(loss), (params, normal(3, 4, 8, 8, 4))


@case(slow=True)
def batch_norm_and_pooling():
    def loss(params, stats, x):
        x = conv(x, params["kernel"])
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        x = (x - mean) * lax.rsqrt(var + 1e-3) * params["scale"] + params["bias"]
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        new = {"mean": 0.9 * stats["mean"] + 0.1 * mean, "var": 0.9 * stats["var"] + 0.1 * var}
        return jnp.mean(jnp.abs(x) ** 3), new

    def step(params, stats, x):
        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params, stats, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), stats, value

    params = {"kernel": normal(0, 3, 3, 4, 8), "scale": normal(1, 8) + 1, "bias": normal(2, 8)}
    return step, (params, {"mean": jnp.zeros(8), "var": jnp.ones(8)}, normal(3, 4, 8, 8, 4))


def dropout_loss(params, x, key):
    h = jax.nn.relu(x @ params["w0"])
    keep = jax.random.bernoulli(key, 0.7, h.shape)
    return jnp.mean((jnp.where(keep, h / 0.7, 0) @ params["w1"]) ** 2)


def dropout_step(state, x):
    key, now = jax.random.split(state["key"])
    value, grads = jax.value_and_grad(dropout_loss)(state["params"], x, now)
    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads), "key": key}, value


@case(slow=True)
def dropout_with_typed_key():
    return dropout_step, ({"params": mlp_params(), "key": jax.random.key(0)}, normal(4, 8, 8))


@case(slow=True)
def dropout_with_raw_key():
    return dropout_step, ({"params": mlp_params(), "key": jax.random.PRNGKey(0)}, normal(4, 8, 8))


@case()
def mixture_of_experts():
    """Top-2 routing by one-hot products; the experts' batch dim is that of a dot."""

    def loss(params, x):
        gates = jax.nn.softmax(x @ params["router"])
        value, chosen = lax.top_k(gates, 2)
        mask = jax.nn.one_hot(chosen, 4) * value[..., None]
        combine = mask.sum(1)
        per_expert = jnp.einsum("be,bd->ebd", combine, x)
        h = jnp.tanh(jnp.einsum("ebd,edh->ebh", per_expert, params["up"]))
        return jnp.mean(jnp.einsum("ebh,ehd->bd", h, params["down"]) ** 2) + jnp.mean(jnp.sort(gates, axis=-1)[:, -1])

    params = {"router": normal(0, 8, 4), "up": normal(1, 4, 8, 16), "down": normal(2, 4, 16, 8)}
    return sgd_step(loss), (params, normal(3, 8, 8, scale=1.0))


@case(slow=True)
def nnx_step():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up, self.norm, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.relu(self.norm(self.up(x))))

    graphdef, params = nnx.split(Net(nnx.Rngs(0)))

    def loss(params, batch):
        logits = nnx.merge(graphdef, params)(batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    return sgd_step(loss), (params, mlp_batch())


@jax.custom_vjp
def clipped_gradient(x):
    return jnp.sin(x)


clipped_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g * jnp.cos(x), -0.01, 0.01),))


@jax.custom_jvp
def softplus(x):
    return jnp.logaddexp(x, 0.0)


softplus.defjvp(lambda primals, tangents: (softplus(*primals), jax.nn.sigmoid(primals[0]) * tangents[0]))


@case(slow=True)
def custom_rules():
    def loss(params, x):
        h = clipped_gradient(x @ params["w0"] + params["b0"])
        return jnp.mean(softplus(h @ params["w1"] + params["b1"]))

    return sgd_step(loss), (mlp_params(), normal(4, 8, 8))


@case(slow=True)
def rematerialised():
    def loss(params, batch):
        block = jax.checkpoint(lambda w, x: jnp.tanh(jax.nn.gelu(x @ w["up"]) @ w["down"]))
        x = batch
        for w in params:
            x = x + block(w, x)
        return jnp.mean(x**2)

    params = [{"up": normal(2 * i, 8, 16), "down": normal(2 * i + 1, 16, 8)} for i in range(2)]
    return sgd_step(loss), (params, normal(9, 8, 8))


@case(slow=True)
def attention():
    """Batched dots, masking, cumulative sums and concatenation."""

    def loss(params, x):
        q, k, v = (jnp.einsum("btd,dhe->bhte", x, params[n]) for n in "qkv")
        scores = jnp.einsum("bhte,bhse->bhts", q, k)
        scores = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), scores, -1e9)
        out = jnp.einsum("bhts,bhse->bthe", jax.nn.softmax(scores), v).reshape(x.shape[0], 4, 8)
        both = jnp.concatenate([out, jnp.cumsum(x, axis=1)], axis=-1)
        return jnp.mean((both @ params["o"]) ** 2)

    params = {n: normal(i, 8, 4, 2) for i, n in enumerate("qkv")} | {"o": normal(5, 16, 8)}
    return sgd_step(loss), (params, normal(6, 4, 4, 8))


@case(slow=True)
def fourier_and_slices():
    """FFT, dynamic slices and updates, reversal, padding, sorting with a payload."""

    def loss(params, x):
        x = x @ params["mix"]
        spectrum = jnp.abs(jnp.fft.rfft(x, axis=-1))
        window = lax.dynamic_slice(x, (0, jnp.argmax(x[0]) % 4), (x.shape[0], 4))
        x = lax.dynamic_update_slice(x, jnp.flip(window, 1), (0, 2))
        order = jnp.argsort(x, axis=-1)
        return jnp.mean(jnp.take_along_axis(x, order, -1) * jnp.arange(8.0)) + jnp.mean(jnp.pad(spectrum, ((0, 0), (1, 2))))

    return sgd_step(loss), ({"mix": normal(0, 8, 8)}, normal(1, 8, 8))


@case(slow=True)
def no_gradient_at_all():
    def evaluate(params, x):
        return jax.nn.softmax(mlp_logits(params, x)).argmax(-1), mlp_logits(params, x)

    return evaluate, (mlp_params(), normal(4, 8, 8))


def marked(names):
    return family(names, slow=[n for n in names if CASES[n][3]])


@pytest.mark.parametrize("name", marked(CASES))
def test_strategies_compute_the_single_device_numbers(name):
    make, tolerance, devices, _ = CASES[name]
    case = Case(*make(), devices=devices)
    case.check_plain(tolerance)
    rng = np.random.default_rng(len(name))
    for strategy in (data_parallel(case.space), case.space.random(rng), case.space.random(rng)):
        case.check(strategy)
