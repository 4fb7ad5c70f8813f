"""Where a step mixes the samples of its batch: there micro-batches compute something else than the whole batch does.

Gradients of micro-batches add up to the step's where the loss is a sum, or a mean, of what each sample gives by itself. They do not

* where every sample meets every other, as in a contrastive loss: micro-batches have fewer *pairs*, n²/M of n²;
* where a *statistic* of the batch comes back to its samples: batch norm, the root of a mean, a balance over experts. It is the
  micro-batch's then, which people accept of batch norm (GPipe does), but want to know.

The step is traced with two sizes of its batch. Dims that grow with it are dims of samples; what has none and was made of the data
is a statistic.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import jax
import numpy as np

from soapjax.graph.trace.program import Atom, FlatEqn, Program


class SampleMixing:
    """Of a step traced with two sizes of its batch, equation by equation alike.

    Args:
      batch: the inputs of `small` that are data.
      wanted: values whose making counts.
    """

    def __init__(self, small: Program, large: Program, batch: Collection[int], wanted: Collection[Atom]):
        self.small, self.large = small, large
        self.data = set(batch)
        _follow(small, self.data)
        self.needed = tuple(_needed(small, {v for v in wanted if isinstance(v, int)}))
        self.producer = {o: e for e in self.needed for o in e.outputs}

    def pairs(self) -> FlatEqn | None:
        """An equation whose result has every sample with every other; None where there is none."""
        return next((e for e in self.needed if self._makes_pairs(e)), None)

    def statistic(self) -> FlatEqn | None:
        """An equation that brings a statistic of the batch to its samples; None where there is none."""
        return next((e for e in self.needed if any(map(self._dims, e.outputs)) and any(map(self._is_statistic, e.inputs))), None)

    def shape(self, eqn: FlatEqn) -> tuple[int, ...]:
        """Of its largest value, with the larger batch."""
        values = (a for a in (*eqn.inputs, *eqn.outputs) if isinstance(a, int))
        return max((tuple(self.large.avals[v].shape) for v in values), key=math.prod)

    def _dims(self, atom: Atom) -> set[int]:
        """Dims of samples."""
        if not isinstance(atom, int):
            return set()
        a, b = self.small.avals[atom].shape, self.large.avals[atom].shape
        return {d for d, (m, n) in enumerate(zip(a, b, strict=False)) if m != n}

    def _is_statistic(self, atom: Atom) -> bool:
        if not isinstance(atom, int) or atom not in self.data:
            return False
        return jax.dtypes.issubdtype(self.small.avals[atom].dtype, np.inexact) and not self._dims(atom)

    def _makes_pairs(self, eqn: FlatEqn) -> bool:
        if eqn.name == "dot_general":
            contracted, batched = eqn.params["dimension_numbers"]
            one, other = (
                (a in self.data, self._dims(a) & set(c), self._dims(a) - {*c, *b})
                for a, c, b in zip(eqn.inputs, contracted, batched, strict=True)
            )
            # A matrix of all samples by all, the same whatever they are, such as the cotangent of a mean over pairs.
            mixes = any(not x[0] and x[1] and x[2] and y[0] for x, y in ((one, other), (other, one)))
            return mixes or all(x[0] and x[2] for x in (one, other))
        if len(self._dims(eqn.outputs[0])) < 2:
            return False
        own = [self._own_dims(a) for a in eqn.inputs if isinstance(a, int) and a in self.data]
        return any(a and b and not a & b for i, a in enumerate(own) for b in own[:i])

    def _own_dims(self, atom: int) -> set[int]:
        """Dims of samples that a value has from what was broadcast to it."""
        eqn = self.producer.get(atom)
        if eqn is None or eqn.name != "broadcast_in_dim":
            return self._dims(atom)
        source, to = eqn.inputs[0], eqn.params["broadcast_dimensions"]
        return {to[d] for d in self._dims(source)}


def _follow(program: Program, data: set[int]) -> None:
    """Adds to `data` all that depends on it; what one trip of a loop makes, the next one reads."""
    for eqn in program.eqns:
        moved = [isinstance(a, int) and a in data for a in eqn.inputs]
        if not any(moved):
            continue
        if eqn.body is None:
            if eqn.name != "optimization_barrier":  # of many values, each as it was
                moved = [True] * len(eqn.outputs)
            data.update(o for o, m in zip(eqn.outputs, moved, strict=True) if m)
            continue
        body, first = eqn.body, eqn.params["num_consts"]
        data.update(i for i, m in zip(body.inputs, moved, strict=True) if m)
        carried = list(zip(body.inputs[first : first + eqn.params["num_carry"]], body.outputs, strict=False))
        before = -1
        while len(data) > before:
            before = len(data)
            _follow(body, data)
            data.update(i for i, o in carried if isinstance(o, int) and o in data)
        made = zip(eqn.outputs, body.outputs, strict=True)
        data.update(o for o, inside in made if isinstance(inside, int) and inside in data)


def _needed(program: Program, wanted: set[int]) -> Iterator[FlatEqn]:
    """The equations that `wanted` is made by, last ones first; of a loop all of its body."""
    for eqn in reversed(program.eqns):
        if wanted.isdisjoint(eqn.outputs):
            continue
        if eqn.name == "optimization_barrier":
            wanted.update(a for a, o in zip(eqn.inputs, eqn.outputs, strict=True) if isinstance(a, int) and o in wanted)
            continue
        wanted.update(a for a in eqn.inputs if isinstance(a, int))
        if eqn.body is None:
            yield eqn
        else:
            yield from eqn.body.leaves
