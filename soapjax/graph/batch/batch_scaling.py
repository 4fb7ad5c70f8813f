"""How every value of a step grows with its batch: what tells a mean over the batch from a sum.

Two traces of one step, the second with a batch M times as large, are followed side by side, as if the larger batch
were M copies of the smaller one. A value that both have alike has power 0, one that is M times as large power 1
(a sum over the batch; the literal 64.0 that was 16.0), a cotangent of a mean per sample power -1. Values that still have
a batch dim are told by their shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import jax
import numpy as np

from soapjax.graph.batch.chunks import added_up, has_more_trips
from soapjax.graph.batch.growth_rules import (
    COMPARE,
    EACH,
    PASSED_ON,
    POWERS,
    UNKNOWN,
    ZERO,
    GrowthRules,
    Scaling,
    exponent_of,
    is_backward,
    is_zero,
    of_either,
)
from soapjax.graph.batch.two_traces import are_alike, branches_of
from soapjax.graph.batch.unlike_sums import Lacks
from soapjax.graph.trace.dataflow import follow
from soapjax.graph.trace.program import Atom, FlatEqn, Program


def scalings(
    small: Program, large: Program, factor: float, *, known: Mapping[int, float] | None = None, batch: Collection[int] = (),
    lacks: Lacks | None = None, may_scale: Callable[[str], bool] = lambda key: True,
) -> dict[int, Scaling]:  # fmt: skip
    """The scaling of every value of `small`, all nesting levels included; empty where the programs differ in structure.

    Args:
      large: the same step with a batch `factor` times as large.
      known: powers of values that nothing makes: statistics of the whole batch. What divides by these, or by what every sample has
        of them and of the inputs `batch` alone, makes no ratio.
      lacks: gets what summands of gradients, and branches, are to be scaled by to grow alike (unlike_sums.py); they are taken to
        grow so then. Where it is None they are of unknown growth.
      may_scale: whether that can be done at an equation (key).
    """
    if not are_alike(small, large):
        return {}
    scaler = _Scaler(small, large, factor, known or {}, batch)
    if lacks is not None:
        scaler.lacks, scaler.may_scale = lacks, may_scale
    return scaler.run()


class _Scaler(GrowthRules):
    def __init__(self, small: Program, large: Program, factor: float, known: Mapping[int, float], batch: Collection[int]):
        super().__init__(small, large)
        self.factor = factor
        self.found: dict[int, Scaling] = dict.fromkeys(small.inputs, Scaling())
        self.found.update({v: Scaling(power) for v, power in known.items()})
        self.own = {*known, *batch} if known else set()  # what every sample has of the batch alone, and what all have of it
        self.found.update({k: ZERO if is_zero(v) else Scaling() for k, v in small.consts.items()})
        self.smooth = set(self.data)  # of the data's values, not only of how they compare
        self.to_samples = self.read_by_samples()
        self.made_by = {o: eqn for eqn in small.leaves for o in eqn.outputs}
        self.lacks: Lacks | None = None
        self.may_scale: Callable[[str], bool] = lambda key: False

    def run(self) -> dict[int, Scaling]:
        self.block(self.small, self.large)
        return self.found

    def block(self, small: Program, large: Program) -> None:
        for eqn, other in zip(small.eqns, large.eqns, strict=True):
            if eqn.name in EACH:
                self.found.update(zip(eqn.outputs, map(self.read, eqn.inputs, other.inputs), strict=True))
                for some in (self.data, self.smooth):
                    some.update(o for o, a in zip(eqn.outputs, eqn.inputs, strict=True) if isinstance(a, int) and a in some)
                continue
            is_choice = eqn.name == "cond" and not (isinstance(eqn.inputs[0], int) and eqn.inputs[0] in self.data)
            is_followed = eqn.body is not None or is_choice  # which of its results are made of the data is told by what is inside
            if not (is_followed or self.data.isdisjoint(eqn.read)):
                self.data.update(eqn.outputs)
            if all(a in self.own or a in self.small.consts for a in eqn.read):
                self.own.update(o for o in eqn.outputs if self.own and self.sample_dims(o))
            read = eqn.inputs[1:] if eqn.name == "select_n" else () if eqn.name in COMPARE else eqn.inputs
            if not is_followed and any(isinstance(a, int) and a in self.smooth for a in read):
                self.smooth.update(eqn.outputs)
            if eqn.body is not None:
                self.loop(eqn, other)
            elif is_choice:
                self.found.update(zip(eqn.outputs, self.cond(eqn, other), strict=True))
            else:
                result = self.equation(eqn, other)
                self.found.update(dict.fromkeys(eqn.outputs, result))

    def read_by_samples(self) -> set[int]:
        """Values without a batch dim from which the forward pass goes on to values that have one."""
        found: set[int] = set()
        for eqn, _ in reversed([*self.small.walk()]):
            if eqn.name in EACH:
                found.update(a for a, o in zip(eqn.inputs, eqn.outputs, strict=True) if isinstance(a, int) and o in found)
            elif not is_backward(eqn) and any(self.sample_dims(o) or o in found for o in eqn.outputs):
                found.update(a for a in eqn.read if not self.sample_dims(a))
        return found

    def read(self, atom: Atom, other: Atom) -> Scaling:
        if isinstance(atom, int):
            return self.found.get(atom, UNKNOWN)
        a, b = np.asarray(atom.val), np.asarray(getattr(other, "val", np.nan))
        if is_zero(a) and is_zero(b):
            return ZERO
        if a.dtype.kind == "c" and not (a.imag.any() or b.imag.any()):  # as the number of samples in a mean of complex numbers
            a, b = a.real, b.real
        if a.size != 1 or b.size != 1 or a.dtype.kind not in "fiu" or np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
            return Scaling()
        return Scaling(self.power_between(float(a), float(b)))

    def power_between(self, small: float, large: float) -> float | None:
        """By which power of the batch a number grows, in halves; None where by none."""
        ratio = large / small if small else 0.0
        power = math.log(ratio, self.factor) if 0 < ratio < math.inf else math.inf
        return round(2 * power) / 2 if power < math.inf and abs(2 * power - round(2 * power)) < 1e-6 else None

    def equation(self, eqn: FlatEqn, other: FlatEqn) -> Scaling:
        inputs = [self.read(a, b) for a, b in zip(eqn.inputs, other.inputs, strict=True)]
        if self.adds_unlike(eqn, inputs) and self.may_be_scaled(eqn) and self.is_of_samples(eqn, inputs):
            inputs = self.alike_summands(eqn, inputs)
        found = self.grown(eqn, inputs)
        if found.is_zero:
            return found
        passes_on = eqn.name in PASSED_ON
        scales = eqn.name in ("mul", "div") and not any(isinstance(a, int) and a in self.data for a in eqn.inputs[1:])
        sums = [self.is_data_sum(a, s) for a, s in zip(eqn.inputs, inputs, strict=True)]
        return found._replace(
            is_ratio=self.divides_by_data(eqn, inputs) or any(s.is_ratio for s in inputs),
            is_sum=found.power is None and (passes_on or scales) and any(sums),
            extreme=self.extreme(eqn, inputs),
            is_mixed=any(s.is_mixed for s in inputs) or (is_backward(eqn) and self.adds_unlike(eqn, inputs)),
        )

    def adds_unlike(self, eqn: FlatEqn, inputs: list[Scaling]) -> bool:
        powers = {s.power for s in inputs if not s.is_zero}
        return eqn.name in ("add", "sub", "add_any") and None not in powers and len(powers) > 1

    def may_be_scaled(self, eqn: FlatEqn) -> bool:
        is_number = all(jax.dtypes.issubdtype(self.small.avals[o].dtype, np.inexact) for o in eqn.outputs)
        return self.lacks is not None and "." not in eqn.key and is_number and self.may_scale(eqn.key)

    def is_of_samples(self, eqn: FlatEqn, inputs: list[Scaling]) -> bool:
        """Whether summands are cotangents, or what every sample has: its input and a gradient of a mean by that, say. Not where one
        is a sum of what the network makes, of which each part has its own."""
        if is_backward(eqn):
            return True
        both = zip(eqn.inputs, inputs, strict=True)
        is_sum = any(isinstance(a, int) and a in self.data and s.power > 0 for a, s in both)
        return bool(self.sample_dims(eqn.outputs[0])) and not is_sum

    def alike_summands(self, eqn: FlatEqn, inputs: list[Scaling]) -> list[Scaling]:
        """Summands that grow differently as they grow when scaled: as that of the data does, or as a mean."""
        both = [(isinstance(a, int) and a in self.data, s.power) for a, s in zip(eqn.inputs, inputs, strict=True)]
        of_data = [power for is_data, power in both if is_data] or [power for _, power in both]
        power = min(of_data, key=abs)
        for j, s in enumerate(inputs):
            if s.power != power:
                self.lacks[eqn.key, j] = (s.power - power,)
        return [s._replace(power=power) for s in inputs]

    def divides_by_data(self, eqn: FlatEqn, inputs: list[Scaling]) -> bool:
        """Whether something is divided by a sum over the data, or, in the loss, one statistic of the batch by another.

        A statistic that comes back to samples is none of the loss: norms over the batch are made of such. What divides a
        statistic in the loss does so in its derivative, too, and there alone where nobody asks for the loss.
        """
        operand = 1 if eqn.name == "div" else 0 if eqn.name in POWERS and exponent_of(eqn) < 0 else None
        over = None if operand is None else eqn.inputs[operand]
        return isinstance(over, int) and over not in self.own and self.is_divisor(eqn, inputs, operand)

    def is_divisor(self, eqn: FlatEqn, inputs: list[Scaling], operand: int) -> bool:
        """As `divides_by_data`, of an equation that divides by this operand."""
        over = eqn.inputs[operand]
        if eqn.name == "div" and isinstance(over, int) and self.is_statistic(over) and over not in self.to_samples:
            number = eqn.inputs[0]
            if is_backward(eqn):
                return not self.sample_dims(number) or self.is_data_sum(over, inputs[1])
            is_smooth = isinstance(number, int) and number in self.smooth and not self.is_made_of(number, over)
            if "jvp(" in eqn.stack and is_smooth and self.is_statistic(number):
                self.found[over] = self.found[over]._replace(is_ratio=True)
                return True
        return self.is_data_sum(over, inputs[operand])

    def is_made_of(self, atom: Atom, other: Atom) -> bool:
        """Whether nothing of the data but `other` is in a value: as in the derivative of a root, over what it is a root of."""
        seen: set[int] = set()
        queue = [atom]
        while queue:
            a = queue.pop()
            if a == other or not isinstance(a, int) or a not in self.data or a in seen:
                continue
            if (eqn := self.made_by.get(a)) is None:
                return False
            seen.add(a)
            queue += eqn.inputs
        return True

    def is_statistic(self, atom: Atom) -> bool:
        """Whether a value is computed from the data, and has no batch dim."""
        return isinstance(atom, int) and atom in self.data and not self.sample_dims(atom)

    def is_data_sum(self, atom: Atom, scaling: Scaling) -> bool:
        return isinstance(atom, int) and atom in self.data and (scaling.is_sum or (scaling.power or 0) >= 1)

    def cond(self, eqn: FlatEqn, other: FlatEqn) -> list[Scaling]:
        """Of a choice that is the same for all of the batch: results grow as all branches say."""
        branches = [self.branch(eqn, other, *pair) for pair in branches_of(eqn, other)]
        for k, o in enumerate(eqn.outputs):
            if any(own[k] for _, own in branches) and all(own[k] or found[k].is_zero for found, own in branches):
                self.own.add(o)
        each = [list(found) for found in zip(*(found for found, _ in branches), strict=True)]
        return [of_either(self.alike_branches(eqn, k, found)) for k, found in enumerate(each)]

    def alike_branches(self, eqn: FlatEqn, k: int, found: list[Scaling]) -> list[Scaling]:
        """What branches give as result `k` as it grows when scaled: as what grows most does."""
        powers = {s.power for s in found if not s.is_zero}
        if len(powers) < 2 or None in powers or not self.may_be_scaled(eqn):
            return found
        power = max(powers)
        self.lacks[eqn.key, k] = tuple(0.0 if s.is_zero else s.power - power for s in found)
        return [s if s.is_zero else s._replace(power=power) for s in found]

    def branch(self, eqn: FlatEqn, other: FlatEqn, small: Program, large: Program) -> tuple[list[Scaling], list[bool]]:
        """How the results of one branch grow, unknown where its two traces differ; and which of them all samples have alike."""
        if not are_alike(small, large):
            return [UNKNOWN for _ in eqn.outputs], [False for _ in eqn.outputs]
        inner = _Scaler(small, large, self.factor, {}, ())
        given = list(zip(small.inputs, eqn.inputs[1:], other.inputs[1:], strict=True))
        inner.found.update((i, self.read(a, b)) for i, a, b in given)
        of_outer = (
            (inner.data, self.data), (inner.smooth, self.smooth), (inner.own, self.own), (inner.chunked, self.chunked),
            (inner.to_samples, self.to_samples),
        )  # fmt: skip
        for mine, some in of_outer:
            mine.update(i for i, a, _ in given if isinstance(a, int) and a in some)
        follow(small, inner.chunked)
        inner.run()
        for some, mine in ((self.data, inner.data), (self.smooth, inner.smooth), (self.to_samples, inner.to_samples)):
            some.update(o for o, a in zip(eqn.outputs, small.outputs, strict=True) if isinstance(a, int) and a in mine)
        found = [inner.read(a, b) for a, b in zip(small.outputs, large.outputs, strict=True)]
        return found, [isinstance(a, int) and a in inner.own for a in small.outputs]

    def after_trips(self, carried: int, after: Atom, begun: Scaling, trips: float | None) -> Scaling:
        """What a loop over chunks carries in the end: what every trip adds grows with their number, nobody knows how others do."""
        terms = added_up(carried, after, self.made_by.get)
        powers = {s.power for s in map(self.read, terms or (), terms or ()) if not s.is_zero}
        if terms is None or None in (*powers, trips) or len(powers) > 1:
            return UNKNOWN
        if not powers:
            return begun
        power = powers.pop() + trips
        return Scaling(power) if begun.is_zero or begun.power == power else UNKNOWN

    def loop(self, eqn: FlatEqn, other: FlatEqn) -> None:
        body, p = eqn.body, eqn.params
        num_consts, num_carry = p["num_consts"], p["num_carry"]
        values = [self.read(a, b) for a, b in zip(eqn.inputs, other.inputs, strict=True)]
        self.found.update(zip(body.inputs, values, strict=True))
        for some in (self.data, self.smooth):
            some.update(i for i, a in zip(body.inputs, eqn.inputs, strict=True) if isinstance(a, int) and a in some)
        handed = [k for k in range(len(body.inputs)) if not num_consts <= k < num_consts + num_carry]
        self.to_samples.update(body.inputs[k] for k in handed if isinstance(a := eqn.inputs[k], int) and a in self.to_samples)
        carried, is_settled = body.inputs[num_consts : num_consts + num_carry], False
        for _ in range(3):  # a carry that starts as zero takes the power of what is added to it
            self.block(body, other.body)
            results = [self.read(a, b) for a, b in zip(body.outputs, other.body.outputs, strict=True)]
            before = [self.found[i] for i in carried], len(self.data)
            for i, result in zip(carried, results, strict=False):
                old = self.found[i]
                if old.is_zero:
                    self.found[i] = result
                elif not result.is_zero and old.power != result.power:
                    self.found[i] = UNKNOWN
            for some in (self.data, self.smooth):
                some.update(i for i, a in zip(carried, body.outputs, strict=False) if isinstance(a, int) and a in some)
            if is_settled := before == ([self.found[i] for i in carried], len(self.data)):
                break
        finals = [self.found[i] for i in carried]
        if has_more_trips(eqn, other):
            trips = self.power_between(p["length"], other.params["length"])
            begun = values[num_consts:]
            finals = [self.after_trips(*at, trips) for at in zip(carried, body.outputs, begun, strict=False)]
        self.found.update(zip(eqn.outputs, [*finals, *results[num_carry:]], strict=True))
        for some in (self.data, self.smooth):  # not what is made of weights alone, as their norms that it keeps for its derivative
            of_some = [isinstance(a, int) and a in some for a in body.outputs]
            some.update(o for o, is_so in zip(eqn.outputs, of_some, strict=True) if is_so or (any(of_some) and not is_settled))
        ends = zip(eqn.outputs, body.outputs, strict=True)
        self.to_samples.update(o for o, a in ends if isinstance(a, int) and a in self.to_samples)
