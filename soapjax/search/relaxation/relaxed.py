"""The additive relaxation: a planning problem as costs of operators and of pairs of operators.

Every operator picks one of its candidates (axes and storage). All durations that the simulator schedules depend on few
operators, and become *terms*: tables over one operator's candidates or two operators'.

    compute, and inner        the operator alone
    collectives
    resolution of a tensor    its producer and its first reader
    reshard                   the tensor's producer (its owner, if it is a parameter) and the reader

`Relaxation.pairwise(weights)` adds them up, weighted per duration: with ones it is OptCNN's objective (Jia et al. 2018,
section 5), the sum of all durations; with other weights it bounds the simulated time from below (bound.py).

Two things are not pairwise, and are taken at their least, so that no weighted sum exceeds the true one:

* a partial sum is resolved towards its first reader; another reader's reshard is charged what it costs from the best of the
  layouts that the first reader might have asked for;
* readers that want a tensor in the same layout share one reshard: each of g operators that may share it is charged 1/g
  (exact where all want one layout, too little where they differ), by the smallest weight of those who may have paid.

Tables are over distinct layouts and computed once for all operators and edges that are alike.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

from soapjax.costs.evaluate import Durations
from soapjax.search.problem import PlanningProblem
from soapjax.search.relaxation.candidates import Candidates, enumerate_candidates
from soapjax.search.relaxation.own_rows import OwnRows
from soapjax.search.relaxation.terms import Term, terms_of
from soapjax.strategy.configs import Strategy
from soapjax.strategy.layout import REPLICATED


class Pairwise(NamedTuple):
    """minimise sum of costs[n][c_n] + sum of tables[a, b][c_a, c_b], over classes of candidates."""

    costs: list[np.ndarray]  # N of [C]
    tables: dict[tuple[int, int], np.ndarray]  # a < b: [Ca, Cb]; equal tables are one array
    labels: list[np.ndarray]  # N of [C]: the best candidate of each class
    own_costs: list[np.ndarray]  # N of [K]: by candidate, without tables

    def value(self, choice: np.ndarray) -> float:
        pairs = sum(float(t[choice[a], choice[b]]) for (a, b), t in self.tables.items())
        return pairs + sum(float(c[k]) for c, k in zip(self.costs, choice, strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Relaxation:
    problem: PlanningProblem
    candidates: list[Candidates]  # per operator
    is_pruned: bool  # whether candidates are missing
    rows: OwnRows
    terms: list[Term]
    usage_bytes: list[np.ndarray]  # N of [K, M]: memory at M times, a lower bound

    @property
    def num_candidates(self) -> int:
        return sum(len(c.storage) for c in self.candidates)

    def weights(self, value: float = 1.0) -> Durations:
        """Equal weights of all durations."""
        tables = self.problem.simulator.tables
        levels = tables.links.num_levels
        counts = len(tables.tensor_bytes), len(tables.edge_task), len(tables.sum_task)
        shapes = (tables.num_tasks,), *((n, levels) for n in counts)
        return Durations(*(np.full(s, value, np.float32) for s in shapes))

    @functools.cached_property
    def classes(self) -> list[np.ndarray]:
        """N of [K]: candidates of one class are alike in all tables over two operators."""
        sides: list[list[np.ndarray]] = [[] for _ in self.candidates]
        for t in self.terms:
            if t.b >= 0:
                sides[t.a].append(t.of_a)
                sides[t.b].append(t.of_b)
        found: dict[object, np.ndarray] = {}
        out = []
        for n, rows in enumerate(sides):
            key = (len(self.candidates[n].storage), tuple(sorted({id(r) for r in rows})))
            if key not in found:
                distinct = list({id(r): r for r in rows}.values()) or [np.zeros(key[0], np.int32)]
                _, first, index = np.unique(np.stack(distinct, axis=1), axis=0, return_index=True, return_inverse=True)
                # Numbered by their first candidate, so that like operators have like classes.
                found[key] = np.argsort(np.argsort(first))[index.reshape(-1)]
            out.append(found[key])
        return out

    def pairwise(self, weights: Durations | None = None, *, memory_price: float = 0.0) -> Pairwise:
        """Weighted sums of all terms; each class is represented by its cheapest candidate.

        `memory_price` is in seconds per byte of the mean usage.
        """
        weights = self.weights() if weights is None else weights
        costs = [memory_price * u.mean(axis=1) for u in self.usage_bytes]
        by_pair: dict[tuple[int, int], list[tuple[np.ndarray, Term]]] = {}
        for term in self.terms:
            w = getattr(weights, term.kind)
            w = np.atleast_1d(w[list(term.payers)].min(axis=0) if term.payers else w[term.place]).astype(np.float32)
            if term.b < 0:
                costs[term.a] += (term.seconds[:, 0] @ w)[term.of_a]
            elif w.any():
                by_pair.setdefault((min(term.a, term.b), max(term.a, term.b)), []).append((w, term))
        labels = []
        for c, k in zip(costs, self.classes, strict=True):
            order = np.lexsort((np.arange(len(c)), c, k))
            labels.append(order[np.searchsorted(k[order], np.arange(k.max() + 1))])
        rows: dict[tuple[int, bytes], np.ndarray] = {}
        made: dict[object, np.ndarray] = {}
        tables = {}

        def row(of: np.ndarray, n: int) -> np.ndarray:
            key = (id(of), labels[n].tobytes())
            if key not in rows:
                rows[key] = of[labels[n]]
            return rows[key]

        for (a, b), members in by_pair.items():
            parts = [(w, t.seconds, row(t.of_a, t.a), row(t.of_b, t.b), t.a == a) for w, t in members]
            key = tuple((w.tobytes(), id(x), id(p), id(q), is_straight) for w, x, p, q, is_straight in parts)
            if key not in made:
                made[key] = functools.reduce(np.add, (_expanded(*part) for part in parts))
            tables[a, b] = made[key]
        return Pairwise([c[k] for c, k in zip(costs, labels, strict=True)], tables, labels, costs)

    def strategy(self, pairwise: Pairwise, choice: np.ndarray) -> Strategy:
        picked = [(c, of[k]) for c, of, k in zip(self.candidates, pairwise.labels, choice, strict=True)]
        return Strategy(np.stack([c.axes[k] for c, k in picked]), np.array([c.storage[k] for c, k in picked], np.int8))

    def choice(self, pairwise: Pairwise, strategy: Strategy) -> np.ndarray | None:
        """The classes [N] of a strategy's configs; None where one is no candidate."""
        chosen = self._indices(strategy)
        return None if chosen is None else np.array([int(k[i]) for k, i in zip(self.classes, chosen, strict=True)])

    def _indices(self, strategy: Strategy) -> list[int] | None:
        chosen = []
        for n, c in enumerate(self.candidates):
            same = (c.axes == strategy.axes[n]).all(axis=1) & (c.storage == strategy.storage[n])
            if not same.any():
                return None
            chosen.append(int(same.argmax()))
        return chosen

    def value(self, strategy: Strategy, weights: Durations | None = None) -> float:
        """The relaxed objective of any strategy whose configs are candidates."""
        return sum(float(np.sum(x)) for x in self.durations(strategy, weights))

    def durations(self, strategy: Strategy, weights: Durations | None = None) -> Durations:
        """The relaxed durations of a strategy, times weights; shared reshards are charged to all who share them."""
        weights = self.weights() if weights is None else weights
        chosen = self._indices(strategy)
        if chosen is None:
            raise ValueError("the strategy has a config that is no candidate of this relaxation")
        out = self.weights(0.0)
        for t in self.terms:
            w = getattr(weights, t.kind)
            w = w[list(t.payers)].min(axis=0) if t.payers else w[t.place]
            seconds = t.seconds[t.of_a[chosen[t.a]], t.of_b[chosen[t.b]] if t.b >= 0 else 0] * w
            getattr(out, t.kind)[t.place] += seconds if t.kind != "compute_s" else seconds[0]
        return out

    def restricted(self, keep: list[np.ndarray], *, deadline: float = math.inf) -> Relaxation:
        """Only the candidates of these indices, per operator. Terms are made anew: fewer candidates say more about sharing.

        Raises: TimeoutError where they were not done by `deadline`, of `time.monotonic`.
        """
        candidates = [Candidates(c.axes[k], c.storage[k]) for c, k in zip(self.candidates, keep, strict=True)]
        fewer = any(len(k) < len(c.storage) for k, c in zip(keep, self.candidates, strict=True))
        rows = self.rows.restricted(candidates, keep)
        usage = [u[k] for u, k in zip(self.usage_bytes, keep, strict=True)]
        terms = terms_of(rows.tables, rows, deadline)
        return dataclasses.replace(
            self, candidates=candidates, rows=rows, terms=terms, usage_bytes=usage, is_pruned=self.is_pruned or fewer
        )  # fmt: skip


def _expanded(w: np.ndarray, seconds: np.ndarray, of_a: np.ndarray, of_b: np.ndarray, is_straight: bool) -> np.ndarray:
    table = (seconds @ w)[of_a[:, None], of_b]
    return table if is_straight else np.ascontiguousarray(table.T)


def relax(
    problem: PlanningProblem, *, max_candidates: int | None = 64, seeds: list[Strategy] | None = None, deadline: float = math.inf
) -> Relaxation:  # fmt: skip
    """The relaxation of `problem`.

    With `max_candidates`, about so many axis assignments per operator, with all storages: those of a `seeds` strategy, and the
    best by the least that the operator and its edges can cost with each (all its neighbours choosing in its favour, summed over
    operators that repeat each other). None keeps all.

    Raises: TimeoutError where it was not done by `deadline`, of `time.monotonic`.
    """
    candidates, is_pruned = enumerate_candidates(problem.space, is_complete=max_candidates is None)
    relaxation = relaxation_on(problem, candidates, is_pruned=is_pruned, deadline=deadline)
    return relaxation if max_candidates is None else pruned(relaxation, max_candidates, seeds or [], deadline=deadline)


def relaxation_on(
    problem: PlanningProblem, candidates: list[Candidates], *, is_pruned: bool = True, deadline: float = math.inf
) -> Relaxation:  # fmt: skip
    """The relaxation on these candidates; `is_pruned` where others are missing.

    Raises: TimeoutError where it was not done by `deadline`, of `time.monotonic`.
    """
    tables = problem.simulator.tables
    rows = OwnRows(problem.simulator.evaluator, candidates, deadline)
    return Relaxation(problem, candidates, is_pruned, rows, terms_of(tables, rows, deadline), _usage(problem, rows))


def pruned(
    relaxation: Relaxation, max_candidates: int, seeds: list[Strategy], *, deadline: float = math.inf
) -> Relaxation:  # fmt: skip
    """Only the best candidates, as `relax` says."""
    if all(len(c.storage) <= max_candidates for c in relaxation.candidates):
        return relaxation
    return relaxation.restricted(_best_candidates(relaxation, max_candidates, seeds), deadline=deadline)


def _best_candidates(relaxation: Relaxation, count: int, seeds: list[Strategy]) -> list[np.ndarray]:
    score = [np.zeros(len(c.storage)) for c in relaxation.candidates]
    least: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for t in relaxation.terms:
        if id(t.seconds) not in least:
            seconds = t.seconds.sum(axis=2)
            least[id(t.seconds)] = seconds.min(axis=1), seconds.min(axis=0)
        of_a, of_b = least[id(t.seconds)]
        score[t.a] += of_a[t.of_a]
        if t.b >= 0:
            score[t.b] += of_b[t.of_b]
    groups: dict[object, list[int]] = {}
    for n, c in enumerate(relaxation.candidates):
        groups.setdefault((relaxation.problem.graph.operators[n].group, c.axes.tobytes(), c.storage.tobytes()), []).append(n)
    keep: list[np.ndarray] = [np.zeros(0, np.int64)] * len(score)
    for members in groups.values():
        total = functools.reduce(np.add, (score[n] for n in members))
        c = relaxation.candidates[members[0]]
        storages = int(c.storage.max()) + 1  # candidates are listed axes by axes, all storages of each
        by_axes = total.reshape(-1, storages).min(axis=1)
        kept = set(np.argsort(by_axes, kind="stable")[:count].tolist())
        axes = c.axes[::storages]
        for wanted in {s.axes[n].tobytes(): s.axes[n] for s in seeds for n in members}.values():
            kept |= set(np.flatnonzero((axes == wanted).all(axis=1)).tolist())
        chosen = np.array(sorted(kept))
        for n in members:
            keep[n] = (chosen[:, None] * storages + np.arange(storages)).reshape(-1)
    return keep


def _usage(problem: PlanningProblem, rows: OwnRows) -> list[np.ndarray]:
    """Bytes per device [K, M] of what an operator stores and makes, at the first task of every phase change and in between."""
    tables = problem.simulator.tables
    sizes = np.array(tables.links.axis_sizes)
    phases = np.array([t.phase for t in tables.graph.tasks])
    last_forward = int(np.flatnonzero(phases == phases.min())[-1]) if len(phases) else 0
    times = np.unique(np.linspace(0, max(0, tables.num_tasks - 1), 6).astype(int).tolist() + [last_forward])
    usage = [np.zeros((k, len(times))) for k in rows.counts]
    num_u = len(tables.access_op)
    for p, n in enumerate(tables.parameter_op):
        stored = rows.slots[rows.index[n], num_u + p]
        held = tables.parameter_bytes[p] * tables.state_copies[p] / np.where(stored >= 0, sizes, 1).prod(axis=1)
        usage[n] += held[:, None]
    for t in range(len(tables.tensor_bytes)):
        alive = (tables.order.since[t] <= times) & (times <= tables.order.until[t])
        if tables.order.until[t] < 0 or tables.left_slot[t] >= 0 or not alive.any():
            continue
        n, raw = rows.raw(t)
        if n >= 0:
            held = tables.tensor_bytes[t] * tables.tensor_copies[t] / np.where(raw != REPLICATED, sizes, 1).prod(axis=1)
            usage[n][:, alive] += held[:, None]
    return usage
