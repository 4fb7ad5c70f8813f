"""Small cores judged choice by choice: prices reach only the choices that are best at some price, enumeration reaches all."""

from __future__ import annotations

import math

import numpy as np

from soapjax.additive.core import Core

MAX_CHOICES = 200_000  # about a second
CHUNK = 4096  # choices judged at once


def is_small(core: Core) -> bool:
    return math.prod(core.sizes.tolist()) <= MAX_CHOICES


def best_of_all(core: Core) -> np.ndarray | None:
    """The cheapest choice [M] that fits; None where none does."""
    memory = _memory_by_strategy(core)
    found, least = None, np.inf
    count = math.prod(core.sizes.tolist())
    for begin in range(0, count, CHUNK):
        numbers = np.arange(begin, min(begin + CHUNK, count))
        choices = np.stack(np.unravel_index(numbers, core.sizes.tolist()), axis=1)  # [chunk, M]
        flat = core.offsets[:-1] + choices
        first, second = choices[:, core.edges[:, 0]], choices[:, core.edges[:, 1]]
        pairs = core.flat_tables[core.table_offsets + first * core.second_sizes + second]
        costs = core.unary[flat].sum(axis=1) + pairs.sum(axis=1)
        for i in np.flatnonzero(costs < least)[np.argsort(costs[costs < least], kind="stable")]:
            if (memory[flat[i]].sum(axis=0) <= core.capacity).all():
                found, least = choices[i], float(costs[i])
                break
    return found


def _memory_by_strategy(core: Core) -> np.ndarray:
    """[sum of K, T]: what each strategy holds at each time."""
    change = np.zeros((int(core.offsets[-1]), core.num_times + 1))
    np.add.at(change, (core.item_strategy, core.item_spans[:, 0]), core.item_usage)
    np.add.at(change, (core.item_strategy, core.item_spans[:, 1]), -core.item_usage)
    return change.cumsum(axis=1)[:, : core.num_times]
