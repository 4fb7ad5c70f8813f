"""Plans without a search, for tests of how steps are called: neither baselines nor costs are computed, which take a second each."""

import pytest

from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import trace
from soapjax.planning.choosing import Chosen
from soapjax.planning.pipelining.stage_strategies import plan_on
from soapjax.steps import making
from soapjax.strategy.plan import Plan, Prediction, graph_parts
from soapjax.topology import factor_mesh


@pytest.fixture
def no_search(monkeypatch):
    """`soap_shard` takes the batch split and every parameter sharded over all devices, as fully-sharded data parallelism."""

    def plan(asked, fn, *args):
        asked, _ = asked.understood(fn)
        step = trace(fn, *args, **asked.tracing)
        (graph, _), mesh = build_graph(step), factor_mesh(asked.topology)
        on_mesh = plan_on(graph, mesh, asked.topology)
        if asked.planner != "data_parallel":
            axes = {name: part.axes for name, part in on_mesh.operators.items()}
            stored = f"sharded({','.join(mesh.axis_names)}), kept"
            on_mesh = plan_on(graph, mesh, asked.topology, axes, {op.name: stored for op in graph.operators if op.parameters})
        sent = dict(bytes_by_collective={}, sends=(), peak_sent_bytes=0)
        nothing = Prediction.model_construct(step_time_s=1.0, memory_bytes_per_device=0, **sent)
        made = Plan(**graph_parts(graph), topology=asked.topology.to_dict(), **dict(on_mesh), prediction=nothing)
        return Chosen(made, "planner", (), step)

    monkeypatch.setattr(making, "as_asked", plan)
