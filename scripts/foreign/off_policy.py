"""Off-policy learning with several critics: ikostrikov/jaxrl's REDQ and DrQ (from pictures), and ikostrikov/rlpd."""

from __future__ import annotations

import types

import numpy as np

from foreign.registry import Made, floats, ints
from foreign.reinforcement import ACTIONS, BATCH, JAXRL, OBSERVATION, jaxrl_batch, rl_case, transitions
from foreign.sources import frozen_init, old_names, package, plain

RLPD = "ikostrikov+rlpd"
SIMULATORS = ("d4rl dm_control dm_env mujoco_py gdown gym.utils gym.utils.seeding gym.wrappers gym.wrappers.pixel_observation "
              "dm_control_suite shimmy").split()  # fmt: skip
HIDDEN = dict(hidden_dims=(32, 32))


def jaxrl(agent: str) -> types.ModuleType:
    old_names()
    return package(JAXRL, f"jaxrl.agents.{agent}.{agent}_learner", SIMULATORS)


def state_of(learner) -> tuple:
    return learner.rng, learner.actor, learner.critic, learner.target_critic, learner.temp


@rl_case("jaxrl_redq", source=JAXRL, packages=["tensorflow_probability"])
def redq() -> Made:
    """Several critics by `vmap`, some of them drawn for each target."""
    m = jaxrl("redq")
    with frozen_init():
        learner = m.REDQLearner(0, floats(1, OBSERVATION), floats(1, ACTIONS), n=2, m=2, **HIDDEN)
    inner = plain(m._update_jit)

    def update(rng, actor, critic, target, temp, batch):
        return inner(rng, actor, critic, target, temp, batch, 0.99, 0.005, -2.0, True, 2, 2, True, True)

    return Made(update, (*state_of(learner), jaxrl_batch(m.Batch)), {i: i for i in range(5)})


@rl_case("jaxrl_drq", source=JAXRL, packages=["tensorflow_probability"])
def drq() -> Made:
    """Pictures that are cropped at random places; actor and critic share an encoder."""
    m = jaxrl("drq")
    before, after = (ints(255, BATCH, 24, 24, 3).astype(np.uint8) for _ in range(2))
    with frozen_init():
        learner = m.DrQLearner(0, before[:1], floats(1, ACTIONS), cnn_features=(8, 8), cnn_strides=(2, 1), latent_dim=10, **HIDDEN)
    inner = plain(m._update_jit)
    _, actions, _, rewards, dones = transitions()
    batch = m.Batch(observations=before, actions=actions, rewards=rewards, masks=1 - dones, next_observations=after)

    def update(rng, actor, critic, target, temp, batch):
        return inner(rng, actor, critic, target, temp, batch, 0.99, 0.005, -2.0, True)

    return Made(update, (*state_of(learner), batch), {i: i for i in range(5)})


@rl_case("rlpd_sac", source=RLPD, packages=["tensorflow_probability", "distrax"])
def rlpd() -> Made:
    """Two critic updates, on halves of the batch, for each of the actor's."""
    old_names()
    m = package(RLPD, "rlpd.agents.sac.sac_learner", ["gym", "gym.spaces", *SIMULATORS])

    def space(size: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(shape=(size,), sample=lambda: floats(size))

    more = dict(num_qs=4, num_min_qs=2, critic_layer_norm=True)
    learner = m.SACLearner.create(0, space(OBSERVATION), space(ACTIONS), **HIDDEN, **more)
    inner = plain(m.SACLearner.update)
    obs, actions, following, rewards, dones = transitions()
    batch = dict(observations=obs, actions=actions, rewards=rewards, masks=1 - dones, next_observations=following)

    def update(learner, batch):
        return inner(learner, batch, 2)

    return Made(update, (learner, batch))
