"""A part of a step as one jitted program on its own mesh, sharded inside as a plan says.

The plan is one of the whole (micro-batched) step on the mesh of the part's devices; only the part's operators follow it.
Every value has one layout per place: a parameter as the plan stores it, any other as the plan keeps it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from soapjax.execute.parts.cut import Part, keys_of
from soapjax.execute.parts.gathered import Gathered, passing
from soapjax.execute.parts.stacked_rows import RowsAndStacks, StackedRows
from soapjax.execute.spmd.evaluator import OfMicroBatch
from soapjax.execute.spmd.gradient_sums import DeferredSum
from soapjax.execute.spmd.plan_layouts import split_of
from soapjax.execute.spmd.planned_evaluator import BoundStep, PlannedEvaluator
from soapjax.execute.spmd.promotion import high
from soapjax.graph.operators import Accumulation
from soapjax.strategy.layout import Spec
from soapjax.strategy.plan import parse_spec


class Place:
    """A sub-mesh with the plan that holds on it.

    Args:
      bound: the step, a plan for the place's devices, and their mesh.
    """

    def __init__(self, bound: BoundStep, *, is_float64: bool = False):
        self.bound, self.mesh, self.is_float64 = bound, bound.mesh, is_float64
        self.values = bound.binding.values
        self._arguments = dict(zip(bound.step.program.inputs, bound.step.in_paths, strict=True))
        self._arrivals: dict[int, Spec] = {}
        self.deferred: dict[int, DeferredSum] = {}  # by value
        self.sums: tuple[Accumulation, ...] = ()  # of several uses of a parameter, all in one of the place's programs
        self.gathered: dict[int, Gathered] = {}  # by value, of what passes read: gathered before them
        self._home: dict[int, Spec] = {}
        self._makers = {o: e for e in bound.step.program.eqns for o in e.outputs}
        self.stacks: StackedRows | None = None  # where the place's programs run layers as loops
        for task, part in bound.task_parts():
            self._home.update({a.tensor: parse_spec(s) for a, s in zip(task.writes, part.results, strict=True)})

    @functools.cached_property
    def evaluator(self) -> Any:
        return self._evaluator(self.bound)

    @functools.cached_property
    def pass_evaluator(self) -> Any:
        """That of forward and backward passes."""
        return self._evaluator(passing(self.bound, self.gathered)) if self.gathered else self.evaluator

    def _evaluator(self, bound: BoundStep) -> Any:
        # Also on one device where the plan pins: the marks of its operators are how they are found again.
        if bound.plan.pinned:
            return PlannedEvaluator(bound, is_float64=self.is_float64, sums=())
        evaluator: Any = bound.evaluator(is_float64=self.is_float64, sums=self.sums)  # with sums, where any are deferred
        for value, deferred in self.deferred.items():
            evaluator.sums.defer(value, deferred)
        return evaluator

    def spec(self, value: int) -> Spec:
        """The layout in which a value lies here, () where the plan says nothing about it."""
        if value in self._arrivals:
            return self._arrivals[value]
        if self.stacks is not None and value in self.stacks.like:
            return ((), *self.spec(self.stacks.like[value]))
        path = self._arguments.get(value)
        if path is not None:
            return self._here(parse_spec(self.bound.plan.arguments[path]))
        alias = self.values.tensor(value)
        spec = self._home.get(self.bound.binding.tensor_of.get(alias.root, -1))
        if spec is None:
            return self._as_made(value)
        return self._here(((),) * alias.shift + spec if alias.shift > 0 else spec[-alias.shift :])

    def _as_made(self, value: int) -> Spec:
        """The layout of a value inside a task, as its equation makes it; () where that is not known."""
        eqn = self._makers.get(value)
        task = None if eqn is None else self.bound.binding.task_of.get(eqn.key)
        dims = None if task is None else self.bound.binding.dims_of.get(eqn.key)
        if dims is None:
            return ()
        found = dims.results[min(eqn.outputs.index(value), len(dims.results) - 1)]
        op = self.bound.graph.operators[self.bound.graph.tasks[task].operator]
        names = self._here(split_of(self.bound.plan, op, found))
        shape = self.bound.step.program.avals[value].shape
        is_even = len(names) == len(shape) and all(
            n % math.prod(self.mesh.shape[a] for a in own) == 0 for n, own in zip(shape, names, strict=True)
        )
        return names if is_even else ()

    def have_stacks(self, stacks: StackedRows) -> None:
        """The place's programs take and make stacks; of gathered parameters, too."""
        self.stacks = stacks
        for stack, like in stacks.like.items():
            if like in self.gathered:
                self.gathered[stack] = self.gathered[like].stacked()

    def receive(self, value: int, source: Place) -> None:
        """`value` comes from `source`: laid out as there where the meshes are alike, so that every device sends to one other.

        A split tensor thus travels in its parts, and is gathered (if at all) by the program that reads it.
        """
        if source.mesh.shape == self.mesh.shape:
            self._arrivals[value] = source.spec(value)

    def _here(self, spec: Spec) -> Spec:
        """Without the axes that are pinned here: made elsewhere, a value may be split over them there."""
        return tuple(tuple(n for n in names if n in self.mesh.axis_names) for names in spec)

    def sharding(self, value: int) -> NamedSharding:
        return self.bound.sharding(self.spec(value))

    @property
    def whole(self) -> NamedSharding:
        return self.bound.sharding(())


@dataclasses.dataclass(frozen=True)
class Accumulated:
    """A value that is summed over micro-batches at a place; a deferred one over the place's devices later.

    Of a stack every row is: the sum's rows come first, before what a deferred one has.
    """

    value: int
    dtype: Any  # of the running sum
    place: Place

    @property
    def rows(self) -> tuple[int, ...]:
        return () if self.place.stacks is None else self.place.stacks.rows.get(self.value, ())

    @property
    def deferred(self) -> DeferredSum | None:
        return self.place.deferred.get(self.rows[0] if self.rows else self.value)

    @property
    def sharding(self) -> NamedSharding:
        if self.deferred is None:
            return self.place.sharding(self.value)
        found = self.deferred.sharding(self.place.mesh)
        return found.update(spec=PartitionSpec(None, *found.spec)) if self.rows else found

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.place.bound.step.program.avals[self.rows[0] if self.rows else self.value].shape
        shape = shape if self.deferred is None else self.deferred.shape(self.place.mesh, shape)
        return (len(self.rows), *shape) if self.rows else tuple(shape)

    def added(self, total: Any, x: Any) -> Any:
        """The running sum with what one micro-batch gives."""
        return total + (x if self.deferred is None else x.blocks).astype(total.dtype)

    def finished(self, total: Any, scale: float, dtype: Any) -> Any:
        """A running sum as the value that the step would have made of the whole batch."""
        found = finished(total, scale, dtype)
        return found if self.deferred is None else self.deferred.total(found, self.place.mesh, has_rows=bool(self.rows))


class StackedSum:
    """The running sum of a stack while a program adds to it: loops do row by row, and what they leave out is added at the end."""

    def __init__(self, accumulated: Accumulated, total: Any):
        self.total, self._accumulated = total, accumulated

    def added(self, total: Any, row: Any, x: Any) -> Any:
        deferred = self._accumulated.deferred
        x = (x if deferred is None else x.blocks).astype(total.dtype)
        return jax.lax.dynamic_update_index_in_dim(total, jax.lax.dynamic_index_in_dim(total, row, keepdims=False) + x, row, 0)

    def finish(self, done: Collection[int], env: Mapping[Any, Any]) -> Any:
        """The sum with the rows that are not `done`."""
        for row, v in enumerate(self._accumulated.rows):
            if row not in done:
                self.total = self.added(self.total, row, env[v])
        return self.total


def evaluate_part(
    place: Place, part: Part, inputs: dict[int, Any], own: OfMicroBatch | None = None, is_pass: bool = False
) -> dict[int, Any]:
    """All values that a part makes from `inputs`, which hold everything that it reads.

    Args:
      own: what the micro-batch has beside them.
      is_pass: a forward or backward pass, which reads gathered parameters.
    """
    evaluator, program = place.pass_evaluator if is_pass else place.evaluator, place.bound.step.program
    consts = {**program.consts, **(part.consts or {})}
    env = RowsAndStacks({k: evaluator.lift(v) for k, v in consts.items()}, place.stacks)
    env.update({v: evaluator.lift(x) for v, x in inputs.items()})
    evaluator.enter(env)
    with evaluator.of_micro_batch(own or OfMicroBatch()):
        evaluator.block(dataclasses.replace(program, eqns=part.eqns), env)
    evaluator.leave(env, part.outputs)
    return env


def rows_added(part: Part, stack: int) -> set[int]:
    """The rows of a running sum that a part's loops add."""
    found: set[int] = set()
    for e in part.eqns:
        for _, into, at in e.params.get("sums", ()) if e.body is not None else ():
            found.update(range(at, at + e.params["length"]) if into == stack else ())
    return found


def keys_in(part: Part, keys: Collection[str]) -> list[str]:
    """Those of the equations `keys` that a part evaluates, in order."""
    mine = {k for e in part.eqns for k in keys_of(e)} if keys else set()
    return sorted(mine.intersection(keys))


def jit_part(
    place: Place, part: Part, *, added: Sequence[Accumulated] = (), shares: Sequence[int] = (), draws: Collection[str] = (),
    whole: Collection[str] = (), out_shardings: dict[int, NamedSharding] | None = None, donated: Sequence[int] = (),
    is_pass: bool = False, adds_up: bool = True,
) -> Callable[..., tuple[Any, ...]]:  # fmt: skip
    """`(*values, *sums) -> (*outputs, *new sums, *shares)`, jitted on the place's mesh.

    Then come the number of the micro-batch, where the part has one of the equations `draws`, and what those of the equations
    `whole` that it has pass on, in the order of `keys_in`.

    Args:
      added: values that the part makes, each of which is added to its running sum (the arguments after the values, whose
        memory is reused).
      shares: values that the part makes, returned as blocks [1, *shape] of an array that several places make together.
      out_shardings: layouts of outputs that are not laid out as `place` keeps them.
      donated: inputs whose memory an output may take.
      is_pass: as for `evaluate_part`.
      adds_up: as for `OfMicroBatch`.
    """

    def fn(*arguments: Any) -> tuple[Any, ...]:
        rest = iter(arguments)
        values, sums = {v: next(rest) for v in part.inputs}, [next(rest) for _ in added]
        stacked = {a.value: StackedSum(a, s) for a, s in zip(added, sums, strict=True) if a.rows}
        own = OfMicroBatch(draws, next(rest) if draws else None, {k: next(rest) for k in whole}, stacked, adds_up)
        env = evaluate_part(place, part, values, own, is_pass)
        sums = [
            stacked[a.value].finish(rows_added(part, a.value), env) if a.rows else a.added(s, env[a.value])
            for a, s in zip(added, sums, strict=True)
        ]
        return (*(env[v] for v in part.outputs), *sums, *(env[v][None] for v in shares))

    draws, whole = keys_in(part, draws), keys_in(part, whole)
    fn.__name__ = fn.__qualname__ = part.name.replace(" ", "_")
    chosen = out_shardings or {}
    shardings = [chosen.get(v) or place.sharding(v) for v in part.outputs] + [a.sharding for a in added]
    shardings += [place.bound.sharding(((), *place.spec(v))) for v in shares]
    first = len(part.inputs)
    taken = tuple(k for k, v in enumerate(part.inputs) if v in set(donated)) + tuple(range(first, first + len(added)))
    return jax.jit(fn, out_shardings=tuple(shardings), donate_argnums=taken)


def finished(total: Any, scale: float, dtype: Any) -> Any:
    """A sum over micro-batches as the value that the step would have made of the whole batch."""
    return (total * jax.numpy.asarray(scale, total.dtype)).astype(dtype)


def sum_dtype(dtype: Any, *, is_float64: bool) -> Any:
    """Sums of low precision are carried in float32; in float64 where a step is evaluated in that."""
    return high(dtype) if is_float64 else jax.numpy.promote_types(dtype, "float32")
