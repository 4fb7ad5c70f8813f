"""Why a plan is as it is: its critical path, its costs, and what a change of one operator, or of all that differ in another plan,
would make of it.

All figures are the simulator's own. What is written in a plan are costs; the critical path and the neighbours need the operator
graph, from which the cost tables are made.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from soapjax.costs.by_operator import owners
from soapjax.errors import Problem, SoapjaxError
from soapjax.helpers.own_config import on_cpu
from soapjax.planning.plan_files import Opened
from soapjax.planning.timelines import pipeline_spans, program_path, program_spans
from soapjax.report.difference import Alone, PlanDifference
from soapjax.report.explanation import Explanation, Neighbour, OperatorExplanation, PathPart, limit_lines, totals_of
from soapjax.report.plan_tables import merged_name, meshes_of, short_storage, split_of
from soapjax.search.experts.baselines import BASELINES
from soapjax.search.problem import Budget, PlanningProblem
from soapjax.simulate.critical_tasks import pipeline_path
from soapjax.simulate.schedule import COMPUTE, RESHARD, RESOLVE, SUM
from soapjax.simulate.simulator import BATCH
from soapjax.strategy.configs import Strategy
from soapjax.strategy.plan import Plan
from soapjax.strategy.plan_strategy import topology_of

MOST_NEIGHBOURS = 512
MOST_COUNTED = 100_000


def explain(plan: Plan, opened: Opened | None = None) -> Explanation:
    """Of a whole plan; without `opened` from what is written in it."""
    totals = totals_of(plan)
    if opened is None:
        return Explanation((), {}, totals, limit_lines(plan, {}))
    with on_cpu():
        placed = _path(opened)
    merged: dict[tuple[str, str], list[float]] = {}
    where: dict[str, float] = {}
    for name, place, took_s in placed:
        merged.setdefault((merged_name(name), place), []).append(took_s)
        where[place] = where.get(place, 0.0) + took_s
    first = {merged_name(name): name for name, _, _ in reversed(placed)}
    parts = (PathPart(n if len(s) > 1 else first[n], w, len(s), sum(s)) for (n, w), s in merged.items())
    path = tuple(sorted(parts, key=lambda p: -p.seconds))
    return Explanation(path, where, totals, limit_lines(plan, where))


def _path(opened: Opened) -> list[tuple[str, str, float]]:
    """The critical path: (task, where it runs, seconds) each."""
    if opened.stages is not None:
        timeline = opened.stages.timeline
        spans, steps = pipeline_spans(timeline, topology_of(opened.plan)[0]), pipeline_path(timeline.tasks)
    else:
        simulator, strategy = opened.problem.simulator, opened.strategy
        spans = program_spans(simulator, strategy, simulator.timeline(strategy))
        steps = program_path(simulator, strategy)
    of_task = {span.task: span for span in spans}
    return [(of_task[s.task].name, of_task[s.task].place, s.duration_s) for s in steps]


def explain_operator(plan: Plan, name: str, opened: Opened | None = None, *, place: str = "OPERATOR") -> OperatorExplanation:
    """Of one operator, by its name or a part of it that no other has.

    Raises: SoapjaxError where there is no such operator, or several.
    """
    name = _operator_named(plan, name, place)
    part = plan.operators[name]
    sizes, where = meshes_of(plan)[name], ""
    for i, stage in enumerate(plan.pipeline.stages if plan.pipeline is not None else ()):
        if name in stage.operators:
            where = f", in stage {i} on devices {', '.join(map(str, stage.devices))}"
    sends = [(s.reason, sum(s.bytes.values())) for s in plan.prediction.sends if s.operator == name]
    found = OperatorExplanation(
        name=name, kind=part.kind, dims=part.dims, split=split_of(part, sizes) + where, storage=short_storage(part.storage, sizes),
        cost=part.cost, seconds_on_path=None, sends=tuple(sorted(sends, key=lambda s: -s[1])[:5]),
    )  # fmt: skip
    if opened is None or opened.problem is None:
        return found
    problem, strategy = opened.problem, opened.strategy
    n = [op.name for op in problem.graph.operators].index(name)
    with on_cpu():
        neighbours, count = neighbours_of(plan, problem, strategy, n)
        (now,) = _titled(problem, [strategy], [("as planned", ())])
        owner = operator_of_scheduled(problem)
        seconds = sum(s.duration_s for s in program_path(problem.simulator, strategy) if owner[s.task] == n)
    return found._replace(seconds_on_path=seconds, neighbours=tuple(neighbours), num_neighbours=count, now=now)


def operator_of_scheduled(problem: PlanningProblem) -> np.ndarray:
    """int [T]: the operator that every scheduled task belongs to, -1 for a barrier."""
    schedule, own = problem.simulator.schedule, owners(problem.simulator.tables)
    found = np.full(schedule.num_tasks, -1)
    for kind, of in ((COMPUTE, own.of_task), (RESOLVE, own.of_tensor), (RESHARD, own.of_edge), (SUM, own.of_sum)):
        mine = schedule.kind == kind
        if mine.any():
            found[mine] = of[schedule.source[mine]]
    return found


def _operator_named(plan: Plan, name: str, place: str) -> str:
    if name in plan.operators:
        return name
    parts = [o for o in plan.operators if name and name in o]
    if len(parts) == 1:
        return parts[0]
    close = parts[:5] or difflib.get_close_matches(name, list(plan.operators), 5, 0.3) or list(plan.operators)[:5]
    value = f"{name!r}, in the names of {len(parts)} operators" if parts else f"{name!r}, no operator's name"
    raise SoapjaxError(Problem(place, value, "the name of one operator", f"choose one, e.g. {', '.join(close)}"))


def neighbours_of(plan: Plan, problem: PlanningProblem, strategy: Strategy, n: int) -> tuple[list[Neighbour], int]:
    """The strategy with every other config of operator `n`, fastest first, and how many the space has.

    Of a large space the MOST_NEIGHBOURS that differ in fewest choices are simulated, and MOST_COUNTED more are counted.
    """
    space, op = problem.space, problem.graph.operators[n]
    every = space.nearest(n, strategy.axes[n], int(strategy.storage[n]))
    nearest = list(itertools.islice(every, MOST_NEIGHBOURS))
    count = len(nearest) + sum(1 for _ in itertools.islice(every, MOST_COUNTED))
    sizes = meshes_of(plan)[op.name]
    like: dict[tuple, list[str]] = {}
    for name, run in BASELINES.items():
        theirs = run(None, problem, Budget()).best.strategy
        like.setdefault((tuple(theirs.axes[n].tolist()), int(theirs.storage[n])), []).append(name)
    now = strategy.config(n, op, space.mesh, space.storages)
    strategies, titles = [], []
    for axes, storage in nearest:
        moved = strategy.but(n, axes, storage)
        other = moved.config(n, op, space.mesh, space.storages)
        words = [f"{a}: {v}, not {now.axes[a]}" for a, v in other.axes.items() if v != now.axes[a]]
        words += [f"stored {short_storage(other.storage, sizes)}"] if other.storage != now.storage else []
        strategies.append(moved)
        titles.append(("; ".join(words), tuple(like.get((axes, storage), ()))))
    found = _titled(problem, strategies, titles)
    return sorted(found, key=lambda x: (not x.is_feasible, x.step_time_s, x.sent_bytes)), count


def _titled(
    problem: PlanningProblem, strategies: Sequence[Strategy], titles: Sequence[tuple[str, tuple[str, ...]]]
) -> list[Neighbour]:  # fmt: skip
    found = []
    for (changes, like), c in zip(titles, costed(problem, strategies), strict=True):
        fits = c.memory_bytes <= problem.usable_memory_bytes and c.is_valid
        found.append(Neighbour(changes, c.step_time_s, int(c.sent_bytes), int(c.memory_bytes), fits, like))
    return found


class Costed(NamedTuple):
    """What one strategy costs."""

    step_time_s: float
    sent_bytes: float  # by each device that takes part in everything
    memory_bytes: float
    is_valid: bool  # every degree divides


def costed(problem: PlanningProblem, strategies: Sequence[Strategy]) -> Iterator[Costed]:
    """Of any number of strategies, one after the other."""
    for k in range(0, len(strategies), BATCH):
        some = strategies[k : k + BATCH]
        batch = problem.simulator.batch(np.stack([s.axes for s in some]), np.stack([s.storage for s in some]))
        rows = zip(batch.scores.step_time_s, batch.scores.memory_bytes, batch.scores.violations, strict=True)
        for i, (step_s, memory, violations) in enumerate(rows):
            yield Costed(float(step_s), float(batch.outline(i).bytes_by_collective.sum()), float(memory), not violations)
        batch.done()


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
