"""When tensors are alive and reshards made, as a compiler orders them (costs/compilers)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class MemoryOrder(NamedTuple):
    """Tasks, as places in time for what is alive."""

    since: np.ndarray  # int32 [T]: from when on a tensor is alive
    until: np.ndarray  # int32 [T]: -1 where it is counted elsewhere
    read_at: np.ndarray  # int32 [E]: when the reader of a reshard runs
    made_at: np.ndarray  # int32 [E]: when it is resharded, by readers that share no earlier copy
    at_least: np.ndarray  # int32 [T]: until when also where its last readers share a copy in another layout: `until`, or earlier


def least_until(order: MemoryOrder, edge_tensor: np.ndarray, computed_until: np.ndarray, is_kept: np.ndarray) -> MemoryOrder:
    """Says how early tensors are free whose readers have a copy: where nothing but these reshards keeps them.

    `computed_until` [T]: until when others are computed from a tensor. `is_kept` [T]: something else needs it until the end.
    """
    read = np.full(len(order.until), -1)
    np.maximum.at(read, edge_tensor, order.read_at)
    is_other = is_kept | (order.until > np.maximum(read, computed_until)) | (read < 0)
    found = np.where(is_other, order.until, np.minimum(order.until, np.maximum(order.since, computed_until)))
    return order._replace(at_least=found.astype(np.int32))
