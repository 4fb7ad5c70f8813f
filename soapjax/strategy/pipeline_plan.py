"""The plan of a pipeline from the plans of its stages: every operator, argument and result as it lies on its own stage's mesh.

Where stages have meshes of several shapes, what one reads of another's operators and arguments has a layout on each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from soapjax.graph.operators import OperatorGraph
from soapjax.strategy.pipeline import Pipeline
from soapjax.strategy.plan import MeshPlan, ModelSource, Plan, Prediction, Provenance, graph_parts
from soapjax.strategy.plan_strategy import mesh_part
from soapjax.topology import DeviceTopology, factor_mesh


def make_pipeline_plan(
    graph: OperatorGraph, topology: DeviceTopology, pipeline: Pipeline, stages: Sequence[MeshPlan], prediction: Prediction, *,
    model: ModelSource | None = None, provenance: Provenance = Provenance(), tracing: Mapping[str, Any] = {},
    profile: dict[str, Any] | None = None, fixed: Collection[str] = (),
) -> Plan:  # fmt: skip
    """A plan of a pipeline.

    Args:
      graph: of the whole batch; its micro-batches' has the same operators.
      stages: of every stage what holds on its mesh; stages with equal meshes have equal ones.
      fixed: arguments whose layouts the user fixed, on the mesh of the stage that holds them.
    """
    at = _stages_of_entries(graph, pipeline)
    own: dict[str, Any] = {kind: {name: getattr(stages[i], kind)[name] for name, i in of.items()} for kind, of in at.items()}
    elsewhere = []
    for i, plan in enumerate(stages):
        if any(p.mesh == plan.mesh for p in stages[:i]):
            continue
        others = {
            kind: {name: getattr(plan, kind)[name] for name, k in of.items() if stages[k].mesh != plan.mesh}
            for kind, of in at.items()
        }  # fmt: skip
        if any(others.values()):
            elsewhere.append(MeshPlan(mesh=plan.mesh, **others))
    return Plan(
        model=model,
        **graph_parts(graph),
        topology=topology.to_dict(),
        mesh=mesh_part(factor_mesh(topology)),
        **own,
        **tracing,
        fixed={path: own["arguments"][path] for path in fixed},
        profile=profile,
        prediction=prediction,
        provenance=provenance,
        pipeline=pipeline,
        elsewhere=tuple(elsewhere),
    )


def holders_of(graph: OperatorGraph) -> dict[str, int]:
    """The operator on whose stage an argument lies, by its path: a parameter's and its state's owner, else the first that reads it.

    Without those that nobody reads: they lie on the first stage.
    """
    found: dict[str, int] = {}
    for p in graph.parameters:
        found |= {graph.in_paths[leaf]: p.owner for leaf in p.leaves}
    for task in graph.tasks:
        for access in task.reads:
            if (leaf := graph.tensors[access.tensor].input_leaf) >= 0:
                found.setdefault(graph.in_paths[leaf], task.operator)
    return found


def _stages_of_entries(graph: OperatorGraph, pipeline: Pipeline) -> dict[str, dict[str, int]]:
    """The stage whose mesh an operator, an argument and a result lie on: of operators of the update alone the last."""
    last = len(pipeline.stages) - 1
    stage_of = {name: i for i, stage in enumerate(pipeline.stages) for name in stage.operators}
    operators = {op.name: stage_of.get(op.name, last) for op in graph.operators}
    at = list(operators.values())
    results: dict[str, int] = {}
    for task in graph.tasks:
        for access in task.writes:
            for leaf in graph.tensors[access.tensor].output_leaves:
                results[graph.out_paths[leaf]] = at[task.operator]
    holders = holders_of(graph)
    arguments = {path: at[holders[path]] if path in holders else 0 for path in graph.in_paths}
    results |= {graph.out_paths[o]: arguments[graph.in_paths[i]] for i, o in graph.state_pairs}
    return {"operators": operators, "arguments": arguments, "results": {path: results.get(path, last) for path in graph.out_paths}}
