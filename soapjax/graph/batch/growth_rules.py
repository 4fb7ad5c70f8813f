"""By which power of the batch the result of one equation grows, given those of its operands (batch_scaling.py).

A rule is a name in one of the sets below, or a line of `GrowthRules.grown`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from soapjax.graph.batch.chunks import chunked
from soapjax.graph.batch.two_traces import sample_dims
from soapjax.graph.trace.program import Atom, FlatEqn, Program


class Scaling(NamedTuple):
    """How one value grows; `power` None where that is not known.

      is_zero: as good as any power.
      is_ratio: over a sum or mean of the data (a mean with weights).
      is_sum: of unknown power, but a sum over the data with something added, or a bound: a divisor that is kept from zero.
      extreme: "max" or "min", the largest or smallest of all samples, which no sum or mean of parts gives; "made" of such.
      is_mixed: of the backward pass, a sum of what grows differently: of a sum over the batch and a penalty of the weights, say.
    """

    power: float | None = 0.0
    is_zero: bool = False
    is_ratio: bool = False
    is_sum: bool = False
    extreme: str = ""
    is_mixed: bool = False


UNKNOWN = Scaling(None)
ZERO = Scaling(0.0, True)

_KEEP = {
    "neg", "convert_element_type", "reshape", "transpose", "broadcast_in_dim", "slice", "squeeze", "copy", "copy_p", "rev",
    "reduce_precision", "real", "imag", "name", "expand_dims", "abs", "reduce_max", "reduce_min",
    "stop_gradient", "sharding_constraint", "reduce_window_max", "split", "unstack", "conj", "sort", "tile", "cummax", "cummin",
    "top_k", "fft",
}  # fmt: skip
EACH = {"optimization_barrier", "device_put"}  # of many values, each as it was
_OPAQUE = {"cond", "while", "triangular_solve"}
_FIRST = {"gather", "dynamic_slice"}  # as the first operand; the others are indices
_ALIKE = {
    "add", "sub", "add_any", "max", "min", "concatenate", "stack", "pad", "rem", "clamp", "dynamic_update_slice", "nextafter",
    "complex",
}  # fmt: skip
PASSED_ON = _KEEP | _FIRST | _ALIKE | {"select_n", "scatter"}
_EXTREMES = {"reduce_max": "max", "reduce_min": "min"}
_IN_ORDER = {"convert_element_type", "reshape", "transpose", "squeeze", "copy", "name", "stop_gradient", "reduce_precision"}
COMPARE = {"eq", "ne", "lt", "le", "gt", "ge", "argmax", "argmin", "sign", "is_finite"}
_UNREAD = {"empty", "empty2"}  # what a branch hands on in the place of what another keeps for its derivative
_SUMS = {"reduce_sum", "reduce_window_sum", "cumsum"}
_PRODUCTS = {"mul", "dot_general", "conv_general_dilated", "ragged_dot_general"}  # of the first two operands
POWERS = {"integer_pow": None, "square": 2, "sqrt": 0.5, "rsqrt": -0.5}  # exponents; of the first it is a parameter


def exponent_of(eqn: FlatEqn) -> float:
    return POWERS[eqn.name] or eqn.params["y"]


class GrowthRules:
    """Of equations of two traces of one step.

    Attributes:
      data: values that are made of the batch; of inputs those that have it, others are added as they are met.
      chunked: values that are a chunk of the batch as a whole.
    """

    def __init__(self, small: Program, large: Program):
        self.small, self.large = small, large
        self.chunked = chunked(small, large)
        self.data = {i for i in small.inputs if self.sample_dims(i)}

    def sample_dims(self, atom: Atom) -> tuple[int, ...]:
        """Dims of samples; one that no operand has where a whole chunk is as one (chunks.py)."""
        return (-1,) if isinstance(atom, int) and atom in self.chunked else sample_dims(self.small, self.large, atom)

    def extreme(self, eqn: FlatEqn, inputs: list[Scaling]) -> str:
        kind = _EXTREMES.get(eqn.name, "")
        if kind and self.vanished(eqn) and not self.data.isdisjoint(eqn.read):
            return kind
        found = [s.extreme for s in inputs if s.extreme] if eqn.name in PASSED_ON else []
        is_same = len(inputs) == 1 and (eqn.name in _IN_ORDER or kind in found)
        return "" if not found else found[0] if is_same else "made"

    def grown(self, eqn: FlatEqn, inputs: list[Scaling]) -> Scaling:
        """The power of an equation's result."""
        name = eqn.name
        if name in _UNREAD:
            return ZERO
        if any(s.power is None for s in inputs):
            return UNKNOWN
        powers = [s.power for s in inputs if not s.is_zero]

        def alike(found: list[float]) -> Scaling:
            return ZERO if not found else Scaling(found[0]) if len(set(found)) == 1 else UNKNOWN

        if name in _KEEP or name in _FIRST:
            return alike([s.power for s in inputs[:1] if not s.is_zero])
        if name in _ALIKE:
            return Scaling() if len(set(powers)) > 1 and self.is_index(eqn) else alike(powers)
        if name == "select_n":
            return alike([s.power for s in inputs[1:] if not s.is_zero])
        if name in COMPARE:
            return Scaling() if len(set(powers)) <= 1 else UNKNOWN
        if name in _PRODUCTS:
            if any(s.is_zero for s in inputs[:2]):
                return ZERO
            return Scaling(sum(s.power or 0.0 for s in inputs[:2]) + (name != "mul" and self.contracts_samples(eqn)))
        if name == "div":
            return ZERO if inputs[0].is_zero else Scaling(inputs[0].power - inputs[1].power)
        if name in POWERS:
            exponent = exponent_of(eqn)
            return ZERO if inputs[0].is_zero and exponent > 0 else Scaling(inputs[0].power * exponent)
        if name in _SUMS:
            return ZERO if inputs[0].is_zero else Scaling(inputs[0].power + self.vanished(eqn))
        if name in ("scatter-add", "scatter", "scatter-sub"):
            adds = bool(self.sample_dims(eqn.inputs[2])) and not self.sample_dims(eqn.outputs[0])
            updates = [] if inputs[2].is_zero else [inputs[2].power + (adds and name != "scatter")]
            return alike([*([] if inputs[0].is_zero else [inputs[0].power]), *updates])
        if name == "select_and_scatter_add":
            return alike([s.power for s in inputs[:1] if not s.is_zero])
        if name in _OPAQUE and is_backward(eqn) and len(grown := {p for p in powers if p}) == 1 and not self.vanished(eqn):
            return Scaling(grown.pop())  # linear in cotangents
        # What is not linear: alike in both where its operands are, unless it mixes samples (to more than whether one does so).
        mixes = self.vanished(eqn) and self.small.avals[eqn.outputs[0]].dtype != np.bool_
        return Scaling() if not any(powers) and not mixes else UNKNOWN

    def is_index(self, eqn: FlatEqn) -> bool:
        """Whether every sample has a whole number: an index, counted from the end of the batch where it is below zero."""
        aval = self.small.avals[eqn.outputs[0]]
        return np.issubdtype(aval.dtype, np.integer) and bool(self.sample_dims(eqn.outputs[0]))

    def vanished(self, eqn: FlatEqn) -> bool:
        """Whether no result has the batch dim of the operands."""
        return any(self.sample_dims(a) for a in eqn.inputs) and not any(self.sample_dims(o) for o in eqn.outputs)

    def contracts_samples(self, eqn: FlatEqn) -> bool:
        if eqn.name == "dot_general":
            (lhs, _), _ = eqn.params["dimension_numbers"]
            return bool(set(lhs) & set(self.sample_dims(eqn.inputs[0])))
        # Of a convolution, or a product of groups of rows, only the weight gradient sums over the batch: it has no sample dim.
        return bool(self.sample_dims(eqn.inputs[0])) and not self.sample_dims(eqn.outputs[0])


def of_either(found: Collection[Scaling]) -> Scaling:
    """What grows as one of these, nobody knows which."""
    grown = [s for s in found if not s.is_zero]
    if not grown:
        return ZERO
    power = grown[0].power if len({s.power for s in grown}) == 1 else None
    extreme = "made" if any(s.extreme for s in grown) else ""
    any_of = {k: any(getattr(s, k) for s in grown) for k in ("is_ratio", "is_mixed")}
    return Scaling(power, is_sum=power is None and any(s.is_sum or s.power == 1 for s in grown), extreme=extreme, **any_of)


def is_backward(eqn: FlatEqn) -> bool:
    """Whether an equation is of the backward pass, and not of what it computes again."""
    return "transpose(" in eqn.stack and "rematted_computation" not in eqn.stack


def is_zero(value: object) -> bool:
    a = np.asarray(value) if not hasattr(value, "dtype") or isinstance(value, np.ndarray | np.generic) else None
    return a is not None and a.size == 1 and a.dtype.kind in "fiuc" and not a.item()
