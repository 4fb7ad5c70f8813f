"""The moves of the Markov chain that change many operators: (rng_key, strategy) -> strategy, each with a reverse of equal density.

* tied: on one axis, two values change places in all members of a group of repeated operators (an involution);
* tied storage: likewise;
* flow: on one axis, two dims change places wherever the graph carries them: a dim of an operator is the dim of its
  neighbour that the tensor between them ties it to (so "batch" and "hidden width" change places in a whole layer at once);
  in one layer or in all that repeat it, in the whole graph or in a run of operators (an involution);
* axes: two axes change places in a run of consecutive operators (an involution);
* pins: where pins are offered, the two coordinates of an axis change places in a run of operators (an involution), or an
  axis' pins change places with replication in a group.

All are symmetric, so the Hastings correction is one. A proposal whose degrees do not divide is
scored infinite, and so refused. Moves of one operator are drawn in blocks (mcmc.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from soapjax.graph.union_find import UnionFind
from soapjax.strategy.space import SearchSpace
from soapjax.strategy.strategy import FIRST_PIN, PIN, REPLICATE

# Of tied, tied storage, flow, two axes, pins.
WEIGHTS = (0.25, 0.15, 0.4, 0.1, 0.1)


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


def choices_of(space: SearchSpace) -> tuple[np.ndarray, np.ndarray]:
    """(values int8 [N, A, V], counts int32 [N, A]): what an axis may take, pins included, to draw from uniformly."""
    num_ops, num_axes = space.graph.num_operators, space.num_axes
    most_pins = max(space.mesh.axis_sizes) if space.offers_pins else 0
    values = np.zeros((num_ops, num_axes, space.allowed.shape[2] + most_pins), np.int8)
    counts = np.zeros((num_ops, num_axes), np.int32)
    for n in range(num_ops):
        pins = space.may_pin(n)
        for a, size in enumerate(space.mesh.axis_sizes):
            found = [*(np.flatnonzero(space.allowed[n, a]) - 1), *(PIN(i) for i in range(size) if pins and size > 1)]
            values[n, a, : len(found)], counts[n, a] = found, len(found)
    return values, counts


def pick(u: Array, count: Array | int) -> Array:
    """A uniform integer below `count`, from a uniform number."""
    return jnp.minimum((u * count).astype(jnp.int32), count - 1)


def leap(space: SearchSpace) -> Callable[[Array, State], State]:
    """The mixture of moves on `space`."""
    graph = space.graph
    num_ops, num_axes = graph.num_operators, space.num_axes
    choices, counts = choices_of(space)
    groups = np.array([o.group for o in graph.operators], np.int32)
    owners = np.flatnonzero(space.owns_parameters)
    owners = owners if len(owners) else np.zeros(1, np.int64)
    num_storages = len(space.storages) if space.owns_parameters.any() else 1
    free = np.flatnonzero((counts > 1).any(axis=1))
    free = free if len(free) else np.zeros(1, np.int64)
    table = jnp.asarray(choices)

    # All randomness of a move is one vector of uniforms u [R] drawn at once: one generator call to compile.
    def draw_value(u: Array, n: Array, a: Array) -> Array:
        return table[n, a, pick(u, jnp.asarray(counts)[n, a])]

    def draw_operator(u: Array) -> Array:
        return jnp.asarray(free)[pick(u, len(free))]

    def draw_owner(u: Array) -> Array:
        return jnp.asarray(owners)[pick(u, len(owners))]

    def draw_storage(u: Array) -> Array:
        return pick(u, num_storages).astype(jnp.int8)

    def run(u: Array) -> Array:
        """All operators, or a run of consecutive ones; takes three uniforms."""
        ends = jnp.stack([pick(u[0], num_ops + 1), pick(u[1], num_ops + 1)])
        index = jnp.arange(num_ops)
        return (u[2] < 0.5) | ((index >= ends.min()) & (index < ends.max()))

    def swap(x: Array, u: Array, v: Array, where: Array) -> Array:
        return jnp.where(where & (x == u), v, jnp.where(where & (x == v), u, x))

    def tied(u: Array, s: State) -> State:
        n, a = draw_operator(u[0]), pick(u[1], num_axes)
        members = jnp.asarray(groups) == jnp.asarray(groups)[n]
        column = swap(s.axes[:, a], draw_value(u[2], n, a), draw_value(u[3], n, a), members)
        return s._replace(axes=s.axes.at[:, a].set(column))

    def tied_storage(u: Array, s: State) -> State:
        members = jnp.asarray(groups) == jnp.asarray(groups)[draw_owner(u[0])]
        return s._replace(storage=swap(s.storage, draw_storage(u[1]), draw_storage(u[2]), members))

    flows = jnp.stack([jnp.asarray(x) for x in dim_flows(space)])  # [2, N, D + 1]
    # Operators with a choice on an axis; a user's constraint leaves none.
    movable = jnp.asarray(counts > 1)  # [N, A]

    def flow(u: Array, s: State) -> State:
        ids = flows[(u[7] < 0.5).astype(jnp.int32)]
        n, a = draw_operator(u[0]), pick(u[1], num_axes)
        # A pin flows nowhere: it counts as replicated.
        drawn = [jnp.maximum(draw_value(v, n, a), REPLICATE) + 1 for v in (u[2], u[3])]
        first, second = ids[n, drawn[0]], ids[n, drawn[1]]
        has_first, has_second = ids == first, ids == second
        where = has_first.any(axis=1) & has_second.any(axis=1) & movable[:, a] & run(u[4:7])
        # Where a class stands twice in an operator, its first dim.
        x, y = (jnp.argmax(has, axis=1).astype(jnp.int8) - 1 for has in (has_first, has_second))
        return s._replace(axes=s.axes.at[:, a].set(swap(s.axes[:, a], x, y, where)))

    sizes = jnp.asarray(space.mesh.axis_sizes)

    def may_take(n: Array, a: Array, value: Array) -> Array:
        pinned = space.offers_pins & (FIRST_PIN - value < sizes[a])
        return jnp.where(value <= FIRST_PIN, pinned, jnp.asarray(space.allowed)[n, a, jnp.maximum(value, REPLICATE) + 1])

    def pins(u: Array, s: State) -> State:
        a = pick(u[1], num_axes)
        one, other = (FIRST_PIN - pick(v, sizes[a]).astype(jnp.int8) for v in (u[2], u[3]))
        # Half the time with "replicate" in the place of one: a whole run of operators moves to one coordinate, or back.
        one = jnp.where(u[0] < 0.5, jnp.int8(REPLICATE), one)
        has = jnp.asarray([space.may_pin(n) for n in range(num_ops)])
        return s._replace(axes=s.axes.at[:, a].set(swap(s.axes[:, a], one, other, run(u[4:7]) & has)))

    def two_axes(u: Array, s: State) -> State:
        a, b = pick(u[0], num_axes), pick(u[1], num_axes)
        index = jnp.arange(num_ops)
        inside = run(u[4:7])
        # Only where both axes may take both values: else the reverse would not exist.
        va, vb = s.axes[:, a], s.axes[:, b]
        both = may_take(index, a, vb) & may_take(index, b, va)
        inside &= (both | ~inside).all()
        axes = s.axes.at[:, a].set(jnp.where(inside, vb, va))
        return s._replace(axes=axes.at[:, b].set(jnp.where(inside, va, axes[:, b])))

    moves = (tied, tied_storage, flow, two_axes) + ((pins,) if space.offers_pins else ())
    weights = np.array(WEIGHTS[: len(moves)])
    thresholds = jnp.asarray(np.cumsum(weights / weights.sum())[:-1], jnp.float32)

    def propose(key: Array, s: State) -> State:
        u = jax.random.uniform(key, (9 + num_axes,))
        kind = (u[-1] >= thresholds).sum()
        # Under vmap a switch computes every branch; the moves are cheap beside the simulation.
        return jax.lax.switch(kind, moves, u, s)

    return propose
