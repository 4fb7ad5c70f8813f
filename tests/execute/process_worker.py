"""One process of a job that runs steps on several of them, and compares with the single-device step: a JSON line per case.

    JAX_COORDINATOR_ADDRESS=... JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 python process_worker.py mlp/1f1b tied/gpipe nmt/random

A case is a model, and how it is split: the file of a plan, too.
"""

import json
import math
import sys

import jax
import numpy as np
from balanced import balanced_pipeline
from planned import topology_with

import soapjax
import soapjax.distributed
from models import mlp, nmt, transformer_lm
from soapjax.graph.passes.build import build_graph
from soapjax.planning.entry import plan_of_strategy, planning_problem
from soapjax.search.experts.placement import model_parallel_strategy
from soapjax.strategy.pipeline import Pipeline

NUM_STEPS = 3
BOUND = 1e-5  # of a gradient's error relative to its norm
FLOOR = 4 * float(np.finfo(np.float32).eps) / BOUND  # of the norm of all gradients: below it is rounding (a key's bias has none)
MODELS = {
    "mlp": (mlp, dict(batch=16, width=16, layers=3, features=8)),
    "nmt": (nmt, dict(batch=8, seq=2, hidden=8, layers=1, vocab=32)),
    "scan": (transformer_lm, dict(batch=8, seq=4, width=8, layers=4, heads=1, vocab=16, scan=True)),
    "tied": (transformer_lm, dict(batch=8, seq=4, width=8, layers=1, heads=1, vocab=16, tie=True)),
}


def sharded_step(step, arguments, kind):
    devices = jax.devices()
    if kind == "planned":
        num = jax.process_count()
        return soapjax.soap_shard(step, devices=devices, pipeline="1f1b", stages=num, microbatches=4, proposals=1)
    if kind.endswith(".json"):
        return soapjax.soap_shard(step, plan=kind, devices=devices)
    if kind not in ("pinned", "random"):
        graph, _ = build_graph(soapjax.trace(step, *arguments))
        if kind == "replicas":  # two stages with a replica per process: in one round of minibatches nothing is stale
            num = jax.process_count()
            own = [tuple(d for d in range(len(devices)) if d % 2 == i) for i in range(2)]
            stages = balanced_pipeline(graph, 2, num_microbatches=num, num_stages=2).stages
            stages = [s.model_copy(update={"devices": d, "replicas": num}) for s, d in zip(stages, own, strict=True)]
            stages = Pipeline(schedule="pipedream", num_microbatches=num, stages=tuple(stages))
            return soapjax.soap_shard(step, devices=devices, pipeline=stages)
        stages = balanced_pipeline(graph, len(devices), schedule=kind, num_microbatches=4, num_stages=jax.process_count())
        return soapjax.soap_shard(step, devices=devices, pipeline=stages)
    problem = planning_problem(soapjax.trace(step, *arguments), topology_with(len(devices)), space="paper")
    if kind == "random":
        strategy = problem.space.random(np.random.default_rng(0))
    else:  # layers on devices; one over all of them, split by its first dim
        strategy = model_parallel_strategy(problem)[0]
        strategy.axes[next(n for n, op in enumerate(problem.graph.operators) if op.name == "dense1")] = 0
    plan = plan_of_strategy(problem, strategy)
    assert 0 < len(plan.pinned) < len(plan.operators) and len({str(o.axes) for o in plan.operators.values()}) > 2
    return soapjax.soap_shard(step, plan=plan, devices=devices)


def compared(step, state, batch, kind):
    """Errors of loss and gradients (Adam's first moment) in what this process holds, and how much it holds."""
    state, batch = jax.tree.map(np.asarray, (state, batch))
    sharded, plain, single = sharded_step(step, (state, batch), kind), jax.jit(step), state
    state, metrics = sharded(state, batch)
    single, wanted = plain(single, batch)
    worst, held = 0.0, 0
    pairs = list(zip(*(jax.tree.leaves(s["opt_state"][0].mu) for s in (state, single)), strict=True))
    total = math.sqrt(sum(float(np.linalg.norm(x)) ** 2 for _, x in pairs))
    for mine, theirs in pairs:
        held += bool(mine.addressable_shards)
        for shard in mine.addressable_shards:
            difference = np.asarray(shard.data) - np.asarray(theirs)[shard.index]
            worst = max(worst, float(np.linalg.norm(difference) / max(np.linalg.norm(theirs), FLOOR * total)))
    for _ in range(NUM_STEPS - 1):  # only the loss: where a gradient is zero, Adam makes steps of its rounding
        state, metrics = sharded(state, batch)
        single, wanted = plain(single, batch)
    loss = abs(float(metrics["loss"]) / float(wanted["loss"]) - 1)
    return {"worst": worst, "loss": loss, "held": held, "leaves": len(pairs)}


if __name__ == "__main__":
    soapjax.distributed.initialize(timeout_s=120)
    for case in sys.argv[1:]:
        model, kind = case.split("/", 1)
        module, sizes = MODELS[model]
        print(json.dumps(compared(*module.make(**sizes), kind)), flush=True)
