"""The plan file: what was decided, how every tensor is laid out, and what it was predicted to cost.

Canonical JSON with a schema version. A person reads it, diffs it and edits the `axes` and `storage`
of an operator; specs and prediction are derived, and made anew when the file is loaded.
Specs are written per tensor dim, `-` for a dim that is not split: `"h0+d0, -, d1"`.

An axis value of an operator is one of its dims, "replicate", or "pin(i)": the operator runs only where that axis' coordinate
is i. All axes pinned are one device. The specs of a pinned operator hold among the devices that take part: an axis that is
pinned splits nothing and stands in no spec.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pydantic

from soapjax.errors import Problem, SoapjaxError
from soapjax.files import read_text, write_text_atomic
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.phases import PHASE_NAMES
from soapjax.strategy.layout import REPLICATED, Spec, spec_of
from soapjax.strategy.pipeline import Pipeline
from soapjax.strategy.space import SearchSpace
from soapjax.strategy.strategy import PIN, REPLICATE, Strategy
from soapjax.topology import DeviceTopology, FactorMesh, factor_mesh

SCHEMA_VERSION = 1
MAX_PLAN_BYTES = 256 * 2**20
_MAX_NESTING = 32


class _Part(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSource(_Part):
    """Where the step came from: `path` names a module with `make`, or `module:factory`."""

    path: str
    settings: dict[str, bool | int | float | str] = {}


class GraphId(_Part):
    fingerprint: str
    num_operators: int


class MeshPart(_Part):
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    device_order: tuple[int, ...]


class TaskPart(_Part):
    """Specs of one task's operands as used by it, and of its results as they are kept."""

    phase: str
    operands: tuple[str, ...] = ()
    results: tuple[str, ...] = ()


class OperatorPart(_Part):
    kind: str
    dims: dict[str, int] = {}  # name and size of what an axis may be assigned to, for those who edit
    axes: dict[str, str]  # mesh axis -> dim, "replicate" or "pin(i)"
    storage: str = "as used"
    figures: str = "analytic"  # where its compute seconds come from: "measured", "calibrated" or "analytic", the weakest
    tasks: tuple[TaskPart, ...] = ()


class SentPart(_Part):
    """What each device sends in one step for one reason, in words that name the tensor."""

    task: int  # of the operator graph, in schedule order; their number stands for the step's end
    operator: str
    reason: str
    bytes: dict[str, int]  # by collective
    program: str = ""  # of a pipeline: "forward 0", "backward 0", "update 0" of stage 0; a transfer is "send 0 to 1"


class Prediction(_Part):
    step_time_s: float
    memory_bytes_per_device: int
    usable_memory_bytes: int
    memory_parts_bytes: dict[str, int]
    feasible: bool
    bytes_by_collective: dict[str, int]
    sends: tuple[SentPart, ...] = ()  # the summands of `bytes_by_collective`
    compute_figures: dict[str, float] = {}  # "measured", "calibrated", "analytic" -> share of the compute seconds


class TimedStep(_Part):
    """A strategy that was run on the devices at hand."""

    strategy: str
    predicted_s: float
    measured_s: float


class Provenance(_Part):
    versions: dict[str, str] = {}
    planner: str = ""
    space: str = "soap"  # that was searched
    seed: int = 0
    num_proposals: int = 0
    search_s: float = 0.0
    baselines: dict[str, float | None] = {}
    notes: tuple[str, ...] = ()
    verified: tuple[TimedStep, ...] = ()  # --verify-top


class Plan(_Part):
    """One plan. `Plan.load(path)` reads and checks the file; `plan.save(path)` writes it atomically."""

    schema_version: Literal[1] = 1
    model: ModelSource | None = None
    graph: GraphId
    topology: dict[str, Any]
    mesh: MeshPart
    executable: bool = True  # the operators of every loop are on the same devices; derived from `axes`
    unroll: bool = False  # scans were planned step by step
    fixed: dict[str, str] = {}
    profile: dict[str, Any] | None = None  # the measurements that it was costed with (costs/profile.py)
    operators: dict[str, OperatorPart]
    arguments: dict[str, str]
    results: dict[str, str]
    prediction: Prediction
    provenance: Provenance = Provenance()
    # Stages of micro-batches: `axes` are those of each stage's own mesh then, and specs are made when it runs.
    pipeline: Pipeline | None = None

    @property
    def num_devices(self) -> int:
        return int(np.prod(self.mesh.axis_sizes))

    @property
    def pinned(self) -> tuple[str, ...]:
        """The operators that run on a part of the devices."""
        return tuple(name for name, part in self.operators.items() if any(v.startswith("pin(") for v in part.axes.values()))

    def dumps(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=False) + "\n"

    @property
    def plan_sha256(self) -> str:
        """Over the canonical JSON without provenance and measurements."""
        data = self.model_dump(mode="json", exclude={"provenance", "profile"})
        return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def save(self, path: str) -> None:
        write_text_atomic(path, self.dumps())

    @classmethod
    def load(cls, path: str) -> Plan:
        """Reads a plan file.

        Raises: SoapjaxError naming every place in the file that is not as expected.
        """
        return cls.loads(read_text(path, max_bytes=MAX_PLAN_BYTES), place=str(path))

    @classmethod
    def loads(cls, text: str, *, place: str = "plan") -> Plan:
        data = _parse(text, place)
        version = data.get("schema_version")
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise SoapjaxError(
                Problem(f"{place}: schema_version", str(version), f"at most {SCHEMA_VERSION}", "update soapjax, or plan anew")
            )
        try:
            return cls.model_validate(data)
        except pydantic.ValidationError as e:
            raise SoapjaxError(
                Problem(
                    f"{place}: {'.'.join(str(x) for x in error['loc'])}", repr(error.get("input"))[:80], error["msg"],
                    "restore this entry, or plan anew",
                )
                for error in e.errors()[:20]
            ) from None  # fmt: skip


def _parse(text: str, place: str) -> dict[str, Any]:
    depth = deepest = 0
    for c in text:
        if c in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif c in "]}":
            depth -= 1
    if deepest > _MAX_NESTING:
        raise SoapjaxError(Problem(place, f"nested {deepest} deep", "a plan file", "this file was not written by soapjax"))

    def no_constant(name: str) -> Any:
        raise SoapjaxError(Problem(place, name, "finite numbers", "replace it by a number, or plan anew"))

    def no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [k for k, _ in pairs]
        twice = sorted({k for k in keys if keys.count(k) > 1}) if len(set(keys)) != len(keys) else []
        if twice:
            raise SoapjaxError(Problem(f"{place}: {twice[0]}", "given twice", "each key once", "delete one of them"))
        return dict(pairs)

    try:
        data = json.loads(text, parse_constant=no_constant, object_pairs_hook=no_twice)
    except json.JSONDecodeError as e:
        raise SoapjaxError(
            Problem(f"{place}: line {e.lineno}, column {e.colno}", e.msg, "JSON", "restore the file, or plan anew")
        ) from None
    except SoapjaxError:
        raise
    except ValueError as e:  # a number with thousands of digits
        raise SoapjaxError(Problem(place, str(e), "a plan file", "this file was not written by soapjax")) from None
    if not isinstance(data, dict):
        raise SoapjaxError(Problem(place, type(data).__name__, "a JSON object", "this file was not written by soapjax"))
    return data


def format_spec(spec: Spec) -> str:
    return ", ".join("+".join(names) or "-" for names in spec)


def parse_spec(text: str) -> Spec:
    """The inverse of `format_spec`."""
    return tuple(tuple(n for n in part.strip().split("+") if n != "-") for part in text.split(",")) if text else ()


def make_plan(
    space: SearchSpace, topology: DeviceTopology, strategy: Strategy, used: np.ndarray, home: np.ndarray, stored: np.ndarray,
    prediction: Prediction, *, model: ModelSource | None = None, provenance: Provenance = Provenance(), unroll: bool = False,
    profile: dict[str, Any] | None = None, figures: Sequence[str] | None = None,
) -> Plan:  # fmt: skip
    """A plan from a strategy and the layouts that it implies.

    Args:
      used: int8 [U, A], layout of every access of every task but the updates, reads before writes, in task order.
      home: int8 [T, A], layout of every tensor.
      stored: int8 [P, A], storage layout of every parameter.
      profile: the measurements behind the prediction; `figures`: per operator where its seconds come from.
    """
    graph, mesh = space.graph, space.mesh
    names = mesh.axis_names

    def spec(layout: np.ndarray, rank: int) -> str:
        return format_spec(spec_of([int(x) for x in layout], rank=rank, axis_names=names))

    parts: dict[int, list[TaskPart]] = {n: [] for n in range(graph.num_operators)}
    u = 0
    for task in graph.tasks:
        if task.parameter >= 0:
            continue
        operands = [spec(used[u + k], len(a.dims)) for k, a in enumerate(task.reads)]
        results = [spec(home[a.tensor], len(a.dims)) for a in task.writes]
        u += len(task.reads) + len(task.writes)
        parts[task.operator].append(TaskPart(phase=PHASE_NAMES[task.phase], operands=tuple(operands), results=tuple(results)))
    operators = {}
    for n, op in enumerate(graph.operators):
        config = strategy.config(n, op, mesh, space.storages)
        operators[op.name] = OperatorPart(
            kind=op.kind, dims={d.name: d.size for d in op.dims}, axes=config.axes, storage=config.storage,
            figures="analytic" if figures is None else figures[n], tasks=tuple(parts[n]),
        )  # fmt: skip
    arguments, results = _leaf_specs(graph, home, stored, spec)
    return Plan(
        model=model,
        graph=GraphId(fingerprint=graph.fingerprint(), num_operators=graph.num_operators),
        topology=topology.to_dict(),
        mesh=MeshPart(axis_names=names, axis_sizes=mesh.axis_sizes, device_order=tuple(range(mesh.num_devices))),
        unroll=unroll,
        executable=_is_executable(graph, strategy),
        fixed={graph.in_paths[leaf]: arguments[graph.in_paths[leaf]] for leaf in sorted(space.fixed_layouts)},
        profile=profile,
        operators=operators,
        arguments=arguments,
        results=results,
        prediction=prediction,
        provenance=provenance,
    )


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


def _leaf_specs(graph: OperatorGraph, home, stored, spec) -> tuple[dict[str, str], dict[str, str]]:
    """Argument and result specs by path; a leaf that no task touches is replicated."""
    arguments: dict[str, str] = dict.fromkeys(graph.in_paths, "")
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
        for leaf in (parameter.leaf, *parameter.state_leaves):
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
    problems = []
    if found != wanted:
        value, expected = (f"{names} of {sizes}" for names, sizes in (found, wanted))
        remedy = f"restore it, or plan anew for {topology.num_devices} devices"
        problems.append(Problem(f"{place}: mesh", value, f"{expected}, the topology's", remedy))
    elif sorted(plan.mesh.device_order) != list(range(mesh.num_devices)):
        order, expected = str(plan.mesh.device_order), f"a permutation of 0 to {mesh.num_devices - 1}"
        problems.append(Problem(f"{place}: mesh.device_order", order, expected, "restore it, or plan anew"))
    if problems:
        raise SoapjaxError(problems)
    return topology, mesh


def strategy_of(plan: Plan, space: SearchSpace, *, place: str = "plan") -> Strategy:
    """The strategy that a plan's `axes` and `storage` name.

    Raises: SoapjaxError naming every operator, axis, dim and storage that does not fit the graph and the mesh.
    """
    graph, mesh = space.graph, space.mesh
    problems = []
    remedy = "restore the entry, or plan anew"
    for name in sorted(plan.operators.keys() - {o.name for o in graph.operators}):
        problems.append(Problem(f"{place}: operators.{name}", "an unknown operator", "an operator of this step", remedy))
    if tuple(plan.mesh.axis_names) != mesh.axis_names or tuple(plan.mesh.axis_sizes) != mesh.axis_sizes:
        problems.append(
            Problem(
                f"{place}: mesh",
                f"{plan.mesh.axis_names} of {plan.mesh.axis_sizes}",
                f"{mesh.axis_names} of {mesh.axis_sizes}",
                "plan anew for this topology",
            )
        )
    n = graph.num_operators
    strategy = Strategy(np.full((n, space.num_axes), REPLICATE, np.int8), np.zeros(n, np.int8))
    storages = {s.describe(mesh.axis_names): k for k, s in enumerate(space.storages)}
    for i, op in enumerate(graph.operators):
        part = plan.operators.get(op.name)
        if part is None:
            problems.append(Problem(f"{place}: operators.{op.name}", "missing", "an entry for every operator", remedy))
            continue
        dims = {d.name: k for k, d in enumerate(op.dims)} | {"replicate": REPLICATE}
        for a in sorted(part.axes.keys() - set(mesh.axis_names)):
            problems.append(
                Problem(f"{place}: operators.{op.name}.axes.{a}", "an unknown axis", f"one of {mesh.axis_names}", remedy)
            )
        for k, a in enumerate(mesh.axis_names):
            value = part.axes.get(a)
            choices = dims | ({f"pin({c})": PIN(c) for c in range(mesh.axis_sizes[k])} if space.may_pin(i) else {})
            if value not in choices:
                problems.append(
                    Problem(f"{place}: operators.{op.name}.axes.{a}", repr(value), " or ".join(choices), "choose one of these")
                )
            else:
                strategy.axes[i, k] = choices[value]
        if part.storage not in storages:
            problems.append(
                Problem(
                    f"{place}: operators.{op.name}.storage",
                    repr(part.storage),
                    " or ".join(map(repr, storages)),
                    "choose one of these",
                )
            )
        else:
            strategy.storage[i] = storages[part.storage]
    problems += [p._replace(place=f"{place}: {p.place}") for p in space.violations(strategy)] if not problems else []
    if problems:
        raise SoapjaxError(problems)
    return strategy
