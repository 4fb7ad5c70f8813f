"""Additive problems: pick one strategy per node; costs of nodes and edges add up; memory has a limit at every time.

    nodes   0 (2 strategies)   1 (3 strategies)     cost  = costs[0][s0] + costs[1][s1] + tables[0][s0, s1]
    edge    0 -- 1             [2, 3] table         usage = sum of usages[n][sn] over the nodes alive at a time

This is the ASPLOS 2025 contest's intra-operator parallelism problem, the relaxation of sharding in which nothing
overlaps. A node counts while start <= time < end; one with start = end never counts. A cost of 1e18 or more forbids
a choice; forbidden choices are counted apart, so that sums stay exact. Solutions compare by `Score`, in the order of
its fields: forbidden choices, memory that is lacking, cost.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

FORBIDDEN = 10**18


class Score(NamedTuple):
    """Smaller is better, field by field; exact Python integers."""

    violations: int  # forbidden choices taken
    excess: int  # usage over the limit, at the worst time
    cost: int  # of all else

    @property
    def is_feasible(self) -> bool:
        return self.violations == 0 and self.excess == 0


@dataclasses.dataclass(frozen=True, eq=False)
class AdditiveProblem:
    """Tables of N nodes and E edges, all integers; ragged tables lie end to end."""

    num_strategies: np.ndarray  # int64 [N]: K of each node
    costs: np.ndarray  # int64 [sum of K]
    usages: np.ndarray  # int64 [sum of K]
    intervals: np.ndarray  # int64 [N, 2]: start, end
    edges: np.ndarray  # int64 [E, 2]
    tables: np.ndarray  # int64 [sum of K_first * K_second], row-major
    usage_limit: int
    name: str = "problem"

    @property
    def num_nodes(self) -> int:
        return len(self.num_strategies)

    @property
    def node_offsets(self) -> np.ndarray:
        """Where each node's strategies begin, and the end of all: int64 [N + 1]."""
        return np.concatenate([[0], np.cumsum(self.num_strategies)])

    @property
    def table_offsets(self) -> np.ndarray:
        """Where each edge's table begins, and the end of all: int64 [E + 1]."""
        sizes = self.num_strategies[self.edges[:, 0]] * self.num_strategies[self.edges[:, 1]]
        return np.concatenate([[0], np.cumsum(sizes)])

    def score(self, strategies: np.ndarray) -> Score:
        """Of one strategy index per node, recomputed from the tables."""
        s = np.asarray(strategies, np.int64)
        at = self.node_offsets[:-1] + s
        first, second = self.edges.T
        chosen = np.concatenate(
            [self.costs[at], self.tables[self.table_offsets[:-1] + s[first] * self.num_strategies[second] + s[second]]]
        )
        is_forbidden = chosen >= FORBIDDEN
        return Score(
            int(is_forbidden.sum()), max(0, self.peak_usage(self.usages[at]) - self.usage_limit), _exact_sum(chosen[~is_forbidden])
        )

    def peak_usage(self, usage: np.ndarray) -> int:
        """The largest sum at any time, of one usage [N] per node."""
        times, at = np.unique(self.intervals, return_inverse=True)
        at = at.reshape(-1, 2)
        change = np.zeros(len(times), object if usage.sum(dtype=np.float64) > 2.0**62 else np.int64)
        np.add.at(change, at[:, 0], usage.astype(change.dtype))
        np.subtract.at(change, at[:, 1], usage.astype(change.dtype))
        return int(change.cumsum().max(initial=0))


def _exact_sum(values: np.ndarray) -> int:
    """Of integers below 1e18; halves of 32 bits cannot overflow."""
    return (int((values >> 32).sum()) << 32) + int((values & 0xFFFFFFFF).sum())
