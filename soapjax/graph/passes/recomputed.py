"""Which equations of the forward pass a recomputation repeats.

Of `jax.checkpoint` around each of three equal layers the backward pass computes the third again first. Names and shapes do not tell
it from the first, nor what is repeated from what derivatives add beside it: what an equation reads does.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping

from soapjax.graph.passes.phases import module_path
from soapjax.graph.passes.relayouts import behind_layouts
from soapjax.graph.trace.program import FlatEqn, Program
from soapjax.graph.trace.values import Values


def repeated(atom: int, values: Values, twins: Mapping[int, int]) -> int:
    """The root behind layouts and casts, which the backward pass often makes anew; of what is computed again, what it repeats."""
    root = behind_layouts(atom, values)
    return twins.get(root, root)


def twins_of(
    first: list[FlatEqn], again: list[FlatEqn], program: Program, values: Values, known: dict[int, int]
) -> list[tuple[FlatEqn, FlatEqn]]:
    """Pairs of an equation of `again` and its twin in `first`: of those alike the one that reads the same, and of equations that
    read what has no twin those that are left, in order.

    Args:
      known: of what is computed again elsewhere, by root, what it repeats, behind layouts.
    """

    def signature(e: FlatEqn) -> tuple:
        return module_path(e.stack), e.name, tuple(program.aval(e.outputs[0]).shape)

    def reads(e: FlatEqn) -> list[int]:
        return [repeated(a, values, twins) for a in e.read]

    twin_of: dict[int, int] = {}  # root -> the one in the forward pass
    twins = collections.ChainMap(twin_of, known)
    waiting: dict[tuple, list[FlatEqn]] = collections.defaultdict(list)
    for e in first:
        waiting[signature(e)].append(e)
    found: list[tuple[FlatEqn, FlatEqn]] = []
    left = []
    for e in again:
        queue, read = waiting[signature(e)], reads(e)
        k = next((k for k, other in enumerate(queue) if reads(other) == read), None)
        if k is None:
            left.append(e)
            continue
        twin = queue.pop(k)
        made = zip(e.outputs, twin.outputs, strict=False)
        twin_of.update((behind_layouts(a, values), behind_layouts(b, values)) for a, b in made)
        found.append((e, twin))
    return found + [(e, queue.pop(0)) for e in left if (queue := waiting[signature(e)])]
