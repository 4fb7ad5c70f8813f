"""A multilayer perceptron: dense layers with relu, then softmax cross-entropy over ``classes``.

The smallest model with something to plan: each hidden layer is one ``[batch, width] x [width, width]`` product,
which may be split by rows (data parallel), by columns or by the contracted dimension (tensor parallel).

    params = features*width + width + (layers - 1)*(width*width + width) + width*classes + classes
"""

import jax.numpy as jnp
import optax
from flax import linen as nn

from .training import TrainStep, classifier_of_features, get_dtype


class MLP(nn.Module):
    """``layers`` hidden layers of ``width``, and the output layer."""

    width: int
    layers: int
    classes: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):  # [batch, features] -> [batch, classes]
        for i in range(self.layers):
            x = nn.relu(nn.Dense(self.width, dtype=self.dtype, name=f"dense{i}")(x))
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x)


def make(
    *,
    batch: int = 64,
    width: int = 256,
    layers: int = 3,
    classes: int = 16,
    features: int = 64,
    dtype: str = "float32",
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> tuple[TrainStep, dict, dict]:
    """The step, its first state, and a batch ``{"features": f32[batch, features], "label": i32[batch]}``."""
    model = MLP(width=width, layers=layers, classes=classes, dtype=get_dtype(dtype))
    optimizer = optax.adam(learning_rate)
    return classifier_of_features(model, optimizer, batch=batch, features=features, classes=classes, seed=seed)
