"""Loops over chunks of the batch: a cross entropy over so many tokens at a time, say, whose logits would not fit all at once.

    total, _ = lax.scan(lambda total, chunk: (total + loss(weights, chunk), None), 0.0, tokens.reshape(-1, 128, width))

A larger batch has more chunks of the same size, so that no dim within the loop grows: there a whole chunk is as a sample is
elsewhere. What every trip adds to what the loop carries is a sum over samples then.
"""

from __future__ import annotations

from collections.abc import Callable

from soapjax.graph.trace.dataflow import follow
from soapjax.graph.trace.program import Atom, FlatEqn, Program

_SUMS = {"add", "add_any"}


def has_more_trips(eqn: FlatEqn, other: FlatEqn) -> bool:
    """Whether a loop of one trace has another number of trips in the other."""
    return eqn.body is not None and eqn.params.get("length") != other.params.get("length")


def chained(eqn: FlatEqn, made_by: Callable[[int], FlatEqn | None]) -> dict[int, int]:
    """What a loop hands from one chunk to the next (carried input -> what it becomes), but for what stays as it is given, and for
    sums to which every chunk adds and that nothing else in the loop reads, as a running sum is."""
    p, body = eqn.params, eqn.body
    pairs = zip(body.inputs[p["num_consts"] :], body.outputs[: p["num_carry"]], strict=False)
    carried = {i: o for i, o in pairs if isinstance(o, int)}

    def is_read(i: int) -> bool:
        follow(body, reached := {i})
        return any(o in reached for o in body.outputs if o != carried[i])

    terms = {i: added_up(i, o, made_by) for i, o in carried.items()}
    return {i: carried[i] for i, added in terms.items() if added is None or (added and is_read(i))}


def chunked(small: Program, large: Program) -> set[int]:
    """Values within such loops that are made of a chunk; of two traces of a step, equation by equation alike."""
    found: set[int] = set()

    def has_more(a: int) -> bool:
        return small.avals[a].shape[0] != large.avals[a].shape[0]

    _follow(small, large, has_more, found)
    return found


def _follow(block: Program, other: Program, has_more: Callable[[int], bool], found: set[int]) -> None:
    for eqn, its in zip(block.eqns, other.eqns, strict=True):
        if eqn.body is None:
            if not found.isdisjoint(eqn.read):
                found.update(eqn.outputs)
            continue
        scanned = eqn.params["num_consts"] + eqn.params["num_carry"] if has_more_trips(eqn, its) else len(eqn.inputs)
        for k, (i, a) in enumerate(zip(eqn.body.inputs, eqn.inputs, strict=True)):
            if isinstance(a, int) and (a in found or (k >= scanned and has_more(a))):
                found.add(i)
        _follow(eqn.body, its.body, has_more, found)
        if not found.isdisjoint(eqn.read):
            found.update(eqn.outputs)


def added_up(carried: int, after: Atom, made_by: Callable[[int], FlatEqn | None]) -> list[Atom] | None:
    """The terms that a trip adds to what it is given as `carried` and hands on as `after`; None where it does otherwise with it.

    Args:
      made_by: the equation of the body that makes a value.
    """
    terms: list[Atom] = []
    while after != carried:
        eqn = made_by(after) if isinstance(after, int) else None
        if eqn is not None and eqn.name == "optimization_barrier":  # of many values, each as it was
            after = eqn.inputs[eqn.outputs.index(after)]
            continue
        if eqn is None or eqn.name not in (*_SUMS, "convert_element_type"):
            return None
        through = [a for a in eqn.inputs if _comes_from(a, carried, made_by)]
        if len(through) != 1:
            return None
        terms += [a for a in eqn.inputs if a is not through[0]]
        after = through[0]
    return terms


def _comes_from(atom: Atom, value: int, made_by: Callable[[int], FlatEqn | None]) -> bool:
    seen: set[int] = set()
    left = [atom]
    while left:
        at = left.pop()
        if not isinstance(at, int) or at in seen:
            continue
        if at == value:
            return True
        seen.add(at)
        eqn = made_by(at)
        left += () if eqn is None else eqn.read
    return False
