"""Values without an element, such as the gradient of the weights of no inputs: whatever is said to be read for them, nothing is.

A state-space model that is controlled by nothing has weights [states, 0], whose gradient is a product of cotangents and of what is
empty. XLA drops that product with the sums over the batch that it reads, and so does this. Of a product over a dim of no elements,
which is zero, XLA's partitioner takes no parts. Only where an argument is empty: a micro-batch of which a slice leaves nothing
(the largest third of two samples) keeps the equations of the whole batch, with which it is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Traced = Callable[[Callable[..., Any], list[Any], str, list[dict]], list[Any]]  # a function of ours, inlined over atoms


def without_operands(records: list[dict], avals: Mapping[int, Any], traced: Traced) -> list[dict]:
    """The same where what makes an empty value of values that are not, or a product of empty ones, reads nothing."""
    found: list[dict] = []
    for r in records:
        if r.get("body") is not None:
            args, results, inner = r["body"]
            found.append(dict(r, body=(args, results, without_operands(inner, avals, traced))))
        elif "const" not in r and _reads_in_vain(r, avals):
            made = avals[r["outputs"][0]]
            traced(lambda made=made: jnp.zeros(made.shape, made.dtype), [], r["stack"], begin := list[dict]())
            found += [*begin[:-1], dict(begin[-1], outputs=r["outputs"], trip=r.get("trip"))]
        else:
            found.append(r)
    return found


def _reads_in_vain(record: dict, avals: Mapping[int, Any]) -> bool:
    made = [avals[o] for o in record["outputs"]]
    if len(made) != 1 or not made[0].shape or record["effects"] or jax.dtypes.issubdtype(made[0].dtype, jax.dtypes.extended):
        return False
    is_full = [avals[a].size > 0 for a in record["inputs"] if isinstance(a, int)]
    return any(is_full) if made[0].size == 0 else record["primitive"].name == "dot_general" and not all(is_full)
