"""From a step function to a plan: trace, search, and what the plan says of how it was found.

`plan` for one program over all devices, or placed operators; `plan_pipeline` for stages and micro-batches.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from soapjax import interrupts, options
from soapjax.calling import listed
from soapjax.costs.by_operator import operator_costs
from soapjax.costs.measured.profile import Profile, cache_folder, cached_profile, carried, load_profile, mismatches
from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.compiled.timing import time_steps
from soapjax.execute.spmd.compiled_step import CompiledStep
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.build import build_graph
from soapjax.graph.recompute import Recomputation
from soapjax.graph.trace.trace import TracedStep, trace
from soapjax.own_config import own_configuration
from soapjax.page_data import extras_of
from soapjax.planning.compile_check import checked, compiled_plan, devices_to_compile_for
from soapjax.planning.pipeline_files import pipeline_plan
from soapjax.planning.pipelines import FoundPipeline, find_pipeline, provenance_of
from soapjax.planning.profiling import compute_figures, device_at_hand
from soapjax.planning.remarks import repeated_remarks, structure_remarks
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
from soapjax.topology import DeviceTopology, factor_mesh, load_topology
from soapjax.topology.local import local_topology

DEFAULT_PROPOSALS = 100_000


class Planned(NamedTuple):
    """What planning found: the plan, and what it was chosen among."""

    plan: Plan
    result: SearchResult
    baselines: dict[str, SearchResult]
    problem: PlanningProblem
    step: TracedStep
    front: tuple[FrontPoint, ...] = ()  # of time, communication and memory, of all that was judged, where `pareto` asked for it
    program: CompiledStep | None = None  # the plan's, where a check compiled it

    @property
    def graph(self) -> OperatorGraph:
        return self.problem.graph

    def _repr_html_(self) -> str:
        """For notebooks: the plan's tables, and folded under them the page of `soapjax report`."""
        with on_cpu():
            return framed(self.plan, page(self.plan, extras_of(self.problem.simulator, self.result.best.strategy)))


def plan(
    fn: Callable[..., Any], *args: Any, topology: str | DeviceTopology = "local", planner: str = "mcmc", seed: int = 0,
    proposals: int | None = None, seconds: float | None = None, fixed: Mapping[str, Any] | None = None, unroll: bool = False,
    static_argnums: Sequence[int] = (), space: str = "soap", model: ModelSource | None = None,
    progress: Callable[[int, float, float], None] | None = None, profile: str | Profile | None = None, verify_top: int = 0,
    devices: Sequence[Any] | None = None, axis_name: str | Sequence[str] = (), strip_constraints: bool = False,
    logical_axis_rules: Sequence[tuple[str, Any]] | None = None, objective: str | Objective = "time", pareto: bool = False,
    simplicity: float = 0.5, check: str = "none", donate: bool | Sequence[int] = True,
) -> Planned:  # fmt: skip
    """Plans `fn(*args)` for a topology. Nothing of the model is allocated; `args` may be `jax.ShapeDtypeStruct`s.

    Args:
      topology: a TOML file, a shipped name ("a100x64"), "local", or a `DeviceTopology`.
      planner: a name in `soapjax.PLANNERS`.
      seed, proposals, seconds: the search's; the same seed and `proposals` give the same plan. Compiling is part of the seconds.
      fixed: argument path -> PartitionSpec (or axis names per dim, or a pytree of shardings) that the plan must keep.
      unroll: plan every step of a scan on its own.
      space: "soap", or "paper": also operators on parts of the devices. Such plans run as several programs.
      progress: called between rounds with (proposals, best step time, elapsed seconds).
      profile: measurements to cost with: a file of `soapjax profile`, "auto" (all in the cache that fit), or a `Profile`.
      verify_top: run so many of the best strategies, and data parallelism, and take the measured best.
      devices: those to run on for that, to compile for, and those that "local" means; `jax.devices()` by default.
      axis_name, strip_constraints, logical_axis_rules: as for `soap_shard`.
      objective: what is minimised: "time", or an `Objective` with limits of communication and memory. Where no plan meets these,
        the one that violates them least is returned, with a note; `objective.unmet` names them.
      pareto: keep the front of time, communication and memory of all that the search judged.
      simplicity: of plans within so many percent of the best step time, the simplest is taken; 0 takes the best.
      check: "compile": compile the best plan, and search on with less memory where it does not fit; `donate` as for `soap_shard`.
        With "none" plans keep a margin of memory for the error of their prediction.
    Raises: SoapjaxError for every input that does not fit; InfeasibleError where no plan fits as compiled.
    """
    given = dict(
        topology=topology, planner=planner, seed=seed, proposals=proposals, seconds=seconds, fixed=fixed, unroll=unroll,
        static_argnums=static_argnums, space=space, profile=profile, verify_top=verify_top, devices=devices, axis_name=axis_name,
        strip_constraints=strip_constraints, logical_axis_rules=logical_axis_rules, objective=objective, pareto=pareto,
        simplicity=simplicity, check=check,
    )  # fmt: skip
    objective, static_argnums, topology, profile, remarks = _understood(fn, given)
    if check == "compile":
        to_compile_for = devices_to_compile_for(topology, devices)
        topology = topology.usable_up_to(topology.device.available_memory_bytes)
    if verify_top:
        require_real_devices(topology, jax.devices() if devices is None else list(devices))
    search = get_planner(planner, space=space)
    step = trace(
        fn, *args, unroll=unroll, static_argnums=static_argnums, axis_name=axis_name, strip_constraints=strip_constraints
    )  # fmt: skip
    begin = time.monotonic()
    static = {i % len(args) for i in static_argnums} if args else set()
    given, axis_names = [a for i, a in enumerate(args) if i not in static], factor_mesh(topology).axis_names
    layouts = user_layouts(given, step.in_paths, fixed, axis_names=axis_names, rules=logical_axis_rules)
    problem = planning_problem(step, topology, layouts, space=space, profile=profile, objective=objective)
    if pareto or not objective.is_time:
        problem = problem.keeping_front()
    remarks = (*remarks, *structure_remarks(problem.graph))
    deadline = math.inf if seconds is None else begin + seconds
    if proposals is None and seconds is None:
        proposals = DEFAULT_PROPOSALS
    looks, recomputation = check == "compile", Recomputation(step)

    def recomputing(as_it_is: PlanningProblem, limit_bytes: float) -> Recomputing:
        def problem_of(recomputed: frozenset[str]) -> PlanningProblem:
            other = recomputation.step(recomputed)
            made = planning_problem(other, topology, layouts, space=space, profile=profile, objective=objective)
            return made.usable_up_to(limit_bytes)

        return Recomputing(as_it_is, recomputation, problem_of)

    run = Search(planner, search, seed, proposals, deadline, progress, simplicity / 100, recomputing, may_go_on=looks)

    def plan_of(found: Searched, **more: Any) -> Plan:
        return plan_of_strategy(found.problem, found.result.best.strategy, model=model, unroll=unroll, **more)

    program, compiled, table = None, (), ()
    with on_cpu():
        found = run(problem)
        if looks and found.result.stopped_by != "interrupted":
            found, compiled, program = checked(run, found, plan_of, lambda p: compiled_plan(step, p, to_compile_for, donate))
        if verify_top and found.result.stopped_by != "interrupted":
            leaves = jax.tree_util.tree_leaves([a for i, a in enumerate(args) if i not in static])
            found, table, notes = _verified(verify_top, found, step, planner, leaves, devices)
            remarks = (*remarks, *notes)
            program = None  # it may be another strategy's
        remarks = (*remarks, *repeated_remarks(found.problem, found.result.best.strategy))
        provenance = _provenance(planner, space, seed, found, remarks, table, compiled)
        made = plan_of(found, provenance=provenance)
    if names := logical_axes(given, step.in_paths, axis_names):
        made = made.model_copy(update={"logical_axes": names})
    front = found.problem.front.points() if pareto else ()
    return Planned(made, found.result, found.baselines, found.problem, step, front, program)


def plan_pipeline(
    fn: Callable[..., Any], *args: Any, pipeline: str, topology: str | DeviceTopology = "local", microbatches: int | None = None,
    stages: int | None = None, seed: int = 0, proposals: int | None = None, seconds: float | None = None, unroll: bool = False,
    static_argnums: Sequence[int] = (), model: ModelSource | None = None,
    progress: Callable[[int, float, float], None] | None = None, profile: str | Profile | None = None,
    devices: Sequence[Any] | None = None, axis_name: str | Sequence[str] = (), strip_constraints: bool = False,
    objective: str | Objective = "time", pareto: bool = False, graph: OperatorGraph | None = None, slower_than_s: float = math.inf,
) -> tuple[Plan, FoundPipeline]:  # fmt: skip
    """Plans `fn(*args)` as a pipeline: "gpipe", "1f1b", "interleaved", "pipedream", or "auto", the best of the synchronous ones.

    Args:
      microbatches, stages: their numbers, searched where they are not given; others as for `plan`.
      graph: of the step, where it has been traced before.
      slower_than_s: a step time that the pipeline is to come near.
    Raises: SoapjaxError for every input that does not fit, and where no pipeline fits into memory; `Beaten` where the best is
      slower than `slower_than_s`, before it is priced on the whole graph.
    """
    given = dict(
        topology=topology, pipeline=pipeline, microbatches=microbatches, stages=stages, seed=seed, proposals=proposals,
        seconds=seconds, unroll=unroll, static_argnums=static_argnums, profile=profile, devices=devices, axis_name=axis_name,
        strip_constraints=strip_constraints, objective=objective, pareto=pareto,
    )  # fmt: skip
    objective, static_argnums, topology, profile, remarks = _understood(fn, given)
    how = dict(unroll=unroll, static_argnums=static_argnums, axis_name=axis_name, strip_constraints=strip_constraints)
    with on_cpu():
        graph = build_graph(trace(fn, *args, **how))[0] if graph is None else graph
        require_operators(graph)
        found = find_pipeline(
            graph, topology, schedule=pipeline, num_stages=stages, num_microbatches=microbatches, seed=seed, proposals=proposals,
            seconds=seconds, progress=progress, profile=profile, objective=objective, pareto=pareto, slower_than_s=slower_than_s,
        )  # fmt: skip
    found = found._replace(notes=(*remarks, *found.notes))
    base = Provenance(versions=_versions(), objective=objective.describe())
    provenance = provenance_of(found, base, planner=f"pipeline {pipeline}", seed=seed)
    with on_cpu():
        made = pipeline_plan(graph, topology, found.times, model=model, provenance=provenance, unroll=unroll, profile=profile)
    return made, found


def _understood(
    fn: Callable[..., Any], given: dict[str, Any]
) -> tuple[Objective, Sequence[int], DeviceTopology, Profile | None, tuple[str, ...]]:  # fmt: skip
    """What options of either kind of plan mean: objective, static arguments, topology, profile, and remarks on the profile.

    Raises: SoapjaxError for every option that does not fit.
    """
    options.check(given, also=options.check_step(fn))
    topology = _topology(given["topology"], given["devices"])
    found = find_profile(given["profile"], topology)
    return options.objective(given["objective"]), listed(given["static_argnums"]), topology, *found


def _topology(topology: str | DeviceTopology, devices: Sequence[Any] | None) -> DeviceTopology:
    """The topology that is meant; "local" is that of the devices to run on."""
    if topology == "local":
        return local_topology(devices)
    return topology if isinstance(topology, DeviceTopology) else load_topology(topology)


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


def find_profile(profile: str | Profile | None, topology: DeviceTopology) -> tuple[Profile | None, tuple[str, ...]]:
    """The profile that is meant, and remarks on what was left out.

    Raises: SoapjaxError where a file is damaged, or of another device kind or version.
    """
    if profile is None:
        return None, ()
    if profile == "auto":
        at_hand = device_at_hand()
        own = at_hand.processor if topology.device.platform == "cpu" == at_hand.platform else None
        found, notes = cached_profile(topology.device, processor=own, topology_fingerprint=topology.fingerprint())
        if found is None:
            notes = (*notes, f"no profile of {topology.device.name} in {cache_folder()}: all figures are analytic")
        return found, notes
    place = "profile" if isinstance(profile, Profile) else profile
    found = profile if isinstance(profile, Profile) else load_profile(profile)
    if problems := mismatches(found, topology.device, place=place):
        raise SoapjaxError(problems)
    fitting = found.for_cluster(topology.fingerprint())
    return fitting, () if fitting is found else (f"{place}: scalars of another cluster left out",)


def _verified(
    count: int, found: Searched, step: TracedStep, planner: str, leaves: Sequence[Any], devices: Sequence[Any] | None
) -> tuple[Searched, tuple[TimedStep, ...], tuple[str, ...]]:
    """The measured best of the best predicted ones, how long each took, and notes."""
    problem, result = found.problem, found.result
    own = [result.best, *(e for e in result.candidates if e is not result.best)]
    pool = [(f"{planner} {i + 1}" if i else planner, e) for i, e in enumerate(own)]
    pool += [(name, baseline.best) for name, baseline in found.baselines.items()]
    used = list(jax.devices() if devices is None else devices)[: problem.simulator.tables.topology.num_devices]

    def time_one(e: Evaluation) -> float:
        return time_steps(bind_plan(step, plan_of_strategy(problem, e.strategy), devices=used), leaves)

    try:
        with interrupts.searching(), jax.default_device(None):
            best, table, notes = measured_best(shortlist(pool, count), time_one)
        return found._replace(result=result._replace(best=best)), table, notes
    except KeyboardInterrupt:
        note = "interrupted while the best strategies were run: this is the best predicted one"
        return found._replace(result=result._replace(stopped_by="interrupted")), (), (note,)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Searches run on the CPU, since the accelerator's memory belongs to the training step, and under JAX's own configuration."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        device = None
    with own_configuration(), contextlib.nullcontext() if device is None else jax.default_device(device):
        yield


def plan_of_strategy(
    problem: PlanningProblem, strategy: Strategy, *, model: ModelSource | None = None, provenance: Provenance = Provenance(),
    unroll: bool = False,
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
    planner: str, space: str, seed: int, found: Searched, remarks: Sequence[str], verified: Sequence[TimedStep],
    compiled: Sequence[CompiledFigures],
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
        planner=planner,
        space=space,
        objective=problem.objective.describe(),
        seed=seed,
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
