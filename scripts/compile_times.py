"""How long a planned step takes to compile, beside plain `jax.jit` with the same shardings of arguments and results.

    python scripts/compile_times.py                       # all models, fsdp and mcmc on 8 fake CPU devices
    python scripts/compile_times.py --models resnet --runs 5

Both sides are traced, lowered and compiled in turn, in one process, each time with JAX's caches emptied; figures are CPU
seconds (the machine is shared, and XLA compiles on several threads), median and range of the runs. The plain side is
what a user writes by hand from `shardings()`: XLA's partitioner chooses what happens inside.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"])
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
from paper_tables import ROOT, guarded

from soapjax import plan, soap_shard
from soapjax.helpers.files import write_text_atomic

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("mlp", dict(batch=64, width=64)),
    "transformer": ("transformer_lm", dict(layers=2, width=64, heads=4, batch=16, seq=32)),
    "transformer, 6 layers": ("transformer_lm", dict(layers=6, width=64, heads=4, batch=16, seq=32)),
    "transformer, scanned": ("transformer_lm", dict(layers=6, width=64, heads=4, batch=16, seq=32, scan=True)),
    "transformer, nnx": ("transformer_nnx", dict(layers=2, width=64, heads=4, batch=16, seq=32)),
    "resnet": ("resnet", dict(depth="tiny", batch=16, image=32, width=16, classes=10)),
    "rnnlm": ("rnnlm", dict(batch=16, seq=8, hidden=32, layers=2, vocab=64)),
    "moe": ("moe", dict(batch=16, seq=16, width=32, layers=2, heads=2, experts=8, vocab=64, top=2)),
}


def compiled_s(lower: Callable[[], Any]) -> float:
    """CPU seconds of tracing, lowering and compiling."""
    jax.clear_caches()
    begin = time.process_time()
    lower().compile()
    return time.process_time() - begin


def measured(name: str, planner: str, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """CPU seconds of every run: planned, and plain."""
    module, sizes = MODELS[name]
    sys.path[:0] = [str(ROOT)] * (str(ROOT) not in sys.path)
    step, *args = importlib.import_module(f"models.{module}").make(**sizes)
    found = plan(step, *args, topology="cpu8", planner=planner, proposals=options.proposals)
    planned = soap_shard(step, plan=found.plan).prepare(*args)
    compiled = planned.lower(*args).compile()
    layouts = dict(in_shardings=planned.shardings(), out_shardings=compiled.output_shardings)
    runs: tuple[list[float], list[float]] = ([], [])
    for _ in range(options.runs):
        runs[0].append(compiled_s(lambda: planned.lower(*args)))
        # A function of its own each time: jax.jit knows what it has traced.
        plain = jax.jit(lambda *a: step(*a), donate_argnums=0, **layouts)
        runs[1].append(compiled_s(lambda plain=plain: plain.lower(*args)))
    return runs


def table(options: argparse.Namespace) -> None:
    def shown(seconds: list[float]) -> str:
        return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"

    lines = ["| model | planner | planned, CPU s | plain, CPU s | ratio |", "|---|---|---:|---:|---:|"]
    for name in options.models:
        for planner in options.planners:
            planned, plain = measured(name, planner, options)
            ratio = statistics.median(a / b for a, b in zip(planned, plain, strict=True))
            lines.append(f"| {name} | {planner} | {shown(planned)} | {shown(plain)} | {ratio:.2f} |")
            print(lines[-1], flush=True)
    title = "# Compiling a planned step, beside plain `jax.jit` with the same shardings\n\n"
    command = f"python scripts/compile_times.py --runs {options.runs} --proposals {options.proposals}"
    made = f"Made by `{command}`, jax {jax.__version__}.\n\n"
    if not options.is_partial:
        write_text_atomic(options.output, title + made + "\n".join(lines) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--planners", nargs="*", default=["fsdp", "mcmc"])
    parser.add_argument("--proposals", type=int, default=256, help="of mcmc")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", default=str(ROOT / "results" / "compile_times.md"), help="written when all models are made")
    options = parser.parse_args(argv)
    options.is_partial = options.models != list(MODELS)
    return guarded(table, options)


if __name__ == "__main__":
    sys.exit(main())
