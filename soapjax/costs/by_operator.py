"""A strategy's figures taken apart by operator: seconds of computing and of communication, bytes sent, bytes held at the peak.

A reshard belongs to the operator that reads its result, a resolution (of a partial sum) to the operator that made the
partial sum, a parameter to its owner. What is resharded at the step's end belongs to the operator that made it.
Communication is added up over link levels, hidden or not. So seconds are those of the streams, not of the step: they add up to the
step without overlap where no pins are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from soapjax.costs.evaluate import Costs
from soapjax.costs.memory.memory_over_time import memory_curve
from soapjax.costs.split_share import split_flops
from soapjax.costs.tables.problem_tables import CostTables
from soapjax.graph.lifespans import makers
from soapjax.strategy.configs import Strategy
from soapjax.strategy.plan import OperatorCost, SentPart


class Owners(NamedTuple):
    """The operator of every task, resolution, reshard and inner collective, -1 where nobody made a tensor."""

    of_task: np.ndarray  # int [K]
    of_tensor: np.ndarray  # int [T]: its maker
    of_edge: np.ndarray  # int [E]
    of_sum: np.ndarray  # int [S]


def owners(tables: CostTables) -> Owners:
    num_k = tables.num_tasks
    of_task = np.append(tables.task_op, -1)  # and the step's end, and nobody
    maker = of_task[makers(tables.graph)]
    of_edge = np.where(tables.edge_task < num_k, of_task[np.minimum(tables.edge_task, num_k)], maker[tables.edge_tensor])
    return Owners(of_task[:-1], maker, of_edge, of_task[tables.sum_task])


def operator_costs(
    tables: CostTables, costs: Costs, strategy: Strategy, sends: Sequence[SentPart]
) -> tuple[OperatorCost, ...]:  # fmt: skip
    """[N]; `costs` as NumPy arrays, of one strategy, `sends` as `sent_parts` gives them."""
    graph, own = tables.graph, owners(tables)
    count, d = graph.num_operators, costs.durations
    compute, sent_s = np.zeros(count), np.zeros(count)
    np.add.at(compute, own.of_task, np.asarray(d.compute_s, np.float64))
    for of, seconds in ((own.of_tensor, d.resolve_s), (own.of_edge, d.reshard_s), (own.of_sum, d.sum_s)):
        np.add.at(sent_s, of[of >= 0], np.asarray(seconds, np.float64).sum(-1)[of >= 0])
    index = {op.name: n for n, op in enumerate(graph.operators)}
    sent_bytes = np.zeros(count)
    for part in sends:
        if part.operator in index:
            sent_bytes[index[part.operator]] += sum(part.bytes.values())
    memory = memory_curve(tables, costs).at_peak(own.of_tensor, own.of_edge, tables.parameter_op, count)
    flops, split = split_flops(tables, strategy.axes, tables.stored(costs.layouts.slots))
    return tuple(
        OperatorCost(
            compute_s=_rounded(compute[n]), communication_s=_rounded(sent_s[n]), sent_bytes=int(sent_bytes[n]),
            memory_bytes=int(memory[n]), flops=float(flops[n]),
            split_flops_share=round(split[n] / flops[n], 4) if flops[n] else 1.0,
        )
        for n in range(count)
    )  # fmt: skip


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")
