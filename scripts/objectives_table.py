"""Planners under the objective `mdpe`, and the fronts that they saw, for public steps that nobody here wrote.

    python scripts/objectives_table.py --sources ~/public
    python scripts/objectives_table.py --sources ~/public --only flax_vae --planners mcmc optcnn

Each planner plans first by time; then with three quarters of that plan's communication and twice its memory as the limits. The
table has the step time, communication and memory of both plans, and how many plans the front has that each search saw. "pipeline"
is the best of all synchronous schedules. `--sources` and the cases are those of foreign_models.py.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from foreign import sources
from foreign.registry import Made, all_cases
from paper_tables import BUDGET_COLUMNS, Rows, budget_of, guarded, markdown, note, parser_of

import soapjax
from soapjax.helpers.files import write_text_atomic
from soapjax.helpers.sizes import size
from soapjax.strategy.plan import Plan

CASES = ("flax_vae", "flax_mnist_nnx")
PLANNERS = ("mcmc", "optcnn", "exhaustive", "pipeline")
COLUMNS = ("name", "planner", "objective", "step", "a device sends", "memory", "meets the limits", "on the front", "planned in")


def main() -> int:
    parser = parser_of(__doc__, seconds=30.0)
    parser.add_argument("--sources", type=Path, default=Path("sources"), help="folder with one folder owner+name each")
    parser.add_argument("--only", nargs="*", default=list(CASES), metavar="NAME")
    parser.add_argument("--planners", nargs="*", default=list(PLANNERS))
    parser.add_argument("--topology", default="cpu8")
    return guarded(run, parser.parse_args())


def run(options: Any) -> None:
    sources.use(options.sources)
    cases = all_cases()
    arguments = ("name", "planner", "topology", *BUDGET_COLUMNS, "objective")
    rows = Rows(options.results / "objectives.csv", arguments, again=options.again)
    for name in options.only:
        made = None
        for planner in options.planners:
            asked = {"name": name, "planner": planner, "topology": options.topology, **budget_of(options)[1]}
            by_time = rows.find(asked | {"objective": "time"})
            if by_time is None:
                made = made or cases[name].build()
                by_time = rows.add(asked | row_of(made, planner, options, "time"))
            limited = soapjax.Objective(
                "mdpe", max_bytes=max(0.75 * float(by_time["sent_bytes"]), 1.0), max_memory=2 * float(by_time["memory_bytes"])
            )  # fmt: skip
            if rows.find(asked | {"objective": limited.describe()}) is None:
                made = made or cases[name].build()
                rows.add(asked | row_of(made, planner, options, limited))
            note(f"{name}, {planner}: done")
    shown = [words(r) for r in rows.rows if r["name"] in options.only]
    head, _, what = __doc__.strip().split("\n\n")
    write_text_atomic(options.results / "objectives.md", f"{head}\n\n{what}\n\n{markdown(COLUMNS, shown)}")
    print(markdown(COLUMNS, shown))


def row_of(made: Made, planner: str, options: Any, objective: str | soapjax.Objective) -> dict[str, Any]:
    """One search."""
    begin = time.monotonic()
    shared = dict(topology=options.topology, **budget_of(options)[1], objective=objective, pareto=True)
    if planner == "pipeline":
        plan, found = soapjax.plan_pipeline(made.step, *made.args, pipeline="auto", **shared)
        front = found.front
    else:
        found = soapjax.plan(made.step, *made.args, planner=planner, **shared)
        plan, front = found.plan, found.front
    return figures(plan, objective) | {"front": len(front), "plan_s": time.monotonic() - begin}


def figures(plan: Plan, objective: str | soapjax.Objective) -> dict[str, Any]:
    p = plan.prediction
    unmet = [] if isinstance(objective, str) else objective.unmet(p.peak_sent_bytes, p.memory_bytes_per_device)
    return {
        "objective": plan.provenance.objective, "step_time_s": p.step_time_s, "sent_bytes": p.peak_sent_bytes,
        "memory_bytes": p.memory_bytes_per_device, "meets": int(not unmet), "notes": " / ".join(plan.provenance.notes),
    }  # fmt: skip


def words(row: dict[str, str]) -> dict[str, str]:
    return {
        "name": row["name"], "planner": row["planner"], "objective": row["objective"],
        "step": f"{float(row['step_time_s']) * 1e3:.4g} ms", "a device sends": size(float(row["sent_bytes"])),
        "memory": size(float(row["memory_bytes"])), "meets the limits": "yes" if int(row["meets"]) else "no",
        "on the front": row["front"], "planned in": f"{float(row['plan_s']):.3g} s",
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
