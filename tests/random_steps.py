"""Random training steps: a forward pass of random layers under a random way of training it.

What they have in common with public code: masks and keys with several readers, several gradients, reads of updated values,
gradients inside the loss, loops of updates, scalars, empty arrays, batches that are joined, shuffled and cut.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BATCH, WIDTH, TIMES = 16, 8, 4


def _weight(rng, p, name):
    p[name] = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) * 0.3


# Layers: make(rng, params, name) -> apply(params, h, context); h is [B, WIDTH], context has mask [B], key, tokens [B, TIMES].
def dense(rng, p, name):
    _weight(rng, p, name)
    return lambda q, h, c: jnp.tanh(h @ q[name])


def norm(rng, p, name):
    p[name] = np.ones(WIDTH, np.float32)
    return lambda q, h, c: (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-3) * q[name]


def scale(rng, p, name):
    p[name] = np.float32(0.3)
    return lambda q, h, c: h * jnp.exp(q[name])


def masked_mean(rng, p, name):
    return lambda q, h, c: h - (h * c["mask"][:, None]).sum(0) / jnp.maximum(c["mask"].sum(), 1)


def noise(rng, p, name):
    return lambda q, h, c: h + 0.1 * jax.random.normal(c["key"], h.shape)


def embedding(rng, p, name):
    p[name] = rng.standard_normal((6, WIDTH)).astype(np.float32)
    return lambda q, h, c: h + (q[name][c["tokens"]] * (c["tokens"] != 0)[..., None]).mean(1)


def attention(rng, p, name):
    _weight(rng, p, name + "q")
    _weight(rng, p, name + "k")

    def apply(q, h, c):
        x = h[:, None] + jnp.arange(TIMES, dtype=jnp.float32)[:, None]
        scores = jnp.einsum("btd,bsd->bts", x @ q[name + "q"], x @ q[name + "k"])
        scores = jnp.where((c["tokens"] != 0)[:, None], scores, -1e9)
        return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores / 8), x).mean(1)

    return apply


def gram(rng, p, name):
    return lambda q, h, c: jax.nn.softmax(h @ h.T / WIDTH) @ h


def recurrent(rng, p, name):
    _weight(rng, p, name)
    return lambda q, h, c: lax.scan(lambda a, t: (jnp.tanh(a @ q[name] + t), a.sum()), h, jnp.ones((3, WIDTH)))[0]


def stacked(rng, p, name):
    p[name] = rng.standard_normal((3, WIDTH, WIDTH)).astype(np.float32) * 0.3

    @jax.checkpoint
    def layer(h, w):
        return jnp.tanh(h @ w) + h, None

    return lambda q, h, c: lax.scan(layer, h, q[name])[0]


def iterated(rng, p, name):
    return lambda q, h, c: lax.fori_loop(0, 3, lambda i, a: 0.9 * jnp.sin(a), h)


def chosen(rng, p, name):
    return lambda q, h, c: lax.cond(c["mask"].sum() > 3, jnp.tanh, lambda a: a * 0.5, h)


def shuffled(rng, p, name):
    return lambda q, h, c: h[jax.random.permutation(c["key"], h.shape[0])]


def joined(rng, p, name):
    def apply(q, h, c):
        both = jnp.tanh(jnp.concatenate([h, h + 1]))
        return both[: h.shape[0]] - both[h.shape[0] :].mean(0)

    return apply


def rolled(rng, p, name):
    return lambda q, h, c: h + 0.5 * jnp.roll(h, 1, axis=0) + jnp.cumsum(h, -1) * 0.1


def swapped(rng, p, name):
    return lambda q, h, c: sum(lax.fori_loop(0, 3, lambda i, ab: (ab[1], ab[0] * 0.5), (h, h + 1)))


def grouped(rng, p, name):
    def apply(q, h, c):
        groups = h.reshape(min(4, len(h)), -1, WIDTH)
        return (groups - groups.mean(1, keepdims=True)).reshape(-1, WIDTH) + h

    return apply


def sorted_features(rng, p, name):
    return lambda q, h, c: jnp.sort(h, -1) + lax.top_k(h, 2)[0].sum(-1, keepdims=True)


def empty(rng, p, name):
    p[name] = np.zeros((0, WIDTH), np.float32)
    return lambda q, h, c: h + q[name].sum(0) + jnp.concatenate([h[:, :0], h], -1)


def across(rng, p, name):
    mean = jax.vmap(lambda row: row - lax.pmean(row, "batch"), axis_name="batch")
    return lambda q, h, c: mean(h) + jax.device_put(h)


def drawn(rng, p, name):
    def apply(q, h, c):
        keys = jax.random.split(jax.random.fold_in(c["key"], 1), len(h))
        return h + 0.1 * jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(keys)

    return apply


def settled(rng, p, name):
    """Every row for as long as it changes; no gradient goes through a loop of unknown length."""

    def one(row):
        def moves(carry):
            return (jnp.abs(carry[0] - carry[1]).max() > 0.05) & (carry[2] < 20)

        return lax.while_loop(moves, lambda carry: (jnp.cos(carry[0]) * 0.7, carry[0], carry[2] + 1), (row, row + 1, 0))[0]

    return lambda q, h, c: h + jax.vmap(one)(lax.stop_gradient(h))


def whitened(rng, p, name):
    """A solve with a matrix of every row."""

    def one(row):
        parts = row.reshape(2, -1)
        lower = jnp.linalg.cholesky(parts @ parts.T + jnp.eye(2))
        return lax.linalg.triangular_solve(lower, parts, left_side=True, lower=True).reshape(-1)

    return lambda q, h, c: jax.vmap(one)(h)


LAYERS = (
    dense, dense, norm, scale, masked_mean, noise, drawn, embedding, attention, gram, recurrent, stacked, iterated, settled, chosen,
    whitened, shuffled, joined, rolled, swapped, grouped, sorted_features, empty, across,
)  # fmt: skip


def network(rng, num_layers):
    """(parameters, loss(parameters, x, context)): a random stack that ends in a product."""
    params = {}
    layers = [LAYERS[rng.integers(len(LAYERS))](rng, params, f"layer{i}") for i in range(num_layers)]
    _weight(rng, params, "head")

    def loss(q, x, c):
        h = x
        for layer in layers:
            h = layer(q, h, c)
        error = ((h @ q["head"] - 1) ** 2).mean(-1)
        return (error * c["mask"]).sum() / jnp.maximum(c["mask"].sum(), 1)

    return params, loss


# Updates: (state, gradient, parameters) -> (parameters, state).
def sgd(s, g, p):
    return jax.tree.map(lambda a, b: a - 0.1 * b, p, g), s


def momentum(s, g, p):
    s = jax.tree.map(lambda m, b: 0.9 * m + b, s, g)
    return jax.tree.map(lambda a, m: a - 0.05 * m, p, s), s


def clipped(s, g, p):
    size = jnp.sqrt(sum(jnp.vdot(a, a) for a in jax.tree.leaves(g)))
    return momentum(s, jax.tree.map(lambda a: a / jnp.maximum(size, 1), g), p)


def orthogonal(s, g, p):
    """Momentum through two Newton-Schulz steps where it is a matrix, as Muon does."""
    s = jax.tree.map(lambda m, b: 0.9 * m + b, s, g)

    def turn(m):
        if m.ndim != 2 or 0 in m.shape:
            return m
        m = m / (jnp.linalg.norm(m) + 1e-3)
        for _ in range(2):
            m = 1.5 * m - 0.5 * m @ (m.T @ m)
        return m

    return jax.tree.map(lambda a, m: a - 0.05 * turn(m), p, s), s


UPDATES = (sgd, momentum, clipped, orthogonal)


# Ways of training: make(loss, update) -> step(state, x, context) -> (state, metrics).
def plain(loss, update):
    def step(state, x, c):
        value, g = jax.value_and_grad(loss)(state["p"], x, c)
        p, m = update(state["m"], g, state["p"])
        return {"p": p, "m": m}, value

    return step


def twice(loss, update):
    once = plain(loss, update)

    def step(state, x, c):
        state, first = once(state, x, c)
        state, second = once(state, x * 0.5, c)
        return state, (first, second)

    return step


def scanned(loss, update):
    once = plain(loss, update)

    def step(state, x, c):
        parts = (x.reshape(2, -1, WIDTH), c["mask"].reshape(2, -1), c["tokens"].reshape(2, -1, TIMES))
        return lax.scan(lambda s, part: once(s, part[0], {**c, "mask": part[1], "tokens": part[2]}), state, parts)

    return step


def accumulated(loss, update):
    def step(state, x, c):
        def cut(a, i):
            return lax.dynamic_slice_in_dim(a, i * (BATCH // 2), BATCH // 2)

        def part(i):
            return jax.grad(loss)(state["p"], cut(x, i), {**c, "mask": cut(c["mask"], i), "tokens": cut(c["tokens"], i)})

        g = lax.fori_loop(1, 2, lambda i, g: jax.tree.map(jnp.add, g, part(i)), part(0))
        p, m = update(state["m"], g, state["p"])
        return {"p": p, "m": m}, jax.tree.map(lambda a: (a**2).sum(), g)

    return step


def evaluated(loss, update):
    once = plain(loss, update)

    def step(state, x, c):
        new, value = once(state, x, c)
        kept = lax.cond(jnp.isfinite(value), lambda: new, lambda: state)
        return kept, {"before": value, "after": loss(new["p"], x, c)}

    return step


def sharpness(loss, update):
    def step(state, x, c):
        g = jax.grad(loss)(state["p"], x, c)
        value, g = jax.value_and_grad(loss)(jax.tree.map(lambda a, b: a + 0.05 * b, state["p"], g), x, c)
        p, m = update(state["m"], g, state["p"])
        return {"p": p, "m": m}, value

    return step


def meta(loss, update):
    def outer(p, x, c):
        g = jax.grad(loss)(p, x, c)
        return loss(jax.tree.map(lambda a, b: a - 0.1 * b, p, g), x + 1, c)

    return plain(outer, update)


def penalised(loss, update):
    def total(p, x, c):
        g = jax.grad(loss, 1)(p, x, c)
        return loss(p, x, c) + (jnp.sqrt((g**2).sum(-1) + 1e-6) - 1).mean() ** 2

    return plain(total, update)


def curved(loss, update):
    def step(state, x, c):
        value, g = jax.value_and_grad(loss)(state["p"], x, c)
        h = jax.jvp(lambda p: jax.grad(loss)(p, x, c), (state["p"],), (g,))[1]
        p, m = update(state["m"], jax.tree.map(lambda a, b: a + 0.1 * b, g, h), state["p"])
        return {"p": p, "m": m}, value

    return step


def adversarial(loss, update):
    once = plain(loss, update)

    def step(state, x, c):
        def ascend(i, d):
            return d + 0.01 * jnp.sign(jax.grad(lambda d: loss(state["p"], x + d, c))(d))

        return once(state, x + lax.fori_loop(0, 2, ascend, jnp.zeros_like(x)), c)

    return step


def per_example(loss, update):
    def step(state, x, c):
        one = jax.vmap(jax.grad(loss), (None, 0, {"mask": 0, "tokens": 0, "key": None}))
        g = one(state["p"], x[:, None], {**c, "mask": c["mask"][:, None], "tokens": c["tokens"][:, None]})
        size = sum((a.reshape(BATCH, -1) ** 2).sum(-1) for a in jax.tree.leaves(g) if a.size)
        weight = jnp.minimum(1, 1 / (size + 1))
        g = jax.tree.map(lambda a: (a * weight.reshape((-1,) + (1,) * (a.ndim - 1))).mean(0), g)
        p, m = update(state["m"], g, state["p"])
        return {"p": p, "m": m}, size.mean()

    return step


def untrained(loss, update):
    return lambda state, x, c: (state, loss(state["p"], x, c))


TRAININGS = (
    plain, plain, twice, scanned, accumulated, evaluated, sharpness, meta, penalised, curved, adversarial, per_example, untrained,
)  # fmt: skip


def random_step(seed):
    """(step, arguments, what it is): the step takes (state, x, tokens), splits a key and returns (state, metrics)."""
    rng = np.random.default_rng(seed)
    training = TRAININGS[rng.integers(len(TRAININGS))]
    update = UPDATES[rng.integers(len(UPDATES))]
    params, loss = network(rng, int(rng.integers(1, 5)))
    inner = training(loss, update)

    def step(state, x, tokens):
        key, sub = jax.random.split(state["key"])
        mask = (tokens[:, 0] != 0).astype(jnp.float32)
        trained, metrics = inner(state["trained"], x, {"mask": mask, "tokens": tokens, "key": sub})
        return {"trained": trained, "key": key}, (metrics, mask.sum())

    trained = {"p": jax.tree.map(jnp.asarray, params), "m": jax.tree.map(jnp.zeros_like, params)}
    x = jnp.asarray(rng.standard_normal((BATCH, WIDTH)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 6, (BATCH, TIMES)), jnp.int32)
    what = f"{training.__name__}, {update.__name__}, {list(params)}"
    return step, ({"trained": trained, "key": jax.random.PRNGKey(seed)}, x, tokens), what
