"""Equations that treat every row by itself, and whose operands the partitioner gathers all the same: devices run their own rows.

XLA (0.10.2) replicates an FFT, and on CPUs `top_k`, however the dims are split that they leave alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from soapjax.execute.spmd.on_blocks import axes_of, partition_spec
from soapjax.execute.spmd.plan_layouts import PlanLayouts
from soapjax.graph.trace.program import FlatEqn

BY_ROW = ("fft", "top_k", "approx_top_k")
Bind = Callable[[FlatEqn, list[Any], dict[str, Any]], list[Any]]  # runs an equation on operands, with such parameters


def run_by_row(k: int, eqn: FlatEqn, inputs: list[Any], layouts: PlanLayouts, bind: Bind) -> list[Any]:
    """The results of an equation `BY_ROW` of task `k`, split as its one operand is in that operator.

    A batch that is made anew of whole rows (an FFT over the samples) is in whole rows here, too: its block is taken afterwards.
    """
    (operand,) = layouts.binding.dims_of[eqn.key].operands
    spec = layouts.spec_from(layouts.graph.tasks[k].operator, operand)
    if not axes_of(spec):
        return bind(eqn, inputs, eqn.params)
    rows = partition_spec(spec)
    run = jax.shard_map(
        lambda x: tuple(bind(eqn, [x], eqn.params)), mesh=layouts.mesh, check_vma=False,
        in_specs=rows, out_specs=(rows,) * len(eqn.outputs),
    )  # fmt: skip
    return list(run(*inputs))
