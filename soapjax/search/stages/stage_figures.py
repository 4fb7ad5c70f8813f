"""What the cost model says of operators on the devices of a stage, at any micro-batch size.

The figures of costs/evaluate.py, whose program is the same for all micro-batch sizes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from soapjax.costs.evaluate import Evaluator, Layouts
from soapjax.costs.measured.profile import Profile
from soapjax.costs.tables.problem_tables import CostTables, cost_tables
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.phases import BACKWARD, FORWARD, UPDATE
from soapjax.graph.readers import kept_copies
from soapjax.search.experts.baselines import data_parallel_strategy, tensor_parallel_strategy
from soapjax.search.problem import PlanningProblem
from soapjax.simulate.schedule import schedule_of
from soapjax.strategy.configs import Storage, Strategy, stage_storages
from soapjax.strategy.layout import PARTIAL, Spec
from soapjax.strategy.space import SearchSpace, search_space
from soapjax.topology import DeviceTopology, LinkLevel, factor_mesh


def part_of(topology: DeviceTopology, first: int, count: int) -> DeviceTopology:
    """`count` devices from `first` as a topology: whole units where they are, else one level of the slowest links between them."""
    levels: list[LinkLevel] = []
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
STORED = ("", ", sharded", ", sharded, regathered", ", sharded, gradients")  # ends of names: as used, and ZeRO-1, 3 and 2


class Figures(NamedTuple):
    """Of one inner strategy at one micro-batch size, as NumPy arrays."""

    seconds: np.ndarray  # [T] of every scheduled task
    shard_bytes: np.ndarray  # [tensors]: of a tensor as it is kept, per device, whether it is stored or fused into its readers
    copy_bytes: np.ndarray  # [E]: of resharded copies
    copy_since: np.ndarray  # [E]: the task from which a copy is held for its reader: an earlier reader's, where they share it
    transient_bytes: np.ndarray  # [tensors]: of partial sums, and work space
    merging_bytes: np.ndarray  # [tensors, 2]: of gradients that wait to be summed in one collective, their sums left out
    stored_bytes: np.ndarray  # [P]: of a parameter with its optimizer state
    parameter_bytes: np.ndarray  # [P]: of a parameter alone
    may_sum_late: np.ndarray  # bool [P]: not gathered for each pass, so that running sums may wait on their devices for the update
    late_growth: np.ndarray  # [P]: bytes of a sum that waits, over those of one that does not
    gathered_bytes: np.ndarray  # [P]: of the one copy that all micro-batches read; 0 where passes gather, or nobody
    gathers_once: np.ndarray  # bool [E]: the reshard that makes such a copy
    cast_bytes: np.ndarray  # [P]: of a copy in the type that its reader casts it to first, where such a copy may serve all passes
    cast_s: np.ndarray  # [P]: of making it
    layouts: Layouts


@dataclasses.dataclass(frozen=True, eq=False)
class Inside:
    """One way to run operators on the devices of a stage."""

    name: str
    strategy: Strategy
    fabric: Fabric
    is_by_hand: bool = True  # as people write it; else a search offered it

    @functools.cached_property
    def figures(self) -> Figures:
        return self.fabric.figures(self.strategy)


def expert_of(name: str) -> str:
    """Which of the baselines (search/experts/baselines.py) an inner strategy by hand belongs to, by its name."""
    return "tensor_parallel" if name.startswith("tensor") else "fsdp" if "sharded" in name else "data_parallel"


class Fabric:
    """Devices of one stage, at one number of micro-batches: the problem, and its inner strategies.

    Args:
      has_passes: whether the forward and the backward pass are programs of their own.
      has_sums: whether several micro-batches add to one gradient, and so may share a copy of a parameter.
      fixed: layouts that the user decided, by argument path; of the batch those of a micro-batch.
    """

    def __init__(
        self, graph: OperatorGraph, topology: DeviceTopology, profile: Profile | None, *, has_passes: bool = True,
        has_sums: bool = True, fixed: Mapping[str, Spec] | None = None,
    ):  # fmt: skip
        self.topology, self.has_passes, self.has_sums = topology, has_passes, has_sums
        mesh = factor_mesh(topology)
        self.space = search_space(graph, mesh, fixed=fixed, storages=stage_storages(mesh, adds_up=has_sums))
        self.tables = cost_tables(graph, self.space, topology, profile)
        self.schedule = schedule_of(self.tables)
        self._figures: dict[bytes, Figures] = {}

    @functools.cached_property
    def evaluator(self) -> Evaluator:
        """Of many meshes only the names of what may be done inside are asked."""
        return Evaluator(self.tables)

    @functools.cached_property
    def choices(self) -> list[Inside]:
        """The inner strategies, data parallelism first; behind those by hand what a search offered."""
        return [Inside(name, s, self) for name, s in _inner(self.space.graph, self.space, self.topology)]

    def offer(self, name: str, strategies: Sequence[Strategy]) -> list[int]:
        """The places of strategies among `choices`, where they are appended if they are new."""
        place = {inside.strategy.key(): i for i, inside in enumerate(self.choices)}
        for strategy in strategies:
            if strategy.key() not in place:
                place[strategy.key()] = len(self.choices)
                self.choices.append(Inside(name, strategy, self, is_by_hand=False))
        return [place[s.key()] for s in strategies]

    def figures(self, strategy: Strategy) -> Figures:
        """Of any strategy; kept once they are known."""
        if (key := strategy.key()) not in self._figures:
            self._figures[key] = _figures(self, strategy)
        return self._figures[key]


def _inner(graph: OperatorGraph, space: SearchSpace, topology: DeviceTopology) -> list[tuple[str, Strategy]]:
    """Data parallelism, and Megatron's pairs over the fastest axes with what is between them repeated or split along the sequence;
    each with parameters as used, sharded, and regathered, and sharded with sums of gradients in parts.

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
                    found.append((name + STORED[_zero(storage)], variant))
    return found or [("data", data_parallel_strategy(problem)[0])]


def _zero(storage: Storage) -> int:
    """The place among STORED."""
    return 0 if not any(storage.axes) else 2 if storage.regathers else 3 if storage.scatters else 1


def _resharded_again(tables: CostTables, found: Layouts) -> np.ndarray:
    """bool [E]: reshards that the backward pass, a program of its own, makes again of what the forward pass resharded."""
    again = np.zeros(len(tables.edge_task), bool)
    phase = np.array([*(t.phase for t in tables.graph.tasks), UPDATE])[tables.edge_task]
    first: dict[tuple[int, bytes], int] = {}  # tensor and layout -> the phase of what reads it there first
    for e in np.argsort(tables.edge_task, kind="stable").tolist():
        if found.is_shared[e] or phase[e] == FORWARD:
            key = int(tables.edge_tensor[e]), found.slots[tables.edge_slot[e]].tobytes()
            again[e] = found.is_shared[e] and phase[e] == BACKWARD and first.get(key) == FORWARD
            first[key] = phase[e]
    return again


def _may_sum_late(tables: CostTables, strategy: Strategy) -> np.ndarray:
    """bool [P]: as execute/parts/deferral.py decides; of what a loop makes, but running sums, only where it is stored as used."""
    storage, graph = strategy.storage[tables.parameter_op], tables.graph
    in_loops = {a.tensor for task in graph.tasks if task.scope for a in task.writes} - {a.total for a in graph.accumulations}
    is_alone = np.array([p.gradient not in in_loops for p in graph.parameters], bool)
    is_trained = np.array([not p.is_frozen for p in graph.parameters], bool)
    is_plain = np.array([not any(s.axes) for s in tables.space.storages])[storage]
    is_scattered = np.array([s.regathers or s.scatters for s in tables.space.storages])[storage]
    return is_trained & (is_plain | (~is_scattered & is_alone))


def _late_growth(tables: CostTables, late: np.ndarray) -> np.ndarray:
    """[P]: what is cast behind the sum, in the backward pass, waits as it was cast; 1 of all others."""
    growth = np.ones(len(late), np.float32)
    for p in np.flatnonzero(late):
        tensor = tables.graph.tensors[g := tables.graph.parameters[p].gradient]
        if tensor.sum_dtype:
            growth[p] = tensor.size_bytes / max(tables.resolve_bytes[g], 1)
    return growth


def _gathered_once(tables: CostTables, found: Layouts, strategy: Strategy) -> np.ndarray:
    """bool [E]: reshards that read what is kept once it is gathered (execute/parts/gathered.py), all of a parameter's."""
    space, graph = tables.space, tables.graph
    once = np.zeros(len(tables.edge_task), bool)
    kept = np.array([any(s.axes) and not s.regathers for s in space.storages])[strategy.storage[tables.parameter_op]]
    phase = np.array([*(t.phase for t in graph.tasks), UPDATE])[tables.edge_task]
    for p in kept_copies(graph).keys() & set(np.flatnonzero(kept).tolist()):
        tensor = graph.parameters[p].tensor
        mine = np.flatnonzero((tables.edge_tensor == tensor) & (phase != UPDATE))
        used = found.slots[tables.edge_slot[mine]]
        once[mine] = len(mine) > 0 and bool((used == used[0]).all()) and bool((used[0] != found.home[tensor]).any())
    return once


def _cast_bytes(tables: CostTables, strategy: Strategy, parameter_bytes: np.ndarray) -> np.ndarray:
    """[P]: of what is stored as it is used; what is gathered for all passes is cast before that (execute/parts/gathered.py)."""
    share = np.zeros(len(parameter_bytes), np.float32)
    as_used = np.array([not any(s.axes) for s in tables.space.storages])[strategy.storage[tables.parameter_op]]
    for p, cast in kept_copies(tables.graph).items():
        if cast is not None and as_used[p]:
            tensor = tables.graph.tensors[tables.graph.parameters[p].tensor]
            share[p] = np.dtype(cast).itemsize / np.dtype(tensor.dtype).itemsize
    return parameter_bytes * share


def _cast_s(tables: CostTables, parameter_bytes: np.ndarray, cast_bytes: np.ndarray) -> np.ndarray:
    """[P]: one is read, the other written. None where tasks were measured: what they cast is in their time."""
    moved_bytes = np.where(cast_bytes > 0, parameter_bytes + cast_bytes, 0.0)
    return moved_bytes / tables.rates.memory_bytes_per_s * (tables.profile is None)


def _figures(fabric: Fabric, strategy: Strategy) -> Figures:
    tables, schedule = fabric.tables, fabric.schedule
    costs = fabric.evaluator.alone(strategy.axes, strategy.storage)
    durations, parts, found = costs.durations, costs.parts, costs.layouts
    own_since = np.minimum(tables.edge_task, tables.num_tasks - 1)
    copy_since = np.where(found.is_shared, tables.edge_handed_on[found.shared_with], own_since)
    if fabric.has_passes:
        again = _resharded_again(tables, found)
        durations = durations._replace(reshard_s=np.where(again[:, None], parts.reshard_s, durations.reshard_s))
        found = found._replace(is_shared=found.is_shared & ~again)
        copy_since = np.where(again, tables.edge_task, copy_since)
    waiting, sizes = np.asarray(parts.waiting_bytes), np.array(tables.links.axis_sizes, np.float32)
    split = np.where(found.home >= 0, sizes, 1.0).prod(axis=1)
    shard_bytes = tables.tensor_bytes * np.array([t.copies for t in tables.graph.tensors], np.float32) / split
    copy_bytes, late = np.array(parts.copy_bytes), _may_sum_late(tables, strategy)
    parameter_bytes = parts.stored_bytes / tables.state_copies
    gathered_bytes, gathers = np.zeros(len(tables.graph.parameters), np.float32), np.zeros(len(tables.edge_task), bool)
    cast_bytes = np.zeros(len(parameter_bytes), np.float32)
    growth = _late_growth(tables, late & fabric.has_sums)
    if fabric.has_sums:
        resolve_s = np.array(durations.resolve_s)
        gradients = [p.gradient for p in tables.graph.trained]
        resolve_s[gradients] *= growth[: len(gradients), None]
        durations = durations._replace(resolve_s=resolve_s)
        cast_bytes = _cast_bytes(tables, strategy, parameter_bytes)
        once = _gathered_once(tables, found, strategy)
        firsts = {int(tables.edge_tensor[e]): e for e in np.flatnonzero(once)[::-1]}
        gathers[list(firsts.values())] = True
        durations = durations._replace(reshard_s=np.where((once & ~gathers)[:, None], 0.0, durations.reshard_s))
        found = found._replace(is_shared=found.is_shared & ~gathers | (once & ~gathers))
        for p, parameter in enumerate(tables.graph.parameters):
            if (e := firsts.get(parameter.tensor)) is not None:
                gathered_bytes[p] = copy_bytes[e]
            g = parameter.gradient
            if late[p] and (found.raw[g] == PARTIAL).any():  # until it is summed it lies as it is made
                shard_bytes[g] *= split[g] / np.where(found.raw[g] >= 0, sizes, 1.0).prod()
        copy_bytes = np.where(once, 0.0, copy_bytes)
    return Figures(
        seconds=schedule.durations(durations), shard_bytes=shard_bytes, copy_bytes=copy_bytes, copy_since=copy_since,
        transient_bytes=parts.transient_bytes, merging_bytes=np.maximum(waiting - parts.held_bytes[:, None], 0.0) * (waiting > 0),
        stored_bytes=parts.stored_bytes, parameter_bytes=parameter_bytes, may_sum_late=late, late_growth=growth,
        gathered_bytes=gathered_bytes, gathers_once=gathers, cast_bytes=cast_bytes,
        cast_s=_cast_s(tables, parameter_bytes, cast_bytes), layouts=found,
    )  # fmt: skip
