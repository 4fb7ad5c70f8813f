"""Measures placements of one model on the cluster that this process belongs to; placement_cluster.py starts it.

Rank 0 places: by hand, at random, and by the learned planners, in the cluster's calibrated simulator. All placements are timed
in turn; then what each sends is read off the network interface, and rank 0 compiles each for devices of its own to say what it
holds (a process of its own, since a rank has one device).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # models/

import jax
import numpy as np
from cluster_fit import Calibrated, kept
from cluster_measure import Recorder, calibrated, rank_parser, run_as_rank
from cluster_timing import Timer, in_rounds, shared
from jax.experimental import multihost_utils
from pipeline_measure import split
from placement_cluster import FIELDS, MODELS

import soapjax
import soapjax.distributed
from soapjax.planning.compile_check import compiled_plan
from soapjax.planning.entry import plan_of_strategy
from soapjax.search.experts.layered import layered_expert_strategies
from soapjax.search.experts.layers import layers_of
from soapjax.search.experts.placement import model_parallel_strategy, placed
from soapjax.search.learned.learned_planners import HIERARCHICAL, TRINITY, learned
from soapjax.search.objective import Objective
from soapjax.search.problem import Budget, PlanningProblem
from soapjax.steps.sourced_models import concrete_model
from soapjax.strategy.configs import Strategy
from soapjax.strategy.plan import Plan

SENDING = Path("/proc/self/net/dev")  # of the namespace that this process is in


class CountingTimer(Timer):
    """Also counts what this host's interface sends in every step."""

    def __init__(self, *of: Any, **options: Any):
        super().__init__(*of, **options)
        self.sent: list[int] = []

    def once(self) -> float:
        before = interface_bytes()
        seconds = super().once()
        self.sent.append(interface_bytes() - before)
        return seconds

    def busiest(self) -> float:
        """Bytes of a step by the host that sends most, the first step aside: it agrees on programs. Every rank must call it."""
        mine = np.float32(statistics.mean(self.sent[1:]))
        return float(np.max(multihost_utils.process_allgather(mine)))


def interface_bytes() -> int:
    """Sent by eth0 so far."""
    line = next(x for x in SENDING.read_text().splitlines() if x.strip().startswith("eth0:"))
    return int(line.partition(":")[2].split()[8])


def placements(problem: PlanningProblem, options: argparse.Namespace) -> Iterator[tuple[str, Strategy]]:
    count, devices = problem.graph.num_operators, problem.space.mesh.num_devices
    yield "single device", placed(problem, np.zeros(count, int))
    yield "layered expert", layered_expert_strategies(problem)[0]
    yield "model parallel", model_parallel_strategy(problem)[0]
    for method in (HIERARCHICAL, TRINITY):
        method = method._replace(recipe=method.recipe._replace(num_groups=options.groups))
        budget = Budget(options.batches * method.recipe.partitions * method.recipe.placements)
        yield method.name, learned(method, jax.random.key(options.seed), problem, budget).best.strategy
    rng = np.random.default_rng(options.seed)
    for i in range(options.random):
        device = np.zeros(count, int)
        for layer in layers_of(problem.graph):
            device[list(layer.operators)] = rng.integers(devices)
        yield f"random {i}", placed(problem, device)


def planned(step: Any, cluster: Calibrated, options: argparse.Namespace) -> list[list[str]]:
    """Names and plans; equal placements are one, with all their names."""
    problem = cluster.problem(step, space="paper", objective=Objective("mdpe", max_bytes=options.max_bytes))
    names: dict[bytes, list[str]] = {}
    found: dict[bytes, Strategy] = {}
    for name, strategy in placements(problem, options):
        found[strategy.key()] = strategy
        names.setdefault(strategy.key(), []).append(name)
    return [[", ".join(names[k]), plan_of_strategy(problem, strategy).dumps()] for k, strategy in found.items()]


def compiled_memory(options: argparse.Namespace) -> dict[str, int]:
    """Bytes that the device which holds most of each plan holds; in a process that has as many devices."""
    command = [sys.executable, __file__, *sys.argv[1:], "--compile"]
    of_the_job = ("JAX_COORDINATOR", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "SOAPJAX_JOB")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(of_the_job)}
    done = subprocess.run(command, env=clean | {"JAX_NUM_CPU_DEVICES": str(options.hosts)}, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def say_memory(options: argparse.Namespace) -> int:
    model = concrete_model(MODELS[options.model])
    step = soapjax.trace(model.step, *model.arguments)
    plans = json.loads((Path(options.work) / "plans.json").read_text())
    found = {name: compiled_plan(step, Plan.loads(plan), jax.devices()).memory_bytes for name, plan in plans}
    print(json.dumps(found))
    return 0


def run(options: argparse.Namespace) -> None:
    soapjax.distributed.initialize(timeout_s=120)
    work = Path(options.work)
    model = concrete_model(MODELS[options.model])
    step = soapjax.trace(model.step, *model.arguments)
    cluster = calibrated(model, step, options)
    plans = kept(work / "plans.json", "plans", lambda: planned(step, cluster, options))
    memory = kept(work / "memory.json", "memory", lambda: compiled_memory(options))
    recorder = Recorder(options, FIELDS)
    done = set(shared("done", lambda: sorted(recorder.done())))
    todo = [(name, Plan.loads(plan)) for name, plan in plans if name not in done]
    timers = []
    for name, plan in todo:
        placed_step = soapjax.soap_shard(model.step, plan=plan, devices=list(jax.devices()))
        timers.append(CountingTimer(name, placed_step, *split(model.arguments), options.steps, overlaps=True))
    in_rounds(timers)
    sent = [timer.busiest() for timer in timers]
    for (name, plan), timer, sent_bytes in zip(todo, timers, sent, strict=True) if jax.process_index() == 0 else ():
        timing, of = timer.timing(), plan.prediction
        recorder.add(
            strategy=name, predicted_s=of.step_time_s, measured_s=timing.median_s, spread=timing.spread, steps=timing.steps,
            loss=timing.loss, predicted_bytes=of.peak_sent_bytes, sent_bytes=sent_bytes,
            predicted_memory=of.memory_bytes_per_device, compiled_memory=memory[name],
        )  # fmt: skip


def main() -> int:
    parser = rank_parser(__doc__, MODELS)
    parser.add_argument("--random", type=int, default=6, help="placements of layers at random")
    parser.add_argument("--batches", type=int, default=8, help="of placements that a learned planner learns from")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--proposals", type=int, default=256)
    parser.add_argument("--max-bytes", type=float, default=1e6, help="limit of `mdpe`, of what a device sends in a step")
    parser.add_argument("--compile", action="store_true", help="only say what memory the plans take")
    options = parser.parse_args()
    return say_memory(options) if options.compile else run_as_rank(run, options)


if __name__ == "__main__":
    sys.exit(main())
