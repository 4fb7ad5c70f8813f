"""Scatter-adds (the gradient of an embedding, or of picked logits) as planned.

Each device adds up its own updates, then the sums are added; and makes its own rows only, where these are split. The
partitioner gathers all updates to every device instead, and makes all rows on each.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from soapjax.execute.spmd.heavy import Bind, axes_of, combined, partition_spec, with_leading
from soapjax.graph.trace.program import FlatEqn
from soapjax.strategy.layout import Spec


def runs_on_blocks(eqn: FlatEqn, in_specs: list[Spec], raw_spec: Spec) -> bool:
    """Whether a scatter-add is one whose updates, or whose rows, are split."""
    has_sums = axes_of(raw_spec) < {n for s in in_specs for n in axes_of(s)}
    return eqn.name == "scatter-add" and (has_sums or bool(_split_rows(eqn, raw_spec)))


def _split_rows(eqn: FlatEqn, raw_spec: Spec) -> dict[int, int]:
    """Positions in the index vector that point into a split dim of the operand, and that dim."""
    numbers = eqn.params["dimension_numbers"]
    into = enumerate(numbers.scatter_dims_to_operand_dims)
    return {column: d for column, d in into if d in numbers.inserted_window_dims and raw_spec[d]}


def _in_own_rows(eqn: FlatEqn, indices: Any, column: int, size: int, names: tuple[str, ...], mesh: Mesh) -> Any:
    """Indices as seen from a device's block of `size` rows split over `names`: those of other blocks are out of bounds."""
    own = indices[..., column].astype(jnp.promote_types(indices.dtype, jnp.int32))
    if eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP:
        own = jnp.clip(own, 0, size - 1)
    part = size // math.prod(mesh.shape[n] for n in names)
    return indices.astype(own.dtype).at[..., column].set(own - part * jax.lax.axis_index(names))


def run_scatter_add(
    eqn: FlatEqn, inputs: list[Any], in_specs: list[Spec], raw_spec: Spec, home_spec: Spec, mesh: Mesh, bind: Bind,
    kept: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    """`inputs`: operand, indices, updates, laid out as `in_specs`; specs and `kept` as of `run_heavy`."""
    operand, indices, updates = inputs
    partial = {n for s in in_specs for n in axes_of(s)} - axes_of(raw_spec) - set(kept)
    rows = _split_rows(eqn, raw_spec)
    params = eqn.params | ({"mode": jax.lax.GatherScatterMode.FILL_OR_DROP} if rows else {})

    def body(zeros: Any, indices: Any, updates: Any) -> Any:
        for column, d in rows.items():
            indices = _in_own_rows(eqn, indices, column, operand.shape[d], raw_spec[d], mesh)
        return with_leading(combined(bind([zeros, indices, updates], params)[0], partial, home_spec, mesh), kept)

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
