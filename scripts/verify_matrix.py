"""Verifies every model under every kind of plan on 8 fake devices, and writes the table.

    python scripts/verify_matrix.py --output results/verify_matrix.md
    python scripts/verify_matrix.py --models mlp lenet --random 2

Each row is one plan: data_parallel, fsdp, tensor_parallel, mcmc, and random points of the space
(spatial splits of convolutions and splits of contractions among them). Exit status 1 if one is not proven.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # models/

import jax
import numpy as np

import soapjax
from soapjax.execute.compiled.devices import start_devices
from soapjax.execute.compiled.proof import FLOAT64_BOUND, reference, verify
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.helpers.files import write_text_atomic
from soapjax.planning.entry import plan_of_strategy, planning_problem
from soapjax.search.planners import get_planner
from soapjax.search.problem import Budget
from soapjax.steps.sourced_models import concrete_model
from soapjax.strategy.plan import ModelSource

# Small enough for two cores, with every operator of the full size.
MODELS: dict[str, tuple[str, dict]] = {
    "mlp": ("models.mlp", {}),
    "mlp bfloat16": ("models.mlp", {"dtype": "bfloat16"}),
    "lenet": ("models.lenet", {"batch": 16}),
    "alexnet": ("models.alexnet", {"batch": 16, "image": 67, "width": 0.125, "classes": 64}),
    "resnet18": ("models.resnet", {"depth": 18, "batch": 8, "image": 32, "width": 8, "classes": 16}),
    "resnet50": ("models.resnet", {"depth": 50, "batch": 8, "image": 32, "width": 8, "classes": 16}),
    "transformer_lm": ("models.transformer_lm", {"seq": 16, "width": 32, "heads": 4}),
    "transformer_lm scan remat dropout": (
        "models.transformer_lm", {"seq": 16, "width": 32, "scan": True, "remat": True, "dropout": 0.1},
    ),
    "transformer_lm remat tied": ("models.transformer_lm", {"seq": 16, "width": 32, "remat": True, "tie": True}),
    "transformer_nnx": ("models.transformer_nnx", {"seq": 16, "width": 32}),
    "transformer_nnx bfloat16": ("models.transformer_nnx", {"seq": 16, "width": 32, "dtype": "bfloat16"}),
    "inception_v3": ("models.inception_v3", {"batch": 8, "width": 0.125, "classes": 16}),
    "nasnet": ("models.nasnet", {"image": 16}),
    "pnasnet": ("models.nasnet", {"design": "pnasnet_5", "image": 16}),
    "vgg": ("models.vgg", {"depth": 11, "batch": 8, "classes": 16}),
    "unet": ("models.unet", {"image": 16}),
    "rnntc": ("models.rnntc", {"seq": 4, "layers": 2}),
    "rnnlm": ("models.rnnlm", {"batch": 16, "seq": 4}),
    "rnnlm scan": ("models.rnnlm", {"batch": 16, "seq": 4, "scan": True}),
    "nmt": ("models.nmt", {"batch": 16, "seq": 4}),
    "gnmt": ("models.gnmt", {"batch": 16, "seq": 4}),
    "gnmt of two layers": ("models.gnmt", {"batch": 16, "seq": 4, "layers": 2}),
    "bert": ("models.bert", {"seq": 16}),
    "gpt3": ("models.gpt3", {"seq": 16, "remat": True}),
    "moe": ("models.moe", {"top": 2}),
}  # fmt: skip
COLUMNS = "model | plan | gradient error | bound | float64 | ops as planned | unchecked | proven | s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--random", type=int, default=5, help="random points of the space per model")
    parser.add_argument("--topology", default="cpu8")
    parser.add_argument("--proposals", type=int, default=1024, help="of mcmc")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="", help="where to write the table (Markdown)")
    options = parser.parse_args()
    topology = soapjax.load_topology(options.topology)
    devices = start_devices(topology.num_devices)
    lines = [f"| {COLUMNS} |", "|" + "---|" * len(COLUMNS.split("|"))]
    print(lines[0], lines[1], sep="\n", flush=True)
    failed = 0
    for name in options.models:
        path, settings = MODELS[name]
        model = concrete_model(ModelSource(path=path, settings=settings))
        arguments = jax.tree_util.tree_leaves(model.arguments)
        step = soapjax.trace(model.step, *model.arguments)
        problem = planning_problem(step, topology)
        rng = np.random.default_rng(options.seed)
        key = jax.random.key(options.seed)
        strategies = {p: get_planner(p)(key, problem, Budget(options.proposals)).best.strategy
                      for p in ("data_parallel", "fsdp", "tensor_parallel", "mcmc")}  # fmt: skip
        strategies |= {f"random {i}": problem.space.random(rng) for i in range(options.random)}
        single = None
        for label, strategy in strategies.items():
            start = time.monotonic()
            program = bind_plan(step, plan_of_strategy(problem, strategy), devices=devices)
            single = reference(program, arguments) if single is None else single
            v = verify(program, arguments, single)
            proven = v.is_proven and v.gradient_rel_error_float64 <= FLOAT64_BOUND and v.ops_unchecked <= 0.1 * v.planned_ops
            failed += not proven
            verdict = "yes" if proven else f"NO: {v.worst_leaf}"
            lines.append(
                f"| {name} | {label} | {v.gradient_rel_error:.1e} | {v.gradient_rel_bound:.1e} "
                f"| {v.gradient_rel_error_float64:.1e} | {v.ops_as_planned}/{v.planned_ops} | {v.ops_unchecked} | {verdict} "
                f"| {time.monotonic() - start:.0f} |"
            )
            print(lines[-1], flush=True)
            for difference in v.differences[:3]:
                print("   ", difference, file=sys.stderr, flush=True)
            if options.output:
                write_text_atomic(options.output, "\n".join(lines) + "\n")
        jax.clear_caches()
    print(f"{len(lines) - 2 - failed} of {len(lines) - 2} proven", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
