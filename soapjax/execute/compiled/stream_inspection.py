"""What the compiler made of a step of several programs, without running it: pipelines, and plans with pins.

Every program of the list of dispatches (stream.py) is compiled once, with the layouts that its arguments will have. Walking
through the list then tells how often each runs, what is sent between devices, and how much memory each device holds at
its fullest: the arrays that some later program still reads, and beside them the results and temporary
buffers of the program that runs. Arguments that no program takes the memory of stay with the caller, and count all the time.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from soapjax.execute.compiled.collectives import KINDS, Collective, collectives_of
from soapjax.execute.compiled.hlo import OpsCheck, check_ops, replicated_tasks
from soapjax.execute.compiled.inspection import compiler_messages, rematerialised_in
from soapjax.execute.parts.cut import Part, keys_of
from soapjax.execute.parts.part_program import Place
from soapjax.execute.streams.stream import Dispatch, Streamed
from soapjax.graph.operators import NOT_SPLIT, OperatorGraph
from soapjax.helpers.own_config import compiled_as_planned


class InspectedPart(NamedTuple):
    """One program: the forward pass of a stage, say."""

    name: str
    place: int  # which stage, or which sub-mesh of a plan with pins
    num_devices: int
    runs: int  # per step
    ops: OpsCheck
    collectives: tuple[Collective, ...]  # of one run
    rematerialised: tuple[str, ...]  # where the partitioner built a whole tensor to get from one layout to another
    replicated: tuple[str, ...]  # operators whose planned splits the program does not have

    @property
    def bytes_by_collective(self) -> dict[str, float]:
        """What each of its devices sends in one step."""
        return {k: self.runs * sum(c.step_bytes for c in self.collectives if c.kind == k) for k in KINDS}


class StreamInspection(NamedTuple):
    parts: tuple[InspectedPart, ...]
    transfers: dict[str, int]  # "send 0 to 1" -> bytes per step, of all devices together
    memory_bytes: dict[int, int]  # device id -> bytes at its fullest
    compile_s: float

    @property
    def ops(self) -> OpsCheck:
        """Of all programs together."""
        found = [p.ops for p in self.parts]
        return OpsCheck(
            sum(o.planned_ops for o in found), sum(o.ops_as_planned for o in found), sum(o.ops_unchecked for o in found),
            tuple(d for o in found for d in o.differences),
        )  # fmt: skip


class _Compiled(NamedTuple):
    outs: tuple[jax.ShapeDtypeStruct, ...]
    fresh_bytes: int  # per device: results and temporary buffers, without the memory of arguments that it reuses
    part: InspectedPart | None  # `runs` are not known yet


def inspect_stream(step: Streamed) -> StreamInspection:
    """Compiles the programs of a step.

    Raises: SoapjaxError where a program has collectives of an unknown kind.
    """
    start = time.perf_counter()
    stream = step.dispatches()
    compiled: dict[Any, _Compiled] = {}
    runs: collections.Counter[Any] = collections.Counter()
    transfers: collections.Counter[str] = collections.Counter()
    at: dict[int, jax.ShapeDtypeStruct] = dict(zip(stream.given, step.argument_structs(), strict=True))
    memory = _Memory({s: at[s] for s in stream.given}, kept=set(stream.given) - stream.taken)
    for entry in stream.dispatches:
        ins = [at[s] for s in entry.ins]
        if entry.targets is not None:
            outs = entry.arrivals(ins)
            at.update(zip(entry.outs, outs, strict=True))
            if entry.is_regrouping:
                memory.regroup(entry, outs)
            else:
                name = entry.label.split(",")[0]  # of "send 0 to 1, micro-batch 3"
                transfers[name] += sum(map(moved_bytes, ins, entry.targets))
                memory.move(entry, ins, outs)
            continue
        key = (id(entry.fn), *((x.shape, x.dtype, x.sharding) for x in ins))
        if key not in compiled:
            compiled[key] = _compile(entry, ins)
        one = compiled[key]
        runs[key] += 1
        at.update(zip(entry.outs, one.outs, strict=True))
        memory.run(entry, one)
    parts = tuple(one.part._replace(runs=runs[key]) for key, one in compiled.items() if one.part is not None)
    return StreamInspection(parts, dict(transfers), dict(memory.peak), time.perf_counter() - start)


def _compile(entry: Dispatch, ins: Sequence[jax.ShapeDtypeStruct]) -> _Compiled:
    with compiler_messages() as messages, compiled_as_planned():
        lowered = entry.fn.lower(*ins)
        compiled = lowered.compile()
    shapes, shardings = jax.tree_util.tree_leaves(lowered.out_info), jax.tree_util.tree_leaves(compiled.output_shardings)
    outs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(shapes, shardings, strict=True))
    found = compiled.memory_analysis()
    fresh = found.output_size_in_bytes + found.temp_size_in_bytes - found.alias_size_in_bytes
    part = None if entry.part is None else _inspected(*entry.part, compiled.as_text(), rematerialised_in(messages))
    return _Compiled(outs, int(fresh), part)


def _inspected(place: Place, part: Part, text: str, rematerialised: tuple[str, ...]) -> InspectedPart:
    keys = {k for e in part.eqns for k in keys_of(e)}
    tasks = [k for k, task in enumerate(place.bound.graph.tasks) if task.equations.heavy in keys]
    if part.consts is not None:  # once per step: products over samples are over those of all micro-batches
        tasks = [k for k in tasks if not _is_of_samples(place.bound.graph, k)]
    return InspectedPart(
        name=part.name, place=part.place, num_devices=place.mesh.size, runs=0, ops=check_ops(place.bound, text, tasks),
        collectives=tuple(collectives_of(text, place.mesh.size)), rematerialised=rematerialised,
        replicated=tuple(replicated_tasks(place.bound, text)),
    )  # fmt: skip


def _is_of_samples(graph: OperatorGraph, k: int) -> bool:
    task = graph.tasks[k]
    dims = graph.operators[task.operator].dims
    return any(dims[d].kind == "S" for one in task.equations.operand_dims for d in one if d != NOT_SPLIT)


def moved_bytes(source: jax.ShapeDtypeStruct, target: Any) -> int:
    """What devices get that they do not hold: the bytes of a transfer, of all devices together."""
    here = source.sharding.devices_indices_map(source.shape)
    there = target.devices_indices_map(source.shape)
    own = math.prod(target.shard_shape(source.shape)) * source.dtype.itemsize
    return sum(own for device, index in there.items() if here.get(device) != index)


class _Memory:
    """Bytes alive on every device while the dispatches go by, and the most there ever were.

    Args:
      given: arrays that are there from the beginning; those in `kept` to the end.
    """

    def __init__(self, given: dict[int, jax.ShapeDtypeStruct], kept: set[int]):
        self.live: collections.Counter[int] = collections.Counter()  # by device id
        self.peak: dict[int, int] = {}
        self._kept = kept
        self._buffer: dict[int, int] = {}  # slot -> buffer: the slot that it was made for
        self._users: collections.Counter[int] = collections.Counter()  # of a buffer
        self._bytes: dict[int, dict[int, int]] = {}  # buffer -> device id -> bytes
        for slot, struct in given.items():
            self._add(slot, struct)
        self._note(self.live)

    def run(self, entry: Dispatch, compiled: _Compiled) -> None:
        devices = {d.id for x in compiled.outs for d in x.sharding.device_set}
        self._note({d: self.live[d] + compiled.fresh_bytes for d in devices})
        for slot, struct in zip(entry.outs, compiled.outs, strict=True):
            self._add(slot, struct)
        self._free(entry)

    def move(self, entry: Dispatch, ins: Sequence[jax.ShapeDtypeStruct], outs: Sequence[jax.ShapeDtypeStruct]) -> None:
        for slot, source, a, b in zip(entry.outs, entry.ins, ins, outs, strict=True):
            stays = a.sharding.is_equivalent_to(b.sharding, len(a.shape))  # then nothing is copied
            self._add(slot, b, self._buffer[source] if stays else None)
        self._note(self.live)
        self._free(entry)

    def regroup(self, entry: Dispatch, outs: Sequence[jax.ShapeDtypeStruct]) -> None:
        if len(entry.ins) == len(entry.outs):
            for slot, source, struct in zip(entry.outs, entry.ins, outs, strict=True):
                self._add(slot, struct, self._buffer[source])
            self._free(entry)
        else:  # of joined arrays the memory goes on as the whole's
            self._free(entry)
            for slot, struct in zip(entry.outs, outs, strict=True):
                self._add(slot, struct)

    def _note(self, live: dict[int, int]) -> None:
        for d, size in live.items():
            self.peak[d] = max(self.peak.get(d, 0), size)

    def _add(self, slot: int, struct: jax.ShapeDtypeStruct, buffer: int | None = None) -> None:
        if buffer is None:
            own = math.prod(struct.sharding.shard_shape(struct.shape)) * struct.dtype.itemsize
            self._bytes[slot] = {d.id: own for d in struct.sharding.device_set}
            self.live.update(self._bytes[slot])
        self._buffer[slot] = slot if buffer is None else buffer
        self._users[self._buffer[slot]] += 1

    def _free(self, entry: Dispatch) -> None:
        for slot in entry.free:
            buffer = self._buffer.pop(slot, None)
            if buffer is None or slot in self._kept:
                continue
            self._users[buffer] -= 1
            if not self._users[buffer]:
                self.live.subtract(self._bytes.pop(buffer))
