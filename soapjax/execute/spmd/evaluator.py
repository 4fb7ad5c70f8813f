"""Running a flat program equation by equation, with a hook for every equation: one evaluator for all executors.

`ProgramEvaluator` alone reproduces the traced function; `PlannedEvaluator` (planned_evaluator.py) constrains
what the plan says. Both run inside `jax.jit`, so the walk over equations happens once per trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from soapjax.execute.spmd.max_pool import pool_gradient
from soapjax.execute.spmd.promotion import high, in_type_of, promote, promoted_bind, results_of
from soapjax.execute.spmd.slicing import block_slice
from soapjax.graph.batch.draws import is_key
from soapjax.graph.batch.unlike_sums import SCALES, as_plain
from soapjax.graph.passes.phases import module_path
from soapjax.graph.rules.pools import is_made_of_choices
from soapjax.graph.trace.flattening import flatten
from soapjax.graph.trace.program import Atom, FlatEqn, Program
from soapjax.helpers.own_config import on_plans_mesh

# Values by id (no literal is a key), and by name what an evaluator keeps beside them.
Env = dict[Atom | str, Any]


class OfMicroBatch(NamedTuple):
    """What a micro-batch has beside its part of the batch.

    draws: equations (keys) that draw random numbers for the micro-batch `number`, with it folded into their keys.
    whole: equation (key) -> what it passes on of the whole batch.
    sums: running sums, by stack, of what loops make in every trip; each has its new total afterwards.
    adds_up: whether what it makes is added to what others make, and is no step of its own (graph/batch/unlike_sums.py).
    """

    draws: Collection[str] = ()
    number: Any = None
    whole: Mapping[str, Any] = MappingProxyType({})
    sums: Mapping[int, RunningSum] = MappingProxyType({})
    adds_up: bool = True


class RunningSum(Protocol):
    """A sum over micro-batches with a leading dim: a row for each trip of a loop."""

    total: Any

    def added(self, total: Any, row: Any, x: Any) -> Any: ...  # the sum with `x` in one row


def task_mark(task: int) -> str:
    """The name-stack part by which a task is found again in the compiled program."""
    return f"sj{task}"


class ProgramEvaluator:
    """Evaluates a program on flat arguments.

    Args:
      program: what `flatten` made.
      is_float64: evaluate with every float in float64 (needs x64 enabled).
    """

    def __init__(self, program: Program, *, is_float64: bool = False):
        self.program = program
        self.is_float64 = is_float64
        self._own = OfMicroBatch()

    @contextlib.contextmanager
    def of_micro_batch(self, own: OfMicroBatch) -> Iterator[None]:
        """Equations are those of one micro-batch."""
        self._own = own
        try:
            yield
        finally:
            self._own = OfMicroBatch()

    def run(self, arguments: list[Any], also: tuple[int, ...] = ()) -> tuple[list[Any], list[Any]]:
        """The outputs, and the values of the ids in `also` (gradients, say; ids of the outermost level)."""
        env: Env = {k: self.lift(v) for k, v in self.program.consts.items()}
        env.update((i, self.as_traced(i, a)) for i, a in zip(self.program.inputs, arguments, strict=True))
        self.enter(env)
        self.block(self.program, env)
        outputs = [self.as_typed(o, self.read(o, env)) for o in self.program.outputs]
        return outputs, [env[i] for i in also]

    def lift(self, x: Any) -> Any:
        return promote(x) if self.is_float64 else x

    def as_traced(self, i: int, argument: Any) -> Any:
        """An argument in the type that it was traced with, or its float64: with x64 enabled a Python int, say, is another."""
        return in_type_of(self.program.avals[i], argument) if self.is_float64 else argument

    def read(self, atom: Atom, env: Env) -> Any:
        if isinstance(atom, int):
            return env[atom]
        value = np.asarray(atom.val, dtype=atom.aval.dtype) if hasattr(atom.aval, "dtype") else atom.val
        if self.is_float64:
            return self.lift(jnp.asarray(value))
        if getattr(atom.aval, "weak_type", False) and jax.typeof(value.item()).dtype == value.dtype:
            return value.item()  # a Python number: what is made of it stays weakly typed
        return value

    def as_typed(self, atom: Atom, x: Any) -> Any:
        """An output weakly or strongly typed as it was traced: the next step gets it, and jit functions compile for each."""
        traced = self.program.aval(atom)
        is_weak = getattr(traced, "weak_type", False)
        if self.is_float64 or x is None or (found := jax.typeof(x)).dtype != traced.dtype or found.weak_type == is_weak:
            return x
        return jax.lax.convert_element_type_p.bind(jnp.asarray(x), new_dtype=traced.dtype, weak_type=is_weak, sharding=None)

    def block(self, program: Program, env: Env) -> None:
        for eqn in program.eqns:
            with jax.named_scope(self.scope_name(eqn)), eqn.ctx.manager, on_plans_mesh():
                results = self.loop(eqn, env) if eqn.body is not None else self.equation(eqn, env)
            env.update(zip(eqn.outputs, results, strict=True))

    def scope_name(self, eqn: FlatEqn) -> str:
        """The readable path of an equation, as profilers and the compiled program show it."""
        return module_path(eqn.stack) or eqn.name

    def equation(self, eqn: FlatEqn, env: Env) -> list[Any]:
        """One equation; executors override this."""
        return self.bind(eqn, [self.read(a, env) for a in eqn.inputs], eqn.params)

    def bind(self, eqn: FlatEqn, inputs: list[Any], params: dict[str, Any]) -> list[Any]:
        if eqn.key in self._own.whole:
            return [self._own.whole[eqn.key]]
        if eqn.key in self._own.draws:
            inputs = [_numbered(x, self._own.number) for x in inputs]
        if SCALES in params:
            inputs, params = as_plain(inputs, params, is_scaled=self._own.adds_up)
        if eqn.name == "dynamic_slice":
            return [block_slice(inputs[0], inputs[1:], params["slice_sizes"])]
        if eqn.name == "device_put" and not any(eqn.params["devices"]):
            return inputs
        if is_made_of_choices(eqn):
            return [pool_gradient(inputs[0], inputs[1], params)]
        if self.is_float64 and eqn.name == "while":
            return _while_in_float64(params, inputs)
        if self.is_float64 and eqn.name == "cond":
            branches = [_in_float64(b) for b in params["branches"]]
            return list(jax.lax.switch(inputs[0].astype("int32"), branches, *inputs[1:]))
        if self.is_float64:
            dtypes = [self.program.aval(a).dtype for a in eqn.inputs]
            return promoted_bind(eqn, inputs, dtypes, params)
        return results_of(eqn, inputs, params)

    def loop(self, eqn: FlatEqn, env: Env) -> list[Any]:
        """A scan, its body evaluated in the same way."""
        body, p = eqn.body, eqn.params
        num_consts, num_carry = p["num_consts"], p["num_carry"]
        values = [self.read(a, env) for a in eqn.inputs]
        outer: Env = dict(zip(body.inputs[:num_consts], values[:num_consts], strict=True))
        carry_ids, x_ids = body.inputs[num_consts : num_consts + num_carry], body.inputs[num_consts + num_carry :]
        stacked = values[num_consts + num_carry :]
        begins, sums = p.get("begins", {}), p.get("sums", ())  # of loops that trips were put into (trip_loops.py)
        if p.get("is_mapped"):
            stacked = [x if k not in begins else x[begins[k] : begins[k] + p["length"]] for k, x in enumerate(stacked)]
            begins = {}
        xs = [x if k not in begins else jnp.arange(begins[k], begins[k] + p["length"]) for k, x in enumerate(stacked)]
        carry = self.enter_loop(eqn, values[num_consts : num_consts + num_carry], outer)
        # A body reads nothing of the outer levels but its constants.
        held: Env = {k: env[k] for k in self.program.consts if k in env}

        def step(carry: tuple[Any, ...], trip: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            (carry, totals), (t, xs) = carry, trip
            mine = [jax.lax.dynamic_index_in_dim(stacked[k], x, keepdims=False) if k in begins else x for k, x in enumerate(xs)]
            inner: Env = {**held, **outer, **dict(zip(carry_ids, carry, strict=True)), **dict(zip(x_ids, mine, strict=True))}
            self.enter_body(eqn, inner)
            self.block(body, inner)
            results = [self.read(o, inner) for o in body.outputs]
            added = (self._own.sums[s].added(x, t + at, inner[v]) for (v, s, at), x in zip(sums, totals, strict=True))
            return (tuple(results[:num_carry]), tuple(added)), tuple(results[num_carry:])

        if p.get("is_mapped"):
            return list(jax.vmap(lambda *xs: step(((), ()), (None, xs))[1])(*xs))
        totals = tuple(self._own.sums[s].total for _, s, _ in sums)
        trips = jnp.arange(p["length"]) if sums else None
        (final, totals), found = jax.lax.scan(
            step, (tuple(carry), totals), (trips, tuple(xs)), length=p["length"], reverse=p["reverse"], unroll=p.get("unroll", 1),
        )  # fmt: skip
        for (_, s, _), x in zip(sums, totals, strict=True):
            self._own.sums[s].total = x
        return [*final, *found]

    def enter(self, env: Env) -> None:
        """Called with the arguments in place."""

    def leave(self, env: Env, values: Iterable[int]) -> None:
        """Called with everything made: others go on with `values`."""

    def enter_loop(self, eqn: FlatEqn, carry: list[Any], consts: Env) -> list[Any]:
        """Called before a loop; returns the first carry."""
        # A literal as first value is weakly typed or a NumPy scalar; the carry's type must not change in the body.
        ids = eqn.body.inputs[eqn.params["num_consts"] :]
        typed = []
        for i, c in zip(ids, carry, strict=False):
            dtype = self.program.avals[i].dtype
            if is_key(self.program.avals[i]):
                typed.append(c)
            else:
                typed.append(jax.tree.map(lambda x, t=high(dtype) if self.is_float64 else dtype: jnp.asarray(x, t), c))
        return typed

    def enter_body(self, eqn: FlatEqn, env: Env) -> None:
        """Called in every trip (once per trace) with the body's arguments in place."""


def _numbered(x: Any, number: Any) -> Any:
    """A key, or an array of keys, with the number of a micro-batch in it; anything else as it is."""
    if not is_key(x):
        return x
    fold = jax.random.fold_in
    for _ in range(x.ndim):
        fold = jax.vmap(fold, (0, None))
    return fold(x, number)


def _in_float64(closed: Any) -> Callable[..., tuple[Any, ...]]:
    """A jaxpr of an opaque equation as a function that evaluates it in float64."""
    inner = ProgramEvaluator(flatten(closed), is_float64=True)

    def typed(x: Any, aval: Any) -> Any:  # a branch that returns a constant, and one that computes it, have one type
        if not hasattr(aval, "dtype") or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
            return x
        return jax.lax.convert_element_type(x, high(aval.dtype))

    return lambda *arguments: tuple(map(typed, inner.run(list(arguments))[0], closed.out_avals))


def _while_in_float64(params: dict[str, Any], inputs: list[Any]) -> list[Any]:
    """The loop in float64. A vmapped condition is one per row: a row stays as it is once its own is over."""
    condition, body = _in_float64(params["cond_jaxpr"]), _in_float64(params["body_jaxpr"])
    first, start = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

    def goes_on(carry: tuple[Any, ...]) -> Any:
        return condition(*inputs[:first], *carry)[0]

    def trip(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        rows, new = goes_on(carry), body(*inputs[first:start], *carry)
        if not rows.ndim:
            return new
        return tuple(
            jnp.where(rows.reshape(rows.shape + (1,) * (a.ndim - rows.ndim)), a, b) for a, b in zip(new, carry, strict=True)
        )  # fmt: skip

    carry: tuple[Any, ...] = tuple(map(jnp.asarray, inputs[start:]))
    carry = jax.lax.while_loop(lambda carry: goes_on(carry).any(), trip, carry)
    return list(carry)
