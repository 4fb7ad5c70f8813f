"""How good the search is: against proven optima, and against all neighbours of what it found; the paper's section 8.4.

    python scripts/optimality.py --seconds 10

The paper (Jia, Zaharia and Aiken, 2019, section 8.4) finds the proven optimum of LeNet and of an RNNLM of two steps on four
devices, and for all six networks, on 2, 4 and 8 devices, a strategy that no change of one operator improves.

Global: `exhaustive` (branch and bound, --exhaustive-seconds) beside `mcmc`; `mcmc_optimum` is 1 where the search found it.
Local: every config and every storage of every operator is judged beside the best strategy known; where one is better, the best
one of that operator is taken, and so on until a whole round finds none. `improvements` counts them: 0 says that what the search
had found was locally optimal. Better means by more than 1e-5, which is what float32 tells apart.
"""

from __future__ import annotations

import sys
import time
from typing import NamedTuple

import numpy as np
from paper_problems import PAPER_MODELS, WORKLOADS, BestKnown, Case, search
from paper_tables import BUDGET_COLUMNS, CASE_COLUMNS, Rows, budget_of, guarded, parser_of, positive_float, positive_int, show

from soapjax.search.chain.engine import Engine
from soapjax.search.chain.neighbourhood import Position
from soapjax.search.problem import Budget, Evaluation, PlanningProblem

BETTER = 1e-5  # relative
GLOBAL_MODELS = ("lenet", "rnnlm_2_steps")


def arguments(argv=None):
    parser = parser_of(__doc__)
    parser.add_argument("--global-models", nargs="*", choices=list(WORKLOADS), default=list(GLOBAL_MODELS), metavar="MODEL")
    parser.add_argument("--global-devices", nargs="+", type=positive_int, default=[4])
    parser.add_argument("--exhaustive-seconds", type=positive_float, default=600.0)
    parser.add_argument("--models", nargs="*", choices=list(WORKLOADS), default=list(PAPER_MODELS), metavar="MODEL")
    parser.add_argument("--devices", nargs="+", type=positive_int, default=[2, 4, 8])
    return parser.parse_args(argv)


class Descent(NamedTuple):
    end: Evaluation
    improvements: int
    judged: int
    seconds: float


class Neighbours:
    """Judges all neighbours of a strategy."""

    def __init__(self, problem: PlanningProblem):
        self.problem, self.engine = problem, Engine(problem)
        by_options: dict[bytes, np.ndarray] = {}
        self.candidates = []  # N of (axes int8 [Q, A], storage int8 [Q])
        space = problem.space
        for n in range(problem.graph.num_operators):
            options = space.allowed[n].tobytes() + space.divisors[n].tobytes() + bytes([space.may_pin(n)])
            if options not in by_options:
                by_options[options] = np.array(list(space.configs(n)), np.int8).reshape(-1, space.num_axes)
            axes = by_options[options]
            storages = np.arange(len(space.storages) if space.owns_parameters[n] else 1, dtype=np.int8)
            self.candidates.append((np.repeat(axes, len(storages), axis=0), np.tile(storages, len(axes))))

    def costs(self, position: Position, n: int) -> np.ndarray:
        """Of all candidates of operator `n`."""
        return self.engine.judged(position, n, *self.candidates[n]).cost_s

    def descend(self, start: Evaluation) -> Descent:
        """Takes improving neighbours until there is none."""
        begin, now, improvements, judged = time.monotonic(), start, 0, 0
        position = self.engine.at(now.strategy)
        quiet, n, count = 0, 0, len(self.candidates)
        while quiet < count:
            costs = self.costs(position, n)
            judged += len(costs)
            moved = False
            for q in np.argsort(costs)[:3]:  # the simulator has the last word
                if costs[q] >= now.cost * (1 - BETTER):
                    break
                changed = now.strategy.but(n, self.candidates[n][0][q], self.candidates[n][1][q])
                tried = self.problem.evaluate([changed])[0]
                if tried.cost < now.cost * (1 - BETTER):
                    now, moved = tried, True
                    position = self.engine.at(now.strategy)
                    improvements += 1
                    break
            quiet = 0 if moved else quiet + 1
            n = (n + 1) % count
        return Descent(now, improvements, judged, time.monotonic() - begin)


def global_row(case: Case, options) -> dict:
    problem = case.problem()
    budget, _ = budget_of(options)
    ours = search("mcmc", problem, budget, options.seed)
    proof = search("exhaustive", problem, Budget(seconds=options.exhaustive_seconds), options.seed)
    return dict(
        operators=problem.graph.num_operators,
        mcmc_s=ours.best.cost,
        exhaustive_s=proof.best.cost,
        mcmc_optimum=ours.best.cost / proof.best.cost,
        is_proven=int(proof.stopped_by == "complete"),
        note=" ".join(proof.notes),
        mcmc_search_s=ours.search_s,
        exhaustive_search_s=proof.search_s,
    )


def local_row(case: Case, options, known: BestKnown) -> dict:
    problem = case.problem()
    budget, _ = budget_of(options)
    ours = search("mcmc", problem, budget, options.seed)
    start = known.offer(case, problem, ours.best, f"optimality mcmc seed {options.seed}")
    neighbours = Neighbours(problem)
    end = neighbours.descend(start)
    known.offer(case, problem, end.end, f"optimality descent after seed {options.seed}")
    return dict(
        operators=problem.graph.num_operators,
        mcmc_s=ours.best.cost,
        start_s=start.cost,
        neighbours=sum(len(s) for _, s in neighbours.candidates),
        improvements=end.improvements,
        end_s=end.end.cost,
        gain=start.cost / end.end.cost - 1,
        judged=end.judged,
        descent_s=end.seconds,
    )


def run(options) -> None:
    _, named = budget_of(options)
    columns = (*CASE_COLUMNS, *BUDGET_COLUMNS, "exhaustive_seconds")
    first = Rows(options.results / "optimality_global.csv", columns, again=options.again)
    second = Rows(options.results / "optimality_local.csv", (*CASE_COLUMNS, *BUDGET_COLUMNS), again=options.again)
    known = BestKnown(options.results / "best_known.json")
    proven, local = [], []
    try:
        for model in options.global_models:
            for devices in options.global_devices:
                case = Case(model, "p100", devices, tiny=options.tiny)
                key = case.key() | named | dict(exhaustive_seconds=options.exhaustive_seconds)
                proven.append(first.get(key, lambda c=case: global_row(c, options)))
        for devices in options.devices:
            for model in options.models:
                case = Case(model, "p100", devices, tiny=options.tiny)
                local.append(second.get(case.key() | named, lambda c=case: local_row(c, options, known)))
    finally:
        columns = ("model", "devices", "operators", "mcmc_s", "exhaustive_s", "mcmc_optimum", "is_proven", "note")
        show("against the proven optimum", (*columns, "exhaustive_search_s"), proven)
        columns = ("model", "devices", "operators", "mcmc_s", "start_s", "neighbours", "improvements", "end_s", "gain", "descent_s")
        show("against all neighbours: none is better at the end", columns, local)


def main(argv=None) -> int:
    return guarded(run, arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
