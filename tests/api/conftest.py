"""Plans without a search, for tests of how steps are called: neither baselines nor costs are computed, which take a second each."""

import types

import pytest

from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.trace import trace
from soapjax.planning import entry
from soapjax.planning.stage_strategies import plan_on
from soapjax.strategy.plan import Plan, Prediction, graph_parts
from soapjax.topology import factor_mesh

TRACING = {"static_argnums", "axis_name", "strip_constraints", "unroll"}


@pytest.fixture
def no_search(monkeypatch):
    """`soap_shard` takes the batch split and every parameter sharded over all devices, as fully-sharded data parallelism."""

    def plan(fn, *args, topology, devices, planner, **options):
        topology = entry._topology(topology, devices)
        step = trace(fn, *args, **{k: v for k, v in options.items() if k in TRACING})
        (graph, _), mesh = build_graph(step), factor_mesh(topology)
        on_mesh = plan_on(graph, mesh, topology)
        if planner != "data_parallel":
            axes = {name: part.axes for name, part in on_mesh.operators.items()}
            stored = f"sharded({','.join(mesh.axis_names)}), kept"
            on_mesh = plan_on(graph, mesh, topology, axes, {op.name: stored for op in graph.operators if op.parameters})
        sent = dict(bytes_by_collective={}, sends=(), peak_sent_bytes=0)
        nothing = Prediction.model_construct(step_time_s=1.0, memory_bytes_per_device=0, **sent)
        made = Plan(**graph_parts(graph), topology=topology.to_dict(), **dict(on_mesh), prediction=nothing)
        return types.SimpleNamespace(plan=made, step=step, program=None)

    monkeypatch.setattr(entry, "plan", plan)
