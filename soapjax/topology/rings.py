"""Links between some pairs of devices only: what a group of devices has of them.

In a hybrid cube mesh (NVIDIA DGX-1) rings through all eight GPUs use all six links of each, rings through two GPUs the one
or two between these. NCCL sums and gathers over rings that share no link; a link carries both directions at once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy

Matrix = tuple[tuple[int, ...], ...]  # links between any two devices; symmetric
MOST_DEVICES = 8  # rings are enumerated


def is_matrix(found: Any, size: int) -> bool:
    """Whether `found`, anything that was read, is the links between any two of `size` devices, each of which has some."""
    if not isinstance(found, list | tuple) or any(not isinstance(row, list | tuple) or len(row) != size for row in found):
        return False
    return (
        len(found) == size
        and all(type(n) is int and n >= 0 for row in found for n in row)
        and all(found[a][b] == found[b][a] and not found[a][a] for a in range(size) for b in range(size))
        and (size == 1 or all(map(any, found)))
    )


def ring_share(links: Matrix, group: Sequence[int]) -> float:
    """What rings through `group` carry at once, of what the device with the most links can send; 0 if none joins them all.

    The most rings that share no link, by linear programming: parts of a ring count.
    """
    most = max(map(sum, links))
    first, *others = group
    if not others:
        return 1.0
    if len(others) == 1:
        return links[first][others[0]] / most
    pairs = {frozenset(p): i for i, p in enumerate(itertools.combinations(group, 2))}
    rings = []
    for order in itertools.permutations(others):
        if order[0] < order[-1]:  # the other half are the same, backwards
            stops = [first, *order, first]
            steps = [frozenset(s) for s in itertools.pairwise(stops)]
            if all(links[a][b] for a, b in steps):
                rings.append([pairs[s] for s in steps])
    if not rings:
        return 0.0
    uses = np.zeros((len(pairs), len(rings)))
    for i, ring in enumerate(rings):
        uses[ring, i] = 1
    there = [links[a][b] for a, b in pairs]
    found = scipy.optimize.linprog(-np.ones(len(rings)), A_ub=uses, b_ub=there, method="highs")
    return round(-2 * found.fun / most, 9)


def detour_share(links: Matrix) -> float:
    """What is left to devices that no ring joins: as much as one link."""
    return 1 / max(map(sum, links))


@functools.cache
def group_shares(links: Matrix, axis_sizes: tuple[int, ...]) -> dict[tuple[int, ...], tuple[float, tuple[int, ...]]]:
    """By axes of the mesh that the devices form: the share of the worst group along them, and that group."""
    places = np.arange(math.prod(axis_sizes)).reshape(axis_sizes)
    found = {}
    for count in range(1, len(axis_sizes) + 1):
        for axes in itertools.combinations(range(len(axis_sizes)), count):
            groups = np.moveaxis(places, axes, range(count)).reshape(math.prod(axis_sizes[a] for a in axes), -1).T
            found[axes] = min((ring_share(links, group), tuple(group)) for group in groups.tolist())
    return found
