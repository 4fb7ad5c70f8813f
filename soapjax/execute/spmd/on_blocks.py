"""Equations that run exactly as planned: on the local blocks of their operands, each primitive in its own way.

What the partitioner would choose is left no room: local FLOPs, the collective that combines partial results (an all-reduce, or a
reduce-scatter where the result's home is split), and over which axes. The way of a primitive is one function under `@executes`,
which `run_on_blocks` finds; the partitioner runs whatever has none, between constraints.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from soapjax.graph.trace.program import FlatEqn
from soapjax.strategy.layout import Spec


def partition_spec(spec: Spec) -> PartitionSpec:
    return PartitionSpec(*(None if not names else names[0] if len(names) == 1 else names for names in spec))


def axes_of(spec: Spec) -> set[str]:
    return {n for names in spec for n in names}


def contracted_axes(in_specs: list[Spec], raw_spec: Spec) -> set[str]:
    """The axes that split operands and not the result, which is partial over them."""
    return {n for s in in_specs for n in axes_of(s)} - axes_of(raw_spec)


class OnBlocks(NamedTuple):
    """How one equation is laid out."""

    mesh: Mesh
    in_specs: list[Spec]  # of its operands, as used
    raw_spec: Spec  # of its result before partial results are combined
    home_spec: Spec  # of its result after; an axis in it but not in `raw_spec` is reduce-scattered
    bind: Callable[[list[Any], dict[str, Any]], list[Any]]  # runs the equation on operands, with such parameters
    kept: tuple[str, ...] = ()  # axes whose partial sums stay apart: the result has a leading dim for each
    # Of the result's dims, where its reader wants them permuted. Sums over devices are made in that order: the compiler makes the
    # blocks so, while a sum in another order would be a pass over memory more. The result is as without.
    order: tuple[int, ...] | None = None

    @property
    def contracted(self) -> set[str]:
        """The axes over which results are combined at once."""
        return contracted_axes(self.in_specs, self.raw_spec) - set(self.kept)

    @property
    def is_split(self) -> bool:
        return any(map(axes_of, (*self.in_specs, self.raw_spec)))

    def constrained(self, inputs: list[Any]) -> list[Any]:
        """Operands, laid out as used."""
        pairs = zip(inputs, self.in_specs, strict=True)
        return [jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, partition_spec(s))) for x, s in pairs]

    def run(self, body: Callable[..., Any], inputs: list[Any], home_spec: Spec | None = None) -> Any:
        """`body` of each device's blocks of `inputs`; its results are laid out as `home_spec`, behind a dim for each of `kept`."""
        in_specs = tuple(map(partition_spec, self.in_specs))
        out_spec = partition_spec((*((n,) for n in self.kept), *(self.home_spec if home_spec is None else home_spec)))
        on_device = lambda *blocks: with_leading(body(*blocks), self.kept)  # noqa: E731
        return jax.shard_map(on_device, mesh=self.mesh, in_specs=in_specs, out_specs=out_spec, check_vma=False)(*inputs)

    def in_first_place(self, whole: Any) -> Any:
        """A whole value as a sum over the `kept` axes: itself in the first place, zeros in the others."""
        parts = tuple(self.mesh.shape[n] for n in self.kept)
        is_first = jnp.arange(math.prod(parts)).reshape(*parts, *(1,) * whole.ndim) == 0
        return jnp.where(is_first, whole, jnp.zeros_like(whole))


Run = Callable[[FlatEqn, list[Any], OnBlocks], Any]
_WAYS: dict[str, Run] = {}


def executes(*primitives: str) -> Callable[[Run], Run]:
    """Declares how equations of `primitives` run: a function of the equation, its operands and `OnBlocks` to its result."""

    def declared(run: Run) -> Run:
        _WAYS.update(dict.fromkeys(primitives, run))
        return run

    return declared


def is_executed(eqn: FlatEqn) -> bool:
    """Whether its primitive has a way of its own."""
    return eqn.name in _WAYS


def run_on_blocks(eqn: FlatEqn, inputs: list[Any], blocks: OnBlocks) -> Any:
    """The result of an equation whose primitive has a way of its own."""
    return _WAYS[eqn.name](eqn, inputs, blocks)


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
