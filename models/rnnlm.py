"""A recurrent language model: embedding, LSTM layers, and a softmax over the vocabulary at every step.

Zaremba, Sutskever and Vinyals, "Recurrent Neural Network Regularization", 2014, without dropout. Sizes of the paper
of FlexFlow (Jia, Zaharia and Aiken, 2019, section 8.1; ``PAPER``): two layers of 2048, 40 steps, the 10,000 words of
Penn Treebank. The width of the embedding is that of the LSTM.

    params = vocab*hidden + layers*4*hidden*(2*hidden + 1) + hidden*vocab + vocab     PAPER: 108,095,248

Unrolled, every step of every layer is an operator of its own, and so is every step's softmax layer; with
``scan=True`` each layer is one loop over time, and the softmax layer one product for all steps.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from . import text
from .lstm import LSTMStack, no_carry, over_time, scan_time, sequence_loss
from .training import TrainStep, build_step, get_dtype, get_optimizer, initial_state, initialize

PAPER = dict(batch=64, seq=40, hidden=2048, layers=2, vocab=10_000, optimizer="sgd", learning_rate=0.1)


class RNNLM(nn.Module):
    """Logits of the next token at every step: a list of ``[batch, vocab]``, or one array with ``scan``."""

    hidden: int
    layers: int
    vocab: int
    scan: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens):  # int32 [batch, seq]
        x = nn.Embed(self.vocab, self.hidden, dtype=self.dtype, name="embed")(tokens)
        lstm = LSTMStack(self.hidden, self.layers, self.dtype, name="rnn")
        head = nn.Dense(self.vocab, dtype=self.dtype, name="head")
        if self.scan:
            return head(scan_time(lstm, no_carry(len(tokens), self.hidden, self.layers, self.dtype), x)[1])

        def step(carry, x):
            carry, y = lstm(carry, x)
            return carry, head(y)

        return over_time(step, None, jnp.unstack(x, axis=1))[1]


def batches(*, batch: int, seq: int, vocab: int = 256, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless training batches of real text; see ``models.text``."""
    return text.batches(batch=batch, seq=seq, vocab=vocab, seed=seed)


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
    """The step, its first state, and a batch ``{"tokens": int32[batch, seq + 1]}``."""
    model = RNNLM(hidden=hidden, layers=layers, vocab=vocab, scan=scan, dtype=get_dtype(dtype))
    transform = get_optimizer(optimizer, learning_rate)

    def loss_fn(params, state, batch):
        tokens = batch["tokens"]
        return sequence_loss(model.apply({"params": params}, tokens[:, :-1]), tokens[:, 1:]), {}

    params = initialize(model, jax.random.key(seed), jnp.zeros((1, 2), jnp.int32))["params"]
    state = initial_state(params, transform)
    return build_step(loss_fn, transform), state, next(batches(batch=batch, seq=seq, vocab=vocab, seed=seed))
