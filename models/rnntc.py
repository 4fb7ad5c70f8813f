"""Text classification by a recurrent net: embedding, LSTM layers, and a softmax over the classes after the last step.

The RNNTC of the paper of FlexFlow (Jia, Zaharia and Aiken, 2019, section 8.1; ``PAPER``), after Kim, "Convolutional
Neural Networks for Sentence Classification", 2014, for the data: four layers of 1024, 40 steps, movie reviews of two
classes. Kim counts 18,765 words; 18,768 has more divisors. The width of the embedding is that of the LSTM.

    params = vocab*hidden + layers*4*hidden*(2*hidden + 1) + hidden*classes + classes     PAPER: 52,791,298

Unrolled, every step of every layer is an operator of its own; with ``scan=True`` each layer is one loop over time.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from . import text
from .lstm import LSTMStack, no_carry, over_time, scan_time
from .training import TrainStep, build_step, cross_entropy, get_dtype, get_optimizer, initial_state, initialize

PAPER = dict(batch=64, seq=40, hidden=1024, layers=4, vocab=18_768, classes=2, optimizer="sgd", learning_rate=0.1)


class RNNTC(nn.Module):
    """Logits of the class of a whole sequence."""

    hidden: int
    layers: int
    vocab: int
    classes: int
    scan: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens):  # int32 [batch, seq] -> [batch, classes]
        x = nn.Embed(self.vocab, self.hidden, dtype=self.dtype, name="embed")(tokens)
        lstm = LSTMStack(self.hidden, self.layers, self.dtype, name="rnn")
        if self.scan:
            carry, _ = scan_time(lstm, no_carry(len(tokens), self.hidden, self.layers, self.dtype), x)
        else:
            carry, _ = over_time(lstm, None, jnp.unstack(x, axis=1))
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(carry[-1][0])


def make(
    *,
    batch: int = 8,
    seq: int = 8,
    hidden: int = 32,
    layers: int = 4,
    vocab: int = 256,
    classes: int = 2,
    scan: bool = False,
    dtype: str = "float32",
    learning_rate: float = 1e-2,
    optimizer: str = "adam",
    seed: int = 0,
) -> tuple[TrainStep, dict, dict]:
    """The step, its first state, and a batch ``{"tokens": int32[batch, seq], "label": int32[batch]}``."""
    model = RNNTC(hidden=hidden, layers=layers, vocab=vocab, classes=classes, scan=scan, dtype=get_dtype(dtype))
    transform = get_optimizer(optimizer, learning_rate)

    def loss_fn(params, state, batch):
        return cross_entropy(model.apply({"params": params}, batch["tokens"]), batch["label"]), {}

    init_key, label_key = jax.random.split(jax.random.key(seed))
    params = initialize(model, init_key, jnp.zeros((1, 2), jnp.int32))["params"]
    tokens = next(text.batches(batch=batch, seq=seq - 1, vocab=vocab, seed=seed))["tokens"]
    example = {"tokens": tokens, "label": jax.random.randint(label_key, (batch,), 0, classes, jnp.int32)}
    return build_step(loss_fn, transform), initial_state(params, transform), example
