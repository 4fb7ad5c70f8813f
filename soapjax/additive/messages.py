"""Tree-reweighted message passing: what each strategy costs, all other nodes at their best, approximately.

A sweep visits the nodes in an order and sends along every edge the least cost behind it (min-plus), the node's own
belief shared over its chains, then comes back (TRW-S, Kolmogorov 2006). Messages only move cost between tables, so
`bound` is a lower bound of any choice's cost whatever they are, and new node costs do no harm: the prices of memory may change
in between. Rounding follows the beliefs, node by node, those before given.

Nodes of one level (no edge among them, all that come before them visited) are computed together, tables of one shape stacked.
Program order is best for chains; for large cores hubs come first, which makes few levels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from soapjax.additive.core import Core

FEW_NODES = 1500  # cores up to this size are swept in program order


class Group(NamedTuple):
    """G edges from one level, tables of one shape; positions are of flat [sum of K] arrays and of flat messages."""

    tables: np.ndarray  # [G, K_from, K_to]
    sender: np.ndarray  # int [G]: node
    at_sender: np.ndarray  # int [G, K_from]: flat strategies
    at_target: np.ndarray  # int [G, K_to]
    out: np.ndarray  # int [G, K_to]: message slots
    back: np.ndarray  # int [G, K_from]: message slots of the other direction
    share: np.ndarray  # [G, 1] of the sender's belief


class Level(NamedTuple):
    sending: list[Group]
    # Edges from nodes visited before, as seen from there: [G, K_before, K_here].
    behind: list[Group]
    nodes: dict[int, np.ndarray]  # K -> nodes of the level with so many strategies


class Messages:
    def __init__(self, core: Core):
        self.core = core
        m = core.num_nodes
        degree = np.bincount(core.edges.ravel(), minlength=m)
        order = np.arange(m) if m <= FEW_NODES else np.argsort(-degree, kind="stable")
        rank = np.empty(m, np.int64)
        rank[order] = np.arange(m)
        first, second = core.edges.T
        earlier = np.where(rank[first] < rank[second], first, second)
        later = first + second - earlier
        counts = np.maximum(np.bincount(earlier, minlength=m), np.bincount(later, minlength=m))
        self.weight = 1 / np.maximum(1, counts)
        self.degree = np.maximum(1, degree)
        # Two messages per edge: into the first node of the edge, then into the second.
        sizes = np.stack([core.sizes[first], core.sizes[second]], axis=1)
        self.slots = np.concatenate([[0], np.cumsum(sizes)])[:-1].reshape(-1, 2)
        self.sent = np.zeros(int(sizes.sum()))
        self.incoming = np.zeros(int(core.offsets[-1]))
        flipped = earlier != first
        self.down, self.up = (self._levels(order, rank, earlier, later, flipped, sign) for sign in (1, -1))
        self.all_groups = [g for level in self.down for g in level.sending]
        self.alone = np.flatnonzero(degree == 0)

    def _levels(
        self, order: np.ndarray, rank: np.ndarray, earlier: np.ndarray, later: np.ndarray, flipped: np.ndarray, sign: int
    ) -> list[Level]:
        """Levels in the order of the sweep; down the order (sign 1) or back up."""
        core = self.core
        source, target = (earlier, later) if sign == 1 else (later, earlier)
        into: list[list[int]] = [[] for _ in range(core.num_nodes)]
        for u, v in zip(source.tolist(), target.tolist(), strict=True):
            into[v].append(u)
        level = [0] * core.num_nodes
        for v in order.tolist()[::sign]:
            level[v] = max([level[u] + 1 for u in into[v]], default=0)
        depth = np.array(level, np.int64)
        count = int(depth.max(initial=-1)) + 1
        is_first = source == core.edges[:, 0]
        sending = self._groups(source, target, is_first, depth[source], count)
        behind = self._groups(source, target, is_first, depth[target], count)
        nodes: list[dict[int, np.ndarray]] = [{} for _ in range(count)]
        by = np.lexsort((core.sizes, depth))
        cuts = np.flatnonzero(np.diff(depth[by]) | np.diff(core.sizes[by])) + 1
        for part in np.split(by, cuts) if len(by) else []:
            nodes[depth[part[0]]][int(core.sizes[part[0]])] = part
        return [Level(*x) for x in zip(sending, behind, nodes, strict=True)]

    def _groups(
        self, source: np.ndarray, target: np.ndarray, is_first: np.ndarray, depth: np.ndarray, count: int
    ) -> list[list[Group]]:
        core = self.core
        found: list[list[Group]] = [[] for _ in range(count)]
        if not len(source):
            return found
        by = np.lexsort((core.sizes[target], core.sizes[source], depth))
        same = np.diff(depth[by]) | np.diff(core.sizes[source[by]]) | np.diff(core.sizes[target[by]])
        for edges in np.split(by, np.flatnonzero(same) + 1):
            a, b = int(core.sizes[source[edges[0]]]), int(core.sizes[target[edges[0]]])
            tables = np.stack([core.tables[e] if is_first[e] else core.tables[e].T for e in edges])
            out = self.slots[edges, is_first[edges].astype(int)]
            back = self.slots[edges, 1 - is_first[edges].astype(int)]
            found[depth[edges[0]]].append(
                Group(
                    tables=tables, sender=source[edges], at_sender=core.offsets[source[edges], None] + np.arange(a),
                    at_target=core.offsets[target[edges], None] + np.arange(b), out=out[:, None] + np.arange(b),
                    back=back[:, None] + np.arange(a), share=self.weight[source[edges], None],
                )  # fmt: skip
            )
        return found

    def sweep(self, unary: np.ndarray) -> np.ndarray:
        """Forth and back, for node costs [sum of K]; the choice [M] that the beliefs round to on the way back."""
        sent, incoming = self.sent, self.incoming
        choice = np.zeros(self.core.num_nodes, np.int64)
        for levels, is_rounding in ((self.down, False), (self.up, True)):
            for level in levels:
                if is_rounding:
                    self._round(level, unary, choice)
                at, change = [], []
                for g in level.sending:
                    belief = (unary[g.at_sender] + incoming[g.at_sender]) * g.share - sent[g.back]
                    new = (g.tables + belief[:, :, None]).min(axis=1)
                    new -= new.min(axis=1, keepdims=True)
                    at.append(g.at_target.ravel())
                    change.append((new - sent[g.out]).ravel())
                    sent[g.out] = new
                if at:
                    np.add.at(incoming, np.concatenate(at), np.concatenate(change))
        # Anew: sums of differences lose digits.
        incoming[:] = 0
        for g in self.all_groups:
            np.add.at(incoming, g.at_target.ravel(), sent[g.out].ravel())
            np.add.at(incoming, g.at_sender.ravel(), sent[g.back].ravel())
        return choice

    def _round(self, level: Level, unary: np.ndarray, choice: np.ndarray) -> None:
        """Choices of a level's nodes: known neighbours by their tables, the others by their messages."""
        offsets = self.core.offsets
        known = np.zeros(len(unary))
        for g in level.behind:
            np.add.at(known, g.at_target, g.tables[np.arange(len(g.sender)), choice[g.sender]] - self.sent[g.out])
        for k, nodes in level.nodes.items():
            flat = offsets[nodes, None] + np.arange(k)
            choice[nodes] = (unary[flat] + self.incoming[flat] + known[flat]).argmin(axis=1)

    def beliefs(self, unary: np.ndarray) -> np.ndarray:
        """[sum of K]"""
        return unary + self.incoming

    def bound(self, unary: np.ndarray) -> float:
        """A lower bound of the cost: every edge with its share of the two beliefs, at its least."""
        beliefs = self.beliefs(unary)
        share = beliefs / np.repeat(self.degree, self.core.sizes)
        total = sum(float(beliefs[self.core.offsets[v] : self.core.offsets[v + 1]].min()) for v in self.alone.tolist())
        for g in self.all_groups:
            own = share[g.at_sender] - self.sent[g.back]
            other = share[g.at_target] - self.sent[g.out]
            total += float(((g.tables + own[:, :, None]).min(axis=1) + other).min(axis=1).sum())
        return total
