"""One kernel instead of hundreds: how the loops of the jitted simulators are compiled.

XLA's CPU runtime runs every operation of a loop's body as a kernel of its own, at half a microsecond of overhead per turn: for
a few hundred numbers at a time that is most of the work. It compiles loops that it takes to be small as a whole, as one
function without that overhead. `as_one_kernel` asks for the same by name; measured on the walk over 2,600
items with 256 strategies side by side: 0.9 ms instead of 3.5, and half the time to compile.

It is a request: a version of XLA that does not know it, or another backend, gives the same numbers at the old speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Literal, jaxpr_as_fun

from soapjax.jit.array_types import Array, Scalar

# The mark that XLA's own SmallWhileLoopHoistingPass leaves on what it compiles so; a call that is inlined would lose it.
ATTRIBUTES = {"xla_cpu_small_call": "true", "inlineable": "false"}
LARGEST_CONSTANT = 4096  # bytes of an argument that is known when the program around the kernel is compiled


def as_one_kernel(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` of pytrees of arrays, compiled as one function of those leaves that it reads.

    No scatters, sorts, matrix products or calls of libraries in it, no reductions of
    more than a few numbers into one, and no arrays that it closes over.
    """

    def called(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        # XLA (jaxlib 0.10) aborts the process on an argument of such a function that is a constant of more than 10 KiB.
        if any(not isinstance(x, jax.core.Tracer) and np.asarray(x).nbytes > LARGEST_CONSTANT for x in leaves):
            return jax.jit(fn)(*args)
        leaves = [jnp.asarray(x) for x in leaves]
        closed, out = jax.make_jaxpr(lambda *x: fn(*jax.tree.unflatten(tree, x)), return_shape=True)(*leaves)
        # XLA (jaxlib 0.10) aborts the process on an argument of such a function that nothing reads.
        read = {v for e in closed.jaxpr.eqns for v in e.invars if not isinstance(v, Literal)}
        read |= {v for v in closed.jaxpr.outvars if not isinstance(v, Literal)}
        is_read = [v in read and x.size > 0 for v, x in zip(closed.jaxpr.invars, leaves, strict=True)]

        def kernel(*given: jax.Array) -> list[jax.Array]:
            rest = iter(given)
            return jaxpr_as_fun(closed)(
                *(next(rest) if is_read[i] else jnp.zeros(x.shape, x.dtype) for i, x in enumerate(leaves))
            )

        found = jax.jit(kernel)(*(x for x, is_given in zip(leaves, is_read, strict=True) if is_given))
        return jax.tree.unflatten(jax.tree.structure(out), [set_xla_metadata(x, **ATTRIBUTES) for x in found])

    return called


def in_kernel(fn: Callable[..., Any], *of: Any) -> Any:
    """`fn(*of)` as one kernel; what `fn` gives back unchanged must not be among its results."""
    return as_one_kernel(fn)(*of)


def put(x: Array, i: Array | Scalar, value: Any) -> jax.Array:
    """`x.at[i].set(value)` of one index, which is trusted: not negative, and inside.

    `x[i]` of jax.numpy first counts negative indices from the end: four operations more per access, in programs that consist of
    accesses, and so a good part of their compile time.
    """
    return jax.lax.dynamic_update_index_in_dim(x, jnp.asarray(value, x.dtype), i, 0, allow_negative_indices=False)


def row(x: Array, i: Array | Scalar) -> jax.Array:
    """`x[i]` of one index, which is trusted."""
    return jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False, allow_negative_indices=False)


def added_at(x: Array, places: tuple[Array, ...], values: tuple[Array, ...]) -> jax.Array:
    """`x` with `values` added at `places`, one after the other: in a loop, since between two adds XLA would copy the array."""
    index, value = jnp.stack(places), jnp.stack([jnp.broadcast_to(v, x.shape[1:]) for v in values])
    return jax.lax.fori_loop(0, len(places), lambda i, x: added(x, row(index, i), row(value, i)), x)


def added(x: Array, i: Array | Scalar, value: Array) -> jax.Array:
    """`x.at[i].add(value)` of one index, which is trusted."""
    return put(x, i, row(x, i) + value)


def zeroed(x: Array, count: Array | Scalar) -> jax.Array:
    """`x` whose first `count` rows are zero: where a problem is small, sooner than an array of zeros of the padded size."""
    nothing = jnp.zeros(x.shape[1:], x.dtype)
    return jax.lax.fori_loop(0, count, lambda i, x: put(x, i, nothing), x)


def largest(x: Array) -> jax.Array:
    """`x.max(0)`, by halves: of several thousand numbers XLA (jaxlib 0.10) cannot compile a reduction in a kernel."""
    return _folded(jnp.maximum, x)


def any_of(x: Array) -> jax.Array:
    """`x.any(0)`, as `largest`."""
    return _folded(jnp.logical_or, x)


def _folded(join: Callable[[Array, Array], jax.Array], x: Array) -> jax.Array:
    while (n := x.shape[0]) > 1:
        halves = join(x[: n // 2], x[n // 2 : n // 2 * 2])
        x = jnp.concatenate([halves, x[n - 1 :]]) if n % 2 else halves
    return x[0]
