"""Pipelines planned against configurations that experts tuned by hand: GPT of 1.7 billion to 1 trillion parameters on A100.

    python scripts/megatron_table.py
    python scripts/megatron_table.py --only 39.1B 22B --seconds 60

Columns of the file: name, heads, width, layers, tensor, stages, gpus, batch, microbatch, chunks_per_stage, recomputed,
sequence_parallel (Narayanan et al. 2021, Table 1; Korthikanti et al. 2022, Table 5). Every row is priced twice by the same
simulator: as configured by hand (stages of equally many blocks), and as `soapjax plan --pipeline auto --seconds 60` plans it, from
the command's start to its end, tracing included, in a process of its own. The configurations ran in a framework that takes all of
a device's memory, and both are priced so: a program may take --memory-fraction of it (XLA's preallocation, which says 0.75 unless
told otherwise). Of that the plan, which nobody compiled, keeps its margin; what people ran needs none. Rows go to
results/megatron.csv, from where the same command goes on, and the page to results/megatron.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from csv_files import Count, CsvRow, read_rows
from paper_tables import PUBLISHED_FILES, ROOT, Rows, guarded, note

from soapjax.helpers.files import write_text_atomic

SEQ, VOCAB = 2048, 51_200
MODEL = "soapjax.models.transformer_lm"


class Row(CsvRow):
    name: str
    heads: Count
    width: Count
    layers: Count
    tensor: Count
    stages: Count
    gpus: Count
    batch: Count
    microbatch: Count
    chunks_per_stage: Count
    recomputed: Literal["block", "attention"]
    sequence_parallel: Literal["yes", "no"]

    @property
    def settings(self) -> dict[str, Any]:
        """Of the model's factory."""
        return {
            "batch": self.batch, "seq": SEQ, "width": self.width, "layers": self.layers, "heads": self.heads, "vocab": VOCAB,
            "tie": True, "dtype": "bfloat16", "remat": True if self.recomputed == "block" else "attention",
        }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=PUBLISHED_FILES / "megatron_configurations.csv")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--seconds", type=float, default=60.0, help="of planning, after tracing")
    parser.add_argument("--node", default="dgx_a100", help="topology of one host")
    parser.add_argument("--memory-fraction", type=float, default=0.95, help="XLA_PYTHON_CLIENT_MEM_FRACTION of the jobs")
    parser.add_argument("--again", action="store_true", help="compute also what the CSV has already")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--by-hand", default="", help=argparse.SUPPRESS)  # one row's price, as JSON into this file
    options = parser.parse_args(argv)
    if options.by_hand:
        rows = read_rows(options.file, Row)
        Path(options.by_hand).write_text(json.dumps(by_hand(next(r for r in rows if r.name == options.only[0]), options.node)))
        return 0
    return guarded(table, options)


def table(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        node = Path(folder) / "node.toml"
        node.write_text(with_memory_fraction(options.node, options.memory_fraction))
        options.node = str(node)
        fill(options)


def with_memory_fraction(node: str, fraction: float) -> str:
    """The TOML of a topology of which a program may take so much memory."""
    path = Path(node) if node.endswith(".toml") else ROOT / "topologies" / f"{node}.toml"
    return re.sub(r"(?m)^memory_fraction = [0-9.]+$", f"memory_fraction = {fraction}", path.read_text())


def fill(options: argparse.Namespace) -> None:
    rows = Rows(options.results / "megatron.csv", ("name", "seconds"), again=options.again)
    for row in read_rows(options.file, Row):
        if options.only and row.name not in options.only:
            continue
        key = {"name": row.name, "seconds": options.seconds}
        if rows.find(key) is None:
            where = ("--topology", options.node, "--hosts", str(row.gpus // 8))
            plan = planned(MODEL, row.settings, where, options.seconds)
            rows.add({**key, "gpus": row.gpus, **priced_by_hand(row, options), **plan})
            note(f"{row.name}: {rows.find(key)}")
        write_text_atomic(options.results / "megatron.md", page(rows.rows, options.memory_fraction))


def priced_by_hand(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, __file__, str(options.file), "--only", row.name, "--node", options.node, "--by-hand", str(out)]
        subprocess.run(command, check=True)
        return json.loads(out.read_text())


def by_hand(row: Row, node: str) -> dict[str, Any]:
    """What the simulator says of the published configuration."""
    from soapjax.graph.passes.build import build_graph
    from soapjax.graph.trace.tracing import trace
    from soapjax.search.stages.choices import Choice
    from soapjax.search.stages.stage_problem import StageProblem
    from soapjax.steps.sourced_models import abstract_model
    from soapjax.strategy.plan import ModelSource
    from soapjax.topology import load_topology

    made = abstract_model(ModelSource(path=MODEL, settings=row.settings))
    graph = build_graph(trace(made.step, *made.arguments))[0]
    topology = load_topology(node, hosts=row.gpus // 8)
    stages, chunks = row.stages, row.chunks_per_stage
    num = row.batch // row.microbatch // (row.gpus // stages // row.tensor)
    problem = StageProblem(graph, topology, num_stages=stages, num_microbatches=num)
    bounds = equal_blocks([graph.operators[n].name for n in problem.forward], row.layers, stages * chunks)
    name = f"tensor/{row.tensor}" if row.tensor > 1 else "data"
    name += ", sequence" if row.sequence_parallel == "yes" and row.tensor > 1 else ""
    inner = [x.name for x in problem.loads.fabric(0, row.gpus // stages, num).choices].index(name)
    schedule = "interleaved" if chunks > 1 else "1f1b"
    again = (False,) * (stages * chunks)
    choice = Choice(schedule, num, bounds, (row.gpus // stages,) * stages, (inner,) * stages, again)
    found = problem.price(choice)
    fits = found.memory_bytes <= topology.device.available_memory_bytes
    return {
        "hand_step_s": found.timeline.step_time_s, "hand_memory_gb": found.memory_bytes / 1e9, "hand_fits": int(fits),
        "by_hand": problem.sentence(choice),
    }  # fmt: skip


def equal_blocks(names: list[str], layers: int, stages: int) -> tuple[int, ...]:
    """Bounds of stages of equally many blocks, as Megatron-LM cuts: the embedding with the first, the head with the last."""
    first = {k: next(i for i, name in enumerate(names) if name.startswith(f"blk{k}/")) for k in range(layers)}
    return (0, *(first[k * layers // stages] for k in range(1, stages)), len(names))


def planned(model: str, settings: Mapping[str, Any], where: Sequence[str], seconds: float) -> dict[str, Any]:
    """The plan that the command makes of a model, and how long it takes in all; `where`: the options of its topology."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "soapjax", "plan", model, *where]
        command += [x for k, v in settings.items() for x in ("--set", f"{k}={v}")]
        command += ["--pipeline", "auto", "--seconds", str(seconds), "-o", str(out)]
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=False)
        after, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - begin
        took = {"wall_s": round(wall_s, 1), "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1)}
        if done.returncode or not out.exists():
            return {"step_s": "", "memory_gb": "", "fits": 0, **took, "plan": done.stderr.strip()[-300:].replace("\n", " ")}
        plan = json.loads(out.read_text())
    prediction, notes = plan["prediction"], plan["provenance"]["notes"]
    sentence = f"one program: {plan['provenance']['planner']}"
    if plan["pipeline"]:
        sentence = next(n for n in notes if "micro-batches" in n)
    return {
        "step_s": prediction["step_time_s"], "memory_gb": prediction["memory_bytes_per_device"] / 1e9,
        "fits": int(prediction["feasible"]), **took, "plan": sentence,
    }  # fmt: skip


def page(rows: list[dict[str, Any]], memory_fraction: float) -> str:
    lines = [
        "# Pipelines planned, against configurations tuned by hand", "",
        "`python scripts/megatron_table.py megatron_configurations.csv`: GPT, sequences of 2,048, bfloat16, Adam, on hosts of eight"
        f" A100 80GB (topology `dgx_a100`, where a program may take {100 * memory_fraction:g} % of the memory; a plan that nobody"
        " compiled keeps a tenth of that free, what people ran needs no margin); both columns by the same simulator, from data"
        " sheets. Wall and CPU seconds are of the whole command, tracing included, on 2 cores.", "",
        "| model | GPUs | by hand s | GB | planned s | GB | by hand / planned | wall s | CPU s | the plan | by hand |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|---|",
    ]  # fmt: skip
    for r in rows:
        hand = float(r["hand_step_s"])
        step, memory = (f"{float(r[k]):.3g}" if r[k] != "" else "none" for k in ("step_s", "memory_gb"))
        ratio = f"{hand / float(r['step_s']):.2f}" if r["step_s"] != "" else ""
        fits = "" if int(r["hand_fits"]) else " (does not fit)"
        lines.append(
            f"| {r['name']} | {r['gpus']} | {hand:.3g} | {float(r['hand_memory_gb']):.3g}{fits} | {step} | {memory} | {ratio} "
            f"| {r['wall_s']} | {r['cpu_s']} | {r['plan']} | {r['by_hand']} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
