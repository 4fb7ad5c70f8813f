"""A step that spans several processes: one plan, one program, compiled everywhere before anyone runs it.

Rank 0 plans and publishes, between checks (agreement.py), each a barrier with a time-out that names who is missing:

    train_step#1/settings   what JAX and the compiler were told that changes numbers
    train_step#2/plan       the plan, the graph of each rank's own step, topology, devices, versions
    train_step#3/program    the lowered program, or the list of programs and transfers with the plans inside
    train_step#3/compiled   nothing to compare; gloo gives the ranks 30 s to meet in the first collective, compiling may take longer
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax

from soapjax.execute.processes import membership
from soapjax.execute.processes.agreement import agree, made_by_first, sha256
from soapjax.execute.processes.calls import HERE, WAITING
from soapjax.execute.processes.coordination import store
from soapjax.execute.processes.settings import settings_of_numbers
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import TracedStep
from soapjax.helpers.canonical_json import canonical
from soapjax.strategy.plan import Plan
from soapjax.topology import DeviceTopology

TIMEOUT_S = 300.0  # for a rank to come; tracing may take as long on another
COMPILING_S = 3600.0  # the watch looks after those that compile
SILENCE_S = 60.0  # where the job was started by jax.distributed alone
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


@contextlib.contextmanager
def call(name: str) -> Iterator[None]:
    """A call that all ranks make of a step whose devices belong to several: counted, and watched (watch.py)."""
    membership.start_by_store(SILENCE_S, TIMEOUT_S)
    with HERE.call(name):
        yield


def runs() -> None:
    """From here on the call in progress only runs."""
    HERE.run(on_cpu=jax.local_devices()[0].platform == "cpu")


def agree_on_settings(name: str) -> None:
    """Raises: SoapjaxError on all ranks where one has other settings that change numbers or programs."""
    _agree(f"{name}#{next(_sequence)}/settings", settings_of_numbers(), timeout_s=TIMEOUT_S)


def _agree(key: str, fields: dict[str, str], **options: Any) -> None:
    with HERE.doing(f"{WAITING} all at {key}"):
        agree(store(), key, fields, **options)


def planned_by_first(name: str, search: Callable[[], Plan], *, seconds: float | None) -> Plan:
    """The plan that rank 0 finds, on all ranks.

    Raises: SoapjaxError, on all ranks, where the search does; or where rank 0 does not come.
    """
    key = f"{name}#{next(_sequence)}"

    def make() -> str:
        with HERE.doing("planning"):
            return canonical(search().model_dump(mode="json"))

    with HERE.doing(f"{WAITING} rank 0's plan"):
        text = made_by_first(
            store(), f"{key}/planning", make, timeout_s=TIMEOUT_S, making_s=PLANNING_S + (seconds or 0.0)
        )  # fmt: skip
    return Plan.loads(text, place=f"rank 0's plan of {name}")


class Measured:
    """Plans that are run to be measured: rank 0 says which, one after the other, and all ranks run each.

    Made by all ranks at the same place. `seconds` are those that rank 0 searches for.
    """

    def __init__(self, name: str, *, seconds: float | None):
        self._name, self._key = name, f"{name}#{next(_sequence)}/measured"
        self._searching_s, self._numbers = PLANNING_S + (seconds or 0.0), itertools.count(1)

    def announce(self, plan: Plan | None) -> None:
        """Rank 0 is about to run `plan`; None where no further one follows."""
        self._next("" if plan is None else canonical(plan.model_dump(mode="json")))

    def follow(self, run: Callable[[Plan], None]) -> None:
        """Runs what rank 0 announces, until it has no more; nothing on rank 0."""
        while store().rank and (text := self._next("")):
            run(Plan.loads(text, place=f"what rank 0 measures of {self._name}"))

    def _next(self, text: str) -> str:
        with HERE.doing(f"{WAITING} rank 0's next plan to measure"):
            key = f"{self._key}{next(self._numbers)}"
            return made_by_first(store(), key, lambda: text, timeout_s=self._searching_s, making_s=TIMEOUT_S)


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
    _agree(
        f"{name}#{next(_sequence)}/plan", fields, timeout_s=TIMEOUT_S,
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
    with HERE.doing("lowering"):
        fields, compile_here = step.to_agree(*args)
    _agree(f"{key}/program", {k: sha256(text) for k, text in fields.items()} | settings_of_numbers(), timeout_s=TIMEOUT_S)
    with HERE.doing("compiling"):
        compile_here()
    _agree(f"{key}/compiled", {}, timeout_s=COMPILING_S)
