"""The end of a synchronous pipeline step: sums are finished, every stage updates what it holds.

Sums that several stages made of one gradient (tied parameters) first come together where the parameter lives. Then the rounds that
the step was cut into (update_cut.py): what each stage can compute alone, and what needs what others made (a global norm). Names
beside those of pipeline_stream.py:

    ("total", value, stage)       a deferred running sum, summed over the stage's devices for another stage
    ("sent", value, from, to)     a running sum that came from another stage
    ("out", stage, value)         a result of an update
    ("final", stage, value)       a gradient, where gradients are wanted
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from soapjax.execute.parts.part_program import Place, evaluate_part, finished, jit_part
from soapjax.execute.spmd.evaluator import OfMicroBatch
from soapjax.execute.spmd.promotion import high
from soapjax.execute.streams.pipeline_stream import PipelineStream, Staged
from soapjax.execute.streams.stream import Stream


class StepStream(NamedTuple):
    """All dispatches of one step."""

    stream: Stream
    feeds: list[tuple[int, Place]]  # as of `PipelineStream`


def step_stream(staged: Staged, *, with_gradients: bool) -> StepStream:
    """The dispatches of one step; its results are the step's, and the gradients last where they are wanted."""
    passes = PipelineStream(staged)
    wanted = _Updates(passes, with_gradients).emit(passes.updated)
    return StepStream(passes.out.build(passes.given, wanted), passes.feeds)


class _Updates:
    def __init__(self, stream: PipelineStream, with_gradients: bool):
        self.stream, self.cut, self.places, self.out = stream, stream.cut, stream.places, stream.out
        self.staged, self.program, self.step = stream.staged, stream.program, stream.staged.micro.step
        self.with_gradients = with_gradients
        self.joined = {c.value for c in stream.joined}
        self.reads = [{v for p in parts for v in p.inputs} for parts in self.cut.rounds]
        self.mixed_reads = set[int]().union(*self.reads[1:])
        self.replaces = {  # output -> the state that it replaces
            out: self.program.inputs[i] for i, o in self.step.state_pairs.items() if isinstance(out := self.program.outputs[o], int)
        }

    def emit(self, stages: Sequence[int]) -> list[tuple]:
        self._bring_sums()
        for s in stages:
            self._join(s)
            self._update(s)
        for k in range(1, len(self.cut.rounds)):
            self._send_between(stages, k)
            self._mixed(stages, k)
        wanted: list[tuple] = [("out", *r) for r in self.cut.results if r is not None and r[1] not in self.stream.batch]
        wanted = [n if n in self.out else ("value", n[2], n[1], None) for n in wanted]
        return wanted + ([("final", s, v) for s, v in self.cut.gradients] if self.with_gradients else [])

    def _bring_sums(self) -> None:
        """Every summand of a crossing value to its site."""
        moves: dict[tuple[int, int], list[int]] = {}
        for c in self.cut.crossings:
            for s, v in c.summands if c.value not in self.joined else ():
                if s != c.site:
                    moves.setdefault((s, c.site), []).append(v)
        for (s, t), values in sorted(moves.items()):
            values = list(dict.fromkeys(values))
            deferred = [v for v in values if self.stream.sum_of(v, s).deferred is not None]
            self._sum_over_devices(s, deferred)
            self.out.move(
                f"sums {s} to {t}", f"link {s} to {t}",
                [("total", v, s) if v in deferred else self.stream.sum_name(v, s) for v in values],
                self.stream.shardings(values, s), self.stream.shardings(values, t), [("sent", v, s, t) for v in values],
            )  # fmt: skip

    def _sum_over_devices(self, s: int, values: Sequence[int]) -> None:
        """Deferred sums that another stage needs: what is sent is their total."""
        if not values:
            return
        sums = [self.stream.sum_of(v, s) for v in values]
        fn = jax.jit(
            lambda *xs: tuple(a.finished(x, 1.0, a.dtype) for a, x in zip(sums, xs, strict=True)),
            out_shardings=tuple(self.stream.shardings(values, s)),
        )
        names = [self.stream.sum_name(v, s) for v in values]
        self.out.call(f"totals {s}", self.stream.track(s), fn, names, [("total", v, s) for v in values])

    def _join(self, s: int) -> None:
        """Results of all micro-batches as one: joined along their batch dim, or the largest or least."""
        for c in self.stream.joined:
            if c.site == s and c.value not in self.stream.batch:
                how, place = self.staged.joinings[c.value], self.places[s]
                fn = jax.jit(lambda *xs, how=how: (how.of(xs),), out_shardings=(place.whole,))
                parts = [self.stream.name(c.value, s, m) for m in range(self.stream.num)]
                self.out.call(f"join {s}", self.stream.track(s), fn, parts, [("out", s, c.value)])

    def _update(self, s: int) -> None:
        """The first round of a stage: its sums, finished, and what follows from them."""
        part, place = self.cut.update[s], self.places[s]
        crossings = [c for c in self.cut.crossings if c.site == s and c.value not in self.joined]
        made = {c.value for c in crossings}
        values = [v for v in part.inputs if v not in made]
        outputs = [v for v in part.outputs if v not in self.joined]
        finals = [v for t, v in self.cut.gradients if t == s] if self.with_gradients else []
        if not outputs and not finals:
            return
        statistics = self.stream.statistics_of(part)
        scales = [1 / self.stream.num if self.staged.joinings[c.value].how == "mean" else 1.0 for c in crossings]
        dtypes = [high(d) if place.is_float64 else d for d in (self.program.avals[c.value].dtype for c in crossings)]

        def fn(*arguments: Any) -> tuple[Any, ...]:
            env = dict(zip(values, arguments, strict=False))
            rest = iter(arguments[len(values) :])
            for c, scale, dtype in zip(crossings, scales, dtypes, strict=True):
                terms = [next(rest) for _ in c.summands]
                own = [self.stream.sum_of(v, s) if t == s else None for t, v in c.summands]
                if len(terms) > 1:  # of several stages: in the running sums' own type until the last
                    terms = [x if a is None else a.finished(x, 1.0, x.dtype) for a, x in zip(own, terms, strict=True)]
                    own = [None]
                total = functools.reduce(operator.add, terms)
                env[c.value] = finished(total, scale, dtype) if own[0] is None else own[0].finished(total, scale, dtype)
            of_batch = OfMicroBatch(whole={k: next(rest) for _, k, _ in statistics})
            env = evaluate_part(place, part, env, of_batch)
            return (*(env[v] for v in outputs), *(env[v] for v in finals))

        fn.__name__ = fn.__qualname__ = f"update_{s}"
        donated = self._donated(s, values, outputs, 0)
        shardings = [self._result_sharding(v, s) for v in outputs] + [place.sharding(v) for v in finals]
        jitted = jax.jit(fn, out_shardings=tuple(shardings), donate_argnums=tuple(donated))
        sums = [self.stream.sum_name(v, t) if t == s else ("sent", v, t, s) for c in crossings for t, v in c.summands]
        ins = [self._name(v, s) for v in values] + sums + statistics
        outs = [("out", s, v) for v in outputs] + [("final", s, v) for v in finals]
        taken = [ins[k] for k in donated]
        self.out.call(f"update {s}", self.stream.track(s), jitted, ins, outs, takes=taken, part=(place, part))

    def _name(self, v: int, s: int) -> tuple:
        """Of what an update reads beside finished sums."""
        if v in self.stream.batch:
            return ("all", v, s)
        return ("out", s, v) if v in self.joined else self.stream.name(v, s, None)

    def _donated(self, s: int, values: Sequence[int], outputs: Sequence[int], k: int) -> list[int]:
        """Positions of parameters and optimizer state that live on a stage, and are replaced there in round `k`."""
        if not self.staged.donate:
            return []
        leaves = self.places[0].bound.graph.stored_leaves
        traced, stacks = self.staged.traced.step.program.inputs, self.places[s].stacks
        given = {v for k in leaves for v in (traced[k], *(stacks.holding(traced[k]) if stacks else ()))}
        own = {v for v in given if self.cut.home.get(v) == s}
        replaced = {self.replaces[o] for o in outputs if o in self.replaces}
        replaced -= {o for o in self.program.outputs if isinstance(o, int)} | self.stream.shared  # what is returned too stays
        replaced -= set[int]().union(*self.reads[k + 1 :])
        free = [n not in self.out.lent for n in (self.stream.name(v, s, None) for v in values)]
        return [k for k, v in enumerate(values) if v in own & replaced and free[k]]

    def _result_sharding(self, v: int, s: int) -> Any:
        """State goes out as it came in; other results whole."""
        if v in self.replaces:
            return self.places[s].sharding(self.replaces[v])
        return self.places[s].sharding(v) if v in self.mixed_reads else self.places[s].whole

    def _made_before(self, k: int) -> dict[int, set[int]]:
        """Value -> the stages that made it in rounds before `k`."""
        made: dict[int, set[int]] = {}
        for part in (p for parts in self.cut.rounds[:k] for p in parts):
            for v in part.outputs:
                made.setdefault(v, set()).add(part.place)
        return made

    def _send_between(self, stages: Sequence[int], k: int) -> None:
        """What round `k` reads of what other stages made before."""
        made = self._made_before(k)
        moves: dict[tuple[int, int], list[int]] = {}
        for part in (p for p in self.cut.rounds[k] if p.place in stages):
            for v in part.inputs:
                if v in made and part.place not in made[v] and ("out", part.place, v) not in self.out:
                    moves.setdefault((min(made[v]), part.place), []).append(v)
        for (t, s), values in sorted(moves.items()):
            self.out.move(
                f"send {t} to {s}", f"link {t} to {s}", [("out", t, v) for v in values],
                [self._result_sharding(v, t) for v in values], self.stream.shardings(values, s), [("out", s, v) for v in values],
            )  # fmt: skip

    def _mixed(self, stages: Sequence[int], k: int) -> None:
        """A later round: what depends on what several stages made."""
        made = self._made_before(k)
        for part in (p for p in self.cut.rounds[k] if p.place in stages):
            s = part.place
            ins = [("out", s, v) if v in made else self._name(v, s) for v in part.inputs] + self.stream.statistics_of(part)
            shardings = {v: self._result_sharding(v, s) for v in part.outputs}
            donated = self._donated(s, part.inputs, part.outputs, k)
            mine = [part.inputs[k] for k in donated]
            fn = jit_part(self.places[s], part, whole=self.staged.micro.whole, out_shardings=shardings, donated=mine)
            outs, taken = [("out", s, v) for v in part.outputs], [ins[k] for k in donated]
            self.out.call(part.name, self.stream.track(s), fn, ins, outs, takes=taken, part=(self.places[s], part))
