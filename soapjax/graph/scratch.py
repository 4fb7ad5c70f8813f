"""Work space of equations that GPU compilers rewrite into several kernels.

XLA has no GPU kernel for the gradient of max-pooling: it first finds the place of every window's maximum (one int32 per dim and
window), then adds up at these places in an array of zeros, of which it keeps a second one.
"""

from __future__ import annotations

import math

from soapjax.graph.program import FlatEqn, Program

_INDEX_BYTES = 4
_ZEROS = 2


def scratch_of(eqn: FlatEqn, program: Program) -> float:
    """Bytes of work space per byte of the equation's result, on GPUs."""
    if eqn.name != "select_and_scatter_add":
        return 0.0
    windows, result = program.aval(eqn.inputs[0]), program.aval(eqn.outputs[0])
    indices = len(result.shape) * _INDEX_BYTES * math.prod(windows.shape)
    return _ZEROS + indices / (result.dtype.itemsize * math.prod(result.shape))
