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

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.compiled import CompiledStep, ShapesChanged, place, signature
from soapjax.execute.spmd import bind_plan
from soapjax.execute.stream import Event
from soapjax.execute.stream_step import StreamStep, compile_step
from soapjax.graph.build import build_graph
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.trace import TracedStep, trace
from soapjax.pipelining import PipelineOptions, pipelined, planned_pipeline
from soapjax.search.planners import BASELINES, get_planner
from soapjax.search.problem import Budget, PlanningProblem, SearchResult
from soapjax.simulate.simulator import layouts_for_plan
from soapjax.stage_plans import FoundPipeline, find_pipeline, pipeline_plan, provenance_of, recost_pipeline
from soapjax.strategy.layout import Spec
from soapjax.strategy.pipeline import Pipeline
from soapjax.strategy.plan import ModelSource, Plan, Provenance, make_plan, parse_spec, strategy_of, topology_of
from soapjax.strategy.space import has_pins, search_space
from soapjax.strategy.strategy import Strategy
from soapjax.timelines import pipeline_events, spmd_events
from soapjax.topology import DeviceTopology, factor_mesh, load_topology
from soapjax.user_shardings import check_constraints, user_layouts

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
    progress: Callable[[int, float, float], None] | None = None,
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
    Raises: SoapjaxError for every input that does not fit.
    """
    topology = load_topology(topology) if isinstance(topology, str) else topology
    search = get_planner(planner, space=space)
    step = trace(fn, *args, unroll=unroll, static_argnums=static_argnums)
    static = {i % len(args) for i in static_argnums} if args else set()
    layouts = user_layouts([a for i, a in enumerate(args) if i not in static], step.in_paths, fixed)
    problem = planning_problem(step, topology, layouts, space=space)
    key = jax.random.key(seed)
    if proposals is None and seconds is None:
        proposals = DEFAULT_PROPOSALS
    with _on_cpu():
        baselines = {name: run(key, problem, Budget()) for name, run in BASELINES.items()}
        try:
            result = search(key, problem, Budget(proposals, seconds, progress))
        except KeyboardInterrupt:  # before a planner had anything of its own: the best baseline is the best so far
            best = min((found.best for found in baselines.values()), key=lambda e: (not e.is_feasible, e.cost))
            result = SearchResult(best, 0, 0.0, "interrupted")
        provenance = _provenance(planner, space, seed, result, baselines)
        made = plan_of_strategy(problem, result.best.strategy, model=model, provenance=provenance, unroll=unroll)
    return Planned(made, result, baselines, problem, step)


def planning_problem(
    step: TracedStep, topology: DeviceTopology, fixed: Mapping[str, Spec] | None = None, *, space: str = "soap"
) -> PlanningProblem:
    """The graph, space and simulator of a traced step on a topology."""
    graph, _ = build_graph(step)
    mesh = factor_mesh(topology)
    check_constraints(step, mesh)
    return PlanningProblem.make(graph, search_space(graph, mesh, fixed=fixed, pins=has_pins(space)), topology)


def _on_cpu() -> contextlib.AbstractContextManager:
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
    topology = simulator.tables.topology
    return make_plan(
        problem.space, topology, strategy, *layouts, simulator.prediction(strategy), model=model, provenance=provenance,
        unroll=unroll,
    )  # fmt: skip


def _provenance(planner: str, space: str, seed: int, result: SearchResult, baselines: Mapping[str, SearchResult]) -> Provenance:
    notes = [*result.notes]
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
    with _on_cpu():
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
    if loaded.pipeline is not None:
        with _on_cpu():
            return recost_pipeline(loaded, graph, own, place=place)[0]
    check_constraints(step, mesh)
    fixed = {path: parse_spec(spec) for path, spec in loaded.fixed.items()}
    try:
        problem = PlanningProblem.make(graph, search_space(graph, mesh, fixed=fixed, pins=bool(loaded.pinned)), own)
    except SoapjaxError as e:
        raise SoapjaxError(p._replace(place=f"{place}: {p.place}") for p in e.problems) from None
    strategy = strategy_of(loaded, problem.space, place=place)
    with _on_cpu():
        made = plan_of_strategy(problem, strategy, model=loaded.model, provenance=loaded.provenance, unroll=loaded.unroll)
    return made.model_copy(update={"mesh": loaded.mesh})


def timeline_events(plan: Plan, step: TracedStep) -> list[Event]:
    """What runs when in the simulation of a plan: a track per device, and per device and level of links."""
    topology, _ = topology_of(plan)
    graph, _ = build_graph(step)
    with _on_cpu():
        if plan.pipeline is not None:
            return pipeline_events(recost_pipeline(plan, graph, topology)[1].timeline, topology)
        fixed = {path: parse_spec(spec) for path, spec in plan.fixed.items()}
        space = search_space(graph, factor_mesh(topology), fixed=fixed, pins=bool(plan.pinned))
        problem = PlanningProblem.make(graph, space, topology)
        return spmd_events(problem.simulator, strategy_of(plan, space))


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
        self._last: CompiledStep | StreamStep | None = None
        self._last_constants: Constants = Constants()
        self._last_plan: Plan | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or self._static:
            args, constants = self._bound(args, kwargs)
        else:
            constants = Constants()
        if self._last is not None and constants == self._last_constants:
            try:
                return self._last(*constants.others(args))
            except ShapesChanged:
                log.info("soap_shard(%s): arguments of another shape", self.__name__)
        compiled = self._prepared(args, constants)
        return compiled(*compiled.place_state(*constants.others(args)))

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
            found = plan(self._fn, *args, static_argnums=static, **options)
            return found.plan, found.step
        source = self._source if isinstance(self._source, Plan) else Plan.load(self._source)
        step = trace(self._fn, *args, static_argnums=static, unroll=source.unroll or options["unroll"])
        return recost(source, step, place="plan" if source is self._source else str(self._source)), step

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
    devices: Sequence[Any] | None = None, pipeline: str | Pipeline | None = None, microbatches: int | None = None,
    stages: int | None = None, microbatch_reduction: str = "mean",
) -> Any:  # fmt: skip
    """Shards a step function by a searched (or given) plan. Bare or with arguments.

    Args:
      fn: any function of pytrees; `(state, batch) -> (state, metrics)` for training.
      topology, planner, seconds, proposals, seed, fixed, unroll: as for `soapjax.plan`.
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
        static_argnums=static, donate=donate, devices=devices,
        pipeline=PipelineOptions.of(pipeline, microbatches, stages, microbatch_reduction, plan=plan, fixed=fixed),
    )  # fmt: skip
    return functools.partial(SoapShard, **options) if fn is None else SoapShard(fn, **options)
