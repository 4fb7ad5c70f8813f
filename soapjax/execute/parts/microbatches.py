"""From a step to its micro-batches: which arguments are split, and how its values grow with the batch.

What comes out is put together again by joinings.py. Semantics, as in GPipe (Huang et al. 2019, section 2.3):

- batch statistics are those of each micro-batch, and moving averages move once per step: a mean, and a variance E[x²] - E[x]², by
  those of the whole batch (graph/batch/batch_means.py); a variance E[(x - E[x])²] by the mean of the micro-batches' variances;
- metrics are averaged, counts (what grows with the batch) are summed, what has a batch dim is joined along it, and of what is the
  largest or least of all samples the largest or least is taken;
- every micro-batch draws random numbers of its own: its number is folded into the key where numbers are drawn, whatever the
  schedule; a key that comes with the data stays as it is (graph/batch/draws.py);
- numbers of the batch alone, such as what a mean with weights divides by, are the whole batch's (graph/batch/whole_batch.py).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.parts.batch_axes import batch_leaves, behind_time, second_dims, states_of_samples, untrained_state
from soapjax.execute.parts.cut import phase_of
from soapjax.execute.parts.part_problems import problems_of_part
from soapjax.graph.batch.draws import draws_alike
from soapjax.graph.batch.growth import Growth, growth_of
from soapjax.graph.batch.growth_rules import is_backward
from soapjax.graph.batch.sample_mixing import SampleMixing
from soapjax.graph.batch.two_traces import are_alike
from soapjax.graph.batch.whole_batch import BatchStatistic
from soapjax.graph.batch.whole_equations import consts_of_whole, equations_of_whole, with_size_of_whole
from soapjax.graph.passes.build import Binding, build_graph
from soapjax.graph.passes.phases import UPDATE
from soapjax.graph.recompute import recomputing
from soapjax.graph.rules.light_rules import ELEMENTWISE
from soapjax.graph.trace.dataflow import follow
from soapjax.graph.trace.program import FlatEqn
from soapjax.graph.trace.tracing import TracedStep, trace

_MOST_UNITS = 4  # arguments as long as the batch, of which some may be none


@dataclasses.dataclass(frozen=True, eq=False)
class MicroStep:
    """A step traced with one micro-batch, and how its values grow with the batch."""

    step: TracedStep
    batch_leaves: tuple[int, ...]  # input leaves that have the batch
    batch_dims: tuple[int, ...]  # which dim of each it is: the leading one, but of data that begin with time
    num_microbatches: int
    batch_size: int
    full: TracedStep
    growth: Growth  # not known where there is one micro-batch
    draws: frozenset[str] = frozenset()  # equations (keys) that draw random numbers for each micro-batch (graph/batch/draws.py)
    # Those of the forward pass that wait for all micro-batches: of means over the whole batch (graph/batch/batch_means.py), or of
    # all samples.
    after_all: frozenset[str] = frozenset()
    # Those that pass on numbers of the whole batch (graph/batch/whole_batch.py).
    whole: Mapping[str, BatchStatistic] = dataclasses.field(default_factory=dict)
    running: frozenset[int] = frozenset()  # what running statistics of the whole batch are made of
    # By the key of an equation what runs in its place once per step (graph/batch/whole_equations.py).
    once: Mapping[str, FlatEqn] = dataclasses.field(default_factory=dict)
    consts_once: Mapping[int, Any] = dataclasses.field(default_factory=dict)  # likewise

    def sample_dims(self, value: int) -> tuple[int, ...]:
        """Dims of a value that grow with the batch; of a result also where nothing else is known of what grows how."""
        if dims := self.growth.sample_dims(value):
            return dims
        ours, theirs = self.step.program, self.full.program
        is_known = self.growth.value(value) in self.growth.scaling
        if is_known or len(ours.outputs) != len(theirs.outputs) or value not in ours.outputs:
            return ()
        whole = theirs.aval(theirs.outputs[ours.outputs.index(value)]).shape
        return tuple(d for d, (m, n) in enumerate(zip(ours.avals[value].shape, whole, strict=False)) if m < n)

    def of_all_samples(self, keys: frozenset[str]) -> MicroStep:
        """With equations `keys` that are evaluated on all samples: they read numbers of the whole batch, and no part of these."""
        program = self.step.program
        passed_on = [(e.outputs[0], self.whole[e.key]) for e in program.eqns if e.key in self.whole]
        all_of = {statistic.value: v for v, statistic in passed_on if statistic.scale == 1}
        instead = {v: all_of[statistic.value] for v, statistic in passed_on if statistic.scale != 1}

        def changed(eqn: FlatEqn) -> FlatEqn:
            if eqn.key not in keys or instead.keys().isdisjoint(eqn.read):
                return eqn
            inputs = (instead.get(a, a) if isinstance(a, int) else a for a in eqn.inputs)
            return dataclasses.replace(eqn, inputs=tuple(inputs))

        program = dataclasses.replace(program, eqns=tuple(map(changed, program.eqns)))
        step = dataclasses.replace(self.step, program=program)
        return dataclasses.replace(self, step=step, after_all=self.after_all | keys)


def micro_step(
    fn: Any, *args: Any, num_microbatches: int, static_argnums: Sequence[int] = (), full: TracedStep | None = None,
    recomputed: Collection[str] = (), adds_up: bool = True, **tracing: Any,
) -> MicroStep:  # fmt: skip
    """Traces `fn` with one micro-batch, and with the whole batch where that (`full`) is not given.

    Args:
      recomputed: operators that the backward pass computes again, in `full` too.
      adds_up: whether micro-batches are put together, and not steps of their own, as under an asynchronous schedule.
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
    if num_microbatches == 1:
        size, nothing_grows = full.in_avals[leaves[0]].shape[0], Growth(full.program, full.program, {}, frozenset())
        return MicroStep(full, leaves, (0,) * len(leaves), 1, batch_size=size, full=full, growth=nothing_grows)
    static = {i % len(args) for i in static_argnums} if args else set()
    dynamic = tuple(a for i, a in enumerate(args) if i not in static)

    def traced_with(samples: int, dims: Mapping[int, int]) -> TracedStep:
        flat, tree = jax.tree_util.tree_flatten(dynamic)
        for i, d in dims.items():
            aval = full.in_avals[i]
            shape = (*aval.shape[:d], samples, *aval.shape[d + 1 :])
            flat[full.leaf_of[i]] = jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)
        rest = iter(jax.tree_util.tree_unflatten(tree, flat))
        try:
            return traced(*(a if i in static else next(rest) for i, a in enumerate(args)))
        except SoapjaxError as e:
            raise SoapjaxError(problems_of_part(full, dims, samples, e.problems)) from e

    small, dims, grows = _parts(traced_with, full, leaves, num_microbatches, adds_up=adds_up)
    leaves, size = tuple(dims), _size(full, dims)
    draws = draws_alike(small.program, {small.program.inputs[k] for k in leaves})
    program, whole = grows.with_whole(small.program, num_microbatches)
    once = equations_of_whole(small.program, full.program, num_microbatches)
    making = grows.making_running
    return MicroStep(
        step=dataclasses.replace(small, program=program), batch_leaves=leaves, batch_dims=tuple(dims.values()),
        num_microbatches=num_microbatches, batch_size=size, full=full, growth=grows, draws=draws, whole=whole, once=once,
        consts_once=consts_of_whole(small.program, full.program),
        after_all=grows.after_means(small.program.outputs) | making,
        running=frozenset(a for e in program.eqns if e.key in making for a in e.read),
    )  # fmt: skip


Traced = Callable[[int, Mapping[int, int]], TracedStep]  # the step with so many samples in these dims of input leaves


def _size(full: TracedStep, dims: Mapping[int, int]) -> int:
    return next(full.in_avals[i].shape[d] for i, d in dims.items())


def _parts(
    traced: Traced, full: TracedStep, leaves: tuple[int, ...], num: int, *, adds_up: bool
) -> tuple[TracedStep, dict[int, int], Growth]:  # fmt: skip
    """The step with one of `num` micro-batches, the dim of every input leaf that is the batch, and how values grow with that.

    It is the leading one, unless samples depend on each other along it (steps in time that a loop runs over, differences between
    neighbours) and are apart along the second.
    Raises: SoapjaxError where `num` does not divide the batch, or the step with a part of it cannot be traced.
    """

    def parts(dims: dict[int, int]) -> tuple[TracedStep, dict[int, int], Growth]:
        _require_divisor(full, dims, num)
        small, dims = _smallest(lambda of: traced(_size(full, dims) // num, of), full, dims, cuts_state=adds_up)
        if adds_up:
            program = with_size_of_whole(small.program, full.program, {small.program.inputs[k] for k in dims})
            small = dataclasses.replace(small, program=program)
        return small, dims, _growth(small, full, dims, num, lambda samples: traced(samples, dims))

    def along_second() -> tuple[TracedStep, dict[int, int], Growth] | None:
        """Where samples are apart along the second dim."""
        if dims := second_dims(full, leaves):
            with contextlib.suppress(SoapjaxError):
                found = parts(dims)
                return None if _depends_on_others(found[0], found[2], statistics=True) else found
        return None

    try:
        found = parts(dict.fromkeys(leaves, 0))
    except SoapjaxError:
        if (other := along_second()) is None:
            raise
        return other
    return (along_second() if _depends_on_others(found[0], found[2]) else None) or found


def _depends_on_others(small: TracedStep, grows: Growth, *, statistics: bool = False) -> bool:
    """Whether new state is made of samples by their place, in pairs or one after the other (`statistics`: or of what all of them
    give and read), or it is not known how."""
    if not grows.is_known:
        return True
    mixing = grows.mixing([small.program.outputs[k] for k in small.state_pairs.values()])
    looks = [mixing.chain, mixing.order, mixing.pairs, mixing.fixed_rows, mixing.by_number]
    return any(look() is not None for look in (*looks, *((mixing.statistic,) if statistics else ())))


def _require_divisor(full: TracedStep, dims: Mapping[int, int], num: int) -> None:
    """Raises: SoapjaxError naming the nearest numbers of micro-batches that divide the batch."""
    if (size := _size(full, dims)) % num:
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        near = sorted(divisors, key=lambda d: (abs(d - num), d))[:3]
        expected = f"a divisor of the batch of {size} ({full.in_paths[next(iter(dims))]})"
        raise SoapjaxError(Problem("microbatches", str(num), expected, f"choose {' or '.join(map(str, sorted(near)))}"))


def _growth(
    small: TracedStep, full: TracedStep, dims: Mapping[int, int], num: int, with_samples: Callable[[int], TracedStep]
) -> Growth:  # fmt: skip
    """Raises: SoapjaxError where it is not known since the step takes samples by their place."""
    if _size(full, dims) == num:
        _require_own_samples(small, full)
    graph, binding = build_graph(full)
    found = growth_of(
        small, full, tuple(dims), num, samples=_size(full, dims), with_samples=with_samples,
        state_leaves=[k for k in untrained_state(full, binding) if k not in dims], given_leaves=_given(full, binding, dims),
        updates={e.key for e in full.program.eqns if phase_of(e, graph, binding) == UPDATE},
    )  # fmt: skip
    if not found.is_known:
        _require_no_order(small, full, dims, num)
        _require_no_places(full, binding, dims, with_samples)
    return found


def _smallest(
    traced: Callable[[Mapping[int, int]], TracedStep], full: TracedStep, dims: dict[int, int], *, cuts_state: bool
) -> tuple[TracedStep, dict[int, int]]:  # fmt: skip
    """The step with one micro-batch, and which inputs have the batch: also such as begin with time, or what the step hands on for
    every sample (the hidden state of a recurrent net), where it cannot be traced without; or not all that are as long, where it can
    be without some of them (a table of positions, as many as there are samples).

    Raises: SoapjaxError where it cannot be traced so either, or in two ways.
    """
    try:
        return traced(dims), dims
    except SoapjaxError as e:
        found: list[tuple[TracedStep, dict[int, int]]]
        if not any(dims.values()) and (more := behind_time(full, tuple(dims))):
            with contextlib.suppress(SoapjaxError):
                return traced(dims | more), dims | more
        for parts in states_of_samples(full, _size(full, dims)) if cuts_state else ():
            found = []
            for more in parts:
                with contextlib.suppress(SoapjaxError):
                    found.append((traced(dims | more), dims | more))
            if len(found) == 1:
                return found[0]
        arguments = collections.defaultdict(list)
        for i in dims:
            arguments[full.in_paths[i].partition(".")[0]].append(i)
        found = []
        units = list(arguments.values()) if len(arguments) > 1 else [[i] for i in dims]
        for num in reversed(range(1, len(units) if len(units) <= _MOST_UNITS else 1)):
            for chosen in itertools.combinations(units, num):
                with contextlib.suppress(SoapjaxError):
                    found.append((traced(of := {i: dims[i] for i in sorted(i for unit in chosen for i in unit)}), of))
            if found:
                break
        if len(found) == 1:
            return found[0]
        raise e


def _require_no_places(
    full: TracedStep, binding: Binding, dims: Mapping[int, int], with_samples: Callable[[int], TracedStep]
) -> None:  # fmt: skip
    """Refuses a step that is another program with a part of its batch, but not with more: it takes a number of samples that is
    the same for any batch, or reads them by their place.

    Raises: SoapjaxError naming the line.
    """
    size = _size(full, dims)
    try:
        double = with_samples(2 * size)
    except SoapjaxError:
        return
    if not are_alike(full.program, double.program):
        return
    wanted = [*(p.gradient for p in binding.phases.parameters), *full.program.outputs]
    mixing = SampleMixing(full.program, double.program, [full.program.inputs[k] for k in dims], wanted)
    if (found := mixing.fixed_rows() or mixing.order()) is not None:
        value = f"a fixed number of samples, or samples by their place ({found.name} of {list(mixing.shape(found))})"
        expected = "a step that is the same for a part of its batch"
        remedy = "take a share of the batch's own size there (x.shape[0] // 4, say), or use one micro-batch"
        raise SoapjaxError(Problem(found.source or "train step", value, expected, remedy))


def _require_own_samples(small: TracedStep, full: TracedStep) -> None:
    """Refuses a step whose one sample is broadcast against what is as long as the batch, but no part of it: two times of a target
    would not fit to all times of a trajectory, one does.

    Raises: SoapjaxError naming the line.
    """
    one, more = small.program, full.program
    for (a, _), (b, _) in zip(one.walk(), more.walk(), strict=True) if are_alike(one, more) else ():
        if a.name not in ELEMENTWISE or len(a.outputs) != 1:
            continue
        made = list(zip(one.aval(a.outputs[0]).shape, more.aval(b.outputs[0]).shape, strict=True))
        for x, y in zip(a.inputs, b.inputs, strict=True):
            read = list(zip(one.aval(x).shape, more.aval(y).shape, strict=True))
            if any(m == 1 < n and of == (n, n) for (m, n), of in zip(read, made, strict=False) if len(read) == len(made)):
                value = f"one sample of the batch meets several of what is no part of it ({a.name}: {list(more.aval(y).shape)})"
                remedy = "give all data with the batch first, or use one micro-batch"
                raise SoapjaxError(Problem(a.source or "train step", value, "as many samples of all that they meet", remedy))


def _require_no_order(small: TracedStep, full: TracedStep, dims: Mapping[int, int], num: int) -> None:
    """Refuses a step that is another program with a part of its batch, since it takes all samples pair by pair, and their pairs
    likewise, as an associative scan does: what a sample has of those before it.

    Raises: SoapjaxError naming the line.
    """
    size = _size(full, dims)
    of_part = set(_every_second(small, dims, size // num))
    if found := next((key for key in _every_second(full, dims, size) if key in of_part), None):
        value = f"{size} samples one after the other, every second by itself, as an associative scan over the batch takes them"
        remedy = "use one micro-batch, or plan without a pipeline"
        raise SoapjaxError(Problem(found[0] or "train step", value, "a loss of every sample by itself, or a mean", remedy))


def _every_second(step: TracedStep, dims: Mapping[int, int], size: int) -> Iterator[tuple[str, int]]:
    """Lines of the forward pass, and dims, where a slice takes some of so many values of the data in steps of two."""
    program = step.program
    follow(program, of_data := {program.inputs[k] for k in dims})
    for e in program.leaves:
        if e.name == "slice" and e.inputs[0] in of_data and not is_backward(e):
            shape, strides = program.aval(e.inputs[0]).shape, e.params["strides"] or ()
            yield from ((e.source, d) for d, stride in enumerate(strides) if stride == 2 and shape[d] == size)


def _given(step: TracedStep, binding: Binding, batch: Collection[int]) -> list[int]:
    """Input leaves beside the batch and the state, of which there is no gradient."""
    others = {*batch, *step.state_pairs}
    return [k for k, v in enumerate(step.program.inputs) if k not in others and v not in binding.phases.trained]
