"""Where planning and executing meet: `plan`, `load_plan`, `soap_shard`.

>>> @soap_shard(topology="local")
... def train_step(state, batch): ...
>>> state, metrics = train_step(state, batch)  # the first call plans, places, compiles and runs
>>> train_step.plan.save("plan.json")
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from soapjax.costs.profile import Profile, cache_folder, cached_profile, load_profile, mismatches, profile_of
from soapjax.errors import Problem, SoapjaxError
from soapjax.execute import jointly
from soapjax.execute.compiled import CompiledStep, ShapesChanged, place, signature
from soapjax.execute.spmd import bind_plan
from soapjax.execute.stream import Event
from soapjax.execute.stream_step import StreamStep, compile_step
from soapjax.execute.timing import time_steps
from soapjax.graph.build import build_graph
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.trace import TracedStep, trace
from soapjax.pipelining import PipelineOptions, pipelined, planned_pipeline
from soapjax.profiling import compute_figures, device_at_hand
from soapjax.search.planners import BASELINES, get_planner
from soapjax.search.problem import Budget, Evaluation, PlanningProblem, SearchResult
from soapjax.simulate.simulator import layouts_for_plan
from soapjax.stage_plans import FoundPipeline, find_pipeline, pipeline_plan, provenance_of, recost_pipeline
from soapjax.strategy.layout import Spec
from soapjax.strategy.pipeline import Pipeline
from soapjax.strategy.plan import ModelSource, Plan, Provenance, TimedStep, make_plan, parse_spec, strategy_of, topology_of
from soapjax.strategy.space import has_pins, search_space
from soapjax.strategy.strategy import Strategy
from soapjax.timelines import pipeline_events, spmd_events
from soapjax.topology import DeviceTopology, FactorMesh, factor_mesh, load_topology
from soapjax.user_shardings import check_constraints, user_layouts
from soapjax.verify_top import Verified, measured_best, require_real_devices, shortlist

log = logging.getLogger("soapjax")
DEFAULT_PROPOSALS = 100_000


class Planned(NamedTuple):
    """What planning found: the plan, and what it was chosen among."""

    plan: Plan
    result: SearchResult
    baselines: dict[str, SearchResult]
    problem: PlanningProblem
    step: TracedStep

    @property
    def graph(self) -> OperatorGraph:
        return self.problem.graph


def plan(
    fn: Callable[..., Any], *args: Any, topology: str | DeviceTopology = "local", planner: str = "mcmc", seed: int = 0,
    proposals: int | None = None, seconds: float | None = None, fixed: Mapping[str, Any] | None = None, unroll: bool = False,
    static_argnums: Sequence[int] = (), space: str = "soap", model: ModelSource | None = None,
    progress: Callable[[int, float, float], None] | None = None, profile: str | Profile | None = None, verify_top: int = 0,
    devices: Sequence[Any] | None = None,
) -> Planned:  # fmt: skip
    """Plans `fn(*args)` for a topology. Nothing of the model is allocated; `args` may be `jax.ShapeDtypeStruct`s.

    Args:
      topology: a TOML file, a shipped name ("a100x64"), "local", or a `DeviceTopology`.
      planner: a name in `soapjax.PLANNERS`.
      seed, proposals, seconds: the search's; the same seed and `proposals` give the same plan.
      fixed: argument path -> PartitionSpec (or axis names per dim, or a pytree of shardings) that the plan must keep.
      unroll: plan every step of a scan on its own.
      space: "soap", or "paper": also operators on parts of the devices. Such plans run as several programs.
      progress: called between rounds with (proposals, best step time, elapsed seconds).
      profile: measurements to cost with: a file of `soapjax profile`, "auto" (all in the cache that fit), or a `Profile`.
      verify_top: run so many of the best strategies, and data parallelism, and take the measured best.
      devices: those to run on for that; `jax.devices()` by default.
    Raises: SoapjaxError for every input that does not fit.
    """
    topology = load_topology(topology) if isinstance(topology, str) else topology
    profile, remarks = find_profile(profile, topology)
    if verify_top:
        require_real_devices(topology, jax.devices() if devices is None else list(devices))
    search = get_planner(planner, space=space)
    step = trace(fn, *args, unroll=unroll, static_argnums=static_argnums)
    static = {i % len(args) for i in static_argnums} if args else set()
    layouts = user_layouts([a for i, a in enumerate(args) if i not in static], step.in_paths, fixed)
    problem = planning_problem(step, topology, layouts, space=space, profile=profile)
    key = jax.random.key(seed)
    if proposals is None and seconds is None:
        proposals = DEFAULT_PROPOSALS
    with on_cpu():
        baselines = {name: run(key, problem, Budget()) for name, run in BASELINES.items()}
        try:
            result = search(key, problem, Budget(proposals, seconds, progress))
        except KeyboardInterrupt:  # before a planner had anything of its own: the best baseline is the best so far
            best = min((found.best for found in baselines.values()), key=lambda e: (not e.is_feasible, e.cost))
            result = SearchResult(best, 0, 0.0, "interrupted")
        result, simpler = _simpler_if_as_good(result, baselines, problem, planner)
        table: tuple[TimedStep, ...] = ()
        if verify_top:
            leaves = jax.tree_util.tree_leaves([a for i, a in enumerate(args) if i not in static])
            verified = _verified(verify_top, problem, step, planner, result, baselines, leaves, devices)
            result, table = result._replace(best=verified.best), verified.table
            remarks = (*remarks, *verified.notes)
        provenance = _provenance(planner, space, seed, result, baselines, (*remarks, *simpler), table)
        made = plan_of_strategy(problem, result.best.strategy, model=model, provenance=provenance, unroll=unroll)
    return Planned(made, result, baselines, problem, step)


def planning_problem(
    step: TracedStep, topology: DeviceTopology, fixed: Mapping[str, Spec] | None = None, *, space: str = "soap",
    profile: Profile | None = None,
) -> PlanningProblem:  # fmt: skip
    """The graph, space and simulator of a traced step on a topology."""
    graph, _ = build_graph(step)
    mesh = factor_mesh(topology)
    check_constraints(step, mesh)
    return PlanningProblem.make(graph, search_space(graph, mesh, fixed=fixed, pins=has_pins(space)), topology, profile)


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


def _simpler_if_as_good(
    result: SearchResult, baselines: Mapping[str, SearchResult], problem: PlanningProblem, planner: str
) -> tuple[SearchResult, tuple[str, ...]]:
    """The simplest baseline whose distance from the best is within the calibrated error; the simplest first."""
    profile = problem.simulator.tables.profile
    error = profile.error if profile is not None else 0.0
    best = result.best
    for name, found in baselines.items() if error > 0 and planner not in baselines else ():
        gain = 1 - best.step_time_s / found.best.step_time_s
        if found.best.is_feasible and 0 <= gain < error:
            note = (
                f"{planner} found {best.step_time_s:.4g} s per step, {gain:.1%} less than {name}: below the calibrated error of "
                f"{error:.1%}, so {name} is taken"
            )
            return result._replace(best=found.best, candidates=(best, *result.candidates)), (note,)
    return result, ()


def _verified(
    count: int, problem: PlanningProblem, step: TracedStep, planner: str, result: SearchResult,
    baselines: Mapping[str, SearchResult], leaves: Sequence[Any], devices: Sequence[Any] | None,
) -> Verified:  # fmt: skip
    """The measured best of the best predicted ones."""
    own = [result.best, *(e for e in result.candidates if e is not result.best)]
    pool = [(f"{planner} {i + 1}" if i else planner, e) for i, e in enumerate(own)]
    pool += [(name, found.best) for name, found in baselines.items()]
    used = list(jax.devices() if devices is None else devices)[: problem.simulator.tables.topology.num_devices]

    def time_one(e: Evaluation) -> float:
        return time_steps(bind_plan(step, plan_of_strategy(problem, e.strategy), devices=used), leaves)

    with jax.default_device(None):
        return measured_best(shortlist(pool, count), time_one)


def on_cpu() -> contextlib.AbstractContextManager:
    """Searches run on the CPU: the accelerator's memory belongs to the training step."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return contextlib.nullcontext()


def plan_of_strategy(
    problem: PlanningProblem, strategy: Strategy, *, model: ModelSource | None = None, provenance: Provenance = Provenance(),
    unroll: bool = False,
) -> Plan:  # fmt: skip
    """The plan of any strategy of a problem's space, with its specs and prediction."""
    simulator = problem.simulator
    layouts = layouts_for_plan(simulator.tables, simulator.costs(strategy))
    topology, profile = simulator.tables.topology, simulator.tables.profile
    figures, shares = compute_figures(simulator, strategy)
    own = profile.for_structures({t.structure for t in problem.graph.tasks}) if profile is not None else None
    return make_plan(
        problem.space, topology, strategy, *layouts, simulator.prediction(strategy, compute_figures=shares), model=model,
        provenance=provenance, unroll=unroll, figures=figures, profile=own.model_dump(mode="json") if own is not None else None,
    )  # fmt: skip


def _provenance(
    planner: str, space: str, seed: int, result: SearchResult, baselines: Mapping[str, SearchResult],
    remarks: Sequence[str] = (), verified: Sequence[TimedStep] = (),
) -> Provenance:  # fmt: skip
    notes = [*remarks, *result.notes]
    for name, found in baselines.items():
        notes += [f"{name}: {note}" for note in found.notes]
        if not found.best.is_feasible:
            notes.append(f"{name}: does not fit ({found.best.memory_bytes / 1e9:.3g} GB per device)")
    if not result.best.is_feasible:
        notes.append("the best plan found does not fit the usable memory")
    return Provenance(
        versions=_versions(),
        planner=planner,
        space=space,
        seed=seed,
        num_proposals=result.num_proposals,
        search_s=round(result.search_s, 3),
        baselines={name: found.best.step_time_s for name, found in baselines.items()},
        notes=tuple(notes),
        verified=tuple(verified),
    )


def _versions() -> dict[str, str]:
    versions = {p: importlib.metadata.version(p) for p in ("jax", "jaxlib", "flax", "optax", "numpy")}
    return versions | {"soapjax": _version()}


def _version() -> str:
    try:
        return importlib.metadata.version("soapjax")
    except importlib.metadata.PackageNotFoundError:
        return "0"


def plan_pipeline(
    fn: Callable[..., Any], *args: Any, pipeline: str, topology: str | DeviceTopology = "local", microbatches: int | None = None,
    stages: int | None = None, seed: int = 0, proposals: int | None = None, seconds: float | None = None, unroll: bool = False,
    static_argnums: Sequence[int] = (), model: ModelSource | None = None,
    progress: Callable[[int, float, float], None] | None = None,
) -> tuple[Plan, FoundPipeline]:  # fmt: skip
    """Plans `fn(*args)` as a pipeline: "gpipe", "1f1b", "interleaved", "pipedream", or "auto", the best of the synchronous ones.

    Args:
      microbatches, stages: their numbers, searched where they are not given; others as for `plan`.
    Raises: SoapjaxError for every input that does not fit, and where no pipeline fits into memory.
    """
    topology = load_topology(topology) if isinstance(topology, str) else topology
    step = trace(fn, *args, unroll=unroll, static_argnums=static_argnums)
    graph, _ = build_graph(step)
    with on_cpu():
        found = find_pipeline(
            graph, topology, schedule=pipeline, num_stages=stages, num_microbatches=microbatches, seed=seed, proposals=proposals,
            seconds=seconds, progress=progress,
        )  # fmt: skip
    provenance = provenance_of(found, Provenance(versions=_versions()), planner=f"pipeline {pipeline}", seed=seed)
    return pipeline_plan(graph, topology, found.times, model=model, provenance=provenance, unroll=unroll), found


def load_plan(path: str, step: TracedStep, *, topology: DeviceTopology | None = None) -> Plan:
    """Reads a plan for a traced step and derives its specs and prediction anew, so that edits count.

    Raises: SoapjaxError where the plan does not fit the step or (if given) the topology.
    """
    return recost(Plan.load(path), step, place=str(path), topology=topology)


def recost(loaded: Plan, step: TracedStep, *, place: str = "plan", topology: DeviceTopology | None = None) -> Plan:
    """The plan with specs and prediction derived from its `axes` and `storage`."""
    if loaded.pipeline is not None:
        graph, own, _ = _checked(loaded, step, place, topology)
        with on_cpu():
            return recost_pipeline(loaded, graph, own, place=place)[0]
    problem = problem_of_plan(loaded, step, place=place, topology=topology)
    strategy = strategy_of(loaded, problem.space, place=place)
    with on_cpu():
        made = plan_of_strategy(problem, strategy, model=loaded.model, provenance=loaded.provenance, unroll=loaded.unroll)
    return made.model_copy(update={"mesh": loaded.mesh})


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


def timeline_events(plan: Plan, step: TracedStep) -> list[Event]:
    """What runs when in the simulation of a plan: a track per device, and per device and level of links."""
    with on_cpu():
        if plan.pipeline is not None:
            graph, topology, _ = _checked(plan, step, "plan", None)
            return pipeline_events(recost_pipeline(plan, graph, topology)[1].timeline, topology)
        problem = problem_of_plan(plan, step)
        return spmd_events(problem.simulator, strategy_of(plan, problem.space))


class Constants(NamedTuple):
    """Which positional arguments are compile-time constants, and the values of those that `static_argnums` names."""

    positions: tuple[int, ...] = ()
    values: tuple[Any, ...] = ()

    def others(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(a for i, a in enumerate(args) if i not in self.positions) if self.positions else args


class SoapShard:
    """A step function that plans itself; made by `soap_shard`. Feels like `jax.jit`'s result."""

    def __init__(self, fn: Callable[..., Any], **options: Any):
        functools.update_wrapper(self, fn)
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)  # a functools.partial has none
        self._fn = fn
        self._source = options.pop("plan")
        self._donate = options.pop("donate")
        self._devices = options.pop("devices")
        self._static = tuple(options.pop("static_argnums"))
        self._pipeline: PipelineOptions | None = options.pop("pipeline")
        self._options = options
        self._by_shapes: dict[Any, tuple[Plan | None, CompiledStep | StreamStep]] = {}
        self._agreed: set[CompiledStep | StreamStep] = set()  # by all processes, where there are several
        self._last: CompiledStep | StreamStep | None = None
        self._last_constants: Constants = Constants()
        self._last_plan: Plan | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or self._static:
            args, constants = self._bound(args, kwargs)
        else:
            constants = Constants()
        if self._last is not None and constants == self._last_constants and self._is_agreed(self._last):
            try:
                return self._last(*constants.others(args))
            except ShapesChanged:
                log.info("soap_shard(%s): arguments of another shape", self.__name__)
        compiled = self._prepared(args, constants)
        placed = compiled.place_state(*constants.others(args))
        if not self._is_agreed(compiled):
            jointly.agree_on_program(self.__name__, compiled, placed)
            self._agreed.add(compiled)
        return compiled(*placed)

    def _is_agreed(self, compiled: CompiledStep) -> bool:
        """Whether it may run: over several processes only after all have compiled the same program."""
        return not compiled.spans_processes or compiled in self._agreed

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Constants]:
        """Arguments by position, and those among them that are compile-time constants.

        Where a keyword comes after parameters that were left out, these take their defaults, as constants.
        """
        left_out: list[int] = []
        if kwargs:
            bound = inspect.signature(self._fn).bind(*args, **kwargs)
            parameters = bound.signature.parameters.values()
            only = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY or p.kind is p.VAR_KEYWORD]
            if given := [name for name in only if name in bound.arguments]:
                expected, remedy = "arguments that have a position", "wrap the step in a function of positional arguments"
                raise SoapjaxError(Problem(self.__name__, f"keyword-only arguments {given}", expected, remedy))
            if bound.kwargs:
                named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD or p.kind is p.POSITIONAL_ONLY]
                left_out = [i for i, name in enumerate(named) if name not in bound.arguments]
                bound.apply_defaults()
            args = bound.args
        static = {i + len(args) if i < 0 else i for i in self._static}
        positions = sorted({i for i in static if 0 <= i < len(args)} | set(left_out))
        return args, Constants(tuple(positions), tuple(args[i] for i in positions if i not in left_out))

    def _prepared(self, args: tuple[Any, ...], constants: Constants) -> CompiledStep | StreamStep:
        """Plans (or loads) for these shapes and constants, once."""
        key = (constants, signature(constants.others(args)))
        if key not in self._by_shapes and self._pipeline is not None:
            self._by_shapes[key] = None, pipelined(
                self._fn, *args, options=self._pipeline, topology=self._options["topology"], devices=self._devices,
                static_argnums=constants.positions, unroll=self._options["unroll"], donate=self._donate,
            )  # fmt: skip
        if key not in self._by_shapes:
            start = time.monotonic()
            if jointly.spans_processes(self._devices):
                made, step = self._plan_jointly(args, constants.positions)
            else:
                made, step = self._make_plan(args, constants.positions)
            devices = self._devices if self._devices is not None else jax.devices()[: made.num_devices]
            if made.pipeline is not None:
                compiled = planned_pipeline(
                    self._fn, *args, plan=made, topology=topology_of(made)[0], devices=devices, donate=self._donate,
                    static_argnums=constants.positions,
                )  # fmt: skip
            else:
                compiled = compile_step(bind_plan(step, made, devices=devices), donate=self._donate)
            self._by_shapes[key] = made, compiled
            log.info(
                "soap_shard(%s): planned %d operators for %d devices in %.1f s, predicted %.4g s per step",
                self.__name__, made.graph.num_operators, made.num_devices, time.monotonic() - start, made.prediction.step_time_s,
            )  # fmt: skip
        self._last_plan, self._last = self._by_shapes[key]
        self._last_constants = constants
        return self._last

    def _make_plan(self, args: tuple[Any, ...], static: tuple[int, ...]) -> tuple[Plan, TracedStep]:
        options = self._options
        if self._source is None:
            found = plan(self._fn, *args, static_argnums=static, devices=self._devices, **options)
            return found.plan, found.step
        source = self._source if isinstance(self._source, Plan) else Plan.load(self._source)
        step = trace(self._fn, *args, static_argnums=static, unroll=source.unroll or options["unroll"])
        return recost(source, step, place="plan" if source is self._source else str(self._source)), step

    def _plan_jointly(self, args: tuple[Any, ...], static: tuple[int, ...]) -> tuple[Plan, TracedStep]:
        """The one plan of all processes: process 0 plans, the others take its plan; of plan files, each reads its own."""
        if self._source is None:
            step: TracedStep | None = None

            def search() -> Plan:
                nonlocal step
                made, step = self._make_plan(args, static)
                return made

            made = jointly.planned_by_first(self.__name__, search, seconds=self._options["seconds"])
            step = step or trace(self._fn, *args, static_argnums=static, unroll=self._options["unroll"])
        else:
            made, step = self._make_plan(args, static)
        jointly.agree_on_plan(self.__name__, made, step)
        return made, step

    @property
    def plan(self) -> Plan:
        """The plan of the last call.

        Raises: SoapjaxError before the first.
        """
        if self._last_plan is None and self._last is not None:
            remedy = "a given pipeline is not planned: read .pipeline instead"
            raise SoapjaxError(Problem(f"{self.__name__}.plan", "none", "a planned step", remedy))
        if self._last_plan is None:
            raise SoapjaxError(
                Problem(f"{self.__name__}.plan", "not planned yet", "a call before", "call the step, or .prepare(*args), first")
            )
        return self._last_plan

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline of the last call; None where the step is none."""
        return getattr(getattr(self._last, "streamed", None), "pipeline", None)

    def traced(self, *args: Any, **kwargs: Any) -> tuple[Any, list[Event]]:
        """A call, and what ran when: one event per program and transfer of a pipeline or a placed plan, seconds since its begin.

        Raises: SoapjaxError where the step is one program.
        """
        args, constants = self._bound(args, kwargs)
        step = self._prepared(args, constants)
        if not isinstance(step, StreamStep):
            expected, remedy = "a step of several programs", "use jax.profiler for one program"
            raise SoapjaxError(Problem(f"{self.__name__}.traced", "one program", expected, remedy))
        return step.traced(*constants.others(args))

    def prepare(self, *args: Any, **kwargs: Any) -> SoapShard:
        """Plans for these arguments (arrays or ShapeDtypeStructs) without running."""
        self._prepared(*self._bound(args, kwargs))
        return self

    def shard(self, tree: Any, *, argument: int = 0) -> Any:
        """`tree` laid out as the plan wants positional argument `argument` (the state, by default)."""
        before = sum(i < argument for i in self._last_constants.positions)
        return jax.tree.map(place, tree, self.shardings()[argument - before])

    def shardings(self) -> tuple[Any, ...]:
        """NamedShardings of every argument but the static ones, as pytrees: `in_shardings` for plain `jax.jit`."""
        if self._last is None:
            self.plan  # noqa: B018 - raises
        return self._last.in_shardings

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fn).lower`: the planned program, lowered for these arguments."""
        args, constants = self._bound(args, kwargs)
        return self._prepared(args, constants).lower(*constants.others(args))


def soap_shard(
    fn: Callable[..., Any] | None = None, *, topology: str | DeviceTopology = "local", plan: str | Plan | None = None,
    planner: str = "mcmc", seconds: float | None = None, proposals: int | None = None, seed: int = 0,
    fixed: Mapping[str, Any] | None = None, unroll: bool = False, static_argnums: int | Sequence[int] = (), donate: bool = True,
    devices: Sequence[Any] | None = None, profile: str | Profile | None = None, verify_top: int = 0,
    pipeline: str | Pipeline | None = None, microbatches: int | None = None, stages: int | None = None,
    microbatch_reduction: str = "mean",
) -> Any:  # fmt: skip
    """Shards a step function by a searched (or given) plan. Bare or with arguments.

    Over several processes (soapjax/distributed.py) all call the step with the same global arguments; process 0 plans.

    Args:
      fn: any function of pytrees; `(state, batch) -> (state, metrics)` for training.
      topology, planner, seconds, proposals, seed, fixed, unroll, profile, verify_top: as for `soapjax.plan`.
      plan: a plan file (or `Plan`) to execute instead of searching.
      static_argnums: positions of compile-time constants, as for `jax.jit`.
      donate: give the memory of state arguments to the results, as `donate_argnums` does.
      devices: the devices to run on; the first of `jax.devices()` by default.
      pipeline: a `Pipeline` to run, or the name of a schedule ("gpipe", "1f1b", "interleaved", "pipedream").
      microbatches, stages: of a schedule that is named; as many stages as divide the devices, up to four, and as many
        micro-batches as stages, by default.
      microbatch_reduction: "mean" where the loss is a mean over the batch, "sum" where it is a sum.
    """
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    if plan is not None and fixed is not None:
        raise SoapjaxError(Problem("fixed", "given beside a plan", "one of them", "plan anew, or edit the plan file's own layouts"))
    options = dict(
        topology=topology, plan=plan, planner=planner, seconds=seconds, proposals=proposals, seed=seed, fixed=fixed, unroll=unroll,
        static_argnums=static, donate=donate, devices=devices, profile=profile, verify_top=verify_top,
        pipeline=PipelineOptions.of(pipeline, microbatches, stages, microbatch_reduction, plan=plan, fixed=fixed),
    )  # fmt: skip
    return functools.partial(SoapShard, **options) if fn is None else SoapShard(fn, **options)
