"""How the values of a micro-batched step grow with its batch, where it has one sample, too.

What grows is told by two traces of the step that are alike, equation by equation (batch_scaling.py). Traced with one sample, a step
has other equations than with two: JAX drops sums over one, and reshapes where it would gather. It is then held against the step
with two samples: equations in order, the same primitive in the same scope, with operands that correspond where these have
counterparts. A value without one is of unknown growth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import jax

from soapjax.errors import SoapjaxError
from soapjax.graph.batch.batch_means import after_means
from soapjax.graph.batch.batch_scaling import scalings
from soapjax.graph.batch.correspondence import corresponding
from soapjax.graph.batch.growth_rules import UNKNOWN, Scaling, is_backward
from soapjax.graph.batch.sample_mixing import SampleMixing
from soapjax.graph.batch.two_traces import has_other_literals, sample_dims
from soapjax.graph.batch.unlike_sums import Lacks, scaled
from soapjax.graph.batch.whole_batch import BatchStatistic, Read, passed_on, running_statistics_read, statistics_read, with_given
from soapjax.graph.rules.heavy_rules import SCATTERS
from soapjax.graph.trace.dataflow import follow
from soapjax.graph.trace.program import Atom, FlatEqn, Program
from soapjax.graph.trace.tracing import TracedStep

_MOST_JOINED = 2**24  # numbers of a value that is kept of all samples, for results


@dataclasses.dataclass(frozen=True, eq=False)
class Growth:
    """Of the values of one step.

    small, large: the step with two sizes of its batch, alike equation by equation.
    scaling: of the values of `small`; empty where it could not be told.
    counterpart: value of the step -> value of `small`; None where the step is `small`.
    equations: key of an equation of `small` -> key of the step's; None likewise.
    batch: the inputs of `small` that are data.
    whole: where `small` reads a number that is to be the whole batch's -> its value, and the power by which it grows. In `small`
      and `large` others, which nothing makes, stand for these.
    running: equations of `small` that make numbers of the whole batch of statistics and of state.
    lacks: by which powers of the batch summands of `small` are to be scaled, that they grow alike (unlike_sums.py).
    """

    small: Program
    large: Program
    scaling: dict[int, Scaling]
    batch: frozenset[int]
    counterpart: dict[int, int] | None = None
    equations: dict[str, str] | None = None
    whole: Mapping[Read, tuple[int, float]] = dataclasses.field(default_factory=dict)
    running: frozenset[str] = frozenset()
    lacks: Mapping[tuple[str, int], tuple[float, ...]] = dataclasses.field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        return bool(self.scaling)

    def value(self, v: Atom) -> int | None:
        """What stands for a value of the step in `small`; None where nothing does."""
        if not isinstance(v, int):
            return None
        return v if self.counterpart is None else self.counterpart.get(v)

    def of(self, v: Atom) -> Scaling | None:
        mine = self.value(v)
        return None if mine is None else self.scaling.get(mine)

    def sample_dims(self, v: Atom) -> tuple[int, ...]:
        """Dims of a value of the step that grow with the batch."""
        mine = self.value(v)
        return sample_dims(self.small, self.large, mine) if self.is_known and mine is not None else ()

    def mixing(self, wanted: Sequence[Atom]) -> SampleMixing:
        """Where samples are mixed in the making of values of the step."""
        return SampleMixing(self.small, self.large, self.batch, [v for v in map(self.value, wanted) if v is not None])

    def line_of(self, wanted: Sequence[Atom], is_so: Callable[[Scaling], bool]) -> str:
        """The first line of the user's code, in the making of `wanted`, that makes something so of what is not; "" if none does."""

        def so(a: int) -> bool:
            return is_so(self.scaling.get(a, UNKNOWN))

        made = [e for e in reversed(self.mixing(wanted).needed) if e.source and any(map(so, e.outputs))]
        first = next((e for e in made if not any(map(so, e.read))), made[0] if made else None)  # none of a loop, whose carry is so
        return "" if first is None else first.source

    def no_sum(self, wanted: Sequence[Atom]) -> FlatEqn | None:
        """An equation of the forward pass that makes of a sum over the batch, in the making of `wanted`, what nobody knows to grow:
        what follows layer by layer from sums over a graph's edges, say. Of the largest over them nobody knows it at once."""

        def is_sum(a: int) -> bool:
            return a in mixing.data and ((s := self.scaling.get(a, UNKNOWN)).is_sum or (s.power or 0) >= 1)

        def is_known(a: int) -> bool:
            return (s := self.scaling.get(a, UNKNOWN)).power is not None or s.is_sum

        def puts_together(e: FlatEqn) -> bool:
            """Samples, at places: what it makes has none."""
            is_one = e.name in SCATTERS and bool(sample_dims(self.small, self.large, e.inputs[2]))
            return is_one and not any(sample_dims(self.small, self.large, o) for o in e.outputs)

        mixing = self.mixing(wanted)
        forward = (e for e in mixing.needed if not (is_backward(e) or e.body is not None or all(map(is_known, e.outputs))))
        return next((e for e in forward if any(map(is_sum, e.read)) or puts_together(e)), None)

    def after_means(self, wanted: Sequence[Atom]) -> frozenset[str]:
        """Equations of the step between means over the batch and what they make of its values `wanted` (batch_means.py)."""
        return self._keys(self._after_means(wanted))

    def _keys(self, keys: Collection[str]) -> frozenset[str]:
        """The keys of equations of `small`, in the step; not of those that it lacks."""
        return frozenset(keys if self.equations is None else (self.equations[k] for k in keys if k in self.equations))

    def _after_means(self, wanted: Sequence[Atom]) -> frozenset[str]:
        mine = [v for v in map(self.value, wanted) if v is not None]
        found = after_means(self.small, self.large, self.scaling, self.batch, mine)
        return found if self.equations is None else found & self.equations.keys()

    @property
    def making_running(self) -> frozenset[str]:
        """The equations of `running`, in the step."""
        return self._keys(self.running)

    def no_means(self, values: Sequence[int], gradients: Collection[int]) -> set[int]:
        """Those of the step's `values` that are made of the batch otherwise than means are, and not of means of the whole batch.

        Args:
          gradients: values that are known to be the whole batch's.
        """
        mine = {v: w for v in values if self.is_known and (w := self.value(v)) is not None}
        after, trained, beside = self._after_means(values), self._trained(gradients), self._beside(gradients)

        def is_other(wanted: Collection[int]) -> bool:
            mixing = beside.of(wanted)
            is_no_mean = mixing.statistic(trained) is not None or mixing.not_linear({*after, *trained}) is not None
            return is_no_mean or mixing.chain() is not None

        return {v for v, w in mine.items() if is_other([w])} if mine and is_other(mine.values()) else set()

    def of_all_samples(
        self, outputs: Sequence[int], gradients: Collection[int], blindly: Collection[int]
    ) -> dict[int, frozenset[str]]:  # fmt: skip
        """Of the step's `outputs` those that are made otherwise than of sums or means over samples: of each the equations that all
        samples together are to be given to; none where too much would be kept for that, or gradients, or a loop, need them.

        Args:
          gradients: values that are known to be the whole batch's.
          blindly: outputs that are known to be made so.
        """
        mixing, found = self._beside(gradients), {}
        mine = {v: w for v in outputs if (w := self.value(v)) is not None and w in mixing.data}
        if not self.is_known or not mine:
            return {}
        trained = self._trained(gradients)
        for v, w in mine.items():
            making = mixing.of([w])
            # Statistics that layers read, as of batch norm, are the micro-batches' for all that follows.
            statistics = v in blindly or making.statistic(trained) is not None or making.pairs() is not None
            if eqns := making.of_all_on(statistics=statistics):
                found[v] = self._of_all(making, eqns, trained)
        return found

    def of_data(self, outputs: Sequence[int], gradients: Collection[int]) -> set[int]:
        """Those of the step's `outputs` that are made of the data otherwise than by gradients; none where nothing is known."""
        data = self._beside(gradients).data if self.is_known else ()
        return {v for v in outputs if self.value(v) in data}

    def _trained(self, gradients: Collection[int]) -> set[str]:
        """The equations that gradients are made by."""
        return {e.key for e in self.mixing(list(gradients)).needed}

    def _beside(self, gradients: Collection[int]) -> SampleMixing:
        known = [w for w in map(self.value, gradients) if w is not None]
        return SampleMixing(self.small, self.large, self.batch, (), known)

    def _of_all(self, mixing: SampleMixing, eqns: Sequence[FlatEqn], trained: Collection[str]) -> frozenset[str]:
        """The keys of equations of an output, in the step, if they may wait for all samples."""
        keys = {e.key for e in eqns}
        may_wait = keys.isdisjoint(k.partition(".")[0] for k in trained)  # a loop as a whole
        if self.equations is not None:
            keys = {self.equations.get(k, "") for k in keys}
        may_wait = may_wait and "" not in keys and all(map(self._may_be_joined, mixing.read_by(eqns)))
        return frozenset(keys) if may_wait else frozenset()

    def _may_be_joined(self, v: int) -> bool:
        dims, scaling = sample_dims(self.small, self.large, v), self.scaling.get(v, UNKNOWN)
        return len(dims) == 1 and scaling.power is not None and self.large.avals[v].size <= _MOST_JOINED

    def with_whole(self, program: Program, num: int) -> tuple[Program, dict[str, BatchStatistic]]:
        """The step's program, in which the numbers of `whole` are passed on; by equation (key) what it hands to `num` parts."""

        def in_step(key: str) -> str:
            return key if self.equations is None else self.equations[key]

        mine = {(in_step(k), j): found for (k, j), found in self.whole.items()}
        program = scaled(program, {(in_step(k), j): powers for (k, j), powers in self.lacks.items()}, num)
        made, keys = passed_on(program, {read: power for read, (_, power) in mine.items()})
        return made, {key: BatchStatistic(mine[read][0], num**-power) for key, (read, power) in keys.items()}


def growth_of(
    step: TracedStep, full: TracedStep, batch_leaves: Sequence[int], factor: int, *, samples: int,
    with_samples: Callable[[int], TracedStep], state_leaves: Sequence[int] = (), given_leaves: Sequence[int] = (),
    updates: Collection[str] = (),
) -> Growth:  # fmt: skip
    """How the values of `step` grow with its batch.

    Args:
      full: the step with a batch `factor` times as large.
      batch_leaves: inputs that are data.
      samples: how many `full` has.
      state_leaves: inputs that are state which no gradient is of.
      given_leaves: inputs that are neither data nor state, and which no gradient is of.
      updates: outermost equations (keys) that run once, when all gradients are known: these read numbers of the whole batch as
        they are, not a micro-batch's part of them.
      with_samples: traces the step with a number of samples; called where `step` has one, and is not like `full` therefore.
    Raises: SoapjaxError where it has one sample, and cannot be traced with two.
    """

    def between(small: TracedStep, large: TracedStep, factor: float, equations: dict[str, str] | None = None) -> Growth:
        one, more = small.program, large.program
        batch = frozenset(one.inputs[k] for k in batch_leaves)
        found = scalings(one, more, factor)
        if not found:
            return Growth(one, more, found, batch, equations=equations)
        state = {one.inputs[k] for k in state_leaves}
        given = [one.inputs[k] for k in given_leaves]
        reads = _Reads(one, more, found, batch, state=state, given=given, updates=updates, equations=equations)
        if not reads.are_known:
            reads.learn(_with_statistics(one, more, factor, batch, equations, reads.known()).scaling)
        growth = _with_statistics(one, more, factor, batch, equations, whole := reads.whole())
        if beside := reads.for_results(growth.scaling, whole):
            whole = {read: of for read, of in whole.items() if read not in beside}
            growth = _with_statistics(one, more, factor, batch, equations, whole)
        return dataclasses.replace(growth, running=frozenset(reads.making))

    found = between(step, full, factor)
    if found.is_known or samples > factor:
        return found
    # Not with two samples where it is with one, and with all: one sample is broadcast against so many constants.
    two = with_samples(2)
    try:
        more = full if factor > 2 else with_samples(4)
    except SoapjaxError:  # a step of this one size: nothing is known of it, as of one that has other equations for every size
        return found
    if len(step.program.outputs) != len(two.program.outputs):
        return found
    values, equations = corresponding(step.program, two.program)
    ends = zip(step.program.outputs, two.program.outputs, strict=True)
    values |= {v: w for v, w in ends if isinstance(v, int) and isinstance(w, int)}
    return dataclasses.replace(between(two, more, (samples if more is full else 4) / 2, equations), counterpart=values)


class _Reads:
    """Where a step reads numbers that are made of the batch alone.

    making: equations (keys) that make numbers of the whole batch of statistics and of state.
    """

    def __init__(
        self, one: Program, more: Program, found: Mapping[int, Scaling], batch: frozenset[int], *, state: Collection[int],
        given: Collection[int], updates: Collection[str], equations: Mapping[str, str] | None,
    ):  # fmt: skip
        self.one, self.found, self.batch, self.given, self.updates, self.equations = one, found, batch, given, updates, equations
        self.has_samples = lambda a: bool(sample_dims(one, more, a))
        sized = {a.key for a, b in zip(one.eqns, more.eqns, strict=True) if has_other_literals(a, b)}
        self.running, self.making = running_statistics_read(one, batch, state, self.has_samples, lambda e: e.key in sized)
        self.all = self._read(lambda v: True)
        self.power = {v: 1.0 if scaling.is_sum else scaling.power for v, scaling in found.items()}

    def _read(self, may_be_read: Callable[[int], bool]) -> dict[Read, int]:
        found = statistics_read(self.one, self.batch, self.given, self.has_samples, may_be_read)
        return {read: v for read, v in found.items() if read[0] not in self.making}

    @property
    def are_known(self) -> bool:
        return all(self.power[v] is not None for (key, _), v in self.all.items() if key not in self.updates)

    def known(self) -> dict[Read, tuple[int, float]]:
        """As `whole`, but that of numbers of unknown growth what they are made of is read."""
        return {read: (v, self.power[v] or 0.0) for read, v in self._read(lambda v: self.power[v] is not None).items()}

    def learn(self, scaling: Mapping[int, Scaling]) -> None:
        """How numbers of unknown growth grow where the `known` ones are exact: 1 / (n + 1e-8) as 1 / n, say."""
        self.power |= {v: scaling[v].power for v in self.all.values() if self.power[v] is None}

    def whole(self) -> dict[Read, tuple[int, float]]:
        """Where a number of the whole batch is to be read -> its value, and by which power the part of it grows that is read."""
        found = {read: (v, 0.0 if read[0] in self.updates else self._power(v)) for read, v in self.all.items()}
        found |= {read: (v, 0.0) for read, v in self.running.items()}
        return {read: of for read, of in found.items() if self.equations is None or read[0] in self.equations}

    def _power(self, v: int) -> float:
        """0 of a number that is read as it is: also of one that is not known to grow, or has no parts."""
        return self.power[v] or 0.0 if jax.numpy.issubdtype(self.one.avals[v].dtype, jax.numpy.inexact) else 0.0

    def for_results(self, scaling: Mapping[int, Scaling], whole: Mapping[Read, tuple[int, float]]) -> set[Read]:
        """Those reads of what grows with the batch, a count say, that lead to no gradient, and to nothing but results that add it
        to what grows otherwise: to what there was before. Such a result is made of all samples (`of_all_samples`).

        Args:
          scaling: where parts of the `whole` are read.
        """
        growing = {read: power for read, (v, power) in whole.items() if self.found[v].power != 0 and read[0] not in self.updates}
        parts = [read for read, power in growing.items() if power != 0]
        others = [read for read, power in growing.items() if power == 0]
        return _read_for_results(scaling, self.one, parts) | _read_for_results(self.found, self.one, others)


def _with_statistics(
    one: Program, more: Program, factor: float, batch: frozenset[int], equations: dict[str, str] | None,
    whole: dict[Read, tuple[int, float]],
) -> Growth:  # fmt: skip
    """The growth of a step that reads `whole` of the whole batch."""
    named, keys = passed_on(one, {read: power for read, (_, power) in whole.items()})
    made = {e.key: e.outputs[0] for e in named.eqns if e.key in keys}
    ids = {(whole[read][0], power): made[key] for key, (read, power) in keys.items()}
    given = {read: ids[of] for read, of in whole.items()}
    of_small, of_large = ({k: program.avals[v] for (v, _), k in ids.items()} for program in (one, more))
    one, more = with_given(one, given, of_small), with_given(more, given, of_large)
    powers, lacks = {k: power for (_, power), k in ids.items()}, Lacks()
    may_scale = lambda key: equations is None or key in equations  # noqa: E731
    found = scalings(one, more, factor, known=powers, batch=batch, lacks=lacks, may_scale=may_scale)
    return Growth(one, more, found, batch, equations=equations, whole=whole, lacks=lacks)


def _read_for_results(scaling: Mapping[int, Scaling], step: Program, reads: Collection[Read]) -> set[Read]:
    """Of `reads` those that lead to no gradient, and to nothing but results of unknown growth."""
    unknown = {v for v, found in scaling.items() if found.power is None and not found.is_zero}
    results = {o for o in step.outputs if isinstance(o, int)}
    if results.isdisjoint(unknown):
        return set()
    by_key = {e.key: e for e in step.eqns}  # loops too

    def is_for_results(key: str) -> bool:
        follow(step, reached := set(by_key[key].outputs))
        if not reached & results or not reached & results <= unknown:
            return False
        readers = (e for e in step.leaves if not reached.isdisjoint((*e.read, *e.outputs)))
        return not any(is_backward(e) or unknown.intersection(e.read) - reached for e in readers)

    return {read for read in reads if is_for_results(read[0])}
