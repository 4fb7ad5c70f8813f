"""A decoder-only transformer language model in flax.linen, trained on bytes.

Pre-layer-norm blocks (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019) over the
attention of Vaswani et al., "Attention Is All You Need", 2017. The query, key and value projections are separate
and keep heads as a dimension of their own, ``[width, heads, head_width]``, so that the split of Shoeybi et al.,
"Megatron-LM", 2019 (heads of attention, columns then rows of the mlp) is a split of one named dimension each.

    params = vocab*width + seq*width                                      embed, position
           + layers*(4*(width^2 + width) + 4*width                        attention, two layer norms
                     + 2*ratio*width^2 + ratio*width + width)             mlp
           + 2*width + (0 if tie else width*vocab)                        last layer norm, head

With ``scan=True`` the layers are one ``lax.scan`` over parameters stacked as ``blocks/...[layers, ...]``; without
it they are ``blk0/...``, ``blk1/...``. ``remat=True`` recomputes each block in the backward pass (Chen et al.,
"Training Deep Nets with Sublinear Memory Cost", 2016), ``remat="attention"`` the core of its attention.
``loss_chunks=n`` takes the loss in n pieces of the sequence and recomputes their logits in the backward pass, so that never more
than one piece's logits exist.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from . import text
from .training import TrainStep, build_step, cross_entropy, get_dtype, get_optimizer, initial_state, run_once, step_key

MASKED = -1e30  # finite: a row that is masked everywhere gives a uniform softmax instead of nan


class Attention(nn.Module):
    """Causal self-attention; scores and softmax in float32, dropout on its weights."""

    width: int
    heads: int
    dtype: jnp.dtype
    dropout: float = 0.0
    remat: bool = False

    @nn.compact
    def __call__(self, x):  # [batch, seq, width] -> the same
        head_width = self.width // self.heads

        def project(name):
            return nn.DenseGeneral((self.heads, head_width), dtype=self.dtype, name=name)(x)

        query, key, value = project("query"), project("key"), project("value")  # [batch, seq, heads, head_width]
        mixed = (nn.remat(Attention.mix) if self.remat else Attention.mix)(self, query, key, value)
        return nn.DenseGeneral(self.width, axis=(-2, -1), dtype=self.dtype, name="out")(mixed)


    def mix(self, query, key, value):
        """The core, without parameters: what Korthikanti et al. (2022, section 5) recompute and nothing else."""
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) * query.shape[-1] ** -0.5
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = nn.softmax(jnp.where(causal, scores, MASKED)).astype(self.dtype)
        weights = nn.Dropout(self.dropout, deterministic=self.dropout == 0.0)(weights)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


class FeedForward(nn.Module):
    """Dense to ``ratio * width``, gelu, dense back."""

    width: int
    ratio: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        hidden = nn.gelu(nn.Dense(self.ratio * self.width, dtype=self.dtype, name="up")(x))
        return nn.Dense(self.width, dtype=self.dtype, name="down")(hidden)


class Block(nn.Module):
    """Attention and mlp, each behind a layer norm, with dropout before each is added to the residual stream."""

    width: int
    heads: int
    ratio: int
    dropout: float
    dtype: jnp.dtype
    attention_dropout: float = 0.0
    remat_attention: bool = False

    @nn.compact
    def __call__(self, x):
        drop = nn.Dropout(self.dropout, deterministic=self.dropout == 0.0)
        normed = nn.LayerNorm(dtype=self.dtype, name="norm1")(x)
        sizes = (self.width, self.heads, self.dtype, self.attention_dropout, self.remat_attention)
        x = x + drop(Attention(*sizes, name="attn")(normed))
        normed = nn.LayerNorm(dtype=self.dtype, name="norm2")(x)
        return x + drop(FeedForward(self.width, self.ratio, self.dtype, name="mlp")(normed))


class TransformerLM(nn.Module):
    """Token and position embedding, blocks, last layer norm, logits over the vocabulary.

    With ``hidden=True`` a call stops before the logits: [batch, seq, width].
    """

    seq: int
    width: int
    layers: int
    heads: int
    vocab: int
    ratio: int
    scan: bool
    remat: bool | str
    dropout: float
    tie: bool
    dtype: jnp.dtype
    attention_dropout: float = 0.0

    @nn.compact
    def __call__(self, tokens, hidden=False):  # int32 [batch, seq] -> [batch, seq, vocab]
        init = nn.initializers.normal(0.02)
        embed = nn.Embed(self.vocab, self.width, embedding_init=init, dtype=self.dtype, name="embed")
        position = self.param("position", init, (self.seq, self.width), jnp.float32)
        x = embed(tokens) + position.astype(self.dtype)
        # Inside a scan nothing can be merged across the recomputation, so its barriers would only cost time.
        block = nn.remat(Block, prevent_cse=not self.scan) if self.remat is True else Block
        sizes = (self.width, self.heads, self.ratio, self.dropout, self.dtype, self.attention_dropout, self.remat == "attention")
        if self.scan:
            body = nn.scan(
                lambda blocks, x, _: (blocks(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=self.layers,
            )
            x, _ = body(block(*sizes, name="blocks"), x, None)
        else:
            for i in range(self.layers):
                x = block(*sizes, name=f"blk{i}")(x)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
        if hidden:
            return x
        if self.tie:
            return embed.attend(x)
        return nn.Dense(self.vocab, use_bias=False, dtype=self.dtype, name="head")(x)

    def chunked_loss(self, params, x, targets, chunks: int):
        """Mean cross-entropy of [batch, seq, width] before the logits, `chunks` pieces of the sequence one after another."""
        head = params["embed"]["embedding"].T if self.tie else params["head"]["kernel"]  # [width, vocab]
        head = head.astype(self.dtype)

        @jax.checkpoint
        def loss_of(piece):
            x, targets = piece
            return cross_entropy(x @ head, targets)

        def pieces(array):  # [batch, seq, ...] -> [chunks, batch, seq / chunks, ...]
            batch, seq, *rest = array.shape
            return jnp.moveaxis(array.reshape(batch, chunks, seq // chunks, *rest), 1, 0)

        return jax.lax.map(loss_of, (pieces(x), pieces(targets))).mean()


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
    scan: bool = False,
    remat: bool | str = False,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    loss_chunks: int = 1,
    tie: bool = False,
    dtype: str = "float32",
    learning_rate: float = 1e-3,
    optimizer: str = "adamw",
    seed: int = 0,
) -> tuple[TrainStep, dict, dict]:
    """The step, its first state, and a batch ``{"tokens": int32[batch, seq + 1]}``."""
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of heads {heads}; choose a width that is")
    if remat not in (False, True, "attention"):
        raise ValueError(f"remat {remat!r} is none of False, True (whole blocks) and 'attention' (its core); choose one")
    if loss_chunks < 1 or seq % loss_chunks:
        raise ValueError(f"loss_chunks {loss_chunks} do not divide the sequence of {seq}; choose a divisor")
    model = TransformerLM(
        seq=seq,
        width=width,
        layers=layers,
        heads=heads,
        vocab=vocab,
        ratio=mlp_ratio,
        scan=scan,
        remat=remat,
        dropout=dropout,
        attention_dropout=attention_dropout,
        tie=tie,
        dtype=get_dtype(dtype),
    )
    transform = get_optimizer(optimizer, learning_rate)
    drops = dropout > 0 or attention_dropout > 0

    def loss_fn(params, state, batch):
        rngs = {"dropout": step_key(state)} if drops else {}
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        if loss_chunks > 1:
            x = model.apply({"params": params}, inputs, hidden=True, rngs=rngs)
            return model.chunked_loss(params, x, targets, loss_chunks), {}
        return cross_entropy(model.apply({"params": params}, inputs, rngs=rngs), targets), {}

    params_key, dropout_key = jax.random.split(jax.random.key(seed))
    keys = {"params": params_key, "dropout": dropout_key}

    def begin(keys):
        params = model.init(keys, jnp.zeros((1, seq), jnp.int32))["params"]
        return initial_state(params, transform, dropout_seed=seed + 1 if drops else None)

    state = run_once(begin, keys)
    return build_step(loss_fn, transform), state, next(batches(batch=batch, seq=seq, vocab=vocab, seed=seed))
