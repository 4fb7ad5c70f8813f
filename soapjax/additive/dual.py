"""Prices of memory: the Lagrangian dual over times, by subgradient steps between sweeps of messages.

Whatever the prices >= 0, bound = messages' bound with memory priced, minus the prices of the whole capacity, is below
any feasible cost. Steps follow the load over capacity of the rounded choice; where the bound falls too far behind its best,
the walk returns there and takes shorter steps. All steps are relative to the bound: no scale is assumed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from soapjax.additive.core import Core
from soapjax.additive.messages import Messages

STALL = 15  # steps without gain, after which they become shorter
FAR = 100  # aims behind the best bound, likewise
SMALLEST_SHARE = 3e-4


class Dual:
    def __init__(self, core: Core):
        self.core, self.messages = core, Messages(core)
        self.prices = np.zeros(core.num_times)
        self.best_prices = self.prices
        self.bound = -np.inf  # of the core, without the reduction's offset
        self.best_beliefs: np.ndarray | None = None
        self.step_share = 0.2  # of the bound's size: how much one step aims to gain
        self.is_converged = False  # the steps became tiny once
        self.stalled = 0
        self.direction = np.zeros(core.num_times)

    def priced_unary(self, prices: np.ndarray) -> np.ndarray:
        return self.core.unary + self.core.priced(prices) if prices.any() else self.core.unary

    def step(self, offset: float) -> np.ndarray:
        """One sweep and one change of prices; the choice that the sweep rounds to."""
        core = self.core
        unary = self.priced_unary(self.prices)
        choice = self.messages.sweep(unary)
        bound = self.messages.bound(unary) - float(self.prices @ core.capacity)
        scale = max(abs(self.bound + offset), abs(bound + offset) * 1e-3) if np.isfinite(self.bound) else abs(bound + offset)
        aim = self.step_share * max(scale, 1e-9)
        self.stalled = 0 if bound > self.bound + 0.03 * aim else self.stalled + 1
        if bound > self.bound:
            self.bound, self.best_prices = bound, self.prices
            self.best_beliefs = self.messages.beliefs(unary)
        if self.stalled >= STALL or bound < self.bound - FAR * aim:
            self.step_share *= 0.6
            if self.step_share < SMALLEST_SHARE:
                self.is_converged, self.step_share = True, 0.05
            self.stalled = 0
            self.prices = self.best_prices
            self.direction = np.zeros(core.num_times)
            return choice
        over = core.load(choice) - core.capacity
        self.direction = 0.5 * self.direction + 0.5 * over
        direction = np.where((self.prices <= 0) & (self.direction < 0), 0.0, self.direction)
        length = float(direction @ direction)
        if length > 0:
            self.prices = np.maximum(0, self.prices + aim / length * direction)
        return choice

    def push(self, offset: float, tries: int, stop: Callable[[], bool]) -> np.ndarray | None:
        """Raises the best prices where memory lacks, more and more, until the rounded choice fits; None if it does not."""
        core = self.core
        prices = self.best_prices
        scale = max(abs(self.bound + offset), 1e-9)
        gain = 0.02
        for _ in range(tries):
            if stop():
                break
            choice = self.messages.sweep(self.priced_unary(prices))
            over = np.maximum(core.load(choice) - core.capacity, 0)
            length = float(over @ over)
            if length == 0:
                return choice
            prices = prices + gain * scale / length * over
            gain *= 1.15
        return None
