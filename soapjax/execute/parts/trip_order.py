"""In which order families of equations run as loops, and what stands between these."""

from __future__ import annotations

import collections
import graphlib
from collections.abc import Sequence

import numpy as np
import scipy

from soapjax.execute.parts.trip_families import Family
from soapjax.graph.trace.program import Atom, FlatEqn

SAME, FORWARDS, BACKWARDS = 0, 1, -1  # what a family reads of another: of its own trip, of the row before, of the row after


class Irregular(Exception):
    """Trips that differ in a way that is not known here."""


class TripOrder:
    """When each family and each other equation is evaluated: loops at even times, other equations at odd ones.

    `read[f][j]`: (family, output, which row of it) of the j-th operand of a family, where every row reads that.
    """

    def __init__(self, families: list[Family], eqns: Sequence[FlatEqn], rows: list[int]):
        self.families, self.rows = families, rows
        rolled = {e.key for family in families for e in family.eqns.values()}
        self.singles = [e for e in eqns if e.key not in rolled]
        self.maker: dict[int, tuple[int, int, int | None]] = {}  # value -> node, output, row
        for f, family in enumerate(families):
            self.maker.update({o: (f, j, t) for t, e in family.eqns.items() for j, o in enumerate(e.outputs)})
        for s, e in enumerate(self.singles):
            self.maker.update({o: (len(families) + s, j, None) for j, o in enumerate(e.outputs)})
        # (maker, reader) -> kinds; None: of other rows.
        self.edges: dict[tuple[int, int], set[int | None]] = collections.defaultdict(set)
        self.read: list[list[tuple[int, int, int] | None]] = [self._reads(f) for f in range(len(families))]
        for s, e in enumerate(self.singles):
            for a in e.inputs:
                if isinstance(a, int) and a in self.maker:
                    self.edges[self.maker[a][0], len(families) + s].add(None)
        self.direction: dict[int, int] = {}  # of loops, by time
        self.time = self._times()

    def _reads(self, f: int) -> list[tuple[int, int, int] | None]:
        family = self.families[f]
        found = []
        for j in range(len(family.eqns[self.rows[0]].inputs)):
            atoms = [family.eqns[t].inputs[j] for t in self.rows]
            way = self._way(atoms)
            found.append(way)
            if way is not None:
                self.edges[way[0], f].add(way[2])
            first = {FORWARDS: atoms[:1], BACKWARDS: atoms[-1:], SAME: []}
            for a in atoms if way is None else first[way[2]]:
                if isinstance(a, int) and a in self.maker:
                    self.edges[self.maker[a][0], f].add(None)
        return found

    def _way(self, atoms: Sequence[Atom]) -> tuple[int, int, int] | None:
        """(family, output, which row) where all rows read it of one family: the first, or last, of a loop apart."""
        made = [self.maker.get(a, (-1, 0, None)) if isinstance(a, int) else (-1, 0, None) for a in atoms]
        for way, own in ((SAME, slice(None)), (FORWARDS, slice(1, None)), (BACKWARDS, slice(None, -1))):
            mine, rows = made[own], self.rows[own]
            g, j, row = mine[0]
            if row is not None and all(m == (g, j, t - way) for m, t in zip(mine, rows, strict=True)):
                return g, j, way
        return None

    def _times(self) -> list[int]:
        num = len(self.families) + len(self.singles)
        pairs = list(self.edges)
        matrix = scipy.sparse.coo_array((np.ones(len(pairs)), ([a for a, _ in pairs], [b for _, b in pairs])), shape=(num, num))
        _, of = scipy.sparse.csgraph.connected_components(matrix, directed=True, connection="strong")
        members: dict[int, list[int]] = collections.defaultdict(list)
        for node, c in enumerate(of.tolist()):
            members[c].append(node)
        before: dict[int, dict[int, set[int | None]]] = collections.defaultdict(lambda: collections.defaultdict(set))
        after: dict[int, dict[int, set[int | None]]] = collections.defaultdict(lambda: collections.defaultdict(set))
        own: dict[int, set[int | None]] = collections.defaultdict(set)
        for (a, b), kinds in self.edges.items():
            if of[a] == of[b]:
                own[of[a]] |= kinds
            else:
                before[of[b]][of[a]] |= kinds
                after[of[a]][of[b]] |= kinds
        order = list(graphlib.TopologicalSorter({c: before[c] for c in members}).static_order())
        ways = {c: self._direction(members[c], own[c], before[c]) for c in order}
        time: dict[int, int] = {}
        for c in order:
            time[c] = self._earliest(c, members, ways, before[c], time)
        for c in reversed(order):
            if ways[c] == SAME and members[c][0] < len(self.families) and after[c]:
                time[c] = max(time[c], min(self._latest(time[d], kinds, members[d]) for d, kinds in after[c].items()))
        return [time[int(c)] for c in of]

    def _direction(self, nodes: list[int], own: set[int | None], before: dict[int, set[int | None]]) -> int:
        """The order of trips in which a component can run; SAME: any."""
        is_single = nodes[0] >= len(self.families)
        if own and (None in own or {FORWARDS, BACKWARDS} <= own or any(n >= len(self.families) for n in nodes)):
            raise Irregular
        if is_single:
            return SAME
        ways = own - {SAME} or {k for kinds in before.values() for k in kinds} & {FORWARDS, BACKWARDS}
        return ways.pop() if len(ways) == 1 else SAME

    def _earliest(
        self, c: int, members: dict[int, list[int]], ways: dict[int, int], before: dict[int, set[int | None]], time: dict[int, int]
    ) -> int:  # fmt: skip
        num = len(self.families)
        if members[c][0] >= num:
            return max([-1, *(time[d] if members[d][0] >= num else time[d] + 1 for d in before)])
        found = 0
        for d, kinds in before.items():
            if members[d][0] >= num:
                found = max(found, time[d] + 1)
            else:
                goes = kinds <= {SAME, ways[c]} and (ways[c] == SAME or self.direction.get(time[d], ways[c]) == ways[c])
                found = max(found, time[d] if goes else time[d] + 2)
        if ways[c] != SAME:
            while self.direction.get(found, ways[c]) != ways[c]:
                found += 2
            self.direction[found] = ways[c]
        return found

    def _latest(self, time: int, kinds: set[int | None], nodes: list[int]) -> int:
        if nodes[0] >= len(self.families):
            return time - 1
        return time if kinds <= {SAME, self.direction.get(time, FORWARDS)} else time - 2
