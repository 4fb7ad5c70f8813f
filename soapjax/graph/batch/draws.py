"""Where a step draws random numbers from a key that is the same for all micro-batches.

A step draws with `random_bits(key)`, whatever the key was derived by: split, fold_in of a step counter, Flax's `make_rng`. Traced
for a micro-batch, it has the key of the whole step, and so all micro-batches would draw alike. Executors therefore fold the
number of the micro-batch in where numbers are drawn (execute/spmd/evaluator.py), and nowhere else: keys that the step returns stay
what they were. A key that comes with the data differs already, and stays as it is: every sample then draws as in the whole batch.

Loops that JAX keeps closed (`while`, `cond`) are given keys that have the number in them, where their keys are typed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax

from soapjax.graph.trace.dataflow import follow
from soapjax.graph.trace.program import Program

DRAWS = ("random_", "threefry")  # how the names of primitives begin by which random numbers are drawn
_DRAWS = {"random_bits", "random_gamma"}
_CLOSED = {"while", "cond"}


def is_key(aval: Any) -> bool:
    return hasattr(aval, "dtype") and jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)


def draws_alike(program: Program, batch: Collection[int]) -> frozenset[str]:
    """Keys of the equations, at every level, that draw by a key which does not depend on the values `batch`."""
    follow(program, varying := set(batch))
    found = set()
    for eqn in program.leaves:
        keys = [isinstance(a, int) and a in varying for a in eqn.inputs if is_key(program.aval(a))]
        if eqn.name in _DRAWS | _CLOSED and keys and not all(keys):
            found.add(eqn.key)
    return frozenset(found)
