"""Collectives timed on the devices at hand, level by level."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SIZES_BYTES = (2**12, 2**16, 2**20, 2**23)
IN_A_ROW_BYTES = 2**21  # a single small message could pass on the burst that a shaped link allows
Point = tuple[str, int, float, float]  # collective, devices, bytes that each holds before or after, seconds

# Per kind what gives each of the `n` devices of `axis` as many numbers as it had, so that one can follow on another. (Of zeros:
# their sums stay finite.)
KINDS: dict[str, Callable[[Any, str, int], Any]] = {
    "all-reduce": lambda x, axis, n: jax.lax.psum(x, axis),
    "all-gather": lambda x, axis, n: jax.lax.all_gather(x[: x.shape[0] // n], axis, tiled=True),
    "reduce-scatter": lambda x, axis, n: jnp.tile(jax.lax.psum_scatter(x, axis, tiled=True), n),
    "all-to-all": lambda x, axis, n: jax.lax.all_to_all(x, axis, 0, 0, tiled=True),
    "collective-permute": lambda x, axis, n: jax.lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)]),
}


def time_collectives(
    level_sizes: Sequence[int], level: int, devices: Sequence[Any], *, sizes_bytes: Sequence[int] = SIZES_BYTES, repeats: int = 5,
    kinds: Collection[str] = tuple(KINDS),
) -> list[Point]:  # fmt: skip
    """Seconds of collectives over the links of one level only; every process of the devices must call this alike.

    Args:
      level_sizes: how many units each level joins, slowest first; their product is the number of devices.
      level: the level to measure, of more than one unit.
      sizes_bytes: of what each device holds before (reduce-scatter) or after (all-gather), or both.
    """
    names = tuple(f"l{i}" for i in range(len(level_sizes)))
    mesh = Mesh(np.array(devices).reshape(tuple(level_sizes)), names)
    n, axis = level_sizes[level], names[level]
    points: list[Point] = []
    for kind in kinds:
        for size in sizes_bytes:
            count = max(size // 4 // n * n, n)
            in_a_row = int(np.clip(IN_A_ROW_BYTES // size, 1, 64))

            def body(x: Any, once: Any = KINDS[kind], in_a_row: int = in_a_row) -> Any:
                return jax.lax.fori_loop(0, in_a_row, lambda _, x: once(x, axis, n), x)

            spec = PartitionSpec(names)
            run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
            local = np.zeros(count, np.float32)

            def own(_: Any, local: np.ndarray = local) -> np.ndarray:
                return local

            x = jax.make_array_from_callback((count * len(devices),), NamedSharding(mesh, spec), own)
            points.append((kind, n, float(count * 4), _median_s(run, x, repeats) / in_a_row))
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
