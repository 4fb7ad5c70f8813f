"""Cutting a micro-batched step into stages: forward and backward parts, and updates.

Forward and backward tasks run on the stage of their operator. What crosses into the update (gradients, the loss, batch
statistics) is summed over micro-batches where it is made. A parameter's gradient that is a sum over several stages (tied
embeddings) is summed per stage first, and added up once, where the parameter lives. The update runs on the stage that
holds the parameter; what mixes gradients of several stages (the norm of all gradients) is evaluated in a second round, by
every stage that needs it, from what the first round made of each stage's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.parts.cut import Part, make_part, tasks_of, with_outputs
from soapjax.execute.parts.cutter import Cutter
from soapjax.execute.parts.microbatches import MicroStep
from soapjax.execute.parts.update_cut import Updates, cut_updates
from soapjax.graph.batch.whole_equations import as_whole
from soapjax.graph.lifespans import kept_between_passes, kept_for_result, lifetimes, makers
from soapjax.graph.microbatch import require_phases
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.build import Binding
from soapjax.graph.passes.phases import BACKWARD, FORWARD, UPDATE
from soapjax.graph.rules.light_rules import LIGHT
from soapjax.graph.trace.program import FlatEqn
from soapjax.strategy.pipeline import Pipeline
from soapjax.strategy.schedules import kind_of, recomputes_apart, splits_backward


@dataclasses.dataclass(frozen=True, eq=False)
class StageCut(Updates):
    """The parts of all stages."""

    forward: tuple[Part, ...]
    backward: tuple[Part, ...]
    weights: tuple[Part | None, ...]  # by stage, what of the backward pass may wait, where the schedule puts it off
    recompute: tuple[Part | None, ...]  # by stage, what makes again what the backward pass reads, where nothing is kept

    def updating_as(self, whole: Mapping[str, FlatEqn], consts: Mapping[int, Any]) -> StageCut:
        """With updates of the whole batch's equations and constants, where these are others."""

        def part(p: Part | None) -> Part | None:
            return None if p is None else dataclasses.replace(p, eqns=tuple(as_whole(e, whole) for e in p.eqns), consts=consts)

        update, mixed, again = (tuple(map(part, parts)) for parts in (self.update, self.mixed, self.mixed_again))
        return dataclasses.replace(self, update=update, mixed=mixed, mixed_again=again)

    @property
    def passes(self) -> tuple[Part, ...]:
        """What runs for every micro-batch."""
        return (*self.forward, *self.backward, *(p for p in (*self.weights, *self.recompute) if p is not None))


def stage_of_operators(graph: OperatorGraph, pipeline: Pipeline) -> list[int]:
    """The stage of every operator.

    Raises: SoapjaxError naming operators that are unknown, missing or in two stages, and stages without any.
    """
    index = {op.name: n for n, op in enumerate(graph.operators)}
    stage = [-1] * graph.num_operators
    problems = []
    trained = [n for n, op in enumerate(graph.operators) if any(graph.tasks[t].phase != UPDATE for t in op.tasks)]
    if len(pipeline.stages) > len(trained):
        value, expected = f"{len(pipeline.stages)} stages", f"at most {len(trained)}, the operators of this step"
        problems.append(Problem("stages", value, expected, "use fewer stages"))
    for i, part in enumerate(pipeline.stages):
        if not part.operators:
            problems.append(Problem(f"stages[{i}].operators", "none", "at least one operator", "use fewer stages"))
        for name in part.operators:
            place = f"stages[{i}].operators"
            if name not in index:
                expected = "operators of this step, traced with one micro-batch"
                problems.append(Problem(place, repr(name), expected, "plan the stages anew for this step"))
            elif stage[index[name]] >= 0:
                value, expected = f"{name!r}, which is in stage {stage[index[name]]} too", "each operator in one stage"
                problems.append(Problem(place, value, expected, "drop it from one of them"))
            else:
                stage[index[name]] = i
    missing = [graph.operators[n].name for n in trained if stage[n] < 0]
    if missing and not problems:
        value = f"{len(missing)} operators in no stage ({', '.join(missing[:3])}, ...)"
        problems.append(Problem("stages", value, "every operator in a stage", "add them to the stages that read their results"))
    if problems:
        raise SoapjaxError(problems)
    return stage


def _assign(c: Cutter, stage_of: Sequence[int]) -> None:
    """Stages of equations: forward never reads from a later stage; a backward one that would moves down."""
    problems = []
    for eqn in c.program.eqns:
        phase = c.phase[eqn.key]
        if phase not in (FORWARD, BACKWARD):
            continue
        operators = {c.graph.tasks[k].operator for k in tasks_of(eqn, c.graph, c.binding)}
        found = {stage_of[n] for n in operators} - {-1}
        names = sorted(c.graph.operators[n].name for n in operators)
        if len(found) > 1:
            value = f"a loop over {', '.join(names[:3])}, ... in stages {sorted(found)}"
            remedy = "unroll the loop (unroll=True, --unroll), or keep it in one stage"
            problems.append(Problem("stages", value, "loops that are in one stage", remedy))
        stage = min(found, default=0)
        read = [c.source(a) for a in eqn.read]
        for a in read if phase == FORWARD else ():
            if c.value_stage.get(a, 0) > stage:
                c.set_free(a)  # a random key that a later stage passes on, say
        before = [(c.value_stage[a], a) for a in read if a in c.value_stage]
        if phase == FORWARD and any(s > stage for s, _ in before):
            value = f"{names[0]!r} in stage {stage} reads what stage {max(before)[0]} makes"
            problems.append(Problem("stages", value, "results that flow from stage to stage", "move it to the later stage"))
        if phase == BACKWARD:
            stage = min([stage, *(s for s, a in before if c.phase[c.made_by[a].key] == BACKWARD)])
        c.stage[eqn.key] = stage
        c.value_stage.update(dict.fromkeys(eqn.outputs, stage))
    if problems:
        raise SoapjaxError(problems[:5])


def _kept_tensors(c: Cutter) -> dict[int, set[int]]:
    """What the forward pass hands on to the backward pass, and what that one stores."""
    graph, lives, maker = c.graph, lifetimes(c.graph), makers(c.graph)
    kept = kept_between_passes(graph, lives, maker, range(len(graph.tasks)), lambda task: True)
    own_results = (kept_for_result(graph, lives, graph.tasks[maker[t]]) for t in kept if lives.is_stand_in[t])
    backward = {a.tensor for task in graph.tasks if task.phase == BACKWARD for a in task.writes if lives.is_stored[a.tensor]}
    return {FORWARD: {t for t in kept if not lives.is_stand_in[t]}.union(*own_results), BACKWARD: backward}


class _Light(NamedTuple):
    """Of one pass what later programs evaluate themselves."""

    equations: set[str]
    given: set[int]  # values that they read although such equations make them


def _computed_again(c: Cutter) -> dict[int, _Light]:
    """The light equations of each pass, by phase.

    A stage keeps what one program would keep for that (graph/lifespans.py): the compiler fuses the derivative of an activation
    into its readers, which it cannot across programs. What does not depend on the batch is made anew by every program.
    """
    found, kept = {}, _kept_tensors(c)
    for phase in (FORWARD, BACKWARD):
        mine = [e for e in c.program.eqns if c.phase[e.key] == phase]
        light = {e.key for e in mine if e.name in LIGHT or e.key not in c.of_batch}
        made = (o for e in mine if e.key in c.of_batch for o in e.outputs)
        found[phase] = _Light(light, {o for o in made if c.binding.tensor_of.get(o) in kept[phase]})
    return found


def cut_stages(micro: MicroStep, graph: OperatorGraph, binding: Binding, pipeline: Pipeline) -> StageCut:
    """Cuts a step that was traced with one micro-batch.

    Raises: SoapjaxError where the gradient boundary is not found, or the stages do not fit the step.
    """
    require_phases(graph, binding.phases.lines_of_late)
    step = micro.step
    if not any("transpose(" in e.stack for e in step.program.eqns):
        value, expected = "a backward pass without the marks of jax.grad", "equations that can be told to be backward"
        remedy = "compute gradients by jax.grad, or plan without a pipeline"
        if any("transpose(" in inner.stack for inner in step.program.leaves):
            value = "a gradient that is made inside a loop of the step's own, as of its gradient accumulation"
            expected, remedy = "gradients that one backward pass makes", "leave the accumulation out: microbatches= is that"
        raise SoapjaxError(Problem("train step", value, expected, remedy))
    c = Cutter(
        step=step, graph=graph, binding=binding, num=len(pipeline.stages), batch_leaves=micro.batch_leaves, draws=micro.draws,
        after_all=micro.after_all,
    )  # fmt: skip
    _assign(c, stage_of_operators(graph, pipeline))
    free = c.keys(None)
    light = _computed_again(c)
    apart = c.between_stages()
    put_off = _put_off(c, free) if splits_backward(pipeline) else set()
    forward, backward, weights, recompute = [], [], [], []
    for s, stage in enumerate(pipeline.stages):
        own, is_apart = c.keys(FORWARD, s), recomputes_apart(pipeline, s)
        forward.append(make_part(f"forward {s}", s, step.program, own, free))
        again, stop = own & light[FORWARD].equations, light[FORWARD].given
        if stage.rematerialise and not is_apart:
            again, stop = own, set()
        mine = c.keys(BACKWARD, s) - apart
        backward.append(make_part(f"backward {s}", s, step.program, mine - put_off, free | again, stop=stop))
        if mine & put_off:
            late, others = mine & put_off, (mine - put_off) & light[BACKWARD].equations
            given = {v for v in light[BACKWARD].given if c.made_by[v].key not in late} | stop
            weights.append(make_part(f"weights {s}", s, step.program, late, free | again | others, stop=given))
        if is_apart and (made := [v for v in backward[s].inputs if v in c.made_by and c.made_by[v].key in own]):
            recompute.append(make_part(f"recompute {s}", s, step.program, (), free | own, made))
    passes = [*forward, *backward, *weights, *recompute]
    if kind_of(pipeline).is_synchronous:  # what updates read of the whole batch is given to them, and nothing that it is made of
        given_apart = (dataclasses.replace(e, inputs=()) if e.key in micro.whole else e for e in step.program.eqns)
        c.program = dataclasses.replace(step.program, eqns=tuple(given_apart))
    updates = cut_updates(c, passes)
    batch = {step.program.inputs[k] for k in micro.batch_leaves}
    home = {v: s for v, s in updates.home.items() if v not in batch}
    # What is computed again the forward pass does not hand on.
    again_of = {f"backward {p.place}": set(p.outputs) for p in recompute}
    reads = [dataclasses.replace(p, inputs=tuple(v for v in p.inputs if v not in again_of.get(p.name, ()))) for p in passes]
    done = {p.name: dataclasses.replace(p, inputs=q.inputs) for p, q in zip(with_outputs(reads), passes, strict=True)}
    kinds = ("forward", "backward", "weights", "recompute")
    of_passes: dict[str, Any] = {kind: tuple(done.get(f"{kind} {s}") for s in range(c.num)) for kind in kinds}
    return StageCut(**of_passes, **vars(updates) | {"home": home})


def _put_off(c: Cutter, free: Collection[str]) -> set[str]:
    """The backward equations that no earlier stage waits for, not through `free` ones either: gradients of weights, on every stage
    but the first."""
    own_sums = {t for v in c.gradient_values() for t in c.summands(v)} | set(c.gradient_values())
    found: set[str] = set()
    for s in range(1, c.num):
        mine = c.keys(BACKWARD, s)
        read = {a for e in c.program.eqns if c.phase[e.key] == BACKWARD and c.stage[e.key] != s for a in e.read}
        for eqn in reversed([e for e in c.program.eqns if e.key in free]):  # a barrier between layers that are computed again, say
            if read.intersection(eqn.outputs):
                read.update(eqn.read)
        needed = {o for e in c.program.eqns if e.key in mine for o in e.outputs if o in read and o not in own_sums}
        if not needed:
            continue
        for eqn in reversed([e for e in c.program.eqns if e.key in mine or e.key in free]):
            if needed & set(eqn.outputs):
                needed.update(eqn.read)
            elif eqn.key in mine:
                found.add(eqn.key)
    return found
