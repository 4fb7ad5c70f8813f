"""Equations that GPU compilers rewrite: work space that several kernels need, and room that one kernel saves.

XLA has no GPU kernel for the gradient of max-pooling: it first finds the place of every window's maximum (one int32 per dim and
window), then adds up at these places in an array of zeros, of which it keeps a second one.

A scatter onto zeros whose result is added to something becomes a scatter onto that: the gradient of picking the labels' scores
is written into that of their normalisation.
"""

from __future__ import annotations

import math

import jax.extend.core as jex_core
import numpy as np

from soapjax.graph.program import FlatEqn, Program
from soapjax.graph.units import ADDITIONS
from soapjax.graph.values import Uses, Values

_INDEX_BYTES = 4
_ZEROS = 2


def scratch_of(eqn: FlatEqn, program: Program) -> float:
    """Bytes of work space per byte of the equation's result, on GPUs."""
    if eqn.name != "select_and_scatter_add":
        return 0.0
    windows, result = program.aval(eqn.inputs[0]), program.aval(eqn.outputs[0])
    indices = len(result.shape) * _INDEX_BYTES * math.prod(windows.shape)
    return _ZEROS + indices / (result.dtype.itemsize * math.prod(result.shape))


def adds_to_sum(eqn: FlatEqn, program: Program, values: Values, uses: Uses) -> bool:
    """Whether an equation adds to zeros what its only reader adds to something else."""
    if eqn.name != "scatter-add" or not isinstance(eqn.inputs[0], int):
        return False
    onto = values.producer.get(values.of(eqn.inputs[0]).root)
    start = onto.inputs[0] if onto is not None and onto.name == "broadcast_in_dim" else None
    reader = uses.only_reader(values.of(eqn.outputs[0]).root)
    is_zero = isinstance(start, jex_core.Literal) and not np.any(start.val)
    return is_zero and reader is not None and reader.name in ADDITIONS
