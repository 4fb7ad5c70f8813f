"""The moves of the Markov chain: (rng_key, strategy) -> strategy, each with a reverse of equal density.

* one operator, one axis: a uniform value of those that the axis may take there;
* one operator, all axes: uniform values (the paper's move);
* one operator's storage;
* tied: on one axis, two values change places in all members of a group of repeated operators (an involution);
* tied storage: likewise;
* flow: on one axis, two dims change places wherever the graph carries them: a dim of an operator is the dim of its
  neighbour that the tensor between them ties it to (so "batch" and "hidden width" change places in a whole layer at once);
  in one layer or in all that repeat it, in the whole graph or in a run of operators (an involution);
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

from soapjax.graph.dims import UnionFind
from soapjax.strategy.space import SearchSpace

MOVES = ("axis", "operator", "storage", "tied", "tied storage", "flow", "tied flow", "axes")
WEIGHTS = (0.2, 0.1, 0.1, 0.15, 0.1, 0.15, 0.15, 0.05)


class State(NamedTuple):
    axes: Array  # int8 [N, A]
    storage: Array  # int8 [N]


def dim_flows(space: SearchSpace) -> tuple[np.ndarray, np.ndarray]:
    """Class ids [N, D + 1] of config values: of dims that tensors tie together, and the same with repeated operators tied too.

    Column 0 (replicate) is class 0; a value that an operator does not have is -1.
    """
    graph, width = space.graph, space.allowed.shape[2]

    def classes(is_tied: bool) -> np.ndarray:
        uf = UnionFind()
        for task in graph.tasks:
            if task.parameter < 0:
                for access in (*task.reads, *task.writes):
                    for d, k in enumerate(access.dims):
                        if k >= 0:
                            uf.union(("op", task.operator, k), ("tensor", access.tensor, d))
        if is_tied:
            first: dict[int, int] = {}
            for n, op in enumerate(graph.operators):
                twin = first.setdefault(op.group, n)
                for k in range(len(op.dims)):
                    uf.union(("op", n, k), ("op", twin, k))
        ids: dict[object, int] = {}
        found = np.full((graph.num_operators, width), -1, np.int32)
        found[:, 0] = 0
        for n, op in enumerate(graph.operators):
            for k in range(len(op.dims)):
                found[n, k + 1] = ids.setdefault(uf.find(("op", n, k)), len(ids) + 1)
        return found

    return classes(False), classes(True)


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

    flows = [jnp.asarray(x) for x in dim_flows(space)]
    # Operators with a choice on an axis; a user's constraint leaves none.
    movable = jnp.asarray(counts > 1)  # [N, A]

    def flow(is_tied: bool) -> Callable[[Array, State], State]:
        ids = flows[int(is_tied)]

        def move(key: Array, s: State) -> State:
            k1, k2, k3, k4, k5 = jax.random.split(key, 5)
            n = jnp.asarray(free)[jax.random.randint(k1, (), 0, len(free))]
            a = jax.random.randint(k2, (), 0, num_axes)
            u, v = ids[n, draw_value(k3, n, a) + 1], ids[n, draw_value(k4, n, a) + 1]
            has_u, has_v = ids == u, ids == v
            where = has_u.any(axis=1) & has_v.any(axis=1) & movable[:, a] & run(k5)
            # Where a class stands twice in an operator, its first dim.
            mine_u, mine_v = (jnp.argmax(x, axis=1).astype(jnp.int8) - 1 for x in (has_u, has_v))
            return s._replace(axes=s.axes.at[:, a].set(swap(s.axes[:, a], mine_u, mine_v, where)))

        return move

    def run(key: Array) -> Array:
        """All operators, or a run of consecutive ones."""
        k1, k2 = jax.random.split(key)
        ends = jax.random.randint(k1, (2,), 0, num_ops + 1)
        index = jnp.arange(num_ops)
        return jax.random.bernoulli(k2, 0.5) | ((index >= ends.min()) & (index < ends.max()))

    def two_axes(key: Array, s: State) -> State:
        k1, k2, k3 = jax.random.split(key, 3)
        a, b = jax.random.randint(k1, (), 0, num_axes), jax.random.randint(k2, (), 0, num_axes)
        index = jnp.arange(num_ops)
        inside = run(k3)
        # Only where both axes may take both values: else the reverse would not exist.
        va, vb = s.axes[:, a], s.axes[:, b]
        allowed = jnp.asarray(space.allowed)
        both = allowed[index, a, vb + 1] & allowed[index, b, va + 1]
        ok = (both | ~inside).all()
        inside &= ok
        axes = s.axes.at[:, a].set(jnp.where(inside, vb, va))
        return s._replace(axes=axes.at[:, b].set(jnp.where(inside, va, axes[:, b])))

    moves = (one_axis, one_operator, one_storage, tied, tied_storage, flow(False), flow(True), two_axes)

    def propose(key: Array, s: State) -> State:
        k1, k2 = jax.random.split(key)
        kind = jax.random.choice(k1, len(moves), p=jnp.asarray(WEIGHTS))
        # Under vmap a switch computes every branch; the moves are cheap beside the simulation.
        return jax.lax.switch(kind, moves, k2, s)

    return propose
