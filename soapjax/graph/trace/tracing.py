"""From a step function and example arguments to a `TracedStep`: nothing is allocated or run.

Arguments may be arrays or `jax.ShapeDtypeStruct`s. Leaves are named by readable
paths, the first part being the parameter's name: `state.params.blk0.attn.query.kernel`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from soapjax.errors import Problem, SoapjaxError
from soapjax.graph.batch.growth_rules import is_backward
from soapjax.graph.rules.light_rules import ELEMENTWISE, is_known
from soapjax.graph.trace.dataflow import follow, needed_for
from soapjax.graph.trace.explicit_axes import without_layouts
from soapjax.graph.trace.flattening import flatten
from soapjax.graph.trace.one_program import for_one_program, noting_device_counts
from soapjax.graph.trace.program import Program
from soapjax.graph.trace.source_lines import line_of_error
from soapjax.helpers.garbage import fewer_collections
from soapjax.helpers.own_config import has_explicit_axes, without_mesh

CORRECT = "correct the step at that line"  # the remedy of what JAX cannot trace
Unroll = bool | Literal["rows"]  # loops stay, are unrolled, or are unrolled with the stacked state that they read taken apart


@dataclasses.dataclass(frozen=True, eq=False)
class TracedStep:
    """A traced step: its flat program, the paths of its leaves, and which outputs replace which inputs.

    Inputs are those of the program: where a leaf of the arguments is taken apart into its rows (`unroll="rows"`), each row is one,
    `state.w[2]`. Trees, and what is called `leaf_...`, are of the arguments as the user has them.
    """

    program: Program
    in_tree: Any
    out_tree: Any
    leaf_paths: tuple[str, ...]  # of the arguments as the user has them,
    leaf_shapes: tuple[tuple[tuple[int, ...], str], ...]  # their shapes and dtypes,
    leaf_pairs: dict[int, int]  # and those that are state, as in `state_pairs`
    in_paths: tuple[str, ...]
    out_paths: tuple[str, ...]
    state_pairs: dict[int, int]  # input leaf -> the output leaf that becomes it in the next step
    in_names: tuple[str, ...] = ()  # of the arguments
    # As it was traced, and the fingerprint of that graph, where `program` recomputes something (recompute.py).
    traced_program: Program | None = None
    fingerprint: str = ""

    @property
    def in_avals(self) -> list[Any]:
        return [self.program.avals[i] for i in self.program.inputs]

    @property
    def out_avals(self) -> list[Any]:
        return [self.program.aval(o) for o in self.program.outputs]

    @functools.cached_property
    def leaf_of(self) -> tuple[int, ...]:
        """Per input of the program the leaf of the arguments that it is, or is a row of."""
        return tuple(k for k, n in enumerate(self.program.rows[0]) for _ in range(n))

    def rows_of(self, leaves: Sequence[Any]) -> list[Any]:
        """The program's inputs of flat arguments."""
        rows = self.program.rows[0]
        return [y for x, n in zip(leaves, rows, strict=True) for y in ([x] if n == 1 else [x[t] for t in range(n)])]

    @functools.cached_property
    def is_read(self) -> tuple[bool, ...]:
        """Per input leaf whether an equation reads it, or the step returns it."""
        read = {a for eqn, _ in self.program.walk() for a in eqn.read}
        read.update(a for a in self.program.outputs if isinstance(a, int))
        return tuple(i in read for i in self.program.inputs)


def leaf_paths(tree: Any, prefix: str) -> list[str]:
    """Readable paths of the leaves of a pytree."""
    paths = []
    for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        inner = jax.tree_util.keystr(path, simple=True, separator=".")
        paths.append(".".join(p for p in (prefix, inner) if p))
    return paths


def _abstract(x: Any) -> Any:
    if isinstance(x, jax.Array) or (hasattr(x, "shape") and hasattr(x, "dtype")):
        # As it will be given to the step: jax 0.11 warns of 64 bits that are not switched on.
        dtype = jax.dtypes.canonicalize_dtype(x.dtype) if isinstance(x, np.ndarray | np.generic) else x.dtype
        return jax.ShapeDtypeStruct(x.shape, dtype, weak_type=getattr(x, "weak_type", False))
    return x


def check_leaves(args: Sequence[Any], names: Sequence[str]) -> None:
    """Raises: SoapjaxError naming every leaf that is neither an array nor a number."""
    problems = []
    for name, argument in zip(names, args, strict=False):
        for path, x in zip(leaf_paths(argument, name), jax.tree_util.tree_leaves(argument), strict=True):
            if isinstance(x, jax.Ref):
                value, expected = "a mutable array (jax.Ref)", "an array, whose new value the step returns"
                problems.append(Problem(f"argument {path}", value, expected, "give it x[...], and write what comes back into x"))
                continue
            if isinstance(x, jax.ShapeDtypeStruct | jax.Array):
                continue
            try:
                jax.typeof(x)
            except TypeError:
                kind = f"{type(x).__module__}.{type(x).__qualname__}"
                value = f"{x!r}, a {type(x).__name__}" if isinstance(x, str | bytes) else f"a {kind}"
                problems.append(Problem(f"argument {path}", value, "an array or a number", _instead(x, name)))
    if problems:
        raise SoapjaxError(problems)


def _instead(x: Any, name: str) -> str:
    if hasattr(x, "__array__") or hasattr(x, "numpy"):
        return "convert it with np.asarray (a torch tensor: .numpy()) before the call"
    return f"leave it out of what the step is given, or name {name!r} in static_argnames where all of it is constant"


def argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    """The names of the first `count` positional parameters, `arg0` where there is none."""
    try:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [p.name for p in inspect.signature(fn).parameters.values() if p.kind in kinds]
    except (TypeError, ValueError):
        names = []
    return [names[i] if i < len(names) else f"arg{i}" for i in range(count)]


@fewer_collections()
def trace(
    fn: Callable[..., Any], *args: Any, unroll: Unroll = False, static_argnums: Sequence[int] = (),
    axis_name: str | Sequence[str] = (), strip_constraints: bool = False, **kwargs: Any,
) -> TracedStep:  # fmt: skip
    """Traces `fn(*args, **kwargs)`; positions in `static_argnums` are compile-time constants.

    Args:
      unroll: loops (`scan`) into their iterations; "rows": and the state that they read row by row into its rows.
      axis_name: axes over which the step's collectives go, as for `jax.pmap`: the whole batch is their one member.
      strip_constraints: leave the step's own sharding constraints out.
    Raises: SoapjaxError where an argument is no array, and where the function cannot be traced: the cause is named, with its line,
      and the exception is the error's `__cause__`.
    """
    static = {i % len(args) for i in static_argnums} if args else set()
    all_names = argument_names(fn, len(args))
    names = [n for i, n in enumerate(all_names) if i not in static]
    check_leaves([*(a for i, a in enumerate(args) if i not in static), *kwargs.values()], [*names, *kwargs])
    dynamic = tuple(a for i, a in enumerate(args) if i not in static)
    leaves, in_tree = jax.tree_util.tree_flatten((dynamic, kwargs))
    # Shapes only: an array's own sharding would leave its marks in the jaxpr. Leaf by leaf: nodes that look at their leaves as they
    # are made get arrays, or tracers of them.
    leaves = list(map(_abstract, leaves))
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    made: dict[str, Any] = {}  # of the results, as the function makes them

    @functools.wraps(fn)
    def step(*leaves: Any) -> Any:
        dyn, kw = jax.tree_util.tree_unflatten(in_tree, leaves)
        it = iter(dyn)
        out = fn(*(a if i in static else next(it) for i, a in enumerate(args)), **kw)
        made["paths"] = leaf_paths(out, "out")
        found, made["tree"] = jax.tree_util.tree_flatten(out)
        return found

    try:
        with jax.disable_jit(False):
            closed, results = _jaxpr_of(step, leaves, axes)
    except SoapjaxError:
        raise
    except Exception as e:  # noqa: BLE001 - whatever the user's function raises is reported with its own words
        raise SoapjaxError(_untraceable(fn, e)) from e
    if axes or strip_constraints:
        closed = for_one_program(closed, axes, strip_constraints=strip_constraints)
    if len(closed.jaxpr.invars) != len(leaves):
        value, expected = "closes over a tracer, an array of another trace", "a function of its arguments and of arrays"
        remedy = "make that array with NumPy, or outside of jax.jit, jax.grad and the like; or pass it as an argument"
        raise SoapjaxError(Problem(getattr(fn, "__qualname__", str(fn)), value, expected, remedy))
    of_arguments = (*names, *sorted(kwargs))
    given = [*dynamic, *(kwargs[k] for k in sorted(kwargs))]
    of_leaves = signature(leaves)[1]
    trees = list(map(jax.tree_util.tree_structure, given))
    pairs = _state_pairs(trees, of_leaves, made["tree"], signature(results)[1])
    apart = pairs if unroll == "rows" else None
    program = flatten(closed, unroll=bool(unroll), has_rule=is_known, apart=apart, elementwise=ELEMENTWISE)
    (in_rows, out_rows), pairs = program.rows, _not_by_chance(pairs, trees, of_leaves, program)
    paths = tuple(p for n, a in zip(of_arguments, given, strict=True) for p in leaf_paths(a, n))
    return TracedStep(
        program, in_tree, made["tree"], paths, of_leaves, pairs, in_paths=_paths_of_rows(paths, in_rows),
        out_paths=_paths_of_rows(made["paths"], out_rows), state_pairs=_pairs_of_rows(pairs, in_rows, out_rows),
        in_names=of_arguments,
    )  # fmt: skip


def _jaxpr_of(step: Callable[..., Any], args: Sequence[Any], axes: tuple[str, ...]) -> tuple[Any, Any]:
    """The program of a function, without layouts in its types, and the types of its results."""

    def traced() -> tuple[Any, Any]:
        if axes:
            with noting_device_counts(axes):
                axis_env = [(a, 1) for a in axes]
                return jax.make_jaxpr(jax.jit(step), axis_env=axis_env, return_shape=True)(*args)
        found = jax.jit(step).trace(*args)
        return found.jaxpr, found.out_info

    if not has_explicit_axes():
        return traced()
    try:
        with without_mesh():
            return traced()
    except Exception:  # noqa: BLE001 - a step that asks for layouts is traced with its mesh; what else is wrong is raised again there
        closed, out_info = traced()
        return without_layouts(closed, jax.sharding.get_mesh()), out_info


def _paths_of_rows(paths: Sequence[str], rows: Sequence[int]) -> tuple[str, ...]:
    return tuple(p if n == 1 else f"{p}[{t}]" for p, n in zip(paths, rows, strict=True) for t in range(n))


def _pairs_of_rows(pairs: dict[int, int], in_rows: Sequence[int], out_rows: Sequence[int]) -> dict[int, int]:
    ins, outs = np.cumsum([0, *in_rows]).tolist(), np.cumsum([0, *out_rows]).tolist()
    return {ins[k] + t: outs[o] + t for k, o in pairs.items() for t in range(in_rows[k])}


def _untraceable(fn: Callable[..., Any], e: Exception) -> Problem:
    """What a user's function raised while it was traced, at its own line."""
    line = line_of_error(e)
    place = getattr(fn, "__qualname__", str(fn)) + (f", {line}" if line else "")
    message = " ".join(str(e).strip().split("\n\n")[0].split())
    value = f"{type(e).__name__}: {message}" if message else type(e).__name__
    if isinstance(e, NameError) and "unbound axis name" in message:
        name = message.partition("unbound axis name: ")[2].split(".")[0]
        expected = "an axis that is known under one program"
        remedy = f"pass axis_name={name!r} (--axis-name {name}): its one member is the whole batch then"
        return Problem(place, value, expected, remedy)
    if isinstance(e, TypeError) and not line:  # before its first line: another number of arguments, or other names
        return Problem(place, value, "a call with the arguments that the step takes", "pass these, and no others")
    return Problem(place, value, "a function that jax.jit can trace with these arguments", CORRECT)


def signature(tree: Any) -> tuple[Any, tuple[Any, ...]]:
    """The tree, and shape and dtype of every leaf as JAX sees them: float32 for a float64 array, int32 for a Python int.

    (Flax's `TrainState` starts at a step that is one.)
    """

    def dtype(x: Any) -> Any:
        found = x.dtype if hasattr(x, "dtype") else jax.numpy.result_type(x)
        return str(jax.dtypes.canonicalize_dtype(found, allow_extended_dtype=True))

    leaves, structure = jax.tree_util.tree_flatten(tree)
    return structure, tuple((tuple(jax.numpy.shape(x)), dtype(x)) for x in leaves)


def _state_pairs(args: Sequence[Any], leaves: Sequence[Any], out: Any, results: Sequence[Any]) -> dict[int, int]:
    """An argument is state where an output, the whole output, or a part of an output, has its structure, shapes and dtypes; most of
    it is where these have most of it: a dict with fewer keys, a leaf of another dtype.

    Args:
      args, out: structures of the arguments, and of the output.
      leaves, results: shape and dtype of their leaves.
    """
    candidates = _parts_of(out)
    pairs: dict[int, int] = {}
    taken: set[int] = set()  # leaves of the output
    starts = list(itertools.accumulate((a.num_leaves for a in args), initial=0))
    # The largest first: a batch may look like one of the parameters.
    for start, a in sorted(zip(starts, args, strict=False), key=lambda argument: -argument[1].num_leaves):
        n = a.num_leaves
        for is_member, offset, o in candidates:
            mine = range(offset, offset + n)
            # A single leaf inside a result, of metrics, say, may look like an argument by chance.
            may_be = n > 1 or (n == 1 and is_member)
            if may_be and o == a and results[offset : offset + n] == leaves[start : start + n] and taken.isdisjoint(mine):
                taken.update(mine)
                pairs.update({start + k: offset + k for k in range(n)})
                break
        else:
            like = [_alike(start, a, offset, o, leaves, results) for is_member, offset, o in candidates if is_member and n > 1]
            found = max(like, key=len, default={})
            if len(found) > n / 2 and taken.isdisjoint(found.values()):
                taken.update(found.values())
                pairs.update(found)
    return pairs


def _not_by_chance(pairs: dict[int, int], args: Sequence[Any], leaves: Sequence[Any], program: Program) -> dict[int, int]:
    """Without single arrays, beside a larger state, that are as long as the data, and of which nothing trained comes back: a step
    that returns a value for every sample is given rewards of that shape."""
    starts = list(itertools.accumulate((a.num_leaves for a in args), initial=0))
    singles = [k for k, a in zip(starts, args, strict=False) if a.num_leaves == 1 and k in pairs and leaves[k][0]]
    if len(singles) == len(pairs):
        return pairs
    data = {shape[0] for k, (shape, _) in enumerate(leaves) if k not in pairs and shape}
    ins, outs = (np.cumsum([0, *rows]).tolist() for rows in program.rows)
    by_chance = set()
    for k in singles:
        v, out = program.inputs[ins[k]], program.outputs[outs[pairs[k]]]
        if leaves[k][0][0] in data and isinstance(out, int):
            follow(program, of_it := {v})
            if out not in of_it or not any(map(is_backward, needed_for(program, {out}))):
                by_chance.add(k)
    return {k: o for k, o in pairs.items() if k not in by_chance}


def _alike(start: int, a: Any, offset: int, o: Any, leaves: Sequence[Any], results: Sequence[Any]) -> dict[int, int]:
    """Leaves of an argument, and of the output, at the same places of two trees, as far as these are the same."""
    if a.num_leaves == o.num_leaves == 1 and not a.children() and not o.children():
        return {start: offset} if leaves[start] == results[offset] else {}
    mine, theirs = (dict(zip(_keys(t), _children(first, t), strict=True)) for first, t in ((start, a), (offset, o)))
    if (a.node_data() or (None,))[0] is not (o.node_data() or (None,))[0] or not mine:
        return {}
    if (a.node_data() or (None,))[0] is not dict and a.node_data() != o.node_data():
        return {}
    both = ((mine[k], theirs[k]) for k in mine.keys() & theirs.keys())
    return {i: j for (s, x), (t, y) in both for i, j in _alike(s, x, t, y, leaves, results).items()}


def _keys(tree: Any) -> list[Any]:
    """Of the children: a dict's keys, elsewhere their numbers."""
    kind, data = tree.node_data() or (None, None)
    return list(data) if kind is dict else list(range(len(tree.children())))


def _parts_of(tree: Any) -> list[tuple[bool, int, Any]]:
    """An output's members, it, and its members' parts: whether it is the output or a member of a tuple, its first leaf, and it."""
    levels = [[(0, tree)]]
    while below := [child for offset, t in levels[-1] for child in _children(offset, t)]:
        levels.append(below)
    kind = (tree.node_data() or (None,))[0]
    is_sequence = isinstance(kind, type) and issubclass(kind, tuple | list)
    first = [(is_sequence, *part) for part in levels[1]] if len(levels) > 1 else []
    return [*first, (True, 0, tree), *((False, *part) for level in levels[2:] for part in level)]


def _children(offset: int, tree: Any) -> list[tuple[int, Any]]:
    children = tree.children()
    starts = itertools.accumulate((c.num_leaves for c in children), initial=offset)
    return list(zip(starts, children, strict=False))
