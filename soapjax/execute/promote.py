"""Evaluating a program in float64: the proof that a plan computes the same numbers.

Every float32, bfloat16 and float16 value becomes float64; equations keep their order and
addresses, so that a plan's constraints apply unchanged. Bit tricks (random numbers) keep their own types.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from soapjax.graph.program import FlatEqn

_LOW = {"float32", "bfloat16", "float16"}
_BITS = {"bitcast_convert_type", "random_bits", "rng_bit_generator", "random_wrap", "random_unwrap", "nextafter"}
_SCATTERS = {
    "scatter-add": jax.lax.scatter_add,
    "scatter": jax.lax.scatter,
    "scatter-mul": jax.lax.scatter_mul,
    "scatter_min": jax.lax.scatter_min,
    "scatter_max": jax.lax.scatter_max,
}


def is_low(dtype: Any) -> bool:
    return str(dtype) in _LOW


def promote(x: Any) -> Any:
    """`x` in float64 where it is a floating-point array of lower precision."""
    return jnp.asarray(x, jnp.float64) if hasattr(x, "dtype") and is_low(x.dtype) else x


def promoted_bind(eqn: FlatEqn, inputs: list[Any], in_dtypes: list[Any], params: dict[str, Any]) -> list[Any]:
    """The results of one equation with all floats in float64."""
    name = eqn.name
    if name == "reduce_precision":
        return list(inputs)
    if name in _SCATTERS:
        keep = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        return [_SCATTERS[name](*inputs, **{k: params[k] for k in keep})]
    if name in _BITS or any(k.endswith("jaxpr") for k in params):
        low = [jnp.asarray(x, d) if is_low(d) else x for x, d in zip(inputs, in_dtypes, strict=True)]
        return [promote(x) for x in _listed(eqn, low, params)]
    return _listed(eqn, inputs, {k: _promoted_param(v) for k, v in params.items()})


def _promoted_param(value: Any) -> Any:
    is_dtype = isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic))
    return np.dtype("float64") if is_dtype and is_low(np.dtype(value)) else value


def _listed(eqn: FlatEqn, inputs: list[Any], params: dict[str, Any]) -> list[Any]:
    out = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]
