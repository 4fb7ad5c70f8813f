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

from soapjax.execute.spmd.on_blocks import OnBlocks, axes_of, combined, executes
from soapjax.graph.trace.program import FlatEqn
from soapjax.strategy.layout import Spec


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


@executes("scatter-add")
def run_scatter_add(eqn: FlatEqn, inputs: list[Any], blocks: OnBlocks) -> Any:
    """A scatter-add of operand, indices and updates; one whose updates and rows are whole is the partitioner's."""
    operand, indices, updates = inputs
    rows = _split_rows(eqn, blocks.raw_spec)
    has_sums = axes_of(blocks.raw_spec) < {n for s in blocks.in_specs for n in axes_of(s)}
    if not has_sums and not rows:
        return blocks.bind(inputs, eqn.params)[0]
    params = eqn.params | ({"mode": jax.lax.GatherScatterMode.FILL_OR_DROP} if rows else {})

    def body(zeros: Any, indices: Any, updates: Any) -> Any:
        for column, d in rows.items():
            indices = _in_own_rows(eqn, indices, column, operand.shape[d], blocks.raw_spec[d], blocks.mesh)
        return combined(blocks.bind([zeros, indices, updates], params)[0], blocks.contracted, blocks.home_spec, blocks.mesh)

    added = blocks.run(body, [jnp.zeros_like(operand), indices, updates])
    operand = blocks.in_first_place(operand) if blocks.kept else operand
    return added + operand  # once, not by every device; XLA drops it where the operand is zero
