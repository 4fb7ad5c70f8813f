"""Heavy equations exactly as planned: dots and convolutions run on their local blocks, in `shard_map`.

What the partitioner would choose is left no room: local FLOPs, the collective
that resolves a partial sum (all-reduce, or reduce-scatter where the result's home is split), and the borders that
blocks of an image exchange where a spatial dim is split (halo.py) are the plan's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from soapjax.execute.spmd.halo import bordered_params, borders, with_borders
from soapjax.graph.trace.program import FlatEqn
from soapjax.strategy.layout import Spec

Bind = Callable[[list[Any], dict[str, Any]], list[Any]]


def partition_spec(spec: Spec) -> PartitionSpec:
    return PartitionSpec(*(None if not names else names[0] if len(names) == 1 else names for names in spec))


def axes_of(spec: Spec) -> set[str]:
    return {n for names in spec for n in names}


def run_heavy(
    eqn: FlatEqn, inputs: list[Any], in_specs: list[Spec], raw_spec: Spec, home_spec: Spec, mesh: Mesh, bind: Bind,
    kept: tuple[str, ...] = (), order: tuple[int, ...] | None = None,
) -> Any:  # fmt: skip
    """One dot or convolution on local blocks.

    Args:
      in_specs: layout of each operand, as used.
      raw_spec: layout of the result before partial sums are resolved.
      home_spec: layout of the result after; an axis in it but not in `raw_spec` is reduce-scattered.
      kept: axes whose partial sums stay apart: the result has a leading dim for each (`contracted_axes` says which can be).
      order: of the result's dims where its reader wants them permuted. Sums over devices are made in that order: the compiler
        makes the blocks so, while a sum in another order would be a pass over memory more. The result is as without.
    """
    if not {n for s in (*in_specs, raw_spec) for n in axes_of(s)}:
        return bind(inputs, eqn.params)[0]
    contracted = contracted_axes(in_specs, raw_spec) - set(kept)
    params, found = eqn.params, []
    if eqn.name == "conv_general_dilated":
        found = borders(eqn, [x.shape for x in inputs], in_specs, raw_spec, mesh)
        params = bordered_params(eqn, _local_params(eqn, in_specs, mesh), found)
    order = tuple(range(len(home_spec))) if order is None or kept or not contracted else order
    ordered = tuple(home_spec[d] for d in order)

    def body(*blocks: Any) -> Any:
        image, *others = blocks
        block = jnp.transpose(bind([with_borders(image, found), *others], params)[0], order)
        return with_leading(combined(block, contracted, ordered, mesh), kept)

    out_spec = partition_spec((*((n,) for n in kept), *ordered))
    result = jax.shard_map(
        body, mesh=mesh, in_specs=tuple(map(partition_spec, in_specs)), out_specs=out_spec, check_vma=False
    )(*inputs)
    return result if kept else jnp.transpose(result, np.argsort(order))


def combined(block: Any, partial: set[str], home_spec: Spec, mesh: Mesh, collective: Callable[..., Any] | None = None) -> Any:
    """A device's block of partial results over the axes `partial`, combined: reduce-scattered where `home_spec` splits by one.

    To be called within `shard_map`. `collective` combines over the other axes: a sum, by default.
    """
    split = [(d, n) for d, names in enumerate(home_spec) for n in names if n in partial]
    others = tuple(n for n in mesh.axis_names if n in partial and n not in {a for _, a in split})
    for d, n in split:
        block = scattered(block, n, d)
    return (collective or jax.lax.psum)(block, others) if others else block


def scattered(block: Any, name: str, d: int) -> Any:
    """A block summed over an axis, of which a device keeps its part of dim `d`."""
    if d == 0:
        return jax.lax.psum_scatter(block, name, tiled=True)
    # XLA lays out the whole anew, element by element, to scatter along another dim than the first: here runs are copied.
    shape = (*block.shape[:d], jax.lax.axis_size(name), -1, *block.shape[d + 1 :])
    return jax.lax.psum_scatter(jnp.moveaxis(block.reshape(shape), d, 0), name)


def with_leading(block: Any, kept: tuple[str, ...]) -> Any:
    """A device's block of a result whose partial sums stay apart: one leading dim for each of the axes."""
    return block.reshape((1,) * len(kept) + block.shape)


def contracted_axes(in_specs: list[Spec], raw_spec: Spec) -> set[str]:
    """The axes over which a dot's or a convolution's result is a partial sum."""
    return {n for s in in_specs for n in axes_of(s)} - axes_of(raw_spec)


def _local_params(eqn: FlatEqn, in_specs: list[Spec], mesh: Mesh) -> dict[str, Any]:
    """Group counts of a convolution whose groups are split."""
    dn = eqn.params["dimension_numbers"]

    def ways(d: int) -> int:
        return math.prod(mesh.shape[n] for n in in_specs[0][d])

    params = dict(eqn.params)
    if params["feature_group_count"] > 1:
        params["feature_group_count"] //= ways(dn.lhs_spec[1])
    if params["batch_group_count"] > 1:
        params["batch_group_count"] //= ways(dn.lhs_spec[0])
    return params
