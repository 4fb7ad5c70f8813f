"""Floating-point operations of one equation, from its shapes (as XLA's own cost analysis counts them)."""

from __future__ import annotations

import math

import numpy as np

from soapjax.graph.program import FlatEqn, Program

_FREE = {
    "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "slice", "dynamic_slice", "dynamic_update_slice",
    "concatenate", "pad", "rev", "gather", "iota", "copy", "convert_element_type", "bitcast_convert_type", "stop_gradient",
    "select_n", "optimization_barrier", "name", "random_bits", "random_wrap", "random_unwrap", "random_seed",
    "random_fold_in", "random_split", "random_clone", "split", "sort", "top_k", "argmax", "argmin", "sharding_constraint",
    "scatter", "empty", "empty2", "while", "cond",
}  # fmt: skip


def flops_of(eqn: FlatEqn, program: Program) -> float:
    """FLOPs of one execution of `eqn` on its full shapes; a multiply-add counts two."""
    ins = [tuple(program.aval(a).shape) for a in eqn.inputs]
    out = tuple(program.aval(eqn.outputs[0]).shape) if eqn.outputs else ()
    name = eqn.name
    if name == "dot_general":
        (lhs_contract, _), _ = eqn.params["dimension_numbers"]
        return 2.0 * math.prod(out) * math.prod(ins[0][d] for d in lhs_contract)
    if name == "conv_general_dilated":
        dn = eqn.params["dimension_numbers"]
        kernel = ins[1]
        per_output = math.prod(kernel[d] for d in dn.rhs_spec[1:])
        return 2.0 * math.prod(out) * per_output / eqn.params["batch_group_count"]
    if name in _FREE:
        return 0.0
    if not np.issubdtype(np.dtype(_dtype(program, eqn)), np.inexact):
        return 0.0
    if name in ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"):
        return float(math.prod(out) * (math.prod(eqn.params["window_dimensions"]) - 1))
    if name == "select_and_scatter_add":
        return float(math.prod(ins[0]) * math.prod(eqn.params["window_dimensions"]))
    if name.startswith(("reduce_", "cum")):
        return float(math.prod(ins[0]))
    if name.startswith("scatter"):
        return float(math.prod(ins[2]))
    return float(math.prod(out))


def _dtype(program: Program, eqn: FlatEqn) -> object:
    dtype = program.aval(eqn.outputs[0]).dtype if eqn.outputs else np.dtype("int32")
    # Key types and bfloat16 are no plain NumPy dtypes.
    text = str(dtype)
    return "float32" if text in ("bfloat16", "float16") else (text if text in np.sctypeDict else "int32")
