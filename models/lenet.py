"""LeNet-5: two convolutions with pooling, then three dense layers.

LeCun, Bottou, Bengio, Haffner, "Gradient-Based Learning Applied to Document Recognition", 1998, section II.B. As
usual today, each feature map of the second convolution sees all maps of the first, pooling has no weights of its
own, and the output is a softmax instead of radial basis functions. With ``image=28`` the sizes are

    28x28x1 -> conv 5x5 -> 28x28x6 -> pool -> 14x14x6 -> conv 5x5 -> 10x10x16 -> pool -> 5x5x16 -> 120 -> 84 -> classes

which with ten classes makes 61,706 parameters (``PAPER``, with a batch of 64).
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from .images import example_batch
from .training import TrainStep, build_step, cross_entropy, initial_state

PAPER = dict(batch=64, image=28, channels=1, classes=10)
POOLS = {"average": nn.avg_pool, "max": nn.max_pool}


class LeNet(nn.Module):
    """LeNet-5 with tanh; ``pool`` is a key of ``POOLS``."""

    classes: int
    pool: str

    @nn.compact
    def __call__(self, x):  # [batch, image, image, channels] -> [batch, classes]
        pool = POOLS[self.pool]
        # The paper pads its 28 x 28 digits to 32 x 32; padding the first convolution is the same.
        x = nn.tanh(nn.Conv(6, (5, 5), padding="SAME", name="conv1")(x))
        x = pool(x, (2, 2), strides=(2, 2))
        x = nn.tanh(nn.Conv(16, (5, 5), padding="VALID", name="conv2")(x))
        x = pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        x = nn.tanh(nn.Dense(120, name="dense1")(x))
        x = nn.tanh(nn.Dense(84, name="dense2")(x))
        return nn.Dense(self.classes, name="head")(x)


def make(
    *,
    batch: int = 64,
    image: int = 28,
    channels: int = 1,
    classes: int = 10,
    pool: str = "average",
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> tuple[TrainStep, dict, dict]:
    """The step, its first state, and a batch of images and labels."""
    if pool not in POOLS:
        raise ValueError(f"pool {pool!r} is unknown; choose one of {', '.join(sorted(POOLS))}")
    if image < 12:
        raise ValueError(f"image {image} is too small: nothing is left after the second pooling; choose at least 12")
    model = LeNet(classes=classes, pool=pool)
    optimizer = optax.adam(learning_rate)

    def loss_fn(params, state, batch):
        return cross_entropy(model.apply({"params": params}, batch["image"]), batch["label"]), {}

    init_key, batch_key = jax.random.split(jax.random.key(seed))
    params = jax.jit(model.init)(init_key, jnp.zeros((1, image, image, channels), jnp.float32))["params"]
    example = example_batch(batch_key, batch=batch, image=image, channels=channels, classes=classes)
    return build_step(loss_fn, optimizer), initial_state(params, optimizer), example
