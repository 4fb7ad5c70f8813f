"""Measures pipelines and pinned plans of one model on the cluster that this process belongs to; pipeline_cluster.py starts it.

The calibration is that of cluster_calibration.py: the model's own operators (at the size of a micro-batch too) and the links,
measured, and one factor each for compute and network, fitted on plans of one program. No pipeline and no pinned plan is
fitted on. Rank 0 plans; all plans are timed in turn, the factors are then fitted again on all plans of one program, as they
were timed among the others, and all plans simulated with them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # models/

import jax
import numpy as np
from cluster_fit import Calibrated, Judged, judged, kept, refitted
from cluster_measure import Recorder, calibrated, rank_parser, run_as_rank
from cluster_timing import Timer, in_rounds, shared
from pipeline_candidates import Candidate, candidates
from pipeline_cluster import FIELDS, MODELS, ONE_PROGRAM

import soapjax
import soapjax.distributed
from soapjax.planning.plan_files import recost
from soapjax.steps.sourced_models import concrete_model
from soapjax.strategy.plan import Plan
from soapjax.strategy.plan_strategy import strategy_of as planned_strategy


def ready(model: Any, one: Candidate, options: argparse.Namespace) -> Timer:
    step = soapjax.soap_shard(model.step, plan=Plan.loads(one.plan), devices=list(jax.devices()))
    return Timer(one.name, step, *split(model.arguments), options.steps, overlaps=one.kind in ("pipeline", "pinned"))


def split(arguments: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """State and the rest, in host memory, as a data loader gives them."""
    state, *rest = jax.tree.map(np.asarray, arguments)
    return state, tuple(rest)


def run(options: argparse.Namespace) -> None:
    soapjax.distributed.initialize(timeout_s=120)
    work = Path(options.work)
    model = concrete_model(MODELS[options.model].source)
    step = soapjax.trace(model.step, *model.arguments)
    parts = () if MODELS[options.model].is_branched else options.microbatches
    cluster = calibrated(model, step, options, parts)
    plans = kept(work / "plans.json", "plans", lambda: [list(c) for c in candidates(model, step, cluster, options)])
    recorder = Recorder(options, FIELDS)
    done = set(shared("done", lambda: sorted(recorder.done())))
    todo = [c for c in (Candidate(*entry) for entry in plans) if c.name not in done]
    timers = [ready(model, one, options) for one in todo]
    in_rounds(timers)
    if jax.process_index() == 0:
        timings = {timer.name: timer.timing() for timer in timers}
        again = refitted(cluster, in_parts(step, cluster, todo), {n: t.median_s for n, t in timings.items()}, work, ONE_PROGRAM)
        for one in todo:
            timing, plan = timings[one.name], Plan.loads(one.plan)
            plan = recost(plan.model_copy(update={"profile": again.profile.model_dump(mode="json")}), step)
            recorder.add(
                strategy=one.name, kind=one.kind, predicted_s=plan.prediction.step_time_s, measured_s=timing.median_s,
                spread=timing.spread, steps=timing.steps, loss=timing.loss,
            )  # fmt: skip


def in_parts(step: Any, cluster: Calibrated, todo: Sequence[Candidate]) -> list[Judged]:
    """The plans of one program, their predictions in compute and network."""
    problem = cluster.problem(step)
    plans = {one.name: Plan.loads(one.plan) for one in todo if one.name in ONE_PROGRAM}
    return [judged(problem, name, planned_strategy(plan, problem.space)) for name, plan in plans.items()]


def main() -> int:
    parser = rank_parser(__doc__, MODELS)
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b", "zb-h1"])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--proposals", type=int, default=256)
    return run_as_rank(run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
