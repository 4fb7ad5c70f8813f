"""A policy that learns: placements are drawn from it, and it is moved towards those with large rewards.

    draw:   M partitions of the operators, P placements of the groups of each        -> B = M × P placements
    learn:  rewards R [B] -> advantage R - b -> one step of Adam (REINFORCE), or several (PPO)

REINFORCE (Mirhoseini et al., 2017, section 3.1; 2018, section 3.2): (R - b) ∇ log p, of the partition with the mean over
its placements. PPO (Zeng et al., Algorithms 2022, 15(4), 108, section 4.2, equation 14):

    max E min(r (R - b), clip(r, 1 - ε, 1 + ε) (R - b)),   r = p(g, s; θ) / p(g, s; θ_old)

The baseline b is the moving average of equation 15, EMA(b_n) = (2 b_n + (N - 1) EMA(b_n-1)) / (N + 1), of the mean rewards of
batches. How the rest was read:

* r: a ratio of each choice (an operator's group, a group's device) of its own, all with the placement's advantage. The ratio of
  the whole placement, a product of some thousand, leaves [1 - ε, 1 + ε] at the first step, and nothing more is learned.
* Equation 14 is printed without a minimum, of two terms: read as PPO has it (Schulman et al., 2017).
* Advantages are divided by their spread in the batch, so that one learning rate serves all models and objectives.
* Noise of up to 0.1 on logits in the first 500 steps, of either sign.
* Of each partition one placement is not drawn: it is the best that the search knows, a group being where most of its work is
  done. Random placements are far worse than what people write down, and a hundred batches too few to find that again.
* The partition network is taught to put together what is co-located (Mirhoseini et al., 2017, section 3.3) before it learns: its
  softmax would be nearly uniform, and no placement of random groups is worth learning from.
* A dropout mask holds for one batch, and ratios are those of probabilities under it.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from soapjax.jit.programs import PlannerProgram, side_by_side
from soapjax.search.learned.features import VOCABULARY, Features
from soapjax.search.learned.networks import Groups, Policy, Told, device_of_groups, groups_of

TEACHING_STEPS, TEACHING_RATE = 300, 0.01


class Recipe(NamedTuple):
    """One way to learn. Published figures where nothing else is said."""

    method: Literal["ppo", "reinforce"]
    partitions: int  # M: of a batch
    placements: int  # P: of each
    num_groups: int = 256
    learning_rate: float = 2e-3  # published: 0.1; between what either planner does best with (results/trinity_rates.csv)
    gradient_norm: float = 1.0
    noise: float = 0.1
    noisy_steps: int = 500
    period: int = 9  # N of equation 15
    clip: float = 0.2  # ε; not published
    minibatches: int = 4  # of PPO, per batch: each a step of Adam; not published
    entropy: float = 1e-2  # weight of the mean entropy of a choice of a device; not published
    follows_best: bool = True  # one placement of each partition is the best so far; not published


class Draw(NamedTuple):
    """M partitions, P placements of each."""

    number: Array  # int32 [M, N]: the group of every operator
    device: Array  # int32 [M, P, L]: of every group that is used
    log_group: Array  # [M, N]: of the probability of each choice
    log_device: Array  # [M, P, L]
    mask_key: Array  # of the dropout


class Learner(NamedTuple):
    params: dict
    optimizer: optax.OptState
    baseline: Array  # []
    batches: Array  # int32 []: learned from so far


class AgentSizes(NamedTuple):
    """Of the arrays of a program: it serves all problems that fit in. Powers of two, which problems fill up."""

    operators: int
    edges: int
    devices: int
    is_grouped: bool  # operators are in groups that are given; only the schedule network learns

    @classmethod
    def of(cls, features: Features, num_devices: int, *, is_grouped: bool) -> AgentSizes:
        counts = zip((len(features.word), len(features.edges), num_devices), (64, 64, 4), strict=True)
        operators, edges, devices = (max(least, 1 << (count - 1).bit_length()) for count, least in counts)
        return cls(operators, edges, devices, is_grouped)

    def filled(self, features: Features, num_devices: int) -> Told:
        """Features in arrays of these sizes."""

        def longer(x: np.ndarray, count: int) -> Any:
            return np.pad(x, [(0, count - len(x)), *[(0, 0)] * (x.ndim - 1)])

        n, count = self.operators, cast(Array, np.int32(num_devices))
        is_there = longer(np.ones(len(features.word), bool), n)
        word, figures, size, seconds = (longer(x, n) for x in (features.word, features.figures, features.size, features.seconds))
        return Told(
            word=word, figures=figures, size=size, seconds=seconds, is_there=is_there, edges=longer(features.edges, self.edges),
            num_devices=count,
        )  # fmt: skip


class Agent:
    """The compiled functions of a search, all pure: `first`, `draw` and `learn`."""

    def __init__(self, sizes: AgentSizes, recipe: Recipe):
        self.sizes, self.recipe = sizes, recipe
        most = min(recipe.num_groups, sizes.operators)
        self.policy = Policy(VOCABULARY + 1, recipe.num_groups, most, sizes.devices)
        adam = optax.adam(recipe.learning_rate)
        self.optimizer = optax.chain(optax.clip_by_global_norm(recipe.gradient_norm), adam)
        functions = self._first, self._draw, self._learn
        self.first, self.draw, self.learn = (PlannerProgram(f, is_urgent=True, promotes=True) for f in functions)  # optax does

    def prepare(self, *given: Array | np.ndarray | Told, learns: bool) -> None:
        """Compiles them side by side, for `given` = (key, told, fixed, best) as of `draw`."""
        key, told, *places = given
        with side_by_side() as prepare:
            learner = prepare(self.first, key, told, places[0])
            draw, device = prepare(self.draw, key, told, *places, learner)
            if learns:
                prepare(self.learn, told, learner, draw, jax.ShapeDtypeStruct(device.shape[:1], jnp.float32))

    def _first(self, key: Array, told: Told, fixed: Array) -> Learner:
        """`fixed` int32 [N] are groups by co-location: those of the operators, or what the partition network begins with."""
        params: Any = self.policy.init(key, told)
        if not self.sizes.is_grouped:
            params = self._taught(params, told, fixed)
        return Learner(params, self.optimizer.init(params), jnp.float32(0), jnp.int32(0))

    def _taught(self, params: dict, told: Told, fixed: Array) -> dict:
        """Parameters whose partition network gives these groups, as far as it can."""
        adam, weight = optax.adam(TEACHING_RATE), told.is_there / told.is_there.sum()
        partition = {name: params["params"][name] for name in ("words", "partition")}

        def step(state, _):
            partition, adam_state = state

            def loss(partition: dict) -> Array:
                logits = self._applied({"params": params["params"] | partition}, told, method="partition_logits")
                return (optax.softmax_cross_entropy_with_integer_labels(logits, fixed) * weight).sum()

            updates, adam_state = adam.update(jax.grad(loss)(partition), adam_state)
            return (optax.apply_updates(partition, updates), adam_state), None

        partition = jax.lax.scan(step, (partition, adam.init(partition)), length=TEACHING_STEPS)[0][0]
        return {"params": params["params"] | partition}

    def _applied(self, params: Any, *of: Any, **options: Any) -> Any:
        """What a method of the networks gives with these parameters."""
        return self.policy.apply(params, *of, **options)

    def _groups(self, number: Array, told: Told) -> Groups:
        return groups_of(number, told, self.recipe.num_groups, self.policy.num_slots)

    def _group_log_p(self, params: dict, told: Told, key: Array, number: Array) -> Array:
        """Logarithms of the probabilities of groups int32 [M, N], with the dropout of that key."""
        logits = self._applied(params, told, True, method="partition_logits", rngs={"dropout": key})
        return jax.nn.log_softmax(logits)[jnp.arange(len(logits)), number]

    def _draw(self, key: Array, told: Told, fixed: Array, best: Array, learner: Learner) -> tuple[Draw, Array]:
        """A batch, and the device of every operator, int32 [B, N].

        `fixed` int32 [N] are the groups that are given, if any, `best` int32 [N] the devices of the best placement so far.
        """
        recipe, n = self.recipe, self.sizes.operators
        of_mask, of_noise, of_groups, of_devices = jax.random.split(key, 4)
        noise = jnp.where(learner.batches < recipe.noisy_steps, recipe.noise, 0.0)
        if self.sizes.is_grouped:
            number, log_group = jnp.broadcast_to(fixed, (recipe.partitions, n)), jnp.zeros((recipe.partitions, n))
        else:
            logits = self._applied(learner.params, told, method="partition_logits")
            logits += noise * jax.random.uniform(of_noise, logits.shape, minval=-1, maxval=1)
            number = jax.random.categorical(of_groups, logits, shape=(recipe.partitions, n)).astype(jnp.int32)
            log_group = self._group_log_p(learner.params, told, of_mask, number)
        groups = self._groups(number, told)
        given = device_of_groups(best, told, groups.slot, self.policy.num_slots, self.sizes.devices)
        is_given = jnp.arange(recipe.placements) < int(recipe.follows_best)
        drawing = (of_devices, told, groups, given, is_given, noise)
        device, log_device = self._applied(learner.params, *drawing, method="draw")
        of_operator = jax.vmap(lambda d, slot: d[:, slot])(device, groups.slot)  # [M, P, N]
        return Draw(number, device, log_group, log_device, of_mask), of_operator.reshape(-1, n)

    def _learn(self, told: Told, learner: Learner, draw: Draw, reward: Array) -> Learner:
        """From rewards [B]."""
        recipe = self.recipe
        mean = reward.mean()
        # Of rewards before the first batch nothing is known.
        baseline = jnp.where(learner.batches == 0, mean, learner.baseline)
        advantage = ((reward - baseline) / jnp.maximum(reward.std(), 1e-8)).reshape(draw.device.shape[:2])
        parts = recipe.minibatches if recipe.method == "ppo" else 1
        m, p, slots = draw.device.shape

        def in_parts(x: Array) -> Array:  # [M, P, ...] -> [parts, M, P / parts, ...]
            return x.reshape(m, parts, p // parts, *x.shape[2:]).swapaxes(0, 1)

        groups = self._groups(draw.number, told)

        def step(state, part):
            params, optimizer = state
            gradient = jax.grad(self._loss)(params, told, draw, groups, *part)
            updates, optimizer = self.optimizer.update(gradient, optimizer)
            return (optax.apply_updates(params, updates), optimizer), None

        batch = tuple(map(in_parts, (draw.device, draw.log_device, advantage)))
        (params, optimizer), _ = jax.lax.scan(step, (learner.params, learner.optimizer), batch)
        n = recipe.period
        return Learner(params, optimizer, (2 * mean + (n - 1) * baseline) / (n + 1), learner.batches + 1)

    def _loss(
        self, params: dict, told: Told, draw: Draw, groups: Groups, device: Array, log_device: Array, advantage: Array
    ) -> Array:  # fmt: skip
        """Minus what is maximised, of placements [M, P, L] with advantages [M, P]."""
        every = self._applied(params, told, groups, device, method="log_probabilities")
        chosen = jnp.take_along_axis(every, device[..., None], axis=3)[..., 0]  # [M, P, L]
        is_used = jnp.arange(device.shape[2]) < groups.used[:, None, None]
        followed = self._followed(chosen, log_device, advantage[..., None] * is_used)
        if not self.sizes.is_grouped:
            of_partition = self._group_log_p(params, told, draw.mask_key, draw.number)
            counts = advantage.sum(1, keepdims=True) * told.is_there
            followed += self._followed(of_partition, draw.log_group, counts)
        entropy = -(jnp.exp(every) * every).sum(3)
        mean_entropy = jnp.where(is_used, entropy, 0).sum() / (is_used.sum() * device.shape[1])
        return -followed / advantage.size - self.recipe.entropy * groups.used.mean() * mean_entropy

    def _followed(self, log_p: Array, log_old: Array, advantage: Array) -> Array:
        """The sum over choices of what is maximised; its gradient is that of the method."""
        if self.recipe.method == "reinforce":
            return (log_p * advantage).sum()
        ratio, eps = jnp.exp(log_p - log_old), self.recipe.clip
        return jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - eps, 1 + eps) * advantage).sum()


@functools.cache
def agent_of(sizes: AgentSizes, recipe: Recipe) -> Agent:
    """One for all problems of these sizes: its programs are compiled once."""
    return Agent(sizes, recipe)
