"""Arrays between meshes of several processes, piece by piece.

`jax.device_put` sends an array to other processes only where both sides are split alike. Here any layout becomes any other: every
device of the target asks for the blocks that it needs, each from one device that has it (itself, its own process, or
another), and puts them together:

    source: 2 devices of process 0, rows 0:4 | 4:8      target: 1 device of process 1
    pieces: rows 0:4 from device 0, rows 4:8 from device 1; device 2 joins them

All processes must make the same calls in the same order: sender and receiver find each other by counting.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

Block = tuple[tuple[int, int], ...]  # per dim (start, end)


class Piece(NamedTuple):
    """A block that `target` needs and `source` has."""

    source: Any
    target: Any
    block: Block
    held: Block  # by the source
    wanted: Block  # by the target


def pieces_of(source: Sharding, target: NamedSharding, shape: Sequence[int]) -> list[Piece]:
    """What must come from where, the same list on every process; each element of a target device once."""
    holders: dict[Block, list[Any]] = {}
    for device, index in source.devices_indices_map(tuple(shape)).items():
        holders.setdefault(_block(index, shape), []).append(device)
    found = []
    for k, (device, index) in enumerate(target.devices_indices_map(tuple(shape)).items()):
        wanted = _block(index, shape)
        for held, having in holders.items():
            block = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(held, wanted, strict=True))
            if all(a < b for a, b in block) or (block == wanted == held):
                own = device.process_index  # type: ignore[attr-defined]  # the stub's Device is no type
                near = [d for d in having if d == device] or [d for d in having if d.process_index == own]
                found.append(Piece((near or having)[k % len(near or having)], device, block, held, wanted))
    return found


def _block(index: Sequence[slice], shape: Sequence[int]) -> Block:
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


@functools.lru_cache(maxsize=4096)
def alone(device: Any) -> NamedSharding:
    return NamedSharding(Mesh(np.array([device]), ("all",)), PartitionSpec())


def on_one_device(shape: Sequence[int], dtype: Any, device: Any, held: Any) -> jax.Array:
    """An array on `device`: `held` in its own process, no data in the others."""
    mine = [held] if device.process_index == jax.process_index() else []
    return jax.make_array_from_single_device_arrays(tuple(shape), alone(device), mine, dtype=dtype)


def send_alone(arrays: Sequence[jax.Array], targets: Sequence[Any]) -> list[jax.Array]:
    """Arrays of one device each to another device each. Between two devices of a process that is not this one nothing is done.

    One call per pair of devices: JAX numbers the transfers of a call in the order of a hash table, another in every process
    (`BatchedCopyToDeviceWithSharding` of jaxlib's py_array.cc), so that with two pairs a receiver may wait for what nobody sends.
    """
    out = list(arrays)
    pairs: dict[tuple[Any, Any], list[int]] = {}
    for k, (x, target) in enumerate(zip(arrays, targets, strict=True)):
        if _concerns(_device(x), target):
            pairs.setdefault((_device(x), target), []).append(k)
    for (_, target), moved in pairs.items():
        for k, y in zip(moved, jax.device_put([arrays[k] for k in moved], alone(target)), strict=True):
            out[k] = y
    return out


def _device(x: jax.Array) -> Any:
    (device,) = x.sharding.device_set
    return device


def _concerns(source: Any, target: Any) -> bool:
    if source == target:
        return False
    return source.process_index != target.process_index or source.process_index == jax.process_index()


class PieceMover:
    """Moves arrays of one shape from one layout to another; called many times."""

    def __init__(self, source: Sharding, target: NamedSharding, shape: Sequence[int]):
        self.target, self.shape = target, tuple(shape)
        self.pieces = pieces_of(source, target, shape)
        groups = itertools.groupby(range(len(self.pieces)), key=lambda k: self.pieces[k].target)
        self._own = [list(own) for device, own in groups if device.process_index == jax.process_index()]  # which pieces, by target

    def start(self, x: jax.Array) -> tuple[list[jax.Array], list[Any]]:
        """What `send_alone` takes: the pieces where they are, and where they go."""
        shards = {s.device: s.data for s in x.addressable_shards}
        return [self._cut(p, shards.get(p.source), x.dtype) for p in self.pieces], [p.target for p in self.pieces]

    def _cut(self, p: Piece, held: jax.Array | None, dtype: Any) -> jax.Array:
        if held is not None and p.block != p.held:
            held = _cut(held, tuple((a - h, b - h) for (a, b), (h, _) in zip(p.block, p.held, strict=True)))
        return on_one_device([b - a for a, b in p.block], dtype, p.source, held)

    def finish(self, arrived: Sequence[jax.Array], dtype: Any) -> jax.Array:
        parts = [_joined([arrived[k].addressable_data(0) for k in own], [self.pieces[k] for k in own]) for own in self._own]
        return jax.make_array_from_single_device_arrays(self.shape, self.target, parts, dtype=dtype)


@functools.partial(jax.jit, static_argnums=1)
def _cut(x: jax.Array, block: Block) -> jax.Array:
    return x[tuple(slice(a, b) for a, b in block)]


def _joined(parts: list[jax.Array], group: Sequence[Piece]) -> jax.Array:
    if len(parts) == 1:
        return parts[0]
    wanted = group[0].wanted
    starts = tuple(tuple(a - w for (a, _), (w, _) in zip(p.block, wanted, strict=True)) for p in group)
    return _put_together(tuple(parts), starts, tuple(b - a for a, b in wanted))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _put_together(parts: tuple[jax.Array, ...], starts: tuple[tuple[int, ...], ...], shape: tuple[int, ...]) -> jax.Array:
    whole = jnp.zeros(shape, parts[0].dtype)
    for part, start in zip(parts, starts, strict=True):
        whole = jax.lax.dynamic_update_slice(whole, part, start)
    return whole


def piecewise(sources: Sequence[Sharding], targets: Sequence[NamedSharding]) -> Callable[..., list[jax.Array]]:
    """A function that moves arrays laid out as `sources` to `targets`: all their pieces in one call."""
    movers: list[PieceMover] = []

    def move(*arrays: jax.Array) -> list[jax.Array]:
        if not movers:
            movers.extend(PieceMover(s, t, x.shape) for s, t, x in zip(sources, targets, arrays, strict=True))
        started = [m.start(x) for m, x in zip(movers, arrays, strict=True)]
        arrived = iter(send_alone([x for xs, _ in started for x in xs], [t for _, ts in started for t in ts]))
        return [
            m.finish(list(itertools.islice(arrived, len(m.pieces))), x.dtype) for m, x in zip(movers, arrays, strict=True)
        ]  # fmt: skip

    return move


def on_every_process(devices: Sequence[Any], source: NamedSharding) -> NamedSharding:
    """The layout that a whole result has for all processes: a copy on one device of each, the source's own among them."""
    first: dict[int, Any] = {}
    for d in (*source.mesh.devices.flat, *devices):
        first.setdefault(d.process_index, d)
    return NamedSharding(Mesh(np.array([first[p] for p in sorted(first)]), ("process",)), PartitionSpec())
