"""From a step function to a plan of one program over all devices, or of placed operators: trace, search, and what the plan says
of how it was found. Of stages and micro-batches that is planning/pipelining/staging.py.
"""

from __future__ import annotations

import importlib.metadata
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from soapjax.costs.by_operator import operator_costs
from soapjax.costs.measured.profile import Profile, carried
from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.compiled.timing import time_steps
from soapjax.execute.spmd.compiled_step import CompiledStep
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.build import build_graph
from soapjax.graph.recompute import Recomputation
from soapjax.graph.trace.tracing import TracedStep, argument_names, trace
from soapjax.helpers import interrupts
from soapjax.helpers.own_config import on_cpu, own_configuration
from soapjax.helpers.sizes import size
from soapjax.planning.compile_check import checked, compiled_plan, devices_to_compile_for
from soapjax.planning.early_programs import begin_programs
from soapjax.planning.page_data import extras_of
from soapjax.planning.profiling import compute_figures
from soapjax.planning.remarks import dispatch_remarks, repeated_remarks, structure_remarks
from soapjax.planning.request import PlanRequest, Understood, takes_options
from soapjax.planning.searching import Search, Searched
from soapjax.planning.user_shardings import check_constraints, logical_axes, user_layouts
from soapjax.planning.verify_top import measured_best, require_real_devices, shortlist
from soapjax.report.html import framed, page
from soapjax.search.front import FrontPoint
from soapjax.search.objective import LEAST_VIOLATING, TIME, Objective
from soapjax.search.planners import get_planner
from soapjax.search.problem import Evaluation, PlanningProblem, SearchResult
from soapjax.search.recomputation import Recomputing
from soapjax.steps.call_checks import check_planned
from soapjax.strategy.configs import Strategy
from soapjax.strategy.layout import Spec
from soapjax.strategy.plan import CompiledFigures, ModelSource, Plan, Provenance, TimedStep
from soapjax.strategy.plan_strategy import make_plan, mesh_plan
from soapjax.strategy.space import has_pins, search_space
from soapjax.topology import DeviceTopology, factor_mesh

DEFAULT_PROPOSALS = 100_000
OF_PIPELINES = "pipeline", "microbatches", "stages", "microbatch_reduction"


class Planned(NamedTuple):
    """What planning found: the plan, and what it was chosen among."""

    plan: Plan
    result: SearchResult
    baselines: dict[str, SearchResult]
    problem: PlanningProblem
    step: TracedStep
    front: tuple[FrontPoint, ...] = ()  # of time, communication and memory, of all that was judged, where `pareto` asked for it
    program: CompiledStep | None = None  # the plan's, where a check compiled it
    left_s: float = math.inf  # of the seconds that were asked for; below 0 where it took longer

    @property
    def graph(self) -> OperatorGraph:
        return self.problem.graph

    def _repr_html_(self) -> str:
        """For notebooks: the plan's tables, and folded under them the page of `soapjax report`."""
        with on_cpu():
            return framed(self.plan, page(self.plan, extras_of(self.problem.simulator, self.result.best.strategy)))


@takes_options(*OF_PIPELINES)
def plan(fn: Callable[..., Any], *args: Any, **options: Any) -> Planned:
    """Plans `fn(*args)` for a topology. Nothing of the model is allocated; `args` may be `jax.ShapeDtypeStruct`s.

    Options are those of `PlanRequest` (soapjax/planning/request.py), those of pipelines excepted.

    Raises: SoapjaxError for every input that does not fit; InfeasibleError where no plan fits as compiled.
    """
    return plan_one_program(PlanRequest(**options), fn, *args)


def plan_one_program(request: PlanRequest, fn: Callable[..., Any], *args: Any, kept: float = 0.0) -> Planned:
    """As `plan`; of the seconds `kept` is left where no baseline fits the devices."""
    asked, remarks = request.understood(fn)
    topology, looks = asked.topology, asked.check == "compile"
    if looks:
        to_compile_for = devices_to_compile_for(topology, asked.devices)
        asked = asked.but(topology=topology.usable_up_to(topology.device.available_memory_bytes))
    if asked.verify_top:
        require_real_devices(topology, jax.devices() if asked.devices is None else list(asked.devices))
    planner = get_planner(asked.planner, space=asked.space)
    given = given_arguments(asked, fn, args)
    if not has_pins(asked.space):
        begin_programs(len(jax.tree.leaves(given)), asked.topology, walks=asked.planner == "mcmc")
    step = trace(fn, *args, **asked.tracing)
    deadline = math.inf if asked.seconds is None else time.monotonic() + asked.seconds
    axis_names = factor_mesh(topology).axis_names
    layouts = user_layouts(given, step.in_paths, asked.fixed, axis_names=axis_names, rules=asked.logical_axis_rules)
    begin = time.monotonic()
    problem = _problem_of(asked, step, layouts)
    making_s = time.monotonic() - begin
    if asked.pareto or not asked.objective.is_time:
        problem = problem.keeping_front()
    remarks = (*remarks, *structure_remarks(step, problem.graph))
    run = Search(
        name=asked.planner, planner=planner, seed=asked.seed, proposals=_proposals(asked), deadline=deadline,
        progress=asked.progress, simplicity=asked.simplicity / 100, recomputing=_recomputing(asked, step, layouts, making_s),
        may_go_on=looks, kept=kept,
    )  # fmt: skip

    def plan_of(found: Searched, **more: Any) -> Plan:
        return plan_of_strategy(found.problem, found.result.best.strategy, model=asked.model, tracing=asked.tracing_in_plan, **more)

    program: CompiledStep | None = None
    compiled: tuple[CompiledFigures, ...] = ()
    table: tuple[TimedStep, ...] = ()
    with on_cpu():
        found = run(problem)
        if looks and found.result.stopped_by != "interrupted":
            found, compiled, program = checked(
                run, found, plan_of, lambda p: compiled_plan(step, p, to_compile_for, asked.donate)
            )  # fmt: skip
        if asked.verify_top and found.result.stopped_by != "interrupted":
            found, table, notes = _verified(asked, found, step, jax.tree_util.tree_leaves(given))
            remarks = (*remarks, *notes)
            program = None  # it may be another strategy's
        best = found.result.best
        remarks = (
            *remarks, *repeated_remarks(found.problem, best.strategy),
            *dispatch_remarks(found.problem, best.strategy, best.step_time_s),
        )  # fmt: skip
        made = plan_of(found, provenance=_provenance(asked, found, remarks, table, compiled))
    if names := logical_axes(given, step.in_paths, axis_names):
        made = made.model_copy(update={"logical_axes": names})
    front = found.problem.front.points() if asked.pareto else ()
    left_s = deadline - time.monotonic()
    return Planned(
        plan=made, result=found.result, baselines=found.baselines, problem=found.problem, step=step, front=front, program=program,
        left_s=left_s,
    )  # fmt: skip


def given_arguments(asked: Understood, fn: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """The arguments that are no constants.

    Raises: SoapjaxError naming what cannot be planned for: leaves that are no arrays, an empty batch.
    """
    static = {i % len(args) for i in asked.static_argnums} if args else set()
    named = [(n, a) for i, (n, a) in enumerate(zip(argument_names(fn, len(args)), args, strict=True)) if i not in static]
    given = [a for _, a in named]
    check_planned(given, [n for n, _ in named])
    return given


def _proposals(asked: Understood) -> int | None:
    return DEFAULT_PROPOSALS if asked.proposals is None and asked.seconds is None else asked.proposals


def _problem_of(asked: Understood, step: TracedStep, layouts: Mapping[str, Spec]) -> PlanningProblem:
    return planning_problem(step, asked.topology, layouts, space=asked.space, profile=asked.profile, objective=asked.objective)


def _recomputing(
    asked: Understood, step: TracedStep, layouts: Mapping[str, Spec], making_s: float
) -> Callable[[PlanningProblem, float, Sequence[FrontPoint]], Recomputing]:  # fmt: skip
    """Problems of the step with parts of its forward pass computed again in the backward pass; the step's own took `making_s`."""
    recomputation = Recomputation(step)

    def recomputing(as_it_is: PlanningProblem, limit_bytes: float, baselines: Sequence[FrontPoint]) -> Recomputing:
        def problem_of(recomputed: frozenset[str]) -> PlanningProblem:
            return _problem_of(asked, recomputation.step(recomputed), layouts).usable_up_to(limit_bytes)

        return Recomputing(as_it_is, recomputation, problem_of, baselines, making_s)

    return recomputing


def planning_problem(
    step: TracedStep, topology: DeviceTopology, fixed: Mapping[str, Spec] | None = None, *, space: str = "soap",
    profile: Profile | None = None, objective: Objective = TIME,
) -> PlanningProblem:  # fmt: skip
    """The graph, space and simulator of a traced step on a topology."""
    mesh = factor_mesh(topology)
    check_constraints(step, mesh)
    with own_configuration():
        graph, _ = build_graph(step)
        require_operators(graph)
        found = search_space(graph, mesh, fixed=fixed, pins=has_pins(space))
        return PlanningProblem.make(graph, found, topology, profile, objective)


def require_operators(graph: OperatorGraph) -> None:
    """Raises: SoapjaxError where a step computes nothing."""
    if not graph.operators:
        value = "nothing that is returned is computed from the arguments"
        expected = "a step that computes something, as (state, batch) -> (state, metrics)"
        raise SoapjaxError(Problem("the step", value, expected, "return the new state and the metrics"))


def _verified(
    asked: Understood, found: Searched, step: TracedStep, leaves: Sequence[Any]
) -> tuple[Searched, tuple[TimedStep, ...], tuple[str, ...]]:
    """The measured best of the best predicted ones, how long each took, and notes."""
    problem, result, measuring = found.problem, found.result, asked.measuring
    own = [result.best, *(e for e in result.candidates if e is not result.best)]
    pool = [(f"{asked.planner} {i + 1}" if i else asked.planner, e) for i, e in enumerate(own)]
    pool += [(name, baseline.best) for name, baseline in found.baselines.items()]

    def time_one(e: Evaluation) -> float:
        plan = plan_of_strategy(problem, e.strategy)
        if measuring is not None:
            measuring(plan)
        return time_plan(plan, step, leaves, asked.devices)

    try:
        with interrupts.searching(), jax.default_device(None):
            best, table, notes = measured_best(shortlist(pool, asked.verify_top), time_one)
        return found._replace(result=result._replace(best=best)), table, notes
    except KeyboardInterrupt:
        note = "interrupted while the best strategies were run: this is the best predicted one"
        return found._replace(result=result._replace(stopped_by="interrupted")), (), (note,)


def time_plan(plan: Plan, step: TracedStep, leaves: Sequence[Any], devices: Sequence[Any] | None) -> float:
    """Median seconds of a step under a plan, on the first of `devices`: all of those at hand by default."""
    used = list(jax.devices() if devices is None else devices)[: plan.num_devices]
    return time_steps(bind_plan(step, plan, devices=used), leaves)


def plan_of_strategy(
    problem: PlanningProblem, strategy: Strategy, *, model: ModelSource | None = None, provenance: Provenance = Provenance(),
    tracing: Mapping[str, Any] = {},
) -> Plan:  # fmt: skip
    """The plan of any strategy of a problem's space, with its specs and prediction."""
    simulator = problem.simulator
    costs = simulator.costs(strategy)
    topology, profile = simulator.tables.topology, simulator.tables.profile
    figures, shares = compute_figures(simulator, strategy)
    prediction = simulator.prediction(strategy, compute_figures=shares)
    if (compiled := provenance.compiled_as(prediction)) is not None:  # the compiler's word goes before ours
        prediction = prediction.model_copy(update={"feasible": compiled.fits})
    layouts, sends = costs.layouts, prediction.sends
    each = figures, operator_costs(simulator.tables, costs, strategy, sends)
    return make_plan(
        problem.space, topology, strategy, mesh_plan(problem.space, strategy, layouts.slots, layouts.home, *each), prediction,
        model=model, provenance=provenance, tracing=tracing, profile=carried(profile, {t.structure for t in problem.graph.tasks}),
    )  # fmt: skip


def _provenance(
    asked: Understood, found: Searched, remarks: Sequence[str], verified: Sequence[TimedStep], compiled: Sequence[CompiledFigures]
) -> Provenance:  # fmt: skip
    problem, result, baselines = found.problem, found.result, found.baselines
    figures = found.as_it_is.simulator.figures([b.best.strategy for b in baselines.values()])
    notes = [*remarks, *found.notes, *result.notes]
    for name, baseline in baselines.items():
        notes += [f"{name}: {note}" for note in baseline.notes]
        best = baseline.best
        if best.exceeds_limits:
            loads = f"a device sends {size(best.sent_bytes)} and stores {size(best.memory_bytes)}"
            notes.append(f"{name}: exceeds a limit ({loads})")
        elif not best.is_feasible:
            notes.append(f"{name}: does not fit ({best.memory_bytes / 1e9:.3g} GB per device)")
    if result.best.exceeds_limits:
        notes.append(LEAST_VIOLATING)
    elif not result.best.is_feasible:
        notes.append("the best plan found does not fit the usable memory")
    return Provenance(
        versions=versions(),
        planner=asked.planner,
        space=asked.space,
        objective=problem.objective.describe(),
        seed=asked.seed,
        num_proposals=result.num_proposals,
        baselines={name: baseline.best.step_time_s for name, baseline in baselines.items()},
        baseline_figures=dict(zip(baselines, figures, strict=True)),
        notes=tuple(notes),
        verified=tuple(verified),
        compiled=tuple(compiled),
    )


def versions() -> dict[str, str]:
    versions = {p: importlib.metadata.version(p) for p in ("jax", "jaxlib", "flax", "optax", "numpy")}
    return versions | {"soapjax": _version()}


def _version() -> str:
    try:
        return importlib.metadata.version("soapjax")
    except importlib.metadata.PackageNotFoundError:
        return "0"
