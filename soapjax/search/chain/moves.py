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
scored infinite, and so refused. Moves of one operator are drawn in blocks (mcmc_planner.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from soapjax.graph.trace.union_find import UnionFind
from soapjax.jit.array_types import Array, Scalar
from soapjax.strategy.configs import FIRST_PIN, PIN, REPLICATE
from soapjax.strategy.space import SearchSpace

# Of tied, tied storage, flow, two axes, pins.
WEIGHTS = (0.25, 0.15, 0.4, 0.1, 0.1)


LARGEST_AXIS = 7  # axes have prime sizes


class State(NamedTuple):
    axes: Any  # int8 [N, A]: NumPy's on the host, JAX's inside a program
    storage: Any  # int8 [N]


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


class MoveTables(NamedTuple):
    """Of one space, padded to the sizes of a bucket; N operators, A axes."""

    values: Array  # int8 [N, A, V]: what an axis may take
    counts: Array  # int32 [N, A]: how many of them
    num_ops: Scalar  # int32 []
    num_axes: Scalar  # int32 []
    num_storages: Scalar  # int32 []
    free: Array  # int32 [N]: operators with a choice
    num_free: Scalar  # int32 []
    movable: Array  # int32 [N]: operators with a choice on some axis
    num_movable: Scalar  # int32 []
    owners: Array  # int32 [N]: operators with parameters
    num_owners: Scalar  # int32 []
    owns: Array  # bool [N]
    groups: Array  # int32 [N]: of repeated operators
    flows: Array  # int32 [2, N, V]: see `dim_flows`
    sizes: Array  # int32 [A]
    may_pin: Array  # bool [N]
    steps: Scalar  # int32 []: of a block
    weights: Array  # float32 [4]: up to where a uniform number means each of the moves


def move_tables(space: SearchSpace, num_ops: int, num_axes: int, op_dims: int, steps: int) -> MoveTables:
    """Of a space in a bucket of so many operators, axes and dims of operators."""
    graph, count = space.graph, space.graph.num_operators
    values, counts = choices_of(space)
    owners = np.flatnonzero(space.owns_parameters)
    movable = np.flatnonzero((counts > 1).any(axis=1))
    free = np.flatnonzero((counts > 1).any(axis=1) | space.owns_parameters)

    def listed(x: np.ndarray) -> tuple[np.ndarray, np.int32]:
        found = np.zeros(num_ops, np.int32)
        found[: len(x)] = x
        return found, np.int32(max(len(x), 1))

    def padded(x: np.ndarray, shape: tuple[int, ...], value: int = 0) -> np.ndarray:
        found = np.full(shape, value, x.dtype)
        found[tuple(slice(n) for n in x.shape)] = x
        return found

    width = op_dims + 1 + (LARGEST_AXIS if space.offers_pins else 0)
    flows = np.stack([padded(x, (num_ops, op_dims + 1), -1) for x in dim_flows(space)])
    moves = 5 if space.offers_pins else 4
    weights = np.cumsum(np.array(WEIGHTS[:moves]) / sum(WEIGHTS[:moves]))[:-1]
    (free, num_free), (movable, num_movable), (of_owners, num_owners) = map(listed, (free, movable, owners))
    return MoveTables(
        values=padded(values, (num_ops, num_axes, width)), counts=padded(counts, (num_ops, num_axes), 1), num_ops=np.int32(count),
        num_axes=np.int32(space.num_axes), num_storages=np.int32(len(space.storages) if len(owners) else 1),
        free=free, num_free=num_free, movable=movable, num_movable=num_movable, owners=of_owners, num_owners=num_owners,
        owns=padded(np.asarray(space.owns_parameters), (num_ops,)),
        groups=padded(np.array([o.group for o in graph.operators], np.int32), (num_ops,), -1),
        flows=flows, sizes=padded(np.array(space.mesh.axis_sizes, np.int32), (num_axes,), 1),
        may_pin=padded(np.array([space.may_pin(n) for n in range(count)], bool), (num_ops,)), steps=np.int32(steps),
        weights=padded(weights.astype(np.float32), (4,), 2),
    )  # fmt: skip


def pick(u: Array, count: Array | Scalar | int) -> jax.Array:
    """A uniform integer below `count`, from a uniform number."""
    return jnp.minimum((u * jnp.asarray(count, u.dtype)).astype(jnp.int32), count - 1)


NUM_UNIFORMS = 10  # of a leap


def swap(x: Array, u: Array, v: Array, where: Array) -> Array:
    """`x` with values `u` and `v` exchanged."""
    return jnp.where(where & (x == u), v, jnp.where(where & (x == v), u, x))


def may_take(m: MoveTables, a: Array, value: Array) -> Array:
    """bool [N]: whether each operator may take its `value` [N] on axis `a`."""
    options = jnp.arange(m.values.shape[2]) < m.counts[:, a][:, None]
    return ((m.values[:, a] == value[:, None]) & options).any(1)


def leap(m: MoveTables, u: Array, s: State, *, pins: bool) -> State:
    """The mixture of moves; all randomness of a move is one vector `u` of uniforms."""
    index = jnp.arange(s.axes.shape[0])
    exists = index < m.num_ops

    def draw_value(u: Array, n: Array, a: Array) -> Array:
        return m.values[n, a, pick(u, m.counts[n, a])]

    def draw_operator(u: Array) -> Array:
        return m.movable[pick(u, m.num_movable)]

    def run(u: Array) -> Array:
        """All operators, or a run of consecutive ones; takes three uniforms."""
        ends = jnp.stack([pick(u[0], m.num_ops + 1), pick(u[1], m.num_ops + 1)])
        return exists & ((u[2] < 0.5) | ((index >= ends.min()) & (index < ends.max())))

    def tied(u: Array) -> State:
        n, a = draw_operator(u[0]), pick(u[1], m.num_axes)
        members = m.groups == m.groups[n]
        column = swap(s.axes[:, a], draw_value(u[2], n, a), draw_value(u[3], n, a), members)
        return s._replace(axes=s.axes.at[:, a].set(column))

    def tied_storage(u: Array) -> State:
        members = m.groups == m.groups[m.owners[pick(u[0], m.num_owners)]]
        one, other = (pick(v, m.num_storages).astype(jnp.int8) for v in (u[1], u[2]))
        return s._replace(storage=swap(s.storage, one, other, members))

    def flow(u: Array) -> State:
        ids = m.flows[(u[7] < 0.5).astype(jnp.int32)]
        n, a = draw_operator(u[0]), pick(u[1], m.num_axes)
        # A pin flows nowhere: it counts as replicated.
        drawn = [jnp.maximum(draw_value(v, n, a), REPLICATE) + 1 for v in (u[2], u[3])]
        has_first, has_second = (ids == ids[n, d] for d in drawn)
        # Operators with a choice on an axis; a user's constraint leaves none.
        where = has_first.any(axis=1) & has_second.any(axis=1) & (m.counts[:, a] > 1) & run(u[4:7])
        # Where a class stands twice in an operator, its first dim.
        x, y = (jnp.argmax(has, axis=1).astype(jnp.int8) - 1 for has in (has_first, has_second))
        return s._replace(axes=s.axes.at[:, a].set(swap(s.axes[:, a], x, y, where)))

    def pinned(u: Array) -> State:
        a = pick(u[1], m.num_axes)
        one, other = (FIRST_PIN - pick(v, m.sizes[a]).astype(jnp.int8) for v in (u[2], u[3]))
        # Half the time with "replicate" in the place of one: a whole run of operators moves to one coordinate, or back.
        one = jnp.where(u[0] < 0.5, jnp.int8(REPLICATE), one)
        return s._replace(axes=s.axes.at[:, a].set(swap(s.axes[:, a], one, other, run(u[4:7]) & m.may_pin)))

    def two_axes(u: Array) -> State:
        a, b = pick(u[0], m.num_axes), pick(u[1], m.num_axes)
        inside = run(u[4:7])
        # Only where both axes may take both values: else the reverse would not exist.
        va, vb = s.axes[:, a], s.axes[:, b]
        both = may_take(m, a, vb) & may_take(m, b, va)
        inside &= (both | ~inside).all()
        axes = s.axes.at[:, a].set(jnp.where(inside, vb, va))
        return s._replace(axes=axes.at[:, b].set(jnp.where(inside, va, axes[:, b])))

    moves = (tied, tied_storage, flow, two_axes) + ((pinned,) if pins else ())
    kind = jnp.minimum((u[-1] >= m.weights).sum(), len(moves) - 1)
    # Under vmap a switch computes every branch; the moves are cheap beside the simulation.
    return jax.lax.switch(kind, moves, u)
