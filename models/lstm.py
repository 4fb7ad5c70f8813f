"""The LSTM cell of the recurrent models, and two ways to run it over time: unrolled, or as one ``lax.scan``.

Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997, with forget gates (Gers, Schmidhuber and Cummins,
"Learning to Forget", 2000), whose bias starts at one. A step is two products, of the input and of the previous
output, with all four gates in each. Gates are a dimension of their own, ``[in, 4, hidden]``: a split of ``hidden``
splits the four gates alike, so that what the gates are joined to stays on its device.

    params = 4*hidden*(in + hidden + 1) per layer

Unrolled, every step stands in the program under a scope of its own (``step07/lstm0/input``), with the same
parameters: a planner may place every step of every layer differently. Values over time are then lists of
``[batch, width]``, so that nothing is stacked in between.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from .training import cross_entropy

GATES = 4  # input, forget, candidate, output
Carry = Any


class LSTMCell(nn.Module):
    """One layer at one step; the carry is ``(output, memory)``, or None before the first step, which has no product of it."""

    hidden: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, carry, x, *extra):
        """``(h, c), [batch, in], ... -> (h, c), h``; every extra input has a product of its own, added to the others."""

        def project(value, name):
            return nn.DenseGeneral((GATES, self.hidden), use_bias=False, dtype=self.dtype, name=name)(value)

        gates = project(x, "input") + self.param("bias", forget_bias, (GATES, self.hidden)).astype(self.dtype)
        for i, value in enumerate(extra):
            gates += project(value, f"extra{i}")
        if carry is not None:
            gates += project(carry[0], "hidden")
        write, keep, candidate, read = jnp.unstack(gates, axis=1)
        memory = nn.sigmoid(write) * nn.tanh(candidate)
        if carry is not None:
            memory += nn.sigmoid(keep) * carry[1]
        output = nn.sigmoid(read) * nn.tanh(memory)
        return (output, memory), output


def forget_bias(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Zeros, and ones for the forget gate: a new net remembers."""
    return jnp.zeros(shape).at[1].set(1.0)


class LSTMStack(nn.Module):
    """Layers of LSTM on top of one another, at one step; from layer ``residual_from`` on, a layer's input is added.

    A tuple as input stands for its parts side by side: the first layer has a product with each.
    """

    hidden: int
    layers: int
    dtype: jnp.dtype
    residual_from: int = 1 << 30

    @nn.compact
    def __call__(self, carry, x):  # one (h, c) per layer, [batch, in] -> the same, [batch, hidden]
        inputs, carries = x if isinstance(x, tuple) else (x,), []
        for i in range(self.layers):
            new, y = LSTMCell(self.hidden, self.dtype, name=f"lstm{i}")(None if carry is None else carry[i], *inputs)
            inputs = (inputs[0] + y,) if i >= self.residual_from else (y,)
            carries.append(new)
        return tuple(carries), inputs[0]


def no_carry(batch: int, hidden: int, layers: int, dtype: jnp.dtype) -> Carry:
    """Zeros to start a scan with, one pair per layer."""
    zeros = jnp.zeros((batch, hidden), dtype)
    return ((zeros, zeros),) * layers


def over_time(
    step: Callable[[Carry, Any], tuple[Carry, Any]], carry: Carry, inputs: Sequence[Any], *, reverse: bool = False
) -> tuple[Carry, list[Any]]:
    """Runs a step over a list of inputs, each under its own scope; the last carry, and the outputs in order of time."""
    times = range(len(inputs))
    digits = len(str(len(inputs) - 1))
    outputs: list[Any] = [None] * len(inputs)
    for t in reversed(times) if reverse else times:
        with jax.named_scope(f"step{t:0{digits}}"):
            carry, outputs[t] = step(carry, inputs[t])
    return carry, outputs


def scan_time(module: nn.Module, carry: Carry, inputs: Any, *others: Any, reverse: bool = False) -> tuple[Carry, Any]:
    """Runs a module as one loop over dim 1 of ``inputs`` with the same parameters in every trip; outputs are stacked.

    ``others`` are handed to every trip as they are.
    """
    body = nn.scan(
        lambda module, carry, x, *others: module(carry, x, *others),
        variable_broadcast="params",
        split_rngs={"params": False},
        in_axes=(1, *(nn.broadcast for _ in others)),
        out_axes=1,
        reverse=reverse,
    )
    return body(module, carry, inputs, *others)


def sequence_loss(logits: list[jax.Array] | jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy over batch and time: of one array ``[batch, steps, vocab]``, or of a list, step by step.

    A step's own loss picks the label's logit by comparing, not by an index: it stays one operator, without a gather.
    """
    if not isinstance(logits, list):
        return cross_entropy(logits, labels)

    def step(t, logits):
        logits, label = logits.astype(jnp.float32), jax.lax.slice_in_dim(labels, t, t + 1, axis=1)
        with jax.named_scope("loss"):
            picked = jnp.where(jnp.arange(logits.shape[-1]) == label, logits, 0.0).sum(axis=-1)
            return t + 1, (nn.logsumexp(logits, axis=-1) - picked).mean()

    with jax.named_scope("losses"):  # the root of the paths of the steps' scopes, as a model is
        _, losses = over_time(step, 0, logits)
        return jnp.stack(losses).mean()
