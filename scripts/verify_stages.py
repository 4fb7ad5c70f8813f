"""Memory of the stages of pipelines, predicted against compiled for GPUs that need not be there.

    pip install "soapjax[cuda-aot]"
    python scripts/verify_stages.py
    python scripts/verify_stages.py --only zb-h1 interleaved --topology a100x8

Every case is planned with one schedule (`soapjax plan --pipeline`), and its programs are compiled for the topology's GPU (`soapjax
verify --target cuda`): nothing is run. One row per stage in results/verify_stages.csv, from where the same command goes on, and
the page in results/verify_stages.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paper_tables import ROOT, Rows, guarded, note

from soapjax.errors import Problem, SoapjaxError
from soapjax.helpers.files import write_text_atomic

LM = {"layers": 8, "width": 2048, "heads": 16, "seq": 2048, "vocab": 51_200, "batch": 64}
LLAMA = LM | {"vocab": 32_000, "dtype": "bfloat16"}
WIDE = {"layers": 4, "width": 8192, "heads": 64, "seq": 2048, "vocab": 51_200, "batch": 16, "dtype": "bfloat16", "tie": True}
NARROW = {"layers": 8, "width": 1024, "heads": 16, "seq": 1024, "vocab": 32_000, "batch": 64, "dtype": "bfloat16"}
PROPOSALS = 60


class Case(NamedTuple):
    model: str
    settings: Mapping[str, Any]
    schedule: str
    stages: int
    microbatches: int

    @property
    def name(self) -> str:
        marks = " ".join(f"{k}={v}" for k, v in self.settings.items() if k in ("dtype", "remat", "tie", "width"))
        return f"{self.model} {marks}".strip()


CASES = (
    Case("transformer_lm", LM, "1f1b", 2, 4),
    Case("transformer_lm", LM | {"dtype": "bfloat16"}, "1f1b", 2, 4),
    Case("transformer_lm", LM | {"dtype": "bfloat16"}, "gpipe", 2, 8),
    Case("transformer_lm", LM | {"dtype": "bfloat16"}, "zb-h1", 2, 8),
    Case("transformer_lm", LM | {"dtype": "bfloat16"}, "interleaved", 4, 4),
    Case("transformer_lm", LM | {"dtype": "bfloat16", "remat": True}, "1f1b", 2, 8),
    Case("transformer_lm", LM | {"dtype": "bfloat16", "remat": "attention"}, "1f1b", 4, 8),
    Case("transformer_lm", WIDE, "1f1b", 2, 8),
    Case("transformer_lm", NARROW, "zb-h1", 4, 8),
    Case("llama", LLAMA, "1f1b", 2, 4),
    Case("llama", LLAMA | {"remat": True}, "interleaved", 4, 8),
    Case("resnet", {"batch": 64}, "1f1b", 2, 4),
    Case("moe", {"batch": 64, "seq": 256, "width": 512}, "1f1b", 2, 4),
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="SCHEDULE")
    parser.add_argument("--topology", default="a100x8")
    parser.add_argument("--again", action="store_true", help="compute also what the CSV has already")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    return guarded(table, parser.parse_args(argv))


def table(options: argparse.Namespace) -> None:
    rows = Rows(options.results / "verify_stages.csv", ("topology", "case", "schedule", "stages", "stage"), again=options.again)
    for case in CASES:
        if options.only and case.schedule not in options.only:
            continue
        key = {"topology": options.topology, "case": case.name, "schedule": case.schedule, "stages": case.stages}
        if rows.find(key | {"stage": 0}) is None:
            for stage, (predicted, compiled) in enumerate(stages_of(case, options.topology)):
                rows.add({**key, "stage": stage, "predicted_gb": predicted / 1e9, "compiled_gb": compiled / 1e9})
            note(f"{case.name}, {case.schedule}: done")
        write_text_atomic(options.results / "verify_stages.md", page(rows.rows))


def stages_of(case: Case, topology: str) -> list[tuple[float, float]]:
    """Bytes per device of every group of devices, predicted and compiled."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "plan.json")
        settings = [word for k, v in case.settings.items() for word in ("--set", f"{k}={v}")]
        asked = ["--pipeline", case.schedule, "--stages", str(case.stages), "--microbatches", str(case.microbatches)]
        where = ["--topology", topology]
        soapjax("plan", f"soapjax.models.{case.model}", *settings, *asked, *where, "--proposals", str(PROPOSALS), "-o", path)
        found = json.loads(soapjax("verify", path, "--trust", "--target", "cuda", *where, "--json"))
        devices = [stage["devices"] for stage in json.loads(Path(path).read_text())["pipeline"]["stages"]]
    every = found["stage_memory_bytes"]
    first = [i for i, mine in enumerate(devices) if devices.index(mine) == i]  # stages that share devices have one peak
    return [(every[f"stage {i}"]["predicted"], every[f"stage {i}"]["compiled"]) for i in first]


def soapjax(*words: str) -> str:
    """What the command prints.

    Raises: SoapjaxError with what it says where it fails.
    """
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-m", "soapjax", *words], capture_output=True, text=True, env=env, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        remedy = "run it alone; compiling for GPUs that are not there needs soapjax[cuda-aot]"
        raise SoapjaxError(Problem(f"soapjax {' '.join(words)}", " ".join(said), "exit status 0", remedy))
    return done.stdout


def page(rows: Sequence[Mapping[str, str]]) -> str:
    errors = [float(r["predicted_gb"]) / float(r["compiled_gb"]) - 1 for r in rows]
    lines = [
        "# Memory of stages, predicted against compiled", "",
        f"`python scripts/verify_stages.py`: plans of one schedule each, {PROPOSALS} proposals. Their programs are compiled for the"
        " topology's GPU by XLA's ahead-of-time compiler, and walked through in the order of the schedule; the prediction is the"
        " simulator's alone. Stages that share devices are one row.", "",
        f"Of {len(errors)} groups of devices the prediction is at most {-100 * min(errors):.1f} % too low and"
        f" {100 * max(errors):.1f} % too high, {100 * sorted(map(abs, errors))[len(errors) // 2]:.1f} % off in the median.", "",
        "| topology | model | schedule, stages | devices' stage | predicted GB | compiled GB | difference |",
        "|---|---|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for r, error in zip(rows, errors, strict=True):
        cells = r["topology"], r["case"], f"{r['schedule']}, {r['stages']}", r["stage"]
        figures = (f"{float(r[name]):.3g}" for name in ("predicted_gb", "compiled_gb"))
        lines.append(f"| {' | '.join((*cells, *figures))} | {100 * error:+.1f} % |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
