"""What the cost model says of operators on the devices of a stage, at any micro-batch size.

The figures of costs/evaluate.py, whose program is the same for all micro-batch sizes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

from soapjax.costs.evaluate import Evaluator, Layouts
from soapjax.costs.measured.profile import Profile
from soapjax.costs.tables.tables import CostTables, cost_tables
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.phases import BACKWARD, FORWARD, UPDATE
from soapjax.search.experts.baselines import data_parallel_strategy, tensor_parallel_strategy
from soapjax.search.problem import PlanningProblem
from soapjax.simulate.schedule import Schedule, schedule_of
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
                levels.insert(0, level.part((first // inside) % level.size, units))
                break
            if units % level.size == 0 and (first // inside) % level.size == 0:
                levels.insert(0, level)
                inside *= level.size
                continue
        slowest = topology.levels[level_between(topology, first, first + count - 1)]
        return dataclasses.replace(topology, levels=(slowest.part(0, count),))
    return dataclasses.replace(topology, levels=tuple(levels or (topology.levels[-1].part(0, 1),)))


def level_between(topology: DeviceTopology, first: int, last: int) -> int:
    """The slowest level at which two devices differ; the fastest where they are one."""
    below = topology.num_devices
    for i, level in enumerate(topology.levels):
        below //= level.size
        if first // below != last // below:
            return i
    return len(topology.levels) - 1


MOST_UNITS = 4
STORED = {(False, False): "", (False, True): "", (True, False): ", sharded", (True, True): ", sharded, regathered"}


class Figures(NamedTuple):
    """Of one inner strategy at one micro-batch size, as NumPy arrays."""

    seconds: np.ndarray  # [T] of every scheduled task
    shard_bytes: np.ndarray  # [tensors]: of a tensor as it is kept, per device, whether it is stored or fused into its readers
    copy_bytes: np.ndarray  # [E]: of converted copies
    copy_since: np.ndarray  # [E]: the task from which a copy is held for its reader: an earlier reader's, where they share it
    passing_bytes: np.ndarray  # [tensors]: of partial sums, and work space
    merging_bytes: np.ndarray  # [tensors, 2]: of gradients that wait to be summed in one collective, their sums left out
    stored_bytes: np.ndarray  # [P]: of a parameter with its optimizer state
    parameter_bytes: np.ndarray  # [P]: of a parameter alone
    may_sum_late: np.ndarray  # bool [P]: stored as used, so that running sums may stay on their devices until the update
    layouts: Layouts


@dataclasses.dataclass(frozen=True, eq=False)
class Inside:
    """One way to run operators on the devices of a stage."""

    name: str
    strategy: Strategy
    fabric: Fabric

    @functools.cached_property
    def figures(self) -> Figures:
        return self.fabric.figures(self.strategy)


class Fabric:
    """Devices of one stage, at one number of micro-batches: the problem, and its inner strategies.

    Args:
      has_passes: whether the forward and the backward pass are programs of their own.
    """

    def __init__(self, graph: OperatorGraph, topology: DeviceTopology, profile: Profile | None, *, has_passes: bool = True):
        self.topology, self.mesh, self.has_passes = topology, factor_mesh(topology), has_passes
        self.space = search_space(graph, self.mesh)
        self.tables = cost_tables(graph, self.space, topology, profile)
        self.schedule = schedule_of(self.tables)
        self.evaluator = Evaluator(self.tables)

    @functools.cached_property
    def choices(self) -> list[Inside]:
        """The inner strategies, data parallelism first."""
        return [Inside(name, s, self) for name, s in _inner(self.space.graph, self.space, self.topology)]

    def figures(self, strategy: Strategy) -> Figures:
        late = np.array([not any(s.axes) for s in self.space.storages])[strategy.storage[self.tables.parameter_op]]
        return _figures(self.evaluator, self.schedule, strategy, late, has_passes=self.has_passes)


def _inner(graph: OperatorGraph, space: SearchSpace, topology: DeviceTopology) -> list[tuple[str, Strategy]]:
    """Data parallelism, and Megatron's pairs over the fastest axes with what is between them repeated or split along the sequence;
    each with parameters as used, sharded, and regathered.

    Pairs are offered over as many devices as MOST_UNITS units of the fastest links have: beyond, nobody splits a product.
    """
    problem = PlanningProblem(graph, space, None)
    found: list[tuple[str, Strategy]] = []
    for first in range(space.num_axes, -1, -1):
        axes = range(first, space.num_axes)
        degree = math.prod(space.mesh.axis_sizes[a] for a in axes)
        if first < space.num_axes and (degree == 1 or degree > MOST_UNITS * topology.levels[-1].size):
            continue
        named = {"data": data_parallel_strategy(problem)[0]} if not axes else {
            f"tensor/{degree}{suffix}": tensor_parallel_strategy(problem, axes, sequence_parallel=is_split)
            for suffix, is_split in (("", False), (", sequence", True))
        }  # fmt: skip
        for name, strategy in named.items():
            if any((strategy.axes == s.axes).all() for _, s in found):
                continue
            for k, storage in enumerate(space.storages):
                # Of the storages over all axes or none: what FSDP is beside data parallelism.
                if any(storage.axes) and not all(storage.axes):
                    continue
                variant = Strategy(strategy.axes, np.where(space.owns_parameters, k, 0).astype(np.int8))
                if space.is_valid(variant):
                    found.append((name + STORED[any(storage.axes), storage.regather], variant))
    return found or [("data", data_parallel_strategy(problem)[0])]


def _converted_again(tables: CostTables, found: Layouts) -> np.ndarray:
    """bool [E]: conversions that the backward pass, a program of its own, makes again of what the forward pass converted."""
    again = np.zeros(len(tables.edge_task), bool)
    phase = np.array([*(t.phase for t in tables.graph.tasks), UPDATE])[tables.edge_task]
    first: dict[tuple[int, bytes], int] = {}  # tensor and layout -> the phase of what reads it there first
    for e in np.argsort(tables.edge_task, kind="stable").tolist():
        if found.is_shared[e] or phase[e] == FORWARD:
            key = int(tables.edge_tensor[e]), found.slots[tables.edge_slot[e]].tobytes()
            again[e] = found.is_shared[e] and phase[e] == BACKWARD and first.get(key) == FORWARD
            first[key] = phase[e]
    return again


def _figures(
    evaluator: Evaluator, schedule: Schedule, strategy: Strategy, may_sum_late: np.ndarray, *, has_passes: bool
) -> Figures:  # fmt: skip
    tables = evaluator.tables
    costs = evaluator.costs(evaluator(strategy.axes[None], strategy.storage[None]), 0)
    durations, parts, found = costs.durations, costs.parts, costs.layouts
    copy_since = np.where(found.is_shared, found.shared_since, np.minimum(tables.edge_task, tables.num_tasks - 1))
    if has_passes:
        again = _converted_again(tables, found)
        durations = durations._replace(convert_s=np.where(again[:, None], parts.convert_s, durations.convert_s))
        found = found._replace(is_shared=found.is_shared & ~again)
        copy_since = np.where(again, tables.edge_task, copy_since)
    waiting = np.asarray(parts.waiting_bytes)
    split = np.where(found.home >= 0, np.array(tables.links.axis_sizes, np.float32), 1.0).prod(axis=1)
    return Figures(
        schedule.durations(durations),
        tables.tensor_bytes * np.array([t.copies for t in tables.graph.tensors], np.float32) / split,
        parts.copy_bytes,
        copy_since,
        parts.passing_bytes,
        np.maximum(waiting - parts.held_bytes[:, None], 0.0) * (waiting > 0),
        parts.stored_bytes,
        parts.stored_bytes / tables.state_copies,
        may_sum_late,
        found,
    )
