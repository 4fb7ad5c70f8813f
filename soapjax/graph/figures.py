"""An operator graph as figures in a file: all that costs are made from, and nothing that runs.

A plan carries them, so that whoever has the plan can predict it anew without the step. They are lists of numbers and words,
one operator, task or tensor a line. What a stranger's file says is checked before anything is made from it: types, that every
index points at something, that sizes are finite; what must hold of any graph comes on top (checks.py).

>>> graph = problem.graph
>>> graph_of(figures_of(graph)).fingerprint() == graph.fingerprint()
True

The keys of equations are left out: places in a program that the file does not have.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable
from typing import Any

import pydantic

from soapjax.errors import Problem, SoapjaxError
from soapjax.graph.operators import HEAVY_RESULT, NO_GRADIENT, NOT_SPLIT, Access, Halo, InnerSum, OperatorGraph, Task, Work
from soapjax.graph.passes.checks import check_graph

MOST = 2**53  # of sizes and counts: whole numbers up to it are exact as floats
MOST_DIMS = 64
MOST_PROBLEMS = 20
REMEDY = "restore the file, plan anew, or give the step with --model"


def figures_of(graph: OperatorGraph) -> dict[str, Any]:
    """The graph as JSON data."""
    tasks = tuple(t._replace(equations=t.equations._replace(keys=())) for t in graph.tasks)
    rows = {f.name: getattr(graph, f.name) for f in dataclasses.fields(graph)} | {"tasks": tasks}
    return json.loads(json.dumps(rows, default=lambda x: x.item()))  # NumPy's numbers, where an array was asked for a size


def figures_text(figures: dict[str, Any]) -> str:
    """As a JSON object whose lists have one entry a line."""
    parts = []
    for name, rows in figures.items():
        lines = ",\n   ".join(json.dumps(row, separators=(",", ":")) for row in rows) if isinstance(rows, list) else None
        parts.append(f'"{name}": ' + (json.dumps(rows) if not lines else f"[\n   {lines}\n  ]"))
    return "{\n  " + ",\n  ".join(parts) + "\n }"


def graph_of(figures: dict[str, Any], *, place: str = "operator_graph") -> OperatorGraph:
    """The graph that figures from a file describe.

    Raises: SoapjaxError naming every figure that is of the wrong type, points nowhere, or is of no step.
    """
    fields = {f.name for f in dataclasses.fields(OperatorGraph)}
    if unknown := sorted(figures.keys() - fields):
        raise SoapjaxError(
            Problem(f"{place}.{name[:80]}", "an unknown entry", "a graph's figures", REMEDY) for name in unknown[:MOST_PROBLEMS]
        )
    tasks = figures.get("tasks")
    if isinstance(tasks, list):
        figures = figures | {"tasks": [_grouped(row) for row in tasks]}
    try:
        graph = _types().validate_json(json.dumps(figures), strict=True)
    except pydantic.ValidationError as e:
        raise SoapjaxError(
            Problem(f"{place}.{'.'.join(str(x) for x in error['loc'])}", repr(error.get("input"))[:80], error["msg"], REMEDY)
            for error in e.errors()[:MOST_PROBLEMS]
        ) from None
    found = _Ranges(place)
    _check_ranges(graph, found)
    found.raise_any()  # what follows looks operators and tensors up
    _check_tasks(graph, found)
    found.raise_any()
    try:
        check_graph(graph)
    except SoapjaxError as e:
        raise SoapjaxError(
            Problem(f"{place}: {p.place}", p.value, p.expected, REMEDY) for p in e.problems[:MOST_PROBLEMS]
        ) from None
    return _with_slices(graph)


def _with_slices(graph: OperatorGraph) -> OperatorGraph:
    """Where a file is older than what says so: an argument is read slice by slice by a loop of as many trips as it has rows."""

    def with_slices(task: Task) -> Task:
        def of(a: Access) -> Access:
            shape = graph.tensors[a.tensor].shape
            is_sliced = task.trip_count > 1 and graph.tensors[a.tensor].input_leaf >= 0 and shape[:1] == (task.trip_count,)
            return a._replace(slices=task.trip_count if is_sliced else 1) if a.slices == 0 else a

        return task._replace(reads=tuple(map(of, task.reads)), writes=tuple(map(of, task.writes)))

    return dataclasses.replace(graph, tasks=tuple(map(with_slices, graph.tasks)))


def _grouped(row: Any) -> Any:
    """A task's figures; in older files all stand in one row, where the keys of its equations come before its trips."""
    if not isinstance(row, list) or len(row) != 22 or not isinstance(row[8], list):
        return row
    operator_to_sums, keys, heavy, trips, scope, parameter, *rest = row[:8], *row[8:]
    operand_dims, result_dims, result_bytes, recomputed_from, structure, halos, casts, choices_of, adds_to_sum = rest
    memory, equations = [result_bytes, recomputed_from, choices_of, adds_to_sum], [keys, heavy, operand_dims, result_dims]
    return [*operator_to_sums, trips, scope, parameter, structure, halos, casts, memory, equations]


@functools.cache
def _types() -> pydantic.TypeAdapter:
    return pydantic.TypeAdapter(OperatorGraph)


class _Ranges:
    """Numbers outside of what they may be."""

    def __init__(self, place: str):
        self._place = place
        self._problems: list[Problem] = []

    def within(self, place: str, values: Iterable[float], low: float, high: float) -> None:
        """`values` from `low` up to but without `high`."""
        for value in values:
            if not low <= value < high and len(self._problems) < MOST_PROBLEMS:
                self._problems.append(Problem(f"{self._place}.{place}", f"{value:.6g}", f"from {low} to below {high}", REMEDY))

    def raise_any(self) -> None:
        if self._problems:
            raise SoapjaxError(self._problems)


def _check_ranges(graph: OperatorGraph, found: _Ranges) -> None:
    within = found.within
    operators, tasks, tensors, parameters = (len(x) for x in (graph.operators, graph.tasks, graph.tensors, graph.parameters))
    inputs, outputs = len(graph.in_paths), len(graph.out_paths)
    for i, op in enumerate(graph.operators):
        at = f"operators.{i}"
        within(f"{at}: dims", [len(op.dims)], 0, MOST_DIMS)
        within(f"{at}: sizes", [d.size for d in op.dims], 0, MOST)
        within(f"{at}: divisors", [d.divisor for d in op.dims], 1, MOST)
        within(f"{at}: tasks", op.tasks, 0, tasks)
        within(f"{at}: parameters", op.parameters, 0, parameters)
        within(f"{at}: group", [op.group], 0, MOST)
        within(f"{at}: sizes of the user's mesh", [n for _, n in op.fixed_mesh], 1, MOST)
    for i, tensor in enumerate(graph.tensors):
        at = f"tensors.{i}"
        within(f"{at}: dims", [len(tensor.shape)], 0, MOST_DIMS)
        within(f"{at}: shape", tensor.shape, 0, MOST)
        within(f"{at}: itemsize", [tensor.itemsize, tensor.sum_itemsize], 0, 1024)
        within(f"{at}: copies", [tensor.copies], 1, MOST)
        within(f"{at}: bytes", [math.prod(tensor.shape[:MOST_DIMS]) * tensor.itemsize * tensor.copies], 0, 2**63)
        within(f"{at}: input_leaf", [tensor.input_leaf], -1, inputs)
        within(f"{at}: output_leaves", tensor.output_leaves, 0, outputs)
    within("tasks: operator", [t.operator for t in graph.tasks], 0, operators)
    for i, parameter in enumerate(graph.parameters):
        at = f"parameters.{i}"
        within(f"{at}: tensors", [parameter.tensor], 0, tensors)
        within(f"{at}: gradient", [parameter.gradient], NO_GRADIENT, tensors)
        within(f"{at}: owner", [parameter.owner], 0, operators)
        within(f"{at}: leaves", parameter.leaves, 0, inputs)
    for name, used in {
        "entries": [t for e in graph.entries for t in e],
        "accumulations": [t for a in graph.accumulations for t in (*a.summands, *a.running, a.total, a.layout_of)],
        "joint_sums": [t for j in graph.joint_sums for t in j.summands],
    }.items():
        within(f"{name}: tensors", used, 0, tensors)
    within("accumulations: parameter", [a.parameter for a in graph.accumulations], 0, parameters)
    within("state_pairs: inputs", [i for i, _ in graph.state_pairs], 0, inputs)
    within("state_pairs: outputs", [o for _, o in graph.state_pairs], 0, outputs)
    within("leaf_of", graph.leaf_of, 0, inputs)


def _check_tasks(graph: OperatorGraph, found: _Ranges) -> None:
    within, tensors, parameters = found.within, len(graph.tensors), len(graph.parameters)
    for i, parameter in enumerate(graph.parameters):
        within(f"parameters.{i}: storage_dims", parameter.storage_dims, 0, len(graph.tensors[parameter.tensor].shape))
    for k, task in enumerate(graph.tasks):
        at, dims = f"tasks.{k}", len(graph.operators[task.operator].dims)
        within(f"{at}: phase", [task.phase], 0, 3)
        within(f"{at}: trip_count", [task.trip_count], 1, MOST)
        within(f"{at}: parameter", [task.parameter], -1, parameters)
        accesses = (*task.reads, *task.writes)
        recomputed = [t for sources in task.memory.recomputed_from for t in sources or ()]
        within(f"{at}: tensors", [a.tensor for a in accesses] + [t for t, _ in task.casts], 0, tensors)
        within(f"{at}: tensors", [task.memory.choices_of, *recomputed], min(-1, HEAVY_RESULT), tensors)
        heavy = (*task.equations.operand_dims, task.equations.result_dims)
        within(f"{at}: dims of tensors", [d for of in (*(a.dims for a in accesses), *heavy) for d in of], NOT_SPLIT, dims)
        parts: tuple[Work | InnerSum | Halo, ...] = (*task.work, *task.sums, *task.halos)
        own = [d for a in accesses for d in a.reduced] + [d for s in task.sums for d in s.reduced]
        own += [d for part in parts for d in part.dims] + [d for h in task.halos for d in h.edges]
        within(f"{at}: dims", own, 0, dims)
        within(f"{at}: operands", [a.operand for a in accesses], -1, MOST_DIMS * 1024)
        within(f"{at}: slices", [a.slices for a in accesses], 0, MOST)
        # A sum, a halo or FLOPs beyond any machine's: what is made of them must stay a finite float32.
        sizes = [s.size_bytes for s in task.sums] + [h.size_bytes for h in task.halos]
        amounts = [*(w.flops for w in task.work), *sizes, task.memory.result_bytes, task.memory.costly_bytes]
        within(f"{at}: FLOPs and bytes", amounts, 0, 1e30)
