"""Feasible choices made better: blocks solved exactly with memory priced, prices raised until the result fits.

A round draws a plan (what is free, in which order), solves it with memory priced somewhere between nothing
and the dual's prices, and where the result does not fit, raises the prices at the times that lack memory and solves again.
"""

from __future__ import annotations

import time

import numpy as np

from soapjax.additive.blocks import Blocks
from soapjax.additive.core import Core

MAX_TABLE = 2e4  # entries: larger blocks at once, or more blocks in the time


class Improver:
    def __init__(self, core: Core, rng: np.random.Generator):
        self.core, self.rng = core, rng
        self.blocks = Blocks(core)
        # Gain per second of each size of region: sizes that pay are drawn more often.
        self.region_sizes = _region_sizes(core.num_nodes)
        self.rates = np.full(len(self.region_sizes), np.nan)

    def least_memory(self) -> np.ndarray:
        """Every node by itself: its least memory over all times, then its least cost."""
        core = self.core
        memory = core.priced(np.ones(core.num_times))
        parts = zip(core.offsets[:-1].tolist(), core.offsets[1:].tolist(), strict=True)
        return np.array([np.lexsort((core.unary[a:b], memory[a:b]))[0] for a, b in parts], np.int64)

    def draw_size(self) -> int:
        """Index of a region size: untried ones first, then half by gain per second, half evenly."""
        untried = np.flatnonzero(np.isnan(self.rates))
        if len(untried):
            return int(untried[0])
        total = self.rates.sum()
        weight = np.full(len(self.rates), 1 / len(self.rates))
        if total >= np.finfo(float).smallest_normal:  # below it, where thousands of rounds without a gain lead, quotients are wrong
            weight = 0.5 * weight + 0.5 * self.rates / total
        return int(self.rng.choice(len(weight), p=weight))

    def region(self, size: int) -> np.ndarray:
        """A random ball of so many nodes: bool [M]."""
        m = self.core.num_nodes
        if size >= m:
            return np.ones(m, bool)
        free = np.zeros(m, bool)
        border = [int(self.rng.integers(m))]
        count = 0
        while border and count < size:
            at = int(self.rng.integers(len(border)))
            border[at], border[-1] = border[-1], border[at]
            v = border.pop()
            if free[v]:
                continue
            free[v] = True
            count += 1
            around = [w for w in self.blocks.adjacent[v] if not free[w]]
            if len(around) > 50:
                around = [around[i] for i in self.rng.choice(len(around), 50, replace=False)]
            border += around
            if not border and count < size:
                border = [int(self.rng.integers(m))]
        return free

    def fit(
        self, choice: np.ndarray, prices: np.ndarray, tries: int, free: np.ndarray, beliefs: np.ndarray | None = None
    ) -> np.ndarray | None:
        """A feasible choice near `choice`, or None: solves with `prices`, raised where memory lacks."""
        core = self.core
        plan = self.blocks.plan(self.rng, free, choice, MAX_TABLE, beliefs)
        unit = max(float(prices.max(initial=0)), abs(core.cost(choice)) / max(float(core.capacity.max(initial=1)), 1e-9) * 1e-3)
        raised = 0.1
        for _ in range(tries):
            choice = self.blocks.solve(plan, choice, core.unary + core.priced(prices))
            over = core.load(choice) - core.capacity
            worst = float(over.max(initial=0))
            if worst <= 0:
                return choice
            prices = prices + raised * unit * np.maximum(over, 0) / worst
            raised *= 2
        return None

    def round(self, choice: np.ndarray, prices: np.ndarray, beliefs: np.ndarray | None) -> np.ndarray | None:
        """Another feasible choice, better or not: the best of some block at some prices; None where prices do not make it fit."""
        scale = float(self.rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 1.3]))
        use = beliefs if self.rng.random() < 0.6 else None
        k = self.draw_size()
        begin = time.monotonic()
        found = self.fit(choice, prices * scale, 8, self.region(self.region_sizes[k]), use)
        cost = self.core.cost(choice)
        gain = max(0.0, cost - self.core.cost(found)) / max(abs(cost), 1e-9) if found is not None else 0.0
        rate = gain / max(time.monotonic() - begin, 1e-6)
        self.rates[k] = rate if np.isnan(self.rates[k]) else 0.8 * self.rates[k] + 0.2 * rate
        return found


def _region_sizes(num_nodes: int) -> list[int]:
    """Doubling from 50, or from a tenth of a small core; all of the core too, unless it is very large.

    A region that is solved whole at some price yields only choices that are best at some price: fixed neighbours add others.
    """
    sizes = [s for s in (min(50, max(2, num_nodes // 10)) * 2**i for i in range(8)) if s < 0.8 * num_nodes]
    return [*sizes, num_nodes] if num_nodes <= 8000 else sizes
