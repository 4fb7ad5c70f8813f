"""Exhaustive search by branch and bound: the proven optimum of small problems, over the whole space.

A node of the tree is a set of candidates per operator. Its bound is the least weighted sum of durations, in the additive
relaxation (relaxation.py), where the weights are a flow along chains of tasks that must follow each other (paths.py): no
strategy is faster. The best flow is the solution of a game: elimination (elimination.py) answers a flow with the strategy
that it bounds worst, a linear program answers the strategies seen with the flow that bounds all of them best. Strategies
seen are simulated: the best is the incumbent. Then

* candidates whose min-marginal (the bound with that candidate chosen) is not below the incumbent go;
* what is left is enumerated and simulated where it is little, else one operator's candidates are told apart.

Fewer candidates make better bounds: more communications are known to be active, and more conversions to be shared or not.
"""

from __future__ import annotations

import heapq
import itertools
import time
from typing import NamedTuple

import numpy as np
from jax import Array

from soapjax.costs.evaluate import Durations
from soapjax.errors import Problem, SoapjaxError
from soapjax.search.baselines import BASELINES
from soapjax.search.elimination import eliminate, factors_of, order_of
from soapjax.search.optcnn import additive_start
from soapjax.search.paths import FlowProgram, chains_of, flat, longest_paths, turning_tasks, unflat
from soapjax.search.problem import Budget, Evaluation, PlanningProblem, SearchResult
from soapjax.search.relaxation import Relaxation, relax
from soapjax.strategy.strategy import Strategy

MAX_CONFIGS = 1500  # of one operator
MAX_OPERATORS = 120
PROOF = 1e-5  # relative: what is proven is that no strategy is faster by more
_LEAVES = 256  # strategies of a node that are simply simulated
_GAME_ROUNDS = 14
_EASY = 25  # nodes without which a problem is not worth kicks of its incumbent
_KICKS = 80


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


class _Search:
    """The incumbent, and what has been simulated."""

    def __init__(self, problem: PlanningProblem, budget: Budget):
        self.problem, self.budget, self.begin = problem, budget, time.monotonic()
        self.best: Evaluation | None = None
        self.evaluated = 0
        self.known: set[bytes] = set()

    def simulate(self, strategies: list[Strategy]) -> list[Evaluation]:
        """Evaluations of those that have not been simulated before."""
        new = list({s.key(): s for s in strategies if s.key() not in self.known}.values())
        self.known |= {s.key() for s in new}
        out: list[Evaluation] = []
        for k in range(0, len(new), 32):
            found = self.problem.evaluate(new[k : k + 32])
            self.evaluated += len(found)
            out += found
            every = found if self.best is None else [self.best, *found]
            self.best = min(every, key=lambda e: (not e.is_feasible, e.cost))
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
        if self.budget.seconds is not None and time.monotonic() - self.begin > self.budget.seconds:
            return "seconds"
        return None


def exhaustive(rng_key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
    """The proven optimum of the space.

    Raises: SoapjaxError where operators or their configs are too many for any hope of a proof.
    """
    _check(problem)
    search = _Search(problem, budget)
    history = []
    stopped_by = "complete"
    bound = 0.0
    try:
        search.simulate([run(rng_key, problem, Budget()).best.strategy for run in BASELINES.values()])
        search.simulate([additive_start(problem)])
        root = relax(problem, max_candidates=None)
        keep = _undominated(root)
        if search.stopped_by() is None:
            descend(search, root, keep, search.best)
        heap, nodes = [Node(0.0, 0, keep, np.zeros(0), [])], 0
        count = 1
        while heap:
            bound = heap[0].bound
            if bound >= search.limit:
                break
            stop = search.stopped_by()
            if stop is not None:
                stopped_by = stop
                break
            node = heapq.heappop(heap)
            nodes += 1
            if nodes == _EASY:  # a better incumbent is worth its time
                kick(search, root, keep, node.weights)
            for child in expand(search, root, node):
                if child.bound < search.limit:
                    heapq.heappush(heap, child._replace(number=count))
                    count += 1
            history.append((search.evaluated, time.monotonic() - search.begin, search.best.step_time_s))
    except KeyboardInterrupt:
        stopped_by = "interrupted"
        if search.best is None:
            raise
    note = f"proven optimal to {PROOF:g}" if stopped_by == "complete" else f"no proof: no strategy takes less than {bound:.6g} s"
    return SearchResult(search.best, search.evaluated, time.monotonic() - search.begin, stopped_by, tuple(history), (note,))


def _check(problem: PlanningProblem) -> None:
    space = problem.space
    most = max((float(np.prod(a.sum(axis=1, dtype=float))) for a in space.allowed), default=1.0)
    if most > MAX_CONFIGS or problem.graph.num_operators > MAX_OPERATORS:
        found = f"{problem.graph.num_operators} operators of up to {most:.0f} configs"
        expected, remedy = f"at most {MAX_OPERATORS} of {MAX_CONFIGS}", "use planner mcmc, optcnn or ilp here"
        raise SoapjaxError(Problem("planner exhaustive", found, expected, remedy))


def _undominated(relaxation: Relaxation) -> list[np.ndarray]:
    """Candidates without those that another one, alike in all that concerns neighbours, beats in every duration of its own.

    The simulated time never falls when a duration rises. Only where memory cannot run out.
    """
    tables = relaxation.problem.simulator.tables
    everything = float((tables.parameter_bytes * tables.state_copies).sum() + tables.edge_bytes.sum())
    everything += float((tables.tensor_bytes * tables.tensor_copies).sum() + tables.tensor_bytes.max(initial=0))
    if everything > tables.usable_memory_bytes:
        return [np.arange(len(c.storage)) for c in relaxation.candidates]
    own: list[list[np.ndarray]] = [[np.zeros((len(c.storage), 1), np.float32)] for c in relaxation.candidates]
    for t in relaxation.terms:
        if t.b < 0:
            own[t.a].append(t.seconds[:, 0][t.of_a])
    keep = []
    for parts, classes in zip(own, relaxation.classes, strict=True):
        d = np.concatenate(parts, axis=1)
        kept: list[int] = []
        for i in np.lexsort((np.arange(len(d)), d.sum(axis=1))):
            if not any(classes[j] == classes[i] and (d[j] <= d[i]).all() for j in kept):
                kept.append(int(i))
        keep.append(np.array(sorted(kept)))
    return keep


def descend(search: _Search, root: Relaxation, keep: list[np.ndarray], start: Evaluation) -> Evaluation:
    """Changes one operator at a time for the better, all its candidates simulated, until none helps."""
    best, improved = start, True
    while improved and search.stopped_by() is None:
        before = best.cost
        for n, c in enumerate(root.candidates):
            trial = [_changed(best.strategy, {n: (c.axes[k], c.storage[k])}) for k in keep[n]]
            best = min([best, *search.simulate(trial)], key=lambda e: (not e.is_feasible, e.cost))
        improved = best.cost < before
    return best


def _changed(strategy: Strategy, configs: dict[int, tuple[np.ndarray, int]]) -> Strategy:
    axes, storage = strategy.axes.copy(), strategy.storage.copy()
    for n, (a, s) in configs.items():
        axes[n], storage[n] = a, s
    return Strategy(axes, storage)


def kick(search: _Search, root: Relaxation, keep: list[np.ndarray], weights: np.ndarray) -> None:
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
    near: list[list[int]] = [[n] for n in range(len(keep))]
    for a, b in root.pairwise().tables:
        near[a].append(b)
        near[b].append(a)
    current = search.best
    for _ in range(_KICKS):
        if search.stopped_by() is not None or search.evaluated > allowed:
            break
        around = near[rng.integers(len(near))]
        changed = rng.permutation(around)[: rng.integers(2, 5)]
        configs = {}
        for n in changed.tolist():
            k = int(rng.choice(keep[n]))
            configs[n] = root.candidates[n].axes[k], int(root.candidates[n].storage[k])
        found = search.simulate([_changed(current.strategy, configs)])
        if found:
            improved = descend(search, root, keep, found[0])
            current = improved if improved.cost <= current.cost * (1 + 2e-3) else current
            current = search.best if rng.random() < 0.2 else current


def bounded(search: _Search, relaxation: Relaxation, node: Node) -> Bounded:
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
        for i in np.flatnonzero(differs):
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
            out[start[t.kind] + t.index * width + i] = [n for n in (t.a, t.b) if n >= 0]
    return out


def active_durations(relaxation: Relaxation) -> Durations:
    """Which durations are positive whatever is chosen."""
    active = relaxation.weights(0.0)
    for t in relaxation.terms:
        rows = t.seconds[np.unique(t.of_a)][:, np.unique(t.of_b)]
        getattr(active, t.kind)[t.index] = (rows > 0).all(axis=(0, 1)) if t.kind != "compute_s" else bool((rows > 0).all())
    return active


def expand(search: _Search, root: Relaxation, node: Node) -> list[Node]:
    """Bounds a node anew, removes candidates, and splits what is left; no children if it is done."""
    bound = node.bound
    while True:
        keep = node.keep
        size = float(np.prod([float(len(k)) for k in keep]))
        if size <= _LEAVES:
            _enumerate(search, root, keep)
            return []
        relaxation = root.restricted(keep)
        found = bounded(search, relaxation, node)
        if found.value >= search.limit:
            return []
        marginals = candidate_marginals(relaxation, found.weights)
        kept = [k[m < search.limit] for k, m in zip(keep, marginals, strict=True)]
        if any(len(k) == 0 for k in kept):
            return []
        smaller = np.prod([len(k) / len(old) for k, old in zip(kept, keep, strict=True)])
        marginals = [m[m < search.limit] for m in marginals]
        node = node._replace(keep=kept, weights=found.weights, seen=found.seen)
        if smaller > 0.2:
            break
    n = _branch_on(search, kept, marginals, found)
    rest = max(found.value, bound)
    children = []
    for part in _parts(root, kept, n):
        value = max(rest, float(marginals[n][np.isin(kept[n], part)].min()))
        children.append(node._replace(bound=value, keep=[part if m == n else k for m, k in enumerate(kept)]))
    return children


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


def _enumerate(search: _Search, root: Relaxation, keep: list[np.ndarray]) -> None:
    strategies = []
    for picked in itertools.product(*keep):
        pairs = list(zip(root.candidates, picked, strict=True))
        axes, storage = np.stack([c.axes[k] for c, k in pairs]), np.array([c.storage[k] for c, k in pairs], np.int8)
        strategies.append(Strategy(axes, storage))
    search.simulate(strategies)


def _branch_on(search: _Search, keep: list[np.ndarray], marginals: list[np.ndarray], found: Bounded) -> int:
    """The operator that decides most: by the seconds that its choice contests, and that it adds to the bound."""
    room = search.limit - found.value
    scores = []
    for n, k in enumerate(keep):
        spread = float(np.clip(marginals[n] - found.value, 0, room).mean())
        scores.append(found.contested[n] + spread if len(k) > 1 else -np.inf)
    return int(np.argmax(scores))


def _parts(root: Relaxation, keep: list[np.ndarray], n: int) -> list[np.ndarray]:
    """The candidates of operator `n`, by axis assignment; by storage where there is one assignment only."""
    axes, storage = root.candidates[n].axes[keep[n]], root.candidates[n].storage[keep[n]]
    names = [a.tobytes() for a in axes]
    if len(set(names)) == 1:
        names = [int(s) for s in storage]
    return [keep[n][[x == name for x in names]] for name in dict.fromkeys(names)]
