"""Plans without a search, for tests of how steps are called: neither baselines nor costs are computed, which take a second each."""

import types

import pytest

from soapjax import planning
from soapjax.graph.build import build_graph
from soapjax.graph.trace import trace
from soapjax.pipelining import inside_plan
from soapjax.topology import factor_mesh

TRACING = {"static_argnums", "axis_name", "strip_constraints", "unroll"}


@pytest.fixture
def no_search(monkeypatch):
    """`soap_shard` takes the batch split and every parameter sharded over all devices, as fully-sharded data parallelism."""

    def plan(fn, *args, topology, devices, planner, **options):
        topology = planning._topology(topology, devices)
        step = trace(fn, *args, **{k: v for k, v in options.items() if k in TRACING})
        (graph, _), mesh = build_graph(step), factor_mesh(topology)
        if planner == "data_parallel":
            return types.SimpleNamespace(plan=inside_plan(graph, mesh, topology), step=step, program=None)
        whole = inside_plan(graph, mesh, topology)
        axes = {name: part.axes for name, part in whole.operators.items()}
        stored = f"sharded({','.join(mesh.axis_names)}), kept"
        storage = {op.name: stored for op in graph.operators if op.parameters}
        return types.SimpleNamespace(plan=inside_plan(graph, mesh, topology, axes, storage), step=step, program=None)

    monkeypatch.setattr(planning, "plan", plan)
