"""Scatter-adds (the gradient of an embedding) as planned: each device adds up its own updates, then the sums are added.

The partitioner gathers all updates to every device instead.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from soapjax.execute.heavy import Bind, axes_of, combined, partition_spec, with_leading
from soapjax.graph.program import FlatEqn
from soapjax.strategy.layout import Spec


def run_scatter_add(
    eqn: FlatEqn, inputs: list[Any], in_specs: list[Spec], raw_spec: Spec, home_spec: Spec, mesh: Mesh, bind: Bind,
    kept: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    """`inputs`: operand, indices, updates, laid out as `in_specs`; specs and `kept` as of `run_heavy`."""
    operand, indices, updates = inputs
    partial = {n for s in in_specs for n in axes_of(s)} - axes_of(raw_spec) - set(kept)

    def body(zeros: Any, indices: Any, updates: Any) -> Any:
        return with_leading(combined(bind([zeros, indices, updates], eqn.params)[0], partial, home_spec, mesh), kept)

    out_spec = partition_spec((*((n,) for n in kept), *home_spec))
    added = jax.shard_map(
        body, mesh=mesh, in_specs=tuple(map(partition_spec, in_specs)), out_specs=out_spec,
        axis_names=set(mesh.axis_names), check_vma=False,
    )(jnp.zeros_like(operand), indices, updates)  # fmt: skip
    if kept:
        parts = added.shape[: len(kept)]
        is_first = jnp.arange(math.prod(parts)).reshape(*parts, *(1,) * operand.ndim) == 0
        operand = jnp.where(is_first, operand, jnp.zeros_like(operand))
    return added + operand  # once, not by every device; XLA drops it where the operand is zero
