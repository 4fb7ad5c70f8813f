"""What a step computes from means over the batch: a moving variance, say, from E[x] and E[x²], or a perplexity.

Micro-batches have means of their own. What is linear in them may be averaged over micro-batches; what is not must be computed from
the averaged means, as the step computes it from those of the whole batch:

    var(batch) = E[x²] - E[x]²                     E of the whole batch, the average of the micro-batches'
    average of var(micro-batch) = that - the variance of the micro-batches' E[x]

A mean is recognised as a sum over samples, laid out anew, added to such sums or (a penalty of the weights) to what is none of the
batch's, or scaled, that a larger batch leaves alike. What follows from means and from nothing else of the batch, without a number
that depends on its size, is computed after them. A variance that is itself a mean, of (x - E[x])², is none of these: its E[x] is
inside, and it is averaged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import jax
import numpy as np

from soapjax.graph.batch.chunks import has_more_trips
from soapjax.graph.batch.growth_rules import Scaling
from soapjax.graph.rules.light_rules import LIGHT
from soapjax.graph.trace.program import Atom, FlatEqn, Program

_LAYOUTS = {"reshape", "squeeze", "broadcast_in_dim", "expand_dims", "transpose", "convert_element_type", "neg", "reduce_sum"}
_ADDITIONS = {"add", "sub", "add_any"}


def after_means(
    small: Program, large: Program, scaling: Mapping[int, Scaling], batch: Collection[int], wanted: Collection[int]
) -> frozenset[str]:
    """Keys of the outermost equations between means over the batch and what they make of the values `wanted`, but for means.

    Args:
      small, large: the step traced with two sizes of its batch, equation by equation alike.
      scaling: of the values of `small`, as `scalings` finds it; nothing is found where it is empty.
      batch: inputs that are data.
    """
    if not scaling:
        return frozenset()
    steps = _Steps(small, large, scaling, batch)
    needed, found = set(wanted) - steps.linear, set()
    for eqn in reversed(small.eqns):
        if eqn.key in steps.after and not needed.isdisjoint(eqn.outputs):
            found.add(eqn.key)
            needed.update(a for a in eqn.read if a not in steps.linear)
    return frozenset(found)


class _Steps:
    """`after`: keys of all equations that follow from means alone."""

    def __init__(self, small: Program, large: Program, scaling: Mapping[int, Scaling], batch: Collection[int]):
        self.small, self.large, self.scaling = small, large, scaling
        self.of_batch = set(batch)
        self.linear: set[int] = set()  # sums over samples, and what is linear in them
        self.known: set[int] = set()  # means, and what follows from them
        self.after: set[str] = set()
        for eqn, other in zip(small.eqns, large.eqns, strict=True):
            mine = [a for a in eqn.read if a in self.of_batch]
            if not mine:
                continue
            self.of_batch.update(eqn.outputs)
            if eqn.body is not None:
                self.linear.update(self._sums_over_chunks(eqn, other))
            if eqn.body is not None or any(map(self._has_samples, eqn.outputs)):
                continue
            if self.known.issuperset(mine) and self._is_alike(eqn, other):
                self.after.add(eqn.key)
                self.known.update(eqn.outputs)
            if self._is_linear(eqn, other, mine):
                self.linear.update(eqn.outputs)
                self.known.update(o for o in eqn.outputs if self._is_fixed(o))

    def _sums_over_chunks(self, eqn: FlatEqn, other: FlatEqn) -> list[int]:
        """What a loop with more trips for a larger batch adds up: of others that it carries nobody knows how they grow."""
        if not has_more_trips(eqn, other):
            return []
        carried = eqn.outputs[: eqn.params["num_carry"]]
        return [o for o in carried if self.scaling[o].power is not None and not self._has_samples(o)]

    def _has_samples(self, value: int) -> bool:
        return self.small.avals[value].shape != self.large.avals[value].shape

    def _is_fixed(self, atom: Atom) -> bool:
        """Whether a value is known to be as large for a larger batch."""
        found = self.scaling.get(atom) if isinstance(atom, int) else Scaling()
        return found is not None and (found.is_zero or found.power == 0.0) and not found.is_ratio

    def _is_alike(self, eqn: FlatEqn, other: FlatEqn) -> bool:
        """Whether an equation computes the same of whatever size of batch its operands are."""
        pairs = zip(eqn.inputs, other.inputs, strict=True)
        return eqn.name in LIGHT and all(map(self._is_fixed, eqn.inputs)) and all(self._is_same(a, b) for a, b in pairs)

    def _is_same(self, a: Atom, b: Atom) -> bool:
        """Whether a literal or a constant is the same in both programs; other values are told by their scaling."""
        if isinstance(a, int):
            return a not in self.small.consts or (isinstance(b, int) and np.array_equal(self.small.consts[a], self.large.consts[b]))
        return np.array_equal(a.val, getattr(b, "val", None))

    def _is_linear(self, eqn: FlatEqn, other: FlatEqn, mine: list[int]) -> bool:
        if not all(jax.dtypes.issubdtype(self.small.avals[o].dtype, np.inexact) for o in eqn.outputs):
            return False
        if eqn.name == "reduce_sum" and self._has_samples(mine[0]):
            return True
        if not self.linear.issuperset(mine):
            return False
        if eqn.name in _ADDITIONS:
            return len(mine) == 2 or self._is_alike(eqn, other)
        scaled = len(mine) == 1 and (eqn.name == "mul" or (eqn.name == "div" and mine[0] == eqn.inputs[0]))
        return scaled or eqn.name in _LAYOUTS
