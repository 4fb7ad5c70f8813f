"""Residual networks with batch norm: ResNet-18, -50, -101, -152, and a tiny one with one block per stage.

He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", 2015, table 1, with the stride of a bottleneck in
its 3x3 convolution ("v1.5"), and with the last batch norm of a block starting at scale zero, so that the block starts
as the identity (Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 5.1).

Batch norm takes its mean over the batch that the step sees. The step is written for the whole batch, so under a plan
that splits the batch it means statistics over all devices, at the price of one small all-reduce per layer.

``PAPER`` is the ResNet-101 of the paper of FlexFlow (Jia, Zaharia and Aiken, 2019, section 8.1): 44,549,160 parameters.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from .images import example_batch
from .training import TrainStep, build_step, get_dtype, initial_state, loss_with_statistics

PAPER = dict(depth=101, batch=64, image=224, classes=1000)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions; the output has ``features`` channels."""

    features: int
    stride: int
    dtype: jnp.dtype
    expansion = 1

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.dtype)
        y = conv(self.features, (3, 3), (self.stride, self.stride), padding=1, name="conv1")(x)
        y = nn.relu(norm(name="norm1")(y))
        y = conv(self.features, (3, 3), padding=1, name="conv2")(y)
        y = norm(name="norm2", scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = conv(self.features, (1, 1), (self.stride, self.stride), padding=0, name="conv_skip")(x)
            x = norm(name="norm_skip")(x)
        return nn.relu(x + y)


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up; the output has ``4 * features`` channels."""

    features: int
    stride: int
    dtype: jnp.dtype
    expansion = 4

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.dtype)
        y = nn.relu(norm(name="norm1")(conv(self.features, (1, 1), name="conv1")(x)))
        y = conv(self.features, (3, 3), (self.stride, self.stride), padding=1, name="conv2")(y)
        y = nn.relu(norm(name="norm2")(y))
        y = conv(self.expansion * self.features, (1, 1), name="conv3")(y)
        y = norm(name="norm3", scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = conv(self.expansion * self.features, (1, 1), (self.stride, self.stride), padding=0, name="conv_skip")(x)
            x = norm(name="norm_skip")(x)
        return nn.relu(x + y)


# depth -> the kind of block, the number of blocks in each of the four stages
DEPTHS = {
    "tiny": (BasicBlock, (1, 1, 1, 1)),
    18: (BasicBlock, (2, 2, 2, 2)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}


class ResNet(nn.Module):
    """Stem, stages of residual blocks whose width doubles and whose image halves, mean over the image, dense."""

    block: type[nn.Module]
    stages: tuple[int, ...]
    width: int
    classes: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):  # [batch, image, image, channels] -> [batch, classes]
        x = nn.Conv(self.width, (7, 7), (2, 2), padding=3, use_bias=False, dtype=self.dtype, name="stem_conv")(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype, name="stem_norm")(x)
        x = nn.max_pool(nn.relu(x), (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for i, count in enumerate(self.stages):
            for j in range(count):
                stride = 2 if i > 0 and j == 0 else 1
                x = self.block(self.width * 2**i, stride, self.dtype, name=f"stage{i}_blk{j}")(x)
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x.mean(axis=(1, 2)))


def make(
    *,
    batch: int = 32,
    image: int = 224,
    channels: int = 3,
    classes: int = 1000,
    width: int = 64,
    depth: int | str = 50,
    dtype: str = "float32",
    learning_rate: float = 0.1,
    seed: int = 0,
) -> tuple[TrainStep, dict, dict]:
    """The step, its first state with ``batch_stats``, and a batch of images and labels."""
    if depth not in DEPTHS:
        raise ValueError(f"depth {depth!r} is unknown; choose one of {', '.join(map(repr, DEPTHS))}")
    block, stages = DEPTHS[depth]
    model = ResNet(block=block, stages=stages, width=width, classes=classes, dtype=get_dtype(dtype))
    optimizer = optax.sgd(learning_rate, momentum=0.9)

    init_key, batch_key = jax.random.split(jax.random.key(seed))
    variables = jax.jit(model.init)(init_key, jnp.zeros((1, image, image, channels), jnp.float32))
    state = initial_state(variables["params"], optimizer, batch_stats=variables["batch_stats"])
    example = example_batch(batch_key, batch=batch, image=image, channels=channels, classes=classes)
    return build_step(loss_with_statistics(model), optimizer), state, example
