"""VGG: stacks of 3x3 convolutions with max-pooling in between, then two wide dense layers with dropout.

Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", 2015, table 1, columns A,
B, D and E (VGG-11, -13, -16, -19). As in AlexNet the convolutions have nearly all the arithmetic and the dense layers
nearly all the parameters, only more so.

``width`` scales every layer. ``PAPER`` is VGG-16 at the published size: 138,357,544 parameters.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from .images import example_batch
from .training import TrainStep, build_step, cross_entropy, get_dtype, initial_state, initialize, step_key

PAPER = dict(depth=16, batch=64, image=224, classes=1000, width=1.0, dropout=0.5)
SMALLEST_IMAGE = 32  # five poolings halve it

# depth -> the number of convolutions in each stack
DEPTHS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
FEATURES = (64, 128, 256, 512, 512)
UNITS = 4096


class VGG(nn.Module):
    """Stacks whose width doubles and whose image halves, then dense layers."""

    stacks: tuple[int, ...]
    classes: int
    width: float
    dropout: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):  # [batch, image, image, channels] -> [batch, classes]
        for i, (count, features) in enumerate(zip(self.stacks, FEATURES, strict=True)):
            for j in range(count):
                size = self.scaled(features)
                x = nn.relu(nn.Conv(size, (3, 3), padding=1, dtype=self.dtype, name=f"stack{i}_conv{j}")(x))
            with jax.named_scope(f"pool{i}"):
                x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        drop = nn.Dropout(self.dropout, deterministic=self.dropout == 0.0)
        for i in range(2):
            x = drop(nn.relu(nn.Dense(self.scaled(UNITS), dtype=self.dtype, name=f"dense{i}")(x)))
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x)

    def scaled(self, size: int) -> int:
        return max(1, round(size * self.width))


def make(
    *,
    batch: int = 8,
    image: int = 32,
    channels: int = 3,
    classes: int = 16,
    depth: int = 16,
    width: float = 1 / 8,
    dropout: float = 0.0,
    dtype: str = "float32",
    learning_rate: float = 0.01,
    seed: int = 0,
) -> tuple[TrainStep, dict, dict]:
    """The step, its first state, and a batch of images and labels."""
    if depth not in DEPTHS:
        raise ValueError(f"depth {depth!r} is unknown; choose one of {', '.join(map(repr, DEPTHS))}")
    if image < SMALLEST_IMAGE:
        raise ValueError(f"image {image} is too small: nothing is left after pooling; choose at least {SMALLEST_IMAGE}")
    model = VGG(stacks=DEPTHS[depth], classes=classes, width=width, dropout=dropout, dtype=get_dtype(dtype))
    optimizer = optax.sgd(learning_rate, momentum=0.9)

    def loss_fn(params, state, batch):
        rngs = {"dropout": step_key(state)} if dropout else {}
        return cross_entropy(model.apply({"params": params}, batch["image"], rngs=rngs), batch["label"]), {}

    params_key, dropout_key, batch_key = jax.random.split(jax.random.key(seed), 3)
    keys = {"params": params_key, "dropout": dropout_key}
    params = initialize(model, keys, jnp.zeros((1, image, image, channels), jnp.float32))["params"]
    state = initial_state(params, optimizer, dropout_seed=seed + 1 if dropout else None)
    example = example_batch(batch_key, batch=batch, image=image, channels=channels, classes=classes)
    return build_step(loss_fn, optimizer), state, example
