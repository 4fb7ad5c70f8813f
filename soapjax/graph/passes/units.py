"""Equations into units: what XLA runs as one kernel, and what the schedule orders as one task.

A heavy equation (dot, conv, gather, ...) is a unit of its own, together with
the transposes that only lay out its result. Light equations form regions:
equations of one phase and one loop, with equally many heavy equations before
them, that are connected by data or read the same heavy result. Where regions would
then read each other in a circle (a padding mask that stands in one region and is read by another), order.py
takes them apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Set

from soapjax.graph.passes.order import Unit, ordered, without_circles
from soapjax.graph.passes.phases import FORWARD, UPDATE, Phases, is_recompute
from soapjax.graph.passes.relayouts import ADDITIONS, LAYOUT_ONLY, operand_of
from soapjax.graph.rules import linalg_rules
from soapjax.graph.rules.heavy_rules import POOLS, SCATTERS
from soapjax.graph.rules.light_rules import is_known
from soapjax.graph.trace.program import Atom, FlatEqn, Program
from soapjax.graph.trace.union_find import UnionFind
from soapjax.graph.trace.values import IDENTITIES, Uses, Values

HEAVY = {
    "dot_general": "dot",
    "ragged_dot_general": "ragged_dot",  # no "dot": compilers make masked products or calls of it, which no proof counts
    "conv_general_dilated": "conv",
    "gather": "gather",
    **dict.fromkeys(SCATTERS, "scatter"),
    **dict.fromkeys((*POOLS, "select_and_scatter_add", "select_and_gather_add"), "pool"),
    "sort": "sort",
    "top_k": "sort",
    "fft": "fft",
    "while": "loop",
    "cond": "loop",
    "sharding_constraint": "constraint",
    "shard_map": "shard_map",
    **dict.fromkeys(linalg_rules.NAMES, "linalg"),
}
# What may follow a heavy equation as part of it (bias, activation): nothing that sums over its result.
_NO_EPILOGUE = ("reduce", "arg", "cum", "concatenate", "split", "slice", "dynamic", "pad", "rev", "random", "iota")


def kind_of(eqn: FlatEqn) -> str | None:
    """The kind of a heavy equation; None for a light one. An unknown primitive is an operator of its own."""
    return HEAVY.get(eqn.name) or (None if is_known(eqn.name) else "unknown")


def find_units(
    program: Program, values: Values, phases: Phases, generated: set[int], additions: frozenset[str]
) -> tuple[list[Unit], list[FlatEqn]]:
    """Units in program order, and the update equations, which are grouped by parameter elsewhere.

    An update that a unit reads (momentum that a product orthogonalises, parameters that are evaluated after their update,
    all updates in a loop of them) is a unit as well. Each of `additions`, equation keys that sum up gradients, is a unit of
    its own. Equations whose values are `generated`, from constants alone (masks, iotas, literals), belong to no unit: each
    device makes its own.
    """
    depth: dict[int, int] = {}
    keys: dict[str, tuple] = {}
    updates: list[FlatEqn] = []
    light: list[FlatEqn] = []
    units: list[Unit] = []
    heavy_unit: dict[int, Unit] = {}  # root -> the unit of the heavy equation that makes it
    again: dict[int, FlatEqn] = {}  # value -> the equation that repeats it
    read = _read_by_units(program, values, phases)

    def visit(p: Program, base: int) -> int:
        deepest = base
        for eqn in p.eqns:
            d = max([base, *[depth.get(root, 0) for root in _decisive(eqn, program, values, phases)]])
            if eqn.body is not None:
                inner = visit(eqn.body, d + 1) + 1
                for out in eqn.outputs:
                    depth[values.of(out).root] = inner
                deepest = max(deepest, inner)
                continue
            if eqn.name in IDENTITIES or generated.issuperset(eqn.outputs):
                continue
            if not program.repeats.keys().isdisjoint(eqn.outputs):
                depth.update((o, depth[program.repeats[o]]) for o in eqn.outputs)
                again.update((program.repeats[o], eqn) for o in eqn.outputs)
                continue
            phase, scope = phases.phase[eqn.key], values.scope[eqn.key]
            kind = kind_of(eqn)
            if phase == UPDATE and kind is None and read.isdisjoint(eqn.outputs):
                updates.append(eqn)
            elif eqn.key in additions:
                units.append(Unit([eqn], phase, scope, "fused"))
            elif kind is not None:
                d += 1
                unit = Unit([eqn], phase, scope, kind, eqn)
                units.append(unit)
                heavy_unit.update(dict.fromkeys(eqn.outputs, unit))
            else:
                keys[eqn.key] = (phase, scope, d)
                light.append(eqn)
            depth.update(dict.fromkeys(eqn.outputs, d))
            deepest = max(deepest, d)
        return deepest

    visit(program, 0)
    _sink_additions(light, keys, values, values.uses)
    units += _regions(light, keys, depth, values, generated, heavy_unit, program, phases.own_additions)
    units += _repeated(units, again, phases) if again else []
    for unit in units:
        unit.eqns.sort(key=lambda e: values.order[e.key])
    return ordered(without_circles(units, values), values), updates


def _decisive(eqn: FlatEqn, program: Program, values: Values, phases: Phases) -> tuple[int, ...]:
    """The roots behind which an equation stands: all that it reads; where a step scales a gradient before it adds it, only that."""
    own = operand_of(eqn, program) if eqn.key in phases.own_additions else None
    return values.reads[eqn.key] if own is None else (values.of(own).root,)


def _repeated(units: list[Unit], again: dict[int, FlatEqn], phases: Phases) -> list[Unit]:
    """Of each unit the one that repeats of it what is repeated."""
    found = []
    for unit in units:
        eqns = [again[e.outputs[0]] for e in unit.eqns if e.outputs and e.outputs[0] in again]
        if eqns:
            heavy = again.get(unit.heavy.outputs[0]) if unit.heavy is not None else None
            kind = "fused" if heavy is None else unit.kind
            found.append(Unit(eqns, phases.phase[eqns[0].key], unit.scope, kind, heavy))
    return found


def _read_by_units(program: Program, values: Values, phases: Phases) -> set[int]:
    """Roots that a unit reads, directly or through equations of the update."""
    found: set[int] = set()
    queue = [root for e in program.leaves if phases.phase[e.key] != UPDATE or kind_of(e) is not None for root in values.sources(e)]
    while queue:
        root = queue.pop()
        if root not in found:
            found.add(root)
            producer = values.producer.get(root)
            if producer is not None and phases.phase[producer.key] == UPDATE:
                queue += values.sources(producer)
    return found


def generated_values(program: Program, values: Values, gradients: Set[int] = frozenset()) -> set[int]:
    """Values computed without any input of the step.

    None of the `gradients` is one, nor what follows from it. That of the last bias of a critic whose scores are averaged is the
    constant 1: its update is an update like any other, stored as its parameter is.
    """
    made: set[int] = set(program.consts)
    begun: set[int] = set()
    while True:
        made |= begun
        for eqn in program.leaves:
            is_generated = made.issuperset(values.reads[eqn.key]) and gradients.isdisjoint(eqn.outputs)
            if is_generated and not eqn.name.startswith("rng_uniform"):
                made.update(eqn.outputs)
        begun = {a for a, c in values.carries.items() if all(_is_made(x, made, values) for x in (c.init, c.result))}
        if begun <= made:
            return made


def _is_made(atom: Atom, made: Set[int], values: Values) -> bool:
    """Whether a value is a literal, or one of those `made`: of a loop's carry both are where no trip reads what the one before it
    had, as the cotangent of a result of the last trip alone."""
    found = values.of(atom)
    return found is None or found.root in made


def _regions(light, keys, depth, values: Values, generated, heavy_unit, program: Program, own: Set[str]) -> list[Unit]:
    """Connected regions of light equations; those that only prepare or finish a heavy equation join its unit.

    `own`: keys of what a step does with gradients that it adds up (own_accumulation.py).
    """
    inputs = set(program.inputs)
    prepared = _sink_preparations(light, keys, values, inputs | generated, heavy_unit)
    light = [e for e in light if e.key not in prepared]
    together = UnionFind()  # keys of equations
    makers: dict[int, str] = {o: eqn.key for eqn in light for o in eqn.outputs}
    readers: dict[tuple, str] = {}
    scalars: dict[tuple, str] = {}
    for eqn in light:
        key = keys[eqn.key]
        is_update = key[0] == UPDATE
        if is_update and all(program.aval(a).size <= 1 for a in (*eqn.inputs, *eqn.outputs)):
            together.union(eqn.key, scalars.setdefault(key, eqn.key))  # bias corrections, counts, rates
        for root in values.reads[eqn.key]:
            if root in generated:
                continue
            if is_update and program.avals[root].size <= 1:
                continue  # a norm or a bias correction does not make one region of all parameters' updates
            maker = makers.get(root)
            if maker is not None and keys[maker] == key:
                together.union(eqn.key, maker)
            elif root in heavy_unit and depth[root] == key[2]:
                together.union(eqn.key, readers.setdefault((root, key), eqn.key))
    groups: dict[Hashable, list[FlatEqn]] = {}
    for eqn in light:
        groups.setdefault(together.find(eqn.key), []).append(eqn)
    units = []
    for eqns in groups.values():
        phase, scope, _ = keys[eqns[0].key]
        inside = {o for e in eqns for o in e.outputs}
        read = {root for e in eqns for root in values.reads[e.key] if root not in inside and root not in generated}
        hosts = {heavy_unit[r] for r in read if r in heavy_unit}
        numbers = {r for e in eqns if e.key in own for r in values.reads[e.key] if program.avals[r].shape == ()}
        is_one = len(hosts) == 1 and all(r in heavy_unit or r in inputs for r in read - numbers)
        host = hosts.pop() if is_one else None
        kinds = ("dot", "ragged_dot", "conv", "gather", "scatter")
        finishes = host is not None and (host.phase, host.scope) == (phase, scope) and host.kind in kinds
        if finishes and (host.kind == "scatter" or (phase != FORWARD and not is_recompute(eqns[0]))):
            finishes = all(e.name in LAYOUT_ONLY or e.key in own for e in eqns)
        if finishes and _meets_its_transpose(host, eqns, program):
            finishes = False  # k + kᵀ makes rows and columns of a product one dim
        if finishes and not any(e.name.startswith(_NO_EPILOGUE) for e in eqns):
            host.eqns += eqns
        else:
            units.append(Unit(eqns, phase, scope, "fused"))
    return units


def _meets_its_transpose(host: Unit, eqns: list[FlatEqn], program: Program) -> bool:
    """Whether one of the equations that follow a product reads a square value of it laid out in two ways."""
    ways = {o: {0} for e in host.eqns for o in e.outputs}  # value -> how many square transposes it is away, modulo 2
    for eqn in eqns:
        read = set().union(*(ways.get(a, ()) for a in eqn.read))
        if len(read) > 1:
            return True
        is_turned = eqn.name == "transpose" and program.aval(eqn.inputs[0]).shape == program.aval(eqn.outputs[0]).shape
        ways.update(dict.fromkeys(eqn.outputs, {1 - w for w in read} if is_turned else read))
    return False


def _sink_additions(light, keys, values: Values, uses: Uses) -> None:
    """Sums of many values are added up by one region, the last: what comes early waits there (joint_sums.py)."""
    additions = {e.outputs[0]: e for e in light if e.name in ADDITIONS}
    for eqn in reversed(additions.values()):
        for a in eqn.read:
            before = additions.get(a)
            if before is None or not uses.is_private(a, eqn) or values.of(a).root != a:
                continue
            if a not in uses.carried and keys[before.key][:2] == keys[eqn.key][:2]:
                keys[before.key] = keys[eqn.key]


def _sink_preparations(light, keys, values: Values, inputs: set[int], heavy_unit) -> dict[str, Unit]:
    """What is computed from the step's inputs alone (casts of weights, masks, dropout bits) belongs to its first reader.

    Moves the key of each to that of its reader; where the reader is heavy, appends it to the unit and returns its key
    with the unit.
    """
    only_inputs: set[int] = set()
    for e in light:
        if all(root in inputs or root in only_inputs for root in values.reads[e.key]):
            only_inputs.update(e.outputs)
    readers: dict[int, list[FlatEqn]] = {}
    heavy_units = dict.fromkeys(heavy_unit.values())
    host_of = {u.heavy.key: u for u in heavy_units}
    for e in (*light, *(u.heavy for u in heavy_units)):
        for root in values.reads[e.key]:
            readers.setdefault(root, []).append(e)
    gone: dict[str, Unit] = {}
    for e in reversed(light):
        if only_inputs.isdisjoint(e.outputs):
            continue
        same = [r for o in e.outputs for r in readers.get(o, ()) if values.scope[r.key] == values.scope[e.key]]
        first = min(same, key=lambda r: values.order[r.key], default=None)
        host = host_of.get(first.key) if first is not None else None
        if first is None:
            continue
        host = host or gone.get(first.key)
        if host is not None and host.phase == keys[e.key][0]:
            host.eqns.append(e)
            gone[e.key] = host
        elif host is None and keys[first.key][0] == keys[e.key][0]:
            keys[e.key] = keys[first.key]
    return gone
