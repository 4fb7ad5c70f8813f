"""Frozen weights, as those beside which adapters (LoRA) are trained: state that the passes read and the step gives back as it was,
weights that come as arguments of their own, and target networks, which follow parameters.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from soapjax.graph.passes.phases import UPDATE, Phases
from soapjax.graph.trace.program import Atom
from soapjax.graph.trace.tracing import TracedStep
from soapjax.graph.trace.values import Values


class FrozenWeight(NamedTuple):
    path: str
    leaf: int  # position among the step's inputs
    value: int


def frozen_weights(step: TracedStep, values: Values, phases: Phases, given: Collection[int]) -> list[FrozenWeight]:
    """Of a step that trains something: beside parameters, all arrays that come back as they were, or follow parameters, and are of
    numbers with fractions, or of bytes (quantised weights). Others are random keys, or places of something.

    What an optimizer gives an update of zeros (`optax.set_to_zero`) comes back unchanged.

    Args:
      given: inputs (values) that are neither state nor data (samples.py).
    """
    if phases.is_single_phase or not phases.parameters:
        return []
    program, taken = step.program, {leaf for p in phases.parameters for leaf in p.leaves}
    read = {root for eqn in program.leaves if phases.phase[eqn.key] != UPDATE for root in values.sources(eqn)}
    found = []
    for leaf, value in enumerate(program.inputs):
        aval = program.avals[value]
        is_array = bool(aval.shape) and aval.size > 1 and _is_of_weights(aval.dtype)
        out = program.outputs[step.state_pairs[leaf]] if leaf in step.state_pairs else None
        is_unchanged = value in given if out is None else isinstance(out, int) and _is_unchanged(values, value, out)
        if leaf not in taken and value in read and is_array and (is_unchanged or leaf in phases.followers):
            found.append(FrozenWeight(step.in_paths[leaf], leaf, value))
    return found


def _is_of_weights(dtype: Any) -> bool:
    is_byte = jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize == 1
    return jnp.issubdtype(dtype, jnp.inexact) or is_byte


def _is_unchanged(values: Values, value: int, out: int) -> bool:
    """Whether `out` is `value`, or `value` and zeros added up."""
    root = values.of(out).root
    producer = values.producer.get(root)
    if root == value or producer is None:
        return root == value
    if producer.name not in ("add", "add_any"):
        return False
    others = [a for a in producer.inputs if not isinstance(a, int) or values.of(a).root != value]
    return len(others) == 1 and _is_zero(values, others[0])


def _is_zero(values: Values, atom: Atom) -> bool:
    """Of a literal, and what is spread or cast of one."""
    while isinstance(atom, int):
        producer = values.producer.get(values.of(atom).root)
        if producer is None or producer.name not in ("broadcast_in_dim", "convert_element_type") or len(producer.inputs) != 1:
            return False
        (atom,) = producer.inputs
    return bool(np.all(np.asarray(atom.val) == 0))
