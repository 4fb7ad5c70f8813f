"""The transformer of ``models.transformer_lm`` again, written in flax.nnx.

Same sizes, same names of parameters, same loss on copied parameters. What differs is how the model meets the
training step: an nnx module is an object with arrays inside. ``nnx.split`` takes it apart into a graph definition,
which is static and which the step closes over, and the parameters, which go into the state as a dict of arrays;
``nnx.merge`` puts it together again inside the loss. Random keys are passed in at the call, never kept inside the
module, so parameters are all there is to split off and the graph definition holds no array.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from . import text
from .training import TrainStep, build_step, cross_entropy, get_dtype, get_optimizer, initial_state, step_key

MASKED = -1e30  # finite: a row that is masked everywhere gives a uniform softmax instead of nan


class Attention(nnx.Module):
    """Causal self-attention; scores and softmax in float32."""

    def __init__(self, width: int, heads: int, dtype: jnp.dtype, *, rngs: nnx.Rngs):
        split = (heads, width // heads)
        self.dtype = dtype
        self.query = nnx.LinearGeneral(width, split, dtype=dtype, rngs=rngs)
        self.key = nnx.LinearGeneral(width, split, dtype=dtype, rngs=rngs)
        self.value = nnx.LinearGeneral(width, split, dtype=dtype, rngs=rngs)
        self.out = nnx.LinearGeneral(split, width, axis=(-2, -1), dtype=dtype, rngs=rngs)

    def __call__(self, x):  # [batch, seq, width] -> the same
        query, key, value = self.query(x), self.key(x), self.value(x)  # [batch, seq, heads, head_width]
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) * query.shape[-1] ** -0.5
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = nnx.softmax(jnp.where(causal, scores, MASKED)).astype(self.dtype)
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, value))


class FeedForward(nnx.Module):
    """Dense to ``ratio * width``, gelu, dense back."""

    def __init__(self, width: int, ratio: int, dtype: jnp.dtype, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, ratio * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(ratio * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class Block(nnx.Module):
    """Attention and mlp, each behind a layer norm, with dropout before each is added to the residual stream."""

    def __init__(self, width: int, heads: int, ratio: int, dropout: float, dtype: jnp.dtype, *, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.attn = Attention(width, heads, dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.mlp = FeedForward(width, ratio, dtype, rngs=rngs)
        self.drop = nnx.Dropout(dropout, deterministic=dropout == 0.0)

    def __call__(self, x, rngs: nnx.Rngs | None):
        x = x + self.drop(self.attn(self.norm1(x)), rngs=rngs)
        return x + self.drop(self.mlp(self.norm2(x)), rngs=rngs)


class TransformerLM(nnx.Module):
    """Token and position embedding, blocks, last layer norm, logits over the vocabulary."""

    def __init__(
        self,
        *,
        seq: int,
        width: int,
        layers: int,
        heads: int,
        vocab: int,
        ratio: int,
        dropout: float,
        tie: bool,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.normal(0.02)
        self.layers, self.tie, self.dtype = layers, tie, dtype
        self.embed = nnx.Embed(vocab, width, embedding_init=init, dtype=dtype, rngs=rngs)
        self.position = nnx.Param(init(rngs.params(), (seq, width), jnp.float32))
        for i in range(layers):
            # An attribute per block, not a list: the path of a leaf is then the same as in linen.
            setattr(self, f"blk{i}", Block(width, heads, ratio, dropout, dtype, rngs=rngs))
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        if not tie:
            self.head = nnx.Linear(width, vocab, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens, rngs: nnx.Rngs | None = None):  # int32 [batch, seq] -> [batch, seq, vocab]
        x = self.embed(tokens) + self.position[...].astype(self.dtype)
        for i in range(self.layers):
            x = getattr(self, f"blk{i}")(x, rngs)
        x = self.norm(x)
        return self.embed.attend(x) if self.tie else self.head(x)


def batches(*, batch: int, seq: int, vocab: int = 256, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless training batches of real text; see ``models.text``."""
    return text.batches(batch=batch, seq=seq, vocab=vocab, seed=seed)


def make(
    *,
    batch: int = 8,
    seq: int = 64,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    vocab: int = 256,
    mlp_ratio: int = 4,
    dropout: float = 0.0,
    tie: bool = False,
    dtype: str = "float32",
    learning_rate: float = 1e-3,
    optimizer: str = "adamw",
    seed: int = 0,
) -> tuple[TrainStep, dict, dict]:
    """The step, its first state, and a batch ``{"tokens": int32[batch, seq + 1]}``."""
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of heads {heads}; choose a width that is")
    model = TransformerLM(
        seq=seq,
        width=width,
        layers=layers,
        heads=heads,
        vocab=vocab,
        ratio=mlp_ratio,
        dropout=dropout,
        tie=tie,
        dtype=get_dtype(dtype),
        rngs=nnx.Rngs(params=jax.random.key(seed)),
    )
    graphdef, variables = nnx.split(model)
    params = nnx.to_pure_dict(variables)
    transform = get_optimizer(optimizer, learning_rate)

    def loss_fn(params, state, batch):
        rngs = nnx.Rngs(dropout=step_key(state)) if dropout else None
        tokens = batch["tokens"]
        logits = nnx.merge(graphdef, nnx.State(params))(tokens[:, :-1], rngs)
        return cross_entropy(logits, tokens[:, 1:]), {}

    state = initial_state(params, transform, dropout_seed=seed + 1 if dropout else None)
    return build_step(loss_fn, transform), state, next(batches(batch=batch, seq=seq, vocab=vocab, seed=seed))
