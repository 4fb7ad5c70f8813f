"""Keep or recompute: what the backward pass reads of some operators is computed again there, instead of being kept.

The choice is made in the program, before its graph is built: an equation of the forward pass whose result a backward equation
reads is repeated right before that one, as `jax.checkpoint` would. All that follows (costs, lifetimes, reshards, execution)
knows recomputation already, from steps that ask for it themselves.

The forward pass is cut into *segments* (segments.py). What is read across a cut is kept, whatever the choice: so a segment is
computed again from what enters it. What is repeated of one segment is repeated at once, before the first backward equation that
belongs to the segment, behind a barrier that waits for that equation's cotangent: else the compiler would merge it with the
forward pass, or compute it early. What the step's own `jax.checkpoint` does not keep is not read by the backward pass, so that it
is no choice here.

>>> options = Recomputation(trace(train_step, state, batch))
>>> step = options.step({"blk0/attn/scores", "blk0/mlp"})
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax

from soapjax.errors import Problem, SoapjaxError
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.build import Binding, build_graph
from soapjax.graph.passes.phases import BACKWARD, FORWARD, RECOMPUTED, module_path
from soapjax.graph.segments import Value, cuts
from soapjax.graph.trace.program import Atom, FlatEqn, Program, bytes_of
from soapjax.graph.trace.tracing import TracedStep

# Not repeated: loops and programs of their own, and what is said of a value rather than computed.
_ONCE = {"while", "cond", "shard_map", "sharding_constraint", "optimization_barrier"}


class RecomputedOperator(NamedTuple):
    """What it means to recompute one operator."""

    segment: int
    tensors: set[int]  # of the graph of the step as it is: what is not kept then for the backward pass
    # Recomputed with it, or as much would be kept instead: operators whose results only this one reads for the backward pass, and
    # light ones, whose results the compiler does not keep but computes from this one's.
    needs: set[str]


class Recomputation:
    """What of a step may be recomputed; `graph` is that of the step as it is."""

    def __init__(self, step: TracedStep):
        self.traced = step

    @property
    def graph(self) -> OperatorGraph:
        return build_graph(self.traced)[0]

    @property
    def binding(self) -> Binding:
        return build_graph(self.traced)[1]

    @property
    def offered(self) -> frozenset[str]:
        """The operators of which the backward pass reads something that it could compute again."""
        return frozenset(self.parts)

    @functools.cached_property
    def parts(self) -> dict[str, RecomputedOperator]:
        """What recomputing each operator means, in program order."""
        forward, names = self._forward, [op.name for op in self.graph.operators]
        found: dict[int, RecomputedOperator] = {}
        for o, e in sorted(forward.saved.items()):
            n = self._operator(e)
            part = found.setdefault(n, RecomputedOperator(forward.segment[e.key], set(), set()))
            if o in self.binding.tensor_of:
                part.tensors.add(self.binding.tensor_of[o])
            for s in (s for s in forward.read(e) if s in forward.saved):
                maker = self._operator(forward.makers[s])
                if maker != n and s not in forward.by_backward:
                    part.needs.add(names[maker])
                if maker != n and self.graph.operators[n].kind == "fused":
                    segment = forward.segment[forward.makers[s].key]
                    found.setdefault(maker, RecomputedOperator(segment, set(), set())).needs.add(names[n])
        return {names[n]: found[n] for n in sorted(found)}

    @functools.cached_property
    def closed(self) -> dict[str, list[str]]:
        """Operators worth recomputing, and all that is recomputed with each, itself included.

        What the last segment makes is there when the backward pass begins, whatever is kept.
        """
        last = max((p.segment for p in self.parts.values()), default=0)
        return {name: self._with_needs(name) for name, part in self.parts.items() if part.segment < last}

    def _with_needs(self, name: str) -> list[str]:
        found, queue = {name}, [name]
        while queue:
            more = self.parts[queue.pop()].needs - found
            found |= more
            queue += more
        return sorted(found)

    @functools.cached_property
    def _forward(self) -> _Forward:
        return _Forward(self.traced.program, self.graph, self.binding)

    def _operator(self, eqn: FlatEqn) -> int:
        return self.graph.tasks[self.binding.task_of[eqn.key]].operator

    def step(self, recomputed: Collection[str]) -> TracedStep:
        """The step in which these of the `offered` operators are recomputed; the others are as they were."""
        chosen = {n for n, op in enumerate(self.graph.operators) if op.name in recomputed}
        if not chosen:
            return self.traced
        program = _Repeater(self._forward, lambda e: self._operator(e) in chosen).program()
        return dataclasses.replace(
            self.traced, program=program, traced_program=self.traced.program, fingerprint=self.graph.fingerprint()
        )


def recomputing(step: TracedStep, recomputed: Collection[str], *, place: str = "plan") -> TracedStep:
    """`step` where these operators are recomputed; `place` is where they are named.

    Raises: SoapjaxError naming those that cannot be.
    """
    if not recomputed:
        return step
    options = Recomputation(step)
    if unknown := sorted(set(recomputed) - options.offered):
        expected = "false: the backward pass reads nothing of this operator that it could compute again"
        remedy = "set it to false, or plan anew"
        raise SoapjaxError(Problem(f"{place}: operators.{name}.recompute", "true", expected, remedy) for name in unknown)
    return options.step(recomputed)


class _Forward:
    """The equations of a forward pass, and what of it the backward pass reads."""

    def __init__(self, program: Program, graph: OperatorGraph, binding: Binding):
        self.program, self.values, self.binding = program, binding.values, binding
        self.phase = binding.phases.phase
        self.outside_loops = {*program.inputs, *(o for e in program.eqns for o in e.outputs)}
        # In one phase there is no backward pass that begins when the forward pass is over.
        forward = [] if graph.is_single_phase else [e for e in program.eqns if self.phase_of(e) == FORWARD]
        self.makers = {o: e for e in forward if self._may_repeat(e) for o in e.outputs}
        place = {e.key: i for i, e in enumerate(forward)}
        self.last_read = dict.fromkeys(self.makers, -1)
        for e in forward:
            self.last_read.update((o, place[e.key]) for o in self.read(e) if o in self.makers)
        self.by_backward = {o for e in program.eqns if self.phase_of(e) == BACKWARD for o in self.read(e) if o in self.makers}
        facts = [Value(place[e.key], max(self.last_read[o], place[e.key]), bytes_of(program.avals[o]), o in self.by_backward)
                 for o, e in self.makers.items()]  # fmt: skip
        ends = cuts(facts, len(forward))
        self.segment, segment = {}, 0
        for i, e in enumerate(forward):
            segment += segment < len(ends) and i >= ends[segment]
            self.segment[e.key] = segment
        self.crosses = {o for e in forward for o in self.read(e)
                        if o in self.makers and self.segment[e.key] > self.segment[self.makers[o].key]}  # fmt: skip
        # What the backward pass reads and could compute again, and what only others of these are made of: by value.
        self.saved: dict[int, FlatEqn] = {}
        queue = list(self.by_backward)
        while queue:
            o = queue.pop()
            if o in self.makers and o not in self.crosses and o not in self.saved:
                self.saved[o] = self.makers[o]
                queue += self.read(self.makers[o])

    def phase_of(self, eqn: FlatEqn) -> int:
        while eqn.body is not None and eqn.body.eqns:
            eqn = eqn.body.eqns[0]
        return self.phase.get(eqn.key, FORWARD)

    def read(self, eqn: FlatEqn) -> list[int]:
        """The values that an equation reads, names and barriers seen through."""
        return [self.root(a) for a in eqn.read]

    def root(self, atom: int) -> int:
        alias = self.values.of(atom)
        return alias.root if alias.shift == 0 and alias.root in self.outside_loops else atom

    def _may_repeat(self, eqn: FlatEqn) -> bool:
        return eqn.body is None and eqn.name not in _ONCE and eqn.key in self.binding.task_of


class _Repeater:
    """Writes the program anew, with equations of chosen operators repeated in the backward pass."""

    def __init__(self, forward: _Forward, is_chosen: Callable[[FlatEqn], bool]):
        self.forward, self.is_chosen = forward, is_chosen
        self.avals = dict(forward.program.avals)
        self.again: dict[int, int] = {}  # value of the forward pass -> its repetition
        self.held: dict[int, int] = {}  # cotangent -> itself behind a barrier that has waited for it
        self.eqns: list[FlatEqn] = []
        self.wanted = self._wanted()

    def program(self) -> Program:
        old = self.forward.program
        for e in old.eqns:
            if self.forward.phase_of(e) == BACKWARD:
                e = self._reading_again(e)
            self.eqns.append(e)
        eqns = tuple(_placed(e, (i,), self.avals) for i, e in enumerate(self.eqns))
        repeats = {b: a for a, b in self.again.items()}
        return dataclasses.replace(old, eqns=eqns, avals=self.avals, repeats=repeats)

    def _is_repeated(self, o: int) -> bool:
        return o in self.forward.saved and self.is_chosen(self.forward.makers[o])

    def _wanted(self) -> dict[int, set[int]]:
        """Segment -> all that the backward pass needs of it again."""
        found: dict[int, set[int]] = {}
        for e in self.forward.program.eqns:
            if self.forward.phase_of(e) == BACKWARD:
                for o in self.forward.read(e):
                    if self._is_repeated(o):
                        found.setdefault(self._segment(o), set()).add(o)
        return found

    def _segment(self, o: int) -> int:
        return self.forward.segment[self.forward.makers[o].key]

    def _reading_again(self, eqn: FlatEqn) -> FlatEqn:
        """A backward equation that reads repetitions, which are made before it."""
        read = [o for o in self.forward.read(eqn) if self._is_repeated(o)]
        if not read:
            return self._with_inputs(eqn, self.held)
        # Of a segment behind the others: an equation that reads of several, before its turn, gets only what it reads.
        deepest = max(self._segment(o) for o in self.forward.read(eqn) if o in self.forward.makers)
        for segment in sorted({self._segment(o) for o in read}, reverse=True):
            own = {o for o in read if self._segment(o) == segment}
            self._repeat(own | (self.wanted[segment] if segment == deepest else set()), eqn)
        return self._with_inputs(eqn, self.held | {o: self.again[o] for o in read})

    def _with_inputs(self, eqn: FlatEqn, other: dict[int, int]) -> FlatEqn:
        inputs = tuple(other.get(self.forward.root(a), a) if isinstance(a, int) else a for a in eqn.inputs)
        return eqn if inputs == eqn.inputs else dataclasses.replace(eqn, inputs=inputs)

    def _repeat(self, outputs: set[int], reader: FlatEqn) -> None:
        """Makes these values again, and what they are made of, behind a barrier over all that this starts from."""
        needed: dict[str, FlatEqn] = {}
        queue = [o for o in outputs if o not in self.again]
        while queue:
            e = self.forward.makers[queue.pop()]
            if e.key not in needed:
                needed[e.key] = e
                queue += [o for o in self.forward.read(e) if self._is_repeated(o) and o not in self.again]
        if not needed:
            return
        order = self.forward.values.order
        equations = sorted(needed.values(), key=lambda e: order[e.key])
        made = {o for e in equations for o in e.outputs}
        found = {self.again.get(o, o) for e in equations for o in self.forward.read(e) if o not in made}
        starts = [o for o in sorted(found) if not self._is_generated(o)]
        held = self._barrier(starts, self._cotangents(reader))
        for e in equations:
            inputs = tuple(self._input(a, held) for a in e.inputs)
            again = tuple(self._fresh(o) for o in e.outputs)
            self.again.update(zip(e.outputs, again, strict=True))
            stack = f"{RECOMPUTED}/{module_path(e.stack)}"
            self.eqns.append(dataclasses.replace(e, inputs=inputs, outputs=again, stack=stack))

    def _input(self, atom: Atom, held: dict[int, int]) -> Atom:
        if not isinstance(atom, int):
            return atom
        root = self.forward.root(atom)
        root = self.again.get(root, root)
        return held.get(root, root)

    def _fresh(self, o: int) -> int:
        self.avals[len(self.avals)] = self.avals[o]
        return len(self.avals) - 1

    def _is_generated(self, o: int) -> bool:
        producer = self.forward.values.producer.get(o)
        in_program = o in self.forward.program.inputs or o in self.again.values()
        return not in_program and (producer is None or producer.key not in self.forward.binding.task_of)

    def _cotangents(self, reader: FlatEqn) -> list[int]:
        """What the backward pass has made for the first reader: by then the segment is to be there, and no earlier."""
        values, phase = self.forward.values, self.forward.phase
        # Of what a loop returns that is an equation of its body.
        makers = {o: values.producer.get(values.of(o).root) for o in self.forward.read(reader)}
        return [o for o, e in makers.items() if e is not None and phase[e.key] == BACKWARD]

    def _barrier(self, starts: list[int], cotangents: list[int]) -> dict[int, int]:
        """Start -> the value behind the barrier. What reads the cotangents reads them behind it: XLA drops what nobody reads."""
        inputs = [*starts, *(self.held.get(o, o) for o in cotangents)]
        outputs = [self._fresh(o) for o in inputs]
        self.held.update(zip(cotangents, outputs[len(starts) :], strict=True))
        barrier = _any_barrier()
        self.eqns.append(
            FlatEqn(
                address=(), primitive=barrier.primitive, params=barrier.params, inputs=tuple(inputs), outputs=tuple(outputs),
                stack=RECOMPUTED, ctx=barrier.ctx,
            )  # fmt: skip
        )  # fmt: skip
        return dict(zip(starts, outputs, strict=False))


@functools.cache
def _any_barrier() -> Any:
    """JAX's equation of one, whatever it is over."""
    (barrier,) = jax.make_jaxpr(lambda x: jax.lax.optimization_barrier(x))(0.0).jaxpr.eqns
    return barrier


def _placed(eqn: FlatEqn, address: tuple[int, ...], avals: dict[int, Any]) -> FlatEqn:
    """An equation at another place, with its body."""
    body = eqn.body
    if body is not None:
        eqns = tuple(_placed(e, (*address, i), avals) for i, e in enumerate(body.eqns))
        body = dataclasses.replace(body, eqns=eqns, avals=avals)
    return dataclasses.replace(eqn, address=address, body=body)
