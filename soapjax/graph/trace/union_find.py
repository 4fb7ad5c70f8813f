"""Union-find over hashable nodes. Which node represents a class depends on the order of unions: results must not."""

from __future__ import annotations

from collections.abc import Hashable


class UnionFind:
    def __init__(self) -> None:
        self.parent: dict[Hashable, Hashable] = {}

    def find(self, x: Hashable) -> Hashable:
        parent = self.parent
        root = parent.setdefault(x, x)
        # A root is its own parent, as one object: no comparing of tuples.
        if parent[root] is root:
            return root
        while (above := parent[root]) is not root:
            root = above
        while (above := parent[x]) is not root:
            parent[x], x = root, above
        return root

    def union(self, a: Hashable, b: Hashable) -> None:
        ra, rb = self.find(a), self.find(b)
        if ra is not rb:
            self.parent[rb] = ra
