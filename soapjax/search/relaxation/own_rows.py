"""What every operator's candidates make of its own layouts and durations, by the cost model itself."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator

import numpy as np

from soapjax.costs.evaluate import LANES, Evaluator
from soapjax.costs.rules.many_reshards import reshard_costs
from soapjax.costs.tables.tensor_tables import FROM_FIXED, FROM_READER
from soapjax.search.relaxation.candidates import Candidates
from soapjax.strategy.layout import PARTIAL, REPLICATED


def layout_names(layouts: np.ndarray) -> np.ndarray:
    """One int64 per layout: int8 [..., A] -> [...]; A is 15 at most, and so are dims."""
    out = np.zeros(layouts.shape[:-1], np.int64)
    for a in range(layouts.shape[-1]):
        out = out * 16 + (layouts[..., a].astype(np.int64) + 3)
    return out


class OwnRows:
    """Layouts and durations that depend on one operator, by its candidates."""

    def __init__(self, evaluator: Evaluator, candidates: list[Candidates], deadline: float = math.inf):
        """Evaluates "every operator takes its k-th candidate" for all k: what depends on one operator is read off.

        Raises: TimeoutError where that was not done by `deadline`, of `time.monotonic`.
        """
        tables = evaluator.tables
        self.tables, self.candidates = tables, candidates
        self.counts = [len(c.storage) for c in candidates]
        most = max(self.counts, default=1)
        axes = np.stack([c.axes[np.arange(most) % len(c.storage)] for c in candidates], axis=1)  # [K, N, A]
        storage = np.stack([c.storage[np.arange(most) % len(c.storage)] for c in candidates], axis=1)
        every = zip(*_by_operator(evaluator, axes, storage, deadline), strict=True)
        self.slots, self.compute_s, self.sum_s = (np.concatenate(x) for x in every)
        owner = tables.parameter_op
        self.slot_op = np.concatenate([tables.access_op, owner, owner, owner, owner[tables.sum_parameter], [-1]])
        self.index = [np.arange(k) for k in self.counts]  # of each operator's candidates in the arrays
        self.gathers_again = tables.may_gather_again.tolist()

    def restricted(self, candidates: list[Candidates], keep: list[np.ndarray]) -> OwnRows:
        """Only these candidates; the arrays are shared."""
        other = copy.copy(self)
        other.candidates, other.counts = candidates, [len(k) for k in keep]
        other.index = [of[k] for of, k in zip(self.index, keep, strict=True)]
        return other

    def slot(self, s: int) -> tuple[int, np.ndarray]:
        """The operator that decides a slot's layout, and the layouts [K, A] by its candidates."""
        n = int(self.slot_op[s])
        return (n, self.slots[self.index[n], s]) if n >= 0 else (-1, self.slots[:1, s])

    def name(self, s: int) -> np.ndarray:
        """A slot's layouts as integers [K], by the candidates of its operator."""
        return layout_names(self.slot(s)[1])

    def source(self, e: int) -> tuple[int, np.ndarray]:
        """The layout that a reshard begins with, but for partial sums, as its producer makes it."""
        tables = self.tables
        return self.slot(int(tables.edge_source[e])) if self.gathers_again[e] else self.raw(int(tables.edge_tensor[e]))

    def raw(self, t: int) -> tuple[int, np.ndarray]:
        """A tensor's layout as its producer makes it."""
        tables = self.tables
        if tables.tensor_source[t] == FROM_FIXED:
            return -1, tables.tensor_fixed[t : t + 1]
        n, rows = self.slot(int(tables.tensor_slot[t]))
        if tables.tensor_source[t] == FROM_READER:
            rows = np.where(rows == PARTIAL, np.int8(REPLICATED), rows)
        return n, rows

    def reshard_s(self, source: np.ndarray, target: np.ndarray, size_bytes: float, share: float, shape: np.ndarray) -> np.ndarray:
        """Seconds [n, L] of bringing tensors of a shape [R] from layouts `source` to `target` [n, A]."""
        links = self.tables.links
        out = np.zeros((len(source), links.num_levels), np.float32)
        moves = np.flatnonzero((source != target).any(axis=1))
        shapes = np.broadcast_to(shape, (len(moves), len(shape)))
        out[moves] = reshard_costs(source[moves], target[moves], size_bytes, links, share, shape=shapes).seconds
        return out


def _by_operator(
    evaluator: Evaluator, axes: np.ndarray, storage: np.ndarray, deadline: float
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of strategies int8 [K, N, A] and [K, N], some at a time."""
    for k in range(0, len(axes), LANES):
        if time.monotonic() > deadline:
            raise TimeoutError("the candidates' own costs were not done in time")
        yield evaluator.by_operator(axes[k : k + LANES], storage[k : k + LANES])
