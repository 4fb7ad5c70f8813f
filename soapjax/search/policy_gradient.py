"""Learned device placement: REINFORCE on the simulator.

Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", 2017. A policy draws a device for every group
of co-located operators; the reward of a placement is minus the square root of its step time (section 3.1, equation 1), and
the policy follows the score-function gradient with a moving-average baseline (equations 2 and 3), by Adam:

    batch of placements ~ softmax(logits)  ->  step times  ->  advantage = reward - baseline  ->  logits

Co-location (section 3.3): all of a recurrent layer at one time step is one group; then the cheapest group joins the
neighbour that it exchanges most bytes with, until MAX_GROUPS are left (the paper's nets have 83 to 280).

Where this differs: step times are simulated, not measured. The policy is tables of logits instead of a sequence-to-sequence net
with attention. What that net can learn and independent tables cannot is that neighbours belong together; so every layer draws
a device first, and its groups draw theirs with a bonus for the layer's (that bonus is learned too). Entropy keeps it
exploring. A placement that exceeds the memory is punished by the excess (objective.py) instead of by a constant. Advantages are
divided by their spread in the batch, so that the learning rate means the same for every model.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from soapjax.graph.operators import OperatorGraph
from soapjax.search.layers import forward_edges, layers_of, steps_of
from soapjax.search.placement import operator_seconds, pins_of_devices, placed, require_pins
from soapjax.search.problem import Budget, PlanningProblem, SearchResult
from soapjax.simulate.simulator import BATCH
from soapjax.strategy.strategy import Strategy

MAX_GROUPS = 200
DEFAULT_PROPOSALS = 8_000
LEARNING_RATE = 0.1
ENTROPY = 0.01  # weight of the mean entropy of a group's device, beside advantages of spread one
BASELINE_DECAY = 0.9
FOLLOW = 3.0  # a group begins where its layer is, but for e^-FOLLOW or so


class Policy(NamedTuple):
    """Logits of D devices."""

    layer: Array  # float32 [L, D]
    group: Array  # float32 [G, D]
    follow: Array  # float32 [L]: added to a group's logit of the device that its layer drew


class Draw(NamedTuple):
    """B placements."""

    layer: Array  # int32 [B, L]
    group: Array  # int32 [B, G]


class Learner(NamedTuple):
    policy: Policy
    optimizer: optax.OptState
    baseline: Array  # []: moving average of rewards


def colocated(graph: OperatorGraph, seconds: np.ndarray, num_devices: int, max_groups: int = MAX_GROUPS) -> np.ndarray:
    """The group of every operator, int [N], groups numbered in program order."""
    _, steps = steps_of(graph)
    group = np.arange(graph.num_operators)
    for layer in layers_of(graph):
        if layer.is_recurrent:
            first: dict[str, int] = {}
            for n in layer.operators:
                group[n] = group[first.setdefault(steps[n], n)]
    weight = {int(g): float(seconds[group == g].sum()) for g in np.unique(group)}
    near: dict[int, dict[int, float]] = {g: {} for g in weight}
    for a, b, size, _ in forward_edges(graph):
        a, b = int(group[a]), int(group[b])
        if a != b:
            near[a][b] = near[a].get(b, 0.0) + size
            near[b][a] = near[b].get(a, 0.0) + size
    light = sum(weight.values()) / num_devices / 2
    parent = {g: g for g in weight}
    while len(weight) > max_groups:
        g = min(weight, key=lambda g: (weight[g], g))
        # Into a neighbour that stays small, so that the rest can still be balanced; else the one before it.
        choices = near[g] or {max((o for o in weight if o < g), default=min(o for o in weight if o != g)): 0.0}
        other = max(choices, key=lambda o: (weight[o] + weight[g] <= light, choices[o], -o))
        parent[g] = other
        weight[other] += weight.pop(g)
        for o, size in near.pop(g).items():
            del near[o][g]
            if o != other:
                near[o][other] = near[o].get(other, 0.0) + size
                near[other][o] = near[other].get(o, 0.0) + size

    def root(g: int) -> int:
        while parent[g] != g:
            g = parent[g]
        return g

    roots = np.array([root(int(g)) for g in group])
    order = {r: i for i, r in enumerate(dict.fromkeys(roots.tolist()))}
    return np.array([order[r] for r in roots.tolist()])


def layer_of_groups(graph: OperatorGraph, group: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The layer that most of a group's work belongs to, int [G]."""
    layers = layers_of(graph)
    work = np.zeros((group.max() + 1, len(layers)))
    for i, layer in enumerate(layers):
        for n in layer.operators:
            work[group[n], i] += seconds[n]
    return work.argmax(axis=1)


class Reinforce:
    """The compiled functions of one search; `draw` and `learn` are pure."""

    def __init__(self, problem: PlanningProblem):
        seconds = operator_seconds(problem)
        self.problem = problem
        self.pins = pins_of_devices(problem)
        self.group = colocated(problem.graph, seconds, len(self.pins))
        self.layer = layer_of_groups(problem.graph, self.group, seconds)
        self.start = placed(problem, np.zeros(problem.graph.num_operators, int))
        self.movable = np.array([problem.space.may_pin(n) for n in range(problem.graph.num_operators)], bool)
        self.optimizer = optax.adam(LEARNING_RATE)
        self.draw = jax.jit(self._draw)
        self.learn = jax.jit(self._learn)

    def learner(self) -> Learner:
        devices, layers = len(self.pins), int(self.layer.max()) + 1
        follow = jnp.full(layers, FOLLOW + np.log(devices), jnp.float32)
        policy = Policy(jnp.zeros((layers, devices)), jnp.zeros((len(self.layer), devices)), follow)
        return Learner(policy, self.optimizer.init(policy), jnp.float32(0))

    def _group_logits(self, policy: Policy, layer_device: Array) -> Array:
        """[B, G, D]"""
        bonus = policy.follow[:, None] * jax.nn.one_hot(layer_device, len(self.pins))  # [B, L, D]
        return policy.group + bonus[:, self.layer]

    def _draw(self, key: Array, policy: Policy) -> tuple[Draw, Array]:
        """Placements, and the axes of all operators under them, int8 [B, N, A]."""
        of_layers, of_groups = jax.random.split(key)
        layer = jax.random.categorical(of_layers, policy.layer, shape=(BATCH, len(policy.layer)))
        group = jax.random.categorical(of_groups, self._group_logits(policy, layer))
        axes = jnp.asarray(self.pins)[group[:, self.group]]
        return Draw(layer, group), jnp.where(self.movable[:, None], axes, jnp.asarray(self.start.axes))

    def _learn(self, learner: Learner, draw: Draw, reward: Array, is_first: Array) -> Learner:
        mean = reward.mean()
        baseline = jnp.where(is_first, mean, learner.baseline)
        advantage = (reward - baseline) / jnp.maximum(reward.std(), 1e-6)

        def loss(policy: Policy) -> Array:
            of_layers = jax.nn.log_softmax(policy.layer)[None]  # [1, L, D]
            of_groups = jax.nn.log_softmax(self._group_logits(policy, draw.layer))  # [B, G, D]

            def chosen(log_p: Array, device: Array) -> Array:
                log_p = jnp.broadcast_to(log_p, (BATCH, *log_p.shape[1:]))
                return jnp.take_along_axis(log_p, device[..., None], axis=2).sum(axis=(1, 2))  # [B]

            def entropy(log_p: Array) -> Array:
                return -(jnp.exp(log_p) * log_p).sum(axis=(1, 2)).mean()

            followed = advantage * (chosen(of_layers, draw.layer) + chosen(of_groups, draw.group))
            return -followed.mean() - ENTROPY * (entropy(of_layers) + entropy(of_groups))

        updates, state = self.optimizer.update(jax.grad(loss)(learner.policy), learner.optimizer)
        baseline = BASELINE_DECAY * baseline + (1 - BASELINE_DECAY) * mean
        return Learner(optax.apply_updates(learner.policy, updates), state, baseline)


def reinforce(rng_key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
    """The best placement that the policy drew, or everything on one device where that is better (the first proposal)."""
    begin = time.monotonic()
    require_pins(problem, "reinforce")
    search = Reinforce(problem)
    limit = budget.num_proposals
    if limit is None and budget.seconds is None:
        limit = DEFAULT_PROPOSALS
    first = problem.evaluate([search.start])[0]
    best, storage = first, jnp.zeros((BATCH, problem.graph.num_operators), jnp.int8)
    done, stopped_by, history = 1, "proposals", [(1, time.monotonic() - begin, first.step_time_s)]
    learner = search.learner()
    batch = 0
    while limit is None or done < limit:
        if budget.seconds is not None and time.monotonic() - begin >= budget.seconds:
            stopped_by = "seconds"
            break
        draw, axes = search.draw(jax.random.fold_in(rng_key, batch), learner.policy)
        scores = problem.simulator.batch(axes, storage).scores
        if problem.front is not None:
            problem.see(scores, [Strategy(np.asarray(x), search.start.storage) for x in axes])
        cost = problem.cost(scores)
        learner = search.learn(learner, draw, -jnp.sqrt(cost / first.cost), jnp.asarray(batch == 0))
        counted = np.asarray(cost)[: BATCH if limit is None else min(BATCH, limit - done)]
        done, batch, lowest = done + len(counted), batch + 1, int(counted.argmin())
        if counted[lowest] < best.cost:
            best = problem.evaluate([Strategy(np.asarray(axes[lowest]), search.start.storage)])[0]
            history.append((done, time.monotonic() - begin, best.step_time_s))
        if budget.progress is not None:
            try:
                budget.progress(done, best.step_time_s, time.monotonic() - begin)
            except KeyboardInterrupt:
                stopped_by = "interrupted"
                break
    notes = (f"{len(search.layer)} groups of operators, {batch} policy updates",)
    return SearchResult(best, done, time.monotonic() - begin, stopped_by, tuple(history), notes)
