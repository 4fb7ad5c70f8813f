"""The update of a step that is cut: a part at every place that holds parameters, and what crosses into these from the passes.

What mixes gradients of several places (the norm of all gradients) is evaluated in a second round, by every place that needs it,
from what the first round made of each place's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from soapjax.execute.parts.cut import Part, make_part, read_at
from soapjax.execute.parts.cutter import Cutter
from soapjax.graph.passes.phases import UPDATE


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
    crossings: tuple[Crossing, ...]
    home: dict[int, int]  # input value -> the stage that holds it, for all but the batch
    results: tuple[tuple[int, int] | None, ...]  # of every output leaf: (stage, value); None for a literal
    gradients: tuple[tuple[int, int], ...]  # (stage, value) of every parameter's


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
    for leaf, value in enumerate(program.inputs):
        out = program.outputs[c.step.state_pairs[leaf]] if leaf in c.step.state_pairs else None
        made = sorted(stages_of(out)) if isinstance(out, int) and out not in program.inputs else []
        home[value] = owner.get(leaf, made[0] if made else min(readers.get(value, [0])))
    wanted: list[list[int]] = [[] for _ in range(c.num)]
    for leaf, out in enumerate(program.outputs):
        if not isinstance(out, int):
            results.append(None)
            continue
        at = home[program.inputs[inverse[leaf]]] if leaf in inverse else max(stages_of(out), default=home.get(out, 0))
        results.append((at, out))
        if out not in home and out not in wanted[at]:
            wanted[at].append(out)
    single = {v for v in (*depends, *site) if len(stages_of(v)) == 1}
    update, mixed = _update_parts(c, free, wanted, home, stages_of, stop=single - set(program.inputs))
    crossing = {}
    for part in update:
        for v in part.inputs:
            if v not in home:
                terms = c.summands(v) if v in site else [v]
                crossing[v] = Crossing(v, part.place, tuple((c.value_stage[t], t) for t in terms))
    for v in gradients:  # also those that no update reads
        if v in c.value_stage:
            crossing.setdefault(v, Crossing(v, site[v], tuple((c.value_stage[t], t) for t in c.summands(v))))
    return Updates(
        tuple(update), tuple(mixed), tuple(crossing.values()), home, tuple(results), tuple((site[v], v) for v in gradients)
    )  # fmt: skip


def _update_parts(
    c: Cutter, free: Collection[str], wanted: Sequence[Sequence[int]], home: Mapping[int, int],
    stages_of: Callable[[int], frozenset[int]], *, stop: Collection[int],
) -> tuple[list[Part], list[Part | None]]:  # fmt: skip
    """Of every stage the part that depends on its own gradients alone, and where something `wanted` needs others' a part for that.

    Args:
      home: input -> the stage that keeps it.
      stop: values that such a mixed part is given.
    """
    program = c.program
    alone = [[v for v in wanted[s] if stages_of(v) <= {s}] for s in range(c.num)]
    rest = [[v for v in wanted[s] if v not in alone[s]] for s in range(c.num)]
    mixed = [
        make_part(f"update {s} mixed", s, program, (), free, rest[s], stop=stop) if rest[s] else None for s in range(c.num)
    ]
    for part in mixed:
        for v in part.inputs if part is not None else ():
            if v not in home:
                (t,) = stages_of(v)
                alone[t] += [v] if v not in alone[t] else []
    return [make_part(f"update {s}", s, program, (), free, alone[s]) for s in range(c.num)], mixed
