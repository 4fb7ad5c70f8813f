"""The plan file: what was decided, how every tensor is laid out, and what it was predicted to cost.

Canonical JSON with a schema version. A person reads it, diffs it and edits the `axes` and `storage`
of an operator; specs and prediction are derived, and made anew when the file is loaded.
Specs are written per tensor dim, `-` for a dim that is not split: `"h0+d0, -, d1"`.

An axis value of an operator is one of its dims, "replicate", or "pin(i)": the operator runs only where that axis' coordinate
is i. All axes pinned are one device. The specs of a pinned operator hold among the devices that take part: an axis that is
pinned splits nothing and stands in no spec.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pydantic

from soapjax.errors import Problem, SoapjaxError
from soapjax.graph.figures import figures_of, figures_text
from soapjax.graph.operators import OperatorGraph
from soapjax.helpers.canonical_json import sha256_of
from soapjax.helpers.file_numbers import read_float, read_int
from soapjax.helpers.files import read_text, write_text_atomic
from soapjax.strategy import plan_words
from soapjax.strategy.layout import Spec
from soapjax.strategy.pipeline import Pipeline, Stage

SCHEMA_VERSION = 1
MAX_PLAN_BYTES = 32 * 2**20  # some 20,000 operators
_MAX_NESTING = 32
TRACING = "unroll", "axis_name", "strip_constraints"
LATER = TRACING[1:]  # fields that older plans do not have: not written where they say nothing
_FIRST = ("schema_version", "model", "graph", "topology")  # in the file
_ON_A_MESH = ("operators", "arguments", "results")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


Seconds = Annotated[float, pydantic.Field(ge=0, le=1e15)]
StepSeconds = Annotated[float, pydantic.Field(gt=0, le=1e15)]
Bytes = Annotated[int, pydantic.Field(ge=0, le=2**63)]
Fraction = Annotated[float, pydantic.Field(ge=0, le=1 + 1e-6)]


class _Part(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("should be one line of printable characters")
    return text


_NAME = r"[^\W\d]\w*"
_Word = Annotated[str, pydantic.Field(max_length=200), pydantic.AfterValidator(_one_line)]
_SettingName = Annotated[str, pydantic.Field(max_length=200, pattern=f"^{_NAME}$")]


class ModelSource(_Part):
    """Where the step came from: `path` names a module with `make`, or `module:factory`.

    In a plan that is read it is a remark for people: nothing imports what it names, unless the user says so.
    """

    path: Annotated[str, pydantic.Field(max_length=200, pattern=rf"^{_NAME}(\.{_NAME})*(:{_NAME})?$")]
    settings: Annotated[dict[_SettingName, bool | int | float | _Word], pydantic.Field(max_length=100)] = {}


class GraphId(_Part):
    fingerprint: str
    num_operators: int
    figures_sha256: str = ""  # of `operator_graph`, as it stands in the file; "" in plans of older versions


class MeshPart(_Part):
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    device_order: tuple[int, ...]


class TaskPart(_Part):
    """Specs of one task's operands as used by it, and of its results as they are kept."""

    phase: str
    operands: tuple[str, ...] = ()
    results: tuple[str, ...] = ()


class OperatorCost(_Part):
    """What an operator is predicted to take of a step, on one device; rounded to four digits."""

    compute_s: Seconds
    communication_s: Seconds  # all link levels added up, hidden or not
    sent_bytes: Bytes
    memory_bytes: Bytes  # at the step's peak: its parameters with their optimizer state, its results and resharded operands
    flops: Annotated[float, pydantic.Field(ge=0, le=1e30)]  # of the whole operator, before it is split
    split_flops_share: Fraction  # 1: no FLOP of it is done on two devices, 0: every device does all


class OperatorPart(_Part):
    kind: str
    dims: dict[str, int] = {}  # name and size of what an axis may be assigned to, for those who edit
    axes: dict[str, str]  # mesh axis -> dim, "replicate" or "pin(i)"
    storage: str = "as used"
    recompute: bool = False  # what the backward pass reads of it is computed again there; in the file only where it is
    figures: str = "analytic"  # where its compute seconds come from: "measured", "calibrated" or "analytic", the weakest
    tasks: tuple[TaskPart, ...] = ()
    cost: OperatorCost | None = None  # None: written by an older version, or a pipeline's

    @pydantic.model_serializer(mode="wrap")
    def _as_data(self, to_data: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        data = to_data(self)
        return {k: v for k, v in data.items() if k != "recompute" or v}


class MeshPlan(_Part):
    """What holds on one mesh: what every operator does there, and how arguments and results lie. All that executing reads."""

    mesh: MeshPart
    operators: dict[str, OperatorPart]
    arguments: dict[str, str]
    results: dict[str, str]

    @property
    def num_devices(self) -> int:
        return int(np.prod(self.mesh.axis_sizes))

    @property
    def pinned(self) -> tuple[str, ...]:
        """The operators that run on a part of the devices."""
        return tuple(name for name, part in self.operators.items() if any(v.startswith("pin(") for v in part.axes.values()))

    @property
    def recomputed(self) -> frozenset[str]:
        """The operators that the backward pass computes again."""
        return frozenset(name for name, part in self.operators.items() if part.recompute)

    @property
    def mesh_plan_sha256(self) -> str:
        """Over the canonical JSON of what executing reads."""
        kept = set(MeshPlan.model_fields)
        return sha256_of(self.model_dump(mode="json", include=kept, exclude={"operators": {"__all__": {"cost", "figures"}}}))


class SentPart(_Part):
    """What each device sends in one step for one reason, in words that name the tensor."""

    task: int  # of the operator graph, in schedule order; their number stands for the step's end
    operator: str
    reason: str
    bytes: dict[str, Bytes]  # by collective
    program: str = ""  # of a pipeline: "forward 0", "backward 0", "update 0" of stage 0; a transfer is "send 0 to 1"


class StrategyFigures(_Part):
    """A strategy that a plan is compared with, as predicted by the same simulator."""

    step_time_s: StepSeconds
    without_overlap_s: StepSeconds
    split_flops_share: Fraction
    memory_bytes_per_device: Bytes
    sent_bytes: Bytes  # by each device in one step
    feasible: bool
    peak_sent_bytes: Bytes | None = None  # by the device that sends most; None in plans of older versions


class Prediction(_Part):
    step_time_s: StepSeconds
    memory_bytes_per_device: Bytes
    usable_memory_bytes: Bytes
    memory_parts_bytes: dict[str, Bytes]
    feasible: bool
    bytes_by_collective: dict[str, Bytes]
    sends: tuple[SentPart, ...] = ()  # the summands of `bytes_by_collective`
    compute_figures: dict[str, Fraction] = {}  # "measured", "calibrated", "analytic" -> share of the compute seconds
    # None in plans of older versions. If a device did one thing at a time, communicate or compute, on one link or another:
    without_overlap_s: StepSeconds | None = None
    split_flops_share: Fraction | None = None  # 1: no FLOP of the step is done on two devices, 0: every device does all
    peak_sent_bytes: Bytes | None = None  # in one step by the device that sends most; None in plans of older versions

    @property
    def hidden_communication_s(self) -> float | None:
        """Seconds of communication that are assumed to pass while the device computes, or sends over another link."""
        return None if self.without_overlap_s is None else max(self.without_overlap_s - self.step_time_s, 0.0)


class TimedStep(_Part):
    """A strategy that was run on the devices at hand."""

    strategy: str
    predicted_s: Seconds
    measured_s: Seconds


class CompiledFigures(_Part):
    """What the compiler made of a strategy, beside its prediction."""

    target: str  # the devices that it was compiled for
    step_time_s: Seconds  # predicted
    predicted_memory_bytes: Bytes  # per device, at the peak
    compiled_memory_bytes: Bytes
    available_memory_bytes: Bytes  # what it may take
    predicted_sent_bytes: dict[str, Bytes] = {}  # by each device in one step, by collective
    compiled_sent_bytes: dict[str, Bytes] = {}

    @property
    def fits(self) -> bool:
        return self.compiled_memory_bytes <= self.available_memory_bytes


class Provenance(_Part):
    versions: dict[str, str] = {}
    planner: str = ""
    space: str = "soap"  # that was searched
    objective: str = "time"  # that it was searched by, in words
    seed: int = 0
    num_proposals: int = 0
    search_s: Seconds = 0.0  # in no file since: the same search gives the same file, however long it takes
    baselines: dict[str, Seconds | None] = {}
    baseline_figures: dict[str, StrategyFigures] = {}  # of those that are known in full
    notes: tuple[str, ...] = ()
    verified: tuple[TimedStep, ...] = ()  # --verify-top
    compiled: tuple[CompiledFigures, ...] = ()  # --check compile: what did not fit, and last this plan

    def compiled_as(self, prediction: Prediction) -> CompiledFigures | None:
        """What the compiler made of this plan; None where nobody asked, or the plan was edited since."""
        last = self.compiled[-1] if self.compiled else None
        same = last is not None and last.predicted_memory_bytes == prediction.memory_bytes_per_device
        return last if same and last.predicted_sent_bytes in ({}, prediction.bytes_by_collective) else None


class Plan(MeshPlan):
    """One plan. `Plan.load(path)` reads and checks the file; `plan.save(path)` writes it atomically.

    In a plan of a pipeline every operator is told what to do on the mesh of its own stage, and arguments and results lie on that
    of the stage that holds them; `on_stages` gives the plan of each stage.
    """

    schema_version: Literal[1] = 1
    model: ModelSource | None = None
    graph: GraphId
    topology: dict[str, Any]
    executable: bool = True  # the operators of every loop are on the same devices; derived from `axes`
    unroll: bool | Literal["rows"] = False  # scans were planned step by step; "rows": and stacked state row by row
    axis_name: Annotated[tuple[_Word, ...], pydantic.Field(max_length=100)] = ()  # over which the step's own collectives go
    strip_constraints: bool = False  # the step's own sharding constraints were left out
    fixed: dict[str, str] = {}
    profile: dict[str, Any] | None = None  # the measurements that it was costed with (costs/measured/profile.py)
    logical_axes: dict[str, str] = {}  # the names that the model's own metadata gives an argument's dims: "embed, mlp"
    prediction: Prediction
    provenance: Provenance = Provenance()
    pipeline: Pipeline | None = None  # stages of micro-batches
    # Of a pipeline whose stages have several meshes: what of operators and arguments of other stages is read on each of them.
    elsewhere: tuple[MeshPlan, ...] = ()
    # What costs are made from, so that a plan is predicted anew without its step. None in plans of older versions.
    operator_graph: dict[str, Any] | None = pydantic.Field(default=None, repr=False)

    # What a notebook shows; soapjax/report/html.py, which may import this and not the reverse, says it.
    notebook_html: ClassVar[Callable[[Plan], str] | None] = None

    def _repr_html_(self) -> str | None:
        """For notebooks; None, and so the plain `repr`, where soapjax.report.html was not imported."""
        return None if Plan.notebook_html is None else Plan.notebook_html(self)

    def on_stages(self) -> list[MeshPlan]:
        """What holds on the mesh of every stage of a pipeline; stages with equal meshes share one plan."""
        plans: dict[MeshPart, MeshPlan] = {}
        for stage in self.pipeline.stages:
            if (mesh := _mesh_of(stage)) not in plans:
                found = [self, *(p for p in self.elsewhere if p.mesh == mesh)]  # the latter's entries go before
                layers = {name: {k: v for p in found for k, v in getattr(p, name).items()} for name in _ON_A_MESH}
                plans[mesh] = MeshPlan(mesh=mesh, **layers)
        return [plans[_mesh_of(stage)] for stage in self.pipeline.stages]

    def logical_axis_rules(self) -> list[tuple[str, tuple[str, ...] | None]]:
        """As Flax's `logical_axis_rules`, where one rule per name says the plan (soapjax/strategy/plan_words.py).

        Raises: SoapjaxError naming what it cannot serve.
        """
        return plan_words.logical_axis_rules(self)

    def to_maxtext(self) -> dict[str, int]:
        """As MaxText's degrees of parallelism, where every mesh axis is one of them for all operators.

        Raises: SoapjaxError naming the operators that differ.
        """
        return plan_words.to_maxtext(self)

    @property
    def tracing(self) -> dict[str, Any]:
        """How its step is traced: options of `soapjax.trace`."""
        return {name: getattr(self, name) for name in TRACING}

    def dumps(self) -> str:
        left_out: dict[str, Any] = {"operator_graph": True, "provenance": {"search_s"}}
        left_out |= {name: True for name in ("logical_axes", "elsewhere", *LATER) if not getattr(self, name)}
        data = self.model_dump(mode="json", exclude=left_out)
        text = json.dumps({name: data.pop(name) for name in _FIRST} | data, indent=1, sort_keys=False)
        if self.operator_graph is not None:
            text = text.removesuffix("\n}") + ',\n "operator_graph": ' + figures_text(self.operator_graph) + "\n}"
        return text + "\n"

    @property
    def plan_sha256(self) -> str:
        """Over the canonical JSON without provenance, measurements, names, and figures that only explain the prediction.

        The graph counts by its fingerprint.
        """
        beside = {"without_overlap_s", "split_flops_share", "peak_sent_bytes"}
        explaining = {"operators": {"__all__": {"cost"}}, "prediction": beside}
        graph = {"graph": {"figures_sha256"}, "operator_graph": True}
        left_out: dict[str, Any] = {"provenance": True, "profile": True, "logical_axes": True, **explaining, **graph}
        left_out |= {name: True for name in ("elsewhere", *LATER) if not getattr(self, name)}
        return sha256_of(self.model_dump(mode="json", exclude=left_out))

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


def _mesh_of(stage: Stage) -> MeshPart:
    order = tuple(range(math.prod(stage.mesh.values())))
    return MeshPart(axis_names=tuple(stage.mesh), axis_sizes=tuple(stage.mesh.values()), device_order=order)


def graph_parts(graph: OperatorGraph) -> Mapping[str, Any]:
    """What a plan says of its graph: the fields `graph` and `operator_graph`."""
    figures = figures_of(graph)
    sha256 = sha256_of(figures)
    found = GraphId(fingerprint=graph.fingerprint(), num_operators=graph.num_operators, figures_sha256=sha256)
    return {"graph": found, "operator_graph": figures}


def _parse(text: str, place: str) -> dict[str, Any]:
    depth = deepest = 0
    for c in text.encode("ascii", "replace").translate(None, _NO_BRACKETS):
        depth += 1 if c in b"[{" else -1
        deepest = max(deepest, depth)
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
        data = json.loads(
            text, parse_constant=no_constant, object_pairs_hook=no_twice, parse_float=read_float, parse_int=read_int
        )  # fmt: skip
    except json.JSONDecodeError as e:
        raise SoapjaxError(
            Problem(f"{place}: line {e.lineno}, column {e.colno}", e.msg, "JSON", "restore the file, or plan anew")
        ) from None
    except SoapjaxError:
        raise
    except ValueError as e:  # a number that nothing can be reckoned with
        raise SoapjaxError(Problem(place, str(e), "a plan file", "this file was not written by soapjax")) from None
    if not isinstance(data, dict):
        raise SoapjaxError(Problem(place, type(data).__name__, "a JSON object", "this file was not written by soapjax"))
    return data


def format_spec(spec: Spec) -> str:
    return ", ".join("+".join(names) or "-" for names in spec)


def parse_spec(text: str) -> Spec:
    """The inverse of `format_spec`."""
    return tuple(tuple(n for n in part.strip().split("+") if n != "-") for part in text.split(",")) if text else ()
