"""`soap_shard`: where planning and executing meet.

>>> @soap_shard(topology="local", proposals=256)
... def train_step(weights, batch):
...     loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)
...     return weights - 0.01 * gradient, {"loss": loss}
>>> weights, metrics = train_step(jnp.ones((8, 4)), jnp.ones((16, 8)))  # the first call plans, places, compiles and runs
>>> train_step.plan.save("plan.json")
"""

from __future__ import annotations

import contextlib
import functools
import logging
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.processes import jointly
from soapjax.execute.spmd.compiled_step import CompiledStep, ShapesChanged
from soapjax.execute.streams.stream import Event
from soapjax.execute.streams.stream_step import StreamStep
from soapjax.execute.transfers.arrivals import on_context_mesh, place_all
from soapjax.graph.trace.tracing import argument_names, leaf_paths, signature, trace
from soapjax.helpers import progress
from soapjax.helpers.own_config import has_explicit_axes
from soapjax.planning.compile_check import over_memory
from soapjax.planning.options import check as check_options
from soapjax.planning.options import check_step
from soapjax.planning.request import PlanRequest, takes_options
from soapjax.steps import nnx_steps
from soapjax.steps.call_checks import check_planned, check_run, planned_tree
from soapjax.steps.calling import CallForm, Calling, listed
from soapjax.steps.making import Maker
from soapjax.strategy.pipeline import Pipeline
from soapjax.strategy.plan import Plan

log = logging.getLogger("soapjax")
BESIDE_A_PLAN = {  # option -> what to do
    "pipeline": "drop it", "microbatches": "drop it", "fixed": "plan anew, or edit the plan file's own layouts",
    "objective": "plan anew, or drop it",
}  # fmt: skip


class SoapShard:
    """A step function that plans itself; made by `soap_shard`. Feels like `jax.jit`'s result."""

    def __init__(self, fn: Callable[..., Any], *, request: PlanRequest, plan: str | Plan | None, **of_jit: Any):
        """`of_jit` are `static_argnames`, `donate_argnums` and `donate_argnames`."""
        functools.update_wrapper(self, fn)
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)  # a functools.partial has none
        self._fn, self._of_jit = fn, of_jit
        self._calling = Calling(fn, static_argnums=listed(request.static_argnums), **of_jit)
        self._maker = Maker(self.__name__, request, plan)
        self._by_shapes: dict[Any, tuple[Plan | None, CompiledStep | StreamStep]] = {}
        self._agreed: set[CompiledStep | StreamStep] = set()  # by all processes, where there are several
        self._last: CompiledStep | StreamStep | None = None
        self._last_form: CallForm = CallForm()
        self._last_plan: Plan | None = None
        self._spans: bool | None = None  # whether its devices belong to several processes
        self._of_objects: dict[Any, SoapShard] = {}  # the same step as a function of its nnx objects' arrays
        self._methods: dict[int, tuple[Any, SoapShard]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._spans is None:
            self._spans = jointly.spans_processes(self._maker.devices)
        if not self._spans:
            return self._called(*args, **kwargs)
        with jointly.call(self.__name__):
            return self._called(*args, **kwargs)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        args, form = self._calling.bound(args, kwargs)
        if positions := nnx_steps.object_positions(args):
            step, arrays = self._functional(args, form, positions)
            result, *parts = step(*arrays)
            nnx_steps.update(args, positions, tuple(parts))
            return result
        dynamic = form.dynamic(args)
        if self._last is not None and form == self._last_form and self._is_agreed(self._last):
            try:
                return self._run(self._last, dynamic)
            except ShapesChanged:
                log.info("soap_shard(%s): arguments of another shape", self.__name__)
        if not (inside := _has_tracers(dynamic)):
            check_run(dynamic, self._names(args, form))
        compiled = self._prepared(args, form, runs=not inside)
        if inside:
            return compiled(*dynamic)
        placed = compiled.place_state(*dynamic)
        if not self._is_agreed(compiled):
            jointly.agree_on_program(self.__name__, compiled, placed)
            self._agreed.add(compiled)
        if not compiled.is_compiled:
            with progress.shown(f"compiling {self.__name__}"):
                compiled.compile()
            if isinstance(compiled, CompiledStep) and (problem := over_memory(self._last_plan, compiled)) is not None:
                log.warning("soap_shard(%s): %s", self.__name__, problem)
        return self._run(compiled, placed)

    def _run(self, step: CompiledStep | StreamStep, args: tuple[Any, ...]) -> Any:
        if self._spans:
            jointly.runs()
        found = step(*args)
        return on_context_mesh(found, step.state_outputs) if has_explicit_axes() else found

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method. An instance that is a pytree is an argument; any other is a constant, and has a plan of its own."""
        if instance is None:
            return self
        if nnx_steps.is_object(instance) or not jax.tree_util.all_leaves([instance]):
            return types.MethodType(self, instance)
        store = getattr(instance, "__dict__", None)
        key = f"_soap_shard_{self.__name__}"
        found = self._methods.get(id(instance), (None, None))[1] if store is None else store.get(key)
        if found is None or getattr(found._fn, "__func__", None) is not self._fn:
            constants, given_away = (
                None if n is None else tuple(i - 1 if i > 0 else i for i in listed(n) if i != 0)
                for n in (self._maker.request.static_argnums, self._of_jit["donate_argnums"])
            )
            found = self._like(types.MethodType(self._fn, instance), constants, donate_argnums=given_away)
            if store is None:
                self._methods[id(instance)] = instance, found
            else:
                store[key] = found
        return found

    def _functional(self, args: tuple[Any, ...], form: CallForm, positions: tuple[int, ...]) -> tuple[SoapShard, tuple[Any, ...]]:
        """The step of arrays that stands for a step of nnx objects, and the arguments with arrays in place of the objects."""
        graph, arrays = nnx_steps.split(args, positions)
        key = nnx_steps.Constants(graph), positions, form.names, len(args)
        if key not in self._of_objects:
            given_away = None
            if self._calling.gives_away:
                kept = [i for i in range(len(args)) if i not in form.positions]
                given_away = tuple(kept[k] for k in self._calling.given_away(form, len(args)))
            fn = nnx_steps.functional(self._calling.function(form, len(args)), graph, positions)
            by_position = dict(static_argnames=(), donate_argnums=given_away, donate_argnames=None)
            self._of_objects[key] = self._like(fn, form.positions, **by_position)
        step = self._of_objects[key]
        self._of_objects[key] = self._of_objects.pop(key)  # the last one last
        return step, arrays

    def _like(self, fn: Callable[..., Any], constants: Sequence[int], **of_jit: Any) -> SoapShard:
        """Another function, planned as this one is, with constants at other positions."""
        request = self._maker.request.but(static_argnums=constants)
        return SoapShard(fn, request=request, plan=self._maker.source, **self._of_jit | of_jit)

    def _names(self, args: tuple[Any, ...], form: CallForm) -> tuple[str, ...]:
        """Of the arguments that are no constants."""
        return form.dynamic(tuple(argument_names(self._calling.function(form, len(args)), len(args))))

    def _is_agreed(self, compiled: CompiledStep | StreamStep) -> bool:
        """Whether it may run: over several processes only after all have compiled the same program."""
        return not compiled.spans_processes or compiled in self._agreed

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[SoapShard, tuple[Any, ...], CallForm]:
        """The step that such a call means, with its arguments by position."""
        args, form = self._calling.bound(args, kwargs)
        if positions := nnx_steps.object_positions(args):
            step, arrays = self._functional(args, form, positions)
            return step._bound(arrays, {})
        return self, args, form

    def _prepared(self, args: tuple[Any, ...], form: CallForm, *, runs: bool = False) -> CompiledStep | StreamStep:
        """Plans (or loads) for these shapes and constants, once; where the step `runs` then, its program may check the plan."""
        fn = self._calling.function(form, len(args))
        check_planned(form.dynamic(args), self._names(args, form))
        key = (form, signature(form.dynamic(args)))
        if key not in self._by_shapes:
            inside = _has_tracers(form.dynamic(args))
            if inside:  # of another transformation: its values are not known, and what planning computes does not belong to it
                args = tuple(a if i in form.positions else jax.tree.map(_struct, a) for i, a in enumerate(args))
            with jax.ensure_compile_time_eval() if inside else contextlib.nullcontext():
                given_away = self._calling.given_away(form, len(args))
                donate = self._maker.request.donate if given_away is None else given_away
                try:
                    self._by_shapes[key] = self._maker.made(fn, args, form.positions, donate, runs=runs)
                except SoapjaxError as e:
                    changed = self._changed(args, form, key[1]) if type(e) is SoapjaxError else None
                    if changed is None:
                        raise
                    raise SoapjaxError([*e.problems, changed]) from e
        self._last_plan, self._last = self._by_shapes[key]
        self._last_form = form
        return self._last

    def _changed(self, args: tuple[Any, ...], form: CallForm, now: Any) -> Problem | None:
        """The first argument of another shape or dtype than in the call before: a state, say, that the step returns in float32."""
        before = [of for other, of in self._by_shapes if other == form and of[0] == now[0]]
        paths = [p for n, a in zip(self._names(args, form), form.dynamic(args), strict=True) for p in leaf_paths(a, n)]
        for path, old, new in zip(paths, before[-1][1], now[1], strict=True) if before else ():
            if old != new:
                (was, was_dtype), (shape, dtype) = old, new
                expected = f"{was_dtype}{list(was)}, as in the call before"
                return Problem(f"argument {path}", f"{dtype}{list(shape)}", expected, "give it so, or plan for both")
        return None

    @property
    def _latest(self) -> SoapShard:
        """The step that the last call ran: one of arrays, where the call was one of nnx objects."""
        return next(reversed(self._of_objects.values()), self) if self._last is None else self

    @property
    def plan(self) -> Plan:
        """The plan of the last call.

        Raises: SoapjaxError before the first.
        """
        step = self._latest
        if step._last_plan is None and step._last is not None:
            remedy = "a given pipeline is not planned: read .pipeline instead"
            raise SoapjaxError(Problem(f"{self.__name__}.plan", "none", "a planned step", remedy))
        if step._last_plan is None:
            raise SoapjaxError(
                Problem(f"{self.__name__}.plan", "not planned yet", "a call before", "call the step, or .prepare(*args), first")
            )
        return step._last_plan

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline of the last call; None where the step is none."""
        return getattr(getattr(self._latest._last, "streamed", None), "pipeline", None)

    def traced(self, *args: Any, **kwargs: Any) -> tuple[Any, list[Event]]:
        """A call, and what ran when: one event per program and transfer of a pipeline or a placed plan, seconds since its begin.

        Raises: SoapjaxError where the step is one program.
        """
        step, args, form = self._bound(args, kwargs)
        made = step._prepared(args, form)
        if not isinstance(made, StreamStep):
            expected, remedy = "a step of several programs", "use jax.profiler for one program"
            raise SoapjaxError(Problem(f"{self.__name__}.traced", "one program", expected, remedy))
        return made.traced(*form.dynamic(args))

    def prepare(self, *args: Any, **kwargs: Any) -> SoapShard:
        """Plans for these arguments (arrays or ShapeDtypeStructs) without running."""
        step, args, form = self._bound(args, kwargs)
        step._prepared(args, form)
        return self

    def shard(self, tree: Any, *, argument: int = 0) -> Any:
        """`tree` laid out as the plan wants positional argument `argument` (the state, by default).

        Raises: SoapjaxError naming the leaves that one has and the other has not.
        """
        before = sum(i < argument for i in self._latest._last_form.positions) if isinstance(argument, int) else 0
        place = f"{self.__name__}.shard"
        wanted, is_same = planned_tree(tree, self.shardings(), argument, before, place)
        if not is_same:
            log.warning(
                "%s: the arrays are those that were planned, but static parts of the tree are other objects (a TrainState's "
                "tx or apply_fn made anew): the step will plan again for it", place,
            )  # fmt: skip
        leaves, structure = jax.tree_util.tree_flatten(tree)
        return jax.tree_util.tree_unflatten(structure, place_all(leaves, jax.tree_util.tree_leaves(wanted)))

    def shardings(self) -> tuple[Any, ...]:
        """NamedShardings of every argument but the static ones, as pytrees: `in_shardings` for plain `jax.jit`.

        What the step does not read has the layout that `fixed` gives it; calls take it as it comes.
        """
        step = self._latest
        if step._last is None:
            self.plan  # noqa: B018 - raises
        return step._last.in_shardings

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fn).lower`: the planned program, lowered for these arguments."""
        step, args, form = self._bound(args, kwargs)
        return step._prepared(args, form).lower(*form.dynamic(args))

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fn).trace`: the planned program, traced for these arguments."""
        step, args, form = self._bound(args, kwargs)
        return step._prepared(args, form).trace(*form.dynamic(args))

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fn).eval_shape`: shapes and types of the results; nothing is planned."""
        step, args, form = self._bound(args, kwargs)
        fn = step._calling.function(form, len(args))
        traced = trace(fn, *args, **self._maker.request.but(static_argnums=form.positions, unroll=False).tracing)
        return traced.out_tree.unflatten([jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in traced.out_avals])

    def _cache_size(self) -> int:
        """How many compiled steps there are, as `jax.jit(fn)._cache_size()` says of its own."""
        made = [step for _, step in self._by_shapes.values() if not isinstance(step, CompiledStep) or step.is_compiled]
        return len(made) + sum(s._cache_size() for s in self._of_objects.values())

    def clear_cache(self) -> None:
        """Forgets all plans and programs: the next call plans anew."""
        self._by_shapes.clear()
        self._agreed.clear()
        self._of_objects.clear()
        self._last = self._last_plan = None
        self._last_form = CallForm()


def _has_tracers(args: tuple[Any, ...]) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree_util.tree_leaves(args))


def _struct(x: Any) -> Any:
    if not isinstance(x, jax.core.Tracer):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)


@takes_options("space", "pareto", "model", "progress", "measuring")
def soap_shard(
    fn: Callable[..., Any] | None = None, *, plan: str | Plan | None = None, static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (), donate: bool = True, donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None, check: str = "compile", **options: Any,
) -> Any:  # fmt: skip
    """Shards a step function by a searched (or given) plan. Bare or with arguments.

    Over several processes (soapjax/distributed.py) all call the step with the same global arguments; process 0 plans.

    Args:
      fn: any function of pytrees; `(state, batch) -> (state, metrics)` for training.
      plan: a plan file (or `Plan`) to execute instead of searching.
      static_argnums: compile-time constants by position, as for `jax.jit`.
      static_argnames: the same by name.
      donate: give the memory of state arguments (what the step returns anew) to the results.
      donate_argnums: the arguments whose memory is given away instead, as for `jax.jit`. Arrays that are not yet laid out as
        planned are copied, and stay the caller's.
      donate_argnames: the same by name.
      check: "compile": what a call plans (not `prepare`, nor several processes) is compiled at once, as the call would do anyway;
        where it does not fit the device, the search goes on with less memory, and where nothing fits with micro-batches;
        `InfeasibleError` says so where these do not help.
        With "none", and of what is not compiled, plans keep a margin of memory.
      options: of planning, as `PlanRequest` (soapjax/planning/request.py) has them: topology, planner, seconds, proposals, seed,
        objective, simplicity, fixed, logical_axis_rules, strip_constraints, axis_name, unroll, profile, verify_top, devices,
        pipeline, microbatches, stages, microbatch_reduction. Limits of an objective that no plan meets are named by a warning.
    """
    request = PlanRequest(static_argnums=static_argnums, donate=donate, check=check, **options)
    beside = request.problems()
    if plan is not None:
        asked = (name for name in BESIDE_A_PLAN if getattr(request, name) != getattr(PlanRequest, name))
        beside += [Problem(name, "given beside a plan", "one of them", BESIDE_A_PLAN[name]) for name in asked]
    of_jit = dict(static_argnames=static_argnames, donate_argnums=donate_argnums, donate_argnames=donate_argnames)
    check_options({**request.values(), "plan": plan, **of_jit}, also=beside if fn is None else [*check_step(fn), *beside])
    given: dict[str, Any] = {k: None if v is None else listed(v) for k, v in of_jit.items()}
    given["static_argnames"] = listed(static_argnames)
    request = request.but(static_argnums=listed(static_argnums), axis_name=listed(request.axis_name))
    made: Callable[..., Any] = functools.partial(SoapShard, request=request, plan=plan, **given)
    return made if fn is None else made(fn)
