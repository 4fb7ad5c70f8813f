"""An nnx step that changes its model and optimizer in place, as `nnx.jit` runs it. Two lines change: (1), (2).

    python examples/nnx_step.py

The model is a small image classifier with batch norm, whose moving averages the step moves; images are drawn, not read.
"""

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx

from soapjax import soap_shard  # (1)


class Classifier(nnx.Module):
    """Convolution, batch norm, relu, twice; then the mean over the image, and a dense layer."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, width, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(width, rngs=rngs)
        self.conv2 = nnx.Conv(width, 2 * width, (3, 3), strides=2, rngs=rngs)
        self.norm2 = nnx.BatchNorm(2 * width, rngs=rngs)
        self.head = nnx.Linear(2 * width, 4, rngs=rngs)

    def __call__(self, images):  # [batch, 16, 16, 1] -> [batch, 4]
        x = nnx.relu(self.norm1(self.conv1(images)))
        x = nnx.relu(self.norm2(self.conv2(x)))
        return self.head(x.mean(axis=(1, 2)))


def stripes(key, batch):
    """Noisy stripes in one of four directions, and the direction."""
    for_direction, for_phase, for_noise = jax.random.split(key, 3)
    direction = jax.random.randint(for_direction, (batch,), 0, 4)
    angle = direction[:, None, None] * jnp.pi / 4
    phase = jax.random.uniform(for_phase, (batch, 1, 1), maxval=2 * jnp.pi)
    y, x = jnp.mgrid[:16, :16]
    images = jnp.sin(1.2 * (jnp.cos(angle) * x + jnp.sin(angle) * y) + phase)
    return {"image": (images + jax.random.normal(for_noise, images.shape))[..., None], "direction": direction}


def train_step(model, optimizer, batch):
    def loss_fn(model):
        logits = model(batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["direction"]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def main(steps: int = 60, width: int = 32, batch: int = 64, planner: str = "mcmc"):
    model = Classifier(width, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    step_fn = soap_shard(train_step, planner=planner, proposals=512)  # (2) was: nnx.jit(train_step)
    for step in range(steps):
        loss = step_fn(model, optimizer, stripes(jax.random.key(step), batch))
        if (step + 1) % max(steps // 10, 1) == 0:
            print(f"step {step + 1}  loss {loss:.6f}")

    model.eval()
    unseen = stripes(jax.random.key(steps), 500)
    right = nnx.jit(lambda model, batch: (model(batch["image"]).argmax(axis=-1) == batch["direction"]).mean())(model, unseen)
    print(f"right: {right:.1%} of 500 unseen")


if __name__ == "__main__":
    tyro.cli(main)
