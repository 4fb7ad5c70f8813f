"""Predicted communication, item by item: which task sends what, by which collective, for which tensor.

The sums are `Costs.bytes_by_collective`. Plain Python over the layouts of one strategy: it runs once
per plan, and is what `verify` holds against the compiled program.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from soapjax.costs.evaluate import Layouts
from soapjax.costs.layouts import as_read, value_index
from soapjax.costs.rules.halos import halo_cost_plainly, inner_target
from soapjax.costs.rules.links import COLLECTIVES
from soapjax.costs.rules.plain_reshard import reshard_cost_plainly
from soapjax.costs.tables.problem_tables import CostTables
from soapjax.strategy.configs import Strategy
from soapjax.strategy.layout import HALO, PARTIAL, spec_of
from soapjax.strategy.plan import SentPart, format_spec


class Sent(NamedTuple):
    """Bytes that each device sends in one step for one reason."""

    task: int  # that the collective stands in; the number of tasks for the step's end
    tensor: int  # -1 in the middle of a task
    reason: str  # "resolve" (a partial sum), "reshard" (to a reader's layout), "sum", "halo"
    source: tuple[int, ...]
    target: tuple[int, ...]
    bytes: dict[str, float]  # by collective


_reshard = functools.lru_cache(4096)(reshard_cost_plainly)  # repeated layers ask for the same again


def sent_items(tables: CostTables, found: Layouts, strategy: Strategy) -> list[Sent]:
    """Everything that is sent under a strategy whose layouts (NumPy) are given."""
    links, items = tables.links, []

    def add(task: int, tensor: int, reason: str, source, target, *, size: float, trips: float) -> None:
        shape = tables.tensor_shape[tensor].tolist() if tensor >= 0 else ()
        if reason == "halo":
            _, sent = halo_cost_plainly(source, float(size), links)
        else:
            key = tuple(map(int, source)), tuple(map(int, target)), float(size)
            _, sent = _reshard(*key, links, shape=tuple(shape))
        if any(sent.values()):
            moved = {k: sent[k] * float(trips) for k in COLLECTIVES if sent[k]}
            items.append(Sent(task, tensor, reason, tuple(map(int, source)), tuple(map(int, target)), moved))

    for t in np.flatnonzero(tables.may_be_partial).tolist():
        raw, target = found.raw[t], found.resolved[t]
        size, trips = tables.resolve_bytes[t], tables.tensor_trips[t]
        add(int(tables.tensor_birth[t]), t, "resolve", raw, target, size=size, trips=trips)
    gathers_again = tables.may_gather_again
    for e in np.flatnonzero(~np.asarray(found.is_shared)):
        t = int(tables.edge_tensor[e])
        home = found.slots[tables.edge_source[e]] if gathers_again[e] else found.home[t]
        wanted = found.slots[tables.edge_slot[e]]
        target = np.asarray(as_read(home, wanted))
        size, trips = tables.edge_bytes[e], tables.edge_trips[e]
        add(int(tables.edge_task[e]), t, "reshard", home, target, size=size, trips=trips)
    if len(tables.sum_task):
        index = np.asarray(value_index(strategy.axes))[tables.task_op[tables.sum_task]]
        inner = np.take_along_axis(tables.sum_map, index, axis=1)
        target = np.asarray(inner_target(inner))
        for s, k in enumerate(tables.sum_task.tolist()):
            reason = "halo" if inner[s].min() <= HALO else "sum"
            add(k, -1, reason, inner[s], target[s], size=tables.sum_bytes[s], trips=tables.task_trips[k])
    return items


def sent_parts(tables: CostTables, found: Layouts, strategy: Strategy) -> tuple[SentPart, ...]:
    """The same in words, as the plan file keeps them."""
    return tuple(part for _, part in described_items(tables, found, strategy))


def described_items(tables: CostTables, found: Layouts, strategy: Strategy) -> list[tuple[Sent, SentPart]]:
    """Every item beside its words, by task."""
    graph, names = tables.graph, tables.space.mesh.axis_names
    parameter_of = {p.tensor: p.path for p in graph.parameters}
    gradient_of = {p.gradient: p.path for p in graph.trained}
    maker_of = {a.tensor: t.operator for t in reversed(graph.tasks) for a in t.writes}

    def layout(row: tuple[int, ...], rank: int) -> str:
        partial = "+".join(n for n, d in zip(names, row, strict=True) if d == PARTIAL)
        return f"[{format_spec(spec_of(row, rank=rank, axis_names=names))}]" + (f" summed over {partial}" if partial else "")

    def words(item: Sent) -> str:
        if item.tensor < 0:
            return "halos of the blocks of the image" if item.reason == "halo" else "sum in the middle of the operator"
        tensor = graph.tensors[item.tensor]
        rank = len(tensor.shape)
        if item.tensor in parameter_of:
            name = f"parameter {parameter_of[item.tensor]}"
        elif item.tensor in gradient_of:
            name = f"gradient of {gradient_of[item.tensor]}"
        else:
            maker = maker_of.get(item.tensor)
            made = f"result of {graph.operators[maker].name}" if maker is not None else graph.in_paths[tensor.input_leaf]
            name = f"{made}, {tensor.dtype}{list(tensor.shape)}"
        return f"{name}: {layout(item.source, rank)} to {layout(item.target, rank)}"

    parts = []
    for item in sent_items(tables, found, strategy):
        operator = graph.operators[graph.tasks[item.task].operator].name if item.task < len(graph.tasks) else "the step's end"
        sent = {k: int(b) for k, b in item.bytes.items()}
        parts.append((item, SentPart(task=item.task, operator=operator, reason=words(item), bytes=sent)))
    return sorted(parts, key=lambda p: p[1].task)
