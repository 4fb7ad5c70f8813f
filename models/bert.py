"""BERT: a Transformer encoder that fills in masked tokens.

Devlin, Chang, Lee and Toutanova, "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding",
2019: layer norm after each residual sum, gelu, tokens and positions and segments embedded together, and a head of one
dense layer with gelu and layer norm before the logits. Only the masked language model is trained here, no next
sentences: a part of the tokens is replaced by ``MASK``, and the loss is the mean over these.

    params = (vocab + seq + 2)*width + 2*width                                           embeddings, layer norm
           + layers*(4*(width^2 + width) + 4*width + 8*width^2 + 5*width)                blocks
           + width^2 + width + 2*width + vocab + (0 if tie else width*vocab)             head     PAPER: 335,180,608

``PAPER`` is BERT-large at sequences of 512, with the 30,522 words rounded up to 30,528, which has more divisors.
Projections keep heads as a dimension, as in ``models.transformer_lm``.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from . import text
from .training import TrainStep, build_step, get_dtype, get_optimizer, initial_state, initialize
from .transformer_lm import FeedForward

PAPER = dict(batch=64, seq=512, width=1024, layers=24, heads=16, vocab=30_528, tie=True, optimizer="adamw")
MASK = 0  # the token that stands for a hidden one
MASKED_SHARE = 0.15


class SelfAttention(nn.Module):
    """Every token sees every other; scores and softmax in float32."""

    width: int
    heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):  # [batch, seq, width] -> the same
        head_width = self.width // self.heads

        def project(name):
            return nn.DenseGeneral((self.heads, head_width), dtype=self.dtype, name=name)(x)

        query, key, value = project("query"), project("key"), project("value")
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) * head_width**-0.5
        mixed = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores).astype(self.dtype), value)
        return nn.DenseGeneral(self.width, axis=(-2, -1), dtype=self.dtype, name="out")(mixed)


class Block(nn.Module):
    """Attention and mlp, each added to its input and then normed."""

    width: int
    heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        attended = SelfAttention(self.width, self.heads, self.dtype, name="attn")(x)
        x = nn.LayerNorm(dtype=self.dtype, name="norm1")(x + attended)
        return nn.LayerNorm(dtype=self.dtype, name="norm2")(x + FeedForward(self.width, 4, self.dtype, name="mlp")(x))


class BERT(nn.Module):
    """Logits of the token at every position."""

    seq: int
    width: int
    layers: int
    heads: int
    vocab: int
    tie: bool
    remat: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens, segments):  # int32 [batch, seq] each -> [batch, seq, vocab]
        init = nn.initializers.normal(0.02)
        embed = nn.Embed(self.vocab, self.width, embedding_init=init, dtype=self.dtype, name="embed")
        position = self.param("position", init, (self.seq, self.width), jnp.float32).astype(self.dtype)
        segment = self.param("segment", init, (2, self.width), jnp.float32).astype(self.dtype)
        # Two rows need no lookup.
        x = embed(tokens) + position + jnp.where(segments[..., None] == 0, segment[0], segment[1])
        x = nn.LayerNorm(dtype=self.dtype, name="embed_norm")(x)
        block = nn.remat(Block) if self.remat else Block
        for i in range(self.layers):
            x = block(self.width, self.heads, self.dtype, name=f"blk{i}")(x)
        x = nn.gelu(nn.Dense(self.width, dtype=self.dtype, name="head_dense")(x))
        x = nn.LayerNorm(dtype=self.dtype, name="head_norm")(x)
        bias = self.param("head_bias", nn.initializers.zeros, (self.vocab,), jnp.float32).astype(self.dtype)
        logits = embed.attend(x) if self.tie else nn.Dense(self.vocab, use_bias=False, dtype=self.dtype, name="head")(x)
        return logits + bias


def masked_loss(logits: jax.Array, labels: jax.Array, is_masked: jax.Array) -> jax.Array:
    """Mean cross-entropy over the masked positions, in float32."""
    logits = logits.astype(jnp.float32)
    picked = jnp.where(jnp.arange(logits.shape[-1]) == labels[..., None], logits, 0.0).sum(axis=-1)
    losses = nn.logsumexp(logits, axis=-1) - picked
    return jnp.where(is_masked, losses, 0.0).sum() / jnp.maximum(is_masked.sum(), 1)


def make(
    *,
    batch: int = 8,
    seq: int = 32,
    width: int = 32,
    layers: int = 2,
    heads: int = 4,
    vocab: int = 256,
    tie: bool = True,
    remat: bool = False,
    dtype: str = "float32",
    learning_rate: float = 1e-2,
    optimizer: str = "adamw",
    seed: int = 0,
) -> tuple[TrainStep, dict, dict]:
    """The step, its first state, and a batch of ``tokens``, ``labels``, ``segments`` and ``masked``, all [batch, seq]."""
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of heads {heads}; choose a width that is")
    model = BERT(seq=seq, width=width, layers=layers, heads=heads, vocab=vocab, tie=tie, remat=remat, dtype=get_dtype(dtype))
    transform = get_optimizer(optimizer, learning_rate)

    def loss_fn(params, state, batch):
        logits = model.apply({"params": params}, batch["tokens"], batch["segments"])
        return masked_loss(logits, batch["labels"], batch["masked"]), {}

    tokens = jnp.zeros((1, seq), jnp.int32)
    params = initialize(model, jax.random.key(seed), tokens, tokens)["params"]
    return build_step(loss_fn, transform), initial_state(params, transform), example_batch(batch, seq, vocab, seed)


def example_batch(batch: int, seq: int, vocab: int, seed: int) -> dict[str, np.ndarray]:
    """Real text with hidden tokens; the second half of each sequence is the second segment."""
    labels = next(text.batches(batch=batch, seq=seq - 1, vocab=vocab, seed=seed))["tokens"]
    masked = np.random.default_rng(seed).random((batch, seq)) < MASKED_SHARE
    segments = np.broadcast_to(np.arange(seq) >= seq // 2, (batch, seq)).astype(np.int32)
    return {"tokens": np.where(masked, MASK, labels).astype(np.int32), "labels": labels, "segments": segments, "masked": masked}
