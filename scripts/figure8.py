"""What makes the difference: step time, bytes moved and total compute of NMT on 64 K80, in simulation: the paper's figure 8.

    python scripts/figure8.py --seconds 60

The paper (Jia, Zaharia and Aiken, 2019, section 8.2.1) breaks down data parallelism, the expert-designed strategy (Wu et al.
2016) and its own: 1.7 to 2.4 times less time per iteration than both, with 2 to 5.5 times less data moved than they do, and
less total compute than data parallelism where splitting other dims keeps kernels efficient.

Columns: seconds per step; bytes that all devices send in a step; seconds of compute, summed over devices. The search has the
space "soap" unless --space says otherwise.
"""

from __future__ import annotations

import sys

import numpy as np
from paper_problems import CLUSTERS, SPACES, WORKLOADS, BestKnown, Case, expert_of, search
from paper_tables import BUDGET_COLUMNS, CASE_COLUMNS, Rows, budget_of, figure, guarded, parser_of, positive_int, show

from soapjax.costs.rules.links import COLLECTIVES
from soapjax.costs.rules.many_reshards import reshard_costs
from soapjax.search.problem import Budget, Evaluation, PlanningProblem
from soapjax.strategy.configs import Strategy
from soapjax.strategy.layout import PARTIAL, PINNED

PANELS = {"step_time_s": "seconds per step", "moved_bytes": "bytes moved per step", "compute_device_s": "device-seconds of compute"}


def moved_bytes(problem: PlanningProblem, strategy: Strategy) -> float:
    """Bytes that all devices together send in a step.

    `bytes_by_collective` is what a device sends that takes part in everything; where pins leave devices out, count those.
    """
    tables, costs = problem.simulator.tables, problem.simulator.costs(strategy)
    num_devices = problem.space.mesh.num_devices
    per_device = float(costs.bytes_by_collective.sum())
    if not problem.space.offers_pins:
        return per_device * num_devices
    layouts = costs.layouts
    home = layouts.home[tables.edge_tensor]
    target = layouts.slots[tables.edge_slot]
    target = np.where(target == PARTIAL, home, target)
    source = np.concatenate([layouts.raw, home])
    target = np.concatenate([np.where(layouts.raw == PARTIAL, layouts.home, layouts.raw), target])
    size = np.concatenate([tables.resolve_bytes, tables.edge_bytes])
    times = np.concatenate([tables.tensor_trips * tables.may_be_partial, tables.edge_trips * ~layouts.is_shared])
    found = reshard_costs(source, target, size, tables.links)
    sent = np.asarray(found.bytes, np.float64) * times[:, None]
    sizes = np.array(problem.space.mesh.axis_sizes)

    def devices(mask: np.ndarray) -> np.ndarray:
        return np.where(mask, sizes, 1).prod(axis=1)

    transfer, gather = COLLECTIVES.index("transfer"), COLLECTIVES.index("all-gather")
    senders = np.repeat(devices(source > PINNED)[:, None], len(COLLECTIVES), axis=1)
    senders[:, transfer] = devices((source > PINNED) & ~((source >= 0) & (target <= PINNED)))
    senders[:, gather] = devices(target > PINNED)
    inner_sums = max(0.0, per_device - sent.sum())  # in the middle of operators, which no expert pins
    return float((sent * senders).sum()) + inner_sums * num_devices


def compute_device_s(problem: PlanningProblem, strategy: Strategy) -> float:
    """Seconds that all devices together compute in a step."""
    costs = problem.simulator.costs(strategy)
    seconds = np.asarray(costs.durations.compute_s, np.float64)
    if costs.holders is None:
        return float(seconds.sum()) * problem.space.mesh.num_devices
    return float((seconds * np.asarray(costs.holders.compute).sum(axis=1)).sum())


def arguments(argv=None):
    parser = parser_of(__doc__, seconds=60.0)
    parser.add_argument("--model", choices=list(WORKLOADS), default="nmt", metavar="MODEL")
    parser.add_argument("--cluster", choices=list(CLUSTERS), default="k80")
    parser.add_argument("--devices", type=positive_int, default=64)
    parser.add_argument("--space", choices=SPACES, default="soap", help="of the search")
    return parser.parse_args(argv)


def figures(problem: PlanningProblem, found: Evaluation) -> dict:
    return dict(
        step_time_s=found.step_time_s,
        moved_bytes=moved_bytes(problem, found.strategy),
        compute_device_s=compute_device_s(problem, found.strategy),
        memory_bytes=found.memory_bytes,
        fits=int(found.is_feasible),
    )


def run(options) -> None:
    columns = ("planner", *CASE_COLUMNS, *BUDGET_COLUMNS)
    rows = Rows(options.results / "figure8.csv", columns, again=options.again)
    known = BestKnown(options.results / "best_known.json")
    budget, named = budget_of(options)
    expert, expert_space = expert_of(options.model)
    case = Case(options.model, options.cluster, options.devices, options.space, options.tiny)
    plans = (
        ("data_parallel", case._replace(space="soap"), Budget()),
        (expert, case._replace(space=expert_space), Budget()),
        ("mcmc", case, budget),
    )  # fmt: skip
    made = []
    try:
        for planner, at, spent in plans:

            def compute(planner=planner, at=at, spent=spent) -> dict:
                problem = at.problem()
                result = search(planner, problem, spent, options.seed)
                if planner == "mcmc":
                    known.offer(at, problem, result.best, f"figure8 mcmc seed {options.seed}")
                return figures(problem, result.best) | dict(search_s=result.search_s, searched=result.num_proposals)

            made.append(rows.get(dict(planner=planner) | at.key() | (named if planner == "mcmc" else {}), compute))
    finally:
        show(str(case), ("planner", "space", *PANELS, "memory_bytes", "fits", "search_s"), made)
        if made:
            with figure(options.results / "figure8.png", ncols=3, figsize=(10, 3)) as axes:
                for ax, (column, title) in zip(axes[0] if axes is not None else [], PANELS.items(), strict=False):
                    names, heights = [r["planner"] for r in made], [float(r[column]) for r in made]
                    ax.bar(names, heights, color=["tab:blue", "tab:green", "tab:red"][: len(made)])
                    ax.set_title(title)


def main(argv=None) -> int:
    return guarded(run, arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
