"""Stacked state that a pipeline cuts: which cuts leave every stage as many rows of it.

A loop over layers keeps a row per layer in one array, and between steps it is one array again (execute/transfers/stacked_state.py).
Only where every stage that has rows has equally many, on devices of its own, can that array lie where its rows are used. So the
search cuts such loops evenly, as people do; where no even cut exists, and for some small arrays, the array lies on the stage of its
first row, and the others' rows, with their optimizer state, go there and back in every step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from soapjax.graph.operators import OperatorGraph

MOST_WAYS = 64  # of dealing stages out to the loops of a model
SMALL = 0.05  # of the bytes of all stacks: biases and scales, which may belong to a neighbour's operator, are cut as it comes
MOST_CROWDED = 1.5  # times as many layers as a stage would have if all had some: beyond, other cuts are the lesser evil


class Stacks:
    """The stacks of a graph: arrays whose rows are parameters of their own.

    Args:
      position: [N] of every operator its place among the forward operators.
    """

    def __init__(self, graph: OperatorGraph, position: np.ndarray):
        of_leaf: dict[int, list[int]] = {}
        for p, parameter in enumerate(graph.parameters):
            if graph.leaf_of:
                of_leaf.setdefault(graph.leaf_of[parameter.leaf], []).append(p)
        owner = np.array([p.owner for p in graph.parameters], int)
        # Parameters of every stack in the order of its rows, and the places of those who own them.
        self._parameters = [np.array(mine) for mine in of_leaf.values() if len(mine) > 1]
        self._places = [position[owner[mine]] for mine in self._parameters]
        self._sorted = [np.sort(places) for places in self._places]
        size = np.array([sum(graph.tensors[graph.parameters[p].tensor].size_bytes for p in mine) for mine in self._parameters])
        self._share = size / max(size.sum(), 1)  # of all stacks

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def is_even(self, bounds: Sequence[int], meshes: Sequence[tuple[int, ...]]) -> bool:
        """Whether stages have equally many rows of a stack, or none, on devices of their own, of all stacks but small ones.

        Args:
          meshes: of every stage its first device, and the numbers of devices that must be alike.
        """
        return bool(self._share @ ~self._even(bounds, meshes) <= SMALL)

    def _even(self, bounds: Sequence[int], meshes: Sequence[tuple[int, ...]]) -> np.ndarray:
        """Of every stack [stacks]."""
        found = []
        for places in self._places:
            stage = np.searchsorted(bounds, places, side="right") - 1
            runs = [(k, len(list(rows))) for k, rows in itertools.groupby(stage.tolist())]
            mine = [meshes[k] for k, _ in runs]
            is_apart = len({mesh[0] for mesh in mine}) == len(mine)
            found.append(is_apart and len({mesh[1:] for mesh in mine}) == 1 and len({n for _, n in runs}) == 1)
        return np.array(found, bool)

    def even_cuts(self, marks: Sequence[int], stages: int) -> Iterator[np.ndarray]:
        """For every way of dealing so many stages out to the loops: which runs marks[a] : marks[b] may be a stage [M, M]."""
        is_large = np.cumsum(np.sort(self._share))[np.argsort(np.argsort(self._share))] > SMALL
        before = np.array([np.searchsorted(places, marks) for places in self._sorted])[is_large]  # rows of a stack before each mark
        rows = before[:, None, :] - before[:, :, None]
        lengths = np.array([len(places) for places in self._places])[is_large]
        loops = sorted({*lengths.tolist()})
        divisors = ([n for n in range(1, min(length, stages) + 1) if length % n == 0] for length in loops)
        ways = sorted(itertools.product(*divisors), key=lambda way: -sum(way))  # most stages with rows first
        most = MOST_CROWDED * -(-self._iterations(is_large) // stages)
        for way in ways[:MOST_WAYS]:
            each = lengths // np.array(way)[np.searchsorted(loops, lengths)]
            if (each <= most).all():
                yield ((rows == 0) | (rows == each[:, None, None])).all(0)

    def _iterations(self, is_large: np.ndarray) -> int:
        """Of all loops, one after the other: stacks whose rows lie among each other are of one."""
        loops: list[int] = []
        reached = -1
        for places in sorted((self._sorted[k] for k in np.flatnonzero(is_large)), key=lambda places: places[0]):
            if places[0] > reached:
                loops.append(0)
            loops[-1] = max(loops[-1], len(places))
            reached = max(reached, int(places[-1]))
        return sum(loops)

    def elsewhere(self, bounds: Sequence[int], meshes: Sequence[tuple[int, ...]], stored_bytes: np.ndarray) -> np.ndarray:
        """Bytes per device [S, S] of rows that stage t works with, and their state, of arrays that lie on stage s.

        Args:
          stored_bytes: [P] of every parameter with its optimizer state, on one device of its stage.
        """
        found = np.zeros((len(bounds) - 1,) * 2)
        if self._places:
            for k in np.flatnonzero(~self._even(bounds, meshes)):
                stage = np.searchsorted(bounds, self._places[k], side="right") - 1
                np.add.at(found, (stage[0], stage), stored_bytes[self._parameters[k]])
        return found * (1 - np.eye(len(found)))


def reaches(allowed: np.ndarray, stages: int) -> bool:
    """Whether so many runs, one after the other, lead from the first mark to the last; `allowed`: [M, M], of runs."""
    forwards = np.triu(allowed, 1)
    at = np.arange(len(allowed)) == 0
    for _ in range(stages):
        at = (at[:, None] & forwards).any(0)
    return bool(at[-1])
