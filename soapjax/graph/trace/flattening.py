"""From a jaxpr to the flat program of a train step.

`flatten` inlines the call-like primitives (after differentiation: before it
the custom rules would be lost) and other libraries' primitives that are made of JAX's, gives every value one integer id that is
unique over all nesting levels, prepends the caller's name stack, and drops
dead equations. Loops (`scan`) keep their body as a nested `Program`; `while`
and `cond` stay opaque equations, but for the choice of updates (conditionals.py).

>>> closed = jax.jit(lambda x: jnp.sin(x) @ x).trace(jnp.ones((4, 4))).jaxpr
>>> [e.primitive.name for e in flatten(closed).eqns]
['sin', 'dot_general']
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core

from soapjax.graph.trace.conditionals import chosen, is_choice_of_updates
from soapjax.graph.trace.empty_values import without_operands
from soapjax.graph.trace.program import Atom, FlatEqn, Program
from soapjax.graph.trace.source_lines import Call
from soapjax.graph.trace.trips import Trip, loop_params
from soapjax.graph.trace.unstacking import Unstacked, Unstacking
from soapjax.graph.trace.whole_sums import of_all_elements

# Primitives whose sub-jaxpr is inlined. Not "whatever has a sub-jaxpr": scatter carries one too.
CALL_PRIMITIVES = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_lin": "call_jaxpr",
}

# Collectives; over vmapped axes they are reductions.
_OVER_DIMS = {"psum": jax.lax.reduce_sum, "pmax": jax.lax.reduce_max, "pmin": jax.lax.reduce_min}


class _Flattener:
    def __init__(self, unroll: bool, has_rule: Callable[[str], bool], elementwise: Container[str]):
        self.unroll, self.has_rule, self.elementwise = unroll, has_rule, elementwise
        self.avals: dict[int, Any] = {}
        self._loops = 0  # that were unrolled
        self._reshaped: dict[Atom, Atom] = {}  # what a reshape made -> of what
        self._calls: tuple[Call, ...] = ()  # that are being inlined

    def fresh(self, aval: Any) -> int:
        self.avals[len(self.avals)] = aval
        return len(self.avals) - 1

    def inline(
        self, jaxpr: Any, consts: Sequence[Atom], args: Sequence[Atom], stack: str, out: list[dict], *, barrier: bool = False,
        in_scan: bool = False,
    ) -> list[Atom]:  # fmt: skip
        """Appends the equations of an open jaxpr to `out`; returns its outputs as atoms."""
        args = self._barrier(args, stack, out) if barrier else args
        env: dict[Any, Atom] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(v: Any) -> Atom:
            return v if isinstance(v, jex_core.Literal) else env[v]

        scope, path = None, ""  # neighbours mostly stand in one
        for eqn in jaxpr.eqns:
            inputs = [read(v) for v in eqn.invars]
            if eqn.source_info.name_stack is not scope:
                scope = eqn.source_info.name_stack
                path = "/".join(p for p in (stack, str(scope)) if p)
            name = eqn.primitive.name
            if name in CALL_PRIMITIVES:
                results = self._called(eqn, inputs, path, out, in_scan=in_scan)
            elif name == "custom_linear_solve":  # differentiated already: what is left to run is the solver
                results = self.inline_closed(*_solver(eqn.params, inputs), path, out, in_scan=in_scan)
            elif name in _OVER_DIMS and all(isinstance(axis, int) for axis in eqn.params["axes"]):
                results = [self._reduced(name, eqn.params["axes"], a, path, out) for a in inputs]
            elif name == "reshape" and eqn.params["dimensions"] is not None:
                results = self._transposed_first(eqn, inputs, path, out)
            elif name == "reduce_sum" and (before := self._before_reshape(inputs[0], eqn.outvars[0].aval)) is not None:
                results = [before]
            elif not self.has_rule(name) and (closed := made_of(eqn)) is not None:
                results = self.inline_closed(closed, inputs, path, out, in_scan=in_scan)
            elif name == "cond" and not in_scan and is_choice_of_updates(eqn, self.elementwise):
                results = self._chosen(eqn, inputs, path, out)
            elif name == "scan" and (self.unroll or not eqn.params["length"]):
                results = self._unrolled(eqn, inputs, path, out)
            else:
                results = [self.fresh(v.aval) for v in eqn.outvars]
                if name == "reshape":
                    self._reshaped[results[0]] = inputs[0]
                body = self._body(eqn, path, out) if name == "scan" else None
                out.append(
                    dict(
                        primitive=eqn.primitive,
                        params=loop_params(eqn.params) if name == "scan" else eqn.params,
                        inputs=tuple(inputs),
                        outputs=tuple(results),
                        stack=path,
                        ctx=eqn.ctx,
                        body=body,
                        effects=bool(eqn.effects),
                        source_info=eqn.source_info,
                        calls=self._calls,
                    )
                )
            for var, atom in zip(eqn.outvars, results, strict=True):
                env[var] = atom
        return [read(v) for v in jaxpr.outvars]

    def inline_closed(self, closed: Any, args: Sequence[Atom], stack: str, out: list[dict], *, in_scan: bool = False) -> list[Atom]:
        """As `inline`, of a ClosedJaxpr."""
        return self.inline(closed.jaxpr, [self._const(c, out) for c in closed.consts], args, stack, out, in_scan=in_scan)

    def _called(self, eqn: Any, inputs: Sequence[Atom], stack: str, out: list[dict], *, in_scan: bool) -> list[Atom]:
        """What a call, or a checkpoint, calls, in its place."""
        name, sub = eqn.primitive.name, eqn.params[CALL_PRIMITIVES[eqn.primitive.name]]
        consts = [self._const(c, out) for c in getattr(sub, "consts", ())]
        # Without the barrier XLA merges the recomputation of remat with the original and the memory is kept. In a loop
        # nothing can be merged (prevent_cse=False), but XLA's GPU compiler takes a trip out of it, and computes that layer
        # again before the head's gradient is there: its activations would lie beside the logits.
        is_again = name in ("remat2", "checkpoint") and eqn.params.get("differentiated", False)
        keep = bool(is_again and (in_scan or eqn.params.get("prevent_cse", False)))
        around, self._calls = self._calls, (*self._calls, Call(eqn.source_info, str(eqn.params.get("name", ""))))
        results = self.inline(getattr(sub, "jaxpr", sub), consts, inputs, stack, out, barrier=keep, in_scan=in_scan)
        self._calls = around
        return results

    def _reduced(self, name: str, axes: tuple[int, ...], a: Atom, stack: str, out: list[dict]) -> Atom:
        """A collective over a vmapped axis is a reduction over a dim; over none it is its operand."""
        return self._traced(lambda x: _OVER_DIMS[name](x, axes), [a], stack, out)[0] if axes else a

    def _before_reshape(self, a: Atom, aval: Any) -> Atom | None:
        """What a sum over dims of one element that a reshape put in takes out again; None of any other sum.

        So is the derivative of what is broadcast along a batch (jax 0.10): a gradient that is made scattered, as it is stored.
        """
        before = self._reshaped.get(a) if isinstance(a, int) else None  # a literal is no key
        return before if before is not None and self._aval(before).shape == aval.shape else None

    def _transposed_first(self, eqn: Any, inputs: list[Atom], stack: str, out: list[dict]) -> list[Atom]:
        """A reshape that takes the dims in another order first, as in the derivative of a product over a dim: one by one."""
        params, around = eqn.params, self._calls
        self._calls = (*around, Call(eqn.source_info, ""))
        order, sizes = params["dimensions"], params["new_sizes"]
        results = self._traced(lambda x: jax.lax.reshape(jax.lax.transpose(x, order), sizes), inputs, stack, out)
        self._calls = around
        return results

    def _chosen(self, eqn: Any, inputs: list[Atom], path: str, out: list[dict]) -> list[Atom]:
        """Both branches of a `cond`, and of their results those of one (conditionals.py)."""
        index, *given = inputs
        branches = [self.inline_closed(b, given, path, out) for b in eqn.params["branches"]]
        return [a if a is b else self._traced(chosen, [index, a, b], path, out)[0] for a, b in zip(*branches, strict=True)]

    def _traced(self, fn: Callable[..., Any], args: list[Atom], stack: str, out: list[dict]) -> list[Atom]:
        """Inlines a small function of our own over atoms."""
        structs = [jax.ShapeDtypeStruct(self._aval(a).shape, self._aval(a).dtype) for a in args]
        closed = jax.make_jaxpr(fn)(*structs)
        return self.inline_closed(closed, args, stack, out)

    def _aval(self, atom: Atom) -> Any:
        return self.avals[atom] if isinstance(atom, int) else atom.aval

    def _barrier(self, args: Sequence[Atom], stack: str, out: list[dict]) -> Sequence[Atom]:
        index = [i for i, a in enumerate(args) if isinstance(a, int)]
        if not index:
            return args
        held = self._traced(lambda *xs: jax.lax.optimization_barrier(xs), [args[i] for i in index], stack, out)
        args = list(args)
        for i, atom in zip(index, held, strict=True):
            args[i] = atom
        return args

    def _const(self, value: Any, out: list[dict]) -> int:
        ident = self.fresh(jax.typeof(value))
        out.append(dict(const=ident, value=value))
        return ident

    def _body(self, eqn: Any, path: str, out: list[dict]) -> tuple[list[int], list[Atom], list[dict]]:
        closed = eqn.params["jaxpr"]
        inner: list[dict] = []
        # Constants of the body are values of the outermost level: a body has no constants of its own.
        consts = [self._const(c, out) for c in closed.consts]
        args = [self.fresh(v.aval) for v in closed.jaxpr.invars]
        results = self.inline(closed.jaxpr, consts, args, path, inner, in_scan=True)
        out.extend(e for e in inner if "const" in e)
        return args, results, [e for e in inner if "const" not in e]

    def _unrolled(self, eqn: Any, inputs: list[Atom], path: str, out: list[dict]) -> list[Atom]:
        p = loop_params(eqn.params)
        num_consts, num_carry, length = p["num_consts"], p["num_carry"], p["length"]
        consts, carry, xs = inputs[:num_consts], inputs[num_consts : num_consts + num_carry], inputs[num_consts + num_carry :]
        closed = p["jaxpr"]
        body_consts = [self._const(c, out) for c in closed.consts]
        ys: list[list[Atom]] = [[] for _ in eqn.outvars[num_carry:]]
        self._loops += 1
        loop = self._loops
        for t in reversed(range(length)) if p["reverse"] else range(length):
            step, begin = f"{path}/t{t}", len(out)
            slices = [self._traced(lambda x, t=t: x[t], [x], step, out)[0] for x in xs]
            results = self.inline(closed.jaxpr, body_consts, [*consts, *carry, *slices], step, out, in_scan=True)
            for k, r in enumerate(r for r in out[begin:] if "const" not in r):
                r["trip"] = Trip((loop, k), t)
            carry = results[:num_carry]
            for column, y in zip(ys, results[num_carry:], strict=True):
                column.append(y)

        def stacked(column: list[Atom], aval: Any) -> Atom:
            rows = column[::-1] if p["reverse"] else column
            if not rows:  # a loop of no trips
                return self._traced(lambda: jax.numpy.zeros(aval.shape, aval.dtype), [], path, out)[0]
            return self._traced(lambda *rows: jax.numpy.stack(rows), rows, path, out)[0]

        return [*carry, *(stacked(column, v.aval) for column, v in zip(ys, eqn.outvars[num_carry:], strict=True))]


def _solver(params: dict[str, Any], inputs: list[Atom]) -> tuple[Any, list[Atom]]:
    """The jaxpr that solves, of those of a linear solve, and what it is called with: its own constants and the right-hand sides."""
    lengths = params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    own = inputs[start : start + lengths.solve]
    return params["jaxprs"].solve, [*own, *inputs[start + lengths.solve + lengths.transpose_solve :]]


def made_of(eqn: Any) -> Any:
    """The jaxpr that another library's primitive stands for, by its own `def_impl`; None where that is no JAX code.

    Such a primitive marks what it must not be (differentiated, batched), or carries derivatives of its own: after
    differentiation only its value counts. JAX's own primitives are not made of others.
    """
    impl = eqn.primitive.impl
    if getattr(getattr(impl, "func", impl), "__module__", "jax").split(".")[0] in ("jax", "jaxlib"):
        return None
    params = eqn.primitive.get_bind_params(eqn.params)
    try:
        structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in eqn.invars]
        closed = jax.make_jaxpr(lambda *args: impl(*args, **params))(*structs)
    except Exception:  # it computes on numbers, calls a kernel, ...: whatever it is, it stays one equation
        return None
    is_same = [(a.shape, a.dtype) for a in closed.out_avals] == [(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    return closed if is_same and all(e.primitive is not eqn.primitive for e in closed.eqns) else None


def flatten(
    closed: Any, *, unroll: bool = False, has_rule: Callable[[str], bool] = lambda name: True,
    apart: Mapping[int, int] | None = None, elementwise: Container[str] = (), stack: str = "",
) -> Program:  # fmt: skip
    """The flat program of a ClosedJaxpr.

    Args:
      unroll: also unroll every scan into equations.
      has_rule: whether a primitive of this name is planned as it stands; others are looked into where they can be.
      apart: state (input leaf -> the output leaf that it becomes) that is taken apart into its rows where it is read so
        (unstacking.py); None: nothing is.
      elementwise: names of primitives that work element by element, for that.
      stack: the names under which it is called.
    """
    f = _Flattener(unroll, has_rule, elementwise)
    args = [f.fresh(v.aval) for v in closed.jaxpr.invars]
    records: list[dict] = []
    results = f.inline_closed(closed, args, stack, records)
    found = Unstacked(records, [(a,) for a in args], [(a,) for a in results])
    if apart is not None:
        found = Unstacking(records, args, results, apart, avals=f.avals, elementwise=elementwise, traced=f._traced).run()
    inputs, outputs = (tuple(a for rows in leaves for a in rows) for leaves in (found.inputs, found.outputs))
    values = {r["const"]: r["value"] for r in found.records if "const" in r}
    has_empty = any(not f.avals[a].size for a in inputs)
    records = without_operands(found.records, f.avals, f._traced) if has_empty else found.records
    records = of_all_elements(records, _values(outputs), avals=f.avals, elementwise=elementwise, traced=f._traced)
    records = _own_casts(records, set(inputs), f)
    eqns = _finish([r for r in records if "const" not in r], _values(outputs), (), f.avals)
    rows = tuple(map(len, found.inputs)), tuple(map(len, found.outputs))
    return Program(inputs, outputs, eqns, values, f.avals, rows=rows)


def _own_casts(records: list[dict], inputs: set[int], f: _Flattener) -> list[dict]:
    """Every reader of a cast input (mixed precision) gets a cast of its own.

    Else the backward pass would read the forward pass' cast copy, which then stays whole and alive although the
    parameter behind it is stored in shards. XLA merges casts that stay alike.
    """
    casts: dict[int, dict] = {}
    out: list[dict] = []
    for r in records:
        if "const" in r:
            out.append(r)
            continue
        changed = list(r["inputs"])
        for k, a in enumerate(changed):
            if isinstance(a, int) and a in casts:
                trip = r["trip"].of_operand(k) if r.get("trip") else None
                copy = dict(casts[a], outputs=(f.fresh(f.avals[a]),), stack=r["stack"], trip=trip)
                out.append(copy)
                changed[k] = copy["outputs"][0]
        r = dict(r, inputs=tuple(changed))
        if r["body"] is not None:
            args, results, inner = r["body"]
            first = r["params"]["num_consts"] + r["params"]["num_carry"]
            stable = set(args[: r["params"]["num_consts"]]) | set(args[first:])
            r["body"] = (args, results, _own_casts(inner, stable, f))
        elif r["primitive"].name == "convert_element_type" and isinstance(a := r["inputs"][0], int) and a in inputs:
            casts[r["outputs"][0]] = r
        out.append(r)
    return out


def _finish(records: list[dict], needed: set[int], prefix: tuple[int, ...], avals: dict[int, Any]) -> tuple[FlatEqn, ...]:
    """Drops dead equations and numbers the rest; `needed`: what is read of them from outside."""
    eqns = []
    for i, r in enumerate(_alive(records, needed)):
        address = (*prefix, i)
        body = None
        if r["body"] is not None:
            args, results, inner = r["body"]
            inner_eqns = _finish(inner, _values(results), address, avals)
            body = Program(tuple(args), tuple(results), inner_eqns, {}, avals)
        eqns.append(
            FlatEqn(
                address=address, primitive=r["primitive"], params=r["params"], inputs=r["inputs"], outputs=r["outputs"],
                stack=r["stack"], ctx=r["ctx"], body=body, source_info=r["source_info"], trip=r.get("trip"),
                calls=r["calls"],
            )  # fmt: skip
        )
    return tuple(eqns)


def _alive(records: list[dict], needed: set[int]) -> list[dict]:
    """Those that have effects or make something that is needed, from last to first; `needed` grows by all that they read."""
    alive = []
    for r in reversed(records):
        if r["effects"] or any(o in needed for o in r["outputs"]):
            needed.update(_values(r["inputs"]))
            if r["body"] is not None:
                args, results, inner = r["body"]
                read = _values(results)
                _alive(inner, read)
                needed.update(read - set(args))
            alive.append(r)
    return alive[::-1]


def _values(atoms: Sequence[Atom]) -> set[int]:
    return {a for a in atoms if isinstance(a, int)}
