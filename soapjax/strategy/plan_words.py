"""A plan in the words of others, where they have words for it: Flax's logical axis rules, MaxText's degrees of parallelism.

Both say one thing per *name* (or per mesh axis) for the whole model; a plan says one per operator. Where operators differ there
are no such words, and the error names them.

A `Plan`, which has both as methods, is no import here.
"""

from __future__ import annotations

import re
from typing import Any

from soapjax.errors import Problem, SoapjaxError
from soapjax.topology import DeviceTopology, factor_mesh

SAMPLE = "sample"
_REMEDY = "run the plan itself with soap_shard(plan=...), or plan with planner='fsdp' or 'data_parallel'"


def logical_axis_rules(plan: Any) -> list[tuple[str, tuple[str, ...] | None]]:
    """(logical name, mesh axes or None) pairs for `flax.linen.logical_axis_rules`, from the names in the parameters' metadata.

    "batch" stands for the samples of all activations, beside the names that the model gives its parameters' dims.

    Raises: SoapjaxError where the model names nothing, and naming arguments and operators that one rule cannot serve.
    """
    if not plan.logical_axes:
        remedy = "annotate parameters (flax.linen.with_logical_partitioning), or use plan.arguments: the spec of every leaf"
        raise SoapjaxError(Problem("plan: logical_axes", "none", "logical names in the model's metadata", remedy))
    rules: dict[str, tuple[str, ...]] = {}
    first: dict[str, str] = {}
    problems = []
    for path, names in plan.logical_axes.items():
        text = plan.arguments[path]
        spec = [tuple(n for n in part.strip().split("+") if n != "-") for part in text.split(",")] if text else []
        for d, name in enumerate(n.strip() for n in names.split(",")):
            axes = spec[d] if d < len(spec) else ()
            if name == "-":
                continue
            if rules.setdefault(name, axes) != axes:
                value = f"{name!r} split over {axes or 'nothing'}"
                expected = f"{rules[name] or 'no axes'}, as in {first[name]}"
                problems.append(Problem(f"{path}{_operators_at(plan, path)}", value, expected, _REMEDY))
            first.setdefault(name, path)
    batch: tuple[str, ...] | None = None
    owner = ""
    for name, part in plan.operators.items():
        if part.dims.get(SAMPLE, 1) > 1:
            axes = tuple(a for a in plan.mesh.axis_names if part.axes.get(a) == SAMPLE)
            if batch is not None and axes != batch:
                value, expected = f"its samples split over {axes or 'nothing'}", f"{batch or 'no axes'}, as in {owner}"
                problems.append(Problem(f"operator {name}", value, expected, _REMEDY))
            elif batch is None:
                batch, owner = axes, name
    if problems:
        raise SoapjaxError(problems)
    return [("batch", batch or None), *((name, axes or None) for name, axes in rules.items() if name != "batch")]


def _operators_at(plan: Any, path: str) -> str:
    dotted = f".{path}."
    found = [name for name in plan.operators if "." + name.replace("/", ".") + "." in dotted]
    return f" (operator {max(found, key=len)})" if found else ""


def to_maxtext(plan: Any) -> dict[str, int]:
    """MaxText's degrees: `ici_data_parallelism`, `ici_fsdp_parallelism`, `ici_tensor_parallelism`, and `dcn_...` between hosts.

    Every mesh axis must be one of these for all operators: it splits samples and nothing that is stored (data), samples and stored
    parameters (fsdp), or parameters' dims and never samples (tensor). Which products are split by columns and which by rows is
    MaxText's own choice then, and so is whether a gathered parameter is kept for the backward pass.

    Raises: SoapjaxError naming the operators that differ.
    """
    mesh = factor_mesh(DeviceTopology.from_dict(plan.topology, place="plan: topology"))
    degrees = {f"{where}_{kind}_parallelism": 1 for where in ("dcn", "ici") for kind in ("data", "fsdp", "tensor")}
    problems = []
    for axis, size, level in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_levels, strict=True):
        kinds: dict[str, list[str]] = {}
        for name, part in plan.operators.items():
            if kind := _kind(part, axis):
                kinds.setdefault(kind, []).append(name)
        if set(kinds) == {"data", "fsdp"} and not any("param" in d for n in kinds["data"] for d in plan.operators[n].dims):
            kinds = {"fsdp": kinds["fsdp"]}  # what has no parameters stores none
        if len(kinds) != 1 or "other" in kinds:
            usual = max((k for k in kinds if k != "other"), key=lambda k: len(kinds[k]), default="data")
            for kind, names in kinds.items():
                if kind != usual:
                    shown = f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
                    value = f"{plan.operators[names[0]].axes[axis]}, stored {plan.operators[names[0]].storage}"
                    expected = f"{usual} parallelism on axis {axis}, as most operators"
                    problems.append(Problem(f"operators {shown}", value, expected, _REMEDY))
        else:
            where = "ici" if level == max(mesh.axis_levels) else "dcn"
            degrees[f"{where}_{next(iter(kinds))}_parallelism"] *= size
    if problems:
        raise SoapjaxError(problems)
    return degrees


def _kind(part: Any, axis: str) -> str:
    """What an axis is to an operator: "data", "fsdp", "tensor"; "other" where that has no name; "" where it says nothing."""
    value = part.axes.get(axis, "replicate")
    stored = re.match(r"sharded\(([^)]*)\)", part.storage)
    if value == SAMPLE:
        return "fsdp" if stored and axis in stored[1].split(",") else "data"
    if value.startswith(("param", "attr")):
        return "tensor"
    if value == "replicate":  # a norm between split products, or an operator of no samples
        return "other" if part.kind in ("dot", "conv") and max(part.dims.values(), default=1) > 1 else ""
    return "other"
