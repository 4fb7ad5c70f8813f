"""Statistics of the data: with the whole batch's, micro-batches of a loss that reads them add up.

A loss `sum(w * errors) / sum(w)` (padded tokens have weight 0, say) is no mean of its micro-batches': each divides by the weights
that it happens to have. With the weights of all of them it is one:

    mean over m of  sum_m(w * errors) / (sum(w) / M)  =  sum(w * errors) / sum(w)

So does one with weights that are divided by their largest, or inputs that are normalised by their mean. Where an equation reads a
number that is made of the batch alone, and is no sample's, that may be computed of the whole batch before the passes begin: the
M-th part of a sum, all of a mean, of a largest value and of what nobody knows to grow, as a quantile. What updates read, which run
once, is all of it. What depends on parameters (an overlap of classes) is known only after the
forward pass, and has a derivative of its own; what is drawn is drawn for every micro-batch: neither is offered. Nor is what is read
within loops, but for what the loop is given. State that no gradient is of (a running mean of what was seen) may take part where no
sample has a number of its own: the new running mean, by which samples are normalised, is the whole batch's.

In the program such a number is read through an equation that changes nothing, by which executors find it again: where nothing is
given for it, an equation reads its own batch's number, as the step says.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from soapjax.graph.batch.draws import is_key
from soapjax.graph.trace.dataflow import follow
from soapjax.graph.trace.program import Atom, FlatEqn, Program

# What makes one number of all samples; others pick some of them, the first, say, of which a part has not a part.
_OVER_SAMPLES = {
    "reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "dot_general", "scatter-add", "scan", "while", "cond",
}  # fmt: skip
_PRODUCTS = {"dot_general", "conv_general_dilated"}


class BatchStatistic(NamedTuple):
    """A number of the whole batch that micro-batches read, as what they divide by.

    value: what it is, in the program of the whole batch; `scale` times that is read.
    """

    value: Atom
    scale: float


Read = tuple[str, int]  # an equation's key, and which of its operands


def running_statistics_read(
    program: Program, batch: Collection[int], state: Collection[int], has_samples: Callable[[Atom], bool],
    is_sized: Callable[[FlatEqn], bool],
) -> tuple[dict[Read, int], set[str]]:  # fmt: skip
    """Where what samples have, or what they read, meets numbers that are made of statistics of the inputs `batch` and of `state`,
    and which these are.

    Also the equations (keys) that make numbers of state, of these too, where there are any.

    Args:
      is_sized: whether an equation has the batch's size in it.
    """
    alone, of_batch, of_state = {*batch, *state}, set(batch), set(state)  # made of batch, state and constants alone
    found, makers, read = dict[Read, int](), set[str](), _read_by(program, has_samples)
    for eqn in program.eqns:
        values = [a for a in eqn.read if a not in program.consts]
        reads_state, has = not of_state.isdisjoint(values), any(map(has_samples, (*values, *eqn.outputs)))
        is_alone = alone.issuperset(values) and eqn.body is None and not (reads_state and any(map(has_samples, eqn.outputs)))
        if is_alone and not any(is_key(program.aval(a)) for a in (*eqn.inputs, *eqn.outputs)):
            alone.update(eqn.outputs)
            if reads_state:
                of_state.update(eqn.outputs)
                makers.add(eqn.key)
            if not of_batch.isdisjoint(values) or (reads_state and is_sized(eqn)):
                of_batch.update(eqn.outputs)
        elif has or not read.isdisjoint(eqn.outputs):
            mine = ((j, a) for j, a in enumerate(eqn.inputs) if isinstance(a, int))
            found.update({(eqn.key, j): a for j, a in mine if a in of_state and a in of_batch})
    return found, makers if found else set()


def _read_by(program: Program, has_samples: Callable[[Atom], bool]) -> set[int]:
    """Values from which a program goes on to such as have samples: a layer that is rescaled, say."""
    found: set[int] = set()
    for eqn in reversed(program.eqns):
        if any(o in found or has_samples(o) for o in eqn.outputs):
            found.update(eqn.read)
    return found


def statistics_read(
    program: Program, batch: Collection[int], given: Collection[int], has_samples: Callable[[Atom], bool],
    is_known: Callable[[int], bool],
) -> dict[Read, int]:  # fmt: skip
    """Where outermost equations read statistics of the inputs `batch` alone, and which, but to make others of them.

    Args:
      given: inputs that stand beside the batch as constants do, as weights of classes; not a network that is made of them.
      is_known: of a value, whether it may be read: of a statistic that may not, what it is made of is.
    """
    # Of the batch and constants alone -> whether of the batch.
    made: dict[int, bool] = {**dict.fromkeys(given, False), **dict.fromkeys(batch, True)}
    of_given = set(given)
    sorted_: set[int] = set()  # of these what is in order, of which the one at a place is a quantile
    found: dict[Read, int] = {}
    for eqn in program.eqns:
        values = [a for a in eqn.read if a not in program.consts]
        is_drawn = any(is_key(program.aval(a)) for a in (*eqn.inputs, *eqn.outputs))
        is_picked = any(map(has_samples, values)) and not any(map(has_samples, eqn.outputs)) and eqn.name not in _OVER_SAMPLES
        if eqn.name == "sort" or not sorted_.isdisjoint(values):
            sorted_.update(eqn.outputs)
            numbers = eqn.inputs[1:] if eqn.name in ("gather", "dynamic_slice") else ()
            by_batch = any(isinstance(a, int) and made.get(a) for a in numbers)
            is_picked = is_picked and by_batch
        is_network = eqn.name in _PRODUCTS and not of_given.isdisjoint(values)
        is_alone = all(v in made for v in values) and not (is_drawn or is_picked or is_network)
        if is_alone and not of_given.isdisjoint(values):
            of_given.update(eqn.outputs)
        if is_alone:
            made.update(dict.fromkeys(eqn.outputs, any(made[v] for v in values)))
        if eqn.body is not None and not (is_alone or is_drawn):
            # Of a loop that adds up errors beside their weights, what is made of the batch alone: the number of these.
            alone = _alone(program, eqn, {a for a in eqn.read if a not in made and a not in program.consts})
            made.update((o, True) for o in alone if not has_samples(o) and is_known(o))
        if is_alone and not any(map(has_samples, eqn.outputs)):
            if all(map(is_known, eqn.outputs)) or not any(made[v] for v in values):
                continue
            made.update(dict.fromkeys(eqn.outputs, False))
        found.update({
            (eqn.key, j): a for j, a in enumerate(eqn.inputs)
            if isinstance(a, int) and made.get(a) and not has_samples(a) and a not in batch
        })  # fmt: skip
    return found


def _alone(program: Program, loop: FlatEqn, others: Collection[int]) -> list[int]:
    """What a loop carries to its end that is made of something, and of nothing of `others`.

    Not what it makes in every trip: residuals, of which the derivative alone would read the whole batch's.
    """
    reached = set(others)
    follow(dataclasses.replace(program, eqns=(loop,)), reached)
    read = {a for a in loop.read if a not in reached and a not in program.consts}
    follow(dataclasses.replace(program, eqns=(loop,)), read)
    return [o for o in loop.outputs[: loop.params["num_carry"]] if o in read and o not in reached]


def with_given(program: Program, given: Mapping[Read, int], avals: Mapping[int, Any]) -> Program:
    """The program where equations read other values, which nothing makes, of such types."""
    operands: dict[str, dict[int, int]] = {}
    for (key, j), v in given.items():
        operands.setdefault(key, {})[j] = v

    def changed(eqn: FlatEqn) -> FlatEqn:
        own = operands.get(eqn.key)
        return eqn if own is None else dataclasses.replace(eqn, inputs=tuple(own.get(j, a) for j, a in enumerate(eqn.inputs)))

    return dataclasses.replace(program, eqns=tuple(map(changed, program.eqns)), avals={**program.avals, **avals})


def part_for(program: Program, values: Collection[Atom]) -> tuple[Program, set[int]]:
    """The outermost equations of a program that make `values`, and the inputs that these read."""
    needed, eqns = {v for v in values if isinstance(v, int)}, []
    for eqn in reversed(program.eqns):
        if not needed.isdisjoint(eqn.outputs):
            eqn = eqn if eqn.body is None else _pruned(eqn, eqn.body, needed)
            eqns.append(eqn)
            needed.update(eqn.read)
    return dataclasses.replace(program, eqns=tuple(reversed(eqns)), outputs=tuple(values)), needed & set(program.inputs)


def _pruned(loop: FlatEqn, body: Program, wanted: Collection[int]) -> FlatEqn:
    """A loop that makes what is wanted of its results, and what that is carried by, alone."""
    num_consts, num_carry = loop.params["num_consts"], loop.params["num_carry"]
    kept = {k for k, o in enumerate(loop.outputs) if o in wanted}
    before: set[int] = set()
    while kept != before:
        before, eqns = kept, list[FlatEqn]()
        needed = {o for k in kept if isinstance(o := body.outputs[k], int)}
        for eqn in reversed(body.eqns):
            if not needed.isdisjoint(eqn.outputs):
                eqns.append(eqn)
                needed.update(eqn.read)
        kept = kept | {k for k, i in enumerate(body.inputs[num_consts : num_consts + num_carry]) if i in needed}
    carried = {num_consts + k for k in kept if k < num_carry}
    is_carried = range(num_consts, num_consts + num_carry)
    given = [k for k, i in enumerate(body.inputs) if (k in carried if k in is_carried else i in needed)]
    made = sorted(kept)

    def of(values: Sequence[Any], chosen: Sequence[int]) -> tuple[Any, ...]:
        return tuple(values[k] for k in chosen)

    params = {**loop.params, "num_consts": sum(k < num_consts for k in given), "num_carry": len(carried)}
    body = dataclasses.replace(body, inputs=of(body.inputs, given), outputs=of(body.outputs, made), eqns=tuple(reversed(eqns)))
    return dataclasses.replace(loop, inputs=of(loop.inputs, given), outputs=of(loop.outputs, made), params=params, body=body)


def passed_on(program: Program, reads: Mapping[Read, float]) -> tuple[Program, dict[str, tuple[Read, float]]]:
    """The program where equations read some operands through one more, one for every operand and power of the batch; by the key of
    that what it passes on, and the power. Beside those of a part (not 0) stands one of the whole, which nothing reads.

    Args:
      reads: where, and by which power of the batch the part grows that is read there.
    """
    avals, eqns, through, keys = dict(program.avals), [], dict[tuple[Atom, float], int](), dict[str, tuple[Read, float]]()

    def pass_on(eqn: FlatEqn, j: int, power: float) -> int:
        over = eqn.inputs[j]
        if (over, power) not in through:
            made = through[over, power] = max(avals) + 1
            avals[made] = program.aval(over)
            address, params = (len(program.eqns) + len(keys),), {"name": "of the whole batch"}
            name = dataclasses.replace(
                eqn, address=address, primitive=_name(), params=params, inputs=(over,), outputs=(made,), body=None, trip=None
            )  # fmt: skip
            eqns.append(name)
            keys[name.key] = (eqn.key, j), power
        return through[over, power]

    for eqn in program.eqns:
        inputs = list(eqn.inputs)
        for j in range(len(eqn.inputs)):
            if (power := reads.get((eqn.key, j))) is not None:
                inputs[j] = pass_on(eqn, j, power)
                pass_on(eqn, j, 0.0)
        eqns.append(dataclasses.replace(eqn, inputs=tuple(inputs)) if tuple(inputs) != eqn.inputs else eqn)
    return dataclasses.replace(program, eqns=tuple(eqns), avals=avals), keys


@functools.cache
def _name() -> Any:
    """The primitive of `checkpoint_name`: it says something of a value, and changes nothing."""
    return jax.make_jaxpr(lambda x: checkpoint_name(x, "x"))(1.0).eqns[0].primitive
