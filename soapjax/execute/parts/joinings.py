"""How what micro-batches make becomes what the whole batch would have made: gradients, and all that crosses into the update.

A gradient that is a mean over the batch is the mean of the micro-batches' gradients; one that is a sum is their sum. Which it is,
the step itself tells (graph/batch/growth.py); where it is neither, or samples are mixed, that is refused or warned of.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.parts.microbatches import MicroStep
from soapjax.execute.parts.stage_cut import StageCut
from soapjax.graph.batch.causes import largest_behind, sort_behind
from soapjax.graph.batch.earlier_gradients import earlier_gradient
from soapjax.graph.batch.growth_rules import UNKNOWN, Scaling
from soapjax.graph.batch.sample_mixing import SampleMixing
from soapjax.graph.trace.program import FlatEqn

log = logging.getLogger("soapjax")
Reduction = Literal["auto", "mean", "sum"]
REDUCTIONS: tuple[Reduction, ...] = ("auto", "mean", "sum")
_STATISTIC = (
    "%s brings a mean, or another statistic of the batch, back to its samples: each micro-batch has its own, as of batch norm, and "
    "gradients differ by that from the whole batch's"
)
_ORDER = "%s puts samples in order, or reads them by their place: each micro-batch does so with its own alone"
_UNKNOWN = "how the gradient of %s grows with the batch is not known%s: that the loss is a mean over it is trusted"
_PLACE = "microbatch_reduction"
_TIME = "use one micro-batch, or plan without a pipeline; where that dim is time, or counts edges, give data with the batch first"


class Joining(NamedTuple):
    """How the values of micro-batches become one: "mean", "sum", "max", "min", or "join" along `dim`."""

    how: str
    dim: int = 0
    scale: float = 1.0  # of what is joined: a gradient of every sample in a mean, which is over more samples

    @property
    def is_sum(self) -> bool:
        """Whether a running sum is all that is kept; of the others every micro-batch's value is."""
        return self.how in ("mean", "sum")

    def shape(self, of_one: Sequence[int], num: int) -> tuple[int, ...]:
        """Of `num` micro-batches' values, of such a shape, together."""
        return tuple(n * num if self.how == "join" and d == self.dim else n for d, n in enumerate(of_one))

    def of(self, values: Sequence[Any], numpy: Any = jnp) -> Any:
        """The one of all micro-batches' values, where no running sum is kept."""
        if self.how != "join":
            return getattr(numpy, self.how)(numpy.stack(values), axis=0)
        found = numpy.concatenate(values, self.dim)
        return found if self.scale == 1 else (found * self.scale).astype(found.dtype)


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
        raise SoapjaxError(Problem(_PLACE, repr(reduction), expected, "choose one of these"))
    found = [(path, s) for path, v in gradients if (s := micro.growth.of(v)) is not None]
    values = [v for _, v in gradients]
    _check_growth(micro, found, values, is_asked_for=is_asked_for or not micro.growth.is_known)
    powers = {s.power for _, s in found if not s.is_zero}
    is_either = reduction == "auto"  # of two losses one may be a mean, and the other a sum (see `joining`)
    reduction = ("sum" if powers == {1.0} else "mean") if reduction == "auto" else reduction
    wanted = {"mean": 0.0, "sum": 1.0}[reduction]
    if not micro.growth.is_known and micro.num_microbatches > 1:
        part = f"{micro.batch_size // micro.num_microbatches} of {micro.batch_size} samples"
        warn_once("with %s the step is another program: that its micro-batches add up to the whole batch is trusted", part)
    unknown = [path for path, s in found if _is_unknown(s)]
    if micro.growth.is_known:
        _check_samples(micro, values, _named(unknown) if unknown and is_either else "")
    if unknown:
        line = micro.growth.line_of(values, _is_unknown)
        warn_once(_UNKNOWN, _named(unknown), f" ({line})" if line else "")
    other = [
        (path, s.power) for path, s in found
        if s.power is not None and not s.is_zero and s.power != wanted and not (is_either and s.power in (0.0, 1.0))
    ]  # fmt: skip
    if other and reduction == "mean" and all(p == 0.0 or p == 1.0 for _, p in other):
        value = f"'mean', and the gradient of {other[0][0]!r} (and {len(other) - 1} more) is a sum over the batch"
        raise SoapjaxError(Problem(_PLACE, value, "a loss that is a mean over the batch", f"say {_PLACE}='sum', or take the mean"))
    if other:
        value = f"{reduction!r}, and the gradient of {other[0][0]!r} (and {len(other) - 1} more) grows as batch^{other[0][1]:g}"
        remedy = "say 'mean'" if all(p == 0.0 for _, p in other) else "make the loss a mean over the batch, or use one micro-batch"
        raise SoapjaxError(Problem(_PLACE, value, f"a loss that is a {reduction} over the batch", remedy))
    return reduction


def _check_growth(
    micro: MicroStep, found: Sequence[tuple[str, Scaling]], gradients: Sequence[int], *, is_asked_for: bool
) -> None:  # fmt: skip
    """Refuses gradients (path, scaling) that do not add up, and where nobody asked for micro-batches also what is not known.

    Raises: SoapjaxError.
    """

    def at(is_so: Callable[[Scaling], bool]) -> str:
        return f" ({line})" if (line := micro.growth.line_of(gradients, is_so)) else ""

    if ratios := [path for path, s in found if s.is_ratio]:
        if (largest := _largest(micro, gradients)) is not None:
            value = f"the gradient of {_named(ratios)} is that of the largest or least of all samples ({largest.source})"
            expected = "a loss of every sample by itself, or a mean: every micro-batch has a largest of its own"
            raise SoapjaxError(Problem(_PLACE, value, expected, "use one micro-batch, or plan without a pipeline"))
        value = f"the gradient of {_named(ratios)} is divided by a sum over the batch's results{at(lambda s: s.is_ratio)}"
        expected = "a loss divided by a constant, or by what is made of the batch alone, as a sum of its weights is"
        expected += ", outside of loops and of branches of a `cond`"
        remedy = "divide by a fixed count (the batch size, say), make a sum of weights before the loop or the `cond` that divides "
        remedy += "by it, or use one micro-batch"
        raise SoapjaxError(Problem(_PLACE, value, expected, remedy))
    if extremes := [path for path, s in found if s.extreme]:
        value = f"the gradient of {_named(extremes)} is the largest or least value of a batch{at(lambda s: bool(s.extreme))}"
        expected = "gradients that add up: micro-batches have other ones (as fp8's scales)"
        raise SoapjaxError(Problem(_PLACE, value, expected, "use one micro-batch, or plan without a pipeline"))
    if mixed := [path for path, s in found if s.is_mixed]:
        value = f"the gradient of {_named(mixed)} adds up what grows with the batch and what does not{at(lambda s: s.is_mixed)}"
        expected = "a loss that is all a mean over the batch, or all a sum: a sum beside a penalty of the weights, say, is neither"
        remedy = "make the errors a mean over the batch, with no size of the batch in the penalty; or use one micro-batch"
        raise SoapjaxError(Problem(_PLACE, value, expected, remedy))
    unknown = [path for path, s in found if _is_unknown(s)]
    if unknown and not is_asked_for:
        value = f"how the gradient of {_named(unknown)} grows with the batch is not known{at(_is_unknown)}"
        remedy = "say how many micro-batches, if that will do"
        raise SoapjaxError(Problem(_PLACE, value, "a mean over the batch, or a sum", remedy))


def _largest(micro: MicroStep, gradients: Sequence[int]) -> FlatEqn | None:
    """The largest or least of all samples, where gradients are divided by how many are equal to it."""
    mixing, scaling = micro.growth.mixing(gradients), micro.growth.scaling
    divide = (e for e in mixing.needed if e.name == "div" and any(scaling.get(o, UNKNOWN).is_ratio for o in e.outputs))
    return next((found for e in divide if (found := largest_behind(mixing, e)) is not None), None)


def _is_unknown(scaling: Scaling) -> bool:
    return scaling.power is None and not scaling.is_zero


def _named(paths: Sequence[str]) -> str:
    return f"{paths[0]!r}" + (f" (and {len(paths) - 1} more)" if len(paths) > 1 else "")


def _check_samples(micro: MicroStep, gradients: Sequence[int], unknown: str) -> None:
    """Refuses, or warns of, what mixes samples in the making of gradients (graph/batch/sample_mixing.py).

    Args:
      unknown: gradients of which it is not known how they grow: no more than a warning would be too little then.
    Raises: SoapjaxError.
    """
    mixing = micro.growth.mixing(gradients)
    if (pairs := mixing.pairs()) is not None:
        at = f"{pairs.source or pairs.name}: {list(mixing.shape(pairs))}"
        value = f"the loss is made of a value that has every sample with every other ({at})"
        expected = "a loss of every sample by itself, or a mean: micro-batches have fewer pairs"
        raise SoapjaxError(Problem(_PLACE, value, expected, "use one micro-batch, or plan without a pipeline"))
    if (read := mixing.by_number()) is not None:
        raise SoapjaxError(_by_number(micro, mixing, read))
    if (fixed := mixing.fixed_rows() or mixing.emptied()) is not None:
        value = f"the loss joins a fixed number of samples to others, or takes such ({fixed.source}: {list(mixing.shape(fixed))})"
        expected = f"a share of the batch, which is {_batch_of(micro)}: of a micro-batch a fixed number is a larger share"
        raise SoapjaxError(Problem(_PLACE, value, expected, f"slice by the batch's own size, or {_TIME}"))
    if (chain := mixing.chain()) is not None:
        value = f"a loop over the batch hands on more than sums from one chunk of it to the next ({chain.source or chain.name})"
        expected = f"a loop that adds up what it makes of every chunk of the batch, which is {_batch_of(micro)}"
        raise SoapjaxError(Problem(_PLACE, value, expected, _TIME))
    statistic, moved = mixing.statistic(), mixing.order()
    if unknown and (found := moved or micro.growth.no_sum(gradients)) is not None:
        of = "a largest or least value" if found.name in ("scatter-max", "scatter-min") else "a sum"
        does = "reads samples by their place" if moved is not None else f"makes of {of} over the batch what is no sum"
        at = f"{found.source or found.name} ({found.name}: {list(mixing.shape(found))})"
        value = f"{at} {does}, and how the gradient of {unknown} grows with the batch is not known"
        expected = f"a loss of every sample by itself, a mean over the batch or a sum; the batch is {_batch_of(micro)}"
        remedy = _TIME + f"; {_PLACE}='mean' trusts that it is a mean"
        raise SoapjaxError(Problem(_PLACE, value, expected, remedy))
    if statistic is not None:
        if (earlier := earlier_gradient(mixing)) is not None:
            at = f" ({earlier.source})" if earlier.source else ""
            value = f"a gradient that is a sum over all samples{at}, from which the step goes on to another gradient, as SAM does"
            expected = "one gradient of the whole batch: the second would begin before all micro-batches had added to the first"
            remedy = "add both gradients up in the step itself (jax.lax.scan over parts of the batch), or use one micro-batch"
            raise SoapjaxError(Problem("train step", value, expected, remedy))
        warn_once(_STATISTIC, f"{statistic.source or statistic.name} ({list(mixing.shape(statistic))})")
    if (moved := moved or mixing.drawn_places()) is not None:
        warn_once(_ORDER, f"{moved.source or moved.name} ({moved.name}: {list(mixing.shape(moved))})")


def _by_number(micro: MicroStep, mixing: SampleMixing, read: FlatEqn) -> Problem:
    """Of samples that are read at places of the whole batch: the numbers may be the user's, or of a quantile."""
    at, remedy = f"{read.source}: {list(mixing.shape(read))}", "use one micro-batch, or plan without a pipeline"
    if sort_behind(mixing, read) is not None:
        value = f"one of all samples in order is read, as a quantile or a median is, of what the network makes ({at})"
        expected = "a loss of every sample by itself: every micro-batch has a quantile of its own"
        return Problem(_PLACE, value, expected, f"{remedy}; or take it of the step before, as state")
    value = f"samples are read, or added to, by numbers that come with the batch, or are the same for any batch ({at})"
    paths = {micro.growth.value(v): path for v, path in zip(micro.step.program.inputs, micro.step.in_paths, strict=True)}
    if (path := paths.get(read.read[0])) is not None and read.name == "gather":
        length = micro.growth.large.avals[read.read[0]].shape[0]
        remedy += f"; where {path} is no batch, but a table as long by chance, use another batch size than its {length} rows"
    return Problem(_PLACE, value, "a loss of every sample by itself: the numbers count those of the whole batch", remedy)


def _batch_of(micro: MicroStep) -> str:
    """Which dim of which arguments is cut."""
    dims = [(micro.full.in_paths[k], d) for k, d in zip(micro.batch_leaves, micro.batch_dims, strict=True)]
    of_first = [path for path, d in dims if d == dims[0][1]]
    return f"dim {dims[0][1]} of {', '.join(of_first[:3])}" + (", ..." if len(of_first) > 3 else "")


@functools.lru_cache(256)  # a plan that is checked is made more than once
def warn_once(message: str, *args: str) -> None:
    """A warning, once until `warn_anew`."""
    log.warning(message, *args)


def warn_anew() -> None:
    """Another step is planned, which may have the same trouble."""
    warn_once.cache_clear()


def averaged_blindly(micro: MicroStep, cut: StageCut, reduction: str, gradients: Collection[int]) -> dict[int, str]:
    """Outputs, with their paths, that are averaged, or cannot be, and are no mean over the batch, or not known to be one.

    What an update makes is made of the whole batch's numbers: it is as good as what crosses into it of all micro-batches.
    """
    outputs = {
        v: p for p, v in zip(micro.step.out_paths, micro.step.program.outputs, strict=True)
        if isinstance(v, int) and v not in gradients and not micro.sample_dims(v)
    }  # fmt: skip
    state = {v for k in micro.step.state_pairs.values() if isinstance(v := micro.step.program.outputs[k], int)}
    of_data = micro.growth.of_data(list(outputs), gradients) if micro.growth.is_known else outputs.keys() - state
    of_data |= _of_the_batchs_size(micro, cut, outputs)
    makers = {o: e for part in cut.updates for e in part.eqns for o in e.outputs}
    crossing = {c.value for c in cut.crossings if c.value not in gradients and not micro.sample_dims(c.value)}
    made_of = {v: _made_of(v, makers, crossing) if v in makers else {v} for v in outputs.keys() & of_data}
    joined = set().union(*made_of.values())
    no_means = micro.growth.no_means(list(joined), gradients)

    def is_blind(v: int) -> bool:
        scaling, how = micro.growth.of(v) or UNKNOWN, joining(micro, v, reduction)
        is_other = not scaling.is_zero and (scaling.power != 0 or bool(scaling.extreme) or scaling.is_ratio)
        return v in no_means or how is None or (how.how == "mean" and is_other)

    blind = set(filter(is_blind, joined))
    return {v: outputs[v] for v, of in made_of.items() if not blind.isdisjoint(of)}


def is_of_whole_batch(micro: MicroStep, cut: StageCut, value: int, gradients: Collection[int]) -> bool:
    """Whether an update makes an output of gradients and of what is the whole batch's once it is put together, as a loss after an
    update by the loss before: the update has all samples."""
    makers = {o: e for part in cut.updates for e in part.eqns for o in e.outputs}
    read = _made_of(value, makers, {c.value for c in cut.crossings if c.value not in gradients})
    return value in makers and not micro.growth.of_all_samples(list(read), gradients, ())


def _of_the_batchs_size(micro: MicroStep, cut: StageCut, values: Collection[int]) -> set[int]:
    """Those of the values that passes make of the batch's size, or of a sum over it: there the micro-batch's size, or its share."""
    makers = {o: e for part in cut.passes for e in part.eqns for o in e.outputs if not micro.sample_dims(o)}
    parts = {key for key, statistic in micro.whole.items() if statistic.scale != 1}
    sizes = {o for o, e in makers.items() if e.key in parts or e.key in micro.once}
    return {v for v in values if v in makers and _made_of(v, makers, sizes)}


def _made_of(value: int, makers: Mapping[int, FlatEqn], wanted: Collection[int]) -> set[int]:
    """Those of the `wanted` values that it is made of by these equations."""
    queue, seen = [value], {value}
    while queue:
        v = queue.pop()
        fresh = [a for a in makers[v].read if a not in seen] if v in makers else []
        seen.update(fresh)
        queue.extend(fresh)
    return seen.intersection(wanted)


def joining(micro: MicroStep, value: int, reduction: str, *, is_gradient: bool = False) -> Joining | None:
    """How one value of every micro-batch becomes the value of the step; None where that is not known."""
    if micro.num_microbatches == 1:
        return Joining("sum")
    scaling = micro.growth.of(value)
    if is_gradient:
        is_known = scaling is not None and not scaling.is_zero and scaling.power in (0.0, 1.0)
        return Joining(reduction if not is_known else "sum" if scaling.power else "mean")
    if dims := micro.sample_dims(value):
        is_number = jax.dtypes.issubdtype(micro.step.program.avals[value].dtype, np.inexact)
        power = scaling.power if scaling is not None and is_number else 0.0
        return Joining("join", dims[0], micro.num_microbatches ** (power or 0.0)) if len(dims) == 1 else None
    if scaling is not None and scaling.power == 1.0:
        return Joining("sum")
    wanted = value in micro.running or value in micro.step.program.outputs
    if wanted and scaling is not None and scaling.extreme in ("max", "min"):
        return Joining(scaling.extreme)
    return Joining("mean") if jax.dtypes.issubdtype(micro.step.program.avals[value].dtype, np.inexact) else None
