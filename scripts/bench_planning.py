"""How soon a search finds a good plan: seconds to the first step of a chain, and what a short search misses of a long one.

    python scripts/bench_planning.py                                           # shipped models on three topologies
    python scripts/bench_planning.py --models models.vgg --topologies a100x8 --seconds 10 --long 120

Every cell is three processes with one folder of programs: *cold*, where nothing is compiled yet; *long*, a search of --long
seconds, which the step times of the others are divided by; and *warm*, where all programs are on disk. Each is what `soapjax plan
--seconds N --simplicity 0` does: seconds count from the end of tracing. `compiled` counts the programs that a process compiled;
`next_compiled` those that another problem of the same process did, a smaller model on the same topology: none, if it is of the
same sizes.
CPU seconds stand beside wall time, which other work on the machine lengthens. Rows go to results/bench_planning.csv; the same
command goes on from there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # models/

from paper_tables import Rows, guarded, markdown, parser_of, positive_float

MODELS = ("models.transformer_lm", "models.resnet", "models.vgg", "models.rnnlm", "models.bert")
TOPOLOGIES = ("a100x8", "a100x64", "p100x16")
COLUMNS = (
    "model", "topology", "how", "seed", "trace_s", "compile_cpu_s", "compiled", "next_compiled", "first_walk_s", "search_s",
    "cpu_s", "proposals", "step_ms", "over_long",
)  # fmt: skip


def measured(model: str, topology: str, seconds: float, seed: int, tiny: bool) -> dict[str, Any]:
    """One plan in this process."""
    import soapjax
    from soapjax.jit import programs
    from soapjax.search.chain.engine import Engine
    from soapjax.steps.sourced_models import abstract_model
    from soapjax.strategy.plan import ModelSource

    compiling, walked = [], []
    compile_one, walk = programs.compiled_with, Engine.walk

    def counted(lowered, options):
        cpu = time.process_time()
        found = compile_one(lowered, options)
        compiling.append(time.process_time() - cpu)
        return found

    def walking(*args):
        walked.append(time.monotonic())
        return walk(*args)

    programs.compiled_with, Engine.walk = counted, walking

    def planned(path: str, **budget: Any) -> soapjax.Planned:
        settings = {} if tiny else dict(getattr(importlib.import_module(path), "PAPER", {}))
        made = abstract_model(ModelSource(path=path, settings=settings))
        return soapjax.plan(made.step, *made.arguments, topology=topology, seed=seed, simplicity=0, **budget)

    begin, cpu = time.monotonic(), time.process_time()
    found = planned(model, seconds=seconds)
    took_s, search_s = time.monotonic() - begin, seconds - found.left_s
    row = {
        "trace_s": took_s - search_s, "compile_cpu_s": sum(compiling), "compiled": len(compiling),
        "first_walk_s": walked[0] - begin - (took_s - search_s) if walked else None, "search_s": search_s,
        "cpu_s": time.process_time() - cpu, "proposals": found.result.num_proposals,
        "step_ms": found.result.best.step_time_s * 1e3,
    }  # fmt: skip
    before = len(compiling)
    planned("models.mlp", seconds=2.0)
    return {**row, "next_compiled": len(compiling) - before}


def in_process(model: str, topology: str, seconds: float, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", model, topology, str(seconds), str(options.seed), str(int(options.tiny))]
    environment = {**os.environ, "SOAPJAX_PROGRAM_CACHE": folder}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main(options: argparse.Namespace) -> None:
    rows = Rows(Path(options.results) / "bench_planning.csv", ("model", "topology", "how", "seed", "seconds"), again=options.again)
    for model in options.models:
        for topology in options.topologies:
            at = {"model": model, "topology": topology, "seed": options.seed}
            with tempfile.TemporaryDirectory() as folder:

                def get(how: str, seconds: float, at=at, folder=folder) -> dict[str, str]:
                    cell = {**at, "how": how, "seconds": seconds}
                    return rows.get(cell, lambda: in_process(cell["model"], cell["topology"], seconds, options, folder))

                cold = get("cold", options.seconds)
                best = get("long", options.long)
                warm = get("warm", options.warm_seconds)
            for row in (cold, warm, best):
                rows.add({**row, "over_long": float(row["step_ms"]) / float(best["step_ms"])})
    text = "# How soon a search finds a good plan\n\n" + (__doc__ or "").split("\n\n")[2] + "\n\n" + markdown(COLUMNS, rows.rows)
    (Path(options.results) / "bench_planning.md").write_text(text)
    print(markdown(COLUMNS, rows.rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        model, topology, seconds, seed, tiny = sys.argv[2:]
        print(json.dumps(measured(model, topology, float(seconds), int(seed), tiny == "1")))
    else:
        parser = parser_of(__doc__ or "")
        parser.add_argument("--models", nargs="+", default=MODELS, metavar="MODEL")
        parser.add_argument("--topologies", nargs="+", default=TOPOLOGIES, metavar="TOPOLOGY")
        parser.add_argument("--warm-seconds", type=positive_float, default=5.0)
        parser.add_argument("--long", type=positive_float, default=600.0)
        sys.exit(guarded(main, parser.parse_args()))
