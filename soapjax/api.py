"""`soap_shard`: where planning and executing meet.

>>> @soap_shard(topology="local")
... def train_step(state, batch): ...
>>> state, metrics = train_step(state, batch)  # the first call plans, places, compiles and runs
>>> train_step.plan.save("plan.json")
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from soapjax import planning
from soapjax.auto_pipeline import plan_one_or_pipeline
from soapjax.costs.profile import Profile
from soapjax.errors import Problem, SoapjaxError
from soapjax.execute import jointly
from soapjax.execute.compiled import CompiledStep, ShapesChanged, place
from soapjax.execute.spmd import bind_plan
from soapjax.execute.stream import Event
from soapjax.execute.stream_step import StreamStep, compile_step
from soapjax.graph.trace import TracedStep, signature, trace
from soapjax.pipelining import PipelineOptions, pipelined, planned_pipeline
from soapjax.plan_files import recost
from soapjax.strategy.pipeline import Pipeline
from soapjax.strategy.plan import Plan
from soapjax.strategy.plan_strategy import topology_of
from soapjax.topology import DeviceTopology

log = logging.getLogger("soapjax")


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
        asked = self._pipeline
        if key not in self._by_shapes and asked is not None and isinstance(asked.pipeline, Pipeline):
            self._by_shapes[key] = None, pipelined(
                self._fn, *args, pipeline=asked.pipeline, reduction=asked.reduction, topology=self._options["topology"],
                devices=self._devices, static_argnums=constants.positions, unroll=self._options["unroll"], donate=self._donate,
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
                    static_argnums=constants.positions, reduction="mean" if asked is None else asked.reduction,
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
        if self._source is None and self._pipeline is not None:
            return self._planned_pipeline(args, static), trace(self._fn, *args, static_argnums=static, unroll=options["unroll"])
        if self._source is None:
            found = planning.plan(self._fn, *args, static_argnums=static, devices=self._devices, **options)
            return found.plan, found.step
        source = self._source if isinstance(self._source, Plan) else Plan.load(self._source)
        step = trace(self._fn, *args, static_argnums=static, unroll=source.unroll or options["unroll"])
        return recost(source, step, place="plan" if source is self._source else str(self._source)), step

    def _planned_pipeline(self, args: tuple[Any, ...], static: tuple[int, ...]) -> Plan:
        """The plan of the schedule that was asked for; of "auto" perhaps one of a single program."""
        asked, options = self._pipeline, self._options
        numbers = dict(microbatches=asked.num_microbatches, stages=asked.num_stages, static_argnums=static)
        if asked.pipeline == "auto":
            return plan_one_or_pipeline(self._fn, *args, devices=self._devices, **numbers, **options)[0]
        shared = {k: options[k] for k in ("topology", "seed", "proposals", "seconds", "unroll", "profile")}
        return planning.plan_pipeline(self._fn, *args, pipeline=asked.pipeline, **numbers, **shared)[0]

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
    pipeline: str | Pipeline | None = None, microbatches: int | str = "auto", stages: int | str = "auto",
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
      pipeline: a `Pipeline` to run, or what to plan: a schedule ("gpipe", "1f1b", "interleaved", "pipedream"), or "auto": the
        best synchronous one, where it is faster than one program.
      microbatches, stages: of a pipeline that is planned, a number or "auto".
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
