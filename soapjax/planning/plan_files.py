"""A plan that was written before, edited perhaps: its prediction and timeline made anew, with its step or from the file alone.

The file alone has the figures of the operator graph. Whoever wrote it could write any: they are checked as any input is, and
what is predicted from them is as good as they are. Nothing in a plan is called or imported.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from soapjax.costs.measured.profile import Profile, profile_of
from soapjax.errors import Problem, SoapjaxError
from soapjax.graph.figures import REMEDY, graph_of
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.build import build_graph
from soapjax.graph.recompute import recomputing
from soapjax.graph.trace.tracing import TracedStep
from soapjax.helpers.canonical_json import sha256_of
from soapjax.helpers.own_config import on_cpu
from soapjax.planning.entry import plan_of_strategy
from soapjax.planning.pipelining.pipeline_files import recost_pipeline
from soapjax.planning.pipelining.stage_times import StageTimes
from soapjax.planning.timelines import pipeline_spans, program_spans, trace_of
from soapjax.planning.user_shardings import check_constraints
from soapjax.report.perfetto import TraceEvent
from soapjax.search.problem import PlanningProblem
from soapjax.strategy.configs import Strategy
from soapjax.strategy.plan import Plan
from soapjax.strategy.plan_strategy import fixed_specs, strategy_of, topology_of
from soapjax.strategy.space import search_space
from soapjax.topology import DeviceTopology, FactorMesh


def load_plan(path: str, step: TracedStep, *, topology: DeviceTopology | None = None) -> Plan:
    """Reads a plan for a traced step and derives its specs and prediction anew, so that edits count.

    Raises: SoapjaxError where the plan does not fit the step or (if given) the topology.
    """
    return recost(Plan.load(path), step, place=str(path), topology=topology)


def recost(loaded: Plan, step: TracedStep, *, place: str = "plan", topology: DeviceTopology | None = None) -> Plan:
    """The plan with specs and prediction derived from its `axes` and `storage`."""
    return opened(loaded, step, place=place, topology=topology).plan


class Opened(NamedTuple):
    """A plan with what its prediction was made from."""

    plan: Plan
    graph: OperatorGraph
    problem: PlanningProblem | None  # of a plan of one program, or of placed operators
    strategy: Strategy | None
    stages: StageTimes | None  # of a pipeline


def opened(loaded: Plan, step: TracedStep, *, place: str = "plan", topology: DeviceTopology | None = None) -> Opened:
    """As `recost`, and keeps what it was made from."""
    if loaded.pipeline is not None:
        graph, _ = build_graph(recomputing(step, loaded.recomputed, place=place))
        own, _ = _checked(loaded, graph, place, topology)
        return _opened_pipeline(loaded, graph, own, place)
    with on_cpu():
        return _priced(loaded, problem_of_plan(loaded, step, place=place, topology=topology), place)


def opened_alone(loaded: Plan, *, place: str = "plan", topology: DeviceTopology | None = None) -> Opened:
    """As `opened`, without the step: from the figures of the operator graph that the plan carries.

    Raises: SoapjaxError where it has none, where they are damaged, or are those of no step.
    """
    try:
        graph = _graph_in(loaded, place)
        own, mesh = _checked(loaded, graph, place, topology)
        if loaded.pipeline is not None:
            found = _opened_pipeline(loaded, graph, own, place)
        else:
            with on_cpu():
                found = _priced(loaded, _problem(loaded, graph, own, mesh, place, None), place)
    except SoapjaxError:
        raise
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as e:
        # Figures that are possible one by one, and together of no graph that the tracer makes.
        value, expected = f"{type(e).__name__}: {str(e)[:150]}", "the figures of a traced step"
        raise SoapjaxError(Problem(f"{place}: operator_graph", value, expected, REMEDY)) from None
    step_time_s = found.plan.prediction.step_time_s
    if not 0 < step_time_s < math.inf:
        expected = "a step that takes time"
        raise SoapjaxError(Problem(f"{place}: operator_graph", f"a step of {step_time_s} s", expected, REMEDY))
    return found


def _graph_in(loaded: Plan, place: str) -> OperatorGraph:
    """The graph that a plan carries."""
    figures, named = loaded.operator_graph, loaded.graph
    at = f"{place}: operator_graph"
    if figures is None:
        expected, remedy = "the figures of its operator graph", "give the step with --model, or plan anew"
        raise SoapjaxError(Problem(at, "missing, as in plans of older versions", expected, remedy))
    if (sha256 := sha256_of(figures)) != named.figures_sha256:
        expected = f"{sha256[:12]}, that of the figures in the file"
        raise SoapjaxError(Problem(f"{place}: graph.figures_sha256", named.figures_sha256[:12] or "''", expected, REMEDY))
    graph = graph_of(figures, place=at)
    if graph.fingerprint() != named.fingerprint or graph.num_operators != named.num_operators:
        value = f"{named.fingerprint[:12]}, {named.num_operators} operators"
        expected = f"{graph.fingerprint()[:12]}, {graph.num_operators} operators, those of operator_graph"
        raise SoapjaxError(Problem(f"{place}: graph.fingerprint", value, expected, REMEDY))
    if edited := sorted(graph.recomputed ^ loaded.recomputed):
        remedy = "restore it, or give the step with --model: the figures in the file are of what was recomputed"
        problems = []
        for name in edited:
            value, expected = (str(name in of.recomputed).lower() for of in (loaded, graph))
            problems.append(Problem(f"{place}: operators.{name}.recompute", value, expected, remedy))
        raise SoapjaxError(problems)
    return graph


def _opened_pipeline(loaded: Plan, graph: OperatorGraph, topology: DeviceTopology, place: str) -> Opened:
    with on_cpu():
        made, stages = recost_pipeline(loaded, graph, topology, place=place)
    return Opened(made, graph, None, None, stages)


def reopened(loaded: Plan, other: Opened, *, place: str = "plan") -> Opened:
    """A plan for the same problem as one that is opened already."""
    return _priced(loaded, other.problem, place)


def _priced(loaded: Plan, problem: PlanningProblem, place: str) -> Opened:
    strategy = strategy_of(loaded, problem.space, place=place)
    made = plan_of_strategy(problem, strategy, model=loaded.model, provenance=loaded.provenance, tracing=loaded.tracing)
    kept = {"mesh": loaded.mesh, "logical_axes": loaded.logical_axes}
    return Opened(made.model_copy(update=kept), problem.graph, problem, strategy, None)


def problem_of_plan(
    loaded: Plan, step: TracedStep, *, place: str = "plan", topology: DeviceTopology | None = None,
    profile: Profile | None = None,
) -> PlanningProblem:  # fmt: skip
    """The problem that a plan solves, costed with the plan's own measurements, or with `profile`."""
    graph, _ = build_graph(recomputing(step, loaded.recomputed, place=place))
    own, mesh = _checked(loaded, graph, place, topology)
    check_constraints(step, mesh)
    return _problem(loaded, graph, own, mesh, place, profile)


def _problem(
    loaded: Plan, graph: OperatorGraph, own: DeviceTopology, mesh: FactorMesh, place: str, profile: Profile | None
) -> PlanningProblem:
    try:
        if profile is None and loaded.profile is not None:
            profile = profile_of(loaded.profile)
        space = search_space(graph, mesh, fixed=fixed_specs(loaded), pins=bool(loaded.pinned))
        return PlanningProblem.make(graph, space, own, profile)
    except SoapjaxError as e:
        raise SoapjaxError(p._replace(place=f"{place}: {p.place}") for p in e.problems) from None


def _checked(
    loaded: Plan, graph: OperatorGraph, place: str, topology: DeviceTopology | None
) -> tuple[DeviceTopology, FactorMesh]:  # fmt: skip
    """The plan's topology and mesh, where the plan is for the graph and (if given) the topology."""
    own, mesh = topology_of(loaded, place=place)
    problems = []
    if topology is not None and topology.fingerprint() != own.fingerprint():
        problems.append(
            Problem(
                f"{place}: topology", own.name, f"{topology.name}, which differs from the plan's", "plan anew for this topology"
            )
        )
    if graph.fingerprint() != loaded.graph.fingerprint:
        problems.append(
            Problem(
                f"{place}: graph.fingerprint", loaded.graph.fingerprint[:12],
                f"{graph.fingerprint()[:12]}, this step's "
                f"({graph.num_operators} operators, the plan has {loaded.graph.num_operators})",
                "use the plan with the model and sizes that it was made for, or plan anew",
            )
        )  # fmt: skip
    if problems:
        raise SoapjaxError(problems)
    return own, mesh


def timeline_events(opened: Opened) -> list[TraceEvent]:
    """What runs when in the simulation of a plan: a track per device, and per device and level of links."""
    topology, _ = topology_of(opened.plan)
    if opened.stages is not None:
        return trace_of(pipeline_spans(opened.stages.timeline, topology), topology)
    with on_cpu():
        simulator, strategy = opened.problem.simulator, opened.strategy
        return trace_of(program_spans(simulator, strategy, simulator.timeline(strategy)), topology)
