"""What many reshards cost, of layouts that are given: the rule of reshard_cost.py beside no problem."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from soapjax.costs.rules.links import Links
from soapjax.costs.rules.reshard_cost import Network, network_of, reshard
from soapjax.costs.rules.sets import Mesh, encoded, mesh_of
from soapjax.costs.tables.buckets import SMALL
from soapjax.jit.kernel import in_kernel
from soapjax.jit.programs import PlannerProgram
from soapjax.strategy.layout import PINNED

CHUNK = 1024  # reshards per call
MOST_DIMS = 8  # of a tensor whose shape is not given


class ReshardCosts(NamedTuple):
    seconds: np.ndarray  # [n, L]
    bytes: np.ndarray  # [n, 6] that each device sends, by COLLECTIVES
    late_bytes: np.ndarray  # [n]: of these what devices of the target layout send, or get from shards


@functools.cache
def _program(num_dims: int, num_levels: int, pins: bool) -> PlannerProgram:
    """(mesh, network, source, target, shape, bytes, share) -> what `reshard` gives; for all problems of such sizes."""

    def run(*of: Any) -> Any:
        return in_kernel(reshard, *of)

    return PlannerProgram(run, is_urgent=True, name=f"reshards {num_dims} {num_levels} {pins}", results=(0, 0, 0))


@functools.lru_cache(16)
def _below(links: Links, num_levels: int) -> tuple[Mesh, Network]:
    """The axes and the links below them, on the device."""
    return jax.device_put((mesh_of(links.axis_sizes), network_of(links, num_levels)))


def prepare_reshards(links: Links) -> None:
    """Compiles or loads the program that `reshard_costs` needs for tensors of few dims, without pins."""
    dims, levels = SMALL.dims, max(links.num_levels, SMALL.levels)
    sets = jax.ShapeDtypeStruct((encoded(np.zeros((0, 1), np.int8), dims, False).shape[-1], CHUNK), np.int16)
    shapes, figure = jax.ShapeDtypeStruct((dims, CHUNK), np.int32), jax.ShapeDtypeStruct((CHUNK,), np.float32)
    _program(dims, levels, False).prepare(*_below(links, levels), sets, sets, shapes, figure, figure)


def reshard_costs(
    source: np.ndarray, target: np.ndarray, size_bytes: np.ndarray | float, links: Links,
    latency_share: np.ndarray | float = 1.0, *, shape: np.ndarray | None = None,
) -> ReshardCosts:  # fmt: skip
    """The cost of bringing tensors of `size_bytes` [n] from layouts `source` to `target`, both int8 [n, A].

    Args:
      latency_share: [n], the part of latencies that each pays where collectives are merged.
      shape: int32 [n, R] of the tensors; None, and a dim of 0, are large enough to be split in any way.
    """
    count = len(source)
    dims = MOST_DIMS if shape is None else max(shape.shape[-1], SMALL.dims)
    levels = max(links.num_levels, SMALL.levels)
    padded = -(-count // CHUNK) * CHUNK
    shapes = np.zeros((dims, padded), np.int32)
    if shape is not None:
        shapes[: shape.shape[-1], :count] = shape.T
        shapes[shape.shape[-1] :] = 1
    figures = np.zeros((2, padded), np.float32)
    figures[0, :count], figures[1, :count] = size_bytes, latency_share
    pins = bool((source <= PINNED).any() or (target <= PINNED).any())
    sets = np.zeros((2, encoded(source[:0], dims, pins).shape[-1], padded), np.int16)
    sets[0, :, :count], sets[1, :, :count] = encoded(source, dims, pins).T, encoded(target, dims, pins).T
    program, below = _program(dims, levels, pins), _below(links, levels)
    nothing = np.zeros((levels, 0), np.float32), np.zeros((6, 0), np.float32), np.zeros(0, np.float32)
    found: list[tuple[np.ndarray, ...]] = [nothing]
    for k in range(0, count, CHUNK):
        some = program(*below, *(np.ascontiguousarray(x[..., k : k + CHUNK]) for x in (*sets, shapes, *figures)))
        found.append(tuple(np.asarray(x)[..., : count - k] for x in some))
    seconds, sent, late = (np.concatenate(x, -1).T for x in zip(*found, strict=True))
    return ReshardCosts(seconds[:, levels - links.num_levels :], sent, late)
