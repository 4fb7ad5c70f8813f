"""A plan that was written before, edited perhaps, with the step that it is for: its prediction and timeline made anew."""

from __future__ import annotations

from typing import NamedTuple

from soapjax.costs.profile import Profile, profile_of
from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.stream import Event
from soapjax.graph.build import build_graph
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.trace import TracedStep
from soapjax.planning import on_cpu, plan_of_strategy
from soapjax.search.problem import PlanningProblem
from soapjax.stage_plans import StageTimes, recost_pipeline
from soapjax.strategy.plan import Plan, parse_spec
from soapjax.strategy.plan_strategy import strategy_of, topology_of
from soapjax.strategy.space import search_space
from soapjax.strategy.strategy import Strategy
from soapjax.timelines import pipeline_events, spmd_events
from soapjax.topology import DeviceTopology, FactorMesh
from soapjax.user_shardings import check_constraints


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
        graph, own, _ = _checked(loaded, step, place, topology)
        with on_cpu():
            made, stages = recost_pipeline(loaded, graph, own, place=place)
        return Opened(made, graph, None, None, stages)
    with on_cpu():
        return _priced(loaded, problem_of_plan(loaded, step, place=place, topology=topology), place)


def reopened(loaded: Plan, other: Opened, *, place: str = "plan") -> Opened:
    """A plan for the same problem as one that is opened already."""
    return _priced(loaded, other.problem, place)


def _priced(loaded: Plan, problem: PlanningProblem, place: str) -> Opened:
    strategy = strategy_of(loaded, problem.space, place=place)
    made = plan_of_strategy(problem, strategy, model=loaded.model, provenance=loaded.provenance, unroll=loaded.unroll)
    kept = {"mesh": loaded.mesh, "logical_axes": loaded.logical_axes}
    return Opened(made.model_copy(update=kept), problem.graph, problem, strategy, None)


def problem_of_plan(
    loaded: Plan, step: TracedStep, *, place: str = "plan", topology: DeviceTopology | None = None,
    profile: Profile | None = None,
) -> PlanningProblem:  # fmt: skip
    """The problem that a plan solves, costed with the plan's own measurements, or with `profile`."""
    graph, own, mesh = _checked(loaded, step, place, topology)
    check_constraints(step, mesh)
    fixed = {path: parse_spec(spec) for path, spec in loaded.fixed.items()}
    try:
        if profile is None and loaded.profile is not None:
            profile = profile_of(loaded.profile)
        return PlanningProblem.make(graph, search_space(graph, mesh, fixed=fixed, pins=bool(loaded.pinned)), own, profile)
    except SoapjaxError as e:
        raise SoapjaxError(p._replace(place=f"{place}: {p.place}") for p in e.problems) from None


def _checked(
    loaded: Plan, step: TracedStep, place: str, topology: DeviceTopology | None
) -> tuple[OperatorGraph, DeviceTopology, FactorMesh]:
    """The step's graph and the plan's topology and mesh, where the plan is for them."""
    own, mesh = topology_of(loaded, place=place)
    problems = []
    if topology is not None and topology.fingerprint() != own.fingerprint():
        problems.append(
            Problem(
                f"{place}: topology", own.name, f"{topology.name}, which differs from the plan's", "plan anew for this topology"
            )
        )
    graph, _ = build_graph(step)
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
    return graph, own, mesh


def timeline_events(opened: Opened) -> list[Event]:
    """What runs when in the simulation of a plan: a track per device, and per device and level of links."""
    with on_cpu():
        if opened.stages is not None:
            topology, _ = topology_of(opened.plan)
            return pipeline_events(opened.stages.timeline, topology)
        return spmd_events(opened.problem.simulator, opened.strategy)
