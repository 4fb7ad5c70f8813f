"""Neural machine translation: an encoder and a decoder of LSTM layers, attention, and a softmax at every step.

Luong, Pham and Manning, "Effective Approaches to Attention-based Neural Machine Translation", 2015: global attention
with the dot score on top of the last decoder layer, without input feeding. Sizes of the paper of FlexFlow (Jia,
Zaharia and Aiken, 2019, section 8.1; ``PAPER``): two layers of 1024 on either side, 40 steps each, 32,000 words.

    params = 2*vocab*hidden                                       embeddings
           + 2*layers*4*hidden*(2*hidden + 1)                     encoder, decoder
           + 2*hidden^2                                           attention
           + hidden*vocab + vocab                                 head                 PAPER: 134,003,968

Unrolled, every step of every layer is an operator of its own, and so is every step's attention and softmax layer;
with ``scan=True`` each side is one loop over time, and attention and softmax stand once for all steps.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from . import text
from .lstm import LSTMStack, no_carry, over_time, scan_time, sequence_loss
from .training import TrainStep, build_step, get_dtype, get_optimizer, initial_state, initialize

PAPER = dict(batch=64, seq=40, hidden=1024, layers=2, vocab=32_000, optimizer="sgd", learning_rate=0.1)


class Attention(nn.Module):
    """The mean of the encoder's outputs, weighted by their products with the decoder's, joined to the latter."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, query, memory):  # [batch, ..., hidden], [batch, source, hidden] -> as query
        steps = "t" if query.ndim == 3 else ""
        scores = jnp.einsum(f"b{steps}h,bsh->b{steps}s", query, memory)
        weights = nn.softmax(scores.astype(jnp.float32)).astype(self.dtype)
        context = jnp.einsum(f"b{steps}s,bsh->b{steps}h", weights, memory)

        def project(value, name):
            return nn.Dense(query.shape[-1], use_bias=False, dtype=self.dtype, name=name)(value)

        # One product of both side by side would be the same.
        return nn.tanh(project(context, "context") + project(query, "query"))


class NMT(nn.Module):
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
        encoder = LSTMStack(self.hidden, self.layers, self.dtype, name="encoder")
        decoder = LSTMStack(self.hidden, self.layers, self.dtype, name="decoder")
        attention = Attention(self.dtype, name="attention")
        head = nn.Dense(self.vocab, dtype=self.dtype, name="head")
        if self.scan:
            carry, memory = scan_time(encoder, no_carry(len(source), self.hidden, self.layers, self.dtype), source)
            return head(attention(scan_time(decoder, carry, target)[1], memory))

        carry, outputs = over_time(encoder, None, jnp.unstack(source, axis=1))
        memory = jnp.stack(outputs, axis=1)

        def step(carry, x):
            carry, y = decoder(carry, x)
            return carry, head(attention(y, memory))

        return over_time(step, carry, jnp.unstack(target, axis=1))[1]


def batches(*, batch: int, seq: int, vocab: int = 256, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless pairs of real text, the target being what follows the source; see ``models.text``."""
    for window in text.batches(batch=batch, seq=2 * seq, vocab=vocab, seed=seed):
        yield {"source": window["tokens"][:, :seq], "target": window["tokens"][:, seq:]}


def make(
    *,
    batch: int = 8,
    seq: int = 8,
    hidden: int = 32,
    layers: int = 2,
    vocab: int = 256,
    scan: bool = False,
    dtype: str = "float32",
    learning_rate: float = 1e-2,
    optimizer: str = "adam",
    seed: int = 0,
) -> tuple[TrainStep, dict, dict]:
    """The step, its first state, and a batch ``{"source": int32[batch, seq], "target": int32[batch, seq + 1]}``."""
    model = NMT(hidden=hidden, layers=layers, vocab=vocab, scan=scan, dtype=get_dtype(dtype))
    transform = get_optimizer(optimizer, learning_rate)

    def loss_fn(params, state, batch):
        logits = model.apply({"params": params}, batch["source"], batch["target"][:, :-1])
        return sequence_loss(logits, batch["target"][:, 1:]), {}

    tokens = jnp.zeros((1, 2), jnp.int32)
    params = initialize(model, jax.random.key(seed), tokens, tokens)["params"]
    state = initial_state(params, transform)
    return build_step(loss_fn, transform), state, next(batches(batch=batch, seq=seq, vocab=vocab, seed=seed))
