"""A step that spans several processes: one plan, one program, compiled everywhere before anyone runs it.

Rank 0 plans and publishes; then two checks (agreement.py), each a barrier with a time-out that names who is missing:

    train_step#2/plan       the plan, the graph of each rank's own step, topology, devices, versions
    train_step#3/program    the lowered program, or the list of programs and transfers with the plans inside
    train_step#3/compiled   nothing to compare; gloo gives the ranks 30 s to meet in the first collective, compiling may take longer
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from soapjax.execute.agreement import agree, made_by_first, sha256
from soapjax.execute.coordination import store
from soapjax.graph.build import build_graph
from soapjax.graph.trace import TracedStep
from soapjax.strategy.plan import Plan
from soapjax.topology import DeviceTopology

TIMEOUT_S = 300.0  # for a rank to come; compiling may take as long on another
PLANNING_S = 3600.0  # beyond the seconds that the search was given
VERSIONS = ("jax", "jaxlib", "numpy", "soapjax")
_sequence = itertools.count(1)  # every process makes the same calls in the same order


class Agreeable(Protocol):
    """`CompiledStep` and `StreamStep`."""

    def to_agree(self, *args: Any) -> tuple[dict[str, str], Callable[[], Any]]: ...


def spans_processes(devices: Sequence[Any] | None) -> bool:
    """Whether devices (all by default) belong to several processes."""
    if devices is None:
        return jax.process_count() > 1
    return any(d.process_index != jax.process_index() for d in devices)


def planned_by_first(name: str, search: Callable[[], Plan], *, seconds: float | None) -> Plan:
    """The plan that rank 0 finds, on all ranks.

    Raises: SoapjaxError, on all ranks, where the search does; or where rank 0 does not come.
    """
    key = f"{name}#{next(_sequence)}"
    text = made_by_first(
        store(), f"{key}/planning", lambda: canonical(search()), timeout_s=TIMEOUT_S, making_s=PLANNING_S + (seconds or 0.0)
    )
    return Plan.loads(text, place=f"rank 0's plan of {name}")


def canonical(plan: Plan) -> str:
    return json.dumps(plan.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


def agree_on_plan(name: str, plan: Plan, step: TracedStep) -> None:
    """Raises: SoapjaxError on all ranks where one has another plan, graph, topology, device or version."""
    graph, _ = build_graph(step)
    kinds = sorted({d.device_kind for d in jax.local_devices()})
    fields = {
        "plan": plan.plan_sha256,
        "graph": graph.fingerprint(),
        "topology": DeviceTopology.from_dict(plan.topology).fingerprint(),
        "devices": f"{jax.local_device_count()} of {jax.device_count()}: {', '.join(kinds)}",
    } | {f"versions.{p}": _version(p) for p in VERSIONS}  # fmt: skip
    agree(
        store(), f"{name}#{next(_sequence)}/plan", fields, timeout_s=TIMEOUT_S,
        details=lambda: plan.model_dump(mode="json", exclude={"provenance"}),
    )  # fmt: skip


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def agree_on_program(name: str, step: Agreeable, args: Sequence[Any]) -> None:
    """Lowers and compiles the step for `args`; returns when all ranks have, with the same programs.

    Raises: SoapjaxError on all ranks where the programs differ, or one does not come.
    """
    key = f"{name}#{next(_sequence)}"
    fields, compile_here = step.to_agree(*args)
    agree(store(), f"{key}/program", {k: sha256(text) for k, text in fields.items()}, timeout_s=TIMEOUT_S)
    compile_here()
    agree(store(), f"{key}/compiled", {}, timeout_s=TIMEOUT_S)
