"""The rules of decompositions and solvers: matrices of a batch are split between devices, one matrix never is.

The partitioner runs a library call on each device's matrices without communication where only the batch is split.
"""

from __future__ import annotations

import math

from soapjax.graph.rules.rule_table import BLOCKED, Labels, MadeOf, register
from soapjax.graph.trace.program import FlatEqn

# FLOPs of one matrix of m rows and n columns, or with k right-hand sides: Golub & Van Loan, Matrix Computations (4th ed.),
# sections 3.1, 3.2, 4.2, 5.2, 7.5, 8.3 and 8.6; the leading term, and of iterations their usual number.
_FLOPS = {
    "cholesky": lambda m, n, k: n**3 / 3,
    "cholesky_update": lambda m, n, k: 2 * n**2,
    "lu": lambda m, n, k: m * n * min(m, n) - min(m, n) ** 3 / 3,
    "lu_pivots_to_permutation": lambda m, n, k: 0,
    "triangular_solve": lambda m, n, k: n**2 * k,
    "tridiagonal_solve": lambda m, n, k: 8 * n * k,
    "geqrf": lambda m, n, k: 2 * min(m, n) ** 2 * (max(m, n) - min(m, n) / 3),
    "geqp3": lambda m, n, k: 2 * min(m, n) ** 2 * (max(m, n) - min(m, n) / 3),
    "qr": lambda m, n, k: 4 * min(m, n) ** 2 * (max(m, n) - min(m, n) / 3),
    "householder_product": lambda m, n, k: 2 * min(m, n) ** 2 * (max(m, n) - min(m, n) / 3),
    "hessenberg": lambda m, n, k: 10 * n**3 / 3,
    "tridiagonal": lambda m, n, k: 4 * n**3 / 3,
    "eigh": lambda m, n, k: 9 * n**3,
    "eig": lambda m, n, k: 25 * n**3,
    "schur": lambda m, n, k: 25 * n**3,
    "svd": lambda m, n, k: 4 * m * n * min(m, n) + 22 * min(m, n) ** 3,
}
NAMES = tuple(_FLOPS)
_VECTORS = {"lu_pivots_to_permutation", "tridiagonal_solve"}  # whose first operand is a vector of each problem


@register(*NAMES)
def _batched(eqn: FlatEqn, ins, outs) -> Labels:
    batch = range(_batch_rank(eqn.name, ins))

    def labelled(shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(d if d in batch else BLOCKED for d in range(len(shape)))

    made_of = []
    if eqn.name == "triangular_solve":  # right-hand sides, which are samples where inputs are whitened
        side = len(ins[1]) - (1 if eqn.params["left_side"] else 2)
        made_of.append(MadeOf(1, side, 0, side))
    return Labels(tuple(map(labelled, ins)), tuple(map(labelled, outs)), made_of=tuple(made_of))


def linalg_flops(eqn: FlatEqn, ins: list[tuple[int, ...]]) -> float:
    """FLOPs of a decomposition or solver for operands of these shapes."""
    name, batch = eqn.name, _batch_rank(eqn.name, ins)
    m, n = (ins[0][batch:] * 2)[:2] if name in _VECTORS else ins[0][batch:]
    side = -1 if eqn.params.get("left_side", True) else -2  # of x a = b the right-hand sides are rows
    k = ins[-1][side] if len(ins[-1]) > batch + 1 else 1
    return float(math.prod(ins[0][:batch]) * _FLOPS[name](m, n, k))


def _batch_rank(name: str, ins: list[tuple[int, ...]]) -> int:
    return len(ins[0]) - (1 if name in _VECTORS else 2)
