"""Proximal policy optimisation, one iteration a step: play, estimate advantages, many updates. Two lines change: (1), (2).

    python examples/ppo.py

The worlds are pendulums in JAX, which the policy brings up by pushes to the left, to the right, or none.
"""

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import linen as nn
from flax.training.train_state import TrainState

from soapjax import soap_shard  # (1)

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class ActorCritic(nn.Module):
    width: int

    @nn.compact
    def __call__(self, world):  # [..., 2] -> logits of three pushes [..., 3], value [...]
        x = jnp.stack([jnp.cos(world[..., 0]), jnp.sin(world[..., 0]), world[..., 1]], axis=-1)
        x = nn.tanh(nn.Dense(self.width)(nn.tanh(nn.Dense(self.width)(x))))
        return nn.Dense(3)(x), nn.Dense(1)(x)[..., 0]


def move(world, push):
    """A twentieth of a second: angle and speed [worlds, 2], push 0, 1 or 2 [worlds] -> the same, and the reward [worlds]."""
    speed = 0.98 * world[:, 1] + 0.05 * (5 * jnp.sin(world[:, 0]) + 6.0 * (push - 1))
    angle = world[:, 0] + 0.05 * speed
    return jnp.stack([angle, speed], axis=1), 0.1 * jnp.cos(angle)


def estimate_advantages(rewards, values, last_value, discount=0.97, decay=0.95):
    """Generalised advantage estimation, from the last move to the first; rewards and values are [horizon, worlds]."""
    def back(later, now):
        (advantage, next_value), (reward, value) = later, now
        advantage = reward + discount * next_value - value + discount * decay * advantage
        return (advantage, value), advantage

    return jax.lax.scan(back, (jnp.zeros_like(last_value), last_value), (rewards, values), reverse=True)[1]


def iteration(state, world, key, horizon=32, epochs=4, minibatches=4):
    def play(world, key):
        logits, value = state.apply_fn(state.params, world)
        push = jax.random.categorical(key, logits)
        moved, reward = move(world, push)
        return moved, dict(world=world, push=push, log_prob=-cross_entropy(logits, push), value=value, reward=reward)

    for_play, for_order = jax.random.split(key)
    world, played = jax.lax.scan(play, world, jax.random.split(for_play, horizon))
    played["advantage"] = estimate_advantages(played["reward"], played["value"], state.apply_fn(state.params, world)[1])
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), played)

    def update(state, rows):
        part = jax.tree.map(lambda x: x[rows], flat)

        def loss_fn(params):
            logits, value = state.apply_fn(params, part["world"])
            ratio = jnp.exp(-cross_entropy(logits, part["push"]) - part["log_prob"])
            gain = jax.nn.standardize(part["advantage"], axis=0)
            policy_loss = -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean()
            return policy_loss + 0.5 * ((value - part["value"] - part["advantage"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    orders = jnp.stack([jax.random.permutation(k, flat["push"].size) for k in jax.random.split(for_order, epochs)])
    state, losses = jax.lax.scan(update, state, orders.reshape(epochs * minibatches, -1))
    return state, world, {"loss": losses.mean(), "reward": played["reward"].mean()}


def main(steps: int = 100, width: int = 64, worlds: int = 64, planner: str = "mcmc"):
    world = jax.random.uniform(jax.random.key(0), (worlds, 2), minval=-jnp.pi, maxval=jnp.pi)
    model = ActorCritic(width)
    state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(1), world), tx=optax.adam(1e-3))
    step_fn = soap_shard(iteration, planner=planner, proposals=512)  # (2) was: jax.jit(iteration)
    for step in range(steps):
        state, world, metrics = step_fn(state, world, jax.random.key(step))
        if (step + 1) % max(steps // 10, 1) == 0:
            print(f"step {step + 1}  loss {metrics['loss']:.6f}  reward {metrics['reward']:.6f}")


if __name__ == "__main__":
    tyro.cli(main)
