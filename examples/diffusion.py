"""A denoising diffusion model with a moving average of its weights, sampled at the end. Two lines change: (1), (2).

    python examples/diffusion.py

It learns points on a circle. Times and noise are drawn in the step, from a key that the state keeps and the step splits.
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import linen as nn

from soapjax import soap_shard  # (1)

NUM_TIMES = 100
BETAS = jnp.linspace(1e-4, 0.1, NUM_TIMES)
KEPT = jnp.cumprod(1.0 - BETAS)  # share of the point's variance that is left at each time


class Denoiser(nn.Module):
    """Says which noise was added to a point, given the noisy point and the time."""

    width: int

    @nn.compact
    def __call__(self, points, times):  # [batch, 2], [batch] -> [batch, 2]
        angles = times[:, None] / NUM_TIMES * 2.0 ** jnp.arange(1, 7)
        x = nn.Dense(self.width)(jnp.concatenate([points, jnp.sin(angles), jnp.cos(angles)], axis=1))
        for _ in range(2):
            x = x + nn.silu(nn.Dense(self.width)(x))
        return nn.Dense(2)(x)


def circle(key, batch):
    angle = jax.random.uniform(key, (batch,), maxval=2 * jnp.pi)
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)


def sample(denoise, key, num_points):
    """From noise back to points, one time after the other."""

    def back(points, drawn):
        time, key = drawn
        noise = denoise(points, jnp.full(num_points, time))
        mean = (points - BETAS[time] / jnp.sqrt(1 - KEPT[time]) * noise) / jnp.sqrt(1 - BETAS[time])
        return mean + jnp.where(time > 0, jnp.sqrt(BETAS[time]), 0.0) * jax.random.normal(key, points.shape), None

    start, *keys = jax.random.split(key, NUM_TIMES + 1)
    return jax.lax.scan(back, jax.random.normal(start, (num_points, 2)), (jnp.arange(NUM_TIMES)[::-1], jnp.stack(keys)))[0]


def main(steps: int = 1000, width: int = 256, batch: int = 256, planner: str = "mcmc"):
    model = Denoiser(width)
    optimizer = optax.adam(2e-3)

    def train_step(state, points):
        key, for_times, for_noise = jax.random.split(state["key"], 3)
        times = jax.random.randint(for_times, points.shape[:1], 0, NUM_TIMES)
        noise = jax.random.normal(for_noise, points.shape)
        kept = KEPT[times][:, None]
        noisy = jnp.sqrt(kept) * points + jnp.sqrt(1 - kept) * noise

        def loss_fn(params):
            return ((model.apply(params, noisy, times) - noise) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        average = optax.incremental_update(params, state["average"], step_size=0.02)
        return {"params": params, "average": average, "opt_state": opt_state, "key": key}, loss

    params = model.init(jax.random.key(0), jnp.zeros((1, 2)), jnp.zeros(1, int))
    state = {"params": params, "opt_state": optimizer.init(params), "key": jax.random.key(1)}
    state["average"] = jax.tree.map(jnp.copy, params)  # arrays of its own: a state that is passed in is used up
    train_step = soap_shard(train_step, planner=planner, proposals=512)  # (2) was: jax.jit(train_step)
    for step in range(steps):
        state, loss = train_step(state, circle(jax.random.key(step), batch))
        if (step + 1) % max(steps // 10, 1) == 0:
            print(f"step {step + 1}  loss {loss:.6f}")

    points = jax.jit(lambda average, key: sample(partial(model.apply, average), key, 500))(state["average"], jax.random.key(2))
    print(f"samples: radius {jnp.linalg.norm(points, axis=1).mean():.3f}; of the data 1")


if __name__ == "__main__":
    tyro.cli(main)
