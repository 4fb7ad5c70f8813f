"""What a strategy costs, worked out slowly: one operator, one tensor, one task at a time, in Python floats.

The oracle of `soapjax.costs.evaluate`. It reads the graph and the strategy only, never
the cost tables. Where the tables have an order of their own, figures are summed by the names given here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict

import numpy as np

from soapjax.costs.rules.links import COLLECTIVES, links_of
from soapjax.costs.rules.plain_reshard import reshard_cost_plainly
from soapjax.graph.lifespans import lifetimes
from soapjax.graph.operators import HEAVY_RESULT, NOT_SPLIT, Access, Halo, OperatorGraph, Task
from soapjax.graph.passes.phases import BACKWARD, FORWARD, UPDATE
from soapjax.strategy.configs import Strategy
from soapjax.strategy.layout import PARTIAL, REPLICATED, divides
from soapjax.strategy.space import SearchSpace
from soapjax.topology import DeviceTopology

MERGED_BYTES = 30 * 2**20  # XLA for GPUs merges collectives up to here

Layout = tuple[int, ...]


@dataclasses.dataclass
class Reshard:
    """A reader that wants a tensor in a layout; `task` is the number of tasks for the step's end."""

    task: int
    tensor: int
    target: Layout
    size: float
    trips: int
    scope: str | None  # None where it is never shared
    dtype: str  # as which it is sent
    made: int = -1  # the first task at which it holds a copy of its own
    held_until: int = -1  # the last task at which it holds its copy


@dataclasses.dataclass
class PlainCosts:
    """L link levels; everything in float64."""

    compute_s: list[float]  # by task
    resolve_s: dict[int, np.ndarray]  # tensor -> [L]
    reshard_s: dict[tuple[int, int], np.ndarray]  # (task, tensor) -> [L]
    sum_s: dict[int, np.ndarray]  # task -> [L]
    bytes_by_collective: dict[str, float]
    home: list[Layout]
    memory_bytes: tuple[float, float, float]  # parameters and state, at the peak, the others and what is transient


def plain_costs(graph: OperatorGraph, space: SearchSpace, topology: DeviceTopology, strategy: Strategy) -> PlainCosts:
    return _Oracle(graph, space, topology, strategy).costs()


class _Oracle:
    def __init__(self, graph, space, topology, strategy):
        self.graph, self.space, self.topology, self.strategy = graph, space, topology, strategy
        self.sizes = space.mesh.axis_sizes
        self.links = links_of(topology, space.mesh)
        self.nowhere = (REPLICATED,) * len(self.sizes)
        self.parameter_of = {p.tensor: p for p in graph.parameters}
        self.gradient_of = {p.gradient: p for p in graph.parameters}
        self.writer: dict[int, int] = {}
        self.readers: dict[int, list[tuple[int, Layout]]] = defaultdict(list)
        self.raw: dict[int, Layout] = {}
        for k, task in enumerate(graph.tasks):
            if task.parameter >= 0:
                parameter = graph.parameters[task.parameter]
                self.readers[parameter.gradient].append((k, self.stored_gradient(parameter)))
                continue
            for access in task.reads:
                self.readers[access.tensor].append((k, self.layout(task, access)))
            for access in task.writes:
                self.writer[access.tensor] = k
                self.raw[access.tensor] = self.layout(task, access)
        self.common: dict[int, Layout] = {}  # of summands, partial sums included
        for chain in graph.accumulations:
            layout, parameter = self.raw[chain.layout_of], graph.parameters[chain.parameter]
            storage = space.storages[strategy.storage[parameter.owner]]
            if chain.follows_storage and (any(storage.again) or storage.scatters):
                layout = self.stored_gradient(parameter)
            self.common.update(dict.fromkeys((*chain.summands, *chain.running), layout))
            self.raw.update(dict.fromkeys((*chain.running, chain.total), layout))
            if chain.is_carried:  # the loop goes on with it as it is
                self.readers[chain.total] = [r for r in self.readers[chain.total] if r[0] > self.writer[chain.total]]
        for joint in graph.joint_sums:
            *others, last = joint.summands
            if PARTIAL in self.raw[last]:
                self.common.update({i: self.raw[i] for i in others if self.raw[i] == self.raw[last]})
        self.homes = [self.home(i) for i in range(len(graph.tensors))]

    # Layouts.

    def layout(self, task: Task, access: Access) -> Layout:
        found = []
        for value in self.strategy.axes[task.operator]:
            if value >= 0 and value in access.reduced:
                found.append(PARTIAL)
            elif value >= 0 and value in access.dims:
                found.append(access.dims.index(value))
            else:
                found.append(REPLICATED)
        return tuple(found)

    def shards(self, layout: Layout) -> int:
        return math.prod(s for d, s in zip(layout, self.sizes, strict=True) if d >= 0)

    def stored(self, parameter) -> Layout:
        """As its owner first reads it, and over the storage's axes where the owner leaves them free."""
        if parameter.leaf in self.space.fixed_layouts:
            return tuple(int(d) for d in self.space.fixed_layouts[parameter.leaf])
        shape = self.graph.tensors[parameter.tensor].shape
        reads = [
            self.layout(t, a) for t in self.graph.tasks if t.operator == parameter.owner and t.parameter < 0
            for a in t.reads if a.tensor == parameter.tensor
        ]  # fmt: skip
        as_used = tuple(max(d, REPLICATED) for d in reads[0])
        if not shape:
            return as_used
        devices = self.space.mesh.num_devices
        dims = parameter.storage_dims or (0,)
        dim = next((d for d in dims if shape[d] % devices == 0), None)
        if dim is None:
            dim = max(dims, key=lambda d: math.gcd(shape[d], devices))
        storage = self.space.storages[self.strategy.storage[parameter.owner]]
        wanted = tuple(dim if d == REPLICATED and on else d for d, on in zip(as_used, storage.axes, strict=True))
        degree = math.prod(s for d, s in zip(wanted, self.sizes, strict=True) if d == dim)
        return wanted if shape[dim] % degree == 0 else as_used

    def left(self, parameter) -> Layout:
        """What the backward pass gathers again: what is stored, or the slice of its own copy that the forward pass left."""
        stored = self.stored(parameter)
        storage = self.space.storages[self.strategy.storage[parameter.owner]]
        if storage.again in (storage.axes, (False,) * len(self.sizes)) or not self.may_be_left(parameter):
            return stored
        used = next(self.layout(t, a) for t in self.graph.tasks for a in t.reads if a.tensor == parameter.tensor)
        found = []
        for a, d in enumerate(stored):
            is_slice = all(later != d for later in used[a + 1 :])
            found.append(d if used[a] == d or (storage.again[a] and is_slice) else REPLICATED)
        return tuple(found)

    def may_be_left(self, parameter) -> bool:
        """One operator reads it, in both passes, outside of loops."""
        readers = [t for t in self.graph.tasks if t.phase != UPDATE and any(a.tensor == parameter.tensor for a in t.reads)]
        casts = {(t.operator, dict(t.casts).get(parameter.tensor)) for t in readers}
        return len(casts) == 1 and {FORWARD, BACKWARD} <= {t.phase for t in readers} and not any(t.scope for t in readers)

    def stored_gradient(self, parameter) -> Layout:
        """A loop makes the gradient without the parameter's leading dim."""
        missing = len(self.graph.tensors[parameter.tensor].shape) - len(self.graph.tensors[parameter.gradient].shape)
        return tuple(d - missing if d >= 0 else d for d in self.stored(parameter))

    def home(self, i: int) -> Layout:
        """As it is kept: a partial sum goes where its first reader wants it, or everywhere."""
        if i in self.common:
            return self.common[i]
        tensor = self.graph.tensors[i]
        first = self.readers[i][0][1] if self.readers[i] else self.nowhere
        if i in self.parameter_of:
            return self.stored(self.parameter_of[i])
        if i not in self.writer:
            if tensor.input_leaf in self.space.fixed_layouts:
                return tuple(int(d) for d in self.space.fixed_layouts[tensor.input_leaf])
            if tensor.input_leaf in dict(self.graph.state_pairs):
                return self.nowhere
            return tuple(max(d, REPLICATED) for d in first)
        raw = self.raw[i]
        scattered = list(raw)
        for a, d in enumerate(raw):
            if d == PARTIAL and first[a] >= 0 and first[a] not in raw[a + 1 :]:
                scattered[a] = first[a]
        if not divides(scattered, tensor.shape, self.sizes):
            scattered = list(raw)
        return tuple(max(d, REPLICATED) for d in scattered)

    # Costs.

    def reshard(
        self, source: Layout, target: Layout, size: float, times: float, is_merged: bool = False, shape: tuple[int, ...] = ()
    ) -> tuple[np.ndarray, dict[str, float]]:
        """`is_merged`: small collectives of parameters and gradients share their latency where the compiler merges them."""
        share = min(1.0, size / MERGED_BYTES) if is_merged and self.is_gpu else 1.0
        seconds, sent = reshard_cost_plainly(source, target, size, self.links, share, shape)
        return times * np.array(seconds), {k: times * v for k, v in sent.items()}

    def halos(self, halo: Halo, config: np.ndarray, times: float) -> tuple[np.ndarray, dict[str, float]]:
        """A message to each side along every spatial dim that is split; all other splits make it shorter."""
        links, seconds, total = self.links, np.zeros(self.links.num_levels), 0.0
        for edge in halo.edges:
            along = [a for a, d in enumerate(config) if d == edge]
            level = min((links.axis_levels[a] for a in along), default=None)
            if level is not None:
                others = {*halo.dims, *halo.edges} - {edge}
                size = halo.size_bytes / math.prod(links.axis_sizes[a] for a, d in enumerate(config) if d in others)
                seconds[level] += 2 * links.latency_s[level] + size / links.rate("collective-permute", level, along)
                total += size
        return times * seconds, {"collective-permute": times * total}

    def trip_bytes(self, i: int, task: Task) -> tuple[float, bool]:
        """What one trip of a task reads or writes; a loop reads one slice of a stacked argument."""
        tensor = self.graph.tensors[i]
        never_split = all(
            a.dims[0] == NOT_SPLIT for t in self.graph.tasks for a in t.reads if a.tensor == i and a.dims
        )  # fmt: skip
        slices = max([a.slices for a in task.reads if a.tensor == i], default=1)
        is_sliced = tensor.input_leaf >= 0 and slices > 1 and never_split
        return (tensor.size_bytes / slices if is_sliced else tensor.size_bytes), is_sliced

    def compute(self, k: int) -> float:
        task, device = self.graph.tasks[k], self.topology.device
        memory_rate = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
        rate = device.efficiency[task.kind] * device.peak(task.dtype, operator_class=task.kind)
        axes = self.strategy.axes[task.operator]
        if task.parameter >= 0:
            parameter = self.graph.parameters[task.parameter]
            shards = self.shards(self.stored(parameter))
            copies = 3 + 2 * len(parameter.state_leaves)  # gradient in; parameter and state in and out
            moved = copies * self.graph.tensors[parameter.tensor].size_bytes / shards
            flop_s = sum(w.flops for w in task.work) / rate / shards
            return max(flop_s, moved / memory_rate) + device.launch_s
        flop_s = 0.0
        for w in task.work:
            degree = math.prod(s for v, s in zip(axes, self.sizes, strict=True) if v in w.dims)
            flop_s += w.flops / rate / degree
        moved = sum(self.trip_bytes(a.tensor, task)[0] / self.shards(self.layout(task, a)) for a in (*task.reads, *task.writes))
        return (max(flop_s, moved / memory_rate) + device.launch_s) * task.trip_count

    def reshards(self) -> list[Reshard]:
        """Every reader of every tensor, in schedule order."""
        tasks, tensors, found = self.graph.tasks, self.graph.tensors, []
        made_in_loop = {i for i, k in self.writer.items() if tasks[k].trip_count > 1}
        for i, tensor in enumerate(tensors):
            for k, target in self.readers[i] if i not in self.common else ():
                size, is_sliced = self.trip_bytes(i, tasks[k])
                trips = tasks[k].trip_count if is_sliced or i in made_in_loop else 1
                if tasks[k].parameter >= 0:
                    size *= tensor.copies  # the gradients of all layers of a loop at once
                dtype = dict(tasks[k].casts).get(i, tensor.dtype)  # cast before it is sent
                size *= np.dtype(dtype).itemsize / tensor.itemsize if dtype != tensor.dtype else 1
                found.append(Reshard(k, i, target, size, trips, tasks[k].scope, dtype))
            replaced = {o for _, o in self.graph.state_pairs}
            if i in self.writer and replaced & set(tensor.output_leaves):
                found.append(Reshard(len(tasks), i, self.nowhere, tensor.size_bytes * tensor.copies, 1, None, tensor.dtype))
        for entry in self.graph.entries:
            if self.readers[entry.target]:
                first = self.readers[entry.target][0][0]
                target = self.raw.get(entry.target, self.nowhere)
                size = tensors[entry.source].size_bytes
                found.append(Reshard(first, entry.source, target, size, 1, tasks[first].scope, tensors[entry.source].dtype))
        found = [c for c in found if c.size > min(tensors[c.tensor].itemsize, np.dtype(c.dtype).itemsize)]
        for c in found:  # a loop carries its sums resolved
            c.target = tuple(h if d == PARTIAL else d for d, h in zip(c.target, self.homes[c.tensor], strict=True))
        return sorted(found, key=lambda c: (c.task, c.tensor))

    def gathers_again(self, c: Reshard) -> bool:
        """Whether it reads a parameter for the backward pass."""
        return c.tensor in self.parameter_of and c.scope is not None and self.graph.tasks[c.task].phase != FORWARD

    def may_share(self, earlier: Reshard, later: Reshard) -> bool:
        if earlier.tensor != later.tensor or earlier.target != later.target or later.scope is None:
            return False
        is_outside = later.tensor in self.parameter_of and earlier.trips == later.trips == 1  # of the loops, if any
        if earlier.scope != later.scope and not is_outside:
            return False
        if earlier.dtype != later.dtype:
            return False
        parameter = self.parameter_of.get(later.tensor)
        is_cpu = self.topology.device.platform == "cpu"  # where XLA merges the two, if they gather alike
        if parameter is not None:
            storage = self.space.storages[self.strategy.storage[parameter.owner]]
            if any(storage.again) and (not is_cpu or storage.again != storage.axes and self.may_be_left(parameter)):
                return self.reads_later(earlier) == self.reads_later(later)
        return True

    def reads_later(self, c: Reshard) -> bool:
        """Whether the backward pass reads a parameter, and no loop holds a copy for both passes."""
        loop = c.scope.split("/")[0]
        others = [
            t for t in self.graph.tasks if t.phase == FORWARD and loop and t.scope.split("/")[0] == loop
            and any(a.tensor == c.tensor for a in t.reads)
        ]  # fmt: skip
        return self.graph.tasks[c.task].phase != FORWARD and not (others and c.trips == 1)

    @functools.cached_property
    def pooled_at(self) -> dict[tuple[int, int], int]:
        """Where the image is needed that a pooling's gradient reads: at the pooling."""
        found = {}
        for k, task in enumerate(self.graph.tasks):
            for j, pool in enumerate(self.graph.tasks[:k]):
                is_read = any(a.tensor == task.memory.choices_of and a.operand >= 0 for a in pool.reads)
                if task.memory.choices_of >= 0 and pool.phase == FORWARD and pool.is_heavy and is_read:
                    found[k, task.memory.choices_of] = j
        return found

    # Memory that GPU compilers need besides (costs/memory/working_sets.py).

    @property
    def is_gpu(self) -> bool:
        return self.topology.device.platform in ("cuda", "rocm")

    def images(self) -> set[int]:
        """Arguments of float32 convolutions, which exist in two orders of their dims."""
        parameters = {p.tensor for p in self.graph.parameters}
        return {
            a.tensor for t in self.graph.tasks if t.kind == "conv" and t.dtype == "float32" and self.is_gpu for a in t.reads
            if a.operand >= 0 and self.graph.tensors[a.tensor].input_leaf >= 0 and a.tensor not in parameters
            and min(self.graph.tensors[a.tensor].shape) > 1
        }  # fmt: skip

    def computed_in_float32(self) -> set[int]:
        """Of bfloat16, made and read by light equations alone: what is between two of them is not rounded.

        Not what stands for a heavy equation's result beside which a tanh is kept: that one is in float32 already.
        """
        found = set()
        for task in self.graph.tasks:
            for a, sources in zip(task.writes, task.memory.recomputed_from, strict=False):
                readers = [(t, b) for t in self.graph.tasks for b in t.reads if b.tensor == a.tensor]
                is_light = all(t.parameter < 0 and b.operand < 0 for t, b in readers)
                tensor = self.graph.tensors[a.tensor]
                stands_for_both = task.memory.costly_bytes > 0 and HEAVY_RESULT in (sources or ())
                is_made_light = (sources is not None or not task.is_heavy) and not stands_for_both
                if self.is_gpu and readers and is_light and is_made_light and not tensor.output_leaves:
                    found |= {a.tensor} if tensor.dtype == "bfloat16" else set()
        return found

    def is_read_by_other_product(self, c: Reshard) -> bool:
        """Whether the layer's product that is not put off reads the same, right before or after."""
        for k in (c.task - 1, c.task + 1) if c.task < len(self.graph.tasks) else ():
            other = self.graph.tasks[k] if 0 <= k < len(self.graph.tasks) else None
            is_layer = other is not None and k not in self.late and other.operator == self.graph.tasks[c.task].operator
            if is_layer and any(a.tensor == c.tensor for a in other.reads):
                return True
        return False

    @functools.cached_property
    def waiting(self) -> set[int]:
        """Gradients that nothing but their own parameter's update reads."""
        found = set()
        for p, parameter in enumerate(self.graph.parameters):
            i = parameter.gradient
            readers = {t.parameter for t in self.graph.tasks for a in t.reads if a.tensor == i}
            in_loop = i in self.writer and self.graph.tasks[self.writer[i]].trip_count > 1
            if self.is_gpu and readers <= {p} and not in_loop and not self.graph.tensors[i].output_leaves:
                found.add(i)
        return found

    def resolution(self, i: int) -> tuple[str, float, int]:
        """How partial sums of a tensor are summed up ("", "reduce", "scatter"), bytes before, parts of the first scatter."""
        raw = self.raw[i]
        summed = [a for a, (r, h) in enumerate(zip(raw, self.homes[i], strict=True)) if r == PARTIAL != h]
        scattered = [a for a in summed if self.homes[i][a] >= 0]
        kind = "scatter" if scattered else "reduce" if summed else ""
        return kind, self.graph.tensors[i].summed_bytes / self.shards(raw), self.sizes[scattered[0]] if scattered else 1

    def waiting_bytes(self) -> np.ndarray:
        """By task: of each kind of collective, operands and results of what is merged into one."""
        limit, spans = MERGED_BYTES * self.is_gpu, self.spans
        pools = {"reduce": np.zeros(len(self.graph.tasks)), "scatter": np.zeros(len(self.graph.tasks))}
        last = max((self.writer[i] for i in self.waiting & self.writer.keys()), default=0)
        for i in self.waiting & self.raw.keys():
            kind, local, parts = self.resolution(i)
            if kind and local / parts <= limit:
                end = max((k for k, _ in self.readers[i]), default=-1) + 1
                both, share = local * (1 + 1 / parts), self.sizes[0] / (1 + self.sizes[0]) if kind == "scatter" else 1 / 2
                pools[kind][spans[i][0] + 1 : end] += share * both
                pools[kind][last + 1 : end] += (1 - share) * both
        return np.minimum(pools["reduce"], 2 * limit) + np.minimum(pools["scatter"], (1 + self.sizes[0]) * limit)

    def transient_bytes(self) -> np.ndarray:
        """By task: its partial results before they are summed up."""
        found, spans = np.zeros(len(self.graph.tasks)), self.spans
        for i in self.writer:
            (kind, local, parts), k = self.resolution(i), spans[i][0]
            if kind and not self.is_gpu:
                found[k] += local
            elif kind == "scatter":  # the operand and the result of the first one; what is left in the end counts as kept
                pairs = zip(self.sizes, self.raw[i], self.homes[i], strict=True)
                scattered = [(n, home) for n, raw, home in pairs if raw == PARTIAL and home >= 0]
                left, first = math.prod(n for n, _ in scattered), min(d for _, d in scattered)
                is_anew = self.graph.tasks[self.writer[i]].kind == "dot" and len(self.graph.tensors[i].shape) > 2 and first > 0
                found[k] += local * (1 + (1 if is_anew else 1 / parts) - 1 / left)
        return found

    def parts_alive(self, i: int) -> int:
        """Into how many parts a tensor is split as it lies in memory: a mere slice is cut out by those who read it."""
        raw, home = self.raw.get(i, self.homes[i]), self.homes[i]
        if all(r == h or r == REPLICATED for r, h in zip(raw, home, strict=True)):
            return self.shards(tuple(REPLICATED if r == REPLICATED else h for r, h in zip(raw, home, strict=True)))
        return self.shards(home)

    @functools.cached_property
    def swapped(self) -> list[int]:
        """Tasks of weights' gradients, each right before the product of the same layer that reads the weight; on GPUs."""
        summed = {p.gradient for p in self.graph.parameters} | {i for c in self.graph.accumulations for i in c.summands}
        found: list[int] = []
        for k, (one, two) in enumerate(zip(self.graph.tasks[:-1], self.graph.tasks[1:], strict=True)):
            is_layer = one.operator == two.operator and one.scope == two.scope and one.is_heavy and two.is_heavy
            is_backward = one.phase == two.phase == BACKWARD
            made = {a.tensor for a in one.writes}
            read = {a.tensor for a in two.reads}
            if self.is_gpu and is_layer and is_backward and made & summed and read & self.parameter_of.keys() and not made & read:
                found += [k] if k - 1 not in found else []
        return found

    @functools.cached_property
    def spans(self) -> dict[int, list[int]]:
        """First and last task at which a tensor that is no parameter is alive; summands are put off on GPUs."""
        last, lives, spans = len(self.graph.tasks) - 1, lifetimes(self.graph), {}
        for i, tensor in enumerate(self.graph.tensors):
            if i in self.parameter_of:
                continue
            born = self.writer.get(i, 0)
            ends = [born, *(self.pooled_at.get((k, i), k) for k, _ in self.readers[i])]
            for e in self.graph.entries:
                if e.source == i and self.readers[e.target]:
                    ends.append(self.readers[e.target][0][0])
            ends.append(int(lives.last_use[i]))
            if lives.is_reused[i] and max(ends) == lives.last_use[i] > born:
                ends = [max(ends) - 1]
            spans[i] = [born, last if tensor.output_leaves else max(ends)]
        for k in self.swapped:
            read, next_read = ({a.tensor for a in self.graph.tasks[j].reads} for j in (k, k + 1))
            for i, (born, dead) in spans.items():
                # Where the two change places: whoever of them needs a tensor last, needs it at the place of the other.
                if dead in (k, k + 1) and i in read | next_read:
                    dead = max(n for n, by in ((k + 1, read), (k, next_read)) if i in by)
                born = {k: k + 1, k + 1: k}.get(born, born)
                spans[i] = [born, max(born, dead)]
        makers = {a.tensor: task for task in self.graph.tasks for a in task.writes}
        groups: list[tuple[set[int], set[int]]] = []  # products, and the activations that they read
        for chain in self.graph.accumulations if self.is_gpu else ():
            for i in chain.summands:
                if not chain.is_carried and makers[i].is_heavy and makers[i].trip_count == 1:
                    read = {a.tensor for a in makers[i].reads}
                    own = {i}, {t for t in read if t not in makers or makers[t].phase == FORWARD}
                    alike = [g for g in groups if g[1] & own[1]]
                    groups = [g for g in groups if g not in alike]
                    groups.append(tuple(set().union(*(g[side] for g in (own, *alike))) for side in (0, 1)))
        before, self.late = {i: list(span) for i, span in spans.items()}, {}
        for products, _ in groups:
            first = min(before[i][1] for i in products)
            for i in products:
                spans[i][0] = self.late[self.writer[i]] = max(before[i][0], first)
                for access in makers[i].reads:
                    if access.tensor in spans:
                        spans[access.tensor][1] = max(spans[access.tensor][1], spans[i][0])
        for i, span in spans.items():  # a loop has a place for what goes in or comes out while it runs
            outside = [""] * bool(self.graph.tensors[i].output_leaves)
            for scope in [t.scope for t in self.graph.tasks if any(a.tensor == i for a in t.reads)] + outside:
                span[0] = min(span[0], *self.loop_entered(self.scope_of(i), scope), span[0])
                span[1] = max(span[1], *self.loop_entered(scope, self.scope_of(i)), span[1])
        return spans

    def scope_of(self, i: int) -> str:
        """The loop, in how many others, that makes a tensor."""
        return self.graph.tasks[self.writer[i]].scope if i in self.writer else ""

    def loop_entered(self, inside: str, outside: str) -> list[int]:
        """The tasks of the outermost loop around `inside` that is not around `outside`."""
        around = ["/".join(inside.split("/")[: n + 1]) for n in range(inside.count("/") + 1)] if inside else []
        loop = next((x for x in around if not f"{outside}/".startswith(f"{x}/")), None)
        return [k for k, t in enumerate(self.graph.tasks) if loop is not None and f"{t.scope}/".startswith(f"{loop}/")]

    def costs(self) -> PlainCosts:
        tasks, tensors = self.graph.tasks, self.graph.tensors
        sent = dict.fromkeys(COLLECTIVES, 0.0)

        def add(seconds: np.ndarray, moved: dict[str, float]) -> np.ndarray:
            for kind, b in moved.items():
                sent[kind] += b
            return seconds

        gradients = {p.gradient for p in self.graph.parameters} | {chain.total for chain in self.graph.accumulations}
        after_loop = {chain.total for chain in self.graph.accumulations if chain.is_carried}
        resolve_s: dict[int, np.ndarray] = {}
        for i, raw in self.raw.items():
            home = self.homes[i]
            if i in self.common:  # from a use's own layout to the common one, where a whole value may count as a sum of zeros
                home = tuple(REPLICATED if h == PARTIAL != r else h for h, r in zip(home, raw, strict=True))
                trips = tasks[self.writer[i]].trip_count
                resolve_s[i] = add(*self.reshard(raw, home, tensors[i].summed_bytes, trips, shape=tensors[i].shape))
            elif PARTIAL in raw:
                trips = 1 if i in after_loop else tasks[self.writer[i]].trip_count
                is_gradient, shape = i in gradients, tensors[i].shape
                resolve_s[i] = add(*self.reshard(raw, self.homes[i], tensors[i].summed_bytes, trips, is_gradient, shape))
        sum_s = {}
        for k, task in enumerate(tasks):
            for s in task.sums:
                source, target = [], []
                for value in self.strategy.axes[task.operator]:
                    is_split = value in s.dims and value not in s.reduced
                    source.append(PARTIAL if value in s.reduced else 0 if is_split else REPLICATED)
                    target.append(0 if is_split else REPLICATED)
                seconds = add(*self.reshard(tuple(source), tuple(target), s.size_bytes, task.trip_count))
                sum_s[k] = sum_s.get(k, 0.0) + seconds
            for halo in task.halos:
                sum_s[k] = sum_s.get(k, 0.0) + add(*self.halos(halo, self.strategy.axes[task.operator], task.trip_count))

        # A resharded copy lives from the reader it is made for to the last one that shares it.
        spans = self.spans
        live, read, needed = [0.0] * len(tasks), {}, {}
        reshard_s: dict[tuple[int, int], np.ndarray] = {}
        done: list[Reshard] = []
        read_again: dict[int, list[tuple[int, float]]] = defaultdict(list)
        place = {k: k + 1 for k in self.swapped} | {k + 1: k for k in self.swapped}
        for c in self.reshards():
            home = self.homes[c.tensor]
            if self.gathers_again(c):
                home = self.left(self.parameter_of[c.tensor])
            before = [e for e in done if self.may_share(e, c)]
            done.append(c)
            here = self.pooled_at.get((c.task, c.tensor), c.task)
            made = min(place.get(here, here), len(tasks) - 1)
            here = max(made, self.late.get(c.task, -1) if self.is_read_by_other_product(c) else -1)
            seconds = np.zeros(self.links.num_levels)
            if not before:
                is_parameter, shape = c.tensor in self.parameter_of, tensors[c.tensor].shape
                seconds = add(*self.reshard(home, c.target, c.size, c.trips, is_parameter, shape))
            reshard_s[c.task, c.tensor] = reshard_s.get((c.task, c.tensor), 0.0) + seconds
            c.held_until = c.task
            if c.scope and c.trips == 1:  # made before a loop, which holds it
                loop = self.loop_entered(c.scope, self.scope_of(c.tensor))
                made, here = min([made, *loop]), max([here, *loop])
                c.held_until = max([c.task, *loop])
            c.made = min(made, here)
            if c.target != home:
                since = made
                if before:  # after the last reader before, unless that one has it until then
                    has_it = before[-1].made <= here <= before[-1].held_until
                    since = here + 1 if has_it else min(before[-1].held_until + 1, here)
                for k in range(since, here + 1):
                    live[k] += c.size / self.shards(c.target)
            is_sent = any(h != t and h != REPLICATED for h, t in zip(home, c.target, strict=True))
            read[c.tensor] = max(read.get(c.tensor, -1), here)
            if self.gathers_again(c):
                read_again[c.tensor].append((here, c.size))
            needed[c.tensor] = max(needed.get(c.tensor, -1), here if not is_sent else -1 if before else made)

        lives, images, computed_as = lifetimes(self.graph), self.images(), self.computed_in_float32()
        summands = {i for chain in self.graph.accumulations for i in (*chain.summands, *chain.running, chain.total)}
        for i, (born, dead) in spans.items():
            tensor, computed = tensors[i], min(int(lives.computed_until[i]), len(tasks) - 1)
            # Where nothing else keeps a tensor it goes when its last readers have a copy.
            if i in read and not (tensor.output_leaves or i in summands or i in self.waiting or dead > max(read[i], computed)):
                dead = min(dead, max(needed[i], born, computed))
            for k in range(born, (born if i in self.waiting else dead) + 1):
                size = tensor.size_bytes * tensor.copies * lives.is_stored[i] * lives.scale[i]
                live[k] += size * (1 + (i in images) + (i in computed_as)) / self.parts_alive(i)
        for p in self.graph.parameters:  # what the forward pass leaves, until the backward pass has gathered it
            if (left := self.left(p)) != self.stored(p) and (again := read_again[p.tensor]):
                first = next(k for k, t in enumerate(tasks) if any(a.tensor == p.tensor for a in t.reads))
                for k in range(first, min(max(k for k, _ in again), max(needed[p.tensor], first)) + 1):
                    live[k] += max(size for _, size in again) / self.shards(left)
        live, transient = np.array(live) + self.waiting_bytes(), self.transient_bytes()
        peak = int(np.argmax(live + transient))
        persistent = sum(
            tensors[p.tensor].size_bytes * (1 + len(p.state_leaves)) / self.shards(self.stored(p)) for p in self.graph.parameters
        ) + sum(x.size_bytes for x in self.graph.unplaced)
        return PlainCosts(
            [self.compute(k) for k in range(len(tasks))], resolve_s, reshard_s, sum_s, sent, self.homes,
            (persistent, live[peak], transient[peak]),
        )  # fmt: skip
