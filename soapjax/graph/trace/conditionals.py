"""A `cond` between two updates of the state, element by element: both are computed, and one is taken.

    new, moments = jax.lax.cond(is_finite, lambda: update(grads, moments), lambda: (zeros, moments))   # optax.apply_if_finite

As one equation it has to have all parameters, gradients and moments at one place: a stage of a pipeline was sent those of all
others, and sharded gradients were gathered. Element by element, every stage updates what it holds, and XLA fuses what is chosen
with what it is chosen from. `optax.MultiSteps`, which updates after so many steps only, then computes an update in each of them: a
pass over the state, beside the passes of the network.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from jax import numpy as jnp

_LAYOUTS = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims"}
_LIGHT = _LAYOUTS | {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"}
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}
_FEWEST = 2  # arrays that are chosen: the choice of one activation is no update


def is_choice_of_updates(eqn: Any, elementwise: Container[str]) -> bool:
    """Whether a `cond` of two branches makes several arrays, each like one that it is given, of light equations without effects."""
    branches = eqn.params["branches"]
    if len(branches) != 2 or eqn.effects:
        return False
    given = [(v.aval.shape, v.aval.dtype) for v in eqn.invars[1:]]
    made = [(v.aval.shape, v.aval.dtype) for v in eqn.outvars if v.aval.shape]
    numbers = all(jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_) for _, dtype in (*given, *made))
    is_update = len(made) >= _FEWEST and set(made) <= set(given)
    return is_update and numbers and all(_is_light(b.jaxpr, elementwise) for b in branches)


def chosen(index: Any, first: Any, second: Any) -> Any:
    """What `cond` gives of its branches' results: the second's for any index above 0."""
    return jnp.where(index > 0, second, first)


def _is_light(jaxpr: Any, elementwise: Container[str]) -> bool:
    for eqn in jaxpr.eqns:
        if (name := eqn.primitive.name) in _CALLS:
            inner = eqn.params[_CALLS[name]]
            if not _is_light(getattr(inner, "jaxpr", inner), elementwise):
                return False
        elif name not in elementwise and name not in _LIGHT:
            return False
    return True
