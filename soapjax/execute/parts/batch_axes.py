"""Which arguments of a step have the batch, and in which dim: the leading one, but where the data begin with time."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from soapjax.errors import Problem, SoapjaxError
from soapjax.graph.passes.build import Binding, build_graph
from soapjax.graph.trace.tracing import TracedStep


def batch_leaves(step: TracedStep) -> tuple[int, ...]:
    """The input leaves, beside the training state, whose leading dim is the batch: the size that most of those share that are read.

    Not weights that are given beside the state (graph/passes/samples.py). Arguments, or parts of them, whose leaves all have one
    come before those that hold others too; one sample is no batch where there are others.

    Raises: SoapjaxError where no argument has a leading dim.
    """
    given = build_graph(step)[1].given
    others = {i for i, v in enumerate(step.program.inputs) if v in given or i in step.state_pairs}
    others |= _keys(step)
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


def _keys(step: TracedStep) -> set[int]:
    """The inputs that are the words of one random key (`jax.random.PRNGKey`): they are no samples, however many there are."""
    program = step.program
    one = {e.inputs[0] for e in program.leaves if e.name == "random_wrap" and not program.aval(e.outputs[0]).shape}
    return {i for i, v in enumerate(program.inputs) if v in one}


def _shared(sizes: Mapping[str, int], depth: int) -> set[int]:
    """Sizes, by path, that are those of all paths with which they begin alike, for so many names."""
    found = collections.defaultdict(set)
    for path, size in sizes.items():
        found[tuple(path.split(".")[:depth])].add(size)
    return {size for alike in found.values() if len(alike) == 1 for size in alike}


def second_dims(step: TracedStep, leaves: tuple[int, ...]) -> dict[int, int]:
    """By input leaf the dim that is the batch if `leaves` begin with time, [time, batch, ...], with all others that have as many
    samples; none where their second dims are unlike, or no longer than one.

    Others that have the batch begin with it: a state with which a loop over time starts, values of what comes after the last. Or
    they have one time more or less: observations before and after every action.
    """
    shapes = {i: step.in_avals[i].shape for i in leaves}
    seconds = {s[1] for s in shapes.values() if len(s) > 1}
    if len(seconds) != 1 or (size := seconds.pop()) < 2:
        return {}
    rest = _others(step, leaves)
    times = {s[0] + n for s in shapes.values() for n in (-1, 1)}
    found = {i: 1 for i, s in shapes.items() if len(s) > 1} | {i: 1 for i, s in rest.items() if s[1:2] == (size,) and s[0] in times}
    return found | {i: 0 for i, s in rest.items() if s[:1] == (size,)}


def behind_time(step: TracedStep, leaves: tuple[int, ...]) -> dict[int, int]:
    """By input leaf the second dim, of data beside `leaves` that begin with time although these begin with the batch: the states
    that a trajectory should go through, beside those where it begins."""
    size = step.in_avals[leaves[0]].shape[0]
    return {i: 1 for i, s in _others(step, leaves).items() if s[1:2] == (size,)}


def untrained_state(step: TracedStep, binding: Binding) -> list[int]:
    """Input leaves that the step returns anew, and of which there is no gradient."""
    return [k for k in step.state_pairs if step.program.inputs[k] not in binding.phases.trained]


def states_of_samples(step: TracedStep, size: int) -> Iterator[list[dict[int, int]]]:
    """What may be the samples' of the state that no gradient is of, as a recurrent net's hidden state from one step to the next:
    all of it that is as long as the batch; else that of one argument, or of one part of an argument, beside moments of weights
    which are as long by chance. By input leaf the leading dim; one list of choices after the other."""
    state = untrained_state(step, build_graph(step)[1])
    rows = {k: 0 for k in state if step.in_avals[k].shape[:1] == (size,)}
    for depth in (0, 1, 2) if rows else ():
        found: dict[tuple[str, ...], dict[int, int]] = collections.defaultdict(dict)
        for k in rows:
            found[tuple(step.in_paths[k].split(".")[:depth])][k] = 0
        yield list(found.values())


def _others(step: TracedStep, leaves: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Shapes of the data beside `leaves`: of input leaves that are neither state nor weights that are given."""
    given = build_graph(step)[1].given
    rest = (i for i, v in enumerate(step.program.inputs) if i not in leaves and i not in step.state_pairs and v not in given)
    return {i: step.in_avals[i].shape for i in rest}


def joined(stacked: Any, dim: int) -> Any:
    """[num, ..., batch / num, ...] as [..., batch, ...], with the batch in dim `dim`."""
    x = jnp.moveaxis(stacked, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
