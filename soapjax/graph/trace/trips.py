"""Where the equations of an unrolled loop come from, so that a program which holds many trips of it may be one loop again,
and how many values of a loop are constants and carried."""

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


def loop_params(params: dict[str, Any]) -> dict[str, Any]:
    """A scan's parameters, with the numbers of constants and of carried values (jax 0.11 has trees of both instead)."""
    if "num_consts" in params:
        return params
    consts, carry, _ = (len(list(tree)) for tree in params["ft_in"].unpack())
    return {k: v for k, v in params.items() if k not in ("ft_in", "ft_out")} | dict(num_consts=consts, num_carry=carry)
