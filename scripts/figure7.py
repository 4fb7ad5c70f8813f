"""Training throughput of six networks on up to 16 P100 and 64 K80, in simulation: the paper's figure 7.

    python scripts/figure7.py --models alexnet nmt --clusters p100 --seconds 10

The paper (Jia, Zaharia and Aiken, 2019, section 8.2.1) compares the strategies that its search finds with data parallelism and
with expert-designed ones (Krizhevsky 2014 for convolutional networks, Wu et al. 2016 for recurrent ones), per iteration, at a
batch of 64 (AlexNet: 256) and 40 unrolled steps; the dashed line is what one device does, times the number of devices. It
reports up to 3.3 times the throughput of data parallelism and of the experts.

Columns: samples per second; `mcmc_dp` and `mcmc_expert` are ratios of throughput, above 1 where the search is faster. A star
marks what does not fit into memory. The experts of recurrent networks place operators on single devices: they are simulated in
the space "paper". The search has the space "soap", whose plans run, unless --space says otherwise.
"""

from __future__ import annotations

import sys

from paper_problems import (
    CLUSTER_DEVICES,
    PAPER_MODELS,
    SPACES,
    WORKLOADS,
    BestKnown,
    Case,
    expert_of,
    one_device_s,
    search,
    traced,
)
from paper_tables import BUDGET_COLUMNS, CASE_COLUMNS, Rows, budget_of, figure, guarded, parser_of, positive_int, show

from soapjax.search.experts.baselines import replicate_all
from soapjax.search.problem import Budget, Evaluation

SHOWN = ("mcmc", "data_parallel", "expert")


def arguments(argv=None):
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(PAPER_MODELS), metavar="MODEL")
    parser.add_argument("--clusters", nargs="+", choices=["p100", "k80"], default=["p100", "k80"])
    parser.add_argument("--devices", nargs="+", type=positive_int, default=None, help="by default all of the paper's")
    parser.add_argument("--space", choices=SPACES, default="soap", help="of the search")
    return parser.parse_args(argv)


def point(case: Case, options, known: BestKnown) -> dict:
    """The throughputs of one case."""
    batch = traced(case.model, tiny=case.tiny).batch
    budget, _ = budget_of(options)
    one_s = one_device_s(case.model, case.cluster, tiny=case.tiny)
    found: dict[str, Evaluation] = {}
    problem = case.problem()
    searched = None
    if case.devices == 1:
        found = dict.fromkeys(SHOWN, problem.evaluate([replicate_all(problem)])[0])
    else:
        searched = search("mcmc", problem, budget, options.seed)
        found["mcmc"] = searched.best
        known.offer(case, problem, searched.best, f"figure7 mcmc seed {options.seed}")
        found["data_parallel"] = search("data_parallel", problem, Budget(), options.seed).best
        name, space = expert_of(case.model)
        at = problem if space == case.space else case._replace(space=space).problem()
        found["expert"] = search(name, at, Budget(), options.seed).best
    row: dict = {name: batch / e.step_time_s for name, e in found.items()}
    row |= dict(ideal=batch / one_s * case.devices)
    row |= dict(mcmc_dp=row["mcmc"] / row["data_parallel"], mcmc_expert=row["mcmc"] / row["expert"])
    row |= {f"{name}_step_s": e.step_time_s for name, e in found.items()}
    row |= {f"{name}_fits": int(e.is_feasible) for name, e in found.items()}
    if searched is not None:
        row |= dict(search_s=searched.search_s, searched=searched.num_proposals)
    return row


def run(options) -> None:
    rows = Rows(options.results / "figure7.csv", (*CASE_COLUMNS, *BUDGET_COLUMNS), again=options.again)
    known = BestKnown(options.results / "best_known.json")
    _, budget = budget_of(options)
    made = []
    try:
        for model in options.models:
            for cluster_name in options.clusters:
                for devices in options.devices or CLUSTER_DEVICES[cluster_name]:
                    case = Case(model, cluster_name, devices, options.space, options.tiny)
                    made.append(rows.get(case.key() | budget, lambda c=case: point(c, options, known)))
    finally:
        report(made, options)


def report(made: list[dict], options) -> None:
    def starred(row: dict) -> dict:
        marks = {n: row[n] + ("" if row[f"{n}_fits"] == "1" else " *") for n in SHOWN}
        return row | marks

    columns = ("model", "cluster", "devices", *SHOWN, "ideal", "mcmc_dp", "mcmc_expert", "search_s")
    show("samples per second (* does not fit into memory)", columns, map(starred, made))
    if made:
        models = list(dict.fromkeys(r["model"] for r in made))
        across = min(3, len(models))
        down = -(-len(models) // across)
        with figure(options.results / "figure7.png", nrows=down, ncols=across, figsize=(4.2 * across, 3.2 * down)) as axes:
            if axes is not None:
                for ax, model in zip(axes.flat, models, strict=False):
                    draw(ax, model, [r for r in made if r["model"] == model])
                axes.flat[0].legend(fontsize=6)
                for ax in axes.flat[len(models) :]:
                    ax.set_axis_off()


def draw(ax, model: str, rows: list[dict]) -> None:
    """Samples per second and GPU over the number of GPUs, as in the paper; one style of line per cluster."""
    colors = dict(zip(SHOWN, ("tab:red", "tab:blue", "tab:green"), strict=True))
    for cluster_name, marker in (("p100", "o"), ("k80", "s")):
        mine = sorted((r for r in rows if r["cluster"] == cluster_name), key=lambda r: int(r["devices"]))
        if not mine:
            continue
        x = [int(r["devices"]) for r in mine]
        for name in SHOWN:
            y = [float(r[name]) / n for r, n in zip(mine, x, strict=True)]
            ax.plot(x, y, marker=marker, color=colors[name], markersize=4, label=f"{name}, {cluster_name}")
        y = [float(r["ideal"]) / n for r, n in zip(mine, x, strict=True)]
        ax.plot(x, y, "--", color="gray", label=f"ideal, {cluster_name}")
    ax.set(title=model, xscale="log", xlabel="GPUs", ylabel="samples / s / GPU", ylim=(0, None))
    ticks = sorted({int(r["devices"]) for r in rows})
    ax.set_xticks(ticks, [str(t) for t in ticks])
    ax.minorticks_off()


def main(argv=None) -> int:
    return guarded(run, arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
