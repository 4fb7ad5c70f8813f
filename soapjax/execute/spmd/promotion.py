"""Evaluating a program in float64: the proof that a plan computes the same numbers.

Every float32, bfloat16 and float16 value becomes float64; equations keep their order and
addresses, so that a plan's constraints apply unchanged. Bit tricks (random numbers) keep their own types.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from soapjax.graph.rules.light_rules import is_known
from soapjax.graph.trace.program import FlatEqn

_HIGH = {"float32": "float64", "bfloat16": "float64", "float16": "float64", "complex64": "complex128"}
_BITS = {"bitcast_convert_type", "random_bits", "rng_bit_generator", "random_wrap", "random_unwrap", "nextafter"}
_SCATTERS = {"scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"}


def is_low(dtype: Any) -> bool:
    return str(dtype) in _HIGH


def high(dtype: Any) -> Any:
    """The type in which a value of `dtype` is evaluated: float64 (complex128) for floats, itself for others."""
    return np.dtype(_HIGH[str(dtype)]) if is_low(dtype) else dtype


def in_type_of(aval: Any, x: Any) -> Any:
    """An argument that was traced as `aval`, in the type in which that is evaluated."""
    return x if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) else jnp.asarray(x, high(aval.dtype))


def promote(x: Any) -> Any:
    """`x` in float64 where it is a floating-point array of lower precision."""
    return jnp.asarray(x, high(x.dtype)) if hasattr(x, "dtype") and is_low(x.dtype) else x


def promoted_bind(eqn: FlatEqn, inputs: list[Any], in_dtypes: list[Any], params: dict[str, Any]) -> list[Any]:
    """The results of one equation with all floats in float64."""
    name = eqn.name
    if name == "reduce_precision":
        return list(inputs)
    if name in _SCATTERS and (name != "scatter" or params["update_jaxpr"] is None):
        keep = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        return [getattr(jax.lax, name.replace("-", "_"))(*inputs, **{k: params[k] for k in keep})]
    if name not in _BITS and not any(k.endswith(("jaxpr", "branches")) for k in params):
        try:
            return results_of(eqn, inputs, {k: _promoted_param(v) for k, v in params.items()})
        except Exception:
            if is_known(name):
                raise
            # A primitive of another library, which holds the types of its operands in a way of its own: evaluated in them.
    low = [jnp.asarray(x, d) if is_low(d) else x for x, d in zip(inputs, in_dtypes, strict=True)]
    return [promote(x) for x in results_of(eqn, low, params)]


def _promoted_param(value: Any) -> Any:
    is_dtype = isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic))
    return high(np.dtype(value)) if is_dtype else value


def results_of(eqn: FlatEqn, inputs: list[Any], params: dict[str, Any]) -> list[Any]:
    """What an equation makes of such inputs."""
    out = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]
