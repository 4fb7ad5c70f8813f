"""What stages of a plan take, by its own figures."""

import dataclasses

import pytest
from balanced import balanced_pipeline
from problems import abstract

import soapjax
from soapjax.graph.passes.build import build_graph
from soapjax.planning.pipelining.stage_times import simulated_stages
from soapjax.search.stages.stage_loads import StageLoads
from soapjax.topology import load_topology

LATENCY_S = 1e-3
LAYERS = 3  # on the first stage two of the hidden ones


@pytest.mark.parametrize("topology, share", [("cpu8", 1.0), ("dgx1_v100x8", 0.0)])
def test_sums_of_replicas_pay_the_latency_of_every_gradient_that_is_not_merged(topology, share):
    """Two kernels and two biases on three replicas: XLA for CPUs sums each by itself, for GPUs so small ones in one."""
    topology = load_topology(topology)
    graph = build_graph(soapjax.trace(*abstract("mlp", batch=24, width=8, layers=LAYERS, features=8, classes=8)))[0]
    pipeline = balanced_pipeline(graph, 4, num_microbatches=6, num_stages=2)
    first, last = (s.model_copy(update={"mesh": {"d0": 1}}) for s in pipeline.stages)
    stages = first.model_copy(update={"devices": (0, 1, 2), "replicas": 3}), last.model_copy(update={"devices": (3,)})
    pipeline = pipeline.model_copy(update={"schedule": "pipedream", "stages": stages})
    owned = [p for p in graph.parameters if graph.operators[p.owner].name in first.operators]
    found = []
    for more_s in (0.0, LATENCY_S):
        levels = (*topology.levels[:-1], dataclasses.replace(topology.levels[-1], latency_s=more_s))
        loads = StageLoads(graph, dataclasses.replace(topology, levels=levels), sums_once=False)
        forward = [graph.operators[n].name for n in loads.forward]
        cut = sum(name in first.operators for name in forward)
        times = simulated_stages(loads, pipeline, (0, cut, len(forward)), {})
        sums = {t.duration_s for t in times.timeline.tasks if t.name.startswith("sum of gradients") and t.stage == 0}
        found.append(sums.pop())
        assert not sums
    times_of_latency = (found[1] - found[0]) / (4 * LATENCY_S)  # twice as many steps as there are others
    assert len(owned) == 4 and times_of_latency == pytest.approx(max(len(owned) * share, 1.0), rel=1e-6)
