"""The fronts that searches saw (search/front.py) as rows of a report: what each plan is, where it has a name."""

from __future__ import annotations

from collections.abc import Sequence

from soapjax.planning.entry import Planned
from soapjax.planning.pipelining.pipelines import FoundPipeline
from soapjax.report.front_table import FrontRow
from soapjax.search.front import joined
from soapjax.search.problem import Evaluation
from soapjax.search.stages.choices import Choice
from soapjax.strategy.pipeline import Pipeline


def rows_of_planned(found: Planned) -> tuple[FrontRow, ...]:
    """Of plans of one program: the taken one and the baselines have names. Of plans that are equal in all figures one is there."""
    names = {_figures(b.best): name for name, b in found.baselines.items()}
    taken = _figures(found.result.best)
    names.setdefault(taken, "this plan")
    return tuple(FrontRow(*p[:3], names.get(p[:3], ""), p[:3] == taken) for p in found.front)


def _figures(e: Evaluation) -> tuple[float, float, float]:
    return e.step_time_s, e.sent_bytes, e.memory_bytes


def rows_of_pipelines(found: FoundPipeline) -> tuple[FrontRow, ...]:
    return tuple(FrontRow(*p[:3], _words(p.plan), p.plan == found.chosen) for p in found.front)


def _words(plan: Choice | Pipeline) -> str:
    """ "1f1b, 4 stages on 2+2+1+3 devices, 8 micro-batches"."""
    if isinstance(plan, Choice):
        stages, counts, again = plan.num_stages, plan.counts, plan.rematerialise
    else:
        stages, counts = len(plan.stages), tuple(len(s.devices) for s in plan.stages)
        again = tuple(s.rematerialise for s in plan.stages)
    each = f"{counts[0]} each" if len(set(counts)) == 1 else "+".join(map(str, counts))
    kept = f", {sum(again)} rematerialised" if any(again) else ""
    return f"{plan.schedule}, {stages} stages on {each}, {plan.num_microbatches} micro-batches{kept}"


def joined_rows(taken: Sequence[FrontRow], other: Sequence[FrontRow]) -> tuple[FrontRow, ...]:
    """The front of what was taken and of what was compared with it."""
    return joined(taken, [row._replace(is_taken=False) for row in other])
