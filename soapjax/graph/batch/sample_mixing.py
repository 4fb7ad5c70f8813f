"""Where a step mixes the samples of its batch: there micro-batches compute something else than the whole batch does.

Gradients of micro-batches add up to the step's where the loss is a sum, or a mean, of what each sample gives by itself. They do not

* where every sample meets every other, as in a contrastive loss: micro-batches have fewer *pairs*, n²/M of n²;
* where a *statistic* of the batch comes back to its samples: batch norm, the root of a mean, a balance over experts. It is the
  micro-batch's then, which people accept of batch norm (GPipe does), but want to know;
* where a *fixed number* of samples stands beside all others, treated otherwise: of a micro-batch they are a larger share;
* where samples are read, or added to, by *numbers* that come with the batch: the nodes that the edges of a graph join, pairs that
  were chosen outside. They count samples of the whole batch. (A gather of a label's logit names samples by their place, and so does
  one of places within each sample: an `iota` is in the numbers then.) So do numbers of which there are as many whatever the batch,
  drawn or constant: a permutation of 64, a minibatch out of a data set that is given whole;
* where samples are put *in order*, or read by their place: sorted, shifted, summed up one after the other, half of them taken, or
  halves put side by side (by a slice, a split, or a reshape to [2, half]). Neighbours may be put side by side, and what was joined
  or flattened may be taken apart again.

The step is traced with two sizes of its batch. Dims that grow with it are dims of samples; what has none and was made of the data
is a statistic.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence

import numpy as np

from soapjax.graph.batch.draws import DRAWS, is_key
from soapjax.graph.batch.growth_rules import is_backward
from soapjax.graph.batch.sample_order import SampleOrder
from soapjax.graph.batch.two_traces import are_alike, branches_of
from soapjax.graph.rules.light_rules import ALONG
from soapjax.graph.trace.dataflow import follow
from soapjax.graph.trace.program import Atom, FlatEqn, Program

_LINEAR = {
    "add", "sub", "add_any", "neg", "reduce_sum", "cumsum", "real", "imag", "conj", "convert_element_type", "stop_gradient", "name",
    "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose", "copy",
    "slice", "split", "concatenate", "stack", "pad", "rev",
}  # fmt: skip
_COUNTS = {"iota", "sort", "top_k", "argmax", "argmin"}


class SampleMixing(SampleOrder):
    """Of a step traced with two sizes of its batch, equation by equation alike; arguments as of `SampleOrder`."""

    def _want(self, wanted: Collection[Atom]) -> None:
        super()._want(wanted)
        self.own: dict[int, set[int]] = {}

    @functools.cached_property
    def _inner(self) -> dict[str, list[SampleMixing]]:
        """By `cond` (key): of its branches."""
        return {}

    def of(self, wanted: Collection[Atom]) -> SampleMixing:
        """The same for the making of other values."""
        found = copy.copy(self)
        found.__dict__.pop("_joined", None)
        found._want(wanted)
        return found

    def pairs(self) -> FlatEqn | None:
        """An equation whose result has every sample with every other; None where there is none."""
        return next((e for e in self.needed if self._makes_pairs(e)), None) or self._inside(SampleMixing.pairs)

    def statistic(self, besides: Collection[str] = ()) -> FlatEqn | None:
        """An equation that brings a statistic of the batch to its samples, and is none of `besides` (keys); or None."""
        brings = (e for e in self.needed if e.name != "concatenate" and e.key not in besides)  # which puts some beside others
        found = next((e for e in brings if any(map(self._dims, e.outputs)) and any(map(self.is_statistic, e.inputs))), None)
        return found or self._inside(SampleMixing.statistic, besides)

    def not_linear(self, after: Collection[str] = ()) -> FlatEqn | None:
        """An equation that makes a statistic of others, and not as means of it are made of means of them; None where there is none.

        Args:
          after: equations (keys) that are evaluated on means over the whole batch.
        """
        return next((e for e in self.needed if e.key not in after and self._is_not_linear(e)), None)

    def fixed_rows(self) -> FlatEqn | None:
        """An equation that puts a fixed number of the batch's rows beside as many as it has, or takes them out of all; or None."""
        looks = (self._joins_fixed_rows, self._takes_all_of_a_part, self._takes_as_many, self._pads_as_many)
        found = next((e for e in self.needed if any(look(e) for look in looks)), None)
        return found or self._inside(SampleMixing.fixed_rows)

    def emptied(self) -> FlatEqn | None:
        """A slice that leaves nothing of a micro-batch, whatever it leads to: of nothing JAX makes a constant."""
        slices = (e for e in self.small.leaves if e.name in ("slice", "split"))
        return next((e for e in slices if any(self.small.avals[o].size == 0 < self.large.avals[o].size for o in e.outputs)), None)

    def by_number(self) -> FlatEqn | None:
        """An equation that reads samples, or adds to them, by numbers that come with the batch or are the same for any; or None."""
        placed = _places(self.small)
        found = next((e for e in self.needed if self._reads_by_number(e, placed)), None)
        return found or self._inside(SampleMixing.by_number)

    def order(self) -> FlatEqn | None:
        """An equation that moves, sorts or accumulates along the batch; None where there is none."""
        return next((e for e in self.needed if self._is_along_batch(e)), None) or self._inside(SampleMixing.order)

    def drawn_places(self) -> FlatEqn | None:
        """An equation that reads other samples at places that are drawn, as of a batch that is shuffled for mixup; or None."""
        drawn = {o for e in self.small.leaves if e.name.startswith(DRAWS) for o in e.outputs}
        follow(self.small, drawn)
        found = next((e for e in self.needed if e.name == "gather" and self._is_at_drawn(e, drawn)), None)
        return found or self._inside(SampleMixing.drawn_places)

    def chain(self) -> FlatEqn | None:
        """A loop over samples, or chunks of them, that hands on more than sums from one to the next; None where there is none."""
        needed = {e.address[0] for e in self.needed}
        return next((e for e in self.over_chunks if e.address[0] in needed and self._is_chain(e)), None)

    def _inside(self, look: Callable[[SampleMixing], FlatEqn | None], besides: Collection[str] = ()) -> FlatEqn | None:
        """A needed `cond`, none of `besides` (keys), in a branch of which `look` finds something."""
        choices = (e for e in self.needed if e.name == "cond" and e.key not in besides)
        return next((e for e in choices if any(look(mixing) is not None for mixing in self._branches(e))), None)

    def _branches(self, eqn: FlatEqn) -> list[SampleMixing]:
        """The same within the branches of a `cond`."""
        if eqn.key not in self._inner:
            other = next(e for e, _ in self.large.walk() if e.key == eqn.key)
            of_data, of_chunk = ([isinstance(a, int) and a in some for a in eqn.inputs[1:]] for some in (self.data, self.chunked))
            self._inner[eqn.key] = found = []
            for a, b in branches_of(eqn, other):
                if are_alike(a, b):
                    found.append(SampleMixing(a, b, list(itertools.compress(a.inputs, of_data)), a.outputs))
                    found[-1].chunked.update(itertools.compress(a.inputs, of_chunk))
                    follow(a, found[-1].chunked)
        return self._inner[eqn.key]

    def of_all_on(self, *, statistics: bool) -> list[FlatEqn]:
        """The equations that read samples by their place, put them in order, or one batch behind another for good (`statistics`:
        also those that make one value of all samples), and what is made of that, in order."""
        sizes = {self.small.avals[v].shape[d] for v in self.wanted for d in self._dims(v)}

        def starts(e: FlatEqn) -> bool:
            if e.body is not None and any(map(starts, e.body.eqns)):
                return True
            if e in self.over_chunks and (self._is_chain(e) or any(self._counts(o) and self._dims(o) for o in e.outputs)):
                return True
            of_samples = any(a in self.data and self._dims(a) for a in e.read)
            if of_samples and ((statistics and not any(map(self._dims, e.outputs))) or not all(map(self._is_even, e.outputs))):
                return True
            if e.name == "concatenate" and not is_backward(e) and any(n in sizes for n, _ in self._joined_by(e)):
                return True
            return self._is_along_batch(e) or self._joins_fixed_rows(e) or self._takes_all_of_a_part(e)

        needed = {e.address[0] for e in self.needed}
        made: set[int] = set()
        found = []
        for e in self.small.eqns:  # a loop as a whole
            if e.address[0] in needed and (starts(e) or not made.isdisjoint(e.read)):
                made.update(e.outputs)
                found.append(e)
        return found

    def _is_even(self, atom: Atom) -> bool:
        """Whether dims of samples are as many batches each, as they are not where a fixed number of rows was added."""
        v = next(iter(self.batch))
        ours, theirs = self.small.avals[v].shape, self.large.avals[v].shape
        a, b = next((m, n) for m, n in zip(ours, theirs, strict=True) if m != n)
        shapes = (self.small.aval(atom).shape, self.large.aval(atom).shape)
        return all(n * a == m * b for d, (m, n) in enumerate(zip(*shapes, strict=True)) if d in self._dims(atom))

    def read_by(self, eqns: Sequence[FlatEqn]) -> set[int]:
        """What equations read of the data that they do not make."""
        made = {o for e in eqns for o in e.outputs}
        return {a for e in eqns for a in e.read if a in self.data and a not in made}

    def any(self) -> FlatEqn | None:
        return self.statistic() or self.pairs() or self.order()

    def shape(self, eqn: FlatEqn) -> tuple[int, ...]:
        """Of its value with most dims of samples, the largest of these, with the larger batch."""
        shapes = {v: tuple(self.large.avals[v].shape) for v in (*eqn.read, *eqn.outputs)}
        return max(shapes.items(), key=lambda of: (len(self._dims(of[0])), math.prod(of[1])))[1]

    def is_statistic(self, atom: Atom) -> bool:
        """Whether it is made of the data, and no sample's."""
        if not isinstance(atom, int) or atom not in self.data:
            return False
        return not is_key(self.small.avals[atom]) and not self._dims(atom) and atom not in self.chunked

    def _pads_as_many(self, eqn: FlatEqn) -> bool:
        """Whether samples that are no share of the batch have cotangents, those of the others being zero: as of all but the first.

        Of a batch that is rolled each has one: of slices that were joined, slices of the cotangent."""
        if eqn.name != "pad" or not is_backward(eqn) or not isinstance(source := eqn.inputs[0], int):
            return False
        made_by = self.producer.get(source)
        (a, b), (m, n) = ([p.aval(v).shape for v in (source, eqn.outputs[0])] for p in (self.small, self.large))
        is_share = all(a[d] * n[d] == m[d] * b[d] for d in self._dims(eqn.outputs[0]))
        return not is_share and (made_by is None or made_by.name != "slice")

    def _is_not_linear(self, eqn: FlatEqn) -> bool:
        own = [self.is_statistic(a) for a in eqn.inputs]
        if not any(own) or any(map(self._dims, eqn.outputs)) or eqn.name in _LINEAR:
            return False
        if eqn.name in ("mul", "dot_general"):
            return all(own)
        if eqn.name == "select_n":
            return own[0]
        return not (eqn.name in ("div", "gather", "dynamic_slice") and not any(own[1:]))

    def _takes_all_of_a_part(self, eqn: FlatEqn) -> bool:
        """Whether a slice takes all of a micro-batch, and of the whole batch only as much."""
        if eqn.name not in ("slice", "split") or not isinstance(source := eqn.inputs[0], int) or source not in self.data:
            return False
        shape, dims = self.small.avals[source].shape, self._dims(source)
        made = [(self.small.avals[o].shape, self._dims(o)) for o in eqn.outputs]
        return any(found[d] == shape[d] > 1 and d not in own for found, own in made for d in dims)

    def _takes_as_many(self, eqn: FlatEqn) -> bool:
        """Whether a slice takes as many samples whatever the batch, the first, say: every micro-batch has its own first."""
        if eqn.name not in ("slice", "top_k") or is_backward(eqn) or "." in eqn.key or (source := eqn.inputs[0]) not in self.data:
            return False
        readers = [e for e in self.needed if not set(eqn.outputs).isdisjoint(e.read)]
        # Those of a batch that is rolled are joined: see `_joins_fixed_rows`.
        is_joined = eqn.name == "slice" and bool(readers) and all(e.name == "concatenate" for e in readers)
        return bool(self._dims(source) - self._dims(eqn.outputs[0])) and not is_joined

    def _reads_by_number(self, eqn: FlatEqn, placed: Collection[int]) -> bool:
        is_outermost = "." not in eqn.key  # a loop over samples reads them one by one
        if eqn.name == "dynamic_slice":
            return is_outermost and self._takes_a_window(eqn)
        if eqn.name == "gather":
            over = eqn.params["dimension_numbers"].start_index_map
        elif eqn.name.startswith("scatter"):
            over = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
        else:
            return False
        source, numbers = eqn.inputs[0], eqn.inputs[1]
        if self._dims(source).isdisjoint(over):
            return False
        is_fixed = source in self.data and not self._dims(numbers) and not self._dims(eqn.outputs[0])
        is_of_batch = isinstance(numbers, int) and numbers in self.data and numbers not in placed
        return is_of_batch or (is_fixed and is_outermost and eqn.name == "gather")

    def _is_at_drawn(self, eqn: FlatEqn, drawn: Collection[int]) -> bool:
        """Of several numbers for each place, as of a token within a sample, those that say which sample decide."""
        source, numbers = eqn.inputs
        over = eqn.params["dimension_numbers"].start_index_map
        if source not in self.data or self._dims(source).isdisjoint(over):
            return False
        made_by = self.producer.get(numbers) if isinstance(numbers, int) else None
        if made_by is not None and made_by.name == "concatenate" and len(made_by.inputs) == len(over):
            return any(a in drawn for a, d in zip(made_by.inputs, over, strict=True) if d in self._dims(source))
        return numbers in drawn

    def _takes_a_window(self, eqn: FlatEqn) -> bool:
        """Whether so many samples are taken whatever the batch, from a place that is not known to be the first."""
        source, *begins = eqn.inputs
        taken = self._dims(source) - self._dims(eqn.outputs[0])
        return source in self.data and any(isinstance(a := begins[d], int) or np.any(np.asarray(a.val)) for d in taken)

    def _joins_fixed_rows(self, eqn: FlatEqn) -> bool:
        if eqn.name != "concatenate" or eqn.params["dimension"] not in self._dims(eqn.outputs[0]):
            return False
        sliced = [e for a in eqn.read if (e := self.producer.get(a)) is not None and e.name == "slice"]
        if len(sliced) == len(eqn.inputs) and len({e.inputs[0] for e in sliced}) == 1:
            return False  # slices of one value, as of a batch that is rolled
        return any(a in self.data and eqn.params["dimension"] not in self._dims(a) for a in eqn.read)

    def _makes_pairs(self, eqn: FlatEqn) -> bool:
        if eqn.name == "dot_general":
            contracted, batched = eqn.params["dimension_numbers"]
            one, other = (
                (isinstance(a, int) and a in self.data, self._dims(a) & set(c), self._dims(a) - {*c, *b})
                for a, c, b in zip(eqn.inputs, contracted, batched, strict=True)
            )
            # A matrix of all samples by all, the same whatever they are, such as the cotangent of a mean over pairs.
            mixes = any(not x[0] and x[1] and x[2] and y[0] for x, y in ((one, other), (other, one)))
            return mixes or all(x[0] and x[2] for x in (one, other))
        if len(self._dims(eqn.outputs[0])) < 2:
            return False
        own = [self._own_dims(a) for a in eqn.read if a in self.data]
        return any(a and b and not a & b for i, a in enumerate(own) for b in own[:i])

    def _own_dims(self, atom: int) -> set[int]:
        """Dims of samples that a value has from what was broadcast to it, and computed element by element from that."""
        if atom not in self.own:
            eqn = self.producer.get(atom)
            self.own[atom] = self._dims(atom) if eqn is None else self._made_own(eqn, atom)
        return self.own[atom]

    def _made_own(self, eqn: FlatEqn, atom: int) -> set[int]:
        if eqn.name == "broadcast_in_dim":
            to = eqn.params["broadcast_dimensions"]
            return {to[d] for d in self._own_dims(eqn.read[0])}
        shape = self.small.avals[atom].shape
        if any(self.small.avals[a].shape != shape for a in eqn.read) or eqn.name in ALONG:
            return self._dims(atom)
        return set().union(*(self._own_dims(a) for a in eqn.read if a in self.data))


def _places(program: Program) -> set[int]:
    """Values that count along a dim, and what is made of them."""
    counted = {o for e in program.leaves if e.name in _COUNTS for o in e.outputs}
    found = counted | {v for v, x in program.consts.items() if getattr(x, "shape", ())}
    follow(program, found)
    return found
