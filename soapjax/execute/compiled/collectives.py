"""The collectives of a compiled program: kind, bytes, group, how often, and the task they belong to.

Reads the text of optimised HLO. Bytes are what each device sends in one step, as the cost model counts them:
with n devices per group and `s` bytes of operands per device, all-gather s(n-1), reduce-scatter and all-to-all s(n-1)/n,
all-reduce 2s(n-1)/n, collective-permute s. An instruction in a loop counts once per trip (XLA's
`known_trip_count`), one in a computation that several places call once per call.

>>> collectives_of('ENTRY %main {\\n  %a = f32[4]{0} parameter(0)\\n  ROOT %r = f32[4]{0} all-reduce(%a), '
...                'replica_groups={{0,1}}, to_apply=%add\\n}', num_devices=2)
[Collective(kind='all-reduce', sent_bytes=16.0, trips=1, group=(0, 1), task=-1, op_name='')]
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.compiled.instructions import Instruction, computations, shapes_of

KINDS = ("reduce-scatter", "all-reduce", "all-to-all", "all-gather", "collective-permute")

_CALLED = re.compile(r"(calls|to_apply|body|condition|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_MARK = re.compile(r"(?:^|/)sj(\d+)(?:/|$)")
_GROUPED = re.compile(r"\b(replica_groups|source_target_pairs)=")
# Replica groups: as an iota of devices, dims permuted; as axes of a mesh, or parts of them.
_ORDERED = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=" + _ORDERED)
_MESH = re.compile(r"replica_groups=@?\w*mesh\w*\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}")
_AXIS = re.compile(r"['\"]([^'\"]+)['\"](?::\((\d+)\)(\d+))?")
# f8 types are one byte each; sub-byte types are stored in bytes of their own.
_ITEM_BYTES = {"pred": 1, "bf16": 2, "c64": 8, "c128": 16, "token": 0, "opaque": 0}


class Collective(NamedTuple):
    """One collective instruction."""

    kind: str  # one of KINDS
    sent_bytes: float  # by each device, in one run of the instruction
    trips: int  # runs per step
    group: tuple[int, ...]  # the devices of one group; of a permute, the first device's partner and itself
    task: int  # of the graph, by the executor's mark; -1 where the compiler dropped it
    op_name: str

    @property
    def step_bytes(self) -> float:
        return self.sent_bytes * self.trips


def bytes_by_kind(found: Iterable[Collective]) -> dict[str, int]:
    """What each device sends in one step."""
    kinds = [(c.kind, c.step_bytes) for c in found]
    return {k: round(sum(size for kind, size in kinds if kind == k)) for k in KINDS}


def shape_bytes(text: str) -> int:
    """Bytes of a shape or a tuple of shapes as HLO writes them."""
    return sum(item_bytes(dtype) * math.prod(dims) for dtype, dims in shapes_of(text))


def item_bytes(dtype: str) -> int:
    if dtype in _ITEM_BYTES:
        return _ITEM_BYTES[dtype]
    bits = re.match(r"[a-z]+(\d+)", dtype)
    return max(1, int(bits.group(1)) // 8) if bits else 4


def collectives_of(text: str, num_devices: int) -> list[Collective]:
    """All collectives in HLO text that move something.

    Raises: SoapjaxError naming collectives of a kind, or in groups, unknown here, whose bytes would be missing or wrong.
    """
    by_name, entry = computations(text)
    counts = _call_counts(by_name, entry)
    found, unknown = [], []
    for name, instructions in by_name.items():
        if not counts.get(name):
            continue
        shapes = {i.name: i.result for i in instructions}
        for i in instructions:
            kind = i.opcode.removesuffix("-start")
            if kind not in KINDS:
                if _GROUPED.search(i.attributes) and not i.opcode.endswith("-done"):
                    unknown.append(f"{i.opcode} (%{i.name})")
                continue
            try:
                one = _collective(kind, i, shapes, num_devices, counts[name])
            except ValueError as e:
                unknown.append(f"{i.opcode} (%{i.name}): {e}")
                continue
            if one.sent_bytes:
                found.append(one)
    if unknown:
        raise SoapjaxError(
            Problem(
                "compiled program", ", ".join(sorted(unknown)[:5]),
                f"collectives among {', '.join(KINDS)}, in groups of a known form",
                "report it with the plan and the jaxlib version: the bytes of this program cannot be counted",
            )
        )  # fmt: skip
    return found


def _collective(kind: str, i: Instruction, shapes: dict[str, str], num_devices: int, trips: int) -> Collective:
    local = sum(shape_bytes(shapes.get(o, "")) for o in i.operands)
    name = _OP_NAME.search(i.attributes)
    op_name = name.group(1) if name else ""
    marks = _MARK.findall(op_name)
    task = int(marks[-1]) if marks else -1
    if kind == "collective-permute":
        pairs = [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", i.attributes.split("source_target_pairs=")[1])]
        moved = [p for p in pairs if p[0] != p[1]]
        return Collective(kind, float(local) if moved else 0.0, trips, moved[0] if moved else (), task, op_name)
    group = replica_group(i.attributes, num_devices)
    n = len(group)
    factor = {"all-gather": n - 1, "all-reduce": 2 * (n - 1) / n}.get(kind, (n - 1) / n)
    return Collective(kind, local * factor, trips, group, task, op_name)


def replica_group(attributes: str, num_devices: int) -> tuple[int, ...]:
    """The first replica group: listed {{0,1},{2,3}}, as an iota [2,4]<=[2,2,2]T(1,0,2), as axes of a mesh, or everyone {}.

    A mesh is written mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'a'}; a part of an axis 'b':(1)2, of size 2 behind one of 1.

    Raises: ValueError where they are written otherwise: to count on would be to guess.
    """
    if iota := _IOTA.search(attributes):
        shape, dims, order = iota.groups()
        return tuple(_iota(dims, order, num_devices).reshape(-1)[: _numbers(shape)[-1]].tolist())
    if mesh := _MESH.search(attributes):
        axes, device_ids, names = mesh.groups()
        return _group_of_mesh(axes, device_ids, names, num_devices)
    listed = re.search(r"replica_groups=(?:\{\{([\d,]+)\}|\{\})", attributes)
    if listed is None and "replica_groups=" in attributes:
        written = attributes.split("replica_groups=")[1][:60]
        raise ValueError(f"replica groups written as nothing known here: {written}")
    return _numbers(listed.group(1)) if listed and listed.group(1) else tuple(range(num_devices))


def _group_of_mesh(mesh: str, device_ids: str | None, names: str, num_devices: int) -> tuple[int, ...]:
    axes = {name: int(size) for name, size in re.findall(r"['\"]([^'\"]+)['\"]=(\d+)", mesh)}
    if ordered := re.match(_ORDERED, device_ids or ""):
        dims, order = ordered.groups()
        ids = _iota(dims, order, num_devices)
    else:
        ids = np.array(_numbers(device_ids) or range(num_devices))
    wanted = [(name, int(before or 1), int(size or axes[name])) for name, before, size in _AXIS.findall(names)]
    # Axes of which a part is wanted are split: what is before it, itself, and what is behind.
    shape: list[int] = []
    at: dict[tuple[str, int], int] = {}
    for name, whole in axes.items():
        done = 1
        for _, before, size in sorted(w for w in wanted if w[0] == name):
            shape += [before // done, size]
            at[name, before] = len(shape) - 1
            done = before * size
        shape.append(whole // done)
    chosen = [at[name, before] for name, before, _ in wanted]
    others = [k for k in range(len(shape)) if k not in chosen]
    group = ids.reshape(shape).transpose([*others, *chosen]).reshape(-1, math.prod(shape[k] for k in chosen))[0]
    return tuple(group.tolist())


def _iota(dims: str, order: str | None, num_devices: int) -> np.ndarray:
    """All devices as an array of `dims`, transposed. Raises: ValueError where `dims` are of another number of them."""
    return np.arange(num_devices).reshape(_numbers(dims)).transpose(_numbers(order) or None)


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(",") if x) if text else ()


def _call_counts(by_name: dict[str, list[Instruction]], entry: str) -> dict[str, int]:
    """How often each computation runs in one step; loops of unknown length count once."""
    counts: dict[str, int] = {}
    order: list[str] = []
    seen: set[str] = set()

    def callees(name: str) -> list[tuple[str, int]]:
        found = []
        for i in by_name.get(name, ()):
            trips = _TRIPS.search(i.attributes)
            for role, called in _CALLED.findall(i.attributes):
                times = int(trips.group(1)) if trips and role in ("body", "condition") else 1
                found += [(c, times) for c in re.findall(r"[\w.\-]+", called.replace("%", "")) if c in by_name]
        return found

    def visit(name: str) -> None:
        if name not in seen:
            seen.add(name)
            for called, _ in callees(name):
                visit(called)
            order.append(name)

    visit(entry)
    counts[entry] = 1
    for name in reversed(order):
        for called, times in callees(name):
            counts[called] = counts.get(called, 0) + counts[name] * times
    return counts
