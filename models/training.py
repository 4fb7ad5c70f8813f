"""The one training step that all models share: loss, gradient, optax update, next state.

State is a plain dict, so that the path of a leaf reads like ``params/blk0/attn/query/kernel``:

    params       what the gradient is taken of, always float32
    opt_state    whatever optax keeps
    step         int32 scalar
    rng          uint32[2], only where the model draws random numbers (dropout)
    batch_stats  only where the model has batch norm

A loss function is ``loss_fn(params, state, batch) -> (loss, changed)``, where ``changed`` holds the entries of
the state that the forward pass itself renews (batch statistics). ``build_step`` closes over that function and
over the optax transform and never over an array, so the step that an abstract ``make`` returned is usable too:

    abstract_state, abstract_batch = jax.eval_shape(lambda: mlp.make(width=1 << 16)[1:])   # allocates nothing
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

Tree = Any
LossFn = Callable[[Tree, dict, dict], tuple[jax.Array, dict]]
TrainStep = Callable[[dict, dict], tuple[dict, dict]]

OPTIMIZERS = {
    "adam": optax.adam,
    "adamw": optax.adamw,
    "sgd": lambda learning_rate: optax.sgd(learning_rate, momentum=0.9),
}


def get_optimizer(name: str, learning_rate: float) -> optax.GradientTransformation:
    """The optax transform of that name."""
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer {name!r} is unknown; choose one of {', '.join(sorted(OPTIMIZERS))}")
    return OPTIMIZERS[name](learning_rate)


def get_dtype(name: str) -> jnp.dtype:
    """The compute dtype of that name; parameters are float32 either way."""
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"dtype {name!r} is not supported; choose 'float32' or 'bfloat16'")
    return jnp.dtype(name)


def initial_state(params: Tree, optimizer: optax.GradientTransformation, *, dropout_seed: int | None = None, **extra) -> dict:
    """The state before the first step; ``dropout_seed`` adds the random key, ``extra`` adds entries as they are."""
    state = {"params": params, "opt_state": optimizer.init(params), "step": jnp.zeros((), jnp.int32), **extra}
    if dropout_seed is not None:
        # A raw uint32 key: an ordinary array to whoever shards or saves the state.
        state["rng"] = jax.random.PRNGKey(dropout_seed)
    return state


def run_once(fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(*args)`` as one program, compiled with little optimisation: it runs once, and compiling is all that takes time."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)):
        return fn(*args)  # abstractly there is nothing to compile
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})(*args)


def initialize(model: nn.Module, keys: Any, *example: jax.Array) -> dict:
    """``model.init``, compiled."""
    return run_once(model.init, keys, *example)


def step_key(state: dict) -> jax.Array:
    """The key of this step: the key in the state never changes, the step is folded in."""
    return jax.random.fold_in(state["rng"], state["step"])


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean softmax cross-entropy, in float32 whatever the compute dtype."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def loss_with_statistics(model: nn.Module) -> LossFn:
    """The cross-entropy of a classifier of images, and its new ``batch_stats``."""

    def loss_fn(params, state, batch):
        variables = {"params": params, "batch_stats": state["batch_stats"]}
        logits, changed = model.apply(variables, batch["image"], mutable=["batch_stats"])
        return cross_entropy(logits, batch["label"]), {"batch_stats": changed["batch_stats"]}

    return loss_fn


def build_step(loss_fn: LossFn, optimizer: optax.GradientTransformation) -> TrainStep:
    """``train_step(state, batch) -> (new_state, metrics)``, a plain function of pytrees, not jitted."""

    def train_step(state: dict, batch: dict) -> tuple[dict, dict]:
        (loss, changed), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"], state, batch)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        new_state = {**state, **changed, "params": params, "opt_state": opt_state, "step": state["step"] + 1}
        return new_state, {"loss": loss}

    return train_step


def classifier_of_features(
    model: nn.Module, optimizer: optax.GradientTransformation, *, batch: int, features: int, classes: int, seed: int
) -> tuple[TrainStep, dict, dict]:
    """Of ``model`` [batch, features] -> [batch, classes]: the step, its first state, and a batch of random features and labels."""

    def loss_fn(params, state, batch):
        logits = model.apply({"params": params}, batch["features"])
        return cross_entropy(logits, batch["label"]), {}

    def begin(key):
        init_key, feature_key, label_key = jax.random.split(key, 3)
        params = model.init(init_key, jnp.zeros((1, features), jnp.float32))["params"]
        example = {
            "features": jax.random.normal(feature_key, (batch, features), jnp.float32),
            "label": jax.random.randint(label_key, (batch,), 0, classes, jnp.int32),
        }
        return initial_state(params, optimizer), example

    return build_step(loss_fn, optimizer), *run_once(begin, jax.random.key(seed))
