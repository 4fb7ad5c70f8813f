"""Short steps of the kinds that public training scripts are made of, each (step, arguments)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

BATCH, WIDTH, HIDDEN, VOCAB, LENGTH = 32, 16, 24, 40, 9
OPTIMIZER = optax.adam(1e-2)
X = np.random.default_rng(0).standard_normal((BATCH, WIDTH)).astype(np.float32)
TOKENS = np.random.default_rng(1).integers(0, VOCAB, (BATCH, LENGTH)).astype(np.int32)
PATTERNS = {}


def pattern(make_state, data=X):
    """Registers a step `(state, data) -> (state, metrics)`."""

    def add(step):
        PATTERNS[step.__name__] = lambda: (step, (make_state(), jnp.asarray(data)))
        return step

    return add


def weights(rows=WIDTH, seed=0):
    rng = np.random.default_rng(seed)
    return {"w": jnp.asarray(rng.standard_normal((rows, HIDDEN)) * 0.1, jnp.float32), "v": jnp.full((HIDDEN, 1), 0.1)}


def trained(params):
    return {"p": params, "o": OPTIMIZER.init(params)}


def fresh():
    return trained(weights())


def forward(p, x):
    return jnp.tanh(x @ p["w"]) @ p["v"]


def error(p, x):
    return ((forward(p, x) - 1) ** 2).mean()


def apply(s, g):
    updates, o = OPTIMIZER.update(g, s["o"], s["p"])
    return {"p": optax.apply_updates(s["p"], updates), "o": o}


def update(s, loss):
    value, g = jax.value_and_grad(loss)(s["p"])
    return apply(s, g), value


@pattern(fresh)
def two_updates(s, x):
    s, _ = update(s, lambda p: error(p, x[: BATCH // 2]))
    return update(s, lambda p: error(p, x[BATCH // 2 :]))


@pattern(fresh)
def scan_of_updates(s, x):
    return lax.scan(lambda s, x: update(s, lambda p: error(p, x)), s, x.reshape(2, BATCH // 2, WIDTH))


@pattern(fresh)
def loss_after_the_update(s, x):
    s, before = update(s, lambda p: error(p, x))
    return s, {"before": before, "after": error(s["p"], x)}


@pattern(lambda: {"g": trained({"a": weights(seed=1)["w"], "b": weights(seed=2)["w"].T}), "d": fresh()})
def adversaries(s, x):
    def generate(p, z):
        return jnp.tanh(z @ p["a"]) @ p["b"]

    fake = generate(s["g"]["p"], x)
    d, lost = update(s["d"], lambda p: (jax.nn.softplus(-forward(p, x)) + jax.nn.softplus(forward(p, fake))).mean())
    g, won = update(s["g"], lambda p: jax.nn.softplus(-forward(d["p"], generate(p, x))).mean())
    return {"g": g, "d": d}, (lost, won)


def scores(p, x):
    return forward(p, x) + p["b"]


def experts():
    w = weights(seed=4)["w"] * jnp.arange(1, 5, dtype=jnp.float32)[:, None, None]
    return {"up": w, "down": w.mT}


def critic():
    return trained(weights() | {"b": jnp.full((HIDDEN,), 0.5), "scale": jnp.ones(())})


@pattern(lambda: trained(experts()))
def experts_put_back(s, x):
    """Rows sorted by expert go back to where they came from, as many as there are."""
    expert = jnp.argmax(x[:, :4], -1)
    order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=4)

    def loss(p):
        hidden = lax.ragged_dot(jnp.tanh(lax.ragged_dot(x[order], p["up"], sizes)), p["down"], sizes)
        return ((jnp.zeros_like(hidden).at[order].set(hidden) - x) ** 2).mean()

    return update(s, loss)


@pattern(lambda: trained(experts()))
def sorted_experts(s, x):
    """A mixture of experts without capacity: rows sorted by expert meet the matrix of their group."""
    expert = jnp.abs(jnp.round(3 * x[:, 0])).astype(jnp.int32) % 4
    order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=4)

    def loss(p):
        hidden = jnp.tanh(lax.ragged_dot(x[order], p["up"], sizes))
        return ((lax.ragged_dot(hidden, p["down"], sizes) - 1) ** 2).mean()

    return update(s, loss)


@pattern(lambda: trained({"w": weights(seed=6)["w"][:, :WIDTH], "v": jnp.full((WIDTH, 1), 0.1)}))
def literal_in_a_product(s, x):
    """The gradient of a product that is one number has the literal 1 as an operand."""
    return update(s, lambda p: error(p, x) + jnp.einsum("ij,ji->", p["w"], p["w"]))


@pattern(critic)
def constant_gradients(s, x):
    """Of a mean of scores the gradient of the last bias is a constant, which no data flow into."""
    return update(s, lambda p: scores(p, x).mean() - p["scale"])


@pattern(critic)
def constant_gradients_in_a_loop(s, x):
    """The critic of a Wasserstein GAN: some updates, each with the constant gradient anew."""
    return lax.fori_loop(0, 3, lambda _, c: update(c[0], lambda p: scores(p, x).mean() - p["scale"]), (s, 0.0))


@pattern(critic)
def constant_gradients_accumulated(s, x):
    def add(total, part):
        value, g = jax.value_and_grad(lambda p: scores(p, part).mean() - p["scale"])(s["p"])
        return jax.tree.map(jnp.add, total, g), value

    g, values = lax.scan(add, jax.tree.map(jnp.zeros_like, s["p"]), x.reshape(2, BATCH // 2, WIDTH))
    return apply(s, g), values.mean()


@pattern(fresh)
def sharpness_aware(s, x):
    g = jax.grad(error)(s["p"], x)
    size = optax.tree.norm(g)
    value, g = jax.value_and_grad(error)(jax.tree.map(lambda p, g: p + 0.05 * g / size, s["p"], g), x)
    return apply(s, g), value


@pattern(lambda: {"s": fresh(), "t": weights(seed=3)})
def target_network(s, x):
    new, value = update(s["s"], lambda p: ((forward(p, x) - lax.stop_gradient(forward(s["t"], x)) - 1) ** 2).mean())
    return {"s": new, "t": optax.incremental_update(new["p"], s["t"], 0.01)}, value


@pattern(lambda: {"s": fresh(), "k": jax.random.PRNGKey(0)})
def key_that_is_returned_and_read(s, x):
    key, _ = jax.random.split(s["k"])
    new, value = update(s["s"], lambda p: error(p, x + jax.random.normal(key, x.shape)))
    return {"s": new, "k": key}, value


@pattern(fresh)
def hessian_in_the_loss(s, x):
    def curvature(p, x):
        return jnp.trace(jax.hessian(lambda x: forward(p, x[None])[0, 0])(x))

    return update(s, lambda p: (jax.vmap(curvature, (None, 0))(p, x) ** 2).mean() + error(p, x))


@pattern(fresh)
def hessian_times_vector(s, x):
    g = jax.grad(error)(s["p"], x)
    h = jax.jvp(lambda p: jax.grad(error)(p, x), (s["p"],), (g,))[1]
    return apply(s, jax.tree.map(lambda a, b: a + 0.1 * b, g, h)), error(s["p"], x)


@pattern(fresh)
def clipped_per_example(s, x):
    g = jax.vmap(jax.grad(lambda p, x: error(p, x[None])), (None, 0))(s["p"], x)
    size = jax.vmap(optax.tree.norm)(g)
    g = jax.tree.map(lambda a: (a * jnp.minimum(1, 1 / size).reshape((-1,) + (1,) * (a.ndim - 1))).mean(0), g)
    return apply(s, g), size.mean()


@pattern(fresh)
def loop_in_the_loss(s, x):
    return update(s, lambda p: ((lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h) * 0.9, x @ p["w"]) @ p["v"] - 1) ** 2).mean())


@pattern(fresh)
def what_only_the_last_trip_leaves(s, x):
    """No trip reads what the one before left in `f`: the cotangent is made of constants, as of the potentials of Sinkhorn."""

    def loss(p):
        h = x @ p["w"]

        def trip(_, carry):
            f = jnp.tanh(h @ carry[1])
            return f, f @ h / BATCH

        f, g = lax.fori_loop(0, 3, trip, (jnp.zeros(BATCH), jnp.ones(HIDDEN)))
        return f.mean() + g.mean() + error(p, x)

    return update(s, loss)


@pattern(fresh)
def custom_gradient(s, x):
    @jax.custom_vjp
    def f(x):
        return jnp.tanh(x)

    f.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * (1 - jnp.tanh(x) ** 2),))
    return update(s, lambda p: ((f(x @ p["w"]) @ p["v"] - 1) ** 2).mean())


@pattern(fresh)
def associative_scan(s, x):
    def loss(p):
        h = x.reshape(8, BATCH // 8, WIDTH) @ p["w"]
        h = lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (jax.nn.sigmoid(h), h), axis=1)[1]
        return ((h @ p["v"] - 1) ** 2).mean()

    return update(s, loss)


@pattern(fresh)
def update_only_if_finite(s, x):
    new, value = update(s, lambda p: error(p, x))
    return lax.cond(jnp.isfinite(value), lambda: new, lambda: s), value


@pattern(fresh)
def sorted_values(s, x):
    def loss(p):
        h = x @ p["w"]
        return ((lax.top_k(h, 4)[0] @ p["v"][:4] - 1) ** 2).mean() + (jnp.sort(h, -1)[:, 0] + jnp.cumsum(h, 0)[:, 0]).mean() * 1e-3

    return update(s, loss)


@pattern(fresh)
def fourier(s, x):
    return update(s, lambda p: ((jnp.fft.rfft(x @ p["w"], axis=-1).real @ p["w"][0, :13] - 1) ** 2).mean())


@pattern(fresh)
def cholesky(s, x):
    def loss(p):
        h = x @ p["w"]
        k = h @ h.T / HIDDEN + jnp.eye(BATCH)
        return jnp.linalg.slogdet(k)[1] + (jnp.linalg.cholesky(k) ** 2).mean()

    return update(s, loss)


def _language_model():
    rng = np.random.default_rng(4)
    return trained({"emb": jnp.asarray(rng.standard_normal((VOCAB, WIDTH)) * 0.1, jnp.float32), "w": jnp.eye(WIDTH)})


def _masked(s, tokens, metrics):
    x, y = tokens[:, :-1], tokens[:, 1:]
    mask = (y != 0).astype(jnp.float32)
    count = jnp.maximum(mask.sum(), 1)

    def loss(p):
        logits = p["emb"][x] @ p["w"] @ p["emb"].T
        lost = optax.losses.softmax_cross_entropy_with_integer_labels(logits, y)
        return (lost * mask).sum() / count, metrics(logits, y, mask / count)

    (value, found), g = jax.value_and_grad(loss, has_aux=True)(s["p"])
    return apply(s, g), (value, found)


@pattern(_language_model, TOKENS)
def masked_loss(s, tokens):
    return _masked(s, tokens, lambda logits, y, weight: ())


@pattern(_language_model, TOKENS)
def masked_loss_and_accuracy(s, tokens):
    return _masked(s, tokens, lambda logits, y, weight: ((logits.argmax(-1) == y) * weight).sum())


@pattern(lambda: {"s": fresh(), "k": jax.random.key(0)})
def diffusion(s, x):
    key, noise_key, time_key = jax.random.split(s["k"], 3)
    level = jnp.linspace(1.0, 0.1, 8)[jax.random.randint(time_key, (BATCH,), 0, 8)][:, None]
    noise = jax.random.normal(noise_key, x.shape)
    noisy = level * x + (1 - level) * noise
    new, value = update(s["s"], lambda p: ((forward(p, noisy) - noise.sum(-1, keepdims=True)) ** 2).mean())
    return {"s": new, "k": key}, value


@pattern(lambda: trained({**weights(), "t": jnp.zeros(())}))
def trained_scalar(s, x):
    return update(s, lambda p: ((forward(p, x) * jnp.exp(p["t"]) - 1) ** 2).mean())


@pattern(fresh)
def logged_gradient_norm(s, x):
    value, g = jax.value_and_grad(error)(s["p"], x)
    return apply(s, g), {"loss": value, "norm": jnp.sqrt(sum(jnp.vdot(a, a) for a in jax.tree.leaves(g)))}


@pattern(fresh)
def joined_batches(s, x):
    return update(s, lambda p: error(p, jnp.concatenate([x, x + 1])))


@pattern(fresh)
def shuffled_batch(s, x):
    return update(s, lambda p: error(p, x[jax.random.permutation(jax.random.key(0), BATCH)]))


@pattern(fresh)
def placed_batch(s, x):
    return update(s, lambda p: error(p, jax.device_put(x)))


@pattern(fresh)
def attack_on_the_input(s, x):
    def ascend(i, d):
        return d + 0.01 * jnp.sign(jax.grad(lambda d: error(s["p"], x + d))(d))

    d = lax.fori_loop(0, 3, ascend, jnp.zeros_like(x))
    return update(s, lambda p: error(p, x + d))


@pattern(fresh)
def inner_update(s, x):
    def outer(p):
        g = jax.grad(error)(p, x[: BATCH // 2])
        return error(jax.tree.map(lambda a, b: a - 0.1 * b, p, g), x[BATCH // 2 :])

    return update(s, outer)


@pattern(lambda: jax.random.PRNGKey(0))
def training_in_one_call(key, x):
    key, sub = jax.random.split(key)
    start = trained({**weights(), "w": jax.random.normal(sub, (WIDTH, HIDDEN)) * 0.1})
    end, losses = lax.scan(lambda s, _: update(s, lambda p: error(p, x)), start, None, length=3)
    return key, (losses, end["p"])


@pattern(lambda: {"s": fresh(), "k": jax.random.key(0)}, data=1.0)
def games_played_inside(s, temperature):
    """The batch is drawn, game by game, and carried through a loop over moves, of which each has a key."""
    key, start_key, moves_key = jax.random.split(s["k"], 3)
    start = jax.vmap(lambda k: jax.random.normal(k, (WIDTH,)))(jax.random.split(start_key, BATCH))

    def move(games, k):
        score = forward(s["s"]["p"], games) / temperature
        return games + score * jax.random.normal(k, (WIDTH,)), games

    _, positions = lax.scan(move, start, jax.random.split(moves_key, 3))
    new, value = update(s["s"], lambda p: error(p, positions.reshape(-1, WIDTH)))
    return {"s": new, "k": key}, value
