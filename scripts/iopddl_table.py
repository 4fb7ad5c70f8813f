"""Runs the solver over a folder of the contest's problems, each within its time limit, and writes a table.

    python scripts/iopddl_table.py FOLDER --fraction-of-limit 0.25

SCORES.csv has the columns instance, time_limit_s, best_team; instance X is FOLDER/*-X.json.gz. The table says what the solver
found (recomputed here), against the best team's cost; `bound` is the solver's own lower bound against its own cost.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import pydantic
from csv_files import CsvRow, Positive, read_rows
from paper_tables import PUBLISHED_FILES, guarded

from soapjax.additive.iopddl import load_problem
from soapjax.helpers.files import write_text_atomic

SOLVER = Path(__file__).with_name("solve_iopddl.py")
HEAD = "| instance | seconds | cost | ratio to best team | violations | over limit | bound / cost |\n|---|---|---|---|---|---|---|"


class Scores(CsvRow):
    instance: Annotated[str, pydantic.Field(pattern="^[A-Z]{1,8}$")]
    time_limit_s: Positive
    best_team: Annotated[int, pydantic.Field(ge=1, le=10**18)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("scores", type=Path, nargs="?", default=PUBLISHED_FILES / "iopddl_scores.csv")
    parser.add_argument("--fraction-of-limit", type=float, default=1.0)
    parser.add_argument("--only", default="", help="instances to run, for example BV")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=Path("results/iopddl.md"))
    return guarded(run, parser.parse_args())


def run(options: argparse.Namespace) -> None:
    rows, ratios = [], []
    for entry in read_rows(options.scores, Scores):
        name = entry.instance
        found = sorted(options.folder.glob(f"*-{name}.json.gz"))
        if not found or (options.only and name not in options.only):
            continue
        seconds = entry.time_limit_s * options.fraction_of_limit
        command = [sys.executable, str(SOLVER), str(found[0]), "--seconds", str(seconds), "--seed", str(options.seed)]
        begin = time.monotonic()
        ended = subprocess.run(command, capture_output=True, text=True)
        took = time.monotonic() - begin
        if ended.returncode not in (0, 3):
            sys.exit(f"instance {name}: {SOLVER.name} ended with status {ended.returncode}:\n{ended.stderr[-2000:]}")
        score = load_problem(found[0]).score(np.array(json.loads(ended.stdout.splitlines()[-1])))
        bound = re.search(r"no solution costs less than (\d+)", ended.stderr)
        ratio = score.cost / entry.best_team
        ratios.append(ratio)
        least = f"{int(bound[1]) / score.cost:.4f}" if bound and score.cost else "-"
        rows.append(
            f"| {name} | {took:.1f} of {seconds:.0f} | {score.cost} | {ratio:.5f} | {score.violations} | {score.excess} | {least} |"
        )
        print(rows[-1], flush=True)
    mean = math.exp(sum(map(math.log, ratios)) / max(1, len(ratios)))
    text = "# The ASPLOS 2025 contest's problems\n\n"
    text += f"`scripts/iopddl_table.py --fraction-of-limit {options.fraction_of_limit} --seed {options.seed}`, two processes.\n\n"
    text += "\n".join([HEAD, *rows]) + f"\n\nGeometric mean of the ratios: {mean:.5f}.\n"
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(options.output, text)
    print(f"geometric mean {mean:.5f}")


if __name__ == "__main__":
    sys.exit(main())
