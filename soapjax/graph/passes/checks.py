"""What must hold after each pass of `build_graph`: a defect is named by the pass that made it, not by what breaks later.

The passes: program (flattening), phases, units, operators (pairing), graph. All raise `SoapjaxError` with every
inconsistency; each is a defect of the tracer, never of the step.
"""

from __future__ import annotations

from soapjax.errors import Problem, SoapjaxError
from soapjax.graph.operators import NOT_SPLIT, OperatorGraph
from soapjax.graph.passes.order import Unit, reads_between
from soapjax.graph.passes.phases import PHASE_NAMES, Phases
from soapjax.graph.trace.program import FlatEqn, Program
from soapjax.graph.trace.values import Values


class Findings:
    """Inconsistencies that one pass left."""

    def __init__(self, made_by: str):
        self._made_by = made_by
        self._problems: list[Problem] = []

    def wrong(self, place: str, value: object, expected: str) -> None:
        remedy = f"this is a defect in soapjax's tracer (found after the pass that makes {self._made_by}): report it with the step"
        self._problems.append(Problem(place, str(value), expected, remedy))

    def raise_any(self) -> None:
        if self._problems:
            raise SoapjaxError(self._problems)


def check_program(program: Program) -> None:
    """Every value is made once, before it is read, at its own level or around it."""
    found = Findings("the flat program")
    made: set[int] = set()

    def visit(p: Program, known: set[int]) -> None:
        known = known | set(p.inputs)
        for eqn in p.eqns:
            if lost := [a for a in eqn.read if a not in known]:
                found.wrong(f"equation {eqn.key} ({eqn.name})", f"reads values {lost}", "values made before")
            if eqn.body is not None:
                visit(eqn.body, set(program.consts))
            if again := made.intersection(eqn.outputs):
                found.wrong(f"equation {eqn.key} ({eqn.name})", f"makes values {sorted(again)}", "values that nothing else makes")
            made.update(eqn.outputs)
            known.update(eqn.outputs)
        if lost := [a for a in p.outputs if isinstance(a, int) and a not in known]:
            found.wrong("results", f"values {lost}", "values made before")

    visit(program, set(program.consts))
    found.raise_any()


def check_phases(program: Program, values: Values, phases: Phases) -> None:
    """Every equation has a phase; where there are phases, nothing reads what a later one makes."""
    found = Findings("the phases")
    made_in = {o: phases.phase.get(eqn.key, -1) for eqn in program.leaves for o in eqn.outputs}
    for eqn in program.leaves:
        own = phases.phase.get(eqn.key)
        if own is None:
            found.wrong(f"equation {eqn.key} ({eqn.name})", "no phase", "one of " + ", ".join(PHASE_NAMES))
        elif not phases.is_single_phase and (late := [r for r in values.sources(eqn) if made_in.get(r, -1) > own]):
            found.wrong(f"equation {eqn.key} ({eqn.name})", f"reads {late} of a later phase", "phases in order, or one phase")
    for parameter in phases.parameters:
        if parameter.gradient not in made_in:
            found.wrong(parameter.path, f"gradient {parameter.gradient}", "a value that an equation makes")
    found.raise_any()


def check_units(units: list[Unit], updates: list[FlatEqn], values: Values, phases: Phases) -> None:
    """An equation is in one unit, of its phase and loop, or in the updates; a unit comes after those that it reads from."""
    found = Findings("the units")
    home: dict[str, int] = {}
    for i, unit in enumerate(units):
        for e in unit.eqns:
            if home.setdefault(e.key, i) != i:
                found.wrong(f"equation {e.key} ({e.name})", f"in units {home[e.key]} and {i}", "one unit")
            if (phases.phase[e.key], values.scope[e.key]) != (unit.phase, unit.scope):
                found.wrong(f"equation {e.key} ({e.name})", f"in a unit of phase {unit.phase}, loop {unit.scope}", "its own")
    if twice := [e.key for e in updates if e.key in home]:
        found.wrong("updates", f"equations {twice}", "equations of no unit")
    left = {o for e in updates for o in e.outputs}
    for i, unit in enumerate(units):
        if lost := {values.of(a).root for e in unit.eqns for a in e.read} & left:
            found.wrong(f"unit {i} ({unit.kind})", f"reads values {sorted(lost)} of the updates", "values that units make")
    for i, needs in enumerate(reads_between(units, values)):
        if late := [j for j in needs if j > i]:
            found.wrong(f"unit {i} ({units[i].kind})", f"reads from units {late}", "units before")
    found.raise_any()


def check_operators(operators: list[list[int]], num_units: int) -> None:
    """Every unit is of one operator."""
    found = Findings("the operators")
    counts = [0] * num_units
    for members in operators:
        for i in members:
            counts[i] += 1
    for i in (i for i, n in enumerate(counts) if n != 1):
        found.wrong(f"unit {i}", f"in {counts[i]} operators", "one operator")
    found.raise_any()


def check_graph(graph: OperatorGraph) -> None:
    """Each reference in range, each tensor written once, each read after its write.

    Raises: SoapjaxError with every inconsistency.
    """
    found = Findings("the graph")
    wrong = found.wrong
    names = [o.name for o in graph.operators]
    if len(set(names)) != len(names):
        wrong("operators", sorted({n for n in names if names.count(n) > 1}), "unique names")
    if len(graph.leaf_of) not in (0, len(graph.in_paths)):
        wrong("leaf_of", f"{len(graph.leaf_of)} entries", f"one for each of {len(graph.in_paths)} inputs, or none")
    written: set[int] = {i for i, t in enumerate(graph.tensors) if t.input_leaf >= 0}
    carried = {e.target for e in graph.entries}
    makers: dict[int, int] = {}
    # Of what a loop carries, a trip reads what the trip before wrote; the first value may be a constant.
    loop_of = {access.tensor: task.scope.split("/")[0] for task in graph.tasks for access in task.writes}
    for k, task in enumerate(graph.tasks):
        op = graph.operators[task.operator]
        if k not in op.tasks:
            wrong(f"task {k}", op.name, "an operator that lists the task")
        for access in (*task.reads, *task.writes):
            tensor = graph.tensors[access.tensor]
            split = [d for d in access.dims if d != NOT_SPLIT]
            if len(access.dims) != len(tensor.shape) or len(set(split)) != len(split):
                wrong(f"task {k} of {op.name}", access, f"one op dim per dim of {tensor.shape}, none twice")
            elif task.parameter < 0:
                for d, n in zip(access.dims, tensor.shape, strict=True):
                    if d != NOT_SPLIT and n % op.dims[d].divisor:
                        wrong(f"{op.name}.{op.dims[d].name}", op.dims[d].divisor, f"a divisor of {n}")
        for access in task.reads:
            is_carried = access.tensor in carried or (task.scope and task.scope.split("/")[0] == loop_of.get(access.tensor))
            if access.tensor not in written and not is_carried:
                wrong(f"task {k} of {op.name}", f"reads tensor {access.tensor}", "a tensor written before")
        for access in task.writes:
            if makers.setdefault(access.tensor, k) != k:
                wrong(f"tensor {access.tensor}", f"tasks {makers[access.tensor]} and {k}", "one writer")
            written.add(access.tensor)
    found.raise_any()
