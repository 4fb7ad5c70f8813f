"""Exact reductions: a smaller problem with the same optimum, and the way back.

Real sharding problems are mostly chains of operators that must agree with a neighbour, so that far fewer
choices are free than there are nodes. Until nothing changes:

* a strategy that is forbidden, or has no allowed partner over some edge, goes;
* a node that its neighbour decides (one allowed partner for each of the neighbour's strategies) becomes part of it;
* an edge whose table is a sum f(a) + g(b) becomes node costs;
* a node with one neighbour is decided by it where its cheapest answer also uses the least memory;
* a node without memory and with two neighbours becomes an edge between them (min-plus product);
* a strategy that another one beats whatever the neighbours do, with no more memory at any time, goes
  (dead-end elimination, Goldstein 1994);
* usage that all strategies share moves to the limit; times that cannot exceed it go.

Every step is exact where a solution without forbidden choices exists, and each can be the last: a deadline
ends the reduction early. `Reduced.expand` gives the strategies of the whole problem.
"""

from __future__ import annotations

import time

import numpy as np

from soapjax.additive.additive_problem import AdditiveProblem
from soapjax.additive.shrinking import BIG, Reduced, Shrinking

MAX_PAIR_TABLE = 40_000  # entries of a table that an elimination may make
MAX_PRODUCT = 3_000_000  # of a min-plus product
MAX_DOMINANCE = 40_000_000  # operations for one node's dominance test


class Reducer(Shrinking):
    """Applies the rules; every method keeps the optimum."""

    def __init__(self, problem: AdditiveProblem, deadline: float = float("inf")):
        super().__init__(problem)
        self.deadline = deadline

    # The rules; each returns whether it did something that ends the visit of v.

    def drop_forbidden(self, v: int) -> bool:
        allowed = self.cost[v] < BIG
        for w, table in self.changed("support", v):
            allowed &= table.min(axis=1) < BIG
            self.seen["support"][v][w] = table
        if allowed.all():
            return False
        if not allowed.any():
            raise NoAllowedChoice(f"node {v}")
        self.keep(v, allowed)
        return False

    def only_one(self, v: int) -> bool:
        if len(self.cost[v]) > 1:
            return False
        self.memory(v)
        self.offset += self.cost[v][0]
        for w, table in self.adjacent[v].items():
            self.cost[w] = np.minimum(self.cost[w] + table[0], BIG)
        self.decide(v, [], np.int64(0))
        return True

    def split_sums(self, v: int) -> bool:
        """Tables f(a) + g(b) become node costs."""
        for w, table in self.changed("sum", v):
            self.seen["sum"][v][w] = table
            if w > v and table.shape[0] > 1 and table.shape[1] > 1:
                if table[0, 0] + table[1, 1] != table[0, 1] + table[1, 0]:  # most tables end here
                    continue
                row, column = table[0], table[:, 0] - table[0, 0]
                if (np.abs(row) < BIG).all() and (table == column[:, None] + row).all():
                    self.cost[w] = np.minimum(self.cost[w] + row, BIG)
                    self.cost[v] = np.minimum(self.cost[v] + column, BIG)
                    self.drop_edge(v, w)
                    self.touch(w)
        return False

    def alone(self, v: int) -> bool:
        """No neighbours, and no memory: decided."""
        if self.adjacent[v]:
            return False
        _, usage = self.memory(v)
        if usage.shape[1] == 0:
            best = int(self.cost[v].argmin())
            self.offset += self.cost[v][best]
            self.decide(v, [], np.int64(best))
            return True
        return False

    def leaf(self, v: int) -> bool:
        """One neighbour u: v follows it where, for each of u's strategies, v's cheapest also needs least memory."""
        if len(self.adjacent[v]) != 1:
            return False
        ((u, table),) = self.adjacent[v].items()
        spans, usage = self.memory(v)
        if table.size * max(1, len(spans)) > MAX_PRODUCT:
            return False
        value = np.minimum(table + self.cost[v][:, None], BIG)
        lowest = value.min(axis=0)
        columns = np.arange(table.shape[1])
        if len(spans):
            ties = np.where(value == lowest, usage.sum(axis=1)[:, None], np.inf)
            best = ties.argmin(axis=0)
            allowed = value < BIG
            for m in range(len(spans)):
                least = np.where(allowed, usage[:, m, None], np.inf).min(axis=0)
                if (usage[best, m] > least).any():
                    return False
        else:
            best = value.argmin(axis=0)
        self.absorb(v, u, best, value[best, columns])
        return True

    def absorb(self, v: int, u: int, best: np.ndarray, value: np.ndarray) -> None:
        """v's strategy is best[u's]; its cost and memory become u's; its other edges become u's."""
        self.cost[u] = np.minimum(self.cost[u] + value, BIG)
        self.pieces[u] = self.pieces[u] + [(s, x[best]) for s, x in self.pieces[v]]
        others = [(w, table) for w, table in self.adjacent[v].items() if w != u]
        self.decide(v, [u], best)
        for w, table in others:
            self.add_edge(u, w, table[best])
        self.touch(u)

    def follower(self, v: int) -> bool:
        """Where a neighbour's strategy leaves v one allowed answer, v is part of that neighbour."""
        for u, table in self.changed("follower", v):
            if len(self.adjacent[u]) + len(self.adjacent[v]) > 200 and len(self.adjacent[v]) > 20:
                continue
            allowed = table < BIG
            if (allowed.sum(axis=0) == 1).all():
                if any(table.shape[1] * t.shape[1] > max(MAX_PAIR_TABLE, t.size) for w, t in self.adjacent[v].items() if w != u):
                    continue
                best = allowed.argmax(axis=0)
                value = np.minimum(table[best, np.arange(table.shape[1])] + self.cost[v][best], BIG)
                self.absorb(v, u, best, value)
                return True
            self.seen["follower"][v][u] = table
        return False

    def link(self, v: int) -> bool:
        """Two neighbours, no memory: the min-plus product of the two tables."""
        if len(self.adjacent[v]) != 2:
            return False
        (u, a), (w, b) = self.adjacent[v].items()
        if a.shape[1] * b.shape[1] > MAX_PAIR_TABLE or a.size * b.shape[1] > MAX_PRODUCT:
            return False
        if self.memory(v)[1].shape[1]:
            return False
        value = (a + self.cost[v][:, None])[:, :, None] + b[:, None, :]
        best = value.argmin(axis=0)
        table = np.minimum(np.take_along_axis(value, best[None], axis=0)[0], BIG)
        self.decide(v, [u, w], best)
        self.add_edge(u, w, table)
        return True

    def dominated(self, v: int) -> bool:
        """Drops strategies that another one beats whatever the neighbours do."""
        k = len(self.cost[v])
        work = k * k * (sum(t.shape[1] for t in self.adjacent[v].values()) + 1)
        if k == 1 or work > MAX_DOMINANCE:
            return False
        _, usage = self.memory(v)
        # gap[a, b]: the least that a costs more than b.
        gap = self.cost[v][:, None] - self.cost[v][None]
        for table in self.adjacent[v].values():
            forbidden_by_a = table >= BIG
            # Where a is forbidden it is not chosen: b cannot be worse there.
            shifted = np.where(forbidden_by_a, np.inf, table)
            gap = gap + (shifted[:, None, :] - table[None]).min(axis=2)
        with np.errstate(invalid="ignore"):
            beats = gap >= 0
        if usage.shape[1]:
            # In chunks: the comparison is [K, K, m].
            for m in range(0, usage.shape[1], 64):
                beats &= (usage[:, None, m : m + 64] >= usage[None, :, m : m + 64]).all(axis=2)
        np.fill_diagonal(beats, False)
        if not beats.any():
            return False
        # Of two that beat each other the first stays.
        kept = np.ones(k, bool)
        for a in np.flatnonzero(beats.any(axis=1))[::-1]:
            if (beats[a] & kept).any():
                kept[a] = False
        self.keep(v, kept)
        return False

    # The order of it all.

    def settle(self) -> None:
        """The cheap rules until nothing changes."""
        rules = (self.drop_forbidden, self.only_one, self.split_sums, self.alone, self.leaf, self.follower, self.link)
        while self.queue and time.monotonic() < self.deadline:
            batch, self.queue = self.queue, []
            for v in batch:
                self.queued[v] = False
                if self.alive[v]:
                    for rule in rules:
                        if rule(v):
                            break

    def drop_slack_times(self) -> None:
        """Times that cannot exceed the limit go, and with them memory that counts at no other; nodes left without wake up."""
        lives = np.flatnonzero(self.alive)
        num_times = len(self.capacity)
        change = np.zeros(num_times + 1)
        starts, ends = np.zeros(num_times + 1, bool), np.zeros(num_times + 1, bool)
        memory = {}
        for v in lives.tolist():
            spans, usage = memory[v] = self.memory(v)
            np.add.at(change, spans[:, 0], usage.max(axis=0, initial=0))
            np.subtract.at(change, spans[:, 1], usage.max(axis=0, initial=0))
            starts[spans[:, 0]] = True
            ends[spans[:, 1]] = True
        most = change.cumsum()[:num_times]
        keep = most > self.capacity * (1 + 1e-12)
        # Of two neighbouring times where nothing starts (ends) in between, only the one with more alive counts.
        stack: list[int] = []
        started = np.cumsum(starts[:num_times])
        ended = np.cumsum(ends[:num_times])
        for t in np.flatnonzero(keep).tolist():
            is_needed = True
            while stack:
                s = stack[-1]
                if ended[t] == ended[s] and self.capacity[t] <= self.capacity[s]:
                    stack.pop()  # all that is alive at s is alive at t
                elif started[t] == started[s] and self.capacity[s] <= self.capacity[t]:
                    is_needed = False
                    break
                else:
                    break
            if is_needed:
                stack.append(t)
        kept = np.array(stack, np.int64)
        if len(kept) == num_times:
            return
        new = np.searchsorted(kept, np.arange(num_times + 1))
        self.capacity = self.capacity[kept]
        for v, (spans, usage) in memory.items():
            if len(spans):
                spans = new[spans]
                inside = spans[:, 0] < spans[:, 1]
                self.pieces[v] = [(spans[inside], usage[:, inside])] if inside.any() else []
                self.touch(v)

    def run(self) -> Reduced:
        self.settle()
        dominance_of = np.full(self.problem.num_nodes, -1)
        while time.monotonic() < self.deadline:
            before = (self.alive.sum(), len(self.decisions), sum(len(self.cost[v]) for v in np.flatnonzero(self.alive)))
            self.drop_slack_times()
            self.settle()
            for v in np.flatnonzero(self.alive).tolist():
                if time.monotonic() > self.deadline:
                    break
                size = len(self.cost[v]) + sum(t.shape[1] for t in self.adjacent[v].values()) * 10_000
                if self.alive[v] and dominance_of[v] != size:
                    self.dominated(v)
                    dominance_of[v] = size
            self.settle()
            if before == (self.alive.sum(), len(self.decisions), sum(len(self.cost[v]) for v in np.flatnonzero(self.alive))):
                break
        self.drop_slack_times()
        return self.result()


class NoAllowedChoice(Exception):
    """Every strategy of a node is forbidden, by itself or by a neighbour: no solution without violations exists."""


def reduce_problem(problem: AdditiveProblem, deadline: float = float("inf")) -> Reduced:
    return Reducer(problem, deadline).run()
