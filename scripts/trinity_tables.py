"""The tables and figures of Trinity (Zeng et al., Algorithms 2022, 15(4), 108), for our simulator and planners.

    python scripts/trinity_tables.py --batches 100
    python scripts/trinity_tables.py --parts convergence --models inception_v3 --batches 25

table        run time, peak communication and peak memory on 2 and 4 P100 (11 GB, PCIe) of a single device, the layered expert,
             `hierarchical`, `trinity`, and `mcmc` in the same space, for time and for MDPE (their table 4, figures 6 to 8); the
             time of 100 batches of the learned searches (their table 5); each plan in Trinity's own simulator beside ours
convergence  mean rewards of the batches that PPO and REINFORCE learn from, with Trinity's networks, three seeds (their figure 5)
rates        the reward and the cost after --batches with learning rates from theirs, 0.1, down to 0.001
placement    where `trinity` put NMT, by layer and time step (their figure 4)

`hierarchical` minimises the step time, as its paper does, and `trinity` MDPE with the published weights and limits (8 GB sent and
8 GB held by a device). The cost of MDPE is in seconds: the step time where both limits are met. Everything is simulated; the
published figures are measured, with TensorFlow 1.15. CSV columns of --published: model, batch, gpus, expert_s, and
METHOD_s, METHOD_comm_gb, METHOD_mem_gb of hierarchical and trinity. Every cell is a row that is written when it is there; the same
command goes on where it was stopped.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from pathlib import Path

import jax
import numpy as np
from csv_files import read_table
from paper_problems import Case, search
from paper_tables import CASE_COLUMNS, PUBLISHED_FILES, Rows, figure, guarded, markdown, note, parser_of, positive_int, show

from soapjax.helpers.files import write_text_atomic
from soapjax.search.experts.layers import layers_of, steps_of
from soapjax.search.experts.placement import devices_of, operator_seconds
from soapjax.search.learned.learned_planners import HIERARCHICAL, TRINITY, Method, batches_of, learned, placement_starts
from soapjax.search.objective import TIME, Objective
from soapjax.search.problem import Budget, PlanningProblem, SearchResult

CLUSTER = "p100_pcie"
LIMIT = "8GB"  # of what a device sends, and of what it holds: their section 5.2
MDPE = Objective("mdpe", max_bytes=LIMIT, max_memory=LIMIT)
# Workload -> their name, batch and numbers of GPUs.
PUBLISHED = {
    "inception_v3": ("inception_v3", 64, (2, 4)), "gnmt_2layer": ("gnmt_2layer", 64, (2, 4)), "nmt": ("nmt_2layer", 64, (2, 4)),
    "nasnet_large": ("nasnet_large", 8, (2, 4)), "nasnet_large_32": ("nasnet_large", 32, (4,)),
    "pnasnet_large": ("pnasnet_large", 8, (2, 4)),
}  # fmt: skip
PLANNERS = {  # column -> planner and objective
    "single": ("single_device", MDPE), "expert": ("layered_expert", MDPE), "hierarchical": ("hierarchical", TIME),
    "trinity": ("trinity", MDPE), "mcmc": ("mcmc", TIME), "mcmc_mdpe": ("mcmc", MDPE),
}  # fmt: skip
LEARNED = {"hierarchical": HIERARCHICAL, "trinity": TRINITY}
PARTS = ("table", "convergence", "rates", "placement")
RATES = (0.1, 0.03, 0.01, 0.003, 0.001)
DIFFERENT = 0.15  # of the published figure: more is listed


def arguments(argv=None):
    parser = parser_of(__doc__, seconds=None)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=list(PUBLISHED), default=list(PUBLISHED), metavar="MODEL")
    parser.add_argument("--devices", nargs="+", type=int, choices=(2, 4), default=[2, 4])
    parser.add_argument("--planners", nargs="+", choices=list(PLANNERS), default=list(PLANNERS))
    parser.add_argument("--batches", type=positive_int, default=100, help="of placements that a search learns from")
    parser.add_argument("--groups", type=positive_int, default=TRINITY.recipe.num_groups, help="of the partition network")
    parser.add_argument("--proposals", type=positive_int, default=8192, help="of a search by mcmc")
    parser.add_argument("--seeds", type=positive_int, default=3, help="of curves")
    parser.add_argument("--published", type=Path, default=PUBLISHED_FILES / "trinity.csv", help="a CSV of the paper's table 4")
    return parser.parse_args(argv)


def cases(options) -> list[Case]:
    return [
        Case(model, CLUSTER, d, "paper", options.tiny)
        for model in options.models for d in PUBLISHED[model][2] if d in options.devices
    ]  # fmt: skip


def size_of_batch(method: Method) -> int:
    return method.recipe.partitions * method.recipe.placements


# --- table


def judge(column: str, problem: PlanningProblem, options) -> dict:
    """One planner's plan, and how it stands with MDPE."""
    planner, objective = PLANNERS[column]
    problem = dataclasses.replace(problem, objective=objective)
    begin = time.monotonic()
    if column in LEARNED:
        method = with_groups(LEARNED[column], options.groups)
        budget = Budget(len(placement_starts(jax.random.key(0), problem, Budget())) + options.batches * size_of_batch(method))
        result = learned_search(method, problem, budget, options.seed)
    else:
        result = search(planner, problem, Budget(options.proposals if planner == "mcmc" else None), options.seed)
    best = dataclasses.replace(problem, objective=MDPE).evaluate([result.best.strategy])[0]
    queues = problem.simulator.timeline(best.strategy, order="trinity").makespan_s
    return dict(
        step_s=best.step_time_s, sent_gb=best.sent_bytes / 1e9, memory_gb=best.memory_bytes / 1e9, cost_s=best.cost,
        fits=int(best.memory_bytes <= problem.usable_memory_bytes), within_limits=int(best.is_feasible), queues_s=queues,
        placements=result.num_proposals, search_s=time.monotonic() - begin, note=result.notes[0] if result.notes else "",
        placed_on="".join(map(str, devices_of(problem, best.strategy))) if column == "trinity" else "",
    )  # fmt: skip


def with_groups(method: Method, groups: int) -> Method:
    return method._replace(recipe=method.recipe._replace(num_groups=groups))


def learned_search(method: Method, problem: PlanningProblem, budget: Budget, seed: int) -> SearchResult:
    result = learned(method, jax.random.key(seed), problem, budget)
    if result.stopped_by == "interrupted":
        raise KeyboardInterrupt
    return result


def table(options) -> None:
    columns = ("planner", *CASE_COLUMNS, "seed", "budget", "groups")
    rows = Rows(options.results / "trinity.csv", columns, again=options.again)
    published = published_rows(options)
    try:
        for case in cases(options):
            problem = None
            for planner in options.planners:
                key = key_of(planner, case, options)
                if rows.find(key) is None:
                    problem = problem or case.problem()
                    found = rows.get(key, lambda p=planner, q=problem: judge(p, q, options))
                    note(f"{planner} on {case}: {float(found['step_s']):.4g} s, cost {float(found['cost_s']):.4g} s")
            jax.clear_caches()
    finally:
        report(rows, published, options)


def key_of(planner: str, case: Case, options) -> dict:
    """A row's arguments: only those that its planner depends on."""
    is_learned = planner in LEARNED
    budget = f"{options.batches} batches" if is_learned else f"{options.proposals} proposals" if planner.startswith("mcmc") else ""
    groups = options.groups if is_learned else None
    return dict(planner=planner) | case.key() | dict(seed=options.seed, budget=budget, groups=groups)


def published_rows(options) -> dict[tuple[str, int], dict]:
    """Their rows by workload and number of GPUs."""
    by_name = {(r["model"], int(r["batch"]), int(r["gpus"])): r for r in read_table(options.published)}
    return {
        (model, gpus): by_name[name, batch, gpus]
        for model, (name, batch, numbers) in PUBLISHED.items() for gpus in numbers if (name, batch, gpus) in by_name
    }  # fmt: skip


def report(rows: Rows, published: dict, options) -> None:
    """results/trinity.md from the rows that are there."""
    lines, learning, differences = [], [], []
    wins = {"trinity at most hierarchical": [0, 0], "mcmc_mdpe at most both": [0, 0]}
    every = [Case(m, CLUSTER, d, "paper", options.tiny) for m in PUBLISHED for d in PUBLISHED[m][2]]
    for case in every:
        found = {p: rows.find(key_of(p, case, options)) for p in PLANNERS}
        found = {p: r for p, r in found.items() if r is not None}
        if not found:
            continue
        theirs = published.get((case.model, case.devices), {})
        named = dict(workload=case.model, gpus=case.devices)
        line = dict(named)
        for p, r in found.items():
            mark = "" if r["fits"] == "1" else " *"
            line[p] = f"{float(r['step_s']):.3g} / {float(r['sent_gb']):.2g} / {float(r['memory_gb']):.3g}{mark}"
            if p in LEARNED:
                batches = options.batches
                each = float(r["search_s"]) / batches
                rate = float(r["placements"]) / float(r["search_s"])
                learning.append(
                    named | dict(planner=p, placements=r["placements"], placements_per_s=rate, seconds_per_100_batches=100 * each,
                                 found_by=r["note"].rpartition("the best is ")[2])
                )  # fmt: skip
        for p in ("expert", "hierarchical", "trinity"):
            if theirs.get(f"{p}_s"):
                parts = [theirs.get(f"{p}_{x}", "") for x in ("s", "comm_gb", "mem_gb")]
                line[f"{p}_published"] = " / ".join(x for x in parts if x)
            for ours, column in (("step_s", "s"), ("sent_gb", "comm_gb"), ("memory_gb", "mem_gb")):
                if p in found and theirs.get(f"{p}_{column}"):
                    ratio = float(found[p][ours]) / float(theirs[f"{p}_{column}"])
                    if abs(ratio - 1) > DIFFERENT:
                        differences.append(named | dict(planner=p, figure=ours, ours_to_theirs=ratio))
        lines.append(line)
        cost = {p: float(r["cost_s"]) for p, r in found.items()}
        if {"trinity", "hierarchical"} <= cost.keys():
            count(wins["trinity at most hierarchical"], cost["trinity"] <= cost["hierarchical"] * (1 + 1e-6))
            if "mcmc_mdpe" in cost:
                both = min(cost["trinity"], cost["hierarchical"])
                count(wins["mcmc_mdpe at most both"], cost["mcmc_mdpe"] <= both * (1 + 1e-6))
    if not lines:
        return
    order = [c for p in PLANNERS for c in (p, f"{p}_published")]
    columns = ("workload", "gpus", *(c for c in order if any(c in line for line in lines)))
    show("run time s / peak communication GB / peak memory GB", columns, lines)
    parts = [
        "# Trinity\n",
        f"`scripts/trinity_tables.py`, {options.batches} batches of {size_of_batch(TRINITY)} placements, {options.groups} groups, "
        f"seed {options.seed}{', tiny sizes' if options.tiny else ''}; mcmc {options.proposals} proposals. Seconds per step, GB "
        "sent by the device that sends most, GB held by the device that holds most; all simulated, published figures measured. "
        "`*`: does not fit into 11 GB.\n",
        markdown(columns, lines),
        "\n" + "\n".join(f"MDPE cost of {name}: {a} of {b} cells." for name, (a, b) in wins.items()) + "\n",
    ]
    if learning:
        parts += ["\n## Learning\n", markdown(tuple(learning[0]), learning)]
    orders = queues_of(rows, every, options)
    if orders:
        parts += ["\n## Trinity's own simulator, beside ours\n", markdown(tuple(orders[0]), orders)]
    if differences:
        title = f"\n## More than {DIFFERENT:.0%} from the published figures\n"
        parts += [title, CAUSES, markdown(tuple(differences[0]), differences)]
    write_text_atomic(options.results / "trinity.md", "\n".join(parts))


CAUSES = (
    "Known causes of times: ours are a roofline of datasheet figures for a compiled program, theirs were measured with TensorFlow "
    "1.15; how much that does is not known. Of communication and memory: cause unknown.\n"
)


def count(pair: list[int], is_so: bool) -> None:
    pair[0] += is_so
    pair[1] += 1


def queues_of(rows: Rows, every: list[Case], options) -> list[dict]:
    found = []
    for case in every:
        line = dict(workload=case.model, gpus=case.devices)
        for p in ("expert", "hierarchical", "trinity"):
            r = rows.find(key_of(p, case, options))
            if r is not None and r.get("queues_s"):
                line[f"{p}_ours_s"], line[f"{p}_queues_s"] = float(r["step_s"]), float(r["queues_s"])
        if len(line) > 2:
            found.append(line)
    widest = max(found, key=len, default={})
    return [{k: line.get(k) for k in widest} for line in found]


# --- convergence and rates


def curve(case: Case, method: Method, seed: int, batches: int) -> list[dict]:
    """Of every batch: the mean reward, the lowest cost of all so far, seconds since learning began."""
    problem = dataclasses.replace(case.problem(), objective=MDPE)
    key = jax.random.key(seed)
    starts = placement_starts(key, problem, Budget())
    found, lowest, begin = [], float("inf"), time.monotonic()
    for number, batch in enumerate(itertools.islice(batches_of(key, problem, method, starts), batches)):
        lowest = min(lowest, *(e.cost for e in batch.found))
        found.append(dict(batch=number, reward=float(batch.rewards.mean()), best_cost_s=lowest, elapsed_s=time.monotonic() - begin))
    return found


def curves(rows: Rows, case: Case, key: dict, method: Method, options) -> list[dict]:
    """The rows of one run, computed where they are missing."""
    made = [rows.find(key | dict(batch=b)) for b in range(options.batches)]
    if None not in made:
        return made
    note("learning " + " ".join(f"{k}={v}" for k, v in key.items()))
    return [rows.add(key | r) for r in curve(case, method, int(key["seed"]), options.batches)]


def convergence(options) -> None:
    columns = ("method", *CASE_COLUMNS, "seed", "groups", "batch")
    rows = Rows(options.results / "trinity_convergence.csv", columns, again=options.again)
    models = [m for m in options.models if m in ("nmt", "inception_v3", "nasnet_large")]
    devices = max(options.devices)
    drawn = options.results / "trinity_convergence.png"
    with figure(drawn, ncols=max(len(models), 1), figsize=(5 * max(len(models), 1), 4)) as axes:
        for i, model in enumerate(models):
            case = Case(model, CLUSTER, devices, "paper", options.tiny)
            for name, colour in (("ppo", "C0"), ("reinforce", "C1")):
                recipe = TRINITY.recipe._replace(method=name, num_groups=options.groups)
                of_seeds = []
                for seed in range(options.seeds):
                    key = dict(method=name) | case.key() | dict(seed=seed, groups=options.groups)
                    of_seeds.append([float(r["reward"]) for r in curves(rows, case, key, TRINITY._replace(recipe=recipe), options)])
                if axes is None:
                    continue
                placements = (np.arange(options.batches) + 1) * size_of_batch(TRINITY)
                for rewards in of_seeds:
                    axes[0, i].plot(placements, rewards, color=colour, alpha=0.3)
                axes[0, i].plot(placements, np.mean(of_seeds, axis=0), color=colour, label=name)
                axes[0, i].set(title=f"{model}, {devices} GPUs", xlabel="placements simulated", ylabel="mean reward of a batch")
                axes[0, i].legend()


def rates(options) -> None:
    columns = ("rate", "method", *CASE_COLUMNS, "seed", "groups", "batch")
    rows = Rows(options.results / "trinity_rates.csv", columns, again=options.again)
    lines = []
    for model in options.models:
        case = Case(model, CLUSTER, max(options.devices), "paper", options.tiny)
        for column, method in LEARNED.items():
            for rate in RATES:
                recipe = method.recipe._replace(learning_rate=rate, num_groups=options.groups)
                key = dict(rate=rate, method=column) | case.key() | dict(seed=options.seed, groups=options.groups)
                last = curves(rows, case, key, method._replace(recipe=recipe), options)[-1]
                lines.append(
                    dict(workload=model, planner=column, rate=rate, mean_reward=last["reward"], best_cost_s=last["best_cost_s"])
                )
    show("learning rates", ("workload", "planner", "rate", "mean_reward", "best_cost_s"), lines)


# --- placement


def placement(options) -> None:
    """NMT by layer and time step, each in the colour of the device that does most of it."""
    case = Case("nmt", CLUSTER, max(options.devices), "paper", options.tiny)
    columns = ("planner", *CASE_COLUMNS, "seed", "budget", "groups")
    row = Rows(options.results / "trinity.csv", columns).find(key_of("trinity", case, options))
    if row is None or not row.get("placed_on"):
        note("no placement of NMT drawn: compute its row of the table first (--parts table --models nmt --planners trinity)")
        return
    problem = case.problem()
    graph, seconds = problem.graph, operator_seconds(problem)
    layers, steps = layers_of(graph), steps_of(graph)[1]
    numbers = {s: i for i, s in enumerate(sorted({s for s in steps if s}))}
    work = np.zeros((len(layers), max(len(numbers), 1), case.devices))
    for i, layer in enumerate(layers):
        for n in layer.operators:
            where = [numbers[steps[n]]] if steps[n] else range(work.shape[1])
            work[i, where, int(row["placed_on"][n])] += seconds[n] + 1e-30
    shown = np.where(work.sum(2) > 0, work.argmax(2), np.nan)
    with figure(options.results / "trinity_placement.png", figsize=(9, 1 + 0.3 * len(layers))) as axes:
        if axes is not None:
            image = axes[0, 0].imshow(shown, aspect="auto", cmap="tab10", vmin=-0.5, vmax=9.5, interpolation="nearest")
            axes[0, 0].set(xlabel="time step", title=f"{case.model} on {case.devices} GPUs, by device (planner trinity)")
            axes[0, 0].set_yticks(range(len(layers)), [layer.name for layer in layers])
            bar = axes[0, 0].figure.colorbar(image, ax=axes[0, 0], ticks=range(case.devices))
            bar.ax.set_ylim(-0.5, case.devices - 0.5)


def run(options) -> None:
    for part in PARTS:
        if part in options.parts:
            dict(table=table, convergence=convergence, rates=rates, placement=placement)[part](options)


def main(argv=None) -> int:
    return guarded(run, arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
