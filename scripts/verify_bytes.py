"""Predicted against compiled: collective bytes and peak memory of every model under every kind of plan.

    python scripts/verify_bytes.py --target cpu --topology cpu8 --models mlp lenet --random 2
    pip install "soapjax[cuda-aot]"
    python scripts/verify_bytes.py --target cuda --topology a100x64 --minutes 30

One row per plan in results/verify_bytes.csv, written as it goes; rows that are there are kept, so that the table grows over
several runs (`--random 5` after `--random 2` adds three plans per model; `--minutes` stops before the next plan). Nothing is
run: for cuda no GPU is needed (soapjax/execute/compiled/aot.py). A plan that the compiler itself fails on is listed with its
message and counted apart. Ends with medians, 90th percentiles and the largest errors; `--summary` writes them beside the
causes that were found by hand.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
from pathlib import Path

from paper_tables import guarded, write_csv

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import numpy as np
from csv_files import read_table
from verify_matrix import MODELS

import soapjax
from soapjax.execute.compiled.devices import devices_of_target
from soapjax.execute.compiled.inspection import inspect
from soapjax.execute.compiled.traffic import compare_by_kind, differences
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.helpers.files import write_text_atomic
from soapjax.planning.entry import plan_of_strategy, planning_problem
from soapjax.search.planners import get_planner
from soapjax.search.problem import Budget
from soapjax.steps.sourced_models import abstract_model
from soapjax.strategy.plan import ModelSource

# Enough work for 64 devices, and activations that outweigh constants.
LARGE: dict[str, tuple[str, dict]] = {
    "large mlp": ("models.mlp", {"batch": 4096, "width": 2048, "layers": 4, "features": 1024}),
    "large alexnet": ("models.alexnet", {"batch": 512}),
    "large resnet50": ("models.resnet", {"depth": 50, "batch": 512}),
    "large transformer_lm": (
        "models.transformer_lm", {"batch": 128, "seq": 512, "width": 1024, "layers": 4, "heads": 16, "vocab": 32768},
    ),
    "large transformer_lm scan remat": (
        "models.transformer_lm",
        {"batch": 128, "seq": 512, "width": 1024, "layers": 4, "heads": 16, "vocab": 32768, "scan": True, "remat": True},
    ),
    "large rnnlm": ("models.rnnlm", {"batch": 256, "seq": 8, "hidden": 1024}),
    "large bert bfloat16": (
        "models.bert", {"batch": 256, "seq": 128, "width": 1024, "layers": 4, "heads": 16, "vocab": 30720, "dtype": "bfloat16"},
    ),
    "large gpt3 remat bfloat16": (
        "models.gpt3",
        {"size": "1.3B", "layers": 4, "batch": 128, "seq": 1024, "vocab": 51200, "remat": True, "dtype": "bfloat16"},
    ),
    "large moe": (
        "models.moe",
        {"batch": 128, "seq": 256, "width": 512, "layers": 4, "heads": 8, "vocab": 32768, "experts": 16, "top": 2},
    ),
    "large unet": ("models.unet", {"batch": 128, "image": 128, "channels": 4, "classes": 4, "width": 64, "levels": 3}),
    "large vgg": ("models.vgg", {"batch": 256, "image": 224, "classes": 1024, "depth": 16, "width": 1.0}),
}  # fmt: skip
FIELDS = ["target", "topology", "model", "strategy", "predicted_bytes", "compiled_bytes", "predicted_memory", "compiled_memory",
          "usable_memory", "ops", "ops_as_planned", "rematerialised", "replicated", "compile_s",
          "failed"]  # fmt: skip
NAMED = ("data_parallel", "fsdp", "tensor_parallel", "mcmc")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*MODELS, *LARGE], help="all small ones; with --predict all that are there")
    parser.add_argument("--target", default="cpu", help="cpu, or cuda: the topology's GPU")
    parser.add_argument("--topology", default="cpu8")
    parser.add_argument("--random", type=int, default=5, help="random points of the space per model")
    parser.add_argument("--proposals", type=int, default=1024, help="of mcmc")
    parser.add_argument("--output", default="results/verify_bytes.csv")
    parser.add_argument("--predict", action="store_true", help="predict the rows that are there anew, and compile nothing")
    parser.add_argument("--report", action="store_true", help="print the summary of the rows that are there, and compile nothing")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no further plan after so long")
    parser.add_argument("--summary", default="", help="where to write the summary (Markdown); its section '## Causes' is kept")
    parser.add_argument("--differences", type=int, default=0, help="print so many differences of each plan")
    return guarded(run, parser.parse_args())


def run(options: argparse.Namespace) -> None:
    path = Path(options.output)
    rows = read_table(path) if path.exists() else []
    until = time.monotonic() + 60 * options.minutes
    if options.predict:
        predict_again(rows, options)
        write_csv(path, FIELDS, rows)
    elif not options.report:
        topology = soapjax.load_topology(options.topology)
        devices = devices_of_target(topology, options.target)
        for name in options.models or MODELS:
            if time.monotonic() < until:
                compile_model(name, topology, devices, options, rows, path, until)
    lines = report(rows)
    print("\n".join(lines))
    if options.summary:
        write_summary(Path(options.summary), lines)


def compile_model(name: str, topology, devices, options, rows: list[dict], path: Path, until: float) -> None:
    done = {r["strategy"] for r in rows if (r["target"], r["topology"], r["model"]) == (options.target, topology.name, name)}
    wanted = [*NAMED, *(f"random {i}" for i in range(options.random))]
    if not set(wanted) - done:
        return
    problem, step = problem_of(name, topology)
    rng = np.random.default_rng(0)
    for label in wanted:
        if label.startswith("random"):
            strategy = problem.space.random(rng)  # drawn also where it is done: the sequence counts
        if label in done or time.monotonic() > until:
            continue
        if not label.startswith("random"):
            strategy = planned(label, problem, options)
        plan = plan_of_strategy(problem, strategy)
        start = time.monotonic()
        try:
            found = inspect(bind_plan(step, plan, devices=devices))
        except jax.errors.JaxRuntimeError as e:
            rows.append(dict.fromkeys(FIELDS, "") | dict(
                target=options.target, topology=topology.name, model=name, strategy=label,
                failed=re.sub(r'[\s,"]+', " ", str(e))[:120],
            ))  # fmt: skip
            write_csv(path, FIELDS, rows)
            print(f"{name:34s} {label:16s} {rows[-1]['failed']}", flush=True)
            continue
        by_kind = compare_by_kind(plan, found.collectives).values()
        rows.append(dict(zip(FIELDS, (
            options.target, topology.name, name, label, sum(k["predicted"] for k in by_kind), sum(k["compiled"] for k in by_kind),
            plan.prediction.memory_bytes_per_device, found.memory_bytes, topology.device.available_memory_bytes,
            found.ops.planned_ops, found.ops.ops_as_planned,
            len(found.rematerialised), len(found.replicated), round(time.monotonic() - start, 1), "",
        ), strict=True)))  # fmt: skip
        write_csv(path, FIELDS, rows)
        r = rows[-1]
        errors = f"bytes {error(r, 'bytes'):+7.1%}  memory {error(r, 'memory'):+7.1%}"
        print(f"{name:34s} {label:16s} {errors}  {r['compile_s']} s", flush=True)
        for d in differences(plan, found.collectives)[: options.differences]:
            print(d)
    jax.clear_caches()


def predict_again(rows: list[dict], options) -> None:
    """After a change of the cost model: the compiled figures stay what they are.

    So does the whole row of a search that now finds another plan, one that sends other bytes.
    """
    for topology_name, name in dict.fromkeys((r["topology"], r["model"]) for r in rows):
        if options.models and name not in options.models:
            continue
        of = {r["strategy"]: r for r in rows if (r["topology"], r["model"]) == (topology_name, name) and not r.get("failed")}
        problem, _ = problem_of(name, soapjax.load_topology(topology_name))
        rng = np.random.default_rng(0)
        drawn = {f"random {i}": problem.space.random(rng) for i in range(options.random)}
        for label, row in of.items():
            strategy = drawn[label] if label in drawn else planned(label, problem, options)
            prediction = problem.simulator.prediction(strategy)
            sent = sum(prediction.bytes_by_collective.values())
            if label == "mcmc" and not math.isclose(sent, float(row["predicted_bytes"]), rel_tol=1e-3, abs_tol=1024):
                print(f"{name}: the search finds another plan; its row stays as it is")
                continue
            row["predicted_bytes"], row["predicted_memory"] = sent, prediction.memory_bytes_per_device


def planned(planner: str, problem, options):
    """The same strategy in every run."""
    return get_planner(planner)(jax.random.key(0), problem, Budget(options.proposals)).best.strategy


def problem_of(name: str, topology):
    """(planning problem, traced step)."""
    source, settings = {**MODELS, **LARGE}[name]
    model = abstract_model(ModelSource(path=source, settings=settings))
    step = soapjax.trace(model.step, *model.arguments)
    return planning_problem(step, topology), step


def error(row: dict, what: str) -> float:
    """Of the prediction, relative to what was compiled."""
    predicted, compiled = (float(row[f"{side}_{what}"]) for side in ("predicted", "compiled"))
    return (predicted - compiled) / max(compiled, 1.0) if compiled or predicted else 0.0


def report(rows: list[dict]) -> list[str]:
    """The summary as lines of Markdown."""
    lines = ["| target | models | plans | bytes: median | 90 % | worst | memory: median | 90 % | worst | fits only as predicted |",
             "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    largest: list[str] = []
    compiled = [r for r in rows if not r.get("failed")]
    for key in sorted({(r["target"], r["topology"], r["model"].startswith("large")) for r in compiled}):
        of = [r for r in compiled if (r["target"], r["topology"], r["model"].startswith("large")) == key]
        name, size = f"{key[0]} {key[1]}", "large" if key[2] else "small"
        figures = []
        for what in ("bytes", "memory"):
            errors = np.array([abs(error(r, what)) for r in of])
            figures += [f"{x:.1%}" for x in (np.median(errors), np.percentile(errors, 90), errors.max())]
            worst = [f"{of[i]['model']}, {of[i]['strategy']} {error(of[i], what):+.1%}" for i in np.argsort(-errors)[:5]]
            largest.append(f"- {name}, {size} models, {what}: {'; '.join(worst)}")
        wrong = sum(float(r["predicted_memory"]) <= float(r["usable_memory"]) < float(r["compiled_memory"]) for r in of)
        lines.append(f"| {name} | {size} | {len(of)} | {' | '.join(figures)} | {wrong} |")
    failed = [f"- {r['target']} {r['topology']}, {r['model']}, {r['strategy']}: {r['failed']}" for r in rows if r.get("failed")]
    lines += ["", "Largest errors (predicted against compiled):", "", *largest]
    return lines + (["", "Not compiled, by an error of the compiler:", "", *failed] if failed else [])


def write_summary(path: Path, lines: list[str]) -> None:
    """Keeps what stands in the file from the heading "## Causes" on."""
    before = path.read_text() if path.exists() else ""
    causes = before[before.index("## Causes") :] if "## Causes" in before else "## Causes\n"
    title = "# Predicted against compiled: bytes that each device sends in a step, and its peak memory"
    how = "`python scripts/verify_bytes.py --report --summary results/verify_bytes.md`; every plan: `verify_bytes.csv`."
    write_text_atomic(str(path), "\n".join([title, "", how, "", *lines, "", causes]))


if __name__ == "__main__":
    sys.exit(main())
