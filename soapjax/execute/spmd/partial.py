"""Partial sums that outlive the equation that makes them: summands of a gradient, added up device by device.

XLA has no layout for "every device holds a summand". A `Partial` is an array with one leading dim per mesh axis
over which it is a sum, split over that axis: adding two of them needs no communication, and only
`resolved` sums over the devices, by one all-reduce or reduce-scatter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from soapjax.execute.spmd.on_blocks import combined, partition_spec
from soapjax.execute.spmd.resharder import reshard, reshard_sums
from soapjax.strategy.layout import Spec


@functools.partial(jax.tree_util.register_dataclass, data_fields=["blocks"], meta_fields=["axes"])
@dataclasses.dataclass(frozen=True, eq=False)
class Partial:
    """A value that is the sum over the leading dims, one for each of `axes` (in mesh order), of `blocks`."""

    blocks: Any
    axes: tuple[str, ...]


def constrained(partial: Partial, spec: Spec, mesh: Mesh) -> Partial:
    """Blocks laid out by `spec`, their leading dims by their axes."""
    full = (*((n,) for n in partial.axes), *spec)
    return Partial(jax.lax.with_sharding_constraint(partial.blocks, NamedSharding(mesh, partition_spec(full))), partial.axes)


def split_off(x: Any, axes: tuple[str, ...], spec: Spec, mesh: Mesh, source: Spec | None = None) -> Partial:
    """A whole or partial value as a sum over `axes`: itself in the first place of an axis that it has no sum over, else zeros.

    Args:
      x: an array, or a Partial.
      spec: layout of the value without the sums; none of `axes` is in it. Sums over other axes are summed up on the way to it.
      source: the layout that it comes in, where that is known, as it has to be of sums over other axes: it then takes the way
        that costs count.
    """
    partial = x if isinstance(x, Partial) else Partial(x, ())
    if set(partial.axes) - set(axes):
        kept = tuple(n for n in partial.axes if n in axes)
        partial = Partial(reshard_sums(partial.blocks, partial.axes, kept, source, spec, mesh), kept)
    elif source is not None and source != spec:
        sums = tuple((n,) for n in partial.axes)
        partial = Partial(reshard(partial.blocks, (*sums, *source), (*sums, *spec), mesh), partial.axes)
    elif set(axes) - set(partial.axes):
        partial = constrained(partial, spec, mesh)  # out of the way of the axes that come
    for k, name in enumerate(axes):
        if name not in partial.axes:
            blocks = jnp.expand_dims(partial.blocks, k)
            is_first = jax.lax.broadcasted_iota("int32", blocks.shape[:k] + (mesh.shape[name],) + blocks.shape[k + 1 :], k) == 0
            blocks = jnp.where(is_first, blocks, jnp.zeros_like(blocks))
            partial = Partial(blocks, (*partial.axes[:k], name, *partial.axes[k:]))
    return constrained(partial, spec, mesh)


def elementwise(function: Callable[..., Any], *partials: Partial) -> Partial:
    """A linear function of values of one element each, or of one value's layout, on every summand."""
    for _ in partials[0].axes:
        function = jax.vmap(function)
    return Partial(function(*(p.blocks for p in partials)), partials[0].axes)


def resolved(partial: Partial, spec: Spec, home_spec: Spec, mesh: Mesh) -> Any:
    """The sum over the devices, laid out by `home_spec`.

    Args:
      spec: layout of the summands.
      home_spec: an axis in it but not in `spec` is reduce-scattered, the other axes are all-reduced.
    """

    def body(block: Any) -> Any:
        return combined(block.reshape(block.shape[len(partial.axes) :]), set(partial.axes), home_spec, mesh)

    blocks = constrained(partial, spec, mesh).blocks
    in_spec = partition_spec((*((n,) for n in partial.axes), *spec))
    return jax.shard_map(body, mesh=mesh, in_specs=in_spec, out_specs=partition_spec(home_spec), check_vma=False)(blocks)
