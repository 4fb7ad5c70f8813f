"""What the differences of two plans cost: plan a with some of its operators as they are in b, everything else as it is."""

from __future__ import annotations

import numpy as np

from soapjax.helpers.own_config import on_cpu
from soapjax.planning.plan_files import Opened
from soapjax.report.difference import Alone, PlanDifference
from soapjax.simulate.simulator import BATCH
from soapjax.strategy.configs import Strategy


def with_costs(found: PlanDifference, a: Opened, b: Opened) -> PlanDifference:
    """The difference with what each change alone costs in `a`, largest first.

    Both are opened with one problem.
    """
    problem = a.problem
    index = {op.name: n for n, op in enumerate(problem.graph.operators)}
    strategies = [a.strategy]
    for changed in found.changed:
        rows = [index[name] for name in changed.names]
        mixed = Strategy(a.strategy.axes.copy(), a.strategy.storage.copy())
        mixed.axes[rows], mixed.storage[rows] = b.strategy.axes[rows], b.strategy.storage[rows]
        strategies.append(mixed)
    times: list[float] = []
    sent: list[float] = []
    memory: list[float] = []
    with on_cpu():
        for k in range(0, len(strategies), BATCH):
            some = strategies[k : k + BATCH]
            batch = problem.simulator.batch(np.stack([s.axes for s in some]), np.stack([s.storage for s in some]))
            times += batch.scores.step_time_s.tolist()
            memory += batch.scores.memory_bytes.tolist()
            sent += [float(batch.outline(i).bytes_by_collective.sum()) for i in range(len(some))]
            batch.done()
    alone = [
        c._replace(alone=Alone(times[i] - times[0], int(sent[i] - sent[0]), int(memory[i] - memory[0])))
        for i, c in enumerate(found.changed, 1)
    ]
    return found._replace(changed=tuple(sorted(alone, key=lambda c: -abs(c.alone.step_s))))
