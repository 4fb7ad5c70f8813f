"""Bayesian inference and neighbours: numpyro, blackjax, flowjax, tinygp, dynamax; optimal transport and evolution."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax

from foreign.registry import WHOLE, Made, case, floats, ints
from foreign.sources import pieces

NUMPYRO = "pyro-ppl+numpyro"
bayes_case = functools.partial(case, family="bayesian")


@bayes_case("numpyro_svi_vae", source=NUMPYRO, packages=["numpyro"])
def svi_vae() -> Made:
    """`SVI.update` on the example's model and guide; the key is part of the state."""
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.optim import Adam

    m = pieces(f"{NUMPYRO}/examples/vae.py", ("encoder", "decoder", "model", "guide"), without=("datasets",))
    svi = SVI(m.model, m.guide, Adam(1e-3), Trace_ELBO(), hidden_dim=32, z_dim=8)
    batch = (floats(16, 8, 8) > 0).astype(np.float32)
    return Made(svi.update, (svi.init(jax.random.PRNGKey(0), batch), batch))


@bayes_case("numpyro_svi_multi_sample", source=NUMPYRO, packages=["numpyro"])
def svi_multi() -> Made:
    """Eight particles by vmap, Renyi bound, automatic guide, of the example's neural network."""
    from numpyro.infer import SVI, RenyiELBO
    from numpyro.infer.autoguide import AutoNormal
    from numpyro.optim import Adam

    m = pieces(f"{NUMPYRO}/examples/bnn.py", ("nonlin", "model"))
    svi = SVI(m.model, AutoNormal(m.model), Adam(1e-2), RenyiELBO(alpha=0.5, num_particles=8), D_H=8)
    X, Y = floats(32, 3), floats(32, 1)  # noqa: N806
    return Made(svi.update, (svi.init(jax.random.PRNGKey(0), X, Y), X, Y))


@bayes_case("numpyro_annealed_sampling", source=NUMPYRO, packages=["numpyro"])
def annealed() -> Made:
    """A guide of Langevin steps: gradients in a `scan` inside the loss."""
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoDAIS
    from numpyro.optim import Adam

    m = pieces(f"{NUMPYRO}/examples/dais_demo.py", ("kernel", "model", "get_data"))
    X, Y = m.get_data(16)  # noqa: N806
    svi = SVI(m.model, AutoDAIS(m.model, K=4), Adam(1e-3), Trace_ELBO())
    return Made(svi.update, (svi.init(jax.random.PRNGKey(0), X, Y), X, Y))


@bayes_case("numpyro_hidden_markov", source=NUMPYRO, packages=["numpyro", "funsor"])
def enumerated_states() -> Made:
    """Hidden states are summed out one by one, of sequences of several lengths."""
    from numpyro.handlers import block
    from numpyro.infer import SVI, TraceEnum_ELBO
    from numpyro.infer.autoguide import AutoDelta
    from numpyro.optim import Adam

    m = pieces(f"{NUMPYRO}/examples/hmm_enum.py", ("model_1",))
    model = functools.partial(m.model_1, args=types.SimpleNamespace(hidden_dim=4))
    guide = AutoDelta(block(model, hide_fn=lambda site: site.get("infer", {}).get("enumerate") == "parallel"))
    svi = SVI(model, guide, Adam(1e-3), TraceEnum_ELBO())
    data = ints(2, 16, 8, 11).astype(np.float32), ints(8, 16, low=3)
    return Made(svi.update, (svi.init(jax.random.PRNGKey(0), *data), *data))


@bayes_case("numpyro_nuts_kernel", source=NUMPYRO, packages=["numpyro"])
def nuts() -> Made:
    """One transition of NUTS: gradients in a `while_loop`, and no update of the usual kind."""
    from numpyro.infer import NUTS

    m = pieces(f"{NUMPYRO}/examples/bnn.py", ("nonlin", "model"))
    X, Y = floats(32, 3), floats(32, 1)  # noqa: N806
    kernel = NUTS(m.model, max_tree_depth=3)
    state = kernel.init(jax.random.PRNGKey(0), 10, None, (X, Y, 4), {})

    def step(state, X, Y):  # noqa: N803
        return kernel.sample(state, (X, Y, 4), {})

    return Made(step, (state, X, Y), {0: WHOLE})


def logistic(params, data, scale=1.0):
    x, y = data
    logits = jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"]
    prior = -0.5 * sum(jnp.vdot(p, p) for p in jax.tree.leaves(params))
    return prior - scale * optax.sigmoid_binary_cross_entropy(logits[:, 0], y).sum()


def network_params():
    return {"w1": jnp.asarray(floats(8, 16)) * 0.3, "b1": jnp.zeros(16), "w2": jnp.asarray(floats(16, 1)) * 0.3}


@bayes_case("blackjax_sgld", packages=["blackjax"])
def sgld() -> Made:
    """A gradient of a log density over a minibatch, and a step with noise; the position is the state."""
    import blackjax
    from blackjax.sgmcmc.gradients import grad_estimator

    estimate = grad_estimator(lambda p: -0.5 * sum(jnp.vdot(x, x) for x in jax.tree.leaves(p)),
                              lambda p, one: logistic(p, jax.tree.map(lambda a: a[None], one)), 1000)  # fmt: skip
    sgld = blackjax.sgld(estimate)

    def step(state, key, batch):
        key, sub = jax.random.split(key)
        return sgld.step(sub, state, batch, 1e-4), key

    batch = (floats(32, 8), ints(2, 32).astype(np.float32))
    return Made(step, (network_params(), jax.random.PRNGKey(0), batch), {0: 0, 1: 1})


@bayes_case("blackjax_hmc_chains", packages=["blackjax"])
def hmc() -> Made:
    """Sixteen chains of Hamiltonian Monte Carlo, vmapped."""
    import blackjax

    data = (jnp.asarray(floats(32, 8)), jnp.asarray(ints(2, 32).astype(np.float32)))
    kernel = blackjax.hmc(lambda p: logistic(p, data), step_size=1e-2, inverse_mass_matrix=jnp.ones(160), num_integration_steps=4)
    positions = jax.tree.map(lambda x: x + 0.1 * jnp.asarray(floats(16, *x.shape)), network_params())
    states = jax.vmap(kernel.init)(positions)

    def step(states, key):
        key, sub = jax.random.split(key)
        states, info = jax.vmap(kernel.step)(jax.random.split(sub, 16), states)
        return states, key, info.acceptance_rate

    return Made(step, (states, jax.random.PRNGKey(0)), {0: 0, 1: 1})


@case("flowjax_masked_autoregressive", "flow", packages=["flowjax"])
def flow() -> Made:
    """flowjax's own training step on its masked autoregressive flow with spline transformers."""
    import equinox as eqx
    from flowjax.bijections import RationalQuadraticSpline
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow
    from flowjax.train.losses import MaximumLikelihoodLoss
    from flowjax.train.train_utils import step as flow_step

    dist = masked_autoregressive_flow(
        jax.random.key(0), base_dist=Normal(jnp.zeros(4)), flow_layers=2, nn_width=16,
        transformer=RationalQuadraticSpline(knots=4, interval=4),
    )  # fmt: skip
    import paramax

    params, static = eqx.partition(dist, eqx.is_inexact_array, is_leaf=lambda leaf: isinstance(leaf, paramax.NonTrainable))
    optimizer, loss = optax.adam(1e-3), MaximumLikelihoodLoss()
    inner = getattr(flow_step, "__wrapped__", flow_step)

    def step(params, opt_state, x):
        return inner(params, static, x, optimizer=optimizer, opt_state=opt_state, loss_fn=loss)

    return Made(step, (params, optimizer.init(params), floats(32, 4)), {0: 0, 1: 1})


@bayes_case("tinygp_marginal_likelihood", packages=["tinygp"])
def gaussian_process() -> Made:
    """A Cholesky factorisation of the batch against itself; every parameter is a scalar."""
    import tinygp

    def loss_fn(params, x, y):
        kernel = jnp.exp(params["amplitude"]) * tinygp.kernels.Matern32(jnp.exp(params["scale"]))
        return -tinygp.GaussianProcess(kernel, x, diag=jnp.exp(params["noise"]), mean=params["mean"]).log_probability(y)

    from foreign.state_space import adamw_step

    params = {n: jnp.asarray(v) for n, v in dict(amplitude=0.1, scale=0.3, noise=-1.0, mean=0.0).items()}
    return adamw_step(loss_fn, params, np.sort(floats(64)), floats(64))


@bayes_case("dynamax_hmm_sgd", packages=["dynamax"])
def hidden_markov() -> Made:
    """Marginal likelihood of a Gaussian hidden Markov model: a scan over time for each sequence."""
    from dynamax.hidden_markov_model import GaussianHMM
    from dynamax.parameters import from_unconstrained, log_det_jac_constrain, to_unconstrained

    hmm = GaussianHMM(4, 3)
    params, props = hmm.initialize(jax.random.PRNGKey(0))
    tx = optax.adam(1e-2)
    free = to_unconstrained(params, props)

    def step(state, emissions):
        def loss_fn(free):
            params = from_unconstrained(free, props)
            likelihoods = jax.vmap(functools.partial(hmm.marginal_log_prob, params))(emissions)
            return -(hmm.log_prior(params) + likelihoods.sum() + log_det_jac_constrain(params, props)) / emissions.size

        loss, grads = jax.value_and_grad(loss_fn)(state[0])
        updates, opt = tx.update(grads, state[1])
        return (optax.apply_updates(state[0], updates), opt), loss

    return Made(step, ((free, tx.init(free)), floats(16, 12, 3)))


@case("ott_sinkhorn_loss", "transport", packages=["ott"])
def sinkhorn() -> Made:
    """Points follow the gradient of a Sinkhorn divergence, differentiated implicitly."""
    from ott.geometry import pointcloud
    from ott.solvers import linear

    from foreign.state_space import adamw_step

    def loss_fn(params, target):
        geometry = pointcloud.PointCloud(params["x"] @ params["w"], target, epsilon=0.1)
        return linear.solve(geometry, max_iterations=20).reg_ot_cost

    return adamw_step(loss_fn, {"x": jnp.asarray(floats(32, 4)), "w": jnp.eye(4, 2)}, floats(32, 2))


@case("evosax_evolution_strategy", "evolution", packages=["evosax"])
def evolution() -> Made:
    """Ask, evaluate a population of networks, tell: no gradient at all."""
    from evosax.algorithms import CMA_ES

    params = network_params()
    strategy = CMA_ES(population_size=16, solution=params)
    settings = strategy.default_params
    state = strategy.init(jax.random.PRNGKey(0), params, settings)

    def step(state, key, batch):
        key, ask, tell = jax.random.split(key, 3)
        population, state = strategy.ask(ask, state, settings)
        fitness = jax.vmap(lambda p: -logistic(p, batch))(population)
        state, metrics = strategy.tell(tell, population, fitness, state, settings)
        return state, key, fitness

    return Made(step, (state, jax.random.PRNGKey(1), (floats(32, 8), ints(2, 32).astype(np.float32))), {0: 0, 1: 1})
