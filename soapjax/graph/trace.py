"""From a step function and example arguments to a `TracedStep`: nothing is allocated or run.

Arguments may be arrays or `jax.ShapeDtypeStruct`s. Leaves are named by readable
paths, the first part being the parameter's name: `state.params.blk0.attn.query.kernel`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from soapjax.errors import Problem, SoapjaxError
from soapjax.garbage import fewer_collections
from soapjax.graph.program import Program, flatten


@dataclasses.dataclass(frozen=True, eq=False)
class TracedStep:
    """A traced step: its flat program, the paths of its leaves, and which outputs replace which inputs."""

    program: Program
    in_tree: Any
    out_tree: Any
    in_paths: tuple[str, ...]
    out_paths: tuple[str, ...]
    state_pairs: dict[int, int]  # input leaf -> the output leaf that becomes it in the next step

    @property
    def in_avals(self) -> list[Any]:
        return [self.program.avals[i] for i in self.program.inputs]


def leaf_paths(tree: Any, prefix: str) -> list[str]:
    """Readable paths of the leaves of a pytree."""
    paths = []
    for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        inner = jax.tree_util.keystr(path, simple=True, separator=".")
        paths.append(".".join(p for p in (prefix, inner) if p))
    return paths


def _abstract(x: Any) -> Any:
    if isinstance(x, jax.Array) or (hasattr(x, "shape") and hasattr(x, "dtype")):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))
    return x


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
    fn: Callable[..., Any], *args: Any, unroll: bool = False, static_argnums: Sequence[int] = (), **kwargs: Any
) -> TracedStep:
    """Traces `fn(*args, **kwargs)`; positions in `static_argnums` are compile-time constants.

    Raises: SoapjaxError where the function cannot be traced (the cause is named).
    """
    static = {i % len(args) for i in static_argnums} if args else set()
    # Shapes only: an array's own sharding would leave its marks in the jaxpr.
    dynamic = [jax.tree.map(_abstract, a) for i, a in enumerate(args) if i not in static]
    kwargs = jax.tree.map(_abstract, kwargs)

    @functools.wraps(fn)
    def step(*dyn: Any, **kw: Any) -> Any:
        it = iter(dyn)
        return fn(*(a if i in static else next(it) for i, a in enumerate(args)), **kw)

    try:
        traced = jax.jit(step).trace(*dynamic, **kwargs)
    except SoapjaxError:
        raise
    except Exception as e:  # noqa: BLE001 - whatever the user's function raises is reported with its own words
        message = str(e).strip().split("\n")[0]
        raise SoapjaxError(
            Problem(
                getattr(fn, "__qualname__", str(fn)),
                f"{type(e).__name__}: {message}",
                "a function that jax.jit can trace with these arguments",
                "run jax.jit(step).trace(*args) to see the whole error",
            )
        ) from e
    closed = traced.jaxpr
    names = [n for i, n in enumerate(argument_names(fn, len(args))) if i not in static]
    in_paths = [p for n, a in zip(names, dynamic, strict=True) for p in leaf_paths(a, n)]
    in_paths += [p for k in sorted(kwargs) for p in leaf_paths(kwargs[k], k)]
    out_paths = leaf_paths(traced.out_info, "out")
    program = flatten(closed, unroll=unroll)
    pairs = _state_pairs([*dynamic, *(kwargs[k] for k in sorted(kwargs))], traced.out_info)
    in_tree = jax.tree_util.tree_structure((tuple(dynamic), kwargs))
    return TracedStep(program, in_tree, jax.tree_util.tree_structure(traced.out_info), tuple(in_paths), tuple(out_paths), pairs)


def signature(tree: Any) -> tuple[Any, tuple[Any, ...]]:
    """The tree, and shape and dtype of every leaf as JAX sees them: float32 for a float64 array, int32 for a Python int.

    (Flax's `TrainState` starts at a step that is one.)
    """

    def dtype(x: Any) -> Any:
        found = x.dtype if hasattr(x, "dtype") else jax.numpy.result_type(x)
        return str(jax.dtypes.canonicalize_dtype(found, allow_extended_dtype=True))

    leaves, structure = jax.tree_util.tree_flatten(tree)
    return structure, tuple((tuple(jax.numpy.shape(x)), dtype(x)) for x in leaves)


def _state_pairs(args: list[Any], out: Any) -> dict[int, int]:
    """An argument is state where an output (or the whole output) has its signature."""
    outs = list(out) if isinstance(out, tuple | list) else [out]
    offsets, total = [], 0
    for o in outs:
        offsets.append(total)
        total += len(jax.tree_util.tree_leaves(o))
    pairs: dict[int, int] = {}
    taken: set[int] = set()
    start = 0
    for a in args:
        n = len(jax.tree_util.tree_leaves(a))
        candidates = [(offsets[j], o) for j, o in enumerate(outs)]
        if len(outs) > 1:
            candidates.append((0, out))
        for offset, o in candidates:
            if n and offset not in taken and signature(a) == signature(o):
                taken.add(offset)
                pairs.update({start + k: offset + k for k in range(n)})
                break
        start += n
    return pairs
