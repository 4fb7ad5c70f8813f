"""Every planner on every workload and three clusters, beside a lower bound; written to results/planners.md.

    python scripts/planner_table.py --topologies a100x64 --seconds 10

As the paper's sections 8.2 and 8.3 compare its search with other planners (data parallelism, experts, OptCNN, REINFORCE), for
the paper's six networks and six more. `step` is the simulated step time; `/ mcmc` how many times longer than the search's plan:
below 1, another planner was better. A star marks what does not fit into memory. The bound is that of the planner `ilp`: no
strategy is faster (in the whole space, or, where the note says so, of the candidates considered). Planners that place operators
on single devices (PLACEMENT_PLANNERS) are simulated in the space "paper", all others in "soap"; `mcmc_placed` is the search in
the former, and `mcmc_paper` the paper's plain chain.
"""

from __future__ import annotations

import sys
import time

import jax
from paper_problems import PAPER_MODELS, WORKLOADS, BestKnown, Case, cluster, search
from paper_tables import BUDGET_COLUMNS, CASE_COLUMNS, Rows, budget_of, guarded, markdown, note, parser_of, positive_float, show

from soapjax.errors import SoapjaxError
from soapjax.helpers.files import write_text_atomic
from soapjax.search.planners import BASELINES, PLACEMENT_PLANNERS, PLANNERS
from soapjax.search.problem import Budget
from soapjax.search.proofs.bound import lower_bound

TOPOLOGIES = {"a100x64": ("a100", 64), "p100x16": ("p100", 16), "k80x64": ("k80", 64)}
MODELS = (*PAPER_MODELS, "vgg", "gnmt", "bert", "transformer_lm", "moe", "unet")
MCMC_PLACED = "mcmc_placed"  # the search, in the space of the planners that place operators
IN_PAPER_SPACE = (*PLACEMENT_PLANNERS, MCMC_PLACED)
BOUND, EXHAUSTIVE = "bound", "exhaustive"  # proofs, which no number of proposals ends
ALL = (*PLANNERS, MCMC_PLACED, BOUND)


def arguments(argv=None):
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(MODELS), metavar="MODEL")
    parser.add_argument("--topologies", nargs="+", choices=list(TOPOLOGIES), default=list(TOPOLOGIES))
    parser.add_argument("--planners", nargs="+", choices=ALL, default=list(ALL), metavar="PLANNER", help=", ".join(ALL))
    parser.add_argument("--bound-seconds", type=positive_float, default=30.0, help="of bound, and of exhaustive")
    return parser.parse_args(argv)


class Problems:
    """The problems of one workload and topology, built when they are needed."""

    def __init__(self, case: Case):
        self.case = case
        self._made: dict[str, object] = {}

    def get(self, space: str):
        if space not in self._made:
            self._made[space] = self.case._replace(space=space).problem()
        return self._made[space]


def judge(planner: str, problems: Problems, options, known: BestKnown) -> dict:
    """One planner's row; what it refuses is a note."""
    space = "paper" if planner in IN_PAPER_SPACE else "soap"
    begin = time.monotonic()
    if planner == BOUND:
        found = lower_bound(problems.get("soap"), options.bound_seconds)
        where = f"of {found.candidates} candidates" if found.is_pruned else ""
        return dict(step_time_s=found.value_s, fits="", search_s=time.monotonic() - begin, note=where)
    budget = Budget(None, options.bound_seconds) if planner == EXHAUSTIVE else budget_of(options)[0]
    try:
        problem = problems.get(space)
        name = "mcmc" if planner == MCMC_PLACED else planner
        result = search(name, problem, Budget() if planner in BASELINES else budget, options.seed)
    except SoapjaxError as e:
        return dict(step_time_s=None, fits="", search_s=time.monotonic() - begin, note=f"refused: {e.problems[0].value}")
    known.offer(problems.case._replace(space=space), problem, result.best, f"planner_table {planner} seed {options.seed}")
    noted = result.notes[0] if result.notes else ""
    return dict(step_time_s=result.best.step_time_s, fits=int(result.best.is_feasible), search_s=result.search_s, note=noted)


def run(options) -> None:
    columns = ("planner", *CASE_COLUMNS, *BUDGET_COLUMNS)
    rows = Rows(options.results / "planners.csv", columns, again=options.again)
    known = BestKnown(options.results / "best_known.json")
    _, named = budget_of(options)
    try:
        for topology in options.topologies:
            cluster(*TOPOLOGIES[topology])
            for model in options.models:
                problems = Problems(Case(model, *TOPOLOGIES[topology], tiny=options.tiny))
                line = []
                for planner in options.planners:
                    key = dict(planner=planner) | problems.case.key() | named
                    line.append(rows.get(key, lambda p=planner, ps=problems: judge(p, ps, options, known)))
                note(" | ".join([topology, *(f"{k}: {v}" for k, v in cells(line).items())]))
                jax.clear_caches()
    finally:
        report(all_rows(rows, named, options), options)


def all_rows(rows: Rows, named: dict, options) -> dict[str, dict[str, list[dict]]]:
    """Topology -> workload -> rows of the CSV with this budget, also those of earlier runs, in the order of the planners."""
    made: dict[str, dict[str, list[dict]]] = {}
    for topology, (cluster_name, devices) in TOPOLOGIES.items():
        for model in WORKLOADS:
            key = Case(model, cluster_name, devices, tiny=options.tiny).key() | named
            found = [rows.find(dict(planner=p) | key) for p in ALL]
            if any(found):
                made.setdefault(topology, {})[model] = [r for r in found if r is not None]
    return made


def cells(rows: list[dict]) -> dict:
    """One line of the table: milliseconds, and the ratio to the search's plan."""
    ours = next((float(r["step_time_s"]) for r in rows if r["planner"] == "mcmc" and r["step_time_s"]), None)
    line = dict(workload=rows[0]["model"])
    for r in rows:
        if not r["step_time_s"]:
            line[r["planner"]] = "refused"
            continue
        step = float(r["step_time_s"])
        ratio = "" if ours is None or r["planner"] == "mcmc" else f" ({step / ours:.3f})"
        line[r["planner"]] = f"{step * 1e3:.4g}{ratio}{' *' if r['fits'] == '0' else ''}"
    return line


def report(made: dict[str, dict[str, list[dict]]], options) -> None:
    spent = f"{options.proposals} proposals" if options.proposals else f"{options.seconds:g} s"
    parts = [
        "# Planners\n",
        f"`scripts/planner_table.py`, {spent} per search, seed {options.seed}{', tiny sizes' if options.tiny else ''}. "
        "Simulated milliseconds per step, and in brackets the ratio to mcmc (below 1: better than mcmc). `*`: does not fit into "
        f"memory. {', '.join(IN_PAPER_SPACE)}: in the space \"paper\", where operators may be placed on single devices. "
        "bound: no strategy of the space \"soap\" is faster, or none "
        "of the candidates that `planners.csv` counts.\n",
    ]
    for topology, by_model in made.items():
        lines = [cells(rows) for rows in by_model.values()]
        columns = ("workload", *(p for p in ALL if any(p in line for line in lines)))
        show(topology, columns, lines)
        parts.append(f"## {topology}\n\n{markdown(columns, lines)}")
        for model, rows in by_model.items():
            found = {r["planner"]: float(r["step_time_s"]) for r in rows if r["step_time_s"]}
            for r in rows:
                # What may place operators is held against a search that may, too.
                names = ("mcmc", MCMC_PLACED) if r["planner"] in IN_PAPER_SPACE else ("mcmc",)
                ours = min((found[n] for n in names if n in found), default=0.0)
                if r["planner"] not in (BOUND, *names) and r["fits"] == "1" and float(r["step_time_s"]) < ours * (1 - 1e-5):
                    ratio = float(r["step_time_s"]) / ours
                    note(f"BETTER THAN MCMC: {r['planner']} on {model}, {topology}, space {r['space']}: {ratio:.4f}")
    if made:
        options.results.mkdir(parents=True, exist_ok=True)
        write_text_atomic(options.results / "planners.md", "\n".join(parts))


def main(argv=None) -> int:
    return guarded(run, arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
