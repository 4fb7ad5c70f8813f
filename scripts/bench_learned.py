"""Placements per second while `trinity` and `hierarchical` learn, of this checkout and of another, in turn.

    python scripts/bench_learned.py --other ../before --models nmt inception_v3 --groups 64

Each checkout runs in a process of its own, --rounds times, one after the other: what else the machine does hits both. Of every
batch (128 placements: drawn, simulated, learned from) the time is taken, the first one aside, which compiles; the table has the
median over all rounds, and the seconds before the first batch's rewards, compilation included where nothing is kept on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def measure(model: str, devices: int, planner: str, groups: int, batches: int) -> dict[str, float | list[float]]:
    """Seconds before the first rewards, of every batch after the first, and the least cost that was drawn."""
    import jax
    from trinity_tables import CLUSTER, LEARNED, MDPE, Budget, Case, batches_of, dataclasses, placement_starts, with_groups

    problem = dataclasses.replace(Case(model, CLUSTER, devices, "paper", False).problem(), objective=MDPE)
    key, begin = jax.random.key(0), time.monotonic()
    found = batches_of(key, problem, with_groups(LEARNED[planner], groups), placement_starts(key, problem, Budget()))
    ends, lowest = [], float("inf")
    for _ in range(batches + 1):
        lowest = min(lowest, *(e.cost for e in next(found).found))
        ends.append(time.monotonic())
    return dict(setup_s=ends[0] - begin, batches_s=[b - a for a, b in zip(ends, ends[1:], strict=False)], lowest_s=lowest)


def of_checkout(folder: Path, options: argparse.Namespace, model: str, planner: str) -> dict:
    given = [model, planner, *(str(x) for x in (options.devices, options.groups, options.batches))]
    path = {"PYTHONPATH": os.pathsep.join([str(folder), str(folder / "scripts")])}
    done = subprocess.run(
        [sys.executable, str(HERE / "bench_learned.py"), "--measure", *given], env=os.environ | path, cwd=folder, check=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, required=True, help="another checkout, e.g. of git worktree")
    parser.add_argument("--models", nargs="+", default=["nmt", "gnmt_2layer", "inception_v3"])
    parser.add_argument("--planners", nargs="+", default=["trinity"], choices=("trinity", "hierarchical"))
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    print("| workload | planner | checkout | placements per s | first rewards after s | least cost s |\n|---|---|---|--:|--:|--:|")
    for model in options.models:
        for planner in options.planners:
            sides = {"other": options.other.resolve(), "this": HERE.parent}
            found = {name: [] for name in sides}
            for _ in range(options.rounds):
                for name, folder in sides.items():
                    found[name].append(of_checkout(folder, options, model, planner))
            for name, runs in found.items():
                rate = 128 / statistics.median(s for r in runs for s in r["batches_s"])
                setup, lowest = (min(r[k] for r in runs) for k in ("setup_s", "lowest_s"))
                print(f"| {model} | {planner} | {name} | {rate:.1f} | {setup:.1f} | {lowest:.4f} |", flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        # The other checkout's scripts and package go before this one's.
        sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != HERE] + [str(HERE)]
        model, planner, *numbers = sys.argv[2:]
        devices, groups, batches = map(int, numbers)
        print(json.dumps(measure(model, devices, planner, groups, batches)))
        sys.exit(0)
    sys.exit(main())
