"""From a step to its micro-batches: which arguments are split, how what comes out is put together again.

A gradient that is a mean over the batch is the mean of the micro-batches' gradients; one that is a sum is their sum. Which
it is, the step itself tells (graph/trace/growth.py). Semantics, as in GPipe (Huang et al. 2019, section 2.3):

- batch statistics are those of each micro-batch, and moving averages move once per step: a mean, and a variance E[x²] - E[x]², by
  those of the whole batch (graph/trace/batch_means.py); a variance E[(x - E[x])²] by the mean of the micro-batches' variances;
- metrics are averaged, counts (what grows with the batch) are summed, what has a batch dim is joined along it, and of what is the
  largest or least of all samples the largest or least is taken;
- every micro-batch draws random numbers of its own: its number is folded into the key where numbers are drawn, whatever the
  schedule; a key that comes with the data stays as it is (graph/trace/draws.py);
- numbers of the batch alone, such as what a mean with weights divides by, are the whole batch's (graph/trace/whole_batch.py).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from soapjax.errors import Problem, SoapjaxError
from soapjax.graph.passes.build import build_graph
from soapjax.graph.recompute import recomputing
from soapjax.graph.trace.batch_scaling import UNKNOWN
from soapjax.graph.trace.draws import draws_alike
from soapjax.graph.trace.growth import Growth, growth_of
from soapjax.graph.trace.program import FlatEqn
from soapjax.graph.trace.tracing import TracedStep, trace
from soapjax.graph.trace.whole_batch import BatchStatistic
from soapjax.graph.trace.whole_equations import whole_equations

log = logging.getLogger("soapjax")
Reduction = Literal["auto", "mean", "sum"]
REDUCTIONS: tuple[Reduction, ...] = ("auto", "mean", "sum")
_STATISTIC = (
    "%s brings a mean, or another statistic of the batch, back to its samples: each micro-batch has its own, as of batch norm, and "
    "gradients differ by that from the whole batch's"
)
_ORDER = "%s puts samples in order, or reads them by their place: each micro-batch does so with its own alone"


@dataclasses.dataclass(frozen=True, eq=False)
class MicroStep:
    """A step traced with one micro-batch, and how its values grow with the batch."""

    step: TracedStep
    batch_leaves: tuple[int, ...]  # input leaves whose leading dim is the batch
    num_microbatches: int
    batch_size: int
    full: TracedStep
    growth: Growth  # not known where there is one micro-batch
    draws: frozenset[str] = frozenset()  # equations (keys) that draw random numbers for each micro-batch (graph/trace/draws.py)
    # Those of the forward pass that wait for all micro-batches: they make state of means over the whole batch
    # (graph/trace/batch_means.py), or results of samples by their place.
    after_all: frozenset[str] = frozenset()
    out_of_place: tuple[str, ...] = ()  # results of samples by their place that do not wait
    # Those that pass on numbers of the whole batch (graph/trace/whole_batch.py).
    whole: Mapping[str, BatchStatistic] = dataclasses.field(default_factory=dict)
    # By the key of an equation what runs in its place once per step (graph/trace/whole_equations.py).
    once: Mapping[str, FlatEqn] = dataclasses.field(default_factory=dict)


class Joining(NamedTuple):
    """How the values of micro-batches become one: "mean", "sum", "max", "min", or "join" along `dim`."""

    how: str
    dim: int = 0
    scale: float = 1.0  # of what is joined: a gradient of every sample in a mean, which is over more samples

    @property
    def is_sum(self) -> bool:
        """Whether a running sum is all that is kept; of the others every micro-batch's value is."""
        return self.how in ("mean", "sum")

    def of(self, values: Sequence[jax.Array]) -> jax.Array:
        """The one of all micro-batches' values, where no running sum is kept."""
        if self.how != "join":
            return getattr(jnp, self.how)(jnp.stack(values), axis=0)
        found = jnp.concatenate(values, self.dim)
        return found if self.scale == 1 else (found * self.scale).astype(found.dtype)


def micro_step(
    fn: Any, *args: Any, num_microbatches: int, static_argnums: Sequence[int] = (), full: TracedStep | None = None,
    recomputed: Collection[str] = (), **tracing: Any,
) -> MicroStep:  # fmt: skip
    """Traces `fn` with one micro-batch, and with the whole batch where that (`full`) is not given.

    Args:
      recomputed: operators that the backward pass computes again, in `full` too.
      tracing: as for `trace`.
    Raises: SoapjaxError where the batch is not to be found, micro-batches do not divide it, or an operator cannot be recomputed.
    """

    def traced(*given: Any) -> TracedStep:
        return recomputing(trace(fn, *given, static_argnums=static_argnums, **tracing), recomputed)

    full = traced(*args) if full is None else full
    if num_microbatches < 1:
        problem = Problem("microbatches", str(num_microbatches), "at least 1", "choose 1 or more micro-batches")
        raise SoapjaxError(problem)
    leaves = batch_leaves(full)
    size = full.in_avals[leaves[0]].shape[0]
    if size % num_microbatches:
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        near = sorted(divisors, key=lambda d: (abs(d - num_microbatches), d))[:3]
        expected = f"a divisor of the batch of {size} ({full.in_paths[leaves[0]]})"
        raise SoapjaxError(
            Problem("microbatches", str(num_microbatches), expected, f"choose {' or '.join(map(str, sorted(near)))}")
        )
    if num_microbatches == 1:
        return MicroStep(full, leaves, 1, size, full, Growth(full.program, full.program, {}, frozenset()))
    static = {i % len(args) for i in static_argnums} if args else set()
    dynamic = tuple(a for i, a in enumerate(args) if i not in static)

    def with_samples(samples: int) -> TracedStep:
        flat, tree = jax.tree_util.tree_flatten(dynamic)
        for i in leaves:
            aval = full.in_avals[i]
            flat[full.leaf_of[i]] = jax.ShapeDtypeStruct((samples, *aval.shape[1:]), aval.dtype)
        rest = iter(jax.tree_util.tree_unflatten(tree, flat))
        try:
            return traced(*(a if i in static else next(rest) for i, a in enumerate(args)))
        except SoapjaxError as e:
            cut = ", ".join(full.in_paths[i] for i in leaves[:4]) + (", ..." if len(leaves) > 4 else "")
            of_part = f"traced with {samples} of {size} samples (of {cut}): "
            problems = [p._replace(value=of_part + p.value) for p in e.problems]
            rows = [full.in_paths[i] for i in full.state_pairs if full.in_avals[i].shape[:1] == (size,)]
            if rows:
                may_be = f"state is not cut, and {rows[0]} has {size} rows: if they are the samples', pass it with the batch"
                remedy = f"{may_be}, and return it as a result; else correct the step"
                problems = [p._replace(remedy=remedy) for p in problems]
            raise SoapjaxError(problems) from e

    small = with_samples(size // num_microbatches)
    grows = growth_of(small, full, leaves, num_microbatches, with_samples=with_samples)
    draws = draws_alike(small.program, {small.program.inputs[k] for k in leaves})
    program, whole = grows.with_whole(small.program, num_microbatches)
    once = whole_equations(small.program, full.program, num_microbatches)
    state = set(small.state_pairs.values())
    outputs = list(enumerate(zip(small.out_paths, small.program.outputs, strict=True)))
    results = {v: path for k, (path, v) in outputs if k not in state and isinstance(v, int)}
    by_place = grows.from_places(list(results), [v for k, (_, v) in outputs if k in state])
    return MicroStep(
        step=dataclasses.replace(small, program=program), batch_leaves=leaves, num_microbatches=num_microbatches, batch_size=size,
        full=full, growth=grows, draws=draws, whole=whole, once=once,
        after_all=grows.after_means(small.program.outputs).union(*by_place.values()),
        out_of_place=tuple(results[v] for v, keys in by_place.items() if not keys),
    )  # fmt: skip


def batch_leaves(step: TracedStep) -> tuple[int, ...]:
    """The input leaves, beside the training state, whose leading dim is the batch: the size that most of those share that are read.

    Not weights that are given beside the state (graph/passes/samples.py). Arguments, or parts of them, whose leaves all have one
    come before those that hold others too; one sample is no batch where there are others.

    Raises: SoapjaxError where no argument has a leading dim.
    """
    given = build_graph(step)[1].given
    others = {i for i, v in enumerate(step.program.inputs) if v in given or i in step.state_pairs}
    shapes = {i: a.shape for i, a in enumerate(step.in_avals) if i not in others and a.shape}
    if not shapes:
        expected = "an argument beside the training state with a leading batch dim"
        remedy = "pass the batch as an argument of the step; the state is what the step returns anew"
        raise SoapjaxError(Problem("train step", "no batch among its arguments", expected, remedy))
    read = {i: s[0] for i, s in shapes.items() if step.is_read[i]} or {i: s[0] for i, s in shapes.items()}
    sizes = collections.Counter(read.values())
    of_arguments, of_parts = (_shared({step.in_paths[i]: n for i, n in read.items()}, depth) for depth in (1, 2))
    size = max(sizes, key=lambda n: (n > 1, n in of_arguments, n in of_parts, sizes[n], n))
    return tuple(i for i, s in shapes.items() if s[0] == size)


def _shared(sizes: Mapping[str, int], depth: int) -> set[int]:
    """Sizes, by path, that are those of all paths with which they begin alike, for so many names."""
    found = collections.defaultdict(set)
    for path, size in sizes.items():
        found[tuple(path.split(".")[:depth])].add(size)
    return {size for alike in found.values() if len(alike) == 1 for size in alike}


def found_reduction(
    micro: MicroStep, gradients: Sequence[tuple[str, int]], reduction: str, *, is_asked_for: bool = True
) -> str:  # fmt: skip
    """How micro-batches' gradients (path, value) become the step's: "mean" or "sum".

    Args:
      reduction: what the loss is said to be of its batch; "auto": a sum where all gradients are known to be sums.
      is_asked_for: whether somebody asked for micro-batches: what cannot be told is trusted then, with a warning.
    Raises: SoapjaxError naming the first gradients that are otherwise.
    """
    if reduction not in REDUCTIONS:
        expected = " or ".join(map(repr, REDUCTIONS))
        raise SoapjaxError(Problem("microbatch_reduction", repr(reduction), expected, "choose one of these"))
    found = [(path, s) for path, v in gradients if (s := micro.growth.of(v)) is not None]
    place = "microbatch_reduction"
    if ratios := [path for path, s in found if s.is_ratio]:
        value = f"the gradient of {ratios[0]!r} (and {len(ratios) - 1} more) is divided by a sum over the batch's results"
        expected = "a loss divided by a constant, or by what is made of the batch alone, as a sum of its weights is"
        remedy = "divide by a fixed count (the batch size, say), or use one micro-batch"
        raise SoapjaxError(Problem(place, value, expected, remedy))
    if extremes := [path for path, s in found if s.extreme]:
        value = f"the gradient of {extremes[0]!r} (and {len(extremes) - 1} more) is the largest or least value of a batch"
        expected = "gradients that add up: micro-batches have other ones (as fp8's scales)"
        raise SoapjaxError(Problem(place, value, expected, "use one micro-batch, or plan without a pipeline"))
    if mixed := [path for path, s in found if s.is_mixed]:
        value = f"the gradient of {mixed[0]!r} (and {len(mixed) - 1} more) adds up what grows with the batch and what does not"
        expected = "a loss that is all a mean over the batch, or all a sum: a sum beside a penalty of the weights, say, is neither"
        remedy = "take the mean, or divide the sum by the batch's own size (x.shape[0]); or use one micro-batch"
        raise SoapjaxError(Problem(place, value, expected, remedy))
    unknown = [path for path, s in found if s.power is None and not s.is_zero]
    if unknown and micro.growth.is_known:
        named = f"{unknown[0]!r}" + (f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else "")
        if not is_asked_for:
            value = f"how the gradient of {named} grows with the batch is not known"
            remedy = "say how many micro-batches, if that will do"
            raise SoapjaxError(Problem(place, value, "a mean over the batch, or a sum", remedy))
        warn_once("how the gradient of %s grows with the batch is not known: that the loss is a mean over it is trusted", named)
    powers = {s.power for _, s in found if not s.is_zero}
    reduction = ("sum" if powers == {1.0} else "mean") if reduction == "auto" else reduction
    wanted = {"mean": 0.0, "sum": 1.0}[reduction]
    if not micro.growth.is_known and micro.num_microbatches > 1:
        part = f"{micro.batch_size // micro.num_microbatches} of {micro.batch_size} samples"
        warn_once("with %s the step is another program: that its micro-batches add up to the whole batch is trusted", part)
    if micro.growth.is_known:
        mixing = micro.growth.mixing([v for _, v in gradients])
        if (pairs := mixing.pairs()) is not None:
            value = f"the loss is made of a value of shape {list(mixing.shape(pairs))}, every sample with every other"
            expected = "a loss of every sample by itself, or a mean: micro-batches have fewer pairs"
            raise SoapjaxError(Problem(place, value, expected, "use one micro-batch, or plan without a pipeline"))
        if (fixed := mixing.fixed_rows()) is not None:
            value = f"the loss joins a fixed number of samples to others ({fixed.source}: {list(mixing.shape(fixed))})"
            expected = "a share of the batch: of a micro-batch a fixed number is a larger share"
            raise SoapjaxError(Problem(place, value, expected, "slice by the batch's own size, or use one micro-batch"))
        if (read := mixing.by_number()) is not None:
            at = f"{read.source}: {list(mixing.shape(read))}"
            value = f"samples are read, or added to, by numbers that come with the batch ({at})"
            expected = "a loss of every sample by itself: the numbers count those of the whole batch"
            raise SoapjaxError(Problem(place, value, expected, "use one micro-batch, or plan without a pipeline"))
        if (statistic := mixing.statistic()) is not None:
            warn_once(_STATISTIC, f"{statistic.source or statistic.name} ({list(mixing.shape(statistic))})")
        if (moved := mixing.order()) is not None:
            warn_once(_ORDER, f"{moved.source or moved.name} ({moved.name}: {list(mixing.shape(moved))})")
    other = [(path, s.power) for path, s in found if s.power is not None and not s.is_zero and s.power != wanted]
    if other and reduction == "mean" and all(p == 0.0 or p == 1.0 for _, p in other):
        value = f"'mean', and the gradient of {other[0][0]!r} (and {len(other) - 1} more) is a sum over the batch"
        raise SoapjaxError(Problem(place, value, "a loss that is a mean over the batch", f"say {place}='sum', or take the mean"))
    if other:
        value = f"{reduction!r}, and the gradient of {other[0][0]!r} (and {len(other) - 1} more) grows as batch^{other[0][1]:g}"
        remedy = "say 'mean'" if all(p == 0.0 for _, p in other) else "make the loss a mean over the batch, or use one micro-batch"
        raise SoapjaxError(Problem(place, value, f"a loss that is a {reduction} over the batch", remedy))
    return reduction


@functools.lru_cache(256)  # a plan that is checked is made more than once
def warn_once(message: str, *args: str) -> None:
    """A warning, once until `warn_anew`."""
    log.warning(message, *args)


def warn_anew() -> None:
    """Another step is planned, which may have the same trouble."""
    warn_once.cache_clear()


def averaged_blindly(micro: MicroStep, averaged: Collection[int], gradients: Collection[int]) -> list[str]:
    """Results that are averaged, or made of `averaged` values, and are no mean over the batch, or not known to be one."""
    state = set(micro.step.state_pairs.values())
    results = {
        p: v for k, (p, v) in enumerate(zip(micro.step.out_paths, micro.step.program.outputs, strict=True))
        if isinstance(v, int) and k not in state and not micro.growth.sample_dims(v)
    }  # fmt: skip
    no_means = micro.growth.no_means(list(results.values()), gradients)
    found = []
    for path, v in results.items():
        scaling = micro.growth.of(v) or UNKNOWN
        is_other = not scaling.is_zero and (scaling.power != 0 or scaling.extreme or scaling.is_ratio)
        if (v in averaged and is_other) or v in no_means:
            found.append(path)
    return found


def joining(micro: MicroStep, value: int, reduction: str, *, is_gradient: bool = False) -> Joining | None:
    """How one value of every micro-batch becomes the value of the step; None where that is not known."""
    if micro.num_microbatches == 1:
        return Joining("sum")
    if is_gradient:
        return Joining(reduction)
    scaling = micro.growth.of(value)
    if dims := micro.growth.sample_dims(value):
        is_number = jax.dtypes.issubdtype(micro.step.program.avals[value].dtype, np.inexact)
        power = scaling.power if scaling is not None and is_number else 0.0
        return Joining("join", dims[0], micro.num_microbatches ** (power or 0.0)) if len(dims) == 1 else None
    if scaling is not None and scaling.power == 1.0:
        return Joining("sum")
    if scaling is not None and scaling.extreme in ("max", "min") and value in micro.step.program.outputs:
        return Joining(scaling.extreme)
    return Joining("mean") if jax.dtypes.issubdtype(micro.step.program.avals[value].dtype, np.inexact) else None
