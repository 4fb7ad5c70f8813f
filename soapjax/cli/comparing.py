"""What the differences of two plans cost: plan a with some of its operators as they are in b, everything else as it is."""

from __future__ import annotations

from soapjax.cli.explaining import costed
from soapjax.helpers.own_config import on_cpu
from soapjax.planning.plan_files import Opened
from soapjax.report.difference import Alone, PlanDifference


def with_costs(found: PlanDifference, a: Opened, b: Opened) -> PlanDifference:
    """The difference with what each change alone costs in `a`, largest first.

    Both are opened with one problem.
    """
    problem = a.problem
    index = {op.name: n for n, op in enumerate(problem.graph.operators)}
    strategies = [a.strategy]
    for changed in found.changed:
        rows = [index[name] for name in changed.names]
        strategies.append(a.strategy.but(rows, b.strategy.axes[rows], b.strategy.storage[rows]))
    with on_cpu():
        now, *others = costed(problem, strategies)
    alone = []
    for changed, c in zip(found.changed, others, strict=True):
        sent, memory = int(c.sent_bytes - now.sent_bytes), int(c.memory_bytes - now.memory_bytes)
        alone.append(changed._replace(alone=Alone(c.step_time_s - now.step_time_s, sent, memory)))
    return found._replace(changed=tuple(sorted(alone, key=lambda c: -abs(c.alone.step_s))))
