"""Which equations of the forward pass a recomputation repeats.

Of `jax.checkpoint` around each of three equal layers the backward pass computes the third again first. Names and shapes do not tell
it from the first: what it reads does, its weights and what was left of the layer before.
"""

from __future__ import annotations

import collections

from soapjax.graph.passes.phases import module_path
from soapjax.graph.trace.program import FlatEqn, Program
from soapjax.graph.trace.values import Values


def twins_of(first: list[FlatEqn], again: list[FlatEqn], program: Program, values: Values) -> list[tuple[FlatEqn, FlatEqn]]:
    """Pairs of an equation of `again` and its twin in `first`: of several alike the one that reads the same, else in order."""
    original = values.original

    def signature(e: FlatEqn) -> tuple:
        return module_path(e.stack), e.name, tuple(program.aval(e.outputs[0]).shape)

    def reads(e: FlatEqn) -> list[int]:
        return [twin_of.get(original[a].root, original[a].root) for a in e.read]

    found: list[tuple[FlatEqn, FlatEqn]] = []
    twin_of: dict[int, int] = {}  # root -> the one in the forward pass
    waiting: dict[tuple, list[FlatEqn]] = collections.defaultdict(list)
    for e in first:
        waiting[signature(e)].append(e)
    for e in again:
        queue = waiting[signature(e)]
        if queue:
            read = reads(e)
            twin = queue.pop(next((k for k, other in enumerate(queue) if reads(other) == read), 0))
            twin_of.update((original[a].root, original[b].root) for a, b in zip(e.outputs, twin.outputs, strict=False))
            found.append((e, twin))
    return found
