"""Memory of one strategy over the step, taken apart: what is alive when, and whose it is.

The lifespans are those of evaluate.py; here they are added up in plain NumPy, once per plan. The curve's highest point is
`Costs.memory_bytes[3]`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from soapjax.costs.evaluate import Costs, Lifespans, lifespans
from soapjax.costs.layouts import waiting_spans
from soapjax.costs.tables.problem_tables import CostTables


class MemoryCurve(NamedTuple):
    """Bytes of G groups of devices (one without pins) while each of K tasks runs."""

    persistent: np.ndarray  # [G]: parameters and optimizer state, unplaced state too
    alive: np.ndarray  # [G, K]: activations, gradients and resharded copies
    transient: np.ndarray  # [G, K]: while something is made
    tensor_bytes: np.ndarray  # [T, G]: of a tensor as it is kept
    copy_bytes: np.ndarray  # [E, G]
    stored_bytes: np.ndarray  # [P, G]
    spans: Lifespans

    @property
    def total(self) -> np.ndarray:
        """[G, K]."""
        return self.persistent[:, None] + self.alive + self.transient

    def at_peak(self, of_tensor: np.ndarray, of_edge: np.ndarray, of_parameter: np.ndarray, num: int) -> np.ndarray:
        """Bytes [num] that each owner holds at the peak, on the devices that hold most then.

        What a gradient waits with for its collective belongs to nobody.

        Args:
          of_tensor, of_edge, of_parameter: owner of every tensor, reshard and parameter, -1 for nobody.
        """
        found = np.zeros(num)
        if not self.total.size:
            return found
        g, k = np.unravel_index(np.argmax(self.total), self.total.shape)
        spans, tensors = self.spans, self.spans.tensors
        is_alive = (spans.since <= k) & (k <= np.asarray(spans.until)) & (of_tensor[tensors] >= 0)
        np.add.at(found, of_tensor[tensors[is_alive]], self.tensor_bytes[tensors[is_alive], g])
        is_held = (np.asarray(spans.copy_since) <= k) & (k <= spans.copy_until) & (of_edge >= 0)
        np.add.at(found, of_edge[is_held], self.copy_bytes[is_held, g])
        np.add.at(found, of_parameter, self.stored_bytes[:, g])
        return found


def memory_curve(tables: CostTables, costs: Costs) -> MemoryCurve:
    """The curve of a strategy, by its costs as NumPy arrays."""
    parts, holders, num_k = costs.parts, costs.holders, tables.num_tasks
    working, (birth, death, *_) = tables.working, tables.order
    spans = lifespans(tables, costs.layouts, np.asarray(parts.is_sent))

    def grouped(bytes_: np.ndarray, on: np.ndarray | None) -> np.ndarray:
        column = np.asarray(bytes_, np.float64)[..., None]
        return column if on is None else column * np.asarray(on)

    home, copy_on, stored_on, made_on = (None,) * 4 if holders is None else (
        holders.home, holders.copy, holders.stored, holders.resolve
    )  # fmt: skip
    held, copies = grouped(parts.held_bytes, home), grouped(parts.copy_bytes, copy_on)
    stored, transient = grouped(parts.stored_bytes, stored_on), grouped(parts.transient_bytes, made_on)
    groups = held.shape[1]
    steps = np.zeros((num_k + 2, groups))
    np.add.at(steps, spans.since, held[spans.tensors])
    np.add.at(steps, spans.until + 1, -held[spans.tensors])
    np.add.at(steps, spans.copy_since, copies)
    np.add.at(steps, spans.copy_until + 1, -copies)
    late = np.flatnonzero(working.waits & (death >= 0))
    held_back = np.zeros((num_k + 2, 2, groups))
    of_late = grouped(parts.waiting_bytes[late], None if home is None else home[late][:, None])
    shares = working.operand_share[:, None]
    for bytes_, since in waiting_spans(of_late, birth[late], shares, working.merged_at):
        np.add.at(held_back, since, bytes_)
        np.add.at(held_back, np.maximum(death[late] + 1, since), -bytes_)
    alive = np.cumsum(steps, 0)[:num_k] + np.minimum(np.cumsum(held_back, 0)[:num_k], working.most_waiting[:, None]).sum(1)
    made = np.zeros((num_k, groups))
    np.add.at(made, tables.order.since, transient)
    return MemoryCurve(
        persistent=stored.sum(0) + tables.graph.unplaced_bytes, alive=alive.T, transient=made.T, tensor_bytes=held,
        copy_bytes=copies, stored_bytes=stored, spans=spans,
    )  # fmt: skip
