"""The update of a step that is cut: a part at every place that holds parameters, and what crosses into these from the passes.

What mixes gradients of several places (the norm of all gradients) is evaluated in a second round, by every place that needs it,
from what the first round made of each place's own; and what mixes what came of that (the norm of all new parameters, where
gradients are clipped) in a third. So a place's parameters stay there: others have numbers that it made of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from soapjax.execute.parts.cut import IDENTITIES, Part, make_part, read_at
from soapjax.execute.parts.cutter import Cutter
from soapjax.graph.passes.phases import UPDATE
from soapjax.graph.trace.program import FlatEqn, Program

LAST_ROUND = 2  # what would be of a later one is of this, from what other places keep


class Crossing(NamedTuple):
    """A value of forward or backward parts that the update reads (or the step returns)."""

    value: int
    site: int  # the stage that needs it, or makes it
    summands: tuple[tuple[int, int], ...]  # (stage, value): what is summed over micro-batches, and then added up


@dataclasses.dataclass(frozen=True, eq=False)
class Updates:
    """The parts of the update, and what they have of others."""

    update: tuple[Part, ...]  # first round, by stage
    mixed: tuple[Part | None, ...]  # second round, by stage
    mixed_again: tuple[Part | None, ...]  # third round, by stage
    crossings: tuple[Crossing, ...]
    home: dict[int, int]  # input value -> the stage that holds it, for all but the batch
    results: tuple[tuple[int, int] | None, ...]  # of every output leaf: (stage, value); None for a literal
    gradients: tuple[tuple[int, int], ...]  # (stage, value) of every parameter's

    @property
    def rounds(self) -> list[list[Part]]:
        return [[p for p in parts if p is not None] for parts in (self.update, self.mixed, self.mixed_again)]

    @property
    def updates(self) -> list[Part]:
        """What runs once, after all micro-batches."""
        return [part for parts in self.rounds for part in parts]


class _Origin(NamedTuple):
    """What a value of the update is made of."""

    round: int  # how many times values of several places have met
    places: frozenset[int]  # the one whose parameters, state or gradients it is made of; none where it is made of what all may have


ANYWHERE = _Origin(0, frozenset())


def cut_updates(c: Cutter, passes: Sequence[Part], owners: Mapping[int, int] | None = None) -> Updates:
    """The parts of the update, by place, and what crosses into them from `passes` (forward and backward parts).

    Args:
      owners: input leaf of a parameter -> the place that keeps and updates it; by default the first that reads it.
    """
    program, phases = c.program, c.binding.phases
    free = c.keys(None) | c.keys(UPDATE) | (c.once & c.stage.keys())
    readers = read_at(passes)
    gradients = c.gradient_values()
    owner: dict[int, int] = {}  # input leaf -> stage
    site: dict[int, int] = {}
    for parameter, gradient in zip(phases.parameters, gradients, strict=True):
        stage = min(readers.get(parameter.value, [0])) if owners is None else owners[parameter.leaf]
        owner.update(dict.fromkeys(parameter.leaves, stage))
        site[gradient] = stage
    depends: dict[int, frozenset[int]] = {}

    def stages_of(v: int) -> frozenset[int]:
        """The stages on whose gradients, or other crossing values, it depends; none of an input of the step."""
        if v in depends:
            return depends[v]
        stage = site.get(v, c.value_stage.get(v))
        return frozenset() if stage is None else frozenset({stage})

    for eqn in program.eqns:
        if eqn.key in free:
            found = (stages_of(a) for a in eqn.read)
            depends.update(dict.fromkeys(eqn.outputs, frozenset[int]().union(*found)))
    inverse = {o: i for i, o in c.step.state_pairs.items()}
    home: dict[int, int] = {}
    results: list[tuple[int, int] | None] = []
    origin: dict[int, _Origin] = {}
    for leaf, value in enumerate(program.inputs):
        out = program.outputs[c.step.state_pairs[leaf]] if leaf in c.step.state_pairs else None
        made = sorted(stages_of(out)) if isinstance(out, int) and out not in program.inputs else []
        home[value] = owner.get(leaf, made[0] if made else min(readers.get(value, [0])))
        if (leaf in owner or made) and program.aval(value).size > 1:
            origin[value] = _Origin(0, frozenset({home[value]}))
    for eqn in program.eqns:
        if eqn.key in free:
            origin |= {a: _Origin(0, stages_of(a)) for a in eqn.read if a not in origin}
            origin |= _origins(eqn, program, origin)
    wanted: list[list[int]] = [[] for _ in range(c.num)]
    for leaf, out in enumerate(program.outputs):
        if not isinstance(out, int):
            results.append(None)
            continue
        own = max(origin[out].places if out in origin else (), default=max(stages_of(out), default=home.get(out, 0)))
        at = home[program.inputs[inverse[leaf]]] if leaf in inverse else own
        results.append((at, out))
        if out not in home and out not in wanted[at]:
            wanted[at].append(out)
    of_state = {v for v in origin if not stages_of(v)}
    update, mixed, mixed_again = _update_parts(c, free, wanted, home, origin, of_state)
    return Updates(
        tuple(update), tuple(mixed), tuple(mixed_again), _crossings(c, update, home, site), home, tuple(results),
        tuple((site[v], v) for v in gradients),
    )  # fmt: skip


def _crossings(
    c: Cutter, update: Sequence[Part], home: Mapping[int, int], site: Mapping[int, int]
) -> tuple[Crossing, ...]:  # fmt: skip
    """What the update reads that passes make; gradients, which `site` has, also where no update reads them."""

    def to(place: int, v: int) -> Crossing:
        terms = c.summands(v) if v in site else [v]
        return Crossing(v, place, tuple((c.value_stage[t], t) for t in terms))

    found = {v: to(part.place, v) for part in update for v in part.inputs if v not in home}
    return (*found.values(), *(to(place, v) for v, place in site.items() if v in c.value_stage and v not in found))


def _origins(eqn: FlatEqn, program: Program, known: dict[int, _Origin]) -> dict[int, _Origin]:
    """The origins of what an equation makes.

    An array that belongs to a place stays there, and what comes of it. Single numbers go where others are: the norms of all
    gradients to where they are added up, whatever the order.
    """
    if eqn.name in IDENTITIES and len(eqn.inputs) == len(eqn.outputs):  # a number of the whole batch reads nothing here
        return {o: known[a] if isinstance(a, int) else ANYWHERE for a, o in zip(eqn.inputs, eqn.outputs, strict=True)}
    common = max((known[a].round for a in eqn.read if not known[a].places), default=0)
    own = [a for a in eqn.read if known[a].places]
    arrays = frozenset[int]().union(*(known[a].places for a in own if program.aval(a).size > 1))
    places = arrays or frozenset[int]().union(*(known[a].places for a in own))
    last = max((known[a].round for a in own), default=0)
    if len(places) > 1 or (places and not arrays and common > last):
        found = _Origin(max(last + 1, common), frozenset())
    else:
        found = _Origin(max([common, *(known[a].round + (known[a].places != places) for a in own)]), places)
    return dict.fromkeys(eqn.outputs, found._replace(round=min(found.round, LAST_ROUND)))


def _update_parts(
    c: Cutter, free: Collection[str], wanted: Sequence[Sequence[int]], home: Mapping[int, int], origin: Mapping[int, _Origin],
    of_state: Collection[int],
) -> tuple[list[Part], list[Part | None], list[Part | None]]:
    """The parts of all rounds, by stage: each makes what is `wanted` of it, and what later ones read of its own.

    Args:
      home: input -> the stage that keeps it.
      of_state: values that depend on no gradient: the stage that keeps the state makes them again.
    """
    needed: list[list[list[int]]] = [[[] for _ in range(c.num)] for _ in range(LAST_ROUND + 1)]
    for s, values in enumerate(wanted):
        for v in values:
            found = origin.get(v, ANYWHERE)
            comes = found.places and s not in found.places  # from another stage, a round later
            needed[min(found.round + bool(comes), LAST_ROUND)][s].append(v)
    parts: list[list[Part | None]] = []
    for k in reversed(range(LAST_ROUND + 1)):
        name = ("update {}", "update {} mixed", "update {} mixed again")[k]
        before = {v: found.places for v, found in origin.items() if found.places and found.round < k and v not in home}
        made: list[Part | None] = []
        for s, values in enumerate(needed[k]):
            stop = {v for v, places in before.items() if s not in places or v not in of_state}
            made.append(make_part(name.format(s), s, c.program, (), free, values, stop=stop) if values or k == 0 else None)
        for v in (v for part in made if part is not None and k > 0 for v in part.inputs if v not in home):
            (t,) = origin[v].places
            if v not in needed[origin[v].round][t]:
                needed[origin[v].round][t].append(v)
        parts.append(made)
    mixed_again, mixed, update = parts
    return update, mixed, mixed_again
