"""Notebooks of patrick-kidger/equinox and patrick-kidger/diffrax: networks, neural differential equations, a GAN, a flow.

`eqx.filter_jit`'s part (arrays and the rest apart) is done around each notebook's own `make_step`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

from foreign.registry import Made, case, floats, ints
from foreign.sources import pieces, plain

EQUINOX, DIFFRAX = "patrick-kidger+equinox", "patrick-kidger+diffrax"
equinox_case = functools.partial(case, source=EQUINOX, packages=["equinox", "diffrax", "einops"])
diffrax_case = functools.partial(case, source=DIFFRAX, packages=["diffrax"])


def notebook(source: str, name: str, *names: str, given: Mapping[str, Any] | None = None, **options: Any) -> Any:
    return pieces(f"{source}/docs/examples/{name}.ipynb", names or ("*",), given, **options)


def filtered(fn: Callable[..., Any], args: tuple[Any, ...], feed: Mapping[int, int]) -> Made:
    """A step of modules with functions in them as one of arrays alone."""
    import equinox as eqx

    def is_array(x: Any) -> bool:
        return eqx.is_array(x) or isinstance(x, np.ndarray)

    arrays, rest = eqx.partition(args, is_array)

    def train_step(*arrays):
        return eqx.filter(fn(*eqx.combine(arrays, rest)), eqx.is_array)

    return Made(train_step, arrays, feed)


def trained(optimizer: optax.GradientTransformation, model: Any) -> Any:
    import equinox as eqx

    return optimizer.init(eqx.filter(model, eqx.is_inexact_array))


@equinox_case("equinox_vit", "vision", is_listed=True)
def vision_transformer() -> Made:
    names = ("PatchEmbedding", "AttentionBlock", "VisionTransformer", "compute_grads", "step_model")
    n = notebook(EQUINOX, "vision_transformer", *names, given={"channels": 3})
    model = n.VisionTransformer(
        embedding_dim=32, hidden_dim=64, num_heads=4, num_layers=2, dropout_rate=0.1, patch_size=8, num_patches=16, num_classes=10,
        key=jr.PRNGKey(0),
    )  # fmt: skip
    optimizer = optax.adamw(1e-4)
    inner = plain(n.step_model)

    def step(model, opt, images, labels, keys):
        return inner(model, optimizer, opt, images, labels, keys)

    keys = jr.split(jr.PRNGKey(1), 16)
    return filtered(step, (model, trained(optimizer, model), floats(16, 3, 32, 32), ints(10, 16), keys), {0: 0, 1: 1})


@equinox_case("equinox_bert", "language")
def bert() -> Made:
    layers = ("EmbedderBlock", "FeedForwardBlock", "AttentionBlock", "TransformerLayer", "Encoder", "BertClassifier")
    n = notebook(EQUINOX, "bert", *layers, "bert_config", "compute_loss", "make_step")
    n.jax = _without_pmean()
    small = dict(vocab_size=128, hidden_size=32, intermediate_size=64, max_position_embeddings=16)
    model = n.BertClassifier(config=n.bert_config | small, num_classes=2, key=jr.PRNGKey(0))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    inputs = {"token_ids": ints(128, 16, 16), "segment_ids": np.zeros((16, 16), np.int32), "label": ints(2, 16)}

    def step(model, inputs, opt_state, key):
        return n.make_step(model, inputs, opt_state, key, tx)

    return filtered(step, (model, inputs, trained(tx, model), jr.PRNGKey(1)), {0: 1, 2: 2, 3: 3})


def _without_pmean() -> Any:
    import types

    from foreign.sources import without_collectives

    return without_collectives(types.ModuleType("nothing")).jax


@equinox_case("equinox_mnist_cnn", "vision")
def mnist() -> Made:
    optim = optax.adamw(3e-4)
    n = notebook(EQUINOX, "mnist", "CNN", "loss", "cross_entropy", "make_step", given={"optim": optim})
    model = n.CNN(jr.PRNGKey(0))
    inner = plain(n.make_step)
    return filtered(inner, (model, trained(optim, model), floats(16, 1, 28, 28), ints(10, 16)), {0: 0, 1: 1})


@equinox_case("equinox_rnn", "recurrent")
def rnn() -> Made:
    optim = optax.adam(3e-3)
    n = notebook(EQUINOX, "train_rnn", "RNN", "get_data", "compute_loss", "make_step", given={"optim": optim})
    model = n.RNN(in_size=2, out_size=1, hidden_size=16, key=jr.PRNGKey(0))
    xs, ys = n.get_data(32, key=jr.PRNGKey(1))
    return filtered(plain(n.make_step), (model, xs, ys, trained(optim, model)), {0: 1, 3: 2})


@equinox_case("equinox_stateful_norm", "vision")
def stateful() -> Made:
    """Batch norm over a vmapped axis (`axis_name="batch"`) and spectral norm, with their state threaded."""
    import equinox as eqx

    optim = optax.adam(3e-3)
    n = notebook(EQUINOX, "stateful", "Model", "compute_loss", "make_step", given={"optim": optim})
    model, state = eqx.nn.make_with_state(n.Model)(jr.PRNGKey(0))
    return filtered(plain(n.make_step), (model, state, trained(optim, model), floats(32, 3), floats(32, 3)), {0: 0, 1: 1, 2: 2})


@equinox_case("equinox_frozen_layer", "recurrent")
def frozen_layer() -> Made:
    import equinox as eqx

    optim = optax.adam(3e-3)
    model = eqx.nn.MLP(in_size=1, out_size=1, width_size=32, depth=2, key=jr.PRNGKey(0))
    spec = jax.tree.map(lambda _: False, model)
    spec = eqx.tree_at(lambda tree: (tree.layers[-1].weight, tree.layers[-1].bias), spec, replace=(True, True))
    n = notebook(EQUINOX, "frozen_layer", "make_step", given={"optim": optim, "filter_spec": spec})
    opt = optim.init(eqx.filter(model, spec))
    return filtered(plain(n.make_step), (model, floats(32, 1), floats(32, 1), opt), {0: 0, 3: 1})


@equinox_case("equinox_score_diffusion", "diffusion")
def score_diffusion() -> Made:
    n = notebook(EQUINOX, "score_based_diffusion", "MixerBlock", "Mixer2d", "single_loss_fn", "batch_loss_fn", "make_step")
    model = n.Mixer2d((1, 16, 16), 4, 32, 32, 32, 2, 10.0, key=jr.PRNGKey(0))
    opt = optax.adabelief(3e-4)
    inner = plain(n.make_step)

    def step(model, data, key, opt_state):
        return inner(model, lambda t: 1 - jnp.exp(-t), lambda t: t, data, 10.0, key, opt_state, opt.update)

    return filtered(step, (model, floats(16, 1, 16, 16), jr.PRNGKey(1), trained(opt, model)), {0: 1, 2: 2, 3: 3})


@equinox_case("equinox_unet_diffusion", "diffusion")
def unet() -> Made:
    """The UNet of one notebook under the loss and step of the other."""
    u = notebook(EQUINOX, "unet")
    n = notebook(EQUINOX, "score_based_diffusion", "single_loss_fn", "batch_loss_fn", "make_step")
    model = u.UNet((1, 16, 16), False, [1, 2], 16, 2, 8, 0.0, 3, [8], key=jr.PRNGKey(0))
    opt = optax.adam(3e-4)
    inner = plain(n.make_step)

    def step(model, data, key, opt_state):
        return inner(model, lambda t: 1 - jnp.exp(-t), lambda t: t, data, 10.0, key, opt_state, opt.update)

    return filtered(step, (model, floats(8, 1, 16, 16), jr.PRNGKey(1), trained(opt, model)), {0: 1, 2: 2, 3: 3})


@equinox_case("equinox_dcgan", "gan")
def dcgan() -> Made:
    """Both of the notebook's steps in one: the discriminator's, then the generator's against the new discriminator."""
    import equinox as eqx

    grads = ("compute_grads_discriminator", "compute_grads_generator")
    n = notebook(EQUINOX, "deep_convolutional_gan", "Generator", "Discriminator", *grads, "step_discriminator", "step_generator",
                 given={"batch_size": 8, "latent_size": 16})  # fmt: skip
    shape = (1, 64, 64)
    generator, g_state = eqx.nn.make_with_state(n.Generator)(16, (64, 8, 1), key=jr.PRNGKey(0))
    discriminator, d_state = eqx.nn.make_with_state(n.Discriminator)((64, 8, 1), key=jr.PRNGKey(1))
    tx = optax.adam(2e-4, b1=0.5)
    step_d, step_g = plain(n.step_discriminator), plain(n.step_generator)

    def step(generator, discriminator, g_opt, d_opt, g_state, d_state, key, images):
        d_loss, discriminator, d_opt, g_state, d_state, key = step_d(
            discriminator, generator, images, tx, d_opt, g_state, d_state, key
        )
        g_loss, generator, g_opt, d_state, g_state, key = step_g(generator, discriminator, tx, g_opt, d_state, g_state, key)
        return generator, discriminator, g_opt, d_opt, g_state, d_state, key, (d_loss, g_loss)

    args = (generator, discriminator, trained(tx, generator), trained(tx, discriminator), g_state, d_state, jr.PRNGKey(2))
    return filtered(step, (*args, floats(8, *shape)), {i: i for i in range(7)})


@diffrax_case("diffrax_neural_ode", "ode")
def neural_ode() -> Made:
    optim = optax.adabelief(3e-3)
    n = notebook(
        DIFFRAX, "neural_ode", "Func", "NeuralODE", "_get_data", "get_data", "grad_loss", "make_step", given={"optim": optim}
    )
    ts, ys = n.get_data(16, key=jr.PRNGKey(0))
    model = n.NeuralODE(2, 32, 2, key=jr.PRNGKey(1))
    return filtered(plain(n.make_step), (ts[:10], ys[:, :10], model, trained(optim, model)), {2: 1, 3: 2})


@diffrax_case("diffrax_continuous_flow", "flow")
def continuous_flow() -> Made:
    """Gradients are summed in a `fori_loop` over virtual batches, each a slice of a shuffled set inside the step."""
    import equinox as eqx

    optim = optax.adamw(1e-3, weight_decay=1e-5)
    n = notebook(DIFFRAX, "continuous_normalising_flow", "*", "loss", "make_step",
                 given={"optim": optim, "std": 1.0, "virtual_batches": 2}, without=("scipy",))  # fmt: skip
    n.dataloader = n.DataLoader((jnp.asarray(floats(64, 2)), jnp.ones(64)), 16, key=jr.PRNGKey(0))
    model = n.CNF(data_size=2, exact_logp=True, num_blocks=2, width_size=16, depth=2, key=jr.PRNGKey(1))
    state = (model, optim.init(eqx.filter(model, eqx.is_inexact_array)), jnp.zeros((), jnp.int32), jr.PRNGKey(2))
    return filtered(plain(n.make_step), state, {0: 1, 1: 2, 2: 3, 3: 4})


@diffrax_case("diffrax_latent_ode", "ode")
def latent_ode() -> Made:
    optim = optax.adam(1e-2)
    n = notebook(DIFFRAX, "latent_ode", "Func", "LatentODE", "loss", "make_step", given={"optim": optim})
    model = n.LatentODE(data_size=2, hidden_size=16, latent_size=16, width_size=16, depth=2, key=jr.PRNGKey(0))
    ts = np.sort(np.abs(floats(16, 12)), axis=1)
    return filtered(plain(n.make_step), (model, trained(optim, model), ts, floats(16, 12, 2), jr.PRNGKey(1)), {0: 1, 1: 2, 4: 3})


@diffrax_case("diffrax_neural_cde", "ode")
def neural_cde() -> Made:
    import equinox as eqx

    optim = optax.adam(1e-2)
    n = notebook(DIFFRAX, "neural_cde", "Func", "NeuralCDE", "get_data", "loss", "make_step", given={"optim": optim})
    n.grad_loss = eqx.filter_value_and_grad(plain(n.loss), has_aux=True)
    ts, coeffs, labels, size = n.get_data(16, False, key=jr.PRNGKey(0))
    model = n.NeuralCDE(size, 8, 32, 1, key=jr.PRNGKey(1))
    return filtered(plain(n.make_step), (model, (ts, labels, *coeffs), trained(optim, model)), {0: 2, 2: 3})


@diffrax_case("diffrax_neural_sde_gan", "gan")
def neural_sde() -> Made:
    n = notebook(DIFFRAX, "neural_sde")
    generator = n.NeuralSDE(1, 5, 3, 16, 16, 1, key=jr.PRNGKey(0))
    discriminator = n.NeuralCDE(1, 16, 16, 1, key=jr.PRNGKey(1))
    g_optim, d_optim = optax.rmsprop(2e-5), optax.rmsprop(-1e-4)
    ts = np.tile(np.arange(8, dtype=np.float32), (16, 1))
    inner = plain(n.make_step)

    def step(generator, discriminator, g_opt, d_opt, ts, ys, key, count):
        return inner(generator, discriminator, g_opt, d_opt, g_optim, d_optim, ts, ys, key, count)

    args = (generator, discriminator, trained(g_optim, generator), trained(d_optim, discriminator))
    return filtered(step, (*args, ts, floats(16, 8, 1), jr.PRNGKey(2), jnp.zeros((), jnp.int32)), {i: i for i in range(4)})


@diffrax_case("diffrax_steady_state", "implicit")
def steady_state() -> Made:
    """Implicit differentiation through a solve of unknown length; its only parameter is a scalar."""
    optim = optax.sgd(1e-2, momentum=0.7, nesterov=True)
    n = notebook(DIFFRAX, "steady_state", "ExponentialDecayToSteadyState", "loss", "make_step", given={"optim": optim})
    model = n.ExponentialDecayToSteadyState(jnp.array(0.0))
    return filtered(plain(n.make_step), (model, optim.init(model), jnp.array(0.76)), {0: 0, 1: 1})
