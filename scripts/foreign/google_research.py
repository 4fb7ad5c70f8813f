"""google-research/big_vision and multinerf: contrastive, flow, quantised, distilled, sharpness-aware, scenes."""

from __future__ import annotations

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from foreign.registry import Made, case, floats, ints
from foreign.sources import old_names, package, pieces, plain, without_collectives

BIG_VISION, MULTINERF = "google-research+big_vision", "google-research+multinerf"
TRAINERS = f"{BIG_VISION}/big_vision/trainers/proj"
BATCH, CLASSES = 16, 10
SMALL = dict(width=32, depth=2, mlp_dim=64, num_heads=2)
KEY = jax.random.PRNGKey(0)
vision_case = functools.partial(case, source=BIG_VISION, packages=["ml_collections", "einops", "tensorflow_probability"])


def big_vision(name: str) -> types.ModuleType:
    old_names()
    return package(BIG_VISION, f"big_vision.{name}", ["tensorflow.io.gfile"])


def images() -> np.ndarray:
    return floats(BATCH, 16, 16, 3)


def one_hot() -> np.ndarray:
    return np.eye(CLASSES, dtype=np.float32)[ints(CLASSES, BATCH)]


def trainer(path: str, *also: str, model: Any = None, config: dict[str, Any] | None = None, edits=(), **given: Any):
    """The `update_fn` of one of big_vision's trainers, its optimizer, and the module of both."""
    import ml_collections

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    optimizers = types.SimpleNamespace(get_count=lambda state, jittable: optax.tree_utils.tree_get(state, "count"),
                                       replace_frozen=lambda schedule, grads, value: grads)  # fmt: skip
    made = dict(model=model, tx=tx, bv_optax=optimizers, u=big_vision("utils"), train_state_sharding=None, repl_sharding=None,
                config=ml_collections.ConfigDict(dict(schedule=[], **(config or {}))))  # fmt: skip
    m = pieces(f"{TRAINERS}/{path}", ("update_fn", *also), {**made, **given}, edits=edits,
               without=("big_vision", "clu", "tensorflow", "ml_collections"))  # fmt: skip
    return plain(m.update_fn), tx, m


def vit(**more: Any):
    return big_vision("models.vit").Model(num_classes=CLASSES, patch_size=(4, 4), **SMALL, **more)


@vision_case("siglip", "contrastive")
def siglip() -> Made:
    image = dict(variant=None, patch_size=(4, 4), pool_type="map", **SMALL)
    model = big_vision("models.proj.image_text.two_towers").Model(
        image=image, text=dict(vocab_size=64, **SMALL), out_dim=(None, 32), temperature_init=10.0, bias_init=-2.71
    )
    batch = dict(image=images(), labels=ints(64, BATCH, 8))
    params = model.init(KEY, batch["image"], batch["labels"])["params"]
    update, tx, _ = trainer("image_text/siglip.py", model=model,
                            edits=[("out_shardings=(train_state_sharding, repl_sharding)", "")])  # fmt: skip
    return Made(update, (dict(params=params, opt=tx.init(params)), KEY, batch))


@vision_case("jet_flow", "flow")
def jet() -> Made:
    """Couplings in a `scan`, each by channels or by places as a `cond` decides."""
    model = big_vision("models.proj.jet.jet").Model(depth=3, block_depth=1, emb_dim=32, num_heads=2, ps=4)
    batch = dict(image=images())
    params = model.init(KEY, batch["image"], context=None, method=model.forward)["params"]
    update, tx, _ = trainer("jet/train.py", "_bits_per_dim", model=model)
    return Made(update, (dict(params=params, opt=tx.init(params)), KEY, batch))


@vision_case("gsam", "robust")
def gsam() -> Made:
    """Sharpness-aware: the second gradient is taken where the first leads."""
    model, x = vit(), images()
    params = model.init(KEY, x)["params"]
    rho = dict(rho_max=0.6, rho_min=0.1, alpha=0.6, lr_max=1e-3, lr_min=1e-5)
    update, tx, m = trainer(
        "gsam/train.py", model=model, config=dict(lr=1e-3, gsam=rho), sched_fns=[lambda step: 1 - step / 100],
        gsam_gradient=big_vision("trainers.proj.gsam.gsam").gsam_gradient,
    )  # fmt: skip
    without_collectives(m)
    return Made(update, (params, tx.init(params), KEY, x, one_hot(), jnp.zeros(())), {0: 0, 1: 1, 2: 2})


@vision_case("distillation", "vision")
def distillation() -> Made:
    """A student beside a teacher that stays, on mixed-up images."""
    models, x = dict(student=vit(), teacher=vit(pool_type="map")), images()
    params = {name: model.init(KEY, x)["params"] for name, model in models.items()}
    config = dict(mixup=dict(p=1.0, fold_in=None), teachers=["teacher"], distance="kl", distance_kw=dict(t=2.0))
    update, tx, _ = trainer("distill/distill.py", "loss_fn", "getfirst", config=config, models=models,
                            dd=big_vision("evaluators.proj.distill.distance"))  # fmt: skip
    args = (params, tx.init(params["student"]), KEY, dict(image=x, labels=one_hot()))
    return Made(update, args, {0: 0, 1: 1, 2: 2})


@vision_case("uvim_vqvae", "generative")
def uvim() -> Made:
    """A dictionary of codes that follows its codewords' means."""
    model = big_vision("models.proj.uvim.vit").Model(
        inputs={"in": (48,)}, outputs={"out": (48,)}, input_size=(16, 16), patch_size=(4, 4), code_len=4, width=32, enc_depth=1,
        dec_depth=1, mlp_dim=64, num_heads=2, dict_size=16, codeword_dim=16, dict_momentum=0.9, statistics_axis_name=None,
        with_encoder_ctx=True, with_decoder_ctx=True, code_dropout="random", bottleneck_resize=True,
    )  # fmt: skip
    batch = dict(x=floats(BATCH, 16, 48), ctx=images())

    def inputs(batch):
        return {"x": {"in": batch["x"]}, "ctx": batch["ctx"]}

    def task_loss(logits, batch):
        error = logits["out"] - batch["x"]
        return jnp.mean(error**2, (1, 2)), {"distance": jnp.abs(error)}

    made = model.init(dict.fromkeys(("params", "state", "dropout", "vqvae"), KEY), **inputs(batch))
    update, tx, m = trainer("uvim/vqvae.py", model=model, input_pp_fn=inputs, task_loss_fn=task_loss, SG=jax.lax.stop_gradient,
                            partial=functools.partial)  # fmt: skip
    without_collectives(m)

    def step(params, opt, state, batch, rng):
        return update(params, opt, state, batch, rng)

    return Made(step, (made["params"], tx.init(made["params"]), made["state"], batch, KEY), {0: 0, 1: 1, 2: 2, 4: 4})


NERF = """
Config.batch_size = 16
Model.raydist_fn = @jnp.reciprocal
Model.single_mlp = False
Model.num_prop_samples = 8
Model.num_nerf_samples = 8
PropMLP.net_depth = 2
PropMLP.net_width = 16
PropMLP.disable_rgb = True
PropMLP.max_deg_point = 6
PropMLP.warp_fn = @coord.contract
NerfMLP.net_depth = 2
NerfMLP.net_width = 32
NerfMLP.bottleneck_width = 16
NerfMLP.net_width_viewdirs = 16
NerfMLP.max_deg_point = 6
NerfMLP.warp_fn = @coord.contract
"""


@case("mipnerf_360", "scenes", source=MULTINERF, packages=["gin", "dm_pix"])
def mipnerf_360() -> Made:
    import gin

    old_names()
    train_utils = package(MULTINERF, "internal.train_utils", ["rawpy", "mediapy", "pycolmap"])
    configs, models, utils = (package(MULTINERF, f"internal.{name}") for name in ("configs", "models", "utils"))
    gin.clear_config()
    gin.parse_config(NERF, skip_unknown=True)
    config = configs.Config()
    model, variables = models.construct_model(KEY, utils.dummy_rays(), config)
    state, _ = train_utils.create_optimizer(config, variables)
    without_collectives(train_utils)
    train_step = train_utils.create_train_step(model, config)

    def batched(x: Any) -> np.ndarray:
        x = np.broadcast_to(np.asarray(x), (BATCH, np.shape(x)[-1])).copy()
        return x + 0.1 * floats(*x.shape) if x.dtype.kind == "f" else x

    near, far, weights = (np.full((BATCH, 1), n, np.float32) for n in (0.2, 10.0, 1.0))
    rays = jax.tree.map(batched, utils.dummy_rays()).replace(near=near, far=far, lossmult=weights)

    def step(rng, state, batch, train_frac):
        return train_step(rng, state, batch, None, train_frac, 1.0)

    return Made(step, (KEY, state, utils.Batch(rays=rays, rgb=np.abs(floats(BATCH, 3))), jnp.float32(0.1)), {0: 2, 1: 0})
