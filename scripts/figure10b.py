"""OptCNN's dynamic programming against the search, on convolutional networks: the paper's figure 10b, in simulation.

    python scripts/figure10b.py --seconds 10

OptCNN (Jia, Lin, Qi and Aiken 2018) minimises the sum of all durations, as if nothing overlapped, exactly on linear graphs. The
paper (Jia, Zaharia and Aiken, 2019, section 8.2.3) finds the same strategies as OptCNN for linear networks, and faster ones where
branches can overlap (Inception-v3, RNNTC, RNNLM, NMT: 1.2 to 1.6 times).

Columns: seconds per step of each, both simulated alike; `optcnn_mcmc` is how many times longer OptCNN's plan takes.
"""

from __future__ import annotations

import sys

from paper_problems import CLUSTERS, WORKLOADS, BestKnown, Case, search
from paper_tables import BUDGET_COLUMNS, CASE_COLUMNS, Rows, budget_of, figure, guarded, parser_of, positive_int, show


def arguments(argv=None):
    parser = parser_of(__doc__)
    cnns = ["alexnet", "inception_v3", "resnet101"]
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=cnns, metavar="MODEL")
    parser.add_argument("--cluster", choices=list(CLUSTERS), default="p100")
    parser.add_argument("--devices", type=positive_int, default=16)
    return parser.parse_args(argv)


def compare(case: Case, options, known: BestKnown) -> dict:
    problem = case.problem()
    budget, _ = budget_of(options)
    ours = search("mcmc", problem, budget, options.seed)
    theirs = search("optcnn", problem, budget, options.seed)
    for name, result in (("mcmc", ours), ("optcnn", theirs)):
        known.offer(case, problem, result.best, f"figure10b {name} seed {options.seed}")
    return dict(
        mcmc_step_s=ours.best.step_time_s,
        optcnn_step_s=theirs.best.step_time_s,
        optcnn_mcmc=theirs.best.step_time_s / ours.best.step_time_s,
        mcmc_fits=int(ours.best.is_feasible),
        optcnn_fits=int(theirs.best.is_feasible),
        mcmc_search_s=ours.search_s,
        optcnn_search_s=theirs.search_s,
    )


def run(options) -> None:
    rows = Rows(options.results / "figure10b.csv", (*CASE_COLUMNS, *BUDGET_COLUMNS), again=options.again)
    known = BestKnown(options.results / "best_known.json")
    _, named = budget_of(options)
    made = []
    try:
        for model in options.models:
            case = Case(model, options.cluster, options.devices, tiny=options.tiny)
            made.append(rows.get(case.key() | named, lambda c=case: compare(c, options, known)))
    finally:
        columns = ("model", "mcmc_step_s", "optcnn_step_s", "optcnn_mcmc", "mcmc_fits", "optcnn_fits")
        columns += ("mcmc_search_s", "optcnn_search_s")
        show(f"OptCNN on {options.devices} {options.cluster}", columns, made)
        if made:
            with figure(options.results / "figure10b.png", figsize=(5, 3)) as axes:
                if axes is not None:
                    ax = axes[0, 0]
                    ax.bar([r["model"] for r in made], [float(r["optcnn_mcmc"]) for r in made], color="tab:blue")
                    ax.axhline(1, color="black", linewidth=0.8)
                    ax.set_ylabel("step time, OptCNN / search")


def main(argv=None) -> int:
    return guarded(run, arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
