"""Reinforcement learning: vwxyzjn/cleanrl, luchris429/purejaxrl, ikostrikov/jaxrl and its IQL, young-geng/JaxCQL, rlax, brax."""

from __future__ import annotations

import functools
import sys
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from foreign.registry import Made, case, floats, ints
from foreign.sources import edited, frozen_init, load, old_names, package, pieces, plain

CLEANRL, PUREJAXRL, JAXRL = "vwxyzjn+cleanrl", "luchris429+purejaxrl", "ikostrikov+jaxrl"
rl_case = functools.partial(case, family="rl")
OBSERVATION, ACTIONS, BATCH = 8, 4, 32


class TimeStep(NamedTuple):
    """dm_env's, which is not needed otherwise."""

    step_type: np.ndarray
    reward: np.ndarray
    discount: np.ndarray
    observation: np.ndarray


def space(shape, low=-1.0, high=1.0):
    return types.SimpleNamespace(shape=shape, low=np.full(shape, low, np.float32), high=np.full(shape, high, np.float32), n=ACTIONS)


def transitions() -> tuple[np.ndarray, ...]:
    """Observations, continuous actions, next observations, rewards, ends."""
    ends = (floats(BATCH) > 1).astype(np.float32)
    return floats(BATCH, OBSERVATION), np.tanh(floats(BATCH, ACTIONS)), floats(BATCH, OBSERVATION), floats(BATCH), ends


def cleanrl(script: str, *names: str, **given):
    return pieces(f"{CLEANRL}/cleanrl/{script}.py", ("QNetwork", "TrainState", *names), given,
                  without=("cleanrl_utils", "stable_baselines3", "gymnasium", "tyro"))  # fmt: skip


@rl_case("cleanrl_dqn", source=CLEANRL)
def dqn() -> Made:
    m = cleanrl("dqn_jax", "update", args=types.SimpleNamespace(gamma=0.99))
    m.q_network = m.QNetwork(action_dim=ACTIONS)
    obs, _, following, rewards, dones = transitions()
    params = m.q_network.init(jax.random.PRNGKey(0), obs)
    state = m.TrainState.create(apply_fn=m.q_network.apply, params=params, target_params=params, tx=optax.adam(2.5e-4))
    return Made(plain(m.update), (state, obs, ints(ACTIONS, BATCH, 1), following, rewards, dones), {0: 2})


@rl_case("cleanrl_c51", source=CLEANRL)
def c51() -> Made:
    """The projection of the distribution is a `fori_loop` over the batch with scatters inside."""
    m = cleanrl("c51_jax", "update", args=types.SimpleNamespace(gamma=0.99, v_min=-10.0, v_max=10.0, n_atoms=21))
    clip = jnp.clip
    shadow = types.ModuleType("jnp_with_old_clip")
    shadow.__getattr__ = lambda name: getattr(jnp, name)
    shadow.clip = lambda x, a_min=None, a_max=None: clip(x, a_min, a_max)
    m.jnp = shadow
    m.q_network = m.QNetwork(action_dim=ACTIONS, n_atoms=21)
    obs, _, following, rewards, dones = transitions()
    params = m.q_network.init(jax.random.PRNGKey(0), obs)
    state = m.TrainState.create(apply_fn=m.q_network.apply, params=params, target_params=params,
                                atoms=jnp.linspace(-10, 10, 21), tx=optax.adam(2.5e-4))  # fmt: skip
    data = (obs, ints(ACTIONS, BATCH, 1), following, rewards[:, None], dones[:, None])
    return Made(plain(m.update), (state, *data), {0: 2})


def actor_critic(m) -> tuple:
    """Actor and two critics of a cleanrl script, each with its target."""
    m.actor = m.Actor(action_dim=ACTIONS, action_scale=jnp.ones(ACTIONS), action_bias=jnp.zeros(ACTIONS))
    m.qf = m.QNetwork()
    obs, actions, *_ = transitions()

    def state(net, *inputs, seed):
        params = net.init(jax.random.PRNGKey(seed), *inputs)
        return m.TrainState.create(apply_fn=net.apply, params=params, target_params=params, tx=optax.adam(3e-4))

    return state(m.actor, obs, seed=0), state(m.qf, obs, actions, seed=1), state(m.qf, obs, actions, seed=2)


@rl_case("cleanrl_ddpg", source=CLEANRL)
def ddpg() -> Made:
    args = types.SimpleNamespace(gamma=0.99, tau=0.005)
    m = cleanrl("ddpg_continuous_action_jax", "Actor", "update_critic", "update_actor", args=args)
    actor, qf1, _ = actor_critic(m)

    def update(actor, qf1, *data):
        qf1, loss, values = plain(m.update_critic)(actor, qf1, *data)
        actor, qf1, actor_loss = plain(m.update_actor)(actor, qf1, data[0])
        return actor, qf1, (loss, values, actor_loss)

    return Made(update, (actor, qf1, *transitions()), {0: 0, 1: 1})


@rl_case("cleanrl_td3", source=CLEANRL)
def td3() -> Made:
    args = types.SimpleNamespace(gamma=0.99, tau=0.005, policy_noise=0.2, noise_clip=0.5)
    envs = types.SimpleNamespace(single_action_space=space((ACTIONS,)))
    m = cleanrl("td3_continuous_action_jax", "Actor", "update_critic", "update_actor", args=args, envs=envs)
    actor, qf1, qf2 = actor_critic(m)

    def update(actor, qf1, qf2, key, *data):
        (qf1, qf2), losses, values, key = plain(m.update_critic)(actor, qf1, qf2, *data, key)
        actor, (qf1, qf2), actor_loss = plain(m.update_actor)(actor, qf1, qf2, data[0])
        return actor, qf1, qf2, key, (losses, values, actor_loss)

    return Made(update, (actor, qf1, qf2, jax.random.PRNGKey(3), *transitions()), {0: 0, 1: 1, 2: 2, 3: 3})


def purejaxrl(script: str, **config):
    old_names()
    gymnax_wrappers = ["brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training", "navix"]
    m = load(f"{PUREJAXRL}/purejaxrl", script, "wrappers", stand_ins=gymnax_wrappers)
    defaults = dict(
        LR=2.5e-4, NUM_ENVS=8, NUM_STEPS=8, TOTAL_TIMESTEPS=128, UPDATE_EPOCHS=2, NUM_MINIBATCHES=2, GAMMA=0.99, GAE_LAMBDA=0.95,
        CLIP_EPS=0.2, ENT_COEF=0.01, VF_COEF=0.5, MAX_GRAD_NORM=0.5, ACTIVATION="tanh", ENV_NAME="CartPole-v1", ANNEAL_LR=True,
        DEBUG=False,
    )  # fmt: skip
    return m.make_train(defaults | config)


@rl_case("purejaxrl_ppo_whole", source=PUREJAXRL, packages=["gymnax", "distrax"])
def ppo_whole() -> Made:
    """A whole training, environment included, in one call that takes only a key."""
    train = purejaxrl("ppo")
    return Made(train, (jax.random.PRNGKey(0),), {})


def jaxrl_batch(make):
    obs, actions, following, rewards, dones = transitions()
    return make(observations=obs, actions=actions, rewards=rewards, masks=1 - dones, next_observations=following)


@rl_case("jaxrl_sac", source=JAXRL, packages=["tensorflow_probability"])
def sac() -> Made:
    old_names()
    m = package(
        JAXRL,
        "jaxrl.agents.sac.sac_learner",
        stand_ins=[
            "d4rl",
            "dm_control",
            "mujoco_py",
            "gdown",
            "gym.wrappers",
            "gym.wrappers.pixel_observation",
            "dm_control_suite",
        ],
    )
    with frozen_init():
        learner = m.SACLearner(0, floats(1, OBSERVATION), floats(1, ACTIONS), hidden_dims=(32, 32))
    inner = plain(m._update_jit)

    def update(rng, actor, critic, target, temp, batch):
        return inner(rng, actor, critic, target, temp, batch, 0.99, 0.005, -2.0, True, True)

    state = (learner.rng, learner.actor, learner.critic, learner.target_critic, learner.temp)
    return Made(update, (*state, jaxrl_batch(m.Batch)), {i: i for i in range(5)})


@rl_case("iql", source="ikostrikov+implicit_q_learning", packages=["tensorflow_probability"])
def iql() -> Made:
    old_names()
    folder = "ikostrikov+implicit_q_learning"
    sys.modules["policy"] = edited(f"{folder}/policy.py", [("'actor_def', 'distribution'", "'actor_def'")])
    m = load(folder, "learner", "common", "value_net", "actor", "critic")
    with frozen_init():
        learner = m.Learner(0, floats(1, OBSERVATION), floats(1, ACTIONS), hidden_dims=(32, 32), max_steps=100)
    inner = plain(m._update_jit)

    def update(rng, actor, critic, value, target, batch):
        return inner(rng, actor, critic, value, target, batch, 0.99, 0.005, 0.8, 0.1)

    state = (learner.rng, learner.actor, learner.critic, learner.value, learner.target_critic)
    return Made(update, (*state, jaxrl_batch(m.Batch)), {i: i for i in range(5)})


@rl_case("jaxcql", source="young-geng+JaxCQL", packages=["distrax", "mlxu"])
def cql() -> Made:
    """One `vjp` of several losses of one forward pass (`value_and_multi_grad`): a gradient for each network."""
    old_names()
    m = package("young-geng+JaxCQL", "JaxCQL.conservative_sac", ["gcsfs"])
    models = package("young-geng+JaxCQL", "JaxCQL.model")
    utils = package("young-geng+JaxCQL", "JaxCQL.jax_utils")
    utils.init_rng(0)
    policy = models.TanhGaussianPolicy(OBSERVATION, ACTIONS, "32-32")
    agent = m.ConservativeSAC(None, policy, models.FullyConnectedQFunction(OBSERVATION, ACTIONS, "32-32"))
    inner = plain(m.ConservativeSAC._train_step)
    obs, actions, following, rewards, dones = transitions()
    batch = dict(observations=obs, actions=actions, rewards=rewards, next_observations=following, dones=dones)

    def train_step(states, target, key, batch):
        return inner(agent, states, target, key, batch)

    return Made(train_step, (agent._train_states, agent._target_qf_params, jax.random.PRNGKey(1), batch), {0: 0, 1: 1})


@rl_case("rlax_simple_dqn", source="google-deepmind+rlax", packages=["rlax", "haiku"])
def rlax_dqn() -> Made:
    old_names()
    examples = ["rlax.examples", "rlax.examples.experiment"]
    m = load(
        "google-deepmind+rlax/examples",
        "simple_dqn",
        "experiment",
        stand_ins=["bsuite", "bsuite.environments", "dm_env", *examples],
    )
    m.FLAGS.mark_as_parsed()
    observations, actions = types.SimpleNamespace(shape=(OBSERVATION,)), types.SimpleNamespace(num_values=ACTIONS)
    observations.generate_value = lambda: np.zeros(OBSERVATION, np.float32)
    agent = m.DQN(observations, actions, epsilon_cfg=dict(init_value=1.0, end_value=0.01, transition_steps=10, power=1.0),
                  target_period=2, learning_rate=0.005)  # fmt: skip
    params = agent.initial_params(jax.random.PRNGKey(0))
    learner = agent.initial_learner_state(params)
    obs, _, following, rewards, dones = transitions()
    data = (obs, ints(ACTIONS, BATCH), rewards, 1 - dones, following)
    inner = plain(m.DQN.learner_step)

    def learner_step(params, data, learner, key):
        return inner(agent, params, data, learner, key)

    return Made(learner_step, (params, data, learner, jax.random.PRNGKey(1)), {0: 0, 2: 1})


@rl_case("haiku_impala_vtrace", source="google-deepmind+dm-haiku", packages=["haiku", "rlax"])
def impala() -> Made:
    """V-trace over time-major trajectories, of the one-file learner."""
    import haiku as hk

    step_type = types.SimpleNamespace(FIRST=0, MID=1, LAST=2)
    m = pieces("google-deepmind+dm-haiku/examples/impala_lite.py", ("*",), without=("bsuite", "import dm_env"),
               given={"dm_env": types.SimpleNamespace(TimeStep=TimeStep, StepType=step_type)})  # fmt: skip
    net = hk.without_apply_rng(hk.transform(lambda timestep: m.SimpleNet(ACTIONS)(timestep)))
    opt = optax.rmsprop(5e-3, decay=0.99, eps=1e-7)
    learner = m.Learner(m.Agent(net.apply), opt.update)
    timestep = TimeStep(ints(3, 6, BATCH), floats(6, BATCH), np.ones((6, BATCH), np.float32), floats(6, BATCH, 10, 5))
    trajectories = m.Transition(timestep, ints(ACTIONS, 6, BATCH), floats(6, BATCH, ACTIONS))
    params = net.init(jax.random.PRNGKey(0), jax.tree.map(lambda x: x[0], timestep))
    inner = plain(m.Learner.update)

    def update(params, opt_state, trajectories):
        return inner(learner, params, opt_state, trajectories)

    return Made(update, (params, opt.init(params), trajectories), {0: 0, 1: 1})


@rl_case("brax_ppo_loss", packages=["brax"])
def brax_ppo() -> Made:
    """brax's PPO networks, loss and gradient update; one minibatch, in brax's own observation statistics."""
    from brax.training import gradients
    from brax.training.acme import running_statistics
    from brax.training.agents.ppo import losses, networks
    from brax.training.types import Transition

    net = networks.make_ppo_networks(
        OBSERVATION, ACTIONS, preprocess_observations_fn=running_statistics.normalize,
        policy_hidden_layer_sizes=(32, 32), value_hidden_layer_sizes=(32, 32),
    )  # fmt: skip
    keys = jax.random.split(jax.random.PRNGKey(0))
    params = losses.PPONetworkParams(policy=net.policy_network.init(keys[0]), value=net.value_network.init(keys[1]))
    normalizer = running_statistics.init_state(jax.ShapeDtypeStruct((OBSERVATION,), jnp.float32))
    loss = functools.partial(losses.compute_ppo_loss, ppo_network=net, entropy_cost=0.01, discounting=0.97, reward_scaling=1.0,
                             gae_lambda=0.95, clipping_epsilon=0.3, normalize_advantage=True)  # fmt: skip
    optimizer = optax.adam(3e-4)
    update = gradients.gradient_update_fn(loss, optimizer, pmap_axis_name=None, has_aux=True)
    shape = (BATCH, 5)
    extras = {"policy_extras": {"log_prob": -np.abs(floats(*shape)), "raw_action": floats(*shape, ACTIONS),
                                "distribution_params": floats(*shape, 2 * ACTIONS)},
              "state_extras": {"truncation": np.zeros(shape, np.float32)}}  # fmt: skip
    data = Transition(floats(*shape, OBSERVATION), np.tanh(floats(*shape, ACTIONS)), floats(*shape), np.ones(shape, np.float32),
                      floats(*shape, OBSERVATION), extras)  # fmt: skip

    def step(state, normalizer, data, key):
        (loss, metrics), params, opt_state = update(state[0], normalizer, data, key, optimizer_state=state[1])
        normalizer = running_statistics.update(normalizer, data.observation)
        return (params, opt_state), normalizer, (loss, metrics)

    return Made(step, ((params, optimizer.init(params)), normalizer, data, jax.random.PRNGKey(1)), {0: 0, 1: 1})


@rl_case("brax_sac_losses", packages=["brax"])
def brax_sac() -> Made:
    """Temperature, critic and actor of brax's SAC, each updated in turn, and the target network after them."""
    from brax.training import gradients
    from brax.training.agents.sac import losses, networks
    from brax.training.types import Transition

    net = networks.make_sac_networks(OBSERVATION, ACTIONS, hidden_layer_sizes=(32, 32))
    alpha_loss, critic_loss, actor_loss = losses.make_losses(net, reward_scaling=1.0, discounting=0.99, action_size=ACTIONS)
    tx = optax.adam(1e-3)
    alpha_update, critic_update, actor_update = (
        gradients.gradient_update_fn(f, tx, pmap_axis_name=None) for f in (alpha_loss, critic_loss, actor_loss)
    )
    keys = jax.random.split(jax.random.PRNGKey(0))
    policy, q, log_alpha = net.policy_network.init(keys[0]), net.q_network.init(keys[1]), jnp.zeros(())
    obs, actions, following, rewards, dones = transitions()
    data = Transition(obs, actions, rewards, 1 - dones, following, {"state_extras": {"truncation": np.zeros(BATCH, np.float32)}})

    def step(state, key, data):
        policy, q, target, log_alpha, opts = state
        key, a, b, c = jax.random.split(key, 4)
        l1, new_log_alpha, alpha_opt = alpha_update(log_alpha, policy, None, data, a, optimizer_state=opts[0])
        alpha = jnp.exp(log_alpha)
        l2, new_q, q_opt = critic_update(q, policy, None, target, alpha, data, b, optimizer_state=opts[1])
        l3, new_policy, policy_opt = actor_update(policy, None, q, alpha, data, c, optimizer_state=opts[2])
        target = jax.tree.map(lambda x, y: x * 0.995 + y * 0.005, target, new_q)
        return (new_policy, new_q, target, new_log_alpha, (alpha_opt, q_opt, policy_opt)), key, (l1, l2, l3)

    state = (policy, q, q, log_alpha, (tx.init(log_alpha), tx.init(q), tx.init(policy)))
    return Made(step, (state, jax.random.PRNGKey(1), data), {0: 0, 1: 1})
