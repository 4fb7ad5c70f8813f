"""What operators do on the mesh of a stage, from what a plan or its user says of some of them; the others are data-parallel."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from soapjax.costs.evaluate import costs_of
from soapjax.costs.tables.problem_tables import cost_tables
from soapjax.errors import Problem, SoapjaxError
from soapjax.graph.operators import OperatorGraph
from soapjax.helpers.own_config import own_configuration
from soapjax.search.experts.baselines import data_parallel_strategy
from soapjax.search.problem import PlanningProblem
from soapjax.search.stages.stage_figures import part_of
from soapjax.strategy.configs import Strategy, stage_storages
from soapjax.strategy.layout import Spec
from soapjax.strategy.pipeline import Pipeline, Stage
from soapjax.strategy.plan import MeshPlan, OperatorPart
from soapjax.strategy.plan_strategy import mesh_part, mesh_plan, strategy_of
from soapjax.strategy.space import SearchSpace, fixed_layouts, search_space
from soapjax.topology import DeviceTopology, FactorMesh, factor_mesh

_REMEDY = "use fewer or smaller stages, or name a topology with more devices"


def strategy_with(space: SearchSpace, given: Mapping[str, OperatorPart], *, place: str) -> Strategy:
    """The strategy that has `given` operators as they say, and data parallelism for all others.

    Raises: SoapjaxError naming every operator, axis, dim and storage that does not fit the graph and the mesh.
    """
    whole = data_parallel_strategy(PlanningProblem(space.graph, space, None))[0]
    parts = dict(given)
    for n, op in enumerate(space.graph.operators):
        if op.name not in given:
            config = whole.config(n, op, space.mesh, space.storages)
            parts[op.name] = OperatorPart(kind=op.kind, axes=dict(config.axes), storage=config.storage)
    return strategy_of(MeshPlan(mesh=mesh_part(space.mesh), operators=parts, arguments={}, results={}), space, place=place)


@own_configuration()
def plan_on(
    graph: OperatorGraph, mesh: FactorMesh, part: DeviceTopology, axes: Mapping[str, Mapping[str, str]] | None = None,
    storage: Mapping[str, str] | None = None, fixed: Mapping[str, Spec] | None = None,
) -> MeshPlan:  # fmt: skip
    """What holds on a mesh.

    Args:
      part: the mesh's devices.
      axes: operator -> mesh axis -> dim, "replicate"; data parallelism for operators that are not in it.
      storage: of operators in `axes`, "as used" where it is not given.
      fixed: layouts that the user decided; what cannot be on this mesh is of arguments that lie on another.
    Raises: SoapjaxError naming what does not fit.
    """
    misfits = fixed_layouts(graph, mesh, fixed or {})[1]
    kept = {path: spec for path, spec in (fixed or {}).items() if path not in misfits}
    space = search_space(graph, mesh, fixed=kept, storages=stage_storages(mesh, adds_up=True))  # whatever may be said
    stored = dict.fromkeys(axes or {}, "as used") | dict(storage or {})
    given = {name: OperatorPart(kind="", axes=dict(own), storage=stored[name]) for name, own in (axes or {}).items()}
    strategy = strategy_with(space, given, place="stages")
    layouts = costs_of(cost_tables(graph, space, part), strategy.axes, strategy.storage).layouts
    return mesh_plan(space, strategy, layouts.slots, layouts.home)


def stage_mesh(stage: Stage, topology: DeviceTopology) -> tuple[FactorMesh, DeviceTopology]:
    """The mesh inside a stage (one replica of it), and its devices: their factor mesh, or axes of its own over one level of links.

    Raises: SoapjaxError where its mesh is not of as many devices as it has.
    """
    num = len(stage.devices) // stage.replicas
    part = part_of(topology, min(stage.devices), num)
    planned = factor_mesh(part)
    if not stage.mesh or stage.mesh == dict(zip(planned.axis_names, planned.axis_sizes, strict=True)):
        return planned, part
    if math.prod(stage.mesh.values()) != num:
        expected = f"a mesh of {num} devices"
        raise SoapjaxError(Problem("stage mesh", str(stage.mesh), expected, "change the mesh or the stage's devices"))
    alike = dataclasses.replace(topology, levels=(topology.levels[-1].part(0, num),))
    return FactorMesh(tuple(stage.mesh), tuple(stage.mesh.values()), (0,) * len(stage.mesh)), alike


def plans_of_stages(
    graph: OperatorGraph, pipeline: Pipeline, topology: DeviceTopology, axes: Mapping[str, Mapping[str, str]] | None = None,
    storage: Mapping[str, str] | None = None, fixed: Mapping[str, Spec] | None = None,
) -> list[MeshPlan]:  # fmt: skip
    """What holds on the mesh of every stage; stages on equal meshes share one plan. Arguments as for `plan_on`.

    Raises: SoapjaxError naming what does not fit.
    """
    if problems := [
        Problem(f"stages[{i}].devices", str(stage.devices), f"devices of {topology.name}, 0 to {topology.num_devices - 1}", _REMEDY)
        for i, stage in enumerate(pipeline.stages) if not set(stage.devices) <= set(range(topology.num_devices))
    ]:  # fmt: skip
        raise SoapjaxError(problems)
    meshes = [stage_mesh(stage, topology) for stage in pipeline.stages]
    plans: dict[FactorMesh, MeshPlan] = {}
    for mesh, part in meshes:
        if mesh not in plans:
            alike = {name for stage, (m, _) in zip(pipeline.stages, meshes, strict=True) if m == mesh for name in stage.operators}
            own = {name: x for name, x in (axes or {}).items() if name in alike}
            plans[mesh] = plan_on(graph, mesh, part, own, storage, fixed)
    return [plans[mesh] for mesh, _ in meshes]
