"""Floating-point operations of one equation, from its shapes (as XLA's own cost analysis counts them).

One per element of what an elementwise equation makes, whatever its type;
products count two per multiply-add, and of a convolution only the window
positions that meet a real input element (no padding, no zero of a dilation).
Of a `while`, whose trips nobody knows, one trip counts, as XLA does, and of the branches of a `cond` the mean.
Unlike XLA, which keeps a second counter for them, exponentials and the like count one.
"""

from __future__ import annotations

import math

from soapjax.graph.rules import linalg_rules
from soapjax.graph.rules.control_rules import body_flops
from soapjax.graph.rules.heavy_rules import POOLS
from soapjax.graph.trace.program import FlatEqn, Program

_FREE = {
    "broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "dynamic_slice", "dynamic_update_slice",
    "concatenate", "stack", "unstack", "tile", "pad", "rev", "gather", "iota", "copy", "bitcast_convert_type", "stop_gradient",
    "optimization_barrier", "name", "random_wrap", "random_unwrap", "random_seed",
    "random_fold_in", "random_split", "random_clone", "split", "sort", "top_k", "sharding_constraint", "reshard", "device_put",
    "scatter", "empty", "empty2",
}  # fmt: skip
# The most frequent of those that count one per element of the result.
_ONE_PER_ELEMENT = {
    "add", "sub", "mul", "div", "add_any", "neg", "sqrt", "rsqrt", "exp", "log", "max", "min", "convert_element_type",
}  # fmt: skip
# Threefry: 20 rounds of an addition, a rotation (two shifts, an or) and an xor make two words.
_PER_RANDOM_WORD = 50.0


def flops_of(eqn: FlatEqn, program: Program) -> float:
    """FLOPs of one execution of `eqn` on its full shapes; a multiply-add counts two."""
    name = eqn.name
    if name in _FREE:
        return 0.0
    out = tuple(program.aval(eqn.outputs[0]).shape) if eqn.outputs else ()
    if name in _ONE_PER_ELEMENT:
        return float(math.prod(out))
    ins = [tuple(program.aval(a).shape) for a in eqn.inputs]
    if name == "dot_general":
        (lhs_contract, _), _ = eqn.params["dimension_numbers"]
        return 2.0 * math.prod(out) * math.prod(ins[0][d] for d in lhs_contract)
    if name == "ragged_dot_general":
        return _ragged_dot(eqn, ins)
    if name == "conv_general_dilated":
        return _conv(eqn, ins, out)
    if name in ("while", "cond"):
        return sum(share * flops_of(e, body) * n for body, share in body_flops(eqn) for e, n in body.walk() if e.body is None)
    if name in linalg_rules.NAMES:
        return linalg_rules.linalg_flops(eqn, ins)
    if name == "random_bits":
        return _PER_RANDOM_WORD * math.prod(out)
    if name == "integer_pow":
        power = abs(eqn.params["y"])
        return float(math.prod(out) * max(0, power.bit_length() - 1 + power.bit_count() - 1))
    if name in POOLS:
        return float(math.prod(out) * (math.prod(eqn.params["window_dimensions"]) - 1))
    if name == "select_and_scatter_add":
        return float(math.prod(ins[0]) * math.prod(eqn.params["window_dimensions"]))
    if name.startswith("reduce_") and name != "reduce_precision":
        return float(max(math.prod(ins[0]) - math.prod(out), 0))  # of nothing, a reduction is a constant
    if name.startswith(("cum", "arg")):
        return float(math.prod(ins[0]))
    if name.startswith("scatter"):
        return float(math.prod(ins[2]))
    return float(math.prod(out))


def _ragged_dot(eqn: FlatEqn, ins: list[tuple[int, ...]]) -> float:
    """Every row meets one group's matrix, however many groups there are."""
    dn = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = dn.dot_dimension_numbers
    columns = [n for d, n in enumerate(ins[1]) if d not in (*contracted, *batch, *dn.rhs_group_dimensions)]
    return 2.0 * math.prod(ins[0]) * math.prod(columns)


def _conv(eqn: FlatEqn, ins: list[tuple[int, ...]], out: tuple[int, ...]) -> float:
    p, dn = eqn.params, eqn.params["dimension_numbers"]
    flops = 2.0 * (ins[0][dn.lhs_spec[0]] // p["batch_group_count"]) * math.prod(ins[1][d] for d in dn.rhs_spec[:2])
    for k, (low, _) in enumerate(p["padding"]):
        n, w, m = ins[0][dn.lhs_spec[2 + k]], ins[1][dn.rhs_spec[2 + k]], out[dn.out_spec[2 + k]]
        dilations = {"lhs_dilation": p["lhs_dilation"][k], "rhs_dilation": p["rhs_dilation"][k]}
        flops *= window_pairs(n, w, m, stride=p["window_strides"][k], low=low, **dilations)
    return flops


def conv_flops_by_shape(eqn: FlatEqn, program: Program) -> float:
    """FLOPs of a convolution with the window positions that meet padding counted too."""
    p, dn = eqn.params, eqn.params["dimension_numbers"]
    kernel = program.aval(eqn.inputs[1]).shape
    per_output = math.prod(kernel[d] for d in dn.rhs_spec[1:])
    return 2.0 * math.prod(program.aval(eqn.outputs[0]).shape) * per_output / p["batch_group_count"]


def window_pairs(n: int, w: int, m: int, *, stride: int, low: int, lhs_dilation: int, rhs_dilation: int) -> int:
    """Pairs of an output and a kernel position of one spatial dim that meet an input element."""
    count = 0
    for i in range(w):  # i-th kernel position meets element (o·stride + shift) / lhs_dilation of the input
        shift = i * rhs_dilation - low
        # Outputs o whose place is inside the dilated input, then those among them that hit an element, not a zero.
        first, last = max(0, -(shift // stride)), min(m - 1, ((n - 1) * lhs_dilation - shift) // stride)
        period = lhs_dilation // math.gcd(lhs_dilation, stride)
        hit = next((o for o in range(first, min(first + period, last + 1)) if (o * stride + shift) % lhs_dilation == 0), None)
        count += 0 if hit is None else (last - hit) // period + 1
    return count
