"""An equinox model: what is not an array stays outside the step. Two lines change: (1), (2).

    python examples/equinox_step.py

`eqx.filter_jit` parts a model into arrays and the rest by itself; `jax.jit` and soapjax are given the arrays only, as the state.
The model reads the digits of a number from left to right and says what the number is modulo seven.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import tyro

from soapjax import soap_shard  # (1)


class Reader(eqx.Module):
    """A GRU over digits, and a dense layer on its last state."""

    embed: eqx.nn.Embedding
    cell: eqx.nn.GRUCell
    head: eqx.nn.MLP

    def __init__(self, width: int, *, key):
        for_embed, for_cell, for_head = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(10, width, key=for_embed)
        self.cell = eqx.nn.GRUCell(width, width, key=for_cell)
        self.head = eqx.nn.MLP(width, 7, width, depth=1, key=for_head)

    def __call__(self, digits):  # [digits] -> [7]
        def read(state, digit):
            return self.cell(self.embed(digit), state), None

        state, _ = jax.lax.scan(read, jnp.zeros(self.cell.hidden_size), digits)
        return self.head(state)


def numbers(key, batch, num_digits=3):
    digits = jax.random.randint(key, (batch, num_digits), 0, 10)
    return digits, (digits @ 10 ** jnp.arange(num_digits - 1, -1, -1)) % 7


def main(steps: int = 400, width: int = 128, batch: int = 256, planner: str = "mcmc"):
    model = Reader(width, key=jax.random.key(0))
    optimizer = optax.adam(3e-3)
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)

    def train_step(arrays, opt_state, digits, remainder):
        def loss_fn(arrays):
            logits = jax.vmap(eqx.combine(arrays, rest))(digits)
            return optax.softmax_cross_entropy_with_integer_labels(logits, remainder).mean()

        loss, grads = jax.value_and_grad(loss_fn)(arrays)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(arrays, updates), opt_state, loss

    train_step = soap_shard(train_step, planner=planner, proposals=512)  # (2) was: jax.jit(train_step)
    opt_state = optimizer.init(arrays)
    for step in range(steps):
        arrays, opt_state, loss = train_step(arrays, opt_state, *numbers(jax.random.key(step), batch))
        if (step + 1) % max(steps // 10, 1) == 0:
            print(f"step {step + 1}  loss {loss:.6f}")

    digits, remainder = numbers(jax.random.key(steps), 500)
    right = jax.jit(jax.vmap(eqx.combine(arrays, rest)))(digits).argmax(axis=-1) == remainder
    print(f"right: {right.mean():.1%} of 500 numbers")


if __name__ == "__main__":
    tyro.cli(main)
