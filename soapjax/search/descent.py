"""Where chains begin, made good before they walk: descent in moves of many operators at once.

Repeated operators (forty time steps of a recurrent layer, the blocks of a residual net) are best off alike, and a
chain that moves one of them at a time crosses a ridge for every one. So the descent draws moves that *assign*:

* together: some axes of one operator, in all members of its group; and their storage;
* carried: a dim on an axis, in all operators to which tensors carry that dim, in one layer or in all that repeat it;
* alike: an axis takes what another axis has, in a group or in the whole graph;
* stored: one storage, in a group or in the whole graph.

A round draws a batch of them, none judged before, simulates it in full and takes the best if it is better; what else
was better is tried on top of it in the next round. Where no move helps any more, *kicks* follow: a few moves at once from the
best, whatever they cost, and a short descent from there, kept where it ends lower (iterated local search, Lourenço, Martin and
Stützle 2003). These moves have no reverse, so they only make starts: no Markov chain is asked to balance them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from soapjax.search.moves import choices_of, dim_flows
from soapjax.search.problem import Evaluation, PlanningProblem
from soapjax.simulate.simulator import BATCH
from soapjax.strategy.space import SearchSpace
from soapjax.strategy.strategy import Strategy

WEIGHTS = (0.4, 0.3, 0.15, 0.15)  # of together, carried, alike, stored
MAX_AXES = 3  # that one move of a group changes
PATIENCE = 24  # rounds without an improvement, after which a descent is over
KICKED_MOVES = (2, 5)  # of one kick, at least and at most
KICKED_PATIENCE = 6  # of the descent after a kick
MAX_FAILED = 10  # kicks in a row without an improvement
_MOST_MERGED = 6  # improvements that are tried together
_TRIES = 40  # draws for a strategy that was not judged before


class Descent:
    """One descent from `start`; what it judges depends on `rng` alone."""

    def __init__(
        self, problem: PlanningProblem, start: Evaluation, rng: np.random.Generator, *, moves: Assignments | None = None,
        patience: int = PATIENCE,
    ):  # fmt: skip
        self.problem, self.best, self.rng, self.patience = problem, start, rng, patience
        self.moves = Assignments(problem.space) if moves is None else moves
        self.seen = {start.strategy.key()}
        self.merged: list[Strategy] = []
        self.quiet = 0
        self.is_over = False

    def round(self, limit: int = BATCH) -> int:
        """Judges up to `limit` new strategies and gives their number."""
        drawn = list(self._fresh(min(limit, BATCH)))
        if not drawn:
            self.is_over = True
            return 0
        found = sorted(self.problem.evaluate(drawn), key=lambda e: e.cost)
        better = [e.strategy for e in found if e.cost < self.best.cost][:_MOST_MERGED]
        self.merged = _overlaid(self.best.strategy, better)
        self.quiet = 0 if better else self.quiet + 1
        self.best = min(self.best, found[0], key=lambda e: e.cost)
        self.is_over = self.quiet >= self.patience
        return len(drawn)

    def _fresh(self, count: int) -> Iterator[Strategy]:
        waiting = self.merged
        for _ in range(count):
            for _ in range(_TRIES):
                one = waiting.pop(0) if waiting else self.moves.draw(self.rng, self.best.strategy)
                if one.key() not in self.seen:
                    self.seen.add(one.key())
                    yield one
                    break


class Kicks:
    """Kicks and short descents from `start` and what they find; what it judges depends on both and `rng` alone."""

    def __init__(self, problem: PlanningProblem, start: Evaluation, rng: np.random.Generator):
        self.problem, self.best, self.rng = problem, start, rng
        self.moves = Assignments(problem.space)
        self.descent: Descent | None = None
        self.failed = 0
        self.is_over = False

    def round(self, limit: int = BATCH) -> int:
        """One round of the descent after a kick, or the kick itself; the number of strategies judged, `limit` at most."""
        if limit < 1:
            return 0
        if self.descent is None:
            kicked = self.best.strategy
            for _ in range(self.rng.integers(KICKED_MOVES[0], KICKED_MOVES[1] + 1)):
                kicked = self.moves.draw(self.rng, kicked)
            (start,) = self.problem.evaluate([kicked])
            self.descent = Descent(self.problem, start, self.rng, moves=self.moves, patience=KICKED_PATIENCE)
            return 1
        judged = self.descent.round(limit)
        if self.descent.is_over:
            is_better = self.descent.best.cost < self.best.cost
            self.failed = 0 if is_better else self.failed + 1
            self.best = self.descent.best if is_better else self.best
            self.descent, self.is_over = None, self.failed >= MAX_FAILED
        return judged


def _overlaid(before: Strategy, better: list[Strategy]) -> list[Strategy]:
    """The first of `better` with what the second changed of `before`, that with what the third changed, and so on."""
    out = better[:1]
    for other in better[1:]:
        last = out[-1]
        axes = np.where(other.axes != before.axes, other.axes, last.axes)
        out.append(Strategy(axes, np.where(other.storage != before.storage, other.storage, last.storage)))
    return out[1:]


def look_alikes(space: SearchSpace) -> np.ndarray:
    """int32 [N]: a number for each set of operators with the same dims and choices.

    Wider than the groups of repeated operators: the ends of a chain of time steps have other neighbours, and so are
    groups of their own, but they use the same parameter and want the same split.
    """
    ids: dict[object, int] = {}
    keys = (
        (tuple((d.size, d.kind, d.is_reduced) for d in op.dims), space.allowed[n].tobytes(), space.divisors[n].tobytes())
        for n, op in enumerate(space.graph.operators)
    )
    return np.array([ids.setdefault(key, len(ids)) for key in keys], np.int32)


class Assignments:
    """Draws of the moves above on one space."""

    def __init__(self, space: SearchSpace):
        self.space = space
        self.values, self.counts = choices_of(space)
        # Every set is as likely as any other: what repeats often is one choice.
        free = (self.counts > 1).any(axis=1) | space.owns_parameters
        self.groups, alike = np.array([o.group for o in space.graph.operators]), look_alikes(space)
        self.movable = [np.flatnonzero(free & (of == k)) for of in (self.groups, alike) for k in np.unique(of[free])]
        self.owning = [m for m in self.movable if space.owns_parameters[m].any()]
        self.flows = dim_flows(space)
        self.sizes = np.array(space.mesh.axis_sizes)
        moves = (self._together, self._carried, self._alike, self._stored)
        weights = np.array(WEIGHTS) * [True, True, space.num_axes > 1, bool(self.owning) and len(space.storages) > 1]
        self.moves, self.weights = moves, weights / weights.sum()

    def draw(self, rng: np.random.Generator, strategy: Strategy) -> Strategy:
        """One move; operators whose degrees would not divide stay as they are."""
        proposed = Strategy(strategy.axes.copy(), strategy.storage.copy())
        self.moves[rng.choice(len(self.moves), p=self.weights)](rng, proposed)
        split = np.ones(self.space.divisors.shape, np.int64)
        changed = (proposed.axes != strategy.axes).any(axis=1)
        for a, size in enumerate(self.sizes):
            at = np.flatnonzero(changed & (proposed.axes[:, a] >= 0))
            split[at, proposed.axes[at, a]] *= size
        wrong = (self.space.divisors % split != 0).any(axis=1)
        proposed.axes[wrong] = strategy.axes[wrong]
        return proposed

    def _group(self, rng: np.random.Generator, of: list[np.ndarray]) -> np.ndarray:
        return of[rng.integers(len(of))]

    def _may_take(self, members: np.ndarray, a: int, value: int | np.ndarray) -> np.ndarray:
        """bool [M]: which of `members` offer `value` on axis `a`."""
        is_offered = np.arange(self.values.shape[2]) < self.counts[members, a, None]
        return ((self.values[members, a] == np.reshape(value, (-1, 1))) & is_offered).any(axis=1)

    def _together(self, rng: np.random.Generator, s: Strategy) -> None:
        members = self._group(rng, self.movable)
        model = rng.choice(members)
        # All that the group's model has, with new values on some axes: members that had drifted apart come together.
        row = s.axes[model].copy()
        for a in rng.permutation(len(self.sizes))[: rng.integers(1, MAX_AXES + 1)]:
            row[a] = self.values[model, a, rng.integers(self.counts[model, a])]
        for a, value in enumerate(row):
            s.axes[members, a] = np.where(self._may_take(members, a, value), value, s.axes[members, a])
        if rng.random() < 0.3:
            s.storage[members] = s.storage[model]

    def _carried(self, rng: np.random.Generator, s: Strategy) -> None:
        n, a = rng.choice(self._group(rng, self.movable)), rng.integers(len(self.sizes))
        value = max(int(self.values[n, a, rng.integers(self.counts[n, a])]), -1)
        ids = self.flows[int(rng.random() < 0.7)]
        has = ids == ids[n, value + 1]
        members = np.flatnonzero(has.any(axis=1))
        if value < 0 and rng.random() < 0.5:
            members = members[self.groups[members] == self.groups[n]]
        dims = (has[members].argmax(axis=1) - 1).astype(np.int8)
        s.axes[members, a] = np.where(self._may_take(members, a, dims), dims, s.axes[members, a])

    def _alike(self, rng: np.random.Generator, s: Strategy) -> None:
        a, b = rng.permutation(len(self.sizes))[:2]
        members = np.arange(len(s.axes)) if rng.random() < 0.5 else self._group(rng, self.movable)
        s.axes[members, a] = np.where(self._may_take(members, a, s.axes[members, b]), s.axes[members, b], s.axes[members, a])

    def _stored(self, rng: np.random.Generator, s: Strategy) -> None:
        members = np.flatnonzero(self.space.owns_parameters) if rng.random() < 0.3 else self._group(rng, self.owning)
        s.storage[members] = rng.integers(len(self.space.storages))
