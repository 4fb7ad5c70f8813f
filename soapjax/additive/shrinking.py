"""The problem while it is reduced: a graph that loses nodes, and the decisions that lead back to the whole one.

Nodes are those of the whole problem; strategies carry the labels they have there. A node's memory is a list of spans of
times with a usage per strategy: it starts with one span, and grows as the node takes over others.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from soapjax.additive.additive_problem import FORBIDDEN, AdditiveProblem

BIG = float(FORBIDDEN)


class Decision(NamedTuple):
    """Node -> its label, looked up by the labels of the nodes that decide it."""

    node: int
    by: tuple[tuple[int, np.ndarray], ...]  # (deciding node, its sorted labels then)
    label: np.ndarray  # [labels of the first, labels of the second, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Reduced:
    """The core: M nodes, renumbered; tables are float64, forbidden entries exactly 1e18."""

    costs: list[np.ndarray]  # M of [K]
    edges: np.ndarray  # int64 [F, 2]
    tables: list[np.ndarray]  # F of [K_first, K_second]
    spans: list[np.ndarray]  # M of int64 [m, 2]: capacity times from, to (exclusive)
    usages: list[np.ndarray]  # M of [K, m]: over each span
    capacity: np.ndarray  # [T]: what the core may use at each remaining time
    offset: float  # cost of all that was decided
    nodes: np.ndarray  # int64 [M]: of the whole problem
    labels: list[np.ndarray]  # M of [K]: strategy of the whole problem
    decisions: list[Decision]
    num_nodes: int

    def expand(self, choice: np.ndarray) -> np.ndarray:
        """Strategies of the whole problem for a choice [M] in the core."""
        out = np.zeros(self.num_nodes, np.int64)
        for n, labels, k in zip(self.nodes, self.labels, choice, strict=True):
            out[n] = labels[k]
        for d in reversed(self.decisions):
            out[d.node] = d.label[tuple(int(np.searchsorted(labels, out[n])) for n, labels in d.by)]
        return out


class Shrinking:
    """The problem as it shrinks: what is left of the graph, its memory, and the decisions taken."""

    def __init__(self, problem: AdditiveProblem):
        self.problem = problem
        at = problem.node_offsets
        costs = np.minimum(problem.costs, FORBIDDEN).astype(np.float64)
        usages = problem.usages.astype(np.float64)
        n = problem.num_nodes
        self.cost = [costs[at[v] : at[v + 1]].copy() for v in range(n)]
        self.label = [np.arange(k) for k in problem.num_strategies]
        self.adjacent: list[dict[int, np.ndarray]] = [{} for _ in range(n)]
        self.alive = np.ones(n, bool)
        self.offset = 0.0
        self.decisions: list[Decision] = []
        events, index = np.unique(problem.intervals, return_inverse=True)
        index = index.reshape(-1, 2)
        self.capacity = np.full(max(len(events) - 1, 0), float(problem.usage_limit))
        # A node's memory: pieces ([m, 2] spans, [K, m] usages), joined when looked at.
        self.pieces: list[list[tuple[np.ndarray, np.ndarray]]] = [
            [(index[v : v + 1], usages[at[v] : at[v + 1], None])] if index[v, 0] < index[v, 1] else [] for v in range(n)
        ]
        tables = np.minimum(problem.tables, FORBIDDEN).astype(np.float64)
        offsets = problem.table_offsets
        for e, (u, v) in enumerate(problem.edges.tolist()):
            table = tables[offsets[e] : offsets[e + 1]].reshape(problem.num_strategies[u], problem.num_strategies[v])
            if u == v:
                self.cost[u] = np.minimum(self.cost[u] + np.diagonal(table), BIG)
            else:
                self.add_edge(u, v, table)
        # Rule -> node -> neighbour -> the table that the rule has looked at: hubs are visited often, their edges change seldom.
        self.seen: dict[str, list[dict[int, np.ndarray]]] = {r: [{} for _ in range(n)] for r in ("support", "sum", "follower")}
        self.queue: list[int] = list(range(n))
        self.queued = np.ones(n, bool)

    # The graph.

    def touch(self, v: int) -> None:
        if not self.queued[v]:
            self.queued[v] = True
            self.queue.append(v)

    def changed(self, rule: str, v: int) -> list[tuple[int, np.ndarray]]:
        """v's edges whose tables `rule` has not looked at."""
        seen = self.seen[rule][v]
        return [(w, table) for w, table in self.adjacent[v].items() if seen.get(w) is not table]

    def add_edge(self, u: int, v: int, table: np.ndarray) -> None:
        """Parallel edges add up; both directions share one array."""
        if v in self.adjacent[u]:
            table = np.minimum(self.adjacent[u][v] + table, BIG)
        self.adjacent[u][v], self.adjacent[v][u] = table, table.T

    def drop_edge(self, u: int, v: int) -> None:
        del self.adjacent[u][v], self.adjacent[v][u]

    def memory(self, v: int) -> tuple[np.ndarray, np.ndarray]:
        """Spans [m, 2] and usages [K, m]: equal spans joined, what all strategies share moved to the capacity."""
        pieces = self.pieces[v]
        if not pieces:
            return np.zeros((0, 2), np.int64), np.zeros((len(self.cost[v]), 0))
        spans = np.concatenate([s for s, _ in pieces]) if len(pieces) > 1 else pieces[0][0]
        usage = np.concatenate([u for _, u in pieces], axis=1) if len(pieces) > 1 else pieces[0][1]
        if len(spans) > 1:
            keys, where = np.unique(spans[:, 0] * (len(self.capacity) + 1) + spans[:, 1], return_inverse=True)
            if len(keys) < len(spans):
                joined = np.zeros((usage.shape[0], len(keys)))
                np.add.at(joined.T, where.reshape(-1), usage.T)
                spans, usage = np.stack(np.divmod(keys, len(self.capacity) + 1), axis=1), joined
        shared = usage.min(axis=0)
        for (a, b), x in zip(spans.tolist(), shared.tolist(), strict=True):
            if x:
                self.capacity[a:b] -= x
        usage = usage - shared
        keep = usage.any(axis=0)
        if not keep.all():
            spans, usage = spans[keep], usage[:, keep]
        self.pieces[v] = [(spans, usage)] if len(spans) else []
        return spans, usage

    def keep(self, v: int, kept: np.ndarray) -> None:
        """Only these strategies (a mask or sorted indices) remain."""
        self.cost[v], self.label[v] = self.cost[v][kept], self.label[v][kept]
        self.pieces[v] = [(s, u[kept]) for s, u in self.pieces[v]]
        for w, table in self.adjacent[v].items():
            table = table[kept]
            self.adjacent[v][w], self.adjacent[w][v] = table, table.T
            self.touch(w)
        self.touch(v)

    def remove(self, v: int) -> None:
        for w in list(self.adjacent[v]):
            self.drop_edge(v, w)
            self.touch(w)
        self.alive[v] = False

    def decide(self, v: int, by: list[int], index: np.ndarray | np.integer) -> None:
        """`index` [K of each of `by`] of v's strategies; v leaves."""
        self.decisions.append(Decision(v, tuple((u, self.label[u]) for u in by), self.label[v][index]))
        self.remove(v)

    def result(self) -> Reduced:
        """What is left, renumbered."""
        nodes = np.flatnonzero(self.alive)
        number = np.full(self.problem.num_nodes, -1)
        number[nodes] = np.arange(len(nodes))
        pairs = [(u, v) for u in nodes.tolist() for v in self.adjacent[u] if u < v]
        memory = [self.memory(v) for v in nodes.tolist()]
        return Reduced(
            costs=[self.cost[v] for v in nodes], edges=number[np.array(pairs, np.int64).reshape(-1, 2)],
            tables=[np.ascontiguousarray(self.adjacent[u][v]) for u, v in pairs], spans=[s for s, _ in memory],
            usages=[x for _, x in memory], capacity=self.capacity, offset=self.offset, nodes=nodes,
            labels=[self.label[v] for v in nodes], decisions=self.decisions, num_nodes=self.problem.num_nodes,
        )  # fmt: skip
