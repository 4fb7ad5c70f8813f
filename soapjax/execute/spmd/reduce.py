"""Reductions in the middle of light equations exactly as planned: on local blocks, then over the planned axes.

The partitioner is free to reduce over other axes than those that the operator splits, and on CPUs makes an
all-reduce and a slice of what is planned as a reduce-scatter.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from soapjax.execute.spmd.heavy import Bind, axes_of, combined, partition_spec, with_leading
from soapjax.graph.trace.program import FlatEqn
from soapjax.strategy.layout import Spec

REDUCTIONS = {"reduce_sum": jax.lax.psum, "reduce_max": jax.lax.pmax, "reduce_min": jax.lax.pmin}


def run_reduction(
    eqn: FlatEqn, x: Any, in_spec: Spec, raw_spec: Spec, home_spec: Spec, mesh: Mesh, bind: Bind, kept: tuple[str, ...] = ()
) -> Any:
    """One reduction of `x`, laid out as `in_spec`.

    Args:
      raw_spec: layout of the result before partial results are combined.
      home_spec: layout of the result after; an axis in it but not in `raw_spec` is reduce-scattered (sums only).
      kept: axes whose partial sums stay apart, as of `run_heavy`.
    """
    partial = axes_of(in_spec) - axes_of(raw_spec) - set(kept)

    def body(block: Any) -> Any:
        out = combined(bind([block], eqn.params)[0], partial, home_spec, mesh, REDUCTIONS[eqn.name])
        return with_leading(out, kept)

    return jax.shard_map(
        body, mesh=mesh, in_specs=partition_spec(in_spec), out_specs=partition_spec((*((n,) for n in kept), *home_spec)),
        axis_names=set(mesh.axis_names), check_vma=False,
    )(x)  # fmt: skip
