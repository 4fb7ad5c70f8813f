"""Plans against the best point of the grid that people sweep by hand, found by brute force.

    python scripts/grid_table.py
    python scripts/grid_table.py --only vgg bert --seconds 60

For GPT-3 175B on 64 and 1,024 H100, a Llama of 70 billion parameters on 128, and VGG-16, GNMT-8 and BERT on 16 P100. The grid: the
number of stages, tensor parallelism inside them, how parameters are stored, micro-batches, schedule, and whether stages compute
their activations again (soapjax/search/stages/grid.py). Every point that fits is priced by the simulator, but those that the
grid's closed formula says to be more than --within times as slow as the best priced; the plan is what `soapjax plan --pipeline auto
--seconds 60` makes. Rows go to results/grid.csv, from where the same command goes on, and the page to results/grid.md.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # models/

from megatron_table import planned
from paper_tables import ROOT, Rows, guarded, note

from models import bert, gnmt, vgg
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import trace
from soapjax.helpers.files import write_text_atomic
from soapjax.planning.pipelining.pipelines import times_as_it_runs
from soapjax.search.stages.grid import Grid
from soapjax.search.stages.stage_problem import StageProblem
from soapjax.steps.sourced_models import abstract_model
from soapjax.strategy.plan import ModelSource
from soapjax.topology import load_topology

GPT3 = dict(size="175B", batch=1536, seq=2048, vocab=51_200, remat=True, dtype="bfloat16")
LLAMA_70B = dict(layers=80, width=8192, hidden=28672, heads=64, vocab=32_000, seq=2048, batch=1024, dtype="bfloat16", remat=True)
EXACT = 8  # of the best points, that are priced on the whole graph


class Case(NamedTuple):
    name: str
    model: str
    settings: dict[str, Any]
    topology: str
    hosts: int | None = None


CASES = (
    Case("gpt3 175B, 64", "models.gpt3", GPT3, "dgx_h100", 8),
    Case("gpt3 175B, 1024", "models.gpt3", GPT3, "dgx_h100", 128),
    Case("llama 70B, 128", "models.llama", LLAMA_70B, "dgx_h100", 16),
    # So many samples on each of 16 devices.
    Case("vgg", "models.vgg", vgg.PAPER | dict(batch=16 * 64), "p100x16"),
    Case("bert", "models.bert", bert.PAPER | dict(batch=16 * 8), "p100x16"),
    Case("gnmt", "models.gnmt", gnmt.PAPER | dict(batch=16 * 64), "p100x16"),
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="cases whose names begin so")
    parser.add_argument("--seconds", type=float, default=60.0, help="of planning, after tracing")
    parser.add_argument("--within", type=float, default=1.25, help="times the best: how far off the formula may be")
    parser.add_argument("--again", action="store_true", help="compute also what the CSV has already")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    return guarded(table, parser.parse_args(argv))


def table(options: argparse.Namespace) -> None:
    rows = Rows(options.results / "grid.csv", ("name", "seconds"), again=options.again)
    for case in CASES:
        if options.only and not any(case.name.startswith(x) for x in options.only):
            continue
        key = {"name": case.name, "seconds": options.seconds}
        if rows.find(key) is None:
            where = ["--topology", case.topology, *(["--hosts", str(case.hosts)] if case.hosts else [])]
            rows.add({**key, **planned(case.model, case.settings, where, options.seconds), **swept(case, options.within)})
            note(f"{case.name}: {rows.find(key)}")
        write_text_atomic(options.results / "grid.md", page(rows.rows, options.within))


def swept(case: Case, within: float) -> dict[str, Any]:
    """The best point of the grid that fits."""
    begin = time.monotonic()
    problem = problem_of(case)
    points = list(Grid(problem).choices())
    best_s, priced = math.inf, []
    for _, formula_s, choice in sorted(points, key=lambda p: p[1]):
        if formula_s > within * best_s:
            break
        if problem.memory_bytes(choice) <= problem.usable_bytes:
            priced.append(problem.price(choice))
            best_s = min(best_s, priced[-1].cost)
    # As it would run: of a deep model the search prices few of its blocks.
    exact = [(times_as_it_runs(problem, p), p) for p in sorted(priced, key=lambda p: p.rank)[:EXACT]]
    fits = [(t.timeline.step_time_s, max(t.timeline.memory_bytes), p) for t, p in exact if t.is_feasible]
    took = {"grid_s": round(time.monotonic() - begin, 1), "points": len(points), "priced": len(priced)}
    if not fits:
        return {"best_step_s": "", "best_memory_gb": "", **took, "best": "no point fits"}
    step_s, memory, best = min(fits, key=lambda f: f[0])
    return {"best_step_s": step_s, "best_memory_gb": memory / 1e9, **took, "best": problem.sentence(best.choice)}


def problem_of(case: Case) -> StageProblem:
    made = abstract_model(ModelSource(path=case.model, settings=case.settings))
    return StageProblem(build_graph(trace(made.step, *made.arguments))[0], load_topology(case.topology, hosts=case.hosts))


def page(rows: list[dict[str, Any]], within: float) -> str:
    lines = [
        "# Plans, against the best point of the grid by brute force", "",
        "`python scripts/grid_table.py`: wall seconds are of the whole command `soapjax plan --pipeline auto --seconds 60`, tracing"
        " included, and of the sweep, on 2 cores; both columns by the same simulator, from data sheets. Of all points those that"
        f" fit are priced, but for what the grid's closed formula says to be more than {within:g} times as slow as the best.", "",
        "| model, devices | grid's best s | GB | planned s | GB | grid / planned | wall s | sweep s | points | priced | the plan "
        "| the grid's best |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|---|",
    ]  # fmt: skip
    for r in rows:
        step, memory, best_s, best_gb = (
            f"{float(r[k]):.3g}" if r[k] != "" else "none" for k in ("step_s", "memory_gb", "best_step_s", "best_memory_gb")
        )
        ratio = f"{float(r['best_step_s']) / float(r['step_s']):.2f}" if r["step_s"] != "" and r["best_step_s"] != "" else ""
        lines.append(
            f"| {r['name']} | {best_s} | {best_gb} | {step} | {memory} | {ratio} | {r['wall_s']} | {r['grid_s']} | {r['points']} "
            f"| {r['priced']} | {r['plan']} | {r['best']} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
