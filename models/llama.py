"""Llama in flax.linen: the transformer of ``models.transformer_lm`` without biases and positions that are learned.

Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023: root-mean-square norms before each half of
a block (Zhang and Sennrich, 2019), rotary positions on queries and keys (Su et al., 2021), and an mlp that multiplies
``silu(gate(x))`` with ``up(x)`` (Shazeer, "GLU Variants Improve Transformer", 2020). Input and output embedding are two.

    params = 2*vocab*width + layers*(4*width^2 + 3*width*hidden + 2*width) + width

``PAPER`` is the 7B model in bfloat16: 6,738,415,616 parameters, none of its blocks recomputed. ``remat=True`` recomputes
each block in the backward pass.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from . import text
from .training import TrainStep, build_step, cross_entropy, get_dtype, get_optimizer, initial_state, run_once
from .transformer_lm import MASKED

PAPER = dict(layers=32, width=4096, hidden=11008, heads=32, vocab=32_000, seq=2048, batch=128, dtype="bfloat16")


def rotated(x: jax.Array) -> jax.Array:  # [batch, seq, heads, head_width] -> the same
    """Each pair of features (k, k + head_width / 2) turned by position / 10000^(2 k / head_width)."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] / 10_000 ** (jnp.arange(half) / half)  # [seq, half]
    sin, cos = jnp.sin(angle)[:, None, :], jnp.cos(angle)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Attention(nn.Module):
    """Causal self-attention; scores and softmax in float32."""

    width: int
    heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):  # [batch, seq, width] -> the same
        head_width = self.width // self.heads

        def project(name):
            return nn.DenseGeneral((self.heads, head_width), use_bias=False, dtype=self.dtype, name=name)(x)

        query, key, value = rotated(project("query")), rotated(project("key")), project("value")
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) * head_width**-0.5
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = nn.softmax(jnp.where(causal, scores, MASKED)).astype(self.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return nn.DenseGeneral(self.width, axis=(-2, -1), use_bias=False, dtype=self.dtype, name="out")(mixed)


class FeedForward(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    width: int
    hidden: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        def dense(features, name):
            return nn.Dense(features, use_bias=False, dtype=self.dtype, name=name)

        return dense(self.width, "down")(nn.silu(dense(self.hidden, "gate")(x)) * dense(self.hidden, "up")(x))


class Block(nn.Module):
    """Attention and mlp, each behind a norm and added to the residual stream."""

    width: int
    hidden: int
    heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        normed = nn.RMSNorm(dtype=self.dtype, name="norm1")(x)
        x = x + Attention(self.width, self.heads, self.dtype, name="attn")(normed)
        normed = nn.RMSNorm(dtype=self.dtype, name="norm2")(x)
        return x + FeedForward(self.width, self.hidden, self.dtype, name="mlp")(normed)


class Llama(nn.Module):
    """Embedding, blocks, last norm, logits over the vocabulary."""

    layers: int
    width: int
    hidden: int
    heads: int
    vocab: int
    remat: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens):  # int32 [batch, seq] -> [batch, seq, vocab]
        x = nn.Embed(self.vocab, self.width, embedding_init=nn.initializers.normal(0.02), dtype=self.dtype, name="embed")(tokens)
        block = nn.remat(Block) if self.remat else Block
        for i in range(self.layers):
            x = block(self.width, self.hidden, self.heads, self.dtype, name=f"blk{i}")(x)
        x = nn.RMSNorm(dtype=self.dtype, name="norm")(x)
        return nn.Dense(self.vocab, use_bias=False, dtype=self.dtype, name="head")(x)


def batches(*, batch: int, seq: int, vocab: int = 256, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless training batches of real text; see ``models.text``."""
    return text.batches(batch=batch, seq=seq, vocab=vocab, seed=seed)


def make(
    *,
    batch: int = 8,
    seq: int = 64,
    width: int = 64,
    hidden: int = 0,
    layers: int = 2,
    heads: int = 4,
    vocab: int = 256,
    remat: bool = False,
    dtype: str = "float32",
    learning_rate: float = 1e-3,
    optimizer: str = "adamw",
    seed: int = 0,
) -> tuple[TrainStep, dict, dict]:
    """The step, its first state, and a batch ``{"tokens": int32[batch, seq + 1]}``; ``hidden=0`` is three times the width."""
    if width % (2 * heads):
        raise ValueError(f"width {width} is not a multiple of twice the heads, {2 * heads}; choose a width that is")
    model = Llama(layers, width, hidden or 3 * width, heads, vocab, remat, get_dtype(dtype))
    transform = get_optimizer(optimizer, learning_rate)

    def loss_fn(params, state, batch):
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        return cross_entropy(model.apply({"params": params}, inputs), targets), {}

    def begin(key):
        return initial_state(model.init(key, jnp.zeros((1, seq), jnp.int32))["params"], transform)

    example = next(batches(batch=batch, seq=seq, vocab=vocab, seed=seed))
    return build_step(loss_fn, transform), run_once(begin, jax.random.key(seed)), example
