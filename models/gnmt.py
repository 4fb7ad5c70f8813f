"""GNMT: deep LSTM encoder and decoder with residual connections, and additive attention that all decoder layers see.

Wu et al., "Google's Neural Machine Translation System", 2016, section 3: the first encoder layer reads in both
directions, from the third layer on the input of a layer is added to its output, and the attention is asked by the
first decoder layer. Its answer enters the first layer at the next step, and all others at once. Attention is that of
Bahdanau, Cho and Bengio, "Neural Machine Translation by Jointly Learning to Align and Translate", 2015. ``PAPER`` is
the size known as GNMT-8: 8 layers of 1024 on either side, without dropout and word pieces. ``TWO_LAYERS`` is the
small one of Mirhoseini et al., "A Hierarchical Model for Device Placement", 2018, and Zeng et al., "Trinity", 2022.

    params = 2*vocab*hidden                                                              embeddings
           + (layers + 1)*4*hidden*(2*hidden + 1) + 4*hidden^2                           encoder
           + layers*4*hidden*(3*hidden + 1)                                              decoder
           + 2*hidden^2 + hidden                                                         attention
           + hidden*vocab + vocab                                                        head     PAPER: 280,858,880
                                                                                               TWO_LAYERS: 154,980,608

Unrolled, every step of every layer is an operator of its own; with ``scan=True`` each loop over time is one.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from . import nmt
from .lstm import LSTMCell, LSTMStack, no_carry, over_time, scan_time, sequence_loss
from .training import TrainStep, build_step, get_dtype, get_optimizer, initial_state, initialize

PAPER = dict(batch=64, seq=40, hidden=1024, layers=8, vocab=32_000, optimizer="adam")
TWO_LAYERS = PAPER | dict(layers=2)


class Attention(nn.Module):
    """The mean of ``memory``, weighted by how well ``keys`` (its projections) go with the query."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, query, memory, keys):  # [batch, hidden], [batch, source, hidden] twice -> [batch, hidden]
        hidden = query.shape[-1]
        query = nn.Dense(hidden, use_bias=False, dtype=self.dtype, name="query")(query)
        scores = nn.Dense(1, use_bias=False, dtype=self.dtype, name="score")(nn.tanh(keys + query[:, None]))[..., 0]
        weights = nn.softmax(scores.astype(jnp.float32)).astype(self.dtype)
        return jnp.einsum("bs,bsh->bh", weights, memory)


class Decoder(nn.Module):
    """All layers at one step; the carry is ``(one (h, c) per layer, context)``, or None before the first step."""

    hidden: int
    layers: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, carry, x, memory, keys):
        cells = [LSTMCell(self.hidden, self.dtype, name=f"lstm{i}") for i in range(self.layers)]
        before, context = carry or ((None,) * self.layers, None)
        first, x = cells[0](before[0], x, *([] if context is None else [context]))
        context = Attention(self.dtype, name="attention")(x, memory, keys)
        carries = [first]
        for i in range(1, self.layers):
            new, y = cells[i](before[i], x, context)
            x = x + y if i >= 2 else y
            carries.append(new)
        return (tuple(carries), context), x


class GNMT(nn.Module):
    """Logits of the next target token at every step: a list of ``[batch, vocab]``, or one array with ``scan``."""

    hidden: int
    layers: int
    vocab: int
    scan: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, source, target):  # int32 [batch, seq] each
        source = nn.Embed(self.vocab, self.hidden, dtype=self.dtype, name="source_embed")(source)
        target = nn.Embed(self.vocab, self.hidden, dtype=self.dtype, name="target_embed")(target)
        forward, backward = (LSTMCell(self.hidden, self.dtype, name=f"encoder_{way}") for way in ("forward", "backward"))
        # The first of these layers is the encoder's second.
        rest = LSTMStack(self.hidden, self.layers - 1, self.dtype, residual_from=1, name="encoder")
        project = nn.Dense(self.hidden, use_bias=False, dtype=self.dtype, name="keys")
        decoder = Decoder(self.hidden, self.layers, self.dtype, name="decoder")
        head = nn.Dense(self.vocab, dtype=self.dtype, name="head")

        if self.scan:
            start = no_carry(len(source), self.hidden, self.layers, self.dtype)
            ways = [scan_time(cell, start[0], source, reverse=cell is backward)[1] for cell in (forward, backward)]
            memory = scan_time(rest, start[1:], tuple(ways))[1]
            return head(scan_time(decoder, (start, start[0][0]), target, memory, project(memory))[1])

        words = jnp.unstack(source, axis=1)
        ways = [over_time(cell, None, words, reverse=cell is backward)[1] for cell in (forward, backward)]
        memory = jnp.stack(over_time(rest, None, list(zip(*ways, strict=True)))[1], axis=1)
        keys = project(memory)

        def step(carry, x):
            carry, y = decoder(carry, x, memory, keys)
            return carry, head(y)

        return over_time(step, None, jnp.unstack(target, axis=1))[1]


def batches(*, batch: int, seq: int, vocab: int = 256, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """The pairs of ``models.nmt``."""
    return nmt.batches(batch=batch, seq=seq, vocab=vocab, seed=seed)


def make(
    *,
    batch: int = 8,
    seq: int = 4,
    hidden: int = 16,
    layers: int = 4,
    vocab: int = 256,
    scan: bool = False,
    dtype: str = "float32",
    learning_rate: float = 1e-2,
    optimizer: str = "adam",
    seed: int = 0,
) -> tuple[TrainStep, dict, dict]:
    """The step, its first state, and a batch ``{"source": int32[batch, seq], "target": int32[batch, seq + 1]}``."""
    if layers < 2:
        raise ValueError(f"layers {layers} is too few: the encoder has a layer of two directions and others; choose at least 2")
    model = GNMT(hidden=hidden, layers=layers, vocab=vocab, scan=scan, dtype=get_dtype(dtype))
    transform = get_optimizer(optimizer, learning_rate)

    def loss_fn(params, state, batch):
        logits = model.apply({"params": params}, batch["source"], batch["target"][:, :-1])
        return sequence_loss(logits, batch["target"][:, 1:]), {}

    tokens = jnp.zeros((1, 2), jnp.int32)
    params = initialize(model, jax.random.key(seed), tokens, tokens)["params"]
    state = initial_state(params, transform)
    return build_step(loss_fn, transform), state, next(batches(batch=batch, seq=seq, vocab=vocab, seed=seed))
