"""NASNet-A and PNASNet-5: nets of cells whose inside was found by search, each cell fed by the two before it.

Zoph, Vasudevan, Shlens and Le, "Learning Transferable Architectures for Scalable Image Recognition", 2018, figures 2
and 4; Liu et al., "Progressive Neural Architecture Search", 2018, figure 1. Both without auxiliary head, dropout and
drop path. What the figures leave open (a separable convolution is two, each after relu; the previous cell's result
is halved by two convolutions one pixel apart; the order of stem and cells) is as the authors published it in code.

A cell makes five blocks, each the sum of two operations on earlier values: the cell's input ("input", after a 1x1
convolution), the previous cell's ("previous"), or a block. Its result is the blocks that nothing else reads, side by
side. The operations of a block do not depend on one another, nor do most blocks: more to place than in any other net
here. The stem halves the image three times, by a convolution and two cells of a quarter and half of the width; then
come three stages of ``repeats`` cells, with the image halved and the width doubled between them. NASNet-A halves by a
cell of its own, PNASNet-5 by the first cell of the stage.

``PAPER`` is NASNet-A Large ("6 @ 4032"; published 88.9 million parameters and 23.8 billion multiplications):
88,753,150 parameters. ``PNASNET_PAPER`` is PNASNet-5 Large ("N=4, F=216"; published 86.1 million and 25.0 billion):
86,057,668. Their batches are the smaller of those that Zeng et al., "Trinity", 2022, table 4, trained with.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from .images import example_batch
from .training import TrainStep, build_step, get_dtype, initial_state, initialize, loss_with_statistics

PAPER = dict(design="nasnet_a", batch=8, image=331, stem=96, width=168, repeats=6, classes=1000)
PNASNET_PAPER = dict(design="pnasnet_5", batch=8, image=331, stem=96, width=216, repeats=4, classes=1000)
SMALLEST_IMAGE = 3  # below it, the stem's convolution leaves nothing


class Cell(NamedTuple):
    """Five blocks of two operations each, "operation value"; and the values that the result is made of."""

    blocks: tuple[tuple[str, str], ...]
    result: tuple[str, ...]


class Design(NamedTuple):
    """The cell of the stages, and the one that halves the image; where ``halves_apart``, that is no cell of the stage."""

    normal: Cell
    halving: Cell
    halves_apart: bool


# sepN is a separable convolution of N x N, max and mean pool over 3 x 3, same is the value itself.
NASNET_NORMAL = Cell(
    (
        ("sep5 input", "sep3 previous"),
        ("sep5 previous", "sep3 previous"),
        ("mean input", "same previous"),
        ("mean previous", "mean previous"),
        ("sep3 input", "same input"),
    ),
    ("previous", "block0", "block1", "block2", "block3", "block4"),
)
NASNET_HALVING = Cell(
    (
        ("sep5 input", "sep7 previous"),
        ("max input", "sep7 previous"),
        ("mean input", "sep5 previous"),
        ("same block1", "mean block0"),
        ("sep3 block0", "max input"),
    ),
    ("block1", "block2", "block3", "block4"),
)
PNASNET = Cell(
    (
        ("sep5 previous", "max previous"),
        ("sep7 input", "max input"),
        ("sep5 input", "sep3 input"),
        ("sep3 block2", "max input"),
        ("sep3 previous", "same input"),
    ),
    ("block0", "block1", "block2", "block3", "block4"),
)
DESIGNS = {
    "nasnet_a": Design(NASNET_NORMAL, NASNET_HALVING, halves_apart=True),
    "pnasnet_5": Design(PNASNET, PNASNET, halves_apart=False),
}


class Norm(nn.Module):
    """Batch norm with the authors' constants; see ``models.resnet`` for what it means under a plan."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False, momentum=0.9997, epsilon=1e-3, dtype=self.dtype, name="norm")(x)


class Project(nn.Module):
    """Relu, a 1x1 convolution and batch norm; with ``stride`` 2, every second pixel of every second row."""

    features: int
    dtype: jnp.dtype
    stride: int = 1

    @nn.compact
    def __call__(self, x):
        strides = (self.stride, self.stride)
        x = nn.Conv(self.features, (1, 1), strides, use_bias=False, dtype=self.dtype, name="conv")(nn.relu(x))
        return Norm(self.dtype, name="end")(x)


class Halve(nn.Module):
    """Half the features from the even pixels, half from the odd ones (beyond the border zeros); batch norm of both."""

    features: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        def conv(features, name):
            return nn.Conv(features, (1, 1), (2, 2), use_bias=False, dtype=self.dtype, name=name)

        x = nn.relu(x)
        odd = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (-1, 1, 0), (-1, 1, 0), (0, 0, 0)])
        first = self.features // 2
        ends = [conv(first, "even")(x), conv(self.features - first, "odd")(odd)]
        return Norm(self.dtype, name="end")(jnp.concatenate(ends, axis=-1))


class Separable(nn.Module):
    """Twice: relu, a convolution of each channel alone, a 1x1 convolution, batch norm; the first has the stride."""

    features: int
    kernel: int
    stride: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        for i, stride in enumerate((self.stride, 1)):
            x, channels = nn.relu(x), x.shape[-1]
            window = (self.kernel, self.kernel)
            alone = dict(strides=(stride, stride), feature_group_count=channels, use_bias=False, dtype=self.dtype)
            x = nn.Conv(channels, window, **alone, name=f"depthwise{i}")(x)
            x = nn.Conv(self.features, (1, 1), use_bias=False, dtype=self.dtype, name=f"pointwise{i}")(x)
            x = Norm(self.dtype, name=f"end{i}")(x)
        return x


def pool(kind: str, x: jax.Array, stride: int) -> jax.Array:
    """Largest or mean value of 3 x 3; the mean counts no pixel beyond the border."""
    window = dict(window_shape=(3, 3), strides=(stride, stride), padding="SAME")
    if kind == "max":
        return nn.max_pool(x, **window)
    # Counted along each side: Flax would pool an image of ones for it, which is an operator of its own.
    down, across = (_covered(x.shape[axis], stride).astype(x.dtype) for axis in (1, 2))
    return nn.pool(x, 0.0, jax.lax.add, **window) / (down[:, None, None] * across[:, None])


def _covered(size: int, stride: int) -> jax.Array:
    """How many of ``size`` pixels each window of 3 covers, padded as "SAME" pads."""
    windows = -(-size // stride)
    start = jnp.arange(windows) * stride - max((windows - 1) * stride + 3 - size, 0) // 2
    return jnp.minimum(start + 3, size) - jnp.maximum(start, 0)


class CellOfNet(nn.Module):
    """``[batch, h, w, c]`` of the last cell and of the one before -> ``[batch, h / stride, w / stride, n * features]``."""

    cell: Cell
    features: int
    stride: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, previous):
        if previous is None:
            previous = x  # the first cell reads the stem's convolution twice, and one of the two as it is
        elif previous.shape[1] != x.shape[1]:
            previous = Halve(self.features, self.dtype, name="previous")(previous)
        elif previous.shape[-1] != self.features:
            previous = Project(self.features, self.dtype, name="previous")(previous)
        values = {"previous": previous, "input": Project(self.features, self.dtype, name="input")(x)}
        pooled = {}
        for i, block in enumerate(self.cell.blocks):
            ends = []
            for side, step in zip("ab", block, strict=True):
                kind, name = step.split()
                value, stride = values[name], 1 if name.startswith("block") else self.stride
                if kind.startswith("sep"):
                    end = Separable(self.features, int(kind[3:]), stride, self.dtype, name=f"block{i}{side}")(value)
                else:
                    if step not in pooled:  # one pooling serves all blocks that ask for it
                        with jax.named_scope(step.replace(" ", "_")):
                            pooled[step] = value if kind == "same" else pool(kind, value, stride)
                    end, left = pooled[step], stride if kind == "same" else 1
                    if left > 1 or end.shape[-1] != self.features:
                        end = Project(self.features, self.dtype, left, name=f"block{i}{side}")(end)
                ends.append(end)
            values[f"block{i}"] = ends[0] + ends[1]
        return jnp.concatenate([values[name] for name in self.cell.result], axis=-1)


class NASNet(nn.Module):
    """Stem, three stages of cells, mean over the image, dense."""

    design: Design
    stem: int
    width: int
    repeats: int
    classes: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):  # [batch, image, image, channels] -> [batch, classes]
        def run(name, cell, width, stride, x, previous):
            return CellOfNet(cell, width, stride, self.dtype, name=name)(x, previous)

        x = nn.Conv(self.stem, (3, 3), (2, 2), "VALID", use_bias=False, dtype=self.dtype, name="stem")(x)
        x, previous = Norm(self.dtype, name="stem_end")(x), None
        for i, share in enumerate((4, 2)):
            x, previous = run(f"stem_cell{i}", self.design.halving, self.width // share, 2, x, previous), x
        for stage in range(3):
            width, left = self.width * 2**stage, self.repeats
            if stage > 0:
                name = f"halve{stage}" if self.design.halves_apart else f"stage{stage}_cell0"
                halved = run(name, self.design.halving, width, 2, x, previous)
                # After a cell that only halves, the next one still reads what that one read as the previous.
                x, previous = halved, previous if self.design.halves_apart else x
                left -= not self.design.halves_apart
            for i in range(self.repeats - left, self.repeats):
                x, previous = run(f"stage{stage}_cell{i}", self.design.normal, width, 1, x, previous), x
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(nn.relu(x).mean(axis=(1, 2)))


def make(
    *,
    design: str = "nasnet_a",
    batch: int = 8,
    image: int = 32,
    channels: int = 3,
    classes: int = 16,
    stem: int = 8,
    width: int = 8,
    repeats: int = 1,
    dtype: str = "float32",
    learning_rate: float = 0.01,
    seed: int = 0,
) -> tuple[TrainStep, dict, dict]:
    """The step, its first state with ``batch_stats``, and a batch of images and labels."""
    if design not in DESIGNS:
        raise ValueError(f"design {design!r} is unknown; choose one of {', '.join(sorted(DESIGNS))}")
    if image < SMALLEST_IMAGE:
        raise ValueError(f"image {image} is too small for the stem's convolution; choose at least {SMALLEST_IMAGE}")
    if width % 4:
        raise ValueError(f"width {width} is not a multiple of 4, as the stem's cells need; choose {max(4, width // 4 * 4)}")
    if repeats < 1:
        raise ValueError(f"repeats {repeats} is too few; choose at least 1")
    sizes = dict(stem=stem, width=width, repeats=repeats, classes=classes)
    model = NASNet(DESIGNS[design], **sizes, dtype=get_dtype(dtype))
    optimizer = optax.sgd(learning_rate, momentum=0.9)

    init_key, batch_key = jax.random.split(jax.random.key(seed))
    variables = initialize(model, init_key, jnp.zeros((1, image, image, channels), jnp.float32))
    state = initial_state(variables["params"], optimizer, batch_stats=variables["batch_stats"])
    example = example_batch(batch_key, batch=batch, image=image, channels=channels, classes=classes)
    return build_step(loss_with_statistics(model), optimizer), state, example
