"""From a step function to a plan: trace, search, and what the plan says of how it was found.

`plan` for one program over all devices, or placed operators; `plan_pipeline` for stages and micro-batches.
"""

from __future__ import annotations

import importlib.metadata
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from soapjax import interrupts
from soapjax.call_checks import check_planned
from soapjax.costs.by_operator import operator_costs
from soapjax.costs.measured.profile import Profile, carried
from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.compiled.timing import time_steps
from soapjax.execute.spmd.compiled_step import CompiledStep
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.graph.condensing import loops_over_layers, reads_rows
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.build import build_graph
from soapjax.graph.recompute import Recomputation
from soapjax.graph.trace.tracing import TracedStep, Unroll, argument_names, trace
from soapjax.own_config import on_cpu, own_configuration
from soapjax.page_data import extras_of
from soapjax.planning.compile_check import checked, compiled_plan, devices_to_compile_for
from soapjax.planning.given_pipeline import require_runnable
from soapjax.planning.pipeline_files import pipeline_plan
from soapjax.planning.pipelines import FoundPipeline, find_pipeline, provenance_of
from soapjax.planning.profiling import compute_figures
from soapjax.planning.remarks import repeated_remarks, structure_remarks
from soapjax.planning.request import PlanRequest, takes_options
from soapjax.planning.searching import Search, Searched
from soapjax.planning.user_shardings import check_constraints, logical_axes, user_layouts
from soapjax.planning.verify_top import measured_best, require_real_devices, shortlist
from soapjax.report.html import framed, page
from soapjax.search.front import FrontPoint
from soapjax.search.objective import LEAST_VIOLATING, TIME, Objective
from soapjax.search.planners import get_planner
from soapjax.search.problem import Evaluation, PlanningProblem, SearchResult
from soapjax.search.recomputation import Recomputing
from soapjax.sizes import size
from soapjax.strategy.layout import Spec
from soapjax.strategy.plan import CompiledFigures, ModelSource, Plan, Provenance, TimedStep
from soapjax.strategy.plan_strategy import make_plan, mesh_plan
from soapjax.strategy.space import has_pins, search_space
from soapjax.strategy.strategy import Strategy
from soapjax.topology import DeviceTopology, factor_mesh

DEFAULT_PROPOSALS = 100_000
UNROLLED = "a loop over layers was unrolled: its iterations are in several stages"
NOT_CUT = "stacked parameters stay whole on the first stage that reads them: something reads all their rows at once"
OF_PIPELINES = "pipeline", "microbatches", "stages", "microbatch_reduction"
OF_ONE_PROGRAM = "planner", "space", "simplicity", "check", "verify_top", "fixed", "logical_axis_rules", "donate"


class Traced(NamedTuple):
    step: TracedStep
    graph: OperatorGraph


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


@takes_options("microbatch_reduction", *OF_ONE_PROGRAM)
def plan_pipeline(fn: Callable[..., Any], *args: Any, pipeline: str, **options: Any) -> tuple[Plan, FoundPipeline]:
    """Plans `fn(*args)` as a pipeline: "gpipe", "1f1b", "interleaved", "pipedream", or "auto", the best of the synchronous ones.

    Options are those of `PlanRequest` (soapjax/planning/request.py), those of one program excepted; numbers of micro-batches and
    stages that are not given are searched.

    Raises: SoapjaxError for every input that does not fit, and where no pipeline fits into memory.
    """
    return plan_staged(PlanRequest(pipeline=pipeline, **options), fn, *args)


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
    given = _given(asked, fn, args)
    step = trace(fn, *args, **asked.tracing)
    deadline = math.inf if asked.seconds is None else time.monotonic() + asked.seconds
    axis_names = factor_mesh(topology).axis_names
    layouts = user_layouts(given, step.in_paths, asked.fixed, axis_names=axis_names, rules=asked.logical_axis_rules)
    problem = _problem_of(asked, step, layouts)
    if asked.pareto or not asked.objective.is_time:
        problem = problem.keeping_front()
    remarks = (*remarks, *structure_remarks(problem.graph))
    run = Search(
        asked.planner, planner, asked.seed, _proposals(asked), deadline, asked.progress, asked.simplicity / 100,
        _recomputing(asked, step, layouts), may_go_on=looks, kept=kept,
    )  # fmt: skip

    def plan_of(found: Searched, **more: Any) -> Plan:
        return plan_of_strategy(found.problem, found.result.best.strategy, model=asked.model, unroll=asked.unroll, **more)

    program, compiled, table = None, (), ()
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
        remarks = (*remarks, *repeated_remarks(found.problem, found.result.best.strategy))
        made = plan_of(found, provenance=_provenance(asked, found, remarks, table, compiled))
    if names := logical_axes(given, step.in_paths, axis_names):
        made = made.model_copy(update={"logical_axes": names})
    front = found.problem.front.points() if asked.pareto else ()
    left_s = deadline - time.monotonic()
    return Planned(made, found.result, found.baselines, found.problem, step, front, program, left_s)


def plan_staged(
    request: PlanRequest, fn: Callable[..., Any], *args: Any, traced: Traced | None = None, slower_than_s: float = math.inf,
    is_asked_for: bool = True,
) -> tuple[Plan, FoundPipeline]:  # fmt: skip
    """As `plan_pipeline`.

    Args:
      traced: the step and its graph, where it has been traced before, as the request says.
      slower_than_s: a step time that the pipeline is to come near.
      is_asked_for: whether a pipeline or micro-batches were; otherwise no plan is made that the caller's options could not run.
    Raises: as `plan_pipeline`; `Beaten` where the best is slower than `slower_than_s`, before it is priced on the whole graph.
    """
    asked, remarks = request.understood(fn)
    _given(asked, fn, args)
    if not asked.unroll:
        traced = _traced(asked, fn, *args) if traced is None else traced
    if asked.unroll or loops_over_layers(traced.graph) or reads_rows(traced.graph):
        has_loops = not asked.unroll and any(task.scope for task in traced.graph.tasks)
        asked = asked.but(unroll="rows")
        traced = _traced(asked, fn, *args)
        remarks = (*remarks, *((UNROLLED,) if has_loops else ()), *((NOT_CUT,) if has_loops and not traced.graph.leaf_of else ()))
    graph = traced.graph
    with on_cpu():
        found = find_pipeline(
            graph, asked.topology, schedule=asked.pipeline, num_stages=asked.num_stages, num_microbatches=asked.num_microbatches,
            seed=asked.seed, proposals=asked.proposals, seconds=asked.seconds, progress=asked.progress, profile=asked.profile,
            objective=asked.objective, pareto=asked.pareto, slower_than_s=slower_than_s,
        )  # fmt: skip
    stages = found.times.pipeline
    sure = {} if is_asked_for else {"reductions": (asked.microbatch_reduction,), "at_most": math.inf}
    require_runnable(fn, *args, pipeline=stages, step=traced.step, graph=graph, **sure, **asked.tracing)
    found = found._replace(notes=(*remarks, *found.notes))
    base = Provenance(versions=_versions(), objective=asked.objective.describe())
    provenance = provenance_of(found, base, planner=f"pipeline {asked.pipeline}", seed=asked.seed)
    how = dict(model=asked.model, provenance=provenance, unroll=asked.unroll, profile=asked.profile)
    with on_cpu():
        return pipeline_plan(graph, asked.topology, found.times, **how), found


def _given(asked: PlanRequest, fn: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """The arguments that are no constants.

    Raises: SoapjaxError naming what cannot be planned for: leaves that are no arrays, an empty batch.
    """
    static = {i % len(args) for i in asked.static_argnums} if args else set()
    named = [(n, a) for i, (n, a) in enumerate(zip(argument_names(fn, len(args)), args, strict=True)) if i not in static]
    given = [a for _, a in named]
    check_planned(given, [n for n, _ in named])
    return given


def _traced(asked: PlanRequest, fn: Callable[..., Any], *args: Any) -> Traced:
    step = trace(fn, *args, **asked.tracing)
    with own_configuration():
        graph = build_graph(step)[0]
    require_operators(graph)
    return Traced(step, graph)


def _proposals(asked: PlanRequest) -> int | None:
    return DEFAULT_PROPOSALS if asked.proposals is None and asked.seconds is None else asked.proposals


def _problem_of(asked: PlanRequest, step: TracedStep, layouts: Mapping[str, Spec]) -> PlanningProblem:
    return planning_problem(step, asked.topology, layouts, space=asked.space, profile=asked.profile, objective=asked.objective)


def _recomputing(
    asked: PlanRequest, step: TracedStep, layouts: Mapping[str, Spec]
) -> Callable[[PlanningProblem, float], Recomputing]:  # fmt: skip
    """Problems of the step with parts of its forward pass computed again in the backward pass."""
    recomputation = Recomputation(step)

    def recomputing(as_it_is: PlanningProblem, limit_bytes: float) -> Recomputing:
        def problem_of(recomputed: frozenset[str]) -> PlanningProblem:
            return _problem_of(asked, recomputation.step(recomputed), layouts).usable_up_to(limit_bytes)

        return Recomputing(as_it_is, recomputation, problem_of)

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
    asked: PlanRequest, found: Searched, step: TracedStep, leaves: Sequence[Any]
) -> tuple[Searched, tuple[TimedStep, ...], tuple[str, ...]]:
    """The measured best of the best predicted ones, how long each took, and notes."""
    problem, result = found.problem, found.result
    own = [result.best, *(e for e in result.candidates if e is not result.best)]
    pool = [(f"{asked.planner} {i + 1}" if i else asked.planner, e) for i, e in enumerate(own)]
    pool += [(name, baseline.best) for name, baseline in found.baselines.items()]
    used = list(jax.devices() if asked.devices is None else asked.devices)[: problem.simulator.tables.topology.num_devices]

    def time_one(e: Evaluation) -> float:
        return time_steps(bind_plan(step, plan_of_strategy(problem, e.strategy), devices=used), leaves)

    try:
        with interrupts.searching(), jax.default_device(None):
            best, table, notes = measured_best(shortlist(pool, asked.verify_top), time_one)
        return found._replace(result=result._replace(best=best)), table, notes
    except KeyboardInterrupt:
        note = "interrupted while the best strategies were run: this is the best predicted one"
        return found._replace(result=result._replace(stopped_by="interrupted")), (), (note,)


def plan_of_strategy(
    problem: PlanningProblem, strategy: Strategy, *, model: ModelSource | None = None, provenance: Provenance = Provenance(),
    unroll: Unroll = False,
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
        model=model, provenance=provenance, unroll=unroll, profile=carried(profile, {t.structure for t in problem.graph.tasks}),
    )  # fmt: skip


def _provenance(
    asked: PlanRequest, found: Searched, remarks: Sequence[str], verified: Sequence[TimedStep], compiled: Sequence[CompiledFigures]
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
        versions=_versions(),
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


def _versions() -> dict[str, str]:
    versions = {p: importlib.metadata.version(p) for p in ("jax", "jaxlib", "flax", "optax", "numpy")}
    return versions | {"soapjax": _version()}


def _version() -> str:
    try:
        return importlib.metadata.version("soapjax")
    except importlib.metadata.PackageNotFoundError:
        return "0"
