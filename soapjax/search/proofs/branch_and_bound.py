"""Exhaustive search by branch and bound: the proven optimum of small problems, over the whole space.

A node of the tree is a set of candidates per operator. Its bound is the least weighted sum of durations, in the additive
relaxation (relaxed.py), where the weights are a flow along chains of tasks that must follow each other (paths.py): no
strategy is faster. The best flow is the solution of a game: elimination (elimination.py) answers a flow with the strategy
that it bounds worst, a linear program answers the strategies seen with the flow that bounds all of them best. Strategies
seen are simulated: the best is the incumbent. Then

* candidates whose min-marginal (the bound with that candidate chosen) is not below the incumbent go;
* what is left is enumerated and simulated where it is little, else one operator's candidates are told apart.

Fewer candidates make better bounds: more communications are known to be active, and more reshards to be shared or not.
"""

from __future__ import annotations

import heapq
import itertools
import time

import numpy as np

from soapjax.errors import Problem, SoapjaxError
from soapjax.jit.array_types import Array
from soapjax.search.descent.incumbent import PROOF, Incumbent, descend, perturb
from soapjax.search.experts.baselines import BASELINES
from soapjax.search.problem import Budget, PlanningProblem, SearchResult
from soapjax.search.proofs.flow_game import Bounded, Node, bounded, candidate_marginals
from soapjax.search.relaxation.coarse_optimum import additive_start
from soapjax.search.relaxation.relaxed import Relaxation, relax
from soapjax.strategy.configs import Strategy

MAX_CONFIGS = 1500  # of one operator
MAX_OPERATORS = 120
_LEAVES = 256  # strategies of a node that are simply simulated
_EASY = 25  # nodes without which a problem is not worth perturbations of its incumbent


def exhaustive(rng_key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
    """The proven optimum of the space, without pins where it has them; by any objective, since no cost is below the step time.

    Raises: SoapjaxError where operators or their configs are too many for any hope of a proof.
    """
    _check(problem)
    search = Incumbent(problem, budget)
    history = []
    stopped_by = "complete"
    bound = 0.0
    try:
        search.simulate([run(rng_key, problem, Budget()).best.strategy for run in BASELINES.values()])
        search.simulate([additive_start(problem, deadline=search.deadline)])
        root = relax(problem, max_candidates=None, deadline=search.deadline)
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
                perturb(search, root, keep, node.weights)
            for child in expand(search, root, node):
                if child.bound < search.limit:
                    heapq.heappush(heap, child._replace(number=count))
                    count += 1
            history.append((search.evaluated, time.monotonic() - search.begin, search.best.step_time_s))
    except TimeoutError:  # while costs of candidates were tabulated
        stopped_by = "seconds"
    except KeyboardInterrupt:
        stopped_by = "interrupted"
        if search.best is None:
            raise
    unproven = f"no proof: no strategy{_of(problem)} takes less than {bound:.6g} s"
    note = _proof(problem, search) if stopped_by == "complete" else unproven
    return SearchResult(search.best, search.evaluated, time.monotonic() - search.begin, stopped_by, tuple(history), (note,))


def _of(problem: PlanningProblem) -> str:
    return " without pins" if problem.space.offers_pins else ""


def _proof(problem: PlanningProblem, search: Incumbent) -> str:
    """What is known of the best once the whole tree is done: where nothing is feasible, no strategy was left out."""
    if search.best.is_feasible:
        return f"proven optimal to {PROOF:g}" + (f" of plans{_of(problem)}" if _of(problem) else "")
    lacks = "fits the device" if problem.objective.is_time else "meets the limits"
    return f"proven: no plan{_of(problem)} {lacks}"


def _check(problem: PlanningProblem) -> None:
    space = problem.space
    most = float(space.num_assignments.max(initial=1.0))
    if most > MAX_CONFIGS or problem.graph.num_operators > MAX_OPERATORS:
        found = f"{problem.graph.num_operators} operators of up to {most:.0f} configs"
        expected, remedy = f"at most {MAX_OPERATORS} of {MAX_CONFIGS}", "use planner mcmc, optcnn or ilp here"
        raise SoapjaxError(Problem("planner exhaustive", found, expected, remedy))


def _undominated(relaxation: Relaxation) -> list[np.ndarray]:
    """Candidates without those that another one, alike in all that concerns neighbours, beats in every duration of its own.

    The simulated time never falls when a duration rises. Only where memory cannot run out, and nothing else is limited.
    """
    tables = relaxation.problem.simulator.tables
    everything = float((tables.parameter_bytes * tables.state_copies).sum() + tables.edge_bytes.sum())
    everything += float((tables.tensor_bytes * tables.tensor_copies).sum() + tables.tensor_bytes.max(initial=0))
    if everything > tables.usable_memory_bytes or not relaxation.problem.objective.is_time:
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


def expand(search: Incumbent, root: Relaxation, node: Node) -> list[Node]:
    """Bounds a node anew, removes candidates, and splits what is left; no children if it is done."""
    bound = node.bound
    while True:
        keep = node.keep
        size = float(np.prod([float(len(k)) for k in keep]))
        if size <= _LEAVES:
            _enumerate(search, root, keep)
            return []
        relaxation = root.restricted(keep, deadline=search.deadline)
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


def _enumerate(search: Incumbent, root: Relaxation, keep: list[np.ndarray]) -> None:
    strategies = []
    for picked in itertools.product(*keep):
        pairs = list(zip(root.candidates, picked, strict=True))
        axes, storage = np.stack([c.axes[k] for c, k in pairs]), np.array([c.storage[k] for c, k in pairs], np.int8)
        strategies.append(Strategy(axes, storage))
    search.simulate(strategies)


def _branch_on(search: Incumbent, keep: list[np.ndarray], marginals: list[np.ndarray], found: Bounded) -> int:
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
