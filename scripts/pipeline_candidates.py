"""The plans that pipeline_measure.py times on a cluster: of one program, with micro-batches, pipelines, and pinned ones."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from cluster_fit import Calibrated, strategy_of
from pipeline_cluster import MODELS, ONE_PROGRAM

from soapjax.planning.entry import plan_of_strategy
from soapjax.planning.pipelining.staging import plan_pipeline
from soapjax.planning.plan_files import recost
from soapjax.search.experts.baselines import data_parallel_strategy
from soapjax.search.experts.placement import model_parallel_strategy, placed
from soapjax.search.problem import PlanningProblem
from soapjax.strategy.plan import Plan

SUMS = {"a sum per step": "kept", "a sum per micro-batch": "kept, gradients sharded"}  # ZeRO-1 and ZeRO-2


class Candidate(NamedTuple):
    """A plan to measure, as rank 0 publishes it."""

    name: str
    kind: str  # "pipeline", "accumulation", "pinned" or "one program"
    plan: str


def one_program(step: Any, cluster: Calibrated, options: argparse.Namespace) -> Iterator[Candidate]:
    """Plans without pins and stages: the baselines, and what the search finds."""
    problem = cluster.problem(step)
    for name in ONE_PROGRAM:
        yield Candidate(name, "one program", plan_of_strategy(problem, strategy_of(problem, name, options)).dumps())


def pipelines(model: Any, step: Any, cluster: Calibrated, options: argparse.Namespace) -> Iterator[Candidate]:
    for schedule in options.schedules:
        for num in options.microbatches:
            plan = staged(model, cluster, options, schedule, num, options.hosts)
            yield Candidate(f"{schedule}, {num} micro-batches", "pipeline", plan.dumps())
    yield from accumulated(model, step, cluster, options)
    if options.hosts > 2:
        yield from uneven(model, step, cluster, options)


def accumulated(model: Any, step: Any, cluster: Calibrated, options: argparse.Namespace) -> Iterator[Candidate]:
    """Data parallelism in micro-batches, optimizer state sharded: gradients summed over hosts once, and in every micro-batch."""
    problem = cluster.problem(step)
    space, num = problem.space, max(options.microbatches)
    split = plan_of_strategy(problem, data_parallel_strategy(problem)[0]).operators
    begin = staged(model, cluster, options, "gpipe", num, 1)
    for name, how in SUMS.items():
        stored = f"sharded({','.join(space.mesh.axis_names)}), {how}"
        parts = {
            op.name: split[op.name].model_copy(update={"storage": stored if space.owns_parameters[n] else "as used"})
            for n, op in enumerate(space.graph.operators)
        }
        plan = recost(begin.model_copy(update={"operators": parts}), step)
        yield Candidate(f"data parallel, {num} micro-batches, {name}", "accumulation", plan.dumps())


def uneven(model: Any, step: Any, cluster: Calibrated, options: argparse.Namespace) -> Iterator[Candidate]:
    """PipeDream's stages of unequal numbers of replicas: the last host has what its share is, by the number of heavy operators.

    Every replica has two minibatches.
    """
    num = 2 * (options.hosts - 1)
    plan = staged(model, cluster, options, "pipedream", num, 2)
    first, last = plan.pipeline.stages
    names = [*first.operators, *last.operators]
    heavy = [k for k, name in enumerate(names) if plan.operators[name].kind in ("dot", "conv")]
    cut = heavy[len(heavy) * (options.hosts - 1) // options.hosts]
    devices = tuple(range(options.hosts))
    stages = (
        first.model_copy(update={"operators": tuple(names[:cut]), "devices": devices[:-1], "replicas": options.hosts - 1}),
        last.model_copy(update={"operators": tuple(names[cut:]), "devices": devices[-1:], "replicas": 1}),
    )
    plan = plan.model_copy(update={"pipeline": plan.pipeline.model_copy(update={"stages": stages})})
    yield Candidate(f"pipedream {options.hosts - 1}-1, {num} minibatches", "pipeline", recost(plan, step).dumps())


def staged(model: Any, cluster: Calibrated, options: argparse.Namespace, schedule: str, num: int, stages: int) -> Plan:
    return plan_pipeline(
        model.step, *model.arguments, pipeline=schedule, topology=cluster.topology, microbatches=num, stages=stages,
        proposals=options.proposals, profile=cluster.profile,
    )[0]  # fmt: skip


def pinned(step: Any, cluster: Calibrated, options: argparse.Namespace) -> Iterator[Candidate]:
    """Branches on hosts of their own, runs of layers on hosts, and what the search finds in the space with pins."""
    problem = cluster.problem(step, space="paper")
    found = {
        "a branch per host": placed(problem, branch_devices(problem, options.hosts)),
        "layers on hosts": model_parallel_strategy(problem)[0],
        "mcmc with pins": strategy_of(problem, "mcmc", options),
    }
    for name, strategy in found.items():
        yield Candidate(name, "pinned", plan_of_strategy(problem, strategy).dumps())


def branch_devices(problem: PlanningProblem, hosts: int) -> np.ndarray:
    """A device for every operator [N]: the model's branches (modules that hold others) in turn; the first for all else."""
    tops = [op.name.partition("/")[0] if "/" in op.name else None for op in problem.graph.operators]
    branches = [t for t in dict.fromkeys(tops) if t is not None]
    return np.array([branches.index(t) % hosts if t is not None else 0 for t in tops])


def candidates(model: Any, step: Any, cluster: Calibrated, options: argparse.Namespace) -> list[Candidate]:
    found = list(one_program(step, cluster, options))
    found += pinned(step, cluster, options) if MODELS[options.model].is_branched else pipelines(model, step, cluster, options)
    return found
