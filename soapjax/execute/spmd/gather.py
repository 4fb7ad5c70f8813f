"""Gathers from a table whose rows are split (an embedding by its vocabulary, picked logits) as planned.

Each device picks those of its own rows that are asked for, and zeros in place of others; one sum makes the result. The partitioner
does likewise, but where what it passes through is split too, its program may be one that its own checks refuse (jaxlib 0.10.2).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from soapjax.execute.spmd.on_blocks import OnBlocks, combined, executes
from soapjax.graph.trace.program import FlatEqn


@executes("gather")
def run_gather(eqn: FlatEqn, inputs: list[Any], blocks: OnBlocks) -> Any:
    """A gather of a table and indices; one from whole rows is the partitioner's."""
    table, dn = inputs[0], eqn.params["dimension_numbers"]
    rows = {c: d for c, d in enumerate(dn.start_index_map) if d in dn.collapsed_slice_dims and blocks.in_specs[0][d]}
    is_partial = bool(rows) and bool(blocks.contracted or blocks.kept)
    if not is_partial or jax.dtypes.issubdtype(table.dtype, jax.dtypes.extended):
        found = blocks.bind(inputs, eqn.params)[0]
        return blocks.in_first_place(found) if blocks.kept else found

    def body(block: Any, indices: Any) -> Any:
        is_own, is_known, is_first = True, True, True
        indices = indices.astype(jnp.promote_types(indices.dtype, jnp.int32))
        for column, d in rows.items():
            at, size, part = indices[..., column], table.shape[d], block.shape[d]
            if eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP:
                at = jnp.clip(at, 0, size - 1)
            begin = part * jax.lax.axis_index(blocks.in_specs[0][d])
            is_known &= (at >= 0) & (at < size)
            is_own &= (at >= begin) & (at < begin + part)
            is_first &= begin == 0
            # Out of all bounds stays so: the first device fills in what is asked for there.
            indices = indices.at[..., column].set(jnp.where(is_known, jnp.clip(at - begin, 0, part - 1), -1))
        of = zip(eqn.params["slice_sizes"], table.shape, block.shape, strict=True)
        sizes = tuple(own if n == whole and d not in dn.collapsed_slice_dims else n for d, (n, whole, own) in enumerate(of))
        found = blocks.bind([block, indices], eqn.params | {"slice_sizes": sizes})[0]
        is_picked = jnp.expand_dims(is_own | (~is_known & is_first), dn.offset_dims)
        picked = jnp.where(is_picked, found, jnp.zeros_like(found))
        picked = picked.astype(jnp.int32) if found.dtype == jnp.bool_ else picked
        return combined(picked, blocks.contracted, blocks.home_spec, blocks.mesh).astype(found.dtype)

    return blocks.run(body, inputs)
