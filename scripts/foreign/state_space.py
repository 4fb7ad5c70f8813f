"""State-space models, small language models and other sequence models from repositories of their authors."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from foreign.registry import Made, case, floats, ints
from foreign.sources import edited, frozen_init, load, old_names, package, pieces, plain


def adamw_step(loss_fn: Callable[..., Any], params: Any, *data: Any, tx: Any = None) -> Made:
    """For repositories that bring a model and no step: the usual value_and_grad and optax. loss_fn(params, *data)."""
    tx = tx or optax.adamw(1e-3)

    def train_step(state, *data):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], *data)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    return Made(train_step, ({"params": params, "opt": tx.init(params)}, *data))


def next_token(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def annotated_s4(layer: str) -> Made:
    """Its `train_step`: FFT convolutions, complex numbers, three learning rates by `optax.multi_transform`."""
    old_names()
    names = ["torch", "torchtext", "torchtext.data", "torchtext.datasets", "hydra", "omegaconf"]
    s4 = package("srush+annotated-s4", "s4.s4", stand_ins=names)
    layers = {"s4": s4.S4Layer}
    for name, cls in (("s4d", "S4DLayer"), ("dss", "DSSLayer")):
        layers[name] = getattr(package("srush+annotated-s4", f"s4.{name}", stand_ins=names), cls)
    wanted = ("cross_entropy_loss", "compute_accuracy", "map_nested_fn", "create_train_state", "train_step")
    m = pieces("srush+annotated-s4/s4/train.py", wanted, {"tqdm": None, "DictConfig": object},
               without=("from .", "hydra", "omegaconf", "torch", "tqdm"))  # fmt: skip
    model = functools.partial(
        s4.BatchStackedModel, layer_cls=layers[layer], layer={"N": 8, "l_max": 16}, d_output=10, d_model=16, n_layers=2,
        classification=True, dropout=0.1,
    )  # fmt: skip
    loader = [(types.SimpleNamespace(numpy=lambda: floats(8, 16, 1)), None)]
    rates = getattr(layers[layer], "lr", {})
    with frozen_init():
        state = m.create_train_state(jax.random.PRNGKey(0), model, loader, lr=1e-3, lr_layer=dict(rates or {}))
    inner = plain(m.train_step)

    def train_step(state, key, inputs, labels):
        return inner(state, key, inputs, labels, model(training=True), True)

    return Made(train_step, (state, jax.random.PRNGKey(1), floats(8, 16, 1), ints(10, 8)))


for _layer in ("s4", "s4d", "dss"):
    case(f"annotated_{_layer}", "ssm", source="srush+annotated-s4")(functools.partial(annotated_s4, _layer))


@case("s5", "ssm", source="lindermanlab+S5", is_listed=True)
def s5() -> Made:
    """An associative scan of complex numbers, batch norm, and two optimizers over one tree."""
    old_names()
    m = package("lindermanlab+S5", "s5.train_helpers")
    from jax.scipy.linalg import block_diag

    ssm, seq_model, ssm_init = (package("lindermanlab+S5", f"s5.{n}") for n in ("ssm", "seq_model", "ssm_init"))
    width, state, blocks = 16, 16, 2
    Lambda, _, _, V, _ = ssm_init.make_DPLR_HiPPO(state // blocks)  # noqa: N806
    half = state // blocks // 2
    Lambda, V = Lambda[:half], V[:, :half]  # noqa: N806
    Vc = V.conj().T  # noqa: N806
    layer = ssm.init_S5SSM(
        H=width, P=state // 2, Lambda_re_init=(Lambda * np.ones((blocks, half))).ravel().real,
        Lambda_im_init=(Lambda * np.ones((blocks, half))).ravel().imag, V=block_diag(*([V] * blocks)),
        Vinv=block_diag(*([Vc] * blocks)), C_init="trunc_standard_normal", discretization="zoh", dt_min=0.001, dt_max=0.1,
        conj_sym=True, clip_eigs=False, bidirectional=False,
    )  # fmt: skip
    model = functools.partial(
        seq_model.BatchClassificationModel, ssm=layer, d_output=10, d_model=width, n_layers=2, padded=False,
        activation="half_glu1", dropout=0.1, mode="pool", prenorm=True, batchnorm=True, bn_momentum=0.95,
    )  # fmt: skip
    import flax

    with frozen_init():
        state = m.create_train_state(model, jax.random.PRNGKey(0), False, False, in_dim=1, bsz=8, seq_len=16, batchnorm=True)
    state = state.replace(batch_stats=flax.core.unfreeze(state.batch_stats))
    inner = plain(m.train_step)

    def train_step(state, key, inputs, labels, times):
        return inner(state, key, inputs, labels, times, model(training=True), True)

    data = (floats(8, 16, 1), ints(10, 8).astype(np.float32), np.ones((8, 16), np.float32))
    return Made(train_step, (state, jax.random.PRNGKey(1), *data))


@case("mamba_minimal", "ssm", source="radarFudan+mamba-minimal-jax", is_listed=True)
def mamba() -> Made:
    m = load("radarFudan+mamba-minimal-jax", "model", "pytorch_to_jax")
    net = m.Mamba(m.ModelArgs(d_model=16, n_layer=2, vocab_size=64))
    x, y = ints(64, 8, 16), ints(64, 8, 16)
    return adamw_step(lambda p, x, y: next_token(net.apply(p, x), y), net.init(jax.random.PRNGKey(0), x), x, y)


@case("nanogpt_jax", "language", source="cgarciae+nanoGPT-jax", is_listed=True)
def nanogpt() -> Made:
    """Its `train_step` returns (loss, state)."""
    m = edited("cgarciae+nanoGPT-jax/model.py", [
        ("self.c_attn(x).split(3, axis=-1)", "jnp.split(self.c_attn(x), 3, axis=-1)"),
        ("freeze(path_aware_map(partition_fn, params))", "path_aware_map(partition_fn, params)"),
    ])  # fmt: skip
    model = m.GPT(m.GPTConfig(block_size=16, vocab_size=128, n_layer=2, n_head=4, n_embd=32, dropout=0.1))
    state = model.create_state(learning_rate=6e-4, weight_decay=0.1, beta1=0.9, beta2=0.95, decay_lr=True, warmup_iters=10,
                               lr_decay_iters=100, min_lr=6e-5)  # fmt: skip
    step = pieces("cgarciae+nanoGPT-jax/train.py", ("forward", "train_step"), {
        "dropout": 0.1, "train_state": m.train_state, "print_compiling": lambda f: f, "jax": jax, "partial": functools.partial,
        "Tuple": tuple, "TrainState": m.train_state.TrainState, "jnp": jnp,
    }, without=("import",))  # fmt: skip
    tokens = ints(128, 16, 17)
    return Made(plain(step.train_step), (state, (tokens[:, :-1], tokens[:, 1:])), {0: 1})


@case("mlp_gpt", "language", source="lucidrains+mlp-gpt-jax", packages=["haiku", "einops"])
def mlp_gpt() -> Made:
    """Gated MLPs in place of attention, layers dropped at random, one sequence vmapped to a batch."""
    m = package("lucidrains+mlp-gpt-jax", "mlp_gpt_jax.mlp_gpt_jax")
    utils = package("lucidrains+mlp-gpt-jax", "mlp_gpt_jax.utils")
    model = m.TransformedMLPGpt(num_tokens=64, dim=32, seq_len=16, depth=2, attn_dim=8, layer_survival_prob=0.95)
    params = model.init(jax.random.PRNGKey(0), ints(64, 16))
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2e-4), optax.apply_every(2))
    loss_fn = utils.get_train_loss_fn(model)

    def step(state, key, data):
        key, sub = jax.random.split(key)
        loss, grads = loss_fn(state["params"], sub, data)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, key, loss

    return Made(step, ({"params": params, "opt": tx.init(params)}, jax.random.PRNGKey(1), ints(64, 8, 17)), {0: 0, 1: 1})


def nnx_step(model: Any, loss: Callable[..., Any], data: Any) -> Made:
    """A model of nnx under value_and_grad and AdamW, split and merged; what is no parameter is state too."""
    from flax import nnx

    tx = optax.adamw(1e-3)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def train_step(state, batch):
        def loss_fn(params):
            merged = nnx.merge(graph, params, state["rest"])
            value = loss(merged, batch)
            return value, nnx.state(merged, nnx.Not(nnx.Param))

        (value, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "rest": rest}, {"loss": value}

    return Made(train_step, ({"params": params, "opt": tx.init(params), "rest": rest}, data))


def bonsai(name: str) -> Any:
    return package("jax-ml+bonsai", f"bonsai.models.{name}.modeling", ["safetensors", "safetensors.torch"])


@case("bonsai_mamba2", "ssm", source="jax-ml+bonsai", is_listed=True)
def mamba2() -> Made:
    from flax import nnx

    m = bonsai("mamba2")
    config = m.ModelConfig.tiny()
    model = m.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))
    return nnx_step(model, lambda model, batch: model(batch["x"], labels=batch["x"])["loss"], {"x": ints(config.vocab_size, 8, 16)})


@case("bonsai_unet", "vision", source="jax-ml+bonsai", is_listed=True)
def unet() -> Made:
    from flax import nnx

    m = bonsai("unet")
    model = m.UNet(m.ModelConfig(in_channels=3, num_classes=4, features=(4, 8, 16, 32, 64)), rngs=nnx.Rngs(0))
    return nnx_step(model, lambda model, b: next_token(model(b["x"]), b["y"]), {"x": floats(8, 32, 32, 3), "y": ints(2, 8, 32, 32)})


@case("bonsai_vae", "generative", source="jax-ml+bonsai", is_listed=True)
def vae() -> Made:
    from flax import nnx

    m = bonsai("vae")
    model = m.VAE(m.ModelConfig(block_out_channels=(8, 8, 16, 16), norm_num_groups=4), rngs=nnx.Rngs(0))
    return nnx_step(model, lambda model, b: ((model(b["x"]) - b["x"]) ** 2).mean(), {"x": floats(8, 16, 16, 3)})
