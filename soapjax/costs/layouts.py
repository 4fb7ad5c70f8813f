"""Layouts of one strategy, int8 [..., A], after the cost program found them: for those who list and explain, in plain NumPy."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from soapjax.strategy.layout import PARTIAL, REPLICATED

Task = TypeVar("Task", int, np.ndarray)


def value_index(axes: np.ndarray) -> np.ndarray:
    """Column of tables that are indexed by config value + 1; a pin replicates within its sub-mesh."""
    return np.maximum(axes, REPLICATED).astype(np.int32) + 1


def as_read(home: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """What tensors kept as `home` are resharded to for a reader, as in record_rules.py."""
    return np.where((wanted == PARTIAL) | (home == PARTIAL).any(-1, keepdims=True), home, wanted)


def waiting_spans(waiting: np.ndarray, birth: Task, operand_share: np.ndarray, merged_at: int) -> list[tuple[np.ndarray, Task]]:
    """What waits [n, ..., 2], and from which task on [n] (or of one): operands since they are made, results behind them all."""
    return [(waiting * operand_share, birth + 1), (waiting * (1 - operand_share), merged_at + 0 * birth)]
