"""What the cost model says of operators on the devices of a stage, at any micro-batch size.

The same figures as costs/evaluate.py, with sizes as arguments of what jax compiles: a search of pipelines asks for many
micro-batch sizes, and would wait for the compiler of each.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from soapjax.costs.conversion import Links, conversion_cost
from soapjax.costs.evaluate import Durations, Layouts, latency_shares, layouts_of
from soapjax.costs.layouts import sum_layouts, value_index
from soapjax.costs.tables import CostTables, cost_tables
from soapjax.graph.operators import OperatorGraph
from soapjax.search.baselines import data_parallel_strategy, tensor_parallel_strategy
from soapjax.search.problem import PlanningProblem
from soapjax.simulate.schedule import Schedule, schedule_of
from soapjax.strategy.layout import PARTIAL
from soapjax.strategy.space import SearchSpace, search_space
from soapjax.strategy.strategy import Strategy
from soapjax.topology import DeviceTopology, factor_mesh


def part_of(topology: DeviceTopology, first: int, count: int) -> DeviceTopology:
    """`count` devices from `first` as a topology: whole units where they are, else one level of the slowest links between them."""
    levels = []
    inside = 1  # devices of a unit below
    for level in reversed(topology.levels):
        if count <= inside:
            break
        if first % inside == 0 and count % inside == 0:
            units = count // inside
            if units <= level.size and (first // inside) % level.size + units <= level.size:
                levels.insert(0, dataclasses.replace(level, size=units))
                break
            if units % level.size == 0 and (first // inside) % level.size == 0:
                levels.insert(0, level)
                inside *= level.size
                continue
        slowest = topology.levels[level_between(topology, first, first + count - 1)]
        return dataclasses.replace(topology, levels=(dataclasses.replace(slowest, size=count),))
    return dataclasses.replace(topology, levels=tuple(levels or (dataclasses.replace(topology.levels[-1], size=1),)))


def level_between(topology: DeviceTopology, first: int, last: int) -> int:
    """The slowest level at which two devices differ; the fastest where they are one."""
    below = topology.num_devices
    for i, level in enumerate(topology.levels):
        below //= level.size
        if first // below != last // below:
            return i
    return len(topology.levels) - 1


class Figures(NamedTuple):
    """Of one inner strategy at one micro-batch size, as NumPy arrays."""

    seconds: np.ndarray  # [T] of every scheduled task
    held_bytes: np.ndarray  # [tensors]: of a tensor as it is kept, per device
    copy_bytes: np.ndarray  # [E]: of converted copies
    copy_since: np.ndarray  # [E]: the task from which a copy is held for its reader: an earlier reader's, where they share it
    transient_bytes: np.ndarray  # [tensors]: of partial sums
    stored_bytes: np.ndarray  # [P]: of a parameter with its optimizer state
    parameter_bytes: np.ndarray  # [P]: of a parameter alone


class Inside(NamedTuple):
    """One way to run operators on the devices of a stage."""

    name: str
    strategy: Strategy
    figures: Figures


class Fabric:
    """Devices of one stage, at one number of micro-batches: the problem, and its inner strategies."""

    def __init__(self, graph: OperatorGraph, topology: DeviceTopology, links: tuple, cache: dict[tuple, Compiled]):
        self.mesh = factor_mesh(topology)
        self.space = search_space(graph, self.mesh)
        self.tables = cost_tables(graph, self.space, topology)
        self.schedule = schedule_of(self.tables)
        # Conversions of single numbers are free, and not listed: how many there are depends on the micro-batch.
        key = (links, len(self.tables.edge_task))
        self.compiled = cache[key] = cache.get(key) or Compiled(self.tables)
        self.choices = [Inside(name, s, self.figures(s)) for name, s in _inner(graph, self.space)]

    def figures(self, strategy: Strategy) -> Figures:
        return _figures(self.tables, self.schedule, strategy, self.compiled)


def _inner(graph: OperatorGraph, space: SearchSpace) -> list[tuple[str, Strategy]]:
    """Data parallelism, and Megatron's pairs over the fastest axes; each with parameters as used, sharded, and regathered."""
    problem = PlanningProblem(graph, space, None)
    found: list[tuple[str, Strategy]] = []
    for first in range(space.num_axes, -1, -1):
        axes = range(first, space.num_axes)
        degree = math.prod(space.mesh.axis_sizes[a] for a in axes)
        if first < space.num_axes and degree == 1:
            continue
        strategy = tensor_parallel_strategy(problem, axes) if axes else data_parallel_strategy(problem)[0]
        if any((strategy.axes == s.axes).all() for _, s in found):
            continue
        name = f"tensor/{degree}" if axes else "data"
        for k, storage in enumerate(space.storages):
            # Of the storages over all axes or none: what FSDP is beside data parallelism.
            if any(storage.axes) and not all(storage.axes):
                continue
            variant = Strategy(strategy.axes, np.where(space.owns_parameters, k, 0).astype(np.int8))
            if space.is_valid(variant):
                suffix = ("" if not any(storage.axes) else ", sharded" + (", regathered" if storage.regather else ""))
                found.append((name + suffix, variant))
    return found or [("data", data_parallel_strategy(problem)[0])]


class Compiled:
    """What depends on the mesh alone, and hardly on sizes: layouts of a strategy, seconds of conversions."""

    def __init__(self, tables: CostTables):
        links: Links = tables.links

        def layouts(axes, storage, shape) -> Layouts:
            return layouts_of(dataclasses.replace(tables, tensor_shape=shape), axes, storage)

        self.layouts = jax.jit(layouts)
        self.seconds = jax.jit(lambda source, target, size, share: conversion_cost(source, target, size, links, share).seconds)


def _figures(tables: CostTables, schedule: Schedule, strategy: Strategy, compiled: Compiled) -> Figures:
    """The cost model's figures (costs/evaluate.py) of one strategy, with sizes as arguments of what is compiled."""
    found: Layouts = jax.tree.map(np.asarray, compiled.layouts(strategy.axes, strategy.storage, tables.tensor_shape))
    sizes = np.array(tables.links.axis_sizes, np.float32)
    device = tables.topology.device
    memory_rate = device.memory_bandwidth_bytes_per_s * device.memory_efficiency

    def product(mask: np.ndarray) -> np.ndarray:
        return np.where(mask, sizes, np.float32(1)).prod(-1)

    num_u, num_p, num_k = len(tables.access_op), len(tables.parameter_op), tables.num_tasks
    index = np.asarray(value_index(strategy.axes))
    moved = np.bincount(tables.access_task, tables.access_bytes / product(found.slots[:num_u] >= 0), num_k)
    task_index = index[tables.task_op]
    split = product(np.take_along_axis(tables.work_split, task_index[tables.work_task], axis=1))
    flop_s = np.bincount(tables.work_task, tables.work_seconds / split, num_k)
    shards = product(found.slots[num_u : num_u + num_p] >= 0)
    is_update = tables.task_parameter >= 0
    if num_p:
        update_split = shards[np.maximum(tables.task_parameter, 0)]
        flop_s = np.where(is_update, flop_s / update_split, flop_s)
        moved = np.where(is_update, tables.update_bytes / update_split, moved)
    compute_s = (np.maximum(flop_s, moved / memory_rate) + device.launch_s) * tables.task_trips

    home = found.home
    edge_home, target = home[tables.edge_tensor], found.slots[tables.edge_slot]
    target = np.where(target == PARTIAL, edge_home, target)
    if len(tables.sum_task):
        sums = [np.take_along_axis(x, task_index[tables.sum_task], axis=1) for x in (tables.sum_split, tables.sum_reduced)]
        sum_source, sum_target = map(np.asarray, sum_layouts(*map(jnp.asarray, sums)))
    else:
        sum_source = sum_target = np.zeros((0, len(sizes)), np.int8)
    resolved = np.where(found.raw == PARTIAL, home, found.raw)
    num_t, num_e = len(tables.tensor_bytes), len(tables.edge_task)
    shares = np.concatenate([*latency_shares(tables), np.ones(len(tables.sum_task), np.float32)])
    every = compiled.seconds(
        np.concatenate([found.raw, edge_home, sum_source]), np.concatenate([resolved, target, sum_target]),
        np.concatenate([tables.tensor_bytes, tables.edge_bytes, tables.sum_bytes]), shares,
    )  # fmt: skip
    sum_times = tables.task_trips[tables.sum_task] if len(tables.sum_task) else np.zeros(0, np.float32)
    times = np.concatenate([tables.tensor_trips * tables.may_be_partial, tables.edge_trips, sum_times])
    seconds = np.asarray(every) * times[:, None]
    convert_s = np.where(found.is_shared[:, None], 0.0, seconds[num_t : num_t + num_e])
    durations = Durations(compute_s, seconds[:num_t], convert_s, seconds[num_t + num_e :])
    return Figures(
        schedule.durations(durations),
        tables.tensor_bytes * tables.tensor_copies / product(home >= 0),
        np.where((edge_home != target).any(-1), tables.edge_bytes / product(target >= 0), 0.0),
        np.where(found.is_shared, found.shared_since, np.minimum(tables.edge_task, num_k - 1)),
        np.where((found.raw == PARTIAL).any(-1), tables.tensor_bytes / product(found.raw >= 0), 0.0),
        tables.parameter_bytes * tables.state_copies / shards,
        tables.parameter_bytes / shards,
    )  # fmt: skip
