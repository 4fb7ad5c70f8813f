"""The best strategy that a proof has found so far, and how it is made better: descents, and perturbations of what they end at."""

from __future__ import annotations

import time

import numpy as np

from soapjax.search.problem import Budget, Evaluation, PlanningProblem
from soapjax.search.proofs.paths import unflat
from soapjax.search.relaxation.elimination import eliminate, factors_of, order_of
from soapjax.search.relaxation.relaxed import Relaxation
from soapjax.strategy.configs import Strategy

PROOF = 1e-5  # relative: what is proven is that no strategy is faster by more
_PERTURBATIONS = 80


class Incumbent:
    """The incumbent, and what has been simulated."""

    def __init__(self, problem: PlanningProblem, budget: Budget):
        self.problem, self.budget, self.begin = problem, budget, time.monotonic()
        self.deadline = np.inf if budget.seconds is None else self.begin + budget.seconds
        self.best: Evaluation | None = None
        self.evaluated = 0
        self.known: set[bytes] = set()

    def simulate(self, strategies: list[Strategy]) -> list[Evaluation]:
        """Evaluations of those that have not been simulated before."""
        new = list({s.key(): s for s in strategies if s.key() not in self.known}.values())
        self.known |= {s.key() for s in new}
        out = self.problem.evaluate(new) if new else []
        self.evaluated += len(out)
        self.best = min([*([] if self.best is None else [self.best]), *out], key=lambda e: e.rank)
        if self.budget.progress is not None:
            self.budget.progress(self.evaluated, self.best.step_time_s, time.monotonic() - self.begin)
        return out

    @property
    def limit(self) -> float:
        """Bounds from here on are good enough."""
        return self.best.cost * (1 - PROOF) if self.best is not None and self.best.is_feasible else np.inf

    def stopped_by(self) -> str | None:
        if self.budget.num_proposals is not None and self.evaluated >= self.budget.num_proposals:
            return "proposals"
        if time.monotonic() > self.deadline:
            return "seconds"
        return None


def descend(search: Incumbent, root: Relaxation, keep: list[np.ndarray], start: Evaluation) -> Evaluation:
    """Changes one operator at a time for the better, all its candidates simulated, until none helps."""
    best, improved = start, True
    while improved and search.stopped_by() is None:
        before = best.rank
        for n, c in enumerate(root.candidates):
            if search.stopped_by() is not None:
                return best
            trial = [best.strategy.but(n, c.axes[k], c.storage[k]) for k in keep[n]]
            best = min([best, *search.simulate(trial)], key=lambda e: e.rank)
        improved = best.rank < before
    return best


def perturb(search: Incumbent, root: Relaxation, keep: list[np.ndarray], weights: np.ndarray) -> None:
    """Better incumbents: minimisers between a bound's flow and the plain sum, and random changes of a few neighbours, improved.

    Takes at most half of the proposals.
    """
    allowed = np.inf if search.budget.num_proposals is None else search.budget.num_proposals / 2
    rng = np.random.default_rng(0)
    for share in (0.02, 0.1, 0.3):
        pairwise = root.pairwise(unflat((1 - share) * weights + share, root.weights()))
        order, cut = order_of(pairwise)
        choice = eliminate(factors_of(pairwise), order + cut).choice({}, len(pairwise.costs))
        found = search.simulate([root.strategy(pairwise, choice)])
        if found:
            descend(search, root, keep, found[0])
        if search.stopped_by() is not None:
            return
    near: list[list[int]] = [[n] for n in range(len(keep))]
    for a, b in root.pairwise().tables:
        near[a].append(b)
        near[b].append(a)
    current = search.best
    for _ in range(_PERTURBATIONS):
        if search.stopped_by() is not None or search.evaluated > allowed:
            break
        around = near[rng.integers(len(near))]
        changed = current.strategy
        for n in rng.permutation(around)[: rng.integers(2, 5)].tolist():
            k, c = int(rng.choice(keep[n])), root.candidates[n]
            changed = changed.but(n, c.axes[k], c.storage[k])
        found = search.simulate([changed])
        if found:
            improved = descend(search, root, keep, found[0])
            current = improved if improved.cost <= current.cost * (1 + 2e-3) else current
            current = search.best if rng.random() < 0.2 else current
