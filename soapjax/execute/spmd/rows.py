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
    """The results of an equation `BY_ROW` of task `k`, split as its operator is."""
    dims, operator = layouts.binding.dims_of[eqn.key], layouts.graph.tasks[k].operator
    in_specs, out_specs = ([layouts.spec_from(operator, d) for d in of] for of in (dims.operands, dims.results))
    if not any(map(axes_of, out_specs)):
        return bind(eqn, inputs, eqn.params)
    run = jax.shard_map(
        lambda *rows: tuple(bind(eqn, list(rows), eqn.params)), mesh=layouts.mesh, check_vma=False,
        in_specs=tuple(map(partition_spec, in_specs)), out_specs=tuple(map(partition_spec, out_specs)),
    )  # fmt: skip
    return list(run(*inputs))
