"""Reshards that may be shared: readers that want one tensor in the same layout reshard it once.

Who pays depends on many operators. A reshard that an earlier one of its own operator makes superfluous is free; of the
others, each of the g operators that may want the layout is charged 1/g of the cost. All who want it together are then charged
no more than the one reshard that is made. Where the backward pass gathers parameters again, it pays for itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from soapjax.costs.tables.problem_tables import CostTables
from soapjax.search.relaxation.own_rows import OwnRows


class Twins(NamedTuple):
    """What a reshard is charged, given which earlier ones of its own operator want the same layout."""

    equal: np.ndarray  # int16 [K, Q]: by candidate, for Q earlier reshards of the same operator
    crosses: tuple[bool, ...]  # [Q]: from the forward pass into the backward pass
    sharers: np.ndarray  # int16 [K, 2]: operators that may want this layout: in both passes, and in this pass alone

    def charged(self, again: np.ndarray, equal: np.ndarray, sharers: np.ndarray) -> np.ndarray:
        """Shares [n] of the cost; `again` where the backward pass gathers anew."""
        is_free = (equal & ~(again.astype(bool)[:, None] & np.array(self.crosses, bool))).any(axis=1)
        return np.where(is_free, 0.0, 1.0 / np.where(again, sharers[:, 1], sharers[:, 0]))


Distinct = tuple[np.ndarray, frozenset[int]]  # packed layouts, sorted, and as a set


def sharing_of(tables: CostTables, rows: OwnRows) -> dict[int, tuple]:
    """Reshard -> ((again ingredient, its twins), payers, bytes, trips), for those that are not alone in their group."""
    is_backward, gathers_again = tables.edge_is_backward.tolist(), tables.may_gather_again
    out = {}
    seen: dict[bytes, Distinct] = {}
    for edges in tables.reader_groups():
        if len(edges) == 1:
            continue
        ops = {e: int(rows.slot_op[tables.edge_slot[e]]) for e in edges}
        p = int(tables.edge_parameter[edges[0]])
        owner = int(tables.parameter_op[p]) if p >= 0 else -1
        again = np.zeros((1, 1), np.int8)
        if owner >= 0:
            of_owner = tables.storage_again[rows.candidates[owner].storage] & gathers_again[edges].any()
            again = of_owner[:, None].astype(np.int8)
        # Copies of unequal size (a loop's slice and the whole): no more than the smallest may be charged.
        least = min(float(tables.edge_bytes[e]) for e in edges), min(float(tables.edge_trips[e]) for e in edges)
        packed = {e: rows.name(int(tables.edge_slot[e])) for e in edges}
        layouts = {e: _distinct(packed[e], seen) for e in edges}
        sides = [edges, [e for e in edges if not is_backward[e]], [e for e in edges if is_backward[e]]]
        wanted = [_wanted(side, ops, layouts) for side in sides]
        for i, e in enumerate(edges):
            own = [x for x in edges[:i] if ops[x] == ops[e]]
            equal = np.stack([packed[x] == packed[e] for x in own] or [np.zeros(len(packed[e]), bool)], axis=1)
            both, alone = wanted[0], wanted[2 if is_backward[e] else 1]
            sharers = np.stack([counts[np.searchsorted(names, packed[e])] for names, counts in (both, alone)], 1).astype(np.int16)
            crosses = tuple(is_backward[e] and not is_backward[x] for x in own)
            twins = Twins(equal.astype(np.int16), crosses or (False,), sharers)
            # An own earlier reshard to this layout makes this one free; any other may have paid in its place.
            others = (x for x in edges[:i] if ops[x] != ops[e])
            payers = (*(x for x in others if not layouts[x][1].isdisjoint(layouts[e][1])), e)
            out[e] = (((owner, again), twins), payers, *least)
    return out


def _distinct(packed: np.ndarray, seen: dict[bytes, Distinct]) -> Distinct:
    key = packed.tobytes()
    if key not in seen:
        found = np.unique(packed)
        seen[key] = found, frozenset(found.tolist())
    return seen[key]


def _wanted(edges: list[int], ops: dict[int, int], layouts: dict[int, Distinct]) -> tuple[np.ndarray, np.ndarray]:
    """Packed layouts, sorted, and how many operators may want each."""
    by_op: dict[int, list[np.ndarray]] = {}
    for e in edges:
        by_op.setdefault(ops[e], []).append(layouts[e][0])
    own = [x[0] if len(x) == 1 else np.unique(np.concatenate(x)) for x in by_op.values()]
    return np.unique(np.concatenate([np.zeros(0, np.int64), *own]), return_counts=True)
