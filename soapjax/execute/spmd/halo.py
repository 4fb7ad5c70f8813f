"""Borders of a convolution's blocks: what it reads over the edge of its own block of a split spatial dim, from its neighbours.

The forward convolution and both of its gradients alike (a kernel gradient's kernel is the split cotangent); how many rows is
said in graph/rules/heavy_rules.py. Behind the first and the last block stand zeros, which is what padding is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from soapjax.graph.rules.heavy_rules import border_rows, conv_results
from soapjax.graph.trace.program import FlatEqn
from soapjax.strategy.layout import Spec


class BlockHalo(NamedTuple):
    """Of one spatial dim of the image."""

    dim: int
    names: tuple[str, ...]  # mesh axes that split it, major first
    before: int  # rows from the block before
    after: int
    padding: tuple[int, int]  # of the block with its halos


def halos(eqn: FlatEqn, shapes: Sequence[tuple[int, ...]], in_specs: Sequence[Spec], raw_spec: Spec, mesh: Mesh) -> list[BlockHalo]:
    """The halos of a convolution of operands of global `shapes`, where its spatial dims are split."""
    dn = eqn.params["dimension_numbers"]
    found = []

    def block(size: int, spec: Spec, d: int) -> int:
        return size // math.prod(mesh.shape[n] for n in spec[d])

    for k, m in enumerate(conv_results(eqn, *shapes)):
        dim, of_kernel, of_result = dn.lhs_spec[2 + k], dn.rhs_spec[2 + k], dn.out_spec[2 + k]
        if not in_specs[0][dim]:
            continue
        n, w = block(shapes[0][dim], in_specs[0], dim), block(shapes[1][of_kernel], in_specs[1], of_kernel)
        found.append(BlockHalo(dim, in_specs[0][dim], *border_rows(eqn, k, n, w, block(m, raw_spec, of_result))))
    return found


def with_halos(block: Any, found: Sequence[BlockHalo]) -> Any:
    """A device's block of the image with its neighbours' rows around it. To be called within `shard_map`."""
    for b in found:
        count, size = math.prod(jax.lax.axis_size(n) for n in b.names), block.shape[b.dim]
        parts = [block]
        if b.before:
            rows = jax.lax.slice_in_dim(block, size - b.before, size, axis=b.dim)
            parts.insert(0, jax.lax.ppermute(rows, b.names, [(i, i + 1) for i in range(count - 1)]))
        if b.after:
            rows = jax.lax.slice_in_dim(block, 0, b.after, axis=b.dim)
            parts.append(jax.lax.ppermute(rows, b.names, [(i + 1, i) for i in range(count - 1)]))
        block = jnp.concatenate(parts, b.dim) if len(parts) > 1 else block
    return block


def params_with_halos(eqn: FlatEqn, params: dict[str, Any], found: Sequence[BlockHalo]) -> dict[str, Any]:
    """The parameters of the convolution of a block with its halos."""
    spatial = eqn.params["dimension_numbers"].lhs_spec[2:]
    padding = list(params["padding"])
    for b in found:
        padding[spatial.index(b.dim)] = b.padding
    return params | {"padding": tuple(padding)}
