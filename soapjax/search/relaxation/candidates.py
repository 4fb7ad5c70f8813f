"""The configs that a relaxation considers per operator: all of them, or where they are many one per class of like ones.

Axes of one link level and size are nearly interchangeable. Where an operator has more than `MANY` configs, only those are listed in
which such axes take their dims in one order (sample first, then attributes, then parameters, and replication last); of 4^6 configs
of a product on 64 devices 400 remain. Where more than `MOST` remain, the order holds across levels too: the batch is split over
slow links before parameters are. What is left out this way is reported. A start for a search needs fewer (`coarse_candidates`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from soapjax.strategy.configs import Strategy
from soapjax.strategy.space import SearchSpace
from soapjax.topology import FactorMesh

MANY = 300
MOST = 500
COARSE_RUNS = 2
_KINDS = {"S": 0, "A": 1, "P": 2}


class Candidates(NamedTuple):
    """K configs of one operator."""

    axes: np.ndarray  # int8 [K, A]
    storage: np.ndarray  # int8 [K]


def enumerate_candidates(space: SearchSpace, *, is_complete: bool = False) -> tuple[list[Candidates], bool]:
    """Candidates of every operator, and whether any were left out (never with `is_complete`)."""
    left_out: list[bool] = []

    def listed(alike: Sequence[int]) -> np.ndarray:
        axes, fewer = _axes(space, alike[0], is_complete)
        left_out.append(fewer)
        return axes

    return _with_storages(space, listed), any(left_out)


def coarse_candidates(space: SearchSpace, seeds: Sequence[Strategy]) -> list[Candidates]:
    """Candidates that are made of one dim over slow links and of another one over fast links, and those of `seeds`.

    Of 5^6 configs of a product on 64 devices 80 or so remain.
    """

    def listed(alike: Sequence[int]) -> np.ndarray:
        ordered, _ = _in_order(space, alike[0], set(range(1, space.num_axes)))
        is_coarse = (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1) < COARSE_RUNS
        return np.unique(np.concatenate([ordered[is_coarse], *(s.axes[alike] for s in seeds)]), axis=0)

    return _with_storages(space, listed)


def _with_storages(space: SearchSpace, listed: Callable[[Sequence[int]], np.ndarray]) -> list[Candidates]:
    """All storages of the axis assignments [K, A] that are listed for operators with the same choices."""
    groups: dict[object, list[int]] = {}
    for n, op in enumerate(space.graph.operators):
        key = (space.allowed[n].tobytes(), space.divisors[n].tobytes(), tuple((d.kind, d.is_reduced) for d in op.dims))
        groups.setdefault(key, []).append(n)
    axes_of = {n: axes for alike in groups.values() for axes in [listed(alike)] for n in alike}
    out = []
    for n in range(space.graph.num_operators):
        axes, storages = axes_of[n], len(space.storages) if space.owns_parameters[n] else 1
        out.append(Candidates(np.repeat(axes, storages, axis=0), np.tile(np.arange(storages, dtype=np.int8), len(axes))))
    return out


def _axes(space: SearchSpace, n: int, is_complete: bool) -> tuple[np.ndarray, bool]:
    """Valid axis assignments [K, A] of operator `n`, and whether some were left out."""
    mesh = space.mesh
    if is_complete or space.num_assignments[n] <= MANY:
        return _in_order(space, n, set())
    like = {a for a in range(1, len(mesh.axis_sizes)) if _is_like(mesh, a)}
    rows, fewer = _in_order(space, n, like)
    return (rows, fewer) if len(rows) <= MOST else _in_order(space, n, set(range(1, len(mesh.axis_sizes))))


def _is_like(mesh: FactorMesh, a: int) -> bool:
    """Whether axis `a` is of the level and size of the one before."""
    return (mesh.axis_levels[a], mesh.axis_sizes[a]) == (mesh.axis_levels[a - 1], mesh.axis_sizes[a - 1])


def _in_order(space: SearchSpace, n: int, ordered_axes: set[int]) -> tuple[np.ndarray, bool]:
    """Valid axis assignments, built axis by axis, in which `ordered_axes` take no earlier dim than the axis before each."""
    mesh = space.mesh
    rank = np.zeros(space.allowed.shape[2], np.int64)
    rank[0] = 99
    for k, d in enumerate(space.graph.operators[n].dims):
        rank[k + 1] = _KINDS[d.kind] * 10 + d.is_reduced
    order = np.argsort(rank, kind="stable")
    rank[order] = np.arange(len(rank))
    rows = np.zeros((1, 0), np.int8)
    split = np.ones((1, space.divisors.shape[1]), np.int64)  # [K, D]: degree of each dim so far
    fewer = False
    for a, size in enumerate(mesh.axis_sizes):
        values = np.flatnonzero(space.allowed[n, a]) - 1
        new = np.concatenate([np.repeat(rows, len(values), axis=0), np.tile(values, len(rows))[:, None].astype(np.int8)], axis=1)
        degree = np.repeat(split, len(values), axis=0)
        degree[np.arange(len(new)), np.maximum(new[:, a], 0)] *= np.where(new[:, a] >= 0, size, 1)
        valid = (space.divisors[n] % degree == 0).all(axis=1)
        if a in ordered_axes:
            ordered = rank[new[:, a] + 1] >= rank[new[:, a - 1] + 1]
            fewer |= bool((valid & ~ordered).any())
            valid &= ordered
        rows, split = new[valid], degree[valid]
    return rows, fewer
