"""AlexNet in one tower: five convolutions with max-pooling, then two wide dense layers with dropout.

Krizhevsky, Sutskever, Hinton, "ImageNet Classification with Deep Convolutional Neural Networks", 2012, with the
single-tower widths of Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014, and
without local response normalisation. The weird trick is why it stands here: nearly all arithmetic is in the
convolutions, which want the batch split, and nearly all of the 61 million parameters are in the dense layers, which
want the weights split; a planner should find that by itself.

``width`` scales every layer: 1.0 is the paper's, a small fraction makes a test. ``PAPER`` has the batch of the paper
of FlexFlow (Jia, Zaharia and Aiken, 2019, section 8.1): 61,100,840 parameters.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from .images import example_batch
from .training import TrainStep, build_step, cross_entropy, initial_state, step_key

PAPER = dict(batch=256, image=224, classes=1000, width=1.0)
SMALLEST_IMAGE = 63  # below it, nothing is left after the third pooling


class AlexNet(nn.Module):
    """The one-tower network; ``width`` multiplies the number of channels and of dense units."""

    classes: int
    width: float
    dropout: float

    @nn.compact
    def __call__(self, x):  # [batch, image, image, channels] -> [batch, classes]
        def conv(x, features, kernel, name, *, stride=1):
            pad = 2 if kernel == 11 else kernel // 2
            size = self.scaled(features)
            return nn.relu(nn.Conv(size, (kernel, kernel), (stride, stride), padding=pad, name=name)(x))

        def pool(x):
            return nn.max_pool(x, (3, 3), strides=(2, 2))

        drop = nn.Dropout(self.dropout, deterministic=self.dropout == 0.0)
        x = pool(conv(x, 64, 11, "conv1", stride=4))
        x = pool(conv(x, 192, 5, "conv2"))
        x = conv(x, 384, 3, "conv3")
        x = conv(x, 256, 3, "conv4")
        x = pool(conv(x, 256, 3, "conv5"))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(self.scaled(4096), name="dense1")(drop(x)))
        x = nn.relu(nn.Dense(self.scaled(4096), name="dense2")(drop(x)))
        return nn.Dense(self.classes, name="head")(x)

    def scaled(self, size: int) -> int:
        return max(1, round(size * self.width))


def make(
    *,
    batch: int = 32,
    image: int = 224,
    channels: int = 3,
    classes: int = 1000,
    width: float = 1.0,
    dropout: float = 0.5,
    learning_rate: float = 0.01,
    seed: int = 0,
) -> tuple[TrainStep, dict, dict]:
    """The step, its first state, and a batch of images and labels; ``learning_rate`` and decay as in the paper."""
    if image < SMALLEST_IMAGE:
        raise ValueError(f"image {image} is too small: nothing is left after pooling; choose at least {SMALLEST_IMAGE}")
    model = AlexNet(classes=classes, width=width, dropout=dropout)
    optimizer = optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(learning_rate, momentum=0.9))

    def loss_fn(params, state, batch):
        rngs = {"dropout": step_key(state)} if dropout else {}
        logits = model.apply({"params": params}, batch["image"], rngs=rngs)
        return cross_entropy(logits, batch["label"]), {}

    params_key, dropout_key, batch_key = jax.random.split(jax.random.key(seed), 3)
    keys = {"params": params_key, "dropout": dropout_key}
    params = jax.jit(model.init)(keys, jnp.zeros((1, image, image, channels), jnp.float32))["params"]
    state = initial_state(params, optimizer, dropout_seed=seed + 1 if dropout else None)
    example = example_batch(batch_key, batch=batch, image=image, channels=channels, classes=classes)
    return build_step(loss_fn, optimizer), state, example
