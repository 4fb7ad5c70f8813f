"""LSTMs of two layers for many short sequences side by side, with a backward pass of their own.

What JAX derives from a scan adds to the gradient of the weights at every step, and runs the layers step by step together. Here a
layer runs over all steps before the next one begins, so that the next one's products with its inputs, and those that make the
gradients of weights, are one product of large matrices each. Loops end with the longest sequence that there is.

Arrays have the step first: [L, B, ...] of L steps and B sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array

HIDDEN = 256


class LstmState(NamedTuple):
    """Of two layers, [..., H] each."""

    h: tuple[Array, Array]
    c: tuple[Array, Array]

    @staticmethod
    def zeros(batch: int) -> LstmState:
        none = jnp.zeros((batch, HIDDEN))
        return LstmState((none, none), (none, none))


class Weights(NamedTuple):
    """Of an LSTM of two layers."""

    into: Array  # [F, 4H]: products with inputs are made for many steps at once
    first: Array  # [H, 4H]
    second: Array  # [2H, 4H]
    biases: Array  # [2, 4H]


class LSTM(nn.Module):
    """Makes the weights of two layers of 256 (section 5.1). Arrays: Flax (0.12) lets no module be called inside a loop."""

    inputs: int

    @nn.compact
    def __call__(self) -> Weights:
        init = nn.initializers.lecun_normal()
        sizes = dict(into=self.inputs, first=HIDDEN, second=2 * HIDDEN)
        kernels = {name: self.param(name, init, (size, 4 * HIDDEN)) for name, size in sizes.items()}
        return Weights(**kernels, biases=self.param("biases", nn.initializers.zeros, (2, 4 * HIDDEN)))


def lstm_step(w: Weights, state: LstmState, given: Array) -> LstmState:
    """One step of both layers, from `given` = inputs @ w.into [..., 4H]."""
    h0, c0 = _cell(_gates(given + state.h[0] @ w.first + w.biases[0]), state.c[0])
    h1, c1 = _cell(_gates(jnp.concatenate([h0, state.h[1]], -1) @ w.second + w.biases[1]), state.c[1])
    return LstmState((h0, h1), (c0, c1))


def lstm_steps(w: Weights, start: LstmState, given: Array, used: Array) -> tuple[Array, LstmState]:
    """States [L, B, H] of the second layer and the last ones, from `given` = inputs @ w.into [L, B, 4H].

    Each sequence has its first `used` int32 [B] steps, behind which states stay as they are; zeros behind the longest one.
    """
    lower, h0, c0 = _layer(w.first, given + w.biases[0], start.h[0], start.c[0], used)
    upper, h1, c1 = _layer(w.second[HIDDEN:], lower @ w.second[:HIDDEN] + w.biases[1], start.h[1], start.c[1], used)
    return upper, LstmState((h0, h1), (c0, c1))


def _gates(sums: Array) -> Array:
    """How much is kept, taken, what is new, and what is shown, [..., 4H]."""
    keep, take, new, show = jnp.split(sums, 4, axis=-1)
    return jnp.concatenate([jax.nn.sigmoid(keep + 1), jax.nn.sigmoid(take), jnp.tanh(new), jax.nn.sigmoid(show)], -1)


def _cell(gates: Array, c: Array) -> tuple[Array, Array]:
    keep, take, new, show = jnp.split(gates, 4, axis=-1)
    c = keep * c + take * new
    return show * jnp.tanh(c), c


class _Run(NamedTuple):
    """A layer after its steps, what its backward pass reads."""

    h: Array  # [L, B, H] behind every step
    c: Array
    gates: Array  # [L, B, 4H]


def _run(kernel: Array, given: Array, h: Array, c: Array, used: Array) -> tuple[_Run, Array, Array]:
    """A layer's steps from `given` [L, B, 4H], and its last states."""

    def step(t: Array, state: tuple[_Run, Array, Array]) -> tuple[_Run, Array, Array]:
        run, h, c = state
        gates = _gates(given[t] + h @ kernel)
        is_used = (t < used)[:, None]
        h, c = (jnp.where(is_used, new, old) for new, old in zip(_cell(gates, c), (h, c), strict=True))
        return _Run(run.h.at[t].set(h), run.c.at[t].set(c), run.gates.at[t].set(gates)), h, c

    none = jnp.zeros((*given.shape[:2], HIDDEN))
    return jax.lax.fori_loop(0, used.max(), step, (_Run(none, none, jnp.zeros_like(given)), h, c))


@jax.custom_vjp
def _layer(kernel: Array, given: Array, h: Array, c: Array, used: Array) -> tuple[Array, Array, Array]:
    """States [L, B, H] of a layer with a recurrent `kernel` [H, 4H], and the last two, from `given` [L, B, 4H]."""
    run, h, c = _run(kernel, given, h, c, used)
    return run.h, h, c


def _layer_forward(kernel: Array, given: Array, h: Array, c: Array, used: Array):
    run, *last = _run(kernel, given, h, c, used)
    return (run.h, *last), (kernel, run, h, c, used)


def _layer_backward(kept, cotangents):
    kernel, run, h_first, c_first, used = kept
    of_every, of_h, of_c = cotangents
    before = jnp.concatenate([c_first[None], run.c[:-1]])

    def step(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        of_sums, of_h, of_c = state
        t = used.max() - 1 - i
        keep, take, new, show = jnp.split(run.gates[t], 4, axis=-1)
        of_h, shown = of_h + of_every[t], jnp.tanh(run.c[t])
        within = of_c + of_h * show * (1 - shown * shown)
        of_gates = within * before[t], within * new, within * take, of_h * shown
        slopes = keep * (1 - keep), take * (1 - take), 1 - new * new, show * (1 - show)
        is_used = (t < used)[:, None]
        here = jnp.concatenate([x * s for x, s in zip(of_gates, slopes, strict=True)], -1) * is_used
        of_h = jnp.where(is_used, 0.0, of_h) + here @ kernel.T
        return of_sums.at[t].set(here), of_h, jnp.where(is_used, within * keep, of_c)

    of_sums, of_h, of_c = jax.lax.fori_loop(0, used.max(), step, (jnp.zeros_like(run.gates), of_h, of_c))
    states = jnp.concatenate([h_first[None], run.h[:-1]])
    of_kernel = states.reshape(-1, HIDDEN).T @ of_sums.reshape(-1, 4 * HIDDEN)
    return of_kernel, of_sums, of_h, of_c, np.zeros(used.shape, jax.dtypes.float0)


_layer.defvjp(_layer_forward, _layer_backward)
