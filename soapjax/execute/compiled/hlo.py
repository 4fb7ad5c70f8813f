"""Reading the compiled program: which dots and convolutions it has, with their local FLOPs.

Works on the text of optimised HLO. Instructions are found again by the mark that
the executor leaves in their `op_name`; the partitioner drops the name of convolutions that it rewrites
(halo exchange), which are then told by their FLOPs.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from soapjax.execute.compiled.instructions import Instruction, computations, shapes_of
from soapjax.execute.spmd.plan_layouts import axes_on, split_of
from soapjax.execute.spmd.planned_evaluator import BoundStep
from soapjax.graph.rules.flops import conv_flops_by_shape, flops_of, window_pairs

_MARK = re.compile(r"/sj(\d+)/")


class Flops(NamedTuple):
    """Of one dot or convolution: by shapes alone, and without the window positions that meet padding.

    XLA swaps image and kernel of small convolutions, which changes the first; a halo exchange replaces padding by
    neighbours, which changes the second. A plan is followed where either agrees.
    """

    by_shape: float
    met: float

    def agrees(self, other: Flops) -> bool:
        return any(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(self, other, strict=True))


class Heavy(NamedTuple):
    """One dot or convolution of the compiled program."""

    kind: str
    task: int  # by its mark, -1 where the compiler dropped it
    flops: Flops


class OpsCheck(NamedTuple):
    """Planned dots and convolutions against the compiled ones."""

    planned_ops: int
    ops_as_planned: int
    ops_unchecked: int
    differences: tuple[str, ...]


def heavy_instructions(text: str) -> list[Heavy]:
    """All dots and convolutions in HLO text, with local FLOPs (a multiply-add counts two)."""
    shapes: dict[str, tuple[int, ...]] = {}
    found = []
    for _, i in _of_one_array(text):
        shapes[i.name] = dims = next((dims for _, dims in shapes_of(i.result)), ())
        if i.opcode in ("dot", "convolution"):
            kind, flops_by_text = ("dot", _dot_flops) if i.opcode == "dot" else ("conv", _conv_flops)
            mark = _MARK.search(i.attributes)
            found.append(Heavy(kind, int(mark.group(1)) if mark else -1, flops_by_text(dims, i.operands, shapes, i.attributes)))
    return found


def _of_one_array(text: str) -> Iterator[tuple[str, Instruction]]:
    """The instructions that make one array, with their computations' names."""
    for name, instructions in computations(text)[0].items():
        yield from ((name, i) for i in instructions if " " not in i.result)


def _dot_flops(out: tuple[int, ...], operands: Sequence[str], shapes: dict, rest: str) -> Flops:
    contracting = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)
    dims = [int(d) for d in contracting.group(1).split(",") if d] if contracting else []
    lhs = shapes.get(operands[0], ())
    flops = 2.0 * math.prod(out) * math.prod(lhs[d] for d in dims)
    return Flops(flops, flops)


def _conv_flops(out: tuple[int, ...], operands: Sequence[str], shapes: dict, rest: str) -> Flops:
    lhs_labels, rhs_labels, out_labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", rest).groups()
    groups = re.search(r"batch_group_count=(\d+)", rest)
    window = re.search(r"window=\{([^}]*)\}", rest)
    fields = dict(f.split("=") for f in window.group(1).split()) if window else {}
    lhs, kernel = shapes.get(operands[0], ()), shapes.get(operands[1], ())
    batch = lhs[lhs_labels.index("b")] // (int(groups.group(1)) if groups else 1)
    features = kernel[rhs_labels.index("i")] * kernel[rhs_labels.index("o")]
    by_shape = met = 2.0 * batch * features
    rank = len(lhs) - 2

    def per_dim(name: str, default: int) -> list[int]:
        return [int(x) for x in fields[name].split("x")] if name in fields else [default] * rank

    pads = [int(x.split("_")[0]) for x in fields["pad"].split("x")] if "pad" in fields else [0] * rank
    for k, (stride, low, ld, rd) in enumerate(
        zip(per_dim("stride", 1), pads, per_dim("lhs_dilate", 1), per_dim("rhs_dilate", 1), strict=True)
    ):
        n, w, m = lhs[lhs_labels.index(str(k))], kernel[rhs_labels.index(str(k))], out[out_labels.index(str(k))]
        by_shape *= w * m
        met *= window_pairs(n, w, m, stride=stride, low=low, lhs_dilation=ld, rhs_dilation=rd)
    return Flops(by_shape, met)


def planned_flops(program: BoundStep, task: int) -> Flops:
    """Local FLOPs of a task's heavy equation under the plan."""
    graph, plan = program.graph, program.plan
    found = graph.tasks[task]
    op = graph.operators[found.operator]
    eqn = program.eqn(found.equations.heavy)
    sizes = dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True))
    dims = [d for one in (*found.equations.operand_dims, found.equations.result_dims) for d in one]
    ways = math.prod(sizes[a] for a in axes_on(plan, op, dims))
    by_shape = flops_of(eqn, program.step.program)
    if eqn.name == "conv_general_dilated":
        by_shape = conv_flops_by_shape(eqn, program.step.program)
    return Flops(by_shape / ways, flops_of(eqn, program.step.program) / ways)


def check_ops(program: BoundStep, text: str, tasks: Iterable[int] | None = None) -> OpsCheck:
    """Finds every planned dot and convolution in the compiled program and compares its local FLOPs.

    Args:
      tasks: those that the program has; all of the graph by default.
    """
    graph = program.graph
    by_task: dict[int, list[Flops]] = {}
    nameless: dict[str, list[Flops]] = {"dot": [], "conv": []}
    for h in heavy_instructions(text):
        if h.task >= 0:
            by_task.setdefault(h.task, []).append(h.flops)
        else:
            nameless[h.kind].append(h.flops)
    planned = as_planned = 0
    differences: dict[int, str] = {}
    missing: list[Flops] = []
    of_groups: list[tuple[Flops, int]] = []
    for k in range(len(graph.tasks)) if tasks is None else tasks:
        task = graph.tasks[k]
        if not task.is_heavy or task.kind not in ("dot", "conv"):
            continue
        planned += 1
        wanted = planned_flops(program, k)
        twin = next((f for f in nameless[task.kind] if wanted.agrees(f)), None)
        if k in by_task and (wanted.agrees(_sum(by_task[k])) or _are_copies(wanted, by_task[k], task.trip_count)):
            as_planned += 1
        elif k in by_task:
            name = graph.operators[task.operator].name
            differences[k] = (
                f"{name} ({task.kind}, task {k}): planned {wanted.by_shape:.6g} FLOPs per device, "
                f"compiled {_sum(by_task[k]).by_shape:.6g}"
            )
        elif twin is not None:
            nameless[task.kind].remove(twin)
            as_planned += 1
        elif (groups := program.eqn(task.equations.heavy).params.get("batch_group_count", 1)) > 1:
            of_groups.append((wanted, groups))
        else:
            missing.append(wanted)
    for wanted, groups in of_groups:
        twin = _of_all_pairs(wanted, groups, nameless["conv"])
        if twin is not None:
            nameless["conv"].remove(twin)
            as_planned += 1
        else:
            missing.append(wanted)
    for k in list(differences):
        if others := _under_its_name(planned_flops(program, k), by_task[k], missing):
            del differences[k]
            for f in others:
                missing.remove(f)
            as_planned += 1 + len(others)
    return OpsCheck(planned, as_planned, len(missing), (*differences.values(), *namesakes(text)))


def _sum(found: Iterable[Flops]) -> Flops:
    by_shape, met = map(sum, zip((0.0, 0.0), *found, strict=True))
    return Flops(by_shape, met)


def _are_copies(wanted: Flops, found: Sequence[Flops], trip_count: int) -> bool:
    """Whether a loop's body was written down several times: `scan(..., unroll=2)`, or the compiler unrolled it."""
    return len(found) <= trip_count and all(wanted.agrees(f) for f in found)


def _under_its_name(wanted: Flops, found: Sequence[Flops], missing: Sequence[Flops]) -> list[Flops]:
    """Which of `missing` the instructions of one name `found` do beside what is `wanted` of it; none where that explains nothing.

    Products that share an operand (query, key and value) may have become one, under one of their names. And an instruction that
    lost its name has its reader's (XLA's CPU compiler, jax 0.10).
    """
    equal = [f for f in missing if wanted.agrees(f)]
    count = round(_sum(found).by_shape / wanted.by_shape)
    if 2 <= count <= len(equal) + 1 and math.isclose(_sum(found).by_shape, count * wanted.by_shape, rel_tol=1e-6):
        return equal[: count - 1]
    for number in range(max(1, len(found) - len(missing)), len(found)):  # each of the others is one of `missing`
        for own in itertools.combinations(range(len(found)), number):
            left, others = list(missing), []
            for f in (f for i, f in enumerate(found) if i not in own):
                if (twin := next((m for m in left if m.agrees(f)), None)) is not None:
                    left.remove(twin)
                    others.append(twin)
            if len(others) == len(found) - number and wanted.agrees(_sum(found[i] for i in own)):
                return others
    return []


def _of_all_pairs(wanted: Flops, groups: int, nameless: list[Flops]) -> Flops | None:
    """What a convolution with batch groups (the gradient of a depthwise kernel) may have become, its name lost.

    XLA's CPU compiler (jax 0.10) convolves all pairs of groups and keeps the diagonal: as many times the FLOPs as a device
    has groups.
    """
    times = [m for m in range(2, groups + 1) if groups % m == 0]
    return next((f for f in nameless if any(Flops(wanted.by_shape * m, wanted.met * m).agrees(f) for m in times)), None)


def namesakes(text: str) -> list[str]:
    """Instructions of one fusion that XLA's emitters take for one another (slicing.py), in words."""
    found = []
    seen: dict[tuple[str, str], str] = {}
    for computation, i in _of_one_array(text):
        if not computation.startswith("fused"):
            continue
        other = seen.setdefault((computation, i.name.replace("-", "_")), i.name)
        if other != i.name:
            found.append(
                f"{other} and {i.name} of one fusion have one name for XLA's emitters, which then read one of them "
                "twice: the program may compute wrong numbers"
            )
    return found


def replicated_tasks(program: BoundStep, text: str) -> list[str]:
    """Operators that make a planned split result whole on every device: its full shape is there, its local one is not."""
    shapes: dict[int, set[tuple[int, ...]]] = {}
    for _, i in _of_one_array(text):
        mark = _MARK.search(i.attributes)
        if mark is not None and i.opcode not in ("dynamic-slice", "all-gather", "parameter", "get-tuple-element"):
            shapes.setdefault(int(mark.group(1)), set()).update(_sorted_dims(dims) for _, dims in shapes_of(i.result))
    graph, plan = program.graph, program.plan
    sizes = dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True))
    replicated = []
    for k, task in enumerate(graph.tasks):
        op = graph.operators[task.operator]
        for access in task.writes:
            shape = graph.tensors[access.tensor].shape
            parts = [math.prod(sizes[a] for a in names) for names in split_of(plan, op, access.dims)]
            local = [n // p for n, p in zip(shape, parts, strict=True)]
            whole, own = map(_sorted_dims, (shape, local))
            if whole != own and k in shapes and whole in shapes[k] and own not in shapes[k]:
                replicated.append(f"{op.name} (task {k}): {list(shape)} is whole on every device, planned {local}")
    return replicated


def _sorted_dims(dims: Iterable[int]) -> tuple[int, ...]:
    """The dims of a shape but those of one, in no order: the compiler transposes as it likes."""
    return tuple(sorted(n for n in dims if n != 1))
