"""Two towers of dense layers over the same features, joined by one output layer, as in click and retrieval models.

The towers need nothing of each other: each may run on devices of its own, at the same time, and only their last, narrow
activations meet. Splitting both over all devices instead sends every hidden activation, or every gradient.

    params = 2*(features*width + width + (layers - 1)*(width*width + width) + width*out + out) + 2*out*classes + classes
"""

import jax.numpy as jnp
import optax
from flax import linen as nn

from .training import TrainStep, classifier_of_features, get_dtype


class Tower(nn.Module):
    """``layers`` hidden layers of ``width``, then ``out`` features."""

    width: int
    layers: int
    out: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):  # [batch, features] -> [batch, out]
        for i in range(self.layers):
            x = nn.relu(nn.Dense(self.width, dtype=self.dtype, name=f"dense{i}")(x))
        return nn.Dense(self.out, dtype=self.dtype, name="out")(x)


class TwoTowers(nn.Module):
    width: int
    layers: int
    out: int
    classes: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):  # [batch, features] -> [batch, classes]
        towers = [Tower(self.width, self.layers, self.out, self.dtype, name=name)(x) for name in ("left", "right")]
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(jnp.concatenate(towers, -1))


def make(
    *,
    batch: int = 64,
    width: int = 256,
    layers: int = 3,
    out: int = 16,
    classes: int = 16,
    features: int = 64,
    dtype: str = "float32",
    learning_rate: float = 1e-2,
    seed: int = 0,
) -> tuple[TrainStep, dict, dict]:
    """The step (plain SGD), its first state, and a batch ``{"features": f32[batch, features], "label": i32[batch]}``."""
    model = TwoTowers(width=width, layers=layers, out=out, classes=classes, dtype=get_dtype(dtype))
    optimizer = optax.sgd(learning_rate)
    return classifier_of_features(model, optimizer, batch=batch, features=features, classes=classes, seed=seed)
