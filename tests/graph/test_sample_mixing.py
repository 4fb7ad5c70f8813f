"""What mixes the samples of a batch, against gradients: of micro-batches, in the mean, and of the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import sampled

from soapjax.execute.parts.microbatches import micro_step

BATCH, WIDTH, PARTS = 12, 4, 3


def hidden(w, x):
    return jnp.tanh(x @ w)


def contrastive(w, x):
    z = hidden(w, x)
    return -jax.nn.log_softmax(z @ z.T).diagonal().mean()


def normalised(w, x):
    z = hidden(w, x)
    return (((z - z.mean(0)) / jnp.sqrt(z.var(0) + 0.1)) ** 3).mean()


def through_a_scan(loss_of):
    def loss(w, x):
        def body(z, _):
            return jnp.tanh(z @ w), None

        return loss_of(jax.lax.scan(body, x, None, length=2)[0])

    return loss


def attention(w, x):
    tokens = hidden(w, x).reshape(len(x), 2, WIDTH // 2)
    scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", tokens, tokens))
    return jnp.einsum("bqk,bkd->bqd", scores, tokens).var()


def by_itself(w, x):
    tokens = hidden(w, x).reshape(len(x), 2, WIDTH // 2)
    scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", tokens, tokens))
    return (jnp.einsum("bqk,bkd->bqd", scores, tokens) ** 2).mean()


def by_vmap(w, x):
    z = hidden(w, x)
    return jax.vmap(lambda a: jax.vmap(lambda b: jnp.abs(a - b).sum())(z))(z).mean()


LOSSES = {
    "a mean": lambda w, x: (hidden(w, x) ** 2).mean(),
    "attention": by_itself,
    "a scan": through_a_scan(lambda z: (z**2).mean()),
    "blocks recomputed": jax.checkpoint(lambda w, x: (hidden(w, x) ** 2).mean() + jnp.sqrt((w**2).sum())),
    "parameters alone": lambda w, x: (hidden(w, x) ** 2).mean() + jnp.sqrt((w**2).sum()),
    "a mask": lambda w, x: jnp.where(x[:, :1] > 0, hidden(w, x), 0.0).mean(),
    "a product": lambda w, x: jnp.prod(hidden(w, x), -1).mean(),
    "its own places": lambda w, x: jnp.take_along_axis(hidden(w, x), (x[:, :2] > 0).astype(int), 1).mean(),
    "a product of vectors": lambda w, x: jnp.dot(hidden(w, x).mean(0), w[0]),
    "subtracted at its own places": lambda w, x: (hidden(w, x).at[jnp.arange(len(x)), 0].subtract(1.0) ** 2).mean(),
    "flattened": lambda w, x: hidden(w, x).reshape(-1)[jnp.arange(len(x)) * WIDTH + (x[:, 0] > 0)].mean(),
    "a metric beside": lambda w, x: (hidden(w, x) ** 2).mean() + jax.lax.stop_gradient((x @ x.T).mean()) * 0,
    "means of pairs": lambda w, x: (hidden(w, x) @ hidden(w, x).T).mean(),
    "pairs of a scan": through_a_scan(lambda z: jnp.exp(z @ z.T).mean()),
    "contrastive": contrastive,
    "distances": lambda w, x: jnp.exp(-((hidden(w, x)[:, None] - hidden(w, x)[None]) ** 2).sum(-1)).mean(),
    "distances by vmap": by_vmap,
    "distances, later": lambda w, x: jnp.tanh(jnp.exp(jnp.broadcast_to(hidden(w, x)[:, None], (len(x), len(x), WIDTH)))
                                              - hidden(w, x)[None]).mean(),
    "fixed rows beside all": lambda w, x: (hidden(w, jnp.concatenate([2 * x[:1], x])) ** 2).mean(),
    "fixed rows beside the last": lambda w, x: (hidden(w, jnp.concatenate([2 * x[:1], x, x[1:] ** 2])) ** 2).mean(),
    "by number": lambda w, x: (hidden(w, x) * hidden(w, x)[(x[:, 0] > 0).astype(int)]).mean(),
    "added by number": lambda w, x: (jnp.zeros_like(x).at[(x[:, 0] > 0).astype(int)].add(hidden(w, x)) ** 2).mean(),
    "normalised": normalised,
    "a root of a mean": lambda w, x: jnp.sqrt((hidden(w, x) ** 2).mean()),
    "a variance": attention,
    "with weights": lambda w, x: (hidden(w, x)[:, 0] * x[:, 1] ** 2).sum() / (x[:, 1] ** 2).sum(),
    "hard examples": lambda w, x: jnp.sort((hidden(w, x) ** 2).mean(-1))[len(x) // 2 :].mean(),
    "the largest": lambda w, x: jax.lax.top_k((hidden(w, x) ** 2).mean(-1), len(x) // 3)[0].mean(),
    "mixed up": lambda w, x: (hidden(w, 0.7 * x + 0.3 * x[::-1]) ** 2).mean(),
    "shifted": lambda w, x: (hidden(w, x + jnp.roll(x, 1, axis=0)) ** 2).mean(),
    "a running sum": lambda w, x: (jnp.cumsum(hidden(w, x), axis=0) ** 2).mean(),
    "a mean of running sums": lambda w, x: jnp.cumsum((hidden(w, x) ** 2).mean(-1)).mean(),
    "a switch": lambda w, x: jnp.where((hidden(w, x) ** 2).mean() > 0.52, hidden(w, x) ** 2, hidden(w, x)).mean(),
    "moments": lambda w, x: (hidden(w, x).mean(0) ** 2).sum(),
}  # fmt: skip
MIXES = list(LOSSES)[list(LOSSES).index("means of pairs") :]


@pytest.mark.parametrize("num", [PARTS, BATCH])
@pytest.mark.parametrize("name", sampled(LOSSES, 2))
def test_it_is_found_where_gradients_differ(name, num):
    loss = LOSSES[name]
    w, x = (jax.random.normal(jax.random.key(k), shape) for k, shape in ((0, (WIDTH, WIDTH)), (1, (BATCH, WIDTH))))

    def step(w, x):
        return w - 0.1 * jax.grad(loss)(w, x)

    gradient = jax.jit(jax.grad(loss))
    whole = gradient(w, x)
    parts = np.mean([gradient(w, part) for part in np.split(np.asarray(x), num)], 0)
    differs = not np.allclose(whole, parts, rtol=1e-4, atol=1e-6)
    micro = micro_step(step, w, x, num_microbatches=num)
    mixing = micro.growth.mixing(micro.step.program.outputs)
    assert differs == (name in MIXES)
    is_found = mixing.any() is not None or mixing.by_number() is not None
    assert is_found == (differs and not micro.whole)  # the weights of the whole batch are read
    assert bool(micro.whole) == (name == "with weights")
    assert (mixing.by_number() is not None) == ("by number" in name)
    assert (mixing.pairs() is not None) == ("pairs" in name or "distances" in name or name == "contrastive")
    assert (mixing.fixed_rows() is not None) == ("fixed rows" in name)


def paired(first, second):
    return jnp.exp(first * second).mean()


def looped(trip, rows):
    return jax.lax.scan(trip, 0.0, rows)


# Of micro-batches of several samples.
REGROUPED = {
    "neighbours": (lambda w, x: paired(*hidden(w, x).reshape(-1, 2, WIDTH).transpose(1, 0, 2)), False),
    "every second": (lambda w, x: paired(hidden(w, x)[::2], hidden(w, x)[1::2]), False),
    "joined, and taken apart": (lambda w, x: paired(*jnp.split(hidden(w, jnp.concatenate([x, 2 * x])), 2)), False),
    "joined, and sliced": (lambda w, x: (lambda z: paired(z[: len(x)], z[len(x) :]))(hidden(w, jnp.concatenate([x, -x]))), False),
    "time first, flattened and back": (
        lambda w, x: (hidden(w, jnp.stack([x, 2 * x]).reshape(-1, WIDTH)).reshape(2, -1, WIDTH).mean(0) ** 3).mean(), False,
    ),
    "halves by a split": (lambda w, x: paired(*jnp.split(hidden(w, x), 2)), True),
    "halves by slices": (lambda w, x: paired(hidden(w, x)[: len(x) // 2], hidden(w, x)[len(x) // 2 :]), True),
    "halves by a reshape": (lambda w, x: paired(*hidden(w, x).reshape(2, -1, WIDTH)), True),
    "means of halves": (lambda w, x: (hidden(w, x).reshape(2, -1, WIDTH).mean(0) ** 3).mean(), True),
    "halves, joined again": (
        lambda w, x: (lambda one, other: (hidden(w, jnp.concatenate([one, 2 * other])) ** 2).mean())(*jnp.split(x, 2)), True,
    ),
    "groups, flattened again": (
        lambda w, x: (lambda z: ((z - z.mean(0)).reshape(-1, WIDTH) ** 4).mean())(hidden(w, x).reshape(2, -1, WIDTH)), True,
    ),
    "added up by a loop": (lambda w, x: looped(lambda c, h: (c + (h**2).sum(), None), hidden(w, x))[0], False),
    "added up by a loop, as it grows": (lambda w, x: looped(lambda c, h: (c + (h**2).sum(), c), hidden(w, x))[1].mean(), True),
    "discounted by a loop": (lambda w, x: looped(lambda c, h: (0.9 * c + (h**2).sum(), None), hidden(w, x))[0], True),
    "counted by a loop": (lambda w, x: looped(lambda c, h: (c + 1, (h**2).sum() * c), hidden(w, x))[1].mean(), True),
    "weighed as a loop counts": (lambda w, x: looped(lambda c, _: (c + 1, c), x)[1] @ hidden(w, x)[:, 0], True),
    "every fourth": (lambda w, x: paired(hidden(w, x)[::4], hidden(w, x)[1::4]), False),
}  # fmt: skip


@pytest.mark.parametrize("name", REGROUPED)
def test_samples_that_are_put_side_by_side_are_found(name):
    loss, differs = REGROUPED[name]
    w, x = (jax.random.normal(jax.random.key(k), shape) for k, shape in ((0, (WIDTH, WIDTH)), (1, (BATCH, WIDTH))))
    gradient = jax.jit(jax.grad(loss))
    whole = gradient(w, x)
    parts = np.array([gradient(w, part) for part in np.split(np.asarray(x), PARTS)])
    adds_up = any(np.allclose(whole, of, rtol=1e-4, atol=1e-6) for of in (parts.mean(0), parts.sum(0)))
    assert adds_up != differs
    micro = micro_step(lambda w, x: w - 0.1 * jax.grad(loss)(w, x), w, x, num_microbatches=PARTS)
    mixing = micro.growth.mixing(micro.step.program.outputs)
    assert (mixing.any() is not None or mixing.chain() is not None) == differs


def drawn(key, x, *shape):
    return jax.random.randint(key, (len(x), *shape), 0, WIDTH)


AT_DRAWN_PLACES = {
    "shuffled": (lambda z, key: z * z[jax.random.permutation(key, len(z))], True),
    "places within each": (lambda z, key: z[jnp.arange(len(z))[:, None], drawn(key, z, 2)], False),
    "rows of a table": (lambda z, key: z * jnp.eye(WIDTH)[drawn(key, z)], False),
}


@pytest.mark.parametrize("name", AT_DRAWN_PLACES)
def test_samples_that_are_read_at_drawn_places_are_found(name):
    of, is_other = AT_DRAWN_PLACES[name]

    def step(w, key, x):
        return w - 0.1 * jax.grad(lambda w: (of(hidden(w, x), key) ** 2).mean())(w)

    micro = micro_step(step, jnp.eye(WIDTH), jax.random.key(0), jnp.ones((BATCH, WIDTH)), num_microbatches=PARTS)
    assert (micro.growth.mixing(micro.step.program.outputs).drawn_places() is not None) == is_other
