"""A language model whose feed-forward layers are mixtures of experts, each token going to one or two of many.

Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", 2020, and Fedus,
Zoph and Shazeer, "Switch Transformers", 2021: a token's gate picks its ``top`` experts, an expert takes at most
``capacity = ceil(top * capacity_factor * seq / experts)`` tokens of a sequence, first come first served, and others
pass by on the residual stream. Tokens are sent and fetched by products with a 0/1 tensor, so that all shapes are fixed
and nothing is gathered. Experts are the leading dimension of their weights and of the products with them,

    [experts, batch, capacity, width] x [experts, width, hidden] -> [experts, batch, capacity, hidden]

and splitting it is expert parallelism: from split by batch to split by experts, and back, is an all-to-all.
Every ``every``-th block has experts, the others are those of ``models.transformer_lm``. Added to the loss is
``balance`` times the mean over such blocks of GShard's auxiliary loss, experts * sum(share of tokens * mean gate).

    params = the formula of ``models.transformer_lm``, where in a block with experts the mlp has
             width*experts + 2*experts*ratio*width^2                                  gate, up, down (no bias)

``PAPER`` has the sizes of the model 1.7B/64E of Du et al., "GLaM", 2022, table 4, with plain gelu layers and with
51,200 words: 26,789,015,552 parameters.
"""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from . import text
from .training import TrainStep, build_step, cross_entropy, get_dtype, get_optimizer, initial_state, initialize
from .transformer_lm import Attention, Block

PAPER = dict(batch=1024, seq=1024, width=2048, layers=24, heads=16, vocab=51_200, experts=64, top=2, remat=True, dtype="bfloat16")


class Experts(nn.Module):
    """The mixture; beside its output it returns the auxiliary loss."""

    width: int
    ratio: int
    experts: int
    top: int
    capacity_factor: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):  # [batch, seq, width] -> the same, scalar
        init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=1, out_axis=2, batch_axis=0)
        hidden = self.ratio * self.width
        up = self.param("up", init, (self.experts, self.width, hidden), jnp.float32).astype(self.dtype)
        down = self.param("down", init, (self.experts, hidden, self.width), jnp.float32).astype(self.dtype)
        capacity = math.ceil(self.top * self.capacity_factor * x.shape[1] / self.experts)
        # The choice of experts is sensitive to rounding.
        logits = nn.Dense(self.experts, use_bias=False, dtype=jnp.float32, name="gate")(x.astype(jnp.float32))
        with jax.named_scope("route"):
            combine, aux = route(nn.softmax(logits), top=self.top, capacity=capacity)
            dispatch = (combine > 0.0).astype(self.dtype)
            combine = combine.astype(self.dtype)
        with jax.named_scope("send"):
            sent = jnp.einsum("bsec,bsm->ebcm", dispatch, x)
        with jax.named_scope("up"):
            hidden = nn.gelu(jnp.einsum("ebcm,emh->ebch", sent, up))
        with jax.named_scope("down"):
            done = jnp.einsum("ebch,ehm->ebcm", hidden, down)
        with jax.named_scope("fetch"):
            return jnp.einsum("bsec,ebcm->bsm", combine, done), aux


def route(gates: jax.Array, *, top: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """From gates [batch, seq, experts] the weights [batch, seq, experts, capacity] of each token in each expert's slots.

    With ``top`` 2 the weights of a token's two experts are normalized to sum to one; second choices queue behind all
    first ones (GShard, algorithm 1, without its random dropping of second choices).
    """
    experts = gates.shape[-1]
    left, queued, chosen = gates, 0.0, []
    for _ in range(top):
        picked = jnp.argmax(left, axis=-1)[..., None] == jnp.arange(experts)
        mask = picked.astype(gates.dtype)
        place = jnp.cumsum(mask, axis=1) - mask + queued  # how many of the sequence are before this token
        queued += mask.sum(axis=1, keepdims=True)
        chosen.append((mask, jnp.sum(place * mask, axis=-1)))
        left = jnp.where(picked, 0.0, left)
    weights = [jnp.sum(gates * mask, axis=-1) for mask, _ in chosen]
    total = sum(weights) if top > 1 else 1.0
    combine = 0.0
    for weight, (mask, place) in zip(weights, chosen, strict=True):
        slot = (place[..., None] == jnp.arange(capacity)).astype(gates.dtype)  # none where the expert is full
        combine += (weight / total)[..., None, None] * mask[..., None] * slot[..., None, :]
    first = chosen[0][0]
    aux = experts * jnp.mean(jnp.sum(gates.mean(axis=1) * first.mean(axis=1), axis=-1))
    return combine, aux


class ExpertBlock(nn.Module):
    """The block of ``models.transformer_lm`` with experts in place of its mlp."""

    width: int
    heads: int
    ratio: int
    experts: int
    top: int
    capacity_factor: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        normed = nn.LayerNorm(dtype=self.dtype, name="norm1")(x)
        x = x + Attention(self.width, self.heads, self.dtype, name="attn")(normed)
        mixture = Experts(self.width, self.ratio, self.experts, self.top, self.capacity_factor, self.dtype, name="moe")
        mixed, aux = mixture(nn.LayerNorm(dtype=self.dtype, name="norm2")(x))
        return x + mixed, aux


class MoELM(nn.Module):
    """Logits over the vocabulary, and the mean auxiliary loss."""

    seq: int
    width: int
    layers: int
    heads: int
    vocab: int
    ratio: int
    experts: int
    top: int
    capacity_factor: float
    every: int
    tie: bool
    remat: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens):  # int32 [batch, seq] -> [batch, seq, vocab], scalar
        init = nn.initializers.normal(0.02)
        embed = nn.Embed(self.vocab, self.width, embedding_init=init, dtype=self.dtype, name="embed")
        position = self.param("position", init, (self.seq, self.width), jnp.float32)
        x = embed(tokens) + position.astype(self.dtype)
        plain, expert = (nn.remat(block) if self.remat else block for block in (Block, ExpertBlock))
        losses = []
        for i in range(self.layers):
            if i % self.every == self.every - 1:
                sizes = (self.width, self.heads, self.ratio, self.experts, self.top, self.capacity_factor, self.dtype)
                x, aux = expert(*sizes, name=f"blk{i}")(x)
                losses.append(aux)
            else:
                x = plain(self.width, self.heads, self.ratio, 0.0, self.dtype, name=f"blk{i}")(x)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
        logits = embed.attend(x) if self.tie else nn.Dense(self.vocab, use_bias=False, dtype=self.dtype, name="head")(x)
        return logits, sum(losses) / max(1, len(losses))


def batches(*, batch: int, seq: int, vocab: int = 256, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless training batches of real text; see ``models.text``."""
    return text.batches(batch=batch, seq=seq, vocab=vocab, seed=seed)


def make(
    *,
    batch: int = 8,
    seq: int = 16,
    width: int = 32,
    layers: int = 2,
    heads: int = 4,
    vocab: int = 256,
    mlp_ratio: int = 4,
    experts: int = 4,
    top: int = 1,
    capacity_factor: float = 1.25,
    every: int = 2,
    balance: float = 0.01,
    tie: bool = False,
    remat: bool = False,
    dtype: str = "float32",
    learning_rate: float = 1e-2,
    optimizer: str = "adamw",
    seed: int = 0,
) -> tuple[TrainStep, dict, dict]:
    """The step, its first state, and a batch ``{"tokens": int32[batch, seq + 1]}``."""
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of heads {heads}; choose a width that is")
    if not 1 <= top <= min(2, experts):
        raise ValueError(f"top {top} is not supported; choose 1 or 2, and no more than there are experts ({experts})")
    model = MoELM(
        seq=seq, width=width, layers=layers, heads=heads, vocab=vocab, ratio=mlp_ratio, experts=experts, top=top,
        capacity_factor=capacity_factor, every=every, tie=tie, remat=remat, dtype=get_dtype(dtype),
    )  # fmt: skip
    transform = get_optimizer(optimizer, learning_rate)

    def loss_fn(params, state, batch):
        tokens = batch["tokens"]
        logits, aux = model.apply({"params": params}, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:]) + balance * aux, {}

    params = initialize(model, jax.random.key(seed), jnp.zeros((1, seq), jnp.int32))["params"]
    state = initial_state(params, transform)
    return build_step(loss_fn, transform), state, next(batches(batch=batch, seq=seq, vocab=vocab, seed=seed))
