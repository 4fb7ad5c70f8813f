"""A step as a fixed list of dispatches: programs and transfers, in the order in which one driver issues them.

Built once by symbolic names, run with integer slots: a step costs the host little more than the calls themselves.
All processes run the same list; JAX skips a program on a mesh without local devices, and wants transfers in one order everywhere.

On CPUs a collective between processes holds a thread of the pool that runs programs until the others have come, and there are as
many threads as cores. Were all of them held, a program that those others wait for could not run: so a program with collectives
between processes is dispatched when the earlier ones of this process have ended. Alike on all, which excludes a circle.
"""

from __future__ import annotations

import abc
import dataclasses
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from soapjax.errors import Problem
from soapjax.execute.parts.cut import Part
from soapjax.execute.parts.part_program import Place
from soapjax.execute.transfers.on_meshes import regrouped
from soapjax.execute.transfers.stacked_state import Pieces
from soapjax.execute.transfers.transfer import mover, processes_of
from soapjax.graph.trace.tracing import TracedStep

Name = Hashable


class Dispatch(NamedTuple):
    label: str
    track: str  # where it runs: what a timeline shows in one row
    fn: Any  # a program of `jax.jit`, of a transfer a function
    ins: list[int]
    outs: list[int]
    free: list[int]  # slots that nothing reads afterwards
    lasting: list[int]  # positions of results whose memory no later program takes
    part: tuple[Place, Part] | None = None  # what a program evaluates of the step; None of a transfer, and of small helpers
    targets: tuple[Any, ...] | None = None  # of a transfer the shardings that it ends in
    after: tuple[int, ...] = ()  # slots that are ready before it is dispatched
    is_regrouping: bool = False  # a transfer that moves nothing: the same blocks, as arrays on other meshes
    lets_go: Sequence[int] = ()  # of `free` what the caller has given away, and holds all the same

    def arrivals(self, given: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """What a transfer ends in, from shapes of what it is given: where it is given several per target, they are joined."""
        each = len(given) // len(self.targets)
        shapes = [x.shape if each == 1 else (each, *x.shape[1:]) for x in given[::each]]
        return [
            jax.ShapeDtypeStruct(shape, x.dtype, sharding=s)
            for shape, x, s in zip(shapes, given[::each], self.targets, strict=True)
        ]  # fmt: skip


class Event(NamedTuple):
    """One program or transfer of a real run; seconds since the step's first dispatch."""

    name: str
    track: str
    start_s: float
    duration_s: float


class StreamBuilder:
    """Collects dispatches by the names of what they read and make."""

    def __init__(self) -> None:
        self.slots: dict[Name, int] = {}
        self._entries: list[Dispatch] = []
        self._taken: set[int] = set()
        self.lent: set[Name] = set()  # what goes to other processes: JAX does not keep its memory from a program that takes it

    def slot(self, name: Name) -> int:
        return self.slots.setdefault(name, len(self.slots))

    def __contains__(self, name: Name) -> bool:
        return name in self.slots

    def call(
        self, label: str, track: str, fn: Callable[..., Sequence[Any]], ins: Sequence[Name], outs: Sequence[Name],
        takes: Sequence[Name] = (), part: tuple[Place, Part] | None = None, targets: Sequence[Any] | None = None,
        is_regrouping: bool = False,
    ) -> None:  # fmt: skip
        """`fn` is jitted; `takes`: those of `ins` whose memory it reuses (donated). The others: as in `Dispatch`."""
        missing = [n for n in ins if n not in self.slots]
        if missing:
            raise AssertionError(f"{label} reads {missing[:3]}, which nothing has made")
        self._taken.update(self.slots[n] for n in takes)
        slots = [self.slots[n] for n in ins], [self.slot(n) for n in outs]
        ends = None if targets is None else tuple(targets)
        entry = Dispatch(label, track, fn, *slots, free=[], lasting=[], part=part, targets=ends, is_regrouping=is_regrouping)
        self._entries.append(entry)

    def move(
        self, label: str, track: str, ins: Sequence[Name], sources: Sequence[Any], targets: Sequence[Any], outs: Sequence[Name]
    ) -> None:  # fmt: skip
        """One transfer of several arrays, from the shardings `sources` to `targets`."""
        self.call(label, track, mover(sources, targets), ins, outs, targets=targets)
        self.lent.update(n for n, s, t in zip(ins, sources, targets, strict=True) if processes_of(s) != processes_of(t))

    def regroup(self, label: str, track: str, ins: Sequence[Name], targets: Sequence[Any], outs: Sequence[Name]) -> None:
        """Arrays under their names on other meshes; several `ins` per target are joined along their leading dim."""
        self.call(label, track, regrouped(targets), ins, outs, targets=targets, is_regrouping=True)

    def build(self, given: Sequence[Name], wanted: Sequence[Name], given_away: Collection[Name] = ()) -> Stream:
        """The stream that takes `given` and returns `wanted`; `given_away` of what it takes is the caller's no longer."""
        keep = {self.slots[n] for n in wanted}
        ours = {self.slots[n] for n in given_away} - self._taken
        seen: set[int] = set(keep)
        dispatches = []
        for entry, (made, sent) in reversed(list(zip(self._entries, self._to_settle(), strict=True))):
            if entry.targets is not None and not any(s in seen for s in entry.outs):
                continue  # a transfer of what nobody reads
            after = tuple(sorted(sent | (made & (seen | set(entry.ins)))))
            free = [s for s in dict.fromkeys([*entry.ins, *entry.outs, *after]) if s not in seen]
            seen.update(entry.ins, entry.outs, after)
            lasting = [k for k, s in enumerate(entry.outs) if s not in self._taken]
            lets_go = [s for s in free if s in ours]
            dispatches.append(entry._replace(free=free, lasting=lasting, after=after, lets_go=lets_go))
        slots = [self.slot(n) for n in given], [self.slots[n] for n in wanted]
        return Stream(dispatches[::-1], len(self.slots), *slots, frozenset(self._taken | ours))

    def _to_settle(self) -> list[tuple[set[int], set[int]]]:
        """Per entry, where it has collectives between processes on CPUs: what was made before it, and what was sent of that."""
        found: list[tuple[set[int], set[int]]] = []
        made: set[int] = set()
        sent: set[int] = set()
        for entry in self._entries:
            waits = entry.part is not None and _holds_a_thread(entry.part[0].mesh)
            found.append((made - self._taken, sent & made - self._taken) if waits else (set(), set()))
            if waits:
                made, sent = set(), set()
            made.update(entry.outs)
            sent.update(entry.ins if entry.targets is not None and not entry.is_regrouping else ())
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
    """The list, by slots."""

    dispatches: list[Dispatch]
    num_slots: int
    given: list[int]  # slots of arguments
    wanted: list[int]  # of results
    taken: frozenset[int]  # whose memory a program reuses, or that the stream lets go

    def run(self, arguments: Sequence[Any]) -> list[Any]:
        slots = self._filled(arguments)
        for d in self.dispatches:
            if d.after:
                jax.block_until_ready([slots[i] for i in d.after])
            for s, result in zip(d.outs, d.fn(*[slots[i] for i in d.ins]), strict=True):
                slots[s] = result
            _let_go(d, slots)
        return [slots[s] for s in self.wanted]

    def text(self) -> str:
        """The list, for comparison between processes."""
        return "\n".join(f"{d.label} [{d.track}] {d.ins} -> {d.outs}: {d.targets or ''}" for d in self.dispatches)

    def lowered(self, arguments: Sequence[Any]) -> Iterator[jax.stages.Lowered]:
        """The programs of this process' devices for arguments such as these: once they are compiled, `run` only runs."""
        slots = self._filled([_struct(a, a.sharding) for a in arguments])
        made: dict[Any, Sequence[Any]] = {}  # a program with what it is given -> types and layouts of its results
        for d in self.dispatches:
            given = [slots[i] for i in d.ins]
            results: Sequence[Any]
            if d.targets is not None:
                results = d.arrivals(given)
            elif (key := (id(d.fn), *((x.shape, x.dtype, x.sharding) for x in given))) in made:
                results = made[key]
            else:
                results = made[key] = jax.eval_shape(d.fn, *given)
                if any(x.sharding.has_addressable_devices for x in results):
                    yield d.fn.lower(*given)
            for s, result in zip(d.outs, results, strict=True):
                slots[s] = result

    def _filled(self, arguments: Sequence[Any]) -> list[Any]:
        slots: list[Any] = [None] * self.num_slots
        for s, a in zip(self.given, arguments, strict=True):
            slots[s] = a
        return slots

    def run_traced(self, arguments: Sequence[Any]) -> tuple[list[Any], list[Event]]:
        """As `run`, and what ran when: a program starts when its track is free and its inputs are there.

        One thread per track waits for the programs' results in order, so that the run is not disturbed but for these threads.
        """
        slots = self._filled(arguments)
        done_s: dict[int, Any] = {}  # slot -> the event that makes it, as a future of its end
        pools: dict[str, ThreadPoolExecutor] = {}
        pending: list[Any] = []
        begin = time.perf_counter()

        def watch(entry: Dispatch, witness: Any, dispatched_s: float, needed: list[Any], before: Any) -> tuple[Event, float]:
            starts = [dispatched_s, *(f.result()[1] for f in needed)]
            if before is not None:
                starts.append(before.result()[1])
            if witness is not None:
                jax.block_until_ready(witness)
            end, start = time.perf_counter() - begin, max(starts)
            return Event(entry.label, entry.track, start, max(0.0, end - start)), end

        last: dict[str, Any] = {}
        for entry in self.dispatches:
            jax.block_until_ready([slots[i] for i in entry.after])
            dispatched_s = time.perf_counter() - begin
            results = entry.fn(*[slots[i] for i in entry.ins])
            for s, result in zip(entry.outs, results, strict=True):
                slots[s] = result
            witness = _witness(entry, results)
            pool = pools.setdefault(entry.track, ThreadPoolExecutor(1))
            needed = [done_s[i] for i in entry.ins if i in done_s]
            future = pool.submit(watch, entry, witness, dispatched_s, needed, last.get(entry.track))
            last[entry.track] = future
            done_s.update(dict.fromkeys(entry.outs, future))
            pending.append(future)
            _let_go(entry, slots)
        events = [f.result()[0] for f in pending]
        for pool in pools.values():
            pool.shutdown()
        return [slots[s] for s in self.wanted], events


class Streamed(abc.ABC):
    """A step of flat arguments that runs as such a list: `PipelineStep`, `PlacedStep` and `PipeDreamStep`."""

    step: TracedStep
    in_shardings: list[Any]  # of flat arguments; None where an argument is taken as it comes (a batch that is split)
    donate: bool
    pieces: Pieces | None = None  # what it takes and returns for every leaf; None: rows

    @property
    @abc.abstractmethod
    def all_places(self) -> list[Place]:
        """Of stages and their replicas."""

    @abc.abstractmethod
    def dispatches(self, *, with_gradients: bool = False) -> Stream: ...

    @abc.abstractmethod
    def arguments(self, leaves: Sequence[Any]) -> list[Any]:
        """What the list of dispatches takes."""

    @abc.abstractmethod
    def argument_structs(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and layouts of `arguments`."""

    @abc.abstractmethod
    def outputs(self, results: list[Any], leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Of what the dispatches return: the step's outputs (flat), and what comes beside them."""

    def run(self, leaves: Sequence[Any], *, with_gradients: bool = False) -> tuple[list[Any], list[Any]]:
        """Outputs, and the gradients by the graph's parameters where they are wanted."""
        return self.outputs(self.dispatches(with_gradients=with_gradients).run(self.arguments(leaves)), leaves)

    def run_traced(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Event]]:
        """Outputs, and what ran when and where."""
        results, events = self.dispatches().run_traced(self.arguments(leaves))
        return self.outputs(results, leaves)[0], events


def other_shape(path: str, shape: Sequence[int], expected: Sequence[int]) -> Problem:
    """Of a result that would come back in another shape than the plain step's."""
    value = f"a result of shape {list(shape)}, made by several programs"
    remedy = "return it from the step of the loss's own samples, leave it out of the results, or use one micro-batch"
    return Problem(path, value, f"{list(expected)}, as of the plain step", remedy)


def _let_go(entry: Dispatch, slots: list[Any]) -> None:
    for s in entry.lets_go:
        slots[s].delete()
    for s in entry.free:
        slots[s] = None


def _holds_a_thread(mesh: Any) -> bool:
    devices = list(mesh.devices.flat)
    return devices[0].platform == "cpu" and len({d.process_index for d in devices}) > 1


def _struct(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _witness(entry: Dispatch, results: Sequence[Any]) -> Any:
    """A local array that is ready when a program has ended, and stays so; None where the program runs in other processes."""
    local = [k for k, r in enumerate(results) if isinstance(r, jax.Array) and r.addressable_shards]
    kept = [k for k in local if k in entry.lasting]
    if kept:
        return results[kept[0]]
    # All are running sums, whose memory the next program takes: a copy of the smallest.
    return jax.numpy.copy(min((results[k] for k in local), key=lambda r: r.size)) if local else None
