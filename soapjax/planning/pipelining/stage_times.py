"""A pipeline simulated as it runs: every stage of the whole graph with its own strategy, on its own devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from soapjax.costs.compilers.of_backend import compiler_of
from soapjax.costs.evaluate import Layouts
from soapjax.costs.rules.links import combined_share
from soapjax.costs.split_share import share_of
from soapjax.graph.operators import OperatorGraph
from soapjax.planning.pipelining.stage_sends import peak_sent_bytes, sends_among_replicas, sends_between, sends_of_stage
from soapjax.search.objective import Objective
from soapjax.search.stages.choices import rank_of, scores_of
from soapjax.search.stages.pipedream_stages import Workers
from soapjax.search.stages.stacks import Stacks
from soapjax.search.stages.stage_figures import level_between
from soapjax.search.stages.stage_flows import CrossingBytes
from soapjax.search.stages.stage_loads import StageLoads, transfers_of
from soapjax.simulate.pipeline_tasks import StageLoad, Transfer
from soapjax.simulate.pipeline_timeline import PipelineTimeline, keeping_casts, simulate_pipeline
from soapjax.simulate.simulator import Scores
from soapjax.strategy.configs import Strategy
from soapjax.strategy.pipeline import Pipeline, Stage
from soapjax.strategy.plan import MeshPlan, SentPart
from soapjax.strategy.plan_strategy import mesh_plan
from soapjax.strategy.space import SearchSpace
from soapjax.topology import DeviceTopology


class OnMesh(NamedTuple):
    """What holds on the mesh of a stage."""

    space: SearchSpace
    strategy: Strategy
    layouts: Layouts

    def plan(self) -> MeshPlan:
        return mesh_plan(self.space, self.strategy, self.layouts.slots, self.layouts.home)


class StageTimes(NamedTuple):
    """A pipeline with its simulation."""

    pipeline: Pipeline
    timeline: PipelineTimeline
    inside: tuple[OnMesh, ...]  # of every stage
    usable_bytes: int
    sends: tuple[SentPart, ...]  # per step: of a program what each device of its stage sends, of a transfer all together
    without_overlap_s: float
    split_flops_share: float

    @property
    def is_feasible(self) -> bool:
        """Whether it fits the devices."""
        return max(self.timeline.memory_bytes) <= self.usable_bytes

    @property
    def peak_sent_bytes(self) -> float:
        return peak_sent_bytes(self.pipeline, self.sends)

    def scores(self) -> Scores:
        return scores_of(self.timeline.step_time_s, max(self.timeline.memory_bytes), self.peak_sent_bytes)

    def rank(self, objective: Objective) -> tuple[bool, float, float]:
        return rank_of(self.scores(), self.usable_bytes, objective)


def _sums_of_replicas(graph: OperatorGraph, topology: DeviceTopology, stage: Stage) -> float:
    """How many collectives sum a stage's gradients over its replicas: one of each gradient, but for what the compiler merges."""
    names = set(stage.operators)
    sizes = [graph.tensors[p.gradient].size_bytes for p in graph.trained if graph.operators[p.owner].name in names]
    shares = combined_share(np.array(sizes, float), True, compiler_of(topology).merged_bytes)
    return max(float(shares.sum()), 1.0)


def _within_reach(transfers: list[Transfer], pipeline: Pipeline, topology: DeviceTopology) -> list[Transfer]:
    """Between replicas of both sides, which may be anywhere on the stage's devices: over the slowest link between any two."""
    reach = [(min(s.devices), max(s.devices)) for s in pipeline.stages]
    found = []
    for t in transfers:
        ends = [*reach[t.source], *reach[t.target]]
        level = level_between(topology, min(ends), max(ends))
        old, new = topology.levels[t.level], topology.levels[level]
        ratio = old.achieved_bytes_per_s / new.achieved_bytes_per_s
        seconds = ((s - old.latency_s) * ratio + new.latency_s if s else 0.0 for s in t.seconds)
        found.append(t if level == t.level else Transfer(t.source, t.target, level, *seconds))
    return found


def simulated_stages(
    loads: StageLoads, pipeline: Pipeline, bounds: tuple[int, ...], strategies: Mapping[int, Strategy],
    casts_limit_bytes: float | None = None,
) -> StageTimes:  # fmt: skip
    """A pipeline of any stages.

    Args:
      strategies: by stage, data parallelism where there is none.
      casts_limit_bytes: weights are cast once per step where a stage then takes no more than this; None: as the pipeline says.
    """
    topology, num = loads.topology, pipeline.num_microbatches
    workers = Workers.of(topology)
    found: list[StageLoad] = []
    serial: list[StageLoad] = []  # without overlap
    inside, figures, sends, split = [], [], [], []
    shares = [(min(s.devices), len(s.devices) // s.replicas) for s in pipeline.stages]
    for i, (stage, (first, count)) in enumerate(zip(pipeline.stages, shares, strict=True)):
        fabric = loads.fabric(first, count, num)
        strategy = strategies[i] if i in strategies else fabric.choices[0].strategy
        figures.append(fabric.figures(strategy))
        where = ((bounds[i], bounds[i + 1]), first, count, num)
        load, load_alone = (loads.load_of(*where, figures[i], overlap=overlap) for overlap in (True, False))
        split.append(loads.split_flops(*where, strategy, figures[i]))
        if stage.replicas > 1:
            last = first + len(stage.devices) - 1
            level = level_between(topology, first, last)
            sync = load.gradient_bytes * workers.sync_s_per_byte(first, len(stage.devices), width=count)
            sync += 2 * (stage.replicas - 1) * topology.levels[level].latency_s * _sums_of_replicas(loads.whole, topology, stage)
            load, load_alone = (x._replace(sync_s=sync, sync_level=level) for x in (load, load_alone))
        found.append(load)
        serial.append(load_alone)
        inside.append(OnMesh(fabric.space, strategy, figures[i].layouts))
        once = loads.sends((bounds[i], bounds[i + 1]), first, count, num, strategy, figures[i])
        sends += sends_of_stage(pipeline, i, once)
        sends += sends_among_replicas(pipeline, i, load, len(loads.whole.tasks))
    counts = [c for _, c in shares]
    crossing = loads.crossing(bounds, counts, num, figures)
    sends += sends_between(len(loads.whole.tasks), crossing, num)
    # Of stacked state that is not cut evenly: what lies on one stage although another works with it.
    meshes = [(*share, stage.replicas) for share, stage in zip(shares, pipeline.stages, strict=True)]
    away = Stacks(loads.whole, loads.position).elsewhere(bounds, meshes, figures[0].stored_bytes)
    here = away.sum(1).tolist()
    found, serial = (
        [x._replace(state_bytes=x.state_bytes + more) for x, more in zip(xs, here, strict=True)] for xs in (found, serial)
    )  # fmt: skip
    for home, user in np.argwhere(away).tolist():
        # There before the first pass, and back with the update: as many bytes either way, also from a later stage to an earlier.
        size, between = float(away[home, user]) * counts[home], (min(home, user), max(home, user))
        others = crossing.get(between, CrossingBytes())
        crossing[between] = others._replace(parameters=others.parameters + size, sums=others.sums + size)
    transfers = _within_reach(transfers_of(crossing, topology, [f for f, _ in shares], counts), pipeline, topology)
    if casts_limit_bytes is not None:
        pipeline = keeping_casts(pipeline, found, casts_limit_bytes)
    timeline = simulate_pipeline(pipeline, found, transfers)
    without_overlap_s = simulate_pipeline(pipeline, serial, transfers, overlap=False).step_time_s
    share = share_of(*np.array(split).T)
    return StageTimes(
        pipeline=pipeline, timeline=timeline, inside=tuple(inside), usable_bytes=topology.device.usable_memory_bytes,
        sends=tuple(sends), without_overlap_s=without_overlap_s, split_flops_share=share,
    )  # fmt: skip
