"""Asynchronous 1F1B (PipeDream; Narayanan et al. 2019, sections 3.2 and 3.3): every minibatch updates every stage.

A stage applies an update right after the backward pass of a minibatch, while later minibatches are under way. *Weight
stashing*: the backward pass of a minibatch sees the weights that its forward pass saw. With S stages, stage i (from 0)
computes the gradient of minibatch n with the weights as of n - (S - 1 - i) minibatches and applies it to its newest:
    w_i(n + 1) = w_i(n) - update(gradient at w_i(n - (S - 1 - i))).
*Vertical sync*: all stages use, for a minibatch, the version that the first stage had when it entered. A stage with r
replicas deals minibatches out to them in turn (1F1B-RR) and applies the mean of each round of r gradients, on all of them
(replicas.py).

A call works its batch off as M minibatches and drains the pipeline; in flight are never more than `held.in_flight`.
Versions are names in the list of dispatches: one is freed when its last reader has been dispatched. An update takes the memory of
what no pass reads any more: of optimizer state, and of weights where one minibatch at a time is under way.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.parts.cut import Part, make_part, phase_of, read_at, sent_on
from soapjax.execute.parts.joinings import Joining, joining
from soapjax.execute.parts.microbatches import MicroStep
from soapjax.execute.parts.part_program import Place, evaluate_part, finished, jit_part, keys_in
from soapjax.execute.parts.stage_cut import cut_stages
from soapjax.execute.streams.batches import MicroBatched
from soapjax.execute.streams.replicas import Replicas
from soapjax.execute.streams.small_programs import numbers, rows_apart
from soapjax.execute.streams.stream import Name, Stream, StreamBuilder
from soapjax.graph.passes.phases import UPDATE
from soapjax.strategy.held import in_flight
from soapjax.strategy.pipeline import Action, Pipeline
from soapjax.strategy.schedules import dispatch_order


class _Update(NamedTuple):
    """The program that updates a stage on all its replicas, and the values that it reads."""

    first: Any  # of the state as the caller gave it
    later: Any
    state: list[int]
    summed: list[int]  # over a round of minibatches
    taken: list[int]  # state whose memory it reuses


class PipeDreamStep(MicroBatched):
    """M minibatches under asynchronous 1F1B, ready to run.

    Args:
      micro: the step, traced with one minibatch.
      pipeline: stages (with replicas), and whether versions are synchronised vertically.
      places: of every stage its replicas.
      donate: reuse the memory of the caller's state for its new values.
    Raises: SoapjaxError where an update needs more than its own stage, or stages share a parameter.
    """

    def __init__(self, micro: MicroStep, pipeline: Pipeline, places: Sequence[Sequence[Place]], *, donate: bool = True):
        self.micro, self.pipeline, self.places, self.step, self.donate = micro, pipeline, places, micro.step, donate
        self.as_run, self.pieces = micro, None
        self.program = self.step.program
        bound = places[0][0].bound
        self.stages = [Replicas(replicas) for replicas in places]
        self.cut = cut_stages(micro, bound.graph, bound.binding, pipeline)
        self.batch = {self.program.inputs[k]: k for k in micro.batch_leaves}
        self.replaced = {self.program.inputs[i]: self.program.outputs[o] for i, o in self.step.state_pairs.items()}
        self._require_stages_alone()
        self.updates = [self._update_part(s) for s in range(len(places))]
        self._check_crossings()
        home = self.cut.home
        self.in_shardings = [self.stages[home[v]].place.sharding(v) if v in home else None for v in self.program.inputs]
        self._feeds: list[tuple[int, Place]] = []
        self._stream = self._emit()

    # What a stage needs for itself.

    def _require_stages_alone(self) -> None:
        problems = []
        paths = dict(zip(self.program.inputs, self.step.in_paths, strict=True))
        trained = {p.value for p in self.places[0][0].bound.binding.phases.parameters}
        remedy = 'use the schedule "1f1b", which updates once all gradients are there'
        if any(self.cut.rounds[1:]):
            value = "an update that reads the gradients of several stages (a global norm, for instance)"
            problems.append(Problem("schedule 'pipedream'", value, "an update per stage: stages update at different times", remedy))
        for v, found in read_at((*self.cut.forward, *self.cut.backward)).items():
            if v in trained and len(found) > 1:
                value = f"a parameter of stages {sorted(found)}"
                problems.append(
                    Problem(paths[v], value, "parameters of one stage each", f"put its users into one stage, or {remedy}")
                )
        if problems:
            raise SoapjaxError(problems[:5])

    def state_of(self, s: int) -> list[int]:
        """The state that a stage reads or holds: its own copy, which it brings forward itself."""
        own = [v for v, at in self.cut.home.items() if at == s]
        parts = (self.cut.forward[s], self.cut.backward[s], self.cut.update[s])
        read = [v for p in parts for v in p.inputs if v in self.cut.home]
        return list(dict.fromkeys([*own, *read]))

    def _update_part(self, s: int) -> Part:
        """The update of a stage; beside what it holds also the counters that it reads."""
        c, state = self.cut, self.state_of(s)
        graph, binding = self.places[0][0].bound.graph, self.places[0][0].bound.binding
        free = {e.key for e in self.program.eqns if phase_of(e, graph, binding) in (None, UPDATE)}
        free |= {e.key for e in c.update[s].eqns}
        news = [self.replaced[v] for v in state if v in self.replaced]
        wanted = [v for v in (*c.update[s].outputs, *news) if isinstance(v, int) and v not in self.program.inputs]
        part = make_part(f"update {s}", s, self.program, (), free, wanted)
        known = {*state, *(x.value for x in c.crossings if x.site == s)}
        if foreign := [v for v in part.inputs if v not in known]:
            value = f"a value of shape {self.program.avals[foreign[0]].shape} that another stage makes"
            remedy = 'use the schedule "1f1b"'
            raise SoapjaxError(Problem("schedule 'pipedream'", value, "an update that reads its own stage alone", remedy))
        return part

    def _check_crossings(self) -> None:
        gradients = {v for _, v in self.cut.gradients}
        self._how = {}
        for c in self.cut.crossings:
            # Of a gradient the mean over a stage's replicas, whatever the loss is of a minibatch.
            is_mean = c.value in gradients and self.micro.num_microbatches > 1
            how = Joining("mean") if is_mean else joining(self.micro, c.value, "mean")
            self._how[c.value] = how
            if how is None or how.how == "join":
                value = f"a value of shape {self.program.avals[c.value].shape} per minibatch"
                raise SoapjaxError(Problem("schedule 'pipedream'", value, "metrics that can be averaged", "return means alone"))

    # Dispatches.

    def _emit(self) -> Stream:
        out, cut = StreamBuilder(), self.cut
        given = [("value", v) for v in self.program.inputs if v not in self.batch]
        for name in given:
            out.slot(name)
        self._emit_batch(out, given)
        self._emit_state(out)
        version = [0] * len(self.places)
        passes = {
            (kind, part.place, q): (part, jit_part(place, part, shares=self._shares(part), draws=self.micro.draws, adds_up=False))
            for kind, parts in (("forward", cut.forward), ("backward", cut.backward))
            for part in parts
            for q, place in enumerate(self.places[part.place])
        }
        updates = [self._jit_update(s, out.lent) for s in range(len(self.places))]
        self.versions: dict[Action, int] = {}  # of forward passes, for those who ask
        readers = read_at((*cut.forward, *cut.backward))
        for action in dispatch_order(self.pipeline):
            s, m = action.stage, action.microbatch
            r = self.pipeline.stages[s].replicas
            if action.kind == "update":
                self._emit_update(out, s, version[s], range(m + 1 - r, m + 1), updates[s])
                version[s] += 1
                continue
            forward = action._replace(kind="forward")
            if action.kind == "forward":
                entered = version[0] if s == 0 else self.versions[action._replace(stage=0)]
                done = entered * self.pipeline.stages[0].replicas
                self.versions[forward] = min(done // r, version[s]) if self.pipeline.vertical_sync else version[s]
            part, fn = passes[action.kind, s, m % r]
            state = self.versions[forward]
            ins = [self._name(v, s, m, state) for v in part.inputs]
            ins += [("number", s, m)] if keys_in(part, self.micro.draws) else []
            outs = [("made", v, s, m) for v in part.outputs] + [("share", v, s, m) for v in self._shares(part)]
            runs = (self.places[s][m % r], part)
            out.call(f"{action.kind} {s}, minibatch {m}", self._track(s, m % r), fn, ins, outs, part=runs)
            for t, values in sent_on(part.outputs, readers, s):
                target = self.places[t][m % self.pipeline.stages[t].replicas]
                out.move(
                    f"send {s} to {t}, minibatch {m}", f"link {s} to {t}", [("made", v, s, m) for v in values],
                    [self.places[s][m % r].sharding(v) for v in values], [target.sharding(v) for v in values],
                    [("made", v, t, m) for v in values],
                )  # fmt: skip
        return out.build(given, self._emit_results(out, version), self._given_away(out.lent) if self.donate else ())

    def _emit_state(self, out: StreamBuilder) -> None:
        """The state that the caller gave, as the first version of every stage."""
        for s, stage in enumerate(self.stages):
            for v in self.state_of(s):
                home, given = self.cut.home[v], ("value", v)
                if home == s:
                    out.slots[("state", v, s, 0)] = out.slots[given]
                    continue
                source, here = self.stages[home].place.sharding(v), stage.place.sharding(v)
                out.move(f"weights to {s}", f"link to stage {s}", [given], [source], [here], [("state", v, s, 0)])
            self._show(out, s, 0, ())

    def _emit_results(self, out: StreamBuilder, version: Sequence[int]) -> list[tuple]:
        """Names of what the step returns: the last version of state, and metrics."""
        wanted: list[tuple] = []
        inverse = {o: self.program.inputs[i] for i, o in self.step.state_pairs.items()}
        for leaf, result in enumerate(self.cut.results):
            if result is None or result[1] in self.batch:
                continue
            s, v = result
            if leaf in inverse:
                wanted.append(("state", inverse[leaf], s, version[s]))
            elif v in self.cut.home:
                wanted.append(("value", v))
            else:
                rounds = self.micro.num_microbatches // self.pipeline.stages[s].replicas
                wanted.append(self._emit_metric(out, s, v, rounds))
        return wanted

    def _given_away(self, lent: Collection[Name]) -> list[tuple]:
        """The state that one stage alone holds, in arrays that nothing else stands for."""
        holders: dict[int, list[int]] = {}
        for s in range(len(self.places)):
            for v in self.state_of(s):
                holders.setdefault(v, []).append(s)
        own = [v for v, at in holders.items() if at == [self.cut.home[v]] and len(self.places[at[0]]) == 1 and v in self.replaced]
        return [name for v in own if (name := ("value", v)) not in lent]

    def _track(self, s: int, replica: int | None = None) -> str:
        return f"stage {s}" + (f", replica {replica}" if replica is not None and len(self.places[s]) > 1 else "")

    def _name(self, v: int, s: int, m: int, version: int) -> tuple:
        if v in self.batch:
            return ("batch", v, s, m)
        return ("seen", v, s, m % len(self.places[s]), version) if v in self.cut.home else ("made", v, s, m)

    def _shares(self, part: Part) -> list[int]:
        """What the update of a stage reads of one of its passes."""
        made = part.made
        return [v for v in self.updates[part.place].inputs if v in made]

    def _emit_batch(self, out: StreamBuilder, given: list[tuple]) -> None:
        num = self.micro.num_microbatches
        for s, replicas in enumerate(self.places):
            read = {v for p in (self.cut.forward[s], self.cut.backward[s]) for v in p.inputs if v in self.batch}
            for q, place in enumerate(replicas):
                mine = range(q, num, len(replicas))
                for v in sorted(read):
                    name = ("all", v, s, q)
                    self._feeds.append((self.batch[v], place))
                    out.slot(name)
                    given.append(name)
                    fn = rows_apart(tuple(mine), (place.sharding(v),) * len(mine))
                    outs = [("batch", v, s, m) for m in mine]
                    out.call(f"minibatches {s}", self._track(s, q), fn, [name], outs)
                if any(keys_in(p, self.micro.draws) for p in (self.cut.forward[s], self.cut.backward[s])):
                    fn = numbers(tuple(mine), place.whole)
                    out.call(f"numbers {s}", self._track(s, q), fn, [], [("number", s, m) for m in mine])

    def _show(self, out: StreamBuilder, s: int, version: int, kept: Collection[int]) -> None:
        """A version of a stage's state to the passes of its replicas; what is `kept` they have seen under the version before."""
        parts = (self.cut.forward[s], self.cut.backward[s])
        read = [v for v in self.state_of(s) if any(v in p.inputs for p in parts)]
        every = range(len(self.places[s]))
        for v in read:
            if v in kept or len(every) == 1:
                for q in every:
                    old = ("seen", v, s, q, version - 1) if v in kept else ("state", v, s, version)
                    out.slots[("seen", v, s, q, version)] = out.slots[old]  # the same array under its new name
        new = [v for v in read if v not in kept]
        if len(every) > 1 and new:
            ins, outs = [("state", v, s, version) for v in new], [("seen", v, s, q, version) for q in every for v in new]
            targets = [place.sharding(v) for place in self.places[s] for v in new]
            out.regroup(f"weights of {s}", f"memory of stage {s}", ins * len(every), targets, outs)

    def _jit_update(self, s: int, lent: Collection[Name]) -> _Update:
        part, stage, avals = self.updates[s], self.stages[s], self.program.avals
        state = [v for v in part.inputs if v in self.cut.home]
        summed = [v for v in part.inputs if v not in self.cut.home]

        def fn(*arguments: Any) -> tuple[Any, ...]:
            env = dict(zip(state, arguments, strict=False))
            for v, total in zip(summed, stage.summed(summed, arguments[len(state) :]), strict=True):
                scale = 1.0 if self._how[v].how == "sum" else 1 / stage.num
                dtype = stage.place.evaluator.lift(jnp.zeros((), avals[v].dtype)).dtype
                env[v] = finished(total, scale, dtype) if stage.num > 1 else total
            env = evaluate_part(stage.place, part, env)
            return tuple(env[v] for v in part.outputs)

        fn.__name__ = fn.__qualname__ = f"update_{s}"
        news = {o: v for v, o in self.replaced.items()}
        shardings = [stage.place.sharding(news[o]) if o in news else stage.place.whole for o in part.outputs]
        taken = [k for k, v in enumerate(state) if self.replaced.get(v) in part.outputs and self._is_free(v, s, lent)]
        later = jax.jit(fn, out_shardings=tuple(shardings), donate_argnums=taken)
        first = later if self.donate else jax.jit(fn, out_shardings=tuple(shardings))
        return _Update(first, later, state, summed, [state[k] for k in taken])

    def _is_free(self, v: int, s: int, lent: Collection[Name]) -> bool:
        """Whether nothing reads a version of this state of a stage once its update has."""
        is_read = any(v in p.inputs for p in (self.cut.forward[s], self.cut.backward[s]))
        is_alone = len(self.places[s]) == 1 and in_flight(self.pipeline)[s] == 1 and not self.pipeline.vertical_sync
        return self.cut.home[v] == s and ("value", v) not in lent and (is_alone or not is_read)

    def _emit_update(self, out: StreamBuilder, s: int, version: int, minibatches: range, update: _Update) -> None:
        fn, state, summed = update.later if version else update.first, update.state, update.summed
        part, stage = self.updates[s], self.stages[s]
        rounds = [("share", v, s, minibatches[-1]) for v in summed]
        if stage.num > 1 and summed:
            shares, rounds = [("share", v, s, m) for v in summed for m in minibatches], [("round", v, s, version) for v in summed]
            out.regroup(f"gradients of {s}", f"memory of stage {s}", shares, [stage.round_sharding(v) for v in summed], rounds)
        ins = [*(("state", v, s, version) for v in state), *rounds]
        names = [("new", v, s, version + 1) for v in part.outputs]
        takes = [("state", v, s, version) for v in update.taken if version or self.donate]
        out.call(f"update {s}, minibatch {minibatches[-1]}", self._track(s), fn, ins, names, takes, (stage.place, part))
        own = self.state_of(s)
        kept = [v for v in own if self.replaced.get(v) not in part.outputs]
        for v in own:  # the same array under its new name
            old = ("state", v, s, version) if v in kept else ("new", self.replaced[v], s, version + 1)
            out.slots[("state", v, s, version + 1)] = out.slots[old]
        self._show(out, s, version + 1, kept)

    def _emit_metric(self, out: StreamBuilder, s: int, v: int, rounds: int) -> tuple:
        """The mean (or sum) over minibatches of what updates return."""
        how = self._how.get(v)
        scale = 1.0 if how is not None and how.how == "sum" else 1 / rounds
        name = ("metric", v, s)

        def fn(*values: Any) -> tuple[Any]:
            total = values[0]
            for x in values[1:]:
                total = total + x
            return (finished(total, scale, total.dtype),)

        ins = [("new", v, s, k + 1) for k in range(rounds)]
        if name not in out:
            out.call(f"metrics {s}", self._track(s), jax.jit(fn, out_shardings=(self.stages[s].place.whole,)), ins, [name])
        return name

    # Running.

    @property
    def all_places(self) -> list[Place]:
        return [place for replicas in self.places for place in replicas]

    def dispatches(self, *, with_gradients: bool = False) -> Stream:
        return self._stream

    @property
    def feeds(self) -> list[tuple[int, Place]]:
        return self._feeds
