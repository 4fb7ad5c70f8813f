"""Physics, quantised training and other optimizers: derivatives inside the loss, and numbers of few bits."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from foreign.registry import Made, case, floats, ints
from foreign.sources import load, old_names, package, plain
from foreign.state_space import adamw_step

JAXPI = "PredictiveIntelligenceLab+jaxpi"


def pinn(example: str, inputs: int) -> Made:
    """jaxpi: derivatives of the network inside the loss, causal weights, loss weights balanced by gradient norms."""
    old_names()

    def same(x: Any, *args: Any, **kwargs: Any) -> Any:
        return x

    base = package(JAXPI, "jaxpi.models", ["jax.experimental.host_callback", "wandb"])
    base.jax_utils = type("no", (), {"replicate": staticmethod(same), "unreplicate": staticmethod(same)})
    base.lax = type("lax", (), {"pmean": staticmethod(same), "stop_gradient": staticmethod(jax.lax.stop_gradient)})
    config = load(f"{JAXPI}/examples/{example}/configs", "default").get_config()
    config.arch.num_layers, config.arch.hidden_dim = 2, 32
    if config.arch.get("fourier_emb"):
        config.arch.fourier_emb.embed_dim = 32
    if config.weighting.get("use_causal"):
        config.weighting.num_chunks = 8
    m = load(f"{JAXPI}/examples/{example}", "models")
    t, x = jnp.linspace(0, 1, 16), jnp.linspace(-1, 1, 16)
    model = m.Burgers(config, -jnp.sin(jnp.pi * x), t, x) if example == "burgers" else m.Advection(config, jnp.sin(x), t, x, 1.0)
    inner = plain(base.PINN.step)

    def step(state, batch):
        return inner(model, state, batch)

    from foreign.registry import WHOLE

    return Made(step, (model.state, np.abs(floats(64, inputs)).clip(0, 1)), {0: WHOLE})


case("jaxpi_burgers", "pinn", source=JAXPI, is_listed=True)(functools.partial(pinn, "burgers", 2))
case("jaxpi_advection", "pinn", source=JAXPI)(functools.partial(pinn, "adv", 2))


@case("fourier_neural_operator", "operator", source="astanziola+fourier-neural-operator-flax")
def neural_operator() -> Made:
    """Darcy flow: weights multiply the corners of a 2-d real FFT."""
    m = package("astanziola+fourier-neural-operator-flax", "fno.modules")
    net = m.FNO2D(modes1=4, modes2=4, width=8, depth=2, channels_last_proj=16)
    x, y = floats(8, 16, 16, 1), floats(8, 16, 16, 1)
    return adamw_step(lambda p, x, y: jnp.mean((y - net.apply(p, x)) ** 2), net.init(jax.random.PRNGKey(0), x), x, y)


@case("jax_md_graph_network_forces", "physics", packages=["jax_md"])
def molecular_dynamics() -> Made:
    """Energies of a graph network and forces, their derivatives by position, both matched."""
    from flax import nnx
    from jax_md import energy, space

    displacement, _ = space.periodic(4.0)
    positions = np.abs(floats(8, 12, 3)) % 4
    model = energy.graph_network(displacement, 1.5, key=jax.random.PRNGKey(0), mlp_sizes=(16, 16)).model
    graph, params = nnx.split(model)

    def loss_fn(params, positions, energies, forces):
        energy_fn = nnx.merge(graph, params)
        predicted, gradients = jax.vmap(jax.value_and_grad(lambda r: energy_fn(r)))(positions)
        return jnp.mean((predicted - energies) ** 2) + jnp.mean((gradients + forces) ** 2)

    return adamw_step(loss_fn, params, positions, floats(8), floats(8, 12, 3))


@case("jax_md_nve_simulation", "physics", packages=["jax_md"])
def simulation() -> Made:
    """Molecular dynamics without parameters: forces of a soft sphere potential, ten steps in a `fori_loop`."""
    from jax_md import energy, simulate, space

    displacement, shift = space.periodic(6.0)
    init, apply = simulate.nve(energy.soft_sphere_pair(displacement), shift, dt=1e-3)
    state = init(jax.random.PRNGKey(0), jnp.asarray(np.abs(floats(64, 2)) % 6), kT=0.1)

    def step(state):
        return jax.lax.fori_loop(0, 10, lambda i, s: apply(s), state), ()

    return Made(step, (state,))


@case("ferminet_vmc", "physics", source="google-deepmind+ferminet", packages=["kfac_jax", "folx"])
def ferminet() -> Made:
    """`make_training_step`: Metropolis moves of the walkers, local energies (a Laplacian), Adam; the walkers are state."""
    names = [
        "pyscf",
        "pyscf.pbc",
        "pyscf.pbc.gto",
        "pyscf.gto",
        "pyscf.dft",
        "pyscf.scf",
        "pyscf.lib",
        "pyscf.data",
        "ferminet.pretrain",
    ]
    m = package("google-deepmind+ferminet", "ferminet.train", [*names, "ferminet.utils.scf", "ferminet.utils.statistics"])
    f = {
        n: package("google-deepmind+ferminet", f"ferminet.{n}", names)
        for n in ("networks", "envelopes", "hamiltonian", "loss", "mcmc")
    }
    atoms, charges, spins = jnp.zeros((1, 3)), jnp.array([3.0]), (2, 1)
    net = f["networks"].make_fermi_net(
        spins, charges, envelope=f["envelopes"].make_isotropic_envelope(), determinants=2,
        feature_layer=f["networks"].make_ferminet_features(natoms=1, nspins=spins, ndim=3), hidden_dims=((16, 8), (16, 8)),
    )  # fmt: skip
    params = net.init(jax.random.PRNGKey(0))

    def log_network(*args):
        return net.apply(*args)[1]

    batched = jax.vmap(log_network, in_axes=(None, 0, 0, 0, 0), out_axes=0)
    walkers = 16
    data = f["networks"].FermiNetData(
        positions=jnp.asarray(floats(walkers, 9)), spins=jnp.tile(jnp.array([1.0, 1.0, -1.0]), (walkers, 1)),
        atoms=jnp.tile(atoms, (walkers, 1, 1)), charges=jnp.tile(charges, (walkers, 1)),
    )  # fmt: skip
    local_energy = f["hamiltonian"].local_energy(f=net.apply, charges=charges, nspins=spins, use_scan=False)
    loss = f["loss"].make_loss(log_network, local_energy, clip_local_energy=5.0)
    tx = optax.adam(1e-3)
    moves = f["mcmc"].make_mcmc_step(batched, walkers, steps=2)
    update = m.make_opt_update_step(loss, tx)

    def step(data, params, state, key):
        """As `make_training_step`'s, without its pmap."""
        key, mcmc_key, loss_key = jax.random.split(key, 3)
        data, pmove = moves(params, data, mcmc_key, 0.1)
        params, state, value, _ = update(params, data, state, loss_key)
        return data, params, state, key, (value, pmove)

    return Made(step, (data, params, tx.init(params), jax.random.PRNGKey(1)), {0: 0, 1: 1, 2: 2, 3: 3})


@case("aqt_int8_training", "quantised", packages=["aqt"])
def aqt_training() -> Made:
    """Forward and both backward products in int8, with straight-through gradients, in a Flax network."""
    from aqt.jax.v2 import config as aqt_config
    from aqt.jax.v2.flax import aqt_flax
    from flax import linen as nn

    config = aqt_config.fully_quantized(fwd_bits=8, bwd_bits=8, use_stochastic_rounding=False)
    quantised = functools.partial(aqt_flax.AqtDotGeneral, config, prng_name=None)

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(64, dot_general_cls=quantised)(x))
            x = nn.relu(nn.Dense(64, dot_general_cls=quantised)(x))
            return nn.Dense(10)(x)

    return _classifier(Network())


def _classifier(net: Any, tx: Any = None) -> Made:
    x = floats(32, 16)
    params = net.init(jax.random.PRNGKey(0), x)["params"]

    def loss_fn(params, x, y):
        logits = net.apply({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return adamw_step(loss_fn, params, x, ints(10, 32), tx=tx)


@case("qwix_quantisation_aware", "quantised", packages=["qwix"])
def qwix_training() -> Made:
    """Weights and activations in four and eight bits by rules over module paths, around a plain Flax network."""
    import qwix
    from flax import linen as nn

    net = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(64), nn.relu, nn.Dense(10)])
    rules = [qwix.QtRule(module_path=".*", weight_qtype=jnp.int4, act_qtype=jnp.int8)]
    return _classifier(qwix.quantize_model(net, qwix.QtProvider(rules)))


@case("optax_shampoo_like_muon", "optimizer", packages=["optax", "flax"])
def muon() -> Made:
    """Newton-Schulz iterations (products of matrices) in the update."""
    from flax import linen as nn

    net = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(64), nn.relu, nn.Dense(10)])
    return _classifier(net, optax.contrib.muon(1e-3))


@case("optax_lbfgs_linesearch", "optimizer", packages=["optax", "flax"])
def lbfgs() -> Made:
    """Full-batch L-BFGS with a zoom line search: the loss is evaluated again inside the update's `while_loop`."""
    from flax import linen as nn

    net, x, y = nn.Sequential([nn.Dense(32), nn.tanh, nn.Dense(1)]), floats(64, 8), floats(64, 1)
    params, tx = net.init(jax.random.PRNGKey(0), x), optax.lbfgs(memory_size=4)

    def step(state, x, y):
        params, opt = state

        def loss_fn(params):
            return ((net.apply(params, x) - y) ** 2).mean()

        value, grads = optax.value_and_grad_from_state(loss_fn)(params, state=opt)
        updates, opt = tx.update(grads, opt, params, value=value, grad=grads, value_fn=loss_fn)
        return (optax.apply_updates(params, updates), opt), value

    return Made(step, ((params, tx.init(params)), x, y))


@case("maml_sinusoid", "meta-learning", packages=["optax", "flax"])
def maml() -> Made:
    """Model-agnostic meta-learning over a batch of tasks: a gradient through inner steps of gradient descent (flax and optax)."""
    from flax import linen as nn

    net = nn.Sequential([nn.Dense(40), nn.relu, nn.Dense(40), nn.relu, nn.Dense(1)])

    def loss(params, x, y):
        return ((net.apply(params, x) - y) ** 2).mean()

    def adapted(params, x, y):
        inner = optax.sgd(0.01)
        opt = inner.init(params)
        for _ in range(2):
            updates, opt = inner.update(jax.grad(loss)(params, x, y), opt)
            params = optax.apply_updates(params, updates)
        return params

    def outer(params, x, y, query_x, query_y):
        return jax.vmap(lambda *t: loss(adapted(params, t[0], t[1]), t[2], t[3]))(x, y, query_x, query_y).mean()

    tasks = [floats(8, 10, 1) for _ in range(4)]
    return adamw_step(outer, net.init(jax.random.PRNGKey(0), tasks[0][0]), *tasks)
