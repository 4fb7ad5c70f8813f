"""Synchronous pipelines: GPipe, 1F1B and interleaved 1F1B, each stage one program per pass on its own mesh.

One step: parameters go to where they are read, micro-batches pass through the stages in the schedule's order, gradients are
summed where they are made, then every stage updates the parameters that it holds. All of it is one list of
dispatches (pipeline_stream.py, pipeline_updates.py); what runs at the same time follows from the data alone.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.parts.deferral import deferred_sums, sums_within
from soapjax.execute.parts.gathered import gathered_once
from soapjax.execute.parts.joinings import Joining, averaged_blindly, found_reduction, is_of_whole_batch, joining, warn_once
from soapjax.execute.parts.microbatches import MicroStep
from soapjax.execute.parts.part_program import Place
from soapjax.execute.parts.rolled_cut import roll
from soapjax.execute.parts.stage_cut import StageCut, cut_stages
from soapjax.execute.streams.batches import MicroBatched
from soapjax.execute.streams.pipeline_stream import Staged
from soapjax.execute.streams.pipeline_updates import StepStream, step_stream
from soapjax.execute.streams.stream import Stream, other_shape
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.build import Binding
from soapjax.strategy.pipeline import Pipeline


class PipelineStep(MicroBatched):
    """A micro-batched step, ready to run.

    Args:
      micro: the step, traced with one micro-batch.
      pipeline: stages and schedule.
      places: of every stage, in order: its mesh, and the plan that holds inside.
      reduction: what the loss is of the batch, "mean" or "sum"; "auto": as its growth with the batch tells.
      donate: reuse the memory of parameters and optimizer state for their new values.
    Raises: SoapjaxError where step, stages and reduction do not go together.
    """

    def __init__(
        self, micro: MicroStep, pipeline: Pipeline, places: Sequence[Place], *, reduction: str = "auto", donate: bool = True
    ):
        self.micro, self.pipeline, self.places, self.donate = micro, pipeline, list(places), donate
        self.step = micro.step
        bound = places[0].bound
        self.gradient_paths = tuple(p.path for p in bound.binding.phases.parameters)
        self.cut, self._joinings, self.reduction, blindly = cut_and_joined(micro, bound.graph, bound.binding, pipeline, reduction)
        if blindly:
            more = f" and {len(blindly) - 8} more" if len(blindly) > 8 else ""
            warn_once(
                "put together of micro-batches' own, although no mean or sum over the batch: %s", ", ".join(blindly[:8]) + more
            )
        gradients = [v for _, v in self.cut.gradients]
        self._defer(gradients)
        self.as_run, self.pieces = micro, None
        if rolled := roll(micro, self.cut, places, self._joinings):
            self.as_run, self.cut, self._joinings, stacks, self.pieces = rolled
            for place in places:
                place.have_stacks(stacks)
        else:
            for place, backward, weights in zip(places, self.cut.backward, self.cut.weights, strict=True):
                place.sums = tuple(a for part in (backward, weights) if part is not None for a in sums_within(place, part))
            self._defer(gradients)  # these sums, too
        self._receive()
        home = self.cut.home
        self.in_shardings = [self.places[home[v]].sharding(v) if v in home else None for v in self.as_run.step.program.inputs]
        self._built = functools.cache(self._emit)  # with and without gradients
        self._jitted: dict[Any, Any] = {}  # what both have

    def _defer(self, gradients: Sequence[int]) -> None:
        """What is done once per step: sums of gradients over a stage's devices, and copies of parameters (gathered.py)."""
        if self.micro.num_microbatches == 1:
            return
        parameter_of = {v: p for p, v in enumerate(gradients)}
        for s, place in enumerate(self.places):
            mine = {
                v: parameter_of[c.value] for c in self.cut.crossings if c.value in parameter_of for t, v in c.summands if t == s
            }
            parts = [p for p in (self.cut.backward[s], self.cut.weights[s]) if p is not None]
            place.gathered = gathered_once(place.bound, keeps_casts=self.pipeline.stages[s].keeps_casts)
            place.deferred = {v: d for part in parts for v, d in deferred_sums(place, part, mine).items()}

    def _receive(self) -> None:
        """What each stage gets from another comes in the layout that it has there."""
        parts = self.cut.passes
        made = {v: p.place for p in parts for v in p.outputs} | self.cut.home
        moves = [(v, made[v], p.place) for p in (*parts, *self.cut.updates) for v in p.inputs if v in made]
        moves += [(v, s, c.site) for c in self.cut.crossings for s, v in c.summands]
        for v, source, target in moves:
            if source != target:
                self.places[target].receive(v, self.places[source])

    # Running.

    @property
    def all_places(self) -> list[Place]:
        return self.places

    def dispatches(self, *, with_gradients: bool = False) -> Stream:
        """Those of a step, which then also returns gradients by `gradient_paths`."""
        return self._built(with_gradients).stream

    def _emit(self, with_gradients: bool) -> StepStream:
        given = self.as_run, self.micro, self.pipeline, self.cut, self.places, self._joinings, self.donate
        staged = Staged(*given, self._jitted)
        return step_stream(staged, with_gradients=with_gradients)

    @property
    def feeds(self) -> list[tuple[int, Place]]:
        return self._built(False).feeds


class Joined(NamedTuple):
    """The parts of all stages, how micro-batches' values of what crosses into the update become one, what the loss is of its batch,
    and which outputs are put together although that is not known to be right."""

    cut: StageCut
    joinings: dict[int, Joining]
    reduction: str
    blindly: list[str]


def cut_and_joined(
    micro: MicroStep, graph: OperatorGraph, binding: Binding, pipeline: Pipeline, reduction: str, *, is_asked_for: bool = True
) -> Joined:  # fmt: skip
    """A step's parts. An output that is no mean, as a median, is made of all samples, once, where not too much is kept for that.

    Args:
      graph, binding: of the micro-batched step.
      is_asked_for: as for `found_reduction`.
    Raises: SoapjaxError where step, stages and reduction do not go together.
    """
    cut = cut_stages(micro, graph, binding, pipeline)
    values = [v for _, v in cut.gradients]
    gradients = [(p.path, v) for p, v in zip(binding.phases.parameters, values, strict=True)]
    reduction, blindly = found_reduction(micro, gradients, reduction, is_asked_for=is_asked_for), dict[int, str]()
    if micro.num_microbatches > 1:
        blindly = averaged_blindly(micro, cut, reduction, values)
        outputs = {v: p for p, v in zip(micro.step.out_paths, micro.step.program.outputs, strict=True) if isinstance(v, int)}
        of_all = micro.growth.of_all_samples(list(outputs), values, blindly)
        blindly |= {v: outputs[v] for v, keys in of_all.items() if keys or not is_of_whole_batch(micro, cut, v, values)}
        blindly = {v: p for v, p in blindly.items() if not of_all.get(v)}
        if blindly and micro.growth.is_known and micro.growth.mixing(values).statistic() is not None:
            # Of state that layers read too, as of batch norm, the warning of `found_reduction` has told.
            told = {micro.step.out_paths[k] for k in micro.step.state_pairs.values()}
            blindly = {v: p for v, p in blindly.items() if p not in told}
        if keys := frozenset().union(*of_all.values()):
            micro = micro.of_all_samples(keys)
            cut = cut_stages(micro, graph, binding, pipeline)
    cut = cut.updating_as(micro.once, micro.consts_once)
    problems, found = _own_meshes(cut, pipeline), {}
    problems += [] if micro.growth.is_known else _read_late(micro, cut)
    results = {v for v in micro.step.program.outputs if isinstance(v, int)}
    for crossing in cut.crossings:
        v = crossing.value
        how = joining(micro, v, reduction, is_gradient=v in values)
        if how is None or (not how.is_sum and v not in results and not micro.growth.is_known):
            value = "neither a mean over the batch nor a count, nor split by it along one dim"
            remedy = "return it from the loss as a float mean, or use one micro-batch"
            if len(micro.sample_dims(v)) > 1:
                value = "of every sample with every other, of which micro-batches have a part"
                remedy = "leave it out of the results, or use one micro-batch"
            problems.append(Problem(_place(micro, v), value, "what micro-batches' values can be put together to", remedy))
        else:
            found[v] = how
    problems += _of_other_shapes(micro, found)
    if problems:
        raise SoapjaxError(problems)
    return Joined(cut, found, reduction, list(blindly.values()))


def _of_other_shapes(micro: MicroStep, joinings: Mapping[int, Joining]) -> list[Problem]:
    """Results that micro-batches' values would be put together to in other shapes than the whole step has."""
    own, whole = micro.step.program, micro.full.program
    problems = []
    for path, v, w in zip(micro.step.out_paths, own.outputs, whole.outputs, strict=False):
        if isinstance(v, int) and (how := joinings.get(v)) is not None and len(own.outputs) == len(whole.outputs):
            shape, expected = how.shape(own.avals[v].shape, micro.num_microbatches), tuple(whole.aval(w).shape)
            if shape != expected:
                problems.append(other_shape(path, shape, expected))
    return problems


def _place(micro: MicroStep, value: int) -> str:
    """The result that it is, or the line that makes it."""
    program = micro.step.program
    if value in program.outputs:
        return micro.step.out_paths[program.outputs.index(value)]
    line = next((e.source for e in program.eqns if value in e.outputs), "")
    shape = f"a value of shape {program.avals[value].shape}"
    return f"{line}: {shape}" if line else shape


def _own_meshes(cut: StageCut, pipeline: Pipeline) -> list[Problem]:
    """What the step maps over more devices than the stage has where it runs."""
    problems = []
    for part in cut.passes:
        num = len(pipeline.stages[part.place].devices)
        for eqn in part.eqns:
            if (mesh := eqn.params.get("mesh")) is not None and eqn.name == "shard_map" and mesh.size != num:
                value, expected = f"a shard_map over {mesh.size} devices, in a stage of {num}", "a mesh of the stage's own devices"
                remedy = "plan one program, or micro-batches of one; or leave the shard_map out: the plan splits its operators"
                problems.append(Problem(eqn.source or f"stages[{part.place}]", value, expected, remedy))
    return list(dict.fromkeys(problems))[:3]


def _read_late(micro: MicroStep, cut: StageCut) -> list[Problem]:
    """Arguments of the batch that an update reads itself: it runs once, when all micro-batches are over."""
    batch = {micro.step.program.inputs[k]: micro.step.in_paths[k] for k in micro.batch_leaves}
    late = {v for part in cut.updates for v in part.inputs if v in batch}
    expected = "data of forward and backward passes: the update follows all micro-batches"
    remedy = "compute what it needs of the data in the loss, and return that from there as a mean; or plan without a pipeline"
    value = "read by an update (of moving statistics, say)"
    return [Problem(f"argument {batch[v]}", value, expected, remedy) for v in sorted(late)]
