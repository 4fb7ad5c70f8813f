"""A cut step whose stages run their layers as loops (trip_loops.py), and hand on what belongs to all of them as stacks.

The parts of a stage agree on rows, so that what its forward pass keeps is what its backward pass reads. Of each leaf of the state
that a step has row by row, the rows of a stage are one array, which is how the user has them; so are the running sums of their
gradients. Where anything differs between rows (the plan, the layout, who reads what), they stay by themselves.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from soapjax.execute.parts.cut import Part, read_at
from soapjax.execute.parts.joinings import Joining
from soapjax.execute.parts.microbatches import MicroStep
from soapjax.execute.parts.part_program import Place
from soapjax.execute.parts.stacked_rows import StackedRows
from soapjax.execute.parts.stage_cut import StageCut
from soapjax.execute.parts.trip_families import Rows, runs_of_rows
from soapjax.execute.parts.trip_loops import Rolled
from soapjax.execute.parts.trip_order import Irregular
from soapjax.execute.parts.update_cut import Crossing
from soapjax.execute.transfers.stacked_state import Pieces
from soapjax.graph.trace.program import FlatEqn

PASSES, LATE = ("forward", "recompute", "backward", "weights"), ("update", "mixed", "mixed_again")
_TRIES = 6
# Fewer layers stay as they are. XLA compiles equal operations once, so that a program of ten layers is not much slower to compile
# than a loop, and on CPUs, where a loop copies the weights of every trip, it runs up to a fifth faster (48 layers of width 64 in 4
# stages: 20 CPU seconds for 29; of 4 layers each 19 for 16).
MIN_TRIPS = 12


class RolledStep(NamedTuple):
    micro: MicroStep  # its program takes and returns pieces
    cut: StageCut
    joinings: dict[int, Joining]
    stacks: StackedRows
    pieces: Pieces


class _Piece(NamedTuple):
    """Rows of a leaf that are one array on a stage."""

    inputs: tuple[int, ...]
    outputs: tuple[Any, ...]
    first: int  # the first's position among the program's inputs
    stage: int


def roll(micro: MicroStep, cut: StageCut, places: Sequence[Place], joinings: Mapping[int, Joining]) -> RolledStep | None:
    """The step with its layers in loops; None where none are found."""
    return _Rolling(micro, cut, places, joinings).run()


class _Rolling:
    def __init__(self, micro: MicroStep, cut: StageCut, places: Sequence[Place], joinings: Mapping[int, Joining]):
        self.micro, self.cut, self.places, self.joinings = micro, cut, places, dict(joinings)
        self.program = micro.step.program
        self.stacks = StackedRows(dict(self.program.avals))
        self.parts = {(k, p.place): p for k in (*PASSES, *LATE) for p in getattr(cut, k) if p is not None}
        self.made = {key: part.made for key, part in self.parts.items()}
        self.inputs: dict[tuple[str, int], set[int]] = {}
        self.taken: dict[tuple[str, int], set[Rows]] = {key: set() for key in self.parts}  # tuples that a part has from elsewhere

    def run(self) -> RolledStep | None:
        if not any(e.trip for e in self.program.eqns):
            return None
        self.rolled = {key: rolled for s in range(len(self.places)) for key, rolled in self._of_stage(s).items()}
        if not any(r.loops for (kind, _), r in self.rolled.items() if kind in PASSES):
            return None
        self.pieces = self._state_pieces()
        self.state = {v: self.stacks.of(p.inputs) for p in self.pieces for v in p.inputs}
        self.results = {v: self.stacks.of(p.outputs) for p in self.pieces for v in p.outputs}
        self.singly_added: set[int] = set()
        self.sums = self._sums()
        for key in self.parts:
            self._bring(key)
        for piece in self.pieces:
            for kind in LATE:
                if (rolled := self.rolled.get((kind, piece.stage))) is not None:
                    rolled.give_all(piece.outputs)
        self.finals = {r[1] for r in self.cut.results if r is not None}
        self.readers: dict[int, set[tuple[str, int]]] = {}  # value -> the parts that read it by itself
        for key, rolled in self.rolled.items():
            for v in rolled.singly(self.taken[key]):
                self.readers.setdefault(v, set()).add(key)
        for key, rolled in self.rolled.items():
            for v in self._outputs(key):
                rolled.give_one(v)
            rolled.settle(self.taken[key])
        return self._built()

    # Which rows.

    def _of_stage(self, s: int) -> dict[tuple[str, int], Rolled]:
        alike = _alike(self.places[s])
        passes = [(k, s) for k in PASSES if (k, s) in self.parts]
        found = self._rolled(passes, alike)
        for key in ((k, s) for k in LATE if (k, s) in self.parts):
            found |= self._rolled([key], alike)
        return found

    def _rolled(self, keys: list[tuple[str, int]], alike: Callable[[FlatEqn], Hashable]) -> dict[tuple[str, int], Rolled]:
        parts = [self.parts[key] for key in keys]
        for run in [*runs_of_rows(parts, alike, MIN_TRIPS)[:_TRIES], []]:
            try:
                return {k: Rolled(part, self.program, run, alike) for k, part in zip(keys, parts, strict=True)}
            except Irregular:
                continue
        raise AssertionError("a part as it is, is regular")

    def _state_pieces(self) -> list[_Piece]:
        program, found = self.program, []
        ins, outs = program.rows
        starts = _starts(ins)
        out_of = self.micro.step.state_pairs
        readers = read_at(self.parts.values())
        read = {v for rolled in self.rolled.values() for rows in rolled.tuples() for v in rows}
        for leaf, num in enumerate(ins):
            at = range(starts[leaf], starts[leaf] + num)
            if num == 1 or any(k not in out_of for k in at):
                continue
            for _, group in itertools.groupby(at, key=lambda k: self.cut.home[program.inputs[k]]):
                run = list(group)
                values = tuple(program.inputs[k] for k in run)
                made = tuple(program.outputs[out_of[k]] for k in run)
                piece = _Piece(values, made, run[0], self.cut.home[values[0]])
                if len(run) > 1 and not read.isdisjoint(values) and self._is_one(piece, readers):
                    found.append(piece)
        return found

    def _is_one(self, piece: _Piece, readers: Mapping[int, Sequence[int]]) -> bool:
        """Whether rows may be one array: read on one stage alone, all laid out alike, and made there by one program."""
        s = piece.stage
        if any(readers.get(v, [s]) != [s] for v in piece.inputs) or not self._is_alike(s, piece.inputs):
            return False
        if piece.outputs == piece.inputs:
            return True
        if len(set(piece.outputs)) < len(piece.outputs) or not all(isinstance(v, int) for v in piece.outputs):
            return False
        makers = [key for key in ((k, s) for k in LATE) if key in self.parts and set(piece.outputs) <= set(self.parts[key].outputs)]
        users = [v for v in self.program.outputs if v in piece.outputs]
        results = {r for r in self.cut.results if r is not None and r[1] in piece.outputs}
        return bool(makers) and len(users) == len(piece.outputs) and {t for t, _ in results} == {s}

    def _is_alike(self, s: int, values: Sequence[int]) -> bool:
        place, avals = self.places[s], self.program.avals
        types = {(avals[v].shape, avals[v].dtype) for v in values}
        how = {place.deferred.get(v) for v in values}
        gathered = {place.gathered.get(v) for v in values}
        return all(len(found) == 1 for found in ({place.spec(v) for v in values}, types, how, gathered))

    def _sums(self) -> dict[int, int]:
        """Value -> the stack of values that are summed over micro-batches as one: gradients of the rows of a piece."""
        leaves = {p.leaf: g for p, (_, g) in zip(self.places[0].bound.binding.phases.parameters, self.cut.gradients, strict=True)}
        crossing = {c.value: c for c in self.cut.crossings}
        uses = collections.Counter(v for c in self.cut.crossings for _, v in c.summands)
        found: dict[int, int] = {}
        self.stacked_crossings: dict[int, tuple[Crossing, ...]] = {}
        for piece in self.pieces:
            values = [leaves.get(piece.first + t) for t in range(len(piece.inputs))]
            mine = [crossing[v] for v in values if v in crossing]
            if len(set(values)) < len(values) or len(mine) < len(values) or any(len(c.summands) > 1 for c in mine):
                continue
            summands = [v for c in mine for _, v in c.summands]
            stages = {(c.site, s) for c in mine for s, _ in c.summands}
            hows = {self.joinings[c.value] for c in mine}
            if len(stages) > 1 or len(hows) > 1 or not next(iter(hows)).is_sum or any(uses[v] > 1 for v in summands):
                continue
            ((site, s),) = stages
            if not self._is_alike(s, summands) or any(not self._is_made(s, v) for v in summands):
                continue
            stack = self.stacks.of([c.value for c in mine])
            found.update(dict.fromkeys([c.value for c in mine], stack))
            self.stacked_crossings[stack] = tuple(mine)
            self.joinings[stack] = next(iter(hows))
            self._add(s, tuple(summands))
        return found

    def _is_made(self, s: int, v: int) -> bool:
        return any(v in self.made[k, s] for k in PASSES if (k, s) in self.parts)

    def _add(self, s: int, rows: Rows) -> None:
        """Has loops add to the running sum of `rows`; what they do not is added one by one."""
        stack, left = self.stacks.of(rows), set(rows)
        for key in ((k, s) for k in ("backward", "weights")):
            for loop in self.rolled[key].loops if key in self.rolled else ():
                for own in loop.made:
                    if (at := _within(own, rows)) is not None and self.made[key].issuperset(own):
                        loop.added[own] = stack, at
                        left -= set(own)
        self.singly_added |= left

    # Who gives what.

    def _bring(self, key: tuple[str, int]) -> None:
        """Finds for the tuples that a part's loops read where they are."""
        kind, rolled = key[0], self.rolled[key]
        self.inputs[key] = set()
        for loop in rolled.loops:
            for rows in loop.xs:
                if rolled.makes(rows):
                    continue
                stack = self._given(kind, rows)
                maker = None if stack is not None else self._maker(key, rows)
                if stack is not None:
                    loop.places[rows] = stack, _within(rows, self.stacks.rows[stack])
                elif maker is not None:
                    self.rolled[maker].give(rows)
                    stack = self.stacks.of(rows, self.rolled[maker].like(rows))
                if stack is not None:
                    self.taken[key].add(rows)
                    self.inputs[key].add(stack)

    def _given(self, kind: str, rows: Rows) -> int | None:
        """A stack of state, or (for an update) of a sum, in which the rows are one after the other."""
        known = (self.state, self.sums) if kind in LATE else (self.state,)
        for stack in {of[rows[0]] for of in known if rows[0] in of}:
            if _within(rows, self.stacks.rows[stack]) is not None:
                return stack
        return None

    def _maker(self, key: tuple[str, int], rows: Rows) -> tuple[str, int] | None:
        kind, s = key
        passes = (*(("recompute",) if kind == "backward" else ()), "forward", "backward", "weights")
        for other in LATE[: LATE.index(kind)] if kind in LATE else passes:  # what passes make comes to an update as sums
            maker = other, s
            if other == kind or maker not in self.rolled or not self.rolled[maker].makes(rows):
                continue
            given = self.parts[maker].outputs if other in ("recompute", *LATE) else self.made[maker]
            if len(set(rows).difference(given)) <= 1:  # what a loop begins with is handed on with what it carries
                return maker
        return None

    def _read_singly(self, key: tuple[str, int]) -> None:
        """Adds to a part's inputs the values that it reads by themselves: in a stack where that is what there is."""
        kind, _ = key
        rolled, own = self.rolled[key], self.inputs[key]
        for v in rolled.singly(self.taken[key]):
            if rolled.is_made(v) or v in self.program.consts:
                continue
            if v in self.state:
                own.add(self.state[v])
            elif kind in LATE and v in self.sums:
                own.add(self.sums[v])
            elif own.isdisjoint(self.stacks.holding(v)):
                own.add(v)
        for v in self.parts[key].outputs:  # what an update only hands on
            if not rolled.is_made(v) and v in self.sums:
                own.add(self.sums[v])
            elif not rolled.is_made(v) and v in self.parts[key].inputs:
                own.add(self.state.get(v, v))

    def _outputs(self, key: tuple[str, int]) -> list[int]:
        """The values that others have of a part one by one."""
        kind, s = key
        summands = {v for c in self.cut.crossings if c.value not in self.sums for t, v in c.summands if t == s}
        summands |= self.singly_added
        wanted = [*self.parts[key].outputs, *sorted(summands & self.made[key])]
        finals = self.finals if kind in LATE else summands
        return [v for v in wanted if self.readers.get(v, set()) - {key} or (v in finals and v not in self.results)]

    # What is made of it.

    def _built(self) -> RolledStep:
        for key in self.parts:
            self._read_singly(key)
        read = {v for inputs in self.inputs.values() for v in inputs}
        parts = {key: self._part(key, read) for key in self.parts}
        chosen: dict[str, Any] = {k: tuple(parts.get((k, s)) for s in range(len(self.places))) for k in (*PASSES, *LATE)}
        crossings = [c for c in self.cut.crossings if c.value not in self.sums]
        for stack, mine in self.stacked_crossings.items():
            ((s, _),) = mine[0].summands
            crossings.append(Crossing(stack, mine[0].site, ((s, self.stacks.of([v for c in mine for _, v in c.summands])),)))
        home = {self.state.get(v, v): s for v, s in self.cut.home.items()}
        micro, pieces, results = self._interface()
        cut = dataclasses.replace(self.cut, **chosen, crossings=tuple(crossings), home=home, results=results)
        return RolledStep(micro, cut, self.joinings, self.stacks, pieces)

    def _part(self, key: tuple[str, int], read: Iterable[int]) -> Part:
        kind, _ = key
        part, rolled, read = self.parts[key], self.rolled[key], set(read)
        eqns = rolled.equations(self.stacks)
        own = part.own | {e.key for e in eqns if e.body is not None and any(inner.key in part.own for inner in e.body.eqns)}
        stacked = [o for e in eqns if e.body is not None for o in e.outputs if o in self.stacks.rows]
        outputs = [v for v in part.outputs if v in read or (kind in LATE and v not in self.results and v not in self.sums)]
        outputs += [o for o in stacked if o in read and kind in PASSES]
        if kind in LATE:
            outputs += [self.results[v] for v in part.outputs if v in self.results]
            outputs += [self.sums[v] for v in part.outputs if v in self.sums]
            outputs += [o for o in stacked if o in read]
        inputs = tuple(sorted(self.inputs[key]))
        return Part(part.name, part.place, eqns, own, inputs, outputs=tuple(dict.fromkeys(outputs)), rows=self.made[key])

    def _interface(self) -> tuple[MicroStep, Pieces, tuple[tuple[int, int] | None, ...]]:
        """The step as its program takes and returns leaves now."""
        step, program = self.micro.step, self.program
        first_in = {p.first: p for p in self.pieces}
        first_out = {step.state_pairs[p.first]: p for p in self.pieces}
        ins = _joined(len(program.inputs), {k: len(p.inputs) for k, p in first_in.items()})
        outs = _joined(len(program.outputs), {k: len(p.outputs) for k, p in first_out.items()})
        new_in, new_out = ({k: n for n, k in enumerate(own)} for own in (ins, outs))
        inputs = tuple(self.stacks.of(first_in[k].inputs) if k in first_in else program.inputs[k] for k in ins)
        outputs = tuple(self.stacks.of(first_out[k].outputs) if k in first_out else program.outputs[k] for k in outs)
        made = dataclasses.replace(program, inputs=inputs, outputs=outputs, avals=self.stacks.avals)
        pairs = {new_in[k]: new_out[o] for k, o in step.state_pairs.items() if k in new_in}
        found = dataclasses.replace(
            step, program=made, in_paths=tuple(step.in_paths[k] for k in ins), out_paths=tuple(step.out_paths[k] for k in outs),
            state_pairs=pairs,
        )  # fmt: skip
        results = []
        for k in outs:
            r = self.cut.results[k]
            results.append((r[0], self.stacks.of(first_out[k].outputs)) if k in first_out else r)
        pieces = Pieces(
            _pieces(program.rows[0], {k: len(p.inputs) for k, p in first_in.items()}),
            _pieces(program.rows[1], {k: len(p.outputs) for k, p in first_out.items()}),
        )
        leaves = tuple(new_in[k] for k in self.micro.batch_leaves)
        return dataclasses.replace(self.micro, step=found, batch_leaves=leaves), pieces, tuple(results)


def _alike(place: Place) -> Callable[[FlatEqn], Hashable]:
    """What a plan says of an equation, whatever its operator's name."""
    binding, graph, plan = place.bound.binding, place.bound.graph, place.bound.plan
    gradients = {p.leaf: p.gradient for p in binding.phases.parameters}

    @functools.cache
    def chosen(operator: int) -> str:
        return plan.operators[graph.operators[operator].name].model_dump_json(exclude={"cost", "figures", "dims"})

    def alike(eqn: FlatEqn) -> Hashable:
        k = binding.task_of.get(eqn.key)
        if k is None:
            return None
        task = graph.tasks[k]
        if task.parameter >= 0:  # an update, whatever its parameter's operator does
            leaf = graph.parameters[task.parameter].leaf
            return plan.arguments[graph.in_paths[leaf]], place.spec(gradients[leaf])
        return chosen(task.operator), graph.operators[task.operator].tasks.index(k), task.equations.heavy == eqn.key

    return alike


def _within(rows: Rows, whole: Rows) -> int | None:
    """Where some rows begin among all of them, where they follow one another."""
    at = whole.index(rows[0]) if rows[0] in whole else -1
    return at if at >= 0 and whole[at : at + len(rows)] == rows else None


def _starts(rows: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(rows, initial=0))[:-1]


def _joined(num: int, pieces: Mapping[int, int]) -> list[int]:
    """Positions that stay where pieces, by their first position, stand for several."""
    dropped = {k + t for k, n in pieces.items() for t in range(1, n)}
    return [k for k in range(num) if k not in dropped]


def _pieces(rows: Sequence[int], pieces: Mapping[int, int]) -> tuple[tuple[int, ...], ...]:
    found = []
    for start, num in zip(_starts(rows), rows, strict=True):
        own, t = [], 0
        while t < num:
            own.append(pieces.get(start + t, 0))
            t += own[-1] or 1
        found.append(tuple(own))
    return tuple(found)
