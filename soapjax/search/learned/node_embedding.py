"""node2vec: vectors of the nodes of a graph, near where random walks meet the same nodes.

Grover and Leskovec, "node2vec: Scalable Feature Learning for Networks", 2016. A walk that came from t to v goes on to a
neighbour x of v with a weight of

    1/p  where x is t: back         1  where x is a neighbour of t: stays near         1/q  elsewhere: goes far

and the vectors are those of skip-gram with negative sampling (Mikolov et al., 2013) on the nodes that stand within a window of
one another: a node's vector has large products with the context vectors of the nodes that it was met with, and small ones with
nodes drawn at random, as often as they were met, to the power of 3/4.

Edges have no direction here, so that walks do not end at the loss. The same generator gives the same vectors.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array


class Walking(NamedTuple):
    """How the walks go, and how vectors are fitted to them."""

    back: float = 1.0  # p
    far: float = 0.5  # q
    walks_per_node: int = 10
    length: int = 20
    window: int = 5
    size: int = 16  # of a vector
    negatives: int = 5
    pairs_per_step: int = 2048
    steps: int = 300
    learning_rate: float = 0.03


def node2vec(rng: np.random.Generator, num_nodes: int, edges: np.ndarray, how: Walking = Walking()) -> np.ndarray:
    """float32 [N, size] from edges int [E, 2]; zeros where there is nothing to walk along."""
    walks = random_walks(rng, num_nodes, edges, how)
    centers, contexts = pairs_of(walks, how.window)
    if not len(centers):
        return np.zeros((num_nodes, how.size), np.float32)
    met = np.bincount(contexts, minlength=num_nodes) ** 0.75
    drawn = rng.integers(len(centers), size=(how.steps, how.pairs_per_step))
    negatives = rng.choice(num_nodes, (how.steps, how.pairs_per_step, how.negatives), p=met / met.sum())
    start = rng.normal(0, 0.1, (2, num_nodes, how.size)).astype(np.float32)
    found = _fitted(start, centers[drawn], contexts[drawn], negatives.astype(np.int32), learning_rate=how.learning_rate)
    return np.asarray(found)


def random_walks(rng: np.random.Generator, num_nodes: int, edges: np.ndarray, how: Walking) -> np.ndarray:
    """int32 [walks, length], a few from every node that has neighbours; all walks take a step at once."""
    near = np.zeros((num_nodes, num_nodes), bool)
    near[edges[:, 0], edges[:, 1]] = near[edges[:, 1], edges[:, 0]] = True
    np.fill_diagonal(near, False)
    degree = near.sum(1)
    starts = np.flatnonzero(degree)
    neighbours = np.zeros((num_nodes, max(int(degree.max(initial=0)), 1)), np.int32)  # padded with anything
    for n in starts:
        neighbours[n, : degree[n]] = np.flatnonzero(near[n])
    is_there = np.arange(neighbours.shape[1]) < degree[:, None]
    rounds = []
    for _ in range(how.walks_per_node if len(starts) else 0):
        walk = np.zeros((len(starts), how.length), np.int32)
        walk[:, 0] = now = starts
        before = None
        for i in range(1, how.length):
            options = neighbours[now]
            weight = is_there[now].astype(float)
            if before is not None:
                weight *= np.where(near[before[:, None], options], 1, 1 / how.far)
                weight = np.where(is_there[now] & (options == before[:, None]), 1 / how.back, weight)
            ends = weight.cumsum(1)
            chosen = (ends <= rng.random((len(now), 1)) * ends[:, -1:]).sum(1)
            before, now = now, options[np.arange(len(now)), np.minimum(chosen, degree[now] - 1)]
            walk[:, i] = now
        rounds.append(walk)
    return np.concatenate(rounds) if rounds else np.zeros((0, how.length), np.int32)


def pairs_of(walks: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Centers and contexts, int32 [P] each: all that stand within `window` steps of one another in a walk."""
    before, after = [], []
    for d in range(1, min(window, walks.shape[1] - 1) + 1):
        before.append(walks[:, :-d].ravel())
        after.append(walks[:, d:].ravel())
    one, other = (np.concatenate([np.zeros(0, np.int32), *x]) for x in (before, after))
    return np.concatenate([one, other]), np.concatenate([other, one])


@jax.jit(static_argnames="learning_rate")
def _fitted(start: Array, centers: Array, contexts: Array, negatives: Array, *, learning_rate: float) -> Array:
    """Node vectors [N, size] after a step per row of pairs [steps, P] and negatives [steps, P, negatives]."""
    adam = optax.adam(learning_rate)

    def step(state, pairs):
        vectors, adam_state = state

        def loss(vectors: Array) -> Array:
            (center, context, negative), (of_nodes, of_contexts) = pairs, vectors
            own = of_nodes[center]
            met = (own * of_contexts[context]).sum(-1)
            not_met = jnp.einsum("pd,pkd->pk", own, of_contexts[negative])
            return -(jax.nn.log_sigmoid(met) + jax.nn.log_sigmoid(-not_met).sum(-1)).mean()

        updates, adam_state = adam.update(jax.grad(loss)(vectors), adam_state)
        return (optax.apply_updates(vectors, updates), adam_state), None

    return jax.lax.scan(step, (start, adam.init(start)), (centers, contexts, negatives))[0][0][0]
