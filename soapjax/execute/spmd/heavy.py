"""Products, convolutions and the gradients of pooling on their local blocks (see on_blocks.py).

Blocks of an image exchange their halos where a spatial dim is split (halo.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from soapjax.execute.spmd.halo import halos, params_with_halos, with_halos
from soapjax.execute.spmd.on_blocks import OnBlocks, combined, executes
from soapjax.graph.trace.program import FlatEqn
from soapjax.strategy.layout import Spec


@executes("dot_general", "ragged_dot_general", "conv_general_dilated")
def run_product(eqn: FlatEqn, inputs: list[Any], blocks: OnBlocks) -> Any:
    """One dot or convolution."""
    inputs = blocks.constrained(inputs)
    if not blocks.is_split:
        return blocks.bind(inputs, eqn.params)[0]
    params, found = eqn.params, []
    if eqn.name == "conv_general_dilated":
        found = halos(eqn, [x.shape for x in inputs], blocks.in_specs, blocks.raw_spec, blocks.mesh)
        ways = [math.prod(blocks.mesh.shape[n] for n in names) for names in blocks.in_specs[0]]
        params = params_with_halos(eqn, with_local_groups(params, ways), found)
    as_it_is = tuple(range(len(blocks.home_spec)))
    order = as_it_is if blocks.order is None or blocks.kept or not blocks.contracted else blocks.order
    ordered = tuple(blocks.home_spec[d] for d in order)

    def body(image: Any, *others: Any) -> Any:
        if eqn.name == "ragged_dot_general":
            others = (others[0], _own_groups(eqn, image, others[1], blocks.in_specs))
        block = jnp.transpose(blocks.bind([with_halos(image, found), *others], params)[0], order)
        return combined(block, blocks.contracted, ordered, blocks.mesh)

    result = blocks.run(body, inputs, ordered)
    return result if blocks.kept else jnp.transpose(result, np.argsort(order).tolist())


@executes("select_and_scatter_add")
def run_pool_gradient(eqn: FlatEqn, inputs: list[Any], blocks: OnBlocks) -> Any:
    """The gradient of max-pooling, whose dims are split between windows: blocks are images."""
    if not blocks.is_split:
        return blocks.bind(inputs, eqn.params)[0]
    return blocks.run(lambda *images: blocks.bind(list(images), eqn.params)[0], inputs)


@executes("sharding_constraint")
def as_it_comes(eqn: FlatEqn, inputs: list[Any], blocks: OnBlocks) -> Any:
    """The user's constraint is the plan's: the result is laid out by it."""
    return inputs[0]


def _own_groups(eqn: FlatEqn, rows: Any, sizes: Any, in_specs: list[Spec]) -> Any:
    """How many of a device's `rows` are of each group, of groups of such sizes side by side."""
    (ragged,) = eqn.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    names, count = in_specs[0][ragged], rows.shape[ragged]
    if not names:
        return sizes
    begin, ends = jax.lax.axis_index(names).astype(sizes.dtype) * count, jnp.cumsum(sizes, dtype=sizes.dtype)
    return jnp.maximum(jnp.minimum(ends, begin + count) - jnp.maximum(ends - sizes, begin), 0)


def with_local_groups(params: dict[str, Any], ways: Sequence[int]) -> dict[str, Any]:
    """The parameters of a convolution of blocks of an image, whose dims are split so many ways: its groups are split with them."""
    dims, local = params["dimension_numbers"].lhs_spec, dict(params)
    for count, d in (("batch_group_count", dims[0]), ("feature_group_count", dims[1])):
        if params[count] > 1:
            local[count] //= ways[d]
    return local
