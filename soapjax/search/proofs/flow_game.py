"""The bound of a set of candidates: the game between a flow along chains of tasks and the strategies that it bounds worst.

See branch_and_bound.py, which plays it at every node.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from soapjax.costs.evaluate import Durations
from soapjax.search.descent.incumbent import Incumbent
from soapjax.search.proofs.paths import FlowProgram, chains_of, flat, longest_paths, turning_tasks, unflat
from soapjax.search.relaxation.elimination import eliminate, factors_of, order_of
from soapjax.search.relaxation.relaxed import Relaxation
from soapjax.strategy.configs import Strategy

_GAME_ROUNDS = 14


class Node(NamedTuple):
    bound: float
    number: int  # breaks ties
    keep: list[np.ndarray]  # N of candidate indices of the root
    weights: np.ndarray  # flat: the flow that gave the bound
    seen: list[Seen]  # strategies that the flow was up against


class Seen(NamedTuple):
    choice: np.ndarray  # [N] candidate indices of the root
    durations: np.ndarray  # flat, of the relaxation that it was seen in


class Bounded(NamedTuple):
    value: float
    weights: np.ndarray
    seen: list[Seen]
    contested: np.ndarray  # [N] seconds by which the durations of each operator differ among those that the best flow is up against


def bounded(search: Incumbent, relaxation: Relaxation, node: Node) -> Bounded:
    """The best bound of some rounds of the game, from where the node's parent left it; the strategies seen are simulated."""
    weights = node.weights
    tables = relaxation.problem.simulator.tables
    active = active_durations(relaxation)
    chains = chains_of(tables, active)
    program = FlowProgram(chains)
    if not len(weights):
        costs = relaxation.problem.simulator.costs(search.best.strategy).durations
        weights = longest_paths(chains, flat(costs))[1]
    order = sum(order_of(relaxation.pairwise()), [])
    best, best_weights = -np.inf, weights
    seen = [s for s in node.seen if all((k == c).any() for k, c in zip(node.keep, s.choice, strict=True))]
    strategies: list[Strategy] = []
    mixture = np.ones(len(seen))
    for _ in range(_GAME_ROUNDS):
        pairwise = relaxation.pairwise(unflat(weights, active))
        found = eliminate(factors_of(pairwise), order)
        gained = found.value - best
        if found.value > best:
            best, best_weights = found.value, weights
        if best >= search.limit:
            break
        choice = found.choice({}, len(pairwise.costs))
        strategies.append(relaxation.strategy(pairwise, choice))
        picked = zip(node.keep, pairwise.labels, choice, strict=True)
        seen.append(Seen(np.array([k[of[c]] for k, of, c in picked]), flat(relaxation.durations(strategies[-1]))))
        weights, most, mixture = program.best([s.durations for s in seen])
        if most < search.limit and most - best < 0.1 * (search.limit - best) and gained < 0.02 * (search.limit - best):
            break
        weights = 0.5 * weights + 0.5 * best_weights
    search.simulate(strategies)
    contested = np.zeros(len(relaxation.candidates))
    if strategies and best < search.limit:
        share = mixture / max(mixture.sum(), 1e-30)
        d = np.array([s.durations for s in seen])
        differs = share @ np.abs(d - share @ d)  # flat
        operators = _operators_of(relaxation)
        for i in np.flatnonzero(differs).tolist():
            contested[operators[i]] += differs[i]
        # Where the longest chain turns at a task that may be inactive, the flow could not follow it.
        d = seen[int(share.argmax())].durations
        whole = chains_of(tables, unflat(d > 0, active))
        certain = flat(active)
        missing = longest_paths(whole, d)[0] - best
        for i in turning_tasks(whole, d):
            if not certain[i]:
                contested[operators[i]] += missing
    # Those that matter, and the latest.
    kept = {i for i, m in enumerate(mixture) if m > 0} | set(range(len(seen) - 6, len(seen)))
    return Bounded(best, best_weights, [s for i, s in enumerate(seen) if i in kept], contested)


def _operators_of(relaxation: Relaxation) -> list[list[int]]:
    """The operators that decide each duration (flat)."""
    like = relaxation.weights()
    out: list[list[int]] = [[] for _ in range(sum(x.size for x in like))]
    start = dict(zip(like._fields, np.cumsum([0, *(x.size for x in like[:-1])]).tolist(), strict=True))
    for t in relaxation.terms:
        field = getattr(like, t.kind)
        width = field[0].size
        for i in range(width):
            out[start[t.kind] + t.place * width + i] = [n for n in (t.a, t.b) if n >= 0]
    return out


def active_durations(relaxation: Relaxation) -> Durations:
    """Which durations are positive whatever is chosen."""
    active = relaxation.weights(0.0)
    for t in relaxation.terms:
        rows = t.seconds[np.unique(t.of_a)][:, np.unique(t.of_b)]
        getattr(active, t.kind)[t.place] = (rows > 0).all(axis=(0, 1)) if t.kind != "compute_s" else bool((rows > 0).all())
    return active


def candidate_marginals(relaxation: Relaxation, weights: np.ndarray) -> list[np.ndarray]:
    """N of [K]: the bound with each candidate chosen."""
    pairwise = relaxation.pairwise(unflat(weights, relaxation.weights()))
    order, cut = order_of(pairwise)
    found = eliminate(factors_of(pairwise), order + cut)
    if not found.is_exact:
        return [np.full(len(c.storage), found.value) for c in relaxation.candidates]
    of_class = found.min_marginals()
    out = []
    for n, (own, labels, classes) in enumerate(zip(pairwise.own_costs, pairwise.labels, relaxation.classes, strict=True)):
        out.append(of_class[n][classes] + own - own[labels][classes])
    return out
