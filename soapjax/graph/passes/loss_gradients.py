"""The gradient of picking the labels' scores, which XLA adds into that of their normalisation.

A scatter onto zeros whose result is added to something becomes a scatter onto that.
"""

from __future__ import annotations

import jax.extend.core as jex_core
import numpy as np

from soapjax.graph.passes.units import ADDITIONS
from soapjax.graph.trace.program import FlatEqn
from soapjax.graph.trace.values import Uses, Values


def adds_to_sum(eqn: FlatEqn, values: Values, uses: Uses) -> bool:
    """Whether an equation adds to zeros what its only reader adds to something else."""
    if eqn.name != "scatter-add" or not isinstance(eqn.inputs[0], int):
        return False
    onto = values.producer.get(values.of(eqn.inputs[0]).root)
    start = onto.inputs[0] if onto is not None and onto.name == "broadcast_in_dim" else None
    reader = uses.only_reader(values.of(eqn.outputs[0]).root)
    is_zero = isinstance(start, jex_core.Literal) and not np.any(start.val)
    return is_zero and reader is not None and reader.name in ADDITIONS
