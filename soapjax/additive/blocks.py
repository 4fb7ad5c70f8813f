"""Blocks solved exactly: variable elimination (min-plus) over all nodes, some of them with fewer strategies.

A plan says in which order nodes are eliminated. Where an elimination would make too large a table, a random node
around it keeps only some of its strategies, the present one among them, and so on until the table is small.
What remains has small width: one pass of min-plus products and one pass back give the best of all
these choices together, which is never worse than the present one (large-neighbourhood search).
"""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

import numpy as np

from soapjax.additive.core import Core


class EliminationOrder(NamedTuple):
    order: list[tuple[int, tuple[int, ...]]]  # node, and the neighbours left when it goes
    domains: dict[int, np.ndarray]  # strategies of the nodes that do not have all of theirs


class Blocks:
    def __init__(self, core: Core):
        self.core = core
        self.adjacent: list[dict[int, np.ndarray]] = [{} for _ in range(core.num_nodes)]
        for (u, v), t in zip(core.edges.tolist(), core.tables, strict=True):
            self.adjacent[u][v], self.adjacent[v][u] = t, t.T
        self.log_sizes = np.log(core.sizes).tolist()

    def plan(
        self, rng: np.random.Generator, free: np.ndarray, choice: np.ndarray, max_table: float, beliefs: np.ndarray | None = None
    ) -> EliminationOrder:
        """Eliminates the `free` nodes (mask) by table size; a table has at most `max_table` entries.

        A node that must give way keeps random strategies, or those that `beliefs` say are cheap.
        """
        limit = math.log(max_table)
        log_sizes = self.log_sizes.copy()
        domains: dict[int, np.ndarray] = {}
        neighbours = {v: {w for w in self.adjacent[v] if free[w]} for v in np.flatnonzero(free).tolist()}
        noise = (rng.random(len(free)) * rng.choice([0.3, 1.0, 3.0])).tolist()
        # Which nodes give way differs from plan to plan by orders of magnitude: else it is always the same few.
        gives_way = np.exp(rng.choice([1.0, 3.0, 6.0]) * rng.standard_normal(len(free)))
        share = float(rng.choice([0.0, 0.3, 0.5, 0.7]))

        def size(v: int) -> float:
            return log_sizes[v] + sum([log_sizes[w] for w in neighbours[v]])

        heap = [(size(v) + noise[v], v) for v in neighbours]
        heapq.heapify(heap)
        order = []
        while heap:
            key, v = heapq.heappop(heap)
            if v not in neighbours:
                continue
            now = size(v)
            if now + noise[v] != key:
                heapq.heappush(heap, (now + noise[v], v))
                continue
            around = neighbours[v]
            if now > limit:
                candidates = [*around, v]
                weight = np.array([gives_way[w] * (log_sizes[w] + 1e-9) for w in candidates])
                w = candidates[int(rng.choice(len(candidates), p=weight / weight.sum()))]
                had = domains.get(w, np.arange(self.core.sizes[w]))
                keep = max(0, min(int(len(had) * share), len(had) - 2))
                domains[w] = self._fewer(rng, w, had[had != choice[w]], choice[w], keep, beliefs)
                log_sizes[w] = math.log(keep + 1)
                changed = neighbours[w]
                if keep == 0:
                    changed = neighbours.pop(w)
                    for x in changed:
                        neighbours[x].discard(w)
                for x in {*changed, w, v}:
                    if x in neighbours:
                        heapq.heappush(heap, (size(x) + noise[x], x))
                continue
            order.append((v, tuple(around)))
            del neighbours[v]
            for x in around:
                neighbours[x] |= around
                neighbours[x].discard(x)
                neighbours[x].discard(v)
            for x in around:
                heapq.heappush(heap, (size(x) + noise[x], x))
        # Neighbours that were fixed later are constants.
        is_left = {v for v, _ in order}
        return EliminationOrder([(v, tuple([w for w in around if w in is_left])) for v, around in order], domains)

    def _fewer(
        self, rng: np.random.Generator, w: int, others: np.ndarray, chosen: int, keep: int, beliefs: np.ndarray | None
    ) -> np.ndarray:  # fmt: skip
        """The `chosen` strategy of node `w`, and so many of the others."""
        if keep and beliefs is not None:
            others = others[np.argpartition(beliefs[self.core.offsets[w] + others], keep - 1)[:keep]]
        else:
            others = rng.choice(others, keep, replace=False) if keep else others[:0]
        return np.sort(np.append(others, chosen))

    def solve(self, plan: EliminationOrder, choice: np.ndarray, unary: np.ndarray) -> np.ndarray:
        """The best choice within the plan's domains for these node costs [sum of K]; all else as in `choice`."""
        offsets, domains = self.core.offsets, plan.domains
        position = {v: i for i, (v, _) in enumerate(plan.order)}
        own = {}
        # Factors wait at the first of their nodes to be eliminated.
        waiting: dict[int, list[tuple[tuple[int, ...], np.ndarray]]] = {}
        for v, _ in plan.order:
            cost = unary[offsets[v] : offsets[v + 1]]
            domain = domains.get(v)
            if domain is not None:
                cost = cost[domain]
            for w, table in self.adjacent[v].items():
                there = position.get(w)
                if there is None:
                    cost = cost + (table[:, choice[w]] if domain is None else table[domain, choice[w]])
                elif position[v] < there:
                    if domain is not None:
                        table = table[domain]
                    if w in domains:
                        table = table[:, domains[w]]
                    waiting.setdefault(v, []).append(((v, w), table))
            own[v] = cost
        answers = []
        for v, around in plan.order:
            index = {w: i for i, w in enumerate(around, 1)}
            index[v] = 0
            dims = len(around) + 1
            total = own[v].reshape((-1,) + (1,) * len(around))
            for variables, factor in sorted(waiting.pop(v, []), key=lambda f: f[1].size):
                where = [index[w] for w in variables]
                shape = [1] * dims
                for axis, n in zip(where, factor.shape, strict=True):
                    shape[axis] = n
                total = total + factor.transpose(sorted(range(len(where)), key=where.__getitem__)).reshape(shape)
            if around:
                best = total.argmin(axis=0)
                answers.append((v, around, best))
                rest = total.min(axis=0)
                first = min(around, key=position.__getitem__)
                if len(around) == 1:
                    own[first] = own[first] + rest
                else:
                    waiting.setdefault(first, []).append((around, rest))
            else:
                answers.append((v, around, int(total.argmin())))
        local: dict[int, int] = {}
        out = choice.copy()
        for v, around, best in reversed(answers):
            k = local[v] = int(best[tuple([local[w] for w in around])]) if around else best
            out[v] = domains[v][k] if v in domains else k
        return out
