"""The reduced problem in flat arrays: costs, loads and feasibility of whole choices."""

from __future__ import annotations

import numpy as np

from soapjax.additive.shrinking import Reduced


class Core:
    """Flat views of a `Reduced` problem: M nodes with K strategies each, F edges, T times, S spans of nodes' memory."""

    def __init__(self, reduced: Reduced):
        self.num_nodes, self.num_times = len(reduced.costs), len(reduced.capacity)
        self.capacity = reduced.capacity
        self.sizes = np.array([len(c) for c in reduced.costs], np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(self.sizes)])
        self.unary = np.concatenate([*reduced.costs, np.zeros(0)])
        self.edges, self.tables = reduced.edges, reduced.tables
        self.flat_tables = np.concatenate([*[t.ravel() for t in reduced.tables], np.zeros(0)])
        table_sizes = np.array([t.size for t in reduced.tables], np.int64)
        self.table_offsets = np.concatenate([[0], np.cumsum(table_sizes)])[:-1]
        self.second_sizes = self.sizes[self.edges[:, 1]]
        # Every (strategy, span) with its usage: what flat position, which span.
        spans, strategy, usage = [], [], []
        for v, (s, u) in enumerate(zip(reduced.spans, reduced.usages, strict=True)):
            spans.append(np.tile(s, (u.shape[0], 1)))
            strategy.append(np.repeat(np.arange(self.offsets[v], self.offsets[v + 1]), u.shape[1]))
            usage.append(u.ravel())
        self.item_spans = np.concatenate([*spans, np.zeros((0, 2), np.int64)])  # [I, 2]
        self.item_strategy = np.concatenate([*strategy, np.zeros(0, np.int64)])  # [I]: flat strategy
        self.item_usage = np.concatenate([*usage, np.zeros(0)])  # [I]
        nonzero = self.item_usage != 0
        self.item_spans, self.item_strategy, self.item_usage = (
            self.item_spans[nonzero],
            self.item_strategy[nonzero],
            self.item_usage[nonzero],
        )

    def cost(self, choice: np.ndarray) -> float:
        first, second = self.edges.T
        pairs = self.flat_tables[self.table_offsets + choice[first] * self.second_sizes + choice[second]]
        return float(self.unary[self.offsets[:-1] + choice].sum() + pairs.sum())

    def load(self, choice: np.ndarray) -> np.ndarray:
        """[T]: memory over time."""
        chosen = np.zeros(self.offsets[-1], bool)
        chosen[self.offsets[:-1] + choice] = True
        at = chosen[self.item_strategy]
        spans, usage = self.item_spans[at], self.item_usage[at]
        change = np.bincount(spans[:, 0], usage, self.num_times + 1) - np.bincount(spans[:, 1], usage, self.num_times + 1)
        return change.cumsum()[: self.num_times]

    def fits(self, choice: np.ndarray) -> bool:
        return bool((self.load(choice) <= self.capacity).all())

    def priced(self, prices: np.ndarray) -> np.ndarray:
        """Prices [T] of memory, added up per strategy: [sum of K]."""
        total = np.concatenate([[0.0], np.cumsum(prices)])
        each = self.item_usage * (total[self.item_spans[:, 1]] - total[self.item_spans[:, 0]])
        return np.bincount(self.item_strategy, each, self.offsets[-1])
