"""What mixes the samples of a batch, against gradients: of micro-batches, in the mean, and of the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from soapjax.execute.streams.microbatches import micro_step

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
    "its own places": lambda w, x: jnp.take_along_axis(hidden(w, x), (x[:, :2] > 0).astype(int), 1).mean(),
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
    "a switch": lambda w, x: jnp.where((hidden(w, x) ** 2).mean() > 0.52, hidden(w, x) ** 2, hidden(w, x)).mean(),
    "moments": lambda w, x: (hidden(w, x).mean(0) ** 2).sum(),
}  # fmt: skip
MIXES = list(LOSSES)[list(LOSSES).index("means of pairs") :]


@pytest.mark.parametrize("num", [PARTS, BATCH])
@pytest.mark.parametrize("name", LOSSES)
def test_it_is_found_where_gradients_differ(name, num):
    loss = LOSSES[name]
    w, x = (jax.random.normal(jax.random.key(k), shape) for k, shape in ((0, (WIDTH, WIDTH)), (1, (BATCH, WIDTH))))

    def step(w, x):
        return w - 0.1 * jax.grad(loss)(w, x)

    whole = jax.grad(loss)(w, x)
    parts = jnp.mean(jnp.stack([jax.grad(loss)(w, part) for part in jnp.split(x, num)]), 0)
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
