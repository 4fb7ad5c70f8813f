"""soapjax plans how a JAX training step is split over devices, and runs it so."""

from soapjax.api import SoapShard, soap_shard
from soapjax.errors import InfeasibleError, Problem, SoapjaxError
from soapjax.graph.phases import value_and_grad
from soapjax.graph.trace import trace
from soapjax.plan_files import load_plan
from soapjax.planning import Planned, plan, plan_pipeline
from soapjax.search.planners import PLANNERS
from soapjax.strategy.plan import Plan
from soapjax.topology import DeviceTopology, load_topology

__all__ = [
    "PLANNERS",
    "DeviceTopology",
    "InfeasibleError",
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
