"""Synchronous pipelines: GPipe, 1F1B and interleaved 1F1B, each stage one program per pass on its own mesh.

One step: parameters go to where they are read, micro-batches pass through the stages in the schedule's order, gradients are
summed where they are made, then every stage updates the parameters that it holds. All of it is one list of
dispatches (stream.py); what runs at the same time follows from the data alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.cut import Part
from soapjax.execute.microbatches import Joining, MicroStep, joining, require_reduction
from soapjax.execute.part_program import Accumulated, Place, evaluate_part, finished, jit_part, sum_dtype
from soapjax.execute.stage_cut import Crossing, cut_stages
from soapjax.execute.stream import Event, Stream, StreamBuilder
from soapjax.strategy.pipeline import Action, Pipeline
from soapjax.strategy.schedules import dispatch_order


class PipelineStep:
    """A micro-batched step, ready to run.

    Args:
      micro: the step, traced with one micro-batch.
      pipeline: stages and schedule.
      places: of every stage, in order: its mesh, and the plan that holds inside.
      reduction: what the loss is of the batch, "mean" or "sum".
      donate: reuse the memory of parameters and optimizer state for their new values.
    Raises: SoapjaxError where step, stages and reduction do not go together.
    """

    def __init__(
        self, micro: MicroStep, pipeline: Pipeline, places: Sequence[Place], *, reduction: str = "mean", donate: bool = True
    ):
        self.micro, self.pipeline, self.places, self.donate = micro, pipeline, list(places), donate
        self.step = micro.step
        bound = places[0].bound
        self.cut = cut_stages(self.step, bound.graph, bound.binding, pipeline, micro.batch_leaves)
        self.reduction = reduction
        paths = [p.path for p in bound.binding.phases.parameters]
        self.gradient_paths = tuple(paths)
        values = [v for _, v in self.cut.gradients]
        require_reduction(micro, list(zip(paths, values, strict=True)), reduction)
        self._joinings = self._find_joinings(set(values))
        self._receive()
        self.in_shardings = [self._leaf_sharding(k) for k in range(len(self.step.in_paths))]
        self._streams: dict[bool, Stream] = {}
        self._feeds: list[tuple[int, int]] = []  # (leaf, stage): the parts of the batch that the stream takes

    def _receive(self) -> None:
        """What each stage gets from another comes in the layout that it has there."""
        parts = (*self.cut.forward, *self.cut.backward)
        made = {v: p.place for p in parts for v in p.outputs} | {
            v: s for v, s in self.cut.home.items() if v not in {self.step.program.inputs[k] for k in self.micro.batch_leaves}
        }
        late = [p for p in (*self.cut.update, *self.cut.mixed) if p is not None]
        moves = [(v, made[v], p.place) for p in (*parts, *late) for v in p.inputs if v in made]
        moves += [(v, s, c.site) for c in self.cut.crossings for s, v in c.summands]
        for v, source, target in moves:
            if source != target:
                self.places[target].receive(v, self.places[source])

    def _find_joinings(self, gradients: set[int]) -> dict[int, Joining]:
        problems, found = [], {}
        outputs = {v: k for k, v in reversed([*enumerate(self.step.program.outputs)]) if isinstance(v, int)}
        for crossing in self.cut.crossings:
            v = crossing.value
            how = joining(self.micro, v, self.reduction, is_gradient=v in gradients)
            place = self.step.out_paths[outputs[v]] if v in outputs else f"a value of shape {self.step.program.avals[v].shape}"
            if how is None or (how.how == "join" and v not in outputs):
                value = "neither a mean over the batch nor a count nor split by it"
                remedy = "return it from the loss as a float mean, or use one micro-batch"
                problems.append(Problem(place, value, "what micro-batches' values can be put together to", remedy))
            else:
                found[v] = how
        if problems:
            raise SoapjaxError(problems)
        return found

    def _leaf_sharding(self, leaf: int) -> Any:
        if leaf in self.micro.batch_leaves:
            return None
        value = self.step.program.inputs[leaf]
        return self.places[self.cut.home.get(value, 0)].sharding(value)

    # Building.

    def _stream(self, with_gradients: bool) -> Stream:
        if with_gradients not in self._streams:
            self._streams[with_gradients] = _Emitter(self, with_gradients).emit()
        return self._streams[with_gradients]

    def dispatched(self) -> tuple[Stream, list[jax.ShapeDtypeStruct]]:
        """The dispatches of a step, and shapes and layouts of what they take."""
        stream, avals = self._stream(False), self.step.in_avals
        state = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
            for a, s in zip(avals, self.in_shardings, strict=True) if s is not None
        ]  # fmt: skip
        num = self.micro.num_microbatches
        feeds = [
            jax.ShapeDtypeStruct((num, *avals[leaf].shape), avals[leaf].dtype, sharding=s)
            for (leaf, _), s in zip(self._feeds, self._feed_shardings, strict=True)
        ]  # fmt: skip
        return stream, [*state, *feeds]

    # Running.

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Arguments as the stages hold them; the batch stays as it is."""
        return [a if s is None else placed_array(a, s) for a, s in zip(leaves, self.in_shardings, strict=True)]

    def _fed(self, leaves: Sequence[Any]) -> list[Any]:
        """The batch as [micro-batches, micro-batch, ...], on the stages that read it."""
        num = self.micro.num_microbatches
        whole = {leaf: stacked(leaves[leaf], num) for leaf in {leaf for leaf, _ in self._feeds}}
        return put([whole[leaf] for leaf, _ in self._feeds], self._feed_shardings)

    @functools.cached_property
    def _feed_shardings(self) -> list[Any]:
        """Every micro-batch is laid out as the stage reads it: taking one out of the stack moves nothing."""
        inputs = self.step.program.inputs
        return [self.places[s].bound.sharding(((), *self.places[s].spec(inputs[leaf]))) for leaf, s in self._feeds]

    def run(self, leaves: Sequence[Any], *, with_gradients: bool = False) -> tuple[list[Any], list[Any]]:
        """Outputs (flat), and gradients by `gradient_paths` where they are wanted."""
        stream = self._stream(with_gradients)
        results = stream.run([*self._state(leaves), *self._fed(leaves)])
        return self._outputs(results, leaves)

    def run_traced(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Event]]:
        """Outputs, and what ran when on which stage."""
        stream = self._stream(False)
        results, events = stream.run_traced([*self._state(leaves), *self._fed(leaves)])
        return self._outputs(results, leaves)[0], events

    def _state(self, leaves: Sequence[Any]) -> list[Any]:
        placed = self.place(leaves)
        return [placed[k] for k in range(len(placed)) if k not in self.micro.batch_leaves]

    def _outputs(self, results: list[Any], leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        found = iter(results)
        outputs = []
        for out, result in zip(self.step.program.outputs, self.cut.results, strict=True):
            if result is None:
                outputs.append(jnp.asarray(out.val, out.aval.dtype))
            elif result[1] in (batch := {self.step.program.inputs[k]: k for k in self.micro.batch_leaves}):
                outputs.append(leaves[batch[result[1]]])
            else:
                outputs.append(next(found))
        return outputs, list(found)


def stacked(x: Any, num: int) -> Any:
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    return x.reshape(num, x.shape[0] // num, *x.shape[1:])


def placed_array(x: Any, sharding: Any) -> Any:
    """As `compiled.place`: a copy, unless it lies there already (donation must not take the caller's buffer)."""
    if isinstance(x, jax.Array):
        if x.committed and x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        x = x.copy()
    return put([x], [sharding])[0]


def put(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """`jax.device_put`; of host arrays that all processes have, without asking the others."""
    if jax.process_count() == 1 or all(isinstance(a, jax.Array) and not a.is_fully_addressable for a in arrays):
        return jax.device_put(list(arrays), list(shardings))
    return [
        jax.make_array_from_callback(np.shape(a), s, lambda index, a=np.asarray(a): a[index], dtype=np.asarray(a).dtype)
        for a, s in zip(arrays, shardings, strict=True)
    ]


class _Emitter:
    """Writes the dispatches of one step."""

    def __init__(self, owner: PipelineStep, with_gradients: bool):
        self.owner, self.cut, self.places = owner, owner.cut, owner.places
        self.micro, self.program = owner.micro, owner.step.program
        self.num, self.with_gradients = owner.micro.num_microbatches, with_gradients
        self.out = StreamBuilder()
        self.batch = {self.program.inputs[k] for k in self.micro.batch_leaves}
        self.moved_to: dict[int, list[int]] = {}  # value -> stages that read it
        for part in (*self.cut.forward, *self.cut.backward):
            for v in part.inputs:
                self.moved_to.setdefault(v, []).append(part.place)
        self.sums: dict[int, list[Accumulated]] = {s: [] for s in range(len(self.places))}
        self.joined: list[Crossing] = []
        self._find_sums()

    def track(self, stage: int) -> str:
        return f"stage {stage}"

    def name(self, v: int, stage: int, m: int | None) -> tuple:
        """Where a value is found: one per step for state, one per micro-batch for others."""
        return ("value", v, stage, None if v in self.cut.home and v not in self.batch else m)

    def dtype(self, v: int) -> Any:
        return self.program.avals[v].dtype

    def _find_sums(self) -> None:
        for crossing in self.cut.crossings:
            how = self.owner._joinings[crossing.value]
            if how.how == "join" or crossing.value in self.batch:
                self.joined.append(crossing)
                continue
            for stage, v in crossing.summands:
                if v not in {a.value for a in self.sums[stage]}:
                    is_float64 = self.places[stage].is_float64 and jnp.issubdtype(self.dtype(v), jnp.floating)
                    self.sums[stage].append(Accumulated(v, sum_dtype(self.dtype(v), is_float64=is_float64)))

    def emit(self) -> Stream:
        cut, out, owner = self.cut, self.out, self.owner
        given = [("value", v, cut.home[v], None) for k, v in enumerate(self.program.inputs) if k not in self.micro.batch_leaves]
        for n in given:
            out.slot(n)
        self._feed(given)
        self._move_state()
        self._programs()
        self._zeros()
        waiting: list[Action] = []
        ended = [0] * len(self.places)
        for action in dispatch_order(owner.pipeline):
            if action.kind == "update":
                waiting.append(action)
                continue
            self._pass(action)
            ended[action.stage] += action.kind == "backward"
        self._finish_sums()
        for action in waiting:
            self._update(action.stage)
        self._mixed([a.stage for a in waiting])
        wanted = [("out", *r) for r in cut.results if r is not None and r[1] not in self.batch]
        wanted = [n if n in out else ("value", n[2], n[1], None) for n in wanted]
        if self.with_gradients:
            wanted += [("final", s, v) for s, v in cut.gradients]
        return out.build(given, wanted)

    def _feed(self, given: list[tuple]) -> None:
        feeds: dict[int, list[int]] = {}
        for leaf in self.micro.batch_leaves:
            for s in dict.fromkeys(self.moved_to.get(self.program.inputs[leaf], ())):
                feeds.setdefault(s, []).append(leaf)
        self.owner._feeds = [(leaf, s) for s, leaves in feeds.items() for leaf in leaves]
        for s, leaves in feeds.items():
            values = [self.program.inputs[leaf] for leaf in leaves]
            names = [("batch", v, s) for v in values]
            for n in names:
                self.out.slot(n)
            given += names
            shardings = [self.places[s].sharding(v) for v in values for _ in range(self.num)]
            fn = jax.jit(lambda *xs: tuple(x[m] for x in xs for m in range(self.num)), out_shardings=tuple(shardings))
            self.out.call(
                f"micro-batches {s}", self.track(s), fn, names, [("value", v, s, m) for v in values for m in range(self.num)]
            )

    def _move_state(self) -> None:
        """Parameters and other state to the stages that read what another holds."""
        late = [(v, p.place) for p in (*self.cut.update, *self.cut.mixed) if p is not None for v in p.inputs if v in self.cut.home]
        reads = [(v, s) for v, stages in self.moved_to.items() for s in stages if v in self.cut.home and v not in self.batch]
        moves: dict[tuple[int, int], list[int]] = {}
        for v, s in dict.fromkeys([*reads, *late]):
            if v not in self.batch and s != self.cut.home[v]:
                moves.setdefault((self.cut.home[v], s), []).append(v)
        for (source, target), values in moves.items():
            self._move(values, source, target, None)

    def _move(self, values: Iterable[int], source: int, target: int, m: int | None) -> None:
        values = list(values)
        self.out.move(
            f"send {source} to {target}" + ("" if m is None else f", micro-batch {m}"), f"link {source} to {target}",
            [self.name(v, source, m) for v in values], self._shardings(values, source), self._shardings(values, target),
            [self.name(v, target, m) for v in values],
        )  # fmt: skip

    def _shardings(self, values: Iterable[int], stage: int) -> list[Any]:
        return [self.places[stage].sharding(v) for v in values]

    def _programs(self) -> None:
        self.compiled: dict[tuple[str, int], tuple[Part, Any, list[Accumulated]]] = {}
        joined = {v for c in self.joined for _, v in c.summands}
        for kind, parts in (("forward", self.cut.forward), ("backward", self.cut.backward)):
            for part in parts:
                made = {o for e in part.eqns if e.key in part.own for o in e.outputs}
                added = [a for a in self.sums[part.place] if a.value in made]
                extra = tuple(v for v in sorted(joined & made) if v not in part.outputs)
                part = part.__class__(part.name, part.place, part.eqns, part.own, part.inputs, (*part.outputs, *extra))
                fn = jit_part(self.places[part.place], part, added=added)
                self.compiled[kind, part.place] = part, fn, added

    def _zeros(self) -> None:
        for s, added in self.sums.items():
            if not added:
                continue
            place = self.places[s]
            shapes = [(self.program.avals[a.value].shape, a.dtype) for a in added]
            fn = jax.jit(
                lambda shapes=shapes: tuple(jnp.zeros(*x) for x in shapes),
                out_shardings=tuple(place.sharding(a.value) for a in added),
            )
            self.out.call(f"zeros {s}", self.track(s), fn, [], [("sum", a.value, s, 0) for a in added])
        self.version = {(a.value, s): 0 for s, added in self.sums.items() for a in added}

    def _pass(self, action: Action) -> None:
        part, fn, added = self.compiled[action.kind, action.stage]
        s, m = action.stage, action.microbatch
        ins = [self.name(v, s, m) for v in part.inputs] + [("sum", a.value, s, self.version[a.value, s]) for a in added]
        for a in added:
            self.version[a.value, s] += 1
        outs = [self.name(v, s, m) for v in part.outputs] + [("sum", a.value, s, self.version[a.value, s]) for a in added]
        self.out.call(f"{action.kind} {s}, micro-batch {m}", self.track(s), fn, ins, outs, takes=ins[len(part.inputs) :],
                      part=(self.places[s], part))  # fmt: skip
        targets: dict[int, list[int]] = {}
        for v in part.outputs:
            for t in dict.fromkeys(self.moved_to.get(v, ())):
                if t != s:
                    targets.setdefault(t, []).append(v)
        for t, values in sorted(targets.items()):
            self._move(values, s, t, m)

    def _finish_sums(self) -> None:
        """Every crossing value, whole, on its site: ("total", value, site)."""
        moves: dict[tuple[int, int], list[int]] = {}
        for c in self.cut.crossings:
            if c in self.joined:
                continue
            for s, v in c.summands:
                if s != c.site:
                    moves.setdefault((s, c.site), []).append(v)
        for (s, t), values in sorted(moves.items()):
            values = list(dict.fromkeys(values))
            self.out.move(
                f"sums {s} to {t}", f"link {s} to {t}", [("sum", v, s, self.version[v, s]) for v in values],
                self._shardings(values, s), self._shardings(values, t), [("sent", v, s, t) for v in values],
            )  # fmt: skip

    def _total_names(self, c: Crossing) -> list[tuple]:
        return [("sum", v, s, self.version[v, s]) if s == c.site else ("sent", v, s, c.site) for s, v in c.summands]

    def _update(self, s: int) -> None:
        """The first round of a stage: its sums, finished, and what follows from them."""
        part, place = self.cut.update[s], self.places[s]
        crossings = [c for c in self.cut.crossings if c.site == s and c not in self.joined]
        self._join(s)
        used = {c.value for c in crossings}
        values = [v for v in part.inputs if v not in used and v not in {c.value for c in self.joined}]
        finals = [v for t, v in self.cut.gradients if t == s] if self.with_gradients else []
        outputs = [v for v in part.outputs if v not in {c.value for c in self.joined}]
        counts = [len(c.summands) for c in crossings]
        scales = [1 / self.num if self.owner._joinings[c.value].how == "mean" else 1.0 for c in crossings]
        dtypes = [jnp.dtype("float64") if place.is_float64 and jnp.issubdtype(self.dtype(c.value), jnp.floating) else
                  self.dtype(c.value) for c in crossings]  # fmt: skip

        def fn(*arguments: Any) -> tuple[Any, ...]:
            env = dict(zip(values, arguments, strict=False))
            rest = iter(arguments[len(values) :])
            for c, count, scale, dtype in zip(crossings, counts, scales, dtypes, strict=True):
                total = next(rest)
                for _ in range(count - 1):
                    total = total + next(rest)
                env[c.value] = finished(total, scale, dtype)
            env = evaluate_part(place, part, env)
            return (*(env[v] for v in outputs), *(env[v] for v in finals))

        fn.__name__ = fn.__qualname__ = f"update_{s}"
        replaced = self._replaced(s)
        donated = [k for k, v in enumerate(values) if self.owner.donate and replaced.get(v) in outputs]
        shardings = [self._result_sharding(v, s) for v in outputs] + [place.sharding(v) for v in finals]
        jitted = jax.jit(fn, out_shardings=tuple(shardings), donate_argnums=tuple(donated))
        ins = [self.name(v, s, None) for v in values] + [n for c in crossings for n in self._total_names(c)]
        outs = [("out", s, v) for v in outputs] + [("final", s, v) for v in finals]
        if outs:
            self.out.call(f"update {s}", self.track(s), jitted, ins, outs, takes=[ins[k] for k in donated], part=(place, part))

    def _replaced(self, s: int) -> dict[int, int]:
        """Parameters and optimizer state that live on a stage -> the value that replaces each."""
        leaves = {k for p in self.places[0].bound.graph.parameters for k in (p.leaf, *p.state_leaves)}
        inputs, outputs = self.program.inputs, self.program.outputs
        return {
            inputs[k]: outputs[o]
            for k, o in self.owner.step.state_pairs.items()
            if k in leaves and self.cut.home[inputs[k]] == s and isinstance(outputs[o], int)
        }

    def _result_sharding(self, v: int, s: int) -> Any:
        """State goes out as it came in; other results whole."""
        inverse = {o: i for i, o in self.owner.step.state_pairs.items()}
        for leaf, out in enumerate(self.program.outputs):
            if isinstance(out, int) and out == v and leaf in inverse:
                return self.places[s].sharding(self.program.inputs[inverse[leaf]])
        return (
            self.places[s].sharding(v)
            if any(v == w for p in self.cut.mixed if p is not None for w in p.inputs)
            else self.places[s].whole
        )

    def _join(self, s: int) -> None:
        """Results that have a batch dim, joined along it."""
        for c in self.joined:
            if c.site == s and c.value not in self.batch:
                dim, place = self.owner._joinings[c.value].dim, self.places[s]
                fn = jax.jit(lambda *xs, dim=dim: (jnp.concatenate(xs, dim),), out_shardings=(place.whole,))
                self.out.call(
                    f"join {s}", self.track(s), fn, [self.name(c.value, s, m) for m in range(self.num)], [("out", s, c.value)]
                )

    def _mixed(self, stages: Sequence[int]) -> None:
        """The second round: what depends on the gradients of several stages."""
        made = {v: s for s in stages for v in self.cut.update[s].outputs}
        moves: dict[tuple[int, int], list[int]] = {}
        for s in stages:
            for v in self.cut.mixed[s].inputs if self.cut.mixed[s] is not None else ():
                if v in made and made[v] != s:
                    moves.setdefault((made[v], s), []).append(v)
        for (t, s), values in sorted(moves.items()):
            self.out.move(
                f"send {t} to {s}", f"link {t} to {s}", [("out", t, v) for v in values],
                [self._result_sharding(v, t) for v in values], self._shardings(values, s), [("out", s, v) for v in values],
            )  # fmt: skip
        for s in stages:
            part = self.cut.mixed[s]
            if part is None:
                continue
            ins = [("out", s, v) if v in made else self.name(v, s, None) for v in part.inputs]
            shardings = {v: self._result_sharding(v, s) for v in part.outputs}
            fn = jit_part(self.places[s], part, out_shardings=shardings)
            self.out.call(f"update {s} mixed", self.track(s), fn, ins, [("out", s, v) for v in part.outputs],
                          part=(self.places[s], part))  # fmt: skip
