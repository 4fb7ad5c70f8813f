"""A U-Net: down through halved images, up again, and joined at every level to what was there on the way down.

Ronneberger, Fischer and Brox, "U-Net: Convolutional Networks for Biomedical Image Segmentation", 2015, with padded
convolutions, so that the output has the size of the input, and with the option of group norm (Wu and He, "Group
Normalization", 2018). The loss is the mean cross-entropy over all pixels. The values of the way down stay alive until
the way up meets them, the largest ones longest: memory is activations, not parameters.

Level i has w_i = ``width * 2**i`` channels in images of ``image / 2**i``, from 0 to ``levels``, the bottom. With
f(a, b) = 9*a*b + b for a convolution of a to b channels, and w_{-1} = ``channels``,

    params = sum for i = 0..levels of    f(w_{i-1}, w_i) + f(w_i, w_i)                                down, bottom
           + sum for i = 0..levels-1 of  4*w_{i+1}*w_i + w_i + f(2*w_i, w_i) + f(w_i, w_i)            up
           + width*classes + classes                                                                  head
           + 4*w_i for each of these levels, down and up, where ``groups`` is not 0                   norms
                                                                                                      PAPER: 31,030,658

``PAPER`` has the published levels and widths, with images that halve evenly and a batch to plan for.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from .training import TrainStep, build_step, cross_entropy, get_dtype, get_optimizer, initial_state, initialize

PAPER = dict(batch=64, image=512, channels=1, classes=2, width=64, levels=4, groups=0)


class Pair(nn.Module):
    """Two 3x3 convolutions with relu, each with group norm before it where there are groups."""

    features: int
    groups: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = nn.Conv(self.features, (3, 3), padding=1, dtype=self.dtype, name=f"conv{i}")(x)
            if self.groups:
                x = nn.GroupNorm(self.groups, dtype=self.dtype, name=f"norm{i}")(x)
            x = nn.relu(x)
        return x


class UNet(nn.Module):
    """Logits of every pixel."""

    classes: int
    width: int
    levels: int
    groups: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):  # [batch, image, image, channels] -> [batch, image, image, classes]
        kept = []
        for i in range(self.levels):
            x = Pair(self.width * 2**i, self.groups, self.dtype, name=f"down{i}")(x)
            kept.append(x)
            with jax.named_scope(f"pool{i}"):
                x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = Pair(self.width * 2**self.levels, self.groups, self.dtype, name="bottom")(x)
        for i in reversed(range(self.levels)):
            x = nn.ConvTranspose(self.width * 2**i, (2, 2), strides=(2, 2), dtype=self.dtype, name=f"grow{i}")(x)
            x = jnp.concatenate([kept[i], x], axis=-1)
            x = Pair(self.width * 2**i, self.groups, self.dtype, name=f"up{i}")(x)
        return nn.Conv(self.classes, (1, 1), dtype=self.dtype, name="head")(x)


def make(
    *,
    batch: int = 8,
    image: int = 32,
    channels: int = 1,
    classes: int = 2,
    width: int = 8,
    levels: int = 2,
    groups: int = 4,
    dtype: str = "float32",
    learning_rate: float = 1e-2,
    optimizer: str = "adam",
    seed: int = 0,
) -> tuple[TrainStep, dict, dict]:
    """The step, its first state, and a batch of images ``f32[..., channels]`` with a label for every pixel."""
    if image % 2**levels:
        raise ValueError(f"image {image} cannot be halved {levels} times; choose a multiple of {2**levels}")
    if groups and width % groups:
        raise ValueError(f"width {width} is not a multiple of groups {groups}; choose a width that is, or groups=0")
    model = UNet(classes=classes, width=width, levels=levels, groups=groups, dtype=get_dtype(dtype))
    transform = get_optimizer(optimizer, learning_rate)

    def loss_fn(params, state, batch):
        return cross_entropy(model.apply({"params": params}, batch["image"]), batch["label"]), {}

    init_key, image_key = jax.random.split(jax.random.key(seed))
    smallest = 2**levels
    params = initialize(model, init_key, jnp.zeros((1, smallest, smallest, channels), jnp.float32))["params"]
    pixels = jax.random.normal(image_key, (batch, image, image, channels), jnp.float32)
    # Something to learn: in which of equally wide bands a pixel's brightness is.
    label = jnp.clip(jnp.floor((pixels[..., 0] + 2.0) * classes / 4.0), 0, classes - 1).astype(jnp.int32)
    return build_step(loss_fn, transform), initial_state(params, transform), {"image": pixels, "label": label}
