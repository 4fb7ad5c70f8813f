"""Inception-v3: a stem of convolutions, then blocks of parallel branches that are joined along the channels.

Szegedy, Vanhoucke, Ioffe, Shlens and Wojna, "Rethinking the Inception Architecture for Computer Vision", 2016, table
1 and figures 5 to 7, with the branch widths that the authors published; without dropout and label smoothing. The
auxiliary head after ``mixed7`` (section 4) is there with ``aux=True``. The branches of a block do not depend on one
another, which is what makes the net worth planning.

Every convolution is followed by batch norm (see ``models.resnet`` for what that means under a plan) and relu. Widths
are multiplied by ``width``. With width 1, 3 channels and 1,000 classes there are 23,834,568 parameters
(``PAPER``), with the auxiliary head 27,161,264.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from .images import example_batch
from .training import TrainStep, build_step, cross_entropy, get_dtype, initial_state, initialize

PAPER = dict(batch=64, image=299, width=1.0, classes=1000)
SMALLEST_IMAGE = 75  # below it, nothing is left before the last two blocks
SMALLEST_WITH_AUX = 299  # below it, nothing is left in the auxiliary head

# A step is features:height x width of its kernel; /2 halves the image, - leaves the border out; | splits a branch in two.
STEM = "32:3x3/2 32:3x3- 64:3x3 max 80:1x1 192:3x3- max"
BLOCKS = (
    *(("64:1x1", "48:1x1 64:5x5", "64:1x1 96:3x3 96:3x3", f"mean {pooled}:1x1") for pooled in (32, 64, 64)),
    ("384:3x3/2", "64:1x1 96:3x3 96:3x3/2", "max"),
    *(
        ("192:1x1", f"{c}:1x1 {c}:1x7 192:7x1", f"{c}:1x1 {c}:7x1 {c}:1x7 {c}:7x1 192:1x7", "mean 192:1x1")
        for c in (128, 160, 160, 192)
    ),
    ("192:1x1 320:3x3/2", "192:1x1 192:1x7 192:7x1 192:3x3/2", "max"),
    *(("320:1x1", "384:1x1 384:1x3|384:3x1", "448:1x1 384:3x3 384:1x3|384:3x1", "mean 192:1x1"),) * 2,
)
AUX_AFTER, AUX_WEIGHT = 7, 0.4


class ConvNorm(nn.Module):
    """A convolution as written in ``BLOCKS``, batch norm, relu."""

    spec: str
    width: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        features, _, kernel = self.spec.partition(":")
        height, _, width = kernel.rstrip("/2-").rpartition("x")
        strides, padding = (2, 2) if "/2" in kernel else (1, 1), "VALID" if kernel.endswith(("/2", "-")) else "SAME"
        size = max(1, round(int(features) * self.width))
        x = nn.Conv(size, (int(height), int(width)), strides, padding, use_bias=False, dtype=self.dtype, name="conv")(x)
        norm = nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-3, dtype=self.dtype, name="norm")
        return nn.relu(norm(x))


class Branch(nn.Module):
    """Steps one after the other, parted by blanks."""

    spec: str
    width: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        for i, step in enumerate(self.spec.split()):
            if step == "max":
                x = nn.max_pool(x, (3, 3), strides=(2, 2))
            elif step == "mean":
                x = nn.avg_pool(x, (3, 3), strides=(1, 1), padding="SAME")
            else:
                ends = [
                    ConvNorm(end, self.width, self.dtype, name=f"conv{i}{'ab'[k] if '|' in step else ''}")(x)
                    for k, end in enumerate(step.split("|"))
                ]
                x = jnp.concatenate(ends, axis=-1) if len(ends) > 1 else ends[0]
        return x


class InceptionV3(nn.Module):
    """Stem, blocks, mean over the image, dense; the logits, and those of the auxiliary head or None."""

    classes: int
    width: float
    aux: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):  # [batch, image, image, channels] -> [batch, classes]
        def run(spec, name, x):
            return Branch(spec, self.width, self.dtype, name=name)(x)

        x, extra = run(STEM, "stem", x), None
        for i, branches in enumerate(BLOCKS):
            ends = [run(spec, f"mixed{i}_branch{k}", x) for k, spec in enumerate(branches)]
            x = jnp.concatenate(ends, axis=-1)
            if self.aux and i == AUX_AFTER:
                extra = run("128:1x1 768:5x5-", "aux", nn.avg_pool(x, (5, 5), strides=(3, 3)))
                extra = nn.Dense(self.classes, dtype=self.dtype, name="aux_head")(extra.mean(axis=(1, 2)))
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x.mean(axis=(1, 2))), extra


def make(
    *,
    batch: int = 8,
    image: int = 75,
    channels: int = 3,
    classes: int = 16,
    width: float = 1 / 8,
    aux: bool = False,
    dtype: str = "float32",
    learning_rate: float = 0.01,
    seed: int = 0,
) -> tuple[TrainStep, dict, dict]:
    """The step, its first state with ``batch_stats``, and a batch of images and labels."""
    smallest = SMALLEST_WITH_AUX if aux else SMALLEST_IMAGE
    if image < smallest:
        raise ValueError(f"image {image} is too small: nothing is left after pooling; choose at least {smallest}")
    model = InceptionV3(classes=classes, width=width, aux=aux, dtype=get_dtype(dtype))
    optimizer = optax.sgd(learning_rate, momentum=0.9)

    def loss_fn(params, state, batch):
        variables = {"params": params, "batch_stats": state["batch_stats"]}
        (logits, extra), changed = model.apply(variables, batch["image"], mutable=["batch_stats"])
        loss = cross_entropy(logits, batch["label"])
        if extra is not None:
            loss += AUX_WEIGHT * cross_entropy(extra, batch["label"])
        return loss, {"batch_stats": changed["batch_stats"]}

    init_key, batch_key = jax.random.split(jax.random.key(seed))
    variables = initialize(model, init_key, jnp.zeros((1, image, image, channels), jnp.float32))
    state = initial_state(variables["params"], optimizer, batch_stats=variables["batch_stats"])
    example = example_batch(batch_key, batch=batch, image=image, channels=channels, classes=classes)
    return build_step(loss_fn, optimizer), state, example
