"""Where a step puts samples of its batch in order, reads them by their place, or counts them.

Of two traces of the step, with two sizes of the batch: dims that grow with it are dims of samples. Within a loop over samples, or
chunks of them, no dim grows: there a chunk is as a sample is elsewhere.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator

import jax
import numpy as np

from soapjax.graph.batch.chunks import chained, chunked, has_more_trips
from soapjax.graph.batch.draws import DRAWS, is_key
from soapjax.graph.batch.growth_rules import is_backward
from soapjax.graph.batch.two_traces import are_alike
from soapjax.graph.rules.heavy_rules import POOLS, SCATTERS
from soapjax.graph.rules.light_rules import ALONG, CUMULATIVE
from soapjax.graph.trace.dataflow import follow, needed_for
from soapjax.graph.trace.program import Atom, FlatEqn, Program

BY_NUMBER = {"gather", "dynamic_slice", *SCATTERS}
_WINDOWS = {*POOLS, "select_and_scatter_add"}
_MEETS_NOTHING = {*BY_NUMBER, "sort", "optimization_barrier"}  # its operands each by itself, or by what numbers say


class SampleOrder:
    """Of a step traced with two sizes of its batch, equation by equation alike.

    Args:
      batch: the inputs of `small` that are data.
      wanted: values whose making counts.
      known: values that are known to be the whole batch's, as gradients are: their making does not.
    """

    def __init__(
        self, small: Program, large: Program, batch: Collection[int], wanted: Collection[Atom], known: Collection[int] = ()
    ):  # fmt: skip
        self.small, self.large, self.batch = small, large, batch
        self.data, self.known = set(batch), frozenset(known)
        has_loops = any(e.body is not None for e in small.eqns) and are_alike(small, large)
        self.chunked = chunked(small, large) if has_loops else set()
        both = zip(small.walk(), large.walk(), strict=True) if has_loops else ()
        self.over_chunks = [e for (e, _), (other, _) in both if has_more_trips(e, other)]
        follow(small, self.data, self.known)
        self._want(wanted)

    def _want(self, wanted: Collection[Atom]) -> None:
        self.wanted = {v for v in wanted if isinstance(v, int)}
        self.needed = tuple(needed_for(self.small, self.wanted - self.known))
        self.producer = {o: e for e in self.needed for o in e.outputs}

    def has_samples(self, atom: Atom) -> bool:
        return bool(self._dims(atom))

    def _dims(self, atom: Atom) -> set[int]:
        """Dims of samples."""
        if not isinstance(atom, int):
            return set()
        a, b = self.small.avals[atom].shape, self.large.avals[atom].shape
        return {d for d, (m, n) in enumerate(zip(a, b, strict=False)) if m != n}

    def _is_along_batch(self, eqn: FlatEqn) -> bool:
        """Whether it moves, sorts or accumulates samples, or makes something of them by their place."""
        if self._meets_places(eqn):
            return True
        data = [a for a in eqn.read if a in self.data and self._dims(a)]
        if not data:
            return False
        source, p = data[0], eqn.params
        dims = self._dims(source)
        if eqn.name == "slice":
            return any(self._takes_some(eqn, d) for d in dims)
        if eqn.name == "split":
            return p["axis"] in dims and not self._was_joined(eqn, self.small.avals[source].shape[p["axis"]], len(p["sizes"]))
        if eqn.name == "reshape":
            return not is_backward(eqn) and self._puts_side_by_side(eqn)
        if eqn.name == "conv_general_dilated" and not is_backward(eqn):
            return not self._dims(eqn.inputs[0]).isdisjoint(p["dimension_numbers"].lhs_spec[2:])
        if eqn.name in _WINDOWS:
            return any(p["window_dimensions"][d] > 1 for d in dims)
        along = p.get(ALONG[eqn.name]) if eqn.name in ALONG else len(self.small.avals[source].shape) - 1
        named = eqn.name in ALONG or eqn.name == "top_k"
        return named and not dims.isdisjoint(along if isinstance(along, tuple) else (along,))

    def _meets_places(self, eqn: FlatEqn) -> bool:
        """Whether numbers of samples meet numbers that count them, as a mask of the first ones does. (Indices may.)"""
        made = [self.small.avals[o] for o in eqn.outputs]
        if eqn.name in _MEETS_NOTHING or all(is_key(a) or np.issubdtype(a.dtype, np.integer) for a in made):
            return False
        if self._counted.issuperset(eqn.read):  # as in the derivative of what is put at places: which of them was put last
            return False
        of_samples = eqn.read if eqn.key in self._within_chunks else [a for a in eqn.read if self._dims(a)]
        return any(map(self._counts, of_samples)) and not self.data.isdisjoint(of_samples)

    def _counts(self, atom: int) -> bool:
        return atom in self._counted and atom not in self.data

    @functools.cached_property
    def _counted(self) -> set[int]:
        """What counts samples, and what is made of that, constants too that are added up one after the other, as in the derivative
        of running sums; not random numbers of a key each."""
        small = self.small
        counts = ("iota", *CUMULATIVE)
        counted = {o for e in small.leaves if e.name in counts for o in e.outputs} | {v for v in small.consts if self._dims(v)}
        counted = {v for v in counted if self._dims(v)}
        for e in self.over_chunks:
            follow(e.body, inside := set(chained(e, self._made_by.get)))
            counted |= inside | {o for o, i in zip(e.outputs, e.body.outputs, strict=True) if i in inside}
        counted -= self.data
        drawn = {o for e in small.leaves if e.name.startswith(DRAWS) for o in e.outputs}
        follow(small, counted, frozenset(drawn))
        return counted

    @functools.cached_property
    def _within_chunks(self) -> set[str]:
        """The equations (keys) of loops over chunks."""
        return {e.key for loop in self.over_chunks for e in loop.body.leaves}

    def _is_chain(self, eqn: FlatEqn) -> bool:
        """Whether a loop over chunks hands on more than sums of what it makes of them."""
        of_data = (o for o in chained(eqn, self._made_by.get).values() if o in self.data)
        return any(jax.dtypes.issubdtype(self.small.avals[o].dtype, np.inexact) for o in of_data)

    @functools.cached_property
    def _made_by(self) -> dict[int, FlatEqn]:
        return {o: e for e in self.small.leaves for o in e.outputs}

    def _takes_some(self, eqn: FlatEqn, d: int) -> bool:
        """Whether a slice takes other samples than one of every so many neighbours, or than were joined to others before."""
        p, size = eqn.params, self.small.aval(eqn.inputs[0]).shape[d]
        start, limit, stride = p["start_indices"][d], p["limit_indices"][d], (p["strides"] or (1,) * (d + 1))[d]
        if stride > 1:
            return size % stride != 0 or start >= stride or -(-(limit - start) // stride) != size // stride
        taken = max(limit - start, 1)
        is_a_part = size % taken == 0 and start % taken == 0
        return (start, limit) != (0, size) and not (is_a_part and self._was_joined(eqn, size, size // taken))

    def _was_joined(self, eqn: FlatEqn, size: int, number: int) -> bool:
        """Whether the `size` samples that it reads are `number` batches one behind the other.

        A derivative takes apart what the forward pass joined, and need not be made of that.
        """
        made = self._joined.get((size, number))
        return made is not None and (is_backward(eqn) or not made.isdisjoint(eqn.read))

    @functools.cached_property
    def _joined(self) -> dict[tuple[int, int], set[int]]:
        """(size, number) -> what was joined, or flattened, to so many samples, so many batches one behind the other, and what is
        made of that. What is taken apart first and joined again later was no such thing."""
        found: dict[tuple[int, int], set[int]] = {}
        for eqn in self.needed:
            for key in () if is_backward(eqn) else self._joined_by(eqn):
                found.setdefault(key, set()).add(eqn.outputs[0])
        for made in found.values():
            follow(self.small, made)
        return found

    def _joined_by(self, eqn: FlatEqn) -> Iterator[tuple[int, int]]:
        out, dims = eqn.outputs[0], self._dims(eqn.outputs[0])
        if eqn.name == "concatenate" and (d := eqn.params["dimension"]) in dims:
            sizes = {self.small.aval(a).shape[d] if d in self._dims(a) else None for a in eqn.inputs}
            if len(sizes) == 1 and None not in sizes:
                yield self.small.avals[out].shape[d], len(eqn.inputs)
        elif eqn.name == "reshape" and dims:
            before, after = self._before_samples(eqn.inputs[0]), self._before_samples(out)
            if before > after:
                yield self.small.avals[out].shape[min(dims)], before // after

    def _before_samples(self, atom: Atom) -> int:
        """The product of the dims before that of samples; 0 where there is none."""
        dims = self._dims(atom)
        return math.prod(self.small.aval(atom).shape[: min(dims)]) if dims else 0

    def _puts_side_by_side(self, eqn: FlatEqn) -> bool:
        source, result = eqn.inputs[0], eqn.outputs[0]
        before, after = self._before_samples(source), self._before_samples(result)
        if not 0 < before < after:
            return False
        return not self._was_joined(eqn, self.small.aval(source).shape[min(self._dims(source))], after // before)
