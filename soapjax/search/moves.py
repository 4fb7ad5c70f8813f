"""The moves of the Markov chain: (rng_key, strategy) -> strategy, each with a reverse of equal density.

* one operator, one axis: a uniform value of those that the axis may take there;
* one operator, all axes: uniform values (the paper's move);
* one operator's storage;
* tied: on one axis, two values change places in all members of a group of repeated operators (an involution);
* tied storage: likewise;
* axes: two axes change places in a run of consecutive operators (an involution).

All are symmetric, so the Hastings correction is one. A proposal whose degrees do not divide is
scored infinite, and so refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from soapjax.strategy.space import SearchSpace

MOVES = ("axis", "operator", "storage", "tied", "tied storage", "axes")
WEIGHTS = (0.3, 0.1, 0.1, 0.3, 0.1, 0.1)


class State(NamedTuple):
    axes: Array  # int8 [N, A]
    storage: Array  # int8 [N]


def proposal(space: SearchSpace) -> Callable[[Array, State], State]:
    """The mixture of moves on `space`."""
    graph = space.graph
    num_ops, num_axes = graph.num_operators, space.num_axes
    # Values an axis may take, as a padded list, to draw from uniformly.
    width = space.allowed.shape[2]
    counts = space.allowed.sum(axis=2).astype(np.int32)  # [N, A]
    choices = np.zeros((num_ops, num_axes, width), np.int8)
    for n in range(num_ops):
        for a in range(num_axes):
            values = np.flatnonzero(space.allowed[n, a]) - 1
            choices[n, a, : len(values)] = values
    groups = np.array([o.group for o in graph.operators], np.int32)
    owners = np.flatnonzero(space.owns_parameters)
    owners = owners if len(owners) else np.zeros(1, np.int64)
    num_storages = len(space.storages) if space.owns_parameters.any() else 1
    free = np.flatnonzero((counts > 1).any(axis=1))
    free = free if len(free) else np.zeros(1, np.int64)
    table = jnp.asarray(choices)

    def draw_value(key: Array, n: Array, a: Array) -> Array:
        return table[n, a, jax.random.randint(key, (), 0, jnp.asarray(counts)[n, a])]

    def one_axis(key: Array, s: State) -> State:
        k1, k2, k3 = jax.random.split(key, 3)
        n = jnp.asarray(free)[jax.random.randint(k1, (), 0, len(free))]
        a = jax.random.randint(k2, (), 0, num_axes)
        return s._replace(axes=s.axes.at[n, a].set(draw_value(k3, n, a)))

    def one_operator(key: Array, s: State) -> State:
        k1, k2 = jax.random.split(key)
        n = jnp.asarray(free)[jax.random.randint(k1, (), 0, len(free))]
        keys = jax.random.split(k2, num_axes)
        return s._replace(axes=s.axes.at[n].set(jax.vmap(draw_value, (0, None, 0))(keys, n, jnp.arange(num_axes))))

    def one_storage(key: Array, s: State) -> State:
        k1, k2 = jax.random.split(key)
        n = jnp.asarray(owners)[jax.random.randint(k1, (), 0, len(owners))]
        return s._replace(storage=s.storage.at[n].set(jax.random.randint(k2, (), 0, num_storages).astype(jnp.int8)))

    def swap(x: Array, u: Array, v: Array, where: Array) -> Array:
        return jnp.where(where & (x == u), v, jnp.where(where & (x == v), u, x))

    def tied(key: Array, s: State) -> State:
        k1, k2, k3, k4 = jax.random.split(key, 4)
        n = jnp.asarray(free)[jax.random.randint(k1, (), 0, len(free))]
        a = jax.random.randint(k2, (), 0, num_axes)
        members = jnp.asarray(groups) == jnp.asarray(groups)[n]
        column = swap(s.axes[:, a], draw_value(k3, n, a), draw_value(k4, n, a), members)
        return s._replace(axes=s.axes.at[:, a].set(column))

    def tied_storage(key: Array, s: State) -> State:
        k1, k2, k3 = jax.random.split(key, 3)
        n = jnp.asarray(owners)[jax.random.randint(k1, (), 0, len(owners))]
        members = jnp.asarray(groups) == jnp.asarray(groups)[n]
        u, v = (jax.random.randint(k, (), 0, num_storages).astype(jnp.int8) for k in (k2, k3))
        return s._replace(storage=swap(s.storage, u, v, members))

    def two_axes(key: Array, s: State) -> State:
        k1, k2, k3, k4 = jax.random.split(key, 4)
        a, b = jax.random.randint(k1, (), 0, num_axes), jax.random.randint(k2, (), 0, num_axes)
        ends = jax.random.randint(k3, (2,), 0, num_ops + 1)
        whole = jax.random.bernoulli(k4, 0.3)
        index = jnp.arange(num_ops)
        inside = ((index >= ends.min()) & (index < ends.max())) | whole
        # Only where both axes may take both values: else the reverse would not exist.
        va, vb = s.axes[:, a], s.axes[:, b]
        allowed = jnp.asarray(space.allowed)
        both = allowed[index, a, vb + 1] & allowed[index, b, va + 1]
        ok = (both | ~inside).all()
        inside &= ok
        axes = s.axes.at[:, a].set(jnp.where(inside, vb, va))
        return s._replace(axes=axes.at[:, b].set(jnp.where(inside, va, axes[:, b])))

    moves = (one_axis, one_operator, one_storage, tied, tied_storage, two_axes)

    def propose(key: Array, s: State) -> State:
        k1, k2 = jax.random.split(key)
        kind = jax.random.choice(k1, len(moves), p=jnp.asarray(WEIGHTS))
        # Under vmap a switch computes every branch; the moves are cheap beside the simulation.
        return jax.lax.switch(kind, moves, k2, s)

    return propose
