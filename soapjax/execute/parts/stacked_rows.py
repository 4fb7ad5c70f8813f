"""Rows of values as one array each.

Programs of a stage that loop over its layers (trip_loops.py) hand on what belongs to all of them as one array [layers, ...]. Such a
*stack* is a value of its own, with an id beside those of its rows; a program that has the one finds the other in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax


class StackedRows:
    """All stacks of a step.

    Args:
      avals: of the step's values, to which those of stacks are added.
    """

    def __init__(self, avals: dict[int, Any]):
        self.avals = avals
        self.rows: dict[int, tuple[int, ...]] = {}  # stack -> its rows
        self.like: dict[int, int] = {}  # stack -> the row that it is laid out as
        self.within: dict[int, list[tuple[int, int]]] = {}  # row -> (stack, place)
        self._ids: dict[tuple[int, ...], int] = {}
        self._next = max(avals, default=-1) + 1

    def of(self, rows: Sequence[int], like: int | None = None) -> int:
        """The stack of some rows.

        Args:
          like: one of them, as all are laid out.
        """
        rows = tuple(rows)
        if rows not in self._ids:
            found = self._ids[rows] = self._next
            self._next += 1
            aval = self.avals[rows[0]]
            self.avals[found] = aval.update(shape=(len(rows), *aval.shape))
            self.rows[found], self.like[found] = rows, rows[0] if like is None else like
            for t, v in enumerate(rows):
                self.within.setdefault(v, []).append((found, t))
        return self._ids[rows]

    def holding(self, row: int) -> list[int]:
        """The stacks with a row."""
        return [stack for stack, _ in self.within.get(row, ())]


class RowsAndStacks(dict[Any, Any]):
    """Values by id: a row is found in a stack that is there, a stack is put together of rows."""

    def __init__(self, values: Mapping[Any, Any], stacks: StackedRows | None):
        super().__init__(values)
        self._stacks = stacks

    def __missing__(self, value: Any) -> Any:
        stacks = self._stacks
        if stacks is None or not isinstance(value, int):
            raise KeyError(value)
        if value in stacks.rows:
            rows = [self[v] for v in stacks.rows[value]]
            self[value] = found = jax.tree.map(lambda *xs: jax.numpy.stack(xs), *rows)
            return found
        for stack, t in stacks.within.get(value, ()):
            if stack in self:
                return jax.tree.map(lambda x, t=t: x[t], self[stack])  # a sum over devices, perhaps (partial.py)
        raise KeyError(value)
