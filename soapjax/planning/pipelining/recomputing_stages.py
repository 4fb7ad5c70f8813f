"""Pipelines whose stages compute some operators again, where a stage would compute all of its own, or none fits.

A pipeline is searched in the step as it is, where a stage keeps what the backward pass reads, or computes its forward pass again.
Where faster ones would fit only with all computed again, it is searched again in the step with some operators recomputed: those
that cost the least seconds per byte, in whole groups, so that equal blocks stay equal. Norms and activations are half of the bytes
for a few percent of the time: what people call selective recomputation (Korthikanti et al. 2022, section 5). Where none fits, all
operators are tried, too: a stage that computes all of its own again holds it all at once, and these block by block.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from soapjax.costs.compilers.of_backend import compiler_of
from soapjax.errors import SoapjaxError
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.recompute import Recomputation
from soapjax.graph.trace.tracing import TracedStep
from soapjax.helpers.own_config import on_cpu
from soapjax.planning.pipelining.pipelines import Beaten, FoundPipeline, NoneFits
from soapjax.planning.request import Understood
from soapjax.planning.searching import AGAIN
from soapjax.search.recomputation import Ranking, ranking_of
from soapjax.search.stages.stage_figures import Fabric, part_of
from soapjax.strategy.schedules import SCHEDULES
from soapjax.topology import DeviceTopology

SAVED = (0.5, 0.85)  # of all bytes that can be saved: what the cheapest operators are to save; all where none fits
KEPT_FIRST = 0.6  # of the seconds, for the step as it is where memory binds; of the rest each further step gets an equal part

Find = Callable[[TracedStep, float | None, float, float, float], FoundPipeline]


def recomputation_of(asked: Understood, step: TracedStep, graph: OperatorGraph, topology: DeviceTopology) -> Recomputation | None:
    """The choice, where it is offered: not where the compiler takes barriers out, nor where every stage is to compute all again, or
    none waits for others, nor of an expert's."""
    kind = None if asked.pipeline == "auto" else SCHEDULES[asked.pipeline]
    is_plain = kind is None or (kind.is_synchronous and not kind.is_rematerialised)
    if not is_plain or not compiler_of(topology).keeps_barriers or graph.is_single_phase:
        return None
    if asked.pareto or not asked.objective.is_time or asked.expert is not None:
        return None
    options = Recomputation(step)
    return options if options.closed else None


def best_of_steps(
    options: Recomputation, topology: DeviceTopology, seconds: float | None, slower_than_s: float, find: Find
) -> FoundPipeline:
    """The best pipeline of the step as it is, or with operators recomputed.

    Args:
      find: the best pipeline of a step that is faster than so much, by so many seconds, or such a share of them where memory binds,
        and such a share of the proposals.
    Raises: as `find` of the step as it is.
    """
    begin = time.monotonic()
    kept: FoundPipeline | None = None
    best: FoundPipeline | None = None
    refused: Beaten | NoneFits | None = None
    shares: Sequence[float] = SAVED
    try:
        kept = best = find(options.traced, seconds, KEPT_FIRST, 1.0, slower_than_s)
        is_bound = kept.is_bound and kept.stopped_by != "interrupted"
    except Beaten as e:
        refused, is_bound = e, e.is_bound
    except NoneFits as e:
        refused, is_bound, shares = e, True, (*SAVED, 1.0)
    steps = _steps(options, topology, shares) if is_bound else []
    for i, step in enumerate(steps):
        left_s = None if seconds is None else (seconds - (time.monotonic() - begin)) / (len(steps) - i)
        if left_s is not None and left_s <= 0:
            break
        try:
            found = find(step, left_s, 1.0, AGAIN, min(slower_than_s, _step_s(best)))
        except (Beaten, SoapjaxError):
            continue
        except KeyboardInterrupt:
            if best is None:
                raise
            best = best._replace(stopped_by="interrupted")
            break
        if _step_s(found) < _step_s(best):
            best = _with_note(found, kept)
        if found.stopped_by == "interrupted":
            best = (best or found)._replace(stopped_by="interrupted")
            break
    if best is None:
        assert refused is not None
        raise refused
    return best._replace(search_s=time.monotonic() - begin)


def _step_s(found: FoundPipeline | None) -> float:
    return math.inf if found is None else found.times.timeline.step_time_s


def _with_note(found: FoundPipeline, kept: FoundPipeline | None) -> FoundPipeline:
    """Says what is computed again, and names the baselines of the step as it is where these are known."""
    again = f"{found.notes[0]}, {len(found.graph.recomputed)} operators computed again"
    found = found._replace(notes=(again, *found.notes[1:]))
    if kept is None:
        return found
    done = kept.num_proposals + found.num_proposals
    return found._replace(baselines=kept.baselines, baseline_figures=kept.baseline_figures, num_proposals=done)


def _steps(options: Recomputation, topology: DeviceTopology, shares: Sequence[float]) -> list[TracedStep]:
    """With the first of the ranked operators recomputed: whole groups that save such shares of what all would."""
    ranking = _ranking(options, topology)
    if not ranking.names:
        return []
    saved = ranking.saved_bytes[ranking.ends - 1]
    counts = {int(ranking.ends[np.searchsorted(saved, share * saved[-1])]) for share in shares}
    return [options.step(ranking.names[:k]) for k in sorted(counts)]


def _ranking(options: Recomputation, topology: DeviceTopology) -> Ranking:
    """Of operators on one device: a micro-batch's seconds and bytes are the same part of it for all."""
    with on_cpu():
        one = Fabric(options.graph, part_of(topology, 0, 1), None)
        whole = one.choices[0].strategy
        return ranking_of(options, one.tables, one.evaluator.alone(whole.axes, whole.storage))
