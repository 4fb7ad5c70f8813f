"""soapjax plans how a JAX training step is split over devices, and runs it so.

A name is imported when it is first used: `soapjax --help` and the handling of Ctrl-C come before JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soapjax.api import SoapShard, soap_shard
    from soapjax.errors import InfeasibleError, Problem, SoapjaxError
    from soapjax.graph.passes.phases import value_and_grad
    from soapjax.graph.trace.tracing import trace
    from soapjax.planning.entry import Planned, plan
    from soapjax.planning.pipelining.staging import plan_pipeline
    from soapjax.planning.plan_files import load_plan
    from soapjax.search.objective import Objective
    from soapjax.search.planners import PLANNERS
    from soapjax.strategy.plan import Plan
    from soapjax.topology import DeviceTopology, load_topology

__all__ = [
    "PLANNERS",
    "DeviceTopology",
    "InfeasibleError",
    "Objective",
    "Plan",
    "Planned",
    "Problem",
    "SoapShard",
    "SoapjaxError",
    "load_plan",
    "load_topology",
    "plan",
    "plan_pipeline",
    "soap_shard",
    "trace",
    "value_and_grad",
]

_HOMES = {
    "PLANNERS": "search.planners",
    "DeviceTopology": "topology",
    "InfeasibleError": "errors",
    "Objective": "search.objective",
    "Plan": "strategy.plan",
    "Planned": "planning.entry",
    "Problem": "errors",
    "SoapShard": "api",
    "SoapjaxError": "errors",
    "load_plan": "planning.plan_files",
    "load_topology": "topology",
    "plan": "planning.entry",
    "plan_pipeline": "planning.pipelining.staging",
    "soap_shard": "api",
    "trace": "graph.trace.tracing",
    "value_and_grad": "graph.passes.phases",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'soapjax' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"soapjax.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
