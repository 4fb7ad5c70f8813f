"""Images, scenes and mixtures of experts: diffusion, GANs, radiance fields, vision transformers."""

from __future__ import annotations

import types
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from foreign.registry import Made, case, floats, ints
from foreign.sources import load, old_names, package, path_of, plain, without_collectives
from foreign.state_space import adamw_step

SCORE_SDE = "yang-song+score_sde"


@case("dit", "diffusion", source="kvfrans+jax-diffusion-transformer", is_listed=True)
def dit() -> Made:
    """Its pmap is unwrapped, its pmean dropped; the method's self is the state."""
    import ml_collections

    old_names()
    m = without_collectives(load(
        "kvfrans+jax-diffusion-transformer", "train_diffusion", "utils", "schedulers", "diffusion_transformer",
        stand_ins=["utils.stable_vae", "utils.checkpoint", "ml_collections.config_flags", "localutils",
                   "localutils.debugger", "diffusers"],
    ))  # fmt: skip
    sizes = dict(hidden_size=32, patch_size=2, depth=2, num_heads=4, mlp_ratio=4)
    config = m.model_config.to_dict() | sizes
    net = m.DiT(**sizes, class_dropout_prob=0.1, num_classes=10)
    images, labels, key = floats(8, 8, 8, 4), ints(10, 8), jax.random.PRNGKey(0)
    params = net.init({"params": key, "label_dropout": key}, images, jnp.zeros((8,)), jnp.zeros((8,), jnp.int32))["params"]
    state = m.TrainState.create(net, params, tx=optax.adam(1e-4, b1=0.9, b2=0.99))
    trainer = m.DiffusionTrainer(
        key, state, m.TrainState.create(net, params), ml_collections.FrozenConfigDict(config), m.GaussianDiffusion(100)
    )
    inner = plain(m.DiffusionTrainer.update)

    def update(trainer, images, labels):
        return inner(trainer, images, labels)

    return Made(update, (trainer, images, labels))


@case("google_vit_accumulated", "vision", source="google-research+vision_transformer", is_listed=True)
def vit() -> Made:
    """`make_update_fn`, with its `fori_loop` of gradient accumulation over slices of the batch."""
    import ml_collections

    bert = "flaxformer.architectures.bert"
    m = without_collectives(package("google-research+vision_transformer", "vit_jax.train", [
        "flaxformer", "flaxformer.architectures", bert, f"{bert}.bert", f"{bert}.configs",
    ]))  # fmt: skip
    m.utils = without_collectives(m.utils)
    net = m.models.VisionTransformer(
        num_classes=10, patches=ml_collections.ConfigDict({"size": (4, 4)}), hidden_size=32,
        transformer=dict(num_layers=2, mlp_dim=64, num_heads=4, dropout_rate=0.1, attention_dropout_rate=0.0),
    )  # fmt: skip
    params = net.init(jax.random.PRNGKey(0), jnp.ones((1, 16, 16, 3)), train=False)["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.03, momentum=0.9, accumulator_dtype="bfloat16"))
    step = m.make_update_fn(apply_fn=net.apply, accum_steps=2, tx=tx)
    batch = {"image": floats(16, 16, 16, 3), "label": np.eye(10, dtype=np.float32)[ints(10, 16)]}
    return Made(step, (params, tx.init(params), batch, jax.random.PRNGKey(0)), {0: 0, 1: 1, 3: 3})


@case("vmoe_expert_choice", "moe", source="google-research+vmoe")
def vmoe() -> Made:
    """Vision mixture of experts: noisy top-2 routing into capacity buckets, experts as a vmapped module, auxiliary losses."""
    package("google-research+vision_transformer", "vit_jax.models_vit")
    m = package("google-research+vmoe", "vmoe.nn.vit_moe", ["tensorflow", "orbax.checkpoint", "cachetools"])
    encoder = dict(
        num_layers=2, mlp_dim=32, num_heads=2, dropout_rate=0.0,
        moe=dict(num_experts=4, layers=(1,), group_size=32, router=dict(
            num_selected_experts=2, noise_std=0.5, importance_loss_weight=0.01, load_loss_weight=0.01,
            dispatcher=dict(name="einsum", bfloat16=False, capacity=20, batch_priority=False),
        )),
    )  # fmt: skip
    net = m.VisionTransformerMoe(num_classes=10, patch_size=(4, 4), hidden_size=16, encoder=encoder, classifier="gap")
    images = floats(8, 16, 16, 3)
    rngs = {"params": jax.random.PRNGKey(0), "gating": jax.random.PRNGKey(1)}
    params = net.init(rngs, images)["params"]

    def loss_fn(params, images, labels, key):
        logits, metrics = net.apply({"params": params}, images, rngs={"gating": key})
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss + jnp.mean(metrics["auxiliary_loss"])

    return adamw_step(loss_fn, params, images, ints(10, 8), jax.random.PRNGKey(2))


@case("score_sde_ncsnpp", "diffusion", source=SCORE_SDE)
def score_sde() -> Made:
    """The continuous score-matching loss of `losses.get_sde_loss_fn`, NCSN++ with FIR resampling, gradient clipping and an EMA.

    Their optimizer is of a Flax of 2021: optax's Adam stands in its place.
    """
    old_names()
    flax.optim = types.SimpleNamespace(Optimizer=object)  # named in annotations only
    jax.nn.normalize = getattr(jax.nn, "normalize", jax.nn.standardize)
    names = ("models", "models.utils", "models.ncsnpp", "sde_lib", "configs.vp.cifar10_ncsnpp_continuous")
    losses = load(SCORE_SDE, "losses", *names, stand_ins=["flax.deprecated", "flax.deprecated.nn"])
    config = package(SCORE_SDE, "configs.vp.cifar10_ncsnpp_continuous").get_config()
    config.data.image_size, config.model.nf, config.model.ch_mult, config.model.num_res_blocks = 8, 8, (1, 2), 1
    config.model.attn_resolutions = (4,)
    net = losses.mutils.get_model("ncsnpp")(config=config)
    images, key = floats(8, 8, 8, 3), jax.random.PRNGKey(0)
    variables = net.init({"params": key, "dropout": key}, images, jnp.zeros((8,), jnp.float32))
    sde = losses.VPSDE(beta_min=0.1, beta_max=20, N=100)
    loss_fn = losses.get_sde_loss_fn(sde, net, train=True, likelihood_weighting=False)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-4))

    def step(state, batch):
        key, sub = jax.random.split(state["key"])
        (loss, _), grads = jax.value_and_grad(loss_fn, argnums=1, has_aux=True)(sub, state["params"], {}, batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        ema = jax.tree.map(lambda e, p: e * 0.999 + p * 0.001, state["ema"], params)
        return {"params": params, "opt": opt, "ema": ema, "key": key}, loss

    params = variables["params"]
    return Made(step, ({"params": params, "opt": tx.init(params), "ema": params, "key": key}, {"image": images}))


@case("variational_diffusion", "diffusion", source="google-research+vdm")
def vdm() -> Made:
    """Variational diffusion: the noise schedule is trained too, by a derivative (jvp) inside the loss."""
    old_names()
    m = _aliased("google-research+vdm", "vdm")
    config = m.VDMConfig(
        vocab_size=256, sample_softmax=False, antithetic_time_sampling=True, with_fourier_features=True, with_attention=False,
        gamma_type="learnable_nnet", gamma_min=-13.3, gamma_max=5.0, sm_n_timesteps=0, sm_n_embd=32, sm_n_layer=1, sm_pdrop=0.1,
    )  # fmt: skip
    net = m.VDM(config)
    images = (np.abs(floats(4, 32, 32, 3)) * 60).astype(np.uint8)
    inputs = {"images": images, "conditioning": np.zeros(4, np.float32)}
    keys = jax.random.split(jax.random.PRNGKey(0))
    params = net.init({"params": keys[0], "sample": keys[1]}, **inputs)["params"]

    def loss_fn(params, inputs, key):
        sample, dropout = jax.random.split(key)
        out = net.apply({"params": params}, **inputs, rngs={"sample": sample, "dropout": dropout}, deterministic=False)
        return (jnp.mean(out.loss_klz) + jnp.mean(out.loss_recon) + jnp.mean(out.loss_diff)) / (32 * 32 * 3 * np.log(2.0))

    return adamw_step(loss_fn, params, inputs, jax.random.PRNGKey(1))


def _aliased(folder: str, name: str) -> Any:
    """`model_vdm` of a repository whose root is the package itself."""
    import sys

    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(path_of(folder))]
    return package(folder, f"{name}.model_vdm")


@case("mipnerf", "scenes", source="google+mipnerf", packages=["gin"])
def mipnerf() -> Made:
    """Rays through a coarse and a fine network, resampled between by a sorted search; losses weighed by a mask."""
    old_names()
    flax.optim = types.SimpleNamespace(Optimizer=object)
    flax.nn = flax.linen
    m = package("google+mipnerf", "internal.models", ["internal.datasets", "internal.vis"])
    utils = package("google+mipnerf", "internal.utils")
    net = m.MipNerfModel(num_samples=16)
    directions = floats(32, 3)
    rays = utils.Rays(
        origins=floats(32, 3), directions=directions, viewdirs=directions / np.linalg.norm(directions, axis=1, keepdims=True),
        radii=np.full((32, 1), 0.01, np.float32), lossmult=np.ones((32, 1), np.float32), near=np.full((32, 1), 2, np.float32),
        far=np.full((32, 1), 6, np.float32),
    )  # fmt: skip
    key = jax.random.PRNGKey(0)
    params = net.init(key, rng=key, rays=rays, randomized=False, white_bkgd=False)

    def loss_fn(params, rays, pixels, key):
        levels = net.apply(params, key, rays, randomized=True, white_bkgd=True)
        losses = jnp.array([(rays.lossmult * (rgb - pixels) ** 2).sum() / rays.lossmult.sum() for rgb, _, _ in levels])
        return 0.1 * jnp.sum(losses[:-1]) + losses[-1]

    return adamw_step(loss_fn, params, rays, np.abs(floats(32, 3)), key)


@case("diffusers_unet_text_to_image", "diffusion", packages=["diffusers", "transformers"])
def text_to_image() -> Made:
    """`train_step` of examples/text_to_image/train_text_to_image_flax.py: latents, noise, times and text, one key for all."""
    from diffusers import FlaxDDPMScheduler, FlaxUNet2DConditionModel

    net = FlaxUNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=16, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    params = net.init_weights(jax.random.PRNGKey(0))
    scheduler = FlaxDDPMScheduler(beta_schedule="scaled_linear", num_train_timesteps=100)
    noise_state = scheduler.create_state()
    tx = optax.adamw(1e-4)

    def step(state, key, latents, text):
        dropout, sample, new_key = jax.random.split(key, 3)

        def loss_fn(params):
            noise_rng, time_rng = jax.random.split(sample)
            noise = jax.random.normal(noise_rng, latents.shape)
            times = jax.random.randint(time_rng, (latents.shape[0],), 0, 100)
            noisy = scheduler.add_noise(noise_state, latents, noise, times)
            predicted = net.apply({"params": params}, noisy, times, text, train=True, rngs={"dropout": dropout}).sample
            return ((noise - predicted) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state[0])
        updates, opt = tx.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt), new_key, loss

    return Made(step, ((params, tx.init(params)), jax.random.PRNGKey(1), floats(8, 4, 8, 8), floats(8, 6, 16)), {0: 0, 1: 1})
