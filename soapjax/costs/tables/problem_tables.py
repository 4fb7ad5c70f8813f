"""`CostTables`: all that costs need of a graph, a space and a topology, as static arrays.

Everything a strategy changes is computed from these in jit (evaluate.py). The
sequences here also fix what the simulators schedule:

* compute tasks, in program order;
* one *resolution* per tensor that may be partial, right after its producer;
* one *reshard* per (tensor, reader) whose layouts may differ, right before the reader;
* one *inner collective* per reduction in the middle of a task, and per exchange of halos between blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from soapjax.costs.compilers.compiler_model import CompilerModel, Reshards
from soapjax.costs.compilers.of_backend import compiler_of
from soapjax.costs.measured.interpolation import ComputeRates, MeasuredArrays, linked, measured_arrays
from soapjax.costs.measured.profile import Profile
from soapjax.costs.memory.memory_order import MemoryOrder, least_until, through_loops
from soapjax.costs.memory.working_sets import WorkingMemory, working_memory
from soapjax.costs.rules.links import Links, combined_share, links_of
from soapjax.costs.tables.tensor_tables import reader_groups, tensors_and_edges, trip_bytes, trip_slices
from soapjax.graph.operators import NOT_SPLIT, OperatorGraph
from soapjax.graph.readers import left_parameters, served_by_loop
from soapjax.strategy.layout import HALO, PARTIAL, REPLICATED
from soapjax.strategy.space import NOT_FIXED, SearchSpace
from soapjax.topology import DeviceTopology


@dataclasses.dataclass(frozen=True, eq=False)
class CostTables:
    """Static arrays; letters: K tasks, U accesses, T tensors, P parameters, E reshards, S inner collectives, W work items."""

    graph: OperatorGraph
    space: SearchSpace
    topology: DeviceTopology
    links: Links
    usable_memory_bytes: int
    compiler: CompilerModel
    working: WorkingMemory

    # Layout slots: U accesses; P parameters as they are stored, P gradients, and P parameters as the backward pass gathers them
    # again; sums of A gradients that follow their parameter's storage; "replicated".
    access_op: np.ndarray  # int32 [U]
    access_map: np.ndarray  # int8 [U, D + 1]: tensor dim (or REPLICATED, PARTIAL) by config value + 1
    access_task: np.ndarray  # int32 [U]
    access_tensor: np.ndarray  # int32 [U]
    access_bytes: np.ndarray  # float32 [U]: of one trip
    access_is_write: np.ndarray  # bool [U]

    parameter_op: np.ndarray  # int32 [P] owner
    parameter_slot: np.ndarray  # int32 [P]: the owner's first read of it, U (replicated) where only a loop starts from it
    storage_dim: np.ndarray  # int32 [P]: dim that extra storage axes split
    storage_dim_size: np.ndarray  # int32 [P]
    gradient_shift: np.ndarray  # int32 [P]: leading (loop) dims that the gradient's tensor lacks
    storage_fixed: np.ndarray  # int8 [P, A], NOT_FIXED where free
    parameter_bytes: np.ndarray  # float32 [P]
    state_copies: np.ndarray  # float32 [P]: parameter and optimizer state leaves of its shape
    storage_masks: np.ndarray  # bool [O, A]
    storage_left: np.ndarray  # bool [O, A]: axes that split what the forward pass leaves; none where it leaves nothing
    storage_again: np.ndarray  # bool [O]: the backward pass gathers again
    storage_scatters: np.ndarray  # bool [O]: gradients that are added up are scattered before that
    sum_parameter: np.ndarray  # int32 [A]
    sum_slot: np.ndarray  # int32 [A]: whose layout such a sum has where gradients are not scattered before
    is_left: np.ndarray  # bool [P]: the forward pass can leave a part of it to the backward pass

    tensor_source: np.ndarray  # int32 [T]: FROM_*
    tensor_slot: np.ndarray  # int32 [T]: the slot its layout comes from
    tensor_reader: np.ndarray  # int32 [T]: slot of the first reader (or of "replicated")
    tensor_sum: np.ndarray  # int32 [T]: slot whose layout, partial sums included, a summand is kept in; -1
    is_joint: np.ndarray  # bool [T]: a summand only where it is a partial sum in that layout as it is made
    tensor_fixed: np.ndarray  # int8 [T, A]
    tensor_shape: np.ndarray  # int32 [T, R]
    tensor_bytes: np.ndarray  # float32 [T]: of one trip
    resolve_bytes: np.ndarray  # float32 [T]: as it is added up; a gradient in bfloat16, say, that is cast behind the sum
    tensor_copies: np.ndarray  # float32 [T]: alive at once
    held_bytes: np.ndarray  # float32 [T]: all that are alive, whole; of a parameter what the backward pass reads of it
    left_slot: np.ndarray  # int32 [T]: of a parameter of which a part can be left, the slot of that; -1
    tensor_birth: np.ndarray  # int32 [T]: the task that makes it
    tensor_death: np.ndarray  # int32 [T]: the last task that needs it
    order: MemoryOrder  # when tensors are alive, as the compiler schedules them
    is_product: np.ndarray  # bool [T]: made by a dot, of more than two dims (two can be made in either order)
    tensor_trips: np.ndarray  # float32 [T]: how often it is made
    may_be_partial: np.ndarray  # bool [T]: may be resolved: partial as it is made, or kept in another layout than it is made in

    edge_tensor: np.ndarray  # int32 [E]
    edge_source: np.ndarray  # int32 [E]: the slot its tensor's layout comes from, which a parameter's readers differ in
    edge_slot: np.ndarray  # int32 [E]: the reader's slot
    edge_task: np.ndarray  # int32 [E]: the reader; K for the step's end
    edge_bytes: np.ndarray  # float32 [E]: of one reshard
    edge_trips: np.ndarray  # float32 [E]
    edge_parameter: np.ndarray  # int32 [E]: parameter that is read, -1 for other tensors
    # Shares of latency that gradient sums and parameter gathers pay; activations wait for nobody to be merged with.
    resolve_share: np.ndarray  # float32 [T]
    edge_share: np.ndarray  # float32 [E]
    edge_handed_on: np.ndarray  # int32 [E]: from which task on a later reader of the same copy holds it
    edge_group: np.ndarray  # int32 [E]: one number for those that share a copy if they want the same layout
    edge_is_backward: np.ndarray  # bool [E]: after the forward pass

    sum_task: np.ndarray  # int32 [S]
    sum_bytes: np.ndarray  # float32 [S]
    sum_map: np.ndarray  # int8 [S, D + 1]: 0 (split), PARTIAL, HALO - k or REPLICATED, by config value + 1

    work_task: np.ndarray  # int32 [W]
    work_seconds: np.ndarray  # float32 [W]: on one device
    work_split: np.ndarray  # bool [W, D + 1]
    task_op: np.ndarray  # int32 [K]
    task_trips: np.ndarray  # float32 [K]
    task_parameter: np.ndarray  # int32 [K]
    update_bytes: np.ndarray  # float32 [K]

    profile: Profile | None  # what was measured, None: the topology's figures
    rates: ComputeRates
    measured: MeasuredArrays

    @functools.cached_property
    def work_flops(self) -> np.ndarray:
        """float64 [W]: of all trips, on one device."""
        return np.array([w.flops * t.trip_count for t in self.graph.tasks for w in t.work], np.float64)

    def stored(self, slots: np.ndarray) -> np.ndarray:
        """Of layouts of slots those of parameters as they are stored, [P, ...]."""
        return slots[len(self.access_op) :][: len(self.parameter_op)]

    @property
    def num_tasks(self) -> int:
        return len(self.task_op)

    @functools.cached_property
    def may_gather_again(self) -> np.ndarray:
        """bool [E]: readers of parameters in the backward pass, which by some storages does not share the forward pass's copies."""
        of = self.edge_parameter
        is_left = self.is_left[np.maximum(of, 0)] if len(self.is_left) else False
        served = served_by_loop(self.graph)
        ends = zip(self.edge_task.tolist(), self.edge_tensor.tolist(), strict=True)
        is_served = np.array([end in served for end in ends], bool) & (self.edge_trips == 1)
        # Where barriers do not hold, what the two passes gather alike is gathered once.
        return (of >= 0) & self.edge_is_backward & (self.compiler.keeps_barriers | is_left) & ~is_served

    def reader_groups(self) -> list[list[int]]:
        """The reshards of each `edge_group`, in order."""
        members: dict[int, list[int]] = {}
        for e, number in enumerate(self.edge_group.tolist()):
            members.setdefault(number, []).append(e)
        return list(members.values())

    @property
    def replicated_slot(self) -> int:
        """The last layout slot, behind the accesses, three slots of each parameter, and sums of gradients."""
        return len(self.access_op) + 3 * len(self.parameter_op) + len(self.sum_slot)

    @functools.cached_property
    def parameter_slots(self) -> np.ndarray:
        """int32 [P, 6]: layout slots that a parameter's are made of, its owner's first read and a summand of its gradient, and its
        own: as it is stored, its gradient, as it is gathered again, and the sum of its gradient, -1 where it has none."""
        num_u, num_p = len(self.access_op), len(self.parameter_op)
        found = np.full((num_p, 6), self.replicated_slot, np.int32)
        found[:, 0] = np.where(self.parameter_slot == num_u, self.replicated_slot, self.parameter_slot)
        found[:, 2:5] = num_u + np.arange(3) * num_p + np.arange(num_p)[:, None]
        found[:, 5] = -1
        found[self.sum_parameter, 1] = self.sum_slot
        found[self.sum_parameter, 5] = num_u + 3 * num_p + np.arange(len(self.sum_slot))
        return found

    @property
    def num_edges(self) -> int:
        """Spatial dims with halos in one inner collective, at most; 0 where no convolution has any."""
        return max(0, HALO + 1 - int(self.sum_map.min(initial=REPLICATED)))


def cost_tables(
    graph: OperatorGraph, space: SearchSpace, topology: DeviceTopology, profile: Profile | None = None
) -> CostTables:
    """Builds the arrays; compute costs are a roofline with the topology's figures, or what the profile measured and fitted."""
    t: dict[str, np.ndarray] = {}
    mesh, num_axes = space.mesh, space.num_axes
    width = space.allowed.shape[2]  # D + 1 config values
    _accesses(graph, width, t)
    _parameters(graph, space, t)
    edges = tensors_and_edges(graph, space, num_axes, t)
    reader_groups(graph, edges, t)
    rates = ComputeRates(topology, profile)
    _work(graph, rates, width, t)
    t["storage_masks"] = np.array([s.axes for s in space.storages], bool).reshape(len(space.storages), num_axes)
    t["storage_left"] = np.array([s.left for s in space.storages], bool).reshape(len(space.storages), num_axes)
    compiler = compiler_of(topology)
    t["storage_scatters"] = np.array([s.is_scattering for s in space.storages], bool)
    t["storage_again"] = np.array([s.regathers and (compiler.keeps_barriers or any(s.left)) for s in space.storages], bool)
    links = links_of(linked(topology, profile), mesh)
    is_gradient = np.zeros(len(graph.tensors), bool)
    is_gradient[[p.gradient for p in graph.trained]] = True
    is_gradient[[chain.total for chain in graph.accumulations]] = True
    working = working_memory(graph, compiler, links.axis_sizes[0])
    t["tensor_copies"] *= 1 + working.more
    reshards = Reshards(t["edge_tensor"], t.pop("edge_read_at"))
    order = compiler.ordered(graph, t["tensor_birth"], t["tensor_death"], reshards)
    order, t["edge_handed_on"] = through_loops(graph, order, t["edge_tensor"], t["edge_task"], t["edge_trips"])
    order = least_until(order, t["edge_tensor"], t.pop("computed_until"), t.pop("is_kept") | working.waits)
    order = _left(graph, order, t)
    widened = compiler.widening(x.dtype for x in graph.tensors)
    t["tensor_bytes"] *= np.where([x.input_leaf >= 0 for x in graph.tensors], 1, widened)
    t["resolve_bytes"] *= compiler.widening(x.sum_dtype or x.dtype for x in graph.tensors)
    t["edge_bytes"] *= compiler.widening(e.dtype for e in edges)
    t["held_bytes"] = t["tensor_bytes"] * t["tensor_copies"]
    t["held_bytes"][t["left_slot"] >= 0] = 0
    is_read_again = (t["left_slot"][t["edge_tensor"]] >= 0) & t["edge_is_backward"]
    np.maximum.at(t["held_bytes"], t["edge_tensor"][is_read_again], t["edge_bytes"][is_read_again])
    t["sum_bytes"] *= compiler.widening(graph.tasks[k].dtype for k in t["sum_task"].tolist())
    t["resolve_share"] = combined_share(t["resolve_bytes"], is_gradient, compiler.merged_bytes)
    t["edge_share"] = combined_share(t["edge_bytes"], t["edge_parameter"] >= 0, compiler.merged_bytes)
    return CostTables(
        graph=graph, space=space, topology=topology, links=links,
        usable_memory_bytes=topology.device.usable_memory_bytes, compiler=compiler, working=working, order=order, profile=profile,
        rates=rates, measured=measured_arrays(graph, rates, width - 1), **t,
    )  # fmt: skip


def _accesses(graph: OperatorGraph, width: int, t: dict) -> None:
    ops, maps, tasks, tensors, sizes, slices, writes = [], [], [], [], [], [], []
    for k, task in enumerate(graph.tasks):
        if task.parameter >= 0:
            continue
        for is_write, accesses in ((False, task.reads), (True, task.writes)):
            for access in accesses:
                row = np.full(width, REPLICATED, np.int8)
                for d, dim in enumerate(access.dims):
                    if dim != NOT_SPLIT:
                        row[dim + 1] = d
                row[[dim + 1 for dim in access.reduced]] = PARTIAL
                ops.append(task.operator)
                maps.append(row)
                tasks.append(k)
                tensors.append(access.tensor)
                sizes.append(trip_bytes(graph, access) * access.trips)
                slices.append(trip_slices(graph, access))
                writes.append(is_write)
    t["access_op"], t["access_task"], t["access_tensor"] = (np.array(x, np.int32) for x in (ops, tasks, tensors))
    t["access_map"] = np.array(maps, np.int8).reshape(len(maps), width)
    t["access_bytes"], t["access_is_write"] = np.array(sizes, np.float32), np.array(writes, bool)
    t["access_slices"] = np.array(slices, np.int32)


def _parameters(graph: OperatorGraph, space: SearchSpace, t: dict) -> None:
    mesh = space.mesh
    count = len(graph.parameters)
    first_slot: dict[tuple[int, int], int] = {}
    for u, (op, tensor, is_write) in enumerate(zip(t["access_op"], t["access_tensor"], t["access_is_write"], strict=True)):
        if not is_write:
            first_slot.setdefault((int(op), int(tensor)), u)
    fixed = np.full((count, space.num_axes), NOT_FIXED, np.int8)
    dims, shifts = [], []
    for p, parameter in enumerate(graph.parameters):
        shape = graph.tensors[parameter.tensor].shape
        choices = parameter.storage_dims or (0,)
        whole = [d for d in choices if shape and shape[d] % mesh.num_devices == 0]
        dims.append(whole[0] if whole else max(choices, key=lambda d: math.gcd(shape[d], mesh.num_devices) if shape else 0))
        shifts.append(0 if parameter.is_frozen else len(shape) - len(graph.tensors[parameter.gradient].shape))
        if parameter.leaf in space.fixed_layouts:
            fixed[p] = space.fixed_layouts[parameter.leaf]
    tensors = [graph.tensors[p.tensor] for p in graph.parameters]
    t["parameter_op"] = np.array([p.owner for p in graph.parameters], np.int32)
    t["parameter_slot"] = np.array([first_slot.get((p.owner, p.tensor), len(t["access_op"])) for p in graph.parameters], np.int32)
    t["storage_dim"] = np.array(dims, np.int32)
    t["storage_dim_size"] = np.array([x.shape[d] if x.shape else 1 for x, d in zip(tensors, dims, strict=True)], np.int32)
    t["gradient_shift"] = np.array(shifts, np.int32)
    t["storage_fixed"] = fixed
    t["parameter_bytes"] = np.array([x.size_bytes for x in tensors], np.float32)
    t["state_copies"] = np.array([1 + len(p.state_leaves) for p in graph.parameters], np.float32)


def _left(graph: OperatorGraph, order: MemoryOrder, t: dict) -> MemoryOrder:
    """What the backward pass gathers parameters from, by reader; and when there is what the forward pass leaves it."""
    first = len(t["access_op"]) + 2 * len(graph.parameters)
    is_again = (t["edge_parameter"] >= 0) & t["edge_is_backward"]
    t["edge_source"] = np.where(is_again, first + t["edge_parameter"], t["tensor_slot"][t["edge_tensor"]]).astype(np.int32)
    t["left_slot"] = np.full(len(graph.tensors), -1, np.int32)
    t["is_left"] = np.zeros(len(graph.parameters), bool)
    since, until, at_least = (x.copy() for x in (order.since, order.until, order.at_least))
    for p, first_reader in left_parameters(graph).items() if t["storage_left"].any() else ():
        i = graph.parameters[p].tensor
        t["is_left"][p], t["left_slot"][i] = True, first + p
        since[i] = at_least[i] = until[i] = first_reader
    again = np.flatnonzero(is_again)
    again = again[t["is_left"][t["edge_parameter"][again]]]
    np.maximum.at(until, t["edge_tensor"][again], order.read_at[again])
    return order._replace(since=since, until=until, at_least=at_least)


def _work(graph: OperatorGraph, rates: ComputeRates, width: int, t: dict) -> None:
    def mask(dims) -> np.ndarray:
        row = np.zeros(width, bool)
        row[[d + 1 for d in dims]] = True
        return row

    work_task, work_seconds, work_split = [], [], []
    sum_task, sum_bytes, sum_map = [], [], []
    update_bytes = np.zeros(len(graph.tasks), np.float32)

    def add(k: int, size_bytes: float, dims: Sequence[int], codes: Mapping[int, int]) -> None:
        row = np.full(width, REPLICATED, np.int8)
        row[[d + 1 for d in dims]] = 0
        for d, code in codes.items():
            row[d + 1] = code
        sum_task.append(k)
        sum_bytes.append(size_bytes)
        sum_map.append(row)

    for k, task in enumerate(graph.tasks):
        rate = rates.flops_per_s(task.kind, task.dtype)
        for w in task.work:
            work_task.append(k)
            work_seconds.append(w.flops / rate)
            work_split.append(mask(w.dims))
        for s in task.sums:
            add(k, s.size_bytes, s.dims, dict.fromkeys(s.reduced, PARTIAL))
        for h in task.halos:
            add(k, h.size_bytes, h.dims, {d: HALO - i for i, d in enumerate(h.edges)})
        if task.parameter >= 0:
            parameter = graph.parameters[task.parameter]
            # The gradient is read; the parameter and its optimizer state are read and written.
            update_bytes[k] = graph.tensors[parameter.tensor].size_bytes * (1 + 2 * (1 + len(parameter.state_leaves)))
    t["work_task"], t["work_seconds"] = np.array(work_task, np.int32), np.array(work_seconds, np.float32)
    t["work_split"] = np.array(work_split, bool).reshape(len(work_task), width)
    t["sum_task"], t["sum_bytes"] = np.array(sum_task, np.int32), np.array(sum_bytes, np.float32)
    t["sum_map"] = np.array(sum_map, np.int8).reshape(len(sum_task), width)
    t["task_op"] = np.array([x.operator for x in graph.tasks], np.int32)
    t["task_trips"] = np.array([x.trip_count for x in graph.tasks], np.float32)
    t["task_parameter"] = np.array([x.parameter for x in graph.tasks], np.int32)
    t["update_bytes"] = update_bytes
