"""The dispatches of one synchronous pipeline step up to its updates, in order.

Parameters go to where they are read; micro-batches pass through the stages in the schedule's order, and every pass adds what the
update needs to running sums on its own devices; pipeline_updates.py goes on from there. What a dispatch reads and makes has a name:

    ("batch", value, stage)             all micro-batches of an argument
    ("all", value, stage)               the whole batch of an argument, for an update
    ("value", value, stage, m)          a value on a stage; m is None of state, which all micro-batches share
    ("whole", value, stage)             a parameter that was gathered for all passes
    ("again", value, stage, m)          what is computed again for a backward pass
    ("number", stage, m)                a micro-batch's number, where random numbers are drawn
    ("statistic", equation, stage)      a number of the whole batch that all micro-batches read
    ("sum", value, stage, version)      a running sum: every addition makes a new version, in the old one's memory
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from soapjax.execute.parts.batch_statistics import BatchStatistics
from soapjax.execute.parts.cut import Part, read_at, sent_on
from soapjax.execute.parts.gathered import gather_program
from soapjax.execute.parts.joinings import Joining
from soapjax.execute.parts.microbatches import MicroStep
from soapjax.execute.parts.part_program import Accumulated, Place, jit_part, keys_in, sum_dtype
from soapjax.execute.parts.stage_cut import StageCut
from soapjax.execute.parts.update_cut import Crossing
from soapjax.execute.streams.small_programs import numbers, rows_apart, rows_joined, zeros
from soapjax.execute.streams.stream import StreamBuilder
from soapjax.strategy.pipeline import Action, Pipeline
from soapjax.strategy.schedules import dispatch_order


class Staged(NamedTuple):
    """A step that is cut, and where its stages run."""

    micro: MicroStep
    traced: MicroStep  # with every row of stacked state by itself
    pipeline: Pipeline
    cut: StageCut
    places: Sequence[Place]
    joinings: Mapping[int, Joining]  # of every crossing value: how micro-batches' values become one
    donate: bool
    jitted: dict[Any, Any]  # programs of passes, which are the same whatever else a stream returns


class PipelineStream:
    """Writes the dispatches of one step's passes; `updated` are the stages in the order in which they may update."""

    def __init__(self, staged: Staged):
        self.staged, self.cut, self.places = staged, staged.cut, staged.places
        self.program, self.num = staged.micro.step.program, staged.micro.num_microbatches
        self.out = StreamBuilder()
        of_batch = zip(staged.micro.batch_leaves, staged.micro.batch_dims, strict=True)
        self.dim_of = {self.program.inputs[k]: d for k, d in of_batch}
        self.batch = set(self.dim_of)
        self.feeds: list[tuple[int, Place]] = []  # the parts of the batch that the stream takes: (leaf, where it is read)
        self.moved_to = read_at(self.cut.passes)
        self.read_late = self._find_read_late()
        self.statistics = self._find_statistics()
        self.sums: dict[int, list[Accumulated]] = {s: [] for s in range(len(self.places))}
        self.joined: list[Crossing] = []  # what is not summed
        self._find_sums()
        self.version = {(a.value, s): 0 for s, added in self.sums.items() for a in added}
        self.updated: list[int] = []
        self.shared: set[int] = set()  # state that two stages on the same devices read
        self.given = self._emit()

    def _find_statistics(self) -> dict[int, BatchStatistics]:
        """Stage -> what its passes and its update read of the whole batch."""
        micro, parts, found = self.staged.micro, (*self.cut.passes, *self.cut.updates), {}
        for s, place in enumerate(self.places):
            if keys := sorted({k for part in parts if part.place == s for k in keys_in(part, micro.whole)}):
                found[s] = BatchStatistics(self.staged.traced, keys, is_float64=place.is_float64)
        return found

    def _find_read_late(self) -> dict[int, list[int]]:
        """Stage -> arguments of the batch that its update reads: all of it, since it runs once."""
        found: dict[int, set[int]] = {}
        for part in self.cut.updates:
            if mine := self.batch.intersection(part.inputs):
                found.setdefault(part.place, set()).update(mine)
        return {s: sorted(values) for s, values in found.items()}

    def statistics_of(self, part: Part) -> list[tuple]:
        """The names of what a part reads of the whole batch, in the order of `keys_in`."""
        return [("statistic", k, part.place) for k in keys_in(part, self.staged.micro.whole)]

    def _inputs(self, leaves: Sequence[int]) -> list[int]:
        """What numbers of the whole batch are made of: parts of the batch, or state."""
        return [self.staged.traced.step.program.inputs[leaf] for leaf in leaves]

    def _find_sums(self) -> None:
        for crossing in self.cut.crossings:
            if not self.staged.joinings[crossing.value].is_sum or crossing.value in self.batch:
                self.joined.append(crossing)
                continue
            for stage, v in crossing.summands:
                if v not in {a.value for a in self.sums[stage]}:
                    dtype = self.program.avals[v].dtype
                    is_float64 = self.places[stage].is_float64 and jnp.issubdtype(dtype, jnp.inexact)
                    self.sums[stage].append(Accumulated(v, sum_dtype(dtype, is_float64=is_float64), self.places[stage]))

    def _emit(self) -> list[tuple]:
        """Adds the passes; the names of what the stream takes."""
        given = [("value", v, self.cut.home[v], None) for v in self.program.inputs if v in self.cut.home]
        for n in given:
            self.out.slot(n)
        given += self._feed()
        self._move_state()
        self._gather()
        self._programs()
        self._numbers()
        self._whole_batch()
        self._all_of_batch()
        self._zeros()
        for action in dispatch_order(self.staged.pipeline):
            if action.kind == "update":
                self.updated.append(action.stage)
            else:
                self._pass(action)
        return given

    # Names and layouts.

    def track(self, stage: int) -> str:
        return f"stage {stage}"

    def name(self, v: int, stage: int, m: int | None) -> tuple:
        return ("value", v, stage, None if v in self.cut.home else m)

    def sum_name(self, v: int, stage: int) -> tuple:
        return ("sum", v, stage, self.version[v, stage])

    def sum_of(self, v: int, stage: int) -> Accumulated:
        return next(a for a in self.sums[stage] if a.value == v)

    def shardings(self, values: Iterable[int], stage: int) -> list[Any]:
        return [self.places[stage].sharding(v) for v in values]

    def move(self, values: Iterable[int], source: int, target: int, m: int | None) -> None:
        values = list(values)
        self.out.move(
            f"send {source} to {target}" + ("" if m is None else f", micro-batch {m}"), f"link {source} to {target}",
            [self.name(v, source, m) for v in values], self.shardings(values, source), self.shardings(values, target),
            [self.name(v, target, m) for v in values],
        )  # fmt: skip

    # What a step consists of.

    def _feed(self) -> list[tuple]:
        """Takes the batch apart into micro-batches, on every stage that reads some of it; the names that are given."""
        feeds: dict[int, list[int]] = {}
        for leaf in self.staged.micro.batch_leaves:
            of_all = [s for s, found in self.statistics.items() if self.program.inputs[leaf] in self._inputs(found.leaves)]
            late = [s for s, values in self.read_late.items() if self.program.inputs[leaf] in values]
            for s in dict.fromkeys([*self.moved_to.get(self.program.inputs[leaf], ()), *of_all, *late]):
                feeds.setdefault(s, []).append(leaf)
        self.feeds = [(leaf, self.places[s]) for s, leaves in feeds.items() for leaf in leaves]
        given = []
        for s, leaves in feeds.items():
            values = [self.program.inputs[leaf] for leaf in leaves]
            names = [("batch", v, s) for v in values]
            for n in names:
                self.out.slot(n)
            given += names
            fn = rows_apart(tuple(range(self.num)), tuple(self.places[s].sharding(v) for v in values for _ in range(self.num)))
            self.out.call(
                f"micro-batches {s}", self.track(s), fn, names, [("value", v, s, m) for v in values for m in range(self.num)]
            )
        return given

    def _move_state(self) -> None:
        """Parameters and other state to the stages that read what another holds."""
        late = [(v, p.place) for p in self.cut.updates for v in p.inputs if v in self.cut.home]
        late += [(v, s) for s, found in self.statistics.items() for v in self._inputs(found.state)]
        reads = [(v, s) for v, stages in self.moved_to.items() for s in stages if v in self.cut.home]
        moves: dict[tuple[int, int], list[int]] = {}
        for v, s in dict.fromkeys([*reads, *late]):
            if s != self.cut.home[v]:
                moves.setdefault((self.cut.home[v], s), []).append(v)
        for (source, target), values in moves.items():
            self.move(values, source, target, None)
            if set(self.places[source].mesh.devices.flat) == set(self.places[target].mesh.devices.flat):
                self.shared.update(values)  # moving them moves nothing: both stages have one array

    def _gather(self) -> None:
        """Parameters that all passes of a stage read in one copy."""
        for s, place in enumerate(self.places):
            values = tuple(v for v in place.gathered if s in self.moved_to.get(v, ()))
            if values:
                part, fn = gather_program(place, s, values)
                ins, outs = [self.name(v, s, None) for v in values], [("whole", v, s) for v in values]
                self.out.call(part.name, self.track(s), fn, ins, outs, part=(place, part))

    def _read(self, v: int, s: int, m: int, kind: str) -> tuple:
        """The name of what a pass reads."""
        again = self.cut.recompute[s] if kind == "backward" else None
        if again is not None and v in again.outputs:
            return ("again", v, s, m)
        return ("whole", v, s) if v in self.places[s].gathered else self.name(v, s, m)

    def _programs(self) -> None:
        """One program per stage and pass, with its running sums, and with what is joined as outputs."""
        self.compiled: dict[tuple[str, int], tuple[Part, Any, list[Accumulated]]] = {}
        joined = {v for c in self.joined for _, v in c.summands}
        for kind in ("forward", "recompute", "backward", "weights"):
            parts = getattr(self.cut, kind)
            for part in (p for p in parts if p is not None):
                made = part.made
                added = [a for a in self.sums[part.place] if made.issuperset(a.rows or (a.value,))]
                extra = tuple(v for v in sorted(joined & made) if v not in part.outputs)
                part = dataclasses.replace(part, outputs=(*part.outputs, *extra))
                micro, place = self.staged.micro, self.places[part.place]
                key = kind, part.place, part.outputs, tuple((a.value, a.dtype) for a in added)
                if key not in self.staged.jitted:
                    fn = jit_part(place, part, added=added, draws=micro.draws, whole=micro.whole, is_pass=True)
                    self.staged.jitted[key] = fn
                self.compiled[kind, part.place] = part, self.staged.jitted[key], added

    def _numbers(self) -> None:
        """The numbers of micro-batches, on stages that draw random numbers."""
        for s in sorted({p.place for p, _, _ in self.compiled.values() if keys_in(p, self.staged.micro.draws)}):
            fn = numbers(tuple(range(self.num)), self.places[s].whole)
            self.out.call(f"numbers {s}", self.track(s), fn, [], [("number", s, m) for m in range(self.num)])

    def _whole_batch(self) -> None:
        """The numbers of the whole batch, on stages that read one."""
        for s, found in self.statistics.items():
            given = [("batch", v, s) for v in self._inputs(found.leaves)]
            given += [self.name(v, s, None) for v in self._inputs(found.state)]
            names = [("statistic", k, s) for k in found.keys]
            self.out.call(f"statistics {s}", self.track(s), found.jitted(self.places[s].whole), given, names)

    def _all_of_batch(self) -> None:
        for s, values in self.read_late.items():
            fn = rows_joined(tuple(self.dim_of[v] for v in values), (self.places[s].whole,) * len(values))
            self.out.call(f"batch {s}", self.track(s), fn, [("batch", v, s) for v in values], [("all", v, s) for v in values])

    def _zeros(self) -> None:
        for s, added in self.sums.items():
            if not added:
                continue
            fn = zeros(tuple((a.shape, a.dtype) for a in added), tuple(a.sharding for a in added))
            self.out.call(f"zeros {s}", self.track(s), fn, [], [self.sum_name(a.value, s) for a in added])

    def _pass(self, action: Action) -> None:
        if (action.kind, action.stage) not in self.compiled:
            return  # a first stage puts nothing off: nobody waits for its backward pass; or nothing is to be computed again
        part, fn, added = self.compiled[action.kind, action.stage]
        s, m = action.stage, action.microbatch
        sums = [self.sum_name(a.value, s) for a in added]
        for a in added:
            self.version[a.value, s] += 1
        is_again = action.kind == "recompute"
        outs = [("again", v, s, m) if is_again else self.name(v, s, m) for v in part.outputs]
        outs += [self.sum_name(a.value, s) for a in added]
        ins = [*(self._read(v, s, m, action.kind) for v in part.inputs), *sums]
        ins += [("number", s, m)] if keys_in(part, self.staged.micro.draws) else []
        ins += self.statistics_of(part)
        self.out.call(f"{action.kind} {s}, micro-batch {m}", self.track(s), fn, ins, outs, takes=sums, part=(self.places[s], part))
        for t, values in () if is_again else sent_on(part.outputs, self.moved_to, s):
            self.move(values, s, t, m)
