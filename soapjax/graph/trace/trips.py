"""Where the equations of an unrolled loop come from, so that a program which holds many trips of it may be one loop again."""

from __future__ import annotations

from typing import Any, NamedTuple


class Trip(NamedTuple):
    """One equation's place.

    of: which equation of the loop it is; alike for all trips.
    row: which trip, counted by what the loop reads row by row; whatever its direction.
    """

    of: tuple[Any, ...]
    row: int

    def of_operand(self, k: int) -> Trip:
        """Of an equation that is put before the k-th operand of this one."""
        return Trip(("operand", k, *self.of), self.row)
