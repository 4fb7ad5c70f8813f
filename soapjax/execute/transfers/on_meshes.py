"""Arrays on another mesh of the same devices: every device keeps the block that it has, and nothing is copied or sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding


def regrouped(targets: Sequence[NamedSharding]) -> Callable[..., list[jax.Array]]:
    """A function of as many arrays per target: the blocks that they have on its devices, joined along the leading dim.

    Nothing is copied or sent: with one array per target, the target's devices hold the same blocks of both.
    """

    def regroup(*arrays: jax.Array) -> list[jax.Array]:
        each = len(arrays) // len(targets)
        found: list[jax.Array] = []
        for k, target in enumerate(targets):
            mine = arrays[k * each : (k + 1) * each]
            found.append(blocks_as(mine, mine[0].shape if each == 1 else (each, *mine[0].shape[1:]), target))
        return found

    return regroup


def together(meshes: Sequence[Mesh], axis: str) -> Mesh:
    """Meshes of one shape as one, along a first axis of that name, or of the next that is free."""
    first = meshes[0]
    while axis in first.axis_names:
        axis += "_"
    return Mesh(np.stack([mesh.devices for mesh in meshes]), (axis, *first.axis_names))


def blocks_as(arrays: Sequence[jax.Array], shape: tuple[int, ...], target: NamedSharding) -> jax.Array:
    """The blocks that arrays have on the target's devices, as one array: nothing is copied."""
    blocks = [s.data for x in arrays for s in x.addressable_shards if s.device in target.device_set]
    return jax.make_array_from_single_device_arrays(shape, target, blocks, dtype=arrays[0].dtype)
