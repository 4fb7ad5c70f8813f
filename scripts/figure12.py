"""Best cost found over search time, with full and with delta simulation: the paper's figure 12, for NMT on 16 P100.

    python scripts/figure12.py --seconds 30

The paper (Jia, Zaharia and Aiken, 2019, section 8.3.1) finds the same strategies with both, 2.2 to 6.9 times sooner with the
delta. Here the delta is the planner `mcmc`; the full side is a plain Metropolis-Hastings in this file: changes of one operator
at random, at the same temperatures and from the same starts, each judged by simulating the whole step (in batches: of those
drawn from one state, the first that is accepted is taken and the rest thrown away).

The CSV has a row per improvement: seconds from the start of the search (compilation included), of the processor too, the
proposals judged by then, and the step time. --proposals bounds the delta side only.
"""

from __future__ import annotations

import sys
import time
from typing import NamedTuple

import jax
import numpy as np
from paper_problems import CLUSTERS, WORKLOADS, Case, get_planner
from paper_tables import CASE_COLUMNS, Rows, budget_of, figure, guarded, parser_of, positive_int, show

from soapjax.search.chain.block_steps import exchange
from soapjax.search.chain.mcmc_planner import BETAS
from soapjax.search.chain.starting_points import starts
from soapjax.search.problem import Budget, PlanningProblem
from soapjax.simulate.simulator import BATCH
from soapjax.strategy.configs import FIRST_PIN


class Chain(NamedTuple):
    axes: np.ndarray  # int8 [N, A]
    storage: np.ndarray  # int8 [N]
    cost: float  # relative to the best start


class Improvement(NamedTuple):
    side: str
    elapsed_s: float
    cpu_s: float
    judged: int
    step_time_s: float


def arguments(argv=None):
    parser = parser_of(__doc__, seconds=30.0)
    parser.add_argument("--model", choices=list(WORKLOADS), default="nmt", metavar="MODEL")
    parser.add_argument("--cluster", choices=list(CLUSTERS), default="p100")
    parser.add_argument("--devices", type=positive_int, default=16)
    parser.add_argument("--random-start", action="store_true", help="begin at random strategies only")
    return parser.parse_args(argv)


class Proposals:
    """Draws changes of one operator: every axis and the storage anew, uniformly among what the space offers."""

    def __init__(self, problem: PlanningProblem, rng: np.random.Generator):
        space, self.rng = problem.space, rng
        self.divisors, self.sizes = space.divisors, np.array(space.mesh.axis_sizes)
        self.choices = []
        for n in range(problem.graph.num_operators):
            per_axis = [np.flatnonzero(space.allowed[n, a]) - 1 for a in range(space.num_axes)]
            if space.may_pin(n):
                pins = [FIRST_PIN - np.arange(s if s > 1 else 0) for s in self.sizes]
                per_axis = [np.concatenate(both) for both in zip(per_axis, pins, strict=True)]
            self.choices.append(per_axis)
        self.storages = np.where(space.owns_parameters, len(space.storages), 1)
        free = [n for n, c in enumerate(self.choices) if any(len(x) > 1 for x in c) or self.storages[n] > 1]
        self.free = np.array(free or [0])

    def draw(self, chain: Chain) -> tuple[np.ndarray, np.ndarray]:
        """BATCH strategies that differ from the chain's in one operator each; valid ones (axes [B, N, A], storage [B, N])."""
        axes, storage = np.repeat(chain.axes[None], BATCH, axis=0), np.repeat(chain.storage[None], BATCH, axis=0)
        for b in range(BATCH):
            n = int(self.rng.choice(self.free))
            while True:
                values = np.array([self.rng.choice(c) for c in self.choices[n]], np.int8)
                split = [np.prod(self.sizes[values == d]) for d in range(self.divisors.shape[1])]
                if (self.divisors[n] % np.array(split, int) == 0).all():
                    break
            axes[b, n], storage[b, n] = values, self.rng.integers(self.storages[n])
        return axes, storage


def metropolis(problem: PlanningProblem, budget: Budget, seed: int) -> list[Improvement]:
    """Chains at the temperatures of `mcmc`, every proposal simulated in full."""
    begin, cpu = time.monotonic(), time.process_time()
    begun = starts(jax.random.key(seed), problem, budget)
    rng = np.random.default_rng(seed)
    draws, betas = Proposals(problem, rng), np.array(BETAS)
    reference = lowest = begun[0].cost
    chains = [Chain(e.strategy.axes, e.strategy.storage, e.cost / reference) for e in (begun * len(BETAS))[: len(BETAS)]]
    done, rounds = 0, 0
    found = [Improvement("full", time.monotonic() - begin, time.process_time() - cpu, 0, lowest)]
    while budget.seconds is None or time.monotonic() - begin < budget.seconds:
        for c, beta in enumerate(betas):
            axes, storage = draws.draw(chains[c])
            scores = problem.simulator.batch(axes, storage).scores
            cost = np.asarray(problem.cost(scores), np.float64) / reference
            accepts = np.isfinite(cost) & (rng.random(BATCH) < np.exp(np.minimum(beta * (chains[c].cost - cost), 0)))
            first = int(np.argmax(accepts)) if accepts.any() else BATCH - 1
            best = float(cost[: first + 1].min()) * reference
            done += first + 1
            if best < lowest:
                lowest = best
                found.append(Improvement("full", time.monotonic() - begin, time.process_time() - cpu, done, lowest))
            if accepts.any():
                chains[c] = Chain(axes[first], storage[first], float(cost[first]))
        rounds += 1
        chains = exchange(rng, chains, betas, rounds % 2)
    return [*found, Improvement("full", time.monotonic() - begin, time.process_time() - cpu, done, lowest)]


def delta(problem: PlanningProblem, budget: Budget, seed: int) -> list[Improvement]:
    """The planner's history."""
    cpu, found = time.process_time(), []

    def progress(done: int, best_s: float, elapsed_s: float) -> None:
        if not found or best_s < found[-1].step_time_s:
            found.append(Improvement("delta", elapsed_s, time.process_time() - cpu, done, best_s))

    result = get_planner("mcmc")(jax.random.key(seed), problem, budget._replace(progress=progress))
    if result.stopped_by == "interrupted":
        raise KeyboardInterrupt
    first = Improvement("delta", result.history[0][1], 0.0, 0, result.history[0][2])
    end = Improvement("delta", result.search_s, time.process_time() - cpu, result.num_proposals, result.best.cost)
    return [first, *found, end]


def run(options) -> None:
    budget, named = budget_of(options)
    columns = ("side", "number", *CASE_COLUMNS, *named, "start")
    rows = Rows(options.results / "figure12.csv", columns, again=options.again)
    case = Case(options.model, options.cluster, options.devices, tiny=options.tiny)
    budget = budget._replace(random_start=options.random_start)
    start = "random" if options.random_start else "default"
    made: dict[str, list[dict]] = {}
    try:
        for side, search in (("full", metropolis), ("delta", delta)):
            key = dict(side=side) | case.key() | named | dict(start=start)
            if side == "full":
                key |= dict(seconds=options.seconds, proposals=None)
            if rows.find(key | dict(number=0)) is None:
                spent = Budget(None, options.seconds, random_start=options.random_start) if side == "full" else budget
                found = search(case.problem(), spent, options.seed)
                rows.rows = [r for r in rows.rows if rows._key(r | dict(number="")) != rows._key(key)]
                for i, improvement in enumerate(found):
                    rows.add(dict(number=i) | key | improvement._asdict())
                jax.clear_caches()
            mine = [r for r in rows.rows if rows._key(r | dict(number="")) == rows._key(key)]
            made[side] = sorted(mine, key=lambda r: int(r["number"]))
    finally:
        report(case, made, options)


def report(case: Case, made: dict[str, list[dict]], options) -> None:
    last = [found[-1] for found in made.values()]
    for r in last:
        r["judged_per_s"] = float(r["judged"]) / max(1e-9, float(r["elapsed_s"]) - float(made[r["side"]][0]["elapsed_s"]))
    show(f"the end of both searches, {case}", ("side", "elapsed_s", "cpu_s", "judged", "judged_per_s", "step_time_s"), last)
    if len(made) == 2:
        goal = float(made["full"][-1]["step_time_s"])
        reached = [float(r["elapsed_s"]) for r in made["delta"] if float(r["step_time_s"]) <= goal]
        when = f"after {reached[0]:.2f} s" if reached else "never"
        print(f"the delta reached the best of the full simulation ({goal:.6g} s, {made['full'][-1]['elapsed_s']} s) {when}")
    if made:
        with figure(options.results / "figure12.png", figsize=(5, 3.2)) as axes:
            if axes is not None:
                for side, found in made.items():
                    x, y = [float(r["elapsed_s"]) for r in found], [float(r["step_time_s"]) for r in found]
                    axes[0, 0].step(x, y, where="post", label=f"{side} simulation")
                axes[0, 0].set(xlabel="search seconds", ylabel="best step time (s)", title=str(case))
                axes[0, 0].legend()


def main(argv=None) -> int:
    return guarded(run, arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
