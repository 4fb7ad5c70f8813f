"""Collectives timed on the devices at hand, level by level."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SIZES_BYTES = (2**12, 2**16, 2**20, 2**23)
KINDS = ("all-reduce", "all-gather")
Point = tuple[str, int, float, float]  # collective, devices, bytes of the full tensor, seconds


def time_collectives(
    level_sizes: Sequence[int], level: int, devices: Sequence[Any], *, sizes_bytes: Sequence[int] = SIZES_BYTES, repeats: int = 5
) -> list[Point]:
    """Seconds of collectives over the links of one level only; every process of the devices must call this alike.

    Args:
      level_sizes: how many units each level joins, slowest first; their product is the number of devices.
      level: the level to measure, of more than one unit.
      sizes_bytes: of the full tensor that a group holds together (all-gather) or each (all-reduce).
    """
    names = tuple(f"l{i}" for i in range(len(level_sizes)))
    mesh = Mesh(np.array(devices).reshape(tuple(level_sizes)), names)
    n, axis = level_sizes[level], names[level]
    points: list[Point] = []
    for kind in KINDS:
        for size in sizes_bytes:
            count = max(size // 4 // n * n, n)
            split = PartitionSpec(axis) if kind == "all-gather" else PartitionSpec()

            def body(x: Any, kind: str = kind) -> Any:
                if kind == "all-gather":
                    return jax.lax.all_gather(x, axis, tiled=True)
                return jax.lax.psum(x, axis)

            run = jax.jit(
                jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=PartitionSpec(), check_vma=False)
            )  # fmt: skip
            sharding = NamedSharding(mesh, split)
            local = np.ones(count, np.float32)
            x = jax.make_array_from_callback((count,), sharding, lambda index, local=local: local[index])
            points.append((kind, n, float(count * 4), _median_s(run, x, repeats)))
    return points


def _median_s(run: Any, x: Any, repeats: int) -> float:
    for _ in range(2):
        jax.block_until_ready(run(x))
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(x))
        found.append(time.perf_counter() - start)
    return largest_of_processes(statistics.median(found))


def largest_of_processes(seconds: float) -> float:
    """The slowest process' figure, so that all processes decide alike."""
    if jax.process_count() == 1:
        return seconds
    from jax.experimental import multihost_utils

    return float(np.max(multihost_utils.process_allgather(jnp.float32(seconds))))
