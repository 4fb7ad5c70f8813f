"""Between a plan and a strategy: a plan that says what a strategy implies, and the strategy that a plan's entries name."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from soapjax.errors import Problem, SoapjaxError
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.phases import PHASE_NAMES
from soapjax.strategy.configs import PIN, REPLICATE, Strategy, replicated
from soapjax.strategy.layout import REPLICATED, Spec, spec_of
from soapjax.strategy.plan import (
    MeshPart,
    MeshPlan,
    ModelSource,
    OperatorCost,
    OperatorPart,
    Plan,
    Prediction,
    Provenance,
    TaskPart,
    format_spec,
    graph_parts,
    parse_spec,
)
from soapjax.strategy.space import SearchSpace
from soapjax.topology import DeviceTopology, FactorMesh, factor_mesh


def mesh_plan(
    space: SearchSpace, strategy: Strategy, slots: np.ndarray, home: np.ndarray,
    figures: Sequence[str] | None = None, costs: Sequence[OperatorCost] | None = None,
) -> MeshPlan:  # fmt: skip
    """What a strategy, and the layouts that it implies, say of the space's mesh.

    Args:
      slots: int8 [U + P ..., A], layout of every access of every task but the updates, reads before writes, in task order, and
        then the storage layout of every parameter.
      home: int8 [T, A], layout of every tensor.
      figures: per operator where its seconds come from; `costs`: what it is predicted to take.
    """
    graph, mesh = space.graph, space.mesh

    @functools.cache
    def words(layout: bytes, rank: int) -> str:
        return format_spec(spec_of(np.frombuffer(layout, np.int8).tolist(), rank=rank, axis_names=mesh.axis_names))

    def spec(layout: np.ndarray, rank: int) -> str:
        return words(np.asarray(layout, np.int8).tobytes(), rank)

    parts: dict[int, list[TaskPart]] = {n: [] for n in range(graph.num_operators)}
    u = 0
    for task in graph.tasks:
        if task.parameter >= 0:
            continue
        operands = [spec(slots[u + k], len(a.dims)) for k, a in enumerate(task.reads)]
        made = [spec(home[a.tensor], len(a.dims)) for a in task.writes]
        u += len(task.reads) + len(task.writes)
        parts[task.operator].append(TaskPart(phase=PHASE_NAMES[task.phase], operands=tuple(operands), results=tuple(made)))
    operators = {}
    for n, op in enumerate(graph.operators):
        config = strategy.config(n, op, mesh, space.storages)
        operators[op.name] = OperatorPart(
            kind=op.kind, dims={d.name: d.size for d in op.dims}, axes=config.axes, storage=config.storage,
            recompute=op.is_recomputed,
            figures="analytic" if figures is None else figures[n], tasks=tuple(parts[n]),
            cost=None if costs is None else costs[n],
        )  # fmt: skip
    arguments, results = _leaf_specs(graph, home, slots[u:], spec, space.fixed_layouts)
    return MeshPlan(mesh=mesh_part(mesh), operators=operators, arguments=arguments, results=results)


def mesh_part(mesh: FactorMesh) -> MeshPart:
    return MeshPart(axis_names=mesh.axis_names, axis_sizes=mesh.axis_sizes, device_order=tuple(range(mesh.num_devices)))


def make_plan(
    space: SearchSpace, topology: DeviceTopology, strategy: Strategy, on_mesh: MeshPlan, prediction: Prediction, *,
    model: ModelSource | None = None, provenance: Provenance = Provenance(), tracing: Mapping[str, Any] = {},
    profile: dict[str, Any] | None = None,
) -> Plan:  # fmt: skip
    """A plan of one program, from a strategy and what it says of the mesh; `profile`: the measurements behind the prediction."""
    graph, arguments = space.graph, on_mesh.arguments
    return Plan(
        model=model,
        **graph_parts(graph),
        topology=topology.to_dict(),
        **dict(on_mesh),
        **tracing,
        executable=_is_executable(graph, strategy),
        fixed={graph.in_paths[leaf]: arguments[graph.in_paths[leaf]] for leaf in sorted(space.fixed_layouts)},
        profile=profile,
        prediction=prediction,
        provenance=provenance,
    )


def fixed_specs(plan: Plan) -> dict[str, Spec]:
    """What the user fixed of a plan's arguments, by path."""
    return {path: parse_spec(spec) for path, spec in plan.fixed.items()}


def _is_executable(graph: OperatorGraph, strategy: Strategy) -> bool:
    """A loop is one program: it runs on one set of devices. So does a step that updates between two gradients."""
    pins = [row.tobytes() for row in np.minimum(strategy.axes, REPLICATE)]
    if graph.is_single_phase and graph.parameters and (strategy.axes < REPLICATE).any():
        return False
    of_loop: dict[str, bytes] = {}
    for task in graph.tasks:
        mine = pins[task.operator]
        if task.scope and of_loop.setdefault(task.scope.split("/")[0], mine) != mine:
            return False
    return True


def _leaf_specs(graph: OperatorGraph, home, stored, spec, fixed) -> tuple[dict[str, str], dict[str, str]]:
    """Argument and result specs by path; a leaf that no task touches is as the user fixed it, or replicated."""
    arguments: dict[str, str] = dict.fromkeys(graph.in_paths, "")
    for leaf, layout in fixed.items():
        arguments[graph.in_paths[leaf]] = spec(layout, int(max(layout, default=-1)) + 1)
    results: dict[str, str] = dict.fromkeys(graph.out_paths, "")
    for i, tensor in enumerate(graph.tensors):
        rank = len(tensor.shape)
        for leaf in tensor.output_leaves:
            if rank and tensor.copies == 1 and (home[i] != REPLICATED).any():
                results[graph.out_paths[leaf]] = spec(home[i], rank)
        if tensor.input_leaf >= 0:
            arguments[graph.in_paths[tensor.input_leaf]] = spec(home[i], rank)
    for p, parameter in enumerate(graph.parameters):
        rank = len(graph.tensors[parameter.tensor].shape)
        for leaf in parameter.leaves:
            arguments[graph.in_paths[leaf]] = spec(stored[p], rank)
    for i, o in graph.state_pairs:
        results[graph.out_paths[o]] = arguments[graph.in_paths[i]]
    return arguments, results


def topology_of(plan: Plan, *, place: str = "plan") -> tuple[DeviceTopology, FactorMesh]:
    """The topology that a plan is for, and its mesh.

    Raises: SoapjaxError where the topology is none, or the plan's mesh is not the topology's.
    """
    topology = DeviceTopology.from_dict(plan.topology, place=f"{place}: topology")
    mesh = factor_mesh(topology)
    found, wanted = (plan.mesh.axis_names, plan.mesh.axis_sizes), (mesh.axis_names, mesh.axis_sizes)
    if found != wanted:
        value, expected = "{} of {}".format(*found), "{} of {}".format(*wanted)
        remedy = f"restore it, or plan anew for {topology.num_devices} devices"
        raise SoapjaxError(Problem(f"{place}: mesh", value, f"{expected}, the topology's", remedy))
    if sorted(plan.mesh.device_order) != list(range(mesh.num_devices)):
        order, expected = str(plan.mesh.device_order), f"a permutation of 0 to {mesh.num_devices - 1}"
        raise SoapjaxError(Problem(f"{place}: mesh.device_order", order, expected, "restore it, or plan anew"))
    return topology, mesh


def strategy_of(plan: MeshPlan, space: SearchSpace, *, place: str = "plan") -> Strategy:
    """The strategy that a plan's `axes` and `storage` name.

    Raises: SoapjaxError naming every operator, axis, dim and storage that does not fit the graph and the mesh.
    """
    graph, mesh = space.graph, space.mesh
    problems: list[Problem] = []
    restore, choose = "restore the entry, or plan anew", "choose one of these"

    def wrong(entry: str, value: str, expected: str, remedy: str) -> None:
        problems.append(Problem(f"{place}: {entry}", value, expected, remedy))

    for name in sorted(plan.operators.keys() - {o.name for o in graph.operators}):
        wrong(f"operators.{name}", "an unknown operator", "an operator of this step", restore)
    found, wanted = (plan.mesh.axis_names, plan.mesh.axis_sizes), (mesh.axis_names, mesh.axis_sizes)
    if found != wanted:
        wrong("mesh", "{} of {}".format(*found), "{} of {}".format(*wanted), "plan anew for this topology")
    strategy = replicated(graph, mesh)
    storages = {s.describe(mesh.axis_names): k for k, s in enumerate(space.storages)}
    for i, op in enumerate(graph.operators):
        entry, part = f"operators.{op.name}", plan.operators.get(op.name)
        if part is None:
            wrong(entry, "missing", "an entry for every operator", restore)
            continue
        dims = {d.name: k for k, d in enumerate(op.dims)} | {"replicate": REPLICATE}
        for a in sorted(part.axes.keys() - set(mesh.axis_names)):
            wrong(f"{entry}.axes.{a}", "an unknown axis", f"one of {mesh.axis_names}", restore)
        for k, a in enumerate(mesh.axis_names):
            value = part.axes.get(a)
            choices = dims | ({f"pin({c})": PIN(c) for c in range(mesh.axis_sizes[k])} if space.may_pin(i) else {})
            if value in choices:
                strategy.axes[i, k] = choices[value]
            else:
                wrong(f"{entry}.axes.{a}", repr(value), " or ".join(choices), choose)
        if part.storage in storages:
            strategy.storage[i] = storages[part.storage]
        else:
            wrong(f"{entry}.storage", repr(part.storage), " or ".join(map(repr, storages)), choose)
    problems += [p._replace(place=f"{place}: {p.place}") for p in space.violations(strategy)] if not problems else []
    if problems:
        raise SoapjaxError(problems)
    return strategy
